package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite traffic sends small UDP packets over veth pairs, each behind
// another limiter, in turns: what a packet takes there, beyond what it takes in
// that round without a limiter, is what the limiter costs.

const (
	trafficNever = "Time added per packet: limits that never bite"
	trafficDrops = "Time added per packet: dropping nine tenths"
	trafficMany  = "Time added per packet, random addresses"

	// slice is how long each sends in a round: short, as what else the machine does then hits few of them.
	slice = 10 * time.Millisecond
	// drainStep is how many packets go at a time until a bucket is empty.
	drainStep = 1000
	// warmPackets is how many packets go before.
	warmPackets = 20_000
)

// trafficSubjects are compared with one limit.
func trafficSubjects() []competitor {
	var subjects []competitor
	for _, a := range []policy.Algorithm{policy.GCRA, policy.Leaky} {
		for _, e := range []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow} {
			subjects = append(subjects, shapectl(a, e, loader.TCX))
		}
	}
	return append(subjects, nftOneLimit, nftSet, hashlimit("iptables-legacy", ""), hashlimit("iptables-legacy", "dstip"), tbf, htb)
}

// traffic compares limiters by wall time.
func traffic(ctx context.Context, o options) ([]Result, error) {
	release, err := pin()
	if err != nil {
		return nil, err
	}
	defer release()
	rounds := o.rounds(101)
	passing, err := race(ctx, o, trafficNever, trafficSubjects(), freely, rounds)
	if err != nil {
		return nil, err
	}
	dropping, err := raceDropping(ctx, o, rounds)
	if err != nil {
		return nil, err
	}
	results := append(passing, dropping...)
	counts := []int{1, 100, 10_000, 100_000}
	if o.quick {
		counts = counts[:2]
	}
	for _, n := range counts {
		many, err := raceMany(ctx, o, n, o.rounds(21))
		if err != nil {
			return nil, fmt.Errorf("%d prefixes: %w", n, err)
		}
		results = append(results, many...)
	}
	return results, nil
}

// pin keeps the calling thread on one CPU, so that all of a packet's way is on one.
func pin() (release func(), err error) {
	runtime.LockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("ask for the CPUs of a thread: %w", err)
	}
	last := 0
	for cpu := range len(before) * 64 {
		if before.IsSet(cpu) {
			last = cpu
		}
	}
	one.Set(last)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("keep a thread on CPU %d: %w", last, err)
	}
	return func() {
		unix.SchedSetaffinity(0, &before)
		runtime.UnlockOSThread()
	}, nil
}

// A lane is an arena whose sender takes part in a race.
type lane struct {
	*arena
	*sender
	competitor
	nanoseconds float64 // what a packet takes about
	drops       bool    // most of what is sent
	samples     []float64
}

// newLane sets a limiter up in an arena of its own, lets it settle, and sends so many packets to fill caches.
func newLane(ctx context.Context, s competitor, l limit, targets []netip.Addr, settle time.Duration, packets int) (*lane, error) {
	a, err := newArena(ctx)
	if err != nil {
		return nil, err
	}
	p := &lane{arena: a, competitor: s}
	if err := p.prepare(ctx, l, targets, settle, packets); err != nil {
		a.Close()
		return nil, fmt.Errorf("%s: %w", s.name, err)
	}
	return p, nil
}

func (p *lane) prepare(ctx context.Context, l limit, targets []netip.Addr, settle time.Duration, packets int) (err error) {
	if err := p.sink(); err != nil {
		return err
	}
	if p.sender, err = p.newSender(smallPayload, targets...); err != nil {
		return err
	}
	if err := p.set(ctx, p.arena, l); err != nil {
		return err
	}
	if err := sleep(ctx, settle); err != nil {
		return err
	}
	p.nanoseconds, err = p.send(packets)
	return err
}

// bare is an arena without a limiter.
var bare = competitor{name: noLimiter, set: func(context.Context, *arena, limit) error { return nil }}

