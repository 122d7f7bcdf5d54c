package model

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

var coloured = []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115}

// colouredRule returns a rule with a second rate and burst size; srtcm has no second rate.
func colouredRule(a policy.Algorithm, aware bool, cir policy.Rate, cbs uint64, second policy.Rate, burst uint64) policy.Rule {
	r := policy.Rule{Algorithm: a, Rate: cir, Capacity: cbs, Colours: policy.Colours{Aware: aware}}
	switch a {
	case policy.SRTCM:
		r.Colours.EBS = burst
	case policy.TRTCM:
		r.Colours.PIR, r.Colours.PBS = second, burst
	case policy.RFC4115:
		r.Colours.EIR, r.Colours.EBS = second, burst
	}
	return r
}

// colouredSize returns the size of a packet of 64 to 65535 bytes: often what a bucket has room for, or a byte more.
func (p *colouredPair) size(roll dice, now uint64) uint64 {
	s := p.l.Levels(p.p, now)
	room := func(level, capacity uint64) uint64 { return (capacity-min(level, capacity))>>UnitBits + roll(2) }
	n := 64 + roll(1451)
	switch roll(8) {
	case 0, 1:
		n = room(s.First, p.l.First.Capacity)
	case 2, 3:
		n = room(p.l.E(s), p.l.Burst())
	case 4:
		n = roll(1 << 16)
	}
	return min(max(n, 64), 65535)
}

// gap returns the time until a packet of n bytes: any, or until a bucket has room or is full, or 1 ns earlier.
func (p *colouredPair) gap(roll dice, now, n uint64) uint64 {
	s := p.l.Levels(p.p, now)
	switch roll(6) {
	case 0:
		return p.l.First.Wait(s.First, n) - roll(2)
	case 1:
		wait := excess(p.l.E(s), n, p.l.Second.Capacity)
		if p.l.Kind == policy.SRTCM && wait > 0 { // E gets tokens only while C is full
			wait += s.First
		}
		return p.l.Second.Drain(wait) - roll(2)
	case 2, 3:
		return gap(roll, &Limit{Meter: p.l.First}, p.p.First, now)
	case 4:
		return gap(roll, &Limit{Meter: p.l.Second}, p.p.Second, now)
	default:
		return 0
	}
}

// Random rates and burst sizes. All orders of magnitude are equally likely.
func TestColoursAreExact(t *testing.T) {
	seed := testenv.Seed(t)
	traces, packets := testenv.Rounds(t, 40), 250
	for _, algorithm := range coloured {
		for _, aware := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/aware=%v", algorithm, aware), func(t *testing.T) {
				t.Parallel()
				var near, ties, steps int
				var colours [3]int
				for i := range traces {
					r := rand.New(rand.NewPCG(seed, uint64(i)))
					roll := random(r)
					rate := func() policy.Rate {
						if roll(2) == 0 {
							return policy.Rate(min(max(rates[roll(uint64(len(rates)))], 8000), 400e9))
						}
						return policy.Rate(min(8000+roll(1<<(3+roll(37))), 400e9))
					}
					burst := func() uint64 { return []uint64{0, 64, 1514, roll(1 << (8 + roll(16)))}[min(roll(12), 3)] }
					cir, second := rate(), rate()
					if algorithm == policy.TRTCM {
						cir, second = min(cir, second), max(cir, second)
					}
					p := newColouredPair(colouredRule(algorithm, aware, cir, burst(), second, burst()))
					// A TAT of 0 in tick 0 would be that of a bucket that was never charged.
					now, mostly := starts[roll(uint64(len(starts)))]+1e6, policy.Green
					begun := now
					for range packets {
						n := p.size(roll, now)
						now = advance(now, p.gap(roll, now, n))
						if int64(now-begun) > 1<<61 { // 73 years: ticks wrap after twice that, and a bucket may not be charged meanwhile
							break
						}
						if roll(16) == 0 {
							mostly = policy.Colour(roll(3)) // one bucket may not be charged for long
						}
						in := mostly
						if roll(4) == 0 {
							in = policy.Colour(roll(3))
						}
						p.offer(t, now, n, in)
					}
					near, ties, steps = near+p.near, ties+p.ties, steps+p.steps
					for c, n := range p.colours {
						colours[c] += n
					}
				}
				t.Logf("%d packets, by colour %v, %d exactly on a bound, %d near enough to differ", steps, colours, ties, near)
				if ties < steps/100 || min(colours[0], colours[1], colours[2]) < steps/20 {
					t.Error("the traces miss their purpose")
				}
				if near > steps/20 { // many gaps end at a bound
					t.Error("too many colours are uncertain")
				}
			})
		}
	}
}

