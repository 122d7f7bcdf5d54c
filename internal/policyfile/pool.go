package policyfile

import (
	"fmt"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A pool is a pool of the file. One that is not valid has no rule.
type pool struct {
	at   uint32 // the offset of its key
	rule policy.Rule
}

// Pools returns the table of the pools, which is the same for all devices.
func (f *File) Pools() policy.Table {
	t := policy.Table{Rules: make([]policy.Rule, 0, len(f.pools))}
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
	seen, known := map[string]*node{}, map[meaning]*made{}
	entries := r.entries(n, "pools", "uplink: {rate: 1gbit, share: member}")
	for i := range entries {
		key := &entries[i].key
		if r.again(seen, key, key.text, "pool "+shorten(key.text), "; remove one of them") {
			continue
		}
		if p := r.pool(&entries[i], key.text, "", defaults, known); p != nil {
			*r.pools[key.text] = *p
		}
	}
}

// notOfPools are the defaults that do not apply to pools, beside those that pools cannot have: which rates there are,
// and who has them, is different at each level.
var notOfPools = []string{"rate", "within", "guarantee", "weight", "shadow"}

// pool reads a pool, which is within another one unless it says otherwise. It returns nil if the pool is not valid. known are
// pools with the same defaults.
func (r *reader) pool(e *entry, name string, within policy.Within, defaults parcel, known map[meaning]*made) *pool {
	p := &pool{at: e.key.start}
	m, ok := r.meaningOf(&e.value)
	ok = ok && m.own&ownName == 0 && policy.CheckPoolName(name) == nil
	if like := known[meaning{text: string(r.common), own: m.own}]; ok && like != nil {
		if like = r.withOwn(like, m.own, &e.value); like == nil {
			return nil
		}
		if string(like.within) != name {
			p.rule = *like.rule
			p.rule.Prefix, p.rule.Label.Name, p.rule.Label.Note, p.rule.Within = policy.PoolKey(name), name, like.note, like.within
			return p
		}
	}
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
	var err error
	if p.rule, err = said.draft(usual).Pool(name); err != nil {
		r.blame(err, e.key.start, said, defaults)
		return nil
	}
	r.know(known, m, ok && known != nil, madeOf(&p.rule))
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
	tables, drawn := []policy.Table{pools}, map[policy.Within]bool{}
	allRead := len(r.problems) == 0
	for _, p := range r.pools {
		drawn[p.rule.Within] = true
	}
	for i := range r.file.devices {
		s := &r.file.devices[i]
		for _, p := range s.allPools() {
			drawn[p.rule.Within] = true
		}
		for _, t := range s.tables {
			for _, h := range t.hosts {
				drawn[h.rule.Within] = true
			}
			of := policy.Table{Device: s.device(), Direction: t.direction}
			for j := range t.rules {
				rule := &t.rules[j]
				if drawn[rule.within] = true; rule.rule.Guarantee != 0 && !s.pattern {
					of.Rules = append(of.Rules, rule.on(Device{}))
				}
			}
			tables = append(tables, of)
		}
		for _, p := range s.own {
			if allRead && !drawn[policy.Within(p.rule.Label.Name)] {
				r.report(p.at, p.limitsNothing())
			}
		}
	}
	r.problems = append(r.problems, r.file.poolProblems(policy.NewTree(tables).Problems()...)...)
	for name, p := range r.pools {
		if file, _ := r.inPart(r.line(p.at)); len(r.files) > 0 && file == "" && !drawn[policy.Within(name)] {
			r.warned = append(r.warned, problem{p.at, fmt.Sprintf("nothing is within pool %s, also in the files that are included; correct the name, or remove it", shorten(name))})
		}
	}
}

// limitsNothing is the error for a pool of a device or direction that no rule draws from.
func (p *pool) limitsNothing() string {
	add := "any: {} to " + p.rule.Label.Owner.Direction.String()
	if p.rule.Label.Owner.Whole {
		add = "egress: {any: {}} or ingress: {any: {}} to the device"
	}
	return "no rule is within this pool, so it limits nothing; add " + add + ", or remove the pool"
}

func (f *File) poolProblems(all ...policy.PoolError) (problems []problem) {
	for _, p := range all {
		problems = append(problems, problem{f.placeOf(p.Member), p.Error()})
	}
	return problems
}

// placeOf returns the offset of the key that makes a rule or pool.
func (f *File) placeOf(m policy.Member) uint32 {
	if p := f.pools[m.Rule.Label.Name]; p != nil && m.Table == nil {
		return p.at
	}
	device := m.Rule.Label.Owner.Device
	if m.Table != nil {
		device = m.Table.Device
	}
	s, _ := f.section(device)
	for _, t := range s.tables {
		for i := range t.rules {
			if m.Table != nil && t.direction == m.Table.Direction && t.rules[i].prefix == m.Rule.Prefix {
				return t.rules[i].at
			}
		}
	}
	for _, p := range s.allPools() {
		if p.on(device) == m.Rule.Label.Name {
			return p.at
		}
	}
	return s.at
}
