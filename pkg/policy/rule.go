// Package policy says what a rule is, how people write its parts, and how it
// reads as a sentence. Every value type parses from text, prints text that
// parses back, and satisfies pflag.Value. All parsing is exact integer
// arithmetic; the package does no I/O and imports only the standard library.
package policy

import "net/netip"

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
	Label     Label
}

// Validate reports the first thing that keeps r from being a rule.
func (r *Rule) Validate() error {
	if err := checkPrefix(r.Prefix); err != nil {
		return err
	}
	if err := checkText("plan", r.Label.Plan, MaxName); err != nil {
		return err
	}
	for _, o := range Options {
		if o.valid == nil {
			continue
		}
		if err := o.valid(r); err != nil {
			return err
		}
	}
	if err := r.validateShadow(); err != nil {
		return err
	}
	for _, o := range Options {
		if err := o.validate(r); err != nil {
			return err
		}
	}
	return nil
}