// Under constant overload C is never full, so E gets no tokens: exactly EBS bytes are ever yellow (RFC 2697). One word
// with two thresholds, at CBS and at CBS + EBS, has other colours: E's tokens would come back, and C's would not.
func TestYellowUnderOverload(t *testing.T) {
	const cbs, ebs, size = 10_000, 20_000, 1000
	l, p := NewColoured(colouredRule(policy.SRTCM, false, 8_000_000, cbs, 0, ebs)), Pair{} // a byte each µs
	word := l.First
	var bucket Bucket
	now := uint64(time.Second)
	// overload offers packets at twice the rate, and counts their bytes by colour.
	overload := func(packets int) (rfc, oneWord [3]uint64) {
		for range packets {
			rfc[l.Offer(&p, now, size, policy.Green)] += size
			colour, level := policy.Red, word.Level(bucket, now)+size<<UnitBits
			if level <= (cbs+ebs)<<UnitBits {
				colour = policy.Yellow
				if level <= cbs<<UnitBits {
					colour = policy.Green
				}
				word.Raise(&bucket, level, now)
			}
			oneWord[colour] += size
			now += 500 * uint64(time.Microsecond)
		}
		return rfc, oneWord
	}
	rfc, oneWord := overload(20_000) // 10 s
	// C's tokens before the last packet are those of 9999.5 ms and CBS; 500 are left.
	if want := [3]uint64{10_009_000, ebs, 20_000_000 - 10_009_000 - ebs}; rfc != want {
		t.Errorf("bytes by colour: %v, want %v", rfc, want)
	}
	if want := [3]uint64{19_000, 10_010_000, 20_000_000 - 19_000 - 10_010_000}; oneWord != want {
		t.Errorf("bytes by colour with one word: %v, want %v", oneWord, want)
	}
	// After a pause that fills C and gives E 3000 tokens, so many more bytes are yellow.
	now += (cbs + 3000 - 1000) * uint64(time.Microsecond)
	if rfc, _ = overload(1000); rfc[policy.Yellow] != 3000 {
		t.Errorf("%d bytes are yellow after the pause, want 3000", rfc[policy.Yellow])
	}
}

// Often only one of the buckets is charged. The other one is neither full when its clock has
// wrapped meanwhile, nor when it was idle for longer than it takes to drain, which differs for both.
func TestColoursAfterWrap(t *testing.T) {
	const fast, slow, burst, size = 400_000_000_000, 8000, 1 << 20, 1514
	for _, algorithm := range coloured {
		for _, in := range []policy.Colour{policy.Green, policy.Yellow} {
			cir, second := policy.Rate(fast), policy.Rate(slow)
			if algorithm == policy.TRTCM {
				cir, second = slow, fast
			}
			l := NewColoured(colouredRule(algorithm, true, cir, burst, second, burst))
			for _, pause := range []time.Duration{time.Second, 10 * time.Second, 100 * time.Second, 1000 * time.Second, 24 * time.Hour} {
				p := Pair{}
				now := uint64(time.Hour)
				l.Offer(&p, now, size, policy.Green)
				for range 500 {
					now += uint64(pause)
					s := l.Levels(p, now)
					for _, b := range []struct{ level, rate uint64 }{{s.First, l.First.RateUnits}, {s.Second, l.Second.RateUnits}} {
						if b.level > burst<<UnitBits || b.rate > 1<<50 && b.level != 0 {
							t.Fatalf("%v, %v packets, pauses of %v: levels %+v units after %d ns", algorithm, in, pause, s, now)
						}
					}
					l.Offer(&p, now, size, in)
				}
			}
		}
	}
}

