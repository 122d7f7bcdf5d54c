package model

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A plan is a rule that is to be in force from a time (ns) on. Its limit goes on from the one before it, as is known long
// before that time.
type plan struct {
	at   uint64
	rule policy.Rule
	next *Limit
}

// An edited pair is offered packets while its rule changes, and keeps the extreme of all windows so far.
type edited struct {
	*pair
	tb    testing.TB
	roll  dice
	rule  policy.Rule
	plans []plan
	now   uint64

	net, least          *big.Rat // passed bytes less the integral of the rates; the least of net and room of all beginnings
	begun               uint64
	departs             uint64 // ns: when the last packet leaves
	edits, idle, queues int
}

// limits returns a rule of up to 4 Gbit/s, with any treatment of excess packets but marks.
func limits(roll dice) policy.Rule {
	logarithmic := func(from, octaves uint64) uint64 { return from<<roll(octaves) + roll(from) }
	r := policy.Rule{Rate: policy.Rate(logarithmic(8000, 20)), Capacity: logarithmic(100, 18)}
	switch roll(6) {
	case 0:
		r.Algorithm, r.Penalty = policy.Leaky, policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(logarithmic(1e6, 13))}
	case 1:
		r.Excess, r.Queue = policy.Delay, logarithmic(100, 16)
	case 2:
		r.Algorithm, r.Excess = policy.Leaky, policy.Delay
	}
	return valid(r)
}

// valid returns a rule with a queue that is not longer than a packet may wait.
func valid(r policy.Rule) policy.Rule {
	most := uint64(r.Rate) / 8 * uint64(policy.MaxWait/time.Second)
	if r.Queue = min(r.Queue, most); r.Algorithm == policy.Leaky && r.Excess == policy.Delay {
		r.Capacity = min(r.Capacity, most)
	}
	return r
}

// will plans that a rule is in force from a time on.
func (s *edited) will(at uint64, r policy.Rule) {
	r = valid(r)
	old := s.m
	if n := len(s.plans); n > 0 {
		old = s.plans[n-1].next
	}
	s.plans = append(s.plans, plan{at, r, succeed(old, r, at)})
}

// pass lets time pass, and the plans come true.
func (s *edited) pass(to uint64) {
	for len(s.plans) > 0 && s.plans[0].at <= to {
		p := s.plans[0]
		s.plans = s.plans[1:]
		s.leak(p.at)
		if s.m.Level(s.b, p.at) == 0 && p.next.free() > s.m.free() {
			s.idle++
		}
		s.change(s.tb, p.next, p.rule, p.at)
		s.rule = p.rule
		s.edits++
		s.begin()
	}
	s.leak(to)
}

func (s *edited) leak(to uint64) {
	s.net.Sub(s.net, new(big.Rat).Mul(s.e.rate, rat(to-s.now)))
	s.now = to
}

// begin begins a window with the room that the bucket has.
func (s *edited) begin() {
	room := new(big.Rat).SetFrac64(int64(s.m.free()-s.m.Level(s.b, s.now)), 1<<UnitBits)
	if room.Add(room, s.net); s.least == nil || room.Cmp(s.least) < 0 {
		s.least = room
	}
}

// send offers a packet. Over no window that ends with it has more passed than the rates and the room allow. A queue has that
// much more, which departs later, and a packet larger than the bucket passes when the bucket is empty.
func (s *edited) send(n uint64) {
	s.begin()
	if s.offer(s.tb, s.now, n, false) == Drop {
		return
	}
	if s.m.Queues && s.last.Departure < s.departs {
		s.tb.Fatalf("edit %d, %d bytes at %d ns: the packet departs at %d ns, before %d", s.edits, n, s.now, s.last.Departure, s.departs)
	}
	s.departs = max(s.departs, s.last.Departure)
	s.net.Add(s.net, rat(n))
	beyond := rat((s.m.Capacity - s.m.free()) >> UnitBits)
	if s.m.Capacity > s.m.free() {
		s.queues++
	}
	if n<<UnitBits > s.m.Capacity {
		beyond = rat(n)
	}
	lost := rat(10 + 4*uint64(s.edits) + (s.now-s.begun)>>32) // units, by rounding
	beyond.Add(beyond, lost.Quo(lost, rat(1<<UnitBits)))
	if over := new(big.Rat).Sub(s.net, s.least); over.Cmp(beyond) > 0 {
		s.tb.Fatalf("edit %d, %d bytes at %d ns: in a window, %s bytes more passed than the rates and the room at its beginning allow",
			s.edits, n, s.now, over.FloatString(6))
	}
	if slack := s.e.slack(s.now); slack.Cmp(big.NewRat(1, 1000)) > 0 {
		s.tb.Fatalf("after %d edits the room may be wrong by %s bytes", s.edits, slack.FloatString(6))
	}
}

