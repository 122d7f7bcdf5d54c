package maps

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// firstParams are the cold parameters of a rule with colours.
func firstParams(c *bpf.AbiColdParams) *bpf.AbiFirstParams {
	return (*bpf.AbiFirstParams)(unsafe.Pointer(c))
}

// secondParams are those of its second limit.
func secondParams(c *bpf.AbiColdParams) *bpf.AbiSecondParams {
	return (*bpf.AbiSecondParams)(unsafe.Pointer(c))
}

// encodeColours writes what a rule with colours has beside its limit, or what its second limit has.
func encodeColours(t *bpf.AbiParams, d *bpf.AbiColdParams, r policy.Rule) {
	switch c := r.Colours; {
	case r.Algorithm.HasColours():
		t.Within = uint32(c.Green) | uint32(c.Yellow)<<8 | uint32(c.Red)<<16
		if c.Aware {
			t.Flags |= ruleAware
		}
	case kindOf(r) != policy.GCRA:
		second := secondParams(d)
		second.Yellow, second.Red = c.In.Yellow, c.In.Red
		if kindOf(r) == policy.SRTCM {
			t.Flags |= ruleTotal
		}
	}
}

// decodeColours is the inverse of encodeColours for both limits of a rule.
func (rs *rules) decodeColours(out *policy.Rule, first, second version) {
	out.Excess, out.Members, out.Share = policy.Drop, 0, policy.Share{} // firstParams have others in their place
	c := &out.Colours
	c.Aware = first.Flags&ruleAware != 0
	c.Green, c.Yellow, c.Red = policy.Action(first.Within), policy.Action(first.Within>>8), policy.Action(first.Within>>16)
	params := secondParams(second.AbiColdParams)
	c.In = policy.ColourMap{Yellow: params.Yellow, Red: params.Red}
	rate, burst := policy.Rate(second.RateBits), second.Limit>>model.UnitBits
	switch out.Algorithm {
	case policy.SRTCM:
		c.EBS = burst - out.Capacity
	case policy.TRTCM:
		c.PIR, c.PBS = rate, burst
	case policy.RFC4115:
		c.EIR, c.EBS = rate, burst
	}
}

// copySecond gives parameters of a rule with colours what the fast path needs of those of its second limit in a phase of the
// change. It must follow every change of these.
func (rs *rules) copySecond(v version, in phase) {
	if v.Flags&ruleColours == 0 {
		return
	}
	to, second := firstParams(v.AbiColdParams), rs.versionIn(v.AbiColdParams.Second, in)
	to.SecondRate, to.SecondBase, to.SecondLimit, to.SecondIdle = second.RateUnits, second.Base, second.Limit, second.Idle
}

// totalOf is the second bucket of a key of a srtcm rule, given its slot or the shared bucket. Nil if the key has none.
func (s *Store) totalOf(id uint32, v version, first *bpf.AbiBucket) *bpf.AbiBucket {
	second := v.AbiColdParams.Second
	if first == &s.rule(id).Shared {
		return &s.rule(second).Shared
	}
	limit, total := s.secondOf(first)
	if limit != second {
		return nil
	}
	return total
}

// ebsOf is EBS in units of a version of a srtcm rule.
func ebsOf(v version) uint64 { return firstParams(v.AbiColdParams).SecondLimit - v.Limit }

// clampTotal returns the level of a total, with C limited to CBS and E to EBS, given the level of C.
func clampTotal(total, level uint64, v version) uint64 {
	return min(level, v.Limit) + min(total-min(total, level), ebsOf(v))
}

// clampPair limits the total of a key after a change, given its first bucket, which is limited next.
func (s *Store) clampPair(id uint32, first *bpf.AbiBucket) {
	v := s.current(id)
	total := s.totalOf(id, v, first)
	if total == nil {
		return
	}
	rewriteBucket(total, func(b model.Bucket) (model.Bucket, bool) {
		now := s.now()
		m := s.meterAt(s.current(v.AbiColdParams.Second), now)
		level := m.Level(b, now)
		clamped := clampTotal(level, s.meterAt(v, now).Level(load(first), now), v)
		return m.WithLevel(clamped, now), clamped < level
	})
}

