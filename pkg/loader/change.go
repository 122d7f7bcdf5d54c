package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/fq"
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

// newHook is a hook that is yet to be made.
func newHook(dev netinfo.Device, d policy.Direction) *Hook {
	return &Hook{Direction: d, Device: dev, Was: dev.Name, State: Detached}
}

// Put sets a valid rule on a direction of a device, and attaches what it needs.
func (n *Namespace) Put(dev netinfo.Device, d policy.Direction, match policy.Match, rule policy.Rule) (Change, error) {
	want := policy.Table{Device: dev.Name, Direction: d, Match: match, Rules: []policy.Rule{rule}}
	plan := func() ([]*order, error) { return n.planRule(dev, want) }
	orders, err := n.planned(plan)
	defer func() { closeOrders(orders) }()
	if err == nil {
		orders, err = n.endBefore(orders, plan, orders[0].Hook)
	}
	if err != nil {
		return Change{}, err
	}
	o := orders[0]
	have := policy.Table{Device: dev.Name, Direction: d, Match: match}
	if o.Set != nil {
		if e, found := o.Set.Find(rule.Prefix); found {
			have.Rules = []policy.Rule{e.Rule}
		}
	}
	o.steps = have.Diff(want)
	err = n.pins.changing(func() (err error) {
		if err := n.prepare(orders); err != nil {
			return err
		}
		if o.gone != nil {
			return o.gone
		}
		if o.done.Hook.Changed, err = o.Set.Put(rule); err != nil {
			return err
		}
		return n.pins.trimIfb(o.Set)
	})
	return o.done.Hook, err
}

