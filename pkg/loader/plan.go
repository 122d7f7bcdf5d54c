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
type scope uint8

const (
	onlyThese    scope = iota
	besideOthers       // which rules of the tables replace where they have the same network
	onNewHooks         // on hooks without rules, and of their pools those that do not exist
)

// A planner makes the orders of commands. It changes nothing.
type planner struct{ *Namespace }

// plan makes the orders for tables. A device that does not exist has none. A second list of tables is for after the revert of
// the last change.
func (n planner) plan(which scope, o ApplyOptions, phases ...[]policy.Table) (all orders, err error) {
	if err := n.pins.readable(); err != nil {
		return nil, err
	}
	n.Claims = nil
	switch which {
	case onlyThese:
		if all, err = n.withoutRules(o.Devices); err != nil {
			all.close()
			return nil, err
		}
		if pools := all[0].Set; pools != nil && slices.ContainsFunc(pools.Policy(), func(r policy.Rule) bool { return r.OfPods() }) {
			there, err := n.Tables(Attached, Detached)
			if err != nil {
				return all, err
			}
			phases[0] = policy.BesidePods(phases[0], there)
		}
	case onNewHooks:
		all = orders{n.poolsOrder(nil)}
	}
	named := func(t policy.Table, err error) error {
		if which != besideOthers || len(phases[0]) > 1 {
			err = fmt.Errorf("%s: %w", tableName(t), err)
		}
		return err
	}
	for phase, tables := range phases {
		var t policy.Table
		if all, t, err = n.addTables(all, tables, phase, which, o); err != nil {
			return all, named(t, err)
		}
	}
	if len(phases) > 1 {
		if err := n.checkPhases(all); err != nil {
			return all, err
		}
	}
	drawn := make([][]policy.Rule, len(phases))
	var problem error
	for phase := range phases {
		if drawn[phase], err = n.settle(all, phase, which); problem == nil {
			problem = err
		}
	}
	for _, one := range all {
		one.reverts = len(phases) > 1
		one.planSteps(which, o.Devices == nil)
	}
	if problem != nil && all.steps() > 0 {
		return all, problem
	}
	for _, one := range all {
		if one.isPools() {
			continue
		}
		var rules [][]policy.Rule
		for phase := range phases {
			of := *one.wants(phase)
			if which == besideOthers && one.Set != nil && one.State != Attached {
				of = append(one.Set.Policy(), of...) // all are attached again, perhaps to another device
			}
			rules = append(rules, of, drawnFrom(of, drawn[phase]))
		}
		err := one.check(n, rules...)
		if err == nil {
			err = one.checkMatch(which == besideOthers && o.Final)
		}
		if err != nil && !one.deleted(err) {
			return all, named(one.want, err)
		}
	}
	return n.planDrawing(all, drawn[0])
}

// addTables adds what tables want in a phase: 0 is now, 1 once the last change has reverted. With an error, it returns the table
// that it is of.
func (n planner) addTables(all orders, tables []policy.Table, phase int, which scope, o ApplyOptions) (orders, policy.Table, error) {
	at := map[Side]*order{}
	for _, o := range all {
		at[o.side()] = o
	}
	var pools []policy.Rule
	var added []policy.Table
	for _, t := range tables {
		if which == onNewHooks && t.IsPools() {
			pools = append(pools, t.Rules...)
			continue
		}
		if !t.IsPools() && o.Devices != nil && !slices.Contains(o.Devices, t.Device) {
			continue
		}
		if !o.check && slices.ContainsFunc(t.Rules, func(r policy.Rule) bool { return r.Label.Waits != 0 }) {
			t.Rules = slices.Clone(t.Rules) // with check, the caller learns who has his guarantee
		}
		known := at[Side{t.Device, t.Direction}]
		if known == nil {
			before := len(all)
			var err error
			if all, err = n.add(all, t, o); err != nil {
				return all, t, err
			}
			if len(all) == before {
				continue
			}
			known = all[before]
			known.want.Rules = nil
			if which == onNewHooks && known.Set != nil && known.State != Gone { // another command set rules meanwhile
				known.Close()
				all = all[:before]
			}
		}
		if which == onNewHooks && known.Set != nil {
			continue
		}
		if which == onNewHooks && known.want.Match != t.Match {
			return all, t, n.pins.pending()
		}
		if phase == 0 {
			known.want = t
		}
		*known.wants(phase) = t.Rules
		added = append(added, t)
	}
	if which == onNewHooks {
		*all[0].wants(phase) = missing(n.store(phase), pools, added)
	}
	return all, policy.Table{}, nil
}

