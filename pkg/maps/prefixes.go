package maps

import (
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
)

const (
	spillLines  = uint32(bpf.AbiLayoutSPILL_LINES)
	lengthIPv4  = uint8(bpf.AbiLayoutLENGTH_IPV4)
	noLength    = 255 // that no prefix has
	lengthsList = uint32(bpf.AbiLayoutLENGTHS_LIST)
	fibonacci   = 0x9e3779b97f4a7c15 // FIBONACCI of bpf/prefix.h
)

// words is an address as the programs hold it: in network order, whatever the machine's.
func words(a netip.Addr) (w [4]uint32) {
	b := a.AsSlice()
	for i := range len(b) / 4 {
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

// stored is a prefix as its table holds it.
func stored(p netip.Prefix) (addr [4]uint32, length uint8) {
	length = uint8(p.Bits())
	if p.Addr().Is4() {
		length += lengthIPv4
	}
	return words(p.Addr()), length
}

// hashPrefix is hash_prefix of bpf/prefix.h.
func hashPrefix(addr [4]uint32, length uint8) uint32 {
	h := uint64(addr[0]+uint32(length)) * fibonacci
	if length < lengthIPv4 {
		for _, w := range addr[1:] {
			h = (h>>32 + uint64(w)) * fibonacci
		}
	}
	return uint32(h >> 32)
}

// prefixAt is what place i of a line holds, and its rule's id plus one: 0 where it is free.
func prefixAt(line *bpf.AbiPrefixes, i int) (netip.Prefix, uint32) {
	id := atomic.LoadUint32(&line.Id[i])
	if line.Length[i] >= lengthIPv4 {
		return netip.PrefixFrom(address(line.Addr[i], 4), int(line.Length[i]-lengthIPv4)), id
	}
	return netip.PrefixFrom(address(line.Addr[i], 6), int(line.Length[i])), id
}

// allPrefixes are the prefixes in force with the ids of their rules, in no
// order: those that packets find, so none of a length that they do not look for.
func (s *Set) allPrefixes() iter.Seq2[netip.Prefix, uint32] {
	return func(yield func(netip.Prefix, uint32) bool) {
		for l := range s.prefixes {
			for i := range s.prefixes[l].Id {
				if p, id := prefixAt(&s.prefixes[l], i); id != 0 && s.looksFor(p) && !yield(p, id-1) {
					return
				}
			}
		}
	}
}

// looksFor reports whether packets look for prefixes of that length.
func (s *Set) looksFor(p netip.Prefix) bool {
	_, length := stored(p)
	l := &s.lengths[0]
	return slices.ContainsFunc(listed(l, atomic.LoadUint32(&l.Version)&1, p.Addr().Is6()), func(in bpf.AbiLength) bool {
		return in.Length == uint32(length)
	})
}

// linesOf are the lines that may hold a prefix, in the order in which packets look.
func (s *Set) linesOf(p netip.Prefix) iter.Seq[*bpf.AbiPrefixes] {
	number := hashPrefix(stored(p))
	return func(yield func(*bpf.AbiPrefixes) bool) {
		for n := range spillLines {
			if !yield(&s.prefixes[(number+n)&s.hook.PrefixMask]) {
				return
			}
		}
	}
}

func firsts[A, B any](pairs iter.Seq2[A, B]) iter.Seq[A] {
	return func(yield func(A) bool) {
		for a := range pairs {
			if !yield(a) {
				return
			}
		}
	}
}

// findPrefix is the place of the id of a prefix; nil where it is not in force.
func (s *Set) findPrefix(p netip.Prefix) *uint32 {
	for line := range s.linesOf(p) {
		for i := range line.Id {
			if found, id := prefixAt(line, i); id != 0 && found == p && s.looksFor(p) {
				return &line.Id[i]
			}
		}
		if line.Spill == 0 {
			break
		}
	}
	return nil
}

// addPrefix brings a prefix into force. The error wraps ErrFull where its lines are full.
func (s *Set) addPrefix(p netip.Prefix, id uint32) error {
	s.useLengths(func(yield func(netip.Prefix) bool) {
		firsts(s.allPrefixes())(yield)
		yield(p)
	})
	for line := range s.linesOf(p) {
		for i := range line.Id {
			if atomic.LoadUint32(&line.Id[i]) != 0 {
				continue
			}
			if line.Length[i] != 0 || line.Addr[i] != [4]uint32{} {
				waitForPackets() // which may have seen the prefix that was here before
			}
			line.Addr[i], line.Length[i] = stored(p)
			atomic.StoreUint32(&line.Id[i], id+1)
			return nil
		}
		line.Spill = 1
	}
	return fmt.Errorf("add prefix %s: %w", p, ErrFull)
}

// useLengths makes packets look for prefixes of just these lengths.
func (s *Set) useLengths(all iter.Seq[netip.Prefix]) {
	var used [lengthIPv4 + 33]bool
	for p := range all {
		_, length := stored(p)
		used[length] = true
	}
	l := &s.lengths[0]
	now := atomic.LoadUint32(&l.Version) & 1
	next := now ^ 1
	var want [2][]bpf.AbiLength
	for length, in := range slices.Backward(used[:]) {
		switch {
		case in && length >= int(lengthIPv4):
			want[0] = append(want[0], bpf.AbiLength{Mask: mask(length - int(lengthIPv4)), Length: uint32(length)})
		case in:
			want[1] = append(want[1], bpf.AbiLength{Mask: mask(length), Length: uint32(length)})
		}
	}
	if slices.Equal(want[0], listed(l, now, false)) && slices.Equal(want[1], listed(l, now, true)) {
		return
	}
	waitForPackets() // which may still go by the version before the one in force
	for ipv6, lengths := range want {
		list := 2*next + uint32(ipv6)
		l.Count[list] = uint32(len(lengths))
		room := l.List[list*lengthsList:][:lengthsList]
		room[0].Length = noLength // which is looked for before they are counted
		copy(room, lengths)
	}
	atomic.StoreUint32(&l.Version, next)
}

// listed are the lengths of one family in a version.
func listed(l *bpf.AbiLengths, version uint32, ipv6 bool) []bpf.AbiLength {
	list := 2 * version
	if ipv6 {
		list++
	}
	return l.List[list*lengthsList:][:l.Count[list]]
}

// mask is a prefix length as a mask for words.
func mask(length int) (m [4]uint32) {
	var b [16]byte
	for i := range b {
		b[i] = ^byte(0xff >> min(max(length-8*i, 0), 8))
	}
	return words(netip.AddrFrom16(b))
}
