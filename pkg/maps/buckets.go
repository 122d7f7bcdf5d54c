package maps

import (
	"iter"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

const taken = 1 // TAT_TAKEN of abi.h

// Now is the data path's time: CLOCK_MONOTONIC, in ns.
func Now() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // fails only for a clock that does not exist
	return uint64(ts.Nano())
}

// A Flow is a packet's 5-tuple; ports are 0 where a protocol has none.
type Flow struct {
	Src, Dst         netip.Addr
	Proto            uint8
	SrcPort, DstPort uint16
}

// A Bucket is what one sharer of a rule owes.
type Bucket struct {
	Subnet     netip.Prefix // of a host or subnet; invalid for a flow
	Flow       Flow
	LevelBytes uint64
}

func load(b *bpf.AbiBucket) model.Bucket {
	return model.Bucket{TAT: atomic.LoadUint64(&b.Tat), Tick: atomic.LoadUint32(&b.Tick)}
}

// Level is what the bucket that a packet of flow would be charged to owes now,
// in units: 0 where there is none yet.
func (s *Set) Level(e Entry, match policy.Match, flow Flow, now uint64) (units uint64) {
	rule := s.current(e.ID)
	if rule.Each == uint8(bpf.AbiEachEACH_ALL) {
		return meter(rule).Level(load(&s.own[e.ID].Bucket), now)
	}
	key := makeKey(rule, match, flow)
	line, print := s.place(key, rule.Salt)
	for i := range lineSlots {
		slot := &s.lines[line].Slot[i]
		if atomic.LoadUint32(&slot.Print) == print {
			return meter(rule).Level(load(slot), now)
		}
	}
	return 0
}

// Meter is the arithmetic of a rule as it is in force.
func (s *Set) Meter(e Entry) model.Meter { return meter(s.current(e.ID)) }

// OwnLevel is what a rule's own bucket owes, in units: everybody's, or with
// --each that of packets for whose sharer there was no room.
func (s *Set) OwnLevel(e Entry, now uint64) uint64 {
	return meter(s.current(e.ID)).Level(load(&s.own[e.ID].Bucket), now)
}

// slots are all slots of hosts, subnets and flows of one rule that are in use.
func (s *Set) slots(id uint32) iter.Seq2[*bpf.AbiBucket, *bpf.AbiKey] {
	return func(yield func(*bpf.AbiBucket, *bpf.AbiKey) bool) {
		for i := range s.lines {
			for j := range lineSlots {
				slot, key := &s.lines[i].Slot[j], &s.keys[i*int(lineSlots)+int(j)]
				if tat := atomic.LoadUint64(&slot.Tat); tat == 0 || tat&taken != 0 || atomic.LoadUint32(&key.Id) != id {
					continue
				}
				if !yield(slot, key) {
					return
				}
			}
		}
	}
}

// Buckets are all sharers of a rule that owe something now.
func (s *Set) Buckets(e Entry, now uint64) iter.Seq[Bucket] {
	rule := s.current(e.ID)
	return func(yield func(Bucket) bool) {
		for slot, key := range s.slots(e.ID) {
			before, k := load(slot), *key
			level := meter(rule).Level(before, now)
			_, print := s.place(k, rule.Salt)
			// The key is that of the level if nobody took the slot meanwhile.
			if level == 0 || k.Id != e.ID || atomic.LoadUint32(&slot.Print) != print {
				continue
			}
			b := Bucket{LevelBytes: model.Bytes(level)}
			if rule.Each == uint8(bpf.AbiEachEACH_FLOW) {
				b.Flow = Flow{address(k.Src, k.Family), address(k.Dst, k.Family), k.Proto, networkPort(k.Sport), networkPort(k.Dport)}
			} else {
				b.Subnet = netip.PrefixFrom(address(k.Src, k.Family), int(rule.EachBits))
			}
			if !yield(b) {
				return
			}
		}
	}
}

// settle makes drained buckets of a rule say so on its clock now: the rule's
// next clock may be so slow that idling no longer tells one that wrapped.
func (s *Set) settle(id uint32, m model.Meter, now uint64) {
	s.rewrite(id, now, func(b model.Bucket) (uint64, bool) {
		return m.Clock(now), b.TAT != 0 && m.Level(b, now) == 0
	})
}

// clamp lets no bucket of a rule owe more than the rule can hold.
func (s *Set) clamp(id uint32, m model.Meter, now uint64) {
	s.rewrite(id, now, func(b model.Bucket) (uint64, bool) {
		return m.Clock(now) + m.Most(), m.Level(b, now) > m.Most()
	})
}

// rewrite gives buckets of a rule another TAT, while packets charge them.
func (s *Set) rewrite(id uint32, now uint64, change func(model.Bucket) (tat uint64, wanted bool)) {
	one := func(b *bpf.AbiBucket) {
		for {
			before := load(b)
			tat, wanted := change(before)
			if !wanted || before.TAT&taken != 0 {
				return
			}
			atomic.StoreUint32(&b.Tick, model.Tick(now))
			if atomic.CompareAndSwapUint64(&b.Tat, before.TAT, tat) {
				return
			}
		}
	}
	one(&s.own[id].Bucket)
	for slot := range s.slots(id) {
		one(slot)
	}
}
