package policyfile

import (
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A side is one direction of a device.
type side struct {
	device    string
	direction policy.Direction
}

// A liveHost is what is in force for a MAC address on a side.
type liveHost struct {
	mac          policy.MAC
	pools, rules []*policy.Rule
	odd          bool // an entry by the MAC address would not make all of it
}

// foldHosts moves what is in force for hosts out of pools and of the tables of devices: the pools and rules that
// an entry by a MAC address would make. A direction that has only hosts without addresses gets a table without rules.
func foldHosts(pools []policy.Rule, of map[string][]policy.Table) (rest []policy.Rule, hosts map[side][]*liveHost) {
	type key struct {
		side
		mac policy.MAC
	}
	groups, byPool := map[key]*liveHost{}, map[policy.Within]*liveHost{}
	group := func(k key) *liveHost {
		if k.mac != (policy.MAC{}) && groups[k] == nil {
			groups[k] = &liveHost{mac: k.mac}
		}
		return groups[k]
	}
	for i := range pools {
		p, owner := &pools[i], pools[i].Label.Owner
		if g := group(key{side{owner.Device, owner.Direction}, p.Label.Host}); g != nil {
			g.odd = g.odd || owner.Host == "" || p.Label.Name != owner.String() || p.Label.Waits != 0 || len(g.pools) > 0
			for _, t := range of[owner.Device] {
				g.odd = g.odd || t.Direction == owner.Direction && t.Match != t.Direction.FarSide()
			}
			g.pools = append(g.pools, p)
			byPool[policy.Within(p.Label.Name)] = g
		}
	}
	mix := func(g *liveHost, within policy.Within) {
		if pooled := byPool[within]; pooled != nil && pooled != g {
			pooled.odd = true
		}
	}
	for i := range pools {
		mix(nil, pools[i].Within)
	}
	for device, tables := range of {
		for _, t := range tables {
			for i := range t.Rules {
				r := &t.Rules[i]
				g := group(key{side{device, t.Direction}, r.Label.Host})
				mix(g, r.Within)
				if g != nil {
					g.rules = append(g.rules, r)
					g.odd = g.odd || t.Match != t.Direction.FarSide() || !r.Prefix.IsSingleIP() || withoutNetwork(*r) != withoutNetwork(*g.rules[0]) || !isOfHost(r, g.pools)
				}
			}
		}
	}
	hosts = map[side][]*liveHost{}
	folded := map[*policy.Rule]bool{}
	for k, g := range groups {
		if g.odd {
			continue
		}
		for _, r := range slices.Concat(g.pools, g.rules) {
			folded[r] = true
		}
		hosts[k.side] = append(hosts[k.side], g)
	}
	left := func(rules []policy.Rule) []policy.Rule {
		left := make([]policy.Rule, 0, len(rules))
		for i := range rules {
			if !folded[&rules[i]] {
				left = append(left, rules[i])
			}
		}
		return left
	}
	for s := range hosts {
		slices.SortFunc(hosts[s], func(a, b *liveHost) int { return slices.Compare(a.mac[:], b.mac[:]) })
		tables := slices.Clone(of[s.device])
		i := slices.IndexFunc(tables, func(t policy.Table) bool { return t.Direction == s.direction })
		if i < 0 {
			i, tables = len(tables), append(tables, policy.Table{Device: s.device, Direction: s.direction, Match: s.direction.FarSide()})
		}
		tables[i].Rules = left(tables[i].Rules)
		policy.SortTables(tables)
		of[s.device] = tables
	}
	return left(pools), hosts
}

// isOfHost reports whether the entry of a host, with a pool or without, would make the rule of an address.
func isOfHost(r *policy.Rule, pools []*policy.Rule) bool {
	want := policy.Rule{
		Prefix: r.Prefix, Rate: policy.Unlimited, Fail: r.Fail, Framing: r.Framing, Within: r.Within,
		Label: policy.Label{Name: r.Label.Name, Note: r.Label.Note, Host: r.Label.Host},
	}
	for _, pool := range pools {
		want.Label.Name, want.Label.Note, want.Within = pool.Label.Owner.Host, pool.Label.Note, policy.Within(pool.Label.Name)
	}
	return *r == want && want.Label.Name != ""
}

// value returns the value of the entry by the MAC address of a host.
func (h *liveHost) value(spell *speller) string {
	r := *slices.Concat(h.pools, h.rules)[0]
	if r.Pool {
		r.Label.Name, r.Label.Owner = r.Label.Owner.Host, policy.Owner{}
		for _, of := range h.rules {
			r.Fail, r.Framing = of.Fail, of.Framing
		}
	} else {
		r.Prefix = single
	}
	if r.Label.Host = (policy.MAC{}); r.Label.Name == h.mac.String() {
		r.Label.Name = ""
	}
	return spell.value(&r)
}
