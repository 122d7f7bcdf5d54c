// Package model says what happens to a packet that a limit decides over, without
// a kernel, in the same integers as bpf/*.h and bpf/*.c: for the same packet at
// the same time both give the same verdict. Rates are in units per ns (32.32 fixed
// point), levels in units of 2^-20 byte, times in ns.
package model

import (
	"math/bits"

	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// UnitBits: a level is counted in units of 2^-UnitBits byte.
	UnitBits = 20
	// TickBits: a bucket remembers when it was charged in ticks of 2^TickBits ns.
	TickBits = 30
	// PacketBits: no packet counts as 2^PacketBits bytes or more.
	PacketBits = 24
	// MaxPacket is the most bytes that a packet counts.
	MaxPacket = 1<<PacketBits - 1
	// SparseBits: a sparse flow sends 2^SparseBits bytes at most in the time that a full queue takes to leave.
	SparseBits = 11

	busy = 1 // TAT_BUSY of bpf/abi.h
	// ownTimeNS: a sender's own departure time that is later than this is not one.
	ownTimeNS = 1 << 35
)

// A Meter is the byte clock of one rule, and its bounds.
type Meter struct {
	RateUnits uint64
	Base      uint64 // units: the byte clock at time 0
	Capacity  uint64 // units; of a queue, with its burst
	Burst     uint64 // units: up to this level packets of a queue are not delayed
	Penalty   uint64 // units: the level that an excess packet leaves; 0 for no penalty
	Idle      uint32 // ticks after which any bucket has drained
}

// A Limit is what decides over the packets of a rule.
type Limit struct {
	Meter
	Excess   policy.Excess
	Order    policy.Order
	ECNAbove policy.ECNAbove
}

// NewLimit is the limit of a rule, whose levels stay below 2^62 units, twice the capacity
// and a penalty included, and whose queue is shorter than 17 s; the zero Limit for a rule
// that is unlimited.
func NewLimit(r policy.Rule) *Limit {
	if r.Rate == policy.Unlimited {
		return &Limit{}
	}
	l := &Limit{Excess: r.Excess, Order: r.Order, ECNAbove: r.ECNAbove}
	l.RateUnits, l.Capacity = rateUnits(uint64(r.Rate)), r.Capacity<<UnitBits
	if r.Excess == policy.Delay && r.Algorithm == policy.GCRA {
		l.Burst, l.Capacity = l.Capacity, (r.Capacity+r.Queue)<<UnitBits
	}
	if r.Penalty.Kind != policy.PenaltyNone {
		l.Penalty = (l.Capacity + l.leak(uint64(r.Penalty.Duration)) + 1) &^ busy
	}
	most := max(2*l.Capacity, l.Penalty) + 1<<(UnitBits+PacketBits)
	// Two ticks for rounding, one for a clock that steps back.
	l.Idle = uint32(min(l.drain(most)>>TickBits+3, 1<<31))
	return l
}

// rateUnits is a rate in bits per second (8 to 10^12) in units per ns with 32
// fraction bits, rounded up: a packet that is due exactly now must not find its
// bucket a hair too full.
//
//	rate / 8 bytes/s * 2^20 units/byte / 10^9 ns/s * 2^32 = rate * 2^40 / 5^9
func rateUnits(rateBits uint64) uint64 {
	const fiveTo9 = 1953125
	high, low := bits.Mul64(rateBits, 1<<40)
	low, carry := bits.Add64(low, fiveTo9-1, 0)
	units, _ := bits.Div64(high+carry, low, fiveTo9)
	return units
}

// A State is what a packet finds.
type State struct {
	Level   uint64 // units: of the bucket that the packet is charged to
	Flow    uint64 // units: of its flow's own bucket, where sparse flows go first
	FIFO    bool   // packets of sparse flows are queued, too
	Spilled bool   // the bucket is the spill bucket, which strangers share
}

// A Packet is what a verdict takes of a packet.
type Packet struct {
	Time      uint64 // ns
	Bytes     uint64 // on the wire, below 2^PacketBits
	ECT       bool   // it may be marked
	Departure uint64 // ns: the sender's own departure time; 0 for none
}

// Counted is how many bytes a packet of that length at layer 2 counts: below 2^PacketBits.
func Counted(bytes uint64, f policy.Framing) uint64 {
	return uint64(min(max(int64(bytes)+int64(f.Overhead), int64(f.MPU)), MaxPacket))
}

