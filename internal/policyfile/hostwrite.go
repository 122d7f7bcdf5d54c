package policyfile

import (
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A liveHost is a host in force.
type liveHost struct {
	mac  policy.MAC
	pool *policy.Rule // nil for none
	rule *policy.Rule // of each address, for the network single; nil while none is known
}

// A side is one direction of a device.
type side struct {
	device    string
	direction policy.Direction
}

// foldHosts moves what is in force for hosts out of pools and of the tables of devices: the pools and rules that
// an entry by a MAC address would make. A direction that has only hosts without addresses gets a table without rules.
func foldHosts(pools []policy.Rule, of map[string][]policy.Table) (rest []policy.Rule, hosts map[side][]liveHost) {
	hosts = map[side][]liveHost{}
	pooled, elsewhere := map[string]*policy.Rule{}, usedElsewhere(pools, of)
	for i := range pools {
		p, of := &pools[i], pools[i].Label.Owner
		if of.Host != "" && p.Label.Name == of.String() && p.Label.Host != (policy.MAC{}) && p.Label.Waits == 0 && !elsewhere[p.Label.Name] {
			pooled[p.Label.Name] = p
		}
	}
	type group struct {
		side
		mac  policy.MAC
		pool string
	}
	groups, odd := map[group][]policy.Rule{}, map[group]bool{}
	for device, tables := range of {
		for _, t := range tables {
			for i := range t.Rules {
				r := t.Rules[i]
				mac := r.Label.Host
				g := group{side: side{device, t.Direction}, mac: mac}
				if p := pooled[string(r.Within)]; p != nil {
					g.pool, g.mac = p.Label.Name, p.Label.Host
					odd[g] = odd[g] || mac != g.mac
				} else if mac == (policy.MAC{}) {
					continue
				}
				first := append(groups[g], r)[0]
				odd[g] = odd[g] || t.Match != t.Direction.FarSide() || !r.Prefix.IsSingleIP() || withoutNetwork(r) != withoutNetwork(first) || !isOfHost(&r, pooled[g.pool])
				groups[g] = append(groups[g], r)
			}
		}
	}
	folded, another := map[netip.Prefix]bool{}, map[group]bool{} // pools, and hosts that have one
	for name, p := range pooled {
		owner := p.Label.Owner
		g := group{side{owner.Device, owner.Direction}, p.Label.Host, name}
		other := group{side: g.side, mac: g.mac} // a direction has one entry for a MAC address
		odd[other], odd[g], another[other] = true, odd[g] || another[other], true
		for _, t := range of[owner.Device] {
			odd[g] = odd[g] || t.Direction == owner.Direction && t.Match != t.Direction.FarSide()
		}
		if len(groups[g]) == 0 && !odd[g] {
			groups[g] = nil
		}
	}
	drop := map[side]map[netip.Prefix]bool{}
	for g, rules := range groups {
		if odd[g] {
			continue
		}
		h := liveHost{mac: g.mac, pool: pooled[g.pool]}
		if h.pool != nil {
			folded[h.pool.Prefix] = true
		}
		if drop[g.side] == nil {
			drop[g.side] = map[netip.Prefix]bool{}
		}
		for i := range rules {
			drop[g.side][rules[i].Prefix] = true
		}
		if len(rules) > 0 {
			h.rule = &rules[0]
			h.rule.Prefix = single
		}
		hosts[g.side] = append(hosts[g.side], h)
	}
	for s := range hosts {
		slices.SortFunc(hosts[s], func(a, b liveHost) int { return slices.Compare(a.mac[:], b.mac[:]) })
		tables := slices.Clone(of[s.device])
		i := slices.IndexFunc(tables, func(t policy.Table) bool { return t.Direction == s.direction })
		if i < 0 {
			i, tables = len(tables), append(tables, policy.Table{Device: s.device, Direction: s.direction, Match: s.direction.FarSide()})
		}
		tables[i].Rules = slices.DeleteFunc(slices.Clone(tables[i].Rules), func(r policy.Rule) bool { return drop[s][r.Prefix] })
		policy.SortTables(tables)
		of[s.device] = tables
	}
	return slices.DeleteFunc(slices.Clone(pools), func(p policy.Rule) bool { return folded[p.Prefix] }), hosts
}

// usedElsewhere returns the names of the pools that other pools are within, or rules of another direction than the pool is of.
func usedElsewhere(pools []policy.Rule, of map[string][]policy.Table) map[string]bool {
	used, owners := map[string]bool{}, map[policy.Within]policy.Owner{}
	for i := range pools {
		used[string(pools[i].Within)] = true
		owners[policy.Within(pools[i].Label.Name)] = pools[i].Label.Owner
	}
	for device, tables := range of {
		for _, t := range tables {
			for i := range t.Rules {
				within := t.Rules[i].Within
				if o := owners[within]; o.Device != device || o.Direction != t.Direction {
					used[string(within)] = true
				}
			}
		}
	}
	return used
}

// isOfHost reports whether the entry of a host, with a pool or without, would make the rule of an address.
func isOfHost(r, pool *policy.Rule) bool {
	want := policy.Rule{
		Prefix: r.Prefix, Rate: policy.Unlimited, Fail: r.Fail, Framing: r.Framing, Within: r.Within,
		Label: policy.Label{Name: r.Label.Name, Note: r.Label.Note, Host: r.Label.Host},
	}
	if pool != nil {
		want.Label.Name, want.Label.Note = pool.Label.Owner.Host, pool.Label.Note
	}
	return *r == want && want.Label.Name != ""
}

// value returns the value of the entry by the MAC address of a host.
func (h *liveHost) value(spell *speller) string {
	var r policy.Rule
	if h.pool != nil {
		r = *h.pool
		r.Label.Name, r.Label.Owner = r.Label.Owner.Host, policy.Owner{}
		if h.rule != nil {
			r.Fail, r.Framing = h.rule.Fail, h.rule.Framing
		}
	} else {
		r = *h.rule
	}
	if r.Label.Host = (policy.MAC{}); r.Label.Name == h.mac.String() {
		r.Label.Name = ""
	}
	return spell.value(&r)
}
