package maps

import (
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/params"
	"github.com/shapectl/shapectl/pkg/policy"
)

// share is the number of the share of a rule plus one, or 0.
func (rs *rules) share(id uint32) uint32 {
	r := rs.rule(id)
	return max(r.Cold[0].Share, r.Cold[1].Share)
}

// setShare returns the number of the share of a rule plus one. It allocates one if the rule needs it and has none. There is room.
func (rs *rules) setShare(id uint32, rule policy.Rule) uint32 {
	number := rs.share(id)
	if rule.Share.Kind != policy.ShareNone && number == 0 {
		number = allocate(&rs.progress, rs.shares, shareOwner, id)
		rs.shares[number-1] = renewed(&rs.shares[number-1])
	}
	return number
}

// renewed is a share that begins anew with the next packet, while slots of former sharers stay in the past. All else may be halfway
// through a packet: the weight and the bins may contradict each other, and the lock may be held.
func renewed(s *bpf.AbiShare) bpf.AbiShare {
	return bpf.AbiShare{V: atomic.LoadUint64(&s.V), Last: model.NotYet, Owner: s.Owner, Retired: s.Retired}
}

// freeShare frees the share of a rule that does not exist any more, or has none in any phase.
func (rs *rules) freeShare(id uint32) {
	if number := rs.share(id); number != 0 {
		rs.shares[number-1].Owner, rs.shares[number-1].Retired = 0, rs.change.Epoch
		rs.rule(id).Cold[0].Share, rs.rule(id).Cold[1].Share = 0, 0
	}
}

// isActive reports whether a slot is that of an active sharer: ahead_of of bpf/share.h.
func (bs *buckets) isActive(n uint32) bool {
	return bs.isAhead(bs.current(bs.table().keys[n].Id), *sharer(bs.slot(n)))
}

// isAhead reports whether a sharer of a version of a rule or pool is active.
func (bs *buckets) isAhead(v params.Version, b model.Sharer) bool {
	share := bs.shareOf(v)
	return share != nil && !share.IsIdle(bs.now()) && share.AheadOf(b) > 0
}

// shareOf is a copy of the share of a version of a rule or pool, as a packet would meet it; nil if there is none.
func (bs *buckets) shareOf(v params.Version) *model.Share {
	if v.Flags&params.Shares == 0 || v.Share == 0 || int(v.Share) > len(bs.shares) {
		return nil
	}
	of := &bs.shares[v.Share-1]
	return &model.Share{
		ShareParams: model.ShareParams{FineShift: v.FineShift, CoarseShift: v.CoarseShift, Step: v.Step},
		ByMember:    v.Flags&params.ShareMember != 0, Seen: of.Seen, Skip: atomic.LoadUint64(&of.Skip),
		Credit: int64(atomic.LoadUint64(&of.Credit)), FreeFactor: of.FreeFactor,
		V: atomic.LoadUint64(&of.V), Last: of.Last, Ahead: of.Ahead, More: of.More, Most: of.Most, Rest: of.Rest,
		Weight: int32(atomic.LoadUint32(&of.Weight)), Bins: of.Bin, Shifts: [2]uint8{uint8(of.FineShift), uint8(of.CoarseShift)},
	}
}

// ActiveSharers are how many sharers are active in the buckets of rules and pools, by id.
func (s *index) ActiveSharers() map[uint32]int {
	active, now := map[uint32]int{}, s.phase()
	for it := range s.prefixes.All(nil) {
		v := s.versionIn(it.ID, now)
		if !v.Present() || v.Flags&params.Within == 0 {
			continue
		}
		if pool := s.versionIn(v.Within-1, now); pool.Flags&params.ShareMember != 0 && s.isAhead(pool, *s.memberOf(pool, it.ID)) {
			active[v.Within-1]++
		}
	}
	for n := range s.slots(func(id uint32) bool { return id < s.room() }) {
		if key := &s.table().keys[n]; key.Sharer != 0 && s.isActive(n) {
			active[key.Id]++
		}
	}
	return active
}
