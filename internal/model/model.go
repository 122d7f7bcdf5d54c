// Package model is the arithmetic of the meters, without a kernel: the same
// integers as bpf/bucket.h, so that what one engine says the other must say,
// for the same packet at the same time. It imports the standard library only.
package model

import (
	"math/bits"
)

const (
	// UnitBits: a level is counted in units of 2^-UnitBits byte.
	UnitBits = 20
	// TickBits: a bucket remembers when it was charged in ticks of 2^TickBits ns.
	TickBits = 30
	// PacketBits: no packet counts as 2^PacketBits bytes or more.
	PacketBits = 24
	// SparseBits: a sparse flow sends 2^SparseBits bytes at most in the time that a full queue takes to leave.
	SparseBits = 11

	// MaxLevelBytes bounds what a bucket can be made to owe, twice its
	// capacity and a penalty included: levels stay below 2^62 units.
	MaxLevelBytes = 1 << 42

	taken = 1
)

// A Meter holds what decides a verdict: the clock of one rule, and its bounds.
type Meter struct {
	Slope    uint64 // units per ns, 32.32 fixed point
	Base     uint64 // units
	Capacity uint64 // units; of a queue, with what leaves at once
	AtOnce   uint64 // units: in a queue, up to this level packets do not wait
	Penalty  uint64 // units: the level that an overflow leaves; 0 for no penalty
	Idle     uint32 // ticks after which any bucket has drained
}

// New makes a meter from a rate in bits per second (8 to 10^12), a capacity in
// bytes, and what a penalty holds the bucket full for, in ns; penalised says
// whether there is one. Levels must stay within MaxLevelBytes.
func New(rateBits, capacityBytes uint64, penalised bool, penaltyNS uint64) Meter {
	m := Meter{Slope: slope(rateBits), Capacity: capacityBytes << UnitBits}
	if penalised {
		m.Penalty = (m.Capacity + m.leak(penaltyNS) + 1) &^ taken
	}
	m.Idle = m.idle()
	return m
}

// NewQueue makes the meter of a queue: up to atOnceBytes packets leave as they
// come, and beyond that so many bytes may wait, together within MaxLevelBytes
// and for less than 17 s.
func NewQueue(rateBits, atOnceBytes, queueBytes uint64) Meter {
	m := New(rateBits, atOnceBytes+queueBytes, false, 0)
	m.AtOnce = atOnceBytes << UnitBits
	return m
}

// idle is after how many ticks any bucket has drained.
func (m Meter) idle() uint32 {
	most := max(2*m.Capacity, m.Penalty) + 1<<(UnitBits+PacketBits)
	// Two ticks for rounding, one for a clock that steps back.
	return uint32(min(m.drain(most)>>TickBits+3, 1<<31))
}

// slope is the rate in units per ns with 32 fraction bits, rounded up: a packet
// that is due exactly now must not find its bucket a hair too full.
//
//	rate / 8 bytes/s * 2^20 units/byte / 10^9 ns/s * 2^32 = rate * 2^40 / 5^9
func slope(rateBits uint64) uint64 {
	const fiveTo9 = 1953125
	high, low := bits.Mul64(rateBits, 1<<40)
	low, carry := bits.Add64(low, fiveTo9-1, 0)
	s, _ := bits.Div64(high+carry, low, fiveTo9)
	return s
}

// leak is what leaves a bucket in so many ns, in units, modulo 2^64.
func (m Meter) leak(ns uint64) uint64 {
	high, low := bits.Mul64(ns, m.Slope)
	return high<<32 | low>>32
}

// drain is how long it takes to leak so many units, in ns, rounded up.
func (m Meter) drain(units uint64) uint64 {
	high, low := units>>32, units<<32
	if high >= m.Slope {
		return 1<<64 - 1
	}
	ns, rest := bits.Div64(high, low, m.Slope)
	if rest > 0 {
		ns++
	}
	return ns
}

// Clock reads the byte clock at now (ns): what the rate would have let through
// since the beginning of time, in units modulo 2^64.
func (m Meter) Clock(now uint64) uint64 {
	return (m.Base + m.leak(now)) &^ taken
}

// Most is the level in units up to which a bucket counts as full.
func (m Meter) Most() uint64 { return max(m.Capacity, m.Penalty) }

// Shrinks reports whether buckets can hold less than under old, so that what they owe is to be clamped.
func (m Meter) Shrinks(old Meter) bool { return m.Capacity < old.Capacity || m.Penalty < old.Penalty }

// Continue sets the clock so that at now (ns) it reads what old's reads: every
// bucket then owes under m exactly what it owed under old.
func (m *Meter) Continue(old Meter, now uint64) {
	m.Base = 0
	m.Base = old.Clock(now) - m.Clock(now)
}

