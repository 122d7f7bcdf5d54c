package report

import (
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// Facts says in one line all that a row of a screen has no room for.
func (r *Rule) Facts() string {
	text := ""
	for _, f := range []struct{ label, text string }{
		{"", r.Unusual()}, {"plan ", r.Label.Plan}, {"refuses itself ", strings.TrimPrefix(r.figure("refused_percent"), "0%")}, {"for ", r.sharers()},
		{"", byColour(&r.Counters)}, {"note ", r.Label.Note}, {"", r.Item.Sentence() + r.marks()},
	} {
		if f.text != "" {
			text += "; " + f.label + f.text
		}
	}
	return plain.Line(strings.TrimPrefix(text, "; "))
}

// NameFacts is Facts for a name.
func NameFacts(r *live.Row) string {
	parts := []string{plain.Line(r.Name.Name)}
	for _, side := range r.Sides() {
		parts = append(parts, fmt.Sprintf("%s %s %s in %s", plain.Line(side.Device), side.Direction, sideRate(r, side), plain.Count(len(side.Rules), "rule")))
	}
	if pools := sharedPools(r); pools != "" {
		parts = append(parts, "within "+pools)
	}
	return strings.Join(parts, ", ")
}
