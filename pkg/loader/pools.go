package loader

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sort"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrPoolInUse means that rules or pools are within a pool.
var ErrPoolInUse = errors.New("the pool is in use")

// Pools is a hook that stands for the pools. It has no device, is always attached, and has no Set where there are
// neither rules nor pools.
func (n *Namespace) Pools() *Hook {
	h := &Hook{State: Attached}
	if n.pins.store != nil {
		h.Set = n.pins.store.Hold().Pools()
	}
	return h
}

func (n planner) poolsOrder(want []policy.Rule) *order {
	return newOrder(n.Pools(), netinfo.Device{}, policy.Table{Rules: want})
}

func (o *order) isPools() bool { return o.want.IsPools() }

// tableName is the name of a table in errors.
func tableName(t policy.Table) string {
	if t.IsPools() {
		return "pools"
	}
	return fmt.Sprintf("%s %s", t.Device, t.Direction)
}

// within names all that is directly within pools, but for rules and pools of some ids.
func (s *bpfState) within(pools map[policy.Within]bool, without map[uint32]bool) (users []string) {
	for set, rules := range s.allRules() {
		for _, r := range rules {
			if !pools[r.Within] || without[r.ID] {
				continue
			}
			name := r.Label.Name
			if !r.Pool {
				name = fmt.Sprintf("%s %s %s", set.Device(), set.Direction(), r.Prefix)
			}
			users = append(users, plain.Line(name))
		}
	}
	return users
}

// poolsAfter returns the pools that there are once orders are carried out. The error of
// policy.CheckPools says why these pools would be wrong for what is within them.
func (n planner) poolsAfter(all orders, which scope) ([]policy.Rule, error) {
	concern := all.concernPools()
	attachAgain := func(o *order) bool { return o.Set != nil && o.State != Attached }
	if !concern && !slices.ContainsFunc(all, attachAgain) {
		return nil, nil
	}
	changing := map[uint32]bool{}
	var tables []policy.Table
	for _, o := range all {
		t := o.want
		if o.Set != nil {
			changing[o.Set.Number()] = true
			if which == besideOthers && (concern || o.isPools()) {
				t.Rules = beside(o.Set.Policy(), t.Rules)
			}
		}
		tables = append(tables, t)
	}
	for set, rules := range n.pins.allRules() {
		if !changing[set.Number()] && (concern || set.IsPools()) {
			tables = append(tables, tableOf(set, rules))
		}
	}
	policy.SortTables(tables)
	var pools []policy.Rule
	if len(tables) > 0 && tables[0].IsPools() {
		pools = tables[0].Rules
	}
	if concern && all.steps() > 0 {
		return pools, policy.CheckPools(tables)
	}
	return pools, nil
}

func tableOf(set *maps.Set, rules []maps.Entry) policy.Table {
	t := policy.Table{Device: set.Device(), Direction: set.Direction()}
	for i := range rules {
		t.Rules = append(t.Rules, rules[i].Rule)
	}
	return t
}

// checkNew is policy.CheckPools for the tables of new hooks, and last for new pools, in a store. It returns the pools that
// they draw from.
func checkNew(s *maps.Store, tables []policy.Table) (drawn []policy.Rule, err error) {
	last := len(tables) - 1
	drawn = slices.Clone(tables[last].Rules)
	if s != nil {
		var rules []policy.Rule
		for _, t := range tables {
			rules = append(rules, t.Rules...)
		}
		drawn = append(drawn, policy.Above(rules, func(name policy.Within) (policy.Rule, bool) { // no new pool exists there
			p, found := s.Pools().Find(policy.PoolKey(string(name)))
			return p.Rule, found
		})...)
	}
	counts := func(r policy.Rule) bool { return r.Guarantee != 0 || r.Cluster.Name != "" }
	shared := slices.ContainsFunc(tables, func(t policy.Table) bool { return slices.ContainsFunc(t.Rules, counts) }) // what there is counts, too
	pools, all := policy.Table{Rules: drawn}, slices.Clone(tables[:last])
	if shared {
		for set, rules := range (&bpfState{store: s}).allRules() {
			if t := tableOf(set, rules); t.IsPools() {
				pools.Rules = append(t.Rules, tables[last].Rules...)
			} else {
				all = append(all, t)
			}
		}
	}
	return drawn, policy.CheckPools(append(all, pools))
}

// concernPools reports whether orders change pools, or set rules that are within one.
func (all orders) concernPools() bool {
	return all.drawFromPools() || slices.ContainsFunc(all, func(o *order) bool { return o.isPools() && o.Set != nil && o.Set.Any(maps.Exists) })
}

