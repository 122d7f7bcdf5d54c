package maps

import (
	"net/netip"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A companion is a limit that belongs to a rule and has an id of its own, but no prefix: packets find it by
// its rule.
type companion struct {
	flags uint32                                 // of rules that have one
	limit func(policy.Rule) (policy.Rule, bool)  // of a rule
	id    func(*bpf.AbiColdParams) *uint32       // in a version of the rule
	stays func(have, want policy.Rule) (is bool) // a limit keeps id, counters and buckets when it changes so
}

var companions = [...]companion{
	{
		flags: ruleShadow,
		limit: policy.Rule.Proposed,
		id:    func(c *bpf.AbiColdParams) *uint32 { return &c.Shadow },
		stays: func(have, want policy.Rule) bool { return have == want }, // others begin with new counters
	},
	{
		flags: ruleGuarantee | ruleColours,
		limit: func(r policy.Rule) (policy.Rule, bool) {
			if r.Algorithm.HasColours() {
				return r.Second()
			}
			return r.Guaranteed()
		},
		id:    func(c *bpf.AbiColdParams) *uint32 { return &c.Second },
		stays: func(have, want policy.Rule) bool { return kindOf(have) == kindOf(want) },
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

// of returns the id of a version's companion, if the version has one.
func (c *companion) of(v version) (id uint32, ok bool) {
	return *c.id(v.AbiColdParams), present(v) && v.Flags&c.flags != 0
}

// both returns the limits of a rule before and after a change. One that is new has nothing before.
func (c *companion) both(have, want policy.Rule) (before, after policy.Rule, has, isNew bool) {
	before, had := c.limit(have)
	after, has = c.limit(want)
	before.Prefix, after.Prefix = netip.Prefix{}, netip.Prefix{}
	if isNew = has && !(had && c.stays(before, after)); isNew {
		before = policy.Rule{}
	}
	return before, after, has, isNew
}

// newCompanions counts the ids that a change gives to companions of a rule, and to theirs.
func newCompanions(have, want policy.Rule) (ids uint32) {
	for i := range companions {
		if _, after, _, isNew := companions[i].both(have, want); isNew {
			ids += 1 + newCompanions(policy.Rule{}, after)
		}
	}
	return ids
}

// companionIDs are the ids of the companions of a rule.
type companionIDs [len(companions)]uint32

func idsOf(v version) (ids companionIDs) {
	for i := range companions {
		ids[i] = *companions[i].id(v.AbiColdParams)
	}
	return ids
}

// setCompanions sets up the companions of a rule that a change makes or alters, and returns the ids of all.
func (s *Set) setCompanions(have, want policy.Rule, ids companionIDs, at when) (_ companionIDs, err error) {
	for i := range companions {
		before, after, has, isNew := companions[i].both(have, want)
		if !has || before == after {
			continue
		}
		if ids[i], err = s.write(placed{prefixes.Placed{ID: ids[i]}, isNew}, before, after, at); err != nil {
			return ids, err
		}
	}
	return ids, nil
}

// freeUnused frees the companions, the share and the lease of the parameters that are not in force, if the others do not use them.
func (s *index) freeUnused(id uint32) {
	v, other := s.bothPhases(id)
	for i := range companions {
		c := &companions[i]
		used, has := c.of(v)
		// Absent parameters have companions, too: they are a copy.
		if unused := *c.id(other.AbiColdParams); other.Flags&c.flags != 0 && !(has && used == unused) {
			s.freeWith(unused)
		}
	}
	if v.Flags&ruleShares == 0 || !present(v) {
		s.freeShare(id)
	}
	s.freeLeases(id, leaseNumber(v))
}

// freeWith frees an id with those of its companions.
func (s *index) freeWith(id uint32) {
	v := s.version(id, s.rule(id).Sets)
	for i := range companions {
		if its, has := companions[i].of(v); has {
			s.freeWith(its)
		}
	}
	s.free(id)
}

// companionsOf are the companions of a rule in all phases of a change, and theirs. One may appear twice.
func (rs *rules) companionsOf(id uint32) (ids []uint32) {
	for v := range rs.versions(id) {
		for i := range companions {
			if v.Flags&companions[i].flags != 0 {
				its := *companions[i].id(v.AbiColdParams)
				ids = append(append(ids, its), rs.companionsOf(its)...)
			}
		}
	}
	return ids
}
