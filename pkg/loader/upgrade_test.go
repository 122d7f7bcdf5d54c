package loader

import (
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// renewAsAnotherBuild leaves the rules as another build of shapectl would: in a generation with
// that build's number.
func (r *rig) renewAsAnotherBuild() {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		settings := n.pins.store.Hook()
		settings.Build[0] ^= 0xff
		return n.pins.renew(n.pins.store.Size(), settings)
	})
}

func TestUpgradeKeepsRulesBucketsAndCounters(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		one, two := rule("10.0.0.0/24", slow), rule("10.0.1.0/24", slow, leaky, eachHost)
		r.put(one, two)
		r.renewAsAnotherBuild()
		began := maps.Now()
		r.send("10.0.0.7", 60, 1000)
		r.send("10.0.1.7", 60, 1000)
		h := r.hook("va")
		testenv.Eventually(t, "120 packets", func() bool {
			return r.counters(h, one).PassedPackets+r.counters(h, two).PassedPackets == 120
		})
		old := r.programIDs()
		if change := r.put(one); !change.Upgraded || change.Changed || change.Reattached != "" {
			t.Errorf("the same rule by another build: %+v", change)
		}
		for _, id := range r.programIDs() {
			if slices.Contains(old, id) {
				t.Errorf("program %d of the other build still runs", id)
			}
		}
		h = r.inForce(one, two)
		for _, rule := range []policy.Rule{one, two} {
			if c := r.counters(h, rule); c.PassedPackets != 60 || c.PassedBytes != 60000 {
				t.Errorf("%v: counters are %+v", rule.Prefix, c)
			}
		}
		r.wantLevel(h, one, 60000, began)
		for _, b := range h.Set.Store.Buckets([]maps.Entry{r.entry(h, two)}, maps.Now) {
			r.wantDrained(two, b.LevelBytes, 60000, began)
		}
		r.meters(one, "10.0.0.7", 5)
		r.meters(two, "10.0.1.7", 5)
		if change := r.put(one); change != (Change{}) {
			t.Errorf("once more: %+v", change)
		}
		r.flush()
		r.nothingLeft()
	})
}

// The kernel empties a map of programs with its last pin. Then no rule counts as in force, and the next command that may
// change anything restores all limits.
func TestDeletedPinsOfPrograms(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		one := rule("10.0.0.0/24", slow, in("uplink"))
		r.apply(ApplyOptions{}, poolTable(pool("uplink")), r.table(one))
		for _, lost := range [][]string{{"g*/programs"}, {"kinds"}, {"g*/programs", "kinds", "*gress-*/program"}} {
			for _, pin := range lost {
				paths, err := filepath.Glob(filepath.Join(r.options.BPFFS, "shapectl", "*", pin))
				if err != nil || len(paths) != 1 {
					t.Fatalf("pins: %v, %v", paths, err)
				}
				testenv.Must(t, os.Remove(paths[0]))
			}
			if h := r.hook("va"); h.State != Detached {
				t.Errorf("without %v: state is %q", lost, h.State)
			}
			r.write(func(*Namespace) error { return nil })
			h := r.inForce(one)
			before := r.counters(h, one).DroppedPackets
			r.send("10.0.0.7", 400, 1000)
			testenv.Eventually(t, "dropped packets", func() bool { return r.counters(h, one).DroppedPackets > before })
		}
		r.write(flushEverything)
		r.nothingLeft()
	})
}

// A flood offers packets for two rules as fast as possible, and compares the passed bytes with
// the two rates over every window of time.
type flood struct {
	stop  chan struct{}
	group sync.WaitGroup
	sent  uint64
	worst int64 // bytes passed beyond the rate in the worst window
}

const floodBytes = 1000

// offer starts a flood on a rig, whose rules together allow bytesPerSecond.
func (r *rig) offer(bytesPerSecond int64) *flood {
	f := &flood{stop: make(chan struct{})}
	frames := [][]byte{r.frame("10.0.0.7", floodBytes), r.frame("10.0.1.7", floodBytes)}
	f.group.Go(func() {
		// The least difference so far of passed and allowed bytes: the worst window starts at
		// that time.
		var least int64
		start := maps.Now() // to keep the products small
		for first := true; ; first = false {
			select {
			case <-f.stop:
				return
			default:
			}
			for i := range 64 {
				if err := r.sender.Send(frames[i%2]); err != nil {
					r.t.Error(err)
					return
				}
				f.sent++
			}
			began := int64(maps.Now() - start)
			var c [2]uint64
			if err := r.passed.counts.Lookup(uint32(0), &c); err != nil {
				r.t.Error(err)
				return
			}
			ended := int64(maps.Now() - start)
			passed := int64(c[1]) * 1e9
			if !first {
				f.worst = max(f.worst, (passed-ended*bytesPerSecond-least)/1e9)
			}
			if v := passed - began*bytesPerSecond; first || v < least {
				least = v
			}
		}
	})
	return f
}

// end stops the flood, and ends the test if in any window more than most bytes passed beyond the
// rate.
func (f *flood) end(t *testing.T, most int64) {
	t.Helper()
	close(f.stop)
	f.group.Wait()
	if f.worst > most {
		t.Errorf("in some window %d bytes passed beyond the rate, where the buckets allow %d", f.worst, most)
	}
	if f.sent < 10000 {
		t.Errorf("the flood was %d packets", f.sent)
	}
}

func TestUpgradeUnderFlood(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		const rate, capacity = 8_000_000, 20_000
		fast := func(p *policy.Rule) { p.Rate, p.Capacity = rate, capacity }
		one, two := rule("10.0.0.0/24", fast), rule("10.0.1.0/24", fast, leaky)
		r.put(one, two)
		f, rounds := r.offer(2*rate/8), testenv.Rounds(t, 2)
		for i := range rounds {
			r.renewAsAnotherBuild()
			if i == rounds/2 { // the table is created for the first time
				r.put(one, rule("10.0.2.0/24", fast, eachHost))
			}
			r.put(one)
		}
		f.end(t, 2*capacity+2*floodBytes)
		h := r.inForce(one, two, rule("10.0.2.0/24", fast, eachHost))
		c1, c2 := r.counters(h, one), r.counters(h, two)
		passed := c1.PassedPackets + c2.PassedPackets
		matched := passed + c1.DroppedPackets + c2.DroppedPackets
		// On ingress, under load, the kernel drops packets before any program sees them.
		if matched > f.sent || r.direction == policy.Egress && matched != f.sent {
			t.Errorf("%d packets sent, and %d metered", f.sent, matched)
		}
		if seen := r.passed.count(t).packets; seen != passed {
			t.Errorf("%d packets passed, and the next program saw %d", passed, seen)
		}
		r.flush()
		r.nothingLeft()
	})
}

// Each packet is charged once, by one algorithm or the other, however fast these change.
func TestChangesUnderFlood(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		const rate, capacity = 8_000_000, 20_000
		fast := func(p *policy.Rule) { p.Rate, p.Capacity = rate, capacity }
		slower := func(p *policy.Rule) { p.Rate, p.Capacity = rate/2, capacity }
		one, two := rule("10.0.0.0/24", fast), rule("10.0.1.0/24", fast)
		r.put(one, two)
		f := r.offer(2 * rate / 8)
		for range testenv.Rounds(t, 25) {
			r.put(rule("10.0.0.0/24", slower, leaky))
			r.put(rule("10.0.0.0/24", fast))
		}
		f.end(t, 2*capacity+2*floodBytes)
		r.inForce(one, two)
	})
}
