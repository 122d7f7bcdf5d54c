package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// marking returns a rule with ECN.
func marking(rateBits, capacity uint64, penalised bool, holdNS uint64) policy.Rule {
	r := policy.Rule{Rate: policy.Rate(rateBits), Capacity: capacity, Excess: policy.ECN}
	if penalised {
		r.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(holdNS)}
	}
	return r
}

func limit(rateBits, capacity uint64) *Limit { return NewLimit(marking(rateBits, capacity, false, 0)) }

func TestVectors(t *testing.T) {
	for _, trace := range testenv.Vectors(t) {
		t.Run(trace.Name, func(t *testing.T) {
			m, b := limit(trace.Rate, trace.Capacity), Bucket{}
			for i, s := range trace.Steps(t) {
				if pass := m.Offer(&b, nil, false, Packet{Time: s.Now, Bytes: s.Bytes}).Verdict == Pass; pass != s.Pass {
					t.Fatalf("row %d: pass %v, want %v", i, pass, s.Pass)
				}
				level := float64(m.Level(b, s.Now)) / (1 << UnitBits)
				if math.Abs(level-s.Level) > 0.001 {
					t.Fatalf("row %d: level %.6f bytes, want %.3f", i, level, s.Level)
				}
			}
		})
	}
}

// rates are low, high and odd: no odd rate is a whole number of units per ns.
var rates = []uint64{
	8, 9, 1000, 8000, 64000, 64001, 1_000_000, 9_999_999, 123_456_789, 1_000_000_000, 8_589_934_592,
	40_000_000_000, 399_999_999_999, 400_000_000_000, 1_000_000_000_000,
}

// starts are times around which a clock in ns, ticks or bytes has its limits.
var starts = []uint64{0, 1, 1 << TickBits, 123_456_789_012, 1<<62 - 1e12, 1 << 62, 1<<63 - 1e12, 1 << 63, 1<<64 - 1 - 1e13}

// Dice make a trace from random numbers, or from a fuzzer's bytes. They return numbers below n.
type dice func(n uint64) uint64

func random(r *rand.Rand) dice { return r.Uint64N }

// wrap returns the period of a meter's clock in ns.
func wrap(m *Limit) uint64 {
	if m.RateUnits <= 1<<32 {
		return math.MaxUint64
	}
	ns, _ := bits.Div64(1<<32, 0, m.RateUnits)
	return ns
}

// gap returns a time between packets: short, long, or up to a limit of bucket or clock.
func gap(roll dice, m *Limit, b Bucket, now uint64) uint64 {
	year := uint64(365 * 24 * time.Hour)
	switch roll(16) {
	case 0, 1, 2:
		return 0
	case 3, 4, 5, 6:
		return roll(2*m.Drain(uint64(1500)<<UnitBits) + 2)
	case 7:
		return roll(2000)
	case 8:
		return m.Drain(m.Level(b, now))
	case 9:
		return m.Drain(m.Level(b, now)) - roll(2) // 1 ns backwards if it is empty
	case 10:
		return m.Wait(m.Level(b, now), roll(1<<16))
	case 11:
		return roll(uint64(time.Minute))
	case 12:
		return roll(2 * uint64(m.Idle) << TickBits)
	case 13:
		if w := wrap(m); w < 50*year {
			return (1+roll(3))*w/2 + roll(2000)
		}
		return roll(10 * year)
	case 14:
		return roll(100 * year)
	default:
		return -roll(1 << 20) // backwards, as from one CPU to another
	}
}

func size(roll dice, capacity uint64) uint64 {
	switch roll(8) {
	case 0:
		return 40
	case 1:
		return 1514
	case 2:
		return 1 + roll(512<<10)
	case 3:
		return min(capacity+roll(3), MaxPacket) // exactly full, and one byte more
	case 4:
		return min(max(capacity/2, 1), MaxPacket)
	case 5:
		return 1
	default:
		return 40 + roll(1475)
	}
}

// advance returns the time after a gap. It stays where it is instead of going around the end of the clock, or backwards
// before its start or by more than a tick.
func advance(now, gap uint64) uint64 {
	next := now + gap
	if int64(gap) >= 0 && next < now || int64(gap) < 0 && (next > now || -gap > 1<<20) {
		return now
	}
	return next
}

