package bpf_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A layer prepends headers to a payload.
type layer func(inside []byte) []byte

// in nests layers, the outermost first.
func in(layers ...layer) layer {
	return func(inside []byte) []byte {
		for _, l := range slices.Backward(layers) {
			inside = l(inside)
		}
		return inside
	}
}

func fixed(header ...byte) layer {
	return func(inside []byte) []byte { return slices.Concat(header, inside) }
}

func link(kind uint16) layer {
	return func(inside []byte) []byte { return ether(kind, inside) }
}

// Outer headers have the default addresses, which rules match. Inner ones have others.
func outer4(proto uint8) layer {
	return in(link(typeIPv4), func(inside []byte) []byte { return ip4{proto: proto}.with(inside) })
}

func outer6(proto uint8) layer {
	return in(link(typeIPv6), func(inside []byte) []byte { return ip6{proto: proto}.with(inside) })
}

func inner4(proto uint8) layer {
	return func(inside []byte) []byte {
		return ip4{src: "172.16.0.1", dst: "172.16.0.2", proto: proto}.with(inside)
	}
}

func inner6(proto uint8) layer {
	return func(inside []byte) []byte { return ip6{src: "fd00::1", dst: "fd00::2", proto: proto}.with(inside) }
}

const (
	protoIPIP = 4
	protoIPv6 = 41

	typeBridged = 0x6558 // an Ethernet frame, in GRE and Geneve
)

var (
	byTCP = fixed(tcpHeader(1, 2, 12)...)
	byUDP = fixed(udpHeader(1, 2)...)
	vxlan = fixed(append(udpHeader(50000, 4789), 8, 0, 0, 0, 0xf0, 1, 2, 0)...)
)

// vxlanGPE names the protocol of its payload.
func vxlanGPE(kind byte) layer {
	return fixed(append(udpHeader(50000, 4790), 0x0c, 0, 0, kind, 0, 1, 2, 0)...)
}

// geneve has options of the given number of words.
func geneve(kind uint16, words byte) layer {
	h := append(udpHeader(50000, 6081), words, 0, byte(kind>>8), byte(kind), 0, 1, 2, 0)
	return fixed(append(h, zeros(4*int(words))...)...)
}

// gre has the optional fields of its flags: checksum (0x80), key (0x20), sequence number (0x10).
func gre(flags uint8, kind uint16) layer {
	h := []byte{flags, 0, byte(kind >> 8), byte(kind)}
	for _, field := range []uint8{0x80, 0x20, 0x10} {
		if flags&field != 0 {
			h = append(h, zeros(4)...)
		}
	}
	return fixed(h...)
}

// wireRigs count all packets in both directions, with one rule per family.
type wireRigs struct {
	rigs map[string]*rig
	now  uint64
}

func newWireRigs(t *testing.T, f policy.Framing) *wireRigs {
	w := &wireRigs{rigs: map[string]*rig{}, now: 1e9}
	for name, hook := range map[string]bpf.AbiHook{"egress": egress(), "ingress": ingress()} {
		w.rigs[name] = newRig(t, maps.Size{Rules: 2}, hook)
		for _, everything := range []string{"0.0.0.0/0", "::/0"} {
			rule := wide(everything, policy.GCRA)
			rule.Framing = f
			w.rigs[name].put(rule, 0)
		}
	}
	return w
}

// count returns the counted bytes and packets of a GSO packet with segs segments of a size.
func (w *wireRigs) count(t *testing.T, direction string, frame []byte, size, segs int) (bytes, packets uint64) {
	t.Helper()
	r := w.rigs[direction]
	w.now += uint64(time.Hour)
	m := meta{now: w.now, segSize: uint32(size), segs: uint32(segs)}
	if direction == "egress" {
		// Before Linux 6.19 the kernel adds only the outer headers, and assumes UDP behind them.
		header := 14 + 20 + 8
		if frame[12] == typeIPv6>>8 {
			header += 20
		}
		m.wireLen = uint32(len(frame) + max(0, segs-1)*header)
	}
	before := r.counters()
	if v, _ := send(t, r.program(), frame, m); v != next {
		t.Errorf("%s: verdict %#x", direction, v)
	}
	for id, after := range r.counters() {
		c := since(before[id], after)
		bytes, packets = bytes+c.PassedBytes, packets+c.PassedPackets
	}
	return bytes, packets
}

