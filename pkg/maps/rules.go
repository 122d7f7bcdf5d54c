package maps

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrFull means that the set holds as many rules as it was made for.
var ErrFull = errors.New("no room for another rule")

// An Entry is a rule in force, with the id of its bucket and counters.
type Entry struct {
	policy.Rule
	ID uint32
}

// A version is one of the two that a rule has, but for its bucket.
type version struct {
	*bpf.AbiTerms
	*bpf.AbiDetails
}

func (s *Set) version(id, n uint32) version {
	r := s.rule(id)
	return version{&r.Terms[n&1], &r.Details[n&1]}
}

// current is the version of a rule that packets see.
func (s *Set) current(id uint32) version {
	return s.version(id, atomic.LoadUint32(&s.rule(id).Version))
}

// Rules are all rules by address, IPv4 first, wider prefixes before those they hold.
func (s *Set) Rules() []Entry {
	var entries []Entry
	for p, id := range s.allPrefixes() {
		entries = append(entries, Entry{decode(p, s.current(id)), id})
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return entries
}

// Match is the rule that decides over an address: the longest prefix.
func (s *Set) Match(a netip.Addr) (Entry, bool) {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if p, err := a.Prefix(bits); err == nil {
			if e, ok := s.Find(p); ok {
				return e, true
			}
		}
	}
	return Entry{}, false
}

// Find is the rule of exactly that prefix.
func (s *Set) Find(p netip.Prefix) (Entry, bool) {
	place := s.findPrefix(p)
	if place == nil {
		return Entry{}, false
	}
	id := *place - 1
	return Entry{decode(p, s.current(id)), id}, true
}

// changes is what a change has to know of all rules, gathered at the first one.
type changes struct {
	free    []uint32                // ids without a prefix, the next one last
	lengths [lengthIPv4 + 33]uint32 // prefixes of each length, as stored says it
}

func (s *Set) gather() *changes {
	if s.changes != nil {
		return s.changes
	}
	c := new(changes)
	used := make([]bool, s.Size().Rules)
	for p, id := range s.allPrefixes() {
		used[id] = true
		_, length := stored(p)
		c.lengths[length]++
	}
	// Ids that were never used need no waiting, so they come first.
	for _, fresh := range []bool{false, true} {
		for id := range slices.Backward(used) {
			if !used[id] && (s.rule(uint32(id)).Retired == 0) == fresh {
				c.free = append(c.free, uint32(id))
			}
		}
	}
	s.refilter(s.allPrefixes())
	s.changes = c
	return c
}

// Put sets a valid rule, in one step for any packet; clock is the data path's
// time in ns, Now but in tests. A rule that was there keeps its counters, and each bucket what it
// owes, up to the new capacity. It reports whether anything was changed. The
// error wraps ErrFull where there is no room.
func (s *Set) Put(rule policy.Rule, clock func() uint64) (changed bool, err error) {
	if e, ok := s.Find(rule.Prefix); ok {
		if e.Rule == rule {
			return false, nil
		}
		s.replace(e.ID, rule, clock)
		return true, nil
	}
	if len(s.gather().free) == 0 {
		return false, fmt.Errorf("%w: it holds %d", ErrFull, s.Size().Rules)
	}
	return true, s.insert(rule, clock)
}

// Load is Put for many rules, each in force as soon as it is set. It stops at the first error.
func (s *Set) Load(rules []policy.Rule, clock func() uint64) error {
	// All prefix lengths at once: for packets to look for another takes a wait.
	c := s.gather()
	for _, r := range rules {
		_, length := stored(r.Prefix)
		c.lengths[length]++
	}
	s.useLengths()
	defer s.useLengths()
	defer func() {
		for _, r := range rules {
			_, length := stored(r.Prefix)
			c.lengths[length]--
		}
	}()
	for _, r := range rules {
		if _, err := s.Put(r, clock); err != nil {
			return err
		}
	}
	return nil
}

// insert sets up all that belongs to a new rule; its prefix, last, brings it into force.
func (s *Set) insert(rule policy.Rule, clock func() uint64) error {
	c := s.gather()
	id := c.free[len(c.free)-1]
	r := s.rule(id)
	if r.Retired != 0 {
		s.waitSince(r.Retired) // packets may have found the id before its last rule was deleted
		s.free(id)
		*r = bpf.AbiRule{Retired: r.Retired}
		clear(s.countersOf(id))
	}
	share(r, rule)
	encode(s.version(id, 0), rule, rand.Uint32()|1)
	empty(&r.Own, meter(s.version(id, 0)), clock())
	if err := s.addPrefix(rule.Prefix, id); err != nil {
		return err
	}
	c.free = c.free[:len(c.free)-1]
	return nil
}

