package bpf_test

import (
	"cmp"
	"encoding/binary"
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

// queue returns a rule that delays, for packets that count as their length.
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
	level, burst, limit *big.Rat // bytes
	then, empty         uint64   // time of the last packet, and when the bucket was last empty
}

func newExact(r policy.Rule) *exact {
	burst := r.Capacity
	if r.Algorithm == policy.Leaky {
		burst = 0
	}
	return &exact{
		rate: big.NewRat(int64(r.Rate), 8e9), level: new(big.Rat), burst: rat(burst),
		limit: rat(r.Capacity + r.Queue),
	}
}

func rat(n uint64) *big.Rat { return new(big.Rat).SetInt(new(big.Int).SetUint64(n)) }

// offer returns the departure time of a packet in ns, or false if it is dropped.
func (e *exact) offer(now, bytes uint64) (leaves *big.Rat, passes bool) {
	leaked := new(big.Rat).Mul(e.rate, rat(now-e.then))
	e.then = now
	if e.level.Sub(e.level, leaked); e.level.Sign() <= 0 {
		e.level.SetInt64(0)
		e.empty = now
	}
	n := rat(bytes)
	filled := new(big.Rat).Add(e.level, n)
	if e.level.Sign() > 0 && filled.Cmp(e.limit) > 0 {
		return nil, false
	}
	// Packets within the burst are not delayed; nor is a larger one if the bucket is empty.
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

// Departure times are exact: they equal those of rational arithmetic, to the ns of
// rounding. At the lowest rates, a unit of a level takes about a ns, too. So two units
// may be missing, and 2^-32 of a unit for each ns since the bucket was empty, because
// rate_units has 32 fraction bits.
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
				overhead = 0 // for packets that are small enough for a test run
			}
			t.Run(fmt.Sprint(rate, " ", a, " ", overhead), func(t *testing.T) {
				r.TB = t
				roll := rand.New(rand.NewPCG(seed, uint64(i)))
				longest := uint64(rate) / 8 * 8 // 8 s
				rule := queue(a, rate, 1514+roll.Uint64N(min(100_000, uint64(rate)/8)), min(max(3000, roll.Uint64N(longest+1)), longest))
				rule.Framing.Overhead = int16(overhead)
				rule.Each.Kind = scopes[i%3]
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
						t.Fatalf("packet %d of %d bytes at %d: verdict %#x, want it to pass: %v", p, n, now, verdict, passes)
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
				if delayed < 30 { // of a small queue behind a large burst, few are
					t.Errorf("only %d packets were delayed", delayed)
				}
			})
		}
	}
}

// In every window, the departing packets are at most rate * time, one packet, and the
// burst. While excess is offered throughout, at most one packet less departs: dropped
// packets leave no gap.
func TestWindowsOfDepartures(t *testing.T) {
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
			rule.Each.Kind = scopes[i/2%3]
			overload := i%4 < 2
			now := uint64(1e9)
			twin := newTwin(r, rule, now)
			var w testenv.Windows
			var last, dropped uint64
			ns := int64(uint64(rate)/8000 + 1) // a ns of rounding at both ends, in millionths of a byte
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
						t.Fatalf("packet %d leaves at %d, but the previous one at %d", p, leaves, last)
					}
					if last > 0 {
						w.Leak(uint64(rate), int64(leaves-last))
					}
					last = leaves
					most, least := w.Packet(n)
					if most > 1e6*max(largest, burst)+2*ns {
						t.Fatalf("packet %d: %d millionths of a byte more leave than %v allows", p, most, rate)
					}
					if overload && -least > 2*ns {
						t.Fatalf("packet %d: %d millionths of a byte less leave than %v allows", p, -least, rate)
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

// With sparse-first, a flow that sends little is never delayed by flows that fill the
// queue. No packet overtakes one of the same flow. In every window, the departing
// packets are at most rate * time, the capacity and the queue.
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
			offer := func(host string, n uint64) (delay uint64, passes bool) {
				frame, m := sized(addr(host), n, shrink, now)
				verdict, _, at := sendTimed(t, twin.program(), frame, m)
				if verdict == drop {
					return 0, false
				}
				if at < last[host] {
					t.Fatalf("a packet of %s leaves %d ns before the previous one", host, last[host]-at)
				}
				last[host] = at
				left = append(left, departure{at, n})
				return at - now, true
			}
			// A flow that sends little: half of the limit of a sparse flow.
			sparse := min(max(rule.Queue/16, 2048), 16384)
			next := now
			for range 3000 {
				if now >= next {
					if delay, passes := offer("10.0.0.1", small); passes && delay > 0 {
						t.Fatalf("a sparse flow is delayed by %d ns", delay)
					}
					next = now + full(rule.Queue)*small*2/sparse + 1
				}
				n := 40 + roll.Uint64N(largest-39)
				if delay, _ := offer(fmt.Sprintf("10.0.0.%d", 2+roll.IntN(4)), n); delay > 0 {
					waited++
				}
				now += roll.Uint64N(full(n) + 1)
			}
			if waited < 1000 {
				t.Errorf("%d packets of the flows that fill the queue were delayed", waited)
			}
			slices.SortFunc(left, func(a, b departure) int { return cmp.Compare(a.at, b.at) })
			var w testenv.Windows
			bound := 1e6*int64(rule.Capacity+rule.Queue) + 2*int64(uint64(rate)/8000+1)
			for j, d := range left {
				if j > 0 {
					w.Leak(uint64(rate), int64(d.at-left[j-1].at))
				}
				if most, _ := w.Packet(d.bytes); most > bound {
					t.Fatalf("%d millionths of a byte more leave than %v allows; capacity and queue are %d bytes", most, rate, rule.Capacity+rule.Queue)
				}
			}
		})
	}
}

