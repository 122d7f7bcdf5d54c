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
	var names map[int]string
	for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
		indices, err := n.indices(d)
		if err != nil || len(indices) == 0 {
			continue
		}
		if names == nil {
			devices, err := netinfo.Devices()
			if err != nil {
				return
			}
			names = map[int]string{}
			for _, dev := range devices {
				names[dev.Index] = dev.Name
			}
		}
		for _, index := range indices {
			was, err := n.deviceWas(index, d)
			if name, here := names[index]; here && (err == nil && was == name || !n.isGone(index, d)) {
				continue
			} else if !here && n.attachedAnywhere(index, d) {
				continue
			}
			if err != nil {
				was = fmt.Sprintf("device %d", index)
			}
			if n.takeOff(&Hook{Direction: d, index: index, path: n.hookPath(index, d)}) == nil && !slices.Contains(n.collected, was) {
				n.collected = append(n.collected, was)
			}
		}
	}
	slices.Sort(n.collected)
}

// isGone reports whether a hook is that of a deleted device whose index another one has now.
func (n *Namespace) isGone(index int, d policy.Direction) bool {
	h, err := n.openHook(index, d)
	if err != nil || h == nil {
		return false
	}
	defer h.Close()
	return h.State == Gone
}

// attachedAnywhere reports whether a hook without a device here may be attached
// to one elsewhere: tcx links go along with a device, filters do not.
func (n *Namespace) attachedAnywhere(index int, d policy.Direction) bool {
	on, err := attachedTo(n.hookPath(index, d), d)
	return err != nil || len(on) > 0
}

// attachedTo are the links of a hook that are attached, each with the index of its device.
func attachedTo(hook string, d policy.Direction) ([]*link.Info, error) {
	if err := trustDir(hook); err != nil {
		return nil, err
	}
	h := &Hook{Direction: d, path: hook}
	defer func() { h.closeLinks() }()
	if err := h.openLinks(); err != nil {
		return nil, err
	}
	var attached []*link.Info
	for _, l := range h.links {
		info, err := l.Info()
		if err != nil {
			return nil, fmt.Errorf("ask for a link of %s: %w", hook, err)
		}
		if on := info.TCX(); on == nil || on.Ifindex != 0 {
			attached = append(attached, info)
		}
	}
	return attached, nil
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
	for _, e := range entries {
		path := filepath.Join(home, e.Name())
		_, d, isHook := parseHookName(e.Name())
		switch {
		case isHook:
			if on, err := attachedTo(path, d); err == nil && len(on) == 0 {
				discard(path)
			}
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
	path      string
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
		_, d, ok := parseHookName(e.Name())
		if !ok {
			continue
		}
		path := filepath.Join(home, e.Name())
		links, err := attachedTo(path, d)
		if errors.Is(err, fs.ErrNotExist) {
			continue // another command has just removed it
		}
		if err != nil {
			return orphans, err
		}
		if len(links) == 0 {
			continue
		}
		o := Orphan{Direction: d, path: path}
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
			err = n.remove(&Hook{Direction: o.Direction, path: o.path})
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

// changing are the hooks that take part in the last change. What cannot be read is left out.
func (n *Namespace) changing() (hooks []*Hook) {
	for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
		indices, err := n.indices(d)
		if err != nil {
			continue
		}
		for _, index := range indices {
			// Far cheaper than to open all hooks, of which most have no part in any.
			if dir, err := n.onlyGeneration(index, d); err == nil {
				if changing, err := maps.Changing(dir); err == nil && !changing {
					continue
				}
			}
			if h, err := n.openHook(index, d); err == nil && h != nil {
				hooks = append(hooks, h)
			}
		}
	}
	return hooks
}

// EndOldChange ends the last change for good if it is over, older than an age,
// and has left hooks without a rule, which are kept only for a rollback. It
// reports whether there is more to do than fits in one turn.
func (n *Namespace) EndOldChange(age time.Duration) (more bool, err error) {
	hooks := n.changing()
	defer closeHooks(hooks)
	for _, h := range hooks {
		at := h.Set.Begins() // 0 where a command has ended the change already
		switch state, expired := h.Set.Change(); state {
		case maps.Pending:
			return false, nil
		case maps.Expired:
			at = expired
		}
		if h.Set.Has(nil) && (at == 0 || at+uint64(age) <= maps.Now()) {
			return true, n.endChange(new(Hook))
		}
	}
	return false, nil
}
