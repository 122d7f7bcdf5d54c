package maps

import (
	"net/netip"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A companion is a limit that belongs to a rule and has an id of its own, but no prefix: packets find it by
// its rule.
type companion struct {
	flag  uint32                                 // of rules that have one
	limit func(policy.Rule) (policy.Rule, bool)  // of a rule
	id    func(*bpf.AbiColdParams) *uint32       // in a version of the rule
	stays func(have, want policy.Rule) (is bool) // a limit keeps id, counters and buckets when it changes so
}

var companions = [...]companion{
	{
		flag:  ruleShadow,
		limit: policy.Rule.Proposed,
		id:    func(c *bpf.AbiColdParams) *uint32 { return &c.Shadow },
		stays: func(have, want policy.Rule) bool { return have == want }, // others begin with new counters
	},
	{
		flag:  ruleGuarantee,
		limit: policy.Rule.Guaranteed,
		id:    func(c *bpf.AbiColdParams) *uint32 { return &c.Guarantee },
		stays: func(policy.Rule, policy.Rule) bool { return true },
	},
}

// of returns the id of a version's companion, if the version has one.
func (c *companion) of(v version) (id uint32, ok bool) {
	return *c.id(v.AbiColdParams), present(v) && v.Flags&c.flag != 0
}

// both returns the limits of a rule before and after a change.
func (c *companion) both(have, want policy.Rule) (before, after policy.Rule, had, has bool) {
	before, had = c.limit(have)
	after, has = c.limit(want)
	before.Prefix, after.Prefix = netip.Prefix{}, netip.Prefix{}
	return before, after, had, has
}

// isNew reports whether a change gives a rule a companion with an id of its own.
func (c *companion) isNew(have, want policy.Rule) bool {
	before, after, had, has := c.both(have, want)
	return has && !(had && c.stays(before, after))
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
func (s *Set) setCompanions(have, want policy.Rule, ids companionIDs, at when) companionIDs {
	for i := range companions {
		c := &companions[i]
		before, after, had, has := c.both(have, want)
		switch {
		case c.isNew(have, want):
			ids[i] = s.allocate()
			s.writeNew(ids[i], after, companionIDs{}, at)
		case had && has && before != after:
			s.rewriteParams(ids[i], placed{id: ids[i]}, after, companionIDs{}, at)
		}
	}
	return ids
}

// freeUnused frees the companions, the share and the lease of the parameters that are not in force, if the others do not use them.
func (s *Store) freeUnused(id uint32) {
	v, other := s.bothPhases(id)
	for i := range companions {
		c := &companions[i]
		used, has := c.of(v)
		// Absent parameters have companions, too: they are a copy.
		if unused := *c.id(other.AbiColdParams); other.Flags&c.flag != 0 && !(has && used == unused) {
			s.free(unused)
		}
	}
	if v.Flags&ruleShares == 0 || !present(v) {
		s.freeShare(id)
	}
	if v.Flags&ruleLeased == 0 || !present(v) {
		s.freeLease(id)
	}
}
