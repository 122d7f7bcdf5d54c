package loader

import (
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ifb creates the ifb device of a device.
func ifb(t *testing.T, device int) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Index = "i0", fq.IfbIndex(device)
	testenv.AddLink(t, &netlink.Ifb{LinkAttrs: attrs})
}

// The next command removes the ifb that a killed command has left.
func TestIfbOfAKilledCommand(t *testing.T) {
	r := newRig(t, TCX, policy.Ingress)
	index := testenv.Link(t, "va").Attrs().Index
	killed := func(after func()) {
		t.Helper()
		r.put(rule("10.0.0.0/24"))
		r.write(func(n *Namespace) error {
			testenv.Must(t, os.Mkdir(n.pins.dir.ifbMark(index), 0o750))
			return os.Mkdir(n.pins.dir.pin(busyPin), 0o750)
		})
		ifb(t, index)
		after()
		r.write(func(*Namespace) error { return nil })
		if _, err := netlink.LinkByName("i0"); err == nil {
			t.Error("the ifb is there still")
		}
	}
	killed(func() {})
	killed(r.flush)
	if pins := testenv.Pins(t, r.options.BPFFS); len(pins) > 0 {
		t.Errorf("left behind: %v", pins)
	}
}

func TestWaiting(t *testing.T) {
	delaying := func(algorithm policy.Algorithm, capacity, queue uint64) policy.Rule {
		r := rule("10.0.0.0/24")
		r.Rate, r.Algorithm, r.Excess, r.Capacity, r.Queue = 8_000_000, algorithm, policy.Delay, capacity, queue
		return r
	}
	for _, c := range []struct {
		rules   []policy.Rule
		packets uint32
		longest time.Duration
	}{
		{nil, 0, 0},
		{[]policy.Rule{rule("10.0.0.0/24")}, 0, 0},
		{[]policy.Rule{delaying(policy.Leaky, 1536, 0)}, 24, 1536 * time.Microsecond},
		{[]policy.Rule{delaying(policy.Leaky, 1537, 0), rule("10.0.1.0/24")}, 25, 1537 * time.Microsecond},
		{[]policy.Rule{delaying(policy.GCRA, 100_000, 3028), delaying(policy.Leaky, 2000, 0)}, 48, 3028 * time.Microsecond},
	} {
		if packets, longest := Waiting(c.rules); packets != c.packets || longest != c.longest {
			t.Errorf("%v: %d packets for %v, want %d for %v", c.rules, packets, longest, c.packets, c.longest)
		}
	}
}
