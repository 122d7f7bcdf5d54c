//go:build guest

package wire

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The rate of most tests. A full frame takes 12.112 ms.
const (
	slow  = 1_000_000 // bit/s
	frame = 1514
	turn  = time.Duration(frame * 8e9 / slow)
)

// half of a packet is added to the capacity, for what leaks during a burst.
const half = frame / 2

// queued returns a rule for 16 addresses of a family from the nth on, with room for the given number of packets.
func queued(f *family, n byte, packets uint64) policy.Rule {
	return policy.Rule{
		Prefix: netip.PrefixFrom(f.host(n), f.host(n).BitLen()-4), Rate: slow, Capacity: packets*frame + half,
		Algorithm: policy.Leaky, Excess: policy.Delay, ECNAbove: policy.Never,
	}
}

// host returns the prefix of one address.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// inOrder ends the test unless the arrived packets are the first count packets of a stream.
func inOrder(t *testing.T, what string, packets []packet, count int) {
	t.Helper()
	if len(packets) != count {
		t.Fatalf("%s: %d packets arrived, want %d", what, len(packets), count)
	}
	for i, p := range packets {
		if p.number != uint64(i) {
			t.Fatalf("%s: packet %d arrived, want %d", what, p.number, i)
		}
	}
}

// Packets within the burst are not delayed, and later ones leave at the rate. Packets
// beyond capacity and queue are dropped, and leave no gap: the next packet leaves as
// soon as the accepted ones have left.
func TestBurst(t *testing.T) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	w, c := r.watch(toReceiver, 1000), r.capture(r.receiver, "r0", 1000)
	for _, f := range []*family{v4, v6} {
		for _, a := range []policy.Algorithm{policy.GCRA, policy.Leaky} {
			rule := queued(f, 16*byte(a), 20)
			rule.Algorithm = a
			undelayed, accepted := 1, 20
			if a == policy.GCRA {
				rule.Capacity, rule.Queue = 10*frame+half, 20*frame
				undelayed, accepted = 10, 30
			}
			what := fmt.Sprintf("%s %v", f.name, a)
			r.limit(toReceiver, policy.Egress, rule)
			overload, next := burst(f.host(16*byte(a)+1), 2*accepted), burst(f.host(16*byte(a)+2), 1)
			next.after = 4 * turn // then there is room for one more
			r.send(r.sender, 0, overload, next)
			got := c.take()
			w.into(got)

			burst := to(got, host(overload.to.Addr()))
			inOrder(t, what, burst, accepted)
			for _, p := range burst[:undelayed] {
				if wait := p.at - p.sent; wait > turn/100 {
					t.Errorf("%s: packet %d is within the burst, but arrived after %v", what, p.number, wait)
				}
			}
			// The first delayed packet leaves when the charged bytes, less the capacity, have left.
			line := turn
			if a == policy.GCRA {
				line = time.Duration(float64((undelayed+1)*frame-int(rule.Capacity)) * 8e9 / slow)
			}
			first := burst[undelayed].due
			if earliest, latest := burst[0].sent+line, burst[0].due+line; first < earliest || first > latest {
				t.Errorf("%s: packet %d leaves %v after the first, want %v", what, undelayed, first-burst[0].due, line)
			}
			waiting := append(burst[undelayed:], to(got, host(next.to.Addr()))...)
			if len(waiting) != accepted-undelayed+1 {
				t.Fatalf("%s: the next packet did not arrive", what)
			}
			t.Logf("%s: of %d packets %d were not delayed, %d were dropped", what, overload.count, undelayed, overload.count-accepted)
			evenly(t, what, slow, waiting)
		}
	}
}