// Each segment inside a tunnel repeats all headers before its payload, in both directions.
func TestWireBytesInTunnels(t *testing.T) {
	tunnels := map[string]layer{}
	for family, outer := range map[string]func(uint8) layer{"IPv4": outer4, "IPv6": outer6} {
		for transport, segments := range map[string]layer{
			"TCP over IPv4": in(inner4(protoTCP), byTCP), "UDP over IPv4": in(inner4(protoUDP), byUDP),
			"TCP over IPv6": in(inner6(protoTCP), byTCP), "UDP over IPv6": in(inner6(protoUDP), byUDP),
		} {
			kind, ipip, gpe := uint16(typeIPv4), uint8(protoIPIP), byte(1)
			if transport[len(transport)-1] == '6' {
				kind, ipip, gpe = typeIPv6, protoIPv6, 2
			}
			frame := in(link(kind), segments)
			for name, layers := range map[string]layer{
				"IP in IP":             in(outer(ipip), segments),
				"GRE":                  in(outer(protoGRE), gre(0, kind), segments),
				"GRE, checksum":        in(outer(protoGRE), gre(0x80, kind), segments),
				"GRE, key":             in(outer(protoGRE), gre(0x20, kind), segments),
				"GRE, sequence":        in(outer(protoGRE), gre(0x10, kind), segments),
				"GRE, all":             in(outer(protoGRE), gre(0xb0, kind), segments),
				"GRE, bridged":         in(outer(protoGRE), gre(0x20, typeBridged), frame),
				"VXLAN":                in(outer(protoUDP), vxlan, frame),
				"VXLAN, group policy":  in(outer(protoUDP), fixed(append(udpHeader(5, 8472), 0x88, 0, 0x65, 0x58, 0, 1, 2, 0)...), frame),
				"VXLAN GPE":            in(outer(protoUDP), vxlanGPE(gpe), segments),
				"VXLAN GPE, bridged":   in(outer(protoUDP), vxlanGPE(3), frame),
				"VXLAN, tagged inside": in(outer(protoUDP), vxlan, func(b []byte) []byte { return ether(tag8021Q, tag(5, kind), segments(b)) }),
				"Geneve":               in(outer(protoUDP), geneve(typeBridged, 0), frame),
				"Geneve, options":      in(outer(protoUDP), geneve(typeBridged, 10), frame),
				"Geneve of IP":         in(outer(protoUDP), geneve(kind, 2), segments),
				"IP in UDP":            in(outer(protoUDP), fixed(udpHeader(50000, 5555)...), segments),
				"GRE in VXLAN":         in(outer(protoUDP), vxlan, link(typeIPv4), inner4(protoGRE), gre(0x20, kind), segments),
				"VXLAN in IP in GRE":   in(outer(protoGRE), gre(0, typeIPv6), inner6(protoIPIP), inner4(protoUDP), vxlan, frame),
				"VXLAN, four times": in(outer(protoUDP), vxlan, link(typeIPv4), inner4(protoUDP), vxlan, link(typeIPv6), inner6(protoUDP), vxlan,
					link(typeIPv4), inner4(protoUDP), vxlan, frame),
				"behind extensions": in(link(typeIPv6), func(b []byte) []byte {
					return ip6{proto: protoDstOpts}.with(extension(ipip, 2), segments(b))
				}),
			} {
				tunnels[fmt.Sprintf("%s of %s over %s", name, transport, family)] = layers
			}
		}
	}
	cuts := []struct{ payload, size int }{{2796, 1398}, {2797, 1398}, {2795, 1398}, {1500, 1398}, {2500, 100}, {2449, 50}, {300, 7}, {1000, 1398}}
	for _, f := range []policy.Framing{{}, {Overhead: 20, MPU: 256}} {
		w := newWireRigs(t, f)
		for name, layers := range tunnels {
			t.Run(fmt.Sprintf("%v/%s", f, name), func(t *testing.T) {
				for _, cut := range cuts {
					frame := layers(zeros(cut.payload))
					s := segmented{layers(nil), cut.payload, cut.size}
					for direction := range w.rigs {
						want := s.wire(int(f.Overhead), int(f.MPU))
						bytes, packets := w.count(t, direction, frame, cut.size, s.count())
						if bytes != want || packets != uint64(s.count()) {
							t.Errorf("%s, %d by %d: counted %d bytes in %d packets, want %d in %d", direction, cut.payload, cut.size, bytes, packets, want, s.count())
						}
						// From a guest: the segments are not counted yet, and there may seem to be one more.
						bytes, packets = w.count(t, direction, frame, cut.size, 0)
						more := uint64(max(len(s.header)+int(f.Overhead), int(f.MPU)))
						if bytes < want || bytes > want+more || packets < uint64(s.count()) || packets > uint64(s.count())+1 {
							t.Errorf("%s, %d by %d from a guest: counted %d bytes in %d packets, want %d in %d", direction, cut.payload, cut.size, bytes, packets, want, s.count())
						}
					}
				}
			})
		}
	}
}

