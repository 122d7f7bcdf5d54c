package loader

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/maps"
)

const (
	// leastRules is room for rules that a namespace has from the start: 1.5 MiB with two CPUs. It grows.
	leastRules = 4096
	// manyRules take 100 MiB with two CPUs.
	manyRules = 1 << 18
	// leastViews is room for hooks from the start. It grows.
	leastViews = 64
	// tableBuckets is how many hosts, subnets and flows of a namespace can have a
	// bucket that is not empty at the same time: 16 MiB of slots and 48 MiB of keys.
	tableBuckets = 1 << 20
	// noBuckets is for a namespace whose rules all have one bucket.
	noBuckets = uint32(bpf.AbiLayoutLINE_SLOTS)
	// affectedHosts is how many hosts and subnets are remembered that shadows would have affected: 8 MiB.
	affectedHosts = 1 << 16

	// kindsPin is the map of programs that hooks call.
	kindsPin = "kinds"
)

// openState opens what is pinned of the namespace's rules, if there is anything.
func (n *Namespace) openState() error {
	generations, err := generationsIn(string(n.dir))
	if err != nil || len(generations) == 0 {
		return err
	}
	// Of two, a command that was killed has not finished the newer one; their rules are the same.
	newest := generations[len(generations)-1]
	n.store, err = maps.Open(n.dir.pin(newest))
	if errors.Is(err, maps.ErrOtherLayout) {
		n.store, n.foreign = nil, err
		return nil
	}
	if err != nil {
		return fmt.Errorf("rules of this network namespace: %w", err)
	}
	if n.kinds, err = ebpf.LoadPinnedMap(n.dir.pin(kindsPin), nil); err != nil {
		return fmt.Errorf("open the map of programs: %w", err)
	}
	if state, from := n.store.Change(); state == maps.Armed && n.writing {
		waitUntil(from) // whoever armed it was killed meanwhile
	}
	return nil
}

func (n *Namespace) closeState() {
	if n.store != nil {
		n.store.Close()
	}
	if n.kinds != nil {
		n.kinds.Close()
	}
	n.store, n.kinds = nil, nil
}

// generationsIn are those of maps that are pinned in a directory, oldest first.
func generationsIn(dir string) ([]string, error) {
	entries, err := readDir(dir)
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
		if err := trustDir(filepath.Join(dir, name)); err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	return names, nil
}

