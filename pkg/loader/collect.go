package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// alivePin is a device map that holds the loopback device of a home's namespace. The
	// kernel removes the entry with the device when the namespace ends, and never before.
	alivePin = "alive"
	// loopback is the index of that device in every namespace.
	loopback = 1
)

// Collected are the names of deleted devices whose rules Write has removed, sorted.
func (n *Namespace) Collected() []string { return n.collected }

// markAlive pins the mark that isDead reads. It must be the first pin of a home.
func (dir home) markAlive() error {
	pin := dir.pin(alivePin)
	if exists(pin) {
		return nil
	}
	spec := &ebpf.MapSpec{Name: "shapectl_alive", Type: ebpf.DevMap, ValueSize: 4}
	if err := pinValue(pin, spec, uint32(loopback)); err != nil {
		return fmt.Errorf("mark the pins as those of this network namespace: %w", err)
	}
	return nil
}

// isDead reports whether the namespace of a home no longer exists. The error wraps
// fs.ErrNotExist if a killed command has not marked the home.
func (dir home) isDead() (bool, error) {
	if err := trustDir(string(dir)); err != nil {
		return false, err
	}
	m, err := ebpf.LoadPinnedMap(dir.pin(alivePin), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return false, err
	}
	defer m.Close()
	var index uint32
	err = m.Lookup(uint32(0), &index)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return true, nil
	}
	return false, err
}

// ownPins are those of a home without rules.
var ownPins = []string{alivePin, reattachedPin, authorPin, policyPin, string(ClusterLeases), string(LineLeases), lockPin}

// remove removes a home that has no other pins than its own.
func (dir home) remove() {
	entries, err := os.ReadDir(string(dir))
	if err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return !slices.Contains(ownPins, e.Name()) }) {
		return
	}
	for _, name := range ownPins {
		if unlink(dir.pin(name)) != nil {
			return
		}
	}
	unlink(string(dir)) // refused unless empty
}

// collectDevices removes the hooks of devices that no longer exist. It skips a hook that
// cannot be judged or removed, because the command must not fail for that.
func (n *Namespace) collectDevices(keep func(device string) bool) {
	if n.pins.store == nil {
		return
	}
	devices, err := netinfo.Devices()
	if err != nil {
		return
	}
	names := map[int]string{}
	for _, dev := range devices {
		names[dev.Index] = dev.Name
	}
	n.collected = append(n.collected, n.pins.removeGone(names, keep)...)
	slices.Sort(n.collected)
	n.collected = slices.Compact(n.collected)
}

// removeGone removes the hooks of devices that are not among names and that nobody keeps, and returns what these were called.
func (p *pins) removeGone(names map[int]string, keep func(device string) bool) (removed []string) {
	if p.store == nil {
		return nil
	}
	defer p.store.Hold().Close() // for as long as there are sets to look at
	here := map[string]bool{}    // then the device has other rules
	for _, name := range names {
		here[name] = true
	}
	haveRules := p.store.Have(maps.Exists)
	var gone []*maps.Set
	for _, set := range p.sets() {
		if names[set.Ifindex()] == set.Device() || !set.Attached() || !haveRules[set.Number()] {
			continue
		}
		h := p.dir.hookOf(set)
		if h.judge() == nil && h.State == Gone && (here[h.Was] || keep == nil || !keep(h.Was)) {
			gone = append(gone, set)
		}
		h.Close()
	}
	if len(gone) == 0 {
		return nil
	}
	p.changing(func() error {
		p.store.ClearSets(gone...)
		return forEach(p, gone, func(set *maps.Set) error {
			h := p.dir.hookOf(set)
			defer h.Close()
			err := p.removeHook(h)
			if err == nil {
				removed = append(removed, h.Was)
			}
			return err
		})
	})
	return removed
}

// collectNamespaces removes the homes of namespaces that no longer exist, but for
// hooks that are in force on a device that left its namespace in time.
func (at place) collectNamespaces() {
	for _, dir := range at.others() {
		dead, err := dir.isDead()
		if !dead && !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		unlock, err := dir.lock(true, 0)
		if err != nil {
			continue // another command is using it
		}
		if dead {
			dir.clear()
		}
		dir.remove() // also a home that a killed command made and did not mark
		unlock()
	}
}

