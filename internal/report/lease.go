package report

import (
	"fmt"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// SetLease says what a pool has of the rate of its cluster now (ns).
func (r *Rule) SetLease(pool policy.Rule, l maps.Lease, now uint64) {
	leased, safe := now < l.Until, uint64(l.Safe)
	r.Leased, r.SafeBits = &leased, &safe
	if leased {
		lease, ends := uint64(l.Rate), l.Until-now
		r.LeaseBits, r.LeaseEndsInNS = &lease, &ends
	}
	r.rateNow, r.capacityNow = limit(pool.Part(l.At(now)))
}

// inForce is the rate and capacity that packets meet: those of the lease, or else of the safe share, where a pool has a
// cluster; nil for no limit.
func (r *Rule) inForce() (rate, capacity *uint64) {
	if r.rateNow != nil {
		return r.rateNow, r.capacityNow
	}
	return r.RateBits, r.CapacityBytes
}

// RateNow is the rate that packets meet; nil for no limit.
func (r *Rule) RateNow() *uint64 {
	rate, _ := r.inForce()
	return rate
}

// lease says what a pool has of its cluster's rate; "" for one without a cluster.
func (r *Rule) lease() string {
	switch {
	case r.Leased == nil:
		return ""
	case !*r.Leased:
		return fmt.Sprintf("none; its safe share of %s is in force", bitsText(*r.SafeBits))
	}
	return fmt.Sprintf("%s of %s for %s unless renewed, then %s", bitsText(*r.LeaseBits), rateText(r.RateBits), about(*r.LeaseEndsInNS), bitsText(*r.SafeBits))
}

// leaseCell is lease in a table.
func (r *row) leaseCell() string {
	switch {
	case r.Leased == nil:
		return ""
	case !*r.Leased:
		return "safe " + bitsText(*r.SafeBits)
	}
	return bitsText(*r.LeaseBits)
}
