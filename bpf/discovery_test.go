package bpf_test

import (
	"fmt"
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Neighbour discovery (RFC 4861) passes uncharged and is counted, if its addresses are
// allowed for its type and no router forwards them. All similar packets are limited.
func TestNeighbourDiscovery(t *testing.T) {
	const (
		rs, ra, ns, na, redirect = 133, 134, 135, 136, 137

		none, link, global  = "::", "fe80::1", "2001:db8::1"
		otherLink, endOfTen = "fe80::2", "febf:ffff::9"
		otherGlobal, local  = "2001:db8:1::1", "fd00::1"
		nodes, routers      = "ff02::1", "ff02::2"
		solicited           = "ff02::1:ff00:1"
		wide1, wide2        = "ff05::2", "ff0e::1:ff00:1"
		almost              = "ff02::1:fe00:1"
	)
	type message struct {
		kind     uint8
		src, dst string
	}
	genuine := []message{
		{rs, none, routers}, {rs, link, routers}, {rs, global, routers}, {rs, link, otherLink}, {rs, link, global},
		{ra, link, nodes}, {ra, link, otherLink}, {ra, link, global}, {ra, endOfTen, nodes},
		{ns, none, solicited}, {ns, link, solicited}, {ns, global, solicited}, {ns, local, solicited},
		{ns, link, otherLink}, {ns, link, global}, {ns, global, link},
		{na, link, nodes}, {na, global, nodes}, {na, link, otherLink}, {na, global, link}, {na, link, global},
		{redirect, link, global}, {redirect, link, otherLink},
	}
	limited := []message{
		{132, link, nodes}, {138, link, nodes}, {128, link, otherLink},
		// A router would forward these.
		{rs, global, otherGlobal}, {ra, global, otherGlobal}, {ns, global, otherGlobal}, {na, global, otherGlobal}, {redirect, global, otherGlobal},
		{ns, local, otherGlobal}, {na, global, local}, {ns, "fec0::1", global}, {ns, "fe7f::1", global},
		{rs, global, wide1}, {ns, global, wide2}, {na, global, "ff0e::1"},
		// RFC 4861 sends no such packets.
		{rs, link, nodes}, {rs, none, link}, {rs, none, global}, {rs, link, solicited},
		{ra, global, nodes}, {ra, none, nodes}, {ra, global, link}, {ra, link, routers}, {ra, link, solicited},
		{ns, none, link}, {ns, none, global}, {ns, link, nodes}, {ns, link, routers}, {ns, link, almost}, {ns, link, "ff02::2:ff00:1"}, {ns, link, "ff02:1::1:ff00:1"},
		{na, none, nodes}, {na, none, link}, {na, link, solicited}, {na, link, routers}, {na, nodes, nodes}, {ns, nodes, link},
		{redirect, global, nodes}, {redirect, link, nodes}, {redirect, global, link}, {redirect, none, link},
	}
	header := func(m message) ip6 { return ip6{src: m.src, dst: m.dst, proto: protoICMPv6, hops: 255} }
	for name, hook := range map[string]bpf.AbiHook{"egress": egress(), "ingress": ingress()} {
		for _, algorithm := range algorithms {
			r := newRig(t, maps.Size{Rules: 1}, hook)
			// A full rule: every packet that is limited is dropped.
			full := policy.Rule{Prefix: prefix("::/0"), Rate: 8, Capacity: 1, Algorithm: algorithm}
			id := r.put(full, 0).ID
			first := ether(typeIPv6, ip6{proto: protoUDP}.with(udpHeader(1, 2)))
			r.want(r.program(), first, meta{now: 1e9}, next, map[uint32]maps.Counters{id: passed(uint64(len(first)))})
			see := func(what string, frame []byte, m meta, exempt bool) {
				t.Run(fmt.Sprintf("%s/%v/%s", name, algorithm, what), func(t *testing.T) {
					r := *r
					r.TB = t
					m.now = 1e9
					if exempt {
						r.want(r.program(), frame, m, next, map[uint32]maps.Counters{id: {ExemptPackets: 1}})
					} else {
						r.want(r.program(), frame, m, drop, map[uint32]maps.Counters{id: dropped(uint64(len(frame)))})
					}
				})
			}
			for i, m := range append(genuine, limited...) {
				what := fmt.Sprintf("%d from %s to %s", m.kind, m.src, m.dst)
				see(what, ether(typeIPv6, header(m).with(icmp(m.kind))), meta{}, i < len(genuine))
				see(what+", tagged", ether(tag8021Q, tag(1, typeIPv6), header(m).with(icmp(m.kind))), meta{}, i < len(genuine))
				see(what+", tagged twice", ether(tag8021D, tag(1, tag8021Q), tag(2, typeIPv6), header(m).with(icmp(m.kind))), meta{}, i < len(genuine))
			}
			m := message{ns, link, otherLink}
			far := header(m)
			far.hops = 254
			unsaid := ether(typeIPv6, header(m).with(icmp(ns), zeros(1233)))
			unsaid[14+4], unsaid[14+5] = 0, 32
			behind := func(proto uint8, between ...[]byte) []byte {
				h := header(m)
				h.proto = proto
				return ether(typeIPv6, h.with(append(between, icmp(ns))...))
			}
			for what, c := range map[string]struct {
				frame  []byte
				exempt bool
			}{
				"1280 bytes":                  {ether(typeIPv6, header(m).with(icmp(ns), zeros(1232))), true},
				"1280 bytes, tagged":          {ether(tag8021Q, tag(1, typeIPv6), header(m).with(icmp(ns), zeros(1232))), true},
				"1281 bytes":                  {ether(typeIPv6, header(m).with(icmp(ns), zeros(1233))), false},
				"1281 bytes, tagged":          {ether(tag8021Q, tag(1, typeIPv6), header(m).with(icmp(ns), zeros(1233))), false},
				"1281 bytes, length field 72": {unsaid, false},
				"length field beyond limit":   {patch(ether(typeIPv6, header(m).with(icmp(ns))), 14+4, 5), false},
				"from another link":           {ether(typeIPv6, far.with(icmp(ns))), false},
				"another code":                {ether(typeIPv6, header(m).with(patch(icmp(ns), 1, 1))), false},
				"behind hop-by-hop":           {behind(protoHopByHop, extension(protoICMPv6, 0)), false},
				"behind destination options":  {behind(protoDstOpts, extension(protoICMPv6, 0)), false},
				"a whole packet in fragments": {behind(protoFragment, fragment(protoICMPv6, 0, false)), false},
				"a first fragment":            {behind(protoFragment, fragment(protoICMPv6, 0, true)), false},
				"without a type":              {ether(typeIPv6, header(m).with()), false},
				"cut off behind its type":     {ether(typeIPv6, header(m).with([]byte{ns})), false},
			} {
				see(what, c.frame, meta{}, c.exempt)
			}
			// A guest claims that this is a GSO packet.
			frame := ether(typeIPv6, header(m).with(icmp(ns), zeros(100)))
			before := r.counters()[id]
			if v, _ := send(t, r.program(), frame, meta{now: 1e9, segSize: 10, wireLen: uint32(len(frame))}); v != drop {
				t.Errorf("%s: segmented: verdict %#x", name, v)
			}
			if got := since(before, r.counters()[id]); got.ExemptPackets != 0 || got.DroppedPackets == 0 {
				t.Errorf("%s: segmented: counted %+v", name, got)
			}
		}
	}
}

// The rule of the longest prefix counts exempt packets, even if it is unlimited. Without a match no rule does.
func TestExemptPacketsOfTheLongestPrefix(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 4}, egress())
	wider := r.put(wide("fe80::/10", policy.GCRA), 0).ID
	host := r.put(policy.Rule{Prefix: prefix("fe80::2/128"), Rate: policy.Unlimited}, 0).ID
	to := func(dst string) []byte {
		return ether(typeIPv6, ip6{src: "fe80::1", dst: dst, proto: protoICMPv6, hops: 255}.with(icmp(136)))
	}
	one := maps.Counters{ExemptPackets: 1}
	r.want(r.program(), to("fe80::3"), meta{now: 1}, next, map[uint32]maps.Counters{wider: one})
	r.want(r.program(), to("fe80::2"), meta{now: 1}, next, map[uint32]maps.Counters{host: one})
	r.want(r.program(), to("ff02::1"), meta{now: 1}, next, nil)
}
