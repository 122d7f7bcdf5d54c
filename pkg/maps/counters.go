package maps

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Counters of one rule, summed over CPUs, since it was set. Packets are counted as on the
// wire: a GSO or GRO skb counts as its segments. Passed and dropped packets together are
// all that matched. Excess packets did not conform; they may have passed. Delayed packets
// are passed packets that were queued. After a change from or to delay, a rule counts its
// earlier delayed packets as excess, and vice versa.
type Counters struct {
	PassedPackets, PassedBytes   uint64
	ExcessPackets, ExcessBytes   uint64
	DroppedPackets, DroppedBytes uint64
	DelayedPackets, DelayedBytes uint64
	MarkedPackets                uint64
	ContendedPackets             uint64
	ExtraPackets                 uint64 // passed and dropped packets beyond the first of each skb
	ExemptPackets                uint64 // neighbour discovery, in no other counter
	// SpilledPackets are passed and dropped packets that were charged to the spill bucket,
	// as the table had no room for their key.
	SpilledPackets uint64
	// Of a rule with colours: passed and dropped packets by colour. Yellow and red ones are excess packets.
	GreenPackets, GreenBytes   uint64
	YellowPackets, YellowBytes uint64
	RedPackets, RedBytes       uint64
}

// SKBs is how many skbs were passed or dropped.
func (c Counters) SKBs() uint64 {
	all := c.PassedPackets + c.DroppedPackets
	return all - min(all, c.ExtraPackets)
}

// Follows reports whether c may have been counted after earlier: no rule was set anew in between.
func (c Counters) Follows(earlier Counters) bool {
	return c.PassedPackets >= earlier.PassedPackets && c.PassedBytes >= earlier.PassedBytes && c.DroppedPackets >= earlier.DroppedPackets &&
		c.ExcessPackets+c.DelayedPackets >= earlier.ExcessPackets+earlier.DelayedPackets
}

// Since is what was counted since earlier, which c follows. What counts as another thing since a change counts as nothing.
func (c Counters) Since(earlier Counters) Counters {
	less := func(now *uint64, before uint64) { *now -= min(*now, before) }
	less(&c.PassedPackets, earlier.PassedPackets)
	less(&c.PassedBytes, earlier.PassedBytes)
	less(&c.ExcessPackets, earlier.ExcessPackets)
	less(&c.ExcessBytes, earlier.ExcessBytes)
	less(&c.DroppedPackets, earlier.DroppedPackets)
	less(&c.DroppedBytes, earlier.DroppedBytes)
	less(&c.DelayedPackets, earlier.DelayedPackets)
	less(&c.DelayedBytes, earlier.DelayedBytes)
	less(&c.MarkedPackets, earlier.MarkedPackets)
	less(&c.ContendedPackets, earlier.ContendedPackets)
	less(&c.ExtraPackets, earlier.ExtraPackets)
	less(&c.ExemptPackets, earlier.ExemptPackets)
	less(&c.SpilledPackets, earlier.SpilledPackets)
	less(&c.GreenPackets, earlier.GreenPackets)
	less(&c.GreenBytes, earlier.GreenBytes)
	less(&c.YellowPackets, earlier.YellowPackets)
	less(&c.YellowBytes, earlier.YellowBytes)
	less(&c.RedPackets, earlier.RedPackets)
	less(&c.RedBytes, earlier.RedBytes)
	return c
}

// Counters are the counters of the rule with that id.
func (ls *limits) Counters(id uint32) Counters {
	sum, _ := ls.Read(id, 0)
	return sum
}

// Read is the counters of the rule with that id, and the levels of its shared buckets, in units: of a rule with colours both.
// With --each they are those of the spill buckets.
func (ls *limits) Read(id uint32, now uint64) (sum Counters, shared model.Levels) {
	in := ls.phase()
	v := ls.versionIn(id, in)
	sum, shared.First = ls.count(id, v), ls.meterAt(v, now).Level(load(&ls.rule(id).Shared), now)
	if v.Flags&params.Colours != 0 {
		// The second limit passes yellow packets, drops red ones, and has green ones as further excess.
		id, v = v.AbiColdParams.Second, ls.versionIn(v.AbiColdParams.Second, in)
		second := ls.count(id, v)
		sum.YellowPackets, sum.YellowBytes, sum.RedPackets, sum.RedBytes = second.PassedPackets, second.PassedBytes, second.DroppedPackets, second.DroppedBytes
		sum.GreenPackets, sum.GreenBytes = second.ExcessPackets-second.DroppedPackets, second.ExcessBytes-second.DroppedBytes
		shared.Second = ls.meterAt(v, now).Level(load(&ls.rule(id).Shared), now)
	}
	return sum, shared
}

