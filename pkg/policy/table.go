package policy

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
	"sort"
)

// A Table is the rules of one direction of one device.
type Table struct {
	Device    string
	Direction Direction
	Match     Match // the address that prefixes are compared with
	Rules     []Rule
}

// ComparePrefix orders prefixes by address, IPv4 first, and then by length, wider ones
// first.
func ComparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// SortRules sorts rules by ComparePrefix.
func SortRules(rules []Rule) {
	slices.SortFunc(rules, compareRules)
}

func compareRules(a, b Rule) int { return ComparePrefix(a.Prefix, b.Prefix) }

// SortTables sorts tables by device, egress before ingress.
func SortTables(tables []Table) {
	// slices.SortFunc makes the program 17 KB larger for this type.
	sort.Slice(tables, func(i, j int) bool { return compareTables(tables[i], tables[j]) < 0 })
}

func compareTables(a, b Table) int {
	return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(b.Direction, a.Direction))
}

// A Difference is a rule that two policies do not have in common.
type Difference struct {
	Device     string
	Direction  Direction
	Have, Want *Rule // nil for none
	// The address that prefixes are compared with, which may be the only difference.
	HaveMatch, WantMatch Match
}

// Diff returns the differences between two policies, by device, direction and prefix. Both
// must be sorted, with sorted rules.
func Diff(have, want []Table) []Difference {
	var out []Difference
	for h, w := range Pairs(have, want, compareTables) {
		switch {
		case h == nil:
			h = &Table{Device: w.Device, Direction: w.Direction, Match: w.Match}
		case w == nil:
			w = &Table{Device: h.Device, Direction: h.Direction, Match: h.Match}
		}
		out = append(out, h.Diff(*w)...)
	}
	return out
}

// Diff returns the differences between the rules of two tables of one direction of a
// device. Both must be sorted.
func (t Table) Diff(want Table) []Difference {
	more := max(len(t.Rules), len(want.Rules)) - min(len(t.Rules), len(want.Rules))
	out := make([]Difference, 0, more) // at least
	for h, w := range Pairs(t.Rules, want.Rules, compareRules) {
		if h == nil || w == nil || *h != *w || t.Match != want.Match {
			out = append(out, Difference{want.Device, want.Direction, h, w, t.Match, want.Match})
		}
	}
	return out
}

// Pairs yields the elements of two sorted lists in order. Elements that compare equal come
// together; otherwise one of the two is nil.
func Pairs[A, B any](a []A, b []B, compare func(A, B) int) iter.Seq2[*A, *B] {
	return func(yield func(*A, *B) bool) {
		a, b := a, b
		for len(a) > 0 || len(b) > 0 {
			var c int
			switch {
			case len(a) == 0:
				c = 1
			case len(b) == 0:
				c = -1
			default:
				c = compare(a[0], b[0])
			}
			var one *A
			var other *B
			if c <= 0 {
				one, a = &a[0], a[1:]
			}
			if c >= 0 {
				other, b = &b[0], b[1:]
			}
			if !yield(one, other) {
				return
			}
		}
	}
}
