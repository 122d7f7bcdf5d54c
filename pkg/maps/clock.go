package maps

import (
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// clocks are the byte clocks of all rules, and the leases that some go by.
type clocks struct {
	rules
	leases []bpf.AbiLease
}

// meter is the meter of a version that has no lease.
func meter(r version) model.Meter {
	m := model.Meter{RateUnits: r.RateUnits, Base: r.clock.Base, Capacity: r.Limit, Burst: r.Burst, Penalty: r.Penalty, Idle: r.Idle}
	m.Queues = r.Flags&ruleDelay != 0
	m.Shared = r.Flags&(rulePool|ruleShares) != 0
	m.Edited = r.reverted || r.Flags&ruleEdited != 0
	m.Floor, m.Until, m.Fresh, m.Next = r.clock.Floor, r.clock.Until, r.clock.Fresh, *r.next
	return m
}

// succeed has parameters whose clock no packet uses go on from a meter at a time (ns), and returns their meter.
func (r version) succeed(before model.Meter, at uint64) model.Meter {
	m := meter(r)
	m.Succeed(before, at)
	*r.clock, *r.next = bpf.AbiClock{Base: m.Base, Floor: m.Floor, Until: m.Until, Fresh: m.Fresh}, m.Next
	if !r.reverted {
		r.Flags |= ruleEdited
	}
	return m
}

// time has the next parameters of a rule, which no packet uses, go on at from (ns) from the old ones, and these from those at until.
func (cs *clocks) time(id uint32, from, until uint64) {
	old, next := cs.bothPhases(id)
	cs.continueClock(id, old, next, from)
	if until != Never {
		cs.rebase(id, old, next, until)
	}
}

// continueClock has the next parameters of a rule, which no packet uses, go on at a time (ns) from the old ones.
func (cs *clocks) continueClock(id uint32, old, next version, at uint64) {
	if !limited(old) || !limited(next) {
		return
	}
	before := cs.meterAt(old, at)
	// When sparse-first begins, or the queue changes, the buckets of flows do not show which
	// flows have packets in the queue. Until these packets have left, no flow counts as sparse.
	if next.Flags&ruleSparse != 0 && old.Flags&ruleDelay != 0 &&
		(old.Flags&ruleSparse == 0 || scope(old) != scope(next) || next.Flags&ruleLeased != 0 || !sameQueue(before, meter(next))) {
		keepOrderUntil(cs.rule(id), at+before.LongestWait())
	}
	if next.Flags&ruleLeased != 0 {
		l, set := cs.leaseOf(next)
		startLease(l, set, before, at)
	} else {
		next.succeed(before, at)
	}
}

// sameQueue reports whether packets wait as long with one meter as with another.
func sameQueue(a, b model.Meter) bool {
	return a.RateUnits == b.RateUnits && a.Capacity == b.Capacity && a.Burst == b.Burst
}

func keepOrderUntil(r *bpf.AbiRule, until uint64) {
	atomic.StoreUint64(&r.FifoUntil, max(until, atomic.LoadUint64(&r.FifoUntil)))
}

// empty sets the level of a bucket to 0.
func empty(b *bpf.AbiBucket, m model.Meter, now uint64) {
	e := m.WithLevel(0, now)
	atomic.StoreUint32(&b.Tick, e.Tick)
	atomic.StoreUint64(&b.Tat, e.TAT)
}

// rebase has the clock of old, once reverted, go on at a time (ns) from that of next. Where next has no bucket, that of old goes on.
func (cs *clocks) rebase(id uint32, old, next version, at uint64) {
	if phase(cs.change.Phase) == phaseRollback {
		cs.continueClock(id, next, old, at)
		return
	}
	flags := old.Flags &^ ruleReleased
	switch leased := old.Flags&ruleLeased != 0; {
	case !limited(old) || leased && !limited(next):
	case leased:
		l, set := cs.leaseOf(old)
		back := *l // a packet must not see a part of it
		copyLease(&back, set^1, l, set)
		startLease(&back, set^1, cs.meterAt(next, at), at)
		copyLease(l, set^1, &back, set^1)
		flags |= ruleReleased
	default:
		before := old
		if limited(next) {
			before = next
		}
		cs.afterRevert(id, old).succeed(cs.meterAt(before, at), at)
	}
	old.Flags = flags
}

// keepReverted stores what packets compute since the revert: the reverted clock becomes that of the parameters, or the lease in
// force becomes the stored one. Packets do not look at these until then.
func (cs *clocks) keepReverted(id uint32, v version) {
	r := cs.rule(id)
	switch {
	case v.Flags&ruleReleased != 0:
		l, set := cs.leaseOf(v)
		copyLease(l, set^1, l, set)
	case limited(v) && v.Flags&ruleLeased == 0:
		r.Params[v.index].Clock, r.Next[v.index] = r.Reverted, r.Next[2]
		v.Flags |= ruleEdited
	}
	keepOrderUntil(r, cs.change.Until+uint64(policy.MaxWait)) // as packets did by themselves; sparse-first may begin before that
}
