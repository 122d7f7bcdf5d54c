package maps

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A packet may use parameters until it ends, also when an edit or a change has replaced them. So the next edit of that rule
// waits for such packets before it writes others in their place, and a change of many rules waits once for all.
func TestParametersAreWrittenAgainAfterPackets(t *testing.T) {
	testenv.Root(t)
	const many = 1000
	var hook bpf.AbiHook
	for i := range hook.Secret {
		hook.Secret[i] = rand.Uint32()
	}
	store, err := New(Size{Rules: 2 * many, Labels: 8, Leases: 4, Pools: true}, hook)
	testenv.Must(t, err)
	defer store.Close()
	now := uint64(1e9)
	store.UseClock(func() uint64 { return now })
	s := store.View(0)
	wait := func(what string, want uint32, f func()) {
		t.Helper()
		epoch := s.Store.change.Epoch
		f()
		if waits := s.Store.change.Epoch - epoch; waits != want {
			t.Errorf("%s: waited %d times, want %d", what, waits, want)
		}
	}
	put := func(in *Set, rule policy.Rule) func() {
		return func() {
			t.Helper()
			_, err := in.Put(rule)
			testenv.Must(t, err)
		}
	}
	one := policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: 1e6, Capacity: 2000, Guarantee: 8000}
	other := one
	other.Prefix = netip.MustParsePrefix("10.0.1.0/24")
	one.Within, other.Within = "gold", "gold"
	gold := policy.Rule{Prefix: policy.PoolKey("gold"), Pool: true, Rate: 1e9, Capacity: 1e6, Label: policy.Label{Name: "gold"}}
	put(store.Pools(), gold)()
	put(s, one)()
	put(s, other)()
	edit := func() { one.Rate++; one.Guarantee += 8; put(s, one)() }
	wait("an edit of a new rule", 0, edit)
	wait("another edit of the rule and its guarantee", 1, edit)
	wait("an edit of another rule", 0, func() { other.Rate++; put(s, other)() })
	wait("another edit of that", 1, func() { other.Rate++; put(s, other)() })

	pools := store.Pools()
	gold.Cluster.Name = "gold"
	lease := func() { testenv.Must(t, pools.Renew(gold.Prefix, Lease{Rate: 1e6, Safe: 1e6, Until: now + 1})) }
	wait("a lease", 0, put(pools, gold))
	wait("the first renewal", 0, lease)
	wait("the second renewal", 1, lease)
	gold.Cluster = policy.Cluster{}
	wait("no lease any more", 0, put(pools, gold)) // after the wait for the second renewal
	gold.Cluster.Name = "gold"
	wait("a lease again", 1, put(pools, gold))

	var rules []policy.Rule
	for i := range many {
		rules = append(rules, policy.Rule{Prefix: netip.MustParsePrefix(fmt.Sprintf("10.1.%d.%d/32", i/256, i%256)), Rate: 1e6, Capacity: 2000})
	}
	testenv.Must(t, s.Load(rules))
	change := func() {
		var steps []policy.Difference
		for i := range rules {
			have := rules[i]
			rules[i].Rate++
			want := rules[i]
			steps = append(steps, policy.Difference{Have: &have, Want: &want})
		}
		testenv.Must(t, s.Prepare(steps, nil))
		s.Store.Time(now, Never)
		testenv.Must(t, s.Store.Arm())
		s.Store.Commit()
	}
	wait("a change of many rules", 0, change)
	wait("another change", 2, change) // one to end the first change, and one before packets see rules take part in this one
	edits := func() {
		for i := range rules {
			rules[i].Rate++
		}
		testenv.Must(t, s.Load(rules))
	}
	wait("the end of that", 1, store.Finish)
	wait("edits of many rules", 0, edits)
	wait("more edits of them", 1, edits)
}