// ECT packets that are queued for longer than ECNAbove arrive with CE, and no others. No conforming packet is dropped.
func TestECN(t *testing.T) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	w, c := r.watch(toReceiver, 1000), r.capture(r.receiver, "r0", 1000)
	const accepted, above = 20, 5*turn - turn/2
	for _, f := range []*family{v4, v6} {
		rule := queued(f, 0, accepted)
		for i, ect := range []bool{false, true, true} {
			rule.ECNAbove = policy.ECNAbove(above)
			if i == 2 {
				rule.ECNAbove = policy.Never
			}
			what := fmt.Sprintf("%s, ECT %v, above %v", f.name, ect, rule.ECNAbove)
			r.limit(toReceiver, policy.Egress, rule)
			before := r.counters(toReceiver, policy.Egress, rule.Prefix.Masked()).MarkedPackets
			s := burst(f.host(1), accepted+10)
			s.ect = ect
			r.send(r.sender, 0, s)
			got := c.take()
			w.into(got)
			inOrder(t, what, got, accepted)
			marked := 0
			for _, p := range got {
				want := byte(0)
				if ect {
					want = ect0
				}
				if wait := p.due - p.sent; ect && wait > time.Duration(rule.ECNAbove) {
					want = ce
					marked++
				}
				if p.tos != want {
					t.Errorf("%s: packet %d was queued for %v and arrived with %#x, want %#x", what, p.number, p.due-p.sent, p.tos, want)
				}
				if p.broken {
					t.Errorf("%s: the checksum of packet %d is wrong", what, p.number)
				}
			}
			if want := i == 1; (marked > 0) != want {
				t.Errorf("%s: %d packets are marked", what, marked)
			}
			if have := r.counters(toReceiver, policy.Egress, rule.Prefix.Masked()).MarkedPackets - before; have != uint64(marked) {
				t.Errorf("%s: %d packets are counted as marked, want %d", what, have, marked)
			}
			t.Logf("%s: %d packets queued for up to %v, %d marked", what, len(got), got[len(got)-1].due-got[0].sent, marked)
		}
	}
}

// Packets with a tag are queued like others, whether the tag is in the frame or in metadata. It adds four bytes.
func TestVLAN(t *testing.T) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	const vlan, device = 7, "out0.7"
	r.in(r.router, func() error {
		l, err := netlink.LinkByName(toReceiver)
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex = device, l.Attrs().Index
		err = netlink.LinkAdd(&netlink.Vlan{LinkAttrs: attrs, VlanId: vlan, VlanProtocol: netlink.VLAN_PROTOCOL_8021Q})
		if err != nil {
			return fmt.Errorf("add %s: %w", device, err)
		}
		if err := setUp(device); err != nil {
			return err
		}
		half4, half6 := netip.PrefixFrom(v4.host(128), 25), netip.PrefixFrom(v6.host(128), 121)
		// The kernel accepts no IPv6 gateway here that is reachable by another device.
		by4, by6 := v4.receiver, netip.MustParsePrefix("fe80::4/64")
		return errors.Join(addNeighbour(device, by4, "r0"), addRoute(device, half4, by4),
			addNeighbour(device, by6, "r0"), addRoute(device, half6, by6))
	})
	r.fq(device, fqPackets)
	w, c := r.watch(toReceiver, 1000), r.capture(r.receiver, "r0", 1000)
	cases := []struct {
		what, limited string
		to            netip.Addr
	}{
		{"tag in the frame", toReceiver, v4.host(1)},
		{"tag in metadata", toReceiver, v4.host(129)},
		{"tag in metadata, IPv6", toReceiver, v6.host(129)},
		{"limit on the VLAN's device", device, v4.host(145)},
		{"limit on the VLAN's device, IPv6", device, v6.host(145)},
	}
	for i, test := range cases {
		rule := policy.Rule{
			Prefix: host(test.to), Rate: slow, Capacity: 20*(frame+4) + half,
			Algorithm: policy.Leaky, Excess: policy.Delay, ECNAbove: policy.Never,
		}
		r.limit(test.limited, policy.Egress, rule)
		s, from := burst(test.to, 30), r.sender
		if i == 0 {
			s, from = r.tagged(toReceiver, test.to, vlan), r.router
			s.count = 30
		}
		r.send(from, 0, s)
		got := c.take()
		w.into(got)
		inOrder(t, test.what, got, 20)
		bytes := frame + 4
		for _, p := range got {
			if !p.tagged || p.vlan != vlan || p.bytes != bytes {
				t.Fatalf("%s: a packet of %d bytes arrived, tagged %v with %d", test.what, p.bytes, p.tagged, p.vlan)
			}
		}
		if test.limited == device {
			// The packet has no tag there yet.
			for i := range got {
				got[i].bytes = frame
			}
		}
		evenly(t, test.what, slow, got)
	}
}

