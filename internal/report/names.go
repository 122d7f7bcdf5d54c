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
	Name  string      `json:"name"`
	Sides []NamedSide `json:"sides"`
	// DroppedPercent is dropped packets in percent of all, over the interval or else since the rules were set; null where
	// there were none.
	DroppedPercent *float64 `json:"dropped_percent"`
	IntervalNS     *uint64  `json:"interval_ns"` // null unless it was asked for

	row   *live.Row
	state string
}

// NamedSide is the rules with a name in one direction of a device.
type NamedSide struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Rules     uint64 `json:"rules"`
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
	n := Named{Name: r.Name.Name, DroppedPercent: knownOrNull(r.DroppedPercent), row: r}
	for _, s := range r.Name.Sides {
		n.Sides = append(n.Sides, newSide(r, s))
	}
	all := r.All()
	if over := all[0].Interval; over > 0 {
		n.IntervalNS = new(uint64(over))
	}
	for _, it := range all {
		if n.state = unusual(it.Place.InForce, it.Place.Status); n.state != "" {
			break
		}
	}
	return n
}

func newSide(r *live.Row, s *live.Side) NamedSide {
	done := r.Done(s)
	out := NamedSide{
		Device: s.Device, Direction: s.Direction, Rules: uint64(len(s.Rules)), Pools: []string{}, RateBits: bits(s.Rate), UseBits: bits(done.UseBits),
		rate: (&Rule{Item: r.Of(s)[0]}).RateText(), PassedPackets: done.PassedPackets, PassedBytes: done.PassedBytes,
		DroppedPackets: done.DroppedPackets, DroppedBytes: done.DroppedBytes,
	}
	if s.Rate.Known {
		out.rate = policy.Rate(s.Rate.N).String()
	}
	for _, p := range s.Pools {
		out.Pools = append(out.Pools, p.Label.Name)
	}
	return out
}

// pools are those of all sides.
func (n *Named) pools() string {
	var names []string
	for _, side := range n.Sides {
		for _, pool := range side.Pools {
			if name := plain.Line(pool); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return strings.Join(names, ", ")
}

// unnamed is a rule without a name, as a line among names.
func unnamed(row *live.Row) Named {
	r := NewRule(row.Item)
	n := Named{Name: r.calledBy(), row: row, DroppedPercent: knownOrNull(row.DroppedPercent), state: r.remarks()}
	if r.Interval > 0 {
		n.IntervalNS = new(uint64(r.Interval))
	}
	n.Sides = []NamedSide{{Device: r.Device, Direction: r.Direction, Pools: []string{}, UseBits: bits(r.UseBits()), PassedBytes: r.PassedBytes, rate: r.RateText()}}
	if r.Within != "" {
		n.Sides[0].Pools = []string{string(r.Within)}
	}
	return n
}

// side is what a name has in a column; nil for nothing.
func (n *Named) side(c live.SideColumn) *NamedSide {
	at := 0
	if n.row.Name != nil {
		at = slices.Index(n.row.Name.Sides, n.row.Side(c))
	} else if n.Sides[0].Direction != c.Direction || c.Device != "" && c.Device != n.Sides[0].Device {
		at = -1
	}
	if at < 0 {
		return nil
	}
	return &n.Sides[at]
}

// nameColumns are those of a table of names.
func nameColumns(names Names) []column[Named] {
	columns := []column[Named]{
		{head: "NAME", cell: func(n *Named) string { return plain.Line(n.Name) }, least: leastName, always: true},
		{head: "POOL", cell: (*Named).pools, least: leastCut, drop: 5},
	}
	for i, side := range live.SideColumns(len(names), func(i int) *live.Row { return names[i].row }) {
		figure := func(head string, wide, drop int, of func(NamedSide) string) {
			columns = append(columns, column[Named]{head: head, right: true, wide: wide, drop: drop * i, cell: func(n *Named) string { return optional(n.side(side), of) }})
		}
		figure(side.Head(), 0, 2, func(s NamedSide) string { return s.rate })
		if len(names) > 0 && names[0].IntervalNS != nil {
			figure("USE", bitsWide, 3, func(s NamedSide) string { return optional(s.UseBits, bitsText) })
		} else {
			figure("PASSED", 0, 3, func(s NamedSide) string { return bytesText(s.PassedBytes) })
		}
	}
	return append(columns,
		column[Named]{head: "DROPPED", right: true, drop: 4, cell: func(n *Named) string { return optional(n.DroppedPercent, percentText) }},
		column[Named]{head: "STATE", cell: func(n *Named) string { return n.state }})
}

// Text writes a line for each name. of is how many there were, and unnamed how many of the rules have none.
func (names Names) Text(w io.Writer, of, unnamed, width int) error {
	text := bufio.NewWriter(w)
	if err := writeTable(text, names, nameColumns(names), width); err != nil {
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
