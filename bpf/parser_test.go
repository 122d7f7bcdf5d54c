package bpf_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The programs read any packet as gopacket reads it: whether it is matched,
// whose it is and how many bytes it counts.
//
// gopacket refuses packets that contradict themselves; the programs have no use
// for most of what these contradict themselves about. So it is given headers
// one at a time, with what must not matter made right first: the lengths of IP
// and of UDP, options of IPv4, where the data of TCP begins, and the end of a
// header that is cut off, which is filled up with zeros. What must hold of a
// packet that it still refuses is said where that is (a "refusal").

// A reading is what a packet says of itself.
type reading struct {
	matched bool // IP
	flow    maps.Flow
	exempt  bool // neighbour discovery
}

// readPacket reads a packet with or without a link header, after which there may be tags. Without one, what the skb
// says it is (its EtherType) are bytes 12 and 13 all the same: see TestWithoutLinkHeader.
func readPacket(packet []byte, linkHeader bool) reading {
	var eth layers.Ethernet
	if eth.DecodeFromBytes(packet, gopacket.NilDecodeFeedback) != nil {
		return reading{} // refusal: it is too short for an EtherType
	}
	kind, rest := eth.EthernetType, packet
	if linkHeader {
		rest = packet[14:]
		for kind == layers.EthernetTypeDot1Q || kind == layers.EthernetTypeQinQ {
			var tag layers.Dot1Q
			if tag.DecodeFromBytes(rest, gopacket.NilDecodeFeedback) != nil {
				return reading{} // refusal: half a tag says nothing
			}
			kind, rest = tag.Type, rest[4:]
		}
	}
	switch kind {
	case layers.EthernetTypeIPv4:
		return readIPv4(rest)
	case layers.EthernetTypeIPv6:
		return readIPv6(rest)
	}
	return reading{}
}

func readIPv4(packet []byte) reading {
	if len(packet) < 20 || packet[0]>>4 != 4 {
		return reading{} // refusal: no addresses, or another protocol's
	}
	packet = slices.Clone(packet)
	packet[2], packet[3] = 0, 0 // as long as it is
	for i := 20; i < min(4*int(packet[0]&15), len(packet)); i++ {
		packet[i] = 1 // no operation
	}
	var ip layers.IPv4
	whole := ip.DecodeFromBytes(packet, gopacket.NilDecodeFeedback) == nil
	if !whole {
		// Refusal: the header says that it is shorter than it is, or ends beyond
		// the packet. It has addresses and a protocol, and nothing behind it.
		packet[0] = 0x45
		ip.DecodeFromBytes(packet, gopacket.NilDecodeFeedback)
	}
	r := reading{matched: true, flow: flowOf(ip.SrcIP, ip.DstIP, ip.Protocol)}
	if whole && ip.FragOffset == 0 {
		r.flow.SrcPort, r.flow.DstPort = readPorts(ip.Protocol, ip.Payload)
	}
	return r
}

func readIPv6(packet []byte) reading {
	var ip layers.IPv6
	if len(packet) < 40 || packet[0]>>4 != 6 {
		return reading{} // refusal: no addresses, or another protocol's
	}
	// Refusal: of a length that is wrong or a jumbogram it complains when it has read all else.
	_ = ip.DecodeFromBytes(slices.Clone(packet[:40]), gopacket.NilDecodeFeedback)
	proto, rest, end := walkExtensions(ip.NextHeader, packet[40:])
	r := reading{matched: true, flow: flowOf(ip.SrcIP, ip.DstIP, proto)}
	if end {
		return r
	}
	var icmp layers.ICMPv6
	if ip.NextHeader == layers.IPProtocolICMPv6 && ip.HopLimit == 255 && icmp.DecodeFromBytes(rest, gopacket.NilDecodeFeedback) == nil {
		r.exempt = len(packet) <= 1280 && ip.Length <= 1240 && icmp.TypeCode.Code() == 0 &&
			betweenNeighbours(icmp.TypeCode.Type(), r.flow.Src, r.flow.Dst)
	}
	r.flow.SrcPort, r.flow.DstPort = readPorts(proto, rest)
	return r
}

