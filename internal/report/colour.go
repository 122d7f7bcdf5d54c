package report

import (
	"fmt"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ColourOptions are what a rule with colours has beside its rate and capacity, which are its CIR and CBS. What a rule does
// not have is null: all of it without colours, the PIR except with trtcm, and so on.
type ColourOptions struct {
	PIRBits  *uint64 `json:"pir_bits_per_second"`
	PBSBytes *uint64 `json:"pbs_bytes"`
	EIRBits  *uint64 `json:"eir_bits_per_second"`
	EBSBytes *uint64 `json:"ebs_bytes"`
	Aware    *bool   `json:"colour_aware"`
	In       *string `json:"colours"` // as the flag; null unless packets come in with colours
	Green    *string `json:"green"`   // what happens to such packets
	Yellow   *string `json:"yellow"`
	Red      *string `json:"red"`
}

// ColourCounters are the passed and dropped packets of a rule by colour; 0 without colours.
type ColourCounters struct {
	GreenPackets  uint64 `json:"green_packets"`
	GreenBytes    uint64 `json:"green_bytes"`
	YellowPackets uint64 `json:"yellow_packets"`
	YellowBytes   uint64 `json:"yellow_bytes"`
	RedPackets    uint64 `json:"red_packets"`
	RedBytes      uint64 `json:"red_bytes"`
}

// NewColourOptions is what a rule has.
func NewColourOptions(r policy.Rule) (o ColourOptions) {
	if !r.Algorithm.HasColours() {
		return o
	}
	c := &r.Colours
	switch r.Algorithm {
	case policy.TRTCM:
		o.PIRBits, o.PBSBytes = (*uint64)(&c.PIR), &c.PBS
	case policy.RFC4115:
		o.EIRBits = (*uint64)(&c.EIR)
		fallthrough
	default:
		o.EBSBytes = &c.EBS
	}
	if o.Aware = &c.Aware; c.Aware {
		o.In = new(c.In.String())
	}
	o.Green, o.Yellow, o.Red = new(c.Green.String()), new(c.Yellow.String()), new(c.Red.String())
	return o
}

func newColourCounters(c maps.Counters) ColourCounters {
	return ColourCounters{c.GreenPackets, c.GreenBytes, c.YellowPackets, c.YellowBytes, c.RedPackets, c.RedBytes}
}

// HasColours reports whether packets get colours.
func (o *ColourOptions) HasColours() bool { return o.Red != nil }

// SecondBytes is the size of the second bucket in bytes: PBS or EBS; nil without colours.
func (o *ColourOptions) SecondBytes() *uint64 {
	if o.PBSBytes != nil {
		return o.PBSBytes
	}
	return o.EBSBytes
}

// secondName is what RFCs call the second bucket.
func (o *ColourOptions) secondName() string {
	if o.PBSBytes != nil {
		return "P"
	}
	return "E"
}

// rate is a CIR, and the PIR or EIR beside it.
func (o *ColourOptions) rate(cir string) string {
	switch {
	case o.PIRBits != nil:
		return cir + "/" + rateText(o.PIRBits)
	case o.EIRBits != nil:
		return cir + "+" + rateText(o.EIRBits) // which comes on top
	}
	return cir
}

// actions is what happens to packets by colour; that green ones pass goes without saying.
func (o *ColourOptions) actions() string {
	text := fmt.Sprintf("yellow %s, red %s", *o.Yellow, *o.Red)
	if *o.Green != policy.ActionPass.String() {
		text = fmt.Sprintf("green %s, %s", *o.Green, text)
	}
	return text
}

// OnExcess is what happens to excess packets.
func (r *Rule) OnExcess() string {
	if r.HasColours() {
		return r.actions()
	}
	return r.Excess
}

// byColour is the packets of a rule by colour; "" for none.
func (c *ColourCounters) byColour() string {
	all := c.GreenPackets + c.YellowPackets + c.RedPackets
	if all == 0 {
		return ""
	}
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

// bursts are the sizes of the buckets of a rule.
func (r *row) bursts() string {
	text := optional(r.CapacityBytes, bytesText)
	if r.HasColours() {
		text += " " + r.secondName() + " " + bytesText(*r.SecondBytes())
	}
	return text
}

// levels are the levels of the shared buckets of a rule.
func (r *row) levels() string {
	text := bytesText(r.LevelBytes)
	if second := number(r.SecondLevelBytes, 0); second > 0 {
		text += " " + r.secondName() + " " + bytesText(*r.SecondLevelBytes)
	}
	return text
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

// levels says how full both buckets of a key are.
func (c *Colouring) levels(key string, level, capacity uint64) string {
	second := "E"
	if c.Peak {
		second = "P"
	}
	fill := func(level, of uint64) string {
		if of == 0 {
			return "0 bytes"
		}
		return fmt.Sprintf("%d of %d bytes (%s full)", level, of, percent(level, of))
	}
	return fmt.Sprintf("%s: C %s, %s %s", key, fill(level, capacity), second, fill(*c.SecondLevelBytes, *c.SecondCapacityBytes))
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