// A Verdict is what happens to a packet.
type Verdict uint8

// A marked packet passes, or with a queue is delayed.
const (
	Pass Verdict = iota
	Drop
	Mark
	Delay
)

func (v Verdict) String() string { return [...]string{"pass", "drop", "mark", "delay"}[v] }

// An Outcome is what happens to a packet, and the levels that it leaves.
type Outcome struct {
	Verdict   Verdict
	Excess    bool   // the packet does not conform
	Wait      uint64 // ns that a conforming packet is queued, or until an excess packet would conform if no other came
	Departure uint64 // ns; of a dropped packet when it came
	Level     uint64 // units: of the bucket afterwards
	Flow      uint64 // units: of its flow's own bucket
}

// Decide is the outcome for a packet that finds that state, under a limit that has
// a rate. The spill bucket has no penalty and marks nothing beyond the capacity:
// either would let whoever sends most shut all others out.
func (l *Limit) Decide(s State, p Packet) Outcome {
	o := Outcome{Excess: !l.Conforms(s.Level, p.Bytes), Departure: p.Time, Level: s.Level, Flow: s.Flow}
	after := s.Level + p.Bytes<<UnitBits
	switch {
	case !o.Excess:
		o.Level = after
		if l.Excess == policy.Delay {
			return l.queue(o, s, p)
		}
		return o
	case l.Excess == policy.ECN && p.ECT && !s.Spilled && after <= 2*l.Capacity:
		o.Verdict, o.Level = Mark, after
	default:
		if l.Excess != policy.Pass {
			o.Verdict = Drop
		}
		if !s.Spilled {
			o.Level = max(s.Level, l.Penalty)
		}
	}
	o.Wait = l.Wait(s.Level, p.Bytes)
	return o
}

// queue gives a conforming packet its departure time: when the packets before it
// have left, but for those that conform to the burst together with it. A sender
// may ask for a later time, but by no more than the queue is long.
func (l *Limit) queue(o Outcome, s State, p Packet) Outcome {
	before := excess(s.Level, p.Bytes, l.Burst)
	if before > 0 && l.Order == policy.SparseFirst {
		var ahead bool
		if o.Flow, ahead = l.flowLevel(s, p.Bytes, before); ahead {
			before = 0
		}
	}
	o.Wait = l.drainNearest(before)
	o.Departure += o.Wait
	if p.Departure > o.Departure && p.Departure-o.Departure <= ownTimeNS {
		o.Departure = min(p.Departure, p.Time+l.drainNearest(l.Capacity-l.Burst))
	}
	switch {
	case o.Wait == 0:
	case p.ECT && o.Wait > uint64(l.ECNAbove):
		o.Verdict = Mark
	default:
		o.Verdict = Delay
	}
	return o
}

// flowLevel is the level of a flow's own bucket, in units, after a packet of n bytes
// with so many units before it. The packet goes ahead of them if its flow is sparse
// (as RFC 8290 has it: it builds no queue of its own): 2^SparseBits bytes fill the
// bucket, which is as big as the queue. A queued packet leaves more than that in it
// until its turn, so that no packet overtakes one of its own flow.
func (m Meter) flowLevel(s State, n, before uint64) (level uint64, ahead bool) {
	queue := m.Capacity - m.Burst
	level = s.Flow + queue>>UnitBits*n<<(UnitBits-SparseBits)
	if n <= 1<<SparseBits && !s.FIFO && level <= queue {
		return level, true
	}
	return before + queue, false
}

// Offer decides over a packet, and charges its bucket and that of its flow, which
// may be nil where no sparse flows go first. With fifo they are queued, too.
func (l *Limit) Offer(b, flow *Bucket, fifo bool, p Packet) Outcome {
	if l.RateUnits == 0 {
		return Outcome{Departure: p.Time}
	}
	s := State{Level: l.Level(*b, p.Time), FIFO: fifo}
	sparse := l.Order == policy.SparseFirst && excess(s.Level, p.Bytes, l.Burst) > 0
	if sparse {
		s.Flow = l.Level(*flow, p.Time)
	}
	o := l.Decide(s, p)
	if !o.Excess || o.Level > s.Level {
		*b = l.charged(o.Level, p.Time)
	}
	if !o.Excess && sparse {
		*flow = l.charged(o.Flow, p.Time)
	}
	return o
}

