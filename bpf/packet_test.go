package bpf_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Hosts of the default headers: see ip4 and ip6.
const (
	near4, far4 = "192.0.2.1", "10.0.0.1"
	near6, far6 = "2001:db8::1", "2001:db8:1::1"
)

// wide is a rule whose capacity exceeds everything that these tests send.
func wide(p string, algorithm policy.Algorithm) policy.Rule {
	return policy.Rule{Prefix: prefix(p), Rate: 1_000_000_000, Capacity: 1 << 22, Algorithm: algorithm}
}

// want sends a packet and compares the verdict and all counters. Unless the packet
// is marked, it also checks that the packet is unchanged.
func (r *rig) want(p *ebpf.Program, frame []byte, m meta, verdict uint32, counted map[uint32]maps.Counters) []byte {
	r.Helper()
	before := r.counters()
	got, after := send(r, p, frame, m)
	if got != verdict {
		r.Errorf("verdict %#x, want %#x", got, verdict)
	}
	for id, now := range r.counters() {
		if got, want := since(before[id], now), counted[uint32(id)]; got != want {
			r.Errorf("rule %d counted\n%+v, want\n%+v", id, got, want)
		}
	}
	for _, c := range counted {
		if c.MarkedPackets > 0 {
			return after
		}
	}
	if m.cut > 0 {
		frame = frame[:m.cut]
	}
	if !bytes.Equal(after, frame) {
		r.Errorf("the packet was changed:\n%x\n%x", frame, after)
	}
	return after
}

// Packets of many kinds, the rule that each matches, and its counters.
func TestPackets(t *testing.T) {
	const none, v4, v6 = 0, 4, 6
	payload := zeros(30)
	udp4 := ip4{proto: protoUDP}.with(udpHeader(1000, 53), payload)
	udp6 := ip6{proto: protoUDP}.with(udpHeader(1000, 53), payload)
	type packet struct {
		frame []byte
		rule  int
	}
	table := map[string]packet{
		"IPv4":                        {ether(typeIPv4, udp4), v4},
		"IPv6":                        {ether(typeIPv6, udp6), v6},
		"IPv4, options":               {ether(typeIPv4, ip4{proto: protoTCP, options: 40}.with(tcpHeader(1, 2, 12))), v4},
		"IPv4, short IHL":             {patch(ether(typeIPv4, udp4), 14, 0x44), v4},
		"IPv4, no IHL":                {patch(ether(typeIPv4, udp4), 14, 0x40), v4},
		"IPv4, IHL beyond the end":    {patch(ether(typeIPv4, ip4{proto: protoUDP}.with()), 14, 0x4f), v4},
		"IPv4, version 6":             {patch(ether(typeIPv4, udp4), 14, 0x65), none},
		"IPv4, version 0":             {patch(ether(typeIPv4, udp4), 14, 0x05), none},
		"IPv6, version 4":             {patch(ether(typeIPv6, udp6), 14, 0x40), none},
		"IPv4, wrong total length":    {patch(ether(typeIPv4, udp4), 16, 0xff), v4},
		"IPv4 in a type of IPv6":      {ether(typeIPv6, udp4, zeros(40)), none},
		"IPv6 in a type of IPv4":      {ether(typeIPv4, udp6), none},
		"one tag":                     {ether(tag8021Q, tag(7, typeIPv4), udp4), v4},
		"one tag of 802.1ad":          {ether(tag8021D, tag(7, typeIPv6), udp6), v6},
		"two tags":                    {ether(tag8021D, tag(7, tag8021Q), tag(8, typeIPv4), udp4), v4},
		"two tags of 802.1Q":          {ether(tag8021Q, tag(7, tag8021Q), tag(8, typeIPv6), udp6), v6},
		"three tags":                  {ether(tag8021D, tag(7, tag8021Q), tag(8, tag8021Q), tag(9, typeIPv4), udp4), v4},
		"a tag, then ARP":             {ether(tag8021Q, tag(7, typeARP), zeros(28)), none},
		"a tag, then nothing":         {ether(tag8021Q, tag(7, typeIPv4)), none},
		"a tag cut off":               {ether(tag8021Q, []byte{0, 7}), none},
		"ARP":                         {ether(typeARP, zeros(28)), none},
		"LLDP":                        {ether(typeLLDP, zeros(60)), none},
		"802.3 with a length":         {ether(46, udp4), none},
		"fragment, first":             {ether(typeIPv4, ip4{proto: protoUDP, fragment: 0x2000}.with(udpHeader(1, 2), payload)), v4},
		"fragment, later":             {ether(typeIPv4, ip4{proto: protoUDP, fragment: 100}.with(payload)), v4},
		"IPv6 fragment, first":        {ether(typeIPv6, ip6{proto: protoFragment}.with(fragment(protoUDP, 0, true), udpHeader(1, 2), payload)), v6},
		"IPv6 fragment, later":        {ether(typeIPv6, ip6{proto: protoFragment}.with(fragment(protoUDP, 100, false), payload)), v6},
		"MLD":                         {ether(typeIPv6, ip6{proto: protoHopByHop, hops: 1}.with(extension(protoICMPv6, 0), icmp(143))), v6},
		"MLD, hop limit 255":          {ether(typeIPv6, ip6{proto: protoICMPv6, hops: 255}.with(icmp(131))), v6},
		"ping":                        {ether(typeIPv6, ip6{proto: protoICMPv6, hops: 255}.with(icmp(128))), v6},
		"ND in a later fragment":      {ether(typeIPv6, ip6{proto: protoFragment, hops: 255}.with(fragment(protoICMPv6, 9, false), icmp(135))), v6},
		"ND without a type":           {ether(typeIPv6, ip6{proto: protoICMPv6, hops: 255}.with()), v6},
		"ND's type in UDP":            {ether(typeIPv6, ip6{proto: protoUDP, hops: 255}.with(patch(udpHeader(0, 2), 0, 135))), v6},
		"ICMP of IPv4 with ND's type": {ether(typeIPv4, ip4{proto: protoICMPv6}.with(icmp(135))), v4},
	}
	for _, proto := range []uint8{
		protoICMP, protoTCP, protoUDP, protoDCCP, protoGRE, protoESP, protoSCTP, protoUDPLite, protoNone, 253, 255,
		protoRouting, protoFragment, protoAH, protoDstOpts, protoMobility, protoHIP, protoShim6,
	} {
		for _, n := range []int{0, 1, 3, 4, 40} { // any header length, and no header
			table[fmt.Sprintf("IPv4, protocol %d, %d bytes", proto, n)] = packet{ether(typeIPv4, ip4{proto: proto}.with(zeros(n))), v4}
			table[fmt.Sprintf("IPv6, protocol %d, %d bytes", proto, n)] = packet{ether(typeIPv6, ip6{proto: proto}.with(zeros(n))), v6}
		}
	}
	for name, hook := range map[string]bpf.AbiHook{"egress": egress(), "ingress": ingress()} {
		for _, algorithm := range algorithms {
			t.Run(fmt.Sprintf("%s/%v", name, algorithm), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 4}, hook)
				far := map[int]string{v4: "10.0.0.0/8", v6: "2001:db8:1::/48"}
				near := map[int]string{v4: "192.0.2.0/24", v6: "2001:db8::/48"}
				if hook.MatchSrc == 1 {
					far, near = near, far
				}
				ids := map[int]uint32{}
				for family := range far {
					ids[family] = r.put(wide(far[family], algorithm), 0).ID
					r.put(wide(near[family], algorithm), 0) // the near address, which must not match
				}
				for name, c := range table {
					t.Run(name, func(t *testing.T) {
						r.TB = t
						counted := map[uint32]maps.Counters{}
						if c.rule != none {
							counted[ids[c.rule]] = passed(uint64(len(c.frame)))
						}
						m := meta{now: 1e9}
						r.want(r.program(), c.frame, m, next, counted)
					})
				}
			})
		}
	}
}

