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

// The rule of most tests, by which a full frame takes its turn in 12.112 ms.
const (
	slow  = 1_000_000 // bit/s
	frame = 1514
	turn  = time.Duration(frame * 8e9 / slow)
)

// half of a packet more than is to fit leaves room for what leaks while it is filled.
const half = frame / 2

// queued is a rule of a family, for 16 addresses from the nth on, that holds so many packets.
func queued(f *family, n byte, packets uint64) policy.Rule {
	return policy.Rule{
		Prefix: netip.PrefixFrom(f.host(n), f.host(n).BitLen()-4), Rate: slow, Capacity: packets*frame + half,
		Algorithm: policy.Leaky, Excess: policy.Delay, ECNAbove: policy.Never,
	}
}

// host is a prefix of one address.
func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// inOrder ends the test unless the packets that arrived of a stream are its first ones, and so many.
func inOrder(t *testing.T, what string, packets []packet, count int) {
	t.Helper()
	if len(packets) != count {
		t.Fatalf("%s: %d packets arrived, and there is room for %d", what, len(packets), count)
	}
	for i, p := range packets {
		if p.number != uint64(i) {
			t.Fatalf("%s: as number %d arrived packet %d", what, i, p.number)
		}
	}
}

// What conforms leaves at once, the rest at the rate, and what is more than
// capacity and queue is dropped. What was dropped has not moved anything: the
// next packet leaves as soon as those that were accepted have left.
func TestBurst(t *testing.T) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	w, c := r.watch(toReceiver, 1000), r.capture(r.receiver, "r0", 1000)
	for _, f := range []*family{v4, v6} {
		for _, a := range []policy.Algorithm{policy.GCRA, policy.Leaky} {
			rule := queued(f, 16*byte(a), 20)
			rule.Algorithm = a
			atOnce, accepted := 1, 20
			if a == policy.GCRA {
				rule.Capacity, rule.Queue = 10*frame+half, 20*frame
				atOnce, accepted = 10, 30
			}
			what := fmt.Sprintf("%s %v", f.name, a)
			r.limit(toReceiver, policy.Egress, rule)
			overload, next := burst(f.host(16*byte(a)+1), 2*accepted), burst(f.host(16*byte(a)+2), 1)
			next.after = 4 * turn // when there is room for one more
			r.send(r.sender, 0, overload, next)
			got := c.take()
			w.into(got)

			burst := to(got, host(overload.to.Addr()))
			inOrder(t, what, burst, accepted)
			for _, p := range burst[:atOnce] {
				if wait := p.at - p.sent; wait > turn/100 {
					t.Errorf("%s: packet %d conforms, and arrived after %v", what, p.number, wait)
				}
			}
			// Where the line of departures begins: what has been charged, less the capacity, has left.
			line := turn
			if a == policy.GCRA {
				line = time.Duration(float64((atOnce+1)*frame-int(rule.Capacity)) * 8e9 / slow)
			}
			first := burst[atOnce].due
			if earliest, latest := burst[0].sent+line, burst[0].due+line; first < earliest || first > latest {
				t.Errorf("%s: packet %d leaves %v after the first, and ought to after %v", what, atOnce, first-burst[0].due, line)
			}
			waiting := append(burst[atOnce:], to(got, host(next.to.Addr()))...)
			if len(waiting) != accepted-atOnce+1 {
				t.Fatalf("%s: there was room for one more, and it did not arrive", what)
			}
			t.Logf("%s: of %d packets %d left at once, %d were dropped", what, overload.count, atOnce, overload.count-accepted)
			evenly(t, what, slow, waiting)
		}
	}
}

// ECT packets that wait longer than is said arrive with CE, and no others; none that fits is dropped.
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
					t.Errorf("%s: packet %d waits %v and arrived with %#x, not %#x", what, p.number, p.due-p.sent, p.tos, want)
				}
				if p.broken {
					t.Errorf("%s: the checksum of packet %d is wrong", what, p.number)
				}
			}
			if want := i == 1; (marked > 0) != want {
				t.Errorf("%s: %d are marked", what, marked)
			}
			if have := r.counters(toReceiver, policy.Egress, rule.Prefix.Masked()).MarkedPackets - before; have != uint64(marked) {
				t.Errorf("%s: %d packets are counted as marked, and %d are", what, have, marked)
			}
			t.Logf("%s: %d packets that wait up to %v, %d marked", what, len(got), got[len(got)-1].due-got[0].sent, marked)
		}
	}
}

