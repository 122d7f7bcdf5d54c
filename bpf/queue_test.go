package bpf_test

import (
	"cmp"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// queue is a rule that delays, on a device whose packets count as they are long.
func queue(a policy.Algorithm, rate policy.Rate, burst, waiting uint64) policy.Rule {
	r := policy.Rule{
		Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: waiting, Algorithm: a,
		Excess: policy.Delay, ECNAbove: policy.Never, Framing: policy.Framing{Overhead: shrink},
	}
	if a == policy.GCRA {
		r.Capacity, r.Queue = burst, waiting
	}
	return r
}

// exact is a queue in rational arithmetic.
type exact struct {
	rate                *big.Rat // bytes per ns
	level, burst, holds *big.Rat // bytes
	then, empty         uint64   // when the last packet came, and when the bucket was last empty
}

func newExact(r policy.Rule) *exact {
	burst := r.Capacity
	if r.Algorithm == policy.Leaky {
		burst = 0
	}
	return &exact{
		rate: big.NewRat(int64(r.Rate), 8e9), level: new(big.Rat), burst: rat(burst),
		holds: rat(r.Capacity + r.Queue),
	}
}

func rat(n uint64) *big.Rat { return new(big.Rat).SetInt(new(big.Int).SetUint64(n)) }

// offer is when a packet leaves, in ns; false if it is dropped.
func (e *exact) offer(now, bytes uint64) (leaves *big.Rat, passes bool) {
	leaked := new(big.Rat).Mul(e.rate, rat(now-e.then))
	e.then = now
	if e.level.Sub(e.level, leaked); e.level.Sign() <= 0 {
		e.level.SetInt64(0)
		e.empty = now
	}
	n := rat(bytes)
	filled := new(big.Rat).Add(e.level, n)
	if e.level.Sign() > 0 && filled.Cmp(e.holds) > 0 {
		return nil, false
	}
	// Packets that conform to the burst are not delayed, nor is a larger one that finds the bucket empty.
	ahead := new(big.Rat).Sub(e.burst, n)
	if ahead.Sign() < 0 {
		ahead.SetInt64(0)
	}
	if ahead.Sub(e.level, ahead); ahead.Sign() < 0 {
		ahead.SetInt64(0)
	}
	e.level = filled
	return ahead.Quo(ahead, e.rate).Add(ahead, rat(now)), true
}

// The spacing of a queue is exact: each packet is given the time that rational
// arithmetic gives it, to the ns of rounding. At the lowest rates, a unit of a
// level takes about that long, too: two of them, and a 2^32nd of one for each ns
// since the bucket was empty, as slopes are in 2^-32 of a unit.
func TestDeparturesAreExact(t *testing.T) {
	seed := testenv.Seed(t)
	r := matchSource(t)
	for i, rate := range []policy.Rate{
		8_000, 64_000, 1_000_000, 9_999_991, 119_999_993, 122_000_000, 150_000_000, 1_000_000_000, 9_876_543_210,
		40_000_000_000, 400_000_000_000, 1_000_000_000_000,
	} {
		for j := range 2 * len(algorithms) {
			a, overhead := algorithms[j%2], shrink
			if j > 1 {
				overhead = 0 // the short way, for packets that are no bigger than a test run takes
			}
			t.Run(fmt.Sprint(rate, " ", a, " ", overhead), func(t *testing.T) {
				r.TB = t
				roll := rand.New(rand.NewPCG(seed, uint64(i)))
				longest := uint64(rate) / 8 * 8 // 8 s of it
				rule := queue(a, rate, 1514+roll.Uint64N(min(100_000, uint64(rate)/8)), min(max(3000, roll.Uint64N(longest+1)), longest))
				rule.Framing.Overhead = int16(overhead)
				rule.Each.Kind = sharings[i%3]
				now := uint64(1e9) + roll.Uint64N(1e15)
				twin, reference := newTwin(r, rule, now), newExact(rule)
				var delayed int
				for p := range 1000 {
					n := 40 + roll.Uint64N(1475)
					if overhead != 0 && roll.IntN(8) == 0 {
						n = roll.Uint64N(60000) + 1
					}
					leaves, passes := reference.offer(now, n)
					frame, m := sized(addr("10.0.0.7"), n, overhead, now)
					verdict, _, at := sendTimed(t, twin.program(), frame, m)
					if (verdict == next) != passes {
						t.Fatalf("packet %d of %d bytes at %d: verdict %#x, to pass: %v", p, n, now, verdict, passes)
					}
					if passes {
						off := new(big.Rat).Sub(rat(at), leaves)
						unit := big.NewRat(8e9, int64(rate)<<model.UnitBits)
						grain := new(big.Rat).Add(big.NewRat(2, 1), new(big.Rat).Quo(rat(at-reference.empty), rat(1<<32)))
						if off.Abs(off).Cmp(grain.Mul(grain, unit).Add(grain, big.NewRat(1, 1))) > 0 {
							t.Fatalf("packet %d of %d bytes at %d leaves after %d ns, %s ns off", p, n, now, at-now, off.FloatString(3))
						}
						if at > now {
							delayed++
						}
					}
					now += uint64(float64(n*8e9)/float64(rate)*roll.Float64()*2*float64(p%3)/1.8) + roll.Uint64N(2)
				}
				if delayed < 100 {
					t.Errorf("only %d packets were delayed", delayed)
				}
			})
		}
	}
}

// The traces that are beside the repository, to the ns that they are rounded to.
func TestDeparturesOfVectors(t *testing.T) {
	r := matchSource(t)
	for _, trace := range testenv.Vectors(t) {
		for _, each := range sharings {
			t.Run(fmt.Sprintf("%s/%v", trace.Name, policy.Each{Kind: each}), func(t *testing.T) {
				r.TB = t
				rule := queue(policy.Leaky, policy.Rate(trace.Rate), 0, trace.Capacity)
				rule.Each.Kind = each
				twin := newTwin(r, rule, 0)
				for i, s := range trace.Steps(t) {
					frame, m := sized(addr("10.0.0.7"), s.Bytes, shrink, s.Now)
					verdict, _, leaves := sendTimed(t, twin.program(), frame, m)
					if (verdict == next) != s.Pass {
						t.Fatalf("row %d: verdict %#x, want pass %v", i, verdict, s.Pass)
					}
					if s.Departs && leaves != s.Departure && leaves != s.Departure+1 {
						t.Fatalf("row %d: leaves at %d, want %d", i, leaves, s.Departure)
					}
				}
			})
		}
	}
}

// What leaves in any window is no more than what the rate lets through and a
// packet, after what leaves at once; and while more is offered throughout, no
// less but for a packet: refused ones take nobody's turn.
func TestWindowsOfWhatLeaves(t *testing.T) {
	seed := testenv.Seed(t)
	r := matchSource(t)
	for i := range 24 {
		a := algorithms[i%2]
		t.Run(fmt.Sprint(i, " ", a), func(t *testing.T) {
			r.TB = t
			roll := rand.New(rand.NewPCG(seed, uint64(i)))
			const largest = 1514
			rate := policy.Rate(64_000 << roll.IntN(20))
			rate += policy.Rate(roll.Uint64N(uint64(rate)))
			rule := queue(a, rate, largest+roll.Uint64N(50_000), largest*(2+roll.Uint64N(4)))
			rule.Each.Kind = sharings[i/2%3]
			overload := i%4 < 2
			now := uint64(1e9)
			twin := newTwin(r, rule, now)
			var w testenv.Windows
			var last, dropped uint64
			ns := int64(uint64(rate)/8000 + 1) // a ns of rounding on either side, in millionths of a byte
			burst := int64(0)
			if a == policy.GCRA {
				burst = int64(rule.Capacity)
			}
			for p := range 1500 {
				n := 40 + roll.Uint64N(largest-39)
				frame, m := sized(addr("10.0.0.7"), n, shrink, now)
				verdict, _, leaves := sendTimed(t, twin.program(), frame, m)
				if verdict == drop {
					dropped++
				} else {
					if leaves < last {
						t.Fatalf("packet %d leaves at %d, before the one ahead of it at %d", p, leaves, last)
					}
					if last > 0 {
						w.Leak(uint64(rate), int64(leaves-last))
					}
					last = leaves
					most, least := w.Packet(n)
					if most > 1e6*max(largest, burst)+2*ns {
						t.Fatalf("packet %d: %d millionths of a byte more leave than %v lets through", p, most, rate)
					}
					if overload && -least > 2*ns {
						t.Fatalf("packet %d: %d millionths of a byte less leave than %v lets through", p, -least, rate)
					}
				}
				full := n * 8e9 / uint64(rate)
				if overload {
					now += roll.Uint64N(full/2 + 1)
				} else {
					now += roll.Uint64N(3*full + 1)
				}
			}
			if overload && dropped == 0 {
				t.Error("nothing was dropped")
			}
		})
	}
}

// Where sparse flows go first, one that sends little never waits for those that
// fill the queue, no packet overtakes one of its own flow, and what leaves in any
// window is no more than what the rate lets through, the capacity and the queue.
func TestSparseFirst(t *testing.T) {
	seed := testenv.Seed(t)
	r := matchSource(t)
	for i := range 12 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r.TB = t
			roll := rand.New(rand.NewPCG(seed, uint64(i)))
			const largest, small = 1514, 200
			rate := policy.Rate(1_000_000 << roll.IntN(18))
			rule := queue(policy.GCRA, rate, largest+roll.Uint64N(20_000), 20*largest+roll.Uint64N(uint64(rate)/8))
			rule.Order = policy.SparseFirst
			twin, now := newTwin(r, rule, 1e9), uint64(1e9)
			full := func(n uint64) uint64 { return n * 8e9 / uint64(rate) }
			last := map[string]uint64{}
			type departure struct{ at, bytes uint64 }
			var left []departure
			waited := 0
			offer := func(host string, n uint64) (held uint64, passes bool) {
				frame, m := sized(addr(host), n, shrink, now)
				verdict, _, at := sendTimed(t, twin.program(), frame, m)
				if verdict == drop {
					return 0, false
				}
				if at < last[host] {
					t.Fatalf("a packet of %s leaves %d ns before the one ahead of it", host, last[host]-at)
				}
				last[host] = at
				left = append(left, departure{at, n})
				return at - now, true
			}
			// One that sends little: half of what a sparse flow may.
			next := now
			for range 3000 {
				if now >= next {
					if held, passes := offer("10.0.0.1", small); passes && held > 0 {
						t.Fatalf("a sparse flow waits for %d ns", held)
					}
					next = now + full(rule.Queue)*small*2>>model.SparseBits + 1
				}
				n := 40 + roll.Uint64N(largest-39)
				if held, _ := offer(fmt.Sprintf("10.0.0.%d", 2+roll.IntN(4)), n); held > 0 {
					waited++
				}
				now += roll.Uint64N(full(n) + 1)
			}
			if waited < 1000 {
				t.Errorf("of those that fill the queue, %d packets had to wait", waited)
			}
			slices.SortFunc(left, func(a, b departure) int { return cmp.Compare(a.at, b.at) })
			var w testenv.Windows
			bound := 1e6*int64(rule.Capacity+rule.Queue) + 2*int64(uint64(rate)/8000+1)
			for j, d := range left {
				if j > 0 {
					w.Leak(uint64(rate), int64(d.at-left[j-1].at))
				}
				if most, _ := w.Packet(d.bytes); most > bound {
					t.Fatalf("%d millionths of a byte more leave than %v lets through; capacity and queue are %d bytes", most, rate, rule.Capacity+rule.Queue)
				}
			}
		})
	}
}