// betweenNeighbours reports whether a message of neighbour discovery may go between two addresses, by sections 4.1 to
// 4.5 of RFC 4861, and goes no further than the link.
func betweenNeighbours(kind uint8, src, dst netip.Addr) bool {
	from := map[uint8]func() bool{
		layers.ICMPv6TypeRouterSolicitation:    func() bool { return !src.IsMulticast() },
		layers.ICMPv6TypeRouterAdvertisement:   src.IsLinkLocalUnicast,
		layers.ICMPv6TypeNeighborSolicitation:  func() bool { return !src.IsMulticast() },
		layers.ICMPv6TypeNeighborAdvertisement: func() bool { return !src.IsMulticast() && !src.IsUnspecified() },
		layers.ICMPv6TypeRedirect:              src.IsLinkLocalUnicast,
	}[kind]
	if from == nil || !from() {
		return false
	}
	if dst.IsMulticast() {
		return map[uint8]netip.Prefix{
			layers.ICMPv6TypeRouterSolicitation:    prefix("ff02::2/128"),
			layers.ICMPv6TypeRouterAdvertisement:   prefix("ff02::1/128"),
			layers.ICMPv6TypeNeighborSolicitation:  prefix("ff02::1:ff00:0/104"),
			layers.ICMPv6TypeNeighborAdvertisement: prefix("ff02::1/128"),
		}[kind].Contains(dst)
	}
	return !src.IsUnspecified() && (src.IsLinkLocalUnicast() || dst.IsLinkLocalUnicast())
}

// walkExtensions steps over extension headers. At the end of what can be read is a later
// fragment, or a header of which four bytes are missing: that one then is the protocol.
func walkExtensions(proto layers.IPProtocol, rest []byte) (_ layers.IPProtocol, behind []byte, end bool) {
	for isExtension(proto) && len(rest) >= 4 {
		var length int
		switch proto {
		case layers.IPProtocolIPv6Fragment:
			var h layers.IPv6Fragment
			_ = h.DecodeFromBytes(filled(rest, 8), gopacket.NilDecodeFeedback)
			proto, length = h.NextHeader, 8
			if h.FragmentOffset > 0 {
				return proto, nil, true
			}
		case layers.IPProtocolAH:
			var h layers.IPSecAH
			if h.DecodeFromBytes(filled(rest, 4*(255+2)), gopacket.NilDecodeFeedback) != nil {
				// Refusal: shorter than its own fields. It is as long as it says, or it could hide what follows.
				h.ActualLength, h.NextHeader = 8, layers.IPProtocol(rest[0])
			}
			proto, length = h.NextHeader, h.ActualLength
		default:
			var h layers.IPv6ExtensionSkipper
			_ = h.DecodeFromBytes(filled(rest, 8*(255+1)), gopacket.NilDecodeFeedback)
			proto, length = h.NextHeader, len(h.Contents)
		}
		rest = rest[min(length, len(rest)):]
	}
	return proto, rest, isExtension(proto)
}

func isExtension(proto layers.IPProtocol) bool {
	return slices.Contains([]layers.IPProtocol{
		layers.IPProtocolIPv6HopByHop, layers.IPProtocolIPv6Routing, layers.IPProtocolIPv6Fragment,
		layers.IPProtocolAH, layers.IPProtocolIPv6Destination, protoMobility, protoHIP, protoShim6,
	}, proto)
}

// readPorts are those of a transport header, of which four bytes must be there.
func readPorts(proto layers.IPProtocol, header []byte) (src, dst uint16) {
	if len(header) < 4 {
		return 0, 0
	}
	header = filled(header, 20)
	feedback := gopacket.NilDecodeFeedback
	switch proto {
	case layers.IPProtocolTCP:
		var h layers.TCP
		header[12] = 0x50
		_ = h.DecodeFromBytes(header, feedback)
		return uint16(h.SrcPort), uint16(h.DstPort)
	case layers.IPProtocolUDP, protoDCCP: // which gopacket does not know; RFC 4340, 5.1
		var h layers.UDP
		header[4], header[5] = 0, 0
		_ = h.DecodeFromBytes(header, feedback)
		return uint16(h.SrcPort), uint16(h.DstPort)
	case layers.IPProtocolSCTP:
		var h layers.SCTP
		_ = h.DecodeFromBytes(header, feedback)
		return uint16(h.SrcPort), uint16(h.DstPort)
	case layers.IPProtocolUDPLite:
		h := gopacket.NewPacket(header, layers.LayerTypeUDPLite, gopacket.NoCopy).Layer(layers.LayerTypeUDPLite).(*layers.UDPLite)
		return uint16(h.SrcPort), uint16(h.DstPort)
	}
	return 0, 0
}

