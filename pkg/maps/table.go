package maps

import (
	"iter"
	"runtime"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
)

const tatBusy = 1 // TAT_BUSY of abi.h

// buckets are the buckets of all rules: a shared bucket for each rule, and the slots of the table, by number.
type buckets struct {
	limits
	table func() *table
}

// A table is most of the memory of a store, and is mapped when it is needed first.
type table struct {
	lines []bpf.AbiLine
	keys  []bpf.AbiKey
}

func load(b *bpf.AbiBucket) model.Bucket {
	return model.Bucket{TAT: atomic.LoadUint64(&b.Tat), Tick: atomic.LoadUint32(&b.Tick)}
}

func (bs *buckets) slot(n uint32) *bpf.AbiBucket {
	return &bs.table().lines[n/lineSlots].Slot[n%lineSlots]
}

// slotOf is the slot that a key has.
func (bs *buckets) slotOf(key bpf.AbiKey) (n uint32, found bool) {
	for _, p := range bs.places(key, bs.current(key.Id).Salt) {
		for n := range lineSlots {
			if n += p.line * lineSlots; atomic.LoadUint32(&bs.slot(n).Fingerprint) == p.fingerprint {
				return n, true
			}
		}
	}
	return 0, false
}

// levelOf is the level of a key's bucket. A key without a slot would get an empty one.
func (bs *buckets) levelOf(key bpf.AbiKey, now uint64) uint64 {
	var word model.Bucket
	if n, has := bs.slotOf(key); has {
		word = load(bs.slot(n))
	}
	return bs.level(key.Id, word, now)
}

// canHaveSlot reports whether a key has a slot or could get one, by the rules of bpf/table.h.
func (bs *buckets) canHaveSlot(key bpf.AbiKey, now uint64) bool {
	if _, has := bs.slotOf(key); has {
		return true
	}
	places := bs.places(key, bs.current(key.Id).Salt)
	if bs.emptySlots(places[0].line, now)+bs.emptySlots(places[1].line, now) > 0 {
		return true
	}
	for _, p := range places {
		for i := range bs.table().lines[p.line].Slot {
			moved := place{p.line, atomic.LoadUint32(&bs.table().lines[p.line].Slot[i].Fingerprint)}
			if isFirst(moved.fingerprint) && bs.emptySlots(bs.second(moved).line, now) > 0 {
				return true
			}
		}
	}
	return false
}

// Slots is how full the table is.
type Slots struct {
	All   int
	InUse int // their buckets are not empty, so no other key can get them
}

// Slots counts the slots of the table.
func (bs *buckets) Slots(now uint64) Slots {
	n := Slots{All: len(bs.table().lines) * int(lineSlots)}
	for i := range bs.table().lines {
		n.InUse += int(lineSlots) - bs.emptySlots(uint32(i), now)
	}
	return n
}

// emptySlots is how many slots of a line are free for any key.
func (bs *buckets) emptySlots(line uint32, now uint64) (n int) {
	for i := range lineSlots {
		if bs.isEmpty(line*lineSlots+i, now) {
			n++
		}
	}
	return n
}

// isEmpty is is_empty of bpf/table.h. It allows for CPUs whose clock is behind.
func (bs *buckets) isEmpty(n uint32, now uint64) bool {
	const skew = 1 << 20 // SKEW_NS
	slot, key := bs.slot(n), &bs.table().keys[n]
	b, id := load(slot), atomic.LoadUint32(&key.Id)
	switch {
	case b.TAT == 0 && atomic.LoadUint32(&slot.Fingerprint) == 0:
		return true
	case b.TAT&tatBusy != 0 || id >= bs.room():
		return false
	case key.Sharer != 0:
		return !bs.isActive(n)
	}
	if !bs.current(id).Present() { // it is about to come, or may come back
		return false
	}
	now -= min(now, skew)
	return bs.level(id, b, now) == bs.level(id, model.Bucket{}, now)
}

// slots are the slots in use of some rules, by id. A slot that moves meanwhile may appear twice. None is missing, as buckets only
// move from first lines to second ones: one pass is for keys in their first line, and one for those in their second.
func (bs *buckets) slots(of func(id uint32) bool) iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		lines, keys := bs.table().lines, bs.table().keys
		for _, first := range []bool{true, false} {
			for i := range lines {
				line := &lines[i].Slot
				at := func(j int) uint32 { return atomic.LoadUint32(&line[j].Fingerprint) }
				if at(0)|at(1)|at(2)|at(3) == 0 {
					continue // most lines are empty
				}
				for j := range line {
					n := uint32(i)*lineSlots + uint32(j)
					if fingerprint := at(j); fingerprint == 0 || isFirst(fingerprint) != first || !of(atomic.LoadUint32(&keys[n].Id)) {
						continue
					}
					if !yield(n) {
						return
					}
				}
			}
		}
	}
}

// settled is a bucket that no CPU is about to move or to allocate to another key. It waits
// for as long as a packet takes.
func settled(b *bpf.AbiBucket) model.Bucket {
	for {
		if now := load(b); now.TAT&tatBusy == 0 {
			return now
		}
		runtime.Gosched()
	}
}

// freeSlots frees all slots of a rule that is not in force: by the clock of another one they might not be empty.
func (bs *buckets) freeSlots(id uint32) {
	if bs.rule(id).HasSlots == 0 {
		return
	}
	for n := range bs.slots(func(of uint32) bool { return of == id }) {
		slot := bs.slot(n)
		fingerprint := atomic.LoadUint32(&slot.Fingerprint)
		before := settled(slot)
		// Without a lock, which would stay if the process was killed. A packet that moves the bucket meanwhile moves it to its
		// second line, where it is found, too.
		if atomic.CompareAndSwapUint32(&slot.Fingerprint, fingerprint, 0) {
			atomic.CompareAndSwapUint64(&slot.Tat, before.TAT, 0)
		}
	}
}
