package doctor

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// findPools finds what is within the pools, and which of them delay packets.
func (f *Facts) findPools() {
	var tables []policy.Table
	add := func(t policy.Table, rules []Rule) {
		for _, r := range rules {
			if r.Pool || r.Within != "" {
				t.Rules = append(t.Rules, r.Rule)
			}
		}
		tables = append(tables, t)
	}
	add(policy.Table{}, f.Pools)
	for _, s := range f.Hooks {
		if s.Limits != nil {
			add(policy.Table{Device: s.Name, Direction: s.Direction}, s.Limits.Rules)
		}
	}
	f.tree, f.queues, f.noRoom = policy.NewTree(tables), map[policy.Within][]policy.Rule{}, map[string]string{}
	for _, c := range f.tree.Grant(f.index) {
		if c.NoRoom != nil {
			f.noRoom[c.Who] = c.NoRoom.Rule.Label.Name
		}
	}
	for _, n := range f.tree.Nodes {
		name := policy.Within(n.Pool.Label.Name)
		for ; n != nil; n = n.Above {
			if n.Pool.Excess == policy.Delay {
				f.queues[name] = append(f.queues[name], *n.Pool)
			}
		}
	}
}

// index is the index of a device, 0 if it does not exist.
func (f *Facts) index(device string) int {
	for _, d := range f.Devices {
		if d.Name == device {
			return d.Index
		}
	}
	return 0
}

// checkPools finds pools that nothing draws from, that have only their safe share of a cluster's rate, or that no process
// adapts to their line.
func (f *Facts) checkPools() {
	var unused, ofDevices, never, ended, adapting []string
	for _, n := range f.tree.Nodes {
		o := n.Pool.Label.Owner
		switch present := f.index(o.Device) != 0; {
		case len(n.Below)+len(n.Rules) > 0 || len(f.Unread) > 0: // rules that cannot be read may be within it
		case !present:
			unused = append(unused, n.Pool.Label.Name)
		case o.Host == "":
			ofDevices = append(ofDevices, n.Pool.Label.Name)
		}
	}
	if ofDevices != nil {
		f.say(nil, report.Warning, "pools", "the pool of a device or direction limits nothing, as no rule is within it: "+plain.List(ofDevices),
			"add any: {} beside pool in the policy, or delete it: "+f.suggest("delete", ofDevices[0]))
	}
	if unused != nil {
		f.say(nil, report.Note, "pools", "no rule or pool is within "+plain.List(unused),
			"if that is not intended, set rules --within it, or delete it: "+f.suggest("delete", unused[0]))
	}
	for _, p := range f.Pools {
		name := fmt.Sprintf("%q", p.Label.Name)
		switch {
		case p.adapts():
			adapting = append(adapting, name)
		case p.Cluster.Name == "" || p.Leased:
		case p.Lease.Until == 0:
			never = append(never, fmt.Sprintf("%s (%v)", p.Label.Name, p.Lease.Safe))
		default:
			ended = append(ended, fmt.Sprintf("%s (%v)", p.Label.Name, p.Lease.Safe))
		}
		f.checkSharers(nil, "pool "+name, p)
	}
	var says []string
	if never != nil {
		says = append(says, "no lease was ever granted to "+plain.List(never))
	}
	if ended != nil {
		says = append(says, "the lease ended of "+plain.List(ended))
	}
	if says != nil {
		f.say(nil, report.Warning, "leases", strings.Join(says, "; ")+": the safe share is in force",
			"see that "+f.suggest("serve --cluster-store URL")+" runs, and what it says about the store: systemctl status shapectl-serve")
	}
	if adapting != nil && f.Unadapted {
		f.say(nil, report.Warning, "adapt", "the rate of pools follows their line only while "+f.suggest("serve")+" runs, and none does: "+plain.List(adapting),
			"start it, such as with the service shapectl-serve")
	}
	f.checkRoom(nil, f.Pools, func(r Rule) string { return fmt.Sprintf("pool %q", r.Label.Name) })
}

func (r Rule) adapts() bool { return r.Adapt.Min != 0 }

// checkPoolsOf finds rules whose guarantee waits, those with too many sharers, and a renamed device in the pool of its old name.
func (f *Facts) checkPoolsOf(s *Hook, _ *Device) {
	if s.Limits == nil {
		return
	}
	f.checkRoom(s, s.Limits.Rules, func(r Rule) string { return policy.CIDR(r.Prefix) })
	for _, r := range s.Limits.limited() {
		f.checkSharers(s, policy.CIDR(r.Prefix), r)
	}
	for _, r := range s.Limits.Rules {
		pool := f.tree.Find(string(r.Within))
		if pool == nil || s.Limits.Was == s.Name || pool.Pool.Label.Owner.Device == s.Name || f.index(pool.Pool.Label.Owner.Device) == 0 {
			continue
		}
		f.say(s, report.Warning, "pools", fmt.Sprintf("since the device was renamed, it shares pool %q with %s, whose pool that is now", string(r.Within), plain.Line(pool.Pool.Label.Owner.Device)),
			"apply the policy again, or start "+f.suggest("serve")+", to give each its own; if the policy does not name this device, "+f.flush(s))
		break
	}
}

