package loader

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// leastRules is the initial room for rules of a namespace: 2 MiB with two CPUs. It grows.
	leastRules = 4096
	// manyRules take 128 MiB with two CPUs.
	manyRules = 1 << 18
	// leastLabels is the initial room for labels of a namespace that has any, in parts of LABEL_BYTES: 64 KiB. It grows.
	leastLabels = 4096
	// leastViews is the initial room for hooks. It grows.
	leastViews = 64
	// mostBuckets is how many hosts, subnets and flows of a namespace can have a bucket
	// that is not empty: 16 MiB of slots and 56 MiB of keys.
	mostBuckets = 1 << 20
	// bucketBytes is the memory of one, of which all may take 1/tablePart of the machine's.
	bucketBytes, tablePart = 72, 28
	// noBuckets is for a namespace whose rules have shared buckets only.
	noBuckets = uint32(bpf.AbiLayoutLINE_SLOTS)
	// affectedHosts is how many affected hosts and subnets of shadows are remembered: 8 MiB.
	affectedHosts = 1 << 16
)

// A bpfState is the pinned rules of a namespace: a generation of maps, and the programs that hooks call.
type bpfState struct {
	dir     home
	writing bool // else nothing is changed but what renews allows
	renews  bool // see Options

	store   *maps.Store                   // nil where there are no rules
	kinds   map[*program.Family]*ebpf.Map // the programs, by kind; those that are open
	foreign *OtherLayoutError             // nil unless a build of another layout made the maps
	kept    *Kept                         // nil unless the namespace is read again and again

	generation Generation // that was opened
	lost       string     // the pin of programs that something deleted; "" for none

	rules [][]policy.Rule // see policies
	as    maps.Stamp      // of when they were read
}

// open opens the pinned rules of the namespace, if there are any.
func (s *bpfState) open() error {
	generations, err := generationsIn(string(s.dir))
	if err != nil || len(generations) == 0 {
		return err
	}
	// There are two if a command was killed while it made the newer one; their rules are the same.
	newest := s.dir.pin(generations[len(generations)-1])
	if s.generation, err = identify(newest); err != nil {
		return err
	}
	s.lost = ""
	for _, f := range program.Families {
		for _, pin := range []string{s.dir.pin(f.Pin), filepath.Join(newest, f.Called)} {
			if s.lost == "" && !bpffs.Exists(pin) {
				s.lost = pin
			}
		}
	}
	if s.store = s.kept.take(s.generation); s.store != nil {
		return nil
	}
	_, otherNames, err := s.dir.hookDirs()
	if err != nil {
		return err
	}
	if s.store, err = maps.Open(newest, s.writing || s.renews); err == nil && otherNames {
		s.store.Close()
		err = maps.ErrOtherLayout
	}
	if errors.Is(err, maps.ErrOtherLayout) {
		s.store, s.lost, s.foreign = nil, "", &OtherLayoutError{err: err} // which may have other pins
		s.foreign.Hooks, err = s.dir.otherHooks()
		return err
	}
	if err != nil {
		return fmt.Errorf("rules of this network namespace: %w", err)
	}
	if s.kept != nil || !s.writing {
		s.kept.put(s.generation, s.store)
		return nil
	}
	s.kinds = map[*program.Family]*ebpf.Map{}
	for _, f := range program.Families {
		if s.kinds[f], err = ebpf.LoadPinnedMap(s.dir.pin(f.Pin), nil); errors.Is(err, fs.ErrNotExist) {
			s.kinds[f], err = s.calledKinds(f)
		}
		if err != nil {
			return fmt.Errorf("open the map of programs: %w", err)
		}
	}
	if state, from := s.store.Change(); state == maps.Armed {
		waitUntil(from) // the command that armed it was killed
	}
	return nil
}

// calledKinds is the map of programs that hooks of a family call, without its pin; a new one if there are no hooks.
func (s *bpfState) calledKinds(f *program.Family) (*ebpf.Map, error) {
	for _, set := range s.sets() {
		if program.FamilyOf(set.Ifindex()) != f {
			continue
		}
		a, err := openAttachment(s.dir.hookDirOf(set))
		if err != nil {
			return nil, err
		}
		if a.close(); a.program == 0 {
			continue
		}
		caller, err := ebpf.NewProgramFromID(a.program)
		if err != nil {
			return nil, err
		}
		defer caller.Close()
		info, err := caller.Info()
		if err != nil {
			return nil, err
		}
		if called, _ := info.MapIDs(); len(called) == 1 {
			return ebpf.NewMapFromID(called[0])
		}
	}
	return program.NewKinds()
}

func (s *bpfState) close() {
	if s.store != nil {
		s.store.Close()
	}
	for _, kinds := range s.kinds {
		kinds.Close()
	}
	s.store, s.kinds, s.rules = nil, nil, nil
}

