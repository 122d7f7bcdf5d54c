package maps

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
)

const (
	spillLines = uint32(bpf.AbiLayoutSPILL_LINES)
	lengthIPv4 = 129                      // lengths of IPv4 are counted on from those of IPv6
	noLength   = 255                      // that no prefix has
	noKey4     = noLength<<32 | 1<<32 - 1 // matches no key, and is the same for all addresses, so its line stays in the cache
)

// words is an address as the programs hold it: in network order, whatever the machine's.
func words(a netip.Addr) (w [4]uint32) {
	if a.Is4() {
		b := a.As4()
		w[0] = binary.NativeEndian.Uint32(b[:])
		return w
	}
	b := a.As16()
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

// stored is the address of a prefix as a table has it: in network order.
func stored(p netip.Prefix) [2]uint64 { return pairs(words(p.Addr())) }

// lengthOf is the length of a prefix, which is one of its own for each of either family.
func lengthOf(p netip.Prefix) int {
	if p.Addr().Is4() {
		return lengthIPv4 + p.Bits()
	}
	return p.Bits()
}

// pairs are the words of an address two by two.
func pairs(w [4]uint32) [2]uint64 { return *(*[2]uint64)(unsafe.Pointer(&w)) }

// by4 is what makes an address the key of its prefix of that length: list4 of bpf/abi.h.
func by4(length int) uint64 { return uint64(length)<<32 | uint64(^mask(length)[0]) }

// A prefixLine is a line of one of the two tables. It holds prefixes in a few places.
type prefixLine interface {
	ids() []uint32 // of the rules, plus one; 0 for a place that is free
	prefix(place int) netip.Prefix
	find(p netip.Prefix) (place int) // -1 where it is not
	put(place int, p netip.Prefix)
	used() int // places that were ever filled, or more than there are
	use(places int)
}

type line4 struct{ *bpf.AbiPrefixes4 }

func (l line4) ids() []uint32 { return l.Id[:] }

func (l line4) prefix(place int) netip.Prefix {
	key := l.Key[place]
	return netip.PrefixFrom(address([4]uint32{uint32(key)}, 4), int(key>>32)).Masked()
}

// key4 is all there is to a prefix of IPv4.
func key4(p netip.Prefix) uint64 { return stored(p)[0] | by4(p.Bits()) }

func (l line4) find(p netip.Prefix) int {
	key := key4(p)
	for place, id := range l.Id {
		if l.Key[place] == key && id != 0 {
			return place
		}
	}
	return -1
}

func (l line4) put(place int, p netip.Prefix) { l.Key[place] = key4(p) }

func (l line4) used() int      { return int(atomic.LoadUint32(&l.Used)) }
func (l line4) use(places int) { atomic.StoreUint32(&l.Used, uint32(places)) }

type line6 struct{ *bpf.AbiPrefixes6 }

func (l line6) ids() []uint32 { return l.Id[:] }

func (l line6) prefix(place int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&l.Addr[place]))), int(l.Length[place]))
}

func (l line6) find(p netip.Prefix) int {
	addr, length := stored(p), uint8(p.Bits())
	for place, id := range l.Id {
		if l.Addr[place] == addr && l.Length[place] == length && id != 0 {
			return place
		}
	}
	return -1
}

func (l line6) put(place int, p netip.Prefix) {
	l.Addr[place] = stored(p)
	l.Length[place] = uint8(p.Bits())
}

func (l line6) used() int      { return int(l.Used) }
func (l line6) use(places int) { l.Used = uint8(places) }

// lines are all lines of both tables.
func (s *Set) allLines() iter.Seq[prefixLine] {
	return func(yield func(prefixLine) bool) {
		for i := range s.prefixes4 {
			if !yield(line4{&s.prefixes4[i]}) {
				return
			}
		}
		for i := range s.prefixes6 {
			if !yield(line6{&s.prefixes6[i]}) {
				return
			}
		}
	}
}

// hashPrefix is hash4_prefix and hash6_prefix of bpf/prefix.h.
func (s *Set) hashPrefix(p netip.Prefix) uint64 {
	m := s.hook.Multiplier
	stir := func(h uint64) uint64 { return (h ^ h>>28) * m }
	if p.Addr().Is4() {
		return stir(key4(p) * m)
	}
	addr := stored(p)
	return stir(stir(stir(addr[0]*m+uint64(p.Bits())) + addr[1]))
}

// line is one that may hold a prefix: of the spillLines from the first on, in
// the order in which packets look.
func (s *Set) line(p netip.Prefix, n uint32) prefixLine {
	number := uint32(s.hashPrefix(p)>>40) + n
	if p.Addr().Is4() {
		return line4{&s.prefixes4[number&s.hook.Prefixes4Mask]}
	}
	return line6{&s.prefixes6[number&s.hook.Prefixes6Mask]}
}

// inFilter is the word of the filter that a prefix has its two bits in, and these: in_filter of bpf/prefix.h.
func (s *Set) inFilter(p netip.Prefix) (word uint32, bits uint64) {
	h := s.hashPrefix(p)
	return uint32(h>>32) & s.hook.FilterMask, 1<<(h>>26&63) | 1<<(h>>58)
}

// refilter takes the bits of prefixes that are gone out of the filter. Each word
// has at any time those that are needed.
func (s *Set) refilter(prefixes []placed) {
	fresh := make([]uint64, len(s.filter))
	for _, at := range prefixes {
		word, bits := s.inFilter(at.prefix)
		fresh[word] |= bits
	}
	for i, word := range fresh {
		if s.filter[i] != word {
			atomic.StoreUint64(&s.filter[i], word)
		}
	}
}

