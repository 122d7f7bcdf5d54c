package explain

import (
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Named returns a question for each rule of hooks that has q.Name or, see policy.FindName, that ID, about an address in its
// network; the pools, if they alone limit these rules, and limit no others, and the rules are in force; and the names of all rules.
func Named(hooks []*loader.Hook, q Question) (questions []Question, own, names []string) {
	rules := make([][]maps.Entry, len(hooks))
	for i, h := range hooks {
		rules[i] = h.Set.Rules()
		for _, e := range rules[i] {
			names = append(names, e.Rule.CalledOn(h.Name()))
		}
	}
	routes, mark := q.Device == "", q.Network
	if !policy.IsMark(mark) {
		q.Name = policy.FindName(q.Name, slices.Values(names))
	}
	others, alone := map[string]bool{}, q.Flow == nil
	for i, h := range hooks {
		q.Device, q.Direction = h.Name(), &h.Direction
		for _, e := range rules[i] {
			within := string(e.Rule.Within)
			if q.Name == "" || e.Rule.CalledOn(h.Name()) != q.Name && e.Prefix != mark {
				others[within] = true
				continue
			}
			alone = alone && e.Rule.Rate == policy.Unlimited && within != "" && h.State.InForce()
			if !slices.Contains(own, within) {
				own = append(own, within)
			}
			isMark := policy.IsMark(e.Prefix)
			q.Network, q.Routes = e.Prefix, routes && !isMark
			switch {
			case q.Flow != nil:
				if q.Address = q.Flow.Far(h.Match()); !isMark && !e.Prefix.Contains(q.Address) {
					continue
				}
			case isMark:
				q.Address = outside(false)
			default:
				q.Address = example(h, e.Prefix)
			}
			questions = append(questions, q)
		}
	}
	if !alone || slices.ContainsFunc(own, func(p string) bool { return others[p] }) {
		own = nil
	}
	return questions, own, names
}

// example returns an address of the network of a rule.
func example(h *loader.Hook, network netip.Prefix) netip.Addr {
	return exampleOf(network, func(a netip.Addr) netip.Prefix {
		if route, err := netinfo.RouteTo(a); err == nil && route.Local {
			return netip.PrefixFrom(a, a.BitLen()) // packets to this host itself pass no device
		}
		decides, _ := h.Set.Match(a)
		return decides.Prefix
	})
}

// exampleOf returns the first address of a network for hosts over which no narrower network
// decides; the first one if there is none soon.
func exampleOf(network netip.Prefix, decides func(netip.Addr) netip.Prefix) netip.Addr {
	first := network.Addr()
	if network.Bits() == 0 {
		first = outside(first.Is6())
	} else if network.Bits() < first.BitLen()-1 {
		first = first.Next()
	}
	a := first
	for range 1000 {
		narrower := decides(a)
		if narrower == network {
			return a
		}
		if a = after(narrower); !narrower.IsSingleIP() {
			a = a.Next()
		}
		if !network.Contains(a) {
			break
		}
	}
	return first
}

// after is the address after the last one of a network.
func after(p netip.Prefix) netip.Addr {
	last := p.Addr().AsSlice()
	for i := range last {
		last[i] |= 0xff >> min(max(p.Bits()-8*i, 0), 8)
	}
	a, _ := netip.AddrFromSlice(last)
	return a.Next()
}
