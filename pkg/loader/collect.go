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
	// kernel removes the entry with the device, which goes with the namespace and never before.
	alivePin = "alive"
	// loopback is the index of that device in every namespace.
	loopback = 1
)

// Collected are the names of deleted devices whose rules Write has removed, sorted.
func (n *Namespace) Collected() []string { return n.collected }

// markAlive makes the home tell whether its namespace exists, before anything else is pinned in it.
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

// isDead reports whether the namespace of a home no longer exists. The error
// wraps fs.ErrNotExist where the home does not tell, as an older build made it.
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

// remove removes a home in which nothing but its mark and its lock is left.
func (dir home) remove() {
	entries, err := os.ReadDir(string(dir))
	if err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() != alivePin && e.Name() != lockPin }) {
		return
	}
	if unlink(dir.pin(alivePin)) == nil && unlink(dir.pin(lockPin)) == nil {
		unlink(string(dir)) // refused unless empty
	}
}

// collectDevices removes the hooks of devices that no longer exist. A hook that
// cannot be judged or removed stays, and is no reason for a command to fail.
func (n *Namespace) collectDevices() {
	if n.pins.store == nil && len(n.pins.others) == 0 {
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
	var others []*OtherLayoutError
	for _, other := range n.pins.others {
		_, anywhere, err := attachedTo(other.at)
		if name, here := names[other.at.index]; err == nil && !anywhere && !(here && name == other.Device) {
			others = append(others, other)
		}
	}
	discarded, _ := n.Discard(others...)
	for _, other := range discarded {
		n.collected = append(n.collected, other.Name())
	}
	if n.pins.store != nil {
		defer n.pins.store.Hold().Close() // for as long as there are sets to look at
	}
	for _, set := range n.pins.sets() {
		if names[set.Ifindex()] == set.Device() {
			continue
		}
		h, err := n.pins.dir.openHook(set)
		if err != nil || h == nil {
			continue
		}
		h.Close()
		if h.State == Gone && n.pins.changing(func() error { return n.pins.sweepOne(set) }) == nil {
			n.collected = append(n.collected, h.Was)
		}
	}
	slices.Sort(n.collected)
	n.collected = slices.Compact(n.collected)
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
			continue // another command is at it
		}
		if dead {
			dir.clear()
		}
		dir.remove() // also if a killed command made it and had no time to mark it
		unlock()
	}
}

// clear removes what is pinned for a namespace that no longer exists; the mark that says so goes last.
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
		return // with the maps and programs that its hooks call
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

// A Leftover is what is pinned for another namespace that is not known to exist.
type Leftover struct {
	Path string // of the directory
	Dead bool   // the namespace no longer exists; otherwise an older build left no mark that would tell
	// InForce are the directions of devices on which rules of a dead namespace are in force: only 'flush' lifts them.
	InForce []Orphan
}

// An Orphan is a direction of a device on which rules are in force that a namespace
// set that no longer exists.
type Orphan struct {
	Device    netinfo.Device // the zero Device where it is in another namespace
	Direction policy.Direction

	at hookDir
}

// Leftovers are those that there are now. With the error come those that could be looked at.
func (n *Namespace) Leftovers() (left []Leftover, err error) {
	var failed []error
	for _, dir := range n.place.others() {
		dead, err := dir.isDead()
		switch {
		case dead:
			orphans, err := dir.orphans()
			if errors.Is(err, fs.ErrPermission) {
				continue // nor would it be known whether rules are in force
			}
			failed = append(failed, err)
			left = append(left, Leftover{Path: string(dir), Dead: true, InForce: orphans})
		case errors.Is(err, fs.ErrNotExist) && exists(string(dir)):
			left = append(left, Leftover{Path: string(dir)})
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission): // others' are for root to look at
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
		index, anywhere, err := attachedTo(at)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another command has just removed it
		}
		if err != nil {
			return orphans, err
		}
		if !anywhere {
			continue
		}
		o := Orphan{Direction: at.direction, at: at}
		if index != 0 {
			if o.Device, _, err = netinfo.DeviceByIndex(index); err != nil {
				return orphans, err
			}
		}
		orphans = append(orphans, o)
	}
	return orphans, nil
}

// FlushOrphans lifts rules from devices of this namespace that namespaces set
// which no longer exist, as far as which tells, and returns from where.
func (n *Namespace) FlushOrphans(which func(netinfo.Device, policy.Direction) bool) (flushed []Orphan, err error) {
	left, _ := n.Leftovers() // what cannot be looked at is for doctor to tell
	for _, l := range left {
		for _, o := range l.InForce {
			if o.Device.Name == "" || !which(o.Device, o.Direction) {
				continue
			}
			unlock, err := home(l.Path).lock(true, lockPatience)
			if err != nil {
				return flushed, fmt.Errorf("open the pins: %w", err)
			}
			err = takeAway(o.at)
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

// EndOldChange ends the last change for good if it is over, older than an age,
// and has left hooks without a rule, which are kept only for a rollback. It
// reports whether there is more to do than fits in one turn.
func (n *Namespace) EndOldChange(age time.Duration) (more bool, err error) {
	if n.pins.store == nil {
		return false, nil
	}
	at := n.pins.store.Begins() // 0 where a command has ended the change already
	switch state, expired := n.pins.store.Change(); state {
	case maps.Pending:
		return false, nil
	case maps.Expired:
		at = expired
	}
	if at != 0 && at+uint64(age) > maps.Now() {
		return false, nil
	}
	if !slices.ContainsFunc(n.pins.sets(), func(set *maps.Set) bool { return !set.InForce() }) {
		return false, nil
	}
	if err := n.pins.endChange(nil); err != nil {
		return false, err
	}
	err = n.pins.sweep()
	return err == nil && slices.ContainsFunc(n.pins.sets(), isUnused), err
}
