package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/grace"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrBeginning means that a change of the pool begins or reverts within MaxLead.
var ErrBeginning = errors.New("a change of the pool begins or reverts in a moment; try again then")

// A Lease is the part of its rate that a pool has for a time: of its cluster's rate on this host, or what its line allows.
type Lease struct {
	Rate  policy.Rate // until Until
	Safe  policy.Rate // from then on
	Until uint64      // ns on the monotonic clock; 0 if no lease was ever granted
	Known uint64      // bits per second: the sum of the safe shares of all hosts, as the store knew it
	Epoch uint64      // of the store
	Grant Grant       // beside the lease, which does not keep it
}

// inherited is what a pool keeps of a lease when it becomes another: as large a part of its rate if that is lower, because its
// cluster may lower it on all hosts at once, or what its line allows. Another lessor has granted nothing yet.
func (l Lease) inherited(have, want policy.Rule) Lease {
	safe := Lease{Rate: want.SafeRate(), Safe: want.SafeRate()}
	switch {
	case have.Lessor() != want.Lessor() || l.Until == 0:
		return safe
	case want.Adapt.Min != 0:
		safe.Rate, safe.Until = min(l.Rate, safe.Rate), l.Until
		return safe
	case want.Rate < have.Rate:
		l.Rate, l.Safe = max(l.Rate.Scaled(want.Rate, have.Rate), policy.MinRate), max(l.Safe.Scaled(want.Rate, have.Rate), policy.MinRate)
		l.Known = uint64(policy.Rate(l.Known).Scaled(want.Rate, have.Rate))
	}
	return l
}

// At is the rate in force at a time in ns.
func (l Lease) At(now uint64) policy.Rate {
	if now < l.Until {
		return l.Rate
	}
	return l.Safe
}

// Lease is the last lease of a pool; false if the pool has none.
func (s *Set) Lease(pool netip.Prefix) (l Lease, ok bool) {
	if _, v, ok := s.Store.leased(pool); ok {
		return leaseIn(s.Store.leaseOf(v)), true
	}
	return Lease{}, false
}

func leaseIn(l *bpf.AbiLease, set uint32) Lease {
	of := &l.Set[set]
	return Lease{Rate: policy.Rate(of.Cold[0].RateBits), Safe: policy.Rate(of.Cold[1].RateBits), Until: l.Until[set], Known: l.Known[set], Epoch: l.Epoch[set]}
}

// Renew gives a pool another lease, which is in force from one store on. It changes no rule. While a change of the pool is
// pending, the lease that a revert brings back inherits from it, if it is of the same cluster. A rate above that of the pool is
// lowered. The error may wrap ErrBeginning.
func (s *Set) Renew(pool netip.Prefix, l Lease) error {
	id, v, ok := s.Store.leased(pool)
	if !ok {
		return errors.New("the pool has no cluster and adapts to no line; nothing was changed")
	}
	state, at := s.Store.Change()
	undecided := (state == Armed || state == Pending) && s.Store.Changes(id)
	if undecided && at < s.Store.now()+MaxLead {
		return fmt.Errorf("renew a lease: %w", ErrBeginning)
	}
	if v.Reverted || undecided {
		grace.Wait(s.Store.change, s.Store.change.Epoch) // packets from before the change may still use the one that is not in force
	}
	s.Store.grant(id, l.Grant)
	rule := s.Store.entry(id, pool, v, s.Store.phase()).Rule
	l.Rate, l.Safe = min(l.Rate, rule.Rate), min(l.Safe, rule.Rate)
	s.Store.renew(id, v, rule, l)
	if undecided {
		old, next := s.Store.bothPhases(id)
		if had, is := s.Store.clustered(id, old); is && had.Lessor() == rule.Lessor() {
			s.Store.setLease(id, next, old, had)
		}
		s.Store.rebase(id, old, next, at)
	}
	return nil
}