// generationsIn are the generations of maps that are pinned in a directory, oldest first.
func generationsIn(dir string) ([]string, error) {
	entries, err := bpffs.List(dir)
	if err != nil {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		if number, ok := numbered(e.Name(), "g"); ok && e.IsDir() {
			numbers = append(numbers, number)
		}
	}
	slices.Sort(numbers)
	var names []string
	for _, number := range numbers {
		name := fmt.Sprintf("g%d", number)
		if err := bpffs.TrustDir(filepath.Join(dir, name)); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// discardGenerations removes all generations but the newest keep.
func (dir home) discardGenerations(keep int) error {
	generations, err := generationsIn(string(dir))
	if err != nil {
		return err
	}
	for _, g := range generations[:max(0, len(generations)-keep)] {
		if err := bpffs.Discard(dir.pin(g)); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// discardMaps removes all generations, and the map of programs.
func (dir home) discardMaps() error {
	if err := dir.discardGenerations(0); err != nil {
		return err
	}
	for _, f := range program.Families {
		if err := bpffs.Unlink(dir.pin(f.Pin)); err != nil {
			return err
		}
	}
	return nil
}

// makeRoom makes the maps of the namespace, or a new generation if they lack room for the
// orders or if another build made the programs. It reports whether it was another build.
func (s *bpfState) makeRoom(all orders) (upgraded bool, err error) {
	id, err := program.Build()
	if err != nil {
		return false, err
	}
	var steps []policy.Difference
	var views uint32
	for _, o := range all {
		steps = append(steps, o.steps...)
		if o.Set == nil && !o.isPools() {
			views++
		}
	}
	needs := maps.Needs(steps...)
	if s.store == nil {
		// The spare rules delay the first growth.
		size := maps.Size{Views: max(leastViews, views+1), Rules: max(leastRules, needs.Rules+needs.Rules/32), Buckets: noBuckets, Shares: needs.Shares, Leases: needs.Leases}
		if needs.Labels > 0 {
			size.Labels = max(leastLabels, 2*needs.Labels)
		}
		settings := bpf.AbiHook{Build: id}
		if err := binary.Read(rand.Reader, binary.NativeEndian, &settings.Secret); err != nil {
			return false, err
		}
		return false, s.create(roomFor(needs, size), settings)
	}
	settings, size := s.store.Hook(), roomFor(needs, s.store.Size())
	lacks := s.store.Lacks(needs)
	if lacks.Rules > 0 {
		size.Rules = max(growth(size.Rules), (size.Rules+lacks.Rules)/4*5)
	}
	grow := func(has *uint32, lacks uint32) {
		if lacks > 0 {
			*has = 2 * (*has + lacks)
		}
	}
	grow(&size.Labels, lacks.Labels)
	grow(&size.Shares, lacks.Shares)
	grow(&size.Leases, lacks.Leases)
	for views += uint32(len(s.sets())) + 1; size.Views < views; { // one is that of the pools
		size.Views *= 2
	}
	upgraded = settings.Build != id
	if !upgraded && size == s.store.Size() {
		return false, nil
	}
	settings.Build = id
	return upgraded, s.renew(size, settings)
}

// growth is the next room for rules. A store can grow only RULE_MAPS - 1 times, so
// small ones grow by more.
func growth(rules uint32) uint32 {
	if rules < manyRules {
		return 4 * rules
	}
	return 2 * rules
}

// roomFor adds room for buckets and shadows to a size, if rules need it.
func roomFor(needs, size maps.Size) maps.Size {
	size.Pools, size.Colours = size.Pools || needs.Pools, size.Colours || needs.Colours
	size.NAT, size.Marks = size.NAT || needs.NAT, size.Marks || needs.Marks
	size.Also = size.Also || needs.Also
	if needs.Affected > 0 {
		size.Affected = max(size.Affected, affectedHosts)
	}
	if needs.Buckets > 0 && size.Buckets == noBuckets {
		size.Buckets = tableBuckets(memory())
	}
	return size
}

func (s *bpfState) create(size maps.Size, settings bpf.AbiHook) error {
	var err error
	s.store, err = maps.New(size, settings)
	s.kinds = map[*program.Family]*ebpf.Map{}
	for _, f := range program.Families {
		if err == nil {
			s.kinds[f], err = program.NewKinds()
		}
		if err == nil {
			err = bpffs.Unlink(s.dir.pin(f.Pin))
		}
		if err == nil {
			err = bpffs.Pin(s.kinds[f], s.dir.pin(f.Pin))
		}
	}
	if err == nil {
		err = s.pinAs(s.store, "g0")
	}
	if err != nil {
		s.close()
	}
	return err
}

// pinAs pins a store aside, and then renames the whole into place.
func (s *bpfState) pinAs(store *maps.Store, generation string) error {
	aside := s.dir.pin(asideName)
	if err := bpffs.RemoveAll(aside); err != nil {
		return fmt.Errorf("clear %s: %w", aside, err)
	}
	if err := bpffs.MakeDir(aside); err != nil {
		return err
	}
	if err := store.Pin(aside); err != nil {
		return err
	}
	if err := bpffs.Rename(aside, s.dir.pin(generation)); err != nil {
		return fmt.Errorf("put pins in place: %w", err)
	}
	return nil
}

// renew makes the next generation, with other settings and more room. It shares rules,
// buckets and counters with the last one.
func (s *bpfState) renew(size maps.Size, settings bpf.AbiHook) error {
	next, err := s.store.Derive(size, settings)
	if err != nil {
		return err
	}
	err = s.switchTo(next, func() error {
		generations, err := generationsIn(string(s.dir))
		if err != nil {
			return err
		}
		last, _ := numbered(generations[len(generations)-1], "g")
		return s.pinAs(next, fmt.Sprintf("g%d", last+1))
	})
	if s.store != next {
		next.Close()
	}
	return err
}

// switchTo loads programs for a store, calls pin, lets hooks call these programs, and discards all older
// generations. If the kernel refuses a program, nothing is pinned.
func (s *bpfState) switchTo(store *maps.Store, pin func() error) error {
	programs := map[program.Kind]*ebpf.Program{}
	for kind := range program.Kinds {
		if !s.hasKind(kind) && bpffs.Exists(s.dir.pin(kind.Family().Pin)) { // else something has emptied the map
			continue
		}
		p, err := program.Load(store, kind.Settings(store.Hook()))
		if err != nil {
			return err
		}
		defer p.Close()
		programs[kind] = p
	}
	if err := pin(); err != nil {
		return err
	}
	if s.store != store {
		s.store.Close()
		s.store = store
	}
	for kind, p := range programs {
		if err := s.putKind(kind, p); err != nil {
			return err
		}
	}
	return s.dir.discardGenerations(1)
}

func (s *bpfState) hasKind(kind program.Kind) bool {
	var id uint32
	return s.kinds[kind.Family()].Lookup(kind, &id) == nil
}

func (s *bpfState) putKind(kind program.Kind, p *ebpf.Program) error {
	if err := step.Try("replace a program"); err != nil {
		return err
	}
	if err := s.kinds[kind.Family()].Put(kind, p); err != nil {
		return fmt.Errorf("put a program in place: %w", err)
	}
	return nil
}

// needKind loads the program for hooks of a kind, if there is none yet.
func (s *bpfState) needKind(kind program.Kind) error {
	if s.hasKind(kind) {
		return nil
	}
	p, err := program.Load(s.store, kind.Settings(s.store.Hook()))
	if err != nil {
		return err
	}
	defer p.Close()
	return s.putKind(kind, p)
}

// unify completes the work of a killed command: all hooks use the newest generation. If the programs are lost, another one has them.
func (s *bpfState) unify() error {
	if err := bpffs.RemoveAll(s.dir.pin(asideName)); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	if s.lost != "" {
		err := s.renew(s.store.Size(), s.store.Hook())
		for f, kinds := range s.kinds {
			if pin := s.dir.pin(f.Pin); err == nil && !bpffs.Exists(pin) {
				err = bpffs.Pin(kinds, pin)
			}
		}
		if err == nil {
			s.lost = ""
		}
		return err
	}
	generations, err := generationsIn(string(s.dir))
	if err != nil || len(generations) < 2 {
		return err
	}
	return s.switchTo(s.store, func() error { return nil })
}

// drop removes the maps of a namespace without hooks and pools.
func (s *bpfState) drop() error {
	if s.store == nil {
		return nil
	}
	for range s.store.Sets() {
		return nil
	}
	if s.store.Pools().Any(maps.Exists) {
		return nil
	}
	s.close()
	return s.dir.discardMaps()
}

// otherHooks are the hooks of another layout.
func (dir home) otherHooks() (others []*Hook, err error) {
	dirs, _, err := dir.hookDirs()
	for _, at := range dirs {
		a, failed := openAttachment(at)
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		dev, _, failed := a.on("")
		if len(a.filters) > 0 {
			dev, _, failed = netinfo.DeviceByIndex(a.index)
		}
		a.close()
		err = errors.Join(err, failed)
		at.index = dev.Index
		was := "device that is gone"
		if dev.IsCgroup() {
			was = "a cgroup"
		}
		others = append(others, &Hook{Direction: at.direction, Device: dev, Was: was, at: at})
	}
	return others, err
}

// policies are the rules in force of all views, which are read once while nothing changes. They must not be changed.
func (s *bpfState) policies() [][]policy.Rule {
	if now := s.store.Stamp(); s.rules == nil || s.as != now {
		s.as, s.rules = now, s.store.Policies()
	}
	return s.rules
}

// readable is Namespace.Readable.
func (s *bpfState) readable() error {
	if s.foreign == nil {
		return nil
	}
	return s.foreign
}

// sets are the sets of all hooks.
func (s *bpfState) sets() []*maps.Set {
	if s.store == nil {
		return nil
	}
	return slices.Collect(s.store.Sets())
}

// tableBuckets is the number of slots of a new table on a machine with so many bytes of memory: a power of two.
func tableBuckets(memory uint64) uint32 {
	n := uint64(mostBuckets)
	for n > 1<<12 && n*bucketBytes > memory/tablePart {
		n /= 2
	}
	return uint32(n)
}

// memory is that of the machine, in bytes; 0 if it is not known.
func memory() uint64 {
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