// A packet is matched if its addresses are complete, however short it is.
func TestTruncatedPackets(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 2, Buckets: 1024}, egress())
	flow := policy.Each{Kind: policy.EachFlow}
	ids := map[string]uint32{}
	for _, p := range []string{"10.0.0.0/8", "2001:db8:1::/48"} {
		rule := wide(p, policy.GCRA)
		rule.Each = flow
		ids[p] = r.put(rule, 0).ID
	}
	// A test run requires a complete network header.
	p := cutter(t, r.program())
	var many []byte
	for range 12 {
		many = append(many, extension(protoDstOpts, 0)...)
	}
	now := uint64(1e9)
	for name, c := range map[string]struct {
		frame []byte
		whole int // bytes up to the end of the addresses
		rule  string
	}{
		"TCP":        {ether(typeIPv4, ip4{proto: protoTCP, options: 8}.with(tcpHeader(1, 2, 12))), 34, "10.0.0.0/8"},
		"TCP, tags":  {ether(tag8021D, tag(1, tag8021Q), tag(2, typeIPv4), ip4{proto: protoTCP}.with(tcpHeader(1, 2, 0))), 42, "10.0.0.0/8"},
		"UDP":        {ether(typeIPv6, ip6{proto: protoUDP}.with(udpHeader(1, 2))), 54, "2001:db8:1::/48"},
		"tagged":     {ether(tag8021Q, tag(1, typeIPv6), ip6{proto: protoUDP}.with(udpHeader(1, 2))), 58, "2001:db8:1::/48"},
		"extensions": {ether(typeIPv6, ip6{proto: protoHopByHop}.with(extension(protoRouting, 1), extension(protoAH, 0), authentication(protoFragment, 6), fragment(protoUDP, 0, true), udpHeader(1, 2))), 54, "2001:db8:1::/48"},
		"too many":   {ether(typeIPv6, ip6{proto: protoDstOpts}.with(many)), 54, "2001:db8:1::/48"},
		"ND, remote": {ether(typeIPv6, ip6{proto: protoHopByHop, hops: 3}.with(extension(protoICMPv6, 0), icmp(135))), 54, "2001:db8:1::/48"},
	} {
		t.Run(name, func(t *testing.T) {
			r.TB = t
			for n := 14; n <= len(c.frame); n++ {
				counted := map[uint32]maps.Counters{}
				if n >= c.whole {
					counted[ids[c.rule]] = passed(uint64(n))
				}
				now += uint64(time.Hour)
				r.want(p, c.frame, meta{now: now, cut: uint32(n)}, next, counted)
				if t.Failed() {
					t.Fatalf("cut to %d bytes", n)
				}
			}
		})
	}
}

