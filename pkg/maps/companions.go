package maps

import (
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// setCompanions sets up the companions, of the rule of or of one of these, that a change makes or alters, and returns the ids of
// all. A second limit that a revert may bring back has no room meanwhile.
func (s *Set) setCompanions(of *policy.Rule, have, want policy.Rule, ids params.IDs, at when) (_ params.IDs, err error) {
	for i := range params.Companions {
		c, none := &params.Companions[i], policy.Rule{}
		set := func(isNew bool, from, to policy.Rule, at when) {
			if err == nil {
				ids[i], err = s.write(placed{prefixes.Placed{ID: ids[i]}, isNew}, of, from, to, at)
			}
		}
		if spent, before, _, leaves := c.Both(want, have); leaves && spent != none && at == later {
			set(false, before, spent, at)
		}
		before, after, has, isNew := c.Both(have, want)
		if isNew && before != none {
			set(true, none, before, atOnce)
			isNew = false
		}
		if has && before != after {
			set(isNew, before, after, at)
		}
	}
	return ids, err
}

// freeUnused frees the companions, the share and the lease of the parameters that are not in force, if the others do not use them.
func (s *index) freeUnused(id uint32) {
	v, other := s.bothPhases(id)
	for i := range params.Companions {
		c := &params.Companions[i]
		used, has := c.Of(v)
		// Absent parameters have companions, too: they are a copy.
		if unused := *c.ID(other.AbiColdParams); other.Flags&c.Flags != 0 && !(has && used == unused) {
			s.freeWith(unused)
		}
	}
	if v.Flags&params.Shares == 0 || !v.Present() {
		s.freeShare(id)
	}
	s.freeLeases(id, leaseNumber(v))
}

// freeWith frees an id with those of its companions.
func (s *index) freeWith(id uint32) {
	v := s.version(id, s.rule(id).Sets)
	for i := range params.Companions {
		if its, has := params.Companions[i].Of(v); has {
			s.freeWith(its)
		}
	}
	s.free(id)
}

// companionsOf are the companions of a rule in all phases of a change, and theirs. One may appear twice.
func (rs *rules) companionsOf(id uint32) (ids []uint32) {
	for v := range rs.versions(id) {
		for i := range params.Companions {
			if v.Flags&params.Companions[i].Flags != 0 {
				its := *params.Companions[i].ID(v.AbiColdParams)
				ids = append(append(ids, its), rs.companionsOf(its)...)
			}
		}
	}
	return ids
}
