package bpf_test

import (
	"bytes"
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var update = flag.Bool("update", false, "write captures of the specimens into testenv")

// The program reads any packet as gopacket does: whether it is matched, its flow and
// its size.
//
// gopacket refuses inconsistent packets, but the program ignores most of these
// inconsistencies. So gopacket gets one header at a time, after irrelevant fields are
// corrected: the lengths of IP and UDP, IPv4 options, and the data offset of TCP. A
// truncated header is padded with zeros. Packets that gopacket still refuses have
// expectations of their own, marked "refusal".

// A reading is what a packet's headers say.
type reading struct {
	matched bool // IP
	flow    maps.Flow
	exempt  bool // neighbour discovery
}

// readPacket reads a packet with or without a link header; VLAN tags may follow. Without
// a link header, bytes 12 and 13 are skb->protocol: see TestWithoutLinkHeader.
func readPacket(packet []byte, linkHeader bool) reading {
	var eth layers.Ethernet
	if eth.DecodeFromBytes(packet, gopacket.NilDecodeFeedback) != nil {
		return reading{} // refusal: too short for an EtherType
	}
	kind, rest := eth.EthernetType, packet
	if linkHeader {
		rest = packet[14:]
		for kind == layers.EthernetTypeDot1Q || kind == layers.EthernetTypeQinQ {
			var tag layers.Dot1Q
			if tag.DecodeFromBytes(rest, gopacket.NilDecodeFeedback) != nil {
				return reading{} // refusal: a truncated tag
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
		return reading{} // refusal: no addresses, or not IPv4
	}
	packet = slices.Clone(packet)
	packet[2], packet[3] = 0, 0 // ignores the length
	for i := 20; i < min(4*int(packet[0]&15), len(packet)); i++ {
		packet[i] = 1 // no operation
	}
	var ip layers.IPv4
	whole := ip.DecodeFromBytes(packet, gopacket.NilDecodeFeedback) == nil
	if !whole {
		// Refusal: the header length is too short, or beyond the end of the packet. Only
		// the addresses and the protocol are used.
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
		return reading{} // refusal: no addresses, or not IPv6
	}
	// Refusal: gopacket reports a wrong length or a jumbogram after it has read everything else.
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

// betweenNeighbours reports whether RFC 4861, sections 4.1 to 4.5, allows a type of message
// between two addresses, and no router forwards it.
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

// walkExtensions skips extension headers. It ends at a later fragment, or at a header with
// less than four bytes, which then is the protocol.
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
				// Refusal: shorter than its fields. Its length counts, or it could hide the next header.
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

// readPorts returns the ports of a transport header, if it has at least four bytes.
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
	case layers.IPProtocolUDP, protoDCCP: // unknown to gopacket; RFC 4340, 5.1
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

// filled returns a copy that is padded with zeros to a length.
func filled(b []byte, length int) []byte {
	return append(slices.Clone(b), make([]byte, max(0, length-len(b)))...)
}

func flowOf(src, dst []byte, proto layers.IPProtocol) maps.Flow {
	from, _ := netip.AddrFromSlice(src)
	to, _ := netip.AddrFromSlice(dst)
	return maps.Flow{Src: from, Dst: to, Proto: uint8(proto)}
}

// readWhole returns gopacket's reading of a whole, unmodified frame, and the length of its
// headers. ok is false for frames that gopacket refuses or has no transport for.
func readWhole(frame []byte) (r reading, headers int, ok bool) {
	packet := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.DecodeOptions{NoCopy: true, Lazy: true})
	raw := false // IPv4 in EtherType 0xffff, which only gopacket knows
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
				return r, 0, false // refused
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

// A reader is a hook that limits all packets, and shows their flows or hosts.
type reader struct {
	*rig
	hook    bpf.AbiHook
	each    policy.EachKind
	plain   *ebpf.Program
	short   *ebpf.Program // truncates packets
	tagged  *ebpf.Program // truncates, and adds a tag to the metadata
	entries map[bool]maps.Entry
	now     uint64
}

// readers are hooks of both directions and both matches, with and without link headers,
// with a bucket per flow and per host.
func readers(tb testing.TB) (all []*reader) {
	for _, l2 := range []uint8{14, 0} {
		for kind := range uint8(4) {
			hook := egress()
			hook.L2Bytes, hook.Ingress, hook.MatchSrc = l2, kind&1, kind>>1
			for _, each := range []policy.EachKind{policy.EachFlow, policy.EachHost} {
				r := &reader{rig: newRig(tb, maps.Size{Rules: 2, Buckets: 16}, hook), hook: hook, each: each, entries: map[bool]maps.Entry{}}
				for is4, everything := range map[bool]string{true: "0.0.0.0/0", false: "::/0"} {
					rule := wide(everything, algorithms[kind&1])
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

// A specimen is a packet with its metadata.
type specimen struct {
	frame   []byte
	tagged  bool   // has a tag in the metadata
	segment uint16 // gso_size in bytes
}

// sees runs the program on one packet, and compares the match, the charge and the counters.
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
	// A test run requires a complete network header.
	program, data, m := r.short, filled(packet, 54), meta{now: r.now, cut: uint32(len(packet))}
	if r.hook.L2Bytes > 0 {
		whole, headers, ok := readWhole(packet)
		if ok && whole != want {
			r.Fatalf("gopacket reads %+v as a whole, but %+v header by header\n%x", whole, want, packet)
		}
		// Only on ingress: on egress the kernel counts segments. UDP payload may be a tunnel.
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
		got = append(got, r.bucketsOf(e, r.now)...)
		if n := r.set.Store.SharedLevel(e, r.now); n != 0 {
			r.Errorf("the level of the spill bucket is %d units", n)
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

// plainUDP reports whether a UDP payload cannot be a packet.
func plainUDP(payload []byte) bool {
	return len(payload) == 0 || payload[0]&8 == 0 && payload[0]>>6 == 1 && payload[0]>>4 != 4 && payload[0]>>4 != 6
}

// see shows a packet to all readers, if it fits into a test run.
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

// captured returns the frames of all captures beside the repository, or none. Bare IP
// packets get an Ethernet header. Invalid and truncated files are read as far as
// possible.
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
			return frames // the end of the file, or an invalid record
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

// specimens returns packets of all kinds that the program distinguishes.
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
		// Without a link header the protocol may be a tag, but such packets have no tags.
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

// Captures and specimens, also truncated and with changed bytes.
func TestPacketsAsGopacketReadsThem(t *testing.T) {
	readers := readers(t)
	t.Run("specimens", func(t *testing.T) {
		for _, frame := range specimens() {
			for n := 14; n <= min(len(frame), 100); n++ {
				see(t, readers[:1], specimen{frame: frame[:n]})
			}
		}
		seeAll(t, readers, specimens())
	})
	t.Run("captures", func(t *testing.T) {
		frames := captured(t)
		if len(frames) == 0 {
			t.Skip("needs captures, in ../shared/pcaps")
		}
		seeAll(t, readers, frames)
	})
}

// seeAll shows frames to all readers, then some with changed bytes to one each.
func seeAll(t *testing.T, readers []*reader, frames [][]byte) {
	matched, sound := 0, 0
	for i, frame := range frames {
		see(t, readers, specimen{frame: frame, tagged: i%2 == 0, segment: uint16(i % 50)})
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
	for i := range 3000 {
		roll := rand.New(rand.NewPCG(seed, uint64(i)))
		frame := slices.Clone(frames[roll.IntN(len(frames))])
		if len(frame) < 14 {
			continue
		}
		for range 1 + roll.IntN(3) {
			// Among the headers.
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
}

// The captures of testenv have the specimens, for the tests of other packages.
func TestCapturesHaveSpecimens(t *testing.T) {
	var ethernet, raw bytes.Buffer
	w := pcapgo.NewWriter(&ethernet)
	testenv.Must(t, w.WriteFileHeader(1<<16, layers.LinkTypeEthernet))
	withoutLink := pcapgo.NewWriterNanos(&raw)
	testenv.Must(t, withoutLink.WriteFileHeader(1<<16, layers.LinkTypeRaw))
	for i, frame := range specimens() {
		at := time.Unix(1, int64(i)*1_000_000).UTC()
		testenv.Must(t, w.WritePacket(gopacket.CaptureInfo{Timestamp: at, CaptureLength: len(frame), Length: len(frame)}, frame))
		if kind := binary.BigEndian.Uint16(frame[12:]); kind == typeIPv4 || kind == typeIPv6 {
			testenv.Must(t, withoutLink.WritePacket(gopacket.CaptureInfo{Timestamp: at, CaptureLength: len(frame) - 14, Length: len(frame) - 14}, frame[14:]))
		}
	}
	for name, want := range map[string][]byte{"ethernet.pcap": ethernet.Bytes(), "raw.pcap": raw.Bytes()} {
		if *update {
			testenv.Must(t, os.WriteFile("../internal/testenv/testdata/captures/"+name, want, 0o644))
		} else if !bytes.Equal(testenv.Captures(t)[name], want) {
			t.Errorf("%s is not what the specimens give: write it by 'go test ./bpf -run %s -update'", name, t.Name())
		}
	}
}

// FuzzPacket runs the program on a fuzzer's packets.
func FuzzPacket(f *testing.F) {
	readers := readers(f)
	frames := specimens()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		frames = append(frames, captured(f)...) // otherwise TestPacketsAsGopacketReadsThem covers them
	}
	for i, frame := range frames {
		f.Add(frame, i%4 == 0, uint16(i%1500))
	}
	f.Fuzz(func(t *testing.T, frame []byte, tagged bool, segment uint16) {
		see(t, readers, specimen{frame, tagged, segment})
	})
}
