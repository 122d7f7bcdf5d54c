package model

import (
	"math"
	"math/bits"
)

// Fair shares of a bucket by a clock: bpf/share.h has the same arithmetic, and struct share of bpf/abi.h explains it.
const (
	// FairBits: a fair unit is 2^-FairBits byte for each unit of weight.
	FairBits = 8
	// FairBins is the number of bins of each wheel.
	FairBins = 64

	tatCoarse           = 2  // TAT_COARSE of bpf/abi.h
	wholeBits           = 42 // FREE_WHOLE_BITS of bpf/abi.h
	freeBits, speedBits = 8, 8

	slowest, octaves, more = 2, 4, 3
	mostNS, restNS         = 150_000_000, 4 << 30
	alone, small           = 2, 64 << 10
	ownPackets, forgiven   = 2, 6
	roomPart               = 2
	roomOctaves, roomLeast = 3, 72
	manySharers, rush      = 1 << 15, 7
	creditBits             = 2
	mostAbove, stepBackNS  = 1 << 40, 1 << 40
)

// ShareParams are what the shares of a limit need besides its Meter.
type ShareParams struct {
	FineShift   uint8  // a bin of the fine wheel has 2^FineShift fair units,
	CoarseShift uint8  // and of the coarse one 2^CoarseShift
	Step        uint32 // ns between two advances of the clock
}

// ShareParams returns the parameters for fair shares of the bucket.
func (m Meter) ShareParams() (p ShareParams) {
	const (
		leastFine   = 12 + FairBits // three of the largest packets of segmentation offload are on the fine wheel
		fineBins    = 1024          // in what a sharer that is alone may be ahead
		coarseBins  = 16
		stepsOfC    = 16 // while a full bucket drains; or each ms
		leastStepNS = 1000
		mostStepNS  = 1_000_000
	)
	width := func(bins uint64) int { return bits.Len64(m.together() / bins) }
	p.FineShift = uint8(max(leastFine, width(fineBins)))
	p.CoarseShift = uint8(max(int(p.FineShift), width(coarseBins)))
	p.Step = uint32(max(min(m.Drain(m.Capacity)/stepsOfC, mostStepNS), leastStepNS))
	return p
}

// together is what all sharers together may be ahead, in fair units.
func (m Meter) together() uint64 {
	return min(m.fairUnits(mostNS), m.Capacity>>(UnitBits-FairBits+1))
}

// most is what a sharer that is alone may be ahead, in bytes: at most three quarters of the bucket, and of a small one less than
// half, so that a burst of another sharer finds room at once.
func (m Meter) most() uint32 {
	capacity := m.Capacity >> UnitBits
	return uint32(min(capacity/8*3+2*(max(capacity, small)-small), capacity/4*3, math.MaxUint32))
}

// credit is by how much light sharers may be ahead together, in fair units times weight.
func (m Meter) credit() uint64 { return m.Capacity >> (UnitBits - FairBits + creditBits) }

// A Share is the clock and the wheels of a bucket with fair shares. A new one has only its parameters.
type Share struct {
	ShareParams
	ByMember             bool // the sharers are members
	V, Last, Ahead, Rest uint64
	FreeFactor           uint64 // times the free bytes of the bucket is 2^wholeBits if it is empty
	Seen                 uint64 // the clock of the share above when this one was last advanced
	Skip                 uint64 // fair units that passed without a charge to a sharer, and that the clock has not skipped yet
	Credit               int64  // fair units times weight: what light sharers may still send
	More                 uint64 // fair units: what a sharer that is alone may be ahead beyond its part
	Most                 uint32 // bytes by which any sharer may be ahead
	Weight               int32
	Bins                 [2 * FairBins]uint32 // first those of the fine wheel
	Shifts               [2]uint8             // FineShift and CoarseShift for which the bins are
}

// A Sharer is the state of a sharer: its TAT on the fair clock, and the size in bytes of its largest packet since it became
// active. The zero Sharer is new.
type Sharer struct {
	TAT     uint64
	Largest uint32
}

// AheadOf returns how far a sharer is ahead of the clock, in fair units; 0 if it is not active.
func (s *Share) AheadOf(b Sharer) uint64 {
	if ahead := b.TAT&^(busy|tatCoarse) - s.V; ahead < FairBins<<s.Shifts[1] && s.Weight > 0 {
		return ahead
	}
	return 0
}

func (m Meter) fairUnits(ns uint64) uint64 {
	rate := m.RateUnits >> (UnitBits - FairBits)
	return ns*(rate>>32) + ns*(rate&(1<<32-1))>>32
}

func (m Meter) speed(level uint64) uint64 {
	capacity := m.Capacity >> UnitBits
	free := capacity - min(level, m.Capacity)>>UnitBits
	x := free << 16 * octaves / capacity
	x = (1<<16 + x&(1<<16-1)) << (x >> 16) >> (16 + slowest - speedBits)
	if m.Burst > 0 { // a queue
		x /= 2
	}
	if free > capacity-capacity/16 {
		x <<= more
	}
	return x
}

