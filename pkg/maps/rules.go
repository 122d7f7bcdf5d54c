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

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	// ErrNoRule means that no rule has the prefix.
	ErrNoRule = errors.New("no such rule")
	// ErrFull means that the set holds as many rules as it was made for.
	ErrFull = errors.New("no room for another rule")
)

// An Entry is a rule in force, with the id of its bucket and counters.
type Entry struct {
	policy.Rule
	ID uint32
}

// prefixMap is the map that a prefix belongs in, and its key there.
func (s *Set) prefixMap(p netip.Prefix) (*ebpf.Map, any) {
	if p.Addr().Is4() {
		return s.maps[bpf.GcraMapPrefixes4], bpf.AbiPrefix4{Bits: uint32(p.Bits()), Addr: words(p.Addr())[0]}
	}
	return s.maps[bpf.GcraMapPrefixes6], bpf.AbiPrefix6{Bits: uint32(p.Bits()), Addr: words(p.Addr())}
}

// words is an address as the programs hold it: in network order, whatever the machine's.
func words(a netip.Addr) (w [4]uint32) {
	b := a.AsSlice()
	for i := range len(b) / 4 {
		w[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return w
}

// address is the inverse of words.
func address(w [4]uint32, family uint8) netip.Addr {
	var b [16]byte
	for i, v := range w {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	if family == 4 {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b)
}

// current is the version of a rule that packets see.
func (s *Set) current(id uint32) *bpf.AbiRule {
	return &s.rules[2*id+atomic.LoadUint32(&s.own[id].Version)&1]
}

// Rules are all rules by address, IPv4 first, wider prefixes before those they hold.
func (s *Set) Rules() ([]Entry, error) {
	var entries []Entry
	add := func(p netip.Prefix, id uint32) error {
		if id >= uint32(len(s.own)) {
			return fmt.Errorf("prefix %s: %w", p, ErrOtherLayout)
		}
		entries = append(entries, Entry{decode(p, s.current(id)), id})
		return nil
	}
	var id uint32
	var k4 bpf.AbiPrefix4
	it := s.maps[bpf.GcraMapPrefixes4].Iterate()
	for it.Next(&k4, &id) {
		if err := add(netip.PrefixFrom(address([4]uint32{k4.Addr}, 4), int(k4.Bits)), id); err != nil {
			return nil, err
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("read the IPv4 prefixes: %w", err)
	}
	var k6 bpf.AbiPrefix6
	it = s.maps[bpf.GcraMapPrefixes6].Iterate()
	for it.Next(&k6, &id) {
		if err := add(netip.PrefixFrom(address(k6.Addr, 6), int(k6.Bits)), id); err != nil {
			return nil, err
		}
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("read the IPv6 prefixes: %w", err)
	}
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	return entries, nil
}

// Match is the rule that decides over an address: the longest prefix.
func (s *Set) Match(a netip.Addr) (best Entry, found bool, err error) {
	entries, err := s.Rules()
	for _, e := range entries {
		// Of prefixes that hold one address, a longer one comes later.
		if e.Prefix.Contains(a) {
			best, found = e, true
		}
	}
	return best, found, err
}

// Put sets a valid rule, in one step for any packet; clock is the data path's
// time in ns, Now but in tests. A rule that was there keeps its counters, and each bucket what it
// owes, up to the new capacity. It reports whether anything was changed. The
// error wraps ErrFull where there is no room.
func (s *Set) Put(rule policy.Rule, clock func() uint64) (changed bool, err error) {
	entries, err := s.Rules()
	if err != nil {
		return false, err
	}
	used := make([]bool, len(s.own))
	for _, e := range entries {
		if e.Prefix == rule.Prefix {
			if e.Rule == rule {
				return false, nil
			}
			return true, s.replace(e.ID, rule, clock)
		}
		used[e.ID] = true
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
	}
	s.own[id] = bpf.AbiOwn{}
	s.rules[2*id] = encode(rule, id, newSalt())
	if err := s.resetCounters(id); err != nil {
		return err
	}
	m, key := s.prefixMap(rule.Prefix)
	if err := m.Update(key, id, ebpf.UpdateNoExist); err != nil {
		return fmt.Errorf("add prefix %s: %w", rule.Prefix, err)
	}
	return nil
}

// replace writes the version that no packet reads, and switches to it.
func (s *Set) replace(id uint32, rule policy.Rule, clock func() uint64) error {
	own, old := &s.own[id], s.current(id)
	next := encode(rule, id, old.Salt)
	before, after := meter(old), meter(&next)
	// A packet may still be reading what was in force before the last change.
	waitForPackets()
	switch {
	case limited(old) && limited(&next):
		now := clock()
		if before.Wraps(after.Idle) {
			s.settle(id, before, now)
		}
		after.Continue(before, now)
		next.Base = after.Base
	case limited(&next):
		atomic.StoreUint64(&own.Bucket.Tat, 0)
	}
	if old.Each != next.Each || old.EachBits != next.EachBits || !limited(old) {
		next.Salt = newSalt() // buckets of other sharers than before
	}
	version := atomic.LoadUint32(&own.Version)&1 ^ 1
	s.rules[2*id+version] = next
	atomic.StoreUint32(&own.Version, version)
	if limited(old) && limited(&next) && after.Most() < before.Most() {
		s.clamp(id, after, clock())
	}
	return nil
}

// Delete takes a rule away. The error wraps ErrNoRule where there is none.
func (s *Set) Delete(p netip.Prefix) error {
	m, key := s.prefixMap(p)
	err := m.Delete(key)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return ErrNoRule
	}
	if err != nil {
		return fmt.Errorf("delete prefix %s: %w", p, err)
	}
	return nil
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
