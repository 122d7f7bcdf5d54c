package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
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

var poolChecks = []func(Facts) []report.Finding{checkUnused, checkUnknownHosts, checkPoolBurst, checkPoolSharers, checkWaitingPools, checkForwarded, checkLeases, checkAdapting}

// checkUnused finds pools that nothing draws from.
func checkUnused(f Facts) []report.Finding {
	var unused []string
	for _, n := range f.tree.Nodes {
		o := n.Pool.Label.Owner
		if len(n.Below)+len(n.Rules) == 0 && !(o.Host != "" && f.index(o.Device) != 0) {
			unused = append(unused, n.Pool.Label.Name)
		}
	}
	if len(unused) == 0 || len(f.Unread) > 0 { // rules that cannot be read may be within them
		return nil
	}
	return systemFinding(report.Note, "pools", "no rule or pool is within "+plain.List(unused),
		"if that is not intended, set rules --within it, or delete it: "+plain.Suggest(f.Netns, "delete", unused[0]))
}

// checkUnknownHosts finds hosts whose limit is in a pool, and of which no address is known.
func checkUnknownHosts(f Facts) (findings []report.Finding) {
	for _, n := range f.tree.Nodes {
		o, mac := n.Pool.Label.Owner, n.Pool.Label.Host
		index := f.index(o.Device)
		known := len(f.Neighbours[index][mac]) > 0 // checkHosts tells of those
		if o.Host != "" && index != 0 && !known && f.judged(o.Device) && len(n.Below)+len(n.Rules) == 0 && len(f.Unread) == 0 {
			findings = append(findings, Hook{Name: o.Device, Direction: o.Direction}.finding(report.Warning, "hosts",
				"no address of "+mac.Called(o.Host)+" has a rule, so it is not limited",
				"run "+plain.Suggest(f.Netns, "serve FILE")+", which limits it once "+plain.Line(o.Device)+" knows an address of it")...)
		}
	}
	return findings
}

// index is the index of a device, 0 if it does not exist.
func (f Facts) index(device string) int {
	for _, d := range f.Devices {
		if d.Name == device {
			return d.Index
		}
	}
	return 0
}

// checkLeases finds pools that have only their safe share of a cluster's rate.
func checkLeases(f Facts) []report.Finding {
	var never, ended []string
	for _, p := range f.Pools {
		text := fmt.Sprintf("%s (%v)", plain.Line(p.Label.Name), p.Lease.Safe)
		switch {
		case p.Cluster.Name == "" || p.Leased:
		case p.Lease.Until == 0:
			never = append(never, text)
		default:
			ended = append(ended, text)
		}
	}
	var says []string
	if never != nil {
		says = append(says, "no lease was ever granted to "+plain.List(never))
	}
	if ended != nil {
		says = append(says, "the lease ended of "+plain.List(ended))
	}
	if says == nil {
		return nil
	}
	return systemFinding(report.Warning, "leases", strings.Join(says, "; ")+": the safe share is in force",
		"see that "+plain.Suggest(f.Netns, "serve --cluster-store URL")+" runs, and what it says about the store: systemctl status shapectl-serve")
}

// holds is the most that a bucket and its queue hold.
func (r Rule) holds() uint64 { return r.Capacity + r.Queue }

// checkPoolBurst finds bursts for which a pool has no room, the largest of each pool.
func checkPoolBurst(f Facts) (findings []report.Finding) {
	for _, n := range f.tree.Nodes {
		members := slices.Clone(n.Rules)
		for _, below := range n.Below {
			members = append(members, policy.Member{Rule: below.Pool})
		}
		var largest policy.Member
		room, burst, others := Rule{Rule: *n.Pool}.holds(), uint64(0), -1
		for _, m := range members {
			holds := Rule{Rule: *m.Rule}.holds()
			if m.Rule.Rate == policy.Unlimited || holds <= room {
				continue
			}
			others++
			if holds > burst {
				burst, largest = holds, m
			}
		}
		if burst == 0 {
			continue
		}
		name := n.Pool.Label.Name
		finding := fmt.Sprintf("pool %q holds %d bytes: it never lets the burst of %d bytes pass that %s allows", name, room, burst, memberName(largest))
		if others > 0 {
			finding += fmt.Sprintf(" (nor those of %d more)", others)
		}
		findings = append(findings, systemFinding(report.Note, "pools", finding,
			fmt.Sprintf("raise --capacity of the pool to %db, or lower that of what is within it to %db", burst-(room-n.Pool.Capacity), room))...)
	}
	return findings
}

