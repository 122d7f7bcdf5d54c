package loader

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// State says whether a hook's rules are in force.
type State string

const (
	Attached State = "attached"
	// Gone: the device was deleted since, and its rules limit nothing. Those of a cgroup that was made again still limit old sockets.
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
	Unpinned  bool      // it is attached, and something deleted the pin of its program
	Set       *maps.Set // nil for a hook of another layout, or that is yet to be made

	at    hookDir
	state *bpfState // that it was found in
}

// Rules are those in force of a hook of Namespace.Hooks or Pools, sorted. All are read once while nothing changes, and must not be
// changed.
func (h *Hook) Rules() []policy.Rule { return h.state.policies()[h.Set.Number()] }

// Name is the device's name now, or when the hook was made.
func (h *Hook) Name() string { return cmp.Or(h.Device.Name, h.Was) }

// InForce reports whether the rules of a hook limit anything.
func (s State) InForce() bool { return s == Attached || s == Moved }

// Status is the state, with the name that the device had before it was renamed.
func (h *Hook) Status() string {
	if h.State == Attached && h.Was != h.Name() {
		return string(h.State) + ", was " + h.Was
	}
	return string(h.State)
}

// Match is the address of packets that prefixes are compared with.
func (h *Hook) Match() policy.Match { return h.Set.Side() }

// OtherBuild reports whether another build of shapectl made the program that is attached.
func (h *Hook) OtherBuild() (bool, error) {
	this, err := program.Build()
	return h.Set.Store.Hook().Build != this, err
}

// Close releases the hook, whose rules stay in force.
func (h *Hook) Close() {
	if h.Set != nil {
		h.Set.Store.Close()
	}
}

// CloseHooks closes them all.
func CloseHooks(hooks []*Hook) {
	for _, h := range hooks {
		h.Close()
	}
}

// An OtherLayoutError is about rules that this build can neither read nor change, because a
// build with another layout made them. It wraps maps.ErrOtherLayout.
type OtherLayoutError struct {
	Hooks []*Hook // only to be flushed
	err   error
}

func (e *OtherLayoutError) Error() string {
	var names []string
	for _, o := range e.Hooks {
		names = append(names, o.Name()+" "+o.Direction.String())
	}
	if names == nil {
		names = []string{"this network namespace"}
	}
	return fmt.Sprintf("rules of %s: %v", plain.List(names), e.err)
}

func (e *OtherLayoutError) Unwrap() error { return e.err }

// OtherLayout reports whether an error is that a direction of a device has rules of another layout.
func OtherLayout(err error, index int, d policy.Direction) bool {
	e, ok := errors.AsType[*OtherLayoutError](err)
	return ok && slices.ContainsFunc(e.Hooks, func(h *Hook) bool { return h.Device.Index == index && h.Direction == d })
}

// A hookDir is where the pins of a hook are: it has the direction and the number of the view, such as egress-3.
type hookDir struct {
	dir       string
	direction policy.Direction
	index     int // of the device; 0 if it is not known, as maps of another layout have it
}

// hookDirOf is that of a set.
func (dir home) hookDirOf(set *maps.Set) hookDir {
	return hookDir{dir.pin(fmt.Sprintf("%s-%d", set.Direction(), set.Number())), set.Direction(), set.Ifindex()}
}

// hookDirs are the directories of all hooks, and whether another layout named them.
func (dir home) hookDirs() (dirs []hookDir, other bool, err error) {
	entries, err := bpffs.List(string(dir))
	for _, e := range entries {
		direction, number, _ := strings.Cut(e.Name(), "-")
		_, reversed := strconv.Atoi(direction)
		if reversed == nil { // 7-egress: of the device with that index
			direction, number = number, direction
		}
		var d policy.Direction
		if _, err := strconv.Atoi(number); err == nil && d.Set(direction) == nil {
			dirs, other = append(dirs, hookDir{dir: dir.pin(e.Name()), direction: d}), other || reversed == nil
		}
	}
	return dirs, other, err
}

// Hooks are the hooks that have rules, by device name, egress before ingress: those of some devices, or of devices that had their
// names or indexes; all for none. With an error they are those that could be read.
func (n *Namespace) Hooks(of ...netinfo.Device) (hooks []*Hook, err error) {
	if n.pins.store == nil {
		return nil, n.pins.readable()
	}
	exists := func(set *maps.Set) bool { return set.Any(maps.Exists) }
	if of == nil {
		have := n.pins.store.Have(maps.Exists)
		exists = func(set *maps.Set) bool { return have[set.Number()] }
	}
	named, indexed := map[string]bool{}, map[int]bool{}
	for _, dev := range of {
		named[dev.Name], indexed[dev.Index] = true, true
	}
	hooks, superseded, err := n.pins.hooksOf(func(set *maps.Set) bool { // to judge a hook takes system calls
		return (of == nil || named[set.Device()] || indexed[set.Ifindex()]) && exists(set)
	})
	CloseHooks(superseded)
	slices.SortFunc(hooks, func(a, b *Hook) int {
		return cmp.Or(strings.Compare(a.Name(), b.Name()), strings.Compare(a.Direction.String(), b.Direction.String()))
	})
	return hooks, err
}