// ReadyRevert precedes TimeRevert. It waits for packets from before the change, which may use the clocks that this writes. If
// the change was confirmed, pools inherit from the leases in force: their clusters may have given to others what they had.
func (s *Store) ReadyRevert() {
	grace.Wait(s.change, s.change.Epoch)
	if state, _ := s.Change(); state != Committed {
		return
	}
	for f := range s.prefixes.ByID(poolView) {
		old, next := s.bothPhases(f.ID)
		if had, is := s.clustered(f.ID, old); is && s.Changes(f.ID) {
			s.setLease(f.ID, next, old, had)
		}
	}
}

// clustered is a version of a pool, and whether a cluster grants its leases. What a line allows is back with the pool, whoever
// runs then.
func (ls *limits) clustered(id uint32, v params.Version) (pool policy.Rule, is bool) {
	if leaseNumber(v) != 0 {
		pool = ls.entry(id, netip.Prefix{}, v, ls.phase()).Rule
	}
	return pool, pool.Cluster.Name != ""
}

// leased is a pool that has leases, by its current version.
func (s *index) leased(pool netip.Prefix) (id uint32, v params.Version, ok bool) {
	if id, ok = s.prefixes.Find(poolView, pool); !ok {
		return 0, v, false
	}
	v = s.current(id)
	return id, v, leaseNumber(v) != 0
}

// leaseNumber is the number of the lease of a version plus one; 0 if it has none.
func leaseNumber(v params.Version) uint32 {
	if !v.Present() || v.Flags&params.Leased == 0 {
		return 0
	}
	return v.AbiColdParams.Lease
}

// leaseOf is the lease of a version, and which of its two sets is in force.
func (cs *clocks) leaseOf(v params.Version) (l *bpf.AbiLease, set uint32) {
	l = &cs.leases[v.Lease-1]
	set = atomic.LoadUint32(&l.Version)
	if v.Reverted && v.Flags&params.Released != 0 {
		set++
	}
	return l, set & 1
}

// leasedAt are the parameters of a lease at a time (ns): lease_of of bpf/look.h.
func leasedAt(l *bpf.AbiLease, set uint32, now uint64) params.Version {
	if now >= atomic.LoadUint64(&l.Until[set]) {
		return leaseVersion(l, set, 1)
	}
	return leaseVersion(l, set, 0)
}

// leaseVersion are the parameters of a lease until its end, with part 0, or after it, with part 1.
func leaseVersion(l *bpf.AbiLease, set, part uint32) params.Version {
	p, cold := &l.Set[set].Params[part], &l.Set[set].Cold[part]
	return params.Version{AbiParams: p, AbiColdParams: cold, Clock: &p.Clock, Next: &cold.Lease, Index: part}
}

// meterAt is the meter of a version at a time (ns).
func (cs *clocks) meterAt(v params.Version, now uint64) model.Meter {
	if v.Calendar > 0 {
		return cs.quotaMeter(v, now)
	}
	if v.Flags&params.Leased == 0 || v.Lease == 0 { // slots of a deleted pool have no lease any more
		return v.Meter()
	}
	for {
		seen := atomic.LoadUint32(&cs.leases[v.Lease-1].Version)
		l, set := cs.leaseOf(v)
		m := leasedAt(l, set, now).Meter()
		if m.Whole = v.Limit; atomic.LoadUint32(&l.Version) == seen {
			return m
		}
	}
}

// leaseEnded reports whether packets may be queued that came at another rate, by a lease that has ended: is_fifo of bpf/queue.h.
func (cs *clocks) leaseEnded(v params.Version, now uint64) bool {
	if leaseNumber(v) == 0 {
		return false
	}
	l, set := cs.leaseOf(v)
	return leasedAt(l, set, now-min(now, uint64(policy.MaxWait))).RateUnits != leasedAt(l, set, now).RateUnits
}