// Segmented UDP counts as such, whatever its payload looks like, except from a guest.
func TestWireBytesOfUDPThatLooksLikeTunnels(t *testing.T) {
	w := newWireRigs(t, policy.Framing{})
	carried := in(link(typeIPv4), inner4(protoTCP), byTCP)(zeros(500))
	for name, one := range map[string][]byte{
		"VXLAN":      in(vxlan)(carried)[8:],
		"Geneve":     geneve(typeBridged, 3)(carried)[8:],
		"IP":         carried[14:],
		"QUIC":       append([]byte{0x45, 17, 9, 200, 1, 2, 3, 4, 5, 6}, zeros(500)...),
		"all ones":   slices.Repeat([]byte{255}, 500),
		"half VXLAN": vxlan(nil)[8:],
	} {
		for family, outer := range map[string]func(uint8) layer{"IPv4": outer4, "IPv6": outer6} {
			for direction := range w.rigs {
				payload := slices.Repeat(one, 3)
				frame := in(outer(protoUDP), byUDP)(payload)
				s := segmented{in(outer(protoUDP), byUDP)(nil), len(payload), len(one)}
				if bytes, packets := w.count(t, direction, frame, len(one), 3); bytes != s.wire(0, 0) || packets != 3 {
					t.Errorf("%s of %s, %s: counted %d bytes in %d packets, want %d in 3", name, family, direction, bytes, packets, s.wire(0, 0))
				}
				if bytes, _ := w.count(t, "ingress", frame, len(one), 0); bytes < s.wire(0, 0) {
					t.Errorf("%s of %s, from a guest: counted %d bytes, which is less than %d", name, family, bytes, s.wire(0, 0))
				}
			}
		}
	}
}

