package model

import (
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A Stage is a rule or a pool, with the state of its buckets when a packet arrives.
type Stage struct {
	*Limit                 // without a rate for a rule that has only its pools
	State                  // of the bucket
	Guarantee      *Limit  // of conforming packets that pass all pools above; nil for none
	GuaranteeLevel uint64  // units
	Members        uint64  // of a guarantee of each key: how many there are at most; else 0
	TogetherLevel  uint64  // units: with Members, of the bucket in which all keys together count as one of them
	Share          *Share  // nil for none
	Sharer         *Sharer // the packet's
	Weight         uint64  // of the sharer
	light          bool    // the packet is to be charged to the credit of light sharers
}

// NoStage is the index of no stage.
const NoStage = -1

// A Passage is the outcome for a packet in a rule and the pools above it.
type Passage struct {
	Outcome             // of the rule; Verdict, Wait and Departure are those of all stages together
	Refuses    int      // the stage that refuses the packet, or NoStage
	Guaranteed int      // the stage above which the packet is guaranteed, or NoStage
	Beyond     bool     // the stage that refuses the packet does so because of its fair share
	Levels     []uint64 // units: of the bucket of each stage after the packet,
	Flows      []uint64 // and of the bucket of its flow there, with sparse-first
	Delays     []bool   // by stage: a pool that passes the packet delays it
	Marks      []bool   // by stage: a pool that passes the packet marks it
}

// Climb returns the outcome for a packet in a rule, the first stage, and in the pools above it, the lowest one first.
// The packet passes if all of them conform and it is within its fair shares. A packet that is guaranteed passes the
// pools above, whatever their levels are. Climb advances the clocks of shares and forgives debts of sharers, and charges nothing.
func Climb(stages []Stage, p Packet) Passage {
	rule := &stages[0]
	to := Passage{
		Outcome: Outcome{Departure: p.Time}, Refuses: NoStage, Guaranteed: NoStage,
		Delays: make([]bool, len(stages)), Marks: make([]bool, len(stages)),
	}
	load := Heavy
	share := judge(stages, 0, p, &load)
	if rule.RateUnits != 0 {
		to.Outcome = rule.Decide(rule.State, p)
	}
	if share == BeyondShare {
		to.Outcome = Outcome{Excess: true, Departure: p.Time, Level: rule.State.Level, Flow: rule.State.Flow}
		if rule.Excess != policy.Pass {
			to.Verdict = Drop
		}
	}
	beyond := share == BeyondShare && to.Verdict == Drop // no pool needs to be asked
	if rule.guarantees(p) && !beyond {
		to.Guaranteed = 0
	}
	for i := 1; i < len(stages) && to.Guaranteed == NoStage && to.Refuses == NoStage && !beyond; i++ {
		to.ask(stages, i, p, &load)
	}
	// Of a rule that marks or passes excess packets, the pool is what refuses.
	if to.Verdict == Drop && (to.Refuses == NoStage || rule.Excess == policy.Drop || rule.Excess == policy.Delay) {
		to.Refuses, to.Beyond = 0, share == BeyondShare
	}
	for i := range stages {
		to.Levels, to.Flows = append(to.Levels, stages[i].State.Level), append(to.Flows, stages[i].State.Flow)
	}
	to.Levels[0], to.Flows[0] = to.Outcome.Level, to.Outcome.Flow
	switch {
	case to.Refuses > 0: // nothing is charged
		to.Levels[0], to.Flows[0] = rule.State.Level, rule.State.Flow
		to.Outcome = Outcome{
			Verdict: Drop, Excess: true, Departure: p.Time, Level: rule.State.Level, Flow: rule.State.Flow,
			Wait: stages[to.Refuses].Wait(stages[to.Refuses].State.Level, p.Bytes),
		}
		return to
	case to.Refuses == 0:
		return to
	case to.Excess:
		to.Wait = 0 // the rule marks or passes it without a delay
	}
	turn := p.Time
	if rule.Excess == policy.Delay {
		p.Departure = to.Departure // so far, the queue of the rule keeps the sender's time
	}
	if to.Wait > 0 {
		turn = to.Departure
	}
	for i := 1; i < len(stages); i++ {
		to.Levels[i] = indebted(to.Levels[i], p.Bytes<<UnitBits)
		if stages[i].Excess == policy.Delay {
			queued := to.delay(&stages[i], i, p)
			turn = max(turn, p.Time+queued.Wait)
			p.Departure = min(p.Departure, max(turn, queued.Departure))
			to.Departure = max(turn, p.Departure)
		}
	}
	if slices.Contains(to.Marks, true) || share == BeyondMark {
		to.Verdict = Mark
	}
	return to
}

// ChargeSharer charges the packet to its sharer in a stage that has fair shares. Packets that pass beyond the limit of
// their rule are not charged to sharers. For those that are guaranteed, the clock is slower instead.
func (to *Passage) ChargeSharer(stages []Stage, i int, n uint64) {
	s := &stages[i]
	switch {
	case to.Refuses != NoStage || s.Share == nil:
	case i == 0:
		if !to.Excess || s.Excess != policy.Pass {
			s.chargeSharer(n)
		}
	case to.Guaranteed == NoStage || to.Guaranteed >= i:
		s.chargeSharer(n)
	default:
		s.Share.Skip += n << FairBits
	}
}

func (s *Stage) chargeSharer(n uint64) {
	s.Share.Charge(s.Sharer, s.Weight, n)
	if s.light {
		s.Share.Credit -= int64(n << FairBits)
	}
}

// ChargesGuarantee reports whether the packet is charged to the guarantee of a stage that has one.
func (to *Passage) ChargesGuarantee(i int) bool {
	return to.Refuses == NoStage && to.Guaranteed != NoStage && to.Guaranteed <= i
}

// ask asks a pool.
func (to *Passage) ask(stages []Stage, i int, p Packet, load *Load) {
	pool := &stages[i]
	marks := pool.Excess == policy.ECN && p.ECT
	switch {
	case pool.Conforms(pool.State.Level, p.Bytes):
	case marks && pool.State.Level+p.Bytes<<UnitBits <= 2*pool.Capacity:
		to.Marks[i] = true
	default:
		to.Refuses = i
		return
	}
	switch judge(stages, i, p, load) {
	case BeyondShare:
		to.Refuses, to.Beyond = i, true
		return
	case BeyondMark:
		to.Marks[i] = true
	}
	if pool.guarantees(p) {
		to.Guaranteed = i
	}
}

func (s *Stage) guarantees(p Packet) bool {
	return s.Guarantee != nil && s.Guarantee.Conforms(s.GuaranteeLevel, p.Bytes) &&
		(s.Members == 0 || s.TogetherLevel == 0 || s.TogetherLevel+together(p.Bytes, s.Members) <= s.Guarantee.Capacity)
}

// together returns the units that a packet of n bytes counts in the bucket of all keys of a guarantee together. It rounds up.
func together(n, members uint64) uint64 { return n<<UnitBits/members + 1 }

// judge judges a packet by the shares of a stage. Only a stage that marks excess packets marks packets beyond a share, and
// only sparse-first lets those of sparse flows pass.
func judge(stages []Stage, i int, p Packet, load *Load) ShareVerdict {
	s := &stages[i]
	if s.Share == nil {
		*load = Heavy // nothing here bounds the credit of the sharer below
		return WithinShare
	}
	if s.Share.isLate(p.Time) {
		keepTimes(stages, p.Time)
	}
	verdict := s.Share.Judge(s.Meter, s.Sharer, s.Weight, p.Bytes, s.State.Level, load)
	s.light = *load == Light
	switch {
	case verdict == WithinShare, verdict == BeyondMark && p.ECT && s.marksExcess():
		return verdict
	case verdict <= BeyondSparse && s.Order == policy.SparseFirst && s.isSparse(s.State, p.Bytes):
		return WithinShare
	}
	return BeyondShare
}

// marksExcess reports whether packets a little beyond a fair share are marked.
func (s *Stage) marksExcess() bool {
	return s.Excess == policy.ECN || s.Excess == policy.Delay && s.ECNAbove != policy.Never
}

// keepTimes advances the clocks of all stages that are late, from the top down. Packets that are refused do not get to the
// stages above.
func keepTimes(stages []Stage, now uint64) {
	var above *Stage // the next one that bounds those below
	for i := range slices.Backward(stages) {
		s := &stages[i]
		switch {
		case s.Share != nil:
			s.Share.keepTime(s.Meter, now, s.State.Level, s.bound(above, now))
			above = s
		case s.Guarantee != nil: // its packets pass the pools above
			above = nil
		}
	}
}

// bound returns what the next pool with shares above leaves to a stage; nil for no bound.
func (s *Stage) bound(above *Stage, now uint64) *bound {
	if above == nil || !above.Share.ByMember {
		return nil
	}
	b, passed := above.Share.leaves(above.Meter, *above.Sharer, above.Weight, above.State.Level), min(now-s.Share.Last, restNS)
	if above.Share.Weight <= 0 {
		b.units = above.fairUnits(passed) // nobody is active there, so the clock stands still
	}
	if g := s.Guarantee; g != nil {
		b.units += g.fairUnits(passed)
		b.may += g.Capacity >> (UnitBits - FairBits)
		if s.GuaranteeLevel < g.Capacity {
			b.room = max(b.room, (g.Capacity-s.GuaranteeLevel)/(g.Capacity>>freeBits))
		}
	}
	return &b
}

// delay extends the delay of a packet to that of a pool's queue. i is the pool's index.
func (to *Passage) delay(pool *Stage, i int, p Packet) (queued Outcome) {
	queued = pool.queue(Outcome{Departure: p.Time, Flow: pool.State.Flow}, pool.State, p)
	to.Flows[i] = queued.Flow
	to.Delays[i], to.Marks[i] = queued.Wait > 0, to.Marks[i] || queued.Verdict == Mark
	if queued.Wait > to.Wait {
		to.Wait = queued.Wait
		if to.Verdict == Pass {
			to.Verdict = Delay
		}
	}
	return queued
}

// maxDebt is more than guarantees can reach: levels must stay below 2^62 units.
const maxDebt = 1 << 60

// indebted returns a level after a charge of units that no limit can prevent.
func indebted(level, units uint64) uint64 {
	if level > maxDebt {
		return level
	}
	return level + units
}

// Charge charges a packet of n bytes to a bucket whatever its level is.
func (m Meter) Charge(b *Bucket, now, n uint64) {
	m.raise(b, indebted(m.Level(*b, now), n<<UnitBits), now)
}

// ChargeTogether charges a packet of n bytes, whose key is one of members, to the bucket of all keys of a guarantee
// together.
func (m Meter) ChargeTogether(b *Bucket, now, n, members uint64) {
	m.raise(b, indebted(m.Level(*b, now), together(n, members)), now)
}
