package loader

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// State says whether a hook's rules are in force.
type State string

const (
	Attached State = "attached"
	// Gone: the device was deleted since, and its rules limit nothing.
	Gone State = "device is gone"
	// Moved: the device is in another network namespace now, and the rules, attached by tcx, went along.
	Moved State = "attached, but the device has moved to another namespace"
	// Detached: the device is there, but something else took the program off it.
	Detached State = "detached"
)

// A Hook is the rules of one direction of one device.
type Hook struct {
	Direction policy.Direction
	Device    netinfo.Device // as it is now; the zero Device where it is not here
	Was       string         // its name when the hook was made
	Mode      Mode
	State     State
	Set       *maps.Set // nil for a hook that is yet to be made

	index    int // of the device
	attached *attachment
}

// Name is the device's name now, or when the hook was made.
func (h *Hook) Name() string { return cmp.Or(h.Device.Name, h.Was) }

// InForce reports whether the rules limit anything.
func (h *Hook) InForce() bool { return h.State == Attached || h.State == Moved }

// Status is the state, with the name that the device had before it was renamed.
func (h *Hook) Status() string {
	if h.State == Attached && h.Was != h.Name() {
		return string(h.State) + ", was " + h.Was
	}
	return string(h.State)
}

// Match is the side of packets that prefixes are compared with.
func (h *Hook) Match() policy.Match { return h.Set.Side() }

// OtherBuild reports whether another build of shapectl made the program that is attached.
func (h *Hook) OtherBuild() (bool, error) {
	this, err := program.Build()
	return h.Set.Hook().Build != this, err
}

// Close lets go of the hook; it stays in force.
func (h *Hook) Close() {
	if h.attached != nil {
		h.attached.close()
	}
	if h.Set != nil {
		h.Set.Close()
	}
}

func closeHooks(hooks []*Hook) {
	for _, h := range hooks {
		h.Close()
	}
}

// An OtherLayoutError is about a hook that this build can neither read nor change,
// as one with another layout made it. It wraps maps.ErrOtherLayout.
type OtherLayoutError struct {
	Device    string // its name when the hook was made; "" where that cannot be read either
	Now       string // the name of the device that has its number; "" where none has
	Direction policy.Direction

	index int
	err   error
}

// Name is the device's name, or its number where that is all that can be told.
func (e *OtherLayoutError) Name() string { return cmp.Or(e.Device, fmt.Sprint("device ", e.index)) }

func (e *OtherLayoutError) Error() string {
	return fmt.Sprintf("rules of %s %s: %v", e.Name(), e.Direction, e.err)
}

func (e *OtherLayoutError) Unwrap() error { return e.err }

func parseHookName(name string) (index int, d policy.Direction, ok bool) {
	number, rest, _ := strings.Cut(name, "-")
	index, err := strconv.Atoi(number)
	if err != nil {
		return 0, d, false
	}
	d, err = policy.ParseDirection(rest)
	return index, d, err == nil
}

func (n *Namespace) hookPath(index int, d policy.Direction) string {
	return filepath.Join(n.dir, fmt.Sprintf("%d-%s", index, d))
}

// Hooks are the hooks that have rules, by device name, egress before ingress. With
// the error come the hooks that could be read.
func (n *Namespace) Hooks() (hooks []*Hook, err error) {
	var unread []error
	others, err := n.otherLayouts()
	if err != nil {
		return nil, err
	}
	for _, other := range others {
		unread = append(unread, other)
	}
	if n.store != nil {
		haveRules := n.store.HaveRules()
		for set := range n.store.Sets() {
			if !haveRules[set.Number()] {
				continue
			}
			h, err := n.openHook(set)
			if err != nil {
				unread = append(unread, err)
			} else if h != nil {
				hooks = append(hooks, h)
			}
		}
	}
	slices.SortFunc(hooks, func(a, b *Hook) int {
		return cmp.Or(strings.Compare(a.Name(), b.Name()), strings.Compare(a.Direction.String(), b.Direction.String()))
	})
	return slices.DeleteFunc(hooks, func(h *Hook) bool {
		superseded := h.State == Gone && slices.ContainsFunc(hooks, func(other *Hook) bool {
			return other.State != Gone && other.Name() == h.Was && other.Direction == h.Direction
		})
		if superseded {
			h.Close()
		}
		return superseded
	}), errors.Join(unread...)
}

// otherLayouts are the hooks that builds of another layout have made.
func (n *Namespace) otherLayouts() (others []*OtherLayoutError, err error) {
	if n.dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	for _, e := range entries {
		index, d, ok := parseHookName(e.Name())
		if !ok {
			continue
		}
		other, err := n.otherLayout(index, d)
		if err != nil {
			return nil, err
		}
		if other != nil {
			others = append(others, other)
		}
	}
	return others, nil
}

// otherLayout is the hook of a direction of a device, if a build of another layout has made it.
func (n *Namespace) otherLayout(index int, d policy.Direction) (*OtherLayoutError, error) {
	if n.dir == "" {
		return nil, nil
	}
	path := n.hookPath(index, d)
	hasProgram := exists(filepath.Join(path, programPin))
	if hasProgram && n.foreign == nil || !exists(path) {
		return nil, nil
	}
	generations, err := generationsIn(path)
	hasMaps := len(generations) > 0 && !hasProgram // of its own
	if err != nil || !hasMaps && n.foreign == nil {
		return nil, err
	}
	dev, _, err := netinfo.DeviceByIndex(index)
	other := &OtherLayoutError{dev.Name, dev.Name, d, index, n.foreign}
	if hasMaps {
		other.Device, _ = maps.Device(filepath.Join(path, generations[len(generations)-1]))
		other.err = maps.ErrOtherLayout
	}
	return other, err
}