// A sender's later departure time is kept, but not beyond the length of the queue:
// otherwise packets that it spreads over time could leave together. A time that is
// too late to be valid, or by another clock, is ignored.
func TestDepartureTimeOfSender(t *testing.T) {
	for _, inPool := range []bool{false, true} {
		t.Run(fmt.Sprintf("in a pool %v", inPool), func(t *testing.T) { departureTimeOfSender(t, inPool) })
	}
}

func departureTimeOfSender(t *testing.T, inPool bool) {
	r := newRig(t, maps.Size{Views: 2, Rules: 2, Labels: 4, Pools: inPool}, live())
	rule := queue(policy.Leaky, 8_000_000, 0, 2_000_000) // a byte per us
	rule.Prefix, rule.Framing = prefix("10.0.0.0/8"), policy.Framing{}
	put := func(now uint64) {
		if !inPool {
			r.put(rule, now)
			return
		}
		r.at(now)
		_, err := r.set.Store.Pools().Put(pool("up", rule))
		testenv.Must(t, err)
		r.put(policy.Rule{Prefix: rule.Prefix, Rate: policy.Unlimited, Within: "up"}, now)
	}
	clock := func() uint64 {
		var now unix.Timespec
		testenv.Must(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
		return uint64(now.Nano())
	}
	const second, turn, longest = uint64(time.Second), uint64(time.Second / 2), 2 * uint64(time.Second)
	frame := append(udp(addr("192.0.2.1"), addr("10.0.0.7"), 0), make([]byte, 958)...) // 1000 bytes: a ms
	program := r.program()
	// The time of a packet without delay is only limited to the length of the queue.
	slow := rule.Rate
	rule.Rate = 1_000_000_000_000
	put(clock())
	if _, _, leaves := sendTimed(t, program, frame, meta{now: 5}); leaves != 5 {
		t.Errorf("without a delay the time is %d", leaves)
	}
	if _, _, leaves := sendTimed(t, program, frame, meta{now: clock() + 20*second}); leaves > clock()+second {
		t.Errorf("without a delay, a sender's time beyond the queue is kept: %d", leaves)
	}
	rule.Rate = slow
	put(clock())
	first := clock()
	for range 500 {
		send(t, program, frame, meta{})
	}
	now := clock()
	const its, asked, end = "its turn", "the time that the sender asked for", "the end of the queue"
	cases := map[string]struct {
		time uint64
		when string
	}{
		"none":                    {0, its},
		"past":                    {now, its},
		"sooner than its turn":    {now + second/10, its},
		"later than its turn":     {now + longest - second/2, asked},
		"later than any":          {now + longest + 2*second, end},
		"much later":              {now + 30*second, end},
		"TAI, or the time of day": {1_795_000_000 * second, its},
	}
	for name, c := range cases {
		before := clock()
		verdict, _, leaves := sendTimed(t, program, frame, meta{now: c.time})
		after := clock()
		least, most := first+turn, after+turn+second/4 // each case adds a ms
		switch c.when {
		case asked:
			least, most = c.time, c.time
		case end:
			least, most = before+longest, after+longest
		}
		if verdict != next || leaves < least || leaves > most {
			t.Errorf("%s: verdict %#x, leaves at %d, want %s, %d to %d", name, verdict, leaves, c.when, least, most)
		}
	}
}

// A flow without a slot is delayed, and its next packet does not overtake it when it
// has a slot.
func TestFlowWithoutSlot(t *testing.T) {
	t.Run("in a rule", func(t *testing.T) { testFlowWithoutSlot(t, false) })
	t.Run("in a pool", func(t *testing.T) { testFlowWithoutSlot(t, true) })
}

func testFlowWithoutSlot(t *testing.T, inPool bool) {
	r := newRig(t, maps.Size{Views: 2, Rules: 8, Buckets: 4, Labels: 8, Pools: true}, bySource()) // one line
	rule := queue(policy.GCRA, 8_000_000, 2000, 8_000_000)
	rule.Order = policy.SparseFirst
	slow := queue(policy.GCRA, 8_000, 2000, 2000)
	slow.Prefix, slow.Each.Kind, slow.Excess, slow.Queue, slow.ECNAbove = prefix("192.168.0.0/16"), policy.EachHost, policy.Drop, 0, 0
	now := uint64(1e9)
	if inPool {
		r.at(now)
		within := policy.Rule{Prefix: rule.Prefix, Rate: policy.Unlimited, Framing: rule.Framing, Within: "queue"}
		rule.Framing = policy.Framing{}
		_, err := r.set.Store.Pools().Put(pool("queue", rule))
		testenv.Must(t, err)
		rule = within
	}
	r.put(rule, now)
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
		t.Fatalf("a packet of a flow without a slot leaves after %d ns", first-now)
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
		t.Errorf("after the first has left, another flow is delayed by %d ns", at-now)
	}
}

