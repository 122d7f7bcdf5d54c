package loader

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Return attaches the rules of a deleted device to the one that has its name now, with new counters, and returns the
// directions. It takes no longer for many rules. It does nothing unless there are rules in all directions of tables, which
// match the same address and do not delay, as that may need a qdisc first.
func (n *Namespace) Return(dev netinfo.Device, tables []policy.Table) (returned []policy.Direction, err error) {
	var all orders
	defer func() { all.close() }()
	for _, set := range n.pins.sets() {
		of := func(t policy.Table) bool { return t.Direction == set.Direction() && t.Match == set.Side() }
		if set.Device() != dev.Name || !slices.ContainsFunc(tables, of) || set.Any(maps.Delays) {
			continue
		}
		h, err := n.pins.dir.openHook(set)
		if err != nil {
			return nil, err
		}
		if h == nil {
			continue
		}
		if h.State != Gone {
			h.Close()
			continue
		}
		all = append(all, newOrder(h, dev, policy.Table{Device: dev.Name, Direction: set.Direction(), Match: set.Side()}))
	}
	if len(all) == 0 || len(all) < len(tables) {
		return nil, nil
	}
	err = n.pins.changing(func() error {
		for _, o := range all {
			o.Set.ClearCounters()
		}
		return all.prepare(&n.pins, n.options)
	})
	for _, o := range all {
		if err == nil && o.gone == nil {
			returned = append(returned, o.Direction)
		}
	}
	return returned, err
}

// ApplyTo replaces the rules of a device that has others than those of tables, in the order of Apply. The last table has
// pools: it sets those that the rules need and that do not exist, and changes those of the device.
func (n *Namespace) ApplyTo(dev netinfo.Device, tables []policy.Table) ([]Applied, error) {
	have, err := n.Tables(Attached)
	if err != nil {
		return nil, err
	}
	rules, wanted := tables[:len(tables)-1], tables[len(tables)-1].Rules
	same, pools := true, policy.Table{}
	for _, t := range have {
		if t.IsPools() {
			pools = t
		}
		if t.Device == dev.Name {
			at := slices.IndexFunc(rules, func(w policy.Table) bool { return w.Direction == t.Direction })
			same = same && at >= 0 && slices.Equal(t.Rules, rules[at].Rules)
		}
	}
	exist := map[netip.Prefix]int{}
	for i, p := range pools.Rules {
		exist[p.Prefix] = i
	}
	for _, p := range wanted {
		i, found := exist[p.Prefix]
		of, _, _ := strings.Cut(p.Label.Name, " ")
		if found && of == dev.Name && pools.Rules[i].WithoutGuarantee() != p.WithoutGuarantee() {
			pools.Rules[i], same = p, false
		}
	}
	if same {
		return nil, nil
	}
	pools.Rules = append(pools.Rules, missing(n.pins.store, wanted, rules)...)
	policy.SortRules(pools.Rules)
	return n.Apply(append(slices.Clone(rules), pools), ApplyOptions{Devices: []string{dev.Name}})
}
