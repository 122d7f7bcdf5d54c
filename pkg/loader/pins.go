package loader

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/hurry"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// sweepTime is how long a command may spend on hooks that an earlier change has left
// without rules. The kernel needs up to 20 ms to detach a program. A variable for tests, which want all of them gone.
var sweepTime = time.Second

// busyPin marks that a command is changing something. A killed command leaves it, and the
// next one completes the work.
const busyPin = "busy"

// pins are the hooks of a namespace and all that is pinned for them. Their methods make and
// remove hooks, and complete the work of killed commands.
type pins struct {
	bpfState
	options Options
	place   place
	unlock  func()
	used    map[string]maps.Used // of quotas, before this command; nil until earlier reads it
	trouble error                // see Namespace.Trouble
}

// removeHook removes a hook without rules, and frees its set.
func (p *pins) removeHook(h *Hook) error {
	if err := removeHook(h.at); err != nil {
		return err
	}
	if h.Direction == policy.Ingress {
		if err := p.dropIfb(h); err != nil {
			return err
		}
	}
	if h.Set != nil {
		h.Set.Release()
	}
	return p.bpfState.drop()
}

// sweep removes hooks that have no rules any more, for up to sweepTime.
func (p *pins) sweep() error {
	if p.store == nil {
		return nil
	}
	var empty []*maps.Set
	haveRules := p.store.Have(maps.Exists)
	for set := range p.store.Sets() {
		if !haveRules[set.Number()] || !set.Attached() {
			empty = append(empty, set)
		}
	}
	began := time.Now()
	return hurry.Up(len(empty), func() error {
		for _, set := range empty {
			if time.Since(began) > sweepTime {
				break
			}
			if err := p.sweepOne(set); err != nil {
				return err
			}
		}
		return nil
	})
}

// sweepOne removes a hook with all its rules.
func (p *pins) sweepOne(set *maps.Set) error {
	h := p.hookOf(set)
	defer h.Close()
	p.store.Clear(set)
	return p.removeHook(h)
}

// follow stores the device that a hook is to be on.
func (p *pins) follow(h *Hook, dev netinfo.Device) error {
	if h.at.index == dev.Index {
		return nil
	}
	if err := p.dropIfb(h); err != nil {
		return err
	}
	h.Set.SetDevice(dev.Index, dev.Name)
	h.at.index = dev.Index
	return nil
}

// dropIfb deletes the ifb of a hook, unless another hook has its index: a device that moved away may have had that before.
func (p *pins) dropIfb(h *Hook) error {
	if h.Set != nil && h.Set.Ifb() != 0 {
		h.Set.SetIfb(0)
	}
	if slices.ContainsFunc(p.sets(), func(set *maps.Set) bool { return set.Ifindex() == h.at.index && set.Ifb() != 0 }) {
		return nil
	}
	return p.dir.dropIfb(h.at.index)
}

// trimIfb deletes the ifb of a hook that does not need it any more.
func (p *pins) trimIfb(h *Hook) error {
	if h.Direction != policy.Ingress || needsIfb(h.Set) {
		return nil
	}
	return p.dropIfb(h)
}

// discardForeign removes the maps of another layout, once it has no hooks.
func (p *pins) discardForeign() error {
	if p.foreign == nil {
		return nil
	}
	if hooks, _, err := p.dir.hookDirs(); len(hooks) > 0 || err != nil {
		return err
	}
	p.foreign = nil
	return p.dir.discardMaps()
}

// removeStrays removes pins that belong to no hook.
func (p *pins) removeStrays() error {
	entries, err := bpffs.List(string(p.dir))
	if err != nil {
		return err
	}
	hooks, _, err := p.dir.hookDirs()
	ofSets := map[string]bool{}
	for _, set := range p.sets() {
		ofSets[p.dir.hookDirOf(set).dir] = true
	}
	for _, at := range hooks {
		if err == nil && p.foreign == nil && !ofSets[at.dir] {
			err = removeHook(at)
		}
	}
	if err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	for _, e := range entries {
		path := p.dir.pin(e.Name())
		switch {
		case strings.HasPrefix(e.Name(), bpffs.TrashPrefix), e.Name() == asideName:
			err = bpffs.RemoveAll(path)
		case !e.IsDir() && strings.HasPrefix(e.Name(), "kinds") && p.store == nil && p.foreign == nil:
			err = bpffs.Unlink(path)
		}
		if err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// complete repairs what a killed or failed command has left. It abandons a change that was not
// armed, keeps one generation of maps, and removes hooks without rules.
func (p *pins) complete() error {
	if p.store == nil && p.foreign == nil { // the command may have failed to remove them
		if err := p.bpfState.open(); err != nil {
			return err
		}
	}
	if p.store != nil {
		if state, _ := p.store.Change(); state == maps.NoChange {
			if err := p.settlePolicy(); err != nil {
				return err
			}
			p.store.Unlock()
			p.store.Abandon()
		}
		if err := p.bpfState.unify(); err != nil {
			return err
		}
	}
	if err := p.removeStrays(); err != nil {
		return err
	}
	if err := p.sweep(); err != nil {
		return err
	}
	if err := p.bpfState.drop(); err != nil {
		return err
	}
	for _, set := range p.sets() {
		h := p.hookOf(set)
		err := p.trimIfb(h)
		if h.Close(); err != nil {
			return err
		}
	}
	return nil
}

// changing runs f, which changes pins, and calls complete if f fails. If this process is
// killed, the next command calls complete.
func (p *pins) changing(f func() error) error {
	mark := p.dir.pin(busyPin)
	if err := bpffs.MakeDir(mark); err != nil {
		return err
	}
	err := f()
	if err == nil {
		return bpffs.Unlink(mark)
	}
	if p.complete() == nil {
		bpffs.Unlink(mark)
	}
	return err
}

// heal completes the work of killed commands, and restores lost programs.
func (p *pins) heal() error {
	if err := p.dir.markAlive(); err != nil {
		return err
	}
	if err := p.healMarks(); err != nil {
		return err
	}
	if p.store != nil {
		p.trouble = p.store.RenewCalendars()
	}
	if p.lost == "" && !bpffs.Exists(p.dir.pin(busyPin)) {
		return nil
	}
	return p.changing(p.complete)
}

// endChange ends the last change for good, so that another can begin, or hooks can be changed; none means all. The error wraps
// ErrPending if the change is pending and one of them takes part in it. A pending change in which none does goes on.
func (p *pins) endChange(hooks ...*Hook) error {
	switch takesPart := func(h *Hook) bool { return h.Set != nil && h.Set.Any(maps.TakesPart) }; p.state() {
	case maps.NoChange:
		return nil
	case maps.Pending:
		if len(hooks) == 0 || slices.ContainsFunc(hooks, takesPart) {
			return p.pending()
		}
		return nil
	}
	return p.changing(p.finish)
}

// finish ends the last change, which is not pending, and removes hooks that have no rules then.
func (p *pins) finish() error {
	if err := p.end(); err != nil {
		return err
	}
	if err := p.sweep(); err != nil {
		return err
	}
	return p.bpfState.drop()
}

// end ends the last change, which is not pending.
func (p *pins) end() error {
	if err := p.settlePolicy(); err != nil {
		return err
	}
	p.store.End() // otherwise a killed process could leave a change of which only a part can be reverted
	p.store.Finish()
	return nil
}
