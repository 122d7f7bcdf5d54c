package live

import (
	"net/netip"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Bucket is a bucket of a rule that is not empty.
type Bucket struct {
	Name        string  `json:"key"`         // of the host, subnet or flow; "pool" of a pool
	Bytes       uint64  `json:"level_bytes"` // its level
	SecondBytes *uint64 `json:"second_level_bytes"`
	WaitNS      *uint64 `json:"wait_ns"`
	UsedBytes   *uint64 `json:"quota_used_bytes"` // of its quota; null without one
	LeftBytes   *uint64 `json:"quota_left_bytes"` // of its quota and the grace
	Packets     *uint64 `json:"pps_level_packets"`
	Flows       *uint64 `json:"new_flows_level"`
}

// A FullBucket is one of the fullest buckets of all rules.
type FullBucket struct {
	*Item
	Bucket
	Percent float64 // the level in percent of what the bucket and its queue can hold
}

// A Part of a rule is one of its hosts, subnets or flows: what it sends, and its bucket.
type Part struct {
	Bucket                // Name is always known
	Full            Value // its level in percent of what the bucket and its queue can hold; not known if it has no bucket
	Offered, Passed Value // bit/s; not known of who is only known by a bucket
}

// A Use is who used a rule over an interval.
type Use struct {
	*Item
	Host            string // whose flows the parts are; "" for all hosts of the rule
	Offered, Passed Value  // bit/s, of all together
	Parts           []Row
	Note            string // what the figures lack
}

// PartRow is the row of a part of the item.
func (it *Item) PartRow(p Part) Row {
	use := p.Passed.Or(p.Offered.Or(0))
	dropped := max(p.Offered.Or(0)-use, 0)
	return Row{Item: it, Part: &p, idle: !it.Place.InForce, Use: use, Dropped: dropped, Refusing: dropped, OfRate: -1, DroppedPercent: -1, ExcessPercent: -1, Level: p.Full.Or(-1)}
}

func (l *Limit) bucket(b maps.Bucket) Bucket {
	out := Bucket{Name: b.Flow.String(), Bytes: b.LevelBytes, SecondBytes: l.ifColours(l.Algorithm, b.SecondBytes)}
	switch {
	case l.IsPool():
		out.Name = "pool"
	case b.Subnet.IsValid():
		out.Name = policy.NetworkText(b.Subnet)
	}
	if l.Excess != policy.Delay || l.Algorithm.HasColours() {
		return out
	}
	packet := model.Packet{Bytes: model.Counted(l.Place.FullFrame, l.Framing)}
	if o := model.NewLimit(l.Rule).Decide(model.State{Level: b.LevelBytes << model.UnitBits, FIFO: true}, packet); !o.Excess {
		out.WaitNS = &o.Wait
	}
	return out
}

// levels are those of the other limits of a bucket, by what they count.
type levels [policy.AfterQuota + 1]uint64

// Buckets are the buckets of items that are not empty, or of whose other limits one is not, the shared ones too, in a store that has
// their rules.
func Buckets(store *maps.Store, items []*Item) [][]Bucket {
	type key struct {
		item   int
		subnet netip.Prefix
		flow   maps.Flow
	}
	all, entries := make([][]Bucket, len(items)), make([]maps.Entry, len(items))
	var others []maps.Entry
	var of []int // the item of each
	have := map[key]levels{}
	for i, it := range items {
		entries[i] = *it.Entry
		if it.Each.Kind != policy.EachAll {
			for _, o := range it.others {
				others, of = append(others, o), append(of, i)
			}
			continue
		}
		some, has := it.Level|it.Second|it.Used.AheadBytes, levels{}
		for _, o := range it.others {
			has[o.Unit] = model.BytesOf(o.Unit, store.SharedLevel(o, maps.Now()))
			some |= has[o.Unit]
		}
		if some > 0 {
			all[i] = append(all[i], it.with(has, it.Used.AheadBytes, maps.Bucket{Subnet: it.Prefix, LevelBytes: it.Level, SecondBytes: it.Second}))
		}
	}
	for i, b := range store.Buckets(others, maps.Now) {
		k := key{of[i], b.Subnet, b.Flow}
		has := have[k]
		has[others[i].Unit] = b.LevelBytes
		have[k] = has
	}
	for i, b := range store.Buckets(entries, maps.Now) {
		k := key{i, b.Subnet, b.Flow}
		all[i] = append(all[i], items[i].with(have[k], 0, b))
		delete(have, k)
	}
	for k, has := range have {
		all[k.item] = append(all[k.item], items[k.item].with(has, 0, maps.Bucket{Subnet: k.subnet, Flow: k.flow}))
	}
	return all
}

// with is a bucket with the levels of its other limits, and what is ahead of its quota.
func (l *Limit) with(has levels, ahead uint64, b maps.Bucket) Bucket {
	out := l.bucket(b)
	for _, o := range l.others {
		switch level := has[o.Unit]; o.Unit {
		case policy.Packets:
			out.Packets = &level
		case policy.Flows:
			out.Flows = &level
		case policy.InQuota:
			q := maps.NewQuota(o.Capacity+ahead, level)
			out.UsedBytes, out.LeftBytes = &q.UsedBytes, &q.LeftBytes
		}
	}
	return out
}

// FullestPercent is how full the fullest of the limits of a bucket is, without its quota; not known without a limit.
func (it *Item) FullestPercent(b Bucket) Value {
	full := it.FullPercent(b.Bytes)
	if b.Packets != nil {
		full.N = max(full.N, Percent(*b.Packets, uint64(it.Also.PacketBurst)).N)
	}
	if b.Flows != nil {
		full.N = max(full.N, Percent(*b.Flows, uint64(it.Also.FlowBurst)).N)
	}
	return full
}
