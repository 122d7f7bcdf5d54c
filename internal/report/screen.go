package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
)

// Bits, Bytes and Percent write figures as all tables have them.
func Bits(n uint64) string { return bitsText(n) }

// Bytes is Bits for bytes.
func Bytes(n uint64) string { return bytesText(n) }

// Percent is Bits for shares.
func Percent(p float64) string { return percentText(p) }

// Wait is how long a packet would wait.
func Wait(ns uint64) string { return About(ns) }

// FullPercent is a level in percent of what a bucket of the rule and its queue hold; 0 if the rule has none.
func (r *Rule) FullPercent(level uint64) float64 {
	_, capacity := r.inForce()
	if capacity == nil {
		return 0
	}
	return percentOf(level, r.holds(*capacity))
}

// IsShared reports whether one bucket has the rate, not one for each key.
func (r *Rule) IsShared() bool { return r.scope == "" }

// RateText is the rate, and who has it.
func (r *Rule) RateText() string { return r.rate() }

// RateNowText is RateText, but of a pool with leases what packets meet: the lease or the safe share.
func (r *Rule) RateNowText() string {
	if r.Leased != nil {
		return bitsText(*r.RateNow())
	}
	return r.rate()
}

// Network is the prefix; of a single address without its length.
func (r *Rule) Network() string { return r.network() }

// Where is the device and the direction.
func (r *Rule) Where() string { return r.where() }

// Unusual is what is unusual about the state of the rule; "" for nothing.
func (r *Rule) Unusual() string { return state(*r) }

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
	if refused := r.refused(); number(refused, 0) > 0 {
		add("refuses %s of its packets itself", percentText(*refused))
	}
	add("%s", r.sharers())
	add("note %s", plain.Line(r.Note))
	return strings.Join(parts, ", ")
}

// Matches reports whether a part of what people know the rule by is text, which is in lower case.
func (r *Rule) Matches(text string) bool {
	return slices.ContainsFunc([]string{r.Name, r.Plan, r.Note, r.Host, r.Within, r.Device + " " + r.Direction + " " + r.CIDR}, func(s string) bool {
		return strings.Contains(strings.ToLower(s), text)
	})
}

// SideUse is what the rules with a name use in a direction, as text and in percent of their rate: "" and -1 for none.
func (s *NamedSide) SideUse() (use string, percent float64) {
	if s == nil {
		return "", -1
	}
	percent = -1
	if s.RateBits != nil && s.UseBits != nil {
		percent = percentOf(*s.UseBits, *s.RateBits)
	}
	return optional(s.UseBits, bitsText), percent
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
