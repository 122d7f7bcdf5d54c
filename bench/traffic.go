package main

import (
	"fmt"
	"math"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite traffic sends small UDP packets over veth pairs, each with another limiter, in turns. The cost
// of a limiter is the time of a packet minus its time without a limiter in the same round.
//
// The suite instructions does so in a guest whose clock counts the instructions of its only
// CPU: these figures have no noise. They do not include the effect of caches; traffic does.

// traffic compares limiters by wall time. A packet stays on one CPU for its whole path.
func traffic() {
	onLastCPU(func() {
		subjects := append(shapectlModes(), nftLimit, nftSet, hashlimitAll, hashlimitHost, tbf, htb)
		const warmUp = 20_000
		race("Time added per packet: all packets conform", rounds(101), subjects, func(s limiter) *lane {
			return newLane(s, ample, target, warmUp)
		})
		alone := 0.0
		race("Time added per packet: 90 % dropped", rounds(101), subjects, func(s limiter) *lane {
			if s.name != noLimiter {
				// A quick run may share the CPU, so the share of passed packets varies.
				return newDroppingLane(s, warmUp, alone, unlessQuick(0.2, 9))
			}
			p := newLane(s, limit{}, target, warmUp)
			alone = p.cost
			return p
		})
	})
}

// A lane is an arena with a sender.
type lane struct {
	*arena
	*sender
	limiter
	cost  float64 // approximate time of a packet in ns
	drops bool    // most packets
}

// newLane sets a limiter up in a new arena, and sends so many packets to fill caches.
func newLane(s limiter, l limit, to netip.Addr, warmUp int) *lane {
	p := &lane{arena: newArena(), limiter: s}
	// The far end drops packets as early as possible.
	p.attach(p.far, p.plain("sink"))
	p.sender = p.newSender(p.near, smallPayload, to)
	p.set(p.arena, l)
	sleep(unlessQuick(3*time.Second, time.Second/10)) // for deferred work of the kernel
	p.cost = p.send(warmUp)
	return p
}

// turn sends for a short time, so that other activity affects few turns. It returns the time of a packet.
func (p *lane) turn() (nanoseconds float64) {
	if p.drops {
		p.afterBurst(1000) // the bucket has drained in the turns of other lanes
	}
	return p.send(int(float64(10*time.Millisecond) / p.cost))
}

// race runs limiters in turns, in lanes that enter creates, beside one without a limiter.
// It records the time that each limiter adds to a packet.
func race(name string, rounds int, subjects []limiter, enter func(limiter) *lane) {
	var lanes []*lane
	for _, s := range append([]limiter{bare}, subjects...) {
		p := enter(s)
		defer p.Close()
		lanes = append(lanes, p)
	}
	say("  %s, %d rounds of %d", name, rounds, len(lanes))
	interleave(rounds, len(lanes), func(i int) float64 { return lanes[i].turn() }, func(costs []float64) {
		add(name, noLimiter, "ns", "total time; the other rows are the time added to it", costs[0])
		for i, p := range lanes[1:] {
			add(name, p.name, "ns", p.note, costs[i+1]-costs[0])
		}
	})
}

// newDroppingLane sets a limiter up that passes 10 % of the packets. The rate for that depends on the cost
// of a drop for the sender, so it is found by trial, from the approximate time of a packet. The share may
// differ by the tolerance, which grows with each attempt, because the sender's speed varies on a noisy
// machine. If a proportional step leaves the known bounds, the next rate is their geometric mean: a limiter
// that queues everything drops nothing, and has no proportion.
func newDroppingLane(s limiter, warmUp int, cost, tolerance float64) *lane {
	rate, share, low, high := smallFrame*8*1e9/cost/10, 0.0, 0.0, math.Inf(1)
	for try := range 10 {
		p := newLane(s, limit{policy.Rate(rate), max(4096, uint64(rate/8/100))}, target, warmUp)
		share = p.afterBurst(warmUp)
		if off := 1 + tolerance*float64(1+try); share > 0.1/off && share < 0.1*off {
			p.drops = true
			return p
		}
		p.Close()
		if share < 0.1 {
			low = rate
		} else {
			high = rate
		}
		if rate *= 0.1 / max(share, 0.01); rate <= low || rate >= high {
			rate = math.Sqrt(low * high)
		}
	}
	check(fmt.Errorf("%s: no rate passes 10 %% of the packets: the share is %.2g at %v", s.name, share, policy.Rate(rate)))
	return nil
}

// afterBurst sends until the burst is used up, and returns the share of packets that pass then.
func (p *lane) afterBurst(packets int) float64 {
	passing := func() float64 {
		before := p.sent()
		p.send(packets)
		return float64(p.sent()-before) / float64(packets)
	}
	for range 200 {
		if passing() < 0.5 {
			break
		}
	}
	return passing()
}

// counted are the packets of a sample of instructions, enough to average the ticks of the clock.
const counted = 4000

// instructions measures in the guest.
func instructions() {
	subjects := unlessQuick(append(shapectlModes(), onClsact, police, tbf, htb, cake, nftLimit, nftSet, hashlimitAll, hashlimitHost),
		[]limiter{shapectlModes()[0], onClsact})
	countingInstructions(func() {
		alone := samplesOf(newLane(bare, limit{}, target, counted))
		for _, s := range append([]limiter{emptyTCX, clockTCX}, subjects...) {
			p := newLane(s, ample, target, counted)
			p.added("Instructions added per packet: all packets conform", alone)
			if s.name != emptyProgram && s.name != clockProgram {
				newDroppingLane(s, counted, 0.85*p.cost, 0.05).added("Instructions added per packet: 90 % dropped", alone)
			}
		}
	})
}

// countingInstructions runs f where only the sender may use the CPU.
func countingInstructions(f func()) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	onLastCPU(f)
}

