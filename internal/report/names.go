package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Named is all rules that have a name, such as those of a subscriber.
type Named struct {
	Name    string     `json:"name"`
	Egress  *NamedSide `json:"egress"`  // null without rules
	Ingress *NamedSide `json:"ingress"` // null without rules
	// DroppedPercent is dropped packets in percent of all, over the interval or else since the rules were set; null where
	// there were none.
	DroppedPercent *float64 `json:"dropped_percent"`
	IntervalNS     *uint64  `json:"interval_ns"` // null unless it was asked for

	state string
}

// NamedSide is the rules with a name in one direction.
type NamedSide struct {
	Rules uint64 `json:"rules"`
	// Pools are the ones above that rules with other names draw from, too.
	Pools []string `json:"pools"`
	// RateBits is the most that the rules and the pools of their own let through; null for no limit, and where hosts,
	// subnets or flows have a rate each.
	RateBits       *uint64 `json:"rate_bits_per_second"`
	PassedPackets  uint64  `json:"passed_packets"`
	PassedBytes    uint64  `json:"passed_bytes"`
	DroppedPackets uint64  `json:"dropped_packets"`
	DroppedBytes   uint64  `json:"dropped_bytes"`
	UseBits        *uint64 `json:"use_bits_per_second"` // null without an interval

	rate string
}

// Names are the names of rules, with what they stand for.
type Names []Named

// NewNamed is the name of a row.
func NewNamed(r *live.Row) Named {
	n := Named{
		Name: r.Name.Name, Egress: newSide(r.Name.Egress), Ingress: newSide(r.Name.Ingress), DroppedPercent: percentOrNull(r.Name.DroppedPercent),
	}
	if over := r.Items[0].Interval; over > 0 {
		n.IntervalNS = new(uint64(over))
	}
	for _, it := range r.Items {
		if n.state = state(NewRule(it)); n.state != "" {
			break
		}
	}
	return n
}

func newSide(s *live.Side) *NamedSide {
	if s == nil {
		return nil
	}
	first := NewRule(s.Rules[0])
	out := &NamedSide{
		Rules: uint64(len(s.Rules)), Pools: []string{}, RateBits: bits(s.Rate), UseBits: bits(s.UseBits), rate: first.rate(),
		PassedPackets: s.PassedPackets, PassedBytes: s.PassedBytes, DroppedPackets: s.DroppedPackets, DroppedBytes: s.DroppedBytes,
	}
	if s.Rate.Known {
		out.rate = policy.Rate(s.Rate.N).String()
	}
	for _, p := range s.Pools {
		out.Pools = append(out.Pools, p.Label.Name)
	}
	return out
}

// pools are those of both directions.
func (n *Named) pools() string {
	var names []string
	for _, side := range []*NamedSide{n.Egress, n.Ingress} {
		for i := 0; side != nil && i < len(side.Pools); i++ {
			if name := plain.Line(side.Pools[i]); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return strings.Join(names, ", ")
}

// side is what a name has in a direction, or a rule without a name; nil for nothing.
func (r *row) side(d policy.Direction) *NamedSide {
	switch {
	case r.named == nil && r.Direction != d.String():
		return nil
	case r.named == nil:
		return &NamedSide{UseBits: r.UseBits, PassedBytes: r.PassedBytes, rate: r.rate()}
	case d == policy.Egress:
		return r.named.Egress
	}
	return r.named.Ingress
}

// ofName is a cell that names have, and rules without a name.
func ofName(name func(*Named) string, rule func(*Rule) string) func(*row) string {
	return func(r *row) string {
		if r.named != nil {
			return name(r.named)
		}
		return rule(r.Rule)
	}
}

// nameColumns are those of names. measured is whether they are about an interval.
func nameColumns(measured bool) []column {
	all := func(*row) bool { return true }
	columns := []column{
		{head: "NAME", cell: ofName(func(n *Named) string { return plain.Line(n.Name) }, (*Rule).calledBy), cut: all, least: leastName, always: true},
		{head: "POOL", cell: ofName((*Named).pools, func(r *Rule) string { return plain.Line(r.Within) }), cut: all, inside: true, drop: 2},
	}
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		drop := 0
		if d == policy.Ingress {
			drop = 3
		}
		figure := func(head string, wide int, of func(*NamedSide) string) {
			columns = append(columns, column{head: head, right: true, wide: wide, drop: drop, cell: func(r *row) string {
				return optional(r.side(d), func(s NamedSide) string { return of(&s) })
			}})
		}
		figure(strings.ToUpper(d.String()), 0, func(s *NamedSide) string { return s.rate })
		if measured {
			figure("USE", bitsWide, func(s *NamedSide) string { return optional(s.UseBits, bitsText) })
		} else {
			figure("PASSED", 0, func(s *NamedSide) string { return bytesText(s.PassedBytes) })
		}
	}
	return append(columns,
		column{head: "DROPPED", right: true, drop: 1, cell: ofName(func(n *Named) string { return optional(n.DroppedPercent, percentText) }, func(r *Rule) string { return percentOr(r.it.DroppedPercent()) })},
		column{head: "STATE", cell: ofName(func(n *Named) string { return n.state }, (*Rule).remarks)})
}

// Text writes a line for each name. of is how many there were, and unnamed how many of the rules have none.
func (names Names) Text(w io.Writer, of, unnamed, width int) error {
	text := bufio.NewWriter(w)
	rows := make([]row, len(names))
	for i := range names {
		rows[i].named = &names[i]
	}
	if err := writeTable(text, rows, nameColumns(len(names) > 0 && names[0].IntervalNS != nil), width); err != nil {
		return err
	}
	if len(names) < of {
		fmt.Fprintf(text, "%d of %s\n", len(names), plain.Count(of, "name"))
	}
	if unnamed > 0 {
		fmt.Fprintf(text, "%s without a name\n", plain.Count(unnamed, "rule"))
	}
	return text.Flush()
}
