package maps

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/step"
)

const (
	spillLines = uint32(bpf.AbiLayoutSPILL_LINES)
	lengthIPv4 = 129                      // lengths of IPv4 follow those of IPv6
	noLength   = 255                      // no prefix has it
	noKey4     = noLength<<32 | 1<<32 - 1 // matches no key; its line stays in the cache, as it is the same for all addresses
)

// words is an address as the programs hold it, in network order.
func words(a netip.Addr) (w [4]uint32) {
	var b [16]byte
	copy(b[:], a.AsSlice())
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

// address is the inverse of words.
func address(w [4]uint32, family uint8) netip.Addr {
	var b [16]byte
	for i, v := range w {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	if family == 4 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b)
}

// lengthOf is an index for the length and family of a prefix.
func lengthOf(p netip.Prefix) int {
	if p.Addr().Is4() {
		return lengthIPv4 + p.Bits()
	}
	return p.Bits()
}

// pairs are the words of an address two by two.
func pairs(w [4]uint32) [2]uint64 { return *(*[2]uint64)(unsafe.Pointer(&w)) }

// by4 is by4 of bpf/prefix.h: it turns an address into the key of its prefix of that length.
func by4(length int) uint64 { return uint64(length)<<32 | uint64(^mask(length)[0]) }

// A stored prefix is a prefix as its table holds it.
type stored struct {
	addr   [2]uint64 // only the first for IPv4
	length uint8     // of IPv6; noLength for IPv4
}

func (v view) stored(p netip.Prefix) stored {
	w := words(p.Addr())
	if p.Addr().Is4() {
		return stored{[2]uint64{v.data.Mix4 | by4(p.Bits()) | uint64(w[0])}, noLength}
	}
	a := pairs(w)
	return stored{[2]uint64{a[0] ^ v.data.Mix6[0], a[1] ^ v.data.Mix6[1]}, uint8(p.Bits())}
}

// lengthOf is lengthOf for a stored prefix.
func (p stored) lengthOf() int {
	if p.length == noLength {
		return lengthIPv4 + int(p.addr[0]>>32&noLength)
	}
	return int(p.length)
}

// prefix is the inverse of stored.
func (v view) prefix(p stored) netip.Prefix {
	if key := p.addr[0]; p.length == noLength {
		return netip.PrefixFrom(address([4]uint32{uint32(key)}, 4), int(key>>32&noLength)).Masked()
	}
	mix := v.data.Mix6
	a := [2]uint64{p.addr[0] ^ mix[0], p.addr[1] ^ mix[1]}
	return netip.PrefixFrom(netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&a))), int(p.length))
}

// A prefixLine is a line of one of the two tables. It holds prefixes in a few places.
type prefixLine interface {
	ids() []uint32 // of the rules, plus one; 0 for a free place
	at(place int) stored
	put(place int, p stored)
	used() int // places that were ever filled; more than the line has if prefixes continue in the next line
	use(places int)
}

type line4 struct{ *bpf.AbiPrefixes4 }

func (l line4) ids() []uint32           { return l.Id[:] }
func (l line4) at(place int) stored     { return stored{[2]uint64{l.Key[place]}, noLength} }
func (l line4) put(place int, p stored) { l.Key[place] = p.addr[0] }
func (l line4) used() int               { return int(atomic.LoadUint32(&l.Used)) }
func (l line4) use(places int)          { atomic.StoreUint32(&l.Used, uint32(places)) }

type line6 struct{ *bpf.AbiPrefixes6 }

func (l line6) ids() []uint32           { return l.Id[:] }
func (l line6) at(place int) stored     { return stored{l.Addr[place], l.Length[place]} }
func (l line6) put(place int, p stored) { l.Addr[place], l.Length[place] = p.addr, p.length }
func (l line6) used() int               { return int(l.Used) }
func (l line6) use(places int)          { l.Used = uint8(places) }

// prefixTables find the rules of prefixes, for all views.
type prefixTables struct {
	hook   *bpf.AbiHook
	lines4 []bpf.AbiPrefixes4
	lines6 []bpf.AbiPrefixes6
	filter []uint64
}

// index is the rules by their prefixes, and what a change of many needs to know of them.
type index struct {
	buckets
	prefixes prefixTables
	views    []bpf.AbiView
	known    *known
}

// allViews is no view.
const allViews = ^uint32(0)

func (s *index) view(number uint32) view { return view{number, &s.views[number]} }

