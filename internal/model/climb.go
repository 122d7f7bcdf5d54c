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
	Others         []Other // to which packets must conform, too
	Share          *Share  // nil for none
	Sharer         *Sharer // the packet's
	Weight         uint64  // of the sharer
	light          bool    // the packet is to be charged to the credit of light sharers
}

// NoStage is the index of no stage.
const NoStage = -1

// A Passage is the outcome for a packet in a rule and the pools above it.
type Passage struct {
	Outcome              // of the rule; Verdict, Wait and Departure are those of all stages together
	Refuses    int       // the stage that refuses the packet, or NoStage
	Guaranteed int       // the stage above which the packet is guaranteed, or NoStage
	Beyond     bool      // the stage that refuses the packet does so because of its fair share
	Other      int       // the other limit by which the stage refuses the packet, or the rule has it as excess; or NoStage
	At         []Outcome // the levels and the departure after the packet, by stage; a pool that passes it may delay or mark it
}

// Climb returns the outcome for a packet in a rule, the first stage, and in the pools above it, the lowest one first. The packet
// passes if all of them conform and it is within its fair shares. A packet that is guaranteed passes the pools above, whatever
// their levels are. Climb advances the clocks of shares and forgives debts of sharers, and charges nothing.
func Climb(stages []Stage, p Packet) Passage {
	rule := &stages[0]
	to := Passage{Refuses: NoStage, Guaranteed: NoStage, Other: NoStage}
	for i := range stages {
		to.At = append(to.At, stages[i].State.uncharged(p))
	}
	if to.Outcome = to.At[0]; rule.RateUnits != 0 {
		to.Outcome = rule.Decide(rule.State, p)
	}
	if to.Verdict != Drop {
		to.Other = rule.refusing(p)
	}
	load, share := Heavy, WithinShare
	if to.Other != NoStage {
		to.Outcome = to.At[0]
		to.Wait = rule.Others[to.Other].wait(p)
		if to.Excess = true; rule.Excess != policy.Pass {
			to.Verdict = Drop
		}
	} else if to.Verdict != Drop { // else nothing more needs to be asked
		share = JudgeStage(stages, 0, p, &load)
	}
	if share == BeyondShare {
		to.Outcome = to.At[0]
		if to.Excess = true; rule.Excess != policy.Pass {
			to.Verdict = Drop
		}
	}
	if to.Verdict == Drop {
		to.Refuses, to.Beyond = 0, share == BeyondShare
	} else if to.Other == NoStage && rule.Guarantees(p) {
		to.Guaranteed = 0
	}
	for i := 1; i < len(stages) && to.Guaranteed == NoStage && to.Refuses == NoStage; i++ {
		to.ask(stages, i, p, &load)
	}
	if above := to.Refuses; above > 0 { // nothing is charged
		to.Outcome = to.At[0]
		to.Verdict, to.Excess, to.Wait = Drop, true, stages[above].Wait(stages[above].State.Level, p.Bytes)
		if to.Other != NoStage {
			to.Wait = stages[above].Others[to.Other].wait(p)
		}
	}
	to.At[0] = to.Outcome
	switch {
	case to.Refuses != NoStage:
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
		at := &to.At[i]
		at.Level = indebted(at.Level, p.Bytes<<UnitBits)
		if stages[i].Excess == policy.Delay {
			to.delay(&stages[i], at, p)
			turn = max(turn, p.Time+at.Wait)
			p.Departure = min(p.Departure, max(turn, at.Departure))
			to.Departure = max(turn, p.Departure)
		}
		if at.Verdict == Mark {
			to.Verdict = Mark
		}
	}
	if share == BeyondMark {
		to.Verdict = Mark
	}
	return to
}

// ChargeSharer charges the packet to its sharer in a stage that has fair shares. Packets that pass beyond the limit of their
// rule are not charged to sharers. For those that are guaranteed, the clock is slower instead.
func (to *Passage) ChargeSharer(stages []Stage, i int, n uint64) {
	s := &stages[i]
	switch {
	case to.Refuses != NoStage || s.Share == nil || i == 0 && to.Excess && s.Excess == policy.Pass:
	case to.Guaranteed != NoStage && to.Guaranteed < i:
		s.Share.Skip += n << FairBits
	default:
		if s.Share.Charge(s.Sharer, s.Weight, n); s.light {
			s.Share.Credit -= int64(n << FairBits)
		}
	}
}

