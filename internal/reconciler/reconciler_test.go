package reconciler

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The end of a network namespace is no event in another one, but its leftovers are removed.
func TestSweep(t *testing.T) {
	defer func(every time.Duration) { sweepEvery = every }(sweepEvery)
	sweepEvery = 10 * time.Millisecond
	options := loader.Options{BPFFS: testenv.BPFFS(t)}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(file, []byte("devices: {}\n"), 0o600))
	r := &Reconciler{Options: options, OnApply: func(Event) {}, OnNotice: func(string) {}, OnWarning: func(err error) { t.Error(err) }}
	testenv.Must(t, r.Load(file, ""))
	watched := testenv.NewNetns(t)
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error)
	go func() {
		ended <- watched.Do(func() error { return r.Run(ctx, nil, func() { close(ready) }) })
	}()
	<-ready

	testenv.NewNetns(t) // leaves the watched namespace
	testenv.DoomedNetns(t, func() error {
		return errors.Join(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "va"}, PeerName: "vb"}), limit(options, "va"))
	})
	testenv.Eventually(t, "all pins to be removed", func() bool { return len(testenv.Pins(t, options.BPFFS)) == 0 })
	stop()
	testenv.Must(t, <-ended)
}

// limit sets a rule on a device.
func limit(o loader.Options, device string) error {
	n, err := loader.Write(o)
	if err != nil {
		return err
	}
	defer n.Close()
	dev, err := netinfo.DeviceByName(device)
	if err != nil {
		return err
	}
	rule := policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: 1e6, Capacity: 20000}
	_, err = n.Put(dev, policy.Egress, policy.MatchDst, rule)
	return err
}
