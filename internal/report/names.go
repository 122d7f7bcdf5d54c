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
		if n.state = unusual(it.Place.InForce, it.Place.Status); n.state != "" {
			break
		}
	}
	return n
}

func newSide(s *live.Side) *NamedSide {
	if s == nil {
		return nil
	}
	out := &NamedSide{
		Rules: uint64(len(s.Rules)), Pools: []string{}, RateBits: bits(s.Rate), UseBits: bits(s.UseBits), rate: (&Rule{Item: s.Rules[0]}).RateText(),
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

// Text writes a line for each name. of is how many there were, and unnamed how many of the rules have none.
func (names Names) Text(w io.Writer, of, unnamed, width int) error {
	text := bufio.NewWriter(w)
	columns := []column[Named]{
		{head: "NAME", cell: func(n *Named) string { return plain.Line(n.Name) }, cut: whole[Named], least: leastName, always: true},
		{head: "POOL", cell: (*Named).pools, cut: whole[Named], inside: true},
	}
	for _, d := range []struct {
		head string
		side func(*Named) *NamedSide
	}{
		{"EGRESS", func(n *Named) *NamedSide { return n.Egress }}, {"INGRESS", func(n *Named) *NamedSide { return n.Ingress }},
	} {
		figure := func(head string, of func(NamedSide) string) {
			columns = append(columns, column[Named]{head: head, right: true, cell: func(n *Named) string { return optional(d.side(n), of) }})
		}
		figure(d.head, func(s NamedSide) string { return s.rate })
		if len(names) > 0 && names[0].IntervalNS != nil {
			figure("USE", func(s NamedSide) string { return optional(s.UseBits, bitsText) })
		} else {
			figure("PASSED", func(s NamedSide) string { return bytesText(s.PassedBytes) })
		}
	}
	columns = append(columns,
		column[Named]{head: "DROPPED", right: true, cell: func(n *Named) string { return optional(n.DroppedPercent, percentText) }},
		column[Named]{head: "STATE", cell: func(n *Named) string { return n.state }})
	if err := writeTable(text, names, columns, width); err != nil {
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
