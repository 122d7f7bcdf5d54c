package policy

import (
	"cmp"
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
	slices.SortFunc(rules, func(a, b Rule) int { return ComparePrefix(a.Prefix, b.Prefix) })
}

// SortTables orders tables by device, egress before ingress.
func SortTables(tables []Table) {
	slices.SortFunc(tables, func(a, b Table) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(b.Direction, a.Direction))
	})
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
	for len(have) > 0 || len(want) > 0 {
		var h, w Table
		switch c := compareTables(have, want); {
		case c < 0:
			h, have = have[0], have[1:]
			w = Table{Device: h.Device, Direction: h.Direction, Match: h.Match}
		case c > 0:
			w, want = want[0], want[1:]
			h = Table{Device: w.Device, Direction: w.Direction, Match: w.Match}
		default:
			h, have, w, want = have[0], have[1:], want[0], want[1:]
		}
		out = append(out, h.Diff(w)...)
	}
	return out
}

// compareTables is less than 0 where the first of have stands alone, more where that of want does.
func compareTables(have, want []Table) int {
	switch {
	case len(have) == 0:
		return 1
	case len(want) == 0:
		return -1
	}
	return cmp.Or(cmp.Compare(have[0].Device, want[0].Device), cmp.Compare(want[0].Direction, have[0].Direction))
}

// Diff is what turns the rules of one direction of a device into those of want. Both must be sorted.
func (t Table) Diff(want Table) (out []Difference) {
	h, w := t.Rules, want.Rules
	for len(h) > 0 || len(w) > 0 {
		d := Difference{Device: want.Device, Direction: want.Direction, HaveMatch: t.Match, WantMatch: want.Match}
		var c int
		switch {
		case len(h) == 0:
			c = 1
		case len(w) == 0:
			c = -1
		default:
			c = ComparePrefix(h[0].Prefix, w[0].Prefix)
		}
		if c <= 0 {
			d.Have, h = &h[0], h[1:]
		}
		if c >= 0 {
			d.Want, w = &w[0], w[1:]
		}
		if c != 0 || *d.Have != *d.Want || t.Match != want.Match {
			out = append(out, d)
		}
	}
	return out
}