// NotYet is the Last (ns) of a new share, whose clock the first packet advances.
const NotYet = 1<<64 - 1<<41

// isLate reports whether the clock must be advanced to now (ns).
func (s *Share) isLate(now uint64) bool {
	return now-s.Last >= uint64(s.Step) && s.Last-now >= stepBackNS
}

// IsIdle reports whether no packet came for so long before now (ns) that nobody is active any more.
func (s *Share) IsIdle(now uint64) bool { return s.isLate(now) && now-s.Last > restNS }

// A bound is what the pool above leaves to a member that has fair shares itself.
type bound struct {
	v, weight uint64 // the clock above, and the weight of the member there
	units     uint64 // fair units that pass beside that clock
	may       uint64 // fair units by which the sharers of the member may be ahead together
	credit    uint64 // fair units by which light sharers of the member may be ahead together
	room      uint64 // of 1 << freeBits: what is left of that
}

// keepTime advances the clock to now (ns), if that was long ago. The level of the bucket is in units. The pool above may bound
// it.
func (s *Share) keepTime(m Meter, now, level uint64, b *bound) {
	if !s.isLate(now) {
		return
	}
	passed, together := now-s.Last, m.together()
	s.Last = now
	if shifts := [2]uint8{s.FineShift, s.CoarseShift}; s.Shifts != shifts || passed > restNS { // nobody is active
		shift := max(s.Shifts[1], s.CoarseShift)
		*s = Share{
			ShareParams: s.ShareParams, ByMember: s.ByMember, V: (s.V + 2*FairBins<<shift) &^ (1<<shift - 1), Last: now,
			Credit: math.MaxInt64, Shifts: shifts,
		}
	} else {
		units, speed := m.fairUnits(passed), m.speed(level)
		if !s.ByMember && s.Weight > manySharers {
			speed = max(speed, 1<<(speedBits+rush))
		}
		skip := min(s.Skip, units)
		s.Skip -= skip
		units = (units - skip) * speed >> speedBits
		if b != nil {
			x := b.room*roomOctaves + roomLeast
			faster := (1<<freeBits + x&(1<<freeBits-1)) << (x >> freeBits)
			most := min(b.v-s.Seen, mostAbove)*b.weight + b.units - min(b.units, skip)
			units = min(units, most*faster>>(freeBits+1))
		}
		s.Credit += int64(units)
		s.advance(units + s.Rest)
	}
	credit, more := m.credit(), alone*together
	if b != nil {
		s.Seen = b.v
		together = min(together, b.may)
		more = min(more, b.may-together) // else the sharers together would be beyond the share above
		credit = min(credit, b.credit)
	}
	s.FreeFactor = 1 << wholeBits / (max(m.Whole, m.Capacity) >> UnitBits)
	s.Credit = min(s.Credit, int64(credit))
	weight := uint64(max(s.Weight, 1))
	s.Ahead, s.More = together/weight, more/weight
	s.Most = m.most()
}

// advance advances the clock by fair units times weight, from bin to bin. After FairBins bins the fine wheel is empty, so the
// next ones are coarse.
func (s *Share) advance(units uint64) {
	coarse := uint64(1) << s.Shifts[1]
	leave := func(bin *uint32) {
		s.Weight -= int32(*bin)
		*bin = 0
	}
	for i := 0; i < 2*FairBins && s.Weight > 0; i++ {
		bin := coarse
		if i < FairBins {
			bin = 1 << s.Shifts[0]
		}
		weight, to := uint64(s.Weight), bin-s.V&(bin-1)
		if units/weight < to {
			s.V += units / weight
			units %= weight
			break
		}
		units -= to * weight
		if i < FairBins {
			leave(s.bin(s.V &^ tatCoarse))
		}
		if (s.V+to)&(coarse-1) == 0 {
			leave(s.bin(s.V | tatCoarse))
		}
		s.V += to
	}
	s.Rest = min(units, uint64(max(s.Weight, 0)))
}

// A ShareVerdict is how far a sharer is from its fair share.
type ShareVerdict uint8

const (
	WithinShare  ShareVerdict = iota
	BeyondMark                // so little beyond that a packet may be marked instead of refused
	BeyondSparse              // so little beyond that a packet of a sparse flow passes, unless the bucket is nearly full
	BeyondShare
)

// A Load is how much a sharer sends, beside what it may be ahead.
type Load uint8

const (
	Heavy  Load = iota // or a pool without shares is between
	Modest             // it is ahead by at most half
	Light              // with the packet it is ahead by at most an eighth, or it is not active and the packet is small
)

