package maps

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
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

// current is the version of a rule that packets see.
func (s *Set) current(id uint32) *bpf.AbiRule {
	return &s.rules[2*id+atomic.LoadUint32(&s.own[id].Version)&1]
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
	used := make([]bool, len(s.own))
	for _, id := range s.allPrefixes() {
		used[id] = true
	}
	id := slices.Index(used, false)
	if id < 0 {
		return false, fmt.Errorf("%w: it holds %d", ErrFull, len(s.own))
	}
	return true, s.insert(uint32(id), rule)
}

// insert sets up all that belongs to a new rule; its prefix, last, brings it into force.
func (s *Set) insert(id uint32, rule policy.Rule) error {
	if s.rules[2*id].Salt != 0 {
		waitForPackets() // which may have found the id before its last rule was deleted
		s.free(id)
	}
	s.own[id] = bpf.AbiOwn{}
	s.rules[2*id] = encode(rule, id, newSalt())
	if err := s.resetCounters(id); err != nil {
		return err
	}
	return s.addPrefix(rule.Prefix, id)
}

// replace writes the version that no packet reads, and switches to it.
func (s *Set) replace(id uint32, rule policy.Rule, clock func() uint64) {
	own, old := &s.own[id], s.current(id)
	next := encode(rule, id, old.Salt)
	before, after := meter(old), meter(&next)
	// A packet may still be reading what was in force before the last change.
	waitForPackets()
	switch {
	case limited(old) && limited(&next):
		now := clock()
		s.settle(id, before, now)
		after.Continue(before, now)
		next.Base = after.Base
	case limited(&next):
		atomic.StoreUint64(&own.Bucket.Tat, 0)
		s.free(id)
	}
	// Other sharers have other buckets, and find theirs when they are back.
	next.Salt ^= sharing(old) ^ sharing(&next)
	version := atomic.LoadUint32(&own.Version)&1 ^ 1
	s.rules[2*id+version] = next
	atomic.StoreUint32(&own.Version, version)
	if limited(old) && limited(&next) && (after.Capacity < before.Capacity || after.Penalty < before.Penalty) {
		s.clamp(id, after, clock())
	}
}

// Delete takes a rule away, and reports whether there was one.
func (s *Set) Delete(p netip.Prefix) bool {
	place := s.findPrefix(p)
	if place == nil {
		return false
	}
	atomic.StoreUint32(place, 0)
	s.useLengths(firsts(s.allPrefixes()))
	return true
}

// Clear puts all rules out of force in one step.
func (s *Set) Clear() {
	s.useLengths(func(func(netip.Prefix) bool) {})
	for l := range s.prefixes {
		for i := range s.prefixes[l].Id {
			atomic.StoreUint32(&s.prefixes[l].Id[i], 0)
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

// sharing tells rules apart by who shares a bucket.
func sharing(r *bpf.AbiRule) uint32 { return uint32(r.Each)<<16 | uint32(r.EachBits)<<8 }

func limited(r *bpf.AbiRule) bool { return r.Flags&uint8(bpf.AbiRuleFlagRULE_UNLIMITED) == 0 }

func newSalt() uint32 {
	var b [4]byte
	rand.Read(b[:])
	return binary.NativeEndian.Uint32(b[:]) | 1
}

func meter(r *bpf.AbiRule) model.Meter {
	return model.Meter{Slope: r.Slope, Base: r.Base, Capacity: r.Capacity, Penalty: r.Penalty, Idle: r.Idle}
}

func encode(r policy.Rule, id, salt uint32) bpf.AbiRule {
	out := bpf.AbiRule{
		Id: id, Salt: salt,
		Overhead: r.Framing.Overhead, Mpu: r.Framing.MPU,
		Algorithm: uint8(r.Algorithm), Excess: uint8(r.Excess),
		RateBits: uint64(r.Rate), CapacityBytes: r.Capacity,
	}
	switch r.Each.Kind {
	case policy.EachHost:
		out.Each, out.EachBits = uint8(bpf.AbiEachEACH_SUBNET), uint8(r.Prefix.Addr().BitLen())
	case policy.EachSubnet:
		out.Each, out.EachBits = uint8(bpf.AbiEachEACH_SUBNET), r.Each.Bits
	case policy.EachFlow:
		out.Each = uint8(bpf.AbiEachEACH_FLOW)
	}
	out.EachMask = mask(int(out.EachBits))
	if r.Fail == policy.Closed {
		out.Flags |= uint8(bpf.AbiRuleFlagRULE_FAIL_CLOSED)
	}
	if r.Rate == policy.Unlimited {
		out.Flags |= uint8(bpf.AbiRuleFlagRULE_UNLIMITED)
		return out
	}
	penalised := r.Penalty.Kind != policy.PenaltyNone
	if penalised {
		out.Flags |= uint8(bpf.AbiRuleFlagRULE_PENALTY)
		out.PenaltyNs = uint64(r.Penalty.Duration)
	}
	m := model.New(uint64(r.Rate), r.Capacity, penalised, out.PenaltyNs)
	out.Slope, out.Capacity, out.Penalty, out.Idle = m.Slope, m.Capacity, m.Penalty, m.Idle
	return out
}

func decode(p netip.Prefix, r *bpf.AbiRule) policy.Rule {
	out := policy.Rule{
		Prefix: p, Rate: policy.Rate(r.RateBits), Capacity: r.CapacityBytes,
		Algorithm: policy.Algorithm(r.Algorithm), Excess: policy.Excess(r.Excess),
		Framing: policy.Framing{Overhead: r.Overhead, MPU: r.Mpu},
	}
	switch {
	case r.Each == uint8(bpf.AbiEachEACH_FLOW):
		out.Each.Kind = policy.EachFlow
	case r.Each == uint8(bpf.AbiEachEACH_SUBNET) && int(r.EachBits) == p.Addr().BitLen():
		out.Each.Kind = policy.EachHost
	case r.Each == uint8(bpf.AbiEachEACH_SUBNET):
		out.Each = policy.Each{Kind: policy.EachSubnet, Bits: r.EachBits}
	}
	if r.Flags&uint8(bpf.AbiRuleFlagRULE_FAIL_CLOSED) != 0 {
		out.Fail = policy.Closed
	}
	if r.Flags&uint8(bpf.AbiRuleFlagRULE_PENALTY) != 0 {
		out.Penalty.Kind = policy.PenaltyFill
		if r.PenaltyNs > 0 {
			out.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(r.PenaltyNs)}
		}
	}
	return out
}