// A sender that paces itself is not sent earlier for it, but no later than the
// queue is long: what it spreads over time it may let leave at one moment. One
// that asks for a time that no packet is sent at, or by another clock, has none.
func TestOwnDepartureTime(t *testing.T) {
	hook := egress()
	hook.VirtualClock = 0
	r := newRig(t, maps.Size{Rules: 1}, hook)
	rule := queue(policy.Leaky, 8_000_000, 0, 2_000_000) // a byte in a us
	rule.Prefix, rule.Framing = prefix("10.0.0.0/8"), policy.Framing{}
	clock := func() uint64 {
		var now unix.Timespec
		testenv.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
		return uint64(now.Nano())
	}
	now := clock()
	r.put(rule, now)
	frame := append(udp(addr("192.0.2.1"), addr("10.0.0.7"), 0), make([]byte, 958)...) // 1000 bytes: a ms
	program := r.program()
	for range 500 {
		send(t, program, frame, meta{})
	}
	const second, turn, longest = uint64(time.Second), uint64(time.Second / 2), 2 * uint64(time.Second)
	const its, own, end = "its turn", "its own", "the end of the queue"
	cases := map[string]struct {
		own  uint64
		when string
	}{
		"none":                    {0, its},
		"past":                    {now, its},
		"sooner than its turn":    {now + second/10, its},
		"later than its turn":     {now + longest - second/2, own},
		"later than any":          {now + longest + 2*second, end},
		"much later":              {now + 30*second, end},
		"TAI, or the time of day": {1_795_000_000 * second, its},
	}
	for name, c := range cases {
		before := clock()
		verdict, _, leaves := sendTimed(t, program, frame, meta{now: c.own})
		after := clock()
		least, most := now+turn, after+turn+second/4 // each case adds a ms
		switch c.when {
		case own:
			least, most = c.own, c.own
		case end:
			least, most = before+longest, after+longest
		}
		if verdict != next || leaves < least || leaves > most {
			t.Errorf("%s: verdict %#x, leaves at %d, and ought to at %s, %d to %d", name, verdict, leaves, c.when, least, most)
		}
	}
	// Who need not wait is left alone, but for what is beyond the queue.
	rule.Rate = 1_000_000_000_000
	r.put(rule, now)
	if _, _, leaves := sendTimed(t, program, frame, meta{now: 5}); leaves != 5 {
		t.Errorf("without a wait the time is %d", leaves)
	}
	if _, _, leaves := sendTimed(t, program, frame, meta{now: now + 20*second}); leaves > clock()+second {
		t.Errorf("without a wait, a time of its own beyond the queue stays: %d", leaves)
	}
}

