package netinfo

import (
	"errors"
	"fmt"

	"github.com/safchain/ethtool"
	"golang.org/x/sys/unix"
)

// Offloads has the features of a device that change the packets that programs see.
type Offloads struct {
	HardwareTC bool // filters may run in hardware
	GRO, LRO   bool // packets are merged on ingress
}

// Offloads queries the driver.
func (d Device) Offloads() (Offloads, error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return Offloads{}, fmt.Errorf("open ethtool: %w", err)
	}
	defer e.Close()
	features, err := e.Features(d.Name)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return Offloads{}, nil
	}
	if err != nil {
		return Offloads{}, fmt.Errorf("query the offloads of %s: %w", d.Name, err)
	}
	return Offloads{
		HardwareTC: features["hw-tc-offload"],
		GRO:        features["rx-gro"] || features["rx-gro-hw"],
		LRO:        features["rx-lro"],
	}, nil
}
