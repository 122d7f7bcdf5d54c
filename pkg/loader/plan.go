package loader

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Side is a direction of a device.
type Side struct {
	Device    string
	Direction policy.Direction
}

// scope is which rules tables stand for.
type scope bool

const (
	onlyThese    scope = false
	besideOthers scope = true // which rules of the tables replace where they have the same network
)

// A planner makes the orders of commands. It changes nothing.
type planner struct{ *Namespace }

// plan makes the orders for tables. A device that does not exist has none.
func (n planner) plan(tables []policy.Table, which scope, o ApplyOptions) (all orders, err error) {
	if err := n.pins.readable(); err != nil {
		return nil, err
	}
	if which == onlyThese {
		if all, err = n.withoutRules(o.Devices); err != nil {
			return all, err
		}
	}
	named := func(t policy.Table, err error) error {
		if which == onlyThese || len(tables) > 1 {
			err = fmt.Errorf("%s: %w", tableName(t), err)
		}
		return err
	}
	at := map[Side]*order{}
	for _, o := range all {
		at[Side{o.dev.Name, o.Direction}] = o
	}
	for _, t := range tables {
		if !t.IsPools() && o.Devices != nil && !slices.Contains(o.Devices, t.Device) {
			continue
		}
		if known := at[Side{t.Device, t.Direction}]; known != nil {
			known.want = t
		} else if all, err = n.add(all, t); err != nil {
			return all, named(t, err)
		}
	}
	for _, one := range all {
		one.planSteps(which)
	}
	pools, err := n.poolsAfter(all, which)
	if err != nil {
		return all, err
	}
	for _, one := range all {
		if one.isPools() {
			continue
		}
		rules := one.want.Rules
		if which == besideOthers && one.Set != nil && one.State != Attached {
			rules = append(one.Set.Policy(), rules...) // all are attached again, perhaps to another device
		}
		err := one.check(n, rules, drawnFrom(rules, pools))
		if err == nil {
			err = one.checkMatch(which == besideOthers && o.Final)
		}
		if err != nil && !one.deleted(err) {
			return all, named(one.want, err)
		}
	}
	return n.planDrawing(all, pools)
}

// withoutRules are the orders that leave no pools, and no rules on devices; nil for all.
func (n planner) withoutRules(devices []string) (all orders, err error) {
	var hooks []*Hook
	if devices == nil {
		hooks, err = n.Hooks()
	}
	for _, device := range slices.Compact(slices.Sorted(slices.Values(devices))) {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			h, failed := n.Find(device, d)
			if err = errors.Join(err, failed); h != nil {
				hooks = append(hooks, h)
			}
		}
	}
	all = orders{n.poolsOrder(nil)}
	for _, h := range hooks {
		if h.Device.Name == "" {
			h.Close()
			continue
		}
		all = append(all, newOrder(h, h.Device, policy.Table{Device: h.Device.Name, Direction: h.Direction, Match: h.Match()}))
	}
	return all, err
}

// add adds the order for a table, if its device exists and there is anything to do.
func (n planner) add(all orders, t policy.Table) (orders, error) {
	if t.IsPools() {
		return append(all, n.poolsOrder(t.Rules)), nil
	}
	if len(t.Rules) == 0 {
		return all, nil
	}
	dev, err := netinfo.DeviceByName(t.Device)
	if errors.Is(err, netinfo.ErrNoDevice) {
		return all, nil // it was deleted meanwhile
	}
	var h *Hook
	if err == nil {
		h, err = n.Find(dev.Name, t.Direction)
	}
	if err != nil {
		return all, err
	}
	if h == nil {
		h = newHook(dev, t.Direction)
	}
	if all = append(all, newOrder(h, dev, t)); h.State == Moved {
		err = ErrMoved
	}
	return all, err
}

// planSteps finds the steps from the rules that the hook has to those that it shall have.
func (o *order) planSteps(which scope) {
	have := policy.Table{Device: o.want.Device, Direction: o.want.Direction, Match: o.want.Match}
	switch {
	case o.Set == nil:
	case which == onlyThese:
		have.Rules = o.Set.Policy()
	default:
		for _, r := range o.want.Rules {
			if e, found := o.Set.Find(r.Prefix); found {
				have.Rules = append(have.Rules, e.Rule)
			}
		}
	}
	o.steps = have.Diff(o.want)
	if o.isPools() {
		parentsFirst(o.steps)
	}
}