// race compares limiters with one limit each.
func race(ctx context.Context, o options, name string, subjects []competitor, l limit, rounds int) ([]Result, error) {
	var lanes []*lane
	defer func() { closeLanes(lanes) }()
	for _, s := range append([]competitor{bare}, subjects...) {
		if s.name != noLimiter && !chosen(o.only, s.name) {
			continue
		}
		p, err := newLane(ctx, s, l, []netip.Addr{target}, 0, warmPackets)
		if err != nil {
			return nil, err
		}
		lanes = append(lanes, p)
	}
	o.say("  %s, %d rounds of %d", name, rounds, len(lanes))
	return run1(ctx, name, lanes, rounds)
}

// run1 lets lanes, of which the first has no limiter, take turns, and returns what each added.
func run1(ctx context.Context, name string, lanes []*lane, rounds int) ([]Result, error) {
	added := make([][]float64, len(lanes))
	order := make([]int, len(lanes))
	for i := range order {
		order[i] = i
	}
	for range rounds {
		cost := make([]float64, len(lanes))
		rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if lanes[i].drops {
				// It had the others' turns to fill up again.
				if _, err := lanes[i].drained(drainStep); err != nil {
					return nil, fmt.Errorf("%s: %w", lanes[i].name, err)
				}
			}
			ns, err := lanes[i].send(max(len(lanes[i].targets), int(float64(slice)/lanes[i].nanoseconds)))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", lanes[i].name, err)
			}
			cost[i] = ns
		}
		for i := range lanes {
			added[i] = append(added[i], cost[i]-cost[0])
		}
		lanes[0].samples = append(lanes[0].samples, cost[0])
	}
	results := []Result{newResult(name, noLimiter, unitNanoseconds, lanes[0].samples)}
	results[0].Note = "all of it; the others are what they add"
	for i, p := range lanes[1:] {
		r := newResult(name, p.name, unitNanoseconds, added[i+1])
		r.Note = p.note
		results = append(results, r)
	}
	return results, nil
}

func closeLanes(lanes []*lane) {
	for _, p := range lanes {
		p.Close()
	}
}

// raceDropping compares limiters that let a tenth through.
func raceDropping(ctx context.Context, o options, rounds int) ([]Result, error) {
	first, err := newLane(ctx, bare, limit{}, []netip.Addr{target}, 0, warmPackets)
	if err != nil {
		return nil, err
	}
	lanes := []*lane{first}
	defer func() { closeLanes(lanes) }()
	tolerance := 0.2
	if o.quick {
		tolerance = 9 // beside other work the sender is too unsteady for a share to be hit
	}
	for _, s := range trafficSubjects() {
		if !chosen(o.only, s.name) {
			continue
		}
		p, err := newDroppingLane(ctx, s, target, 0, first.nanoseconds, warmPackets, tolerance)
		if err != nil {
			return nil, err
		}
		lanes = append(lanes, p)
	}
	o.say("  %s, %d rounds of %d", trafficDrops, rounds, len(lanes))
	return run1(ctx, trafficDrops, lanes, rounds)
}

// manySubjects hold a rate for each of many prefixes.
func manySubjects(prefixes []netip.Prefix) []competitor {
	subjects := []competitor{shapectlMany(prefixes), nftMap(prefixes), hashlimitPrefix}
	if len(prefixes) <= maxClasses {
		subjects = append(subjects, htbMany(prefixes))
	}
	return subjects
}

// raceMany compares limiters of so many prefixes, with packets to random addresses in them.
func raceMany(ctx context.Context, o options, n, rounds int) ([]Result, error) {
	prefixes := randomPrefixes(n, manyBits)
	targets := randomTargets(prefixes, 1<<16)
	name := trafficMany + ": 1 prefix"
	if n > 1 {
		name = fmt.Sprintf("%s: %s prefixes", trafficMany, count(n))
	}
	var lanes []*lane
	defer func() { closeLanes(lanes) }()
	for _, s := range append([]competitor{bare}, manySubjects(prefixes)...) {
		if s.name != noLimiter && !chosen(o.only, s.name) {
			continue
		}
		start := time.Now()
		p, err := newLane(ctx, s, freely, targets, 0, len(targets))
		if err != nil {
			return nil, err
		}
		o.say("  %d prefixes: %s is set up after %v", n, s.name, time.Since(start).Round(time.Millisecond))
		lanes = append(lanes, p)
	}
	return run1(ctx, name, lanes, rounds)
}
