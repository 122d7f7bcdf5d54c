package maps_test

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A store holds as many rules as it was made for, with any prefixes. Packets and commands
// find each rule, also after half of them were deleted and set again.
func TestAnyPrefixesFillAHook(t *testing.T) {
	const room = 4096
	for name, prefixes := range maps.PrefixSets(room) {
		t.Run(name, func(t *testing.T) {
			var rules []policy.Rule
			seen := map[netip.Prefix]bool{}
			for _, p := range prefixes {
				if !seen[p] {
					rules = append(rules, policy.Rule{Prefix: p, Rate: policy.MaxRate, Capacity: 1 << 20})
				}
				seen[p] = true
			}
			if testing.Short() {
				rules = rules[:min(len(rules), room/8)]
			}
			r := newRig(t, maps.Size{Rules: uint32(len(rules)), Buckets: 4})
			testenv.Must(t, r.Load(rules))
			packets := map[netip.Prefix]uint64{}
			check := func() {
				t.Helper()
				for _, rule := range rules {
					e, found := r.Find(rule.Prefix)
					if !found || e.Rule != rule {
						t.Fatalf("found %+v of %v", e, rule.Prefix)
					}
					// The first address of a prefix is in the longest one that begins there.
					decides, _ := r.Match(rule.Prefix.Addr())
					r.send(policy.GCRA, to(rule.Prefix.Addr().String()), 100)
					packets[decides.Prefix]++
				}
				for _, rule := range rules {
					e, _ := r.Find(rule.Prefix)
					if got := r.Store.Counters(e.ID).PassedPackets; got != packets[rule.Prefix] {
						t.Fatalf("%d packets were counted under %v, want %d", got, rule.Prefix, packets[rule.Prefix])
					}
				}
			}
			check()
			roll := rand.New(rand.NewPCG(1, 1))
			roll.Shuffle(len(rules), func(i, j int) { rules[i], rules[j] = rules[j], rules[i] })
			for _, rule := range rules[:len(rules)/2] {
				if !r.Delete(rule.Prefix) {
					t.Fatalf("%v is not there to be deleted", rule.Prefix)
				}
				delete(packets, rule.Prefix)
			}
			testenv.Must(t, r.Load(rules))
			check()
		})
	}
}