// ChargesGuarantee reports whether the packet is charged to the guarantee of a stage that has one.
func (to *Passage) ChargesGuarantee(i int) bool {
	return to.Refuses == NoStage && to.Guaranteed != NoStage && to.Guaranteed <= i
}

// ask asks a pool.
func (to *Passage) ask(stages []Stage, i int, p Packet, load *Load) {
	pool := &stages[i]
	if level := pool.State.Level; !pool.Conforms(level, p.Bytes) {
		if pool.Excess != policy.ECN || !p.ECT || level+p.Bytes<<UnitBits > 2*pool.Capacity {
			to.Refuses, to.Other = i, NoStage
			return
		}
		to.At[i].Verdict = Mark
	}
	switch JudgeStage(stages, i, p, load) {
	case BeyondShare:
		to.Refuses, to.Beyond, to.Other = i, true, NoStage
		return
	case BeyondMark:
		to.At[i].Verdict = Mark
	}
	if other := pool.refusing(p); other != NoStage {
		to.Refuses, to.Other = i, other
		return
	}
	if pool.Guarantees(p) {
		to.Guaranteed = i
	}
}

func (s *Stage) Guarantees(p Packet) bool {
	return s.Guarantee != nil && s.Guarantee.Conforms(s.GuaranteeLevel, p.Bytes) &&
		(s.Members == 0 || s.TogetherLevel == 0 || s.TogetherLevel+Together(p.Bytes, s.Members) <= s.Guarantee.Capacity)
}

// Together returns the units that a packet of n bytes counts in the bucket of all keys of a guarantee together. It rounds up.
func Together(n, members uint64) uint64 { return n<<UnitBits/members + 1 }

// JudgeStage judges a packet by the shares of a stage. Only a stage that marks excess packets marks packets beyond a share, and only
// sparse-first lets those of sparse flows pass.
func JudgeStage(stages []Stage, i int, p Packet, load *Load) ShareVerdict {
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
	marks := p.ECT && (s.Excess == policy.ECN || s.Excess == policy.Delay && s.ECNAbove != policy.Never)
	switch {
	case verdict == WithinShare, verdict == BeyondMark && marks:
		return verdict
	case verdict <= BeyondSparse && s.Order == policy.SparseFirst:
		if _, sparse := s.flowLevel(s.State, p.Bytes, 0); sparse {
			return WithinShare
		}
	}
	return BeyondShare
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
	a, w, passed := above.Share, above.Weight, min(now-s.Share.Last, restNS)
	b := bound{v: a.V, weight: w, may: max(a.mayBeAhead(w), SharedBytes*ownPackets<<FairBits)}
	b.credit = min(b.may/2, above.credit())
	free := a.free(above.Meter, above.State.Level)
	may, ahead := b.may>>freeBits*free, a.AheadOf(*above.Sharer)*w
	b.room = min((may-min(ahead, may))<<freeBits/max(may, 1), free)
	if a.Weight <= 0 {
		b.units = above.fairUnits(passed) // nobody is active there, so the clock stands still
	}
	if g := s.Guarantee; g != nil {
		b.units += g.fairUnits(passed)
		b.may += g.Capacity >> (UnitBits - FairBits)
		b.room = max(b.room, (g.Capacity-min(s.GuaranteeLevel, g.Capacity))/(g.Capacity>>freeBits))
	}
	return &b
}

// delay extends the delay of a packet to that of a pool's queue.
func (to *Passage) delay(pool *Stage, at *Outcome, p Packet) {
	marks := at.Verdict == Mark
	if *at = pool.queue(*at, pool.State, p); marks {
		at.Verdict = Mark
	}
	if at.Wait > to.Wait {
		to.Wait = at.Wait
		if to.Verdict == Pass {
			to.Verdict = Delay
		}
	}
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

// Charge charges units to a bucket whatever its level is.
func (m Meter) Charge(b *Bucket, now, units uint64) {
	m.Raise(b, indebted(m.Level(*b, now), units), now)
}
