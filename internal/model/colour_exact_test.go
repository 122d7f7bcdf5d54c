package model

import (
	"cmp"
	"math/big"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A tokenBucket has its tokens as the RFCs count them, in rational numbers.
type tokenBucket struct {
	rate   *big.Rat // bytes per ns
	size   *big.Rat // bytes
	tokens *big.Rat // bytes, at last
	last   uint64   // ns: when a packet took tokens

	clock  exact // for slack and tie: since when the integers have an error
	ragged bool  // the bucket was full, but the integers were not at their end: then they need not be exact at a tie
}

func newTokenBucket(rateBits, size uint64) tokenBucket {
	return tokenBucket{rate: new(big.Rat).Quo(rat(rateBits), rat(8e9)), size: rat(size), tokens: rat(size)}
}

// since returns the tokens that came since a packet took some, without a bound.
func (b tokenBucket) since(now uint64) *big.Rat {
	dt := new(big.Rat).Sub(rat(now), rat(b.last))
	return dt.Mul(dt, b.rate)
}

// fill adds tokens, and returns how many had no room. Tokens may be taken again, because a clock stepped back.
func (b tokenBucket) fill(tokens *big.Rat) (to, over *big.Rat) {
	to, over = new(big.Rat).Add(b.tokens, tokens), new(big.Rat)
	if to.Cmp(b.size) > 0 {
		over.Sub(to, b.size)
		to.Set(b.size)
	}
	return to, over
}

// has reports whether B tokens are there, and whether the integers may say otherwise.
func (b tokenBucket) has(tokens *big.Rat, now, bytes uint64) (enough, unsure, tie bool) {
	margin := new(big.Rat).Sub(tokens, rat(bytes))
	enough, tie = margin.Sign() >= 0, margin.Sign() == 0
	margin.Abs(margin)
	return enough, margin.Cmp(b.clock.slack(now)) <= 0 && (b.ragged || !b.clock.tie(now, margin)), tie
}

// restart ends the error of the integers if they have the bucket full, too.
func (b *tokenBucket) restart(full, empty bool, now uint64) {
	if full && empty {
		b.clock.since = now
	}
	if full {
		b.ragged = !empty
	}
}

// An rfcMeter is a meter as its RFC describes it.
type rfcMeter struct {
	kind  policy.Algorithm
	aware bool
	c, e  tokenBucket // e is P of RFC 2698
}

// at returns the tokens at now.
func (m *rfcMeter) at(now uint64) (tc, te *big.Rat) {
	tc, over := m.c.fill(m.c.since(now))
	if m.kind == policy.SRTCM { // if Tc is less than CBS, Tc is incremented, else Te is (RFC 2697, section 3)
		_, before := m.c.fill(m.c.since(m.e.last))
		te, _ = m.e.fill(over.Sub(over, before))
	} else {
		te, _ = m.e.fill(m.e.since(now))
	}
	return tc, te
}

// free returns the tokens of E that a packet may take: with RFC 2697, none that C lacks because a clock stepped back.
func (m *rfcMeter) free(tc, te *big.Rat) *big.Rat {
	if m.kind == policy.SRTCM && tc.Sign() < 0 {
		return new(big.Rat).Add(te, tc)
	}
	return te
}

// colour returns the colour of a packet, given whether Tc and Te (RFC 2698: Tp) are at least B.
func (m *rfcMeter) colour(in policy.Colour, tc, te bool) policy.Colour {
	if !m.aware {
		in = policy.Green
	}
	switch m.kind {
	case policy.SRTCM: // RFC 2697, section 3
		if in == policy.Green && tc {
			return policy.Green
		}
		if (in == policy.Green || in == policy.Yellow) && te {
			return policy.Yellow
		}
		return policy.Red
	case policy.TRTCM: // RFC 2698, section 3
		if in == policy.Red || !te {
			return policy.Red
		}
		if in == policy.Yellow || !tc {
			return policy.Yellow
		}
		return policy.Green
	default: // RFC 4115
		switch in {
		case policy.Green:
			if tc {
				return policy.Green
			}
			if te {
				return policy.Yellow
			}
		case policy.Yellow:
			if te {
				return policy.Yellow
			}
		}
		return policy.Red
	}
}

// take takes the tokens of a packet with a colour.
func (m *rfcMeter) take(colour policy.Colour, now, bytes uint64, tc, te *big.Rat) {
	if colour == policy.Green {
		m.c.tokens, m.c.last = new(big.Rat).Sub(tc, rat(bytes)), now
	}
	switch {
	case colour == policy.Yellow, colour == policy.Green && m.kind == policy.TRTCM:
		m.e.tokens, m.e.last = new(big.Rat).Sub(te, rat(bytes)), now
	case colour == policy.Green && m.kind == policy.SRTCM: // what C has no room for begins anew
		m.e.tokens, m.e.last = te, now
	}
}

// A colouredPair is an integer meter and an exact one, which are offered the same packets.
type colouredPair struct {
	l *Coloured
	p Pair
	e rfcMeter
	// Packets so near a bound that the colours may differ, and packets exactly at one.
	near, ties, steps int
	colours           [3]int
}

func newColouredPair(r policy.Rule) *colouredPair {
	second, _ := r.Second()
	return &colouredPair{l: NewColoured(r), e: rfcMeter{
		kind: r.Algorithm, aware: r.Colours.Aware,
		c: newTokenBucket(uint64(r.Rate), r.Capacity), e: newTokenBucket(uint64(second.Rate), cmp.Or(r.Colours.PBS, r.Colours.EBS)),
	}}
}

// offer compares the two colours and the levels.
func (p *colouredPair) offer(tb testing.TB, now, bytes uint64, in policy.Colour) policy.Colour {
	tb.Helper()
	p.steps++
	tc, te := p.e.at(now)
	hasC, unsureC, tieC := p.e.c.has(tc, now, bytes)
	hasE, unsureE, tieE := p.e.e.has(p.e.free(tc, te), now, bytes)
	if tieC || tieE {
		p.ties++
	}
	before := p.p
	levels := p.l.Levels(before, now)
	got := p.l.Offer(&p.p, now, bytes, in)
	p.colours[got]++
	if want := p.e.colour(in, hasC, hasE); got != want {
		if !(unsureC && got == p.e.colour(in, !hasC, hasE) || unsureE && got == p.e.colour(in, hasC, !hasE) ||
			unsureC && unsureE && got == p.e.colour(in, !hasC, !hasE)) {
			tb.Fatalf("step %d: %d bytes at %d ns, in %v: %v, exact %v (Tc %s, Te %s)\nmeter %+v\nbuckets %+v",
				p.steps, bytes, now, in, got, want, tc.FloatString(9), te.FloatString(9), p.l, before)
		}
		p.near++
	}
	if got != policy.Red {
		fullC, fullE := tc.Cmp(p.e.c.size) == 0, te.Cmp(p.e.e.size) == 0
		if p.e.kind == policy.SRTCM { // a TAT for both
			fullE = fullE && fullC
		}
		if got == policy.Green {
			p.e.c.restart(fullC, levels.First == 0, now)
		}
		if got == policy.Yellow || p.e.kind != policy.RFC4115 {
			p.e.e.restart(fullE, levels.Second == 0, now)
		}
	}
	p.e.take(got, now, bytes, tc, te) // the colour of the integers, or the two would differ for ever after a tie
	tc, te = p.e.at(now)
	p.sameLevels(tb, now, p.l.Levels(p.p, now), tc, te)
	if (p.p.First.TAT|p.p.Second.TAT)&busy != 0 {
		tb.Fatalf("step %d: a TAT has the bit TAT_BUSY: %+v\nmeter %+v", p.steps, p.p, p.l)
	}
	return got
}

// sameLevels compares the levels with what is missing in the token buckets.
func (p *colouredPair) sameLevels(tb testing.TB, now uint64, levels Levels, tc, te *big.Rat) {
	tb.Helper()
	same := func(name string, units uint64, b tokenBucket, tokens *big.Rat) {
		off := new(big.Rat).Quo(rat(units), rat(1<<UnitBits))
		off.Add(off, tokens).Sub(off, b.size)
		if off.Abs(off).Cmp(b.clock.slack(now)) > 0 {
			tb.Fatalf("step %d at %d ns: level of %s %d units, but %s tokens of %s\nmeter %+v\nbuckets %+v",
				p.steps, now, name, units, tokens.FloatString(9), b.size.FloatString(0), p.l, p.p)
		}
	}
	same("C", levels.First, p.e.c, tc)
	same("E", p.l.E(levels), p.e.e, p.e.free(tc, te))
	if p.e.kind == policy.SRTCM {
		both := p.e.e
		both.size = new(big.Rat).Add(p.e.c.size, p.e.e.size)
		same("C and E", levels.Second, both, new(big.Rat).Add(tc, te))
	}
}