// The bucket that a packet is charged to with a bucket per flow.
func TestFlowKeys(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 2, Buckets: 4096}, egress())
	each := policy.Each{Kind: policy.EachFlow}
	entries := map[bool]maps.Entry{}
	for is4, p := range map[bool]string{true: "10.0.0.0/8", false: "2001:db8:1::/48"} {
		rule := wide(p, policy.GCRA)
		rule.Each = each
		entries[is4] = r.put(rule, 0)
	}
	flow4 := func(proto uint8, sport, dport uint16) maps.Flow {
		return maps.Flow{Src: addr(near4), Dst: addr(far4), Proto: proto, SrcPort: sport, DstPort: dport}
	}
	flow6 := func(proto uint8, sport, dport uint16) maps.Flow {
		return maps.Flow{Src: addr(near6), Dst: addr(far6), Proto: proto, SrcPort: sport, DstPort: dport}
	}
	v4 := func(h ip4, payload ...[]byte) []byte { return ether(typeIPv4, h.with(payload...)) }
	v6 := func(proto uint8, payload ...[]byte) []byte {
		return ether(typeIPv6, ip6{proto: proto}.with(payload...))
	}
	dstOpts := func(n int, then uint8, rest ...[]byte) []byte {
		var b []byte
		for range n - 1 {
			b = append(b, extension(protoDstOpts, 0)...)
		}
		b = append(b, extension(then, 0)...)
		return v6(protoDstOpts, append([][]byte{b}, rest...)...)
	}
	type packet struct {
		frame []byte
		flow  maps.Flow
	}
	table := map[string]packet{
		"no ports in ICMP":             {v4(ip4{proto: protoICMP}, icmp(8), zeros(8)), flow4(protoICMP, 0, 0)},
		"no ports in GRE":              {v4(ip4{proto: protoGRE}, ports(1, 2, 8)), flow4(protoGRE, 0, 0)},
		"no ports in ESP":              {v4(ip4{proto: protoESP}, ports(1, 2, 8)), flow4(protoESP, 0, 0)},
		"unknown protocol":             {v4(ip4{proto: 253}, ports(1, 2, 8)), flow4(253, 0, 0)},
		"behind options":               {v4(ip4{proto: protoUDP, options: 12}, udpHeader(1000, 53)), flow4(protoUDP, 1000, 53)},
		"behind all options":           {v4(ip4{proto: protoTCP, options: 40}, tcpHeader(1000, 53, 40)), flow4(protoTCP, 1000, 53)},
		"behind tags":                  {ether(tag8021D, tag(1, tag8021Q), tag(2, typeIPv4), ip4{proto: protoUDP}.with(udpHeader(1000, 53))), flow4(protoUDP, 1000, 53)},
		"IHL too short for a header":   {patch(v4(ip4{proto: protoUDP}, udpHeader(1000, 53)), 14, 0x44), flow4(protoUDP, 0, 0)},
		"IHL beyond the end":           {patch(v4(ip4{proto: protoUDP}, udpHeader(1000, 53)), 14, 0x4f), flow4(protoUDP, 0, 0)},
		"first fragment":               {v4(ip4{proto: protoUDP, fragment: 0x2000}, udpHeader(1000, 53), zeros(8)), flow4(protoUDP, 1000, 53)},
		"do not fragment":              {v4(ip4{proto: protoUDP, fragment: 0x4000}, udpHeader(1000, 53), zeros(8)), flow4(protoUDP, 1000, 53)},
		"later fragment":               {v4(ip4{proto: protoUDP, fragment: 0x2001}, ports(7, 8, 20)), flow4(protoUDP, 0, 0)},
		"last fragment":                {v4(ip4{proto: protoTCP, fragment: 0x1fff}, ports(7, 8, 20)), flow4(protoTCP, 0, 0)},
		"half of the ports":            {v4(ip4{proto: protoUDP}, []byte{1, 2, 3}), flow4(protoUDP, 0, 0)},
		"IPv6, no ports in ICMP":       {v6(protoICMPv6, icmp(128)), flow6(protoICMPv6, 0, 0)},
		"IPv6, no next header":         {v6(protoNone), flow6(protoNone, 0, 0)},
		"IPv6, ESP":                    {v6(protoESP, ports(1, 2, 8)), flow6(protoESP, 0, 0)},
		"IPv6, atomic fragment":        {v6(protoFragment, fragment(protoUDP, 0, false), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
		"IPv6, first fragment":         {v6(protoFragment, fragment(protoUDP, 0, true), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
		"IPv6, later fragment":         {v6(protoFragment, fragment(protoUDP, 1, true), ports(7, 8, 8)), flow6(protoUDP, 0, 0)},
		"IPv6, last fragment":          {v6(protoFragment, fragment(protoUDP, 0x1fff, false), ports(7, 8, 8)), flow6(protoUDP, 0, 0)},
		"IPv6, options of a fragment":  {v6(protoFragment, fragment(protoDstOpts, 1, false), extension(protoUDP, 0), udpHeader(7, 8)), flow6(protoDstOpts, 0, 0)},
		"IPv6, AH":                     {v6(protoAH, authentication(protoTCP, 7), tcpHeader(1000, 53, 0)), flow6(protoTCP, 1000, 53)},
		"IPv6, long options":           {v6(protoHopByHop, extension(protoUDP, 255), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
		"IPv6, options beyond the end": {v6(protoHopByHop, patch(extension(protoUDP, 0), 1, 200), udpHeader(1000, 53)), flow6(protoUDP, 0, 0)},
		"IPv6, half an extension":      {v6(protoDstOpts, []byte{protoUDP, 0, 0}), flow6(protoDstOpts, 0, 0)},
		"IPv6, one of each": {v6(protoHopByHop, extension(protoDstOpts, 0), extension(protoRouting, 1), extension(protoFragment, 2),
			fragment(protoAH, 0, true), authentication(protoMobility, 4), extension(protoUDP, 0), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
		// Nothing after the 256th extension header is read.
		"IPv6, 8 extensions":                {dstOpts(8, protoUDP, udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
		"IPv6, 256 extensions":              {dstOpts(256, protoUDP, udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
		"IPv6, 257 extensions":              {dstOpts(257, protoUDP, udpHeader(1000, 53)), flow6(protoDstOpts, 0, 0)},
		"IPv6, 8 extensions, then fragment": {dstOpts(8, protoFragment, fragment(protoUDP, 0, true), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)},
	}
	for _, proto := range []uint8{protoTCP, protoUDP, protoSCTP, protoDCCP, protoUDPLite} {
		table[fmt.Sprintf("ports of %d", proto)] = packet{v4(ip4{proto: proto}, ports(50000, 443, 16)), flow4(proto, 50000, 443)}
		table[fmt.Sprintf("IPv6, ports of %d", proto)] = packet{v6(proto, ports(50000, 443, 16)), flow6(proto, 50000, 443)}
	}
	for _, ext := range []uint8{protoHopByHop, protoRouting, protoDstOpts, protoMobility, protoHIP, protoShim6} {
		table[fmt.Sprintf("IPv6, behind %d", ext)] = packet{v6(ext, extension(protoUDP, 0), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)}
		table[fmt.Sprintf("IPv6, behind %d, longer", ext)] = packet{v6(ext, extension(protoUDP, 3), udpHeader(1000, 53)), flow6(protoUDP, 1000, 53)}
	}
	now := uint64(1e9)
	for name, c := range table {
		t.Run(name, func(t *testing.T) {
			r.TB = t
			now += uint64(time.Hour)
			e := entries[c.flow.Src.Is4()]
			r.want(r.program(), c.frame, meta{now: now}, next, map[uint32]maps.Counters{e.ID: passed(uint64(len(c.frame)))})
			got := r.bucketsOf(e, now)
			want := []maps.Bucket{{Flow: c.flow, LevelBytes: uint64(len(c.frame))}}
			if !slices.Equal(got, want) {
				t.Errorf("charged %+v, want %+v", got, want)
			}
			if got := r.set.Store.State(e, policy.MatchDst, c.flow, now).Level >> 20; got != uint64(len(c.frame)) {
				t.Errorf("the level of the flow is %d bytes, want %d", got, len(c.frame))
			}
			if got := r.set.Store.SharedLevel(e, now); got != 0 {
				t.Errorf("the level of the spill bucket is %d units", got)
			}
		})
	}
}

// Hosts and subnets each have a bucket, by the address that rules match.
func TestSubnetKeys(t *testing.T) {
	now := uint64(1e9)
	for name, hook := range map[string]bpf.AbiHook{"egress": egress(), "ingress": ingress()} {
		r := newRig(t, maps.Size{Rules: 2, Buckets: 4096}, hook)
		for _, c := range []struct {
			rule   string
			each   policy.Each
			host   string
			subnet string
		}{
			{"10.0.0.0/8", policy.Each{Kind: policy.EachHost}, "10.1.2.3", "10.1.2.3/32"},
			{"10.0.0.0/8", policy.Each{Kind: policy.EachSubnet, Bits: 9}, "10.255.2.3", "10.128.0.0/9"},
			{"10.0.0.0/8", policy.Each{Kind: policy.EachSubnet, Bits: 24}, "10.1.2.3", "10.1.2.0/24"},
			{"10.0.0.0/8", policy.Each{Kind: policy.EachSubnet, Bits: 31}, "10.1.2.3", "10.1.2.2/31"},
			{"2001:db8::/32", policy.Each{Kind: policy.EachHost}, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4:5:6/128"},
			{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 33}, "2001:db8:ffff::1", "2001:db8:8000::/33"},
			{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 56}, "2001:db8:1:2ff:3:4:5:6", "2001:db8:1:200::/56"},
			{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 64}, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"},
			{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 96}, "2001:db8:1:2:3:4:5:6", "2001:db8:1:2:3:4::/96"},
			{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 127}, "2001:db8:1:2:3:4:5:7", "2001:db8:1:2:3:4:5:6/127"},
		} {
			t.Run(fmt.Sprintf("%s/%s %v", name, c.rule, c.each), func(t *testing.T) {
				r.TB = t
				now += uint64(time.Hour)
				rule := wide(c.rule, policy.Leaky)
				rule.Each = c.each
				e := r.put(rule, now)
				var frame []byte
				match, flow := policy.MatchDst, maps.Flow{Dst: addr(c.host)}
				src, dst := "", c.host
				if hook.MatchSrc == 1 {
					match, flow, src, dst = policy.MatchSrc, maps.Flow{Src: addr(c.host)}, c.host, ""
				}
				if addr(c.host).Is4() {
					frame = ether(typeIPv4, ip4{src: src, dst: dst, proto: protoUDP}.with(udpHeader(1, 2)))
				} else {
					frame = ether(typeIPv6, ip6{src: src, dst: dst, proto: protoUDP}.with(udpHeader(1, 2)))
				}
				size := uint64(len(frame))
				for packets := range uint64(2) {
					frame[len(frame)-8]++ // another port: the same bucket
					r.want(r.program(), frame, meta{now: now}, next, map[uint32]maps.Counters{e.ID: passed(size)})
					want := []maps.Bucket{{Subnet: netip.MustParsePrefix(c.subnet), LevelBytes: size * (packets + 1)}}
					if got := r.bucketsOf(e, now); !slices.Equal(got, want) {
						t.Fatalf("charged %+v, want %+v", got, want)
					}
				}
				if got := r.set.Store.State(e, match, flow, now).Level >> 20; got != 2*size {
					t.Errorf("level %d bytes, want %d", got, 2*size)
				}
				r.set.Delete(rule.Prefix)
			})
		}
	}
}

// Among rules of all prefix lengths, the longest match decides.
func TestLongestPrefix(t *testing.T) {
	for name, a := range map[string]netip.Addr{"IPv4": addr("10.170.85.204"), "IPv6": addr("2001:db8:a5a5:5a5a:1234:5678:9abc:def0")} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 256}, egress())
			ids := map[int]uint32{}
			for bits := range a.BitLen() + 1 {
				p, err := a.Prefix(bits)
				if err != nil {
					t.Fatal(err)
				}
				ids[bits] = r.put(wide(p.String(), policy.GCRA), 0).ID
			}
			for bits := range a.BitLen() + 1 {
				host := a.AsSlice()
				if bits < a.BitLen() {
					host[bits/8] ^= 0x80 >> (bits % 8) // the first bit that differs
				}
				to, _ := netip.AddrFromSlice(host)
				frame := ether(typeIPv4, ip4{dst: to.String(), proto: protoTCP}.with(tcpHeader(1, 2, 0)))
				if to.Is6() {
					frame = ether(typeIPv6, ip6{dst: to.String(), proto: protoTCP}.with(tcpHeader(1, 2, 0)))
				}
				if e, ok := r.set.Match(to); !ok || e.ID != ids[bits] {
					t.Errorf("Match finds %+v for %v, want /%d", e.Prefix, to, bits)
				}
				r.want(r.program(), frame, meta{now: 1}, next, map[uint32]maps.Counters{ids[bits]: passed(uint64(len(frame)))})
				if t.Failed() {
					t.Fatalf("to %v, longest prefix /%d", to, bits)
				}
			}
			// Without the other rules, only the default network matches; without it, no rule.
			for bits := a.BitLen(); bits > 0; bits-- {
				p, _ := a.Prefix(bits)
				r.set.Delete(p)
			}
			frame := ether(typeIPv4, ip4{dst: "203.0.113.9", proto: protoTCP}.with(tcpHeader(1, 2, 0)))
			if a.Is6() {
				frame = ether(typeIPv6, ip6{dst: "fe80::1", proto: protoTCP}.with(tcpHeader(1, 2, 0)))
			}
			r.want(r.program(), frame, meta{now: 1}, next, map[uint32]maps.Counters{ids[0]: passed(uint64(len(frame)))})
			everything, _ := a.Prefix(0)
			r.set.Delete(everything)
			r.want(r.program(), frame, meta{now: 1}, next, nil)
		})
	}
}

// An unlimited rule exempts its prefix from a wider one, and counts.
func TestUnlimitedRuleInsideWiderOne(t *testing.T) {
	for _, algorithm := range algorithms {
		r := newRig(t, maps.Size{Rules: 4}, egress())
		tight := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8, Capacity: 100, Algorithm: algorithm}
		hole := policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: policy.Unlimited, Algorithm: algorithm}
		inner := policy.Rule{Prefix: prefix("10.1.1.0/24"), Rate: 8, Capacity: 100, Algorithm: algorithm}
		to := func(dst string) []byte {
			return ether(typeIPv4, ip4{dst: dst, proto: protoUDP}.with(udpHeader(1, 2), zeros(58)))
		}
		p, m, size := r.program(), meta{now: 5e9}, uint64(100)
		for dst, rule := range map[string]policy.Rule{"10.2.0.1": tight, "10.1.2.1": hole, "10.1.1.1": inner} {
			id := r.put(rule, 0).ID
			r.want(p, to(dst), m, next, map[uint32]maps.Counters{id: passed(size)})
			for range 3 {
				if rule.Rate == policy.Unlimited {
					r.want(p, to(dst), m, next, map[uint32]maps.Counters{id: passed(size)})
				} else {
					r.want(p, to(dst), m, drop, map[uint32]maps.Counters{id: dropped(size)})
				}
			}
		}
	}
}

// On a device without a link header, the protocol is in skb->protocol.
//
// A test run reads it from an Ethernet header, which the data must begin with.
// These packets are valid both ways: bytes 12 and 13 are an EtherType to the test
// run, and part of the source address to the program.
func TestWithoutLinkHeader(t *testing.T) {
	hook := egress()
	hook.L2Bytes = 0
	r := newRig(t, maps.Size{Rules: 2, Buckets: 64}, hook)
	now := uint64(1e9)
	for _, c := range []struct {
		name   string
		rule   string
		header uint64
		packet []byte
		flow   maps.Flow
	}{
		{
			"IPv4", "10.0.0.0/8", 32, ip4{src: "8.0.0.1", proto: protoUDP, options: 4}.with(udpHeader(1000, 53), zeros(8)),
			maps.Flow{Src: addr("8.0.0.1"), Dst: addr(far4), Proto: protoUDP, SrcPort: 1000, DstPort: 53},
		},
		{
			"IPv6", "2001:db8:1::/48", 68, ip6{src: "2001:db8:86dd::1", proto: protoDstOpts}.with(extension(protoTCP, 0), tcpHeader(1000, 53, 0)),
			maps.Flow{Src: addr("2001:db8:86dd::1"), Dst: addr(far6), Proto: protoTCP, SrcPort: 1000, DstPort: 53},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.TB = t
			rule := wide(c.rule, policy.GCRA)
			rule.Each.Kind = policy.EachFlow
			e := r.put(rule, 0)
			size := uint64(len(c.packet))
			r.want(r.program(), c.packet, meta{now: now}, next, map[uint32]maps.Counters{e.ID: passed(size)})
			want := []maps.Bucket{{Flow: c.flow, LevelBytes: size}}
			if got := r.bucketsOf(e, now); !slices.Equal(got, want) {
				t.Errorf("charged %+v, want %+v", got, want)
			}
			// The headers of a segment have no link header.
			data := append(slices.Clone(c.packet), zeros(1000)...)
			payload := 1000 + size - c.header
			m := meta{now: now, segSize: 400, wireLen: uint32(payload + 3*c.header)}
			three := int(payload+399) / 400
			r.want(r.program(), data, m, next, map[uint32]maps.Counters{e.ID: segments(three, passed(payload+3*c.header))})
			// Not matched: packets that are not IP, or of the other family.
			r.want(r.program(), patch(patch(c.packet, 12, 0x08), 13, 0x06), meta{now: now}, next, nil)
			r.want(r.program(), patch(c.packet, 0, c.packet[0]^0x20), meta{now: now}, next, nil)
		})
	}
}