// The payload of UDP segments cannot make them count less.
func TestWireBytesOfUDPWithLongHeadersInside(t *testing.T) {
	w := newWireRigs(t, policy.Framing{})
	long := func(inside []byte) []byte {
		return ip6{proto: protoDstOpts}.with(extension(protoDstOpts, 120), extension(protoUDP, 120), udpHeader(1, 2), inside)
	}
	for name, headers := range map[string]layer{
		"VXLAN":                 in(outer4(protoUDP), vxlan, link(typeIPv6), long),
		"Geneve":                in(outer4(protoUDP), geneve(typeIPv6, 63), long),
		"IP":                    in(outer4(protoUDP), byUDP, long),
		"VXLAN in VXLAN":        in(outer4(protoUDP), vxlan, link(typeIPv4), inner4(protoUDP), vxlan, link(typeIPv6), long),
		"wrong TCP data offset": in(outer4(protoUDP), vxlan, link(typeIPv4), inner4(protoTCP), fixed(patch(tcpHeader(1, 2, 0), 12, 0xf0)...)),
	} {
		for _, size := range []int{60, 100, 700} {
			frame := headers(zeros(3000 - len(headers(nil))))
			s := segmented{frame[:14+20+8], len(frame) - 14 - 20 - 8, size}
			for direction := range w.rigs {
				for _, segs := range []int{s.count(), 0} {
					if bytes, packets := w.count(t, direction, frame, size, segs); bytes < s.wire(0, 0) || segs > 0 && packets != uint64(segs) {
						t.Errorf("%s by %d, %s, gso_segs %d: counted %d bytes in %d packets, but up to %d in %d may be on the wire", name, size, direction, segs,
							bytes, packets, s.wire(0, 0), s.count())
					}
				}
			}
		}
	}
}

// Headers inside a tunnel that cannot be read count as the longest possible headers.
func TestWireBytesOfUnreadableHeaders(t *testing.T) {
	w := newWireRigs(t, policy.Framing{})
	const longest = 14 + 4 + 4 + 40 + 60
	segments := in(inner4(protoTCP), byTCP)
	deep := in(outer4(protoIPIP), inner4(protoIPIP), inner4(protoIPIP), inner4(protoIPIP), inner4(protoIPIP))
	for name, c := range map[string]struct{ read, rest layer }{
		"GRE of MPLS":       {outer4(protoGRE), in(gre(0, 0x8847), fixed(0, 1, 0x11, 64), segments)},
		"GRE, version 1":    {outer4(protoGRE), in(fixed(0x20, 1, 8, 0), segments)},
		"GRE with routing":  {outer4(protoGRE), in(fixed(0x40, 0, 8, 0), segments)},
		"ICMP inside":       {in(outer4(protoIPIP), inner4(protoICMP)), fixed(icmp(8)...)},
		"a fragment inside": {in(outer4(protoUDP), vxlan, link(typeIPv4), func(b []byte) []byte { return ip4{proto: protoUDP, fragment: 100}.with(b) }), fixed()},
		"five deep":         {deep, in(inner4(protoIPIP), segments)},
		"nine deep":         {deep, in(inner4(protoIPIP), inner4(protoIPIP), inner4(protoIPIP), inner4(protoIPIP), segments)},
	} {
		t.Run(name, func(t *testing.T) {
			packet := in(c.read, c.rest)
			const payload, size = 2800, 700
			truth := segmented{packet(nil), payload, size}.wire(0, 0)
			for direction := range w.rigs {
				frame := packet(zeros(payload))
				bytes, packets := w.count(t, direction, frame, size, 4)
				want := uint64(len(frame) + (int(packets)-1)*(len(c.read(nil))+longest))
				if bytes != want || bytes < truth || packets < 4 || packets > 5 {
					t.Errorf("%s: counted %d bytes in %d packets, want %d in 4; %d are on the wire", direction, bytes, packets, want, truth)
				}
			}
		})
	}
}

// SCTP segments differ in size: Linux gives their number, and 65535 as the size.
func TestWireBytesOfSCTP(t *testing.T) {
	w := newWireRigs(t, policy.Framing{})
	for name, headers := range map[string]layer{
		"SCTP": outer4(protoSCTP), "SCTP in VXLAN": in(outer4(protoUDP), vxlan, link(typeIPv4), inner4(protoSCTP)),
	} {
		frame := in(headers, fixed(ports(1, 2, 8)...))(zeros(2900))
		for direction := range w.rigs {
			want := uint64(len(frame) + 2*(len(headers(nil))+12))
			if bytes, packets := w.count(t, direction, frame, 65535, 3); bytes != want || packets != 3 {
				t.Errorf("%s, %s: counted %d bytes in %d packets, want %d in 3", name, direction, bytes, packets, want)
			}
		}
	}
}

