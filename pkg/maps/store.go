// Package maps is typed access to the maps of a network namespace: the rules of
// its hooks (a device and a direction), buckets and counters. It knows what each
// field means to the data path, so that what it writes takes effect whole and
// buckets keep their room. It loads no program and touches no device.
package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/labels"
	"github.com/shapectl/shapectl/internal/listener"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/internal/step"
)

// ErrOtherLayout means that pinned maps were made by a build that lays them out differently.
var ErrOtherLayout = errors.New("made by another version of shapectl")

// A PinError is the path of a pin that something deleted. It is an ErrOtherLayout: without the pin, rules cannot be read either.
type PinError string

func (e PinError) Error() string { return "something deleted the pin " + string(e) }

// Is reports whether an error is of that type, or ErrOtherLayout.
func (PinError) Is(err error) bool {
	_, same := err.(PinError)
	return same || err == ErrOtherLayout
}

const lineSlots = uint32(bpf.AbiLayoutLINE_SLOTS)

// A Store is the maps of a network namespace.
type Store struct {
	index
	Names    map[int]string // of devices by index, for Used.Of; others have the name with which their sets were made
	maps     map[string]*ebpf.Map
	mapped   [][]byte // memory
	readOnly bool
	holders  int
}

// New makes an empty store.
func New(size Size, hook bpf.AbiHook) (*Store, error) { return build(size, hook, nil) }

// Derive makes a store with other settings and more room, which shares all else with s:
// rules are in force in both, with the same buckets. The number of buckets must stay the
// same once keys have slots. The error wraps ErrFull where the rules cannot grow once more.
func (s *Store) Derive(size Size, hook bpf.AbiHook) (*Store, error) {
	have := s.Size()
	hook.RuleMaps, hook.FirstId = s.hook.RuleMaps, s.hook.FirstId
	if size.Rules > have.Rules {
		if int(hook.RuleMaps) == len(ruleMaps) {
			return nil, fmt.Errorf("%w: it holds %d, and has grown %d times", ErrFull, have.Rules, len(ruleMaps)-1)
		}
		hook.FirstId[hook.RuleMaps] = have.Rules
		hook.RuleMaps++
	}
	size.Rules = max(size.Rules, have.Rules)
	derived, err := build(size, hook, s.maps)
	if err != nil {
		return nil, err
	}
	copy(derived.prefixes.Views, s.prefixes.Views)
	if size.Shares > have.Shares {
		for i := range s.shares {
			derived.shares[i] = renewed(&s.shares[i])
		}
	}
	if size.Leases > have.Leases {
		copy(derived.leases, s.leases)
	}
	if size.Labels > have.Labels {
		if err := s.labels.CopyTo(derived.maps[bpf.ShapectlMapLabels]); err != nil {
			derived.Close()
			return nil, err
		}
	}
	if !s.prefixes.CopyTo(&derived.prefixes) {
		derived.Close()
		return nil, fmt.Errorf("copy the prefixes: %w", ErrFull)
	}
	return derived, nil
}

