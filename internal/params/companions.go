package params

import (
	"net/netip"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Companion is a limit that belongs to a rule and has an id of its own, but no prefix: packets find it by
// its rule.
type Companion struct {
	Flags uint32                                 // of rules that have one
	spent bool                                   // begins without room in a rule that exists: no edit gives room
	Limit func(policy.Rule) (policy.Rule, bool)  // of a rule
	ID    func(*bpf.AbiColdParams) *uint32       // in a version of the rule
	stays func(have, want policy.Rule) (is bool) // a limit keeps id, counters and buckets when it changes so
}

// The first of the other limits is among the Companions at this index.
const Chain = 2

// Companions are the shadow of a rule, its guarantee or, with colours, its second limit, and the first of its other limits.
var Companions = [...]Companion{
	{
		Flags: Shadow,
		Limit: policy.Rule.Proposed,
		ID:    func(c *bpf.AbiColdParams) *uint32 { return &c.Shadow },
		stays: func(have, want policy.Rule) bool { return have == want }, // others begin with new counters
	},
	{
		Flags: Guarantee | Colours,
		spent: true,
		Limit: func(r policy.Rule) (policy.Rule, bool) {
			if r.Algorithm.HasColours() {
				return r.Second()
			}
			return r.Guaranteed()
		},
		ID:    func(c *bpf.AbiColdParams) *uint32 { return &c.Second },
		stays: func(have, want policy.Rule) bool { return kindOf(have) == kindOf(want) },
	},
	{
		Flags: Also,
		Limit: policy.Rule.Chained,
		ID:    func(c *bpf.AbiColdParams) *uint32 { return &c.Also },
		stays: func(have, want policy.Rule) bool {
			return have.Unit == want.Unit &&
				(have.Unit != policy.InQuota || have.Also.Quota.Period == want.Also.Quota.Period && have.Also.Zone == want.Also.Zone)
		},
	},
}

// kindOf is the algorithm of the rule of whose colours a limit is the second one, or GCRA if it is not such a limit. With
// another algorithm, the level of the second bucket means something else. So that gets a new limit.
func kindOf(r policy.Rule) policy.Algorithm {
	switch c := r.Colours; {
	case r.Algorithm.HasColours() || c == policy.Colours{}:
		return policy.GCRA
	case c.PIR != 0:
		return policy.TRTCM
	case c.EIR != 0:
		return policy.RFC4115
	}
	return policy.SRTCM
}

// Of returns the id of a version's companion, if the version has one.
func (c *Companion) Of(v Version) (id uint32, ok bool) {
	return *c.ID(v.AbiColdParams), v.Present() && v.Flags&c.Flags != 0
}

// Both returns the limits of a rule before and after a change. One that is new has nothing before, or one without room. Other limits
// may come and go before one of them, which stays.
func (c *Companion) Both(have, want policy.Rule) (before, after policy.Rule, has, isNew bool) {
	before, had := c.Limit(have)
	after, has = c.Limit(want)
	for had && has && c == &Companions[Chain] && !c.stays(before, after) {
		before, had = c.Limit(before)
	}
	before.Prefix, after.Prefix = netip.Prefix{}, netip.Prefix{}
	if isNew = has && !(had && c.stays(before, after)); isNew {
		if before = (policy.Rule{}); c.spent && have != (policy.Rule{}) {
			before = after
			before.Capacity = 0
		}
	}
	return before, after, has, isNew
}

// NewCompanions counts the ids that a change gives to companions of a rule, and to theirs.
func NewCompanions(have, want policy.Rule) (ids uint32) {
	for i := range Companions {
		if i != Chain && want.Unit != policy.Bytes {
			continue // have is the rule
		}
		_, after, has, isNew := Companions[i].Both(have, want)
		if isNew {
			ids++
		}
		if has && i == Chain {
			ids += NewCompanions(have, after)
		}
	}
	return ids
}

// IDs are the ids of the companions of a rule.
type IDs [len(Companions)]uint32

// CompanionIDs are those of the companions of a version.
func (v Version) CompanionIDs() (ids IDs) {
	for i := range Companions {
		ids[i] = *Companions[i].ID(v.AbiColdParams)
	}
	return ids
}