// allPrefixes are the prefixes in force with the ids of their rules, in no
// order: those that packets find, so none of a length that they do not look for.
func (s *Set) allPrefixes() iter.Seq2[netip.Prefix, uint32] {
	return func(yield func(netip.Prefix, uint32) bool) {
		looksFor := s.lookedFor()
		for line := range s.allLines() {
			for place, id := range line.ids()[:min(line.used(), len(line.ids()))] {
				if id == 0 {
					continue
				}
				if p := line.prefix(place); looksFor[lengthOf(p)] && !yield(p, id-1) {
					return
				}
			}
		}
	}
}

// A placed rule is one whose prefix has a place in a table.
type placed struct {
	id     uint32
	prefix netip.Prefix
}

// byID are the prefixes in force in the order of their rules in memory: to read
// a million of them in that of the tables takes ten times as long.
func (s *Set) byID() []placed {
	prefixes, n := make([]netip.Prefix, s.Size().Rules), 0
	for p, id := range s.allPrefixes() {
		prefixes[id] = p
		n++
	}
	list := make([]placed, 0, n)
	for id, p := range prefixes {
		if p.IsValid() {
			list = append(list, placed{uint32(id), p})
		}
	}
	return list
}

// lengthSet says of each prefix length, as lengthOf gives it, whether it is in use.
type lengthSet [lengthIPv4 + 33]bool

// lengthCounts is how many prefixes there are of each length, as lengthOf gives it.
type lengthCounts [lengthIPv4 + 33]uint32

// lookedFor are the lengths that packets look for.
func (s *Set) lookedFor() (used lengthSet) {
	l := &s.lengths[0]
	use := &l.Use[atomic.LoadUint32(&l.Version)&1]
	for _, by := range use.List4[:use.Count4] {
		used[lengthIPv4+by>>32] = true
	}
	for _, by := range use.List6[:use.Count6] {
		used[by.Length] = true
	}
	return used
}

// findPrefix is the place of the id of a prefix; nil where it is not in force.
func (s *Set) findPrefix(p netip.Prefix) *uint32 {
	looksFor := s.lookedFor()
	return s.findAmong(p, &looksFor)
}

// findAmong is findPrefix where it is known which lengths packets look for.
func (s *Set) findAmong(p netip.Prefix, looksFor *lengthSet) *uint32 {
	if !p.IsValid() || !looksFor[lengthOf(p)] {
		return nil
	}
	for n := range spillLines {
		line := s.line(p, n)
		if place := line.find(p); place >= 0 {
			return &line.ids()[place]
		}
		if line.used() <= len(line.ids()) {
			break
		}
	}
	return nil
}

// addPrefix brings a prefix into force. The error wraps ErrFull where its lines are full.
func (s *Set) addPrefix(p netip.Prefix, id uint32) error {
	c := s.gather()
	length := lengthOf(p)
	if c.lengths[length]++; c.lengths[length] == 1 {
		s.useLengths()
	}
	err := s.placePrefix(p, id)
	if err != nil {
		c.lengths[length]--
	}
	return err
}

// placePrefix gives a prefix a place in its table.
func (s *Set) placePrefix(p netip.Prefix, id uint32) error {
	for n := range spillLines {
		line := s.line(p, n)
		ids := line.ids()
		place := slices.Index(ids, 0)
		if place < 0 {
			line.use(len(ids) + 1)
			continue
		}
		if place < line.used() {
			s.waitSince(s.lengths[0].Removed) // packets may have seen the prefix that was here before
		}
		word, bits := s.inFilter(p)
		atomic.OrUint64(&s.filter[word], bits)
		line.put(place, p)
		line.use(max(line.used(), place+1))
		atomic.StoreUint32(&ids[place], id+1)
		return nil
	}
	return fmt.Errorf("add prefix %s: %w", p, ErrFull)
}

// useLengths makes packets look for prefixes of just the lengths that there are.
func (s *Set) useLengths() {
	var want lengthSet
	for length, n := range s.gather().lengths {
		want[length] = n > 0
	}
	l := &s.lengths[0]
	if want == s.lookedFor() && l.First4 == l.Use[l.Version&1].List4[0] {
		return
	}
	s.waitSince(l.Retired) // packets may still go by the version before the one in force
	version := atomic.LoadUint32(&l.Version)&1 ^ 1
	use := &l.Use[version]
	use.Count4, use.Count6 = 0, 0
	// The first of a list is looked for before it is counted.
	use.List4[0] = noKey4
	use.List6[0] = bpf.AbiLength6{Length: noLength}
	for length, in := range slices.Backward(want[:]) {
		switch {
		case in && length >= lengthIPv4:
			bits := length - lengthIPv4
			use.List4[use.Count4] = by4(bits)
			use.Count4++
		case in:
			use.List6[use.Count6] = bpf.AbiLength6{Mask: pairs(mask(length)), Length: uint64(length)}
			use.Count6++
		}
	}
	l.Retired = l.Epoch
	// The switch decides; for as long as there is no first one, packets go by the list.
	atomic.StoreUint64(&l.First4, noKey4)
	atomic.StoreUint32(&l.Version, version)
	atomic.StoreUint64(&l.First4, use.List4[0])
}

// mask is a prefix length as a mask for words.
func mask(length int) (m [4]uint32) {
	var b [16]byte
	for i := range b {
		b[i] = ^byte(0xff >> min(max(length-8*i, 0), 8))
	}
	return words(netip.AddrFrom16(b))
}
