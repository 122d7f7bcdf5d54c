package bpf_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// of is the prefix of a network, mark or VLAN.
func of(tb testing.TB, text string) (r policy.Rule) {
	tb.Helper()
	p, err := policy.ParsePrefix(text)
	testenv.Must(tb, err)
	r = wide("10.0.0.0/8", policy.GCRA)
	r.Prefix = p
	return r
}

// A packet meets the rule for its mark, else that for its outermost tag, else that for its address, in both families. Others are
// as without marks. No address is a mark.
func TestMarks(t *testing.T) {
	for name, hook := range map[string]bpf.AbiHook{far4: egress(), near4: ingress()} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 8, Marks: true}, hook)
			names := map[uint32]string{}
			for _, text := range []string{name, "::/0", "2001:db8:ff::1", "mark:0x10", "mark:0xfffffff0", "mark:0x80000001", "vlan:1", "vlan:4094"} {
				rule := of(t, text)
				switch text {
				case "mark:0x80000001":
					rule.Rate, rule.Capacity = policy.Unlimited, 0
				case "mark:0xfffffff0":
					rule.Rate, rule.Capacity = 8000, 1
				}
				names[r.put(rule, 0).ID] = text
			}
			udp4, udp6 := ip4{proto: protoUDP}.with(udpHeader(1, 2)), ip6{proto: protoUDP}.with(udpHeader(1, 2))
			spoofed := ip6{proto: protoUDP, src: "100::1:0:10", dst: "100::1:0:10"}.with(udpHeader(1, 2))
			nd := ip6{proto: protoICMPv6, hops: 255, src: "fe80::1", dst: "fe80::2"}.with([]byte{135, 0, 0, 0}, zeros(20))
			for i, c := range []struct {
				frame  []byte
				mark   uint32
				pushed []uint16
				want   string
			}{
				{ether(typeIPv4, udp4), 0, nil, name},
				{ether(typeIPv6, udp6), 0, nil, "::/0"},
				{ether(typeIPv4, udp4), 0x10, nil, "mark:0x10"},
				{ether(typeIPv6, udp6), 0x10, nil, "mark:0x10"},
				{ether(typeIPv4, udp4), 0x11, nil, name},
				{ether(typeIPv6, udp6), 0x1000, nil, "::/0"},
				{ether(typeIPv4, udp4), 0x80000001, nil, "mark:0x80000001"},
				{ether(typeIPv6, udp6), 0xfffffff0, nil, "mark:0xfffffff0"},
				{ether(typeIPv6, spoofed), 0, nil, "::/0"},
				{ether(typeIPv4, udp4), 0, []uint16{tag8021Q}, "vlan:1"},
				{ether(typeIPv6, udp6), 0, []uint16{tag8021D}, "vlan:1"},
				{ether(typeIPv4, udp4), 0, []uint16{tag8021Q, tag8021D}, name}, // the outermost is 2
				{ether(tag8021Q, tag(0x6ffe, typeIPv6), udp6), 0, nil, "vlan:4094"},
				{ether(tag8021D, tag(1, tag8021Q), tag(4094, typeIPv4), udp4), 0, nil, "vlan:1"},
				{ether(tag8021Q, tag(4094, typeIPv4), udp4), 0, []uint16{tag8021Q}, "vlan:1"},
				{ether(tag8021Q, tag(0, typeIPv4), udp4), 0, nil, name},
				{ether(tag8021Q, tag(4094, typeIPv6), udp6), 0x10, nil, "mark:0x10"},
				{ether(tag8021Q, tag(4094, typeIPv6), udp6), 0x11, nil, "vlan:4094"},
				{ether(typeARP, zeros(28)), 0x10, nil, ""},
				{ether(typeIPv6, nd), 0x10, nil, "exempt mark:0x10"},
			} {
				p := r.program()
				if c.pushed != nil {
					p = pusher(t, p, c.pushed...)
				}
				before := r.counters()
				v, _ := send(t, p, c.frame, meta{now: 1e9, mark: c.mark})
				met := ""
				for id, now := range r.counters() {
					switch d := since(before[id], now); d {
					case maps.Counters{}:
					case maps.Counters{ExemptPackets: 1}:
						met += "exempt " + names[uint32(id)]
					case passed(uint64(len(c.frame) + 4*len(c.pushed))):
						met += names[uint32(id)]
					default:
						t.Errorf("case %d: %s counted %+v", i, names[uint32(id)], d)
					}
				}
				if v != next || met != c.want {
					t.Errorf("case %d: verdict %#x, met %q, want %q", i, v, met, c.want)
				}
			}
			// The second packet exceeds the mark's bucket.
			frame := ether(typeIPv4, udp4)
			if v, _ := send(t, r.program(), frame, meta{now: 1e9, mark: 0xfffffff0}); v != drop {
				t.Errorf("an excess packet with a mark: verdict %#x", v)
			}
		})
	}
}

// A rule for a mark has buckets of hosts and subnets of both families.
func TestMarkScopes(t *testing.T) {
	for _, c := range []struct {
		each string
		want []string
	}{
		{"host", []string{"10.0.0.1/32", "10.0.0.77/32", "2001:db8:1::1/128", "2001:db8:1::77/128"}},
		{"/24", []string{"10.0.0.0/24", "2001:d00::/24"}},
		{"/64", []string{"10.0.0.1/32", "10.0.0.77/32", "2001:db8:1::/64"}},
	} {
		r := newRig(t, maps.Size{Rules: 2, Buckets: 64, Marks: true}, egress())
		rule := of(t, "mark:7")
		testenv.Must(t, rule.Each.Set(c.each))
		e := r.put(rule, 0)
		for range 2 { // by the slow path, then by the fast one
			for _, dst := range []string{far4, "10.0.0.77"} {
				send(t, r.program(), ether(typeIPv4, ip4{proto: protoUDP, dst: dst}.with(udpHeader(1, 2))), meta{now: 1e9, mark: 7})
			}
			for _, dst := range []string{far6, "2001:db8:1::77"} {
				send(t, r.program(), ether(typeIPv6, ip6{proto: protoUDP, dst: dst}.with(udpHeader(1, 2))), meta{now: 1e9, mark: 7})
			}
		}
		var got []string
		for _, b := range r.bucketsOf(e, 1e9) {
			got = append(got, b.Subnet.String())
		}
		if slices.Sort(got); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("each %s: buckets of %v, want %v", c.each, got, c.want)
		}
		if n := r.counters()[e.ID]; n.PassedPackets != 8 || n.SpilledPackets != 0 {
			t.Errorf("each %s counted %+v", c.each, n)
		}
	}
}

// A change of many rules adds a rule for a mark and removes another one, at one moment.
func TestMarksChange(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 8, Marks: true}, egress())
	all, ten, eleven := of(t, "::/0"), of(t, "mark:10"), of(t, "mark:11")
	a, b := r.put(all, 0).ID, r.put(ten, 0).ID
	r.prepare(all, eleven)
	r.set.Store.Time(2e9, maps.Never)
	testenv.Must(t, r.set.Store.Arm())
	c := b + 1
	for now, want := range map[uint64][]uint32{2e9 - 1: {a, b, a}, 2e9: {a, a, c}} {
		for i, mark := range []uint32{0, 10, 11} {
			frame := ether(typeIPv6, ip6{proto: protoUDP}.with(udpHeader(1, 2)))
			r.want(r.program(), frame, meta{now: now, mark: mark}, next, map[uint32]maps.Counters{want[i]: passed(uint64(len(frame)))})
		}
	}
}
