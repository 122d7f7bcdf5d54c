package loader

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
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
	h := &Hook{State: Attached, state: &n.pins.bpfState}
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
	for set, r := range s.store.EveryRule() {
		if !pools[r.Within] || without[r.ID] {
			continue
		}
		name := r.Label.Name
		if !r.Pool {
			name = fmt.Sprintf("%s %s %s", set.Device(), set.Direction(), policy.CIDR(r.Prefix))
		}
		users = append(users, plain.Line(name))
	}
	return users
}

// settle decides who of what is wanted in a phase has his guarantee once orders are carried out, and returns the pools that the
// rules draw from. The error is that of policy.CheckPools.
func (n planner) settle(all orders, phase int, which scope) (pools []policy.Rule, err error) {
	s, concern := n.store(phase), all.concernPools()
	if !concern && !slices.ContainsFunc(all, func(o *order) bool { return o.Set != nil && o.State != Attached }) {
		return nil, nil
	}
	if which == onlyThese && concern || slices.ContainsFunc(all, func(o *order) bool { return o.concernsOthers(phase) }) {
		return n.settleAmong(all, phase, which)
	}
	find := func(name policy.Within) (policy.Rule, bool) { // which is no new pool
		if s == nil {
			return policy.Rule{}, false
		}
		p, found := s.Pools().Find(policy.PoolKey(string(name)))
		return p.Rule, found
	}
	var tables []policy.Table
	for _, o := range all {
		rules := *o.wants(phase)
		if o.isPools() {
			pools = append(pools, rules...)
		} else {
			tables = append(tables, policy.Table{Device: o.want.Device, Direction: o.want.Direction, Rules: rules})
		}
		if o.Set != nil && o.State != Attached && which == besideOthers {
			rules = append(o.Set.Policy(), rules...)
		}
		pools = append(pools, policy.Above(rules, find)...)
	}
	policy.SortRules(pools)
	pools = slices.Compact(pools)
	return pools, policy.CheckPools(append(tables, policy.Table{Rules: pools}))
}

// concernsOthers reports whether what an order wants in a phase changes a pool, or counts together with what is within its pools.
func (o *order) concernsOthers(phase int) bool {
	return slices.ContainsFunc(*o.wants(phase), func(r policy.Rule) bool {
		found := false
		if r.Pool && o.Set != nil {
			_, found = o.Set.Find(r.Prefix)
		}
		return found || r.Guarantee != 0 || r.Label.Waits != 0 || r.Cluster.Name != ""
	})
}

// settleAmong is settle among all rules and pools that there are. Who has his guarantee keeps it, and then devices that came
// first come first.
func (n planner) settleAmong(all orders, phase int, which scope) (pools []policy.Rule, err error) {
	at, of := map[Side]*order{}, map[uint32]*order{}
	var tables []policy.Table
	for _, o := range all {
		if at[o.side()] = o; o.Set != nil {
			of[o.Set.Number()] = o
		} else {
			tables = append(tables, policy.Table{Device: o.want.Device, Direction: o.want.Direction, Rules: *o.wants(phase)})
		}
	}
	has := map[string]bool{}
	var have [][]policy.Rule
	if phase > 0 {
		have = n.store(phase).Policies()
	} else if n.pins.store != nil {
		have = n.pins.policies()
	}
	for number, rules := range have {
		set := n.pins.store.View(uint32(number))
		t, o := policy.Table{Device: set.Device(), Direction: set.Direction()}, of[set.Number()]
		for i := range rules {
			if rules[i].Guarantee != 0 {
				has[t.Claimant(&rules[i])] = true
			}
		}
		if len(rules) == 0 && o == nil {
			continue
		}
		if o == nil || which != onlyThese {
			t.Rules = withoutWaits(rules)
		}
		if o != nil {
			t.Device, t.Rules = o.want.Device, beside(t.Rules, *o.wants(phase))
		}
		tables = append(tables, t)
	}
	policy.SortTables(tables)
	if len(tables) > 0 && tables[0].IsPools() {
		pools = tables[0].Rules
	}
	turn := map[string]int{} // of those who claim
	tree := policy.NewTree(tables)
	claims := tree.Grant(func(who string) int {
		if _, known := turn[who]; !known {
			dev, _ := netinfo.KnownDevice(who) // a pool comes before devices
			if turn[who] = dev.Index; has[who] {
				turn[who] -= math.MaxInt32
			}
		}
		return turn[who]
	})
	if phase == 0 {
		n.Claims = claims
	}
	for _, c := range claims {
		for _, m := range c.Members {
			s := Side{}
			if m.Table != nil {
				s = Side{m.Table.Device, m.Table.Direction}
			}
			rules := *at[s].wants(phase)
			i, _ := slices.BinarySearchFunc(rules, m.Rule.Prefix, func(r policy.Rule, p netip.Prefix) int { return policy.ComparePrefix(r.Prefix, p) })
			rules[i] = *m.Rule
		}
	}
	if problems := tree.Problems(); len(problems) > 0 {
		return pools, problems[0]
	}
	return pools, nil
}

// concernPools reports whether orders change pools, or set rules that are within one.
func (all orders) concernPools() bool {
	return all.drawFromPools() || slices.ContainsFunc(all, func(o *order) bool { return o.isPools() && o.Set != nil && o.Set.Any(maps.Exists) })
}

// drawFromPools reports whether orders set pools, or rules that are within one.
func (all orders) drawFromPools() bool {
	return slices.ContainsFunc(all, func(o *order) bool {
		within := func(r policy.Rule) bool { return r.Pool || r.Within != "" }
		return slices.ContainsFunc(o.want.Rules, within) || slices.ContainsFunc(o.then, within)
	})
}

// withoutWaits returns rules none of which waits for its guarantee: those that are not wanted go on waiting.
func withoutWaits(rules []policy.Rule) []policy.Rule {
	waits := func(r policy.Rule) bool { return r.Label.Waits != 0 }
	if slices.ContainsFunc(rules, waits) {
		rules = slices.Clone(rules)
		for i := range rules {
			rules[i].Label.Waits = 0
		}
	}
	return rules
}

// beside returns rules together with others, which replace those of the same networks. All are sorted.
func beside(rules, others []policy.Rule) (all []policy.Rule) {
	if len(rules) == 0 {
		return others
	}
	all = make([]policy.Rule, 0, len(rules)+len(others))
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
		return d.Have != nil && (d.Have.Excess == policy.Delay || d.Want != nil && d.Want.Excess == policy.Delay)
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
		o := h.asItIs(h.Device)
		all = append(all, o)
		if err = o.planQueue(n.pins.options.SetupFQ, drawn); err != nil {
			err = fmt.Errorf("%s: %w", tableName(o.want), err)
		}
	}
	return all, err
}
