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

// A side is one direction of a device.
type side struct {
	device    string
	direction policy.Direction
}

// plan makes the orders that bring a policy into force on devices, or on all for nil. It changes nothing.
func (n *Namespace) plan(tables []policy.Table, devices []string) (all orders, err error) {
	other := func(device string) bool { return devices != nil && !slices.Contains(devices, device) }
	hooks, err := n.Hooks()
	all = orders{n.poolsOrder(nil)}
	moved := map[side]bool{}
	for _, h := range hooks {
		if h.State == Moved {
			moved[side{h.Name(), h.Direction}] = true
		}
		if h.Device.Name == "" || other(h.Device.Name) {
			h.Close()
			continue
		}
		none := policy.Table{Device: h.Device.Name, Direction: h.Direction, Match: h.Match()}
		all = append(all, newOrder(h, h.Device, none))
	}
	if err != nil {
		return all, err
	}
	if devices == nil {
		return n.planTables(all, moved, tables, onlyThese)
	}
	tables = slices.DeleteFunc(slices.Clone(tables), func(t policy.Table) bool { return !t.IsPools() && other(t.Device) })
	if all, err = n.planTables(all, moved, tables, onlyThese); err != nil {
		return all, err
	}
	pools, err := n.poolsAfter(all, onlyThese)
	if err != nil {
		return all, err
	}
	return n.planDrawing(all, pools)
}

// planTables adds tables to orders, and plans their steps.
func (n *Namespace) planTables(all orders, moved map[side]bool, tables []policy.Table, which scope) (orders, error) {
	all, err := all.add(moved, tables)
	if err != nil {
		return all, err
	}
	pools, err := n.poolsAfter(all, which)
	if err != nil {
		return all, err
	}
	return all, n.checkAll(all, which, func(o *order) []policy.Rule { return drawnFrom(o.want.Rules, pools) })
}

// add adds tables to the orders of the pools and of existing hooks, and orders for new hooks.
func (all orders) add(moved map[side]bool, tables []policy.Table) (orders, error) {
	at := map[side]*order{}
	for _, o := range all {
		at[side{o.dev.Name, o.Direction}] = o
	}
	for _, t := range tables {
		its := side{t.Device, t.Direction}
		if at[its] != nil {
			at[its].want = t
			continue
		}
		if len(t.Rules) == 0 {
			continue
		}
		if moved[its] {
			return all, fmt.Errorf("%s %s: %w", t.Device, t.Direction, ErrMoved)
		}
		dev, err := netinfo.DeviceByName(t.Device)
		if errors.Is(err, netinfo.ErrNoDevice) {
			continue // the device was deleted meanwhile
		}
		if err != nil {
			return all, fmt.Errorf("%s: %w", t.Device, err)
		}
		all = append(all, newOrder(newHook(dev, t.Direction), dev, t))
	}
	return all, nil
}

// checkAll checks hooks, whose rules draw from pools, and plans the steps of all orders.
func (n *Namespace) checkAll(all orders, which scope, drawn func(*order) []policy.Rule) error {
	for _, o := range all {
		if !o.isPools() {
			if err := o.failed(o.check(n.pins.dir, drawn(o), n.options.SetupFQ)); err != nil {
				return err
			}
		}
		if o.gone == nil {
			o.planSteps(which)
		}
	}
	return nil
}

// check finds out why a hook cannot have its rules.
func (o *order) check(dir home, drawn []policy.Rule, setupFQ bool) error {
	if o.Set == nil {
		if err := dir.elsewhere(o.dev, o.Direction); err != nil {
			return err
		}
	}
	if err := o.dev.CheckReadable(); err != nil {
		return err
	}
	if err := o.planQueue(o.want.Rules, drawn, setupFQ); err != nil {
		return err
	}
	// Without a rule in force, a hook is kept only for a rollback. It goes when the last change ends.
	if o.Set != nil && len(o.want.Rules) > 0 && o.Match() != o.want.Match && o.Set.Any(maps.InForce) {
		return fmt.Errorf("%w (%s)", ErrMatch, o.Match())
	}
	return nil
}