// leak is what leaves a bucket in so many ns, in units, modulo 2^64.
func (m Meter) leak(ns uint64) uint64 {
	high, low := bits.Mul64(ns, m.RateUnits)
	return high<<32 | low>>32
}

// drain is how long it takes to leak so many units, in ns, rounded up.
func (m Meter) drain(units uint64) uint64 {
	high, low := units>>32, units<<32
	if high >= m.RateUnits {
		return 1<<64 - 1
	}
	ns, rest := bits.Div64(high, low, m.RateUnits)
	if rest > 0 {
		ns++
	}
	return ns
}

// drainNearest is drain_ns of bpf/meter.h, with its rounding.
func (m Meter) drainNearest(units uint64) uint64 {
	const fast, left = 46, 13
	rate := m.RateUnits
	if rate>>fast > 0 {
		rate = rate >> left << left
	}
	low, carry := bits.Add64(units<<32, rate/2, 0)
	ns, _ := bits.Div64(units>>32+carry, low, rate)
	return ns
}

// Clock reads the byte clock at now (ns): what the rate would have let through
// since the beginning of time, in units modulo 2^64.
func (m Meter) Clock(now uint64) uint64 {
	return (m.Base + m.leak(now)) &^ busy
}

// Most is the level in units up to which a bucket counts as full.
func (m Meter) Most() uint64 { return max(m.Capacity, m.Penalty) }

// Shrinks reports whether buckets can hold less than under old, so that their levels are to be clamped.
func (m Meter) Shrinks(old Meter) bool { return m.Capacity < old.Capacity || m.Penalty < old.Penalty }

// Continue sets the clock so that at now (ns) it reads what old's reads: every
// bucket then has exactly the level under m that it had under old.
func (m *Meter) Continue(old Meter, now uint64) {
	m.Base = 0
	m.Base = old.Clock(now) - m.Clock(now)
}

// excess is how much of a level has to leave before a packet of n bytes is within a
// bound, in units: all of it if the packet is larger than that.
func excess(level, n, bound uint64) uint64 {
	return level - min(level, bound-min(bound, n<<UnitBits))
}

// Wait is how many ns it takes until a packet of n bytes conforms to a bucket of
// that level in units, if no other packet comes.
func (m Meter) Wait(level, n uint64) uint64 { return m.drain(excess(level, n, m.Capacity)) }

// LongestWait is how long a packet may be queued, in ns.
func (m Meter) LongestWait() uint64 { return m.drain(m.Capacity - m.Burst) }

// Conforms reports whether n bytes (below 2^PacketBits) conform at that level in
// units: exactly full conforms, and so does a packet larger than the bucket when
// it is empty.
func (m Meter) Conforms(level, n uint64) bool {
	return level == 0 || level+n<<UnitBits <= m.Capacity
}

// A Bucket is the state that a packet changes. The zero Bucket was never charged.
type Bucket struct {
	TAT  uint64 // units on the meter's clock
	Tick uint32 // when it was last charged
}

// Tick is a time in ns as a bucket remembers it.
func Tick(now uint64) uint32 { return uint32(now >> TickBits) }

// Level is the level of the bucket at now (ns), in units.
func (m Meter) Level(b Bucket, now uint64) uint64 {
	level := b.TAT - m.Clock(now)
	if int64(level) <= 0 || b == (Bucket{}) || Tick(now)+1-b.Tick > m.Idle {
		return 0
	}
	return level
}

// Bytes rounds a level up to whole bytes.
func Bytes(units uint64) uint64 { return (units + 1<<UnitBits - 1) >> UnitBits }

// WithLevel is a bucket that has a level in units at now (ns).
func (m Meter) WithLevel(units, now uint64) Bucket {
	if units == 0 {
		// Also if the clock of another CPU, which is behind, charges it next.
		const longAgo = 1 << 61 // in units; what the clock advances until that wraps takes longer than Idle
		return Bucket{TAT: m.Clock(now) - longAgo, Tick: Tick(now)}
	}
	return m.charged(units, now)
}

func (m Meter) charged(level, now uint64) Bucket {
	return Bucket{TAT: m.Clock(now) + level, Tick: Tick(now)}
}