// play offers a trace of packets to both buckets. The clock stays within its range.
func play(tb testing.TB, roll dice, p *pair, now uint64, packets int, ecn, changes bool) {
	const year = uint64(365 * 24 * time.Hour)
	edited := now
	for range packets {
		g := gap(roll, p.m, p.b, now)
		// After 146 years a bucket is one tick old again, and 36 years after an edit what it left behind is. But no machine runs
		// for so long.
		if changes && int64(g) > 0 {
			g = min(g, year/2)
		}
		now = advance(now, g)
		if changes && (roll(32) == 0 || now > edited && now-edited > 5*year) {
			rate := 8 + roll(1<<(3+roll(37)))
			r := marking(rate, 1+roll(1<<(10+roll(15))), p.e.full != nil, tolerable(rate, p.hold))
			p.change(tb, succeed(p.m, r, now), r, now)
			edited = now
		}
		capacity := new(big.Int).Div(p.e.capacity.Num(), p.e.capacity.Denom()).Uint64()
		p.offer(tb, now, size(roll, capacity), ecn && roll(2) == 0)
	}
}

func TestOfferIsExact(t *testing.T) {
	seed := testenv.Seed(t)
	packets := testenv.Rounds(t, 100)
	near, ties, steps := 0, 0, 0
	for i, rate := range rates {
		for j, start := range starts {
			for k, capacity := range []uint64{1500, 65536, 1 << 20, rate/80 + 1} {
				r := rand.New(rand.NewPCG(seed, uint64(i<<16|j<<8|k)))
				p := newPair(marking(rate, capacity, false, 0))
				t.Run(fmt.Sprintf("%d-bit-%d-bytes-at-%d", rate, capacity, start), func(t *testing.T) {
					play(t, random(r), p, start, packets, k == 1, k == 2)
				})
				near, ties, steps = near+p.near, ties+p.ties, steps+p.steps
			}
		}
	}
	t.Logf("%d packets, %d exactly on their bound, %d near enough to differ", steps, ties, near)
	if ties == 0 {
		t.Error("no packet exactly filled a bucket: the traces miss their purpose")
	}
	if near > steps/20 { // many gaps end at a bound
		t.Error("too many verdicts are uncertain")
	}
}

// Random rates, capacities and penalties. All orders of magnitude are equally likely.
func TestAnyMeterIsExact(t *testing.T) {
	seed := testenv.Seed(t)
	for i := range testenv.Rounds(t, 150) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			rate := min(8+r.Uint64N(1<<(3+r.IntN(38))), 1e12)
			changes, octaves := i%4 > 0, 40
			if changes {
				octaves = 37 // levels are to be below 2^60 units
			}
			capacity := 1 + r.Uint64N(1<<(1+r.IntN(octaves)))
			hold := tolerable(rate, r.Uint64N(1<<(1+r.IntN(46))))
			p := newPair(marking(rate, capacity, i%3 == 0, hold))
			play(t, random(r), p, starts[r.IntN(len(starts))], 250, i%2 == 0, changes)
		})
	}
}

func TestPenaltyIsExact(t *testing.T) {
	seed := testenv.Seed(t)
	for i, hold := range []time.Duration{0, 1, 777 * time.Nanosecond, time.Millisecond, 1234567 * time.Microsecond, 30 * time.Second, 24 * time.Hour} {
		for j, rate := range rates {
			if tolerable(rate, uint64(hold)) < uint64(hold) {
				continue
			}
			t.Run(fmt.Sprintf("%v-%d-bit", hold, rate), func(t *testing.T) {
				r := rand.New(rand.NewPCG(seed, uint64(i<<8|j)))
				p := newPair(marking(rate, 20000, true, uint64(hold)))
				play(t, random(r), p, 1e9, 200, j%2 == 0, j%3 == 0)
			})
		}
	}
}

// tolerable returns the penalty, or 0 if the level would be too high.
func tolerable(rate, holdNS uint64) uint64 {
	if float64(rate)/8e9*float64(holdNS) > 1<<38 {
		return 0
	}
	return holdNS
}

