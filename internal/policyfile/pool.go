package policyfile

import (
	"cmp"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A pool is a pool of the file. One that is not valid has no rule.
type pool struct {
	at   uint32 // the offset of its key
	said places
	rule policy.Rule
}

// Pools returns the table of the pools, which is the same for all devices.
func (f *File) Pools() policy.Table {
	var t policy.Table
	for _, p := range f.pools {
		t.Rules = append(t.Rules, p.rule)
	}
	policy.SortRules(t.Rules)
	return t
}

// Above returns the pools of the file that rules of tables are within, and those above these.
func (f *File) Above(tables ...policy.Table) []policy.Rule {
	var rules []policy.Rule
	for _, t := range tables {
		rules = append(rules, t.Rules...)
	}
	pools := policy.Above(rules, func(name policy.Within) (policy.Rule, bool) {
		if p := f.pools[string(name)]; p != nil {
			return p.rule, true
		}
		return policy.Rule{}, false
	})
	policy.SortRules(pools)
	return pools
}

func (r *reader) readPools(n *node, defaults parcel) {
	seen := map[string]*node{}
	entries := r.entries(n, "pools", "uplink: {rate: 1gbit, share: member}")
	for i := range entries {
		key := &entries[i].key
		if r.again(seen, key, key.text, "pool "+shorten(key.text), "; remove one of them") {
			continue
		}
		if p := r.pool(&entries[i], key.text, "", defaults); p != nil {
			*r.pools[key.text] = *p
		}
	}
}

// notOfPools are the defaults that do not apply to pools, beside those that pools cannot have: which rates there are,
// and who has them, is different at each level.
var notOfPools = []string{"rate", "within", "guarantee", "weight", "shadow"}

// pool reads a pool, which is within another one unless it says otherwise. It returns nil if the pool is not valid.
func (r *reader) pool(e *entry, name string, within policy.Within, defaults parcel) *pool {
	said := r.limit(&e.value, "a pool", poolWithPlan)
	if said.bad || defaults.bad {
		return nil
	}
	usual := defaults.Draft
	for _, key := range notOfPools {
		usual.Drop(policy.FindOption(key))
	}
	if usual.Within = within; within != "" {
		usual.Mark(policy.FindOption("within"))
	}
	p := &pool{at: e.key.start, said: said.places}
	var err error
	if p.rule, err = said.draft(usual).Pool(name); err != nil {
		r.blame(err, e.key.start, said, defaults)
		return nil
	}
	return p
}

// checkPools reports what is wrong with valid pools and all that is within them. Devices that match patterns are
// not known yet: see Tables.
func (r *reader) checkPools() {
	for _, p := range r.pools {
		if !p.rule.Pool {
			return
		}
	}
	pools := r.file.Pools()
	for _, s := range r.file.exactly {
		for _, p := range s.allPools() {
			pools.Rules = append(pools.Rules, p.rule)
		}
	}
	tree := policy.NewTree([]policy.Table{pools})
	for i := range r.file.devices {
		if r.file.devices[i].pattern {
			continue
		}
		for _, t := range r.file.devices[i].tables {
			for j := range t.rules {
				one := t.rules[j].on(Device{})
				tree.Add(nil, &one)
			}
		}
	}
	r.problems = append(r.problems, r.file.poolProblems(tree.Problems()...)...)
}

func (f *File) poolProblems(all ...policy.PoolError) (problems []problem) {
	for _, p := range all {
		option, _, _ := strings.Cut(p.Message, " ")
		pool := f.poolOf(p.Rule)
		at := pool.at
		if own, found := pool.said.of(option); found {
			at = own
		}
		problems = append(problems, problem{at, p.Error()})
	}
	return problems
}

func comparePools(a, b policy.Rule) int { return cmp.Compare(a.Label.Name, b.Label.Name) }
