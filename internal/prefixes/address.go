package prefixes

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Words are an address as the programs hold it, in network order.
func Words(a netip.Addr) (w [4]uint32) {
	var b [16]byte
	copy(b[:], a.AsSlice())
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

// Address is the inverse of Words.
func Address(w [4]uint32, family uint8) netip.Addr {
	var b [16]byte
	for i, v := range w {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	if family == 4 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b)
}

const markLength = uint8(bpf.AbiLayoutMARK_LENGTH)

// pairs are the words of an address two by two.
func pairs(w [4]uint32) [2]uint64 { return *(*[2]uint64)(unsafe.Pointer(&w)) }

// mask is a prefix length as a mask for words.
func mask(length int) (m [4]uint32) {
	var b [16]byte
	for i := range b {
		b[i] = ^byte(0xff >> min(max(length-8*i, 0), 8))
	}
	return Words(netip.AddrFrom16(b))
}

// by4 is by4 of bpf/prefix.h: it turns an address into the key of its prefix of that length.
func by4(length int) uint64 { return uint64(length)<<32 | uint64(^mask(length)[0]) }

// A Key is a prefix of a view as its table holds it.
type Key struct {
	addr   [2]uint64 // only the first for IPv4
	length uint8     // of IPv6; noLength for IPv4
}

// Key is the key of a prefix of a view.
func (t *Tables) Key(view uint32, p netip.Prefix) Key {
	v, w := &t.Views[view], Words(p.Addr())
	if p.Addr().Is4() {
		return Key{[2]uint64{v.Mix4 | by4(p.Bits()) | uint64(w[0])}, noLength}
	}
	a := pairs(w)
	length := uint8(p.Bits())
	if policy.IsMark(p) {
		length = markLength
	}
	return Key{[2]uint64{a[0] ^ v.Mix6[0], a[1] ^ v.Mix6[1]}, length}
}

// Prefix is the inverse of Key.
func (t *Tables) Prefix(view uint32, k Key) netip.Prefix {
	if key := k.addr[0]; k.length == noLength {
		return netip.PrefixFrom(Address([4]uint32{uint32(key)}, 4), int(key>>32&noLength)).Masked()
	}
	mix := t.Views[view].Mix6
	a := [2]uint64{k.addr[0] ^ mix[0], k.addr[1] ^ mix[1]}
	return netip.PrefixFrom(netip.AddrFrom16(*(*[16]byte)(unsafe.Pointer(&a))), min(int(k.length), 128))
}

// lengthOf is LengthOf for a key.
func (k Key) lengthOf() int {
	if k.length == noLength {
		return lengthIPv4 + int(k.addr[0]>>32&noLength)
	}
	if k.length == markLength {
		return lengthMark
	}
	return int(k.length)
}
