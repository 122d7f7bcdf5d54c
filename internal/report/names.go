package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/history"
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
	// Quota is what is used of the quota of its rules and of pools that only it has, of several the one that is used most; null
	// without one.
	Quota *QuotaUse `json:"quota"`
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
}

// NewNamed is the name of a row.
func NewNamed(r *live.Row) Named {
	n := Named{Name: r.Name.Name, DroppedPercent: knownOrNull(r.DroppedPercent), IntervalNS: history.NotZero(uint64(r.All()[0].Interval))}
	if it := r.Quota(); it != nil {
		n.Quota = NewQuotaUse(it.Also, it.Used)
	}
	for _, s := range r.Sides() {
		done := r.Done(s)
		side := NamedSide{
			Device: s.Device, Direction: s.Direction, Rules: uint64(len(s.Rules)), Pools: []string{}, RateBits: bits(s.Rate), UseBits: bits(done.UseBits),
			PassedPackets: done.PassedPackets, PassedBytes: done.PassedBytes, DroppedPackets: done.DroppedPackets, DroppedBytes: done.DroppedBytes,
		}
		for _, p := range s.Pools {
			side.Pools = append(side.Pools, p.Label.Name)
		}
		n.Sides = append(n.Sides, side)
	}
	return n
}

// sideRate is the rate of a side; where that is not known, the rate of its first rule, and who has it.
func sideRate(r *live.Row, s *live.Side) string {
	if s.Rate.Known {
		return policy.Rate(s.Rate.N).String()
	}
	return (&Rule{Item: r.Of(s)[0]}).RateText()
}

// sharedPools are the pools of all sides.
func sharedPools(r *live.Row) string {
	var names []string
	for _, side := range r.Sides() {
		for _, pool := range side.Pools {
			if name := plain.Line(pool.Label.Name); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return strings.Join(names, ", ")
}

// nameColumns are those of a table of names, and of rules that have none.
func nameColumns(rows []live.Row) []column[live.Row] {
	columns := []column[live.Row]{
		{head: "NAME", least: leastName, always: true, cell: func(r *live.Row) string {
			if r.Name != nil {
				return plain.Line(r.Name.Name)
			}
			return (&Rule{Item: r.Item}).calledBy()
		}},
		{head: "POOL", cell: sharedPools, least: leastCut, drop: 5},
	}
	for i, side := range live.SideColumns(rows) {
		figure := func(head string, wide, drop int, of func(*live.Row, *live.Side) string) {
			columns = append(columns, column[live.Row]{head: head, right: true, wide: wide, drop: drop * i, cell: func(r *live.Row) string {
				if s := r.Side(side); s != nil {
					return of(r, s)
				}
				return ""
			}})
		}
		figure(side.Head(), 0, 2, sideRate)
		if len(rows) > 0 && rows[0].All()[0].Interval > 0 {
			figure("USE", bitsWide, 3, func(r *live.Row, s *live.Side) string { return optional(bits(r.Done(s).UseBits), Bits) })
		} else {
			figure("PASSED", 0, 3, func(r *live.Row, s *live.Side) string { return Bytes(r.Done(s).PassedBytes) })
		}
	}
	return append(columns,
		column[live.Row]{head: "DROPPED", right: true, drop: 4, cell: func(r *live.Row) string { return optional(knownOrNull(r.DroppedPercent), percentText) }},
		column[live.Row]{head: "LEFT", right: true, cell: func(r *live.Row) string {
			if it := r.Quota(); it != nil {
				return leftText(it.Used.LeftBytes, it.Used, it.Also.Then)
			}
			return ""
		}},
		column[live.Row]{head: "STATE", cell: func(r *live.Row) string {
			for _, it := range r.All() {
				if state := (&Rule{Item: it}).remarks(); state != "" {
					return state
				}
			}
			return ""
		}})
}

// Names writes a line for each row that is a name. of is how many there were, and unnamed how many rules have none.
func Names(w io.Writer, names []live.Row, of, unnamed, width int) error {
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
