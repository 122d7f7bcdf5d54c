package reconciler

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The end of a network namespace is no event in another one, but its leftovers are removed, and so is what an old change left.
func TestSweep(t *testing.T) {
	defer func(every, after time.Duration) { sweepEvery, rollbackFor = every, after }(sweepEvery, rollbackFor)
	sweepEvery, rollbackFor = 10*time.Millisecond, 0
	options := loader.Options{BPFFS: testenv.BPFFS(t)}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(file, []byte("devices: {}\n"), 0o600))
	r := &Reconciler{Options: options, OnApply: func(Event) {}, OnNotice: func(string) {}, OnWarning: func(err error) { t.Error(err) }}
	testenv.Must(t, r.Load(file, ""))
	watched := testenv.NewNetns(t)
	testenv.Veth(t, "tap0", "x")
	testenv.Must(t, limit(options, "tap0"))
	n, err := loader.Write(options)
	testenv.Must(t, err)
	_, err = n.Apply(nil, loader.ApplyOptions{})
	n.Close()
	testenv.Must(t, err)
	ready, end := start(t, r, watched)
	<-ready

	testenv.NewNetns(t) // leaves the watched namespace
	testenv.DoomedNetns(t, func() error {
		return errors.Join(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "va"}, PeerName: "vb"}), limit(options, "va"))
	})
	testenv.Eventually(t, "all pins to be removed", func() bool { return len(testenv.Pins(t, options.BPFFS)) == 0 })
	end()
}

// A device whose rules could not be applied gets them when they can be. One error is told of once. It is the same if another
// command has the lock for longer than the reconciler waits.
func TestFailedDeviceIsTriedAgain(t *testing.T) {
	defer func(every time.Duration) { sweepEvery = every }(sweepEvery)
	sweepEvery = 10 * time.Millisecond
	file := filepath.Join(t.TempDir(), "policy.yaml")
	write := func(devices string) {
		testenv.Must(t, os.WriteFile(file+".part", []byte("devices: {"+devices+"}\n"), 0o600))
		testenv.Must(t, os.Rename(file+".part", file))
	}
	write("tap*: {egress: {any: 1mbit}}, '*0': {egress: {any: 1mbit}}")
	applied, warnings := make(chan string, 10), make(chan error, 100)
	options := loader.Options{BPFFS: testenv.BPFFS(t)}
	r := &Reconciler{Options: options, OnApply: func(e Event) { applied <- e.Device }, OnNotice: func(string) {}}
	r.Options.Patience = time.Millisecond
	r.OnWarning = func(err error) { warnings <- err }
	testenv.Must(t, r.Load(file, ""))
	watched := testenv.NewNetns(t)
	testenv.Veth(t, "tap0", "x")
	_, end := start(t, r, watched)
	<-warnings
	time.Sleep(10 * sweepEvery) // for it to try again; if it does later, only the count of warnings is not tested
	write("tap*: {egress: {any: 1mbit}}")
	if device := <-applied; device != "tap0" {
		t.Errorf("rules of %s", device)
	}
	if len(warnings) > 0 {
		t.Errorf("it also warned: %v", <-warnings)
	}
	n, err := loader.Write(options)
	testenv.Must(t, err)
	testenv.Veth(t, "tap1", "y")
	<-warnings
	n.Close()
	testenv.Eventually(t, "rules of tap1", func() bool { return len(applied) > 0 })
	end()
}

// What appears is limited before anything is removed of what has gone.
func TestNewDevicesFirst(t *testing.T) {
	options := loader.Options{BPFFS: testenv.BPFFS(t)}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(file, []byte("devices: {'tap?': {egress: {pool: 2mbit, any: {}}}}\n"), 0o600))
	var mu sync.Mutex
	var steps []string // since the first device was limited
	step.Hook = func(what string, _ bool) error {
		mu.Lock()
		defer mu.Unlock()
		steps = append(steps, what)
		return nil
	}
	defer func() { step.Hook = nil }()
	applied := make(chan string, 10)
	r := &Reconciler{Options: options, OnApply: func(e Event) { applied <- e.Device }, OnNotice: func(string) {}, OnWarning: func(err error) { t.Error(err) }}
	testenv.Must(t, r.Load(file, ""))
	watched := testenv.NewNetns(t)
	testenv.Veth(t, "tap0", "x0")
	ready, end := start(t, r, watched)
	<-applied
	<-ready // the first sweep is over

	n, err := loader.Write(options) // so that the device has gone and another one is there when the reconciler can go on
	testenv.Must(t, err)
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap0")))
	testenv.Veth(t, "tap1", "x1")
	mu.Lock()
	steps = nil
	mu.Unlock()
	n.Close()
	<-applied
	pools := func() int {
		n, err := loader.Read(options)
		testenv.Must(t, err)
		defer n.Close()
		pools := n.Pools()
		defer pools.Close()
		return len(pools.Set.Policy())
	}
	testenv.Eventually(t, "the pool of the deleted device to be removed", func() bool { return pools() == 1 })
	end()
	attached, removed := slices.Index(steps, "say that a hook is attached"), slices.Index(steps, "remove a prefix")
	if attached < 0 || removed < attached {
		t.Errorf("the new device was limited in step %d, and rules were removed in step %d of %q", attached, removed, steps)
	}
}

// The hosts of a device that gets the name of the policy have rules although its neighbours are what they were.
func TestHostsOfRenamedDevice(t *testing.T) {
	defer func(every time.Duration) { sweepEvery = every }(sweepEvery)
	sweepEvery = time.Hour
	options := loader.Options{BPFFS: testenv.BPFFS(t)}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testenv.Must(t, os.WriteFile(file, []byte("devices: {tap0: {egress: {02:00:00:00:00:07: unlimited}}}\n"), 0o600))
	said := make(chan string, 10)
	r := &Reconciler{Options: options, OnApply: func(Event) {}, OnNotice: func(text string) { said <- text }, OnWarning: func(err error) { t.Error(err) }}
	testenv.Must(t, r.Load(file, ""))
	watched := testenv.NewNetns(t)
	testenv.Veth(t, "old", "x")
	link := testenv.Link(t, "old")
	testenv.Must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IPv4(10, 0, 0, 7), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 7},
	}))
	testenv.Must(t, limit(options, "old")) // so that only the addresses of hosts change
	ready, end := start(t, r, watched)
	<-ready
	testenv.Must(t, netlink.LinkSetName(link, "tap0"))
	testenv.Eventually(t, "the rule of the host", func() bool { return len(said) > 0 })
	if text := <-said; text != "tap0: added 10.0.0.7 of 02:00:00:00:00:07, egress" {
		t.Errorf("it said %s", text)
	}
	end()
}

// start runs a reconciler in a namespace until end is called. ready is closed when the first sweep is over.
func start(t *testing.T, r *Reconciler, watched *testenv.Netns) (ready chan struct{}, end func()) {
	ctx, stop := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error)
	go func() { ended <- watched.Do(func() error { return r.Run(ctx, nil, func() { close(ready) }) }) }()
	return ready, func() {
		t.Helper()
		stop()
		testenv.Must(t, <-ended)
	}
}

// limit sets a rule on a device.
func limit(o loader.Options, device string) error {
	n, err := loader.Write(o)
	if err != nil {
		return err
	}
	defer n.Close()
	rule := policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: 1e6, Capacity: 20000}
	_, err = n.Put(loader.ApplyOptions{}, policy.Table{Device: device, Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{rule}})
	return err
}
