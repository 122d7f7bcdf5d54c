package loader

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// sweepTime is how long a command may spend on hooks that an earlier change has left
// without rules: to detach a program takes the kernel up to 20 ms.
const sweepTime = time.Second

// busyPin marks that a command is changing something. One that is left over belongs
// to a command that was killed, and the next one completes what it has begun.
const busyPin = "busy"

// pins are the hooks of a namespace, and what is pinned for them: they come and go, and
// what a killed command has left of them is completed.
type pins struct {
	bpfState
	haste haste
}

// takeOff is the home's, for a hook without rules.
func (p *pins) takeOff(h *Hook) error {
	if err := p.dir.takeOff(h.at); err != nil {
		return err
	}
	h.Set.Release()
	return p.bpfState.drop()
}

// trim takes a hook off that has no rules any more, or else what rules needed that are gone.
func (p *pins) trim(h *Hook) error {
	if h.Set.Empty() {
		return p.takeOff(h)
	}
	return p.trimIfb(h.Set)
}

// sweep takes off hooks that have no rules, or no pins any more, as far as there is time.
func (p *pins) sweep() error {
	if p.store == nil {
		return nil
	}
	var empty []*maps.Set
	haveRules := p.store.HaveRules()
	for set := range p.store.Sets() {
		// Earlier builds flush the pins of a hook, and do not know of its rules.
		if !haveRules[set.Number()] || !set.Attached() || !exists(p.dir.hookDir(set.Ifindex(), set.Direction()).dir) {
			empty = append(empty, set)
		}
	}
	began := time.Now()
	return p.haste.hurry(len(empty), func() error {
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

// sweepOne takes all rules off a hook, and the hook off its device.
func (p *pins) sweepOne(set *maps.Set) error {
	h := p.dir.hookOf(set)
	defer h.Close()
	set.Clear()
	return p.takeOff(h)
}

// follow gives the pins of a hook the number that its device has now.
func (p *pins) follow(h *Hook, dev netinfo.Device) error {
	if h.Set.Ifindex() == dev.Index {
		return nil
	}
	if err := p.vacate(dev.Index, h.Direction); err != nil {
		return err
	}
	to := p.dir.hookDir(dev.Index, h.Direction)
	if err := renamePins(h.at.dir, to.dir); err != nil {
		return fmt.Errorf("rename pins: %w", err)
	}
	h.at = to
	return p.renumber(h.Set, dev.Index, dev.Name)
}

// renumber says of a set where its pins are now.
func (p *pins) renumber(set *maps.Set, index int, device string) error {
	old := set.Ifindex()
	set.SetIfb(0)
	set.SetDevice(index, device)
	return p.dir.dropIfb(old)
}

// vacate makes the number of a device free for its pins, where a hook has it whose device
// has moved to another namespace: that gets one of the highest, which no device has.
func (p *pins) vacate(index int, d policy.Direction) error {
	set := p.setOf(index, d)
	if set == nil {
		return nil
	}
	if isUnused(set) {
		return p.sweepOne(set)
	}
	h := p.dir.hookOf(set)
	defer h.Close()
	free := math.MaxInt32
	for p.setOf(free, d) != nil {
		free--
	}
	return p.follow(h, netinfo.Device{Index: free, Name: h.Was})
}

// adopt completes follow for pins that no set has: they are those of a set whose pins are
// not in their place. Others are taken away.
func (p *pins) adopt(at hookDir) error {
	for _, set := range p.sets() {
		if set.Direction() == at.direction && set.Attached() && !exists(p.dir.hookDir(set.Ifindex(), at.direction).dir) {
			return p.renumber(set, at.index, set.Device())
		}
	}
	return takeAway(at)
}

// trimIfb deletes the ifb of a hook that does not need it any more.
func (p *pins) trimIfb(set *maps.Set) error {
	if set.Direction() != policy.Ingress || needsIfb(set, nil) {
		return nil
	}
	if set.Ifb() != 0 {
		set.SetIfb(0)
	}
	return p.dir.dropIfb(set.Ifindex())
}

// discardOther discards one of them, and after the last one the maps of that layout.
func (p *pins) discardOther(other *OtherLayoutError) error {
	if err := p.dir.takeOff(other.at); err != nil {
		return err
	}
	p.others = slices.DeleteFunc(slices.Clone(p.others), func(o *OtherLayoutError) bool { return o == other })
	if p.foreign == nil || len(p.others) > 0 {
		return nil
	}
	p.foreign = nil
	return p.dir.discardMaps()
}

// removeStrays removes what is pinned for no hook.
func (p *pins) removeStrays() error {
	entries, err := readDir(string(p.dir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := p.dir.pin(e.Name())
		index, d, isHook := parseHookName(e.Name())
		isOther := slices.ContainsFunc(p.others, func(o *OtherLayoutError) bool { return o.at.dir == path })
		switch {
		case strings.HasPrefix(e.Name(), trashPrefix), e.Name() == asideName:
			err = removeAll(path)
		case isHook && !isOther && p.setOf(index, d) == nil:
			err = p.adopt(p.dir.hookDir(index, d))
		case e.Name() == kindsPin && p.store == nil && p.foreign == nil:
			err = unlink(path)
		}
		if err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// complete brings order into what a command has left halfway: a change that was not
// armed is none, maps are of one generation, and there are no hooks without rules.
func (p *pins) complete() error {
	if p.store == nil && p.foreign == nil { // it may have failed to remove them
		if err := p.bpfState.open(); err != nil {
			return err
		}
	}
	if p.store != nil {
		if state, _ := p.store.Change(); state == maps.NoChange {
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
		if err := p.trimIfb(set); err != nil {
			return err
		}
	}
	return nil
}

// changing runs f, which changes something, and looks after what is left if it fails;
// or the next command does, if this one is killed.
func (p *pins) changing(f func() error) error {
	mark := p.dir.pin(busyPin)
	if err := makeDir(mark); err != nil {
		return err
	}
	err := f()
	if err == nil {
		return unlink(mark)
	}
	if p.complete() == nil {
		unlink(mark)
	}
	return err
}

// heal finishes what a killed command was at.
func (p *pins) heal() error {
	if err := p.dir.markAlive(); err != nil {
		return err
	}
	if err := p.dir.healQueues(); err != nil {
		return err
	}
	if exists(p.dir.pin(busyPin)) {
		if err := p.complete(); err != nil {
			return err
		}
		return unlink(p.dir.pin(busyPin))
	}
	// Hooks that an earlier command had no time for.
	return p.sweep()
}

// endChange ends the last change for good, so that another can begin, or h be
// changed; nil is for all hooks. The error wraps ErrPending where the change is to be
// confirmed first; one in which h has no part goes on.
func (p *pins) endChange(h *Hook) error {
	if p.store == nil {
		return nil
	}
	state, _ := p.store.Change()
	switch {
	case state == maps.Pending && (h == nil || h.Set != nil && h.Set.TakesPart()):
		return ErrPending
	case state == maps.Pending, state == maps.NoChange:
		return nil
	}
	return p.changing(p.finish)
}

// finish ends the last change, which is not pending, and takes off hooks that have no rules then.
func (p *pins) finish() error {
	p.store.End() // or a process that is killed meanwhile leaves a change that can be taken back in part
	p.store.Finish()
	return p.sweep()
}

// forEach runs f, which may detach a hook, with each of them, also if it fails with some.
func forEach[H any](p *pins, hooks []H, f func(H) error) error {
	return p.haste.hurry(len(hooks), func() error {
		var failed []error
		for _, h := range hooks {
			failed = append(failed, f(h))
		}
		return errors.Join(failed...)
	})
}
