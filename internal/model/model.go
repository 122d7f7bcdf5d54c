// Package model computes the verdict for a packet without a kernel. It uses the same integers as bpf/*.h and bpf/*.c, so both
// give the same verdict for the same packet at the same time. Rates are in units per ns (32.32 fixed point), levels in units of
// 2^-20 byte, times in ns.
package model

import (
	"math/bits"

	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// UnitBits: a level is in units of 2^-UnitBits byte.
	UnitBits = 20
	// QuotaBits: of a quota in units of 2^-QuotaBits byte.
	QuotaBits = 8
	// TickBits: the time of a bucket's last charge is in ticks of 2^TickBits ns.
	TickBits = 30
	// PacketBits: no packet counts as 2^PacketBits bytes or more.
	PacketBits = 24
	// SharedBytes is the size as which larger packets conform to a bucket that packets of all sizes share.
	SharedBytes = 1514
	// MaxPacket is the largest size of a packet in bytes.
	MaxPacket = 1<<PacketBits - 1
	// While a full queue drains, a sparse flow sends at most a part of sparseParts of it, but at least 2^SparseBits bytes, and
	// at most 2^sparseMore times as many.
	SparseBits              = 11
	sparseParts, sparseMore = 16, 3

	ticksAhead = 1       // TICKS_AHEAD of bpf/abi.h
	ticksLate  = 1 << 20 // TICKS_LATE of bpf/abi.h
	busy       = 1       // TAT_BUSY of bpf/abi.h
	// lapBits: no level is above 2^lapBits units. Those of two laps, the memory of an edit, and longAgo are below 2^63.
	lapBits = 61
	// maxSenderDelayNS: a later timestamp of a sender is not a departure time.
	maxSenderDelayNS = 1 << 35
)

// BitsOf is UnitBits or QuotaBits.
func BitsOf(u policy.Unit) int {
	if u == policy.InQuota {
		return QuotaBits
	}
	return UnitBits
}

// A Meter is the byte clock of one rule, and the bounds of its levels.
type Meter struct {
	RateUnits uint64
	Base      uint64 // units: the byte clock at time 0
	Capacity  uint64 // units; with a queue, the sum of burst and queue
	Burst     uint64 // units; with a queue, packets are not delayed up to this level
	Queues    bool   // packets beyond the burst are queued
	Penalty   uint64 // units: the level after an excess packet; 0 for no penalty
	Idle      uint32 // ticks after which any bucket is empty
	Shared    bool   // packets larger than SharedBytes conform as one of that size
	Edited    bool   // the clock goes on from another one
	Floor     uint64 // the least TAT of a bucket: one that was empty would have all of a larger capacity at once
	Until     uint32 // up to this tick, the floor and levels from before the edit may matter
	Fresh     uint32 // a bucket that was last charged before this tick was empty at the edit
	Next      uint32 // when the lap of the edit began, and which lap that was in the last two bits: see laps
	Whole     uint64 // units: of a lease, the capacity of the pool
}

// A Limit decides the verdicts for the packets of a rule.
type Limit struct {
	Meter
	Excess   policy.Excess
	Order    policy.Order
	ECNAbove policy.ECNAbove
}

// NewLimit returns the limit of a valid rule, or the zero Limit for an unlimited rule. Levels must not be above 2^lapBits
// units, including twice the capacity and a penalty. The queue must be shorter than 17 s.
func NewLimit(r policy.Rule) *Limit {
	if r.Rate == policy.Unlimited {
		return &Limit{}
	}
	l := &Limit{Excess: r.Excess, Order: r.Order, ECNAbove: r.ECNAbove}
	l.Queues, l.Shared = r.Excess == policy.Delay, r.Pool || r.Share.Kind != policy.ShareNone
	l.RateUnits, l.Capacity = rateUnits(uint64(r.Rate)), r.Capacity<<BitsOf(r.Unit)
	if r.Unit == policy.InQuota {
		if over := r.Also.Quota.Period.Rolling(); over > 0 {
			l.RateUnits, _ = bits.Div64(l.Capacity>>32, l.Capacity<<32, uint64(over))
			l.RateUnits = max(l.RateUnits, 1)
		}
	}
	if r.Excess == policy.Delay && r.Algorithm == policy.GCRA {
		l.Burst, l.Capacity = l.Capacity, (r.Capacity+r.Queue)<<UnitBits
	}
	if r.Penalty.Kind != policy.PenaltyNone {
		l.Penalty = (l.Capacity + l.leak(uint64(r.Penalty.Duration)) + 1) &^ busy
	}
	most := max(2*l.Capacity, l.Penalty) + 1<<(UnitBits+PacketBits)
	if r.Pool {
		most += maxDebt
	}
	// Two ticks for rounding, and those that the bucket's tick may be ahead.
	l.Idle = uint32(min(l.Drain(most)>>TickBits+2+ticksAhead, 1<<31))
	return l
}

