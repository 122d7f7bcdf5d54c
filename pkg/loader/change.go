package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
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

// Put sets the valid rules of tables beside the other rules of their devices, and attaches the hooks. Errors are those of Apply.
// Of several devices, one that was deleted meanwhile gets no rules, and is not in what was done.
func (n *Namespace) Put(o ApplyOptions, tables ...policy.Table) (done []Applied, err error) {
	tables = slices.Clone(tables)
	for i := range tables {
		tables[i].Rules = slices.Clone(tables[i].Rules)
		policy.SortRules(tables[i].Rules)
	}
	o.Final = o.Confirm == 0
	all, err := n.pins.carryOut(func() (orders, error) { return planner{n}.plan(besideOthers, o, tables) }, o)
	if err != nil {
		return nil, err
	}
	if done = all.done(func(o *order) bool { return o.gone == nil }); done == nil {
		err = netinfo.ErrNoDevice
		for _, o := range all {
			err = o.gone
		}
	}
	return done, err
}

// Delete removes the rules of networks from hooks, each of which may have its own networks, and detaches each hook without a
// rule left. A hook may be that of the pools, with policy.PoolKey. All go at one moment. The error wraps ErrPoolInUse if
// anything else is within a pool; else errors are those of Apply.
func (n *Namespace) Delete(o ApplyOptions, networks func(*Hook) []netip.Prefix, hooks ...*Hook) (done []Applied, err error) {
	if err := n.pins.readable(); err != nil {
		return nil, err
	}
	o.Final = o.Confirm == 0
	all, err := n.pins.carryOut(func() (all orders, err error) {
		pools, deleted := map[policy.Within]bool{}, map[uint32]bool{}
		for _, h := range hooks {
			o := h.removal(false)
			all = append(all, o)
			for _, p := range networks(h) {
				e, found := h.Set.Find(p)
				if found {
					o.steps, deleted[e.ID] = append(o.steps, policy.Difference{Have: &e.Rule}), true
				}
				if e.Pool {
					pools[policy.Within(e.Label.Name)] = true
				}
			}
		}
		if len(pools) > 0 {
			if users := n.pins.within(pools, deleted); users != nil {
				return all, fmt.Errorf("%w: within it is %s", ErrPoolInUse, plain.List(users))
			}
		}
		return all, nil
	}, o)
	if err != nil {
		return nil, err
	}
	return all.done(func(o *order) bool { return len(o.steps) > 0 }), nil
}

// Flush removes all rules of hooks or pools, and detaches the hooks, which may be of another layout. The error wraps
// ErrPending, and nothing is changed, if one of them takes part in a pending change. If a hook cannot be flushed, the others
// still are. Pools must come last, after all that is within them.
func (n *Namespace) Flush(hooks ...*Hook) error {
	return n.pins.flush(ApplyOptions{Final: true}, hooks)
}

func (p *pins) flush(o ApplyOptions, hooks []*Hook) error {
	if p.dir == "" {
		return nil // there is nothing
	}
	_, err := p.carryOut(func() (all orders, err error) {
		for _, h := range hooks {
			all = append(all, h.removal(true))
		}
		return all, nil
	}, o)
	return err
}

// ApplyNew brings tables into force on hooks without rules, and adds those of their pools and of the pools of hosts that
// do not exist. Each hook has all its rules from the moment on that it is attached. ApplyNew returns what was done to hooks,
// also with an error; nothing is done to a device that was deleted meanwhile.
//
// reverted is what the tables shall be once the last change has reverted; nil if they shall stay. If pools in the change rule
// that out, the error wraps ErrPending while it is pending. Later the tables stay, and if they draw from pools, a change of pools
// cannot be rolled back any more. returns, which may be nil, tells which devices get the rules back that a deleted
// device of that name had, with new counters. That takes no longer for many rules.
func (n *Namespace) ApplyNew(tables, reverted []policy.Table, returns func(device string) bool) (done []Applied, err error) {
	phases := [][]policy.Table{policy.WithoutGuarantees(tables)}
	if _, _, none := n.pins.lastChange(); reverted != nil && none == nil {
		phases = append(phases, policy.WithoutGuarantees(reverted))
	}
	o := ApplyOptions{beside: true, returns: returns}
	all, err := n.pins.carryOut(func() (orders, error) {
		all, err := planner{n}.plan(onNewHooks, o, phases...)
		if err != nil && len(phases) > 1 && n.pins.state() != maps.Pending { // a limit counts more than a rollback
			all.close()
			phases = phases[:1]
			all, err = planner{n}.plan(onNewHooks, o, phases...)
		}
		return all, err
	}, o)
	return all.done(func(o *order) bool { return o.State == Attached && !o.isPools() }), err
}

// ApplyTo replaces the rules of a device by those of tables, in the order of Apply. The last table has pools: it sets those that
// the rules need and that do not exist, and changes those of the device.
func (n *Namespace) ApplyTo(dev netinfo.Device, tables []policy.Table) ([]Applied, error) {
	tables = policy.WithoutGuarantees(tables)
	rules, wanted := tables[:len(tables)-1], tables[len(tables)-1].Rules
	have := n.Pools()
	defer have.Close()
	pools := missing(n.pins.store, wanted, rules)
	if have.Set != nil {
		for _, p := range have.Set.Policy() {
			if i := slices.IndexFunc(wanted, func(w policy.Rule) bool { return w.Prefix == p.Prefix }); i >= 0 && p.Label.Owner.Device == dev.Name {
				p = wanted[i]
			}
			pools = append(pools, p)
		}
	}
	policy.SortRules(pools)
	return n.Apply(append(slices.Clone(rules), policy.Table{Rules: pools}), ApplyOptions{Devices: []string{dev.Name}})
}

// Reattach attaches the hooks that something else has detached, with the rules that they have. It returns them also with
// an error.
func (n *Namespace) Reattach() (again []Side, err error) {
	var unread error
	all, err := n.pins.carryOut(func() (all orders, err error) {
		hooks, err := n.Hooks()
		unread = err
		for _, h := range hooks {
			if h.State != Detached {
				h.Close()
				continue
			}
			all = append(all, h.asItIs(h.Device))
		}
		return all, nil
	}, ApplyOptions{beside: true})
	for _, o := range all {
		if o.State == Attached {
			again = append(again, Side{o.dev.Name, o.Direction})
		}
	}
	if len(again) > 0 {
		err = errors.Join(err, bpffs.Record(n.pins.dir.pin(reattachedPin), Reattached{maps.Now(), again}))
	}
	return again, errors.Join(unread, err)
}