// A packet of a sparse flow does not overtake a queued packet of its flow when a lease raises the rate, or ends.
func TestSparseOrderOverLeases(t *testing.T) {
	for _, ends := range []bool{false, true} {
		for probe := uint64(0); probe < 90e6; probe += 10e6 { // a packet that waits resets the state of its flow, so each run has one
			f := newForest(t, 1<<16)
			now := uint64(1e9)
			p := pool("line", policy.Rule{
				Rate: 8_000_000, Capacity: 3028, Excess: policy.Delay, Queue: 100_000, Order: policy.SparseFirst, ECNAbove: policy.Never,
				Adapt: policy.Adapt{Min: 100_000},
			})
			f.putIn(p, now)
			f.putIn(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "line"}, now)
			renew := func(rate policy.Rate, length uint64) {
				f.at(now)
				testenv.Must(t, f.set.Store.Pools().Renew(p.Prefix, maps.Lease{Rate: rate, Safe: p.Rate, Until: now + length}))
			}
			leaves := func(host string, n uint64) uint64 {
				frame, m := sized(addr(host), n, 0, now)
				verdict, _, at := sendTimed(t, f.program(), frame, m)
				if verdict == drop {
					t.Fatalf("a packet of %s is dropped", host)
				}
				return at
			}
			renew(2_000_000, 5e6)
			for range 14 {
				leaves("10.0.0.1", 1500)
			}
			first := leaves("10.0.0.2", 2500)
			if first < now+70e6 {
				t.Fatalf("the first packet waits for %d ns only", first-now)
			}
			if now += 4e6; !ends {
				renew(8_000_000, 10e9)
			}
			if now += 2e6 + probe; now >= first {
				break
			}
			if second := leaves("10.0.0.2", 60); second < first {
				t.Errorf("lease ends %v: after %d ms, a packet leaves %d ns before the first one of its flow", ends, (2e6+probe)/1e6, first-second)
			}
			now += 10e9
			for range 40 {
				leaves("10.0.0.1", 1500)
			}
			if at := leaves("10.0.0.3", 60); at != now {
				t.Errorf("when all have left, a sparse flow is delayed by %d ns", at-now)
			}
		}
	}
}