// planSteps finds the steps from the rules that the hook has to those that it shall have.
func (o *order) planSteps(which scope) {
	have := o.among(o.want)
	if which == onlyThese && o.Set != nil {
		have.Rules = o.Set.Policy()
	}
	o.steps = have.Diff(o.want)
	if o.isPools() {
		parentsFirst(o.steps)
	}
}

// planRules is plan for the rules of tables, beside the other rules of their hooks.
func (n *Namespace) planRules(tables []policy.Table) (all orders, err error) {
	named := func(t policy.Table, err error) error {
		if len(tables) > 1 {
			err = fmt.Errorf("%s: %w", tableName(t), err)
		}
		return err
	}
	for _, t := range tables {
		o, err := n.planBeside(t)
		if o != nil {
			all = append(all, o)
		}
		if err != nil {
			return all, named(t, err)
		}
	}
	pools, err := n.poolsAfter(all, besideOthers)
	if err != nil {
		return all, err
	}
	for _, o := range all {
		rules := o.want.Rules
		if o.Set != nil && o.State != Attached {
			rules = append(o.Set.Policy(), rules...) // all are attached again, perhaps to another device
		}
		if o.isPools() {
			rules = nil
		}
		if err := o.planQueue(rules, drawnFrom(rules, pools), n.options.SetupFQ); err != nil {
			return all, named(o.want, err)
		}
	}
	return n.planDrawing(all, pools)
}

// planBeside makes the order for the rules of a table. With an error, there may be one to close.
func (n *Namespace) planBeside(want policy.Table) (*order, error) {
	if want.IsPools() {
		o := n.poolsOrder(want.Rules)
		o.planSteps(besideOthers)
		return o, n.pins.readable()
	}
	dev, err := netinfo.DeviceByName(want.Device)
	if err != nil {
		return nil, err
	}
	if err := dev.CheckReadable(); err != nil {
		return nil, err
	}
	h, err := n.Find(dev.Name, want.Direction)
	if err != nil {
		return nil, err
	}
	if h == nil {
		h = newHook(dev, want.Direction)
		err = n.pins.dir.elsewhere(dev, want.Direction)
	}
	o := newOrder(h, dev, want)
	if err != nil {
		return o, err
	}
	if h.State == Moved {
		return o, ErrMoved
	}
	if h.Set != nil && h.Match() != want.Match {
		for _, e := range h.Set.Rules() {
			if !slices.ContainsFunc(want.Rules, func(r policy.Rule) bool { return r.Prefix == e.Prefix }) {
				return o, fmt.Errorf("%w (%s)", ErrMatch, h.Match())
			}
		}
	}
	o.planSteps(besideOthers)
	return o, nil
}

// planNew is plan for hooks without rules, and for those of their pools that do not exist.
func (n *Namespace) planNew(tables, reverted []policy.Table) (orders, error) {
	if err := n.pins.readable(); err != nil {
		return nil, err
	}
	now, pools, err := n.newIn(n.pins.store, tables)
	if err != nil {
		return nil, err
	}
	if reverted != nil {
		then, poolsThen, err := n.newIn(n.pins.store.Reverted(), reverted)
		if err != nil {
			return nil, err
		}
		return n.planPending(now, then, pools, poolsThen)
	}
	all, err := orders{n.poolsOrder(nil)}.add(nil, now)
	if err != nil {
		return all, err
	}
	return all, n.checkAll(all, besideOthers, func(o *order) []policy.Rule { return drawnFrom(o.want.Rules, pools) })
}

// newIn are the tables of hooks without rules, and last those of their pools that do not exist, in a phase of a change.
// drawn are all pools that they draw from.
func (n *Namespace) newIn(store *maps.Store, tables []policy.Table) (without []policy.Table, drawn []policy.Rule, err error) {
	without, pools, err := n.withoutRules(tables)
	if err != nil {
		return nil, nil, err
	}
	without = append(without, policy.Table{Rules: missing(store, pools, without)})
	drawn, err = checkNew(store, without)
	return without, drawn, err
}