// rateUnits converts a rate in bits per second (8 to 10^12) to units per ns with 32 fraction bits. It rounds up, so that a
// packet conforms at the exact time at which there is room for it.
//
//	rate / 8 bytes/s * 2^20 units/byte / 10^9 ns/s * 2^32 = rate * 2^40 / 5^9
func rateUnits(rateBits uint64) uint64 {
	const fiveTo9 = 1953125
	high, low := bits.Mul64(rateBits, 1<<40)
	low, carry := bits.Add64(low, fiveTo9-1, 0)
	units, _ := bits.Div64(high+carry, low, fiveTo9)
	return units
}

// A State is the state of a limit when a packet arrives.
type State struct {
	Level   uint64 // units: of the bucket that the packet is charged to
	Second  uint64 // units: of the second one, with colours
	Flow    uint64 // units: of its flow's bucket, with sparse-first
	FIFO    bool   // sparse flows are queued, too
	Spilled bool   // the bucket is the spill bucket
	Departs uint64 // ns: when the last packet departs that is queued there
}

// A Packet has the properties of a packet that its verdict depends on.
type Packet struct {
	Time      uint64 // ns
	Bytes     uint64 // on the wire, below 2^PacketBits
	ECT       bool   // ECN-capable: it may be marked
	Departure uint64 // ns: the departure time that the sender requests; 0 for none
	Packets   uint64 // on the wire; 0 for 1
}

// Counted returns the size in bytes, below 2^PacketBits, that a packet of a length at layer 2 counts as.
func Counted(bytes uint64, f policy.Framing) uint64 {
	return uint64(min(max(int64(bytes)+int64(f.Overhead), int64(f.MPU)), MaxPacket))
}

// A Verdict is the treatment of a packet.
type Verdict uint8

// A marked packet passes; with a queue it is delayed.
const (
	Pass Verdict = iota
	Drop
	Mark
	Delay
)

func (v Verdict) String() string { return [...]string{"pass", "drop", "mark", "delay"}[v] }

// An Outcome is the verdict for a packet, and the levels after it.
type Outcome struct {
	Verdict   Verdict
	Excess    bool   // the packet does not conform
	Wait      uint64 // ns for which a conforming packet is queued, or until an excess packet would conform if no other packet arrives
	Departure uint64 // ns; the arrival time of a dropped packet
	Level     uint64 // units: of the bucket
	Flow      uint64 // units: of its flow's bucket
	Departs   uint64 // ns: when the last queued packet departs
}

// uncharged is the outcome for a packet that passes without a charge.
func (s State) uncharged(p Packet) Outcome {
	return Outcome{Departure: p.Time, Level: s.Level, Flow: s.Flow, Departs: s.Departs}
}

