package report

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Shadow is what a proposed limit would have done to the packets of its rule.
type Shadow struct {
	RateBits       uint64     `json:"rate_bits_per_second"`
	CapacityBytes  uint64     `json:"capacity_bytes"`
	Each           string     `json:"each"`
	Penalty        string     `json:"penalty"`
	OverheadBytes  int16      `json:"overhead_bytes"`
	MPUBytes       uint16     `json:"mpu_bytes"`
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
func NewShadow(proposed policy.Rule, c maps.Counters, affected []maps.Affected, limit uint32) *Shadow {
	s := &Shadow{
		RateBits: uint64(proposed.Rate), CapacityBytes: proposed.Capacity, Each: proposed.Each.String(),
		Penalty: proposed.Penalty.String(), OverheadBytes: proposed.Framing.Overhead, MPUBytes: proposed.Framing.MPU,
		SeenPackets: c.PassedPackets, SeenBytes: c.PassedBytes, RefusedPackets: c.ExcessPackets, RefusedBytes: c.ExcessBytes,
		AffectedHosts: len(affected), AffectedLimit: limit, Affected: []Affected{},
	}
	for _, h := range affected {
		s.Affected = append(s.Affected, Affected{SubnetName(h.Subnet), h.Packets, h.Bytes})
	}
	return s
}

// SubnetName is a subnet as people read it: a host by its address alone.
func SubnetName(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

// worst is how many of those who would have been affected most are named.
const worst = 3

// Shadows says of each rule with a shadow what that would have refused, and of whom.
func (rules Rules) Shadows(w io.Writer) error {
	rules = slices.DeleteFunc(slices.Clone(rules), func(r Rule) bool { return r.Shadow == nil })
	if len(rules) == 0 {
		_, err := fmt.Fprintln(w, "no rule has a shadow; 'shapectl set ... --shadow rate=RATE' proposes a limit")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "RULE\tPROPOSED\tPACKETS\tWOULD REFUSE\tBYTES\tWOULD REFUSE\tAFFECTED\tMOST")
	for _, r := range rules {
		s := r.Shadow
		proposed := policy.Rate(s.RateBits).String()
		if s.Each != r.Each {
			proposed += " each " + s.Each
		}
		var most []string
		for _, h := range s.Affected[:min(worst, len(s.Affected))] {
			most = append(most, fmt.Sprintf("%s (%d bytes)", h.Subnet, h.RefusedBytes))
		}
		affected := fmt.Sprint(s.AffectedHosts)
		// The kernel begins to forget a little before there is no room.
		if uint32(s.AffectedHosts) >= s.AffectedLimit-s.AffectedLimit/8 {
			affected += " or more"
		}
		fmt.Fprintf(t, "%s %s %s\t%s\t%d\t%d (%s)\t%d\t%d (%s)\t%s\t%s\n", plain.Line(r.Device), r.Direction, r.CIDR, proposed,
			s.SeenPackets, s.RefusedPackets, percent(s.RefusedPackets, cmp.Or(s.SeenPackets, 1)),
			s.SeenBytes, s.RefusedBytes, percent(s.RefusedBytes, cmp.Or(s.SeenBytes, 1)), affected, cmp.Or(strings.Join(most, ", "), "nobody"))
	}
	return t.Flush()
}