// added records the instructions that the limiter of a lane adds to a packet, and closes the lane.
func (p *lane) added(name string, alone []float64) {
	without := quantile(slices.Sorted(slices.Values(alone)), 0.5)
	samples := samplesOf(p)
	for i := range samples {
		samples[i] -= without
	}
	add(name, p.name, "instructions", p.note, samples...)
}

// samplesOf returns the instructions of a packet in a lane, and closes the lane. A nanosecond of the guest is an
// instruction.
func samplesOf(p *lane) (samples []float64) {
	defer p.Close()
	for range rounds(5) {
		samples = append(samples, p.send(counted))
	}
	return samples
}

// The suite accuracy offers each limiter more than its rate, and compares the bytes that arrive
// in windows of time with the rate. They are counted behind the limiter as on a wire: GSO packets
// are segmented by then.

// accuracy compares limiters on this machine.
func accuracy() {
	compareAccuracy("", append(shapectlModes()[:1], shapectlModes()[3], nftLimit, nftSet, hashlimitAll, tbf, htb))
}

// guestAccuracy compares limiters in a guest, because not every kernel has these peers.
func guestAccuracy() {
	compareAccuracy(" in a virtual machine", append(shapectlModes()[:1], police, cake))
}

// compareAccuracy measures limiters at all rates. Where is a part of the tables' names.
func compareAccuracy(where string, subjects []limiter) {
	for _, rate := range unlessQuick([]policy.Rate{1e6, 20e6, 500e6}, []policy.Rate{20e6}) {
		for _, s := range subjects {
			shares := delivered(s, rate)
			if shares == nil {
				continue
			}
			for i := range shares {
				shares[i] = math.Abs(shares[i]-1) * 1e6
			}
			add(fmt.Sprintf("Rate error%s: %v", where, rate), s.name, "millionths", s.note, shares...)
		}
	}
}

// delivered offers as many datagrams as the system can send. If that is not well above the rate, it returns no shares.
func delivered(s limiter, rate policy.Rate) (shares []float64) {
	a := newArena()
	defer a.Close()
	arrived := a.count(1, "count_drop")
	s.set(a, limit{rate, uint64(rate) / 8}) // the smallest burst that nft and hashlimit support
	from, start := a.newSender(a.near, floodPayload, target), time.Now()
	from.flooding(0, func() { shares = arrived.shares(s, rate) })
	if float64(from.packets*maxFrame*8)/time.Since(start).Seconds() < 1.3*float64(rate) {
		return nil
	}
	return shares
}

// shares returns the bytes that arrive in each of several windows, relative to the rate, after the
// first burst. A window begins and ends with the arrival that is furthest ahead of the rate for
// a while: then the bucket is full, and not half empty because the sender waited for its CPU.
func (c counter) shares(s limiter, rate policy.Rate) (shares []float64) {
	window := unlessQuick(time.Second/2, time.Second/4)
	sleep(3 * window)
	var from arrivals
	for i := range rounds(5) + 1 {
		to := c.furthest(rate, window/5)
		bytes := to.Bytes - from.Bytes
		if strings.HasPrefix(s.name, hashlimitAll.name) { // does not count Ethernet headers, by design
			bytes -= (to.Packets - from.Packets) * ethernetBytes
		}
		if i > 0 {
			shares = append(shares, float64(bytes)*8e9/max(1, float64(to.Last-from.Last))/float64(rate))
		}
		from = to
		sleep(window - window/5)
	}
	return shares
}

// furthest returns the arrival within a time that is furthest ahead of the rate.
func (c counter) furthest(rate policy.Rate, while time.Duration) arrivals {
	first := c.read(0)
	best, lead := first, 0.0 // bytes ahead of the rate since the first arrival
	for start := time.Now(); time.Since(start) < while; sleep(time.Millisecond) {
		now := c.read(0)
		if l := float64(now.Bytes-first.Bytes) - float64(now.Last-first.Last)*float64(rate)/8e9; l >= lead {
			best, lead = now, l
		}
	}
	return best
}