// revertPair is revertBy for the total of a key, given its first bucket, which is reverted next: revert_total of
// bpf/colours.h.
func (s *Store) revertPair(id uint32, old, next version, first *bpf.AbiBucket, until uint64) {
	total := s.totalOf(id, old, first)
	if total == nil {
		return
	}
	before, after := s.bothPhases(old.AbiColdParams.Second)
	before.reverted = true
	m, then := s.meterAt(before, until), s.meterAt(after, until)
	rewriteBucket(total, func(b model.Bucket) (model.Bucket, bool) {
		if int32(b.Tick-model.Tick(until)) > 0 {
			return b, false
		}
		level := s.meterAt(next, until).Level(load(first), until)
		back := m.WithLevel(clampTotal(then.Level(b, until), level, old), until)
		back.Tick++
		return back, true
	})
}

// hasTotals reports whether a rule is srtcm before and after a change.
func hasTotals(old, next version) bool {
	return old.Flags&next.Flags&ruleSRTCM != 0 && limited(old) && limited(next)
}

// shrinksPairs reports whether its pairs of buckets can hold less after the change.
func shrinksPairs(old, next version) bool {
	return hasTotals(old, next) && (next.Limit < old.Limit || ebsOf(next) < ebsOf(old))
}

// shareSecond reports whether a rule has colours and the same second limit in two versions.
func shareSecond(a, b version) bool {
	return a.Flags&ruleColours != 0 && b.Flags&ruleColours != 0 && a.AbiColdParams.Second == b.AbiColdParams.Second
}

// countColours has packets that a rule counted so far be of no colour, if it gets colours.
func (s *Store) countColours(id uint32, old, next version) {
	if next.Flags&ruleColours != 0 && !shareSecond(old, next) {
		s.addUncoloured(id, next, 1)
	}
}

// addUncoloured has packets that a rule counted so far be of no colour for its second limit in a version, or with -1 no more.
func (s *Store) addUncoloured(id uint32, v version, factor uint64) {
	so, of := s.count(id), &s.countersOf(v.AbiColdParams.Second)[0]
	atomic.AddUint64(&of.MarkedPackets, factor*(so.PassedPackets+so.DroppedPackets))
	atomic.AddUint64(&of.ContendedPackets, factor*(so.PassedBytes+so.DroppedBytes))
}

// countAfter has packets that rules count while a change is in force be of no colour once it is reverted, from now on or, with
// 1, until now. Only while a change may revert by itself do the programs count them.
func (s *Store) countAfter(factor uint64) {
	if s.hook.Colours == 0 {
		return
	}
	s.eachTaking(func(id uint32) {
		old, next := s.bothPhases(id)
		if old.Flags&ruleColours != 0 && !shareSecond(old, next) {
			s.addUncoloured(id, old, factor)
		}
	})
}

const minus = ^uint64(0) // as a factor

// addColours completes the counters of a rule with colours by those of its second limit, which passes yellow packets, drops
// red ones, and has those without a colour as further excess and as marked. Green packets are all others: a few too few, or none, where
// packets of other colours were counted after all.
func (c *Counters) addColours(second Counters) {
	c.YellowPackets, c.YellowBytes, c.RedPackets, c.RedBytes = second.PassedPackets, second.PassedBytes, second.DroppedPackets, second.DroppedBytes
	packets, bytes := c.PassedPackets+c.DroppedPackets, c.PassedBytes+c.DroppedBytes
	c.GreenPackets = packets - min(packets, c.YellowPackets+second.ExcessPackets+second.MarkedPackets)
	c.GreenBytes = bytes - min(bytes, c.YellowBytes+second.ExcessBytes+second.ContendedPackets)
}

// PutPrograms makes the programs of a kind of hook call each other: that of all rules, and that of rules with colours.
func (s *Store) PutPrograms(kind uint32, all, colours *ebpf.Program) error {
	programs := s.maps[bpf.ShapectlMapPrograms]
	if err := programs.Put(kind, all); err != nil {
		return fmt.Errorf("put a program in place: %w", err)
	}
	if err := programs.Put(uint32(bpf.AbiLayoutKINDS)+kind, colours); err != nil {
		return fmt.Errorf("put the program of rules with colours in place: %w", err)
	}
	return nil
}
