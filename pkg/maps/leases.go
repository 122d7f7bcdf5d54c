package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrBeginning means that a change of many rules begins within MaxLead, with which a pool gets or loses its lease.
var ErrBeginning = errors.New("a change of the pool begins in a moment; try again then")

// ErrBetween means that a change which may still be reverted takes the pool into another cluster: a revert must not bring
// back a lease of that.
var ErrBetween = errors.New("the change of its cluster is not confirmed")

// A Lease is the part of its rate that a pool has for a time: of its cluster's rate on this host, or what its line allows.
type Lease struct {
	Rate  policy.Rate // until Until
	Safe  policy.Rate // from then on
	Until uint64      // ns on the monotonic clock; 0 if no lease was ever granted
	Known uint64      // bits per second: the sum of the safe shares of all hosts, as the store knew it
	Epoch uint64      // of the store
}

// scaled is the lease of a cluster whose rate was lowered.
func (l Lease) scaled(to, from policy.Rate) Lease {
	l.Rate, l.Safe = max(l.Rate.Scaled(to, from), policy.MinRate), max(l.Safe.Scaled(to, from), policy.MinRate)
	l.Known = uint64(policy.Rate(l.Known).Scaled(to, from))
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
	if _, v, ok := s.leased(pool); ok {
		return leaseIn(s.leaseOf(v)), true
	}
	return Lease{}, false
}

func leaseIn(l *bpf.AbiLease, set uint32) Lease {
	of := &l.Set[set]
	return Lease{policy.Rate(of.Cold[0].RateBits), policy.Rate(of.Cold[1].RateBits), l.Until[set], l.Known[set], l.Epoch[set]}
}

// Renew gives a pool another lease, which is in force from one store on. It changes no rule, and works while a change of
// many rules is pending. A rate above LeaseLimit is lowered to that. The error may wrap ErrBeginning or ErrBetween.
func (s *Set) Renew(pool netip.Prefix, l Lease) error {
	id, v, ok := s.leased(pool)
	if !ok {
		return errors.New("the pool has no cluster and adapts to no line; nothing was changed")
	}
	if s.isUndecided(id) {
		old, next := s.bothPhases(id)
		switch state, _ := s.Change(); {
		case state == Armed && present(next) && !sameLease(old, next):
			return fmt.Errorf("renew a lease: %w", ErrBeginning)
		case sameLease(old, next) && s.clusterOf(id, pool, old) != s.clusterOf(id, pool, next):
			return fmt.Errorf("renew a lease: %w", ErrBetween)
		}
	}
	if v.reverted {
		s.waitSince(s.change.Epoch) // packets from before the change may still use the one that is not in force
	}
	e := s.entry(id, pool, v, s.phase())
	most := s.LeaseLimit(e)
	l.Rate, l.Safe = min(l.Rate, most), min(l.Safe, most)
	s.renew(id, v, e.Rule, l)
	return nil
}

// isUndecided reports whether a change of a pool is about to begin, or may be reverted.
func (s *Set) isUndecided(id uint32) bool {
	state, _ := s.Change()
	return (state == Armed || state == Pending) && s.Changes(id)
}

// LeaseLimit is the highest rate of a lease, which a pool tells to its cluster: its own, or the one that a revert would bring
// back if that is lower and the lease stays.
func (s *Set) LeaseLimit(e Entry) policy.Rate {
	rate := e.Rate
	if s.isUndecided(e.ID) {
		old, next := s.bothPhases(e.ID)
		if sameLease(old, next) {
			for _, v := range []version{old, next} {
				rate = min(rate, s.entry(e.ID, e.Prefix, v, s.phase()).Rate)
			}
		}
	}
	return rate
}

// clusterOf is the cluster that a version of a pool has; "" for none.
func (s *Set) clusterOf(id uint32, pool netip.Prefix, v version) policy.ClusterName {
	if leaseNumber(v) == 0 {
		return ""
	}
	return s.entry(id, pool, v, s.phase()).Cluster.Name
}

// ReadyRevert precedes TimeRevert: it waits for packets from before the change, which may use the clocks that this writes.
func (s *Store) ReadyRevert() {
	if state, _ := s.Change(); state == Committed {
		s.Pools().startLeases()
	}
	s.waitSince(s.change.Epoch)
}