// drawFromPools reports whether orders set pools, or rules that are within one.
func (all orders) drawFromPools() bool {
	return slices.ContainsFunc(all, func(o *order) bool {
		return len(o.want.Rules) > 0 && o.isPools() || slices.ContainsFunc(o.want.Rules, func(r policy.Rule) bool { return r.Within != "" })
	})
}

// beside returns rules together with others, which replace those of the same networks. All are sorted.
func beside(rules, others []policy.Rule) (all []policy.Rule) {
	for have, want := range policy.Pairs(rules, others, func(a, b policy.Rule) int { return policy.ComparePrefix(a.Prefix, b.Prefix) }) {
		all = append(all, *cmp.Or(want, have))
	}
	return all
}

// drawnFrom returns the pools that rules draw from.
func drawnFrom(rules, pools []policy.Rule) []policy.Rule {
	if len(pools) == 0 {
		return nil
	}
	named := map[policy.Within]policy.Rule{}
	for _, p := range pools {
		named[policy.Within(p.Label.Name)] = p
	}
	return policy.Above(rules, func(name policy.Within) (policy.Rule, bool) {
		p, found := named[name]
		return p, found
	})
}

// missing are those of pools that rules of tables draw from, or that follow a host, and that do not exist, sorted.
func missing(s *maps.Store, pools []policy.Rule, tables []policy.Table) (missing []policy.Rule) {
	for _, p := range pools {
		if p.Label.Host != (policy.MAC{}) {
			missing = append(missing, p)
		}
	}
	missing = append(missing, drawnFrom(missing, pools)...)
	for _, t := range tables {
		missing = append(missing, drawnFrom(t.Rules, pools)...)
	}
	policy.SortRules(missing)
	return slices.DeleteFunc(slices.Compact(missing), func(p policy.Rule) bool { // tables may draw from the same pool
		if s == nil {
			return false
		}
		_, found := s.Pools().Find(p.Prefix)
		return found
	})
}

// parentsFirst sorts steps to pools so that each comes after the pool that it is within, if that is among them.
func parentsFirst(steps []policy.Difference) {
	pools := map[policy.Within]*policy.Rule{}
	for _, d := range steps {
		if d.Want != nil {
			pools[policy.Within(d.Want.Label.Name)] = d.Want
		}
	}
	depth := func(d policy.Difference) (n int) {
		for p := d.Want; p != nil && n <= policy.MaxDepth; p = pools[p.Within] {
			n++
		}
		return n
	}
	sort.SliceStable(steps, func(i, j int) bool { return depth(steps[i]) < depth(steps[j]) })
}

// planDrawing adds orders for attached hooks whose rules draw from pools that are about to change: the pools may
// begin or cease to delay their packets.
func (n planner) planDrawing(all orders, pools []policy.Rule) (orders, error) {
	delays := func(d policy.Difference) bool {
		return d.Have != nil && d.Have.Excess == policy.Delay || d.Want != nil && d.Want.Excess == policy.Delay
	}
	if !slices.ContainsFunc(all, func(o *order) bool { return o.isPools() && slices.ContainsFunc(o.steps, delays) }) {
		return all, nil
	}
	hooks, err := n.Hooks()
	for _, h := range hooks {
		drawn := drawnFrom(h.Set.Policy(), pools)
		planned := slices.ContainsFunc(all, func(o *order) bool { return o.Set != nil && o.Set.Number() == h.Set.Number() })
		if h.State != Attached || len(drawn) == 0 || planned || err != nil {
			h.Close()
			continue
		}
		o := newOrder(h, h.Device, policy.Table{Device: h.Device.Name, Direction: h.Direction, Match: h.Match()})
		all = append(all, o)
		if err = o.planQueue(nil, drawn, n.pins.options.SetupFQ); err != nil {
			err = fmt.Errorf("%s: %w", tableName(o.want), err)
		}
	}
	return all, err
}

// allRules are the rules of all hooks, and the pools. It needs one pass for all.
func (s *bpfState) allRules() iter.Seq2[*maps.Set, []maps.Entry] {
	return func(yield func(*maps.Set, []maps.Entry) bool) {
		if s.store == nil {
			return
		}
		rules := s.store.AllRules()
		for _, set := range append(s.sets(), s.store.Pools()) {
			if !yield(set, rules[set.Number()]) {
				return
			}
		}
	}
}
