package replay

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

// everything is a rule for all of IPv4 and for a trace without addresses.
func everything(rate policy.Rate, capacity uint64) policy.Rule {
	return policy.Rule{Prefix: prefix("0.0.0.0/0"), Rate: rate, Capacity: capacity}
}

// bothFamilies are rules for all IPv4 and all IPv6 packets.
func bothFamilies(rate policy.Rate, capacity uint64, each policy.EachKind) Limits {
	four, six := everything(rate, capacity), everything(rate, capacity)
	six.Prefix = prefix("::/0")
	four.Each.Kind, six.Each.Kind = each, each
	return Limits{Rules: []policy.Rule{four, six}}
}

// ip4 is an IPv4 packet with a plain header.
func ip4(src, dst string, proto, tos byte, payload ...byte) []byte {
	b := make([]byte, 20)
	b[0], b[1], b[8], b[9] = 0x45, tos, 64, proto
	binary.BigEndian.PutUint16(b[2:], uint16(20+len(payload)))
	copy(b[12:], netip.MustParseAddr(src).AsSlice())
	copy(b[16:], netip.MustParseAddr(dst).AsSlice())
	return append(b, payload...)
}

// ip6 is an IPv6 packet without extensions but those in the payload.
func ip6(src, dst string, proto, class byte, payload ...byte) []byte {
	b := make([]byte, 40)
	b[0], b[1], b[6], b[7] = 0x60|class>>4, class<<4, proto, 255
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	copy(b[8:], netip.MustParseAddr(src).AsSlice())
	copy(b[24:], netip.MustParseAddr(dst).AsSlice())
	return append(b, payload...)
}

func ports(src, dst uint16, more int) []byte {
	b := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, src), dst)
	return append(b, make([]byte, more)...)
}

// at is a completely captured Ethernet packet of a trace.
func at(now uint64, kind uint16, network []byte) *trace.Packet {
	return &trace.Packet{Time: now, Bytes: uint64(14 + len(network)), EtherType: kind, Network: network}
}

// tagged adds VLAN tags in front of a packet, and returns the EtherType of the first one.
func tagged(kind uint16, network []byte, tags ...uint16) (uint16, []byte) {
	for _, tag := range slices.Backward(tags) {
		front := binary.BigEndian.AppendUint16([]byte{0, 7}, kind)
		kind, network = tag, append(front, network...)
	}
	return kind, network
}