// A segmented packet is a GSO packet and the segments that it becomes on the wire.
type segmented struct {
	header  []byte // of link, network and transport
	payload int
	size    int
}

func (s segmented) frame() []byte { return append(slices.Clone(s.header), zeros(s.payload)...) }

// wire returns the bytes of all segments, with overhead and mpu applied to each.
func (s segmented) wire(overhead, mpu int) uint64 {
	total, rest := 0, s.payload
	for {
		part := min(rest, s.size)
		if s.size == 0 {
			part = rest
		}
		total += max(len(s.header)+part+overhead, mpu)
		if rest -= part; rest <= 0 {
			return uint64(total)
		}
	}
}

func (s segmented) count() int {
	if s.size == 0 {
		return 1
	}
	return max(1, (s.payload+s.size-1)/s.size)
}

func TestWireBytes(t *testing.T) {
	options := extension(protoTCP, 4)
	headers := map[string][]byte{
		"TCP":                    ether(typeIPv4, ip4{proto: protoTCP}.with(tcpHeader(1, 2, 0))),
		"TCP with options":       ether(typeIPv4, ip4{proto: protoTCP, options: 8}.with(tcpHeader(1, 2, 12))),
		"TCP with all options":   ether(typeIPv4, ip4{proto: protoTCP, options: 40}.with(tcpHeader(1, 2, 40))),
		"TCP, tagged":            ether(tag8021Q, tag(1, typeIPv4), ip4{proto: protoTCP}.with(tcpHeader(1, 2, 12))),
		"TCP, tagged twice":      ether(tag8021D, tag(1, tag8021Q), tag(1, typeIPv6), ip6{proto: protoTCP}.with(tcpHeader(1, 2, 12))),
		"TCP on IPv6":            ether(typeIPv6, ip6{proto: protoTCP}.with(tcpHeader(1, 2, 0))),
		"TCP on IPv6, options":   ether(typeIPv6, ip6{proto: protoTCP}.with(tcpHeader(1, 2, 20))),
		"TCP behind extensions":  ether(typeIPv6, ip6{proto: protoDstOpts}.with(options, tcpHeader(1, 2, 12))),
		"UDP":                    ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))),
		"UDP on IPv6":            ether(typeIPv6, ip6{proto: protoUDP}.with(udpHeader(1, 2))),
		"a protocol without any": ether(typeIPv4, ip4{proto: 253}.with()),
	}
	cuts := []struct{ payload, size int }{
		{0, 0}, {1, 0}, {1000, 0}, {1000, 1000}, {1001, 1000}, {1999, 1000}, {2000, 1000}, {2001, 1000}, {3000, 536}, {3, 1}, {700, 7}, {1, 1460}, {3000, 65535},
	}
	framings := []policy.Framing{{}, {Overhead: 38, MPU: 84}, {Overhead: -14}, {Overhead: -64}, {MPU: 256}, {Overhead: 256, MPU: 64}}
	var now uint64
	hooks := map[string]bpf.AbiHook{"egress": egress(), "ingress": egress()}
	in := hooks["ingress"]
	in.Ingress = 1
	hooks["ingress"] = in
	for name, hook := range hooks {
		r := newRig(t, maps.Size{Rules: 2}, hook)
		for _, f := range framings {
			now += uint64(time.Hour)
			ids := map[byte]uint32{}
			for _, p := range []string{"10.0.0.0/8", "2001:db8:1::/48"} {
				rule := wide(p, policy.GCRA)
				rule.Framing = f
				ids[byte(addr(prefix(p).Addr().String()).BitLen())] = r.put(rule, now).ID
			}
			for kind, header := range headers {
				id := ids[32]
				if bytes.Contains(header, addr(far6).AsSlice()) {
					id = ids[128]
				}
				for _, cut := range cuts {
					t.Run(fmt.Sprintf("%s/%d/%d/%s/%d by %d", name, f.Overhead, f.MPU, kind, cut.payload, cut.size), func(t *testing.T) {
						r.TB = t
						now += uint64(time.Hour)
						s := segmented{header, cut.payload, cut.size}
						frame, m := s.frame(), meta{now: now, segSize: uint32(cut.size)}
						want := s.wire(int(f.Overhead), int(f.MPU))
						if hook.Ingress == 0 && cut.size > 0 {
							// With the kernel's wire_len, which includes the headers of all segments.
							m.segs, m.wireLen = uint32(s.count()), uint32(s.wire(0, 0))
							if m.wireLen > 1<<16 {
								t.Fatal("too large for a test run")
							}
						}
						counted := map[uint32]maps.Counters{id: segments(s.count(), passed(want))}
						r.want(r.program(), frame, m, next, counted)
						if hook.Ingress == 0 && cut.size > 0 && kind != "a protocol without any" {
							// From a guest: the segments are not counted yet.
							m.segs = 0
							r.want(r.program(), frame, m, next, counted)
						}
					})
				}
			}
		}
	}
}