// allLines are those of both tables.
func (t *prefixTables) allLines() iter.Seq[prefixLine] {
	return func(yield func(prefixLine) bool) {
		for i := range t.lines4 {
			if !yield(line4{&t.lines4[i]}) {
				return
			}
		}
		for i := range t.lines6 {
			if !yield(line6{&t.lines6[i]}) {
				return
			}
		}
	}
}

// hash is hash4_prefix and hash6_prefix of bpf/prefix.h.
func (t *prefixTables) hash(p stored) uint64 {
	m := t.hook.Multiplier
	stir := func(h uint64) uint64 { return (h ^ h>>28) * m }
	if p.length == noLength {
		return stir(p.addr[0] * m)
	}
	return stir(stir(stir(p.addr[0]*m+uint64(p.length)) + p.addr[1]))
}

// line is the nth line that may hold a prefix with that hash, in the order in which packets
// look. n is below spillLines.
func (t *prefixTables) line(p stored, hash uint64, n uint32) prefixLine {
	number := uint32(hash>>40) + n
	if p.length == noLength {
		return line4{&t.lines4[number&t.hook.Prefixes4Mask]}
	}
	return line6{&t.lines6[number&t.hook.Prefixes6Mask]}
}

// inFilter is the word of the filter for a prefix with that hash, and its two bits there:
// in_filter of bpf/prefix.h.
func (t *prefixTables) inFilter(hash uint64) (word uint32, bits uint64) {
	return uint32(hash>>32) & t.hook.FilterMask, 1<<(hash>>26&63) | 1<<(hash>>58)
}

// refilter clears the bits of removed prefixes. At any time, each word has all bits that
// are needed.
func (t *prefixTables) refilter(prefixes []placed) {
	fresh := make([]uint64, len(t.filter))
	for _, f := range prefixes {
		word, bits := t.inFilter(t.hash(f.key))
		fresh[word] |= bits
	}
	for i, word := range fresh {
		if t.filter[i] != word {
			atomic.StoreUint64(&t.filter[i], word)
		}
	}
}

// A placed rule is a rule whose prefix has a place in a table, or a limit that belongs to one, without a key.
type placed struct {
	view, id uint32
	key      stored
	isNew    bool // a change adds it
}

