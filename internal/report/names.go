package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"strings"

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

	rate  string
	limit uint64          // RateBits, or noLimit
	tops  map[string]bool // the pools of their own, and rules in none, that limit is the sum of
}

const noLimit = math.MaxUint64

func sumOf(a, b uint64) uint64 {
	if a > noLimit-b {
		return noLimit
	}
	return a + b
}

// A forest is all rules and pools of a namespace.
type forest struct {
	pools  map[string]*Rule
	within map[string][]*Rule // what is directly within each pool
	owners map[string]string  // the name that all rules within a pool have; "" where they differ
}

func newForest(all Rules) forest {
	f := forest{map[string]*Rule{}, map[string][]*Rule{}, map[string]string{}}
	for i := range all {
		r := &all[i]
		if f.within[r.Within] = append(f.within[r.Within], r); r.IsPool() {
			f.pools[r.Name] = r
		}
	}
	for i := range all {
		if all[i].IsPool() {
			continue
		}
		name := all[i].Name
		for above := f.pools[all[i].Within]; above != nil; above = f.pools[above.Within] {
			if owner, known := f.owners[above.Name]; known && owner != name {
				name = ""
			}
			f.owners[above.Name] = name
		}
	}
	return f
}

// most is what a rule or pool lets through in a direction at most.
func (f *forest) most(r *Rule, direction string) uint64 {
	limit := uint64(noLimit)
	if r.RateBits != nil && r.scope == "" {
		limit = *r.RateBits
		if r.HasColours() {
			limit = r.most(limit)
		}
	}
	if !r.IsPool() && r.Direction != direction {
		return 0
	}
	if !r.IsPool() {
		return limit
	}
	sum := uint64(0)
	for _, below := range f.within[r.Name] {
		sum = sumOf(sum, f.most(below, direction))
	}
	return min(sum, limit)
}

// Names are the names of rules, with what they stand for.
type Names []Named

// ByName puts rules with the same name together. all are those of the namespace, with its pools. unnamed is how many
// rules have no name.
func (rules Rules) ByName(all Rules) (names Names, unnamed int) {
	f, at := newForest(all), map[string]int{}
	names = Names{} // in JSON a list, also of none
	var offered, dropped []uint64
	for i := range rules {
		r := &rules[i]
		if r.IsPool() {
			continue
		}
		if r.Name == "" {
			unnamed++
			continue
		}
		n, known := at[r.Name]
		if !known {
			n = len(names)
			at[r.Name], names = n, append(names, Named{Name: r.Name, IntervalNS: r.IntervalNS})
			offered, dropped = append(offered, 0), append(dropped, 0)
		}
		names[n].add(r, &f)
		its := r.counted()
		offered[n], dropped[n] = offered[n]+its.offered, dropped[n]+its.dropped
	}
	for i := range names {
		names[i].DroppedPercent = partOf(dropped[i], offered[i])
	}
	return names, unnamed
}

// add adds a rule with the name.
func (n *Named) add(r *Rule, f *forest) {
	to := &n.Egress
	if r.Direction == policy.Ingress.String() {
		to = &n.Ingress
	}
	if *to == nil {
		*to = &NamedSide{Pools: []string{}, rate: r.rate(), tops: map[string]bool{}}
	}
	side := *to
	side.Rules++
	side.PassedPackets, side.PassedBytes = side.PassedPackets+r.PassedPackets, side.PassedBytes+r.PassedBytes
	side.DroppedPackets, side.DroppedBytes = side.DroppedPackets+r.DroppedPackets, side.DroppedBytes+r.DroppedBytes
	if r.UseBits != nil {
		side.UseBits = new(*cmp.Or(side.UseBits, new(uint64)) + *r.UseBits)
	}
	n.state = cmp.Or(n.state, state(*r))
	top, key := r, r.Device+" "+r.CIDR
	for f.owners[top.Within] == n.Name {
		top = f.pools[top.Within]
		key = top.Name
	}
	if top.Within != "" && !slices.Contains(side.Pools, top.Within) {
		side.Pools = append(side.Pools, top.Within)
	}
	if side.tops[key] {
		return
	}
	side.tops[key], side.limit = true, sumOf(side.limit, f.most(top, r.Direction))
	if side.RateBits = nil; side.limit != noLimit {
		side.RateBits, side.rate = new(side.limit), policy.Rate(side.limit).String()
	}
}