// Several transmit queues, each with an fq, share one bucket.
func TestQueues(t *testing.T) {
	const rate, queues, d = 5_000_000, 4, time.Second
	r := newRig(t, queues)
	r.fq(toReceiver, fqPackets)
	r.sink()
	rule := must(policy.Limit{Rate: rate, Algorithm: policy.Leaky, Excess: policy.Delay}.Rule(netip.PrefixFrom(v4.host(0), 27)))
	r.limit(toReceiver, policy.Egress, rule)
	var streams []*stream
	// With 30 flows, one queue is unused once in a thousand runs, and two never are.
	for n := range byte(30) {
		streams = append(streams, flood(v4.host(n+1), rate, 0.1))
	}
	w, c := r.watch(toReceiver, 2000), r.capture(r.receiver, "r0", 2000)
	r.send(r.router, d, append(streams, r.probe())...)
	got := c.take()
	w.into(got)
	late := evenly(t, "four queues", rate, to(got, rule.Prefix))
	inTime(t, "four queues", late, probed(t, to(got, host(probeTo)), 1))
	sent, dropped := r.fqStatistics(toReceiver)
	used := 0
	for _, n := range sent {
		if n > 20 {
			used++
		}
	}
	t.Logf("packets by queue: %v", sent)
	if len(sent) != queues || used < 3 || dropped > 0 {
		t.Errorf("the queues sent %v packets and dropped %d", sent, dropped)
	}
}

// fq drops packets beyond its limit per flow, after they were charged.
func TestLimitOfFlow(t *testing.T) {
	const waiting = 400
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	rule := queued(v4, 0, waiting)
	rule.Rate *= 10
	r.limit(toReceiver, policy.Egress, rule)
	c := r.capture(r.receiver, "r0", 1000)
	for _, limit := range []uint32{100, fqPackets} {
		r.fq(toReceiver, limit)
		_, before := r.fqStatistics(toReceiver)
		ours := r.counters(toReceiver, policy.Egress, rule.Prefix)
		r.send(r.sender, 0, burst(v4.host(1), waiting+50))
		arrived := len(c.take())
		_, dropped := r.fqStatistics(toReceiver)
		dropped -= before
		now := r.counters(toReceiver, policy.Egress, rule.Prefix)
		passed, refused := int(now.PassedPackets-ours.PassedPackets), int(now.DroppedPackets-ours.DroppedPackets)
		t.Logf("fq with a limit of %d packets per flow: the rule passed %d and dropped %d; fq dropped %d; %d arrived",
			limit, passed, refused, dropped, arrived)
		if arrived+int(dropped) != passed || refused+passed != waiting+50 {
			t.Errorf("of %d packets the rule passed %d and dropped %d; fq dropped %d; %d arrived", waiting+50, passed, refused, dropped, arrived)
		}
		if (limit < waiting) != (dropped > 0) {
			t.Errorf("fq with a limit of %d dropped %d of %d queued packets", limit, dropped, waiting)
		}
	}
}

// The longest queue of a rule is within the horizon of fq, which is 10 s.
func TestLongestQueue(t *testing.T) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	rule := queued(v4, 0, 0)
	rule.Capacity = slow / 8 * 9 // 9 s
	r.limit(toReceiver, policy.Egress, rule)
	w, c := r.watch(toReceiver, 1000), r.capture(r.receiver, "r0", 1000)
	const most = 9 * slow / 8 / frame
	r.send(r.sender, 0, burst(v4.host(1), most))
	got := c.take()
	w.into(got)
	inOrder(t, "longest queue", got, most)
	evenly(t, "longest queue", slow, got)
	if _, dropped := r.fqStatistics(toReceiver); dropped > 0 {
		t.Errorf("fq dropped %d packets", dropped)
	}
	if wait := got[most-1].due - got[0].sent; wait < 9*time.Second-2*turn || wait > 9*time.Second {
		t.Errorf("the last packet leaves %v after the first was sent", wait)
	}
}