// filled is a copy with zeros behind it, if need be, up to a length.
func filled(b []byte, length int) []byte {
	return append(slices.Clone(b), make([]byte, max(0, length-len(b)))...)
}

func flowOf(src, dst []byte, proto layers.IPProtocol) maps.Flow {
	from, _ := netip.AddrFromSlice(src)
	to, _ := netip.AddrFromSlice(dst)
	return maps.Flow{Src: from, Dst: to, Proto: uint8(proto)}
}

// readWhole is what gopacket says when it goes through a frame on its own, as
// it came, and how long the headers are. It has an answer only for frames that
// it has nothing against, and whose transport it knows.
func readWhole(frame []byte) (r reading, headers int, ok bool) {
	packet := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.DecodeOptions{NoCopy: true, Lazy: true})
	raw := false // gopacket's own: IPv4 in the type 0xffff
	for _, layer := range packet.Layers() {
		headers += len(layer.LayerContents())
		switch l := layer.(type) {
		case *layers.Ethernet:
			raw = l.EthernetType == layers.EthernetTypeRaw
		case *layers.Dot1Q:
			raw = l.Type == layers.EthernetTypeRaw
		case *layers.IPv4:
			if r.matched || l.Version != 4 || raw {
				return r, 0, false
			}
			r = reading{matched: true, flow: flowOf(l.SrcIP, l.DstIP, l.Protocol)}
		case *layers.IPv6:
			if r.matched || l.Version != 6 {
				return r, 0, false
			}
			r = reading{matched: true, flow: flowOf(l.SrcIP, l.DstIP, l.NextHeader)}
		case *layers.IPv6HopByHop:
			r.flow.Proto = uint8(l.NextHeader)
		case *layers.IPv6Routing:
			r.flow.Proto = uint8(l.NextHeader)
		case *layers.IPv6Destination:
			r.flow.Proto = uint8(l.NextHeader)
		case *layers.TCP, *layers.UDP, *layers.SCTP, *layers.UDPLite:
			if len(layer.LayerContents()) == 0 {
				return r, 0, false // it is refused
			}
			src, dst := l.(gopacket.TransportLayer).TransportFlow().Endpoints()
			r.flow.SrcPort, r.flow.DstPort = binary.BigEndian.Uint16(src.Raw()), binary.BigEndian.Uint16(dst.Raw())
			return r, headers, r.matched
		default:
			return r, 0, false
		}
	}
	return r, 0, false
}

// A reader is a hook that limits everything, and says whose packets it saw.
type reader struct {
	*rig
	hook    bpf.AbiHook
	each    policy.EachKind
	plain   *ebpf.Program
	short   *ebpf.Program // makes packets as short as they are meant to be
	tagged  *ebpf.Program // and puts a tag into the metadata
	entries map[bool]maps.Entry
	now     uint64
}

// readers are hooks of both directions, that match either side, with and
// without link headers, and share by flow and by host.
func readers(tb testing.TB) (all []*reader) {
	for _, l2 := range []uint8{14, 0} {
		for side := range uint8(4) {
			hook := egress()
			hook.L2Bytes, hook.Ingress, hook.MatchSrc = l2, side&1, side>>1
			for _, each := range []policy.EachKind{policy.EachFlow, policy.EachHost} {
				r := &reader{rig: newRig(tb, maps.Size{Rules: 2, Buckets: 16}, hook), hook: hook, each: each, entries: map[bool]maps.Entry{}}
				for is4, everything := range map[bool]string{true: "0.0.0.0/0", false: "::/0"} {
					rule := wide(everything, algorithms[side&1])
					rule.Each.Kind = each
					r.entries[is4] = r.put(rule, 0)
				}
				r.plain = r.program()
				r.short = cutter(tb, r.plain)
				r.tagged = pusher(tb, r.short, tag8021Q)
				all = append(all, r)
			}
		}
	}
	return all
}

// A specimen is a packet with what is in no byte of it.
type specimen struct {
	frame   []byte
	tagged  bool   // in the metadata, too
	segment uint16 // it stands for segments of so many bytes
}

