package bpf_test

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Frames are built from the inside out: ether(ipv4(..., udpHeader(...))).

// EtherTypes and protocol numbers (IANA).
const (
	typeIPv4 = 0x0800
	typeARP  = 0x0806
	typeIPv6 = 0x86dd
	tag8021Q = 0x8100
	tag8021D = 0x88a8 // 802.1ad, the outer tag of two
	typeLLDP = 0x88cc

	protoHopByHop = 0
	protoICMP     = 1
	protoTCP      = 6
	protoUDP      = 17
	protoDCCP     = 33
	protoRouting  = 43
	protoFragment = 44
	protoGRE      = 47
	protoESP      = 50
	protoAH       = 51
	protoICMPv6   = 58
	protoNone     = 59
	protoDstOpts  = 60
	protoSCTP     = 132
	protoMobility = 135
	protoUDPLite  = 136
	protoHIP      = 139
	protoShim6    = 140
)

// ether returns a frame with an EtherType, or with a length if kind is below 1536.
func ether(kind uint16, payload ...[]byte) []byte {
	frame := append(make([]byte, 0, 128), 2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2)
	return append(binary.BigEndian.AppendUint16(frame, kind), slices.Concat(payload...)...)
}

// tag returns what follows an EtherType of a VLAN tag.
func tag(id, kind uint16) []byte {
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, id), kind)
}

// An ip4 is an IPv4 header. A zero field means its default.
type ip4 struct {
	src, dst string
	proto    uint8
	tos      uint8
	fragment uint16 // flags and offset
	options  int    // bytes
}

func (h ip4) with(payload ...[]byte) []byte {
	data := slices.Concat(payload...)
	b := make([]byte, 20+h.options)
	for i := 20; i < len(b); i++ {
		b[i] = 1 // no operation
	}
	b[0], b[1], b[8], b[9] = 0x40|uint8(len(b)/4), h.tos, 64, h.proto
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(data)))
	binary.BigEndian.PutUint16(b[6:], h.fragment)
	copy(b[12:], bytesOf(h.src, "192.0.2.1"))
	copy(b[16:], bytesOf(h.dst, "10.0.0.1"))
	binary.BigEndian.PutUint16(b[10:], ^onesSum(b))
	return append(b, data...)
}

// patch returns a frame with one byte changed, for invalid headers.
func patch(frame []byte, at int, b byte) []byte {
	frame = slices.Clone(frame)
	frame[at] = b
	return frame
}

// An ip6 is an IPv6 header. A zero field means its default.
type ip6 struct {
	src, dst string
	proto    uint8
	class    uint8
	hops     uint8
}

func (h ip6) with(payload ...[]byte) []byte {
	data := slices.Concat(payload...)
	b := make([]byte, 40)
	hops := uint8(64)
	if h.hops != 0 {
		hops = h.hops
	}
	b[0], b[1] = 0x60|h.class>>4, h.class<<4
	binary.BigEndian.PutUint16(b[4:], uint16(len(data)))
	b[6], b[7] = h.proto, hops
	copy(b[8:], bytesOf(h.src, "2001:db8::1"))
	copy(b[24:], bytesOf(h.dst, "2001:db8:1::1"))
	return append(b, data...)
}

func bytesOf(address, usual string) []byte {
	if address == "" {
		address = usual
	}
	return netip.MustParseAddr(address).AsSlice()
}

// onesSum is the sum of RFC 1071: 0xffff over a header with a correct checksum.
func onesSum(b []byte) uint16 {
	sum := uint32(0)
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum>>16 != 0 {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// extension returns an IPv6 extension header of 8 + 8*more bytes.
func extension(following uint8, more int) []byte {
	b := make([]byte, 8*(more+1))
	b[0], b[1] = following, uint8(more)
	return b
}

// authentication returns an AH (RFC 4302), whose length field counts words less two.
func authentication(following uint8, words int) []byte {
	b := make([]byte, 4*words)
	b[0], b[1] = following, uint8(words-2)
	return b
}

// fragment returns an IPv6 fragment header; the offset is in units of 8 bytes.
func fragment(following uint8, offset uint16, more bool) []byte {
	b := make([]byte, 8)
	b[0] = following
	binary.BigEndian.PutUint16(b[2:], offset<<3)
	if more {
		b[3] |= 1
	}
	binary.BigEndian.PutUint32(b[4:], 0xdecafbad)
	return b
}

// ports returns the common start of TCP, UDP, SCTP, DCCP and UDP-Lite headers, and more bytes.
func ports(src, dst uint16, more int) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, src), dst)
	return append(b, make([]byte, more)...)
}

func udpHeader(src, dst uint16) []byte { return ports(src, dst, 4) }

// tcpHeader returns a header with options of the given number of bytes.
func tcpHeader(src, dst uint16, options int) []byte {
	b := ports(src, dst, 16+options)
	b[12] = uint8(20+options) / 4 << 4
	return b
}

// icmp returns the shortest message of a type.
func icmp(kind uint8) []byte { return []byte{kind, 0, 0, 0, 0, 0, 0, 0} }

func zeros(n int) []byte { return make([]byte, n) }
