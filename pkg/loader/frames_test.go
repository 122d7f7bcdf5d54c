package loader

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/maps"
)

const (
	receiverPort = 5001
	fullFrame    = 1514
	headersIPv4  = 14 + 20 + 8
	headersIPv6  = 14 + 40 + 8
)

// near6 is the network of the near addresses of IPv6.
var near6 = netip.MustParsePrefix("2001:db8:f::/64")

var receiverMAC = net.HardwareAddr{0x02, 0, 0, 0, 0, 2}

// datagram is a frame of a flow with that many bytes.
func datagram(f maps.Flow, size int) []byte {
	b := make([]byte, size)
	copy(b, receiverMAC)
	copy(b[6:], []byte{0x02, 0, 0, 0, 0, 1})
	ip, udp := b[14:], b[headersIPv4-8:]
	var pseudo uint32 // RFC 8200, 8.1; the checksum of IPv4's UDP may be left out
	if f.Dst.Is4() {
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IP)
		ip[0], ip[8], ip[9] = 0x45, 64, f.Proto
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
		copy(ip[12:], f.Src.AsSlice())
		copy(ip[16:], f.Dst.AsSlice())
		binary.BigEndian.PutUint16(ip[10:], onesComplement(0, ip[:20]))
	} else {
		udp = b[headersIPv6-8:]
		binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IPV6)
		ip[0], ip[6], ip[7] = 0x60, f.Proto, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(len(udp)))
		copy(ip[8:], f.Src.AsSlice())
		copy(ip[24:], f.Dst.AsSlice())
		pseudo = uint32(f.Proto) + uint32(len(udp))
	}
	binary.BigEndian.PutUint16(udp, f.SrcPort)
	binary.BigEndian.PutUint16(udp[2:], f.DstPort)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	if pseudo != 0 {
		binary.BigEndian.PutUint16(udp[6:], onesComplement(pseudo, b[14+8:headersIPv6]))
	}
	return b
}

// onesComplement is the checksum of RFC 1071 over an even number of bytes.
func onesComplement(sum uint32, b []byte) uint16 {
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
