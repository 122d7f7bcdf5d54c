package maps

import (
	"net/netip"
	"time"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Flags of abi.h.
const (
	ruleLeaky       = uint32(bpf.AbiRuleFlagRULE_LEAKY)
	ruleUnlimited   = uint32(bpf.AbiRuleFlagRULE_UNLIMITED)
	ruleFraming     = uint32(bpf.AbiRuleFlagRULE_FRAMING)
	rulePenalty     = uint32(bpf.AbiRuleFlagRULE_PENALTY)
	ruleFailClosed  = uint32(bpf.AbiRuleFlagRULE_FAIL_CLOSED)
	ruleECN         = uint32(bpf.AbiRuleFlagRULE_ECN)
	rulePass        = uint32(bpf.AbiRuleFlagRULE_PASS)
	ruleHost        = uint32(bpf.AbiRuleFlagRULE_HOST)
	ruleSubnet      = uint32(bpf.AbiRuleFlagRULE_SUBNET)
	ruleFlow        = uint32(bpf.AbiRuleFlagRULE_FLOW)
	ruleAbsent      = uint32(bpf.AbiRuleFlagRULE_ABSENT)
	ruleShadow      = uint32(bpf.AbiRuleFlagRULE_SHADOW)
	ruleDelay       = uint32(bpf.AbiRuleFlagRULE_DELAY)
	ruleSparse      = uint32(bpf.AbiRuleFlagRULE_SPARSE)
	ruleWithin      = uint32(bpf.AbiRuleFlagRULE_WITHIN)
	ruleGuarantee   = uint32(bpf.AbiRuleFlagRULE_GUARANTEE)
	rulePool        = uint32(bpf.AbiRuleFlagRULE_POOL)
	ruleLeased      = uint32(bpf.AbiRuleFlagRULE_LEASED)
	ruleSRTCM       = uint32(bpf.AbiRuleFlagRULE_SRTCM)
	ruleTRTCM       = uint32(bpf.AbiRuleFlagRULE_TRTCM)
	ruleRFC4115     = uint32(bpf.AbiRuleFlagRULE_RFC4115)
	ruleAware       = uint32(bpf.AbiRuleFlagRULE_AWARE)
	ruleEdited      = uint32(bpf.AbiRuleFlagRULE_EDITED)
	ruleReleased    = uint32(bpf.AbiRuleFlagRULE_RELEASED)
	ruleShareMember = uint32(bpf.AbiRuleFlagRULE_SHARE_MEMBER)

	ruleEach    = ruleHost | ruleSubnet | ruleFlow
	ruleColours = ruleSRTCM | ruleTRTCM | ruleRFC4115
	ruleShares  = ruleEach<<bpf.AbiLayoutSHARE_FLAGS | ruleShareMember
)

// The flag for each choice; one choice of each kind has none.
var (
	algorithmFlags = []uint32{policy.GCRA: 0, policy.Leaky: ruleLeaky, policy.SRTCM: ruleSRTCM, policy.TRTCM: ruleTRTCM, policy.RFC4115: ruleRFC4115}
	eachFlags      = []uint32{policy.EachAll: 0, policy.EachHost: ruleHost, policy.EachSubnet: ruleSubnet, policy.EachFlow: ruleFlow}
	excessFlags    = []uint32{policy.Drop: 0, policy.ECN: ruleECN, policy.Pass: rulePass, policy.Delay: ruleDelay}
	orderFlags     = []uint32{policy.FIFO: 0, policy.SparseFirst: ruleSparse}
	failFlags      = []uint32{policy.Open: 0, policy.Closed: ruleFailClosed}
	shareFlags     = []uint32{
		policy.ShareNone: 0, policy.ShareHost: ruleHost << bpf.AbiLayoutSHARE_FLAGS, policy.ShareSubnet: ruleSubnet << bpf.AbiLayoutSHARE_FLAGS,
		policy.ShareFlow: ruleFlow << bpf.AbiLayoutSHARE_FLAGS, policy.ShareMember: ruleShareMember,
	}
)

// chosen is the choice whose flag is set, or else the one without a flag.
func chosen[C ~uint8](flags []uint32, set uint32) (choice C) {
	for c, flag := range flags {
		if flag == 0 || set&flag != 0 {
			choice = C(c)
		}
	}
	return choice
}

// encode writes a rule for a bucket that was never charged. pool is the id plus one of the pool that it is within, or 0.
func encode(to version, r policy.Rule, salt, pool uint32, its companionIDs) {
	t := bpf.AbiParams{
		Salt: salt, Within: pool, Limit: r.Capacity << model.UnitBits,
		Flags: algorithmFlags[r.Algorithm] | excessFlags[r.Excess] | eachFlags[r.Each.Kind] | orderFlags[r.Order] | failFlags[r.Fail] |
			shareFlags[r.Share.Kind],
	}
	d := bpf.AbiColdParams{
		RateBits: uint64(r.Rate), Members: uint32(r.Members), WeightLess1: uint8(r.Weight.Value() - 1), EachBits: r.Share.Bits,
		Overhead: r.Framing.Overhead, Mpu: r.Framing.MPU,
		PenaltyNs: uint64(r.Penalty.Duration),
	}
	for i := range companions {
		*companions[i].id(&d) = its[i]
	}
	for _, option := range [...]struct {
		flag uint32
		has  bool
	}{
		{ruleShadow, r.Shadow != policy.Shadow{}}, {ruleGuarantee, r.Guarantee != 0}, {ruleWithin, r.Within != ""}, {rulePool, r.Pool},
		{ruleLeased, r.HasLeases()}, {ruleFraming, r.Framing != policy.Framing{}}, {ruleLabel, hasTexts(r)},
		{ruleUnlimited, r.Rate == policy.Unlimited}, {rulePenalty, r.Penalty.Kind != policy.PenaltyNone},
	} {
		if option.has {
			t.Flags |= option.flag
		}
	}
	if r.Each.Kind == policy.EachSubnet {
		d.EachBits = r.Each.Bits
	}
	if r.Rate != policy.Unlimited {
		m := model.NewLimit(r)
		t.RateUnits, t.Limit, t.Burst, d.Penalty, t.Idle = m.RateUnits, m.Capacity, m.Burst, m.Penalty, m.Idle
		d.EcnAboveNs = uint64(r.ECNAbove)
		if kindOf(r) == policy.GCRA { // a second limit has no shares, and may have a capacity of 0
			p := m.ShareParams()
			d.FineShift, d.CoarseShift, d.Step = p.FineShift, p.CoarseShift, p.Step
		}
	}
	switch c := r.Colours; {
	case r.Algorithm.HasColours():
		t.Within = uint32(c.Green) | uint32(c.Yellow)<<8 | uint32(c.Red)<<16
		if c.Aware {
			t.Flags |= ruleAware
		}
	case kindOf(r) != policy.GCRA:
		second := secondParams(&d)
		second.Yellow, second.Red = c.In.Yellow, c.In.Red
	}
	*to.AbiParams, *to.AbiColdParams = t, d
}

// secondParams are the cold parameters of the second limit of a rule with colours.
func secondParams(c *bpf.AbiColdParams) *bpf.AbiSecondParams {
	return (*bpf.AbiSecondParams)(unsafe.Pointer(c))
}

// decode is the inverse of encode, but for what labels have. The shadow is that of the same phase.
func (ls *limits) decode(p netip.Prefix, r version, in phase) policy.Rule {
	out := policy.Rule{
		Prefix: p, Rate: policy.Rate(r.RateBits), Capacity: r.Limit >> model.UnitBits,
		Algorithm: chosen[policy.Algorithm](algorithmFlags, r.Flags), Excess: chosen[policy.Excess](excessFlags, r.Flags),
		Each:  policy.Each{Kind: chosen[policy.EachKind](eachFlags, r.Flags)},
		Order: chosen[policy.Order](orderFlags, r.Flags), Fail: chosen[policy.Fail](failFlags, r.Flags),
		Framing: policy.Framing{Overhead: r.Overhead, MPU: r.Mpu},
		Share:   policy.Share{Kind: chosen[policy.ShareKind](shareFlags, r.Flags)},
		Members: policy.Members(r.Members), Pool: r.Flags&rulePool != 0,
	}
	if out.Each.Kind == policy.EachSubnet {
		out.Each.Bits = r.EachBits
	} else {
		out.Share.Bits = r.EachBits
	}
	if r.Flags&ruleWithin != 0 {
		out.Within = policy.Within(ls.poolName(r.Within-1, in))
		if r.WeightLess1 > 0 {
			out.Weight = policy.Weight(r.WeightLess1) + 1
		}
	}
	if r.Flags&ruleDelay != 0 {
		out.ECNAbove = policy.ECNAbove(r.EcnAboveNs)
		if out.Algorithm == policy.GCRA {
			out.Capacity, out.Queue = r.Burst>>model.UnitBits, (r.Limit-r.Burst)>>model.UnitBits
		}
	}
	if r.Flags&rulePenalty != 0 {
		out.Penalty.Kind = policy.PenaltyFill
		if r.PenaltyNs > 0 {
			out.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(r.PenaltyNs)}
		}
	}
	if r.Flags&ruleShadow != 0 {
		out.Shadow = policy.NewShadow(ls.decode(p, ls.versionIn(r.Shadow, in), in))
	}
	if r.Flags&ruleGuarantee != 0 {
		out.Guarantee = policy.Guarantee(ls.versionIn(r.Second, in).RateBits)
	}
	if r.Flags&ruleColours == 0 || r.Flags&ruleUnlimited != 0 {
		return out
	}
	second, c := ls.versionIn(r.Second, in), &out.Colours
	c.Aware = r.Flags&ruleAware != 0
	c.Green, c.Yellow, c.Red = policy.Action(r.Within), policy.Action(r.Within>>8), policy.Action(r.Within>>16)
	from := secondParams(second.AbiColdParams)
	c.In = policy.ColourMap{Yellow: from.Yellow, Red: from.Red}
	rate, burst := policy.Rate(second.RateBits), second.Limit>>model.UnitBits
	switch out.Algorithm {
	case policy.SRTCM:
		c.EBS = burst - out.Capacity
	case policy.TRTCM:
		c.PIR, c.PBS = rate, burst
	case policy.RFC4115:
		c.EIR, c.EBS = rate, burst
	}
	return out
}
