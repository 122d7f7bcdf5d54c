package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoPool means that a rule or pool is within a pool that does not exist.
var ErrNoPool = errors.New("there is no such pool")

// poolView is the view of the pools. No hook has it, so no packet looks for their prefixes.
const poolView = 1

// Pools is the set of the pools: each has policy.PoolKey of its name as its prefix.
func (s *Store) Pools() *Set { return s.View(poolView) }

// IsPools reports whether the set is that of the pools.
func (v view) IsPools() bool { return v.number == poolView }

// Unused are the pools that may go and that nothing is within in any phase of a change, or only others of these. It reads the texts
// of unused pools alone.
func (s *Store) Unused(may func(policy.Rule) bool) (unused []netip.Prefix) {
	users, pools := make([]int, s.change.Ids), []prefixes.Placed{}
	count := func(id uint32, by int) {
		before, after := s.bothPhases(id)
		for _, v := range []params.Version{before, after} {
			if v.Present() && v.Flags&params.Within != 0 {
				users[v.Within-1] += by
			}
			if !s.Changes(id) {
				break
			}
		}
	}
	for f := range s.prefixes.All(nil) {
		if count(f.ID, 1); f.View == poolView {
			pools = append(pools, f)
		}
	}
	for found := true; found; {
		found = false
		pools = slices.DeleteFunc(pools, func(f prefixes.Placed) bool {
			if users[f.ID] > 0 {
				return false
			}
			p := s.prefixes.Prefix(poolView, f.Key)
			if e, exists := s.Pools().Find(p); exists && may(e.Rule) {
				unused, found = append(unused, p), true
				count(f.ID, -1)
			}
			return true
		})
	}
	return unused
}

// poolOf is the id plus one of the pool that a rule is within, in any phase of a change; 0 if it is in none.
func (s *index) poolOf(r policy.Rule) (id uint32, err error) {
	if r.Within == "" { // most rules are in none, and the key of a name takes a hash
		return 0, nil
	}
	id, found := s.prefixes.Find(poolView, policy.PoolKey(string(r.Within)))
	if !found {
		return 0, fmt.Errorf("%w: %q", ErrNoPool, r.Within)
	}
	return id + 1, nil
}

// poolName is the name of a pool, which its label holds.
func (ls *limits) poolName(id uint32, in phase) string {
	if name, known := ls.names[id]; known {
		return name
	}
	v := ls.versionIn(id, in)
	if v.Flags&params.Label == 0 {
		v = ls.version(id, v.Index^1) // it does not exist in this phase
	}
	name := ls.labels.Read(id, v.Index).Label.Name
	if ls.names != nil {
		ls.names[id] = name
	}
	return name
}
