package model

import (
	"math/big"
	"testing"
)

// An exact bucket implements the meters of the specification in rational arithmetic. A
// bucket that refuses a packet is not written; the leak is counted from its last
// charge. This is equivalent, and also defines a clock that steps back.
type exact struct {
	rate     *big.Rat // bytes per ns
	capacity *big.Rat // bytes
	full     *big.Rat // the level after an excess packet; nil for no penalty

	charged bool     // whether it was ever charged: else it is empty
	level   *big.Rat // bytes at the last charge
	last    uint64   // time of the last charge in ns

	// For the possible error of the integers: see slack.
	since   uint64 // when the bucket was last empty
	rounded uint64 // units lost since then, without those lost by reading the clock
}

func newExact(rateBits, capacity uint64, penalised bool, holdNS uint64) *exact {
	e := &exact{level: new(big.Rat)}
	e.change(rateBits, capacity, penalised, holdNS, 0)
	e.rounded = 0
	return e
}

func rat(n uint64) *big.Rat { return new(big.Rat).SetUint64(n) }

// change sets another rate and capacity at now; the level is kept.
func (e *exact) change(rateBits, capacity uint64, penalised bool, holdNS, now uint64) {
	if e.rate != nil {
		e.level, e.last = e.look(now), now
		e.rounded += 2 + elapsed(now, e.since)>>32
		e.since = now
	}
	e.rate = new(big.Rat).Quo(rat(rateBits), rat(8e9))
	e.capacity, e.full = rat(capacity), nil
	if penalised {
		e.full = new(big.Rat).Mul(e.rate, rat(holdNS))
		e.full.Add(e.full, e.capacity)
	}
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
	// Packets so near the bound that the verdicts may differ, and packets exactly at it.
	near, ties, steps int
}

func newPair(rateBits, capacity uint64, penalised bool, holdNS uint64) *pair {
	return &pair{
		m: limit(rateBits, capacity, penalised, holdNS), hold: holdNS,
		e: newExact(rateBits, capacity, penalised, holdNS),
	}
}

// offer compares the two verdicts and the two levels.
func (p *pair) offer(tb testing.TB, now, n uint64, ect bool) Verdict {
	tb.Helper()
	p.steps++
	want, margin := p.e.judge(now, n, ect)
	slack := p.e.slack(now)
	before := p.b
	got := p.m.Offer(&p.b, nil, false, Packet{Time: now, Bytes: n, ECT: ect}).Verdict
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

// change sets another rate and capacity of both buckets. The caller clamps levels to the
// new capacity, as pkg/maps does.
func (p *pair) change(tb testing.TB, rateBits, capacity uint64, penalised bool, holdNS, now uint64) {
	tb.Helper()
	next := limit(rateBits, capacity, penalised, holdNS)
	next.Continue(p.m.Meter, now)
	old := p.m.Level(p.b, now)
	// Only the old meter knows whether the bucket is empty by its idle time: pkg/maps does this, too.
	if p.b != (Bucket{}) {
		p.b = p.m.WithLevel(old, now)
	}
	if got := next.Level(p.b, now); got != old && old <= next.Most() {
		tb.Fatalf("a change of rate changed a level of %d units to %d\nfrom %+v\nto   %+v\nbucket %+v at %d", old, got, p.m, next, p.b, now)
	}
	p.e.change(rateBits, capacity, penalised, holdNS, now)
	if old > next.Most() {
		p.b = next.WithLevel(next.Most(), now)
		p.e.level.Set(p.e.capacity)
		if p.e.full != nil {
			p.e.level.Set(p.e.full)
		}
		p.e.rounded += 2 + holdNS>>32
	}
	p.m, p.hold = next, holdNS
}