// mostSharers is how many sharers of one bucket get parts that are about right.
const mostSharers = 4000

func (f *Facts) checkSharers(s *Hook, who string, r Rule) {
	if r.Share.Kind != policy.ShareNone && r.Sharers > mostSharers {
		f.say(s, report.Warning, "shares", fmt.Sprintf("%s: %d sharers are active, and with more than %d fair shares are only approximate", who, r.Sharers, mostSharers),
			"share by subnet, such as --share /24, or divide the sharers among several pools")
	}
}

// checkRoom reports guarantees that wait for room: those of pools, or of the rules of a hook.
func (f *Facts) checkRoom(s *Hook, rules []Rule, name func(Rule) string) {
	of := policy.Table{}
	if s != nil {
		of.Device = s.Name
	}
	var lack, ready, full []string
	for _, r := range rules {
		if r.Label.Waits == 0 {
			continue
		}
		who := fmt.Sprintf("%s (%v)", name(r), r.Label.Waits)
		if pool := f.noRoom[of.Claimant(&r.Rule)]; pool == "" {
			ready = append(ready, who)
		} else {
			lack, full = append(lack, who), append(full, fmt.Sprintf("pool %q", pool))
		}
	}
	for _, names := range [][]string{lack, ready, full} {
		slices.Sort(names)
	}
	if lack != nil {
		f.say(s, report.Warning, "guarantees",
			fmt.Sprintf("there is no room in %s for the guarantee of %s: it gets what other guarantees leave, at worst nothing", plain.List(slices.Compact(full)), plain.List(lack)),
			"raise the rate of the pool, or lower guarantees in it; "+f.suggest("serve")+" then gives them")
	}
	if ready != nil {
		f.say(s, report.Warning, "guarantees", "there is room now for the guarantee of "+plain.List(ready)+", but it is not in force",
			f.suggest("serve")+" gives it within seconds; or apply the policy again")
	}
}

// checkChargedTwice finds a pool that a packet may be charged to twice. One is enough: other pools are like it.
func (f *Facts) checkChargedTwice() {
	for _, n := range f.tree.Nodes {
		if n.Above != nil {
			continue // the highest one has all rules
		}
		if first, second, found := f.bothMeet(widest(n, nil)); found {
			f.say(nil, report.Warning, "pools",
				fmt.Sprintf("packets may be charged to pool %q twice: %s and %s are within it", n.Pool.Label.Name, first, second),
				"keep in a pool the rules of one of the two, or have a pool for each")
			return
		}
	}
}

// widest adds the rules within a pool that have the shortest prefix of their direction and family.
func widest(n *policy.Node, rules []policy.Member) []policy.Member {
	for _, m := range n.Rules {
		i := slices.IndexFunc(rules, func(r policy.Member) bool {
			return r.Table == m.Table && r.Rule.Prefix.Addr().Is4() == m.Rule.Prefix.Addr().Is4()
		})
		if i < 0 {
			rules = append(rules, m)
		} else if m.Rule.Prefix.Bits() < rules[i].Rule.Prefix.Bits() {
			rules[i] = m
		}
	}
	for _, below := range n.Below {
		rules = widest(below, rules)
	}
	return rules
}

// bothMeet names two rules that a packet may meet both.
func (f *Facts) bothMeet(rules []policy.Member) (first, second string, found bool) {
	name := func(m policy.Member) string {
		return fmt.Sprintf("%s %v %v", m.Table.Device, m.Table.Direction, policy.CIDR(m.Rule.Prefix))
	}
	inForce := func(m policy.Member) *Hook {
		for i := range f.Hooks {
			if s := &f.Hooks[i]; s.Name == m.Table.Device && s.Direction == m.Table.Direction && s.inForce() {
				return s
			}
		}
		return nil
	}
	for _, a := range rules {
		s := inForce(a)
		if s == nil {
			continue
		}
		d, is4, dir := f.byIndex[s.Index], a.Rule.Prefix.Addr().Is4(), f.Cgroups[s.Name]
		forwards := s.Direction == policy.Ingress && d != nil && (is4 && d.Forwards4 || !is4 && d.Forwards6)
		if !forwards && dir == "" {
			continue
		}
		for _, b := range rules {
			other := f.Cgroups[b.Table.Device] // "" for a device
			twice := forwards && b.Table.Direction == policy.Egress && b.Table.Device != s.Name && other == ""
			if dir != "" && b.Table.Direction == s.Direction {
				twice = strings.HasPrefix(dir, other+"/") // of a cgroup above, or a device
			}
			if twice && b.Rule.Prefix.Overlaps(a.Rule.Prefix) && inForce(b) != nil {
				return name(a), name(b), true
			}
		}
	}
	return "", "", false
}