// build makes the maps of a store. It shares maps of another store that have the same size.
func build(size Size, hook bpf.AbiHook, other map[string]*ebpf.Map) (_ *Store, err error) {
	spec, err := bpf.Spec()
	if err != nil {
		return nil, err
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return nil, fmt.Errorf("count the CPUs: %w", err)
	}
	lines := prefixes.PowerOfTwo((size.Buckets + lineSlots - 1) / lineSlots)
	prefixes.Configure(&hook, size.Rules)
	hook.LineMask, hook.SlotMask = lines-1, lines*lineSlots-1
	hook.CpuMask = prefixes.PowerOfTwo(uint32(cpus)) - 1
	hook.ViewMask = prefixes.PowerOfTwo(max(size.Views, 2)) - 1
	hook.Layout = Layout()
	hook.RuleMaps = max(hook.RuleMaps, 1)
	hook.Shadows, hook.Pools, hook.Colours, hook.Nat, hook.Also = size.Affected, 0, 0, 0, 0
	if size.Pools {
		hook.Pools = 1
	}
	if size.Colours {
		hook.Colours = 1
	}
	if size.Also {
		hook.Also = 1
	}
	if size.NAT {
		hook.Nat = 1
	}
	if size.Marks {
		hook.Scan = uint32(bpf.AbiScanSCAN_MARKS)
	}
	elements := map[string]uint32{
		bpf.ShapectlMapKeys: lines * lineSlots, bpf.ShapectlMapAffected: size.Affected, bpf.ShapectlMapLabels: size.Labels,
		bpf.ShapectlMapShares: size.Shares, bpf.ShapectlMapLeases: size.Leases,
	}
	end := size.Rules
	for i, name := range slices.Backward(ruleMaps[:hook.RuleMaps]) {
		elements[name], end = end-hook.FirstId[i], hook.FirstId[i]
	}
	for name, count := range elements {
		spec.Maps[name].MaxEntries = max(count, 1) // a map has room for one at least
	}
	for _, name := range ruleMaps {
		spec.Maps[name].ValueSize, spec.Maps[name].Value = ruleSize(&hook), nil // a type of another size
	}
	for name, count := range map[string]uint32{
		hookMap: 1, changeMap: 1, calendarsMap: uint32(bpf.AbiLayoutCALENDARS), viewsMap: hook.ViewMask + 1, prefixes4Map: hook.Prefixes4Mask + 1,
		prefixes6Map: hook.Prefixes6Mask + 1, filterMap: hook.FilterMask + 1, tableMap: lines, worksMap: hook.CpuMask + 1, cgroupWorks: hook.CpuMask + 1,
	} {
		m := spec.Maps[name]
		m.Flags |= unix.BPF_F_MMAPABLE // as they are when a collection makes them
		if name != hookMap && name != changeMap {
			m.Value, m.Contents = nil, nil
			m.ValueSize *= count // the object has room for one
		}
	}
	spec.Maps[hookMap].Contents = []ebpf.MapKV{{Key: uint32(0), Value: hook}}
	s := &Store{maps: map[string]*ebpf.Map{}}
	for name := range pinned {
		m, want := other[name], spec.Maps[name]
		if m != nil && name != hookMap && !holdsPrograms(name) && m.MaxEntries() == want.MaxEntries && m.ValueSize() == want.ValueSize {
			m, err = m.Clone()
		} else if err = step.Try("make a map"); err == nil {
			m, err = ebpf.NewMap(want)
		}
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("make map %s: %w", name, err)
		}
		s.maps[name] = m
	}
	if err := s.attach(); err != nil {
		return nil, err
	}
	if other == nil {
		s.change.Epoch, s.change.From = 1, Never
	}
	s.prefixes.Init()
	return s, nil
}

// Open opens the maps pinned in a directory, for reading only or also for writing. To change
// a store that was opened for reading only ends the process. The error wraps ErrOtherLayout where
// another version of shapectl pinned them. A store without its programs is opened: to derive another one makes them anew.
func Open(dir string, writing bool) (*Store, error) {
	// First, as nothing else of another layout can be read.
	if err := checkLayout(dir); err != nil {
		return nil, err
	}
	s := &Store{maps: map[string]*ebpf.Map{}, readOnly: !writing}
	for name, pin := range pinned {
		path := filepath.Join(dir, pin)
		switch m, err := ebpf.LoadPinnedMap(path, nil); {
		case err == nil:
			s.maps[name] = m
		case !errors.Is(err, fs.ErrNotExist):
			s.Close()
			return nil, fmt.Errorf("open %s: %w", path, err)
		case !holdsPrograms(name):
			s.Close()
			return nil, PinError(path)
		}
	}
	return s, s.attach()
}

// holdsPrograms reports whether a map has the programs of a generation.
func holdsPrograms(name string) bool {
	return name == bpf.ShapectlMapPrograms || name == bpf.ShapectlMapCgroupPrograms
}