// A packet that is due exactly now conforms, at every rate with such a time in whole ns,
// and at any state of the clock.
func TestExactTies(t *testing.T) {
	const capacity = 3000
	for _, rate := range []uint64{1000, 8000, 64000, 999_000, 1_000_000, 123_456_000, 1_000_000_000, 400_000_000_000} {
		for _, start := range starts {
			for _, off := range []uint64{0, 1, 7, 999_999_937} {
				// These bytes leak in a whole number of ns.
				n := rate / gcd(rate, 8e9)
				for n < 40 {
					n *= 2
				}
				if n > capacity {
					continue
				}
				due := n * 8e9 / rate
				p := newPair(marking(rate, capacity, false, 0))
				now, early := start+off, p.m.Drain(6) // more than the clock's resolution
				p.offer(t, now, capacity, false)
				for range 50 {
					now += due
					if v := p.offer(t, now-early, n, false); v != Drop {
						t.Fatalf("%d bit/s: %d bytes %d ns too early: %v", rate, n, early, v)
					}
					if v := p.offer(t, now, n, false); v != Pass {
						t.Fatalf("%d bit/s: %d bytes just in time: %v", rate, n, v)
					}
				}
			}
		}
	}
}

func gcd(a, b uint64) uint64 {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}

// A TAT may be 0 modulo 2^64, which has no special meaning.
func TestTATOfZero(t *testing.T) {
	const rate = 8_000_000_000 // one unit per 2^-20 ns: the clock wraps after 2^44 ns
	for _, n := range []uint64{1, 64, 1500, 65536} {
		m, b := limit(rate, 1<<20), Bucket{}
		now := uint64(1)<<44 - n
		m.Offer(&b, nil, false, Packet{Time: now, Bytes: n})
		if got := m.Level(b, now); got != n<<UnitBits {
			t.Errorf("%d bytes at %d ns: the level is %d units", n, now, got)
		}
	}
}

// A bucket that has drained is empty after any idle time.
func TestIdle(t *testing.T) {
	const year = uint64(365 * 24 * time.Hour)
	for _, rate := range rates {
		for _, capacity := range []uint64{1500, 1 << 20, 1 << 30} {
			m := limit(rate, capacity)
			drained := m.Drain(capacity<<UnitBits) + m.Drain(4)
			idles := []uint64{drained, drained + 1, uint64(24 * time.Hour), uint64(7 * 24 * time.Hour), year, 10 * year, 100 * year, 145 * year}
			if w := wrap(m); w < year {
				for k := range uint64(9) {
					idles = append(idles, k*w/4, k*w/4-1, k*w/4+drained, 1000*w-drained, 1000*w+w/2)
				}
			}
			for _, start := range starts {
				for _, idle := range idles {
					if idle < drained || start+idle < start || idle > 145*year {
						continue
					}
					b := Bucket{}
					for range 3 { // fills the bucket, however late a packet arrives
						m.Offer(&b, nil, false, Packet{Time: start, Bytes: capacity & MaxPacket})
					}
					if got := m.Level(b, start+idle); got != 0 {
						t.Fatalf("%d bit/s, %d bytes: idle from %d for %d ns: the level is %d units", rate, capacity, start, idle, got)
					}
				}
			}
		}
	}
}

// A bucket that has not drained yet keeps its level.
func TestNotIdleYet(t *testing.T) {
	for _, rate := range rates {
		const capacity = 1 << 20
		m := limit(rate, capacity)
		for _, start := range starts {
			b := Bucket{}
			m.Offer(&b, nil, false, Packet{Time: start, Bytes: capacity})
			soon := start + m.Drain((capacity-1000)<<UnitBits)
			if soon < start {
				continue
			}
			if got := m.Level(b, soon); got == 0 || got > 1000<<UnitBits {
				t.Errorf("%d bit/s from %d: the level is %d units after 1000 bytes", rate, start, got)
			}
		}
	}
}

// The leaked bytes match the rate, to one part in a million, for any packet size.
func TestLongRunRate(t *testing.T) {
	for _, rate := range []uint64{8000, 64001, 1_000_000, 123_456_789, 10_000_000_000, 399_999_999_999, 400_000_000_000, 1e12} {
		for _, n := range []uint64{40, 41, 64, 1514, 65536, 512 << 10} {
			// Large enough that the bucket is never empty: at the highest rate, 1 ns is 50 bytes.
			m, b := limit(rate, n+65536), Bucket{}
			start := uint64(987_654_321)
			now, passed := start, uint64(0)
			for range 50_000 {
				now += m.Wait(m.Level(b, now), n)
				if m.Offer(&b, nil, false, Packet{Time: now, Bytes: n}).Verdict == Pass {
					passed += n
				}
			}
			leaked := new(big.Rat).Sub(rat(passed), new(big.Rat).Quo(rat(m.Level(b, now)), rat(1<<UnitBits)))
			want := new(big.Rat).Quo(new(big.Rat).Mul(rat(rate), rat(now-start)), rat(8e9))
			off := new(big.Rat).Sub(leaked, want)
			// The clock's resolution is two units, and does not add up over time.
			allowed := new(big.Rat).Add(new(big.Rat).Quo(want, rat(1e6)), big.NewRat(2, 1<<UnitBits))
			if off.Abs(off).Cmp(allowed) > 0 {
				t.Errorf("%d bit/s, packets of %d: leaked %s bytes, not %s", rate, n, leaked.FloatString(6), want.FloatString(6))
			}
			if want.Cmp(rat(100*n)) < 0 {
				t.Errorf("%d bit/s, packets of %d: only %s bytes leaked: the sender is stuck", rate, n, want.FloatString(1))
			}
		}
	}
}

