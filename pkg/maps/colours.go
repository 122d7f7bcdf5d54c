package maps

import (
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// secondParams are the cold parameters of the second limit of a rule with colours.
func secondParams(c *bpf.AbiColdParams) *bpf.AbiSecondParams {
	return (*bpf.AbiSecondParams)(unsafe.Pointer(c))
}

// encodeColours writes what a rule with colours has beside its limit, or what its second limit has.
func encodeColours(t *bpf.AbiParams, d *bpf.AbiColdParams, r policy.Rule) {
	switch c := r.Colours; {
	case r.Algorithm.HasColours():
		t.Within = uint32(c.Green) | uint32(c.Yellow)<<8 | uint32(c.Red)<<16
		if c.Aware {
			t.Flags |= ruleAware
		}
	case kindOf(r) != policy.GCRA:
		second := secondParams(d)
		second.Yellow, second.Red = c.In.Yellow, c.In.Red
	}
}

// decodeColours is the inverse of encodeColours for both limits of a rule.
func (rs *rules) decodeColours(out *policy.Rule, first, second version) {
	c := &out.Colours
	c.Aware = first.Flags&ruleAware != 0
	c.Green, c.Yellow, c.Red = policy.Action(first.Within), policy.Action(first.Within>>8), policy.Action(first.Within>>16)
	params := secondParams(second.AbiColdParams)
	c.In = policy.ColourMap{Yellow: params.Yellow, Red: params.Red}
	rate, burst := policy.Rate(second.RateBits), second.Limit>>model.UnitBits
	switch out.Algorithm {
	case policy.SRTCM:
		c.EBS = burst - out.Capacity
	case policy.TRTCM:
		c.PIR, c.PBS = rate, burst
	case policy.RFC4115:
		c.EIR, c.EBS = rate, burst
	}
}

// addColours completes the counters of a rule with colours by those of its second limit, which passes yellow packets, drops
// red ones, and has green ones as further excess.
func (c *Counters) addColours(second Counters) {
	c.YellowPackets, c.YellowBytes, c.RedPackets, c.RedBytes = second.PassedPackets, second.PassedBytes, second.DroppedPackets, second.DroppedBytes
	c.GreenPackets, c.GreenBytes = second.ExcessPackets-second.DroppedPackets, second.ExcessBytes-second.DroppedBytes
}
