package replay

import (
	"cmp"
	"math"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Count is packets and their bytes.
type Count struct{ Packets, Bytes uint64 }

func (c *Count) add(bytes uint64) {
	c.Packets++
	c.Bytes += bytes
}

// A Summary is what happened to all packets of a trace. Offered are those that
// matched a rule; they were passed, some of them delayed or marked, or dropped.
// Excess packets did not conform, whatever their verdict.
type Summary struct {
	Offered, Passed, Excess, Dropped, Delayed, Marked Count
	// Unlimited packets are no IP, or neighbour discovery; those outside match no rule.
	Unlimited, Outside Count
	// Of the kernel engine: packets whose bucket could not be updated in time, and
	// those charged to a spill bucket.
	Contended, Spilled Count

	First, Last uint64 // ns: the earliest and the latest packet
	LongestDelay uint64 // ns, of a packet that was delayed

	// LongestGap is the longest time between the departures of two packets of a bucket
	// with a dropped packet between them. Before the first departure it begins with the
	// first dropped packet, and it ends with the last packet of all.
	LongestGap Gap

	limits   Limits
	waited   float64        // ns, of all that were delayed
	highest  uint64         // units
	free     []*model.Limit // each rule's rate, with the largest bucket there is
	needed   uint64         // units, of a bucket that loses nothing
	beyond   bool           // not even the largest bucket would do
	accounts table[account]
}

// An account is what a summary keeps of a bucket key.
type account struct {
	free    model.Bucket // if nothing had been excess
	excess  Count
	since   uint64 // ns: when the last packet departed; before any did, when the first was dropped
	known   bool   // there is such a time
	dropped bool   // packets were dropped since
}

// A Gap is a time in which no packet of a bucket departed, and one was dropped.
type Gap struct {
	From uint64 // ns
	NS   uint64
}

// NewSummary makes one of no packets.
func NewSummary(l Limits) *Summary {
	s := &Summary{limits: l, accounts: newTable[account]()}
	for _, r := range l.Rules {
		s.free = append(s.free, model.NewLimit(policy.Rule{Rate: r.Rate, Capacity: policy.MaxCapacity}))
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
	if r.Verdict == model.Drop {
		s.Dropped.add(r.Bytes)
	} else {
		s.Passed.add(r.Bytes)
	}
	if r.Verdict == model.Mark {
		s.Marked.add(r.Bytes)
	}
	if r.Wait > 0 {
		s.Delayed.add(r.Bytes)
		s.LongestDelay = max(s.LongestDelay, r.Wait)
		s.waited += float64(r.Wait)
	}
	if r.Contended {
		s.Contended.add(r.Bytes)
	}
	if r.Spilled {
		s.Spilled.add(r.Bytes)
	}
	s.highest = max(s.highest, r.Level)
	if s.limits.Rules[r.Rule].Rate == policy.Unlimited {
		return
	}
	// Keys that had excess are not many: each sent more than a bucket holds.
	s.accounts.sweep(func(k bucketKey, a *account) bool {
		return a.excess.Packets == 0 && drained(s.free[k.rule], a.free, r.Time)
	})
	a := s.accounts.get(r.key)
	if r.Excess {
		s.Excess.add(r.Bytes)
		a.excess.add(r.Bytes)
	}
	s.gap(a, r)
	s.need(a, r)
}

// Packets is how many there were, matched or not.
func (s *Summary) Packets() uint64 {
	return s.Offered.Packets + s.Unlimited.Packets + s.Outside.Packets
}

func (s *Summary) gap(a *account, r Result) {
	dropped := r.Verdict == model.Drop
	if dropped && !a.known {
		a.since, a.known = r.Time, true
	}
	a.dropped = a.dropped || dropped
	// A clock that steps back makes no gap, and neither does a drop while other packets are queued.
	at := r.Departure()
	if a.dropped && at >= a.since && (at-a.since > s.LongestGap.NS || s.Dropped.Packets == 1) {
		s.LongestGap = Gap{From: a.since, NS: at - a.since}
	}
	if !dropped {
		// A packet of a sparse flow departs before those that are queued.
		a.since, a.known, a.dropped = max(a.since, at), true, false
	}
}

// need offers the packet to a bucket that drops nothing. A packet that finds it
// empty conforms whatever the capacity.
func (s *Summary) need(a *account, r Result) {
	o := s.free[r.Rule].Offer(&a.free, nil, false, model.Packet{Time: r.Time, Bytes: r.Bytes})
	s.beyond = s.beyond || o.Excess
	if !o.Excess && o.Level > r.Bytes<<model.UnitBits {
		s.needed = max(s.needed, o.Level)
	}
}

// HighestLevelBytes is the highest level of any bucket, rounded up.
func (s *Summary) HighestLevelBytes() uint64 { return model.Bytes(s.highest) }

// MeanDelay is how long delayed packets were queued in the mean, in ns.
func (s *Summary) MeanDelay() uint64 {
	return uint64(math.Round(s.waited / float64(max(1, s.Delayed.Packets))))
}

// LosslessCapacity is the smallest capacity in bytes, of burst and queue together,
// with which no packet would have been excess: the highest level of a bucket that
// drops nothing. It is 0 if each packet came to an empty bucket, so that any capacity
// is enough; it is not known if it is above the largest capacity that a rule can have.
func (s *Summary) LosslessCapacity() (bytes uint64, known bool) {
	return model.Bytes(s.needed), !s.beyond
}

// A KeyExcess is the excess of a bucket key.
type KeyExcess struct {
	Key    string
	Excess Count
}

// MostExcess are the bucket keys with the most bytes of excess, up to a number of
// them: nil where all packets have one bucket.
func (s *Summary) MostExcess(most int) []KeyExcess {
	if len(s.limits.Rules) == 1 && s.limits.Rules[0].Each.Kind == policy.EachAll {
		return nil
	}
	all := []KeyExcess{}
	for key, a := range s.accounts.of {
		if a.excess.Packets > 0 {
			all = append(all, KeyExcess{Key: s.limits.name(key), Excess: a.excess})
		}
	}
	slices.SortFunc(all, func(a, b KeyExcess) int {
		return cmp.Or(cmp.Compare(b.Excess.Bytes, a.Excess.Bytes), cmp.Compare(a.Key, b.Key))
	})
	return all[:min(most, len(all))]
}
