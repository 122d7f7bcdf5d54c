package maps_test

import (
	"fmt"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A pool keeps its room through changes that give it a lease or another one, take it away, are abandoned, and revert, by
// themselves or after they were confirmed. Its rate is always that of the lease in force.
func TestRevertsOfLeases(t *testing.T) {
	plain := policy.Rule{Prefix: policy.PoolKey("gold"), Pool: true, Rate: 8e6, Capacity: 100_000, Label: policy.Label{Name: "gold"}}
	member, line, slower := plain, plain, plain
	member.Cluster, member.Rate = policy.Cluster{Name: "gold", Safe: 1e6}, 7e6
	line.Adapt.Min = 4e6
	slower.Cluster, slower.Rate = member.Cluster, 6e6
	for name, c := range map[string]struct{ before, after policy.Rule }{
		"gets a lease": {plain, member}, "loses it": {member, plain}, "gets another": {line, member}, "gets back": {member, line}, "has a lower rate": {member, slower},
	} {
		for _, confirmed := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", confirmed ", confirmed), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 4, Buckets: 4, Labels: 16, Leases: 4, Pools: true})
				pools := r.Store.Pools()
				limit := func() model.Meter {
					e, _ := pools.Find(plain.Prefix)
					return r.Store.Meter(e)
				}
				room := func() int64 {
					e, _ := pools.Find(plain.Prefix)
					return int64(limit().Capacity - r.Store.SharedLevel(e, r.now))
				}
				same := func(what string, had int64) { // up to a byte, as a moment passes before a revert
					t.Helper()
					want := min(had, int64(limit().Capacity))
					if got := room(); got < want || got > want+1<<model.UnitBits {
						t.Errorf("%s: there is room for %d units, want %d", what, got, want)
					}
				}
				change := func(to policy.Rule, until uint64) {
					t.Helper()
					e, _ := pools.Find(to.Prefix)
					testenv.Must(t, pools.Prepare([]policy.Difference{{Have: &e.Rule, Want: &to}}, nil))
					r.Store.Time(r.now, until)
				}
				renew := func(rate policy.Rate) {
					t.Helper()
					if _, leased := pools.Lease(plain.Prefix); leased {
						had := room()
						testenv.Must(t, pools.Renew(plain.Prefix, maps.Lease{Rate: rate, Safe: rate / 2, Until: r.now + 1e10}))
						same("renewed", had)
						if want := model.NewLimit(policy.Rule{Rate: rate, Capacity: 1}).RateUnits; limit().RateUnits != want {
							t.Errorf("renewed at %v, the rate is %d, want %d", rate, limit().RateUnits, want)
						}
					}
				}
				_, err := pools.Put(c.before)
				testenv.Must(t, err)
				unlimited := rule("10.0.0.0/8", policy.Unlimited, 0)
				unlimited.Within = "gold"
				r.put(unlimited)
				renew(3e6)
				send := func() {
					r.now += 1e6
					for range 3 {
						r.send(policy.GCRA, to("10.1.1.1"), 1500)
					}
				}
				send()

				had := room()
				change(plain, r.now+5) // which a killed command leaves
				r.Store.Abandon()
				same("abandoned", had)
				until := r.now + 2e9
				if confirmed {
					until = maps.Never
				}
				change(c.after, until)
				before := limit().RateUnits
				testenv.Must(t, r.Store.Arm())
				same("armed", had)
				r.Store.Commit()
				send()
				renew(2e6)
				send()
				r.Store.TimeRevert(r.now + 5) // which a killed rollback leaves
				if confirmed {
					until = r.now + 1e8
					r.Store.ReadyRevert()
					r.Store.TimeRevert(until)
					testenv.Must(t, r.Store.Revert(until))
				}
				r.now = until - 2e6
				send()
				r.now = until - 1
				had = room()
				r.now++
				if got := limit().RateUnits; !confirmed && c.before.Cluster.Name != c.after.Cluster.Name && got != before {
					t.Errorf("reverted, the rate is %d, want %d", got, before)
				}
				same("reverted", had)
				send()
				if confirmed {
					renew(5e6)
				}
				had = room()
				r.Store.Finish()
				same("finished", had)
				renew(1e6)
				send()
				if r.Store.Counters(r.Rules()[0].ID).PassedPackets != 18 {
					t.Errorf("%+v", r.Store.Counters(r.Rules()[0].ID))
				}
			})
		}
	}
}
