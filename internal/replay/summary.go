package replay

import (
	"cmp"
	"math"
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Figures are what limits did to a trace. Offered packets matched a rule. Each was passed, perhaps delayed or marked, or
// it was dropped. Excess packets did not conform, whatever their verdict.
type Figures struct {
	OfferedPackets   uint64 `json:"offered_packets"`
	OfferedBytes     uint64 `json:"offered_bytes"`
	PassedPackets    uint64 `json:"passed_packets"`
	PassedBytes      uint64 `json:"passed_bytes"`
	ExcessPackets    uint64 `json:"excess_packets"`
	ExcessBytes      uint64 `json:"excess_bytes"`
	DroppedPackets   uint64 `json:"dropped_packets"`
	DroppedBytes     uint64 `json:"dropped_bytes"`
	MarkedPackets    uint64 `json:"marked_packets"`
	MarkedBytes      uint64 `json:"marked_bytes"`
	DelayedPackets   uint64 `json:"delayed_packets"`
	DelayedBytes     uint64 `json:"delayed_bytes"`
	LongestDelayNS   uint64 `json:"longest_delay_ns"`
	MeanDelayNS      uint64 `json:"mean_delay_ns"`   // of delayed packets
	OutsidePackets   uint64 `json:"outside_packets"` // match no rule
	OutsideBytes     uint64 `json:"outside_bytes"`
	UnlimitedPackets uint64 `json:"unlimited_packets"` // not IP, or neighbour discovery
	UnlimitedBytes   uint64 `json:"unlimited_bytes"`
	ContendedPackets uint64 `json:"contended_packets"`
	SpilledPackets   uint64 `json:"spilled_packets"` // the kernel had no room for their bucket key

	// Of rules with colours, passed or dropped. Yellow and red packets are excess.
	GreenPackets  uint64 `json:"green_packets"`
	GreenBytes    uint64 `json:"green_bytes"`
	YellowPackets uint64 `json:"yellow_packets"`
	YellowBytes   uint64 `json:"yellow_bytes"`
	RedPackets    uint64 `json:"red_packets"`
	RedBytes      uint64 `json:"red_bytes"`

	// Of the passed packets of rules within pools: those that a guarantee let pass, and the others.
	GuaranteedPackets uint64         `json:"guaranteed_packets"`
	GuaranteedBytes   uint64         `json:"guaranteed_bytes"`
	BorrowedPackets   uint64         `json:"borrowed_packets"`
	BorrowedBytes     uint64         `json:"borrowed_bytes"`
	Pools             []ReplayedPool `json:"pools"` // those above the rules

	FirstNS    uint64 `json:"first_ns"` // the earliest packet
	DurationNS uint64 `json:"duration_ns"`
	// LongestGapNS is the longest time between the departures of two packets of a bucket with a dropped packet between
	// them. Before the first departure it begins with the first dropped packet, and it ends with the last packet of all.
	LongestGapNS      uint64 `json:"longest_gap_ns"`
	LongestGapFromNS  uint64 `json:"longest_gap_from_ns"`
	HighestLevelBytes uint64 `json:"highest_level_bytes"`
	// HighestSecondLevelBytes is the level of E, or with trtcm of P; 0 without colours.
	HighestSecondLevelBytes uint64 `json:"highest_second_level_bytes"`
	// LosslessCapacityBytes is the smallest capacity, burst and queue together, with which no packet would have been
	// excess: the highest level of a bucket that drops nothing. It is 0 if each packet found an empty bucket. It is null
	// if no capacity is large enough, and with fair shares, pools, colours, or limits beside the rate.
	LosslessCapacityBytes *uint64 `json:"lossless_capacity_bytes"`

	// MostExcess are the bucket keys and sharers with the most excess bytes; null if all packets share one bucket
	// without fair shares.
	MostExcess []KeyExcess `json:"most_excess"`
}

// A ReplayedPool is what happened to packets in a pool. Its own guarantee covered the guaranteed ones of the passed packets.
type ReplayedPool struct {
	Name              string `json:"name"`
	PassedPackets     uint64 `json:"passed_packets"`
	PassedBytes       uint64 `json:"passed_bytes"`
	RefusedPackets    uint64 `json:"refused_packets"`
	RefusedBytes      uint64 `json:"refused_bytes"`
	GuaranteedPackets uint64 `json:"guaranteed_packets"`
	GuaranteedBytes   uint64 `json:"guaranteed_bytes"`
}

// A KeyExcess is the excess of a bucket key or sharer.
type KeyExcess struct {
	Key     string `json:"key"`
	Packets uint64 `json:"excess_packets"`
	Bytes   uint64 `json:"excess_bytes"`
}

// count counts a packet.
func count(packets, bytes *uint64, of uint64) {
	*packets++
	*bytes += of
}

// A Summary sums up the packets of a trace.
type Summary struct {
	Figures  // but for those that Sum adds
	limits   compiled
	last     uint64         // ns: the latest packet
	waited   float64        // ns, the sum of all delays
	highest  uint64         // units: the highest level
	second   uint64         // units: the highest level of a second bucket
	free     []*model.Limit // by rule: its rate, with the largest bucket
	needed   uint64         // units: the lossless capacity
	beyond   bool           // the largest bucket is not enough
	accounts table[account]
	sharers  table[KeyExcess] // of rules with fair shares
}

// An account is the state of a bucket key.
type account struct {
	free    model.Bucket // a bucket that drops nothing
	excess  KeyExcess
	since   uint64 // ns: when the last packet departed, or the first one was dropped before any departed
	known   bool   // since is valid
	dropped bool   // a packet was dropped since
}

// NewSummary returns a summary without packets.
func NewSummary(l Limits) *Summary {
	s := &Summary{Figures: Figures{Pools: []ReplayedPool{}}, limits: compile(l), accounts: newTable[account](), sharers: newTable[KeyExcess]()}
	for _, pool := range l.Pools {
		s.Pools = append(s.Pools, ReplayedPool{Name: pool.Label.Name})
	}
	for _, r := range l.Rules {
		s.free = append(s.free, model.NewLimit(policy.Rule{Rate: r.Rate, Capacity: policy.MaxCapacity}))
	}
	return s
}

// Add counts a packet.
func (s *Summary) Add(r Result) {
	if s.Packets() == 0 {
		s.FirstNS, s.last = r.Time, r.Time
	}
	s.FirstNS, s.last = min(s.FirstNS, r.Time), max(s.last, r.Time)
	switch {
	case !r.Limited:
		count(&s.UnlimitedPackets, &s.UnlimitedBytes, r.Bytes)
		return
	case r.Rule == NoRule:
		count(&s.OutsidePackets, &s.OutsideBytes, r.Bytes)
		return
	}
	count(&s.OfferedPackets, &s.OfferedBytes, r.Bytes)
	if r.Verdict == model.Drop {
		count(&s.DroppedPackets, &s.DroppedBytes, r.Bytes)
	} else {
		count(&s.PassedPackets, &s.PassedBytes, r.Bytes)
	}
	s.addToPools(r)
	if r.Verdict == model.Mark {
		count(&s.MarkedPackets, &s.MarkedBytes, r.Bytes)
	}
	if r.Wait > 0 {
		count(&s.DelayedPackets, &s.DelayedBytes, r.Bytes)
		s.LongestDelayNS = max(s.LongestDelayNS, r.Wait)
		s.waited += float64(r.Wait)
	}
	if r.Contended {
		s.ContendedPackets++
	}
	if r.Spilled {
		s.SpilledPackets++
	}
	s.highest, s.second = max(s.highest, r.Level), max(s.second, r.Second)
	rule := &s.limits.Rules[r.Rule]
	if rule.Algorithm.HasColours() {
		switch r.Colour {
		case policy.Green:
			count(&s.GreenPackets, &s.GreenBytes, r.Bytes)
		case policy.Yellow:
			count(&s.YellowPackets, &s.YellowBytes, r.Bytes)
		case policy.Red:
			count(&s.RedPackets, &s.RedBytes, r.Bytes)
		}
	}
	if !rule.Limits() {
		return
	}
	// Keys with excess are kept. There are few of them: each filled a bucket.
	s.accounts.sweep(func(k bucketKey, a *account) bool {
		return a.excess.Packets == 0 && drained(s.free[k.rule], a.free, r.Time)
	})
	a := s.accounts.get(r.key)
	if r.Excess {
		count(&s.ExcessPackets, &s.ExcessBytes, r.Bytes)
		count(&a.excess.Packets, &a.excess.Bytes, r.Bytes)
		if rule.Share.Kind != policy.ShareNone {
			s.sharers.sweep(func(_ bucketKey, x *KeyExcess) bool { return x.Bytes < s.ExcessBytes/firstSweep })
			x := s.sharers.get(bucketKey{r.Rule, r.sharer})
			count(&x.Packets, &x.Bytes, r.Bytes)
		}
	}
	s.gap(a, r)
	if rule.Rate != policy.Unlimited {
		s.need(a, r)
	}
}

// Packets is the number of all packets, also of those without a rule.
func (s *Summary) Packets() uint64 {
	return s.OfferedPackets + s.UnlimitedPackets + s.OutsidePackets
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
			count(&pool.PassedPackets, &pool.PassedBytes, r.Bytes)
			if guaranteed && s.limits.rules[number].Guarantee != 0 {
				count(&pool.GuaranteedPackets, &pool.GuaranteedBytes, r.Bytes)
			}
		case name == r.RefusedBy:
			count(&pool.RefusedPackets, &pool.RefusedBytes, r.Bytes)
		}
	}
	switch {
	case r.Verdict == model.Drop:
	case guaranteed:
		count(&s.GuaranteedPackets, &s.GuaranteedBytes, r.Bytes)
	default:
		count(&s.BorrowedPackets, &s.BorrowedBytes, r.Bytes)
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
	if a.dropped && at >= a.since && (at-a.since > s.LongestGapNS || s.DroppedPackets == 1) {
		s.LongestGapFromNS, s.LongestGapNS = a.since, at-a.since
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

// mostKeys is the length of MostExcess.
const mostKeys = 5

// Sum returns the figures of all packets so far. Levels are rounded up.
func (s *Summary) Sum() Figures {
	f := s.Figures
	f.DurationNS, f.MeanDelayNS = s.last-f.FirstNS, uint64(math.Round(s.waited/float64(max(1, f.DelayedPackets))))
	f.HighestLevelBytes, f.HighestSecondLevelBytes = model.Bytes(s.highest), model.Bytes(s.second)
	if !s.beyond && s.limits.Alone() {
		f.LosslessCapacityBytes = new(model.Bytes(s.needed))
	}
	if first := &s.limits.Rules[0]; len(s.limits.Rules) == 1 && first.Each.Kind == policy.EachAll && first.Share.Kind == policy.ShareNone {
		return f
	}
	f.MostExcess = []KeyExcess{}
	for key, a := range s.accounts.of {
		if a.excess.Packets > 0 && s.limits.Rules[key.rule].Share.Kind == policy.ShareNone {
			f.MostExcess = append(f.MostExcess, KeyExcess{s.limits.Key(Result{key: key}), a.excess.Packets, a.excess.Bytes})
		}
	}
	for key, x := range s.sharers.of {
		f.MostExcess = append(f.MostExcess, KeyExcess{s.limits.Sharer(Result{Rule: key.rule, sharer: key.flow}), x.Packets, x.Bytes})
	}
	slices.SortFunc(f.MostExcess, func(a, b KeyExcess) int { return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Key, b.Key)) })
	f.MostExcess = f.MostExcess[:min(mostKeys, len(f.MostExcess))]
	return f
}