// store is the maps as they are in a phase.
func (n planner) store(phase int) *maps.Store {
	if phase == 0 {
		return n.pins.store
	}
	return n.pins.store.Reverted()
}

// checkPhases returns an error if one of the new pools is there, in another phase of the last change.
func (n planner) checkPhases(all orders) error {
	for phase := range 2 {
		for _, p := range *all[0].wants(phase) {
			if _, found := n.store(1 - phase).Pools().Find(p.Prefix); found {
				return n.pins.pending()
			}
		}
	}
	return nil
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
		all = append(all, h.asItIs(h.Device))
	}
	return all, err
}

// add adds the order for a table, if its device exists and there is anything to do.
func (n planner) add(all orders, t policy.Table, o ApplyOptions) (orders, error) {
	if t.IsPools() {
		return append(all, n.poolsOrder(t.Rules)), nil
	}
	if len(t.Rules) == 0 {
		return all, nil
	}
	dev, err := netinfo.DeviceByName(t.Device)
	var h *Hook
	if unseen := errors.Is(err, netinfo.ErrNoDevice); err == nil || unseen {
		h, err = n.Find(t.Device, t.Direction)
		if unseen && h != nil {
			dev = h.Device // a cgroup
		}
		if unseen && dev.Index == 0 { // it was deleted meanwhile
			if h != nil {
				h.Close()
			}
			return all, err
		}
	}
	if err == nil && h == nil && o.returns != nil && o.returns(dev.Name) {
		h, err = n.left(t)
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

// left is the hook that a deleted device has left, nil for none. Its rules match the address of the table and do not delay, as that
// may need a qdisc first.
func (n planner) left(t policy.Table) (left *Hook, err error) {
	hooks, err := n.Hooks(netinfo.Device{Name: t.Device})
	for _, h := range hooks {
		if left == nil && err == nil && h.State == Gone && h.Direction == t.Direction && h.Match() == t.Match && !h.Set.Any(maps.Delays) {
			left = h
		} else {
			h.Close()
		}
	}
	return left, err
}

// planSteps finds the steps from the rules that the hook has to those that it shall have. ofAll: so for all hooks.
func (o *order) planSteps(which scope, ofAll bool) {
	have := policy.Table{Device: o.want.Device, Direction: o.want.Direction, Match: o.want.Match}
	switch {
	case o.Set == nil:
	case which == onlyThese && ofAll:
		have.Rules = o.Rules()
	case which == onlyThese:
		have.Rules = o.Set.Policy()
	default:
		for _, r := range o.want.Rules {
			if e, found := o.Set.Find(r.Prefix); found {
				have.Rules = append(have.Rules, e.Rule)
			}
		}
	}
	o.have, o.steps = have.Rules, have.Diff(o.want)
	if o.isPools() {
		parentsFirst(o.steps)
	}
	if o.reverts {
		for _, d := range (policy.Table{Rules: o.want.Rules}).Diff(policy.Table{Rules: o.then}) { // there must be room for both
			if d.Want != nil {
				o.steps = append(o.steps, policy.Difference{Want: d.Want})
			}
		}
	}
}

// check finds out why a hook cannot have rules, and the pools that these draw from.
func (o *order) check(n planner, rules ...[]policy.Rule) error {
	if o.Set == nil {
		if err := elsewhere(n.Namespace, o.dev, o.Direction); err != nil {
			return err
		}
	}
	if err := o.dev.CheckReadable(); err != nil {
		return err
	}
	return o.planQueue(n.pins.options.SetupFQ, rules...)
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

// elsewhere returns ErrElsewhere if programs of shapectl are on a device without any pin in
// this namespace, as far as this process may look.
func elsewhere(n *Namespace, dev netinfo.Device, d policy.Direction) error {
	ours, _ := n.Programs(dev.Index, d)
	chain, err := netinfo.Chain(dev.Index, d, ours)
	if slices.ContainsFunc(chain, func(e netinfo.ChainEntry) bool { return !e.Ours && strings.HasPrefix(e.Name, program.Name) }) {
		return ErrElsewhere
	}
	return err
}