// sees runs one packet through and compares what was matched, charged and counted.
func (r *reader) sees(s specimen) {
	r.Helper()
	packet := s.frame
	if r.hook.L2Bytes == 0 {
		if packet = slices.Clone(packet[14:]); len(packet) < 14 {
			return
		}
		switch packet[0] >> 4 {
		case 4:
			packet[12], packet[13] = typeIPv4>>8, typeIPv4&255
		case 6:
			packet[12], packet[13] = typeIPv6>>8, typeIPv6&255
		}
	}
	want := readPacket(packet, r.hook.L2Bytes > 0)
	size, count := uint64(len(packet)), 1
	r.now += 1e9
	// A test run wants a whole network header.
	program, data, m := r.short, filled(packet, 54), meta{now: r.now, cut: uint32(len(packet))}
	if r.hook.L2Bytes > 0 {
		whole, headers, ok := readWhole(packet)
		if ok && whole != want {
			r.Fatalf("gopacket reads %+v all at once, and %+v header by header\n%x", whole, want, packet)
		}
		// Only what came in: on egress the kernel counts the segments of a packet. What UDP carries may be a tunnel.
		isSegmented := whole.flow.Proto == protoTCP || whole.flow.Proto == protoUDP && plainUDP(packet[min(headers, len(packet)):])
		if ok && isSegmented && r.hook.Ingress == 1 && s.segment > 0 && headers < len(packet) {
			program, data, m.segSize = r.plain, packet, uint32(s.segment)
			cut := segmented{packet[:headers], len(packet) - headers, int(s.segment)}
			size, count = cut.wire(0, 0), cut.count()
		}
	}
	if s.tagged && m.segSize == 0 {
		program, size = r.tagged, size+4
		want = readPacket(packet, r.hook.L2Bytes > 0)
	}
	entry := r.entries[want.flow.Src.Is4()]
	before := [2]maps.Counters(r.counters())
	verdict, after := send(r, program, data, m)
	if verdict != next {
		r.Errorf("verdict %#x", verdict)
	}
	if program != r.tagged && !bytes.Equal(after, packet) {
		r.Errorf("the packet was changed:\n%x", after)
	}
	for id, now := range r.counters() {
		wantCount := maps.Counters{}
		if want.matched && uint32(id) == entry.ID {
			wantCount = segments(count, passed(size))
			if want.exempt {
				wantCount = maps.Counters{ExemptPackets: 1}
			}
		}
		if got := since(before[id], now); got != wantCount {
			r.Errorf("rule %d counted %+v, want %+v", id, got, wantCount)
		}
	}
	var wantBuckets []maps.Bucket
	if want.matched && !want.exempt {
		wantBuckets = []maps.Bucket{{Flow: want.flow, LevelBytes: size}}
		if r.each == policy.EachHost {
			far := want.flow.Dst
			if r.hook.MatchSrc == 1 {
				far = want.flow.Src
			}
			wantBuckets[0] = maps.Bucket{Subnet: netip.PrefixFrom(far, far.BitLen()), LevelBytes: size}
		}
	}
	var got []maps.Bucket
	for _, e := range r.entries {
		got = slices.AppendSeq(got, r.set.Buckets(e, r.now))
		if n := r.set.SharedLevel(e, r.now); n != 0 {
			r.Errorf("the spill bucket owes %d units", n)
		}
	}
	if !slices.Equal(got, wantBuckets) {
		r.Errorf("charged %+v, want %+v", got, wantBuckets)
	}
	if r.Failed() {
		r.Fatalf("hook %+v, each %v, %d bytes, tagged %v, segments of %d:\n%x",
			r.hook, policy.Each{Kind: r.each}, len(packet), s.tagged, s.segment, packet)
	}
}

// plainUDP reports whether what UDP carries cannot be another packet.
func plainUDP(payload []byte) bool {
	return len(payload) == 0 || payload[0]&8 == 0 && payload[0]>>6 == 1 && payload[0]>>4 != 4 && payload[0]>>4 != 6
}

// see shows a packet to all readers. A test run takes what fits a page.
func see(t *testing.T, readers []*reader, s specimen) {
	s.frame = s.frame[:min(len(s.frame), 3000)]
	if len(s.frame) < 14 {
		return
	}
	for _, r := range readers {
		r.TB = t
		r.sees(s)
	}
}

