//go:build guest

package wire

import (
	"cmp"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A lane is a rule for one direction, and the far hosts of its packets.
type lane struct {
	direction policy.Direction
	rule      policy.Rule
	hosts     []netip.Addr
}

// newLane returns the nth lane of a test: two hosts with one rate, or with one each.
func newLane(n byte, d policy.Direction, f *family, each policy.EachKind, rate policy.Rate) lane {
	host := f.host
	if d == policy.Ingress {
		host = f.source
	}
	hosts := []netip.Addr{host(128 + 16*n), host(129 + 16*n)}
	limit := policy.Limit{Rate: rate, Algorithm: policy.Leaky, Each: policy.Each{Kind: each}, Excess: policy.Delay}
	return lane{d, must(limit.Rule(netip.PrefixFrom(hosts[0], hosts[0].BitLen()-4))), hosts}
}

func (l lane) String() string {
	f := v4.name
	if l.rule.Prefix.Addr().Is6() {
		f = v6.name
	}
	return fmt.Sprintf("%v %v %s, each %v", l.direction, l.rule.Rate, f, l.rule.Each)
}

// streams offer each bucket three times its rate.
func (l lane) streams() (all []*stream) {
	for _, h := range l.hosts {
		times := 3.0
		if l.rule.Each.Kind == policy.EachAll {
			times /= float64(len(l.hosts))
		}
		s := flood(h, uint64(l.rule.Rate), times)
		if l.direction == policy.Ingress {
			s.from, s.to = h, netip.AddrPortFrom(v4.host(1), sinkPort)
			if h.Is6() {
				s.to = netip.AddrPortFrom(v6.host(1), sinkPort)
			}
		}
		all = append(all, s)
	}
	return all
}

// buckets returns the prefixes that each have a bucket.
func (l lane) buckets() []netip.Prefix {
	if l.rule.Each.Kind == policy.EachAll {
		return []netip.Prefix{l.rule.Prefix}
	}
	var all []netip.Prefix
	for _, h := range l.hosts {
		all = append(all, host(h))
	}
	return all
}

// of returns the packets whose far address is in a prefix.
func (l lane) of(packets []packet, prefix netip.Prefix) []packet {
	if l.direction == policy.Egress {
		return to(packets, prefix)
	}
	return where(packets, func(p packet) bool { return prefix.Contains(p.from) })
}

const mbit = 1_000_000

// A flood arrives at the rate: in any window, rate * window and one packet arrive. The
// tolerance is the lateness of packets.
func TestRate(t *testing.T) {
	const out = policy.Egress
	flooded(t, 10*time.Second, newLane(0, out, v4, policy.EachAll, mbit), newLane(1, out, v4, policy.EachHost, mbit),
		newLane(0, out, v6, policy.EachAll, mbit), newLane(1, out, v6, policy.EachHost, mbit))
	flooded(t, time.Second, newLane(0, out, v4, policy.EachHost, 5*mbit), newLane(0, out, v6, policy.EachAll, 20*mbit))
	flooded(t, time.Second/4, newLane(0, out, v4, policy.EachAll, 100*mbit))
}

// flooded offers three times the rate to all lanes, of one direction, for a time d.
func flooded(t *testing.T, d time.Duration, lanes ...lane) {
	t.Helper()
	r := newRig(t, 1)
	r.fq(toReceiver, fqPackets)
	r.sink()
	var streams []*stream
	var bits float64
	buckets := 0
	direction := lanes[0].direction
	device := r.limited(direction)
	for _, l := range lanes {
		r.limit(device, direction, l.rule)
		streams = append(streams, l.streams()...)
		bits += float64(l.rule.Rate) * float64(len(l.buckets()))
		buckets += len(l.buckets())
	}
	packets := int((d + time.Second).Seconds() * (bits/8/frame + 250))
	queue := r.queue(direction)
	w, c := r.watch(queue, packets), r.capture(r.receiver, "r0", packets)
	r.send(r.sender, d, append(streams, r.probe())...)
	got := c.take()
	probes := to(got, host(probeTo))
	got = where(got, func(p packet) bool { return p.to != probeTo })
	w.into(got)
	most := probed(t, probes, buckets)
	for _, l := range lanes {
		for _, b := range l.buckets() {
			what, arrived := fmt.Sprintf("%v, %v", l, b), l.of(got, b)
			inTime(t, what, evenly(t, what, l.rule.Rate, arrived), most)
			if took := arrived[len(arrived)-1].at - arrived[0].at; took < d {
				t.Errorf("%s: the last packet arrived %v after the first, but the flood took %v", what, took, d)
			}
		}
		have := r.counters(device, direction, l.rule.Prefix)
		if n := len(l.of(got, l.rule.Prefix)); int(have.PassedPackets) != n {
			t.Errorf("%v: %d packets arrived, but %d are counted as passed", l, n, have.PassedPackets)
		}
	}
	if _, dropped := r.fqStatistics(queue); dropped > 0 {
		t.Errorf("fq dropped %d packets", dropped)
	}
}

// inTime checks that most packets are no later than most. The guest's kernel may hold up some of them.
func inTime(t *testing.T, what string, late []time.Duration, most time.Duration) {
	t.Helper()
	if half := quantile(late, 0.5); half > most {
		t.Errorf("%s: half of the packets are at least %v late, want at most %v", what, half, most)
	}
}

// probed returns the tolerated lateness of a packet: the maximum of the probes, and as
// much again for each bucket, because packets of all buckets may be due together.
func probed(t *testing.T, probes []packet, buckets int) time.Duration {
	t.Helper()
	for i := range probes {
		probes[i].due = probes[i].sent
	}
	late := lateness(t, probes)
	t.Logf("lateness of packets whose sender sets the departure time: %s", quantiles(late))
	return time.Duration(1+buckets) * slices.Max(late)
}

// lateness returns the arrival times less the departure times.
func lateness(t *testing.T, packets []packet) (late []time.Duration) {
	t.Helper()
	if len(packets) == 0 {
		t.Fatal("no packet arrived")
	}
	for _, p := range packets {
		late = append(late, p.at-p.due)
		if p.at < p.due {
			t.Fatalf("packet %d to %v arrived %v before its departure time", p.number, p.to, p.due-p.at)
		}
	}
	return late
}

// evenly checks that packets of one size leave one by one at exactly a rate: the window
// from any packet to any later one, inclusive, has rate * window and one packet. This
// is exact to the ns for departure times. For arrival times the tolerance is the
// variation of the lateness.
func evenly(t *testing.T, what string, rate policy.Rate, packets []packet) (late []time.Duration) {
	t.Helper()
	// A packet without delay leaves at the time of its charge, which is before the watch
	// sees it, and one gap before the next departure.
	for i := range packets[1:] {
		p, next := &packets[i], &packets[i+1]
		if !p.delayed { // the first one, or one after a stall of the machine
			if p.due = min(p.due, next.due-even(rate, p.bytes)); p.due < p.sent {
				t.Errorf("%s: packet %d departs %v after the one before was sent", what, next.number, next.due-p.sent)
			}
		}
	}
	late = lateness(t, packets)
	due, _ := windows(t, what+", due", rate, packets, func(p packet) time.Duration { return p.due }, time.Nanosecond)
	arrived, gaps := windows(t, what+", arrived", rate, packets, func(p packet) time.Duration { return p.at }, slices.Max(late)-slices.Min(late))
	took := packets[len(packets)-1].at - packets[0].at
	bits := float64(len(packets)-1) * float64(packets[0].bytes) * 8 / took.Seconds()
	t.Logf("%s: %d packets in %v, %+.4f %% of the rate; bytes beyond rate * window: %s for departures, %s for arrivals; late %s; gaps %s",
		what, len(packets), took.Round(time.Millisecond), 100*(bits/float64(rate)-1), due, arrived, quantiles(late), quantiles(gaps))
	return late
}

// windows checks that any window has rate * window and one packet, with a tolerance in
// time. It returns the range of bytes beyond rate * window, and the gaps between
// packets.
func windows(t *testing.T, what string, rate policy.Rate, packets []packet, when func(p packet) time.Duration, late time.Duration) (
	extremes string, gaps []time.Duration,
) {
	t.Helper()
	if len(packets) < 10 {
		t.Fatalf("%s: %d packets", what, len(packets))
	}
	packets = slices.SortedFunc(slices.Values(packets), func(a, b packet) int { return cmp.Compare(when(a), when(b)) })
	size := int64(packets[0].bytes)
	slack := millionths(rate, late)
	var w testenv.Windows
	most, least := size*1e6, size*1e6
	for i, p := range packets {
		if int64(p.bytes) != size {
			t.Fatalf("%s: packets of %d and %d bytes", what, size, p.bytes)
		}
		if i > 0 {
			gap := when(p) - when(packets[i-1])
			gaps = append(gaps, gap)
			w.Leak(uint64(rate), int64(gap))
		}
		high, low := w.Packet(uint64(p.bytes))
		most, least = max(most, high), min(least, low)
	}
	extremes = fmt.Sprintf("%.3f to %.3f", float64(least)/1e6, float64(most)/1e6)
	if most > size*1e6+slack || least < size*1e6-slack {
		t.Errorf("%s: windows have rate * window and %s bytes; a packet has %d bytes, and the tolerance is %.3f bytes (%v)",
			what, extremes, size, float64(slack)/1e6, late)
	}
	return extremes, gaps
}

// even returns the time of a packet at a rate.
func even(rate policy.Rate, bytes int) time.Duration {
	return time.Duration(float64(bytes) * 8e9 / float64(rate))
}

// millionths returns the millionths of a byte that a rate allows in a time, rounded up.
func millionths(rate policy.Rate, d time.Duration) int64 {
	v := new(big.Int).Mul(big.NewInt(int64(rate)), big.NewInt(int64(d)))
	return v.Add(v, big.NewInt(7999)).Div(v, big.NewInt(8000)).Int64()
}