// No packet is large enough to overflow a level.
func TestWireBytesAreBounded(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 1}, ingress())
	rule := wide("2001:db8::/48", policy.GCRA)
	rule.Framing.Overhead = policy.MaxOverhead
	id := r.put(rule, 0).ID
	header := ether(typeIPv6, ip6{proto: protoHopByHop}.with(extension(protoTCP, 160), tcpHeader(1, 2, 40)))
	frame := append(header, zeros(3500-len(header))...)
	s := segmented{header, len(frame) - len(header), 1}
	want := s.wire(policy.MaxOverhead, 0)
	r.want(r.program(), frame, meta{now: 1, segSize: 1}, next, map[uint32]maps.Counters{id: segments(s.count(), passed(want))})
	// A packet made of headers, from a malicious guest or device.
	rule.Framing.Overhead = 32000
	r.put(rule, 1)
	r.want(r.program(), frame, meta{now: 1 << 50, segSize: 1}, next, map[uint32]maps.Counters{id: segments(s.count(), passed(1<<24-1))})
}

// A tag in metadata counts as if it were in the packet, for each segment.
func TestTagInMetadata(t *testing.T) {
	for name, hook := range map[string]bpf.AbiHook{"egress": egress(), "ingress": ingress()} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1}, hook)
			far := "10.0.0.0/8"
			if hook.Ingress == 1 {
				far = "192.0.2.0/24"
			}
			rule := wide(far, policy.GCRA)
			id := r.put(rule, 0).ID
			s := segmented{ether(typeIPv4, ip4{proto: protoTCP}.with(tcpHeader(1, 2, 12))), 1500, 0}
			many := slices.Repeat([]uint16{tag8021Q}, 8) // Linux strips them all
			for i, tags := range [][]uint16{{tag8021Q}, {tag8021D}, {tag8021Q, tag8021D}, {tag8021Q, tag8021Q, tag8021D}, many} {
				p := pusher(t, r.program(), tags...)
				want := uint64(len(s.header) + s.payload + 4*len(tags))
				before := r.counters()[id]
				if v, _ := send(t, p, s.frame(), meta{now: 1e9}); v != next {
					t.Errorf("%x: verdict %#x", tags, v)
				}
				if got := since(before, r.counters()[id]); got != passed(want) {
					t.Errorf("%x counted %+v, want %d bytes", tags, got, want)
				}
				if i > 0 {
					continue
				}
				// 3 segments, of 3 headers with a tag each.
				m := meta{now: 1e9, segSize: 700}
				if hook.Ingress == 0 {
					m.segs, m.wireLen = 3, uint32(1500+3*len(s.header))
				}
				before = r.counters()[id]
				send(t, p, s.frame(), m)
				if got, want := since(before, r.counters()[id]), segments(3, passed(uint64(1500+3*(len(s.header)+4)))); got != want {
					t.Errorf("%x, segments counted %+v, want %+v", tags, got, want)
				}
			}
		})
	}
}