// everyPrefix are the prefixes that packets find, of all sets, in no order. unseen, if not nil, is called with the prefixes in
// the tables whose length packets do not look for.
func (s *index) everyPrefix(unseen func(placed)) iter.Seq[placed] {
	return func(yield func(placed) bool) {
		looksFor := make([]*lengthSet, len(s.views))
		for line := range s.prefixes.allLines() {
			for place, id := range line.ids()[:min(line.used(), len(line.ids()))] {
				if id == 0 {
					continue
				}
				f := placed{id: id - 1, key: line.at(place)}
				if f.key.length == noLength {
					f.view = uint32(f.key.addr[0] >> 40) // saves a cache miss on the rule
				} else {
					f.view = s.rule(f.id).View
				}
				if looksFor[f.view] == nil {
					used := s.view(f.view).lookedFor()
					looksFor[f.view] = &used
				}
				switch {
				case looksFor[f.view][f.key.lengthOf()]:
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

// byID is everyPrefix of a view, or of allViews, in the order of their rules in memory. Reading a million rules in the
// order of the tables takes ten times as long.
func (s *index) byID(view uint32) iter.Seq[placed] {
	var list []placed
	for it := range s.everyPrefix(nil) {
		if view == allViews || view == it.view {
			list = append(list, it)
		}
	}
	slices.SortFunc(list, func(a, b placed) int { return cmp.Compare(a.id, b.id) })
	return slices.Values(list)
}

// A lengthSet has the prefix lengths in use, by the index that lengthOf returns.
type lengthSet [lengthIPv4 + 33]bool

// lookedFor are the lengths that packets look for.
func (v view) lookedFor() (used lengthSet) {
	use := &v.data.Use[atomic.LoadUint32(&v.data.Version)&1]
	for _, length := range use.List[lengthIPv4:][:use.Count4] {
		used[lengthIPv4+int(length)] = true
	}
	for _, length := range use.List[:use.Count6] {
		used[length] = true
	}
	return used
}

// findPrefix is the place of a prefix's id; nil if packets do not find the prefix.
func (s *index) findPrefix(v view, p netip.Prefix) *uint32 {
	if !p.IsValid() || !v.lookedFor()[lengthOf(p)] {
		return nil
	}
	return s.prefixes.find(v.stored(p))
}

// find is the place of a prefix's id, even if packets do not look for the prefix's length.
func (t *prefixTables) find(key stored) *uint32 {
	hash := t.hash(key)
	for n := range spillLines {
		line := t.line(key, hash, n)
		for place, id := range line.ids() {
			if id != 0 && line.at(place) == key {
				return &line.ids()[place]
			}
		}
		if line.used() <= len(line.ids()) {
			break
		}
	}
	return nil
}

// placePrefix brings a prefix into force. Packets must look for its length already. The
// error wraps ErrFull where its lines are full.
func (s *index) placePrefix(v view, p netip.Prefix, id uint32) error {
	key := v.stored(p)
	hash := s.prefixes.hash(key)
	for n := range spillLines {
		line := s.prefixes.line(key, hash, n)
		ids := line.ids()
		place := slices.Index(ids, 0)
		if place < 0 {
			line.use(len(ids) + 1)
			continue
		}
		if place < line.used() {
			s.waitSince(s.change.Removed) // packets may still compare the prefix that was here
		}
		word, bits := s.prefixes.inFilter(hash)
		atomic.OrUint64(&s.prefixes.filter[word], bits)
		line.put(place, key)
		line.use(max(line.used(), place+1))
		atomic.StoreUint32(&ids[place], id+1)
		return nil
	}
	return fmt.Errorf("add prefix %s: %w", p, ErrFull)
}

// trimLengths stops packets from looking for lengths that no prefix of a view, or of allViews, has.
func (s *index) trimLengths(only uint32) {
	have, left := make([]lengthSet, len(s.views)), 0
	for number := range have {
		if only == allViews || only == uint32(number) {
			for _, in := range s.view(uint32(number)).lookedFor() {
				if in {
					left++
				}
			}
		}
	}
	for f := range s.everyPrefix(nil) {
		if left == 0 {
			break
		}
		if length := f.key.lengthOf(); (only == allViews || only == f.view) && !have[f.view][length] {
			have[f.view][length] = true
			left--
		}
	}
	for number, lengths := range have {
		if only == allViews || only == uint32(number) {
			s.lookFor(s.view(uint32(number)), lengths)
		}
	}
}

// lookFor makes packets look for prefixes of just these lengths.
func (s *index) lookFor(in view, want lengthSet) {
	v := in.data
	if want == in.lookedFor() && v.First4&(1<<40-1) == in.first4() { // they differ if a process was killed before setFirst
		return
	}
	if v.Clearing != 0 && want != (lengthSet{}) {
		s.gather() // removes the prefixes that a killed process left
		v.Clearing = 0
	}
	step.Store("look for other lengths")
	s.waitSince(v.Retired) // packets may still use the version that is to be overwritten
	version := atomic.LoadUint32(&v.Version)&1 ^ 1
	use := &v.Use[version]
	use.Count4, use.Count6 = 0, 0
	// Packets look for the first of a list before they read its count.
	use.List[lengthIPv4], use.List[0] = noLength, noLength
	for length, used := range slices.Backward(want[:]) {
		switch {
		case used && length >= lengthIPv4:
			use.List[lengthIPv4+int(use.Count4)] = uint8(length - lengthIPv4)
			use.Count4++
		case used:
			use.List[use.Count6] = uint8(length)
			use.Count6++
		}
	}
	v.Retired = s.change.Epoch
	// While there is no first length, packets use the list.
	atomic.StoreUint64(&v.First4, v.Mix4|noKey4)
	atomic.StoreUint32(&v.First6, noLength)
	atomic.StoreUint32(&v.Version, version)
	in.setFirst()
}

// setFirst copies the longest lengths in use to where packets look first.
func (v view) setFirst() {
	d := v.data
	atomic.StoreUint32(&d.First6, uint32(d.Use[d.Version&1].List[0]))
	atomic.StoreUint64(&d.First4, d.Mix4|v.first4())
}

func (v view) first4() uint64 {
	if use := &v.data.Use[v.data.Version&1]; use.Count4 > 0 {
		return by4(int(use.List[lengthIPv4]))
	}
	return noKey4
}

// mask is a prefix length as a mask for words.
func mask(length int) (m [4]uint32) {
	var b [16]byte
	for i := range b {
		b[i] = ^byte(0xff >> min(max(length-8*i, 0), 8))
	}
	return words(netip.AddrFrom16(b))
}
