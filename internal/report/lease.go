package report

import (
	"fmt"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// SetLease says what a pool has of the rate of its cluster, or of what its line could allow, now (ns).
func (r *Rule) SetLease(pool policy.Rule, l maps.Lease, now uint64) {
	leased, safe := now < l.Until, uint64(l.Safe)
	r.Leased, r.SafeBits = &leased, &safe
	if leased {
		lease, ends := uint64(l.Rate), l.Until-now
		r.LeaseBits, r.LeaseEndsInNS = &lease, &ends
	}
	r.rateNow, r.capacityNow = limit(pool.Part(l.At(now)))
}

// inForce is the rate and capacity that packets meet: those of the lease, or else of the safe share, where a pool has
// leases; with colours, the rate of all packets that are not red; nil for no limit.
func (r *Rule) inForce() (rate, capacity *uint64) {
	switch {
	case r.rateNow != nil:
		return r.rateNow, r.capacityNow
	case r.HasColours():
		return new(r.most(*r.RateBits)), r.CapacityBytes
	}
	return r.RateBits, r.CapacityBytes
}

// RateNow is the rate that packets meet; nil for no limit.
func (r *Rule) RateNow() *uint64 {
	rate, _ := r.inForce()
	return rate
}

// A PoolRate is the rate of a pool that is in force.
type PoolRate struct {
	bits *uint64
	text string // "" where the rate is not known
}

// PoolRate is the rate of the pool.
func (r *Rule) PoolRate() PoolRate { return PoolRate{r.RateNow(), r.RateNowText()} }

// SetPoolRate gives a rule without a rate that of its pool, for tables that do not show the pool above it.
func (r *Rule) SetPoolRate(rate PoolRate) { r.poolRate = rate }

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