// Judge judges a packet of n bytes of a sharer. The level of the bucket is in units. It forgives most of a debt that is from a
// time with fewer sharers. A small packet of a sharer that is not active is always within its share. Any other one must leave
// room for such ones. In a pool above another one, the load is that of the sharer below: if it is modest, the packet may be
// ahead by twice as much here, so that others in that pool do not take all its room; if it is light, the packet is always within
// its share. Light sharers have a credit, which is what the clock leaves to all sharers. So a flood of new sharers is not light
// for long. A packet must leave as much of the credit to smaller ones. Only shares of members bound the clock below, and so its
// credit. Judge sets the load to that for the pool above.
func (s *Share) Judge(m Meter, b *Sharer, weight, n, level uint64, load *Load) ShareVerdict {
	ahead, may, below := s.AheadOf(*b)*weight, s.mayBeAhead(weight), *load
	small := ahead == 0 && n <= 2*SharedBytes || below == Light && s.ByMember
	*load = Modest
	if (small || ahead+n<<FairBits <= may/8) && s.Credit > int64(2*n<<FairBits) {
		*load = Light
	}
	if small {
		return WithinShare
	}
	less := forgiven * (may + uint64(b.Largest)<<FairBits)
	own := n
	most := may + may/4
	if below != Heavy {
		may, own = 2*may, max(n, 2*SharedBytes)
	}
	may = max(may, own*ownPackets<<FairBits)
	free := s.free(m, level+min(n<<UnitBits, m.Capacity/roomPart))
	may = may >> freeBits * free
	if *load == Modest && ahead > may/2 {
		*load = Heavy
	}
	switch {
	case ahead <= may && free > 0:
		return WithinShare
	case ahead > less:
		old := *b
		b.TAT = s.onWheel(less / weight)
		s.move(old.TAT, b.TAT, weight)
	case ahead <= 2*may:
		return BeyondMark
	}
	*load = Heavy // its rule may pass it all the same
	if ahead <= most && free >= 1<<freeBits/2 {
		return BeyondSparse
	}
	return BeyondShare
}

// mayBeAhead returns by how many fair units times weight a sharer may be ahead.
func (s *Share) mayBeAhead(weight uint64) uint64 {
	return min(s.Ahead*weight+s.More*weight*weight/max(uint64(max(s.Weight, 0)), weight), uint64(s.Most)<<FairBits)
}

// free returns which part of a bucket is free, of 1 << freeBits for a quarter of it.
func (s *Share) free(m Meter, level uint64) uint64 {
	if m.Whole != 0 { // the parameters are for the whole capacity
		level = level / (m.Capacity >> 10) * (m.Whole >> 10)
		m.Capacity = m.Whole
	}
	return min((m.Capacity-min(level, m.Capacity))>>UnitBits*s.FreeFactor>>(wholeBits-freeBits-2), 1<<freeBits)
}

// Charge charges a packet of n bytes to a sharer.
func (s *Share) Charge(b *Sharer, weight, n uint64) {
	ahead, old := s.AheadOf(*b), b.TAT
	if ahead == 0 {
		b.Largest = 0
	}
	b.Largest = max(b.Largest, uint32(n))
	b.TAT = s.onWheel(ahead + (n<<FairBits+weight-1)/weight)
	s.move(old, b.TAT, weight)
}

func (s *Share) onWheel(ahead uint64) uint64 {
	tat := (s.V + min(ahead, (FairBins-2)<<s.Shifts[1]) + busy + tatCoarse) &^ (busy | tatCoarse)
	if tat>>s.Shifts[0]-s.V>>s.Shifts[0] < FairBins {
		return tat
	}
	return tat | tatCoarse
}

func (s *Share) bin(tat uint64) *uint32 {
	if tat&tatCoarse != 0 {
		return &s.Bins[FairBins+tat>>s.Shifts[1]&(FairBins-1)]
	}
	return &s.Bins[tat>>s.Shifts[0]&(FairBins-1)]
}

// weighs reports whether the weight of a sharer with that TAT is in a bin: it may be until the clock leaves the bin.
func (s *Share) weighs(tat uint64) bool {
	shift := s.Shifts[0]
	if tat&tatCoarse != 0 {
		shift = s.Shifts[1]
	}
	return tat != 0 && tat>>shift-s.V>>shift < FairBins && s.Weight > 0
}

func (s *Share) move(old, tat, weight uint64) {
	if s.weighs(old) {
		*s.bin(old) -= uint32(weight)
	} else {
		s.Weight += int32(weight)
	}
	*s.bin(tat) += uint32(weight)
}

// AtRate reports whether the level of a bucket is as high as it gets while more is offered than the rate. Fair shares keep it
// about half full.
func AtRate(level, capacity uint64, shares bool) bool {
	if shares {
		return level >= capacity/16*5
	}
	return level >= capacity/16*15
}