// startLeases is called before a revert of a change that was confirmed. Pools to which that gives back their cluster begin
// with the safe share of a new member: the cluster may have given to others what they had there. Those that get back a lower
// rate have as much less of it.
func (s *Set) startLeases() {
	for f := range s.byID(s) {
		if !s.Changes(f.id) {
			continue
		}
		it := placed{id: f.id, prefix: s.prefix(f.key)}
		old, next := s.bothPhases(it.id)
		was, is := s.clusterOf(it.id, it.prefix, old), s.clusterOf(it.id, it.prefix, next)
		pool := s.entry(it.id, it.prefix, old, s.phase()).Rule
		to := Lease{Rate: pool.SafeRate(), Safe: pool.SafeRate()}
		switch {
		case was == "":
			continue
		case is != "":
			now := s.entry(it.id, it.prefix, next, s.phase()).Rule
			if was != is {
				to.Rate, to.Safe = min(to.Rate, now.SafeRate()), min(to.Safe, now.SafeRate())
				break
			}
			if pool.Rate >= now.Rate {
				continue
			}
			to = leaseIn(s.leaseOf(old)).scaled(pool.Rate, now.Rate)
		}
		s.renew(it.id, old, pool, to)
	}
}

// leased is a pool that has leases, by its current version.
func (s *Set) leased(pool netip.Prefix) (id uint32, v version, ok bool) {
	place := s.findPrefix(pool)
	if place == nil {
		return 0, v, false
	}
	id = *place - 1
	v = s.current(id)
	return id, v, leaseNumber(v) != 0
}

// leaseNumber is the number of the lease of a version plus one; 0 if it has none.
func leaseNumber(v version) uint32 {
	if v.AbiParams == nil || !present(v) || v.Flags&ruleLeased == 0 {
		return 0
	}
	return v.AbiColdParams.Lease
}

// sameLease reports whether two versions have one lease. Else the second one begins its own with the room that the first one
// leaves.
func sameLease(a, b version) bool { return leaseNumber(a) != 0 && leaseNumber(a) == leaseNumber(b) }

// shareLease reports whether two sets of parameters of a pool have one lease. Those of a pool that adapts to its line do
// not: so each has its rate again when a change reverts, whoever runs then. What a cluster granted is for all of them.
func shareLease(a, b policy.Rule) bool { return a.Cluster.Name != "" && b.Cluster.Name != "" }

// leaseOf is the lease of a version, and which of its two sets is in force.
func (rs *rules) leaseOf(v version) (l *bpf.AbiLease, set uint32) {
	l = &rs.leases[v.Lease-1]
	set = atomic.LoadUint32(&l.Version)
	if v.reverted && v.Flags&ruleReleased != 0 {
		set++
	}
	return l, set & 1
}

// leasedAt are the parameters of a lease at a time (ns): lease_of of bpf/look.h.
func leasedAt(l *bpf.AbiLease, set uint32, now uint64) version {
	if now >= atomic.LoadUint64(&l.Until[set]) {
		return leaseVersion(l, set, 1)
	}
	return leaseVersion(l, set, 0)
}

// leaseVersion are the parameters of a lease until its end, with part 0, or after it, with part 1.
func leaseVersion(l *bpf.AbiLease, set, part uint32) version {
	params, cold := &l.Set[set].Params[part], &l.Set[set].Cold[part]
	return version{params, cold, &params.Clock, &cold.Lease, part, false}
}

// meterAt is the meter of a version at a time (ns).
func (rs *rules) meterAt(v version, now uint64) model.Meter {
	if v.Flags&ruleLeased == 0 || v.Lease == 0 { // slots of a deleted pool have no lease any more
		return meter(v)
	}
	for {
		seen := atomic.LoadUint32(&rs.leases[v.Lease-1].Version)
		l, set := rs.leaseOf(v)
		if m := leaseMeter(leasedAt(l, set, now), v.Limit); atomic.LoadUint32(&l.Version) == seen {
			return m
		}
	}
}

// leaseEnded reports whether packets may be queued that came at another rate, by a lease that has ended: is_fifo of bpf/queue.h.
func (rs *rules) leaseEnded(v version, now uint64) bool {
	if leaseNumber(v) == 0 {
		return false
	}
	l, set := rs.leaseOf(v)
	return leasedAt(l, set, now-min(now, uint64(policy.MaxWait))).RateUnits != leasedAt(l, set, now).RateUnits
}

// leaseMeter is the meter of a lease of a pool that has that limit.
func leaseMeter(v version, whole uint64) model.Meter {
	m := meter(v)
	m.Whole = whole
	return m
}

