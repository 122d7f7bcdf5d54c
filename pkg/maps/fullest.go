package maps

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
)

const (
	// recentTicks is how long ago a bucket was charged, at most, that Fullest looks at: a tick is about a second. A host
	// above its rate is charged whenever a packet conforms, so it is among them unless its rate is tiny.
	recentTicks = 8
	// mostKeys bounds the keys that one call of Fullest.Find reads, each a cache miss.
	mostKeys = 1 << 15
)

// A Fullest finds the fullest buckets of a store, again and again. A call takes a few ms even if the table holds a
// million buckets: it reads the keys of those alone that were charged lately. If there are too many of them, it goes on
// at the next call where it stopped, and looks at the buckets again that it found before.
type Fullest struct {
	line int      // where the next call begins
	kept []uint32 // slots with the fullest buckets
}

// A FullBucket is a bucket and the id of its rule.
type FullBucket struct {
	Bucket
	ID uint32
	// Percent is the level in percent of what the bucket and its queue can hold.
	Percent float64

	slot uint32
}

// Find returns up to n buckets, the fullest first. rule is the rule with an id, or nil for one whose buckets do not count.
// Shared buckets are not among them. A bucket that moves to another slot meanwhile may be missing.
func (f *Fullest) Find(s *Store, n int, now uint64, rule func(id uint32) *Entry) (top []FullBucket) {
	add := func(number uint32) {
		word, k := load(s.slot(number)), s.table().keys[number]
		if word.TAT&tatBusy != 0 || k.Sharer != 0 {
			return
		}
		e := rule(k.Id)
		if e == nil {
			return
		}
		percent := float64(s.level(k.Id, word, now)) / float64(max(s.current(k.Id).Limit, 1)) * 100
		if percent == 0 || len(top) == n && percent <= top[n-1].Percent {
			return
		}
		if slices.ContainsFunc(top, func(b FullBucket) bool { return b.slot == number }) {
			return
		}
		b := s.bucketIn(*e, number, word, k, now)
		if b.LevelBytes == 0 {
			return
		}
		at, _ := slices.BinarySearchFunc(top, percent, func(b FullBucket, p float64) int { return cmp.Compare(p, b.Percent) })
		top = slices.Insert(top, at, FullBucket{b, k.Id, percent, number})
		top = top[:min(n, len(top))]
	}
	if n <= 0 {
		return nil
	}
	for _, number := range f.kept {
		if int(number) < len(s.table().keys) {
			add(number)
		}
	}
	tick, keys, lines := model.Tick(now), 0, s.table().lines
	for range lines {
		if keys >= mostKeys {
			break
		}
		if f.line++; f.line >= len(lines) {
			f.line = 0
		}
		line := &lines[f.line].Slot
		for i := range line {
			if atomic.LoadUint32(&line[i].Fingerprint) == 0 || tick-atomic.LoadUint32(&line[i].Tick)+uint32(bpf.AbiLayoutTICKS_AHEAD) > recentTicks {
				continue
			}
			add(uint32(f.line)*lineSlots + uint32(i))
			keys++
		}
	}
	f.kept = f.kept[:0]
	for _, b := range top {
		f.kept = append(f.kept, b.slot)
	}
	return top
}
