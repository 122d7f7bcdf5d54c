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
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/netinfo"
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
	// Detached: the device is there, but something else took the programs off it.
	Detached State = "detached"
)

// A Hook is the rules of one direction of one device.
type Hook struct {
	Direction policy.Direction
	Device    netinfo.Device // as it is now; the zero Device where it is not here
	Was       string         // its name when the hook was made
	Mode      Mode
	State     State
	Set       *maps.Set

	path       string
	index      int                  // of the device, when the hook was made
	generation string               // whose program is attached
	links      map[string]link.Link // by pin; a build of another layout may have made several
	filters    []filter
}

// Name is the device's name now, or when the hook was made.
func (h *Hook) Name() string {
	if h.Device.Name != "" {
		return h.Device.Name
	}
	return h.Was
}

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
func (h *Hook) Match() policy.Match {
	if h.Set.Hook().MatchSrc != 0 {
		return policy.MatchSrc
	}
	return policy.MatchDst
}

// An OtherLayoutError is about a hook that this build can neither read nor change,
// as one with another layout made it. It wraps maps.ErrOtherLayout.
type OtherLayoutError struct {
	Device    string // its name when the hook was made; "" where that can not be read either
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

// Close lets go of the hook; it stays in force.
func (h *Hook) Close() {
	if h.Set != nil {
		h.Set.Close()
	}
	h.closeLinks()
}

func (h *Hook) closeLinks() {
	for _, l := range h.links {
		l.Close()
	}
}

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

// The pins of a link and of a program. Those of earlier builds begin like this.
const (
	linkPin    = "link"
	programPin = "program"
)

// pinsLike are the names in a directory of pins that begin like that.
func pinsLike(dir, prefix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Hooks are the hooks that have rules, by device name, egress before ingress.
// Of two for one device of the same name, one is left over from a device that
// was made again, and is not listed. With the error come the hooks that could be read.
func (n *Namespace) Hooks() (hooks []*Hook, err error) {
	var unread []error
	err = n.openHooks(func(h *Hook, err error) error {
		if err != nil {
			unread = append(unread, err)
		} else {
			hooks = append(hooks, h)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(hooks, func(a, b *Hook) int {
		if c := strings.Compare(a.Name(), b.Name()); c != 0 {
			return c
		}
		return strings.Compare(a.Direction.String(), b.Direction.String())
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

// openHooks calls f for each hook that has rules, in no order, until f fails: with
// the hook, or with why it can not be read.
func (n *Namespace) openHooks(f func(h *Hook, err error) error) error {
	for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
		indices, err := n.indices(d)
		if err != nil {
			return err
		}
		for _, index := range indices {
			h, err := n.openHook(index, d)
			if h == nil && err == nil {
				continue
			}
			if err := f(h, err); err != nil {
				return err
			}
		}
	}
	return nil
}

// indices are the devices for which something is pinned.
func (n *Namespace) indices(d policy.Direction) (indices []int, err error) {
	if n.dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	for _, e := range entries {
		if index, of, ok := parseHookName(e.Name()); ok && of == d {
			indices = append(indices, index)
		}
	}
	return indices, nil
}

// Find is the hook of a device by its name; nil if it has none. A device that
// is no longer here is found by the name that it had; but no rules of a device
// that is gone are found for changes.
func (n *Namespace) Find(name string, d policy.Direction) (*Hook, error) {
	if dev, err := netinfo.DeviceByName(name); err == nil {
		h, err := n.openHook(dev.Index, d)
		if err != nil || h != nil && h.Device.Name != "" {
			return h, err
		}
		if h != nil {
			h.Close() // of a device that had the number before
		}
	} else if !errors.Is(err, netinfo.ErrNoDevice) {
		return nil, err
	}
	return n.findGone(name, d)
}

// findGone is the hook of a device that had that name and is no longer here.
func (n *Namespace) findGone(name string, d policy.Direction) (*Hook, error) {
	indices, err := n.indices(d)
	if err != nil {
		return nil, err
	}
	for _, index := range indices {
		if was, err := n.deviceWas(index, d); err == nil && was != name {
			continue
		}
		h, err := n.openHook(index, d)
		var other *OtherLayoutError
		if errors.As(err, &other) {
			// Where there is a device of the number, they are its rules, whatever its name is now.
			if _, here, err := netinfo.DeviceByIndex(index); other.Device != name || err == nil && here {
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		if h == nil {
			continue
		}
		if h.Device.Name == name || h.Was == name && h.Device.Name == "" && (h.State == Moved || !n.writing) {
			return h, nil // back with another number, moved away, or gone and for reading only
		}
		h.Close()
	}
	return nil, nil
}

// deviceWas is the name of a hook's device when its only generation was made, in
// any layout. It is cheaper to learn than all of the hook.
func (n *Namespace) deviceWas(index int, d policy.Direction) (string, error) {
	dir, err := n.onlyGeneration(index, d)
	if err != nil {
		return "", err
	}
	return maps.Device(dir)
}

// onlyGeneration is the directory of a hook's maps, if there is just one generation.
func (n *Namespace) onlyGeneration(index int, d policy.Direction) (dir string, err error) {
	h := &Hook{Direction: d, path: n.hookPath(index, d)}
	generations, err := h.generations()
	if err != nil {
		return "", err
	}
	if len(generations) != 1 {
		return "", errors.New("there is not just one generation")
	}
	return filepath.Join(h.path, generations[0]), nil
}

// deviceName is the name of the device that settings were made for.
func deviceName(s bpf.AbiHook) string {
	return string(s.Device[:max(0, slices.Index(s.Device[:], 0))])
}

// openHook opens what is pinned for a device by its index: nil if nothing is,
// or nothing but what an interrupted command left.
func (n *Namespace) openHook(index int, d policy.Direction) (*Hook, error) {
	if n.dir == "" {
		return nil, nil
	}
	h := &Hook{Direction: d, path: n.hookPath(index, d), index: index}
	generations, err := h.generations()
	if err != nil || len(generations) == 0 {
		return nil, err
	}
	if err := h.openLinks(); err != nil {
		h.Close()
		return nil, err
	}
	h.Mode = TCX
	if len(h.links) == 0 {
		h.Mode = Clsact
		if err := h.openFilters(generations); err != nil {
			h.Close()
			return nil, err
		}
	}
	if h.generation, err = h.attachedGeneration(generations); err != nil {
		h.Close()
		return nil, err
	}
	h.Set, err = maps.Open(filepath.Join(h.path, h.generation))
	if err != nil {
		h.Close()
		if errors.Is(err, maps.ErrOtherLayout) {
			was, _ := maps.Device(filepath.Join(h.path, h.generation))
			return nil, &OtherLayoutError{was, d, index, err}
		}
		return nil, fmt.Errorf("rules of device %d %s: %w", index, d, err)
	}
	if h.Set.Empty() {
		h.Close()
		return nil, nil
	}
	if state, from := h.Set.Change(); state == maps.Armed && n.writing {
		waitUntil(from) // whoever armed it was killed meanwhile
	}
	h.Was = deviceName(h.Set.Hook())
	if err := n.judge(h); err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// generations are those in the hook's directory, oldest first.
func (h *Hook) generations() ([]string, error) {
	entries, err := os.ReadDir(h.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	if err := trustDir(h.path); err != nil {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		if number, err := strconv.Atoi(strings.TrimPrefix(e.Name(), "g")); err == nil && e.IsDir() {
			numbers = append(numbers, number)
		}
	}
	slices.Sort(numbers)
	names := make([]string, len(numbers))
	for i, number := range numbers {
		names[i] = fmt.Sprintf("g%d", number)
		if err := trustDir(filepath.Join(h.path, names[i])); err != nil {
			return nil, err
		}
	}
	return names, nil
}

func (h *Hook) openLinks() error {
	h.links = map[string]link.Link{}
	pins, err := pinsLike(h.path, linkPin)
	if err != nil {
		return err
	}
	for _, pin := range pins {
		l, err := link.LoadPinnedLink(filepath.Join(h.path, pin), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open the %s of device %d %s: %w", pin, h.index, h.Direction, err)
		}
		h.links[pin] = l
	}
	return nil
}

// Programs are those that enforce the rules of a direction of a device; none where there are no rules.
func (n *Namespace) Programs(index int, d policy.Direction) ([]ebpf.ProgramID, error) {
	h, err := n.openHook(index, d)
	if h == nil || err != nil {
		return nil, err
	}
	defer h.Close()
	return h.programs(h.generation)
}

// programs are the ids of the programs that are pinned for a generation: one, or more by a build of another layout.
func (h *Hook) programs(generation string) (ids []ebpf.ProgramID, err error) {
	pins, err := pinsLike(filepath.Join(h.path, generation), programPin)
	if err != nil {
		return nil, err
	}
	for _, pin := range pins {
		p, err := ebpf.LoadPinnedProgram(filepath.Join(h.path, generation, pin), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("open the %s of device %d %s: %w", pin, h.index, h.Direction, err)
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			return nil, fmt.Errorf("ask for the %s of device %d %s: %w", pin, h.index, h.Direction, err)
		}
		id, _ := info.ID()
		ids = append(ids, id)
	}
	return ids, nil
}

// attachedGeneration is the newest whose program is attached; without any,
// the newest there is. There is more than one only where a command was killed.
func (h *Hook) attachedGeneration(generations []string) (string, error) {
	newest := generations[len(generations)-1]
	if len(generations) == 1 {
		return newest, nil
	}
	running := map[ebpf.ProgramID]bool{}
	for _, l := range h.links {
		info, err := l.Info()
		if err != nil {
			return "", fmt.Errorf("ask for the link of device %d %s: %w", h.index, h.Direction, err)
		}
		running[info.Program] = true
	}
	for _, f := range h.filters {
		running[ebpf.ProgramID(f.Id)] = true
	}
	for _, g := range slices.Backward(generations) {
		ids, err := h.programs(g)
		if err != nil {
			return "", err
		}
		for _, id := range ids {
			if running[id] {
				return g, nil
			}
		}
	}
	return newest, nil
}

// openFilters finds the filters on the device that run a program of any of the generations.
func (h *Hook) openFilters(generations []string) error {
	h.filters = nil
	if _, err := netlink.LinkByIndex(h.index); err != nil {
		return nil
	}
	filters, err := bpfFilters(h.index, h.Direction)
	if err != nil {
		return err
	}
	for _, g := range generations {
		ids, err := h.programs(g)
		if err != nil {
			return err
		}
		for _, f := range filters {
			if slices.Contains(ids, ebpf.ProgramID(f.Id)) {
				h.filters = append(h.filters, f)
			}
		}
	}
	return nil
}

// indexNow is the number of the hook's device: another one than it had, if that
// has moved to another namespace and back.
func (h *Hook) indexNow() (int, error) {
	for _, l := range h.links {
		info, err := l.Info()
		if err != nil {
			return 0, fmt.Errorf("ask for a link of device %d %s: %w", h.index, h.Direction, err)
		}
		on := info.TCX()
		if on == nil || on.Ifindex == 0 || int(on.Ifindex) == h.index {
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

// judge finds out what became of the device, and of what its rules need on it.
func (n *Namespace) judge(h *Hook) error {
	index, err := h.indexNow()
	if err != nil {
		return err
	}
	device, here, err := netinfo.DeviceByIndex(index)
	if err != nil {
		return err
	}
	var attached []ebpf.ProgramID
	if here && h.Mode == TCX {
		if attached, err = netinfo.TCXPrograms(index, h.Direction); err != nil {
			return err
		}
	}
	if h.State, err = h.state(here, attached); err != nil {
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

// state is that of the hook's program. attached are those on tcx, where the device is here.
func (h *Hook) state(here bool, attached []ebpf.ProgramID) (State, error) {
	if h.Mode == Clsact {
		switch {
		case !here:
			return Gone, nil
		case h.filters == nil:
			return Detached, nil
		}
		return Attached, nil
	}
	l := h.links[linkPin]
	if l == nil {
		return Detached, nil
	}
	info, err := l.Info()
	if err != nil {
		return "", fmt.Errorf("ask for the link of device %d %s: %w", h.index, h.Direction, err)
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