// In a pool with fair shares, a host that floods it loses no packet of its sparse flow, nor is that delayed. If it spreads its
// flood over so many flows that all are sparse, then another host still has its half of the rate.
func TestSparseFlowsOfHosts(t *testing.T) {
	const rate, packets = 8_000_000, 20_000
	for _, spread := range []bool{false, true} {
		t.Run(fmt.Sprintf("spread %v", spread), func(t *testing.T) {
			f := newForest(t, 1<<16)
			f.putIn(pool("line", policy.Rule{
				Rate: rate, Capacity: 3028, Excess: policy.Delay, Queue: 50_000, Order: policy.SparseFirst, ECNAbove: policy.Never,
				Share: policy.Share{Kind: policy.ShareHost},
			}), 0)
			f.putIn(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "line"}, 0)
			now, passed := uint64(1e9), map[string]uint64{}
			send := func(host string, port uint16, n uint64) (delay uint64, passes bool) {
				frame, m := sized(addr(host), n, 0, now)
				binary.BigEndian.PutUint16(frame[34:], port)
				verdict, _, leaves := sendTimed(t, f.program(), frame, m)
				if verdict == drop {
					return 0, false
				}
				passed[host] += n
				return leaves - now, true
			}
			for i := range packets {
				now += 1e9 * 1500 * 8 / rate / 3 // the flood is three times the rate
				port := uint16(1)
				if spread {
					port = uint16(i)
				}
				send("10.0.0.1", port, 1500)
				if i%3 == 0 {
					send("10.0.0.2", 1, 750) // half of the rate
				}
				if i%100 != 99 || spread {
					continue
				}
				if delay, passes := send("10.0.0.1", 2, 100); !passes || delay > 0 {
					t.Fatalf("packet %d of a sparse flow is delayed by %d ns, or it is dropped", i, delay)
				}
			}
			most := uint64(packets/3) * 750
			if got := passed["10.0.0.2"]; got < most*95/100 {
				t.Errorf("of the host that sends half of the rate, %d of %d bytes pass", got, most)
			}
		})
	}
}

// A host that floods a pool again and again, by small packets of many flows, takes no packet from hosts that send little.
func TestSparseFloods(t *testing.T) {
	const rate, period, end = 9_500_000, uint64(300e6), uint64(4e9)
	f := newForest(t, 1<<16)
	f.putIn(pool("line", policy.Rule{
		Rate: rate, Capacity: 3028, Excess: policy.Delay, Queue: rate / 8 * 30 / 1000, Order: policy.SparseFirst, ECNAbove: policy.Never,
		Share: policy.Share{Kind: policy.ShareHost},
	}), 0)
	f.putIn(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "line"}, 0)
	type sender struct {
		host              string
		bytes, flows, gap uint64
		next, sent, lost  uint64
	}
	gap := func(bytes uint64, percent uint64) uint64 { return bytes * 8e9 / rate * 100 / percent }
	flood := &sender{host: "10.0.0.1", bytes: 60, flows: 100, gap: gap(60, 300)}
	pings := &sender{host: "10.0.0.2", bytes: 98, flows: 1, gap: 20e6}
	steady := &sender{host: "10.0.0.3", bytes: 1514, flows: 1, gap: gap(1514, 10)}
	for start := uint64(1e9); ; {
		s := slices.MinFunc([]*sender{flood, pings, steady}, func(a, b *sender) int { return cmp.Compare(a.next, b.next) })
		if s.next > end {
			break
		}
		if s == flood && s.next/period%2 == 1 {
			s.next += period // it rests
			continue
		}
		frame, m := sized(addr(s.host), s.bytes, 0, start+s.next)
		binary.BigEndian.PutUint16(frame[34:], uint16(s.sent%s.flows))
		if verdict, _ := send(t, f.program(), frame, m); verdict == drop {
			s.lost++
		}
		s.sent++
		s.next += s.gap
	}
	for _, s := range []*sender{pings, steady} {
		if s.lost > 0 {
			t.Errorf("%s lost %d of %d packets", s.host, s.lost, s.sent)
		}
	}
	if flood.lost < flood.sent/3 {
		t.Errorf("the flood lost only %d of %d packets", flood.lost, flood.sent)
	}
}

// A packet that enters with a tag in its frame cannot get a departure time. It passes
// if it conforms, and does not count as delayed.
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
	if c := r.set.Store.Counters(e.ID); c.ContendedPackets != 3 || c.DelayedPackets != 0 || c.PassedPackets != 4 {
		t.Errorf("counted %+v", c)
	}
}

// On ingress all packets of a rule that delays are redirected to the ifb, so none
// overtakes another. Excess is dropped. Packets of other rules are not redirected.
func TestIfb(t *testing.T) {
	const redirected uint32 = 7 // TC_ACT_REDIRECT
	r := newRig(t, maps.Size{Rules: 3, Buckets: 64}, ingress())
	r.set.SetIfb(1)
	for _, a := range algorithms {
		rule := queue(a, 8_000_000, 2000, 2000)
		rule.Prefix, rule.Framing = prefix("10.0.0.0/24"), policy.Framing{}
		r.set.Store.Clear(r.set)
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
