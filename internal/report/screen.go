package report

import (
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
)

// Bits and Bytes write figures as all tables have them.
func Bits(n uint64) string { return bitsText(n) }

// Bytes is Bits for bytes.
func Bytes(n uint64) string { return bytesText(n) }

// Facts says in one line all that a row of a screen has no room for.
func (r *Rule) Facts() string {
	text := r.Item.Sentence() + remark(r.Place.InForce, r.Place.Status) + r.marks()
	for _, f := range []struct{ label, text string }{
		{"plan", r.Label.Plan}, {"note", r.Label.Note}, {"by colour", byColour(&r.Counters)}, {"refuses itself", r.figure("refused_percent")},
		{"for", r.sharers()},
	} {
		if f.text != "" && f.text != "0%" {
			text += "; " + f.label + " " + f.text
		}
	}
	return plain.Line(text)
}

// Facts says in one line all that a row of a screen has no room for.
func (n *Named) Facts() string {
	parts := []string{plain.Line(n.Name)}
	for _, side := range n.Sides {
		parts = append(parts, fmt.Sprintf("%s %s %s in %s", plain.Line(side.Device), side.Direction, side.rate, plain.Count(side.Rules, "rule")))
	}
	if pools := n.pools(); pools != "" {
		parts = append(parts, "within "+pools)
	}
	return strings.Join(parts, ", ")
}
