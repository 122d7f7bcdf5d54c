package live

import (
	"math"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A Value is a figure, or none where it is not known or would mean nothing.
type Value struct {
	N     float64
	Known bool
}

// Or returns the figure, or other if it is not known.
func (v Value) Or(other float64) float64 {
	if v.Known {
		return v.N
	}
	return other
}

func known(n float64) Value { return Value{n, true} }

// Percent is a part of a whole in percent, to a hundredth; of a whole of 0 it is not known.
func Percent(part, whole uint64) Value {
	if whole == 0 {
		return Value{}
	}
	return known(math.Round(1e4*float64(part)/float64(whole)) / 100)
}

// perSecond is a number of bytes over the interval, in bit/s.
func (it *Item) perSecond(bytes uint64, known bool) Value {
	if !known {
		return Value{}
	}
	return Value{math.Floor(float64(bytes) * 8e9 / float64(max(it.Interval, 1))), true}
}

// UseBits is the rate of packets that passed over the interval, in bit/s.
func (it *Item) UseBits() Value {
	return it.perSecond(it.grew(func(c *Counts) uint64 { return c.PassedBytes }))
}

// BorrowedBits is the part of it beyond the guarantee.
func (it *Item) BorrowedBits() Value {
	passed, known := it.grew(func(c *Counts) uint64 { return c.PassedBytes })
	guaranteed, _ := it.grew(func(c *Counts) uint64 { return c.GuaranteedBytes })
	if it.Within == "" {
		passed = 0
	}
	return it.perSecond(passed-min(passed, guaranteed), known)
}

// DroppedBits is the rate of packets that were dropped; of a pool, of those of all rules within it, whoever dropped them.
func (it *Item) DroppedBits() Value {
	loss, known := it.offeredLately()
	return it.perSecond(loss.DroppedBytes, known)
}

// RefusedBits is the rate of packets that a pool itself refused.
func (it *Item) RefusedBits() Value {
	if !it.IsPool() {
		return Value{}
	}
	return it.perSecond(it.grew(func(c *Counts) uint64 { return c.DroppedBytes }))
}

// Refusing is the rate of packets that the rule drops or the pool itself refuses, in bit/s. What a pool lets through, rules
// within it may still drop.
func (it *Item) Refusing() float64 {
	if it.IsPool() {
		return it.RefusedBits().N
	}
	return it.DroppedBits().N
}

// ColourBits are the rates of green, yellow and red packets of a rule with colours.
func (it *Item) ColourBits() (green, yellow, red Value) {
	if !it.Algorithm.HasColours() {
		return green, yellow, red
	}
	return it.perSecond(it.grew(func(c *Counts) uint64 { return c.GreenBytes })), it.perSecond(it.grew(func(c *Counts) uint64 { return c.YellowBytes })),
		it.perSecond(it.grew(func(c *Counts) uint64 { return c.RedBytes }))
}

// came is what came over the interval if there is one, else since the rule was set; of a pool, of all rules within it.
func (it *Item) came() Loss {
	if it.Interval > 0 {
		loss, _ := it.offeredLately()
		return loss
	}
	return it.Offered()
}

// share is the share of some packets among those that the rule or pool itself passed or dropped.
func (it *Item) share(part func(*Counts) uint64) Value {
	all := func(c *Counts) uint64 { return c.PassedPackets + c.DroppedPackets }
	if it.Interval == 0 {
		return Percent(part(&it.Counts), all(&it.Counts))
	}
	n, _ := it.grew(part)
	whole, _ := it.grew(all)
	return Percent(n, whole)
}

// SameBegin reports whether dropped packets were counted since the passed ones were. If the rules within a pool are younger or
// older than it, they passed fewer or more packets. One percent may have come while all were read.
func (it *Item) SameBegin() bool {
	passed := it.Members.MatchedPackets - it.Members.DroppedPackets
	less, more := min(passed, it.PassedPackets), max(passed, it.PassedPackets)
	return !it.IsPool() || more-less <= more/100
}

// DroppedPercent is the share of dropped packets; of a pool, of those of all rules within it.
func (it *Item) DroppedPercent() Value {
	if it.Interval == 0 && !it.SameBegin() {
		return Value{}
	}
	came := it.came()
	return Percent(came.DroppedPackets, came.MatchedPackets)
}

// RefusedPercent is the share of packets that a pool refused itself, among those that it passed or refused.
func (it *Item) RefusedPercent() Value {
	if !it.IsPool() {
		return Value{}
	}
	return it.share(func(c *Counts) uint64 { return c.DroppedPackets })
}

// ExcessPercent is the share of excess and delayed packets.
func (it *Item) ExcessPercent() Value {
	return it.share(func(c *Counts) uint64 { return c.ExcessPackets + c.DelayedPackets })
}

// RefusedPercent is the share of bytes that the shadow would have refused.
func (s *Shadow) RefusedPercent() Value {
	_, refused := s.Refused()
	return Percent(refused, s.PassedBytes+s.DroppedBytes)
}

// InForce is the rate in bit/s and the capacity in bytes that packets meet: of a pool with leases those of the lease, or else
// of the safe share; with colours, the rate of all packets that are not red, or if yellow ones are dropped, of green ones.
// limited is false for no limit.
func (it *Item) InForce() (rate, capacity uint64, limited bool) {
	switch {
	case !it.limited:
		return 0, 0, false
	case it.Lease == nil:
		return it.rate, it.capacity, true
	}
	part := it.Rule.Part(it.Lease.At(it.At))
	return uint64(part.Rate), part.Capacity, part.Rate != policy.Unlimited
}

// most is the rate of all packets that the rule lets through.
func (l *Limit) most() uint64 {
	rate, c := uint64(l.Rate), &l.Colours
	switch {
	case !l.Algorithm.HasColours() || c.Yellow == policy.ActionDrop:
		return rate
	case l.Algorithm == policy.TRTCM:
		return uint64(c.PIR)
	case l.Algorithm == policy.RFC4115:
		return rate + uint64(c.EIR)
	}
	return rate
}

// UsePercent is UseBits in percent of the rate in force; not known where several keys have that rate each.
func (it *Item) UsePercent() Value {
	rate, _, limited := it.InForce()
	use := it.UseBits()
	if !limited || !use.Known || !it.single {
		return Value{}
	}
	return Percent(uint64(use.N), rate)
}

// FullPercent is a level in percent of what a bucket and its queue hold; not known without a limit.
func (it *Item) FullPercent(level uint64) Value {
	_, capacity, limited := it.InForce()
	if !limited {
		return Value{}
	}
	return Percent(level, capacity+it.Queue)
}

// Near is from which share of the rate on, in percent, a rule or pool is near it.
const Near = 90

// A Summary is what all rules do together.
type Summary struct {
	Rules    int     `json:"rules"`
	Pools    int     `json:"pools"`
	Named    int     `json:"named"`                   // rules of a name or of a device
	Out      int     `json:"not_in_force"`            // rules
	Dropping int     `json:"dropping"`                // rules that drop packets now
	Near     int     `json:"near"`                    // other rules that are near their rate
	Passed   float64 `json:"passed_bits_per_second"`  // of all rules
	Dropped  float64 `json:"dropped_bits_per_second"` // of all rules
}

// Summary sums up the items that are chosen; nil for all.
func (out *Reading) Summary(chosen func(*Item) bool) (s Summary) {
	for i := range out.Items {
		it := &out.Items[i]
		switch {
		case chosen != nil && !chosen(it):
			continue
		case it.IsPool():
			s.Pools++
			continue
		}
		dropped := it.DroppedBits().N
		s.Rules, s.Passed, s.Dropped = s.Rules+1, s.Passed+it.UseBits().N, s.Dropped+dropped
		if it.Who() != "" {
			s.Named++
		}
		if !it.Place.InForce {
			s.Out++
		} else if dropped > 0 {
			s.Dropping++
		} else if it.UsePercent().N >= Near {
			s.Near++
		}
	}
	return s
}