// Wait is the first time at which a packet conforms, to the clock's resolution.
func TestWait(t *testing.T) {
	seed := testenv.Seed(t)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, rate := range rates {
		for range 300 {
			capacity := 1500 + r.Uint64N(1<<20)
			m := limit(rate, capacity)
			level := r.Uint64N(2*m.Capacity) &^ busy
			now := 1e9 + r.Uint64N(1e15)
			b := Bucket{TAT: m.Clock(now) + level, Tick: Tick(now)}
			n := 1 + r.Uint64N(2*capacity)
			wait, grain := m.Wait(level, n), m.Drain(2)
			if !m.Conforms(m.Level(b, now+wait+grain), n) {
				t.Fatalf("%d bit/s: %d bytes at a level of %d of %d units do not conform after %d ns", rate, n, level, m.Capacity, wait)
			}
			if wait > grain && m.Conforms(m.Level(b, now+wait-grain-1), n) {
				t.Fatalf("%d bit/s: %d bytes at a level of %d of %d units conform before %d ns", rate, n, level, m.Capacity, wait)
			}
		}
	}
}

// The window bounds of the specification, over every window of a trace. CPU clocks differ. TestEdits has edits.
func TestEveryWindow(t *testing.T) {
	seed := testenv.Seed(t)
	const packets = 5000
	for i := range testenv.Rounds(t, 60) {
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		greedy := i%3 == 0   // sends each packet as soon as it conforms
		overload := i%3 == 1 // offers more than the rate
		largest := 1 + r.Uint64N(512<<10)
		rate := min(rates[r.IntN(len(rates))]+r.Uint64N(1000), 1e12)
		if greedy {
			rate = min(rate, 1e6) // for which a nanosecond is negligible
		}
		capacity := 1 + r.Uint64N(1<<(10+r.Uint64N(12)))
		if overload { // a bucket that refused a packet must not be empty when the next one arrives
			capacity += 2 * largest
		}
		m, b := limit(rate, capacity), Bucket{}
		clock := 1e9 + starts[i%(len(starts)-1)] // clock of the first CPU
		now := clock
		var w testenv.Windows
		grain := int64(10) // millionths of a byte
		n := 1 + r.Uint64N(largest)
		for p := range packets {
			passed := uint64(0)
			if m.Offer(&b, nil, false, Packet{Time: now, Bytes: n}).Verdict == Pass {
				passed = n
			}
			most, least := w.Packet(passed)
			if most > 1e6*int64(max(capacity, n))+grain && passed > 0 {
				t.Fatalf("trace %d, packet %d of %d bytes: %d millionths of a byte more passed than %d bit/s allow, capacity %d",
					i, p, n, most, rate, capacity)
			}
			if (overload || greedy) && -least > 1e6*int64(capacity+largest)+grain {
				t.Fatalf("trace %d, packet %d of %d bytes: %d millionths of a byte less passed than %d bit/s allow, capacity %d",
					i, p, n, -least, rate, capacity)
			}
			then, full := now, n*8e9/rate // ns in which this packet drains
			n = 1 + r.Uint64N(largest)
			switch {
			case greedy:
				clock += m.Wait(m.Level(b, now), n)
				now = clock
				grain += 130 // a ns may be lost, which is 130 millionths of a byte at 1 Mbit/s
			case overload:
				clock += r.Uint64N(full/3 + 1)
				now = clock
			default:
				clock += r.Uint64N(3*full+1) * r.Uint64N(2)
				now = clock - r.Uint64N(3)*500_000 // the clock of one of three CPUs
			}
			w.Leak(rate, int64(now-then))
			grain += 1 + int64(float64(clock-then)/float64(1<<52)*1e6) // because rate_units is rounded up
		}
	}
}