// Excess packets are dropped, marked or passed; a mark is visible in the packet.
func TestExcess(t *testing.T) {
	payload := zeros(60)
	v4 := func(tos uint8) []byte {
		return ether(typeIPv4, ip4{proto: protoUDP, tos: tos}.with(udpHeader(1, 2), payload))
	}
	options := func(tos uint8) []byte {
		return ether(typeIPv4, ip4{proto: protoUDP, tos: tos, options: 8}.with(udpHeader(1, 2), payload))
	}
	tags := func(tos uint8) []byte {
		return ether(tag8021D, tag(1, tag8021Q), tag(2, typeIPv4), ip4{proto: protoUDP, tos: tos}.with(udpHeader(1, 2), payload))
	}
	v6 := func(class uint8) []byte {
		return ether(typeIPv6, ip6{proto: protoUDP, class: class}.with(udpHeader(1, 2), payload))
	}
	tagged6 := func(class uint8) []byte {
		return ether(tag8021Q, tag(1, typeIPv6), ip6{proto: protoUDP, class: class}.with(udpHeader(1, 2), payload))
	}
	now := uint64(1e9)
	for _, algorithm := range algorithms {
		r := newRig(t, maps.Size{Rules: 2}, egress())
		for _, excess := range []policy.Excess{policy.Drop, policy.ECN, policy.Pass} {
			now += uint64(time.Hour)
			ids := map[int]uint32{}
			for family, p := range map[int]string{4: "10.0.0.0/8", 6: "2001:db8:1::/48"} {
				ids[family] = r.put(policy.Rule{Prefix: prefix(p), Rate: 8000, Capacity: 200, Algorithm: algorithm, Excess: excess}, now).ID
			}
			for _, c := range []struct {
				name   string
				frame  func(tos uint8) []byte
				family int
				l3     int
			}{{"IPv4", v4, 4, 14}, {"IPv4 with options", options, 4, 14}, {"IPv4 behind tags", tags, 4, 22}, {"IPv6", v6, 6, 14}, {"IPv6 behind a tag", tagged6, 6, 18}} {
				// The ECN bits of RFC 3168 (0 to 3) behind a DSCP with recognisable bits.
				for _, tos := range []uint8{0, 1, 2, 3, 0xfc, 0xfd, 0xfe, 0xff, 0xb9, 0x46} {
					t.Run(fmt.Sprintf("%v/%v/%s/%#x", algorithm, excess, c.name, tos), func(t *testing.T) {
						r.TB = t
						now += uint64(time.Hour)
						p, m, id, frame := r.program(), meta{now: now}, ids[c.family], c.frame(tos)
						size := uint64(len(frame))
						r.want(p, c.frame(0), m, next, map[uint32]maps.Counters{id: passed(size)})
						switch {
						case excess == policy.Pass:
							r.want(p, frame, m, next, map[uint32]maps.Counters{id: shadowed(size)})
						case excess == policy.Drop || tos&3 == 0:
							r.want(p, frame, m, drop, map[uint32]maps.Counters{id: dropped(size)})
						default:
							after := r.want(p, frame, m, next, map[uint32]maps.Counters{id: marked(size)})
							if want := c.frame(tos | 3); !bytes.Equal(after, want) {
								t.Errorf("marked packet\n%x, want\n%x", after, want)
							}
							if c.family == 4 && onesSum(after[c.l3:c.l3+int(after[c.l3]&15)*4]) != 0xffff {
								t.Errorf("wrong checksum in %x", after)
							}
							// Charged: the third packet would exceed twice the capacity.
							wantLevel := 2 * size
							if 3*size <= 400 {
								r.want(p, frame, m, next, map[uint32]maps.Counters{id: marked(size)})
								wantLevel = 3 * size
							}
							r.want(p, frame, m, drop, map[uint32]maps.Counters{id: dropped(size)})
							e, _ := r.set.Match(addr(map[int]string{4: far4, 6: far6}[c.family]))
							if got := r.set.Store.SharedLevel(e, now) >> 20; got != wantLevel {
								t.Errorf("level %d bytes, want %d", got, wantLevel)
							}
						}
					})
				}
			}
		}
	}
}

