package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// sweepTime is how long a command may spend on hooks that an earlier change has left
// without rules: to detach a program takes the kernel up to 20 ms.
const sweepTime = time.Second

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
	return &Hook{Direction: d, Device: dev, Was: dev.Name, index: dev.Index, State: Detached}
}

// Put sets a valid rule on a direction of a device, and attaches what it needs.
func (n *Namespace) Put(dev netinfo.Device, d policy.Direction, match policy.Match, rule policy.Rule) (change Change, err error) {
	if err := dev.CheckReadable(); err != nil {
		return change, err
	}
	rules := []policy.Rule{rule}
	if n.dir == "" {
		// Before anything is made; once it is, another command may have been first.
		if _, err := n.holdBack(dev, d, rules); err != nil {
			return change, err
		}
		if err := n.elsewhere(dev, d); err != nil {
			return change, err
		}
		if err := n.found(); err != nil {
			return change, err
		}
	}
	h, err := n.Find(dev.Name, d)
	if err == nil {
		err = n.refuseForeign()
	}
	if err == nil && h == nil {
		h = newHook(dev, d)
		err = n.elsewhere(dev, d)
	}
	if err != nil {
		return change, err
	}
	defer h.Close()
	if h.Set != nil && h.State != Attached {
		change.Reattached = string(h.State)
		rules = append(h.Set.Policy(), rule) // all are to be in force, on what may be another device
	}
	hold, err := n.holdBack(dev, d, rules)
	if err != nil {
		return change, err
	}
	if h.State == Moved {
		return change, ErrMoved
	}
	change.Lacks = hold.lacks
	if h.Set != nil && h.Match() != match {
		if others := h.Set.Rules(); len(others) > 1 || len(others) == 1 && others[0].Prefix != rule.Prefix {
			return change, fmt.Errorf("%w (%s)", ErrMatch, h.Match())
		}
	}
	if err := n.endChange(h); err != nil {
		return change, err
	}
	o := newOrder(h, dev, policy.Table{Device: dev.Name, Direction: d, Match: match, Rules: []policy.Rule{rule}})
	o.hold, o.done.Hook = hold, change
	if step, changes := h.step(rule); changes {
		o.steps = []policy.Difference{step}
	}
	err = n.changing(func() (err error) {
		if err := n.prepare([]*order{o}); err != nil {
			return err
		}
		if o.done.Hook.Changed, err = h.Set.Put(rule); err != nil {
			return err
		}
		return n.trimIfb(h)
	})
	return o.done.Hook, err
}

// step is what brings a rule into force on a hook; false if it is already.
func (h *Hook) step(rule policy.Rule) (d policy.Difference, changes bool) {
	d.Want = &rule
	if h.Set == nil {
		return d, true
	}
	e, found := h.Set.Find(rule.Prefix)
	if found {
		d.Have = &e.Rule
	}
	return d, !found || e.Rule != rule
}

// Delete takes the rule of a prefix off hooks, and each hook off its device with its
// last rule. It reports how many hooks had such a rule. Errors are as those of Flush.
func (n *Namespace) Delete(prefix netip.Prefix, hooks ...*Hook) (deleted int, err error) {
	err = n.changeHooks(hooks, func(h *Hook) error {
		if !h.Set.Delete(prefix) {
			return nil
		}
		deleted++
		if h.Set.Empty() {
			return n.takeOff(h)
		}
		return n.trimIfb(h)
	})
	return deleted, err
}

// Flush takes all rules off hooks, and the hooks off their devices. The error wraps
// ErrPending, and nothing is changed, where one of the hooks takes part in a change that is
// not confirmed yet. A hook that cannot be flushed does not keep the others from it.
func (n *Namespace) Flush(hooks ...*Hook) error {
	return n.changeHooks(hooks, func(h *Hook) error {
		h.Set.Clear()
		return n.takeOff(h)
	})
}

// changeHooks runs f, which may detach a hook, with each of the hooks.
func (n *Namespace) changeHooks(hooks []*Hook, f func(*Hook) error) error {
	if len(hooks) == 0 {
		return nil
	}
	for _, h := range hooks {
		if err := n.endChange(h); err != nil {
			return err
		}
	}
	return n.changing(func() error {
		return n.hurry(len(hooks), func() error {
			var failed []error
			for _, h := range hooks {
				failed = append(failed, f(h))
			}
			return errors.Join(failed...)
		})
	})
}

