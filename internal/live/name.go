package live

import (
	"math"
	"slices"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A Name is all rules that have a name, such as those of a subscriber.
type Name struct {
	Name            string
	Egress, Ingress *Side // nil without rules
	// DroppedPercent is the share of dropped packets, over the interval or else since the rules were set.
	DroppedPercent Value
}

// A Side is the rules with a name in one direction.
type Side struct {
	Rules []*Item
	Pools []*Limit // the ones above that rules with other names draw from, too
	// Rate is the most that the rules and the pools of their own let through, in bit/s; not known for no limit, and where
	// hosts, subnets or flows have a rate each.
	Rate                                                     Value
	PassedPackets, PassedBytes, DroppedPackets, DroppedBytes uint64
	UseBits                                                  Value

	tops []*Limit // the pools of their own, and rules in none, that Rate is the sum of
}

// OfRate is UseBits in percent of Rate.
func (s *Side) OfRate() Value {
	if s == nil || !s.Rate.Known || !s.UseBits.Known {
		return Value{}
	}
	return Percent(uint64(s.UseBits.N), uint64(s.Rate.N))
}

// sides are the directions that have rules.
func (n *Name) sides() []*Side {
	return slices.DeleteFunc([]*Side{n.Egress, n.Ingress}, func(s *Side) bool { return s == nil })
}

func (n *Name) rate() (sum float64) {
	for _, s := range n.sides() {
		sum += s.Rate.Or(math.Inf(1))
	}
	return sum
}

// names puts the rules with a name together, and leaves the others as they are. Pools have no row.
func (out *Reading) names(all []Row) (rows []Row) {
	at := map[string]int{}
	for _, r := range all {
		name := r.Label.Name
		if r.IsPool() {
			continue
		}
		if name == "" {
			rows = append(rows, r)
			continue
		}
		n, known := at[name]
		if !known {
			n = len(rows)
			at[name], rows = n, append(rows, Row{Name: &Name{Name: name}, OfRate: -1, DroppedPercent: -1, ExcessPercent: -1, Level: -1})
		}
		sum := &rows[n]
		sum.Items = append(sum.Items, r.Item)
		sum.idle = sum.idle || r.idle
		sum.Use, sum.Dropped, sum.Refusing = sum.Use+r.Use, sum.Dropped+r.Dropped, sum.Refusing+r.Refusing
		sum.Level, sum.ExcessPercent = max(sum.Level, r.Level), max(sum.ExcessPercent, r.ExcessPercent)
	}
	for i := range rows {
		if rows[i].Name != nil {
			rows[i].add()
		}
	}
	return rows
}

// add makes the sides of a name from its rules.
func (r *Row) add() {
	came := Loss{}
	for _, it := range r.Items {
		to := &r.Name.Egress
		if it.Place.Direction == policy.Ingress {
			to = &r.Name.Ingress
		}
		if *to == nil {
			*to = &Side{}
		}
		(*to).add(it)
		came.add(it.came())
	}
	for _, s := range r.Name.sides() {
		r.OfRate = max(r.OfRate, s.OfRate().Or(-1))
	}
	r.Name.DroppedPercent = Percent(came.DroppedPackets, came.MatchedPackets)
	r.DroppedPercent = r.Name.DroppedPercent.Or(-1)
}

func (s *Side) add(it *Item) {
	if s.Rules == nil {
		s.Rate = known(0)
	}
	s.Rules = append(s.Rules, it)
	s.PassedPackets, s.PassedBytes = s.PassedPackets+it.PassedPackets, s.PassedBytes+it.PassedBytes
	s.DroppedPackets, s.DroppedBytes = s.DroppedPackets+it.DroppedPackets, s.DroppedBytes+it.DroppedBytes
	if use := it.UseBits(); use.Known {
		s.UseBits = known(s.UseBits.Or(0) + use.N)
	}
	top := it.Limit
	for top.Above != nil && top.Above.owner != nil && *top.Above.owner == it.Label.Name {
		top = top.Above
	}
	if top.Above != nil && !slices.Contains(s.Pools, top.Above) {
		s.Pools = append(s.Pools, top.Above)
	}
	if !slices.Contains(s.tops, top) {
		s.tops = append(s.tops, top)
		if most := top.mostIn(it.Place.Direction); s.Rate.Known && !math.IsInf(most, 0) {
			s.Rate.N += most
		} else {
			s.Rate = Value{}
		}
	}
}

// mostIn is what a rule or pool lets through in a direction at most, in bit/s; infinite for no limit.
func (l *Limit) mostIn(d policy.Direction) float64 {
	limit := math.Inf(1)
	if l.Rate != policy.Unlimited && l.Scope() == "" {
		limit = float64(l.most())
	}
	switch {
	case !l.IsPool() && l.Place.Direction != d:
		return 0
	case !l.IsPool():
		return limit
	}
	sum := float64(0)
	for _, below := range l.members {
		sum += below.mostIn(d)
	}
	return min(sum, limit)
}