// A flow for which there was no room in the table waits, and its next packet
// does not overtake it once there is room.
func TestNoRoomForFlow(t *testing.T) {
	hook := egress()
	hook.MatchSrc = 1
	r := newRig(t, maps.Size{Rules: 2, Buckets: 4}, hook) // one line
	rule := queue(policy.GCRA, 8_000_000, 2000, 8_000_000)
	rule.Order = policy.SparseFirst
	slow := queue(policy.GCRA, 8_000, 2000, 2000)
	slow.Prefix, slow.Each.Kind, slow.Excess, slow.Queue, slow.ECNAbove = prefix("192.168.0.0/16"), policy.EachHost, policy.Drop, 0, 0
	now := uint64(1e9)
	newTwin(r, rule, now)
	r.put(slow, now)
	leaves := func(host string, n uint64) uint64 {
		frame, m := sized(addr(host), n, shrink, now)
		verdict, _, at := sendTimed(t, r.program(), frame, m)
		if verdict != next {
			t.Fatalf("a packet of %s is dropped", host)
		}
		return at
	}
	for i := range 4 { // for two seconds
		leaves(fmt.Sprintf("192.168.0.%d", i), 2000)
	}
	for range 80 { // for four
		leaves("10.0.0.1", 50_000)
	}
	first := leaves("10.0.0.2", 100)
	if first < now+3.9e9 {
		t.Fatalf("without room for its flow, a packet leaves after %d ns", first-now)
	}
	now += 3e9
	if second := leaves("10.0.0.2", 100); second < first {
		t.Errorf("the second packet leaves %d ns before the first", first-second)
	}
	now = first
	for range 500 {
		leaves("10.0.0.1", 1000)
	}
	if at := leaves("10.0.0.3", 100); at != now {
		t.Errorf("once the first has left, another flow waits for %d ns", at-now)
	}
}