// Decide returns the outcome for a packet in a state, under a limit that has a rate. The spill bucket has no penalty and no
// marks beyond the capacity: with either, the largest sender would block all others.
func (l *Limit) Decide(s State, p Packet) Outcome {
	o, after := s.uncharged(p), s.Level+p.Bytes<<UnitBits
	o.Excess = !l.Conforms(s.Level, p.Bytes)
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

// queue sets the departure time of a conforming packet to the time when the packets before it have left, except for those that
// are within the burst together with it. A sender may request a later time, limited to the length of the queue. After an edit, a
// packet does not depart before those that were queued by another clock. What these still take is in the bucket from then on.
func (l *Limit) queue(o Outcome, s State, p Packet) Outcome {
	before, ahead := excess(s.Level, p.Bytes, l.Burst), false
	if before > 0 && l.Order == policy.SparseFirst {
		o.Flow, ahead = l.flowLevel(s, p.Bytes, before)
	}
	if !ahead {
		o.Departure += l.drainNearest(before)
		if late := s.Departs - o.Departure; s.Departs > o.Departure && s.Departs-p.Time <= uint64(policy.MaxWait) {
			o.Departure = s.Departs
			if late > 2 { // by more than rounding
				o.Departure++
				o.Level += l.leak(late) &^ busy
			}
		}
		if o.Departure > p.Time {
			o.Departs = o.Departure
		}
	}
	o.Wait = o.Departure - p.Time
	if p.Departure > o.Departure && p.Departure-o.Departure <= maxSenderDelayNS {
		o.Departure = max(o.Departure, min(p.Departure, p.Time+l.drainNearest(l.Capacity-l.Burst)))
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

// flowLevel returns the level of a flow's bucket, in units, after a packet of n bytes with the units before queued ahead of it.
// The packet is not delayed if its flow is sparse (RFC 8290: a flow that builds no queue): the most that a sparse flow sends
// fills the bucket, which is as big as the queue. A queued packet raises the level above that until it has left, so that no
// packet overtakes one of the same flow.
func (m Meter) flowLevel(s State, n, before uint64) (level uint64, ahead bool) {
	queue := m.Capacity - m.Burst
	parts := queue >> UnitBits
	parts = max(parts>>sparseMore, min(parts, sparseParts<<SparseBits))
	level = s.Flow + parts*n<<(UnitBits-SparseBits)
	if n <= 1<<SparseBits && !s.FIFO && level <= queue {
		return level, true
	}
	return before + queue, false
}

// Offer decides the outcome for a packet, and charges its bucket and that of its flow, which may be nil without sparse-first.
// With fifo sparse flows are queued, too.
func (l *Limit) Offer(b, flow *Bucket, fifo bool, p Packet) Outcome {
	if l.RateUnits == 0 {
		return Outcome{Departure: p.Time}
	}
	s := State{Level: l.Level(*b, p.Time), FIFO: fifo, Departs: b.Departs}
	if flow != nil {
		s.Flow = l.Level(*flow, p.Time)
	}
	o := l.Decide(s, p)
	if !o.Excess || o.Level > s.Level {
		l.Raise(b, o.Level, p.Time)
	}
	b.Departs = o.Departs
	if o.Flow != s.Flow {
		l.Raise(flow, o.Flow, p.Time)
	}
	return o
}

// leak returns the units that leak in a time in ns, modulo 2^64.
func (m Meter) leak(ns uint64) uint64 {
	high, low := bits.Mul64(ns, m.RateUnits)
	return high<<32 | low>>32
}

// Drain returns the time in ns in which the units leak, rounded up.
func (m Meter) Drain(units uint64) uint64 {
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

// Drained returns a level after a time in ns.
func (m Meter) Drained(level, ns uint64) uint64 {
	if ns >= m.Drain(level) {
		return 0
	}
	return level - min(level, m.leak(ns))
}

// drainNearest is drain_ns of bpf/meter.h, with the same rounding.
func (m Meter) drainNearest(units uint64) uint64 {
	const fast, left = 46, 13
	rate := m.RateUnits
	if units>>2 >= rate {
		return 1 << 34
	}
	if rate>>fast > 0 {
		rate = rate >> left << left
	}
	low, carry := bits.Add64(units<<32, rate/2, 0)
	ns, _ := bits.Div64(units>>32+carry, low, rate)
	return ns
}

// Clock returns the byte clock at now (ns): what the rate has allowed since time 0, plus Base, in units modulo 2^64.
func (m Meter) Clock(now uint64) uint64 {
	return (m.Base + m.leak(now)) &^ busy
}

// free returns the units that may be free in an empty bucket: of a queue, what need not wait.
func (m Meter) free() uint64 {
	if m.Queues {
		return m.Burst
	}
	return m.Capacity
}

// Succeed sets the clock such that at now (ns) every bucket has the room that it had with old, or as long a queue. What was
// empty has no more room than it had: struct clock of bpf/abi.h.
func (m *Meter) Succeed(old Meter, now uint64) {
	v, least := old.Clock(now), old.floorLevel(now)
	m.Base = 0
	m.Base = v + old.free() - m.free() - m.Clock(now)
	m.Floor, m.Until = v+least, Tick(now)+m.ticks(1<<lapBits) // all levels from before have drained then
	if start := m.Clock(now); int64(m.Floor-start) <= 0 {
		m.Floor = start - longAgo // out of reach, even if the clock steps back
	}
	m.Fresh, m.Next = old.laps(now)
	m.Edited = true
}

// laps returns Fresh and Next for an edit at now (ns). A lap is 2^lapBits units of the clock plus what may be free, which no edit
// moves. Next is when the present lap began, and Fresh when the one before did. So since Fresh the clock has moved by one or two
// laps, at whatever rates: enough for any bucket to drain, and too little to wrap.
func (m Meter) laps(now uint64) (fresh, next uint32) {
	at, tick := m.Clock(now)+m.free(), Tick(now)
	into := at % (1 << lapBits)
	both := m.ticks(into + 1<<lapBits)
	next = (tick-m.ticks(into))&^3 | uint32(at>>lapBits)&3
	ran := int32(tick - (m.Until - m.ticks(1<<lapBits)))
	switch begun := (next - m.Next) & 3; {
	case !m.Edited || ran > int32(both) || begun == 2: // both by this clock
		return tick - both, next
	case begun == 1:
		return m.Next &^ 3, next
	}
	return m.Fresh, m.Next // also if the time has stepped back
}

// ticks returns the ticks in which units drain, rounded up; at most 36 years.
func (m Meter) ticks(units uint64) uint32 { return uint32(min(m.Drain(units)>>TickBits+1, 1<<30)) }

// excess returns the units of a level that have to leave before a packet of n bytes is within a bound: all of them if the packet
// is larger than that.
func excess(level, n, bound uint64) uint64 {
	return level - min(level, bound-min(bound, n<<UnitBits))
}

// Wait returns the time in ns until a packet of n bytes conforms, given the level in units, if no other packet arrives.
func (m Meter) Wait(level, n uint64) uint64 { return m.Drain(excess(level, m.tested(n), m.Capacity)) }

// LongestWait returns the longest time in ns for which a packet may be queued.
func (m Meter) LongestWait() uint64 { return m.Drain(m.Capacity - m.Burst) }

// Conforms reports whether n bytes (below 2^PacketBits) conform at that level in units: exactly full conforms, and so does a
// packet larger than the bucket when it is empty.
func (m Meter) Conforms(level, n uint64) bool {
	return level == 0 || level+m.tested(n)<<UnitBits <= m.Capacity
}

// tested is the size as which a packet of n bytes conforms. Where packets of all sizes share a bucket, a small one would always
// find room before a large one. So large packets conform as smaller ones do, and are charged as a whole.
func (m Meter) tested(n uint64) uint64 {
	if m.Shared {
		return min(n, SharedBytes)
	}
	return n
}

// A Bucket is the state of a bucket. The zero Bucket was never charged.
type Bucket struct {
	TAT     uint64 // units on the meter's clock
	Tick    uint32 // when it was last charged
	Departs uint64 // ns: with a queue, when the last queued packet departs
}

// Tick converts a time in ns to a bucket's tick.
func Tick(now uint64) uint32 { return uint32(now >> TickBits) }

// Level returns the level of the bucket at now (ns), in units.
func (m Meter) Level(b Bucket, now uint64) uint64 {
	level := b.TAT - m.Clock(now)
	idle := Tick(now)+ticksAhead+ticksLate-b.Tick > m.Idle+ticksLate
	if m.Edited {
		idle = int32(b.Tick-m.Fresh) < 0 || idle && int32(Tick(now)-m.Until) > 0
	}
	if int64(level) <= 0 || idle || b == (Bucket{}) {
		level = 0
	}
	return max(level, m.floorLevel(now))
}

// floorLevel returns the least level of a bucket at now (ns), in units.
func (m Meter) floorLevel(now uint64) uint64 {
	level := m.Floor - m.Clock(now)
	if !m.Edited || int64(level) < 0 || int32(Tick(now)-m.Until) > 0 {
		return 0
	}
	return level
}

// Bytes rounds a level up to whole bytes.
func Bytes(units uint64) uint64 { return BytesOf(policy.Bytes, units) }

// BytesOf is Bytes of a level of what a limit counts.
func BytesOf(u policy.Unit, units uint64) uint64 { return (units + 1<<BitsOf(u) - 1) >> BitsOf(u) }

// longAgo is how many units ago a bucket is empty also for another CPU with a slower clock. Idle is over before the clock gets
// there again.
const longAgo = 1 << 59

// WithLevel returns a bucket with a level in units at now (ns).
func (m Meter) WithLevel(units, now uint64) Bucket {
	if units == 0 {
		return Bucket{TAT: m.Clock(now) - longAgo, Tick: Tick(now)}
	}
	return Bucket{TAT: m.Clock(now) + units, Tick: Tick(now)}
}

// Raise sets the level of a bucket, in units, to that after a packet. A packet that read its time before others does not lower
// the tick.
func (m Meter) Raise(b *Bucket, units, now uint64) {
	tick := Tick(now)
	if b.Tick-tick <= ticksLate && *b != (Bucket{}) {
		tick = b.Tick
	}
	b.TAT, b.Tick = m.Clock(now)+units, tick
}
