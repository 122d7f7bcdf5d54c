package replay

import (
	"cmp"
	"math"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Count is packets and their bytes.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func (c *Count) add(bytes uint64) {
	c.Packets++
	c.Bytes += bytes
}

// A Summary is what became of all packets of a trace. Offered are those that
// matched a rule; they were passed, some of them delayed or marked, or dropped.
// Excess is what did not conform, whatever became of it.
type Summary struct {
	Offered, Passed, Excess, Dropped, Delayed, Marked Count
	// Unlimited packets are no IP, or neighbour discovery; those outside match no rule.
	Unlimited, Outside Count
	// Of the kernel engine: packets whose bucket could not be updated, and those
	// for whose sharer the table had no room.
	Unsure, Spare Count

	First, Last uint64 // ns: the earliest and the latest packet
	LongestWait uint64 // ns, of a packet that was delayed

	limits  Limits
	waited  float64 // ns, of all that were delayed
	highest uint64  // units
	worst   Drought
	free    []model.Meter // each rule's rate, with the largest bucket there is
	needed  uint64        // units, of a bucket that loses nothing
	beyond  bool          // not even the largest bucket would do
	sharers map[sharer]*account
	sweepAt int
}

// An account is what a summary keeps of a sharer.
type account struct {
	free    model.Bucket // if nothing had been excess
	excess  Count
	since   uint64 // ns: when the last packet left that passed; before any did, when the first was dropped
	known   bool   // there is such a time
	dropped bool   // packets were dropped since
}

// A Drought is a time in which nothing of a bucket's left, and something was dropped.
type Drought struct {
	From uint64 // ns
	NS   uint64
}

// NewSummary makes one of no packets.
func NewSummary(l Limits) *Summary {
	s := &Summary{limits: l, sharers: map[sharer]*account{}, sweepAt: firstSweep}
	for _, r := range l.Rules {
		if r.Rate != policy.Unlimited {
			s.free = append(s.free, model.New(uint64(r.Rate), policy.MaxCapacity, false, 0))
		} else {
			s.free = append(s.free, model.Meter{})
		}
	}
	return s
}

// Add counts a packet.
func (s *Summary) Add(r Result) {
	if s.Packets() == 0 {
		s.First, s.Last = r.Time, r.Time
	}
	s.First, s.Last = min(s.First, r.Time), max(s.Last, r.Time)
	switch {
	case !r.Limited:
		s.Unlimited.add(r.Bytes)
		return
	case r.Rule == NoRule:
		s.Outside.add(r.Bytes)
		return
	}
	s.Offered.add(r.Bytes)
	if r.Verdict == Drop {
		s.Dropped.add(r.Bytes)
	} else {
		s.Passed.add(r.Bytes)
	}
	if r.Verdict == Mark {
		s.Marked.add(r.Bytes)
	}
	if r.Held > 0 {
		s.Delayed.add(r.Bytes)
		s.LongestWait = max(s.LongestWait, r.Held)
		s.waited += float64(r.Held)
	}
	if r.Unsure {
		s.Unsure.add(r.Bytes)
	}
	if r.Spare {
		s.Spare.add(r.Bytes)
	}
	s.highest = max(s.highest, r.Level)
	if s.limits.Rules[r.Rule].Rate == policy.Unlimited {
		return
	}
	a := s.account(r.sharer, r.Time)
	if r.Excess {
		s.Excess.add(r.Bytes)
		a.excess.add(r.Bytes)
	}
	s.drought(a, r)
	s.need(a, r)
}

// Packets is how many there were, matched or not.
func (s *Summary) Packets() uint64 {
	return s.Offered.Packets + s.Unlimited.Packets + s.Outside.Packets
}

func (s *Summary) drought(a *account, r Result) {
	dropped := r.Verdict == Drop
	if dropped && !a.known {
		a.since, a.known = r.Time, true
	}
	a.dropped = a.dropped || dropped
	// A clock that steps back makes none, and neither does a drop while others wait to leave.
	at := r.Leaves()
	if a.dropped && at >= a.since && (at-a.since > s.worst.NS || s.Dropped.Packets == 1) {
		s.worst = Drought{From: a.since, NS: at - a.since}
	}
	if !dropped {
		// One that goes ahead of others leaves before them.
		a.since, a.known, a.dropped = max(a.since, at), true, false
	}
}

// need offers the packet to a bucket that loses nothing. One that it found
// empty would have passed whatever the capacity; another fits only if the
// capacity holds what was there, and the packet.
func (s *Summary) need(a *account, r Result) {
	meter := s.free[r.Rule]
	level := meter.Level(a.free, r.Time)
	owed := level + r.Bytes<<model.UnitBits
	if owed > meter.Capacity {
		s.beyond = true
		return
	}
	if level > 0 {
		s.needed = max(s.needed, owed)
	}
	a.free = meter.Owing(owed, r.Time)
}

func (s *Summary) account(who sharer, now uint64) *account {
	a := s.sharers[who]
	if a == nil {
		if len(s.sharers) >= s.sweepAt {
			s.sweep(now)
		}
		a = &account{}
		s.sharers[who] = a
	}
	return a
}

// sweep forgets those who have drained and never had excess. Those who had are
// not many: each sent more than a bucket holds.
func (s *Summary) sweep(now uint64) {
	for who, a := range s.sharers {
		if a.excess.Packets == 0 && drained(s.free[who.rule], a.free, now) {
			delete(s.sharers, who)
		}
	}
	s.sweepAt = max(firstSweep, 2*len(s.sharers))
}

// HighestLevelBytes is the most that any bucket ever owed, rounded up.
func (s *Summary) HighestLevelBytes() uint64 { return model.Bytes(s.highest) }

// MeanWait is how long those that were delayed waited in the mean, in ns.
func (s *Summary) MeanWait() uint64 {
	return uint64(math.Round(s.waited / float64(max(1, s.Delayed.Packets))))
}

// LongestDrought is the longest time between the leaving of two packets of a
// bucket, with one between them that was dropped. Before the first that passes
// it begins with the first that is dropped, and it ends with the last of all.
func (s *Summary) LongestDrought() Drought { return s.worst }

// LosslessCapacity is the smallest capacity in bytes, of a queue and what leaves
// at once together, with which no packet had been excess: the highest that a bucket gets which loses nothing. It is 0 if
// each packet came to an empty bucket, so that any capacity does; and not known
// if it were more than the largest capacity there is.
func (s *Summary) LosslessCapacity() (bytes uint64, known bool) {
	return model.Bytes(s.needed), !s.beyond
}

// A Sufferer is a sharer who had excess.
type Sufferer struct {
	Sharer string `json:"sharer"`
	Excess Count  `json:"excess"`
}

// Sufferers are those sharers who had the most bytes of excess, up to a number
// of them: nil where one bucket is for all.
func (s *Summary) Sufferers(most int) []Sufferer {
	if len(s.limits.Rules) == 1 && s.limits.Rules[0].Each.Kind == policy.EachAll {
		return nil
	}
	all, top := []Sufferer{}, []sharer(nil)
	for who, a := range s.sharers {
		if a.excess.Packets > 0 {
			top = append(top, who)
		}
	}
	slices.SortFunc(top, func(a, b sharer) int {
		return cmp.Or(cmp.Compare(s.sharers[b].excess.Bytes, s.sharers[a].excess.Bytes), cmp.Compare(s.limits.name(a), s.limits.name(b)))
	})
	for _, who := range top[:min(most, len(top))] {
		all = append(all, Sufferer{Sharer: s.limits.name(who), Excess: s.sharers[who].excess})
	}
	return all
}