// A packet whose bucket cannot be updated is charged to the spill bucket, whatever the rule says of failures.
func TestContended(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2)))
	size := uint64(len(frame))
	for _, algorithm := range algorithms {
		for _, fail := range []policy.Fail{policy.Open, policy.Closed} {
			for _, each := range scopes {
				if each == policy.EachAll {
					continue
				}
				t.Run(fmt.Sprintf("%v/%v/%v", algorithm, fail, policy.Each{Kind: each}), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, egress())
					rule := wide("10.0.0.0/8", algorithm)
					rule.Fail, rule.Each.Kind = fail, each
					e := r.put(rule, 0)
					// As if another CPU locked the bucket and never unlocked it.
					kept := r.firstRule()
					binary.NativeEndian.PutUint64(kept, 1<<40|1)
					testenv.Must(t, r.set.Store.Replacements()[bpf.ShapectlMapRules].Put(uint32(0), kept))
					var line bpf.AbiLine
					line.Slot[1].Tat = 1
					if err := r.set.Store.Replacements()[".data.table"].Put(uint32(0), line); err != nil {
						t.Fatal(err)
					}
					r.want(r.program(), frame, meta{now: 1e9}, next, map[uint32]maps.Counters{e.ID: spilled(passed(size))})
				})
			}
		}
	}
}

