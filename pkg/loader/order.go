package loader

import (
	"errors"
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/hurry"
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
	have  []policy.Rule // that are in force and compared with those of want
	steps []policy.Difference
	flush bool   // the hook goes, whatever its rules are
	fq    uint32 // room in packets of an fq to be set up; 0 for none
	ifb   uint32 // room in packets that its ifb needs; 0 for no need
	done  Applied
	asIs  bool  // however it is attached, it stays so
	gone  error // the device was deleted meanwhile, and this failed

	reverts bool          // the last change may revert, and these are new rules;
	then    []policy.Rule // in place of those of want, once it has reverted
}

// wants are the rules of a phase: 0 is now, 1 once the last change has reverted.
func (o *order) wants(phase int) *[]policy.Rule {
	if phase == 0 {
		return &o.want.Rules
	}
	return &o.then
}

func (o *order) side() Side { return Side{o.dev.Name, o.want.Direction} }

func newOrder(h *Hook, dev netinfo.Device, want policy.Table) *order {
	o := &order{Hook: h, dev: dev, want: want, done: Applied{Device: dev.Name, Direction: want.Direction}}
	if h.Set != nil && h.State != Attached {
		o.done.Hook.Reattached = string(h.State)
	}
	return o
}

// asItIs is an order that leaves no rules, or the ones that there are if it is not attached, on a device.
func (h *Hook) asItIs(dev netinfo.Device) *order {
	return newOrder(h, dev, policy.Table{Device: dev.Name, Direction: h.Direction, Match: h.Match()})
}

// removal is an order to remove rules of a hook, whatever its state is. The caller closes the hook itself.
func (h *Hook) removal(flush bool) *order {
	it := *h
	if it.Set != nil {
		it.Set.Store.Hold()
	}
	want := policy.Table{Device: h.Name(), Direction: h.Direction}
	return &order{Hook: &it, dev: h.Device, want: want, flush: flush, asIs: true, done: Applied{Device: want.Device, Direction: want.Direction}}
}

// deleted reports whether an order fails because the device was deleted meanwhile. Then the others do not.
func (o *order) deleted(err error) bool {
	if _, here, lookup := netinfo.DeviceAt(o.dev.Name, o.dev.Index); lookup == nil && !here {
		o.gone, o.steps = fmt.Errorf("%s: %w", tableName(o.want), err), nil
	}
	return o.gone != nil
}

// failed names the hook of an error, unless the device was deleted.
func (o *order) failed(err error) error {
	if err == nil || o.deleted(err) {
		return nil
	}
	return fmt.Errorf("%s: %w", tableName(o.want), err)
}

// hasWork reports whether an order changes anything.
func (o *order) hasWork() bool {
	if o.asIs || o.isPools() {
		return o.flush || len(o.steps) > 0
	}
	return o.gone == nil && (o.Set == nil || o.State != Attached || o.Unpinned || o.fq > 0 || len(o.steps) > 0 || o.isOther())
}