// renew writes the lease of a version of a pool that is not in force, and switches to it.
func (ls *limits) renew(id uint32, v params.Version, pool policy.Rule, to Lease) {
	l, set := ls.leaseOf(v)
	grace.Wait(ls.change, l.Replaced) // for packets that may still see it
	var before model.Meter
	now := ls.promptly(func(now uint64) {
		before = ls.meterAt(v, now)
		writeLease(l, set^1, pool, to, before, now)
	})
	if v.Flags&params.Sparse != 0 && !sameQueue(before, leasedAt(l, set^1, now).Meter()) {
		keepOrderUntil(ls.rule(id), now+before.LongestWait())
	}
	l.Replaced = ls.change.Epoch
	step.Store("switch a lease")
	atomic.AddUint32(&l.Version, 1)
}

// writeLease writes one of the leases of a pool. It begins at a time (ns) with the room that a meter left.
func writeLease(l *bpf.AbiLease, set uint32, pool policy.Rule, to Lease, before model.Meter, now uint64) {
	for part, rate := range [2]policy.Rate{to.Rate, to.Safe} {
		step.Store("write a part of a lease")
		leaseVersion(l, set, uint32(part)).Encode(pool.Part(min(rate, pool.Rate)), 0, 0, params.IDs{})
	}
	l.Until[set], l.Known[set], l.Epoch[set] = to.Until, to.Known, to.Epoch
	step.Store("start the clock of a lease")
	startLease(l, set, before, now)
}

// copyLease copies a lease to a place for one.
func copyLease(l *bpf.AbiLease, set uint32, from *bpf.AbiLease, of uint32) {
	l.Set[set], l.Until[set], l.Known[set], l.Epoch[set] = from.Set[of], from.Until[of], from.Known[of], from.Epoch[of]
}

// startLease lets a lease begin at a time (ns) with the room that a meter left. After its end the bucket keeps its room, too.
func startLease(l *bpf.AbiLease, set uint32, before model.Meter, now uint64) {
	for part := range uint32(2) {
		m := leaseVersion(l, set, part).Succeed(before, now)
		if l.Until[set] > now {
			before, now = m, l.Until[set]
		}
	}
}

// setLease writes the lease of a version of a pool that packets do not use, which inherits from that of another version.
func (ls *limits) setLease(id uint32, from, to params.Version, pool policy.Rule) {
	if !pool.HasLeases() {
		return
	}
	var granted Lease
	var have policy.Rule
	if leaseNumber(from) != 0 {
		granted, have = leaseIn(ls.leaseOf(from)), ls.entry(id, pool.Prefix, from, ls.phase()).Rule
	}
	all := model.Meter{Capacity: 1 << 61} // leaves all room; a pool that exists continues its own clock instead
	l, set := ls.leaseOf(to)
	writeLease(l, set, pool, granted.inherited(have, pool), all, ls.now())
}

// newLease returns the number plus one of a lease for parameters of a pool that are to be written, or 0. There is room.
func (cs *clocks) newLease(id uint32, to params.Version, pool policy.Rule) (number uint32) {
	if cs.freeLeases(id, leaseNumber(cs.version(id, to.Index^1))); pool.HasLeases() {
		number = allocate(&cs.progress, cs.leases, leaseOwner, id)
		l := &cs.leases[number-1]
		*l = bpf.AbiLease{Owner: l.Owner, Retired: l.Retired}
	}
	return number
}

// freeLeases frees the leases of a pool but one that is in use, by its number plus one, or 0. Parameters that are not in force
// keep their number, as packets may still use them.
func (cs *clocks) freeLeases(id, used uint32) {
	for _, cold := range cs.rule(id).Cold {
		if cold.Lease == 0 || cold.Lease == used {
			continue
		}
		if l := &cs.leases[cold.Lease-1]; l.Owner == id+1 {
			l.Owner, l.Retired = 0, cs.change.Epoch
		}
	}
}
