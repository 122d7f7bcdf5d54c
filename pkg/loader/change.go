package loader

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Change is what a command did besides what it was told to.
type Change struct {
	Changed    bool
	Reattached string // what had become of the hook, where it was attached anew
	Upgraded   bool   // the program of another build was replaced
	Replaced   string // the qdisc in whose place an fq was set up
	Redirected bool   // from now on, packets that enter take the way through an ifb, if their rule delays
	// Lacks is how many packets may have to wait, where the fq that there is has no room for so many.
	Lacks uint32
}

// ErrMatch means that the rules of a hook compare the other side of packets.
var ErrMatch = errors.New("other rules of this device and direction compare the other side of packets")

// ErrPending means that a change waits to be confirmed.
var ErrPending = errors.New("the last change is not confirmed yet")

// ErrElsewhere means that programs of shapectl are on the device that this namespace's pins do not know.
var ErrElsewhere = errors.New("limits of shapectl are already on the device, set from another network namespace or another bpffs")

// ErrMoved means that rules are in force on a device that had the name and is in another namespace.
var ErrMoved = errors.New("its rules are in force on the device that had this name and has moved to another namespace")

// Put sets valid rules of different networks on a direction of a device, and attaches what they
// need. Several rules change at one moment, as those of Apply; this also ends the last change. The
// error wraps ErrPending if that is to be confirmed first. On failure no rule is changed.
func (n *Namespace) Put(dev netinfo.Device, d policy.Direction, match policy.Match, rules ...policy.Rule) (Change, error) {
	rules = slices.Clone(rules)
	policy.SortRules(rules)
	want := policy.Table{Device: dev.Name, Direction: d, Match: match, Rules: rules}
	plan := func() (orders, error) { return n.planRules(dev, want) }
	orders, err := n.planned(plan)
	defer func() { orders.close() }()
	if err == nil {
		changed := orders[0].Hook
		if len(rules) > 1 {
			changed = nil // there is one change of many rules at a time
		}
		orders, err = n.endBefore(orders, plan, changed)
	}
	if err != nil {
		return Change{}, err
	}
	o := orders[0]
	have := policy.Table{Device: dev.Name, Direction: d, Match: match}
	for _, r := range rules {
		if o.Set == nil {
			break
		}
		if e, found := o.Set.Find(r.Prefix); found {
			have.Rules = append(have.Rules, e.Rule)
		}
	}
	o.steps = have.Diff(want)
	err = n.pins.changing(func() (err error) {
		if len(rules) > 1 {
			if err = orders.apply(&n.pins, n.options, ApplyOptions{}); err == nil && len(o.steps) > 0 {
				err = n.pins.finish()
			}
		} else if err = orders.prepare(&n.pins, n.options); err == nil && o.gone == nil {
			_, err = o.Set.Put(rules[0])
		}
		if err = cmp.Or(err, o.gone); err != nil {
			return err
		}
		return n.pins.trimIfb(o.Set)
	})
	o.done.Hook.Changed = err == nil && len(o.steps) > 0
	return o.done.Hook, err
}

// Delete deletes the rules of networks from hooks, and detaches each hook that has no rule
// left. It reports how many hooks had such rules. Rules of several networks are deleted at one moment.
// Errors are as those of Put and Flush.
func (n *Namespace) Delete(networks []netip.Prefix, hooks ...*Hook) (deleted int, err error) {
	if err := n.pins.refuseOthers(); err != nil {
		return 0, err
	}
	if len(networks) > 1 {
		return n.deleteTogether(networks, hooks)
	}
	err = n.changeHooks(hooks, func() error {
		return forEach(&n.pins, hooks, func(h *Hook) error {
			if !h.Set.Delete(networks[0]) {
				return nil
			}
			deleted++
			return n.pins.trim(h)
		})
	})
	return deleted, err
}