// clear removes the pins of a namespace that no longer exists, except the mark and the lock.
func (dir home) clear() {
	hooks, err := dir.hookDirs()
	inForce := err != nil
	for _, at := range hooks {
		if _, anywhere, err := attachedTo(at); err != nil || anywhere {
			inForce = true
		} else {
			discard(at.dir)
		}
	}
	if inForce {
		return // the maps and programs stay, because a hook uses them
	}
	entries, _ := readDir(string(dir))
	for _, e := range entries {
		if path := dir.pin(e.Name()); e.IsDir() && e.Name() != lockPin {
			removeAll(path)
		} else if !e.IsDir() && e.Name() != alivePin {
			unlink(path)
		}
	}
}

// A Leftover is the pins of a namespace that no longer exists.
type Leftover struct {
	Path string // of the directory
	// InForce are the directions of devices on which rules are in force: only 'flush' removes them.
	InForce []Orphan
}

// An Orphan is a direction of a device with rules in force that were set in a namespace which
// no longer exists.
type Orphan struct {
	Device    netinfo.Device // the zero Device if it is in another namespace
	Direction policy.Direction

	at hookDir
}

// KnowsOthers reports whether other namespaces have pins: limits of Elsewhere may be theirs, as devices move.
func (n *Namespace) KnowsOthers() bool { return len(n.place.others()) > 0 }

// Leftovers are all leftovers. With an error they are those that could be read.
func (n *Namespace) Leftovers() (left []Leftover, err error) {
	var failed []error
	for _, dir := range n.place.others() {
		dead, err := dir.isDead()
		switch {
		case dead:
			orphans, err := dir.orphans()
			if errors.Is(err, fs.ErrPermission) {
				continue // it cannot be known whether rules are in force
			}
			failed = append(failed, err)
			left = append(left, Leftover{Path: string(dir), InForce: orphans})
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission): // only root may read those of another user
			failed = append(failed, err)
		}
	}
	return left, errors.Join(failed...)
}

// orphans are the hooks of a dead namespace that are in force.
func (dir home) orphans() (orphans []Orphan, err error) {
	hooks, err := dir.hookDirs()
	if err != nil {
		return nil, err
	}
	for _, at := range hooks {
		device, anywhere, err := attachedTo(at)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another command has just removed it
		}
		if err != nil {
			return orphans, err
		}
		if !anywhere {
			continue
		}
		orphans = append(orphans, Orphan{Device: device, Direction: at.direction, at: at})
	}
	return orphans, nil
}

// FlushOrphans removes the orphans of this namespace's devices for which which is true. It
// returns those that it has removed.
func (n *Namespace) FlushOrphans(which func(netinfo.Device, policy.Direction) bool) (flushed []Orphan, err error) {
	left, _ := n.Leftovers() // doctor reports what cannot be read
	for _, l := range left {
		for _, o := range l.InForce {
			if o.Device.Name == "" || !which(o.Device, o.Direction) {
				continue
			}
			unlock, err := home(l.Path).lock(true, lockPatience)
			if err != nil {
				return flushed, fmt.Errorf("open the pins: %w", err)
			}
			err = removeHook(o.at)
			home(l.Path).clear()
			home(l.Path).remove()
			unlock()
			if err != nil {
				return flushed, err
			}
			flushed = append(flushed, o)
		}
	}
	return flushed, nil
}

// EndOldChange ends the last change for good if it is over, older than an age, and has
// left hooks without a rule, which are kept only for a rollback. It reports whether it left
// some for the next call.
func (n *Namespace) EndOldChange(age time.Duration) (more bool, err error) {
	if n.pins.store == nil {
		return false, nil
	}
	at := n.pins.store.Begins() // 0 if a command has ended the change already
	switch state, expired := n.pins.store.Change(); state {
	case maps.Pending:
		return false, nil
	case maps.Expired:
		at = expired
	}
	if at != 0 && at+uint64(age) > maps.Now() {
		return false, nil
	}
	sets := n.pins.sets() // none if there are only pools
	haveRules := n.pins.store.Have(maps.InForce)
	if len(sets) > 0 && !slices.ContainsFunc(sets, func(set *maps.Set) bool { return !haveRules[set.Number()] }) {
		return false, nil
	}
	if err := n.pins.endChange(nil); err != nil {
		return false, err
	}
	if err = n.pins.sweep(); err != nil || n.pins.store == nil {
		return false, err
	}
	haveRules = n.pins.store.Have(maps.Exists)
	return slices.ContainsFunc(n.pins.sets(), func(set *maps.Set) bool { return !haveRules[set.Number()] || !set.Attached() }), nil
}