// FlushAll is Flush for all hooks of the namespace, also those that another version of shapectl has made.
// told is called before with each that this version can read, discarded after with each that it cannot.
func (n *Namespace) FlushAll(told func(*Hook), discarded func(*OtherLayoutError)) error {
	if n.dir == "" {
		return nil
	}
	if err := n.endChange(nil); err != nil {
		return err
	}
	var failed []error
	hooks, err := n.Hooks()
	defer closeHooks(hooks)
	var other *OtherLayoutError
	if err != nil && !errors.As(err, &other) {
		return err
	}
	for _, h := range hooks {
		told(h)
	}
	failed = append(failed, n.Flush(hooks...))
	others, err := n.otherLayouts()
	failed = append(failed, err)
	for _, other := range others {
		err := n.Discard(other)
		if failed = append(failed, err); err == nil {
			discarded(other)
		}
	}
	return errors.Join(append(failed, n.complete())...)
}

// An order is what a hook is to have, and what it takes.
type order struct {
	*Hook
	dev   netinfo.Device
	want  policy.Table
	steps []policy.Difference
	hold  holding
	done  Applied
}

func newOrder(h *Hook, dev netinfo.Device, want policy.Table) *order {
	return &order{Hook: h, dev: dev, want: want, done: Applied{Device: dev.Name, Direction: want.Direction}}
}

func closeOrders(orders []*order) {
	for _, o := range orders {
		o.Close()
	}
}

// prepare makes hooks such that rules can be put in them: with room for what they
// need, attached to their devices, and calling programs of this build that compare
// their side. What is so already is left alone.
func (n *Namespace) prepare(orders []*order) error {
	if err := n.claim(orders); err != nil {
		return err
	}
	return n.attach(orders)
}

// claim makes room for the rules of hooks, gives each a set, and devices the fq that they need.
func (n *Namespace) claim(orders []*order) error {
	var need needs
	for _, o := range orders {
		if o.hold.setup {
			var err error
			if o.done.Hook.Replaced, err = n.setupFQ(o.dev, o.hold.packets); err != nil {
				return fmt.Errorf("%s %s: %w", o.dev.Name, o.Direction, err)
			}
		}
		need.rules = append(need.rules, o.want.Rules...)
		need.ids += maps.IDs(o.steps...)
		if o.Set == nil {
			need.views++
		}
	}
	upgraded, err := n.makeRoom(need)
	if err != nil {
		return err
	}
	for _, o := range orders {
		if o.Set == nil {
			o.Set = n.store.Hold().Claim(o.dev.Index, o.dev.Name, o.Direction, o.want.Match)
			o.attached = &attachment{dir: n.hookPath(o.dev.Index, o.Direction), index: o.dev.Index, direction: o.Direction}
			continue
		}
		o.done.Hook.Upgraded = upgraded
		set := n.store.Hold().View(o.Set.Number()) // of the generation that there is now
		o.Set.Close()
		o.Set = set
	}
	return nil
}

// attach attaches hooks that are not attached.
func (n *Namespace) attach(orders []*order) error {
	return n.hurry(len(orders), func() error {
		for _, o := range orders {
			if err := n.attachOne(o); err != nil {
				return fmt.Errorf("%s %s: %w", o.dev.Name, o.Direction, err)
			}
		}
		return nil
	})
}

