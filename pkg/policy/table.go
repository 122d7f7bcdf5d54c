package policy

import (
	"cmp"
	"iter"
	"net/netip"
	"slices"
)

// A Table is the rules of one direction of one device.
type Table struct {
	Device    string
	Direction Direction
	Match     Match // the side that prefixes are compared with
	Rules     []Rule
}

// ComparePrefix orders prefixes by address, IPv4 first, wider ones before those they hold.
func ComparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// SortRules brings rules into the order of ComparePrefix.
func SortRules(rules []Rule) {
	slices.SortFunc(rules, compareRules)
}

func compareRules(a, b Rule) int { return ComparePrefix(a.Prefix, b.Prefix) }

// SortTables orders tables by device, egress before ingress.
func SortTables(tables []Table) {
	slices.SortFunc(tables, compareTables)
}

func compareTables(a, b Table) int {
	return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(b.Direction, a.Direction))
}

// A Difference is a rule that one policy has and another has not, or has otherwise.
type Difference struct {
	Device     string
	Direction  Direction
	Have, Want *Rule // nil where there is none; of both not the same
	// The side that prefixes are compared with, which may be all that differs.
	HaveMatch, WantMatch Match
}

// Diff is what turns one policy into another, by device, direction and prefix.
// Both must be sorted, with sorted rules.
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

// Diff is what turns the rules of one direction of a device into those of want. Both must be sorted.
func (t Table) Diff(want Table) []Difference {
	more := max(len(t.Rules), len(want.Rules)) - min(len(t.Rules), len(want.Rules))
	out := make([]Difference, 0, more) // at the least
	for h, w := range Pairs(t.Rules, want.Rules, compareRules) {
		if h == nil || w == nil || *h != *w || t.Match != want.Match {
			out = append(out, Difference{want.Device, want.Direction, h, w, t.Match, want.Match})
		}
	}
	return out
}

// Pairs is the elements of two sorted lists in order, those that compare equal together; nil stands for none.
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