// Edits, leases, and changes that begin and revert at times that are known before, at any time. After each of them, a bucket
// has the exact room that it had, up to the new capacity, and over no window passes more than the rates in force and the
// room at its beginning. A queue keeps departures in order.
func TestEdits(t *testing.T) {
	seed := testenv.Seed(t)
	traces, steps := testenv.Rounds(t, 100), 200
	var edits, idle, queues, packets, near int
	for i := range traces {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			roll := random(rand.New(rand.NewPCG(seed, uint64(i))))
			start := starts[roll(uint64(len(starts)-1))] + 1e9
			s := &edited{tb: t, roll: roll, rule: limits(roll), now: start, begun: start, net: new(big.Rat)}
			s.pair = newPair(s.rule)
			soon := func() uint64 { return s.now + 1 + roll(1<<(10+roll(26))) } // up to a minute
			for range steps {
				next := soon()
				soonEmpty := len(s.plans) == 0 && s.m.Drain(s.m.Level(s.b, s.now)) < 1e9
				if roll(8) == 0 && soonEmpty { // to a limit of the bucket or the clock; hours would add to the error of others
					next = advance(s.now, min(gap(roll, s.m, s.b, s.now), uint64(10*time.Hour)))
				}
				s.pass(max(s.now, next))
				switch roll(12) {
				case 0: // an edit
					s.plans = nil
					s.will(s.now, limits(roll))
				case 1: // a lease, and a safe share after it
					s.plans = nil
					lease, safe := s.rule, s.rule
					lease.Rate, lease.Capacity, safe.Rate = limits(roll).Rate, limits(roll).Capacity, limits(roll).Rate
					s.will(s.now, lease)
					s.will(soon(), safe)
				case 2: // a change that reverts
					if len(s.plans) == 0 {
						before := s.rule
						from := soon()
						s.will(from, limits(roll))
						s.will(from+soon()-s.now, before)
					}
				case 3: // it lasts
					s.plans = nil
				}
				s.pass(s.now)
				for range roll(4) {
					s.send([]uint64{60, 1514, 60 + roll(1455), 1 + roll(65536)}[roll(4)])
				}
			}
			edits, idle, queues, packets, near = edits+s.edits, idle+s.idle, queues+s.queues, packets+s.steps, near+s.near
		})
	}
	t.Logf("%d packets, %d near enough to a bound to differ; %d edits, %d of them with more capacity for an empty bucket; %d packets queued",
		packets, near, edits, idle, queues)
	if edits < packets/20 || idle < edits/20 || queues < packets/50 || near > packets/20 {
		t.Error("the traces miss their purpose")
	}
}

// Between edits pass milliseconds or years, at any rate. A bucket has the room that the rates since its charge have allowed, however
// often the clock has wrapped since then.
func TestEditsOverYears(t *testing.T) {
	seed := testenv.Seed(t)
	for i := range testenv.Rounds(t, 1000) {
		roll := random(rand.New(rand.NewPCG(seed, uint64(i))))
		some := func(from, octaves uint64) uint64 { return from<<roll(octaves) + roll(from) }
		now := starts[roll(uint64(len(starts)-1))]
		end, steps := now+uint64(30*365*24*time.Hour), uint64(0)
		var m *Limit
		var buckets [4]Bucket
		var rooms [len(buckets)]*big.Int
		moved := new(big.Int) // units, since the last edit or charge, times 2^32
		check := func() {
			t.Helper()
			for j, b := range buckets {
				room := new(big.Int).Rsh(moved, 32)
				if room.Add(room, rooms[j]); room.Cmp(new(big.Int).SetUint64(m.free())) > 0 {
					room.SetUint64(m.free())
				}
				has := big.NewInt(int64(m.free()) - int64(m.Level(b, now)))
				if has.Sub(has, room); has.CmpAbs(new(big.Int).SetUint64(4*steps)) > 0 {
					t.Fatalf("trace %d, step %d at %d ns: bucket %d has room for %v units more than it should\n%+v\n%+v", i, steps, now, j, has, b, m)
				}
				rooms[j] = room
			}
			moved.SetInt64(0)
		}
		for range 60 {
			next := NewLimit(policy.Rule{Rate: policy.Rate(min(some(8, 38), 1e12)), Capacity: some(1, 40), Excess: policy.ECN})
			if m == nil {
				for j := range buckets {
					rooms[j] = new(big.Int).SetUint64(next.free())
				}
			} else {
				next.Succeed(m.Meter, now)
				steps++
			}
			for m = next; ; {
				check()
				if j := roll(uint64(len(buckets))); roll(2) == 0 {
					if level := m.Level(buckets[j], now); level < 2*m.Capacity {
						level += (1 + roll(2*m.Capacity-level)) &^ busy
						m.Raise(&buckets[j], level, now)
						rooms[j].SetInt64(int64(m.free()) - int64(level))
					}
				}
				if roll(3) == 0 {
					break
				}
				pass := some(1<<20, 37)
				if pass > end-now {
					break
				}
				now, steps = now+pass, steps+1
				moved.Mul(new(big.Int).SetUint64(pass), new(big.Int).SetUint64(m.RateUnits))
			}
		}
	}
}