func (n *Namespace) attachOne(o *order) error {
	h := o.Hook
	if err := n.follow(h, o.dev); err != nil {
		return err
	}
	if n.needsIfb(h, o.want.Rules) {
		packets, _ := Waiting(o.want.Rules)
		if err := n.makeIfb(o.dev, packets); err != nil {
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
	kind := program.Kind{Direction: h.Direction, Match: o.want.Match, L2Bytes: o.dev.L2Bytes}
	if err := n.needKind(kind); err != nil {
		return err
	}
	mode := h.attached.mode()
	if mode == "" {
		var err error
		if mode, err = HookMode(n.options); err != nil {
			return err
		}
	}
	if err := makeDir(h.attached.dir); err != nil {
		return err
	}
	p, err := program.LoadCaller(n.kinds, kind, h.Set.Number())
	if err != nil {
		return err
	}
	defer p.Close()
	if err := h.attached.put(p, mode); err != nil {
		return err
	}
	if err := n.warnEarlier(h.attached.dir); err != nil {
		return err
	}
	h.Set.SetSide(o.want.Match)
	h.Set.SetAttached()
	h.State, h.Mode, h.Device = Attached, mode, o.dev
	return nil
}

// Give brings tables into force on devices whose hooks have no rules: each has its
// rules from the moment on that it is attached. The last change of other hooks can
// still be taken back.
func (n *Namespace) Give(tables []policy.Table) (done []Applied, err error) {
	orders, err := n.planNew(tables)
	defer func() { closeOrders(orders) }()
	if err == nil && n.dir == "" {
		if err := n.found(); err != nil {
			return nil, err
		}
		closeOrders(orders)
		orders, err = n.planNew(tables) // once more, as another command may have been first
	}
	if err != nil {
		return nil, err
	}
	err = n.changing(func() error {
		if err := n.claim(orders); err != nil {
			return err
		}
		for _, o := range orders {
			if err := o.Set.Load(o.want.Rules); err != nil {
				return fmt.Errorf("%s %s: %w", o.dev.Name, o.Direction, err)
			}
		}
		return n.attach(orders)
	})
	for _, o := range orders {
		o.done.Rules, o.done.Hook.Changed = maps.Count(o.steps), true
		done = append(done, o.done)
	}
	return done, err
}

// planNew is plan for devices whose hooks have no rules.
func (n *Namespace) planNew(tables []policy.Table) (orders []*order, err error) {
	if err := n.refuseForeign(); err != nil {
		return nil, err
	}
	for _, t := range tables {
		h, err := n.Find(t.Device, t.Direction)
		if h != nil {
			h.Close()
			err = ErrMoved // or it has rules
		}
		if err != nil {
			return orders, fmt.Errorf("%s %s: %w", t.Device, t.Direction, err)
		}
		o, err := n.orderNew(t)
		if err != nil {
			return orders, err
		}
		orders = append(orders, o)
		if err := o.plan(n); err != nil {
			return orders, fmt.Errorf("%s %s: %w", t.Device, t.Direction, err)
		}
	}
	return orders, nil
}

// orderNew is the order of a hook that is yet to be made.
func (n *Namespace) orderNew(t policy.Table) (*order, error) {
	dev, err := netinfo.DeviceByName(t.Device)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.Device, err)
	}
	if err := n.elsewhere(dev, t.Direction); err != nil {
		return nil, fmt.Errorf("%s %s: %w", t.Device, t.Direction, err)
	}
	return newOrder(newHook(dev, t.Direction), dev, t), nil
}

// warnEarlier pins the settings where builds had them for each hook that kept maps for
// each: so they refuse the hook, as one of another layout, and do not take it for what
// a killed command has left.
func (n *Namespace) warnEarlier(dir string) error {
	pin := filepath.Join(dir, "g0", "hook")
	if exists(pin) {
		return nil
	}
	if err := makeDir(filepath.Dir(pin)); err != nil {
		return err
	}
	settings, err := n.store.Settings()
	if err != nil {
		return err
	}
	defer settings.Close()
	return pinAt(settings, pin)
}

// follow gives the pins of a hook the number that its device has now.
func (n *Namespace) follow(h *Hook, dev netinfo.Device) error {
	if h.index == dev.Index {
		return nil
	}
	path := n.hookPath(dev.Index, h.Direction)
	if err := renamePins(h.attached.dir, path); err != nil {
		return fmt.Errorf("rename pins: %w", err)
	}
	old := h.index
	h.Set.SetDevice(dev.Index, dev.Name)
	h.attached.dir, h.attached.index, h.index = path, dev.Index, dev.Index
	h.Set.SetIfb(0)
	return n.dropIfb(old)
}

// needsIfb reports whether a hook sends packets to an ifb: those of such rules, or
// of others that it has.
func (n *Namespace) needsIfb(h *Hook, rules []policy.Rule) bool {
	if h.Direction != policy.Ingress {
		return false
	}
	packets, _ := Waiting(rules)
	return packets > 0 || h.Set.Ifb() != 0 && h.Set.Delays()
}

// trimIfb deletes the ifb of a hook that does not need it any more.
func (n *Namespace) trimIfb(h *Hook) error {
	if h.Direction != policy.Ingress || n.needsIfb(h, nil) {
		return nil
	}
	if h.Set.Ifb() != 0 {
		h.Set.SetIfb(0)
	}
	return n.dropIfb(h.index)
}

// takeOff takes a hook without rules off its device, and all that it had besides.
func (n *Namespace) takeOff(h *Hook) error {
	if h.attached != nil {
		if err := h.attached.take(); err != nil {
			return err
		}
	}
	if h.Direction == policy.Ingress {
		if err := n.dropIfb(h.index); err != nil {
			return err
		}
	}
	h.Set.Release()
	return n.dropState()
}

// Discard takes a hook of another layout off its device, and its pins away.
func (n *Namespace) Discard(e *OtherLayoutError) error {
	a, err := openAttachment(n.hookPath(e.index, e.Direction), e.index, e.Direction)
	if err != nil {
		return err
	}
	defer a.close()
	if err := a.take(); err != nil {
		return err
	}
	if e.Direction == policy.Ingress {
		if err := n.dropIfb(e.index); err != nil {
			return err
		}
	}
	return n.discardForeign()
}

