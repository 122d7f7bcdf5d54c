package loader

import (
	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Device is one of the network namespace that hooks are in.
type Device = netinfo.Device

// Programs are those that enforce the rules of a direction of a device; none where there are no rules.
func (n *Namespace) Programs(index int, d policy.Direction) ([]ebpf.ProgramID, error) {
	h, err := n.openHook(index, d)
	if h == nil || err != nil {
		return nil, err
	}
	defer h.Close()
	return h.programs(h.generation)
}
