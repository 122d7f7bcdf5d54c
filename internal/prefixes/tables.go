// Package prefixes finds the rule of a prefix in memory that packets read: the tables of prefixes, the filter before them, and
// for each hook, which is a view of them, the lengths in use. It knows rules by their ids alone.
package prefixes

import (
	"cmp"
	"iter"
	"math/bits"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/step"
)

const spillLines = uint32(bpf.AbiLayoutSPILL_LINES)

// AllViews is no view.
const AllViews = ^uint32(0)

// Tables are those of all views.
type Tables struct {
	Hook   *bpf.AbiHook
	Change *bpf.AbiChange
	Views  []bpf.AbiView
	Lines4 []bpf.AbiPrefixes4
	Lines6 []bpf.AbiPrefixes6
	Filter []uint64
	ViewOf func(id uint32) uint32 // the view of a rule
}

// Configure sets what the settings of a hook say of tables for so many rules, except the random secret.
func Configure(hook *bpf.AbiHook, rules uint32) {
	// So half of the places are free in each table, and the filter has 16 bits for each prefix.
	hook.Prefixes4Mask, hook.Prefixes6Mask = PowerOfTwo((rules+1)/2)-1, PowerOfTwo(rules)-1
	hook.FilterMask = PowerOfTwo((rules+3)/4) - 1
	hook.Scan = 0
	if hook.Prefixes4Mask >= 1<<14 { // the tables are too big for a cache: a lookup costs more than the filter, even for the longest length
		hook.Scan = uint32(bpf.AbiScanSCAN_BIG)
	}
	// It is odd, so that no two keys become one.
	last := len(hook.Secret) - 1
	hook.Multiplier = uint64(hook.Secret[last-1])<<32 | uint64(hook.Secret[last]) | 1
	for length := range hook.Masks {
		hook.Masks[length] = pairs(mask(length))
	}
}

// PowerOfTwo is the least power of two that is not below n.
func PowerOfTwo(n uint32) uint32 { return 1 << bits.Len32(max(n, 1)-1) }

// A line of one of the two tables holds prefixes in a few places.
type line interface {
	ids() []uint32 // of the rules, plus one; 0 for a free place
	at(place int) Key
	put(place int, k Key)
	used() int // places that were ever filled; more than the line has if prefixes continue in the next line
	use(places int)
}

type line4 struct{ *bpf.AbiPrefixes4 }

func (l line4) ids() []uint32        { return l.Id[:] }
func (l line4) at(place int) Key     { return Key{[2]uint64{l.Key[place]}, noLength} }
func (l line4) put(place int, k Key) { l.Key[place] = k.addr[0] }
func (l line4) used() int            { return int(atomic.LoadUint32(&l.Used)) }
func (l line4) use(places int)       { atomic.StoreUint32(&l.Used, uint32(places)) }

type line6 struct{ *bpf.AbiPrefixes6 }

func (l line6) ids() []uint32        { return l.Id[:] }
func (l line6) at(place int) Key     { return Key{l.Addr[place], l.Length[place]} }
func (l line6) put(place int, k Key) { l.Addr[place], l.Length[place] = k.addr, k.length }
func (l line6) used() int            { return int(l.Used) }
func (l line6) use(places int)       { l.Used = uint8(places) }

// allLines are those of both tables.
func (t *Tables) allLines() iter.Seq[line] {
	return func(yield func(line) bool) {
		for i := range t.Lines4 {
			if !yield(line4{&t.Lines4[i]}) {
				return
			}
		}
		for i := range t.Lines6 {
			if !yield(line6{&t.Lines6[i]}) {
				return
			}
		}
	}
}

// hash is hash4_prefix and hash6_prefix of bpf/prefix.h.
func (t *Tables) hash(k Key) uint64 {
	m := t.Hook.Multiplier
	stir := func(h uint64) uint64 { return (h ^ h>>28) * m }
	if k.length == noLength {
		return stir(k.addr[0] * m)
	}
	return stir(stir(stir(k.addr[0]*m+uint64(k.length)) + k.addr[1]))
}

// line is the nth line that may hold a prefix with that hash, in the order in which packets
// look. n is below spillLines.
func (t *Tables) line(k Key, hash uint64, n uint32) line {
	number := uint32(hash>>40) + n
	if k.length == noLength {
		return line4{&t.Lines4[number&t.Hook.Prefixes4Mask]}
	}
	return line6{&t.Lines6[number&t.Hook.Prefixes6Mask]}
}

// inFilter is the word of the filter for a prefix with that hash, and its two bits there:
// in_filter of bpf/prefix.h.
func (t *Tables) inFilter(hash uint64) (word uint32, bits uint64) {
	return uint32(hash>>32) & t.Hook.FilterMask, 1<<(hash>>26&63) | 1<<(hash>>58)
}

