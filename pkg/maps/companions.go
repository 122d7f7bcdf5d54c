package maps

import (
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// setCompanions sets up the companions of a rule that a change makes or alters, and returns the ids of all.
func (s *Set) setCompanions(have, want policy.Rule, ids params.IDs, at when) (_ params.IDs, err error) {
	for i := range params.Companions {
		before, after, has, isNew := params.Companions[i].Both(have, want)
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
