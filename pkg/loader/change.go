package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Change is what a command did to a hook, besides its rules.
type Change struct {
	Changed    bool
	Reattached string // the state of the hook before it was attached again
	Upgraded   bool   // the program of another build was replaced
	Replaced   string // the default qdisc that fq has replaced
	Redirected bool   // from now on, arriving packets of rules that delay go through an ifb
	// Lacks is how many packets may be queued, if the fq has no room for so many.
	Lacks uint32
}

// ErrMatch means that the rules of a hook match the other address of packets.
var ErrMatch = errors.New("other rules of this device and direction match the other address of packets")

// ErrPending means that a change is pending.
var ErrPending = errors.New("the last change is not confirmed yet")

// A PendingError is an ErrPending that says when the change reverts.
type PendingError struct {
	Until  uint64 // in ns of maps.Now
	Author Author
}

func (*PendingError) Error() string { return ErrPending.Error() }
func (*PendingError) Unwrap() error { return ErrPending }

// ErrElsewhere means that the device has programs of shapectl without pins in this namespace.
var ErrElsewhere = errors.New("limits of shapectl are already on the device, set from another network namespace or another bpffs")

// ErrMoved means that rules are in force on a device that had this name and is in another namespace now.
var ErrMoved = errors.New("its rules are in force on the device that had this name and has moved to another namespace")

// Put is PutTogether for one direction of a device.
func (n *Namespace) Put(dev netinfo.Device, d policy.Direction, match policy.Match, rules ...policy.Rule) (Change, error) {
	done, err := n.PutTogether(0, policy.Table{Device: dev.Name, Direction: d, Match: match, Rules: rules})
	if err != nil {
		return Change{}, err
	}
	return done[0].Hook, nil
}

// PutTogether sets the valid rules of tables beside the other rules of their devices, and attaches the hooks. Errors, and what
// confirm is for, are those of Apply. Of several devices, one that was deleted meanwhile gets no rules, and is not in what was
// done.
func (n *Namespace) PutTogether(confirm time.Duration, tables ...policy.Table) (done []Applied, err error) {
	tables = slices.Clone(tables)
	for i := range tables {
		tables[i].Rules = slices.Clone(tables[i].Rules)
		policy.SortRules(tables[i].Rules)
	}
	all, err := n.carryOut(func() (orders, error) { return n.planRules(tables) }, ApplyOptions{Confirm: confirm, Final: confirm == 0})
	if err != nil {
		return nil, err
	}
	for _, o := range all {
		if o.gone == nil {
			done = append(done, o.done)
		}
	}
	if done == nil {
		return nil, all[0].gone
	}
	return done, nil
}

// carryOut carries out a plan. What it returns is closed.
func (n *Namespace) carryOut(plan func() (orders, error), o ApplyOptions) (orders, error) {
	all, err := n.planned(plan)
	defer func() { all.close() }()
	if err != nil || !all.haveWork() {
		return all, err // the last change can still be rolled back
	}
	if all, err = n.endBefore(all, plan, all.only(o)); err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(all, (*order).turns); o.Confirm > 0 && i >= 0 {
		return nil, fmt.Errorf("%s: %w (%s)", tableName(all[i].want), ErrMatch, all[i].Match())
	}
	err = n.pins.changing(func() error { return all.apply(&n.pins, n.options, o) })
	for _, one := range all {
		one.done.Rules, one.done.Hook.Changed = maps.Count(one.steps), len(one.steps) > 0
	}
	return all, err
}

// isOther reports whether a hook matches another address than is wanted, or has the program of another build.
func (o *order) isOther() bool {
	build, err := o.OtherBuild()
	return build || err != nil || o.Match() != o.want.Match
}

// turns reports whether rules in force would match another address. No change can revert that.
func (o *order) turns() bool {
	return !o.isPools() && o.Set != nil && o.Match() != o.want.Match && o.Set.Any(maps.InForce)
}

// among returns the rules that the hook has for the networks of a table.
func (h *Hook) among(t policy.Table) policy.Table {
	networks := t.Rules
	t.Rules = nil
	for _, r := range networks {
		if h.Set == nil {
			break
		}
		if e, found := h.Set.Find(r.Prefix); found {
			t.Rules = append(t.Rules, e.Rule)
		}
	}
	return t
}

// Delete removes the rules of networks from hooks, each of which may have its own networks, and detaches each hook without a
// rule left. All rules go at one moment. Errors are those of Put and Flush.
func (n *Namespace) Delete(networks func(*Hook) []netip.Prefix, hooks ...*Hook) error {
	if err := n.pins.readable(); err != nil {
		return err
	}
	_, err := n.carryOut(func() (all orders, err error) {
		for _, h := range hooks {
			all = append(all, h.without(networks(h)))
		}
		return all, nil
	}, ApplyOptions{Final: true})
	return err
}

// without is the order that removes the rules of networks, whatever the state of the hook is.
func (h *Hook) without(networks []netip.Prefix) *order {
	it := *h
	it.Set.Store.Hold()
	o := &order{Hook: &it, dev: h.Device, want: policy.Table{Device: h.Name(), Direction: h.Direction}, asIs: true}
	for _, p := range networks {
		if e, found := h.Set.Find(p); found {
			o.steps = append(o.steps, policy.Difference{Have: &e.Rule})
		}
	}
	return o
}

