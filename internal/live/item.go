// Package live reads rules and pools, once or again and again, and knows each figure of what they did.
package live

import (
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Key tells a rule or pool from all others, now and later.
type Key = history.Key

// A Limit is a rule or pool as it is set. Readings share it until rules change.
type Limit struct {
	Key
	*maps.Entry
	Place *Place
	Above *Limit // the pool that it is within; nil for none

	members   []*Limit     // what is directly within the pool
	owner     string       // who has all rules within the pool; "" where they differ
	index     int          // in the items of a reading
	guarantee uint32       // its id plus one; 0 for none
	shadow    *maps.Entry  // nil for none
	others    []maps.Entry // other limits
	// Each second all rules are compared. What that takes of the Entry is here, as all entries are too large for the CPU's cache.
	isPool, limited, single bool   // single: all packets have one bucket
	oneHost                 bool   // that bucket is the one of a host
	rate, capacity          uint64 // without a lease, see InForce
}

// IsPool reports whether it is a pool.
func (l *Limit) IsPool() bool { return l.isPool }

// A Place is where limits are in force: a direction of a device, or the pools.
type Place struct {
	Device    string // "" for the pools
	Direction policy.Direction
	Match     policy.Match
	InForce   bool
	Status    string // why it is not, or what is unusual
	Mode      loader.Mode
	FullFrame uint64 // bytes of the longest packet of the device
}

func placeOf(h *loader.Hook) Place {
	return Place{h.Name(), h.Direction, h.Match(), h.State.InForce(), h.Status(), h.Mode, h.Device.FullFrame()}
}

// newLimit is a rule or pool at a place.
func newLimit(at *Place, e *maps.Entry) Limit {
	l := Limit{Entry: e, Place: at, Key: Key{Pool: e.Label.Name}, capacity: e.Capacity, isPool: e.Rule.Pool, limited: e.Rate != policy.Unlimited}
	if !e.Rule.Pool {
		l.Key = Key{Device: at.Device, Direction: at.Direction.String(), Network: policy.CIDR(e.Prefix)}
	}
	l.rate, l.single = l.most(), l.Scope() == ""
	l.oneHost = e.Each.Kind == policy.EachHost && policy.IsHost(e.Prefix) && !e.NAT && !e.Rule.Pool
	return l
}

// Who is what the rule is called on its device; or the name of the pool.
func (l *Limit) Who() string { return l.Rule.CalledOn(l.Device) }

// Sentence says what the limit does.
func (l *Limit) Sentence() string {
	return l.Entry.Sentence(l.Place.Device, l.Place.Direction, l.Place.Match)
}

// Scope is who has a bucket, where more than one key may have one; else "".
func (l *Limit) Scope() string { return Scope(&l.Rule) }

// Scope is the same for a rule that is at no place.
func Scope(r *policy.Rule) string {
	each := r.Each.Canonical(r.Prefix)
	if r.Rate == policy.Unlimited || each.Kind == policy.EachAll || each.Kind == policy.EachHost && policy.IsHost(r.Prefix) && !r.NAT {
		return ""
	}
	return each.String()
}

// Counts are what a rule or pool counted since it was set.
type Counts struct {
	maps.Counters                             // of a pool, the dropped packets are those that it refused itself
	GuaranteedPackets, GuaranteedBytes uint64 // of the passed ones, those that the guarantee covered
	// The packets that other limits refused, of packets, new flows and a quota.
	TooManyPackets, TooManyFlows, BeyondQuota uint64
	// Of a pool: what became of the packets of all rules within it, whoever dropped them.
	Members Loss
}

// A Loss is what was dropped of packets.
type Loss struct{ MatchedPackets, DroppedPackets, DroppedBytes uint64 }

func (l *Loss) add(a Loss) {
	l.MatchedPackets, l.DroppedPackets, l.DroppedBytes = l.MatchedPackets+a.MatchedPackets, l.DroppedPackets+a.DroppedPackets, l.DroppedBytes+a.DroppedBytes
}

func lossOf(c *maps.Counters) Loss {
	return Loss{c.PassedPackets + c.DroppedPackets, c.DroppedPackets, c.DroppedBytes}
}

// An Item is a rule or pool in a reading.
type Item struct {
	*Limit
	Counts
	At       uint64        // ns, by maps.Now
	Interval time.Duration // since it was read before; 0 if nothing was measured

	Level, Second uint64      // bytes in the bucket of all packets, else in the spill bucket; and in the second one of a rule with colours
	Lease         *maps.Lease // the last one; nil for none
	Shadow        *Shadow     // nil for none
	Used          maps.Quota  // of a quota; of the spill bucket where each host, subnet or flow has one
	RevertsInNS   *uint64     // nil unless it came with a change that is pending
	// ActiveBuckets and ActiveSharers are how many have a bucket that is not empty, and a part of the shares; nil unless
	// they were asked for.
	ActiveBuckets, ActiveSharers *uint64

	// LostPackets and LostBytes are of a pool: what rules within it lost since the reader began. They never decrease, as
	// Members does when a rule leaves the pool or goes.
	LostPackets, LostBytes uint64

	in      *Reading // nil if it was read alone
	fullest float64  // in percent: the fullest bucket of its hosts, subnets or flows
	before  *Counts  // what it had counted then; nil if it was not there, or was set anew since
	lately  Loss     // of a pool: Members since then
}

// A Shadow is the limit that a rule proposes, and what it counted.
type Shadow struct {
	policy.Rule
	maps.Counters
	Room     uint32     // about how many of the hosts that all shadows would have affected are remembered
	Affected []Affected // nil unless they were asked for
}

// Refused is the packets that it would have refused, and their bytes.
func (s *Shadow) Refused() (packets, bytes uint64) {
	if s.Algorithm.HasColours() { // some excess packets would pass
		return s.DroppedPackets, s.DroppedBytes
	}
	return s.ExcessPackets, s.ExcessBytes
}

// ReadLimit reads what is counted of a rule or pool alone: not what members of a pool lost.
func ReadLimit(h *loader.Hook, e maps.Entry) Item {
	at := placeOf(h)
	l := newLimit(&at, &e)
	l.companions(h.Set.Store)
	return l.read(h.Set.Store, maps.Now())
}

func (l *Limit) companions(s *maps.Store) {
	if its, has := s.Guarantee(*l.Entry); has {
		l.guarantee = its.ID + 1
	}
	if its, has := s.Shadow(*l.Entry); has {
		l.shadow = &its
	}
	l.others = s.Others(*l.Entry)
}

func (l *Limit) read(s *maps.Store, now uint64) Item {
	counters, shared := s.Read(l.ID, now)
	host := l.Prefix.Addr()
	if l.oneHost && l.limited {
		state := s.State(*l.Entry, policy.MatchSrc, maps.Flow{Src: host, Dst: host}, now)
		shared = model.Levels{First: state.Level, Second: state.Second}
	}
	it := Item{Limit: l, Counts: Counts{Counters: counters}, At: now, Level: model.Bytes(shared.First)}
	if l.guarantee != 0 {
		c := s.Counters(l.guarantee - 1)
		it.GuaranteedPackets, it.GuaranteedBytes = c.PassedPackets, c.PassedBytes
	}
	for _, other := range l.others {
		counted := s.Counters(other.ID)
		switch other.Unit {
		case policy.Packets:
			it.TooManyPackets = counted.DroppedPackets
		case policy.Flows:
			it.TooManyFlows = counted.DroppedPackets
		case policy.InQuota:
			if it.Used = s.QuotaOf(other, now); l.oneHost {
				it.Used = s.QuotaOfHost(other, host, now)
			}
		}
		if other.Unit == policy.InQuota || other.Unit == policy.AfterQuota {
			it.BeyondQuota += counted.DroppedPackets
		}
	}
	if l.Algorithm.HasColours() {
		it.Second = model.Bytes(model.NewColoured(l.Rule).E(shared))
	}
	if l.HasLeases() {
		if lease, ok := s.Pools().Lease(l.Prefix); ok {
			it.Lease = &lease
		}
	}
	if l.shadow != nil {
		it.Shadow = &Shadow{Rule: l.shadow.Rule, Counters: s.Counters(l.shadow.ID), Room: s.Size().Affected}
	}
	if s.Changes(l.ID) { // most do not
		if state, until := s.Change(); state == maps.Pending {
			it.RevertsInNS = Ahead(until)
		}
	}
	return it
}

// Since measures what an item did since it was read before, when it had these counts.
func (it *Item) Since(at uint64, before *Counts) {
	it.Interval = time.Duration(it.At - at)
	if it.Counters.Follows(before.Counters) && it.GuaranteedBytes >= before.GuaranteedBytes {
		it.before = before
	}
}

// grew is how much a counter grew over the interval; ok is false if that is not known.
func (it *Item) grew(of func(*Counts) uint64) (n uint64, ok bool) {
	if it.before == nil {
		return 0, false
	}
	now, before := of(&it.Counts), of(it.before)
	return now - min(now, before), true
}

// offeredLately is what came over the interval, of a pool of all rules within it.
func (it *Item) offeredLately() (l Loss, ok bool) {
	switch {
	case it.before == nil:
		return l, false
	case it.IsPool():
		return it.lately, true
	}
	now, before := lossOf(&it.Counters), lossOf(&it.before.Counters)
	return Loss{
		now.MatchedPackets - min(now.MatchedPackets, before.MatchedPackets), now.DroppedPackets - before.DroppedPackets,
		now.DroppedBytes - min(now.DroppedBytes, before.DroppedBytes),
	}, true
}

// Parent is the pool that the item is within; nil for none, and if it was read alone.
func (it *Item) Parent() *Item {
	if it.Above == nil || it.in == nil {
		return nil
	}
	return &it.in.Items[it.Above.index]
}

// Below is how many rules and pools are directly within the pool.
func (l *Limit) Below() int { return len(l.members) }

// Children are what is directly within the pool.
func (it *Item) Children() (all []*Item) {
	for _, l := range it.members {
		all = append(all, &it.in.Items[l.index])
	}
	return all
}

// Offered is what came of a rule, or of the rules within a pool, since these were set.
func (it *Item) Offered() Loss {
	if it.IsPool() {
		return it.Members
	}
	return lossOf(&it.Counters)
}

// ifQuota is a number of something with a quota; nil without one.
func (l *Limit) ifQuota(n uint64) *uint64 {
	if l.Also.Quota.Bytes == 0 {
		return nil
	}
	return &n
}

// quotaOfAll is the same where all packets have one quota.
func (l *Limit) quotaOfAll(n uint64) *uint64 {
	if l.Scope() != "" {
		return nil
	}
	return l.ifQuota(n)
}
