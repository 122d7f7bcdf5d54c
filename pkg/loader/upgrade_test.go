package loader

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

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

// Each packet is metered once while programs and maps are replaced by those of another build.
func TestUpgradeUnderFlood(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		fast := at(8_000_000, 20_000)
		one, two, hosts := rule("10.0.0.0/24", fast), rule("10.0.1.0/24", fast, leaky), rule("10.0.2.0/24", fast, eachHost)
		r.put(one, two)
		w, began := r.witness("va", r.direction), maps.Now()
		sources := []*source{r.source("10.0.0.7", 1000), r.source("10.0.1.7", 1000)}
		sent, rounds := r.keepSending(0, sources...), testenv.Rounds(t, 2)
		for i := range rounds {
			r.renewAsAnotherBuild()
			if i == rounds/2 { // the table is created for the first time
				r.put(one, hosts)
			}
			r.put(one)
		}
		sent.stop()
		h := r.inForce(one, two, hosts)
		count := func() (passed, metered uint64) {
			c, d := r.counters(h, one), r.counters(h, two)
			passed = c.PassedPackets + d.PassedPackets
			return passed, passed + c.DroppedPackets + d.DroppedPackets
		}
		testenv.Eventually(t, "what was sent", func() bool {
			_, before := count()
			time.Sleep(20 * time.Millisecond)
			_, now := count()
			return now == before
		})
		all := w.passages(t)
		newOracle([]regime{{from: began - 1, rules: []policy.Rule{one, two}}}).check(t, all)
		passed, metered := count()
		if uint64(len(all)) != passed {
			t.Errorf("%d packets passed, and %d came by", passed, len(all))
		}
		// On ingress, under load, the kernel drops packets before any program sees them.
		if flood := sources[0].sent + sources[1].sent; flood < 10000 || metered > flood || r.direction == policy.Egress && metered != flood {
			t.Errorf("%d packets sent, and %d metered", flood, metered)
		}
		r.flush()
		r.nothingLeft()
	})
}