// attach reads the settings and maps the arrays; on failure the store is closed.
func (s *Store) attach() (err error) {
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	hook, change := &bpf.AbiHook{}, []bpf.AbiChange{}
	if err := s.maps[hookMap].Lookup(uint32(0), hook); err != nil {
		return fmt.Errorf("read the hook's settings: %w", err)
	}
	s.now, s.hook = Now, hook
	for _, name := range ruleMaps[:hook.RuleMaps] {
		array, err := s.mapMemory(name)
		if err == nil && s.maps[name].ValueSize() != ruleSize(hook) {
			err = fmt.Errorf("map %s: %w", name, ErrOtherLayout)
		}
		if err != nil {
			return err
		}
		s.arrays = append(s.arrays, array)
	}
	if err := errors.Join(mapArray(s, changeMap, 1, &change), mapArray(s, calendarsMap, uint32(bpf.AbiLayoutCALENDARS), &s.calendars)); err != nil {
		return err
	}
	s.change, s.pinned = &change[0], s.maps[changeMap]
	rules := &s.rules
	s.prefixes.Hook, s.prefixes.Change, s.prefixes.ViewOf = hook, s.change, func(id uint32) uint32 { return rules.rule(id).View }
	s.labels = labels.Labels{Map: s.maps[bpf.ShapectlMapLabels], Parts: &s.change.Labels}
	lines := hook.LineMask + 1
	if s.maps[tableMap].ValueSize() != lines*uint32(unsafe.Sizeof(bpf.AbiLine{})) || s.maps[bpf.ShapectlMapKeys].MaxEntries() != lines*lineSlots {
		return fmt.Errorf("map %s: %w", tableMap, ErrOtherLayout)
	}
	s.table = sync.OnceValue(func() *table {
		t := &table{}
		if err := errors.Join(mapArray(s, tableMap, lines, &t.lines), mapArray(s, bpf.ShapectlMapKeys, lines*lineSlots, &t.keys)); err != nil {
			panic(err) // there is no address space, or no memory for page tables
		}
		return t
	})
	return errors.Join(
		mapArray(s, bpf.ShapectlMapShares, s.maps[bpf.ShapectlMapShares].MaxEntries(), &s.shares),
		mapArray(s, bpf.ShapectlMapLeases, s.maps[bpf.ShapectlMapLeases].MaxEntries(), &s.leases),
		mapArray(s, viewsMap, hook.ViewMask+1, &s.prefixes.Views),
		mapArray(s, prefixes4Map, hook.Prefixes4Mask+1, &s.prefixes.Lines4),
		mapArray(s, prefixes6Map, hook.Prefixes6Mask+1, &s.prefixes.Lines6),
		mapArray(s, filterMap, hook.FilterMask+1, &s.prefixes.Filter),
	)
}

// Hook is the settings of the store.
func (s *Store) Hook() bpf.AbiHook { return *s.hook }

// Size is the room of the store.
func (s *Store) Size() Size {
	return Size{
		Views: uint32(len(s.prefixes.Views)), Rules: s.room(), Buckets: (s.hook.LineMask + 1) * lineSlots, Affected: s.hook.Shadows,
		Labels: s.labels.Map.MaxEntries(), Shares: uint32(len(s.shares)), Leases: uint32(len(s.leases)), Pools: s.hook.Pools != 0,
		Colours: s.hook.Colours != 0, NAT: s.hook.Nat != 0, Also: s.hook.Also != 0, Marks: s.hook.Scan == uint32(bpf.AbiScanSCAN_MARKS),
	}
}

// Reverted is the store as it will be once the last change has reverted, only to read it.
func (s *Store) Reverted() *Store {
	reverted := *s
	reverted.after = true
	return &reverted
}

// Listeners are the slots of processes that listen to events.
func (s *Store) Listeners() listener.Slots {
	return listener.Slots{
		Change: s.change, Rings: s.maps[bpf.ShapectlMapRings], Listeners: s.maps[bpf.ShapectlMapListeners], Secret: s.hook.Secret,
		Now: func() uint64 { return s.now() },
	}
}

// Hold keeps the maps open until Close is called one more time.
func (s *Store) Hold() *Store {
	s.holders++
	return s
}

// Close closes the maps; pins and programs keep them.
func (s *Store) Close() error {
	if s.holders--; s.holders >= 0 {
		return nil
	}
	var errs []error
	for _, memory := range s.mapped {
		errs = append(errs, unix.Munmap(memory))
	}
	for _, m := range s.maps {
		errs = append(errs, m.Close())
	}
	*s = Store{}
	return errors.Join(errs...)
}
