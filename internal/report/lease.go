package report

import "fmt"

// rateNow is the rate that packets meet; nil for no limit.
func (r *Rule) rateNow() *uint64 {
	rate, _, limited := r.InForce()
	if !limited {
		return nil
	}
	return &rate
}

// lease says what a pool has of its cluster's rate, or what its line allows; "" for one that has all of its rate.
func (r *Rule) lease() string {
	switch {
	case !r.isLeased():
		return ""
	case !r.Leased():
		return fmt.Sprintf("none; its safe share of %s is in force", Bits(uint64(r.Lease.Safe)))
	}
	return fmt.Sprintf("%s of %v for %s unless renewed, then %s", Bits(uint64(r.Lease.Rate)), r.Rate, About(r.Lease.Until-r.At), Bits(uint64(r.Lease.Safe)))
}

// isLeased reports whether a pool has a lease, or its safe share in place of one.
func (r *Rule) isLeased() bool { return r.Lease != nil && (r.Adapt.Min == 0 || r.Leased()) }