// captured are the frames of all captures beside the repository, with an
// Ethernet header in front of those that were bare IP; none where there are no
// captures. What can be read of a file that is cut off or lies is part of it.
func captured(tb testing.TB) (frames [][]byte) {
	for _, name := range testenv.Shared(tb, "pcaps/*") {
		data, err := os.ReadFile(name)
		if err != nil {
			tb.Fatal(err)
		}
		frames = append(frames, framesOf(data)...)
	}
	return frames
}

func framesOf(file []byte) (frames [][]byte) {
	var packets gopacket.PacketDataSource
	var link layers.LinkType
	if r, err := pcapgo.NewReader(bytes.NewReader(file)); err == nil {
		packets, link = r, r.LinkType()
	} else if r, err := pcapgo.NewNgReader(bytes.NewReader(file), pcapgo.DefaultNgReaderOptions); err == nil {
		packets, link = r, r.LinkType()
	} else {
		return nil
	}
	for {
		frame, _, err := packets.ReadPacketData()
		if err != nil {
			return frames // the end, or no more that can be read
		}
		switch link {
		case layers.LinkTypeEthernet:
			frames = append(frames, frame)
		case layers.LinkTypeRaw, 12 /* as DLT_RAW is written */, layers.LinkTypeIPv4, layers.LinkTypeIPv6:
			kind := uint16(typeIPv4)
			if len(frame) > 0 && frame[0]>>4 == 6 {
				kind = typeIPv6
			}
			frames = append(frames, ether(kind, frame))
		}
	}
}

// specimens have one of all that the programs look at.
func specimens() [][]byte {
	payload := zeros(20)
	frames := [][]byte{
		ether(typeARP, zeros(28)),
		ether(46, ip4{proto: protoUDP}.with(udpHeader(1, 2))), // 802.3
		ether(typeIPv4, ip4{proto: protoICMP}.with(icmp(8))),
		ether(typeIPv4, ip4{proto: protoTCP, options: 8}.with(tcpHeader(1000, 53, 12), payload)),
		ether(typeIPv4, ip4{proto: protoUDP, fragment: 0x2000}.with(udpHeader(1, 2), payload)),
		ether(typeIPv4, ip4{proto: protoUDP, fragment: 100}.with(udpHeader(1, 2), payload)),
		ether(typeIPv4, ip4{proto: protoAH}.with(authentication(protoUDP, 6), udpHeader(1, 2))),
		ether(typeIPv4, ip4{proto: 4 /* IP in IP */}.with(ip4{src: "172.16.0.1", proto: protoTCP}.with(tcpHeader(5, 6, 0)))),
		ether(typeIPv4, ip4{proto: protoGRE}.with(ports(0, 0x6558, 0), ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))))),
		ether(tag8021D, tag(7, tag8021Q), tag(8, typeIPv6), ip6{proto: protoTCP}.with(tcpHeader(1000, 53, 0), payload)),
		ether(tag8021Q, tag(7, tag8021Q), tag(8, tag8021Q), tag(9, typeIPv4), ip4{proto: protoTCP}.with(tcpHeader(1, 2, 0))),
		// Read without a link header, a tag that its skb says it is: what has none has no tags.
		patch(ether(0x88b5, tag(7, typeIPv4), ip4{proto: protoHopByHop}.with(zeros(20))), 14+4+8, tag8021Q>>8),
		ether(0x9100, tag(7, typeIPv4), ip4{proto: protoTCP}.with(tcpHeader(1, 2, 0))),
		ether(0x8864 /* PPPoE */, []byte{0x11, 0, 0, 1, 0, 30, 0, 0x21}, ip4{proto: protoUDP}.with(udpHeader(1, 2))),
		ether(0x8847 /* MPLS */, []byte{0, 1, 0x11, 64}, ip4{proto: protoUDP}.with(udpHeader(1, 2))),
		ether(typeIPv6, ip6{proto: protoHopByHop}.with(extension(protoDstOpts, 0), extension(protoRouting, 1), extension(protoFragment, 2),
			fragment(protoAH, 0, true), authentication(protoMobility, 4), extension(protoUDP, 0), udpHeader(1000, 53))),
		ether(typeIPv6, ip6{proto: protoFragment}.with(fragment(protoUDP, 1, true), ports(7, 8, 8))),
		ether(typeIPv6, ip6{proto: protoAH}.with([]byte{protoUDP, 0, 0, 0, 0, 0, 0, 0}, udpHeader(1000, 53))),
		ether(typeIPv6, ip6{proto: protoHIP}.with(extension(protoShim6, 0), extension(protoTCP, 0), tcpHeader(1000, 53, 0))),
		ether(typeIPv6, ip6{proto: protoDstOpts}.with(slices.Repeat(extension(protoDstOpts, 0), 7), extension(protoUDP, 0), udpHeader(1000, 53))),
		ether(typeIPv6, ip6{proto: protoDstOpts}.with(slices.Repeat(extension(protoDstOpts, 0), 8), extension(protoUDP, 0), udpHeader(1000, 53))),
		ether(typeIPv6, ip6{proto: protoHopByHop, hops: 255}.with(extension(protoICMPv6, 0), icmp(135), zeros(16))),
		ether(typeIPv6, ip6{proto: protoHopByHop, hops: 254}.with(extension(protoICMPv6, 0), icmp(135), zeros(16))),
	}
	for kind := uint8(132); kind <= 138; kind++ {
		frames = append(frames, ether(typeIPv6, ip6{proto: protoICMPv6, hops: 255}.with(icmp(kind), zeros(16))),
			ether(typeIPv6, ip6{src: "fe80::1", proto: protoICMPv6, hops: 255}.with(icmp(kind), zeros(16))))
	}
	for _, proto := range []uint8{protoTCP, protoUDP, protoDCCP, protoSCTP, protoUDPLite, protoESP, protoNone, 253} {
		frames = append(frames,
			ether(typeIPv4, ip4{proto: proto}.with(tcpHeader(50000, 443, 0), payload)),
			ether(typeIPv6, ip6{proto: proto}.with(tcpHeader(50000, 443, 0), payload)))
	}
	return frames
}