// Marked packets fill a bucket up to twice its capacity.
func TestMarkedUpToTwice(t *testing.T) {
	m, b := limit(8000, 1000), Bucket{}
	for i, step := range []struct {
		n    uint64
		ect  bool
		want Verdict
	}{
		{1000, true, Pass}, {1, false, Drop}, {999, true, Mark}, {2, true, Drop}, {1, true, Mark}, {1, true, Drop}, {1, false, Drop},
	} {
		if got := m.Offer(&b, nil, false, Packet{Time: 5, Bytes: step.n, ECT: step.ect}).Verdict; got != step.want {
			t.Errorf("step %d: verdict %v, want %v", i, got, step.want)
		}
	}
	if got := m.Level(b, 5); got != 2000<<UnitBits {
		t.Errorf("level %d units, want 2000 bytes", got)
	}
}

// The outcome for a packet of 1000 bytes at 10 s, by --excess and state.
func TestDecide(t *testing.T) {
	const second, bytes, never = uint64(time.Second), 1 << UnitBits, policy.Never
	// 1000 bytes/s, capacity 3000 bytes. Delaying limits have a queue of 4 s, or a burst and a queue of 3 s each.
	rule := policy.Rule{Rate: 8000, Capacity: 3000}
	with := func(e policy.Excess, above policy.ECNAbove) policy.Rule {
		r := rule
		r.Excess, r.ECNAbove = e, above
		return r
	}
	penalty := rule
	penalty.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: 2 * time.Second}
	shape, burst := with(policy.Delay, never), with(policy.Delay, never)
	shape.Algorithm, shape.Capacity, burst.Queue = policy.Leaky, 4000, 3000
	marks := shape
	marks.ECNAbove = policy.ECNAbove(time.Second)
	sparse := burst
	sparse.Order = policy.SparseFirst
	at := func(level uint64) State { return State{Level: level * bytes} }
	plain, ect := Packet{}, Packet{ECT: true}
	asks := func(after uint64) Packet { return Packet{Departure: (10 + after) * second} }
	for name, c := range map[string]struct {
		rule    policy.Rule
		found   State
		packet  Packet
		verdict Verdict
		excess  bool
		level   uint64 // bytes, after the packet
		wait    uint64 // seconds
		departs uint64 // seconds after its arrival
		flow    uint64 // bytes added to its flow's bucket
	}{
		"exactly full":                     {rule: rule, found: at(2000), packet: plain, verdict: Pass, level: 3000},
		"drop":                             {rule: rule, found: at(3000), packet: ect, verdict: Drop, excess: true, level: 3000, wait: 1},
		"larger than the bucket":           {rule: policy.Rule{Rate: 8000, Capacity: 500}, found: at(500), packet: plain, verdict: Drop, excess: true, level: 500, wait: 1},
		"count only":                       {rule: with(policy.Pass, 0), found: at(4000), packet: plain, verdict: Pass, excess: true, level: 4000, wait: 2},
		"mark":                             {rule: with(policy.ECN, 0), found: at(5000), packet: ect, verdict: Mark, excess: true, level: 6000, wait: 3},
		"mark, not ECT":                    {rule: with(policy.ECN, 0), found: at(5000), packet: plain, verdict: Drop, excess: true, level: 5000, wait: 3},
		"mark, spilled":                    {rule: with(policy.ECN, 0), found: State{Level: 5000 * bytes, Spilled: true}, packet: ect, verdict: Drop, excess: true, level: 5000, wait: 3},
		"mark, beyond twice the capacity":  {rule: with(policy.ECN, 0), found: at(6000), packet: ect, verdict: Drop, excess: true, level: 6000, wait: 4},
		"penalty":                          {rule: penalty, found: at(3000), packet: plain, verdict: Drop, excess: true, level: 5000, wait: 1},
		"penalty, spilled":                 {rule: penalty, found: State{Level: 3000 * bytes, Spilled: true}, packet: plain, verdict: Drop, excess: true, level: 3000, wait: 1},
		"shape":                            {rule: shape, found: at(2000), packet: ect, verdict: Delay, level: 3000, wait: 2, departs: 2},
		"shape, empty":                     {rule: shape, found: at(0), packet: plain, verdict: Pass, level: 1000},
		"shape, full":                      {rule: shape, found: at(4000), packet: plain, verdict: Drop, excess: true, level: 4000, wait: 1},
		"shape, marked":                    {rule: marks, found: at(2000), packet: ect, verdict: Mark, level: 3000, wait: 2, departs: 2},
		"shape, not ECT":                   {rule: marks, found: at(2000), packet: plain, verdict: Delay, level: 3000, wait: 2, departs: 2},
		"shape, asks for earlier":          {rule: shape, found: at(2000), packet: asks(1), verdict: Delay, level: 3000, wait: 2, departs: 2},
		"shape, asks for later":            {rule: shape, found: at(2000), packet: asks(3), verdict: Delay, level: 3000, wait: 2, departs: 3},
		"shape, asks for after the queue":  {rule: shape, found: at(2000), packet: asks(30), verdict: Delay, level: 3000, wait: 2, departs: 4},
		"shape, asks for another clock's":  {rule: shape, found: at(2000), packet: asks(1e6), verdict: Delay, level: 3000, wait: 2, departs: 2},
		"shape, empty, asks for later":     {rule: shape, found: at(0), packet: asks(1), verdict: Pass, level: 1000, departs: 1},
		"in the burst":                     {rule: burst, found: at(2000), packet: plain, verdict: Pass, level: 3000},
		"behind a burst":                   {rule: burst, found: at(4000), packet: plain, verdict: Delay, level: 5000, wait: 2, departs: 2},
		"sparse":                           {rule: sparse, found: at(4000), packet: plain, verdict: Pass, level: 5000, flow: 1464},
		"sparse, FIFO":                     {rule: sparse, found: State{Level: 4000 * bytes, FIFO: true}, packet: plain, verdict: Delay, level: 5000, wait: 2, departs: 2, flow: 5000},
		"sparse, a flow that sends much":   {rule: sparse, found: State{Level: 4000 * bytes, Flow: 1600 * bytes}, packet: plain, verdict: Delay, level: 5000, wait: 2, departs: 2, flow: 3400},
		"sparse, in the burst":             {rule: sparse, found: at(1000), packet: plain, verdict: Pass, level: 2000},
		"larger than the bucket, if empty": {rule: policy.Rule{Rate: 8000, Capacity: 500}, found: at(0), packet: plain, verdict: Pass, level: 1000},
	} {
		c.packet.Time, c.packet.Bytes = 10*second, 1000
		o := NewLimit(c.rule).Decide(c.found, c.packet)
		// The rate is rounded up, by less than one in 2^20.
		round := func(ns uint64) uint64 { return (ns + second/2) / second }
		if o.Verdict != c.verdict || o.Excess != c.excess || o.Level>>UnitBits != c.level || round(o.Wait) != c.wait ||
			round(o.Departure) != 10+c.departs || (o.Flow-c.found.Flow)>>UnitBits != c.flow {
			t.Errorf("%s: %+v, want %+v", name, o, c)
		}
	}
}