// Debts of C and E together keep their level until they have drained.
func TestColoursNotIdleYet(t *testing.T) {
	const cbs = 1 << 30
	l, p := NewColoured(colouredRule(policy.SRTCM, false, 8_000_000, cbs, 0, 1514)), Pair{}
	now := uint64(time.Hour)
	for range cbs >> PacketBits {
		l.Offer(&p, now, MaxPacket, policy.Green)
	}
	full := Levels{cbs >> PacketBits * MaxPacket << UnitBits, cbs >> PacketBits * MaxPacket << UnitBits}
	if got := l.Levels(p, now); got != full {
		t.Fatalf("levels %+v, want %+v", got, full)
	}
	now += l.First.Drain(full.First - 1000<<UnitBits)
	if got := Bytes(l.Levels(p, now).Second); got != 1000 {
		t.Errorf("the level is %d bytes after all but 1000 have drained", got)
	}
}

// What passes in any window, whatever the clocks of CPUs say: of a bucket never more than its size and rate allow.
func TestColoursInEveryWindow(t *testing.T) {
	seed := testenv.Seed(t)
	const largestStep = 1_000_000 // ns backwards
	traces, packets := testenv.Rounds(t, 20), 2000
	for i := range traces {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		algorithm, cir := coloured[i%3], 8000+r.Uint64N(1<<(10+r.Uint64N(28)))
		pir := cir + r.Uint64N(cir)
		cbs, second := 64+r.Uint64N(1<<20), 64+r.Uint64N(1<<20)
		rule := colouredRule(algorithm, i%2 == 0, policy.Rate(cir), cbs, policy.Rate(pir), second)
		l, p := NewColoured(rule), Pair{}
		// The colours, bits of 1<<policy.Colour, that together keep to a rate and size.
		bounds := []struct {
			colours    int
			rate, size uint64
			w          testenv.Windows
		}{{colours: 1 << policy.Green, rate: cir, size: cbs}, {colours: 1<<policy.Green | 1<<policy.Yellow, rate: pir, size: second}}
		switch algorithm {
		case policy.SRTCM:
			// At an earlier time, E has the same tokens.
			bounds[1].rate, bounds[1].size = cir, cbs+second+cir*largestStep/8e9
		case policy.RFC4115:
			bounds[1].colours = 1 << policy.Yellow
		}
		clock := 1e9 + starts[i%(len(starts)-1)] // clock of the first CPU
		now, grain := clock, int64(10)           // millionths of a byte
		for k := range packets {
			n := 64 + r.Uint64N(min(cbs, 65472))
			colour := l.Offer(&p, now, n, policy.Colour(r.IntN(3)))
			then := now
			clock += r.Uint64N(n * 8e9 / cir)
			now = clock - r.Uint64N(3)*largestStep/2 // the clock of one of three CPUs
			grain += 1 + int64(float64(clock-then)/float64(1<<52)*1e6)
			for j := range bounds {
				b := &bounds[j]
				if b.colours>>colour&1 != 0 {
					if most, _ := b.w.Packet(n); most > 1e6*int64(b.size)+grain {
						t.Fatalf("trace %d (%v), packet %d of %d bytes: %d millionths of a byte more than %d bit/s allow, size %d",
							i, algorithm, k, n, most, b.rate, b.size)
					}
				}
				b.w.Leak(b.rate, int64(now-then))
			}
		}
	}
}