// share remembers that a rule gives sharers slots of the table. They have them
// also while the rule has one bucket for all, until they are freed.
func share(r *bpf.AbiRule, rule policy.Rule) {
	if rule.Each.Kind != policy.EachAll {
		r.Shared = 1
	}
}

// empty makes a bucket owe nothing.
func empty(b *bpf.AbiBucket, m model.Meter, now uint64) {
	e := m.Owing(0, now)
	atomic.StoreUint32(&b.Tick, e.Tick)
	atomic.StoreUint64(&b.Tat, e.TAT)
}

// replace writes the version that no packet reads, and switches to it.
func (s *Set) replace(id uint32, rule policy.Rule, clock func() uint64) {
	r, old := s.rule(id), s.current(id)
	number := atomic.LoadUint32(&r.Version)&1 ^ 1
	next := s.version(id, number)
	s.waitSince(r.Retired) // packets may still be reading what was in force before the last change
	share(r, rule)
	encode(next, rule, old.Salt)
	before, after := meter(old), meter(next)
	switch {
	case limited(old) && limited(next):
		now := clock()
		s.settle(id, before, now)
		after.Continue(before, now)
		next.Base = after.Base
	case limited(next):
		empty(&r.Own, after, clock())
		s.free(id)
	}
	// Other sharers have other buckets, and find theirs when they are back.
	next.Salt ^= sharing(old) ^ sharing(next)
	r.Retired = s.lengths[0].Epoch
	atomic.StoreUint32(&r.Version, number)
	if limited(old) && limited(next) && (after.Capacity < before.Capacity || after.Penalty < before.Penalty) {
		s.clamp(id, after, clock())
	}
}

// Delete takes a rule away, and reports whether there was one.
func (s *Set) Delete(p netip.Prefix) bool {
	place := s.findPrefix(p)
	if place == nil {
		return false
	}
	c, l := s.gather(), &s.lengths[0]
	id := *place - 1
	s.rule(id).Retired, l.Removed = l.Epoch, l.Epoch
	atomic.StoreUint32(place, 0)
	c.free = slices.Insert(c.free, 0, id)
	_, length := stored(p)
	if c.lengths[length]--; c.lengths[length] == 0 {
		s.useLengths()
	}
	return true
}

// Clear puts all rules out of force in one step.
func (s *Set) Clear() {
	c, l := s.gather(), &s.lengths[0]
	var ids []uint32
	for _, id := range s.allPrefixes() {
		s.rule(id).Retired = l.Epoch
		ids = append(ids, id)
	}
	c.free = slices.Insert(c.free, 0, ids...)
	clear(c.lengths[:])
	l.Removed = l.Epoch
	s.useLengths()
	for i := range s.prefixes4 {
		for j := range s.prefixes4[i].Id {
			atomic.StoreUint32(&s.prefixes4[i].Id[j], 0)
		}
	}
	for i := range s.prefixes6 {
		for j := range s.prefixes6[i].Id {
			atomic.StoreUint32(&s.prefixes6[i].Id[j], 0)
		}
	}
}

// Empty reports whether no rule is in force.
func (s *Set) Empty() bool {
	for range s.allPrefixes() {
		return false
	}
	return true
}

// MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// waitForPackets returns when no program runs any more that ran when it was called.
func waitForPackets() {
	// It is synchronize_rcu(), and programs run as RCU readers. Kernels with
	// nohz_full refuse it; no packet takes anything like this long.
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		time.Sleep(50 * time.Millisecond)
	}
}

// waitSince waits for the packets that may see what went out of force in an epoch, 0 for never.
func (s *Set) waitSince(epoch uint32) {
	now := &s.lengths[0].Epoch
	if epoch != *now {
		return
	}
	waitForPackets()
	if *now++; *now == 0 {
		*now = 1
	}
}

