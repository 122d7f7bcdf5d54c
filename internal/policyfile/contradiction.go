package policyfile

import (
	"fmt"
	"net/netip"
)

// contradictions reports, of sorted rules, those for one network, and warns of those
// that can never decide, as rules for parts of their network cover all of it.
func (r *reader) contradictions(rules []rule) {
	var open []cover // each holds the next
	for i, this := range rules {
		if i > 0 && rules[i-1].prefix == this.prefix {
			r.report(this.key, fmt.Sprintf("network %v is there twice, first in line %d; take one of them out",
				this.prefix, r.line(rules[i-1].key)))
			continue
		}
		for len(open) > 0 && !open[len(open)-1].prefix.Overlaps(this.prefix) {
			open = r.close(open)
		}
		if n := len(open); n > 0 {
			open[n-1].add(this.prefix)
		}
		open = append(open, cover{rule: this, next: this.prefix.Addr()})
	}
	for len(open) > 0 {
		open = r.close(open)
	}
}

func (r *reader) close(open []cover) []cover {
	last := open[len(open)-1]
	if last.next == end(last.prefix) {
		r.useless = append(r.useless, problem{last.key, fmt.Sprintf(
			"the rule for %v can never decide: longer networks in this direction cover all of it; take it out, or one of them", last.prefix)})
	}
	return open[:len(open)-1]
}

// A cover is a rule and how far longer networks cover its own without a gap.
type cover struct {
	rule
	next netip.Addr // the first that they do not
}

// add adds a network within; they come in order.
func (c *cover) add(p netip.Prefix) {
	if c.next == p.Addr() {
		c.next = end(p)
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
