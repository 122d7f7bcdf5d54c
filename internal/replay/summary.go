package replay

import (
	"cmp"
	"math"
	"sort"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Count is packets and their bytes.
type Count struct{ Packets, Bytes uint64 }

func (c *Count) add(bytes uint64) {
	c.Packets++
	c.Bytes += bytes
}

// A Summary is the result of all packets of a trace. Offered packets matched a rule.
// Each was passed, perhaps delayed or marked, or it was dropped. Excess packets did
// not conform, whatever their verdict.
type Summary struct {
	Offered, Passed, Excess, Dropped, Delayed, Marked Count
	// Unlimited packets are not IP, or neighbour discovery. Outside packets match no rule.
	Unlimited, Outside Count
	// Only by the kernel engine: packets whose bucket could not be updated in time, and
	// packets that were charged to a spill bucket.
	Contended, Spilled Count
	// Of rules with colours, passed or dropped. Yellow and red packets are excess.
	Green, Yellow, Red Count
	// Of the passed packets of rules within pools: those that a guarantee let pass, and the others.
	Guaranteed, Borrowed Count
	Pools                []PoolCount // as Limits.Pools

	First, Last  uint64 // ns: the earliest and the latest packet
	LongestDelay uint64 // ns

	// LongestGap is the longest time between the departures of two packets of a bucket
	// with a dropped packet between them. Before the first departure it begins with the
	// first dropped packet, and it ends with the last packet of all.
	LongestGap Gap

	limits   compiled
	waited   float64        // ns, the sum of all delays
	highest  uint64         // units: the highest level
	second   uint64         // units: the highest level of a second bucket
	free     []*model.Limit // by rule: its rate, with the largest bucket
	needed   uint64         // units: the lossless capacity
	beyond   bool           // the largest bucket is not enough
	accounts table[account]
	sharers  table[Count] // the excess of sharers of rules with fair shares
}

// A PoolCount is what happened to packets in a pool. Guaranteed packets are those of the passed ones that the
// guarantee of the pool itself covered.
type PoolCount struct{ Passed, Refused, Guaranteed Count }

// An account is the state of a bucket key.
type account struct {
	free    model.Bucket // a bucket that drops nothing
	excess  Count
	since   uint64 // ns: when the last packet departed, or the first one was dropped before any departed
	known   bool   // since is valid
	dropped bool   // a packet was dropped since
}

// A Gap is a time in which no packet of a bucket departed and at least one was dropped.
type Gap struct {
	From uint64 // ns
	NS   uint64
}

// NewSummary returns a summary without packets.
func NewSummary(l Limits) *Summary {
	s := &Summary{limits: compile(l), Pools: make([]PoolCount, len(l.Pools)), accounts: newTable[account](), sharers: newTable[Count]()}
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
	s.addToPools(r)
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
	s.highest, s.second = max(s.highest, r.Level), max(s.second, r.Second)
	rule := &s.limits.Rules[r.Rule]
	if rule.Algorithm.HasColours() {
		[...]*Count{&s.Green, &s.Yellow, &s.Red}[r.Colour].add(r.Bytes)
	}
	if rule.Rate == policy.Unlimited && rule.Within == "" {
		return
	}
	// Keys with excess are kept. There are few of them: each filled a bucket.
	s.accounts.sweep(func(k bucketKey, a *account) bool {
		return a.excess.Packets == 0 && drained(s.free[k.rule], a.free, r.Time)
	})
	a := s.accounts.get(r.key)
	if r.Excess {
		s.Excess.add(r.Bytes)
		a.excess.add(r.Bytes)
		if rule.Share.Kind != policy.ShareNone {
			s.sharers.sweep(func(_ bucketKey, c *Count) bool { return c.Bytes < s.Excess.Bytes/firstSweep })
			s.sharers.get(bucketKey{r.Rule, r.sharer}).add(r.Bytes)
		}
	}
	s.gap(a, r)
	if rule.Rate != policy.Unlimited {
		s.need(a, r)
	}
}

// Packets is the number of all packets, also of those without a rule.
func (s *Summary) Packets() uint64 {
	return s.Offered.Packets + s.Unlimited.Packets + s.Outside.Packets
}

// addToPools counts a packet in the pools above its rule.
func (s *Summary) addToPools(r Result) {
	chain := s.limits.chains[r.Rule]
	if len(chain) == 1 {
		return
	}
	guaranteed := false
	for i, number := range chain {
		name := s.limits.names[number]
		guaranteed = guaranteed || name == r.GuaranteedBy
		if i == 0 {
			continue
		}
		pool := &s.Pools[number-len(s.limits.Rules)]
		switch {
		case r.Verdict != model.Drop:
			pool.Passed.add(r.Bytes)
			if guaranteed && s.limits.rules[number].Guarantee != 0 {
				pool.Guaranteed.add(r.Bytes)
			}
		case name == r.RefusedBy:
			pool.Refused.add(r.Bytes)
		}
	}
	switch {
	case r.Verdict == model.Drop:
	case guaranteed:
		s.Guaranteed.add(r.Bytes)
	default:
		s.Borrowed.add(r.Bytes)
	}
}

func (s *Summary) gap(a *account, r Result) {
	dropped := r.Verdict == model.Drop
	if dropped && !a.known {
		a.since, a.known = r.Time, true
	}
	a.dropped = a.dropped || dropped
	// No gap results from a clock that steps back, or from a drop while other packets are queued.
	at := r.Departure()
	if a.dropped && at >= a.since && (at-a.since > s.LongestGap.NS || s.Dropped.Packets == 1) {
		s.LongestGap = Gap{From: a.since, NS: at - a.since}
	}
	if !dropped {
		// A packet of a sparse flow departs before queued packets.
		a.since, a.known, a.dropped = max(a.since, at), true, false
	}
}

// need offers the packet to a bucket that drops nothing. A packet conforms with every
// capacity if it finds the bucket empty.
func (s *Summary) need(a *account, r Result) {
	o := s.free[r.Rule].Offer(&a.free, nil, false, model.Packet{Time: r.Time, Bytes: r.Bytes})
	s.beyond = s.beyond || o.Excess
	if !o.Excess && o.Level > r.Bytes<<model.UnitBits {
		s.needed = max(s.needed, o.Level)
	}
}

// HighestLevelBytes is the highest level of any bucket, rounded up.
func (s *Summary) HighestLevelBytes() uint64 { return model.Bytes(s.highest) }

// HighestSecondBytes is the highest level of any second bucket (of E, or with trtcm of P), rounded up.
func (s *Summary) HighestSecondBytes() uint64 { return model.Bytes(s.second) }

// MeanDelay is the mean delay of delayed packets in ns.
func (s *Summary) MeanDelay() uint64 {
	return uint64(math.Round(s.waited / float64(max(1, s.Delayed.Packets))))
}

// LosslessCapacity is the smallest capacity in bytes, burst and queue together, with which
// no packet would have been excess: the highest level of a bucket that drops nothing. It is
// 0 if each packet found an empty bucket, so that every capacity is enough. It is unknown
// if it exceeds the largest capacity of a rule, if fair shares or pools may refuse packets, too, and with colours.
func (s *Summary) LosslessCapacity() (bytes uint64, known bool) {
	return model.Bytes(s.needed), !s.beyond && s.limits.Alone()
}

// A KeyExcess is the excess of a bucket key, or of a sharer of the bucket.
type KeyExcess struct {
	Key    string
	Excess Count
}

// MostExcess returns the bucket keys and sharers with the most excess bytes, at most so many. It is nil
// if all packets share one bucket without fair shares.
func (s *Summary) MostExcess(most int) []KeyExcess {
	if first := &s.limits.Rules[0]; len(s.limits.Rules) == 1 && first.Each.Kind == policy.EachAll && first.Share.Kind == policy.ShareNone {
		return nil
	}
	all := []KeyExcess{}
	for key, a := range s.accounts.of {
		if a.excess.Packets > 0 && s.limits.Rules[key.rule].Share.Kind == policy.ShareNone {
			all = append(all, KeyExcess{Key: s.limits.name(key), Excess: a.excess})
		}
	}
	for key, excess := range s.sharers.of {
		all = append(all, KeyExcess{Key: s.limits.sharerName(key), Excess: *excess})
	}
	sort.Slice(all, func(i, j int) bool {
		a, b := &all[i], &all[j]
		return cmp.Or(cmp.Compare(b.Excess.Bytes, a.Excess.Bytes), cmp.Compare(a.Key, b.Key)) < 0
	})
	return all[:min(most, len(all))]
}
