package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite traffic sends small UDP packets over veth pairs, each behind another limiter, in turns: what
// a packet takes there, beyond what it takes in that round without a limiter, is what the limiter costs.

const (
	trafficConforming = "Time added per packet: all packets conform"
	trafficDropped    = "Time added per packet: 90 % dropped"
	trafficMany       = "Time added per packet, random addresses"

	// slice is how long each sends in a round: short, as what else the machine does then hits few of them.
	slice = 10 * time.Millisecond
	// drainStep is how many packets go at a time until a bucket is empty.
	drainStep = 1000
)

// shapectlWays are what is compared of ours.
func shapectlWays() (ways []competitor) {
	for _, a := range algorithms {
		for _, e := range []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow} {
			ways = append(ways, shapectl(a, e, loader.TCX))
		}
	}
	return ways
}

// traffic compares limiters by wall time. All of a packet's way is on one CPU.
func traffic(ctx context.Context, o options) error {
	return onLastCPU(func() error {
		subjects := append(shapectlWays(), nftOneLimit, nftSet, hashlimitAll, hashlimitHost, tbf, htb)
		warmed := warmUp{packets: 20_000}
		if err := race(ctx, o, trafficConforming, o.rounds(101), subjects, func(s competitor) (*lane, error) {
			return newLane(ctx, s, freely, warmed, target)
		}); err != nil {
			return err
		}
		if err := raceDropping(ctx, o, subjects, warmed); err != nil {
			return err
		}
		counts := []int{1, 100, 10_000, 100_000}
		if o.quick {
			counts = counts[:2]
		}
		for _, n := range counts {
			if err := raceMany(ctx, o, n); err != nil {
				return fmt.Errorf("%d prefixes: %w", n, err)
			}
		}
		return nil
	})
}

// A lane is an arena whose sender takes part in a race.
type lane struct {
	*arena
	*sender
	competitor
	nanoseconds float64 // what a packet takes about
	drops       bool    // most of what is sent
}

// A warmUp is what a lane gets before it is measured.
type warmUp struct {
	settle  time.Duration // for the kernel to do what it has put off
	packets int           // to fill caches
}

// newLane sets a limiter up in an arena of its own, and warms it up.
func newLane(ctx context.Context, s competitor, l limit, w warmUp, targets ...netip.Addr) (_ *lane, err error) {
	a, err := newArena(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			a.Close()
			err = fmt.Errorf("%s: %w", s.name, err)
		}
	}()
	p := &lane{arena: a, competitor: s}
	// What arrives is dropped as early as any end can.
	if err := p.assemble(p.far, "sink", asm.Instructions{asm.Mov.Imm(asm.R0, drop), asm.Return()}); err != nil {
		return nil, err
	}
	if p.sender, err = p.newSender(p.near, smallPayload, targets...); err != nil {
		return nil, err
	}
	if err := p.set(ctx, p.arena, l); err != nil {
		return nil, err
	}
	if err := sleep(ctx, w.settle); err != nil {
		return nil, err
	}
	p.nanoseconds, err = p.send(w.packets)
	return p, err
}

// turn sends for as long as a slice, and returns what a packet took.
func (p *lane) turn() (nanoseconds float64, err error) {
	if p.drops {
		// It had the others' turns to fill up again.
		if _, err := p.drained(drainStep); err != nil {
			return 0, err
		}
	}
	return p.send(max(len(p.targets), int(float64(slice)/p.nanoseconds)))
}

// bare is an arena without a limiter.
var bare = competitor{name: noLimiter, set: func(context.Context, *arena, limit) error { return nil }}

// race has limiters take turns in lanes that enter makes, beside one without
// a limiter, and reports what each adds to a packet.
func race(ctx context.Context, o options, name string, rounds int, subjects []competitor,
	enter func(competitor) (*lane, error)) error {
	var lanes []*lane
	defer func() {
		for _, p := range lanes {
			p.Close()
		}
	}()
	for _, s := range append([]competitor{bare}, subjects...) {
		if s.name != noLimiter && !o.chosen(s.name) {
			continue
		}
		p, err := enter(s)
		if err != nil {
			return err
		}
		lanes = append(lanes, p)
	}
	o.say("  %s, %d rounds of %d", name, rounds, len(lanes))
	cost := make([]float64, len(lanes))
	for range rounds {
		for _, i := range rand.Perm(len(lanes)) {
			if err := ctx.Err(); err != nil {
				return err
			}
			var err error
			if cost[i], err = lanes[i].turn(); err != nil {
				return fmt.Errorf("%s: %w", lanes[i].name, err)
			}
		}
		o.add(name, noLimiter, unitNanoseconds, "total time; the other rows are the time added to it", cost[0])
		for i, p := range lanes[1:] {
			o.add(name, p.name, unitNanoseconds, p.note, cost[i+1]-cost[0])
		}
	}
	return nil
}

