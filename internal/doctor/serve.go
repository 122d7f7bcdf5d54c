package doctor

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A side is a direction of a device, by its index.
type side struct {
	device    int
	direction policy.Direction
}

// A host is one that rules or a pool follow in a direction of a device.
type host struct {
	side
	mac policy.MAC
}

// hosts returns the names of all hosts. The index is 0 for devices that do not exist.
func (f *Facts) hosts() map[host]string {
	names := map[host]string{}
	for _, p := range f.Pools {
		if o := p.Label.Owner; o.Host != "" {
			names[host{side{f.index(o.Device), o.Direction}, p.Label.Host}] = o.Host
		}
	}
	for _, s := range f.Hooks {
		if s.Limits == nil {
			continue
		}
		for _, r := range s.Limits.Rules {
			if mac := r.Label.Host; mac != (policy.MAC{}) {
				names[host{side{s.Index, s.Direction}, mac}] = r.Label.Name
			}
		}
	}
	return names
}

// checkHosts finds hosts without a rule, and those of which the kernel knows addresses that have none.
func (f *Facts) checkHosts() {
	hooks := map[side]*Hook{}
	rules := map[side]map[netip.Prefix]policy.MAC{} // the host of each rule, zero for none
	count := map[host]int{}
	for i := range f.Hooks {
		s := &f.Hooks[i]
		if s.Limits == nil {
			continue
		}
		its := side{s.Index, s.Direction}
		hooks[its], rules[its] = s, map[netip.Prefix]policy.MAC{}
		for _, r := range s.Limits.Rules {
			rules[its][r.Prefix] = r.Label.Host
			count[host{its, r.Label.Host}]++
		}
	}
	names := f.hosts()
	for _, h := range slices.SortedFunc(maps.Keys(names), func(a, b host) int {
		return cmp.Or(cmp.Compare(a.device, b.device), cmp.Compare(a.direction, b.direction), bytes.Compare(a.mac[:], b.mac[:]))
	}) {
		known := f.Neighbours[h.device][h.mac]
		bare := slices.DeleteFunc(slices.Clone(known), func(a netip.Addr) bool {
			mac, found := rules[h.side][netip.PrefixFrom(a, a.BitLen())]
			return found && (mac == h.mac || mac == policy.MAC{})
		})
		d, s := f.byIndex[h.device], hooks[h.side]
		if len(bare) == 0 && (len(known) > 0 || count[h] > 0) || d == nil || !f.judged(d.Name) || f.mayHide(d.Name) ||
			s != nil && (!s.inForce() || s.Limits.Match != h.direction.FarSide()) { // serve adds no rules there
			continue
		}
		finding := fmt.Sprintf("no address of %s has a rule, so it is not limited", h.mac.Called(names[h]))
		advice := "run " + f.suggest("serve FILE") + ", which limits it once " + plain.Line(d.Name) + " knows an address of it"
		if len(bare) > 0 {
			finding = fmt.Sprintf("%s has no rule for its address %v", h.mac.Called(names[h]), slices.MinFunc(bare, netip.Addr.Compare))
			advice = "run " + f.suggest("serve FILE") + ", which follows the addresses of hosts"
		}
		if others := len(bare) - 1; others > 0 {
			finding += fmt.Sprintf(" and %d more", others)
		}
		if count[h] >= policyfile.MaxAddresses {
			advice = fmt.Sprintf("only %d addresses of a host are limited; does it make them up? To limit it all, limit the networks that it can use", policyfile.MaxAddresses)
		}
		f.say(&Hook{Name: d.Name, Direction: h.direction}, report.Warning, "hosts", finding, advice)
	}
}

// checkPolicy finds directions of devices that lack rules of the policy in force. Of rules that are there and not attached,
// checkState tells.
func (f *Facts) checkPolicy() {
	if f.Unreadable != nil {
		f.say(nil, report.Warning, "policy", "the units cannot apply this policy at boot: "+plain.OneLine(f.Unreadable), "correct the file; "+f.suggest("diff", "FILE")+" checks it")
	}
	for _, l := range f.Lacks {
		lost := func(s Hook) bool {
			return s.Name == l.Device && s.Direction == l.Direction && s.Limits != nil && !s.inForce()
		}
		if l.Detached || !f.judged(l.Device) || slices.ContainsFunc(f.Hooks, lost) {
			continue
		}
		policy, advice := f.Policy, "run "+f.suggest("apply", f.Policy)
		if f.Policy == "-" {
			policy, advice = "from standard input", "apply it again"
		} else {
			advice += "; " + f.suggest("serve") + " does so for each device that appears"
		}
		finding := fmt.Sprintf(" of the policy in force, %s, missing: packets pass without these limits", policy)
		status := report.Failed
		if len(l.Missing) < l.Of {
			status = report.Warning
			finding = fmt.Sprintf(" of the %d that the policy in force, %s, has here missing: %s", l.Of, policy, l.Networks())
		}
		advice += "; if they are not wanted, take them out of the policy, and apply it"
		f.sayOfRules(len(l.Missing), &Hook{Name: l.Device, Direction: l.Direction}, status, "policy", finding, advice)
	}
}

// mayHide reports whether a device may have rules that could not be read.
func (f *Facts) mayHide(device string) bool {
	return slices.ContainsFunc(f.Unread, func(u Unread) bool { return u.Device == "" || u.Device == device })
}