// While four keys of a line have a level, the fifth is charged to the spill bucket.
func TestSpillBucket(t *testing.T) {
	for _, algorithm := range algorithms {
		r := newRig(t, maps.Size{Rules: 2, Buckets: 4}, egress())
		rule := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 2000, Algorithm: algorithm, Each: policy.Each{Kind: policy.EachHost}}
		e := r.put(rule, 0)
		p := r.program()
		to := func(host byte) []byte {
			return ether(typeIPv4, ip4{dst: fmt.Sprintf("10.0.0.%d", host), proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
		}
		pass, excess := map[uint32]maps.Counters{e.ID: passed(1000)}, map[uint32]maps.Counters{e.ID: dropped(1000)}
		now := uint64(1e9)
		for host := range byte(4) {
			r.want(p, to(host), meta{now: now}, next, pass)
			r.want(p, to(host), meta{now: now}, next, pass)
		}
		if got := r.set.Store.SharedLevel(e, now); got != 0 {
			t.Errorf("%v: the level of the spill bucket is %d units before any key needed it", algorithm, got)
		}
		// Further keys share the spill bucket.
		r.want(p, to(10), meta{now: now}, next, map[uint32]maps.Counters{e.ID: spilled(passed(1000))})
		r.want(p, to(11), meta{now: now}, next, map[uint32]maps.Counters{e.ID: spilled(passed(1000))})
		for host := byte(10); host < 20; host++ {
			r.want(p, to(host), meta{now: now}, drop, map[uint32]maps.Counters{e.ID: spilled(dropped(1000))})
		}
		if got := r.set.Store.SharedLevel(e, now) >> 20; got != 2000 {
			t.Errorf("%v: the level of the spill bucket is %d bytes, want 2000", algorithm, got)
		}
		for host := range byte(4) {
			r.want(p, to(host), meta{now: now}, drop, excess) // and every level was kept
		}
		if got := len(r.bucketsOf(e, now)); got != 4 {
			t.Errorf("%v: %d buckets have a level, want 4", algorithm, got)
		}
		// 2000 bytes drain in 2 s: then a slot is allocated to another key.
		now += 2*uint64(time.Second) + 1<<21
		r.want(p, to(30), meta{now: now}, next, pass)
		r.want(p, to(30), meta{now: now}, next, pass)
		r.want(p, to(30), meta{now: now}, drop, excess)
	}
}

// A key keeps its slot until its bucket is empty by the clock of every CPU. Clocks
// differ by less than a millisecond.
func TestSlotIsKeptForSlowClocks(t *testing.T) {
	for _, algorithm := range algorithms {
		r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, egress())
		rule := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8_000_000, Capacity: 2000, Algorithm: algorithm, Each: policy.Each{Kind: policy.EachHost}}
		e := r.put(rule, 0)
		p := r.program()
		pass, excess := map[uint32]maps.Counters{e.ID: passed(2000)}, map[uint32]maps.Counters{e.ID: dropped(2000)}
		now := uint64(1e9)
		for host := range 4 {
			r.want(p, toHost(host, 2000), meta{now: now}, next, pass)
		}
		now += 2000 * 1000 // empty by this CPU's clock
		r.want(p, toHost(10, 2000), meta{now: now}, next, map[uint32]maps.Counters{e.ID: spilled(passed(2000))})
		for host := range 4 {
			r.want(p, toHost(host, 2000), meta{now: now - 1_000_000}, drop, excess)
		}
		if got := r.set.Store.SharedLevel(e, now) >> 20; got != 2000 {
			t.Errorf("%v: the level of the spill bucket is %d bytes, want 2000 of the fifth host", algorithm, got)
		}
		r.want(p, toHost(11, 2000), meta{now: now + 1_100_000}, next, pass)
	}
}