// Flush removes all rules of hooks, and detaches the hooks. The error wraps ErrPending, and
// nothing is changed, if one of the hooks takes part in a pending change. If a hook cannot
// be flushed, the others still are.
func (n *Namespace) Flush(hooks ...*Hook) error {
	if len(hooks) == 0 {
		return nil
	}
	for _, h := range hooks {
		if err := n.pins.endChange(h); err != nil {
			return err
		}
	}
	return n.pins.changing(func() error {
		for _, h := range hooks {
			h.Set.Clear() // all before the first is detached, as that takes a while
		}
		return forEach(&n.pins, hooks, n.pins.removeHook)
	})
}

// FlushAll is Flush for all hooks of the namespace, including those of another version of shapectl.
// told is called before, with each hook that can be read; discarded is called after, with each that cannot.
func (n *Namespace) FlushAll(told func(*Hook), discarded func(OtherHook)) error {
	if n.pins.dir == "" {
		return nil
	}
	if err := n.pins.endChange(nil); err != nil {
		return err
	}
	hooks, err := n.pins.readHooks()
	defer CloseHooks(hooks)
	if err != nil {
		return err
	}
	pools := n.Pools()
	defer pools.Close()
	if pools.Set != nil {
		told(pools)
	}
	for _, h := range hooks {
		told(h)
	}
	var others []OtherHook
	if n.pins.foreign != nil {
		others = n.pins.foreign.Hooks
	}
	return n.pins.haste.hurry(len(hooks)+len(others), func() error {
		failed := []error{n.Flush(hooks...)}
		gone, err := n.Discard(others...)
		for _, other := range gone {
			discarded(other)
		}
		pooled := n.pins.changing(func() error {
			if pools.Set != nil {
				pools.Set.Clear() // after what is within them
			}
			return n.pins.discardForeign()
		})
		return errors.Join(append(failed, err, pooled, n.pins.complete())...)
	})
}

// Discard detaches hooks of another layout, and removes their pins. It returns those that
// are gone, also with an error.
func (n *Namespace) Discard(others ...OtherHook) (gone []OtherHook, err error) {
	if len(others) == 0 {
		return nil, nil
	}
	err = n.pins.changing(func() error {
		return forEach(&n.pins, others, func(other OtherHook) error {
			err := n.pins.discardOther(other)
			if err == nil {
				gone = append(gone, other)
			}
			return err
		})
	})
	return gone, err
}

// ApplyNew brings tables into force on hooks without rules, and adds those of their pools and of the pools of hosts that
// do not exist. Each hook has all its rules from the moment on that it is attached. The last change of other hooks can
// still be reverted, unless it changed pools and these tables draw from some. ApplyNew returns what was done to hooks, also
// with an error; nothing is done to a device that was deleted meanwhile.
//
// reverted is what the tables shall be once the pending change has reverted; nil if they shall stay. The error wraps
// ErrPending if pools in the change rule that out.
func (n *Namespace) ApplyNew(tables, reverted []policy.Table) (done []Applied, err error) {
	if n.pins.state() != maps.Pending {
		reverted = nil
	}
	plan := func() (orders, error) { return n.planNew(tables, reverted) }
	orders, err := n.planned(plan)
	defer func() { orders.close() }()
	if err != nil || !orders.haveWork() {
		return nil, err
	}
	if pools := orders[0].Set; reverted == nil && pools != nil && pools.Any(maps.TakesPart) && orders.drawFromPools() {
		if orders, err = n.endBefore(orders, plan, nil); err != nil {
			return nil, err
		}
	}
	err = n.pins.changing(func() error {
		if err := orders.claim(&n.pins); err != nil {
			return err
		}
		for _, o := range orders {
			if err := o.load(); err != nil {
				return fmt.Errorf("%s: %w", tableName(o.want), err)
			}
		}
		err := orders.attach(&n.pins, n.options)
		if err == nil {
			orders.sweepGone(&n.pins)
		}
		return err
	})
	for _, o := range orders {
		if o.State == Attached && !o.isPools() {
			o.done.Rules, o.done.Hook.Changed = maps.Count(o.steps), true
			if o.then != nil {
				o.done.Rules = maps.Difference{Added: len(o.then.now)}
			}
			done = append(done, o.done)
		}
	}
	return done, err
}

// load sets the rules of a new hook, or new pools.
func (o *order) load() error {
	steps := func(from, to []policy.Rule) []policy.Difference {
		steps := policy.Table{Rules: from}.Diff(policy.Table{Rules: to})
		parentsFirst(steps)
		return steps
	}
	wanted := func(steps []policy.Difference) (rules []policy.Rule) {
		for _, d := range steps {
			rules = append(rules, *d.Want)
		}
		return rules
	}
	if o.then != nil {
		return o.Set.LoadPending(wanted(steps(nil, o.then.reverted)), steps(o.then.reverted, o.then.now))
	}
	return o.Set.Load(wanted(o.steps))
}
