package model

import (
	"math/big"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// An exact bucket implements the meters of the specification in rational arithmetic. A
// bucket that refuses a packet is not written; the leak is counted from its last
// charge. This is equivalent, and also defines a clock that steps back.
type exact struct {
	rate     *big.Rat // bytes per ns
	capacity *big.Rat // bytes: a packet conforms up to this level
	free     *big.Rat // bytes that are free when the bucket is empty: less if it is a queue
	full     *big.Rat // the level after an excess packet; nil for no penalty

	charged bool     // whether it was ever charged: else it is empty
	level   *big.Rat // bytes at the last charge
	last    uint64   // time of the last charge in ns

	// For the possible error of the integers: see slack.
	since   uint64 // when the bucket was last empty
	rounded uint64 // units lost since then, without those lost by reading the clock
}

func rat(n uint64) *big.Rat { return new(big.Rat).SetUint64(n) }

// use sets the parameters of a rule.
func (e *exact) use(r policy.Rule) {
	e.rate = new(big.Rat).Quo(rat(uint64(r.Rate)), rat(8e9))
	e.capacity, e.free, e.full = rat(r.Capacity), rat(r.Capacity), nil
	if r.Excess == policy.Delay {
		e.capacity = rat(r.Capacity + r.Queue)
		if r.Algorithm == policy.Leaky {
			e.free = rat(0)
		}
	}
	if r.Penalty.Kind != policy.PenaltyNone {
		e.full = new(big.Rat).Mul(e.rate, rat(uint64(r.Penalty.Duration)))
		e.full.Add(e.full, e.capacity)
	}
}

// change is an edit at now: the room stays, up to the new capacity. empty means that the integer bucket is empty, too.
func (e *exact) change(r policy.Rule, now uint64, empty bool) {
	if e.level = e.look(now); e.level.Sign() == 0 && empty {
		e.since, e.rounded = now, 0
	}
	room := new(big.Rat).Sub(e.free, e.level)
	e.rounded, e.since, e.last = e.rounded+2+elapsed(now, e.since)>>32, now, now
	e.use(r)
	e.level.Sub(e.free, room)
	if e.level.Sign() < 0 {
		e.level.SetUint64(0)
	}
	e.charged = e.charged || e.level.Sign() > 0
}

// look computes L' = max(0, L - r*dt).
func (e *exact) look(now uint64) *big.Rat {
	if !e.charged {
		return new(big.Rat)
	}
	dt := new(big.Rat).Sub(rat(now), rat(e.last))
	level := dt.Sub(e.level, dt.Mul(dt, e.rate))
	if level.Sign() < 0 {
		level.SetUint64(0)
	}
	return level
}

// judge returns the verdict for a packet, and its distance from the bound in bytes.
func (e *exact) judge(now, n uint64, ect bool) (Verdict, *big.Rat) {
	level := e.look(now)
	over := new(big.Rat).Add(level, rat(n)) // L' + n - C
	over.Sub(over, e.capacity)
	margin := new(big.Rat).Abs(over)
	if rat(n).Cmp(e.capacity) > 0 && level.Cmp(margin) < 0 {
		margin.Set(level)
	}
	if over.Sign() <= 0 || level.Sign() == 0 {
		return Pass, margin
	}
	if ect {
		over.Sub(over, e.capacity)
		if d := new(big.Rat).Abs(over); d.Cmp(margin) < 0 {
			margin = d
		}
		if over.Sign() <= 0 {
			return Mark, margin
		}
	}
	return Drop, margin
}

// settle applies a verdict to the bucket. empty means that the integer bucket is empty,
// too, which ends its error.
func (e *exact) settle(v Verdict, now, n uint64, holdNS uint64, empty bool) {
	level := e.look(now)
	if level.Sign() == 0 && empty {
		e.since, e.rounded = now, 0
	}
	switch {
	case v != Drop:
		e.level, e.last, e.charged = level.Add(level, rat(n)), now, true
	case e.full != nil && level.Cmp(e.full) < 0:
		e.level, e.last = new(big.Rat).Set(e.full), now
		e.since, e.rounded = now, 2+holdNS>>32
	}
}

// slack returns the possible error of the integers in bytes. Two readings of the byte
// clock differ by at most two units from the exact time, and by a unit per 2^32 ns,
// because the rate is rounded up. It does not add up from packet to packet. A change
// of the rate or a penalty time adds to it.
func (e *exact) slack(now uint64) *big.Rat {
	return new(big.Rat).Quo(rat(4+e.rounded+elapsed(now, e.since)>>32), rat(1<<UnitBits))
}

// tie reports whether the integers are exact when a packet exactly fills the bucket:
// since the bucket was empty, whole bytes have leaked, and the clock never counts
// fewer than those.
func (e *exact) tie(now uint64, margin *big.Rat) bool {
	return margin.Sign() == 0 && e.rounded == 0 && now >= e.since
}

func elapsed(a, b uint64) uint64 {
	if a > b {
		return a - b
	}
	return b - a
}

// A pair is an integer bucket and the exact bucket, which are offered the same packets.
type pair struct {
	m    *Limit
	b    Bucket
	e    *exact
	hold uint64
	last Outcome
	// Packets so near the bound that the verdicts may differ, and packets exactly at it.
	near, ties, steps int
}

func newPair(r policy.Rule) *pair {
	p := &pair{m: NewLimit(r), hold: uint64(r.Penalty.Duration), e: &exact{level: new(big.Rat)}}
	p.e.use(r)
	return p
}

// offer compares the two verdicts and the two levels.
func (p *pair) offer(tb testing.TB, now, n uint64, ect bool) Verdict {
	tb.Helper()
	p.steps++
	want, margin := p.e.judge(now, n, ect)
	slack := p.e.slack(now)
	before := p.b
	o := p.m.Offer(&p.b, nil, false, Packet{Time: now, Bytes: n, ECT: ect})
	got := o.Verdict
	p.last = o
	if got == Delay {
		got = Pass
	}
	if margin.Sign() == 0 {
		p.ties++
	}
	if got != want {
		if margin.Cmp(slack) > 0 || p.e.tie(now, margin) {
			tb.Fatalf("step %d: %d bytes at %d ns: verdict %v, exact %v (level %s, %s bytes from the bound)\nmeter %+v\nbucket %+v",
				p.steps, n, now, got, want, p.e.look(now).FloatString(6), margin.FloatString(9), p.m, before)
		}
		p.near++
	}
	p.e.settle(got, now, n, p.hold, p.m.Level(before, now) == 0) // with the integer verdict, or the two would differ for ever after a tie
	if p.m.Queues && !o.Excess && o.Departs == before.Departs+1 {
		own := now + p.m.drainNearest(excess(p.m.Level(before, now), n, p.m.Burst))
		if own+2 < before.Departs { // what was queued by another clock is in the bucket from now on
			p.e.level.Add(p.e.level, new(big.Rat).Mul(p.e.rate, rat(before.Departs-own)))
			p.e.rounded += 2
		}
	}
	p.sameLevel(tb, now)
	if p.b.TAT&busy != 0 {
		tb.Fatalf("step %d: TAT %#x has the bit TAT_BUSY\nmeter %+v", p.steps, p.b.TAT, p.m)
	}
	return got
}

func (p *pair) sameLevel(tb testing.TB, now uint64) {
	tb.Helper()
	got := new(big.Rat).Quo(rat(p.m.Level(p.b, now)), rat(1<<UnitBits))
	off := new(big.Rat).Sub(got, p.e.look(now))
	if off.Abs(off).Cmp(p.e.slack(now)) > 0 {
		tb.Fatalf("step %d at %d ns: level %s bytes, exact %s\nmeter %+v\nbucket %+v", p.steps, now,
			got.FloatString(9), p.e.look(now).FloatString(9), p.m, p.b)
	}
}

// succeed returns the limit of a rule that goes on from another one at a time (ns).
func succeed(old *Limit, r policy.Rule, at uint64) *Limit {
	next := NewLimit(r)
	next.Succeed(old.Meter, at)
	return next
}

// change lets both buckets go on with the next limit, that of a rule. The room stays, up to what is free in an empty bucket,
// also in buckets that were never charged, or have been empty for long.
func (p *pair) change(tb testing.TB, next *Limit, r policy.Rule, now uint64) {
	tb.Helper()
	for _, b := range []Bucket{p.b, {}, p.m.WithLevel(0, now)} {
		had, has := int64(p.m.free()-p.m.Level(b, now)), int64(next.free()-next.Level(b, now))
		if want := min(had, int64(next.free())); has != want {
			tb.Fatalf("an edit at %d ns changed the room from %d to %d units, want %d\nfrom %+v\nto   %+v\nbucket %+v", now, had, has, want, p.m, next, b)
		}
	}
	p.e.change(r, now, p.m.Level(p.b, now) == 0)
	p.m, p.hold = next, uint64(r.Penalty.Duration)
	p.sameLevel(tb, now)
}
