// Package maps is typed access to the maps of a network namespace: the rules of
// its hooks (a device and a direction), buckets and counters. It knows what each
// field means to the data path, so that what it writes takes effect whole and
// buckets keep their room. It loads no program and touches no device.
package maps

import (
	"errors"
	"fmt"
	"io/fs"
	"math/bits"
	"path/filepath"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
)

// ErrOtherLayout means that pinned maps were made by a build that lays them out differently.
var ErrOtherLayout = errors.New("made by another version of shapectl")

const (
	hookMap      = ".rodata"
	changeMap    = ".data.change"
	viewsMap     = ".data.views"
	prefixes4Map = ".data.prefixes4"
	prefixes6Map = ".data.prefixes6"
	filterMap    = ".data.filter"
	tableMap     = ".data.table"
	secondsMap   = ".data.seconds"
	worksMap     = ".data.works"
	lineSlots    = uint32(bpf.AbiLayoutLINE_SLOTS)
)

// ruleMaps hold the rules, each a range of ids.
var ruleMaps = [bpf.AbiLayoutRULE_MAPS]string{
	bpf.ShapectlMapRules, bpf.ShapectlMapRules1, bpf.ShapectlMapRules2, bpf.ShapectlMapRules3,
	bpf.ShapectlMapRules4, bpf.ShapectlMapRules5, bpf.ShapectlMapRules6, bpf.ShapectlMapRules7,
}

// pinned are all maps of a store, each with the name of its pin: bpffs keeps names with a dot for itself.
var pinned = map[string]string{
	filterMap: "filter", prefixes4Map: "prefixes4", prefixes6Map: "prefixes6", viewsMap: "views",
	bpf.ShapectlMapRules: "rules", bpf.ShapectlMapRules1: "rules1", bpf.ShapectlMapRules2: "rules2", bpf.ShapectlMapRules3: "rules3",
	bpf.ShapectlMapRules4: "rules4", bpf.ShapectlMapRules5: "rules5", bpf.ShapectlMapRules6: "rules6", bpf.ShapectlMapRules7: "rules7",
	bpf.ShapectlMapShares: "shares", bpf.ShapectlMapLeases: "leases", tableMap: "table", secondsMap: "seconds", worksMap: "works", bpf.ShapectlMapPrograms: "programs", bpf.ShapectlMapKeys: "keys", bpf.ShapectlMapAffected: "affected", bpf.ShapectlMapLabels: "labels",
	hookMap: "hook", changeMap: "change", bpf.ShapectlMapListeners: "listeners", bpf.ShapectlMapRings: "rings",
}