// A Placed rule is a rule whose prefix has a place in a table.
type Placed struct {
	View, ID uint32
	Key      Key
}

// All are the prefixes that packets find, of all views, in no order. unseen, if not nil, is called with the prefixes in
// the tables whose length packets do not look for.
func (t *Tables) All(unseen func(Placed)) iter.Seq[Placed] {
	return func(yield func(Placed) bool) {
		inUse := make([]*Lengths, len(t.Views))
		for line := range t.allLines() {
			for place, id := range line.ids()[:min(line.used(), len(line.ids()))] {
				if id == 0 {
					continue
				}
				f := Placed{ID: id - 1, Key: line.at(place)}
				if f.Key.length == noLength {
					f.View = uint32(f.Key.addr[0] >> 40) // saves a cache miss on the rule
				} else {
					f.View = t.ViewOf(f.ID)
				}
				if inUse[f.View] == nil {
					used := t.InUse(f.View)
					inUse[f.View] = &used
				}
				switch {
				case inUse[f.View][f.Key.lengthOf()]:
					if !yield(f) {
						return
					}
				case unseen != nil:
					unseen(f)
				}
			}
		}
	}
}

// ByID is All of a view, or of AllViews, in the order of their rules in memory. Reading a million rules in the
// order of the tables takes ten times as long.
func (t *Tables) ByID(view uint32) iter.Seq[Placed] {
	var list []Placed
	for f := range t.All(nil) {
		if view == AllViews || view == f.View {
			list = append(list, f)
		}
	}
	slices.SortFunc(list, func(a, b Placed) int { return cmp.Compare(a.ID, b.ID) })
	return slices.Values(list)
}

// Find is the rule with exactly this prefix, if packets of the view find it.
func (t *Tables) Find(view uint32, p netip.Prefix) (id uint32, found bool) {
	if !p.IsValid() || !t.InUse(view)[LengthOf(p)] {
		return 0, false
	}
	place := t.place(t.Key(view, p))
	if place == nil {
		return 0, false
	}
	return *place - 1, true
}

// place is where the id of a prefix is, even if packets do not look for its length; nil for nowhere.
func (t *Tables) place(k Key) *uint32 {
	hash := t.hash(k)
	for n := range spillLines {
		line := t.line(k, hash, n)
		for place, id := range line.ids() {
			if id != 0 && line.at(place) == k {
				return &line.ids()[place]
			}
		}
		if line.used() <= len(line.ids()) {
			break
		}
	}
	return nil
}

// Place brings a prefix into force, and reports whether there was room for it. Packets must look for its length already.
func (t *Tables) Place(k Key, id uint32) bool {
	hash := t.hash(k)
	for n := range spillLines {
		line := t.line(k, hash, n)
		ids := line.ids()
		place := slices.Index(ids, 0)
		if place < 0 {
			line.use(len(ids) + 1)
			continue
		}
		if place < line.used() {
			grace.Wait(t.Change, t.Change.Removed) // packets may still compare the prefix that was here
		}
		word, bits := t.inFilter(hash)
		atomic.OrUint64(&t.Filter[word], bits)
		line.put(place, k)
		line.use(max(line.used(), place+1))
		atomic.StoreUint32(&ids[place], id+1)
		return true
	}
	return false
}

// Remove hides a prefix from packets, if it has a place. It does not change the lengths in use.
func (t *Tables) Remove(k Key) {
	if place := t.place(k); place != nil {
		t.Change.Removed = t.Change.Epoch
		step.Store("remove a prefix")
		atomic.StoreUint32(place, 0)
	}
}

// CopyTo places all prefixes in tables of more rules, and reports whether there was room. With few rules, one of both tables may
// be the same.
func (t *Tables) CopyTo(bigger *Tables) bool {
	if len(bigger.Lines6) == len(t.Lines6) {
		return true // then so is the other one
	}
	for f := range t.All(nil) {
		if bigger.place(f.Key) == nil && !bigger.Place(f.Key, f.ID) {
			return false
		}
	}
	return true
}

// Refilter clears the bits of removed prefixes, given all that are left. At any time, each word has all bits that
// are needed.
func (t *Tables) Refilter(all []Placed) {
	fresh := make([]uint64, len(t.Filter))
	for _, f := range all {
		word, bits := t.inFilter(t.hash(f.Key))
		fresh[word] |= bits
	}
	for i, word := range fresh {
		if t.Filter[i] != word {
			atomic.StoreUint64(&t.Filter[i], word)
		}
	}
}
