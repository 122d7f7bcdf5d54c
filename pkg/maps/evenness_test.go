package maps

import (
	"math/rand/v2"
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
				counts := map[bool][]int{true: make([]int, len(s.Store.prefixes.lines4)), false: make([]int, len(s.Store.prefixes.lines6))}
				for _, p := range prefixes {
					if err := s.Store.placePrefix(s.view, p, 0); err != nil {
						t.Fatal(err)
					}
				}
				for _, p := range prefixes {
					n := 0
					for !holds(s.Store.prefixes.line(s.stored(p), s.Store.prefixes.hash(s.stored(p)), uint32(n)), s.stored(p)) {
						n++
					}
					moved += min(n, 1)
					furthest = max(furthest, n)

					lines, first := counts[p.Addr().Is4()], roll.Int()
					n = 0
					for lines[(first+n)%len(lines)] == len(s.Store.prefixes.line(s.stored(p), s.Store.prefixes.hash(s.stored(p)), 0).ids()) {
						n++
					}
					lines[(first+n)%len(lines)]++
					byChance += min(n, 1)
					furthestByChance = max(furthestByChance, n)
				}
			}
			t.Logf("%d of %d are not in the line that they belong in, and up to %d further on; by chance it is %d, and %d",
				moved, secrets*len(prefixes), furthest, byChance, furthestByChance)
			if moved > byChance*21/20+50 || furthest > furthestByChance+3 {
				t.Error("that is worse than chance")
			}
		})
	}
}

func holds(line prefixLine, p stored) bool {
	for place, id := range line.ids() {
		if id != 0 && line.at(place) == p {
			return true
		}
	}
	return false
}

// emptyTables are the prefix tables of a store for so many rules, in ordinary memory.
func emptyTables(rules uint32, multiplier uint64) *Set {
	lines4, lines6, words := tableSizes(rules)
	hook := &bpf.AbiHook{Multiplier: multiplier, Prefixes4Mask: lines4 - 1, Prefixes6Mask: lines6 - 1, FilterMask: words - 1}
	s := &Store{}
	s.views = make([]bpf.AbiView, 1)
	s.change = &bpf.AbiChange{}
	s.prefixes = prefixTables{hook, make([]bpf.AbiPrefixes4, lines4), make([]bpf.AbiPrefixes6, lines6), make([]uint64, words)}
	return s.View(0)
}