// setOf is the set of a direction of a device, by its index when the hook was made; nil if there is none.
func (n *Namespace) setOf(index int, d policy.Direction) *maps.Set {
	if n.store != nil {
		for set := range n.store.Sets() {
			if set.Ifindex() == index && set.Direction() == d {
				return set
			}
		}
	}
	return nil
}

// Find is the hook of a device by its name; nil if it has none. A device that
// is no longer here is found by the name that it had; but no rules of a device
// that is gone are found for changes.
func (n *Namespace) Find(name string, d policy.Direction) (*Hook, error) {
	dev, err := netinfo.DeviceByName(name)
	here := err == nil
	if err != nil && !errors.Is(err, netinfo.ErrNoDevice) {
		return nil, err
	}
	if here {
		other, err := n.otherLayout(dev.Index, d)
		if err != nil {
			return nil, err
		}
		if other != nil {
			return nil, other
		}
	} else {
		others, err := n.otherLayouts()
		if err != nil {
			return nil, err
		}
		for _, other := range others {
			if other.Direction == d && other.Device == name {
				return nil, other
			}
		}
	}
	if n.store == nil {
		return nil, nil
	}
	var sets []*maps.Set
	for set := range n.store.Sets() {
		switch {
		case set.Direction() != d:
		case here && set.Ifindex() == dev.Index:
			sets = append([]*maps.Set{set}, sets...)
		case set.Device() == name:
			sets = append(sets, set)
		}
	}
	for _, set := range sets {
		h, err := n.openHook(set)
		if err != nil {
			return nil, err
		}
		if h == nil {
			continue
		}
		if h.Device.Name == name || h.Was == name && h.Device.Name == "" && (h.State == Moved || !n.writing) {
			return h, nil // here, back with another number, moved away, or gone and for reading only
		}
		h.Close()
	}
	return nil, nil
}

// openHook opens the hook of a set; nil if it has no rules, nor any that a change has
// taken away or is to bring.
func (n *Namespace) openHook(set *maps.Set) (*Hook, error) {
	if isUnused(set) {
		return nil, nil
	}
	h := &Hook{Direction: set.Direction(), Was: set.Device(), Set: set, index: set.Ifindex()}
	set.Hold()
	var err error
	h.attached, err = openAttachment(n.hookPath(h.index, h.Direction), h.index, h.Direction)
	if err != nil {
		h.Close()
		return nil, err
	}
	h.Mode = h.attached.mode()
	if err := h.judge(); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// isUnused reports whether a hook has no rules, or a command was killed before it attached it.
func isUnused(set *maps.Set) bool { return set.Empty() || !set.Attached() }

// judge finds out what became of the device, and of the program on it.
func (h *Hook) judge() error {
	index, err := h.indexNow()
	if err != nil {
		return err
	}
	device, here, err := netinfo.DeviceByIndex(index)
	if err != nil {
		return err
	}
	if h.State, err = h.attached.state(index, here); err != nil {
		return err
	}
	if !here || h.State == Moved || h.State == Gone {
		return nil
	}
	if h.State == Detached && device.Name != h.Was {
		h.State = Gone // and its number is another device's now
		return nil
	}
	h.Device = device
	return nil
}

// indexNow is the number of the hook's device: another one than it had, if that
// has moved to another namespace and back.
func (h *Hook) indexNow() (int, error) {
	infos, err := h.attached.on()
	if err != nil {
		return 0, err
	}
	for _, info := range infos {
		on := info.TCX()
		if on == nil || int(on.Ifindex) == h.index {
			continue
		}
		// The number may be of a device elsewhere, and one of ours have it by chance.
		attached, err := netinfo.TCXPrograms(int(on.Ifindex), h.Direction)
		if err == nil && slices.Contains(attached, info.Program) {
			return int(on.Ifindex), nil
		}
	}
	return h.index, nil
}

// state is that of the program on a device, if that is here.
func (a *attachment) state(index int, here bool) (State, error) {
	l := a.links[linkPin]
	switch {
	case l == nil && !here:
		return Gone, nil
	case l == nil && len(a.filters) == 0:
		return Detached, nil
	case l == nil:
		return Attached, nil
	}
	info, err := l.Info()
	if err != nil {
		return "", fmt.Errorf("ask for the link of device %d %s: %w", a.index, a.direction, err)
	}
	var attached []ebpf.ProgramID
	if here {
		if attached, err = netinfo.TCXPrograms(index, a.direction); err != nil {
			return "", err
		}
	}
	switch on := info.TCX(); {
	case here && slices.Contains(attached, info.Program):
		return Attached, nil
	case on != nil && on.Ifindex != 0:
		return Moved, nil
	case here:
		return Detached, nil
	}
	return Gone, nil
}

// Programs are those that enforce the rules of a direction of a device; none where there are no rules.
func (n *Namespace) Programs(index int, d policy.Direction) ([]ebpf.ProgramID, error) {
	set := n.setOf(index, d)
	if set == nil {
		return nil, nil
	}
	id, err := pinnedProgram(filepath.Join(n.hookPath(index, d), programPin))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the program of device %d %s: %w", index, d, err)
	}
	return []ebpf.ProgramID{id}, nil
}