// planPending is planNew for tables while a change is pending, and for those after it has reverted, which draw from pools.
func (n *Namespace) planPending(now, then []policy.Table, pools, poolsThen []policy.Rule) (all orders, err error) {
	at := map[side]*afterRevert{}
	var tables []policy.Table // with the rules of both, for which there must be room
	for i, t := range append(now, then...) {
		its := side{t.Device, t.Direction}
		if at[its] == nil {
			at[its] = &afterRevert{}
			tables = append(tables, t)
		}
		if i < len(now) {
			at[its].now = t.Rules
		} else {
			at[its].reverted = t.Rules
		}
		one := slices.IndexFunc(tables, func(o policy.Table) bool { return o.Device == t.Device && o.Direction == t.Direction })
		if tables[one].Match != t.Match {
			return nil, &PendingError{n.pins.store.Until(), n.Author()}
		}
		tables[one].Rules = beside(t.Rules, tables[one].Rules)
	}
	for _, store := range []*maps.Store{n.pins.store, n.pins.store.Reverted()} {
		for _, p := range append(slices.Clone(at[side{}].now), at[side{}].reverted...) {
			if _, found := store.Pools().Find(p.Prefix); found { // in the other phase only
				return nil, &PendingError{n.pins.store.Until(), n.Author()}
			}
		}
	}
	if all, err = (orders{n.poolsOrder(nil)}).add(nil, tables); err != nil {
		return all, err
	}
	for _, o := range all {
		o.then = at[side{o.want.Device, o.want.Direction}]
	}
	err = n.checkAll(all, besideOthers, func(o *order) []policy.Rule {
		return append(drawnFrom(o.then.now, pools), drawnFrom(o.then.reverted, poolsThen)...)
	})
	for _, o := range all {
		for i := range o.then.reverted { // companions of both need room
			o.steps = append(o.steps, policy.Difference{Want: &o.then.reverted[i]})
		}
	}
	return all, err
}

// withoutRules are the tables of hooks without rules, and the pools.
func (n *Namespace) withoutRules(tables []policy.Table) (without []policy.Table, pools []policy.Rule, err error) {
	for _, t := range tables {
		if t.IsPools() {
			pools = t.Rules
			continue
		}
		h, err := n.Find(t.Device, t.Direction)
		if h == nil && err == nil {
			without = append(without, t)
			continue
		}
		if h != nil {
			h.Close()
			if h.State != Moved {
				continue // another command set rules meanwhile
			}
			err = ErrMoved
		}
		return nil, nil, fmt.Errorf("%s %s: %w", t.Device, t.Direction, err)
	}
	return without, pools, nil
}

// planned carries out a plan function. Before the first thing is pinned, it makes a place
// for pins and plans once more, as another command may have been faster.
func (n *Namespace) planned(plan func() (orders, error)) (orders, error) {
	orders, err := plan()
	if err != nil || n.pins.dir != "" || !orders.haveWork() {
		return orders, err
	}
	orders.close()
	if err := n.makeHome(); err != nil {
		return nil, err
	}
	return plan()
}

// endBefore ends the last change before planned orders, and plans once more: hooks may have gone with it.
func (n *Namespace) endBefore(all orders, plan func() (orders, error), h *Hook) (orders, error) {
	if n.pins.store == nil {
		return all, nil
	}
	if state, _ := n.pins.store.Change(); state == maps.NoChange {
		return all, nil
	}
	if err := n.pins.endChange(h); err != nil {
		return all, err
	}
	all.close()
	return plan()
}

// Elsewhere returns the directions of devices, among those for which which is true, that have limits of ErrElsewhere, as
// far as this process may look.
func (n *Namespace) Elsewhere(which func(device string, d policy.Direction) bool) (found []string) {
	devices, _ := netinfo.Devices()
	for _, dev := range devices {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			if which(dev.Name, d) && errors.Is(n.pins.dir.elsewhere(dev, d), ErrElsewhere) {
				found = append(found, dev.Name+" "+d.String())
			}
		}
	}
	return found
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