// isOther reports whether a hook matches another address than is wanted, or has the program of another build.
func (o *order) isOther() bool {
	build, err := o.OtherBuild()
	return build || err != nil || o.Match() != o.want.Match
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

// haveHooksToSweep reports whether some hooks, or all maps, go with the last change.
func (all orders) haveHooksToSweep(s *maps.Store) bool {
	have := s.Have(maps.InForce)
	return !slices.Contains(have, true) || slices.ContainsFunc(all, func(o *order) bool { return o.Set != nil && !o.isPools() && !have[o.Set.Number()] })
}

// done is what was done by those that did something.
func (all orders) done(did func(*order) bool) (done []Applied) {
	for _, o := range all {
		if did(o) {
			done = append(done, o.done)
		}
	}
	return done
}

// carryOut carries out a plan. What it returns is closed.
func (p *pins) carryOut(plan func() (orders, error), o ApplyOptions) (all orders, err error) {
	defer func() { all.close() }()
	after := func(err error) error {
		if err == nil {
			all.close()
			all, err = plan()
		}
		return err
	}
	if all, err = plan(); err != nil || !all.haveWork() {
		return all, err // the last change can still be rolled back
	}
	if o.Allow != nil {
		lifted, have := 0, 0
		for _, one := range all {
			have += len(one.have)
			for _, s := range one.steps {
				if s.Have != nil && (s.Want == nil || s.Have.Limits() && !s.Want.Limits()) {
					lifted++
				}
			}
		}
		if err := o.Allow(lifted, have); err != nil {
			return all, err
		}
	}
	if p.dir == "" { // another command may have been faster
		if err := after(p.makeHome()); err != nil || !all.haveWork() {
			return all, err
		}
		if p.store != nil && !o.beside {
			return all, ErrFaster
		}
	}
	if ends, concerned := all.endLast(o); ends && p.state() != maps.NoChange {
		stale := all.haveHooksToSweep(p.store)
		err := p.endChange(concerned...)
		if stale {
			err = after(err)
		}
		if err != nil {
			return all, err
		}
	}
	p.used = nil
	if all.endQuotas(p) {
		p.trouble = errors.Join(p.trouble, p.keepUsed())
	}
	err = p.changing(func() error { return hurry.Up(len(all), func() error { return all.apply(p, o) }) })
	if state := p.state(); err == nil && !o.Final && !o.beside && (state == maps.Pending || state == maps.Committed) {
		bpffs.Record(p.dir.pin(authorPin), Author{o.Author, p.store.Begins()}) // else nobody is told who it was
	}
	for _, one := range all {
		one.done.Rules, one.done.Hook.Changed = maps.Count(one.steps), len(one.steps) > 0
		if one.reverts {
			one.done.Rules = maps.Difference{Added: len(one.want.Rules)}
		}
	}
	return all, err
}

// endLast tells whether the last change must end before orders, and which hooks may take no part in it while it is pending: all
// for none. There is one change of several rules at a time, and it may add or remove the pools that rules need.
func (all orders) endLast(o ApplyOptions) (ends bool, concerned []*Hook) {
	first := all[0]
	if o.beside {
		return first.isPools() && first.Set != nil && !first.reverts && first.Set.Any(maps.TakesPart) && all.drawFromPools(), nil
	}
	if first.flush || o.Final && all.steps() <= 1 && !all.concernPools() {
		for _, one := range all {
			if one.hasWork() {
				concerned = append(concerned, one.Hook)
			}
		}
		if len(concerned) > 1 && !first.flush {
			concerned = nil
		}
	}
	return true, concerned
}

// apply prepares hooks, and changes all their rules at one moment. If it fails before, it removes the fqs that it has set up.
func (all orders) apply(p *pins, o ApplyOptions) (err error) {
	began := o.beside // each hook comes into force by itself
	defer func() {
		if err != nil && !began {
			err = errors.Join(err, all.removeFQs())
		}
	}()
	if slices.ContainsFunc(all, func(o *order) bool { return !o.asIs }) {
		if err := all.claim(p); err != nil {
			return err
		}
		if o.beside {
			if err := all.load(); err != nil {
				return err
			}
		}
		if err := all.attach(p); err != nil {
			return err
		}
	}
	of := all.steps()
	switch {
	case o.beside:
		of = 0
	case of == 1 && o.Final:
		err = all.step()
	case of > 0:
		err = all.change(p, o, of)
	}
	if err != nil {
		return err
	}
	began = true
	if slices.ContainsFunc(all, func(o *order) bool { return o.gone != nil }) {
		p.sweep() // the next command removes what it leaves
	}
	if !o.Final {
		return nil
	}
	return all.finish(p, of > 1)
}

// load sets the rules of new hooks, and new pools.
func (all orders) load() error {
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
	for _, o := range all {
		var err error
		if now := steps(o.then, o.want.Rules); o.reverts && len(now) > 0 {
			err = o.Set.LoadPending(wanted(steps(nil, o.then)), now)
		} else if len(o.steps) > 0 {
			err = o.Set.Load(wanted(o.steps))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", tableName(o.want), err)
		}
	}
	return nil
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
func (all orders) change(p *pins, o ApplyOptions, of int) error {
	ready := 0
	for _, one := range all {
		if err := one.Set.Prepare(one.steps, func(steps int) {
			p.options.progress("rules ready", ready+steps, of)
		}); err != nil {
			return fmt.Errorf("%s: %w", tableName(one.want), err)
		}
		ready += len(one.steps)
		p.options.progress("rules ready", ready, of)
	}
	if o.Policy != nil {
		if err := p.keepPolicy(o.Policy, true); err != nil {
			return err
		}
	}
	return arm(p.store, o.Confirm)
}

// finish rules out that a change reverts, if there was one, and removes what is not needed any more.
func (all orders) finish(p *pins, change bool) error {
	if change {
		if err := p.end(); err != nil {
			return err
		}
	}
	var flushed []*maps.Set
	for _, o := range all {
		if o.flush && o.Set != nil {
			flushed = append(flushed, o.Set)
		}
	}
	var have []bool
	if p.store != nil {
		if flushed != nil {
			p.store.Clear(flushed...) // all before the first is detached, as that takes a while
		}
		have = p.store.Have(maps.Exists)
	}
	var failed error
	for i, o := range all { // even after some failed
		switch {
		case o.gone != nil || o.isPools():
		case have != nil && o.Set != nil && have[o.Set.Number()]: // nil: all went with the last change
			failed = errors.Join(failed, p.trimIfb(o.Hook))
		default:
			failed = errors.Join(failed, p.removeHook(o.Hook))
		}
		p.options.progress("programs detached", i+1, len(all))
	}
	return errors.Join(failed, p.discardForeign(), p.drop())
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

// claim makes room for the rules of hooks, allocates their sets, and sets up fq where needed.
func (all orders) claim(p *pins) error {
	for _, o := range all {
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
	p.store.Earlier, p.store.Names = p.earlier, map[int]string{}
	for _, o := range all {
		p.store.Names[o.dev.Index] = o.dev.Name
		if o.isPools() {
			o.Close() // of the old generation
			o.Set = p.store.Hold().Pools()
			continue
		}
		if o.Set == nil {
			o.Set = p.store.Hold().Claim(o.dev.Index, o.dev.Name, o.Direction, o.want.Match)
			o.at = p.dir.hookDirOf(o.Set)
			continue
		}
		o.done.Hook.Upgraded = upgraded
		set := p.store.Hold().View(o.Set.Number()) // of the new generation
		o.Set.Store.Close()
		o.Set = set
	}
	return nil
}

// attach attaches hooks that are not attached, with programs of this build.
func (all orders) attach(p *pins) error {
	for i, o := range all {
		if o.gone == nil && !o.isPools() {
			if err := o.failed(o.attach(p)); err != nil {
				return err
			}
		}
		p.options.progress("programs attached", i+1, len(all))
	}
	return nil
}

func (o *order) attach(p *pins) error {
	h := o.Hook
	if h.State == Gone { // the rules are attached to another device
		h.Set.ClearCounters()
	}
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
	if h.State == Attached && h.Match() == o.want.Match && !h.Unpinned {
		return nil
	}
	kind := program.KindOf(h.Direction, o.want.Match, o.dev)
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
		if mode, err = HookMode(p.options); o.dev.IsCgroup() {
			mode = Cgroup
		} else if err != nil {
			return err
		}
	}
	if err := bpffs.MakeDir(h.at.dir); err != nil {
		return err
	}
	caller, err := program.LoadCaller(p.kinds[kind.Family()], kind, h.Set.Number())
	if err != nil {
		return err
	}
	defer caller.Close()
	if err := attached.put(caller, mode, o.dev.Name); err != nil {
		return err
	}
	h.Set.SetSide(o.want.Match)
	h.Set.SetAttached()
	h.State, h.Mode, h.Device, h.Unpinned = Attached, mode, o.dev, false
	return nil
}

// needsIfb reports whether a hook sends packets to an ifb, for rules that it has or for pools of these.
func needsIfb(set *maps.Set) bool {
	return set.Direction() == policy.Ingress && set.Ifb() != 0 && set.Any(maps.Delays)
}
