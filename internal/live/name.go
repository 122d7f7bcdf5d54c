package live

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A Name is all rules that have a name, such as those of a subscriber or a device: see Limit.Who.
type Name struct {
	Name  string  // "" for one rule that has none
	Sides []*Side // by device and direction
}

// A Side is the rules with a name in one direction of a device. Downloads and uploads are never in one side, whose rate would
// mean nothing: both may be egress, on different devices.
type Side struct {
	Device, Direction string
	Rules             []int    // their places in the items of a reading
	Pools             []*Limit // the ones above that rules with other names draw from, too
	// Rate is the most that the rules and the pools of their own let through, in bit/s; not known for no limit, and where
	// hosts, subnets or flows have a rate each.
	Rate Value

	tops []*Limit // the pools of their own, and rules in none, that Rate is the sum of
}

// Done is what the rules of a side did together.
type Done struct {
	PassedPackets, PassedBytes, DroppedPackets, DroppedBytes uint64
	UseBits                                                  Value
	OfRate                                                   Value // UseBits in percent of the rate of the side
}

// Done is what the rules of a side of the row's name did.
func (r *Row) Done(s *Side) (sum Done) {
	for _, it := range r.Of(s) {
		sum.PassedPackets, sum.PassedBytes = sum.PassedPackets+it.PassedPackets, sum.PassedBytes+it.PassedBytes
		sum.DroppedPackets, sum.DroppedBytes = sum.DroppedPackets+it.DroppedPackets, sum.DroppedBytes+it.DroppedBytes
		if use := it.UseBits(); use.Known {
			sum.UseBits = known(sum.UseBits.N + use.N)
		}
	}
	sum.OfRate = s.ofRate(sum.UseBits)
	return sum
}

func (s *Side) ofRate(use Value) Value {
	if !s.Rate.Known || !use.Known {
		return Value{}
	}
	return Percent(uint64(use.N), uint64(s.Rate.N))
}

func (n *Name) rate() (sum float64) {
	for _, s := range n.Sides {
		sum += s.Rate.Or(math.Inf(1))
	}
	return sum
}

// namesOf puts the rules that are chosen together by name, and leaves those without one alone.
func (s *Scene) namesOf(chosen func(*Limit) bool) (names []*Name) {
	at := map[string]*Name{}
	for i := range s.limits {
		l := &s.limits[i]
		if l.IsPool() || !chosen(l) {
			continue
		}
		who := l.Who()
		n := at[who]
		if n == nil || who == "" {
			n = &Name{Name: who}
			at[n.Name], names = n, append(names, n)
		}
		n.side(l).add(l)
	}
	return names
}

// side is the one that a rule belongs to.
func (n *Name) side(l *Limit) *Side {
	for _, s := range n.Sides {
		if s.has(l) {
			return s
		}
	}
	s := &Side{Device: l.Device, Direction: l.Direction, Rate: known(0)}
	n.Sides = append(n.Sides, s)
	return s
}

func (s *Side) has(l *Limit) bool { return l.Device == s.Device && l.Direction == s.Direction }

func (s *Side) add(l *Limit) {
	s.Rules = append(s.Rules, l.index)
	top := l
	for top.Above != nil && top.Above.owner != "" && top.Above.owner == l.Who() {
		top = top.Above
	}
	if top.Above != nil && !slices.Contains(s.Pools, top.Above) {
		s.Pools = append(s.Pools, top.Above)
	}
	if !slices.Contains(s.tops, top) {
		s.tops = append(s.tops, top)
		if most := top.mostOf(s); s.Rate.Known && !math.IsInf(most, 0) {
			s.Rate.N += most
		} else {
			s.Rate = Value{}
		}
	}
}

// mostOf is what a rule or pool lets through of a side at most, in bit/s; infinite for no limit.
func (l *Limit) mostOf(s *Side) float64 {
	limit := math.Inf(1)
	if l.limited && l.single {
		limit = float64(l.rate)
	}
	switch {
	case !l.IsPool() && !s.has(l):
		return 0
	case !l.IsPool():
		return limit
	}
	sum := float64(0)
	for _, below := range l.members {
		sum += below.mostOf(s)
	}
	return min(sum, limit)
}

// name is the row of a name.
func (out *Reading) name(n *Name) Row {
	if n.Name == "" {
		return out.Items[n.Sides[0].Rules[0]].row()
	}
	r := Row{Name: n, in: out, OfRate: -1, ExcessPercent: -1, Level: -1}
	came := Loss{}
	for _, s := range n.Sides {
		use, measured := float64(0), false
		for _, at := range s.Rules {
			it := &out.Items[at]
			one := it.row()
			r.idle = r.idle || one.idle
			r.Use, r.Dropped, r.Refusing = r.Use+one.Use, r.Dropped+one.Dropped, r.Refusing+one.Refusing
			r.Level, r.ExcessPercent = max(r.Level, one.Level), max(r.ExcessPercent, one.ExcessPercent)
			came.add(it.came())
			use, measured = use+one.Use, measured || it.before != nil
		}
		r.OfRate = max(r.OfRate, s.ofRate(Value{use, measured}).Or(-1))
	}
	r.DroppedPercent = Percent(came.DroppedPackets, came.MatchedPackets).Or(-1)
	return r
}

// A SideColumn is a column of a table of names.
type SideColumn struct{ Device, Direction string } // the device is "" for all

// Head is the head of the column.
func (c SideColumn) Head() string { return cmp.Or(c.Device, strings.ToUpper(c.Direction)) }

// SideColumns are the columns for what rows have: a direction each, or if all have one direction of two devices, such as
// downloads of one and uploads of the other, a device each.
func SideColumns(rows []Row) []SideColumn {
	var places []SideColumn
	for i := range rows {
		for _, it := range rows[i].All() {
			at := SideColumn{it.Device, it.Direction}
			if !slices.Contains(places, at) {
				places = append(places, at)
			}
			if len(places) > 2 || at.Direction != places[0].Direction {
				return directions
			}
		}
	}
	if len(places) < 2 {
		return directions
	}
	return places
}

var directions = []SideColumn{{Direction: policy.Egress.String()}, {Direction: policy.Ingress.String()}}

// Sides are those of the name, or of the rule alone.
func (r *Row) Sides() []*Side {
	if r.Name != nil {
		return r.Name.Sides
	}
	var alone Name
	alone.side(r.Limit).add(r.Limit)
	return alone.Sides
}

// Side is the side of the row in a column, of several the one nearest to its rate; nil for none.
func (r *Row) Side(c SideColumn) (in *Side) {
	of := func(s *Side) float64 { return r.Done(s).OfRate.Or(-1) }
	for _, s := range r.Sides() {
		if s.Direction == c.Direction && (c.Device == "" || s.Device == c.Device) && (in == nil || of(s) > of(in)) {
			in = s
		}
	}
	return in
}