// hooksOf are hooks of attached sets, judged, but for those that are superseded: gone, and with the name of another hook. With an
// error they are those that could be read.
func (s *bpfState) hooksOf(which func(*maps.Set) bool) (hooks, superseded []*Hook, err error) {
	cgroups := map[string]int{} // the newest, by name
	for _, set := range s.sets() {
		if !set.Attached() || !which(set) { // not attached: a command was killed before that
			continue
		}
		h := s.hookOf(set)
		if failed := s.kept.judge(h); failed != nil {
			h.Close()
			err = errors.Join(err, failed)
			continue
		}
		if hooks = append(hooks, h); h.Device.IsCgroup() {
			cgroups[h.Was] = max(cgroups[h.Was], h.Device.Index)
		}
	}
	netinfo.RenewCgroups(cgroups)
	here := map[Side]bool{}
	for _, h := range hooks {
		if index := cgroups[h.Was]; index != 0 && index != h.Device.Index { // its link lives as long as its sockets
			h.State, h.Device = Gone, netinfo.Device{}
		}
		if h.State != Gone {
			here[Side{h.Name(), h.Direction}] = true
		}
	}
	hooks = slices.DeleteFunc(hooks, func(h *Hook) bool {
		old := h.State == Gone && here[Side{h.Was, h.Direction}]
		if old {
			superseded = append(superseded, h)
		}
		return old
	})
	return hooks, superseded, err
}

// Readable is an OtherLayoutError if this build cannot read the rules, else nil. Then only Flush changes anything.
func (n *Namespace) Readable() error { return n.pins.readable() }

// Find is the hook of a device by its name or an alternative one; nil if it has none. A
// device that is no longer here is found by the name that it had. In a Namespace for changes,
// a device that was deleted is not found.
func (n *Namespace) Find(name string, d policy.Direction) (found *Hook, err error) {
	dev, err := netinfo.DeviceByName(name)
	if errors.Is(err, netinfo.ErrNoDevice) {
		dev, err = netinfo.Device{Name: name}, nil
	}
	if err != nil {
		return nil, err
	}
	hooks, err := n.Hooks(dev)
	at := slices.IndexFunc(hooks, func(h *Hook) bool {
		return h.Direction == d && h.Device.Name == dev.Name && (dev.Index == 0 || h.Device.Index == dev.Index)
	})
	if at < 0 { // moved away, or gone and only to be read
		at = slices.IndexFunc(hooks, func(h *Hook) bool {
			return h.Direction == d && h.Was == dev.Name && h.Device.Name == "" && (h.State == Moved || !n.pins.writing)
		})
	}
	for i, h := range hooks {
		if i == at && err == nil {
			found = h
		} else {
			h.Close()
		}
	}
	return found, err
}

// hookOf is the hook of a set, before judge finds its State.
func (s *bpfState) hookOf(set *maps.Set) *Hook {
	set.Store.Hold()
	return &Hook{Direction: set.Direction(), Was: set.Device(), Set: set, at: s.dir.hookDirOf(set), state: s}
}

// judge finds the state of the hook, and its device. It leaves no file open, because there
// may be more hooks than files that a process may open.
func (h *Hook) judge() error {
	attached, err := openAttachment(h.at)
	if err != nil {
		return err
	}
	defer attached.close()
	h.Mode, h.Unpinned = attached.mode(), attached.unpinned
	device, anywhere, err := attached.on(h.Was)
	if err != nil {
		return err
	}
	here := device.Index != 0
	if !here {
		if device, here, err = netinfo.DeviceAt(h.Was, h.Set.Ifindex()); err != nil {
			return err
		}
		here = here && len(attached.filters) > 0
	}
	switch {
	case here && h.state.lost != "":
		h.State, h.Device = Detached, device
	case here:
		h.State, h.Device = Attached, device
	case anywhere:
		h.State = Moved
	case device.Index != 0 && device.Name == h.Was:
		h.State, h.Device = Detached, device
	default:
		h.State = Gone // also if another device has its index now
	}
	return nil
}

// Programs are those that enforce the rules of a direction of a device, of any layout; none if there are no rules.
func (n *Namespace) Programs(index int, d policy.Direction) (programs []ebpf.ProgramID, err error) {
	var all []hookDir
	if n.pins.foreign != nil {
		all, _, err = n.pins.dir.hookDirs()
	}
	for _, set := range n.pins.sets() {
		if set.Ifindex() == index {
			all = append(all, n.pins.dir.hookDirOf(set))
		}
	}
	for _, at := range all {
		if at.direction != d {
			continue
		}
		a, failed := openAttachment(at)
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		if a.close(); a.program != 0 && a.index == index {
			programs = append(programs, a.program)
		}
	}
	return programs, err
}
