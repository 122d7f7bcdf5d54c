package model

import (
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// SeenNS is how long (ns) a flow without packets is remembered.
const SeenNS = 30e9

// An Other is another limit of a rule or pool, of which Rule.Chained tells, with the level of its bucket when a packet arrives.
type Other struct {
	*Limit
	Unit  policy.Unit
	Level uint64 // units
	Ends  uint64 // ns until the period of a quota ends; 0 if there is none
	New   bool   // the packet begins a flow, for a limit of these
}

// NewOthers are the other limits of a rule or pool, with empty buckets.
func NewOthers(r policy.Rule) (all []Other) {
	for next, ok := r.Chained(); ok; next, ok = next.Chained() {
		all = append(all, Other{Limit: NewLimit(next), Unit: next.Unit})
	}
	return all
}

// Renew has a quota without a rate begin anew with each period of the calendar: period_began of bpf/look.h.
func (o *Other) Renew(p policy.Period, in *time.Location, now uint64) {
	const mask = 1<<TickBits - 1
	edge := now &^ mask
	at := time.Unix(int64(edge/1e9), int64(edge%1e9)).In(in) // also after the year 2262
	o.Edited, o.Fresh, o.Until = true, Tick(uint64(p.Begins(at, 0).UnixNano())+mask), 0
	o.Ends = uint64(p.Begins(at, 1).UnixNano()) - now
}

// Cost is what a packet counts, in units.
func (o *Other) Cost(p Packet) uint64 {
	switch {
	case o.Unit == policy.Packets:
		return max(p.Packets, 1) << UnitBits
	case o.Unit != policy.Flows:
		return p.Bytes << BitsOf(o.Unit)
	case o.New:
		return 1 << UnitBits
	}
	return 0
}

func (o *Other) fits(p Packet) bool {
	cost := o.Cost(p)
	return cost == 0 || o.Level == 0 || o.Level+cost <= o.Capacity
}

// wait is how long a packet that does not conform has to wait, in ns.
func (o *Other) wait(p Packet) uint64 {
	cost := min(o.Cost(p), o.Capacity)
	ns := o.Drain(o.Level - min(o.Level, o.Capacity-cost))
	if o.Ends > 0 {
		ns = min(ns, o.Ends)
	}
	return ns
}

// After is the limit after a time in ns without packets.
func (o Other) After(ns uint64) Other {
	if o.Level = o.Drained(o.Level, ns); o.Ends > 0 {
		if ns >= o.Ends {
			o.Level = 0
		}
		o.Ends -= min(o.Ends, ns)
	}
	return o
}

// refusing is the other limit of a stage that refuses a packet, or NoStage.
func (s *Stage) refusing(p Packet) int {
	by, left := NoStage, false // whether something is left of the quota
	for i := range s.Others {
		o := &s.Others[i]
		fits := o.fits(p)
		switch {
		case o.Unit == policy.AfterQuota && (left || fits):
			by = NoStage
			continue
		case by != NoStage && o.Unit != policy.AfterQuota:
			return by
		case !fits:
			by = i
		}
		left = fits && o.Unit == policy.InQuota
	}
	return by
}

// Charged are the other limits of a stage to which a packet that passes is charged, each with what it counts there.
func (s *Stage) Charged(p Packet, charge func(i int, units uint64)) {
	left := false
	for i := range s.Others {
		o := &s.Others[i]
		fits := o.fits(p)
		if !(o.Unit == policy.AfterQuota && left) && (fits || o.Unit != policy.InQuota) {
			charge(i, o.Cost(p))
		}
		left = fits && o.Unit == policy.InQuota
	}
}
