package report

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ratesOf is the rate of a rule; with colours its CIR, and the PIR or EIR beside it.
func ratesOf(r *policy.Rule) string {
	switch r.Algorithm {
	case policy.TRTCM:
		return r.Rate.String() + "/" + r.Colours.PIR.String()
	case policy.RFC4115:
		return r.Rate.String() + "+" + r.Colours.EIR.String() // which comes on top
	}
	var others []string
	if r.AnyRate() && r.Also.Packets != 0 {
		others = append(others, r.Also.Packets.String()+" pps")
	}
	if r.AnyRate() && r.Also.Flows != 0 {
		others = append(others, r.Also.Flows.String()+" new/s")
	}
	return cmp.Or(strings.Join(others, ", "), r.Rate.String())
}

// OnExcess is what happens to packets beyond the rate, or to packets by colour; that green ones pass goes without saying.
func (r *Rule) OnExcess() string {
	switch {
	case r.Rate == policy.Unlimited: // its pools decide
		return ""
	case !r.HasColours():
		return r.Excess.String()
	}
	text := fmt.Sprintf("yellow %v, red %v", r.Colours.Yellow, r.Colours.Red)
	if r.Colours.Green != policy.ActionPass {
		text = fmt.Sprintf("green %v, %s", r.Colours.Green, text)
	}
	return text
}

// byColour is the packets of a rule by colour; "" for none.
func byColour(c *maps.Counters) string {
	all := c.GreenPackets + c.YellowPackets + c.RedPackets
	var parts []string
	for _, of := range []struct {
		packets uint64
		colour  policy.Colour
	}{{c.GreenPackets, policy.Green}, {c.YellowPackets, policy.Yellow}, {c.RedPackets, policy.Red}} {
		if of.packets > 0 {
			parts = append(parts, percentText(percentOf(of.packets, all))+" "+of.colour.String())
		}
	}
	return strings.Join(parts, ", ")
}

// Colouring is the colour that a packet gets from a rule with colours, and what follows. Without colours, texts are empty,
// and all else is null.
type Colouring struct {
	Colour   string `json:"colour"`
	ColourIn string `json:"incoming_colour"` // green, unless the rule is colour-aware
	DSCP     string `json:"dscp"`            // by which the packet comes in with that colour; "" unless the rule is colour-aware
	Action   string `json:"action"`          // what happens to packets of the colour
	// The second bucket is E, or with trtcm P.
	SecondLevelBytes    *uint64 `json:"second_level_bytes"`
	SecondCapacityBytes *uint64 `json:"second_capacity_bytes"`
	GreenInNS           *uint64 `json:"green_in_ns"` // until the packet would be green, if no others come; null for never

	Peak bool `json:"-"` // the second bucket is P
}

// become is what happens to a packet of the colour, or to many.
func (c *Colouring) become(many bool) string {
	passes, is, gets, it := "passes", "is ", "gets ", "it allows"
	if many {
		passes, is, gets, it = "pass", "are ", "get ", "they allow"
	}
	switch c.Action {
	case policy.ActionPass.String():
		return passes
	case policy.ActionDrop.String():
		return is + "dropped"
	case policy.ActionECN.String():
		return is + "marked by ECN if " + it + " it, else dropped"
	}
	return gets + strings.TrimPrefix(c.Action, "dscp:") + ", and " + passes
}

// coloured is the colour of a packet, what happens to it, and when it would be green.
func (p *Stop) coloured() string {
	b, text, is := p.Bucket, "", "is "
	if b.DSCP != "" {
		text = fmt.Sprintf("that comes in %s (%s) ", b.ColourIn, b.DSCP)
	}
	if b.Colour == b.ColourIn && b.Colour != policy.Green.String() {
		is = "stays "
	}
	text += is + b.Colour + ", and " + b.become(false)
	switch {
	case b.Colour == policy.Green.String():
		return text + "; room for " + plain.Count(b.RoomPackets, "such packet")
	case b.GreenInNS == nil:
		return text + "; it would never be green"
	}
	return text + "; it would be green in " + About(*b.GreenInNS) + ", if no others come"
}
