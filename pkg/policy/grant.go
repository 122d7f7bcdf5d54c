package policy

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
)

// A Claim is the guarantees of a device that waited for room, which it gets all or none; or that of a pool without a device.
type Claim struct {
	Who     string
	Members []Member
	NoRoom  *PoolError // nil if they are given
}

// Claimant is who claims the guarantee of a rule or pool of the table: a device, or the pool.
func (t Table) Claimant(r *Rule) string {
	if device := cmp.Or(t.Device, r.Label.Owner.Device); device != "" {
		return device
	}
	return "pool " + strconv.Quote(r.Label.Name)
}

// Grant gives guarantees that wait as far as there is room beside those that are given, to claimants in the order of turn.
func (t *Tree) Grant(turn func(who string) int) []*Claim {
	byName := map[string]*Claim{}
	add := func(m Member) {
		if m.Rule.Label.Waits == 0 {
			return
		}
		var t Table
		if m.Table != nil {
			t = *m.Table
		}
		who := t.Claimant(m.Rule)
		if byName[who] == nil {
			byName[who] = &Claim{Who: who}
		}
		byName[who].Members = append(byName[who].Members, m)
	}
	for _, n := range t.Nodes {
		add(Member{Rule: n.Pool})
		for _, m := range n.Rules {
			add(m)
		}
	}
	claims := slices.SortedFunc(maps.Values(byName), func(a, b *Claim) int {
		return cmp.Or(cmp.Compare(turn(a.Who), turn(b.Who)), cmp.Compare(a.Who, b.Who))
	})
	lacking := map[*Node]Rate{}
	for _, c := range claims {
		for n, rate := range t.grant(c) {
			lacking[n] = min(lacking[n]+rate, mostPromised)
		}
	}
	for n, rate := range lacking { // errors tell what all need together
		n.Members, lacking[n] = min(n.Members+rate, mostPromised), n.Members
	}
	for _, c := range claims {
		if c.NoRoom != nil {
			c.NoRoom = t.byName[Within(c.NoRoom.Rule.Label.Name)].noRoom()
		}
	}
	for n, before := range lacking {
		n.Members = before
	}
	return claims
}

// grant gives all guarantees of a claim, or if a pool has no room takes them back, and returns what they add up to in each pool.
func (t *Tree) grant(c *Claim) (lacking map[*Node]Rate) {
	for _, m := range c.Members {
		m.Rule.Guarantee, m.Rule.Label.Waits = m.Rule.Label.Waits, 0
	}
	more := map[*Node]Rate{}
	for _, m := range c.Members {
		promised := m.Rule.promised()
		if m.Table == nil { // what is within the pool was promised by the pools above
			pool := t.byName[Within(m.Rule.Label.Name)]
			more[pool] += 0
			promised -= min(promised, pool.Members)
		}
		for keeper := range t.byName[m.Rule.Within].keepers {
			more[keeper] = min(more[keeper]+promised, mostPromised)
		}
	}
	for n, rate := range more {
		n.Members += rate
		if p := n.noRoom(); p != nil && (c.NoRoom == nil || p.Rule.Label.Name < c.NoRoom.Rule.Label.Name) {
			c.NoRoom = p
		}
	}
	if c.NoRoom == nil {
		return nil
	}
	for n, rate := range more {
		n.Members -= rate
	}
	for _, m := range c.Members {
		*m.Rule = m.Rule.WithoutGuarantee()
	}
	return more
}

// WithoutGuarantees returns the tables with WithoutGuarantee of each rule.
func WithoutGuarantees(tables []Table) []Table {
	tables = slices.Clone(tables)
	for i, t := range tables {
		for j, r := range t.Rules {
			if r.Guarantee != 0 {
				if &tables[i].Rules[0] == &t.Rules[0] {
					tables[i].Rules = slices.Clone(t.Rules)
				}
				tables[i].Rules[j] = r.WithoutGuarantee()
			}
		}
	}
	return tables
}

// WithoutGuarantee returns the rule or pool with its guarantee, if it has one, waiting for room in the pool above.
func (r Rule) WithoutGuarantee() Rule {
	if r.Guarantee != 0 {
		r.Label.Waits, r.Guarantee = r.Guarantee, 0
	}
	return r
}
