package loader

import (
	"errors"
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// newHook is a hook that does not exist yet.
func newHook(dev netinfo.Device, d policy.Direction) *Hook {
	return &Hook{Direction: d, Device: dev, Was: dev.Name, State: Detached}
}

// An order is what a hook shall have, and the steps to get there.
type order struct {
	*Hook
	dev   netinfo.Device
	want  policy.Table
	steps []policy.Difference
	fq    uint32 // room in packets of an fq to be set up; 0 for none
	ifb   uint32 // room in packets that its ifb needs; 0 for no need
	done  Applied
	asIs  bool         // however it is attached, it stays so
	then  *afterRevert // nil unless a change is pending
	gone  error        // the device was deleted meanwhile, and this failed
}

// afterRevert is the rules of a new hook while a change is pending, and after it has reverted.
type afterRevert struct{ now, reverted []policy.Rule }

func newOrder(h *Hook, dev netinfo.Device, want policy.Table) *order {
	o := &order{Hook: h, dev: dev, want: want, done: Applied{Device: dev.Name, Direction: want.Direction}}
	if h.Set != nil && h.State != Attached {
		o.done.Hook.Reattached = string(h.State)
	}
	return o
}

// failed names the hook of an error. If its device was deleted meanwhile, only this order fails.
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

// hasWork reports whether an order changes anything.
func (o *order) hasWork() bool {
	if o.asIs || o.isPools() {
		return len(o.steps) > 0
	}
	return o.gone == nil && (o.Set == nil || o.State != Attached || o.fq > 0 || len(o.steps) > 0 || o.isOther())
}

// orders are the orders of one command.
type orders []*order

func (all orders) close() {
	for _, o := range all {
		o.Close()
	}
}

func (all orders) haveWork() bool { return slices.ContainsFunc(all, (*order).hasWork) }

// steps returns how many there are.
func (all orders) steps() (n int) {
	for _, o := range all {
		n += len(o.steps)
	}
	return n
}

// only is the hook for which one step suffices; nil if there must be a change of several rules, of which there is one at a time
// and which may add or remove the pools.
func (all orders) only(o ApplyOptions) (h *Hook) {
	if !o.Final || all.steps() > 1 || all.concernPools() {
		return nil
	}
	for _, one := range all {
		if one.hasWork() {
			if h != nil {
				return nil
			}
			h = one.Hook
		}
	}
	return h
}

// apply prepares hooks, and changes all their rules at one moment. If it fails before, it removes the fqs that it has set up.
func (all orders) apply(p *pins, options Options, o ApplyOptions) (err error) {
	began := false
	defer func() {
		if err != nil && !began {
			err = errors.Join(err, all.removeFQs())
		}
	}()
	if err := all.prepare(p, options); err != nil {
		return err
	}
	of := all.steps()
	if of == 1 && o.Final {
		err = all.step()
	} else if of > 0 {
		err = all.change(p.store, o, of)
	}
	if err != nil {
		return err
	}
	began = true
	all.sweepGone(p)
	if !o.Final || of == 0 {
		return nil
	}
	return all.finish(p, of > 1)
}

// step carries out the only step.
func (all orders) step() error {
	for _, o := range all {
		for _, d := range o.steps {
			if d.Want != nil {
				_, err := o.Set.Put(*d.Want)
				return err
			}
			o.Set.Delete(d.Have.Prefix)
		}
	}
	return nil
}

// change carries out all steps, of which there are so many, at one moment.
func (all orders) change(store *maps.Store, o ApplyOptions, of int) error {
	ready := 0
	for _, one := range all {
		if err := one.Set.Prepare(one.steps, func(steps int) {
			if o.Progress != nil {
				o.Progress(ready+steps, of)
			}
		}); err != nil {
			return fmt.Errorf("%s: %w", tableName(one.want), err)
		}
		ready += len(one.steps)
	}
	return arm(store, o.Confirm)
}

// finish removes what is not needed any more. After a change, it rules out that this reverts.
func (all orders) finish(p *pins, change bool) error {
	if change {
		if err := p.end(); err != nil {
			return err
		}
	}
	err := forEach(p, all, func(o *order) error {
		if o.gone != nil || o.isPools() {
			return nil
		}
		return p.trim(o.Hook)
	})
	return errors.Join(err, p.bpfState.drop())
}

// removeFQs removes the fqs that claim has set up.
func (all orders) removeFQs() (err error) {
	for _, o := range all {
		if o.done.Hook.Replaced != "" {
			_, failed := fq.Remove(o.dev.Index)
			err = errors.Join(err, failed)
		}
	}
	return err
}

// prepare makes room for the rules of hooks, and attaches the hooks that need it, with
// programs of this build.
func (all orders) prepare(p *pins, options Options) error {
	if !slices.ContainsFunc(all, func(o *order) bool { return !o.asIs }) {
		return nil
	}
	if err := all.claim(p); err != nil {
		return err
	}
	return all.attach(p, options)
}

// claim makes room for the rules of hooks, allocates their sets, and sets up fq where needed.
func (all orders) claim(p *pins) error {
	for _, o := range all {
		if o.Set == nil && !o.isPools() {
			if err := p.vacate(o.dev.Index, o.Direction); err != nil {
				return err
			}
		}
		if o.fq > 0 {
			var err error
			o.done.Hook.Replaced, err = fq.Setup(o.dev.Index, o.fq)
			if err := o.failed(err); err != nil {
				return err
			}
		}
	}
	upgraded, err := p.makeRoom(all)
	if err != nil {
		return err
	}
	for _, o := range all {
		if o.isPools() {
			o.Close() // of the old generation
			o.Set = p.store.Hold().Pools()
			continue
		}
		if o.Set == nil {
			o.Set = p.store.Hold().Claim(o.dev.Index, o.dev.Name, o.Direction, o.want.Match)
			o.at = p.dir.hookDir(o.dev.Index, o.Direction)
			continue
		}
		o.done.Hook.Upgraded = upgraded
		set := p.store.Hold().View(o.Set.Number()) // of the new generation
		o.Set.Store.Close()
		o.Set = set
	}
	return nil
}

// attach attaches hooks that are not attached.
func (all orders) attach(p *pins, options Options) error {
	return p.haste.hurry(len(all), func() error {
		for _, o := range all {
			if o.gone != nil || o.isPools() {
				continue
			}
			if err := o.failed(o.attach(p, options)); err != nil {
				return err
			}
		}
		return nil
	})
}

func (o *order) attach(p *pins, options Options) error {
	h := o.Hook
	if err := p.follow(h, o.dev); err != nil {
		return err
	}
	if o.ifb > 0 || needsIfb(h.Set) {
		if err := p.dir.makeIfb(o.dev, o.ifb); err != nil {
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
	if err := p.needKind(kind); err != nil {
		return err
	}
	attached, err := openAttachment(h.at)
	if err != nil {
		return err
	}
	defer attached.close()
	mode := attached.mode()
	if mode == "" {
		if mode, err = HookMode(options); err != nil {
			return err
		}
	}
	if err := makeDir(h.at.dir); err != nil {
		return err
	}
	caller, err := program.LoadCaller(p.kinds, kind, h.Set.Number())
	if err != nil {
		return err
	}
	defer caller.Close()
	if err := attached.put(caller, mode); err != nil {
		return err
	}
	h.Set.SetSide(o.want.Match)
	h.Set.SetAttached()
	h.State, h.Mode, h.Device = Attached, mode, o.dev
	return nil
}

// sweepGone removes hooks whose devices were deleted before they were attached. The next
// command removes what it leaves.
func (all orders) sweepGone(p *pins) {
	if slices.ContainsFunc(all, func(o *order) bool { return o.gone != nil }) {
		p.sweep()
	}
}

// needsIfb reports whether a hook sends packets to an ifb, for rules that it has or for pools of these.
func needsIfb(set *maps.Set) bool {
	return set.Direction() == policy.Ingress && set.Ifb() != 0 && set.Any(maps.Delays)
}
