package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/step"
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
func (n *Namespace) markAlive() error {
	pin := filepath.Join(n.dir, alivePin)
	if exists(pin) {
		return nil
	}
	if err := step.Try("mark the pins as those of a namespace"); err != nil {
		return err
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "shapectl_alive", Type: ebpf.DevMap, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err == nil {
		defer m.Close()
		if err = m.Put(uint32(0), uint32(loopback)); err == nil {
			err = m.Pin(pin)
		}
	}
	if err != nil {
		return fmt.Errorf("mark the pins as those of this network namespace: %w", err)
	}
	return nil
}

// isDead reports whether the namespace of a home no longer exists. The error
// wraps fs.ErrNotExist where the home does not tell, as an older build made it.
func isDead(home string) (bool, error) {
	if err := trustDir(home); err != nil {
		return false, err
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(home, alivePin), &ebpf.LoadPinOptions{ReadOnly: true})
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

// removeHome removes a home in which nothing but its mark is left.
func removeHome(home string) {
	entries, err := os.ReadDir(home)
	if err != nil || len(entries) > 1 || len(entries) == 1 && entries[0].Name() != alivePin {
		return
	}
	if unlink(filepath.Join(home, alivePin)) == nil {
		unlink(home) // refused unless empty
	}
}

// collectDevices removes the hooks of devices that no longer exist. A hook that
// cannot be judged or removed stays, and is no reason for a command to fail.
func (n *Namespace) collectDevices() {
	others, err := n.otherLayouts()
	if n.store == nil && len(others) == 0 || err != nil {
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
	for _, other := range others {
		on, err := attachedTo(n.hookPath(other.index, other.Direction), other.index, other.Direction)
		if name, here := names[other.index]; err != nil || len(on) > 0 || here && name == other.Device {
			continue
		}
		if n.Discard(other) == nil && !slices.Contains(n.collected, other.Name()) {
			n.collected = append(n.collected, other.Name())
		}
	}
	if n.store == nil {
		return
	}
	var gone []*Hook
	for set := range n.store.Sets() {
		if names[set.Ifindex()] == set.Device() {
			continue
		}
		h, err := n.openHook(set)
		if err != nil || h == nil {
			continue
		}
		if h.State == Gone {
			gone = append(gone, h)
		} else {
			h.Close()
		}
	}
	defer closeHooks(gone)
	for _, h := range gone {
		err := n.changing(func() error {
			h.Set.Clear()
			return n.takeOff(h)
		})
		if err == nil && !slices.Contains(n.collected, h.Was) {
			n.collected = append(n.collected, h.Was)
		}
	}
	slices.Sort(n.collected)
}

// attachedTo are the links of a hook that are attached, each with the index of its device.
func attachedTo(dir string, index int, d policy.Direction) ([]*link.Info, error) {
	a, err := openAttachment(dir, index, d)
	if err != nil {
		return nil, err
	}
	defer a.close()
	return a.on()
}

// homes are the directories of other namespaces.
func (n *Namespace) homes() (paths []string) {
	if errors.Join(trustBase(n.bpffs()), trustDir(n.top())) != nil {
		return nil
	}
	entries, err := os.ReadDir(n.top())
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if cookie, err := strconv.ParseUint(e.Name(), 10, 64); err == nil && cookie != n.cookie {
			paths = append(paths, filepath.Join(n.top(), e.Name()))
		}
	}
	return paths
}

// collectNamespaces removes the homes of namespaces that no longer exist, but for
// hooks that are in force on a device that left its namespace in time.
func (n *Namespace) collectNamespaces() {
	for _, home := range n.homes() {
		dead, err := isDead(home)
		if !dead && !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		unlock, err := lock(home, true, 0)
		if err != nil {
			continue // another command is at it
		}
		if dead {
			clearHome(home)
		}
		removeHome(home) // also if a killed command made it and had no time to mark it
		unlock()
	}
}

// clearHome removes what is pinned for a namespace that no longer exists; the mark that says so goes last.
func clearHome(home string) {
	entries, err := os.ReadDir(home)
	if err != nil {
		return
	}
	slices.SortStableFunc(entries, func(a, b os.DirEntry) int { // hooks first
		_, _, isHook := parseHookName(a.Name())
		_, _, isOther := parseHookName(b.Name())
		switch {
		case isHook == isOther:
			return 0
		case isHook:
			return -1
		}
		return 1
	})
	inForce := false
	for _, e := range entries {
		path := filepath.Join(home, e.Name())
		index, d, isHook := parseHookName(e.Name())
		switch {
		case isHook:
			if on, err := attachedTo(path, index, d); err != nil || len(on) > 0 {
				inForce = true
			} else {
				discard(path)
			}
		case e.Name() == hurryPin:
			relax(home)
		case inForce: // with the maps and programs that its hooks call
		case e.IsDir():
			removeAll(path)
		case e.Name() != alivePin:
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

	path  string
	index int // of the device when the rules were set
}

// Leftovers are those that there are now. With the error come those that could be looked at.
func (n *Namespace) Leftovers() (left []Leftover, err error) {
	var failed []error
	for _, home := range n.homes() {
		dead, err := isDead(home)
		switch {
		case dead:
			orphans, err := n.orphans(home)
			failed = append(failed, err)
			left = append(left, Leftover{Path: home, Dead: true, InForce: orphans})
		case errors.Is(err, fs.ErrNotExist) && exists(home):
			left = append(left, Leftover{Path: home})
		case !errors.Is(err, fs.ErrNotExist):
			failed = append(failed, err)
		}
	}
	return left, errors.Join(failed...)
}

// orphans are the hooks of a dead namespace that are in force.
func (n *Namespace) orphans(home string) (orphans []Orphan, err error) {
	entries, err := os.ReadDir(home)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	for _, e := range entries {
		index, d, ok := parseHookName(e.Name())
		if !ok {
			continue
		}
		path := filepath.Join(home, e.Name())
		links, err := attachedTo(path, index, d)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another command has just removed it
		}
		if err != nil {
			return orphans, err
		}
		if len(links) == 0 {
			continue
		}
		o := Orphan{Direction: d, path: path, index: index}
		if on := links[0].TCX(); on != nil {
			// The number may be of a device elsewhere, and one of ours have it by chance.
			attached, err := netinfo.TCXPrograms(int(on.Ifindex), d)
			if err == nil && slices.Contains(attached, links[0].Program) {
				if o.Device, _, err = netinfo.DeviceByIndex(int(on.Ifindex)); err != nil {
					return orphans, err
				}
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
			unlock, err := lock(l.Path, true, lockPatience)
			if err != nil {
				return flushed, fmt.Errorf("open the pins: %w", err)
			}
			var a *attachment
			if a, err = openAttachment(o.path, o.index, o.Direction); err == nil {
				err = a.take()
				a.close()
			}
			clearHome(l.Path)
			removeHome(l.Path)
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
	if n.store == nil {
		return false, nil
	}
	at := n.store.Begins() // 0 where a command has ended the change already
	switch state, expired := n.store.Change(); state {
	case maps.Pending:
		return false, nil
	case maps.Expired:
		at = expired
	}
	if at != 0 && at+uint64(age) > maps.Now() {
		return false, nil
	}
	for set := range n.store.Sets() {
		if set.InForce() {
			continue
		}
		if err := n.endChange(nil); err != nil {
			return false, err
		}
		if err := n.sweep(); err != nil || n.store == nil {
			return false, err
		}
		for set := range n.store.Sets() {
			more = more || isUnused(set)
		}
		return more, nil
	}
	return false, nil
}