// A merged packet counts as its packets on the wire, whatever its verdict.
func TestMergedPacketsCountAsTheirSegments(t *testing.T) {
	s := segmented{ether(typeIPv4, ip4{proto: protoTCP, tos: 2}.with(tcpHeader(1, 2, 0))), 2500, 1000}
	size := s.wire(0, 0)
	for name, c := range map[string]struct {
		rule   policy.Rule
		then   uint32
		second maps.Counters
	}{
		"drop": {policy.Rule{}, drop, dropped(size)},
		"pass": {policy.Rule{Excess: policy.Pass}, next, shadowed(size)},
		"mark": {policy.Rule{Excess: policy.ECN}, next, marked(size)},
		"delay": {
			policy.Rule{Excess: policy.Delay, Queue: 2 * size, ECNAbove: policy.Never}, next,
			maps.Counters{PassedPackets: 1, PassedBytes: size, DelayedPackets: 1, DelayedBytes: size},
		},
		"unlimited": {policy.Rule{Rate: policy.Unlimited}, next, passed(size)},
	} {
		for _, algorithm := range algorithms {
			if name == "delay" && algorithm == policy.Leaky {
				continue // all of its capacity is the queue
			}
			for direction, hook := range map[string]bpf.AbiHook{"egress": egress(), "ingress": egress()} {
				t.Run(fmt.Sprintf("%s/%v/%s", name, algorithm, direction), func(t *testing.T) {
					m := meta{now: 1e9, segSize: 1000, segs: 3}
					if direction == "ingress" {
						hook.Ingress = 1
					} else {
						m.wireLen = uint32(size)
					}
					r := newRig(t, maps.Size{Rules: 1}, hook)
					rule := c.rule
					rule.Prefix, rule.Algorithm = prefix("10.0.0.0/8"), algorithm
					if rule.Rate == 0 {
						rule.Rate, rule.Capacity = 8000, size
					}
					id := r.put(rule, 0).ID
					before := r.counters()[id]
					send(t, r.program(), s.frame(), m)
					if got, want := since(before, r.counters()[id]), segments(3, passed(size)); got != want {
						t.Errorf("first: counted %+v, want %+v", got, want)
					}
					before = r.counters()[id]
					if v, _ := send(t, r.program(), s.frame(), m); v != c.then {
						t.Errorf("second: verdict %#x, want %#x", v, c.then)
					}
					if got, want := since(before, r.counters()[id]), segments(3, c.second); got != want {
						t.Errorf("second: counted %+v, want %+v", got, want)
					}
					r.want(r.program(), ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2))), meta{now: 1 << 50}, next,
						map[uint32]maps.Counters{id: passed(42)})
					if got := r.counters()[id]; got.SKBs() != 3 || got.PassedPackets+got.DroppedPackets != 7 {
						t.Errorf("%d skbs with %+v, want 3 with 7 packets", got.SKBs(), got)
					}
				})
			}
		}
	}
}

// Each segment repeats all extension headers. Linux omits them in wire_len of packets
// that it routes.
func TestWireBytesBehindExtensions(t *testing.T) {
	w := newWireRigs(t, policy.Framing{})
	for _, n := range []int{1, 8, 9, 60, 256} {
		headers := in(outer6(protoDstOpts), func(inside []byte) []byte {
			for i := range n {
				next := uint8(protoDstOpts)
				if i == 0 {
					next = protoTCP
				}
				inside = append(extension(next, 0), inside...)
			}
			return inside
		})
		frame := headers(tcpHeader(1, 2, 0))
		segments := segmented{frame, 1000, 100}
		want := segments.wire(0, 0)
		for direction := range w.rigs {
			bytes, packets := w.count(t, direction, append(frame, zeros(1000)...), 100, 10)
			if bytes != want || packets != 10 {
				t.Errorf("%s, %d headers: counted %d bytes in %d packets, want %d in 10", direction, n, bytes, packets, want)
			}
		}
	}
}
