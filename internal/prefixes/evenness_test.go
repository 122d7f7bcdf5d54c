package prefixes

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/bpf"
)

// Prefixes are distributed over the lines of their tables as evenly as random numbers.
func TestPrefixesLieEvenly(t *testing.T) {
	const room, secrets = 4096, 50
	for name, prefixes := range PrefixSets(room) {
		t.Run(name, func(t *testing.T) {
			roll := rand.New(rand.NewPCG(1, 2))
			var moved, byChance, furthest, furthestByChance int
			for range secrets {
				s := emptyTables(room, roll.Uint64()|1)
				counts := map[bool][]int{true: make([]int, len(s.Lines4)), false: make([]int, len(s.Lines6))}
				for _, p := range prefixes {
					if !s.Place(s.Key(0, p), 0) {
						t.Fatalf("no room for %v", p)
					}
				}
				for _, p := range prefixes {
					key, n := s.Key(0, p), 0
					for !holds(s.line(key, s.hash(key), uint32(n)), key) {
						n++
					}
					moved += min(n, 1)
					furthest = max(furthest, n)

					lines, first := counts[p.Addr().Is4()], roll.Int()
					n = 0
					for lines[(first+n)%len(lines)] == len(s.line(key, s.hash(key), 0).ids()) {
						n++
					}
					lines[(first+n)%len(lines)]++
					byChance += min(n, 1)
					furthestByChance = max(furthestByChance, n)
				}
			}
			t.Logf("%d of %d are not in the line that they belong in, and up to %d further on; by chance it is %d, and %d",
				moved, secrets*len(prefixes), furthest, byChance, furthestByChance)
			// Both counts scatter by chance, by their roots; and each step further is a third as likely.
			if float64(moved) > 1.05*float64(byChance)+6*math.Sqrt(float64(byChance))+20 || furthest > furthestByChance+8 {
				t.Error("that is worse than chance")
			}
		})
	}
}

func holds(l line, k Key) bool {
	for place, id := range l.ids() {
		if id != 0 && l.at(place) == k {
			return true
		}
	}
	return false
}

// emptyTables are tables for so many rules of one view, in ordinary memory.
func emptyTables(rules uint32, multiplier uint64) *Tables {
	hook := &bpf.AbiHook{}
	Configure(hook, rules)
	hook.Multiplier = multiplier
	t := &Tables{
		Hook: hook, Change: &bpf.AbiChange{Epoch: 1}, Views: make([]bpf.AbiView, 1), Filter: make([]uint64, hook.FilterMask+1),
		Lines4: make([]bpf.AbiPrefixes4, hook.Prefixes4Mask+1), Lines6: make([]bpf.AbiPrefixes6, hook.Prefixes6Mask+1),
		ViewOf: func(uint32) uint32 { return 0 },
	}
	t.Init()
	return t
}

// A packet may read a prefix just before it is removed, and its id just after that. So no other
// prefix gets the place before such packets have ended. A new epoch shows that they have.
func TestPlaceIsFilledAgainAfterPackets(t *testing.T) {
	for _, family := range []string{"10.0.%d.0/24", "2001:db8:%d::/48"} {
		s := emptyTables(32, 1)
		put := func(n int) (key Key, place *uint32) {
			key = s.Key(0, netip.MustParsePrefix(fmt.Sprintf(family, n)))
			if !s.Place(key, uint32(n)) {
				t.Fatalf("no room for rule %d", n)
			}
			return key, s.place(key)
		}
		first, place := put(1)
		s.Remove(first)
		for n := 2; ; n++ { // ends, because the tables hold 32
			_, at := put(n)
			if waited := s.Change.Epoch != 1; waited != (at == place) {
				t.Fatalf("rule %d of %s: in the same place: %v, waited: %v", n, family, at == place, waited)
			}
			if at == place {
				break
			}
		}
	}
}