// What enters with a tag left in its frame can not be told when to leave: it
// passes within what the rule holds, and is not counted as one that waited.
func TestTagLeftInFrame(t *testing.T) {
	const redirected uint32 = 7 // TC_ACT_REDIRECT
	hook := ingress()
	hook.VirtualClock = 0
	r := newRig(t, maps.Size{Rules: 1}, hook)
	r.set.SetIfb(1)
	rule := queue(policy.Leaky, 8_000, 0, 4000)
	rule.Prefix, rule.Framing = prefix("10.0.0.0/8"), policy.Framing{}
	e := r.put(rule, 1)
	frame := udp(addr("10.0.0.7"), addr("192.0.2.1"), 0)
	frame = append(slices.Concat(frame[:12], []byte{0x81, 0, 0, 7}, frame[12:]), make([]byte, 954)...)
	for i, want := range []uint32{redirected, redirected, redirected, redirected, drop} {
		if verdict, _ := send(t, r.program(), frame, meta{}); verdict != want {
			t.Errorf("packet %d: verdict %#x, want %#x", i, verdict, want)
		}
	}
	if c := r.set.Counters(e.ID); c.ContendedPackets != 3 || c.DelayedPackets != 0 || c.PassedPackets != 4 {
		t.Errorf("counted %+v", c)
	}
}

// On ingress all packets of a rule that delays take the way through the ifb, so
// none overtakes another; excess is dropped, and what no such rule is for goes on.
func TestIfb(t *testing.T) {
	const redirected uint32 = 7 // TC_ACT_REDIRECT
	r := newRig(t, maps.Size{Rules: 3, Buckets: 64}, ingress())
	r.set.SetIfb(1)
	for _, a := range algorithms {
		rule := queue(a, 8_000_000, 2000, 2000)
		rule.Prefix, rule.Framing = prefix("10.0.0.0/24"), policy.Framing{}
		r.set.Clear()
		r.put(rule, 1)
		r.put(policy.Rule{Prefix: prefix("10.0.1.0/24"), Rate: 8_000_000, Capacity: 2000, Algorithm: a}, 1)
		r.put(policy.Rule{Prefix: prefix("10.0.0.9/32"), Rate: policy.Unlimited, Algorithm: a}, 1)
		for host, want := range map[string][]uint32{
			"10.0.0.1": {redirected, redirected, drop},
			"10.0.1.1": {next, next, drop},
			"10.0.0.9": {next, next, next},
			"10.0.2.1": {next, next, next},
		} {
			if a == policy.GCRA && host == "10.0.0.1" {
				want = []uint32{redirected, redirected, redirected, redirected, drop}
			}
			for i, want := range want {
				frame := append(udp(addr(host), addr("192.0.2.1"), 0), make([]byte, 958)...)
				if verdict, _ := send(t, r.program(), frame, meta{now: 1e9}); verdict != want {
					t.Errorf("%v, packet %d from %s: verdict %#x, want %#x", a, i, host, verdict, want)
				}
			}
		}
	}
}
