package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// WithShadow are the rules that have a shadow.
func (rules Rules) WithShadow() Rules {
	return slices.DeleteFunc(rules, func(r Rule) bool { return r.Shadow == nil })
}

// Shadows writes what the shadow of each rule would have refused, and to whom. All rules have one; of is how many were
// found.
func (rules Rules) Shadows(w io.Writer, of, width int) error {
	if len(rules) == 0 {
		_, err := fmt.Fprintln(w, "no rule has a shadow; 'shapectl set ... --shadow rate=RATE' proposes a limit")
		return err
	}
	text := bufio.NewWriter(w)
	err := writeTable(text, rules, []column[Rule]{called(rules.havePools()), places(),
		{head: "SHADOW", always: true, right: true, cell: func(r *Rule) string { return rateFor(ratesOf(&r.Shadow.Rule), r.Shadow.Item().Scope()) }},
		{head: "SEEN", always: true, right: true, cell: func(r *Rule) string { return Bytes(r.Shadow.PassedBytes + r.Shadow.DroppedBytes) }},
		{head: "WOULD DROP", always: true, right: true, cell: func(r *Rule) string { return percentText(r.Shadow.RefusedPercent().N) }},
		{head: "HOSTS", right: true, cell: func(r *Rule) string { return affectedHosts(r.Shadow) }},
		{head: "COLOURS", drop: 2, cell: func(r *Rule) string { return byColour(&r.Shadow.Counters) }},
		{head: "MOST AFFECTED", drop: 1, cell: func(r *Rule) string {
			if len(r.Shadow.Affected) == 0 {
				return ""
			}
			return r.Shadow.Affected[0].Subnet
		}},
	}, width)
	if err == nil && len(rules) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rules), plain.Count(of, "rule"))
	}
	return cmp.Or(err, text.Flush())
}

// affectedHosts is how many would have been affected; with a + where there may have been more.
func affectedHosts(s *live.Shadow) string {
	text := countText(uint64(len(s.Affected)))
	// The kernel begins to forget a little before there is no room.
	if uint32(len(s.Affected)) >= s.Room-s.Room/8 {
		text += "+"
	}
	return text
}
