package cluster

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// TestFairAfterChange compares what each host may use with exact weighted max-min fairness, after the demand of some hosts
// has changed.
func TestFairAfterChange(t *testing.T) {
	var parts, late int
	store := newSimStore(t)
	for seed := range uint64(testenv.Rounds(t, 50)) {
		w := settled(store, seed)
		for range 5 {
			for range 1 + w.IntN(len(w.hosts)) {
				h := w.hosts[w.IntN(len(w.hosts))]
				for _, p := range h.pools {
					p.count(h.local())
					p.demand = w.someDemand(theCluster)
				}
			}
			switch h := w.hosts[w.IntN(len(w.hosts))]; w.IntN(8) {
			case 0:
				if len(h.pools) > 0 {
					h.pools[0].Weight = 1 + w.Uint64N(4)
				}
			case 1:
				h.leave()
			case 2:
				h := w.addHost(fmt.Sprint("new", len(w.hosts)))
				h.addPool(theCluster, 1+w.Uint64N(4)).demand = w.someDemand(theCluster)
				h.startAgent()
				w.tell("join")
			}
			w.tell("change")
			w.run(3 * Interval)
			late += len(w.unfair())
			parts += len(w.hosts)
			w.run(Interval)
			for p, want := range w.unfair() {
				w.fail("a lease of %d after %v: %.0f would be fair", p.Lease.Rate, 4*Interval, want)
			}
			w.run(time.Duration(w.Float64() * 2e9))
		}
	}
	t.Logf("%d of %d leases were more than 5 %% off after %v", late, parts, 3*Interval)
	if late > parts/10_000 {
		t.Fail()
	}
}

// unfair are the pools whose lease differs by more than 5 % from the fair part, which is returned, without being larger
// than the pool can use.
func (w *world) unfair() map[*simPool]float64 {
	parts := w.exact(theCluster)
	for p, want := range parts {
		if math.Abs(min(p.asks(w), float64(p.Lease.Rate))-want) <= 0.05*want {
			delete(parts, p)
		}
	}
	return parts
}

// TestCalm lets nothing change and nothing go wrong: no lease must be lowered for long.
func TestCalm(t *testing.T) {
	store := newSimStore(t)
	for seed := range uint64(testenv.Rounds(t, 20)) {
		w := settled(store, seed)
		for range 300 {
			w.run(time.Second / 10)
			for p, want := range w.unfair() {
				w.fail("a lease of %d: %.0f would be fair", p.Lease.Rate, want)
			}
		}
	}
}

// TestEmptiedAgain empties the store before it has granted leases again. Hosts that are back must not be reserved for.
func TestEmptiedAgain(t *testing.T) {
	store := newSimStore(t)
	for seed := range uint64(testenv.Rounds(t, 20)) {
		w := settled(store, seed)
		for range 1 + w.IntN(5) {
			w.lose(nil)
			w.run(time.Duration(w.Float64() * 4e9))
		}
		w.run(Rise + Length)
		if c := w.store.state(theCluster); c.Known > c.Seen {
			w.fail("%.0f is reserved for hosts that are not missing", c.Known-c.Seen)
		}
		for p, want := range w.unfair() {
			w.fail("a lease of %d: %.0f would be fair", p.Lease.Rate, want)
		}
	}
}

// settled is a world in which nothing goes wrong, some time after all agents started.
func settled(s *simStore, seed uint64) *world {
	w := newWorld(s, seed, faults{delay: 20 * time.Millisecond, drift: 5e-4})
	w.rates[theCluster] = 1e6 * (1 + w.Uint64N(1e5))
	for i := range 2 + w.IntN(40) {
		h := w.addHost(fmt.Sprint("h", i))
		h.addPool(theCluster, 1+w.Uint64N(4)).demand = w.someDemand(theCluster)
		w.after(time.Duration(w.Float64()*1e9), h.startAgent)
	}
	w.run(15 * time.Second)
	return w
}
