package maps

import (
	"iter"
	"net/netip"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/prefixes"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Bucket is a bucket of a rule, with its key.
type Bucket struct {
	Subnet      netip.Prefix // of a host or subnet; invalid for a flow
	Flow        Flow
	LevelBytes  uint64
	SecondBytes uint64 // of a rule with colours: the level of E, or with trtcm of P
}

// Meter is the meter of a rule by the parameters in force.
func (ls *limits) Meter(e Entry) model.Meter { return ls.meterAt(ls.current(e.ID), ls.now()) }

// level is the level of a bucket, in units, by the limit with that id.
func (cs *clocks) level(id uint32, b model.Bucket, now uint64) uint64 {
	return cs.meterAt(cs.current(id), now).Level(b, now)
}

// SharedLevel is the level of a rule's shared bucket, in units. With --each that is the
// spill bucket.
func (ls *limits) SharedLevel(e Entry, now uint64) uint64 {
	return ls.level(e.ID, load(&ls.rule(e.ID).Shared), now)
}

// State is the state that a packet of flow would meet now. With Spilled, the table has no
// room for its key, and the packet would be charged to the spill bucket.
func (bs *buckets) State(e Entry, match policy.Match, flow Flow, now uint64) (state model.State) {
	state.Level, state.Departs = bs.SharedLevel(e, now), atomic.LoadUint64(&bs.rule(e.ID).Departs)
	second, coloured := bs.Second(e)
	if coloured {
		state.Second = bs.SharedLevel(second, now)
	}
	if e.Each.Kind != policy.EachAll {
		key, other := makeKey(e.ID, e.Each, match, flow), makeKey(second.ID, e.Each, match, flow)
		state.Spilled = !bs.canHaveSlot(key, now) || coloured && !bs.canHaveSlot(other, now)
		if !state.Spilled {
			state.Level, state.Departs = bs.levelOf(key, now), 0
			if n, has := bs.slotOf(key); has {
				state.Departs = atomic.LoadUint64(&bs.table().keys[n].Departs)
			}
			if coloured {
				state.Second = bs.levelOf(other, now)
			}
		}
	}
	if e.Order != policy.SparseFirst {
		return state
	}
	v, key := bs.current(e.ID), makeKey(e.ID, policy.Each{Kind: policy.EachFlow}, match, flow)
	state.Flow = bs.levelOf(key, now)
	state.FIFO = !bs.canHaveSlot(key, now) || now < atomic.LoadUint64(&bs.rule(e.ID).FifoUntil) || bs.leaseEnded(v, now) ||
		v.Reverted && now < bs.change.Until+uint64(policy.MaxWait)
	return state
}

// Buckets are the buckets of rules that are not empty, each with the index of its rule, without shared buckets and the words of
// sparse flows. It reads the table once for all of them, which takes a while: packets charge buckets meanwhile, so it asks for
// the time again.
func (bs *buckets) Buckets(rules []Entry, now func() uint64) iter.Seq2[int, Bucket] {
	index := map[uint32]int{}
	for i, e := range rules {
		if bs.rule(e.ID).HasSlots != 0 {
			index[e.ID] = i
			if second, coloured := bs.Second(e); coloured {
				index[second.ID] = i
			}
		}
	}
	has := func(id uint32) bool { _, ok := index[id]; return ok }
	return func(yield func(int, Bucket) bool) {
		if len(index) == 0 {
			return
		}
		at := now()
		for n := range bs.slots(has) {
			before, k := load(bs.slot(n)), bs.table().keys[n]
			i, ok := index[k.Id]
			if !ok || before.TAT&tatBusy != 0 || k.Sharer != 0 {
				continue
			}
			b := bs.bucketIn(rules[i], n, before, k, at)
			if b.LevelBytes > rules[i].Capacity {
				at = now()
				b = bs.bucketIn(rules[i], n, before, k, at)
			}
			if b.LevelBytes|b.SecondBytes != 0 && !yield(i, b) {
				return
			}
		}
	}
}

// bucketIn is the bucket in a slot whose word and key were read; the zero Bucket if it is empty, or not one of the rule.
func (bs *buckets) bucketIn(e Entry, n uint32, word model.Bucket, k bpf.AbiKey, now uint64) (b Bucket) {
	level := bs.level(k.Id, word, now)
	places, fingerprint := bs.places(k, bs.current(k.Id).Salt), atomic.LoadUint32(&bs.slot(n).Fingerprint)
	// Level and key belong together if no other key got the slot meanwhile.
	is := fingerprint == places[0].fingerprint || fingerprint == places[1].fingerprint
	if second, coloured := bs.Second(e); coloured {
		first, other := k, k
		first.Id, other.Id = e.ID, second.ID
		if _, has := bs.slotOf(first); has && k.Id != e.ID {
			return Bucket{} // the other slot tells of both
		}
		levels := model.Levels{First: bs.levelOf(first, now), Second: bs.levelOf(other, now)}
		b.SecondBytes = model.Bytes(model.NewColoured(e.Rule).E(levels))
		level = levels.First
	}
	if level == 0 && b.SecondBytes == 0 || !is || isFlow(k) && e.Each.Kind != policy.EachFlow {
		return Bucket{}
	}
	b.LevelBytes = model.BytesOf(e.Unit, level)
	if e.Each.Kind == policy.EachFlow {
		b.Flow = flowOf(k)
	} else {
		far := prefixes.Address(k.Src, k.Family)
		b.Subnet = netip.PrefixFrom(far, eachBits(e.Each, far))
	}
	return b
}
