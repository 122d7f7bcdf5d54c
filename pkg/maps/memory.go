package maps

import (
	"fmt"
	"maps"
	"path/filepath"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
)

const (
	hookMap      = ".rodata"
	changeMap    = ".data.change"
	viewsMap     = ".data.views"
	prefixes4Map = ".data.prefixes4"
	prefixes6Map = ".data.prefixes6"
	filterMap    = ".data.filter"
	tableMap     = ".data.table"
	worksMap     = ".data.works"
	cgroupWorks  = ".data.cgroup_works"
	calendarsMap = ".data.calendars"
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
	bpf.ShapectlMapShares: "shares", bpf.ShapectlMapLeases: "leases", tableMap: "table", worksMap: "works", cgroupWorks: "works-cgroup", bpf.ShapectlMapPrograms: "programs", bpf.ShapectlMapCgroupPrograms: "programs-cgroup", bpf.ShapectlMapKeys: "keys", bpf.ShapectlMapAffected: "affected", bpf.ShapectlMapLabels: "labels",
	hookMap: "hook", changeMap: "change", calendarsMap: "calendars", bpf.ShapectlMapListeners: "listeners", bpf.ShapectlMapRings: "rings",
}

// mapArray maps the values of a map into memory, shared with the programs.
func mapArray[T any](s *Store, name string, count uint32, array *[]T) error {
	memory, err := s.mapMemory(name)
	if err != nil {
		return err
	}
	if *array = unsafe.Slice((*T)(unsafe.Pointer(&memory[0])), count); uintptr(len(memory)) != uintptr(count)*unsafe.Sizeof((*array)[0]) {
		return fmt.Errorf("map %s: %w", name, ErrOtherLayout)
	}
	return nil
}

func (s *Store) mapMemory(name string) ([]byte, error) {
	memory, err := s.memoryOf(name)
	if err == nil {
		s.mapped = append(s.mapped, memory)
	}
	return memory, err
}

// memoryOf maps a map into memory, which the caller unmaps.
func (s *Store) memoryOf(name string) ([]byte, error) {
	m, access := s.maps[name], unix.PROT_READ|unix.PROT_WRITE
	if s.readOnly {
		access = unix.PROT_READ
	}
	memory, err := unix.Mmap(m.FD(), 0, int(m.ValueSize())*int(m.MaxEntries()), access, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", name, err)
	}
	return memory, nil
}

// Pin pins all maps in a directory of a bpffs.
func (s *Store) Pin(dir string) error {
	for name, pin := range pinned {
		if err := step.Try("pin a map"); err != nil {
			return err
		}
		// A clone, as a map object remembers one pin, and a set may have several.
		m, err := s.maps[name].Clone()
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
func (s *Store) Replacements() map[string]*ebpf.Map { return s.maps }

// OfCgroups are Replacements for the programs of cgroups.
func (s *Store) OfCgroups() map[string]*ebpf.Map {
	all := maps.Clone(s.maps)
	all[worksMap], all[bpf.ShapectlMapPrograms] = all[cgroupWorks], all[bpf.ShapectlMapCgroupPrograms]
	return all
}
