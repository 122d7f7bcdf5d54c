package policyfile

import (
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// AtPool is a problem of a pool of the file, at its place there.
func (f *File) AtPool(p policy.PoolError) Errors { return f.errors(f.poolProblems(p)) }

// HasGuarantees reports whether anything in the file has a guarantee, or one that waits.
func (f *File) HasGuarantees() bool {
	has := func(r *policy.Rule) bool { return r.Guarantee != 0 || r.Label.Waits != 0 }
	guaranteed := func(p *pool) bool { return has(&p.rule) }
	for _, p := range f.pools {
		if guaranteed(p) {
			return true
		}
	}
	return slices.ContainsFunc(f.devices, func(s section) bool {
		return slices.ContainsFunc(s.allPools(), guaranteed) || slices.ContainsFunc(s.tables, func(t table) bool {
			return slices.ContainsFunc(t.rules, func(r rule) bool { return has(r.rule) })
		})
	})
}