// sum adds up a figure of both directions; those without it count as nothing.
func (n *Named) sum(of func(*NamedSide) *uint64) (sum float64) {
	for _, side := range []*NamedSide{n.Egress, n.Ingress} {
		if side != nil {
			sum += number(of(side), 0)
		}
	}
	return sum
}

// NameSorts are the names of the orders that Sort knows.
var NameSorts = []string{"name", "rate", "use", "passed", "dropped"}

// Sort brings names into one of the orders of NameSorts: figures of both directions together from the largest on.
func (names Names) Sort(by string) {
	figure := map[string]func(*Named) float64{
		"name":    func(*Named) float64 { return 0 },
		"rate":    func(n *Named) float64 { return n.sum(func(s *NamedSide) *uint64 { return &s.limit }) },
		"use":     func(n *Named) float64 { return n.sum(func(s *NamedSide) *uint64 { return s.UseBits }) },
		"passed":  func(n *Named) float64 { return n.sum(func(s *NamedSide) *uint64 { return &s.PassedBytes }) },
		"dropped": func(n *Named) float64 { return number(n.DroppedPercent, -1) },
	}[by]
	sort.SliceStable(names, func(i, j int) bool {
		a, b := &names[i], &names[j]
		return cmp.Or(cmp.Compare(figure(b), figure(a)), Natural(a.Name, b.Name)) < 0
	})
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
func (names Names) Text(w io.Writer, rules Rules, of, unnamed, width int) error {
	text := bufio.NewWriter(w)
	rows := make([]row, len(names))
	for i := range names {
		rows[i].named = &names[i]
	}
	all := func(*row) bool { return true }
	columns := []column{
		{head: "NAME", cell: func(r *row) string { return plain.Line(r.named.Name) }, cut: all, least: leastName, always: true},
		{head: "POOL", cell: func(r *row) string { return r.named.pools() }, cut: all, inside: true},
	}
	for _, d := range []struct {
		head string
		side func(*Named) *NamedSide
	}{
		{"EGRESS", func(n *Named) *NamedSide { return n.Egress }}, {"INGRESS", func(n *Named) *NamedSide { return n.Ingress }},
	} {
		figure := func(head string, of func(*NamedSide) string) {
			columns = append(columns, column{head: head, right: true, cell: func(r *row) string {
				return optional(d.side(r.named), func(s NamedSide) string { return of(&s) })
			}})
		}
		figure(d.head, func(s *NamedSide) string { return s.rate })
		if len(names) > 0 && names[0].IntervalNS != nil {
			figure("USE", func(s *NamedSide) string { return optional(s.UseBits, bitsText) })
		} else {
			figure("PASSED", func(s *NamedSide) string { return bytesText(s.PassedBytes) })
		}
	}
	columns = append(columns,
		column{head: "DROPPED", right: true, cell: func(r *row) string { return optional(r.named.DroppedPercent, percentText) }},
		column{head: "STATE", cell: func(r *row) string { return r.named.state }})
	if err := writeTable(text, rows, columns, width); err != nil {
		return err
	}
	if len(names) < of {
		fmt.Fprintf(text, "%d of %s\n", len(names), plain.Count(of, "name"))
	}
	if unnamed > 0 {
		fmt.Fprintf(text, "%s without a name\n", plain.Count(unnamed, "rule"))
	}
	rules.pending(text, lastReverts)
	return text.Flush()
}
