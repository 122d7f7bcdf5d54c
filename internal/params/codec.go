package params

import (
	"hash/crc32"
	"net/netip"
	"time"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Flags of abi.h.
const (
	Leaky       = uint32(bpf.AbiRuleFlagRULE_LEAKY)
	Unlimited   = uint32(bpf.AbiRuleFlagRULE_UNLIMITED)
	Framing     = uint32(bpf.AbiRuleFlagRULE_FRAMING)
	Penalty     = uint32(bpf.AbiRuleFlagRULE_PENALTY)
	FailClosed  = uint32(bpf.AbiRuleFlagRULE_FAIL_CLOSED)
	ECN         = uint32(bpf.AbiRuleFlagRULE_ECN)
	Pass        = uint32(bpf.AbiRuleFlagRULE_PASS)
	Host        = uint32(bpf.AbiRuleFlagRULE_HOST)
	Subnet      = uint32(bpf.AbiRuleFlagRULE_SUBNET)
	Flow        = uint32(bpf.AbiRuleFlagRULE_FLOW)
	Absent      = uint32(bpf.AbiRuleFlagRULE_ABSENT)
	Shadow      = uint32(bpf.AbiRuleFlagRULE_SHADOW)
	Delay       = uint32(bpf.AbiRuleFlagRULE_DELAY)
	Sparse      = uint32(bpf.AbiRuleFlagRULE_SPARSE)
	Within      = uint32(bpf.AbiRuleFlagRULE_WITHIN)
	Guarantee   = uint32(bpf.AbiRuleFlagRULE_GUARANTEE)
	Pool        = uint32(bpf.AbiRuleFlagRULE_POOL)
	NAT         = uint32(bpf.AbiRuleFlagRULE_NAT)
	Leased      = uint32(bpf.AbiRuleFlagRULE_LEASED)
	SRTCM       = uint32(bpf.AbiRuleFlagRULE_SRTCM)
	TRTCM       = uint32(bpf.AbiRuleFlagRULE_TRTCM)
	RFC4115     = uint32(bpf.AbiRuleFlagRULE_RFC4115)
	Aware       = uint32(bpf.AbiRuleFlagRULE_AWARE)
	Edited      = uint32(bpf.AbiRuleFlagRULE_EDITED)
	Released    = uint32(bpf.AbiRuleFlagRULE_RELEASED)
	ShareMember = uint32(bpf.AbiRuleFlagRULE_SHARE_MEMBER)
	Also        = uint32(bpf.AbiRuleFlagRULE_ALSO)
	Label       = uint32(bpf.AbiRuleFlagRULE_LABEL)

	Each    = Host | Subnet | Flow
	Colours = SRTCM | TRTCM | RFC4115
	Shares  = Each<<bpf.AbiLayoutSHARE_FLAGS | ShareMember
)

// The flag for each choice; one choice of each kind has none.
var (
	algorithmFlags = []uint32{policy.GCRA: 0, policy.Leaky: Leaky, policy.SRTCM: SRTCM, policy.TRTCM: TRTCM, policy.RFC4115: RFC4115}
	eachFlags      = []uint32{policy.EachAll: 0, policy.EachHost: Host, policy.EachSubnet: Subnet, policy.EachFlow: Flow}
	excessFlags    = []uint32{policy.Drop: 0, policy.ECN: ECN, policy.Pass: Pass, policy.Delay: Delay}
	orderFlags     = []uint32{policy.FIFO: 0, policy.SparseFirst: Sparse}
	failFlags      = []uint32{policy.Open: 0, policy.Closed: FailClosed}
	units          = []uint32{
		policy.Bytes: uint32(bpf.AbiUnitCOUNTS_BYTES), policy.Packets: uint32(bpf.AbiUnitCOUNTS_PACKETS),
		policy.Flows: uint32(bpf.AbiUnitCOUNTS_FLOWS), policy.InQuota: uint32(bpf.AbiUnitCOUNTS_QUOTA),
		policy.AfterQuota: uint32(bpf.AbiUnitCOUNTS_BYTES),
	}
	shareFlags = []uint32{
		policy.ShareNone: 0, policy.ShareHost: Host << bpf.AbiLayoutSHARE_FLAGS, policy.ShareSubnet: Subnet << bpf.AbiLayoutSHARE_FLAGS,
		policy.ShareFlow: Flow << bpf.AbiLayoutSHARE_FLAGS, policy.ShareMember: ShareMember,
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

// Encode writes a rule for a bucket that was never charged. pool is the id of the pool that it is within plus one, or 0, and its are
// the ids of its companions.
func (v Version) Encode(r policy.Rule, salt, pool uint32, its IDs) {
	t := bpf.AbiParams{
		Salt: salt, Within: pool, Limit: r.Capacity << model.BitsOf(r.Unit),
		Flags: algorithmFlags[r.Algorithm] | excessFlags[r.Excess] | eachFlags[r.Each.Kind] | orderFlags[r.Order] | failFlags[r.Fail] |
			shareFlags[r.Share.Kind],
	}
	d := bpf.AbiColdParams{
		RateBits: uint64(r.Rate), Members: uint32(r.Members), WeightLess1: uint8(r.Weight.Value() - 1), EachBits: r.Share.Bits,
		Overhead: r.Framing.Overhead, Mpu: r.Framing.MPU,
		LongNs: uint64(r.Penalty.Duration),
	}
	for i := range Companions {
		*Companions[i].ID(&d) = its[i]
	}
	_, chained := r.Chained()
	for _, option := range [...]struct {
		flag uint32
		has  bool
	}{
		{Shadow, r.Shadow != policy.Shadow{}}, {Guarantee, r.Guarantee != 0}, {Within, r.Within != ""}, {Pool, r.Pool}, {NAT, r.NAT},
		{Leased, r.HasLeases()}, {Also, chained}, {Framing, r.Framing != policy.Framing{}}, {Label, HasTexts(r)},
		{Unlimited, r.Rate == policy.Unlimited}, {Penalty, r.Penalty.Kind != policy.PenaltyNone},
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
		d.LongNs = max(d.LongNs, uint64(r.ECNAbove))
		if kindOf(r) == policy.GCRA && r.Unit == policy.Bytes { // a second limit has no shares, and may have a capacity of 0
			p := m.ShareParams()
			d.FineShift, d.CoarseShift, d.Step = p.FineShift, p.CoarseShift, p.Step
		}
	}
	switch c := r.Colours; {
	case r.Unit != policy.Bytes:
		t.Within = units[r.Unit]
		if r.Unit == policy.InQuota {
			d.Members = crc32.ChecksumIEEE([]byte(r.Cluster.Name)) // 0 without one
		}
	case r.Algorithm.HasColours():
		t.Within = uint32(c.Green-1) | uint32(c.Yellow-1)<<8 | uint32(c.Red-1)<<16
		if c.Aware {
			t.Flags |= Aware
		}
	case kindOf(r) != policy.GCRA:
		second := secondParams(&d)
		second.Yellow, second.Red = c.In.Yellow, c.In.Red
	}
	*v.AbiParams, *v.AbiColdParams = t, d
}

// secondParams are the cold parameters of the second limit of a rule with colours.
func secondParams(c *bpf.AbiColdParams) *bpf.AbiSecondParams {
	return (*bpf.AbiSecondParams)(unsafe.Pointer(c))
}

// Decode is the inverse of Encode, but for what labels have. other returns other versions of the same phase by their id, and
// poolName the names of pools.
func (r Version) Decode(p netip.Prefix, other func(id uint32) Version, poolName func(id uint32) string) policy.Rule {
	out := policy.Rule{
		Prefix: p, Rate: policy.Rate(r.RateBits), Capacity: r.Limit >> model.UnitBits,
		Algorithm: chosen[policy.Algorithm](algorithmFlags, r.Flags), Excess: chosen[policy.Excess](excessFlags, r.Flags),
		Each:  policy.Each{Kind: chosen[policy.EachKind](eachFlags, r.Flags)},
		Order: chosen[policy.Order](orderFlags, r.Flags), Fail: chosen[policy.Fail](failFlags, r.Flags),
		Framing: policy.Framing{Overhead: r.Overhead, MPU: r.Mpu},
		Share:   policy.Share{Kind: chosen[policy.ShareKind](shareFlags, r.Flags)},
		Members: policy.Members(r.Members), Pool: r.Flags&Pool != 0, NAT: r.Flags&NAT != 0,
	}
	if out.Each.Kind == policy.EachSubnet {
		out.Each.Bits = r.EachBits
	} else {
		out.Share.Bits = r.EachBits
	}
	if r.Flags&Within != 0 {
		out.Within = policy.Within(poolName(r.AbiParams.Within - 1))
		if r.WeightLess1 > 0 {
			out.Weight = policy.Weight(r.WeightLess1) + 1
		}
	}
	if r.Flags&Delay != 0 {
		out.ECNAbove = policy.ECNAbove(r.LongNs)
		if out.Algorithm == policy.GCRA {
			out.Capacity, out.Queue = r.Burst>>model.UnitBits, (r.Limit-r.Burst)>>model.UnitBits
		}
	}
	if r.Flags&Penalty != 0 {
		out.Penalty.Kind = policy.PenaltyFill
		if r.LongNs > 0 {
			out.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(r.LongNs)}
		}
	}
	if r.Flags&Shadow != 0 {
		out.Shadow = policy.NewShadow(other(r.AbiColdParams.Shadow).Decode(p, other, poolName))
	}
	if r.Flags&Guarantee != 0 {
		out.Guarantee = policy.Guarantee(other(r.Second).RateBits)
	}
	if r.Flags&Colours == 0 || r.Flags&Unlimited != 0 {
		return out
	}
	second, c := other(r.Second), &out.Colours
	c.Aware = r.Flags&Aware != 0
	c.Green, c.Yellow, c.Red = policy.Action(r.Within)+1, policy.Action(r.Within>>8)+1, policy.Action(r.Within>>16)+1
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
