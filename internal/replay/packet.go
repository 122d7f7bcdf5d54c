package replay

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
)

const (
	typeIPv4 = unix.ETH_P_IP
	typeIPv6 = unix.ETH_P_IPV6
	typeVLAN = unix.ETH_P_8021Q
	typeQinQ = unix.ETH_P_8021AD

	protoHIP   = 139 // IANA; the package unix lacks both
	protoShim6 = 140
)

const (
	ipv4Header, ipv6Header = 20, 40
	// extensions is the maximum number of IPv6 extension headers that are skipped.
	extensions = 256
	// discoveryBytes is the maximum length of neighbour discovery with its IP header: the minimum MTU of IPv6.
	discoveryBytes = 1280
)

// A packet has the fields that rules need. It is parsed exactly as bpf/packet.h does,
// also if its headers are wrong; a general decoder would reject those.
type packet struct {
	ip   bool // with complete addresses
	nd   bool // genuine neighbour discovery: never limited
	ect  bool // ECN-capable
	dscp uint8
	syn  bool // it opens a TCP connection
	flow maps.Flow
}

func read(t *trace.Packet) (p packet) {
	kind, b := t.EtherType, t.Network
	for kind == typeVLAN || kind == typeQinQ {
		if len(b) < 4 {
			return p
		}
		kind, b = binary.BigEndian.Uint16(b[2:]), b[4:]
	}
	switch {
	case kind == typeIPv4 && len(b) >= ipv4Header && b[0]>>4 == 4:
		p.readIPv4(b)
	case kind == typeIPv6 && len(b) >= ipv6Header && b[0]>>4 == 6:
		p.readIPv6(b)
	}
	return p
}

func (p *packet) readIPv4(b []byte) {
	p.ip, p.ect, p.dscp = true, b[1]&3 != 0, b[1]>>2
	p.flow = maps.Flow{Src: netip.AddrFrom4([4]byte(b[12:])), Dst: netip.AddrFrom4([4]byte(b[16:])), Proto: b[9]}
	header := int(b[0]&15) * 4
	if header >= ipv4Header && binary.BigEndian.Uint16(b[6:])&0x1fff == 0 {
		p.readPorts(b, header)
	}
}

func (p *packet) readIPv6(b []byte) {
	p.ip, p.ect, p.dscp = true, b[1]>>4&3 != 0, (b[0]<<4|b[1]>>4)>>2
	p.flow = maps.Flow{Src: netip.AddrFrom16([16]byte(b[8:])), Dst: netip.AddrFrom16([16]byte(b[24:])), Proto: b[6]}
	at := ipv6Header
	for i := 0; i < extensions && isExtension(p.flow.Proto) && at+4 <= len(b); i++ {
		ext := b[at:]
		fragment := p.flow.Proto == unix.IPPROTO_FRAGMENT
		switch p.flow.Proto {
		case unix.IPPROTO_FRAGMENT:
			at += 8
		case unix.IPPROTO_AH:
			at += (int(ext[1]) + 2) * 4
		default:
			at += (int(ext[1]) + 1) * 8
		}
		p.flow.Proto = ext[0]
		if fragment && (ext[2] != 0 || ext[3]&0xf8 != 0) {
			return // a later fragment has no transport header
		}
	}
	if isExtension(p.flow.Proto) {
		return
	}
	p.nd = isDiscovery(p.flow.Src, p.flow.Dst, b)
	p.readPorts(b, at)
}

// isDiscovery reports whether an IPv6 packet is neighbour discovery (RFC 4861)
// between addresses that routers do not forward.
func isDiscovery(src, dst netip.Addr, b []byte) bool {
	const message = ipv6Header
	if b[6] != unix.IPPROTO_ICMPV6 || b[7] != 255 || len(b) < message+4 || b[message+1] != 0 || src.IsMulticast() ||
		len(b) > discoveryBytes || message+int(binary.BigEndian.Uint16(b[4:])) > discoveryBytes {
		return false
	}
	fromLink, unspecified := src.IsLinkLocalUnicast(), src.IsUnspecified()
	var group netip.Prefix
	switch kind := b[message]; {
	case kind == 133: // router solicitation
		group = allRouters
	case kind == 134 && fromLink: // router advertisement
		group = allNodes
	case kind == 135: // neighbour solicitation
		group = solicitedNodes
	case kind == 136 && !unspecified: // neighbour advertisement
		group = allNodes
	case kind == 137 && fromLink: // redirect: never multicast
	default:
		return false
	}
	if dst.IsMulticast() {
		return group.Contains(dst)
	}
	return fromLink || dst.IsLinkLocalUnicast() && !unspecified
}

// Multicast addresses of RFC 4861.
var (
	allNodes       = netip.MustParsePrefix("ff02::1/128")
	allRouters     = netip.MustParsePrefix("ff02::2/128")
	solicitedNodes = netip.MustParsePrefix("ff02::1:ff00:0/104")
)

func isExtension(proto uint8) bool {
	switch proto {
	case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS, unix.IPPROTO_FRAGMENT, unix.IPPROTO_AH,
		unix.IPPROTO_MH, protoHIP, protoShim6:
		return true
	}
	return false
}

func (p *packet) readPorts(b []byte, at int) {
	p.syn = p.flow.Proto == unix.IPPROTO_TCP && (at+13 >= len(b) || b[at+13]&0x12 == 2)
	switch p.flow.Proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_DCCP, unix.IPPROTO_UDPLITE:
		if at+4 <= len(b) {
			p.flow.SrcPort, p.flow.DstPort = binary.BigEndian.Uint16(b[at:]), binary.BigEndian.Uint16(b[at+2:])
		}
	}
}