// check finds out why a hook cannot have rules, and the pools that these draw from.
func (o *order) check(n planner, rules, drawn []policy.Rule) error {
	if o.Set == nil {
		if err := n.pins.dir.elsewhere(o.dev, o.Direction); err != nil {
			return err
		}
	}
	if err := o.dev.CheckReadable(); err != nil {
		return err
	}
	return o.planQueue(rules, drawn, n.pins.options.SetupFQ)
}

// checkMatch returns an error if rules in force would match another address: any, if the change may revert, or else one that
// stays. A hook without a rule in force is kept only for a rollback, and goes when the last change ends.
func (o *order) checkMatch(lasts bool) error {
	if o.Set == nil || len(o.want.Rules) == 0 || o.Match() == o.want.Match {
		return nil
	}
	for _, e := range o.Set.Rules() {
		if !lasts || !slices.ContainsFunc(o.want.Rules, func(r policy.Rule) bool { return r.Prefix == e.Prefix }) {
			return fmt.Errorf("%w (%s)", ErrMatch, o.Match())
		}
	}
	return nil
}

// planNew is plan for hooks without rules, and for those of their pools that do not exist. reverted is nil unless a change is
// pending; then they are the tables once it has reverted.
func (n planner) planNew(tables, reverted []policy.Table) (all orders, err error) {
	if err := n.pins.readable(); err != nil {
		return nil, err
	}
	all = orders{n.poolsOrder(nil)}
	at, drawn := map[Side]*order{{}: all[0]}, map[*order][]policy.Rule{}
	phases, stores := [][]policy.Table{tables}, []*maps.Store{n.pins.store}
	if reverted != nil {
		phases, stores = append(phases, reverted), append(stores, n.pins.store.Reverted())
	}
	for phase, tables := range phases {
		var without []policy.Table
		var pools []policy.Rule
		for _, t := range tables {
			if t.IsPools() {
				pools = t.Rules
				continue
			}
			if last, its := len(all), (Side{t.Device, t.Direction}); at[its] == nil {
				if all, err = n.add(all, t); err != nil {
					return all, fmt.Errorf("%s: %w", tableName(t), err)
				}
				if len(all) == last {
					continue
				}
				if all[last].Set != nil { // another command set rules meanwhile
					all[last].Close()
					all = all[:last]
					continue
				}
				at[its] = all[last]
			}
			without = append(without, t)
		}
		without = append(without, policy.Table{Rules: missing(stores[phase], pools, without)})
		above, err := checkNew(stores[phase], without)
		if err != nil {
			return all, err
		}
		for _, t := range without {
			o := at[Side{t.Device, t.Direction}]
			if o.want.Match != t.Match {
				return all, n.pins.pending()
			}
			if reverted != nil && o.then == nil {
				o.then = &[2][]policy.Rule{}
			}
			if o.then != nil {
				o.then[phase] = t.Rules
			}
			o.want.Rules = beside(t.Rules, o.want.Rules) // there must be room for both
			drawn[o] = append(drawn[o], drawnFrom(t.Rules, above)...)
		}
	}
	for _, store := range stores[1:] {
		for _, p := range all[0].want.Rules {
			_, found := n.pins.store.Pools().Find(p.Prefix)
			_, foundThen := store.Pools().Find(p.Prefix)
			if found || foundThen { // in the other phase only
				return all, n.pins.pending()
			}
		}
	}
	for _, o := range all {
		o.planSteps(besideOthers)
		if !o.isPools() {
			if err := o.failed(o.check(n, o.want.Rules, drawn[o])); err != nil {
				return all, err
			}
		}
		if o.then != nil {
			for i := range o.then[1] { // companions of both need room
				o.steps = append(o.steps, policy.Difference{Want: &o.then[1][i]})
			}
		}
	}
	return all, nil
}

// elsewhere returns ErrElsewhere if programs of shapectl are on a device without any pin in
// this namespace, as far as this process may look.
func (dir home) elsewhere(dev netinfo.Device, d policy.Direction) error {
	if dir != "" && exists(dir.hookDir(dev.Index, d).dir) {
		return nil
	}
	chain, err := netinfo.Chain(dev.Index, d, nil)
	if slices.ContainsFunc(chain, func(e netinfo.ChainEntry) bool { return strings.HasPrefix(e.Name, program.Name) }) {
		return ErrElsewhere
	}
	return err
}
