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

// Buckets are the buckets of items that are not empty, or of whose quota something is used, the shared ones too, in a store that
// has their rules.
func Buckets(store *maps.Store, items []*Item) [][]Bucket {
	type key struct {
		item   int
		subnet netip.Prefix
		flow   maps.Flow
	}
	all, entries := make([][]Bucket, len(items)), make([]maps.Entry, len(items))
	var quotas []maps.Entry
	var of []int // the item of each
	used := map[key]uint64{}
	for i, it := range items {
		entries[i] = *it.Entry
		switch quota := it.quota(); {
		case it.Each.Kind == policy.EachAll:
			if it.Level|it.Second|it.Used.UsedBytes|it.Used.AheadBytes > 0 {
				all[i] = append(all[i], it.bucket(maps.Bucket{Subnet: it.Prefix, LevelBytes: it.Level, SecondBytes: it.Second}).using(quota, it.Used.UsedBytes, it.Used.AheadBytes))
			}
		case quota != nil:
			quotas, of = append(quotas, *quota), append(of, i)
		}
	}
	for i, b := range store.Buckets(quotas, maps.Now) {
		used[key{of[i], b.Subnet, b.Flow}] = b.LevelBytes
	}
	for i, b := range store.Buckets(entries, maps.Now) {
		k := key{i, b.Subnet, b.Flow}
		all[i] = append(all[i], items[i].bucket(b).using(items[i].quota(), used[k], 0))
		delete(used, k)
	}
	for k, bytes := range used {
		it := items[k.item]
		all[k.item] = append(all[k.item], it.bucket(maps.Bucket{Subnet: k.subnet, Flow: k.flow}).using(it.quota(), bytes, 0))
	}
	return all
}

// using is the bucket with what is used of its quota, and ahead; nil for none.
func (b Bucket) using(quota *maps.Entry, used, ahead uint64) Bucket {
	if quota != nil {
		q := maps.NewQuota(quota.Capacity+ahead, used)
		b.UsedBytes, b.LeftBytes = &q.UsedBytes, &q.LeftBytes
	}
	return b
}

// quota is the quota among the other limits; nil for none.
func (l *Limit) quota() *maps.Entry {
	for i := range l.others {
		if l.others[i].Unit == policy.InQuota {
			return &l.others[i]
		}
	}
	return nil
}