func memberName(m policy.Member) string {
	if m.Table == nil {
		return fmt.Sprintf("pool %q", m.Rule.Label.Name)
	}
	return fmt.Sprintf("%s %v %v", m.Table.Device, m.Table.Direction, m.Rule.Prefix)
}

// checkGuarantees finds guarantees of rules whose device is gone.
func checkGuarantees(f Facts, s Hook, _ *Device) (findings []report.Finding) {
	if s.Limits == nil || s.Limits.State != loader.Gone {
		return nil
	}
	reserved := map[policy.Within]policy.Rate{}
	for _, r := range s.Limits.Rules {
		if r.Guarantee != 0 {
			reserved[r.Within] += policy.Rate(r.Guarantee) * policy.Rate(max(r.Members, 1))
		}
	}
	for _, pool := range slices.Sorted(maps.Keys(reserved)) {
		findings = append(findings, s.finding(report.Warning, "guarantees",
			fmt.Sprintf("the device is gone, and %v of pool %q stay reserved for its rules: other rules cannot have them guaranteed", reserved[pool], string(pool)),
			s.flush(f.Netns)+" frees them")...)
	}
	return findings
}

// checkForwarded finds a pool that a forwarded packet may be charged to twice: as it enters one device, and as it leaves
// another.
func checkForwarded(f Facts) []report.Finding {
	for _, n := range f.tree.Nodes {
		if n.Above != nil {
			continue // the highest one has all rules
		}
		if pair := f.bothMeet(widest(n, nil)); pair != "" { // one is enough: other pools are like it
			return systemFinding(report.Warning, "pools",
				fmt.Sprintf("packets that this host forwards may be charged to pool %q twice: %s are within it", n.Pool.Label.Name, pair),
				"keep in a pool the rules of one of the two devices, or have a pool for each direction")
		}
	}
	return nil
}