// count is Counters of a version without colours.
func (ls *limits) count(id uint32, v params.Version) (sum Counters) {
	r := ls.rule(id)
	sum.ExtraPackets = atomic.LoadUint64(&r.ExtraPackets) // counted last, so read first
	sum.ExemptPackets = atomic.LoadUint64(&r.ExemptPackets)
	sum.SpilledPackets = atomic.LoadUint64(&r.SpilledPackets)
	counters := ls.countersOf(id)
	for i := range counters {
		c := &counters[i]
		sum.PassedPackets += atomic.LoadUint64(&c.PassedPackets)
		sum.PassedBytes += atomic.LoadUint64(&c.PassedBytes)
		sum.DroppedPackets += atomic.LoadUint64(&c.DroppedPackets)
		sum.DroppedBytes += atomic.LoadUint64(&c.DroppedBytes)
		sum.DelayedPackets += atomic.LoadUint64(&c.PassedExcessPackets)
		sum.DelayedBytes += atomic.LoadUint64(&c.PassedExcessBytes)
		sum.MarkedPackets += atomic.LoadUint64(&c.MarkedPackets)
		sum.ContendedPackets += atomic.LoadUint64(&c.ContendedPackets)
	}
	sum.ExcessPackets, sum.ExcessBytes = sum.DroppedPackets, sum.DroppedBytes
	if v.Flags&params.Delay == 0 {
		sum.ExcessPackets += sum.DelayedPackets
		sum.ExcessBytes += sum.DelayedBytes
		sum.DelayedPackets, sum.DelayedBytes = 0, 0
	}
	return sum
}

// Shadow is the limit of a rule's shadow, which has its own buckets and counters. It passes
// all packets; its excess is what it would have refused. False if the rule has no shadow.
func (ls *limits) Shadow(e Entry) (Entry, bool) { return ls.companion(0, e) }

// Guarantee is the limit of a rule's guarantee, which has its own buckets and counters. It passes the packets
// that are guaranteed. False if the rule has no guarantee.
func (ls *limits) Guarantee(e Entry) (its Entry, has bool) {
	if !e.Algorithm.HasColours() {
		its, has = ls.companion(1, e)
	}
	return its, has
}

// Second is the second limit of a rule with colours, which has its own buckets. False if the rule has no colours.
func (ls *limits) Second(e Entry) (its Entry, has bool) {
	if e.Algorithm.HasColours() {
		its, has = ls.companion(1, e)
	}
	return its, has
}

// Others are the other limits of a rule or pool, of which Rule.Chained tells. Each has its own buckets and counters.
func (ls *limits) Others(e Entry) (all []Entry) {
	if e.Also == (policy.Also{}) { // to ask takes a while for many rules
		return nil
	}
	for its, has := ls.companion(params.Chain, e); has; its, has = ls.companion(params.Chain, its) {
		all = append(all, its)
	}
	return all
}

func (ls *limits) companion(kind int, e Entry) (its Entry, has bool) {
	if its.ID, has = params.Companions[kind].Of(ls.current(e.ID)); has {
		its.Rule, _ = params.Companions[kind].Limit(e.Rule)
	}
	return its, has
}

// Affected is a host or subnet with packets that a shadow would have refused.
type Affected struct {
	Subnet         netip.Prefix
	Packets, Bytes uint64
}

// Affected are the hosts and subnets that the shadow of each of the rules would have affected, by
// the rule's id, the most affected first. Beyond Size.Affected, the oldest are forgotten.
func (s *Store) Affected(rules []Entry) (map[uint32][]Affected, error) {
	type shadowed struct {
		id   uint32
		each policy.Each
	}
	by, affected := map[uint32]shadowed{}, map[uint32][]Affected{}
	for _, e := range rules {
		if shadow, ok := s.Shadow(e); ok {
			each := e.Shadow.Each
			if each.Kind != policy.EachSubnet {
				each = policy.Each{Kind: policy.EachHost}
			}
			by[s.current(shadow.ID).Salt] = shadowed{e.ID, each}
		}
	}
	if len(by) == 0 {
		return affected, nil
	}
	var key bpf.AbiAffectedKey
	var value bpf.AbiAffected
	entries := s.maps[bpf.ShapectlMapAffected].Iterate()
	for entries.Next(&key, &value) {
		of, ok := by[key.Salt]
		if !ok {
			continue // of a shadow that is gone
		}
		addr := prefixes.Address(key.Addr, uint8(key.Family))
		affected[of.id] = append(affected[of.id], Affected{netip.PrefixFrom(addr, eachBits(of.each, addr)), value.Packets, value.Bytes})
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the hosts that shadows would have affected: %w", err)
	}
	for _, list := range affected {
		slices.SortFunc(list, func(a, b Affected) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), policy.ComparePrefix(a.Subnet, b.Subnet))
		})
	}
	return affected, nil
}