// A Store is the maps of a network namespace.
type Store struct {
	memory
	buckets
	prefixes prefixTables
	views    []bpf.AbiView
	known    *known
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
	copy(derived.views, s.views)
	if size.Shares > have.Shares {
		for i := range s.shares {
			derived.shares[i] = renewed(&s.shares[i])
		}
	}
	if size.Leases > have.Leases {
		copy(derived.leases, s.leases)
	}
	if size.Labels > have.Labels {
		if err := s.labels.copyTo(derived.maps[bpf.ShapectlMapLabels]); err != nil {
			derived.Close()
			return nil, err
		}
	}
	if len(derived.prefixes.lines6) == len(s.prefixes.lines6) {
		return derived, nil // the tables of prefixes are shared
	}
	for f := range s.everyPrefix(nil) {
		set := derived.View(f.view)
		if derived.prefixes.find(f.key) != nil {
			continue // with few rules, only the other family's table may have grown
		}
		if err := set.placePrefix(set.prefix(f.key), f.id); err != nil {
			derived.Close()
			return nil, err
		}
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
	lines := powerOfTwo((size.Buckets + lineSlots - 1) / lineSlots)
	lines4, lines6, words := tableSizes(size.Rules)
	hook.LineMask, hook.SlotMask = lines-1, lines*lineSlots-1
	hook.Prefixes4Mask, hook.Prefixes6Mask, hook.FilterMask = lines4-1, lines6-1, words-1
	hook.CpuMask = powerOfTwo(uint32(cpus)) - 1
	hook.Multiplier = multiplier(hook)
	hook.ViewMask = powerOfTwo(max(size.Views, 2)) - 1
	for length := range 129 {
		hook.Masks[length] = pairs(mask(length))
	}
	if hook.Layout, err = Layout(); err != nil {
		return nil, err
	}
	hook.RuleMaps = max(hook.RuleMaps, 1)
	hook.Shadows, hook.Pools = size.Affected, 0
	if size.Pools {
		hook.Pools = 1
	}
	hook.Colours, hook.SecondsMask = 0, 0
	if size.Colours {
		hook.Colours, hook.SecondsMask = 1, lines-1
	}
	spec.Maps[bpf.ShapectlMapKeys].MaxEntries = lines * lineSlots
	spec.Maps[bpf.ShapectlMapAffected].MaxEntries = max(size.Affected, 1) // a map has room for one at least
	spec.Maps[bpf.ShapectlMapLabels].MaxEntries = max(size.Labels, 1)
	spec.Maps[bpf.ShapectlMapShares].MaxEntries = max(size.Shares, 1)
	spec.Maps[bpf.ShapectlMapLeases].MaxEntries = max(size.Leases, 1)
	end := size.Rules
	for i, name := range slices.Backward(ruleMaps[:hook.RuleMaps]) {
		spec.Maps[name].MaxEntries, end = end-hook.FirstId[i], hook.FirstId[i]
	}
	for _, name := range ruleMaps {
		spec.Maps[name].ValueSize = ruleSize(&hook)
		spec.Maps[name].Value = nil // a type of another size
	}
	for name, count := range map[string]uint32{
		viewsMap: hook.ViewMask + 1, prefixes4Map: lines4, prefixes6Map: lines6, filterMap: words, tableMap: lines, secondsMap: hook.SecondsMask + 1,
		worksMap: hook.CpuMask + 1,
	} {
		m := spec.Maps[name]
		m.Value, m.Contents = nil, nil
		m.ValueSize *= count // the object has room for one
	}
	spec.Maps[hookMap].Contents = []ebpf.MapKV{{Key: uint32(0), Value: hook}}
	for _, name := range []string{hookMap, changeMap, viewsMap, prefixes4Map, prefixes6Map, filterMap, tableMap, secondsMap, worksMap} {
		spec.Maps[name].Flags |= unix.BPF_F_MMAPABLE // as they are when a collection makes them
	}
	s := &Store{memory: memory{maps: map[string]*ebpf.Map{}}}
	for name := range pinned {
		m, want := other[name], spec.Maps[name]
		if m != nil && name != hookMap && name != bpf.ShapectlMapPrograms && m.MaxEntries() == want.MaxEntries && m.ValueSize() == want.ValueSize {
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
	for number := range s.views {
		if v := s.View(uint32(number)); v.data.Mix6 == [2]uint64{} {
			v.prepare()
		}
	}
	return s, nil
}

// multiplier is for hashes of prefixes. It is odd, so that no two keys become one.
func multiplier(hook bpf.AbiHook) uint64 {
	last := len(hook.Secret) - 1
	return uint64(hook.Secret[last-1])<<32 | uint64(hook.Secret[last]) | 1
}

// tableSizes are the lines of the prefix tables, and the words of the filter, for so many rules.
func tableSizes(rules uint32) (lines4, lines6, words uint32) {
	// So half of the places are free in each table, and the filter has 16 bits for each prefix.
	return powerOfTwo((rules + 1) / 2), powerOfTwo(rules), powerOfTwo((rules + 3) / 4)
}

// powerOfTwo is the least power of two that is not below n.
func powerOfTwo(n uint32) uint32 { return 1 << bits.Len32(max(n, 1)-1) }

// Open opens the maps pinned in a directory, for reading only or also for writing. To change
// a store that was opened for reading only ends the process. The error wraps ErrOtherLayout where
// another version of shapectl pinned them.
func Open(dir string, writing bool) (*Store, error) {
	// First, as nothing else of another layout can be read.
	if err := checkLayout(dir); err != nil {
		return nil, err
	}
	s := &Store{memory: memory{maps: map[string]*ebpf.Map{}, readOnly: !writing}}
	for name, pin := range pinned {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pin), nil)
		if err != nil {
			s.Close()
			if errors.Is(err, fs.ErrNotExist) {
				err = ErrOtherLayout
			}
			return nil, fmt.Errorf("open %s: %w", filepath.Join(dir, pin), err)
		}
		s.maps[name] = m
	}
	return s, s.attach()
}

// attach reads the settings and maps the arrays; on failure the store is closed.
func (s *Store) attach() (err error) {
	s.now = Now
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	hook := &bpf.AbiHook{}
	s.hook, s.prefixes.hook = hook, hook
	if err := s.maps[hookMap].Lookup(uint32(0), hook); err != nil {
		return fmt.Errorf("read the hook's settings: %w", err)
	}
	for _, name := range ruleMaps[:hook.RuleMaps] {
		array, err := s.mapMemory(name, ruleSize(hook))
		if err != nil {
			return err
		}
		s.arrays = append(s.arrays, array)
	}
	var change []bpf.AbiChange
	if err := mapArray(&s.memory, changeMap, 1, &change); err != nil {
		return err
	}
	s.change, s.pinned = &change[0], s.maps[changeMap]
	s.labels = labels{s.maps[bpf.ShapectlMapLabels], &s.change.Labels}
	return errors.Join(
		mapArray(&s.memory, bpf.ShapectlMapShares, s.maps[bpf.ShapectlMapShares].MaxEntries(), &s.shares),
		mapArray(&s.memory, bpf.ShapectlMapLeases, s.maps[bpf.ShapectlMapLeases].MaxEntries(), &s.leases),
		mapArray(&s.memory, viewsMap, hook.ViewMask+1, &s.views),
		mapArray(&s.memory, prefixes4Map, hook.Prefixes4Mask+1, &s.prefixes.lines4),
		mapArray(&s.memory, prefixes6Map, hook.Prefixes6Mask+1, &s.prefixes.lines6),
		mapArray(&s.memory, filterMap, hook.FilterMask+1, &s.prefixes.filter),
		mapArray(&s.memory, tableMap, hook.LineMask+1, &s.lines),
		mapArray(&s.memory, secondsMap, hook.SecondsMask+1, &s.seconds),
		mapArray(&s.memory, bpf.ShapectlMapKeys, (s.hook.LineMask+1)*lineSlots, &s.keys),
	)
}

// memory is the maps, and their mappings.
type memory struct {
	maps     map[string]*ebpf.Map
	mapped   [][]byte
	readOnly bool
}

// mapArray maps so many elements into memory, shared with the programs.
func mapArray[T any](from *memory, name string, count uint32, array *[]T) error {
	memory, err := from.mapMemory(name, uint32(unsafe.Sizeof((*array)[0])))
	if err != nil {
		return err
	}
	*array = unsafe.Slice((*T)(unsafe.Pointer(&memory[0])), count)
	if len(memory) != int(count)*int(unsafe.Sizeof((*array)[0])) {
		return fmt.Errorf("map %s: %w", name, ErrOtherLayout)
	}
	return nil
}

// mapMemory maps a map into memory. Its values, or the elements of its one value, have that size.
func (all *memory) mapMemory(name string, size uint32) ([]byte, error) {
	m := all.maps[name]
	if m.ValueSize()%size != 0 {
		return nil, fmt.Errorf("map %s: %w", name, ErrOtherLayout)
	}
	access := unix.PROT_READ | unix.PROT_WRITE
	if all.readOnly {
		access = unix.PROT_READ
	}
	memory, err := unix.Mmap(m.FD(), 0, int(m.ValueSize())*int(m.MaxEntries()), access, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", name, err)
	}
	all.mapped = append(all.mapped, memory)
	return memory, nil
}

// Pin pins all maps in a directory of a bpffs.
func (all *memory) Pin(dir string) error {
	for name, pin := range pinned {
		if err := step.Try("pin a map"); err != nil {
			return err
		}
		// A clone, as a map object remembers one pin, and a set may have several.
		m, err := all.maps[name].Clone()
		if err == nil {
			err = m.Pin(filepath.Join(dir, pin))
			m.Close()
		}
		if err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	return nil
}

// Replacements are the maps by name, for loading a program.
func (all *memory) Replacements() map[string]*ebpf.Map { return all.maps }

// close closes the maps.
func (all *memory) close() error {
	var errs []error
	for _, memory := range all.mapped {
		errs = append(errs, unix.Munmap(memory))
	}
	for _, m := range all.maps {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Hook is the settings of the store.
func (s *Store) Hook() bpf.AbiHook { return *s.hook }

// Size is the room of the store.
func (s *Store) Size() Size {
	return Size{
		Views: uint32(len(s.views)), Rules: s.room(), Buckets: uint32(len(s.lines)) * lineSlots, Affected: s.hook.Shadows,
		Labels: s.labels.texts.MaxEntries(), Shares: uint32(len(s.shares)), Leases: uint32(len(s.leases)), Pools: s.hook.Pools != 0,
		Colours: s.hook.Colours != 0,
	}
}

// Reverted is the store as it will be once the pending change has reverted, only to read it.
func (s *Store) Reverted() *Store {
	reverted := *s
	reverted.after = true
	return &reverted
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
	err := s.close()
	*s = Store{}
	return err
}

// PutClimb puts the second program of a kind of hook in place.
func (s *Store) PutClimb(kind uint32, climb *ebpf.Program) error {
	if err := s.maps[bpf.ShapectlMapPrograms].Put(kind, climb); err != nil {
		return fmt.Errorf("put a program in place: %w", err)
	}
	return nil
}
