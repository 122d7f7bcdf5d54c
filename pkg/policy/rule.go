// Package policy says what a rule is, how people write its parts, and how it
// reads as a sentence. Every value type parses from text, prints text that
// parses back, and satisfies pflag.Value. All parsing is exact integer
// arithmetic; the package does no I/O and imports only the standard library.
package policy

import (
	"errors"
	"fmt"
	"net/netip"
)

// maxOwed bounds the bytes a bucket can ever owe, so that the data path's
// arithmetic cannot overflow.
const maxOwed = 1 << 42

// Rule limits one prefix on one direction of one device.
type Rule struct {
	Prefix    netip.Prefix
	Rate      Rate
	Capacity  uint64 // bytes, MinCapacity to MaxCapacity; 0 if Rate is Unlimited
	Algorithm Algorithm
	Each      Each
	Excess    Excess
	Queue     uint64   // bytes beyond Capacity that may wait, if Excess is Delay and Algorithm GCRA; else 0
	ECNAbove  ECNAbove // above 0 if Excess is Delay; else 0
	Order     Order    // FIFO, unless Excess is Delay and Algorithm GCRA
	Penalty   Penalty
	Fail      Fail
	Framing   Framing
	Shadow    Shadow
}

// Validate reports the first thing that keeps r from being a rule.
func (r Rule) Validate() error {
	for _, err := range []error{
		checkPrefix(r.Prefix),
		checkName(r.Algorithm, "algorithm", algorithmNames),
		checkName(r.Excess, "excess", excessNames),
		checkName(r.Order, "order", orderNames),
		checkName(r.Fail, "fail", failNames),
		r.Each.validate(r.Prefix),
		r.Penalty.validate(),
		checkFraming(int(r.Framing.Overhead), int(r.Framing.MPU)),
		r.validateShadow(),
	} {
		if err != nil {
			return err
		}
	}
	if r.Rate == Unlimited {
		return r.validateUnlimited()
	}
	if err := checkRate(r.Rate.String, r.Rate); err != nil {
		return err
	}
	if r.Capacity < MinCapacity {
		return fmt.Errorf("capacity of %d bytes (%s at %v) is less than one full packet; use %d or more",
			r.Capacity, drainTime(r.Capacity, r.Rate), r.Rate, MinCapacity)
	}
	if err := checkMaxCapacity("capacity", func() string { return fmt.Sprintf("of %d bytes", r.Capacity) }, r.Capacity); err != nil {
		return err
	}
	if err := r.validateQueue(); err != nil {
		return err
	}
	if r.Penalty.Kind != PenaltyNone && r.Algorithm != Leaky {
		return fmt.Errorf("penalty %v needs the algorithm leaky, not %v; change one of them", r.Penalty, r.Algorithm)
	}
	if room := maxOwed - 1 - 2*r.Capacity; bytesIn(r.Penalty.Duration, r.Rate) > room {
		return fmt.Errorf("penalty %v at %v is more than a bucket can owe; shorten it to %ds or less, or lower the rate",
			r.Penalty, r.Rate, 8*room/uint64(r.Rate))
	}
	return nil
}

func (r Rule) validateUnlimited() error {
	switch {
	case r.Capacity != 0:
		return errors.New("capacity has no use in an unlimited rule; leave it out")
	case r.Each != Each{}:
		return fmt.Errorf("each %v has no use in an unlimited rule; leave it out", r.Each)
	case r.Excess != Drop:
		return fmt.Errorf("excess %v has no use in an unlimited rule; leave it out", r.Excess)
	case r.Queue != 0:
		return errors.New("queue has no use in an unlimited rule; leave it out")
	case r.ECNAbove != 0:
		return errors.New("ecn-above has no use in an unlimited rule; leave it out")
	case r.Order != FIFO:
		return fmt.Errorf("order %v has no use in an unlimited rule; leave it out", r.Order)
	case r.Penalty != Penalty{}:
		return fmt.Errorf("penalty %v has no use in an unlimited rule; leave it out", r.Penalty)
	}
	return nil
}