// refuseForeign reports as an error that the maps of the namespace are of another layout.
func (n *Namespace) refuseForeign() error {
	if n.foreign == nil {
		return nil
	}
	return n.noState(n.foreign)
}

// discardForeign removes the maps of another layout, whose hooks are gone.
func (n *Namespace) discardForeign() error {
	others, err := n.otherLayouts()
	if n.foreign == nil || len(others) > 0 || err != nil {
		return err
	}
	generations, err := n.generations()
	if err != nil {
		return err
	}
	for _, g := range generations {
		if err := discard(filepath.Join(n.dir, g)); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	n.foreign = nil
	return unlink(filepath.Join(n.dir, kindsPin))
}

// sweep takes off hooks that have no rules, as far as there is time.
func (n *Namespace) sweep() error {
	if n.store == nil {
		return nil
	}
	var empty []*maps.Set
	haveRules := n.store.HaveRules()
	for set := range n.store.Sets() {
		if !haveRules[set.Number()] || !set.Attached() {
			empty = append(empty, set)
		}
	}
	began := time.Now()
	return n.hurry(len(empty), func() error {
		for _, set := range empty {
			if time.Since(began) > sweepTime {
				break
			}
			if err := n.sweepOne(set); err != nil {
				return err
			}
		}
		return nil
	})
}

func (n *Namespace) sweepOne(set *maps.Set) error {
	set.Hold()
	h := &Hook{Direction: set.Direction(), Was: set.Device(), Set: set, index: set.Ifindex()}
	defer h.Close()
	var err error
	if h.attached, err = openAttachment(n.hookPath(h.index, h.Direction), h.index, h.Direction); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if !set.Empty() {
		set.Clear()
	}
	return n.takeOff(h)
}

// elsewhere reports, as far as this process may look, programs of shapectl on
// a device where this namespace knows of none.
func (n *Namespace) elsewhere(dev netinfo.Device, d policy.Direction) error {
	chain, err := netinfo.Chain(dev.Index, d, nil)
	if err != nil {
		return err
	}
	for _, link := range chain {
		if strings.HasPrefix(link.Name, program.Name) && !n.isOurs(dev, d) {
			return ErrElsewhere
		}
	}
	return nil
}

// isOurs reports whether this namespace has pins for the device, if only such as an interrupted command left.
func (n *Namespace) isOurs(dev netinfo.Device, d policy.Direction) bool {
	return n.dir != "" && exists(n.hookPath(dev.Index, d))
}

// busyPin marks that a command is changing something. One that is left over belongs
// to a command that was killed, and the next one completes what it has begun.
const busyPin = "busy"

// changing runs f, which changes something, and looks after what is left if it fails;
// or the next command does, if this one is killed.
func (n *Namespace) changing(f func() error) error {
	mark := filepath.Join(n.dir, busyPin)
	if err := makeDir(mark); err != nil {
		return err
	}
	err := f()
	if err == nil {
		return unlink(mark)
	}
	if n.complete() == nil {
		unlink(mark)
	}
	return err
}

// complete brings order into what a command has left halfway: a change that was
// prepared and not armed is none, maps are of one generation, and there are no hooks
// without rules.
func (n *Namespace) complete() error {
	if err := relax(n.dir); err != nil {
		return err
	}
	if n.store == nil && n.foreign == nil { // it may have failed to remove them
		if err := n.openState(); err != nil {
			return err
		}
	}
	if n.store != nil {
		if state, _ := n.store.Change(); state == maps.NoChange {
			n.store.Abandon()
		}
		if err := n.finishState(); err != nil {
			return err
		}
	}
	if err := n.sweep(); err != nil {
		return err
	}
	if err := n.dropState(); err != nil {
		return err
	}
	if n.store != nil {
		for set := range n.store.Sets() {
			if err := n.trimIfb(&Hook{Direction: set.Direction(), Set: set, index: set.Ifindex()}); err != nil {
				return err
			}
		}
	}
	return n.removeStrays()
}

// removeStrays removes what is pinned for no hook.
func (n *Namespace) removeStrays() error {
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return fmt.Errorf("read the pins: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(n.dir, e.Name())
		index, d, isHook := parseHookName(e.Name())
		switch {
		case strings.HasPrefix(e.Name(), trashPrefix), e.Name() == asideName:
			err = removeAll(path)
		case isHook && n.foreign == nil && n.setOf(index, d) == nil:
			if generations, _ := generationsIn(path); len(generations) > 0 && !exists(filepath.Join(path, programPin)) {
				continue // of another layout
			}
			var a *attachment
			if a, err = openAttachment(path, index, d); err == nil {
				err = a.take()
				a.close()
			}
		case e.Name() == kindsPin && n.store == nil && n.foreign == nil:
			err = unlink(path)
		}
		if err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}