// Captures and specimens, and what is left of them when they are cut, and bytes
// of them are changed.
func TestPacketsAsGopacketReadsThem(t *testing.T) {
	readers := readers(t)
	frames := slices.Concat(specimens(), captured(t))
	matched, sound := 0, 0
	for i, frame := range frames {
		t.Run(fmt.Sprintf("%d", i), func(t *testing.T) {
			for n := 14; n <= min(len(frame), 100) && i < len(specimens()); n++ {
				see(t, readers[:1], specimen{frame: frame[:n]})
			}
			see(t, readers, specimen{frame: frame, tagged: i%2 == 0, segment: uint16(i % 50)})
		})
		if len(frame) >= 14 {
			if readPacket(frame, true).matched {
				matched++
			}
			if _, _, ok := readWhole(frame); ok {
				sound++
			}
		}
	}
	t.Logf("%d packets, %d of IP, %d of which gopacket had nothing against", len(frames), matched, sound)
	seed := testenv.Seed(t)
	t.Run("changed", func(t *testing.T) {
		for i := range 6000 {
			roll := rand.New(rand.NewPCG(seed, uint64(i)))
			frame := slices.Clone(frames[roll.IntN(len(frames))])
			if len(frame) < 14 {
				continue
			}
			for range 1 + roll.IntN(3) {
				// Where headers are.
				at := 12 + roll.IntN(max(1, min(len(frame), 100)-12))
				switch roll.IntN(3) {
				case 0:
					frame[at] = byte(roll.Uint32())
				case 1:
					frame[at] ^= 1 << roll.IntN(8)
				case 2:
					frame = frame[:max(at, 14)]
				}
			}
			see(t, readers[i%len(readers):][:1], specimen{frame, roll.IntN(4) == 0, uint16(roll.IntN(3) * roll.IntN(1500))})
		}
	})
}

// FuzzPacket shows the programs a fuzzer's packets.
func FuzzPacket(f *testing.F) {
	readers := readers(f)
	frames := specimens()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		frames = append(frames, captured(f)...) // otherwise the test above has seen to them
	}
	for i, frame := range frames {
		f.Add(frame, i%4 == 0, uint16(i%1500))
	}
	f.Fuzz(func(t *testing.T, frame []byte, tagged bool, segment uint16) {
		see(t, readers, specimen{frame, tagged, segment})
	})
}