// renew writes the lease of a version of a pool that is not in force, and switches to it.
func (s *Set) renew(id uint32, v version, pool policy.Rule, to Lease) {
	l, set := s.leaseOf(v)
	s.waitSince(l.Replaced) // for packets that may still see it
	var before model.Meter
	now := s.promptly(func(now uint64) {
		before = s.meterAt(v, now)
		writeLease(l, set^1, pool, to, before, now)
	})
	if v.Flags&ruleSparse != 0 && !sameQueue(before, leaseMeter(leasedAt(l, set^1, now), v.Limit)) {
		keepOrderUntil(s.rule(id), now+before.LongestWait())
	}
	l.Replaced = s.change.Epoch
	step.Store("switch a lease")
	atomic.AddUint32(&l.Version, 1)
	if old, next := s.bothPhases(id); s.isUndecided(id) && !sameLease(old, next) && v.index == next.index {
		s.rebase(id, old, next, s.Until())
	}
}

// writeLease writes one of the leases of a pool. It begins at a time (ns) with the room that a meter left.
func writeLease(l *bpf.AbiLease, set uint32, pool policy.Rule, to Lease, before model.Meter, now uint64) {
	for part, rate := range [2]policy.Rate{to.Rate, to.Safe} {
		step.Store("write a part of a lease")
		encode(leaseVersion(l, set, uint32(part)), pool.Part(min(rate, pool.Rate)), 0, 0, companionIDs{})
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
		m := leaseVersion(l, set, part).succeed(before, now)
		if l.Until[set] > now {
			before, now = m, l.Until[set]
		}
	}
}

// setLease gives a pool that gets a lease one on its safe share, or on what its line allowed so far. It lowers the lease of a
// pool that keeps it with the rate of the pool, and a new safe share takes effect unless a lease was granted.
func (s *Set) setLease(it placed, old, next version, want policy.Rule, at when) {
	if !want.HasLeases() {
		return
	}
	safe := want.SafeRate()
	l, set := s.leaseOf(next)
	to, have := Lease{Rate: safe, Safe: safe}, policy.Rule{}
	if leaseNumber(old) != 0 {
		have = s.entry(it.id, it.prefix, old, s.phase()).Rule
	}
	if !sameLease(old, next) {
		if was := want.Lessor(); was.Line && was == have.Lessor() {
			granted := leaseIn(s.leaseOf(old))
			to.Rate, to.Until = min(granted.Rate, safe), granted.Until
		}
		all := model.Meter{Capacity: 1 << 61} // leaves all room; a pool that exists continues its own clock instead
		writeLease(l, set, want, to, all, s.now())
		return
	}
	to = leaseIn(l, set)
	another := have.Cluster.Name != want.Cluster.Name // which has granted nothing
	lower := want.Rate < have.Rate                    // perhaps on all hosts, whose parts of it must fit at once
	switch {
	case another: // and a revert brings back the first one
		safe = min(safe, have.SafeRate())
		to = Lease{Rate: safe, Safe: safe}
	case to.Until == 0:
		to = Lease{Rate: safe, Safe: safe}
	case lower:
		to = to.scaled(want.Rate, have.Rate)
	}
	if at == atOnce || another || lower {
		s.renew(it.id, old, want, to)
	}
}

// allocateLease returns the number plus one of the lease of a pool by parameters that are to be written. It allocates one, of
// which packets know nothing yet, unless the parameters in force have it. There is room.
func (s *Store) allocateLease(id uint32, to version, pool policy.Rule) uint32 {
	other := s.version(id, to.index^1)
	if s.freeLeases(id, leaseNumber(other)); !pool.HasLeases() {
		return 0
	}
	if number := leaseNumber(other); number != 0 && shareLease(s.entry(id, pool.Prefix, other, s.phase()).Rule, pool) {
		return number
	}
	for i := range s.leases {
		if l := &s.leases[i]; l.Owner == 0 {
			s.waitSince(l.Retired)
			*l = bpf.AbiLease{Owner: id + 1, Retired: l.Retired}
			return uint32(i) + 1
		}
	}
	return 0
}

// freeLeases frees the leases of a pool but one that is in use, by its number plus one, or 0. Parameters that are not in force
// keep their number, as packets may still use them.
func (s *Store) freeLeases(id, used uint32) {
	for _, cold := range s.rule(id).Cold {
		if cold.Lease == 0 || cold.Lease == used {
			continue
		}
		if l := &s.leases[cold.Lease-1]; l.Owner == id+1 {
			l.Owner, l.Retired = 0, s.change.Epoch
		}
	}
}

// freeLostLeases frees the leases that a killed command allocated and no pool has.
func (s *Store) freeLostLeases(used []bool) {
	for i := range s.leases {
		l := &s.leases[i]
		id, number := l.Owner-1, uint32(i)+1
		if l.Owner != 0 && (int(id) >= len(used) || !used[id] || s.rule(id).Cold[0].Lease != number && s.rule(id).Cold[1].Lease != number) {
			l.Owner, l.Retired = 0, s.change.Epoch
		}
	}
}
