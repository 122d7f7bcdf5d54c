package maps

import (
	"sync/atomic"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

const ruleShares = uint32(bpf.AbiRuleFlagRULE_SHARE_HOST | bpf.AbiRuleFlagRULE_SHARE_SUBNET |
	bpf.AbiRuleFlagRULE_SHARE_FLOW | bpf.AbiRuleFlagRULE_SHARE_MEMBER)

const ruleShareMember = uint32(bpf.AbiRuleFlagRULE_SHARE_MEMBER)

// Shares is how many rules and pools get fair shares by steps.
func Shares(steps ...policy.Difference) (shares uint32) {
	return gained(steps, func(r *policy.Rule) bool { return r.Share.Kind != policy.ShareNone })
}

// gained is how many rules and pools get something by steps that they had not.
func gained(steps []policy.Difference, has func(*policy.Rule) bool) (n uint32) {
	for _, d := range steps {
		if d.Want != nil && has(d.Want) && (d.Have == nil || !has(d.Have)) {
			n++
		}
	}
	return n
}

// LacksShares is how many shares are missing for so many new ones.
func (s *Store) LacksShares(shares uint32) uint32 {
	return lacks(shares, s.shares, func(share *bpf.AbiShare) uint32 { return share.Owner })
}

// lacks is how many of n new things are missing, where one without an owner is free.
func lacks[T any](n uint32, things []T, owner func(*T) uint32) uint32 {
	for i := range things {
		if n > 0 && owner(&things[i]) == 0 {
			n--
		}
	}
	return n
}

// share is the number of the share of a rule plus one, or 0.
func (rs *rules) share(id uint32) uint32 {
	r := rs.rule(id)
	return max(r.Cold[0].Share, r.Cold[1].Share)
}

// setShare returns the number of the share of a rule plus one. It allocates one, of which packets know nothing yet, if
// the rule needs it and has none. There is room.
func (s *Store) setShare(id uint32, rule policy.Rule) uint32 {
	number := s.share(id)
	if rule.Share.Kind == policy.ShareNone || number != 0 {
		return number
	}
	for i := range s.shares {
		if share := &s.shares[i]; share.Owner == 0 {
			s.waitSince(share.Retired)
			*share = renewed(share)
			share.Owner = id + 1
			return uint32(i) + 1
		}
	}
	return 0
}

// renewed is a share that begins anew with the next packet, while slots of former sharers stay in the past. All else may be halfway
// through a packet: the weight and the bins may contradict each other, and the lock may be held.
func renewed(s *bpf.AbiShare) bpf.AbiShare {
	return bpf.AbiShare{V: atomic.LoadUint64(&s.V), Last: model.NotYet, Owner: s.Owner, Retired: s.Retired}
}

// freeShare frees the share of a rule that does not exist any more, or has none in any phase.
func (s *Store) freeShare(id uint32) {
	if number := s.share(id); number != 0 {
		s.shares[number-1].Owner, s.shares[number-1].Retired = 0, s.change.Epoch
		s.rule(id).Cold[0].Share, s.rule(id).Cold[1].Share = 0, 0
	}
}

// freeLostShares frees the shares that a killed command allocated and no rule has.
func (s *Store) freeLostShares(used []bool) {
	for i := range s.shares {
		share := &s.shares[i]
		if id := share.Owner - 1; share.Owner != 0 && (int(id) >= len(used) || !used[id] || s.share(id) != uint32(i)+1) {
			share.Owner, share.Retired = 0, s.change.Epoch
		}
	}
}

// encodeShare adds the parameters of fair shares to those of a rule that has a rate.
func encodeShare(to *bpf.AbiColdParams, m model.Meter) {
	p := m.ShareParams()
	to.FineShift, to.CoarseShift, to.Step = p.FineShift, p.CoarseShift, p.Step
}

// isActive reports whether a slot is that of an active sharer: ahead_of of bpf/share.h.
func (bs *buckets) isActive(slot *bpf.AbiBucket, key *bpf.AbiKey) bool {
	return bs.isAhead(bs.current(key.Id), model.Sharer{TAT: atomic.LoadUint64(&slot.Tat)})
}

// isAhead reports whether a sharer of a version of a rule or pool is active.
func (bs *buckets) isAhead(v version, b model.Sharer) bool {
	if v.Share == 0 || int(v.Share) > len(bs.shares) || v.Flags&ruleShares == 0 {
		return false
	}
	share := bs.shareIn(v)
	return !share.IsIdle(bs.now()) && share.AheadOf(b) > 0
}

// Share is a copy of the clock and the wheels of a rule or pool; nil if it has no shares.
func (bs *buckets) Share(e Entry) *model.Share { return bs.shareFor(bs.current(e.ID)) }

// shareIn is a copy of the share of a version that has one.
func (bs *buckets) shareIn(v version) model.Share {
	of := &bs.shares[v.Share-1]
	return model.Share{
		ShareParams: model.ShareParams{
			FineShift: v.FineShift, CoarseShift: v.CoarseShift, Step: v.Step,
		},
		ByMember: v.Flags&ruleShareMember != 0, Seen: of.Seen, Skip: atomic.LoadUint64(&of.Skip),
		Credit: int64(atomic.LoadUint64(&of.Credit)), FreeFactor: of.FreeFactor,
		V: atomic.LoadUint64(&of.V), Last: of.Last, Ahead: of.Ahead, More: of.More, Most: of.Most, Rest: of.Rest,
		Weight: int32(atomic.LoadUint32(&of.Weight)), Bins: of.Bin, Shifts: [2]uint8{uint8(of.FineShift), uint8(of.CoarseShift)},
	}
}

// ActiveSharers are how many sharers are active in the buckets of rules and pools, by id.
func (s *Store) ActiveSharers() map[uint32]int {
	bs, active, now := &s.buckets, map[uint32]int{}, s.phase()
	for f := range s.everyPrefix(nil) {
		v := bs.versionIn(f.id, now)
		if !present(v) || v.Flags&ruleWithin == 0 {
			continue
		}
		if pool := bs.versionIn(v.Within, now); pool.Flags&ruleShareMember != 0 && bs.isAhead(pool, *bs.memberOf(pool, f.id)) {
			active[v.Within]++
		}
	}
	all := func(uint32) bool { return true }
	for slot, key := range bs.slots(all) {
		if key.Sharer != 0 && key.Id < bs.room() && bs.isActive(slot, key) {
			active[key.Id]++
		}
	}
	return active
}
