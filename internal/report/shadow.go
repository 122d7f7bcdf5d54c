package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Shadow is what a proposed limit would have done to the packets of its rule.
type Shadow struct {
	RateBits      uint64 `json:"rate_bits_per_second"`
	CapacityBytes uint64 `json:"capacity_bytes"`
	Each          string `json:"each"`
	Penalty       string `json:"penalty"`
	OverheadBytes int16  `json:"overhead_bytes"`
	MPUBytes      uint16 `json:"mpu_bytes"`
	ColourOptions
	ColourCounters
	SeenPackets    uint64     `json:"seen_packets"`
	SeenBytes      uint64     `json:"seen_bytes"`
	RefusedPackets uint64     `json:"refused_packets"`
	RefusedBytes   uint64     `json:"refused_bytes"`
	AffectedHosts  int        `json:"affected_hosts"` // or subnets, with each /N
	AffectedLimit  uint32     `json:"affected_limit"` // about how many of all shadows of the hook are remembered
	Affected       []Affected `json:"affected"`
}

// Affected is a host or subnet of which packets would have been refused.
type Affected struct {
	Subnet         string `json:"subnet"`
	RefusedPackets uint64 `json:"refused_packets"`
	RefusedBytes   uint64 `json:"refused_bytes"`
}

// NewShadow puts together what is known of a rule's shadow.
func NewShadow(of *live.Shadow) *Shadow {
	proposed, c := of.Rule, of.Counters
	s := &Shadow{
		RateBits: uint64(proposed.Rate), CapacityBytes: proposed.Capacity, Each: proposed.Each.String(),
		Penalty: proposed.Penalty.String(), OverheadBytes: proposed.Framing.Overhead, MPUBytes: proposed.Framing.MPU,
		SeenPackets: c.PassedPackets + c.DroppedPackets, SeenBytes: c.PassedBytes + c.DroppedBytes,
		AffectedLimit: of.Room, Affected: []Affected{},
		ColourOptions: NewColourOptions(proposed), ColourCounters: newColourCounters(c),
	}
	s.RefusedPackets, s.RefusedBytes = of.Refused()
	return s
}

// Affects adds the hosts of which packets would have been refused.
func (s *Shadow) Affects(hosts []maps.Affected) {
	s.AffectedHosts = len(hosts)
	for _, h := range hosts {
		s.Affected = append(s.Affected, Affected{policy.NetworkText(h.Subnet), h.Packets, h.Bytes})
	}
}

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
	rows := rules.rows()
	err := writeTable(text, rows, []column{called(rows), places(rows),
		{head: "SHADOW", always: true, right: true, cell: (*row).proposed},
		{head: "SEEN", always: true, right: true, cell: func(r *row) string { return bytesText(r.Shadow.SeenBytes) }},
		{head: "WOULD DROP", always: true, right: true, cell: func(r *row) string { return percentText(percentOf(r.Shadow.RefusedBytes, r.Shadow.SeenBytes)) }},
		{head: "HOSTS", right: true, cell: func(r *row) string { return r.Shadow.hosts() }},
		{head: "COLOURS", drop: 2, cell: func(r *row) string { return r.Shadow.byColour() }},
		{head: "MOST AFFECTED", drop: 1, cell: func(r *row) string {
			if len(r.Shadow.Affected) == 0 {
				return ""
			}
			return r.Shadow.Affected[0].Subnet
		}},
	}, width)
	if err == nil && len(rules) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rules), plain.Count(of, "rule"))
	}
	var shared []string
	for i := range rules {
		if r := &rules[i]; r.Share != (policy.Share{}).String() {
			shared = append(shared, cmp.Or(plain.Line(r.Name), r.network()))
		}
	}
	if shared != nil {
		text.WriteString(plain.Fold("a shadow has no shares, so with those of "+plain.List(shared)+" others may lose, and less or more", screenWidth, "", "    "))
	}
	return cmp.Or(err, text.Flush())
}

// proposed is the rate of the shadow, and who has it.
func (r *Rule) proposed() string {
	scope := r.Shadow.Each
	if scope == "all" {
		scope = ""
	}
	return rateFor(r.Shadow.ColourOptions.rate(rateText(&r.Shadow.RateBits)), scope)
}

// hosts is how many would have been affected; with a + where there may have been more.
func (s *Shadow) hosts() string {
	text := countText(uint64(s.AffectedHosts))
	// The kernel begins to forget a little before there is no room.
	if uint32(s.AffectedHosts) >= s.AffectedLimit-s.AffectedLimit/8 {
		text += "+"
	}
	return text
}