// discardGenerations removes all but the newest keep of them.
func (dir home) discardGenerations(keep int) error {
	generations, err := generationsIn(string(dir))
	if err != nil {
		return err
	}
	for _, g := range generations[:max(0, len(generations)-keep)] {
		if err := discard(dir.pin(g)); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	return nil
}

// makeRoom has the namespace's maps made, or made anew, where they lack room for what
// hooks are to get, or where another build made the programs. It reports whether it was
// another build.
func (n *Namespace) makeRoom(orders []*order) (upgraded bool, err error) {
	id, err := program.Build()
	if err != nil {
		return false, err
	}
	var ids, views uint32
	for _, o := range orders {
		ids += maps.IDs(o.steps...)
		if o.Set == nil {
			views++
		}
	}
	if n.store == nil {
		// With a few more rules, it does not have to grow.
		size := maps.Size{Views: max(leastViews, views), Rules: max(leastRules, ids+ids/32), Buckets: noBuckets}
		settings := bpf.AbiHook{Build: id}
		if err := binary.Read(rand.Reader, binary.NativeEndian, &settings.Secret); err != nil {
			return false, err
		}
		return false, n.createState(roomFor(orders, size), settings)
	}
	settings, size := n.store.Hook(), roomFor(orders, n.store.Size())
	if lacks := n.store.Lacks(ids); lacks > 0 {
		size.Rules = max(growth(size.Rules), (size.Rules+lacks)/4*5)
	}
	for views += uint32(len(n.sets())); size.Views < views; {
		size.Views *= 2
	}
	upgraded = settings.Build != id
	if !upgraded && size == n.store.Size() {
		return false, nil
	}
	settings.Build = id
	return upgraded, n.renewState(size, settings)
}

// growth is room for how many rules there is once that for so many is full. As a
// store can grow only so often it is for many more, but where those are many already.
func growth(rules uint32) uint32 {
	if rules < manyRules {
		return 4 * rules
	}
	return 2 * rules
}

// roomFor is a size with room for buckets and shadows, if rules are to have any.
func roomFor(orders []*order, size maps.Size) maps.Size {
	for _, o := range orders {
		for i := range o.want.Rules {
			r := &o.want.Rules[i]
			proposed, ok := r.Proposed()
			if ok {
				size.Affected = max(size.Affected, affectedHosts)
			}
			if size.Buckets == noBuckets && (maps.HasSlots(*r) || maps.HasSlots(proposed)) {
				size.Buckets = tableBuckets
			}
		}
	}
	return size
}

func (n *Namespace) createState(size maps.Size, settings bpf.AbiHook) error {
	pin := n.dir.pin(kindsPin)
	var err error
	if n.store, err = maps.New(size, settings); err == nil {
		n.kinds, err = program.NewKinds()
	}
	if err == nil {
		err = unlink(pin)
	}
	if err == nil {
		err = pinAt(n.kinds, pin)
	}
	if err == nil {
		err = n.pinState(n.store, "g0")
	}
	if err != nil {
		n.closeState()
	}
	return err
}

// pinState pins a store aside, and puts the whole in place.
func (n *Namespace) pinState(store *maps.Store, generation string) error {
	aside := n.dir.pin(asideName)
	if err := removeAll(aside); err != nil {
		return fmt.Errorf("clear %s: %w", aside, err)
	}
	if err := makeDir(aside); err != nil {
		return err
	}
	if err := store.Pin(aside); err != nil {
		return err
	}
	if err := renamePins(aside, n.dir.pin(generation)); err != nil {
		return fmt.Errorf("put pins in place: %w", err)
	}
	return nil
}

// renewState makes the next generation: with other settings, and room for more.
// Rules, buckets and counters are shared with the last one.
func (n *Namespace) renewState(size maps.Size, settings bpf.AbiHook) error {
	next, err := n.store.Derive(size, settings)
	if err != nil {
		return err
	}
	err = n.switchTo(next, func() error {
		generations, err := generationsIn(string(n.dir))
		if err != nil {
			return err
		}
		last, _ := numbered(generations[len(generations)-1], "g")
		return n.pinState(next, fmt.Sprintf("g%d", last+1))
	})
	if n.store != next {
		next.Close()
	}
	return err
}

// switchTo has hooks call programs on a store once it is pinned, and discards all older generations.
// The kernel may refuse a program; then nothing is pinned.
func (n *Namespace) switchTo(store *maps.Store, pin func() error) error {
	programs := map[program.Kind]*ebpf.Program{}
	for kind := range program.Kinds {
		if !n.hasKind(kind) {
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
	if n.store != store {
		n.store.Close()
		n.store = store
	}
	for kind, p := range programs {
		if err := n.putKind(kind, p); err != nil {
			return err
		}
	}
	return n.dir.discardGenerations(1)
}

func (n *Namespace) hasKind(kind program.Kind) bool {
	var id uint32
	return n.kinds.Lookup(kind, &id) == nil
}

func (n *Namespace) putKind(kind program.Kind, p *ebpf.Program) error {
	if err := step.Try("replace a program"); err != nil {
		return err
	}
	if err := n.kinds.Put(kind, p); err != nil {
		return fmt.Errorf("put a program in place: %w", err)
	}
	return nil
}

// needKind makes sure that there is a program for hooks of a kind.
func (n *Namespace) needKind(kind program.Kind) error {
	if n.hasKind(kind) {
		return nil
	}
	p, err := program.Load(n.store, kind.Settings(n.store.Hook()))
	if err != nil {
		return err
	}
	defer p.Close()
	return n.putKind(kind, p)
}

// finishState completes what a killed command has begun: the newest generation is that of all hooks.
func (n *Namespace) finishState() error {
	if err := removeAll(n.dir.pin(asideName)); err != nil {
		return fmt.Errorf("remove pins: %w", err)
	}
	generations, err := generationsIn(string(n.dir))
	if err != nil || len(generations) < 2 {
		return err
	}
	return n.switchTo(n.store, func() error { return nil })
}

// dropState removes the maps of a namespace in which no hook is left.
func (n *Namespace) dropState() error {
	if n.store == nil {
		return nil
	}
	for range n.store.Sets() {
		return nil
	}
	n.closeState()
	if err := n.dir.discardGenerations(0); err != nil {
		return err
	}
	return unlink(n.dir.pin(kindsPin))
}
