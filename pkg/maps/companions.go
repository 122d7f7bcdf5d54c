package maps

import (
	"slices"

	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// setCompanions sets up the companions, of the rule of or of one of these, that a change makes or alters, and returns the ids of
// all. A second limit that a revert may bring back has no room meanwhile. What comes behind a new one of the other limits may be one
// of those that have has.
func (s *Set) setCompanions(of *policy.Rule, have, want policy.Rule, ids params.IDs, at when) (_ params.IDs, err error) {
	had := ids[params.Chain]
	for i := range params.Companions {
		c, none := &params.Companions[i], policy.Rule{}
		if i != params.Chain && want.Unit != policy.Bytes {
			continue // have is the rule
		}
		set := func(isNew bool, from, to policy.Rule, at when) {
			if err == nil {
				ids[i], err = s.write(placed{prefixes.Placed{ID: ids[i]}, isNew}, of, from, to, had, at)
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
		switch {
		case i != params.Chain || !has:
		case isNew:
			before = have
		default:
			ids[i] = s.Store.sameOf(had, have, after)
		}
		if has && before != after {
			set(isNew, before, after, at)
		}
	}
	return ids, err
}

// sameOf is the one of the other limits of have, the first of which has the id, that counts the same as r.
func (s *Store) sameOf(id uint32, have, r policy.Rule) uint32 {
	for is, has := have.Chained(); has && is.Unit != r.Unit; is, has = is.Chained() {
		id = s.current(id).Also
	}
	return id
}

// freeUnused frees the companions, the share and the lease of the parameters that are not in force, if the others do not use them.
func (s *index) freeUnused(id uint32) {
	v, other := s.bothPhases(id)
	var used []uint32
	if v.Present() {
		used = s.companionsIn(v)
	}
	for _, its := range s.companionsIn(other) { // absent parameters have companions, too: they are a copy
		if !slices.Contains(used, its) {
			s.free(its)
		}
	}
	if v.Flags&params.Shares == 0 || !v.Present() {
		s.freeShare(id)
	}
	s.freeLeases(id, leaseNumber(v))
}

// freeWith frees an id with those of its companions.
func (s *index) freeWith(id uint32) {
	if v := s.version(id, s.rule(id).Sets); v.Present() {
		for _, its := range s.companionsIn(v) {
			s.free(its)
		}
	}
	s.free(id)
}

// companionsOf are the companions of a rule in all phases of a change, and theirs. One may appear twice.
func (rs *rules) companionsOf(id uint32) (ids []uint32) {
	for v := range rs.versions(id) {
		ids = append(ids, rs.companionsIn(v)...)
	}
	return ids
}

// companionsIn are the companions of a version, and theirs in all phases.
func (rs *rules) companionsIn(v params.Version) (ids []uint32) {
	for i := range params.Companions {
		if v.Flags&params.Companions[i].Flags != 0 {
			its := *params.Companions[i].ID(v.AbiColdParams)
			ids = append(append(ids, its), rs.companionsOf(its)...)
		}
	}
	return ids
}
