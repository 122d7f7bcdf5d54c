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

// The suite traffic sends small UDP packets over veth pairs, each with another limiter, in turns. The cost
// of a limiter is the time of a packet minus its time without a limiter in the same round.

const (
	trafficConforming = "Time added per packet: all packets conform"
	trafficDropped    = "Time added per packet: 90 % dropped"
	trafficMany       = "Time added per packet, random addresses"

	// slice is the time of a turn. It is short, so that other activity affects few turns.
	slice = 10 * time.Millisecond
	// drainStep is the number of packets per step until a bucket is full.
	drainStep = 1000
)

// shapectlModes returns the modes of shapectl to compare.
func shapectlModes() (modes []competitor) {
	for _, a := range algorithms {
		for _, e := range []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow} {
			modes = append(modes, shapectl(a, e, loader.TCX))
		}
	}
	return modes
}

// traffic compares limiters by wall time. A packet stays on one CPU for its whole path.
func traffic(ctx context.Context, o options) error {
	return onLastCPU(func() error {
		subjects := append(shapectlModes(), nftOneLimit, nftSet, hashlimitAll, hashlimitHost, tbf, htb)
		warmed := warmUp{packets: 20_000}
		if err := race(ctx, o, trafficConforming, o.rounds(101), subjects, func(s competitor) (*lane, error) {
			return newLane(ctx, s, ample, warmed, target)
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

// A lane is an arena with a sender in a race.
type lane struct {
	*arena
	*sender
	competitor
	nanoseconds float64 // approximate time of a packet
	drops       bool    // most packets
}

// A warmUp prepares a lane for a measurement.
type warmUp struct {
	settle  time.Duration // for deferred work of the kernel
	packets int           // to fill caches
}

// newLane sets a limiter up in a new arena, and warms it up.
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
	// The far end drops packets as early as possible.
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

// turn sends for the time of a slice, and returns the time of a packet.
func (p *lane) turn() (nanoseconds float64, err error) {
	if p.drops {
		// The bucket has drained in the turns of other lanes.
		if _, err := p.afterBurst(drainStep); err != nil {
			return 0, err
		}
	}
	return p.send(max(len(p.targets), int(float64(slice)/p.nanoseconds)))
}

// bare is an arena without a limiter.
var bare = competitor{name: noLimiter, set: func(context.Context, *arena, limit) error { return nil }}

// race runs limiters in turns, in lanes that enter creates, beside one without a limiter.
// It reports the time that each limiter adds to a packet.
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

// raceDropping compares limiters that pass 10 %.
func raceDropping(ctx context.Context, o options, subjects []competitor, w warmUp) error {
	tolerance := 0.2
	if o.quick {
		tolerance = 9 // a quick run may share the CPU, so the share of passed packets varies
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

// raceMany compares limiters with a rate for each of n prefixes. Packets go to random addresses in them.
func raceMany(ctx context.Context, o options, n int) error {
	prefixes := randomPrefixes(n)
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
		p, err := newLane(ctx, s, ample, warmUp{packets: len(targets)}, targets...)
		o.say("  %d prefixes: %s was set up in %v", n, s.name, time.Since(start).Round(time.Millisecond))
		return p, err
	})
}

// newDroppingLane sets a limiter up that passes 10 % of the packets. The rate for that depends on the cost
// of a drop for the sender, so it is found by trial, from the approximate time of a packet. The share may
// differ by the tolerance, which grows with each attempt, because the sender's speed varies on a noisy
// machine. If a proportional step leaves the known bounds, the next rate is their geometric mean: a limiter
// that queues everything drops nothing, and has no proportion.
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
		if share, err = p.afterBurst(w.packets); err != nil {
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
	return nil, fmt.Errorf("%s: no rate passes 10 %% of the packets: the share is %.2g at %v", s.name, share, policy.Rate(rate))
}

// afterBurst sends until the burst is used up, and returns the share of packets that pass then.
func (p *lane) afterBurst(packets int) (share float64, err error) {
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

// passing sends packets, and returns the share that passed.
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