// Packets with a tag are held back like others, whether the tag is in the frame or beside it; with it they are four bytes longer.
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
		// The kernel takes no IPv6 gateway here that it could reach by another device.
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
		{"tag beside the frame", toReceiver, v4.host(129)},
		{"tag beside the frame, IPv6", toReceiver, v6.host(129)},
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
			// There the tag is not yet on the packet.
			for i := range got {
				got[i].bytes = frame
			}
		}
		evenly(t, test.what, slow, got)
	}
}

// Several queues with an fq each share one bucket.
func TestQueues(t *testing.T) {
	const rate, queues, d = 5_000_000, 4, time.Second
	r := newRig(t, queues)
	r.fq(toReceiver, fqPackets)
	r.sink()
	rule := must(policy.Limit{Rate: rate, Algorithm: policy.Leaky, Excess: policy.Delay}.Rule(netip.PrefixFrom(v4.host(0), 27), 14))
	r.limit(toReceiver, policy.Egress, rule)
	var streams []*stream
	// So many that no queue is without one but once in a thousand runs, nor two of them ever.
	for n := range byte(30) {
		streams = append(streams, flood(v4.host(n+1), rate, 0.1))
	}
	w, c := r.watch(toReceiver, 2000), r.capture(r.receiver, "r0", 2000)
	r.send(r.router, d, append(streams, r.probe())...)
	got := c.take()
	w.into(got)
	late, _ := evenly(t, "four queues", rate, to(got, rule.Prefix))
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

// What fq itself does not hold is lost behind the bucket: it holds as much as it is told.
func TestLimitOfFlow(t *testing.T) {
	const held = 400
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	rule := queued(v4, 0, held)
	rule.Rate *= 10
	r.limit(toReceiver, policy.Egress, rule)
	c := r.capture(r.receiver, "r0", 1000)
	for _, limit := range []uint32{100, fqPackets} {
		r.fq(toReceiver, limit)
		_, before := r.fqStatistics(toReceiver)
		ours := r.counters(toReceiver, policy.Egress, rule.Prefix)
		r.send(r.sender, 0, burst(v4.host(1), held+50))
		arrived := len(c.take())
		_, dropped := r.fqStatistics(toReceiver)
		dropped -= before
		now := r.counters(toReceiver, policy.Egress, rule.Prefix)
		passed, refused := int(now.PassedPackets-ours.PassedPackets), int(now.DroppedPackets-ours.DroppedPackets)
		t.Logf("fq with a limit of %d packets of a flow: %d passed the rule and %d were dropped by it; %d dropped by fq; %d arrived",
			limit, passed, refused, dropped, arrived)
		if arrived+int(dropped) != passed || refused+passed != held+50 {
			t.Errorf("of %d packets %d passed, %d were dropped, %d more by fq, and %d arrived", held+50, passed, refused, dropped, arrived)
		}
		if (limit < held) != (dropped > 0) {
			t.Errorf("fq with a limit of %d has dropped %d of %d packets that wait", limit, dropped, held)
		}
	}
}

// The longest queue that a rule may have is within what fq takes, which is 10 s ahead.
func TestLongestQueue(t *testing.T) {
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	rule := queued(v4, 0, 0)
	rule.Capacity = slow / 8 * 9 // 9 s
	r.limit(toReceiver, policy.Egress, rule)
	w, c := r.watch(toReceiver, 1000), r.capture(r.receiver, "r0", 1000)
	const fit = 9 * slow / 8 / frame
	r.send(r.sender, 0, burst(v4.host(1), fit))
	got := c.take()
	w.into(got)
	inOrder(t, "longest queue", got, fit)
	evenly(t, "longest queue", slow, got)
	if _, dropped := r.fqStatistics(toReceiver); dropped > 0 {
		t.Errorf("fq has dropped %d packets", dropped)
	}
	if wait := got[fit-1].due - got[0].sent; wait < 9*time.Second-2*turn || wait > 9*time.Second {
		t.Errorf("the last packet leaves %v after the first was sent", wait)
	}
}
