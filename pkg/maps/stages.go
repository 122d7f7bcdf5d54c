package maps

import (
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Stages is a rule and the pools above it, the lowest first, with the state that a packet of flow would meet now.
// model.Climb foretells its verdict.
func (bs *buckets) Stages(e Entry, match policy.Match, flow Flow, now uint64) (entries []Entry, stages []model.Stage) {
	in := bs.phase()
	v := bs.versionIn(e.ID, in)
	entries, stages = []Entry{e}, []model.Stage{bs.stage(e, v, match, flow, now)}
	for range policy.MaxDepth {
		if v.Flags&params.Within == 0 {
			break
		}
		member := e
		v, e = bs.versionIn(v.Within-1, in), bs.pool(v.Within-1, in)
		pool := bs.stage(e, v, match, flow, now)
		pool.Weight = uint64(member.Weight.Value())
		if pool.Share != nil && e.Share.Kind == policy.ShareMember {
			pool.Sharer = bs.memberOf(v, member.ID)
		}
		entries, stages = append(entries, e), append(stages, pool)
	}
	return entries, stages
}

// pool is a pool by its id.
func (ls *limits) pool(id uint32, in phase) Entry {
	e := ls.entry(id, netip.Prefix{}, ls.versionIn(id, in), in)
	e.Prefix = policy.PoolKey(e.Label.Name)
	return e
}

// stage is the limit of a version of a rule or pool, with its state and those of its guarantee and its share.
func (bs *buckets) stage(e Entry, v params.Version, match policy.Match, flow Flow, now uint64) model.Stage {
	s := model.Stage{Limit: model.NewLimit(e.Rule), Weight: 1}
	if e.Rate != policy.Unlimited {
		s.State = bs.State(e, match, flow, now)
	}
	if v.Flags&params.Leased != 0 {
		s.Meter = bs.meterAt(v, now)
	}
	if guarantee, has := bs.Guarantee(e); has {
		s.Guarantee = model.NewLimit(guarantee.Rule)
		s.GuaranteeLevel = bs.SharedLevel(guarantee, now)
		if guarantee.Each.Kind != policy.EachAll {
			s.Members, s.TogetherLevel, s.GuaranteeLevel = uint64(guarantee.Members), s.GuaranteeLevel, 0
			if n, has := bs.slotOf(makeKey(guarantee.ID, guarantee.Each, match, flow)); has {
				s.GuaranteeLevel = bs.level(guarantee.ID, load(bs.slot(n)), now)
			}
		}
	}
	for _, other := range bs.Others(e) {
		s.Others = append(s.Others, bs.otherOf(other, match, flow, now))
	}
	if s.Share = bs.shareOf(v); s.Share != nil && e.Share.Kind != policy.ShareMember {
		key := makeKey(e.ID, sharersOf(e.Share, flow.Far(match)), match, flow)
		key.Sharer = 1
		s.Sharer = &model.Sharer{} // one without a slot is new
		if n, has := bs.slotOf(key); has {
			s.Sharer = sharer(bs.slot(n))
		}
	}
	return s
}

// otherOf is another limit of a rule or pool, with the level that a packet of flow would meet.
func (bs *buckets) otherOf(e Entry, match policy.Match, flow Flow, now uint64) model.Other {
	o := model.Other{Limit: model.NewLimit(e.Rule), Unit: e.Unit}
	v := bs.current(e.ID)
	o.Meter = bs.meterAt(v, now)
	o.Capacity = v.Limit // of a cluster, what is granted
	if o.Level = bs.SharedLevel(e, now); e.Each.Kind != policy.EachAll {
		if key := makeKey(e.ID, e.Each, match, flow); bs.canHaveSlot(key, now) {
			o.Level = bs.levelOf(key, now)
		}
	}
	if e.Unit == policy.Flows {
		key := makeKey(e.ID, policy.Each{Kind: policy.EachFlow}, match, flow)
		o.New = flow.Proto == unix.IPPROTO_TCP || bs.levelOf(key, now) == 0
	}
	if v.Calendar > 0 {
		o.Capacity += aheadOf(o.Meter, load(&bs.rule(e.ID).Shared), now)
		o.Ends = bs.ends(v.Calendar, now)
	}
	return o
}

// sharersOf is the bucket scope in which each key is that of a sharer, for packets with a far address.
func sharersOf(s policy.Share, far netip.Addr) policy.Each {
	switch s.Kind {
	case policy.ShareFlow:
		return policy.Each{Kind: policy.EachFlow}
	case policy.ShareSubnet:
		return policy.Each{Kind: policy.EachSubnet, Bits: uint8(min(int(s.Bits), far.BitLen()))} // a pool has both families
	}
	return policy.Each{Kind: policy.EachHost}
}

// memberOf is a rule or pool as a sharer of its pool. One that was within another pool is new.
func (bs *buckets) memberOf(pool params.Version, id uint32) *model.Sharer {
	if fair := &bs.rule(id).Fair; atomic.LoadUint32(&fair.Fingerprint) == pool.Salt {
		return sharer(fair)
	}
	return &model.Sharer{}
}

func sharer(b *bpf.AbiBucket) *model.Sharer {
	return &model.Sharer{TAT: atomic.LoadUint64(&b.Tat), Largest: atomic.LoadUint32(&b.Tick)}
}
