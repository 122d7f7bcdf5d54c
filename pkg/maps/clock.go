package maps

import (
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/pkg/policy"
)

// clocks are the byte clocks of all rules, and the leases that some go by.
type clocks struct {
	rules
	leases    []bpf.AbiLease
	calendars []bpf.AbiCalendar
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
func (cs *clocks) continueClock(id uint32, old, next params.Version, at uint64) {
	if !old.Limited() || !next.Limited() {
		return
	}
	before := cs.meterAt(old, at)
	// When sparse-first begins, or the queue changes, the buckets of flows do not show which
	// flows have packets in the queue. Until these packets have left, no flow counts as sparse.
	if next.Flags&params.Sparse != 0 && old.Flags&params.Delay != 0 &&
		(old.Flags&params.Sparse == 0 || old.Scope() != next.Scope() || next.Flags&params.Leased != 0 || !sameQueue(before, next.Meter())) {
		keepOrderUntil(cs.rule(id), at+before.LongestWait())
	}
	if next.Flags&params.Leased != 0 {
		l, set := cs.leaseOf(next)
		startLease(l, set, before, at)
	} else {
		next.Succeed(before, at)
	}
}

// sameQueue reports whether packets wait as long with one meter as with another.
func sameQueue(a, b model.Meter) bool {
	return a.RateUnits == b.RateUnits && a.Capacity == b.Capacity && a.Burst == b.Burst
}

func keepOrderUntil(r *bpf.AbiRule, until uint64) {
	atomic.StoreUint64(&r.FifoUntil, max(until, atomic.LoadUint64(&r.FifoUntil)))
}

// setBucket sets a bucket that no packet uses.
func setBucket(b *bpf.AbiBucket, to model.Bucket) {
	atomic.StoreUint32(&b.Tick, to.Tick)
	atomic.StoreUint64(&b.Tat, to.TAT)
}

// rebase has the clock of old, once reverted, go on at a time (ns) from that of next. Where next has no bucket, that of old goes on.
func (cs *clocks) rebase(id uint32, old, next params.Version, at uint64) {
	if phase(cs.change.Phase) == phaseRollback {
		cs.continueClock(id, next, old, at)
		return
	}
	flags := old.Flags &^ params.Released
	switch leased := old.Flags&params.Leased != 0; {
	case !old.Limited() || leased && !next.Limited():
	case leased:
		l, set := cs.leaseOf(old)
		back := *l // a packet must not see a part of it
		copyLease(&back, set^1, l, set)
		startLease(&back, set^1, cs.meterAt(next, at), at)
		copyLease(l, set^1, &back, set^1)
		flags |= params.Released
	default:
		before := old
		if next.Limited() {
			before = next
		}
		cs.afterRevert(id, old).Succeed(cs.meterAt(before, at), at)
	}
	old.Flags = flags
}

// keepReverted stores what packets compute since the revert: the reverted clock becomes that of the parameters, or the lease in
// force becomes the stored one. Packets do not look at these until then.
func (cs *clocks) keepReverted(id uint32, v params.Version) {
	r := cs.rule(id)
	switch {
	case v.Flags&params.Released != 0:
		l, set := cs.leaseOf(v)
		copyLease(l, set^1, l, set)
	case v.Limited() && v.Flags&params.Leased == 0:
		r.Params[v.Index].Clock, r.Next[v.Index] = r.Reverted, r.Next[2]
		v.Flags |= params.Edited
	}
	keepOrderUntil(r, cs.change.Until+uint64(policy.MaxWait)) // as packets did by themselves; sparse-first may begin before that
}
