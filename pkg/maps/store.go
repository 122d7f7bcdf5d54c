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

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
)

// ErrOtherLayout means that pinned maps were made by a build that lays them out differently.
var ErrOtherLayout = errors.New("made by another version of shapectl")

const lineSlots = uint32(bpf.AbiLayoutLINE_SLOTS)

// A Store is the maps of a network namespace.
type Store struct {
	memory
	index
	holders int
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
		if derived.prefixes.find(f.key) != nil {
			continue // with few rules, only the other family's table may have grown
		}
		v := derived.view(f.view)
		if err := derived.placePrefix(v, v.prefix(f.key), f.id); err != nil {
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
	for length := range hook.Masks {
		hook.Masks[length] = pairs(mask(length))
	}
	if hook.Layout, err = Layout(); err != nil {
		return nil, err
	}
	hook.RuleMaps = max(hook.RuleMaps, 1)
	hook.Shadows, hook.Pools, hook.Colours = size.Affected, 0, 0
	if size.Pools {
		hook.Pools = 1
	}
	if size.Colours {
		hook.Colours = 1
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
		hookMap: 1, changeMap: 1, viewsMap: hook.ViewMask + 1, prefixes4Map: lines4, prefixes6Map: lines6, filterMap: words, tableMap: lines,
		worksMap: hook.CpuMask + 1,
	} {
		m := spec.Maps[name]
		m.Flags |= unix.BPF_F_MMAPABLE // as they are when a collection makes them
		if name != hookMap && name != changeMap {
			m.Value, m.Contents = nil, nil
			m.ValueSize *= count // the object has room for one
		}
	}
	spec.Maps[hookMap].Contents = []ebpf.MapKV{{Key: uint32(0), Value: hook}}
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
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	hook, change := &bpf.AbiHook{}, []bpf.AbiChange{}
	if err := s.maps[hookMap].Lookup(uint32(0), hook); err != nil {
		return fmt.Errorf("read the hook's settings: %w", err)
	}
	s.now, s.hook, s.prefixes.hook = Now, hook, hook
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
		mapArray(&s.memory, bpf.ShapectlMapKeys, (hook.LineMask+1)*lineSlots, &s.keys),
	)
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
