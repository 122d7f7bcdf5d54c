package policyfile

import (
	"fmt"
	"net/netip"
	"slices"
)

// contradictions reports, of sorted rules, those for one network, and warns of those
// that can never decide, as rules for parts of their network cover all of it.
func (r *reader) contradictions(rules []rule) {
	behind := make([]int, len(rules)) // the first rule behind those within the network of each
	for i, this := range slices.Backward(rules) {
		if i > 0 && rules[i-1].prefix == this.prefix {
			r.report(this.key, fmt.Sprintf("network %v is there twice, first in line %d; take one of them out",
				this.prefix, r.line(rules[i-1].key)))
		}
		next, inner := this.prefix.Addr(), i+1 // the first address that longer networks do not cover
		for inner < len(rules) && rules[inner].prefix.Overlaps(this.prefix) {
			if within := rules[inner].prefix; within.Addr() == next {
				next = end(within)
			}
			inner = behind[inner]
		}
		behind[i] = inner
		if next == end(this.prefix) {
			r.useless = append(r.useless, problem{this.key, fmt.Sprintf(
				"the rule for %v can never decide: longer networks in this direction cover all of it; take it out, or one of them", this.prefix)})
		}
	}
}

// end is the address behind the last one of a network; the zero Addr behind all.
func end(p netip.Prefix) netip.Addr {
	bytes := p.Addr().AsSlice()
	for bit := p.Bits(); bit < p.Addr().BitLen(); bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(bytes)
	return last.Next()
}
