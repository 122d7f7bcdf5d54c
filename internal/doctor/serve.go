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

func (r Rule) adapts() bool { return r.Adapt.Min != 0 }

// checkAdapting finds pools that adapt to their line, and that no process adapts.
func checkAdapting(f Facts) []report.Finding {
	var names []string
	for _, p := range f.Pools {
		if p.adapts() {
			names = append(names, fmt.Sprintf("%q", p.Label.Name))
		}
	}
	if len(names) == 0 || !f.Unadapted {
		return nil
	}
	who := "pool " + names[0] + " adapts to its line"
	if len(names) > 1 {
		who = "pools " + plain.List(names) + " adapt to their line"
	}
	return systemFinding(report.Warning, "adapt", who+" only while "+plain.Suggest(f.Netns, "serve")+" runs, and none does",
		"start it, such as with the service shapectl-serve")
}

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

func (h host) compare(o host) int {
	return cmp.Or(cmp.Compare(h.device, o.device), cmp.Compare(h.direction, o.direction), bytes.Compare(h.mac[:], o.mac[:]))
}

// hosts returns the names of all hosts. The index is 0 for devices that do not exist.
func (f *Facts) hosts() map[host]string {
	indexes := map[string]int{}
	for _, d := range f.Devices {
		indexes[d.Name] = d.Index
	}
	names := map[host]string{}
	for _, p := range f.Pools {
		if o := p.Label.Owner; o.Host != "" {
			names[host{side{indexes[o.Device], o.Direction}, p.Label.Host}] = o.Host
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

// checkHosts finds hosts of which the kernel knows addresses that have no rule.
func checkHosts(f Facts) (findings []report.Finding) {
	if len(f.Neighbours) == 0 {
		return nil
	}
	hooks := map[side]Hook{}
	rules := map[side]map[netip.Prefix]policy.MAC{} // the host of each rule, zero for none
	count := map[host]int{}
	for _, s := range f.Hooks {
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
	for _, h := range slices.SortedFunc(maps.Keys(names), host.compare) {
		bare := slices.DeleteFunc(slices.Clone(f.Neighbours[h.device][h.mac]), func(a netip.Addr) bool {
			mac, found := rules[h.side][netip.PrefixFrom(a, a.BitLen())]
			return found && (mac == h.mac || mac == policy.MAC{})
		})
		d := f.byIndex[h.device]
		if len(bare) == 0 || d == nil || !f.judged(d.Name) || f.mayHide(d.Name) {
			continue
		}
		s, limited := hooks[h.side]
		if limited && (!s.inForce() || s.Limits.Match != h.direction.FarSide()) {
			continue // serve adds no rules there
		}
		finding := fmt.Sprintf("%s has no rule for its address %v", h.mac.Called(names[h]), slices.MinFunc(bare, netip.Addr.Compare))
		if others := len(bare) - 1; others > 0 {
			finding += fmt.Sprintf(" and %d more", others)
		}
		advice := "run " + plain.Suggest(f.Netns, "serve FILE") + ", which follows the addresses of hosts"
		if count[h] >= policyfile.MaxAddresses {
			advice = fmt.Sprintf("only %d addresses of a host are limited; does it make them up? To limit it all, limit the networks that it can use", policyfile.MaxAddresses)
		}
		findings = append(findings, Hook{Name: d.Name, Direction: h.direction}.finding(report.Warning, "hosts", finding, advice)...)
	}
	return findings
}

// checkPolicy finds directions of devices that lack rules of the policy in force. Of rules that are there and not attached,
// checkState tells.
func checkPolicy(f Facts) (findings []report.Finding) {
	for _, l := range f.Lacks {
		lost := func(s Hook) bool {
			return s.Name == l.Device && s.Direction == l.Direction && s.Limits != nil && !s.inForce()
		}
		if l.Detached || !f.judged(l.Device) || slices.ContainsFunc(f.Hooks, lost) {
			continue
		}
		policy, advice := f.Policy, "run "+plain.Suggest(f.Netns, "apply", f.Policy)
		if f.Policy == "-" {
			policy, advice = "from standard input", "apply it again"
		} else {
			advice += "; " + plain.Suggest(f.Netns, "serve") + " does so for each device that appears"
		}
		finding := fmt.Sprintf(" of the policy in force, %s, missing: packets pass without these limits", policy)
		status := report.Failed
		if len(l.Missing) < l.Of {
			status = report.Warning
			finding = fmt.Sprintf(" of the %d that the policy in force, %s, has here missing: %s", l.Of, policy, l.Networks())
			advice += "; if they are not wanted, take them out of the policy"
		}
		at := Hook{Name: l.Device, Direction: l.Direction}.finding(status, "policy", "", advice)
		at[0].OfRules(len(l.Missing), finding)
		findings = append(findings, at...)
	}
	return findings
}

// mayHide reports whether a device may have rules that could not be read.
func (f Facts) mayHide(device string) bool {
	return slices.ContainsFunc(f.Unread, func(u Unread) bool { return u.Device == "" || u.Device == device })
}