func (n *Namespace) deleteTogether(networks []netip.Prefix, hooks []*Hook) (deleted int, err error) {
	if err := n.pins.endChange(nil); err != nil {
		return 0, err
	}
	err = n.pins.changing(func() error {
		var having []*Hook
		for _, h := range hooks {
			var steps []policy.Difference
			for _, p := range networks {
				if e, found := h.Set.Find(p); found {
					steps = append(steps, policy.Difference{Have: &e.Rule})
				}
			}
			if steps == nil {
				continue
			}
			if err := h.Set.Prepare(steps, func(int) {}); err != nil {
				return err
			}
			having = append(having, h)
		}
		if having == nil {
			return nil
		}
		if err := arm(n.pins.store, 0); err != nil {
			return err
		}
		n.pins.store.End()
		n.pins.store.Finish()
		deleted = len(having)
		return forEach(&n.pins, having, n.pins.trim)
	})
	return deleted, err
}

// Flush takes all rules off hooks, and the hooks off their devices. The error wraps
// ErrPending, and nothing is changed, where one of the hooks takes part in a change that is
// not confirmed yet. A hook that cannot be flushed does not keep the others from it.
func (n *Namespace) Flush(hooks ...*Hook) error {
	return n.changeHooks(hooks, func() error {
		for _, h := range hooks {
			h.Set.Clear() // of all before the first is detached, as that takes a while
		}
		return forEach(&n.pins, hooks, n.pins.takeOff)
	})
}

// changeHooks runs f, which changes hooks outside of the last change.
func (n *Namespace) changeHooks(hooks []*Hook, f func() error) error {
	if len(hooks) == 0 {
		return nil
	}
	for _, h := range hooks {
		if err := n.pins.endChange(h); err != nil {
			return err
		}
	}
	return n.pins.changing(f)
}

// FlushAll is Flush for all hooks of the namespace, also those that another version of shapectl has made.
// told is called before with each that this version can read, discarded after with each that it cannot.
func (n *Namespace) FlushAll(told func(*Hook), discarded func(*OtherLayoutError)) error {
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
	for _, h := range hooks {
		told(h)
	}
	return n.pins.haste.hurry(len(hooks)+len(n.pins.others), func() error {
		failed := []error{n.Flush(hooks...)}
		gone, err := n.Discard(n.pins.others...)
		for _, other := range gone {
			discarded(other)
		}
		return errors.Join(append(failed, err, n.pins.complete())...)
	})
}

// Discard takes hooks of another layout off their devices, and their pins away. With the
// error come those that are gone.
func (n *Namespace) Discard(others ...*OtherLayoutError) (gone []*OtherLayoutError, err error) {
	if len(others) == 0 {
		return nil, nil
	}
	err = n.pins.changing(func() error {
		return forEach(&n.pins, others, func(other *OtherLayoutError) error {
			err := n.pins.discardOther(other)
			if err == nil {
				gone = append(gone, other)
			}
			return err
		})
	})
	return gone, err
}

// Give brings tables into force on devices whose hooks have no rules: each has its
// rules from the moment on that it is attached. The last change of other hooks can
// still be taken back. With the error comes what is done, which is nothing for a device
// that was deleted meanwhile.
func (n *Namespace) Give(tables []policy.Table) (done []Applied, err error) {
	orders, err := n.planned(func() (orders, error) { return n.planNew(tables) })
	defer func() { orders.close() }()
	if err != nil || !orders.haveWork() {
		return nil, err
	}
	err = n.pins.changing(func() error {
		if err := orders.claim(&n.pins); err != nil {
			return err
		}
		for _, o := range orders {
			if err := o.Set.Load(o.want.Rules); err != nil {
				return fmt.Errorf("%s %s: %w", o.dev.Name, o.Direction, err)
			}
		}
		err := orders.attach(&n.pins, n.options)
		if err == nil {
			orders.sweepGone(&n.pins)
		}
		return err
	})
	for _, o := range orders {
		if o.State == Attached {
			o.done.Rules, o.done.Hook.Changed = maps.Count(o.steps), true
			done = append(done, o.done)
		}
	}
	return done, err
}