// A Bucket is the state that a packet changes. The zero Bucket was never charged.
type Bucket struct {
	TAT  uint64 // units on the meter's clock
	Tick uint32 // when it was last charged
}

// Tick is a time in ns as a bucket remembers it.
func Tick(now uint64) uint32 { return uint32(now >> TickBits) }

// Level is what the bucket owes at now (ns), in units.
func (m Meter) Level(b Bucket, now uint64) uint64 {
	level := b.TAT - m.Clock(now)
	if int64(level) <= 0 || b == (Bucket{}) || Tick(now)+1-b.Tick > m.Idle {
		return 0
	}
	return level
}

// Bytes rounds a level up to whole bytes.
func Bytes(units uint64) uint64 { return (units + 1<<UnitBits - 1) >> UnitBits }

// A Verdict is what a meter says of a packet.
type Verdict uint8

const (
	Pass   Verdict = iota // conforms, and was charged
	Excess                // does not fit
	Mark                  // does not fit, but twice the capacity would hold it: charged
)

// Conforms reports whether n bytes (below 2^PacketBits) fit a bucket of that
// level: exactly full conforms, and so does a packet bigger than the bucket
// when it is empty.
func (m Meter) Conforms(level, n uint64) bool {
	return level == 0 || level+n<<UnitBits <= m.Capacity
}

// Marks reports whether a packet that does not conform may be marked instead of
// dropped: twice the capacity would hold it.
func (m Meter) Marks(level, n uint64) bool { return level+n<<UnitBits <= 2*m.Capacity }

// Wait is how long a packet of n bytes had to wait, in ns, for a bucket of
// that level to let it conform, if nothing else came meanwhile.
func (m Meter) Wait(level, n uint64) uint64 {
	if m.Conforms(level, n) {
		return 0
	}
	cost := n << UnitBits
	if cost > m.Capacity {
		return m.drain(level)
	}
	return m.drain(level + cost - m.Capacity)
}

// LongestWait is how long a queue may hold a packet back, in ns.
func (m Meter) LongestWait() uint64 { return m.drain(m.Capacity - m.AtOnce) }

// Before is what has to leave a queue before a packet of n bytes that finds a
// level at which it conforms, in units: what is in the bucket, and does not leave at once.
func (m Meter) Before(level, n uint64) uint64 {
	var free uint64
	if cost := n << UnitBits; m.AtOnce > cost {
		free = m.AtOnce - cost
	}
	return level - min(level, free)
}

// Held is for how long it is held back, to the nearest ns.
func (m Meter) Held(level, n uint64) uint64 {
	return m.drainNearest(m.Before(level, n))
}

// Ahead reports whether a packet of n bytes goes ahead of so many units that
// are to leave before it: its flow has nothing among them, and has sent little.
// It is brought to the flow's own bucket, which is as big as the queue, and
// which 2^SparseBits bytes fill that go ahead. One that has to wait leaves more
// than that in it until its turn, so that none overtakes one of its own flow.
// inOrder says that all have to wait.
func (m Meter) Ahead(flow *Bucket, now, n, before uint64, inOrder bool) bool {
	queue := m.Capacity - m.AtOnce
	if n <= 1<<SparseBits && !inOrder {
		owed := m.Level(*flow, now) + queue>>UnitBits*n<<(UnitBits-SparseBits)
		if owed <= queue {
			*flow = m.charged(owed, now)
			return true
		}
	}
	*flow = m.charged(before+queue, now)
	return false
}

// drainNearest is drain_ns of bpf/bucket.h, with its rounding.
func (m Meter) drainNearest(units uint64) uint64 {
	const fast, left = 46, 13
	slope := m.Slope
	if slope>>fast > 0 {
		slope = slope >> left << left
	}
	low, carry := bits.Add64(units<<32, slope/2, 0)
	ns, _ := bits.Div64(units>>32+carry, low, slope)
	return ns
}

// Offer brings a packet of n bytes at now (ns) to the bucket. ect says that
// the packet may be marked instead of dropped.
func (m Meter) Offer(b *Bucket, now, n uint64, ect bool) Verdict {
	level, verdict := m.Level(*b, now), Pass
	owed := level + n<<UnitBits
	if !m.Conforms(level, n) {
		switch {
		case ect && m.Marks(level, n):
			verdict = Mark
		case level < m.Penalty:
			verdict, owed = Excess, m.Penalty
		default:
			return Excess
		}
	}
	*b = m.charged(owed, now)
	return verdict
}

// Owing is a bucket that is made to owe so many units at now (ns).
func (m Meter) Owing(units, now uint64) Bucket {
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
