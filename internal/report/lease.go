package report

import (
	"fmt"
)

// rateNow is the rate that packets meet; nil for no limit.
func (r *Rule) rateNow() *uint64 {
	rate, _, limited := r.it.InForce()
	if !limited {
		return nil
	}
	return &rate
}

// rateNowText is the rate, but of a pool with leases what packets meet: the lease or the safe share.
func (r *Rule) rateNowText() string {
	if r.Leased != nil {
		return bitsText(*r.rateNow())
	}
	return r.rate()
}

// lease says what a pool has of its cluster's rate, or what its line allows; "" for one that has all of its rate.
func (r *Rule) lease() string {
	switch {
	case r.Leased == nil, r.Adapt != nil && !*r.Leased:
		return ""
	case !*r.Leased:
		return fmt.Sprintf("none; its safe share of %s is in force", bitsText(*r.SafeBits))
	}
	return fmt.Sprintf("%s of %s for %s unless renewed, then %s", bitsText(*r.LeaseBits), rateText(r.RateBits), About(*r.LeaseEndsInNS), bitsText(*r.SafeBits))
}

// leaseCell is lease in a table.
func (r *row) leaseCell() string {
	switch {
	case r.Leased == nil, r.Adapt != nil && !*r.Leased:
		return ""
	case !*r.Leased:
		return "safe " + bitsText(*r.SafeBits)
	}
	return bitsText(*r.LeaseBits)
}