func TestBytesRoundsUp(t *testing.T) {
	for units, want := range map[uint64]uint64{0: 0, 1: 1, 1 << UnitBits: 1, 1<<UnitBits + 1: 2, 1500<<UnitBits - 1: 1500} {
		if got := Bytes(units); got != want {
			t.Errorf("Bytes(%d) = %d, want %d", units, got, want)
		}
	}
}

// FuzzOffer offers a trace made from a fuzzer's bytes to both buckets. The verdicts are
// equal unless the bound is missed by less than the clock's resolution, about 2^-18
// byte. They are also equal if the bound is met exactly.
func FuzzOffer(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for i, rate := range rates {
		data := make([]byte, 40*(1+i%3))
		for j := range data {
			data[j] = byte(r.Uint32())
		}
		f.Add(rate, uint64(1500*(i+1)), starts[i%len(starts)], uint64(i%4)*1e9, data)
	}
	f.Fuzz(func(t *testing.T, rate, capacity, start, hold uint64, data []byte) {
		rate = 8 + rate%(1e12-7)
		capacity = 1 + capacity%(1<<37)
		penalised := hold%3 == 1
		hold %= uint64(24 * time.Hour)
		hold = tolerable(rate, hold)
		roll := func(n uint64) uint64 {
			var word [8]byte
			data = data[copy(word[:min(8, 1+bits.Len64(n)/8)], data):]
			return binary.LittleEndian.Uint64(word[:]) % n
		}
		packets := min(len(data)/4, 200)
		play(t, roll, newPair(marking(rate, capacity, penalised, hold)), start, packets, hold%2 == 0, hold%5 == 0)
	})
}
