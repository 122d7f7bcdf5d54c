package report

import (
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
)

// Bits, Bytes and Percent write figures as all tables have them.
func Bits(n uint64) string { return bitsText(n) }

// Bytes is Bits for bytes.
func Bytes(n uint64) string { return bytesText(n) }

// RateText is the rate, and who has it.
func (r *Rule) RateText() string { return r.rate() }

// Facts says in one line all that a row of a screen has no room for.
func (r *Rule) Facts() string {
	parts := []string{strings.TrimSpace(r.where() + " " + r.network() + " " + r.matchedBy())}
	if r.IsPool() {
		parts[0] = "pool " + plain.Line(r.Name)
	}
	add := func(format, text string) {
		if text != "" {
			parts = append(parts, fmt.Sprintf(format, text))
		}
	}
	add("%s", state(*r))
	if !r.IsPool() {
		add("name %s", plain.Line(r.Name))
	}
	add("plan %s", plain.Line(r.Plan))
	add("within %s", plain.Line(r.Within))
	add("%s", r.rate())
	add("lease %s", r.lease())
	add("%s guaranteed", optional(r.GuaranteeBits, func(bits uint64) string { return rateText(&bits) }))
	add("burst %s", optional(r.CapacityBytes, bytesText))
	switch {
	case r.HasColours():
		add("burst of yellow packets %s", bytesText(*r.SecondBytes()))
		add("%s", r.actions())
		add("%s", r.byColour())
	case r.RateBits != nil:
		add("excess %s", r.Excess)
	}
	if refused := r.it.RefusedPercent(); refused.N > 0 {
		add("refuses %s of its packets itself", percentText(refused.N))
	}
	add("%s", r.sharers())
	add("note %s", plain.Line(r.Note))
	return strings.Join(parts, ", ")
}

// Facts says in one line all that a row of a screen has no room for.
func (n *Named) Facts() string {
	parts := []string{plain.Line(n.Name)}
	for _, side := range []struct {
		direction string
		*NamedSide
	}{{"egress", n.Egress}, {"ingress", n.Ingress}} {
		if side.NamedSide != nil {
			parts = append(parts, fmt.Sprintf("%s %s in %s", side.direction, side.rate, plain.Count(side.Rules, "rule")))
		}
	}
	if pools := n.pools(); pools != "" {
		parts = append(parts, "within "+pools)
	}
	return strings.Join(parts, ", ")
}