// checkRenamed finds a renamed device in the pool of its old name, which another device has now.
func checkRenamed(f Facts, s Hook, _ *Device) []report.Finding {
	if s.Limits == nil || s.Limits.Was == s.Name {
		return nil
	}
	for _, r := range s.Limits.Rules {
		pool := f.tree.Find(string(r.Within))
		if pool == nil || pool.Pool.Label.Owner.Device == s.Name || f.index(pool.Pool.Label.Owner.Device) == 0 {
			continue
		}
		return s.finding(report.Warning, "pools",
			fmt.Sprintf("since the device was renamed, it shares pool %q with %s, whose pool that is now", pool.Pool.Label.Name, plain.Line(pool.Pool.Label.Owner.Device)),
			"apply the policy again, or start "+plain.Suggest(f.Netns, "watch")+", to give each its own; if the policy does not name this device, "+s.flush(f.Netns))
	}
	return nil
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

// enforcer is the device on which a rule is in force; nil for none.
func (f *Facts) enforcer(m policy.Member) *Device {
	for i := range f.Hooks {
		if s := &f.Hooks[i]; s.Name == m.Table.Device && s.Direction == m.Table.Direction && s.inForce() {
			return f.byIndex[s.Index]
		}
	}
	return nil
}

// bothMeet names two rules that a forwarded packet may meet both; "" for none.
func (f *Facts) bothMeet(rules []policy.Member) string {
	for _, in := range rules {
		if in.Table.Direction != policy.Ingress {
			continue
		}
		d := f.enforcer(in)
		if is4 := in.Rule.Prefix.Addr().Is4(); d == nil || is4 && !d.Forwards4 || !is4 && !d.Forwards6 {
			continue
		}
		for _, out := range rules {
			if out.Table.Direction == policy.Egress && out.Table.Device != in.Table.Device && out.Rule.Prefix.Overlaps(in.Rule.Prefix) && f.enforcer(out) != nil {
				return memberName(in) + " and " + memberName(out)
			}
		}
	}
	return ""
}

// checkRoom reports guarantees that wait for room: those of pools, or of the rules of one direction of a device.
func (f *Facts) checkRoom(rules []Rule, of policy.Table, name func(Rule) string, warn func(finding, advice string) []report.Finding) (findings []report.Finding) {
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
	serve := plain.Suggest(f.Netns, "serve")
	slices.Sort(lack)
	slices.Sort(ready)
	slices.Sort(full)
	if lack != nil {
		findings = append(findings, warn(
			fmt.Sprintf("there is no room in %s for the guarantee of %s: it gets what other guarantees leave, at worst nothing",
				plain.List(slices.Compact(full)), plain.List(lack)),
			"raise the rate of the pool, or lower guarantees in it; "+serve+" then gives them")...)
	}
	if ready != nil {
		findings = append(findings, warn("there is room now for the guarantee of "+plain.List(ready)+", but it is not in force",
			serve+" gives it within seconds; or apply the policy again")...)
	}
	return findings
}

func checkWaitingPools(f Facts) []report.Finding {
	return f.checkRoom(f.Pools, policy.Table{}, func(r Rule) string { return fmt.Sprintf("pool %q", r.Label.Name) },
		func(finding, advice string) []report.Finding {
			return systemFinding(report.Warning, "guarantees", finding, advice)
		})
}

func checkWaiting(f Facts, s Hook, _ *Device) []report.Finding {
	if s.Limits == nil {
		return nil
	}
	return f.checkRoom(s.Limits.Rules, policy.Table{Device: s.Name}, func(r Rule) string { return r.Prefix.String() },
		func(finding, advice string) []report.Finding {
			return s.finding(report.Warning, "guarantees", finding, advice)
		})
}

// mostSharers is how many sharers of one bucket get parts that are about right.
const mostSharers = 4000

// crowded says that too many sharers are active in a bucket for exact shares.
func crowded(who string, r Rule) (status report.Status, finding, advice string) {
	carries := r.holds() / model.SharedBytes
	switch {
	case r.Share.Kind == policy.ShareNone:
	case r.Sharers > mostSharers:
		return report.Warning,
			fmt.Sprintf("%s: %d sharers are active, and with more than %d fair shares are only approximate", who, r.Sharers, mostSharers),
			"share by subnet, such as --share /24, or divide the sharers among several pools"
	case uint64(r.Sharers) > carries:
		return report.Note,
			fmt.Sprintf("%s: %d sharers are active, and its %d bytes have room for a full packet of %d: fair shares are less exact", who, r.Sharers, r.holds(), carries),
			fmt.Sprintf("raise --capacity to %db", uint64(r.Sharers)*model.SharedBytes)
	}
	return report.OK, "", ""
}

func checkPoolSharers(f Facts) (findings []report.Finding) {
	for _, p := range f.Pools {
		if status, finding, advice := crowded(fmt.Sprintf("pool %q", p.Label.Name), p); finding != "" {
			findings = append(findings, systemFinding(status, "shares", finding, advice)...)
		}
	}
	return findings
}

func checkSharers(_ Facts, s Hook, _ *Device) (findings []report.Finding) {
	for _, r := range s.Limits.limited() {
		if status, finding, advice := crowded(r.Prefix.String(), r); finding != "" {
			findings = append(findings, s.finding(status, "shares", finding, advice)...)
		}
	}
	return findings
}
