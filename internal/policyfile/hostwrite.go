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

// foldHosts moves what is in force for hosts out of pools and of the tables of devices that exist: the pools and rules that
// an entry by a MAC address would make. A direction that has only hosts without addresses gets a table without rules.
func foldHosts(pools []policy.Rule, of map[string][]policy.Table, exists func(device string) bool) (rest []policy.Rule, hosts map[side][]liveHost) {
	hosts = map[side][]liveHost{}
	pooled, users := map[string]*policy.Rule{}, usersOf(pools, of)
	for i := range pools {
		p := &pools[i]
		device, d, ok := SideOfHost(p)
		mac, own, _ := p.Follows()
		note := mac.Following(policy.Note(own))
		if ok && exists(device) && p.Label.Note == string(note) && !usedElsewhere(users[policy.Within(p.Label.Name)], device, d) {
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
				mac, _, follows := r.Follows()
				g := group{side: side{device, t.Direction}, mac: mac}
				if p := pooled[string(r.Within)]; p != nil {
					g.pool = p.Label.Name
					g.mac, _, _ = p.Follows()
					odd[g] = odd[g] || !follows || mac != g.mac
				} else if !follows {
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
		device, d, _ := SideOfHost(p)
		mac, _, _ := p.Follows()
		g := group{side{device, d}, mac, name}
		other := group{side: g.side, mac: mac} // a direction has one entry for a MAC address
		odd[other], odd[g], another[other] = true, odd[g] || another[other], true
		for _, t := range of[device] {
			odd[g] = odd[g] || t.Direction == d && t.Match != d.FarSide()
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

// usedElsewhere reports whether anything but rules of a direction is among users.
func usedElsewhere(users map[user]bool, device string, d policy.Direction) bool {
	for by := range users {
		if by.pool != "" || by.device != device || by.direction != d {
			return true
		}
	}
	return false
}

// isOfHost reports whether the entry of a host, with a pool or without, would make the rule of an address.
func isOfHost(r, pool *policy.Rule) bool {
	mac, own, _ := r.Follows()
	note := mac.Following(policy.Note(own))
	want := policy.Rule{
		Prefix: r.Prefix, Rate: policy.Unlimited, Fail: r.Fail, Framing: r.Framing, Within: r.Within,
		Label: policy.Label{Name: r.Label.Name, Note: string(note)},
	}
	if pool != nil {
		want.Label.Name, want.Label.Note = NameOfHost(pool), pool.Label.Note
	}
	return *r == want && want.Label.Name != ""
}

// freshHost returns the entry of a host in a direction of a device.
func freshHost(usual policy.Limit, h liveHost, s side, l2Bytes uint8) fresh {
	usual = withoutColours(usual)
	for _, o := range policy.Options {
		if o.RuleOnly && !ofAddress(o) || h.pool == nil && slices.Contains(ofPoolOnly, o.Name) {
			o.Reset(&usual) // host leaves it out
		}
	}
	var r policy.Rule
	if h.pool != nil {
		r = *h.pool
		r.Label.Name = NameOfHost(h.pool)
		if h.rule != nil {
			r.Fail, r.Framing = h.rule.Fail, h.rule.Framing
		}
	} else {
		r = *h.rule
	}
	if _, r.Label.Note, _ = r.Follows(); r.Label.Name == h.mac.String() {
		r.Label.Name = ""
	}
	return fresh{key: h.mac.String(), value: newSpeller(usual, l2Bytes, nil).value(&r)}
}

// said returns what the file says of a host, as a live one.
func (h *host) said(s *section, d Device) (out liveHost) {
	out.mac = h.mac
	rule := h.on(s, d)
	out.rule = &rule
	if h.pool != nil {
		pool := h.pool.rule
		pool.Label.Name = string(rule.Within)
		pool.Prefix, pool.Within = policy.PoolKey(pool.Label.Name), s.poolOn(pool.Within, d.Name)
		out.pool = &pool
	}
	return out
}

// isLive reports whether a host is in force as the file says.
func (h *host) isLive(s *section, d Device, live liveHost) bool {
	said := h.said(s, d)
	same := (said.pool == nil) == (live.pool == nil) && (said.pool == nil || *said.pool == *live.pool)
	return same && (live.rule == nil || *said.rule == *live.rule)
}

// pooledHosts counts the hosts that have a pool. Without addresses, only of these is known whether they are in force.
func (t *table) pooledHosts() (n int) {
	for _, h := range t.hosts {
		if h.pool != nil {
			n++
		}
	}
	return n
}

// changeHosts changes the hosts of a direction to the live ones.
func (m *merger) changeHosts(c *change, s *section, t *table, live policy.Table, d Device) {
	its := side{d.Name, t.direction}
	var known []policy.MAC
	for _, h := range t.hosts {
		c.entries, known = append(c.entries, h.span), append(known, h.mac)
		i := slices.IndexFunc(m.hosts[its], func(l liveHost) bool { return l.mac == h.mac })
		switch {
		case i < 0 && (h.pool != nil || live.Match != t.direction.FarSide()):
			c.gone[h.key] = true
		case i >= 0 && !h.isLive(s, d, m.hosts[its][i]):
			m.replace(int(h.value), int(h.end), freshHost(t.usual, m.hosts[its][i], its, d.L2Bytes).value)
		}
	}
	for _, l := range m.hosts[its] {
		if !slices.Contains(known, l.mac) {
			c.last = append(c.last, freshHost(t.usual, l, its, d.L2Bytes))
		}
	}
}

// hostsAreLive reports whether the hosts of a device are in force as the section of a pattern says.
func (m *merger) hostsAreLive(s *section, d Device) bool {
	live := len(m.hosts[side{d.Name, policy.Egress}]) + len(m.hosts[side{d.Name, policy.Ingress}])
	if s == nil {
		return live == 0
	}
	for i := range s.tables {
		t := &s.tables[i]
		for _, h := range t.hosts {
			of := m.hosts[side{d.Name, t.direction}]
			i := slices.IndexFunc(of, func(l liveHost) bool { return l.mac == h.mac })
			if i < 0 && h.pool != nil || i >= 0 && !h.isLive(s, d, of[i]) {
				return false
			}
			if i >= 0 {
				live--
			}
		}
	}
	return live == 0
}