// raceDropping compares limiters that let a tenth through.
func raceDropping(ctx context.Context, o options, subjects []competitor, w warmUp) error {
	tolerance := 0.2
	if o.quick {
		tolerance = 9 // beside other work the sender is too unsteady for a share to be hit
	}
	var alone float64
	return race(ctx, o, trafficDropped, o.rounds(101), subjects, func(s competitor) (*lane, error) {
		if s.name != noLimiter {
			return newDroppingLane(ctx, s, target, w, alone, tolerance)
		}
		p, err := newLane(ctx, s, limit{}, w, target)
		if err == nil {
			alone = p.nanoseconds
		}
		return p, err
	})
}

// raceMany compares limiters that hold a rate for each of so many prefixes, with packets to random addresses in them.
func raceMany(ctx context.Context, o options, n int) error {
	prefixes := randomPrefixes(n, manyBits)
	targets := randomTargets(prefixes, 1<<16)
	subjects := []competitor{shapectlMany(prefixes), nftMap(prefixes), hashlimitPrefix}
	if n <= maxClasses {
		subjects = append(subjects, htbMany(prefixes))
	}
	name := trafficMany + ": 1 prefix"
	if n > 1 {
		name = fmt.Sprintf("%s: %s prefixes", trafficMany, count(n))
	}
	return race(ctx, o, name, o.rounds(21), subjects, func(s competitor) (*lane, error) {
		start := time.Now()
		p, err := newLane(ctx, s, freely, warmUp{packets: len(targets)}, targets...)
		o.say("  %d prefixes: %s is set up after %v", n, s.name, time.Since(start).Round(time.Millisecond))
		return p, err
	})
}

// newDroppingLane sets a limiter up such that a tenth of what is sent passes.
// The rate for that depends on what a drop costs the sender: it is found by trying, from what a packet
// takes about. The share may be off by tolerance times what it is to be, and by once more for each
// try: on a noisy machine the sender's speed changes between them. Where it falls so far that the limiter
// holds back all and drops nothing, no proportion leads to the rate: then it is looked for in the middle.
func newDroppingLane(ctx context.Context, s competitor, to netip.Addr, w warmUp,
	nanoseconds, tolerance float64) (*lane, error) {
	frame := float64(smallFrame)
	if to.Is6() {
		frame += 20
	}
	rate, share := frame*8*1e9/nanoseconds/10, 0.0
	low, high := 0.0, math.Inf(1)
	for try := range 10 {
		p, err := newLane(ctx, s, limit{policy.Rate(rate), max(4096, uint64(rate/8/100))}, w, to)
		if err != nil {
			return nil, err
		}
		if share, err = p.drained(w.packets); err != nil {
			p.Close()
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		if off := 1 + tolerance*float64(1+try); share > 0.1/off && share < 0.1*off {
			p.drops = true
			return p, nil
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
	return nil, fmt.Errorf("%s: no rate lets a tenth through: %.2g pass at %v", s.name, share, policy.Rate(rate))
}

// drained sends until a full bucket is no longer what lets packets through,
// and returns the share of packets that passed then.
func (p *lane) drained(packets int) (share float64, err error) {
	for range 200 {
		if share, err = p.passing(packets); err != nil || share < 0.5 {
			break
		}
	}
	if err != nil {
		return 0, err
	}
	return p.passing(packets)
}

// passing sends packets, and returns the share of them that passed.
func (p *lane) passing(packets int) (share float64, err error) {
	before, err := p.sent()
	if err != nil {
		return 0, err
	}
	if _, err := p.send(packets); err != nil {
		return 0, err
	}
	after, err := p.sent()
	return float64(after-before) / float64(packets), err
}