// planRule is plan for the one rule of a table, beside those that the hook has.
func (n *Namespace) planRule(dev netinfo.Device, want policy.Table) (orders []*order, err error) {
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
	if err == nil {
		err = n.pins.refuseOthers()
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	o := newOrder(h, dev, want)
	orders = []*order{o}
	rules := want.Rules
	if h.Set != nil && h.State != Attached {
		rules = append(h.Set.Policy(), rules...) // all are to be in force, on what may be another device
	}
	if o.hold, err = n.holdBack(dev, want.Direction, rules); err != nil {
		return orders, err
	}
	o.done.Hook.Lacks = o.hold.lacks
	if h.State == Moved {
		return orders, ErrMoved
	}
	if h.Set != nil && h.Match() != want.Match {
		if others := h.Set.Rules(); len(others) > 1 || len(others) == 1 && others[0].Prefix != want.Rules[0].Prefix {
			return orders, fmt.Errorf("%w (%s)", ErrMatch, h.Match())
		}
	}
	return orders, nil
}

// planned is what comes of a plan. Where that is the first thing to be pinned, it makes a
// place for it, and plans once more, as another command may have been first.
func (n *Namespace) planned(plan func() ([]*order, error)) ([]*order, error) {
	orders, err := plan()
	if err != nil || n.pins.dir != "" || !slices.ContainsFunc(orders, (*order).hasWork) {
		return orders, err
	}
	closeOrders(orders)
	if err := n.found(); err != nil {
		return nil, err
	}
	return plan()
}

// Delete takes the rule of a prefix off hooks, and each hook off its device with its
// last rule. It reports how many hooks had such a rule. Errors are as those of Flush.
func (n *Namespace) Delete(prefix netip.Prefix, hooks ...*Hook) (deleted int, err error) {
	if err := n.pins.refuseOthers(); err != nil {
		return 0, err
	}
	err = n.changeHooks(hooks, func(h *Hook) error {
		if !h.Set.Delete(prefix) {
			return nil
		}
		deleted++
		if h.Set.Empty() {
			return n.pins.takeOff(h)
		}
		return n.pins.trimIfb(h.Set)
	})
	return deleted, err
}

// Flush takes all rules off hooks, and the hooks off their devices. The error wraps
// ErrPending, and nothing is changed, where one of the hooks takes part in a change that is
// not confirmed yet. A hook that cannot be flushed does not keep the others from it.
func (n *Namespace) Flush(hooks ...*Hook) error { return n.changeHooks(hooks, n.pins.clear) }

// changeHooks runs f, which may detach a hook, with each of the hooks.
func (n *Namespace) changeHooks(hooks []*Hook, f func(*Hook) error) error {
	if len(hooks) == 0 {
		return nil
	}
	for _, h := range hooks {
		if err := n.pins.endChange(h); err != nil {
			return err
		}
	}
	return changeEach(&n.pins, hooks, f)
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
	err = changeEach(&n.pins, others, func(other *OtherLayoutError) error {
		err := n.pins.discardOther(other)
		if err == nil {
			gone = append(gone, other)
		}
		return err
	})
	return gone, err
}

// An order is what a hook is to have, and what it takes.
type order struct {
	*Hook
	dev   netinfo.Device
	want  policy.Table
	steps []policy.Difference
	hold  holding
	done  Applied
	gone  error // what went wrong, as the device was deleted meanwhile
}

func newOrder(h *Hook, dev netinfo.Device, want policy.Table) *order {
	o := &order{Hook: h, dev: dev, want: want, done: Applied{Device: dev.Name, Direction: want.Direction}}
	if h.Set != nil && h.State != Attached {
		o.done.Hook.Reattached = string(h.State)
	}
	return o
}

// failed is what went wrong with an order, but for one whose device was deleted meanwhile: that fails alone.
func (o *order) failed(err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%s %s: %w", o.dev.Name, o.Direction, err)
	if _, here, lookup := netinfo.DeviceByIndex(o.dev.Index); lookup == nil && !here {
		o.gone, o.steps = err, nil
		return nil
	}
	return err
}

// sweepGone takes away what there is of hooks that could not be attached, as their
// devices were deleted. What it leaves, the next command takes away.
func (n *Namespace) sweepGone(orders []*order) {
	if slices.ContainsFunc(orders, func(o *order) bool { return o.gone != nil }) {
		n.pins.sweep()
	}
}

func closeOrders(orders []*order) {
	for _, o := range orders {
		o.Close()
	}
}

// prepare makes room for the rules of hooks, and attaches hooks: with programs of
// this build that compare their side. What is so already is left alone. An order is gone
// whose device is deleted meanwhile.
func (n *Namespace) prepare(orders []*order) error {
	if err := n.claim(orders); err != nil {
		return err
	}
	return n.attach(orders)
}

// claim makes room for the rules of hooks, gives each a set, and devices the fq that they need.
func (n *Namespace) claim(orders []*order) error {
	for _, o := range orders {
		if o.Set == nil {
			if err := n.pins.vacate(o.dev.Index, o.Direction); err != nil {
				return err
			}
		}
		if o.hold.setup {
			var err error
			o.done.Hook.Replaced, err = n.pins.dir.setupFQ(o.dev, o.hold.packets)
			if err := o.failed(err); err != nil {
				return err
			}
		}
	}
	upgraded, err := n.pins.makeRoom(orders)
	if err != nil {
		return err
	}
	for _, o := range orders {
		if o.Set == nil {
			o.Set = n.pins.store.Hold().Claim(o.dev.Index, o.dev.Name, o.Direction, o.want.Match)
			o.at = n.pins.dir.hookDir(o.dev.Index, o.Direction)
			continue
		}
		o.done.Hook.Upgraded = upgraded
		set := n.pins.store.Hold().View(o.Set.Number()) // of the generation that there is now
		o.Set.Close()
		o.Set = set
	}
	return nil
}

// attach attaches hooks that are not attached.
func (n *Namespace) attach(orders []*order) error {
	return n.pins.haste.hurry(len(orders), func() error {
		for _, o := range orders {
			if o.gone != nil {
				continue
			}
			if err := o.failed(n.attachOne(o)); err != nil {
				return err
			}
		}
		return nil
	})
}

func (n *Namespace) attachOne(o *order) error {
	h := o.Hook
	if err := n.pins.follow(h, o.dev); err != nil {
		return err
	}
	if needsIfb(h.Set, o.want.Rules) {
		packets, _ := Waiting(o.want.Rules)
		if err := n.pins.dir.makeIfb(o.dev, packets); err != nil {
			return err
		}
		if h.Set.Ifb() == 0 {
			h.Set.SetIfb(fq.IfbIndex(o.dev.Index))
			o.done.Hook.Redirected = true
		}
	}
	if h.State == Attached && h.Match() == o.want.Match {
		return nil
	}
	kind := program.KindOf(h.Direction, o.want.Match, o.dev.L2Bytes)
	if err := n.pins.needKind(kind); err != nil {
		return err
	}
	attached, err := openAttachment(h.at)
	if err != nil {
		return err
	}
	defer attached.close()
	mode := attached.mode()
	if mode == "" {
		if mode, err = HookMode(n.options); err != nil {
			return err
		}
	}
	if err := makeDir(h.at.dir); err != nil {
		return err
	}
	p, err := program.LoadCaller(n.pins.kinds, kind, h.Set.Number())
	if err != nil {
		return err
	}
	defer p.Close()
	if err := attached.put(p, mode); err != nil {
		return err
	}
	if err := n.warnEarlier(h.at.dir, o.dev.Name); err != nil {
		return err
	}
	h.Set.SetSide(o.want.Match)
	h.Set.SetAttached()
	h.State, h.Mode, h.Device = Attached, mode, o.dev
	return nil
}

// Give brings tables into force on devices whose hooks have no rules: each has its
// rules from the moment on that it is attached. The last change of other hooks can
// still be taken back. With the error comes what is done, which is nothing for a device
// that was deleted meanwhile.
func (n *Namespace) Give(tables []policy.Table) (done []Applied, err error) {
	orders, err := n.planned(func() ([]*order, error) { return n.planNew(tables) })
	defer func() { closeOrders(orders) }()
	if err != nil || !slices.ContainsFunc(orders, (*order).hasWork) {
		return nil, err
	}
	err = n.pins.changing(func() error {
		if err := n.claim(orders); err != nil {
			return err
		}
		for _, o := range orders {
			if err := o.Set.Load(o.want.Rules); err != nil {
				return fmt.Errorf("%s %s: %w", o.dev.Name, o.Direction, err)
			}
		}
		err := n.attach(orders)
		if err == nil {
			n.sweepGone(orders)
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

// planNew is plan for devices whose hooks have no rules.
func (n *Namespace) planNew(tables []policy.Table) ([]*order, error) {
	if err := n.pins.refuseOthers(); err != nil {
		return nil, err
	}
	for _, t := range tables {
		h, err := n.Find(t.Device, t.Direction)
		if h != nil {
			h.Close()
			err = ErrMoved // or it has rules
		}
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", t.Device, t.Direction, err)
		}
	}
	return n.planTables(nil, nil, tables)
}

// warnEarlier pins settings where builds had them that kept maps for each hook: so they
// refuse the hook, and do not take it for what a killed command has left.
func (n *Namespace) warnEarlier(dir, device string) error {
	pin := filepath.Join(dir, "g0", "hook")
	if exists(pin) {
		return nil
	}
	if err := makeDir(filepath.Dir(pin)); err != nil {
		return err
	}
	var settings [24]byte // a layout that none had, and at the end the name
	copy(settings[8:], device)
	return pinValue(pin, &ebpf.MapSpec{Name: "shapectl_device", Type: ebpf.Array, ValueSize: uint32(len(settings))}, settings)
}

// needsIfb reports whether a hook sends packets to an ifb: those of such rules, or
// of others that it has.
func needsIfb(set *maps.Set, rules []policy.Rule) bool {
	if set.Direction() != policy.Ingress {
		return false
	}
	packets, _ := Waiting(rules)
	return packets > 0 || set.Ifb() != 0 && set.Delays()
}

// elsewhere reports, as far as this process may look, programs of shapectl on a device
// for which this namespace has no pins, not even such as an interrupted command left.
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
