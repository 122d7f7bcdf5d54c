package maps

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A packet may read a prefix just before it is deleted, and its id just after that. So no other
// prefix gets the place before such packets have ended. A new epoch shows that they have.
func TestPlaceIsFilledAgainAfterPackets(t *testing.T) {
	testenv.Root(t)
	for _, family := range []string{"10.0.%d.0/24", "2001:db8:%d::/48"} {
		t.Run(family, func(t *testing.T) {
			store, err := New(Size{Rules: 32}, bpf.AbiHook{})
			testenv.Must(t, err)
			defer store.Close()
			s := store.View(0)
			put := func(n int) (p netip.Prefix, at *uint32) {
				t.Helper()
				p = netip.MustParsePrefix(fmt.Sprintf(family, n))
				_, err := s.Put(policy.Rule{Prefix: p, Rate: 1e6, Capacity: 2000})
				testenv.Must(t, err)
				return p, s.findPrefix(p)
			}
			put(0) // so that the lengths in use stay the same
			first, place := put(1)
			s.Delete(first)
			epoch := s.change.Epoch
			// Ids that were never used need no wait.
			for n := 2; n < 30; n++ {
				_, at := put(n)
				if waited := s.change.Epoch != epoch; waited != (at == place) {
					t.Fatalf("rule %d: in the same place: %v, waited: %v", n, at == place, waited)
				}
				if at == place {
					return
				}
			}
			t.Error("no rule got the place of the first one")
		})
	}
}