// Flags of abi.h.
const (
	ruleLeaky      = uint32(bpf.AbiRuleFlagRULE_LEAKY)
	ruleUnlimited  = uint32(bpf.AbiRuleFlagRULE_UNLIMITED)
	ruleFraming    = uint32(bpf.AbiRuleFlagRULE_FRAMING)
	rulePenalty    = uint32(bpf.AbiRuleFlagRULE_PENALTY)
	ruleFailClosed = uint32(bpf.AbiRuleFlagRULE_FAIL_CLOSED)
	ruleECN        = uint32(bpf.AbiRuleFlagRULE_ECN)
	rulePass       = uint32(bpf.AbiRuleFlagRULE_PASS)
	ruleHost       = uint32(bpf.AbiRuleFlagRULE_HOST)
	ruleSubnet     = uint32(bpf.AbiRuleFlagRULE_SUBNET)
	ruleFlow       = uint32(bpf.AbiRuleFlagRULE_FLOW)

	ruleEach = ruleHost | ruleSubnet | ruleFlow
)

// What flag a rule has for each choice; one of each kind has none.
var (
	algorithmFlags = []uint32{policy.GCRA: 0, policy.Leaky: ruleLeaky}
	eachFlags      = []uint32{policy.EachAll: 0, policy.EachHost: ruleHost, policy.EachSubnet: ruleSubnet, policy.EachFlow: ruleFlow}
	excessFlags    = []uint32{policy.Drop: 0, policy.ECN: ruleECN, policy.Pass: rulePass}
	failFlags      = []uint32{policy.Open: 0, policy.Closed: ruleFailClosed}
)

// sharing tells rules apart by who shares a bucket.
func sharing(r version) uint32 { return r.Flags&ruleEach<<8 | r.EachBits }

func limited(r version) bool { return r.Flags&ruleUnlimited == 0 }

func meter(r version) model.Meter {
	return model.Meter{Slope: r.Slope, Base: r.Base, Capacity: r.Capacity, Penalty: r.Penalty, Idle: r.Idle}
}

// encode writes a rule, for a bucket that was never charged.
func encode(to version, r policy.Rule, salt uint32) {
	t := bpf.AbiTerms{
		Salt: salt, Overhead: r.Framing.Overhead, Mpu: r.Framing.MPU, Capacity: r.Capacity << model.UnitBits,
		Flags: algorithmFlags[r.Algorithm] | excessFlags[r.Excess] | eachFlags[r.Each.Kind] | failFlags[r.Fail],
	}
	d := bpf.AbiDetails{RateBits: uint64(r.Rate)}
	if r.Each.Kind == policy.EachSubnet {
		t.EachBits, d.EachMask = uint32(r.Each.Bits), mask(int(r.Each.Bits))
	}
	if r.Framing != (policy.Framing{}) {
		t.Flags |= ruleFraming
	}
	penalised := r.Penalty.Kind != policy.PenaltyNone
	if penalised {
		t.Flags |= rulePenalty
		d.PenaltyNs = uint64(r.Penalty.Duration)
	}
	if r.Rate == policy.Unlimited {
		t.Flags |= ruleUnlimited
	} else {
		m := model.New(uint64(r.Rate), r.Capacity, penalised, d.PenaltyNs)
		t.Slope, t.Capacity, t.Penalty, t.Idle = m.Slope, m.Capacity, m.Penalty, m.Idle
	}
	*to.AbiTerms, *to.AbiDetails = t, d
}

// decode is the rule that encode has written.
func decode(p netip.Prefix, r version) policy.Rule {
	out := policy.Rule{
		Prefix: p, Rate: policy.Rate(r.RateBits), Capacity: r.Capacity >> model.UnitBits,
		Algorithm: policy.Algorithm(choice(algorithmFlags, r.Flags)), Excess: policy.Excess(choice(excessFlags, r.Flags)),
		Each:    policy.Each{Kind: policy.EachKind(choice(eachFlags, r.Flags)), Bits: uint8(r.EachBits)},
		Fail:    policy.Fail(choice(failFlags, r.Flags)),
		Framing: policy.Framing{Overhead: r.Overhead, MPU: r.Mpu},
	}
	if r.Flags&rulePenalty != 0 {
		out.Penalty.Kind = policy.PenaltyFill
		if r.PenaltyNs > 0 {
			out.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(r.PenaltyNs)}
		}
	}
	return out
}

// choice is the one whose flag is set, or the one that has none.
func choice(flags []uint32, set uint32) (chosen int) {
	for c, flag := range flags {
		if flag == 0 || set&flag != 0 {
			chosen = c
		}
	}
	return chosen
}
