package policy

import (
	"cmp"
	"fmt"
	"math/bits"
)

// A Cluster is what a pool has of a rate that many hosts share. The rate, capacity and queue of the pool are those
// of all hosts together; each host has a lease on a part of them.
type Cluster struct {
	Name   ClusterName // all pools with the name share one rate; "" for no cluster
	Weight Weight      // of this host
	Floor  Rate        // a lease of this host is never below this; 0 for none
	Share  Rate        // a fixed lease for this host; 0 for one by demand
	Safe   Rate        // the rate without a lease; 0 for the rate divided by the hosts that were known when the last lease was granted
}

// ClusterName is the name of a cluster; "" for none.
type ClusterName string

// clusterRate is an option of a cluster that is a part of the rate of its pool.
func clusterRate(of func(*Cluster) *Rate, o Option) *Option {
	o.PoolOnly = true
	o.check = func(r *Rule) error {
		switch part := *of(&r.Cluster); {
		case part == 0:
			return nil
		case part > r.Rate:
			return fmt.Errorf("%s %v is above the rate %v of all hosts together; lower it, or raise the rate", o.Name, part, r.Rate)
		default:
			return checkRate(o.Name, part.String, part)
		}
	}
	return same(func(l *Limit) *Guarantee { return (*Guarantee)(of(&l.Cluster)) }, func(r *Rule) *Guarantee { return (*Guarantee)(of(&r.Cluster)) }, o)
}

// Scaled is the same part of a rate as r is of another one. It is all of that if r is more than the other one.
func (r Rate) Scaled(to, of Rate) Rate {
	return Rate(scaled(uint64(min(r, of)), to, of))
}

// scaled is v * to / of, which must not be above 2^64.
func scaled(v uint64, to, of Rate) uint64 {
	high, low := bits.Mul64(v, uint64(to))
	part, _ := bits.Div64(high, low, uint64(of))
	return part
}

// Part returns a pool with a part of its rate, and as much of its capacity and queue.
func (r Rule) Part(rate Rate) Rule {
	whole := r.Rate
	part := func(of uint64) uint64 { return max(scaled(of, rate, whole), min(of, MinCapacity)) }
	if rate < r.Rate {
		r.Rate, r.Capacity, r.Queue = rate, part(r.Capacity), part(r.Queue)
	}
	return r
}

// SafeRate returns the rate of a pool with leases before its first one.
func (r *Rule) SafeRate() Rate {
	if r.Adapt.Min != 0 {
		return r.Rate
	}
	return min(cmp.Or(r.Cluster.Safe, MinRate), r.Rate)
}

// says describes how a pool shares its rate with other hosts.
func (c Cluster) says() (says string) {
	if c.Name == "" {
		return ""
	}
	says = fmt.Sprintf(" for all hosts of cluster %q together", string(c.Name))
	if c.Weight != 0 {
		says += fmt.Sprintf(", weight %v on this one", c.Weight)
	}
	for _, part := range []struct {
		rate Rate
		text string
	}{{c.Floor, ", at least %v on this one"}, {c.Share, ", %v on this one"}, {c.Safe, ", %v on this one without a lease"}} {
		if part.rate != 0 {
			says += fmt.Sprintf(part.text, part.rate)
		}
	}
	return says
}
