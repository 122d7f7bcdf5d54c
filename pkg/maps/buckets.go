package maps

import (
	"fmt"
	"iter"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

const taken = 1 // TAT_TAKEN of abi.h

// Now is the data path's time: CLOCK_MONOTONIC, in ns.
func Now() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // fails only for a clock that does not exist
	return uint64(ts.Nano())
}

// A Flow is a packet's 5-tuple; ports are 0 where a protocol has none.
type Flow struct {
	Src, Dst         netip.Addr
	Proto            uint8
	SrcPort, DstPort uint16
}

// protocols are those that people know by name; all have ports but ICMP.
var protocols = map[uint8]string{1: "icmp", 6: "tcp", 17: "udp", 33: "dccp", 58: "icmp6", 132: "sctp", 136: "udplite"}

// ParseFlow reads a flow as String writes it: a protocol by name or number, and
// where a packet comes from and goes to, with ports if it has them
// ("udp,192.0.2.1:5000,10.0.0.7:53").
func ParseFlow(s string) (f Flow, err error) {
	parts := strings.Split(s, ",")
	if len(parts) != 3 {
		return f, fmt.Errorf("flow %.100q: write protocol, source and destination, such as udp,192.0.2.1:5000,10.0.0.7:53", s)
	}
	number, err := strconv.ParseUint(parts[0], 10, 8)
	f.Proto = uint8(number)
	if err != nil {
		named := false
		for n, name := range protocols {
			if name == strings.ToLower(parts[0]) {
				f.Proto, named = n, true
			}
		}
		if !named {
			return f, fmt.Errorf("flow %.100q: protocol %q is unknown; use tcp, udp, sctp, dccp, udplite, icmp, icmp6 or a number", s, parts[0])
		}
	}
	for i, end := range []struct {
		addr *netip.Addr
		port *uint16
	}{{&f.Src, &f.SrcPort}, {&f.Dst, &f.DstPort}} {
		text := parts[i+1]
		if *end.addr, err = netip.ParseAddr(text); err == nil {
			continue
		}
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			return f, fmt.Errorf("flow %.100q: %q is neither an address nor an address and a port (10.0.0.7:53, [2001:db8::7]:53)", s, text)
		}
		*end.addr, *end.port = ap.Addr(), ap.Port()
	}
	if f.Src.Is4() != f.Dst.Is4() || f.Src.Zone() != "" || f.Dst.Zone() != "" || f.Src.Is4In6() || f.Dst.Is4In6() {
		return f, fmt.Errorf("flow %.100q: write two IPv4 addresses or two IPv6 addresses, without zones", s)
	}
	return f, nil
}

func (f Flow) String() string {
	proto, ok := protocols[f.Proto]
	if !ok {
		proto = strconv.Itoa(int(f.Proto))
	}
	if f.SrcPort == 0 && f.DstPort == 0 {
		return proto + "," + f.Src.String() + "," + f.Dst.String()
	}
	return proto + "," + netip.AddrPortFrom(f.Src, f.SrcPort).String() + "," + netip.AddrPortFrom(f.Dst, f.DstPort).String()
}

// A Bucket is what one sharer of a rule owes.
type Bucket struct {
	Subnet     netip.Prefix // of a host or subnet; invalid for a flow
	Flow       Flow
	LevelBytes uint64
}

func load(b *bpf.AbiBucket) model.Bucket {
	return model.Bucket{TAT: atomic.LoadUint64(&b.Tat), Tick: atomic.LoadUint32(&b.Tick)}
}

// Level is what the bucket that a packet of flow would be charged to owes now,
// in units: 0 where it is a new one.
func (s *Set) Level(e Entry, match policy.Match, flow Flow, now uint64) (units uint64) {
	if e.Each.Kind == policy.EachAll || s.Spills(e, match, flow, now) {
		return s.OwnLevel(e, now)
	}
	return s.slotLevel(e.ID, makeKey(e.ID, e.Each, match, flow), now)
}

// Spills reports whether a packet of flow would now be charged to the spill
// bucket of its rule, as the table has no room for a bucket of its own.
func (s *Set) Spills(e Entry, match policy.Match, flow Flow, now uint64) bool {
	return e.Each.Kind != policy.EachAll && !s.hasRoom(e.ID, makeKey(e.ID, e.Each, match, flow), now)
}

// GoesAhead reports whether a packet of n bytes of a flow would now go ahead of
// those that wait, as sparse flows do where the rule says so.
func (s *Set) GoesAhead(e Entry, flow Flow, now, n uint64) bool {
	if e.Order != policy.SparseFirst {
		return false
	}
	m, key := s.Meter(e), makeKey(e.ID, policy.Each{Kind: policy.EachFlow}, policy.MatchDst, flow)
	own := m.Owing(s.slotLevel(e.ID, key, now), now)
	inOrder := now < atomic.LoadUint64(&s.rule(e.ID).FifoUntil) || !s.hasRoom(e.ID, key, now)
	return m.Ahead(&own, now, n, 0, inOrder)
}

// slotOf is the slot of a key, nil where it has none.
func (s *Set) slotOf(id uint32, key bpf.AbiKey) *bpf.AbiBucket {
	for _, p := range s.places(key, s.current(id).Salt) {
		for i := range lineSlots {
			if slot := &s.lines[p.line].Slot[i]; atomic.LoadUint32(&slot.Fingerprint) == p.print {
				return slot
			}
		}
	}
	return nil
}

// slotLevel is what the slot of a key owes, in units: 0 where it has none.
func (s *Set) slotLevel(id uint32, key bpf.AbiKey, now uint64) uint64 {
	slot := s.slotOf(id, key)
	if slot == nil {
		return 0
	}
	return s.levelOf(id, s.current(id), load(slot), now)
}

// hasRoom reports whether a key has a slot, or would get one: try_slot of bpf/bucket.h.
func (s *Set) hasRoom(id uint32, key bpf.AbiKey, now uint64) bool {
	if s.slotOf(id, key) != nil {
		return true
	}
	places := s.places(key, s.current(id).Salt)
	if s.hasSpare(places[0].line, now) || s.hasSpare(places[1].line, now) {
		return true
	}
	for _, p := range places {
		for i := range lineSlots {
			moved := place{p.line, atomic.LoadUint32(&s.lines[p.line].Slot[i].Fingerprint)}
			if isFirst(moved.print) && s.hasSpare(s.second(moved).line, now) {
				return true
			}
		}
	}
	return false
}

// Slots tell how full the table is.
type Slots struct {
	All   int
	InUse int // that somebody owes something on, so that no other key can have them
}

// Slots counts those of the table.
func (s *Set) Slots(now uint64) Slots {
	n := Slots{All: len(s.lines) * int(lineSlots)}
	for i := range s.lines {
		for j := range lineSlots {
			if !s.isSpare(uint32(i), j, now) {
				n.InUse++
			}
		}
	}
	return n
}

// hasSpare reports whether a line has a slot that any key may take.
func (s *Set) hasSpare(line uint32, now uint64) bool {
	for i := range lineSlots {
		if s.isSpare(line, i, now) {
			return true
		}
	}
	return false
}

func (s *Set) isSpare(line, i uint32, now uint64) bool {
	slot, key := &s.lines[line].Slot[i], &s.keys[line*lineSlots+i]
	b := load(slot)
	return b.TAT == 0 && atomic.LoadUint32(&slot.Fingerprint) == 0 || b.TAT&taken == 0 && s.drained(key, b, now)
}

// drained is that of bpf/bucket.h: for CPUs whose clock is behind, too.
func (s *Set) drained(key *bpf.AbiKey, b model.Bucket, now uint64) bool {
	const skew = 1 << 20 // SKEW_NS
	id := atomic.LoadUint32(&key.Id)
	return id < s.Size().Rules && s.levelOf(id, s.current(id), b, now-min(now, skew)) == 0
}

// Sharer names whose bucket a packet of flow is charged to.
func Sharer(e Entry, match policy.Match, flow Flow) string {
	far := flow.Dst
	if match == policy.MatchSrc {
		far = flow.Src
	}
	switch e.Each.Kind {
	case policy.EachHost:
		return far.String()
	case policy.EachSubnet:
		return netip.PrefixFrom(far, int(e.Each.Bits)).Masked().String()
	case policy.EachFlow:
		return flow.String()
	}
	return e.Prefix.String()
}

// Meter is the arithmetic of a rule as it is in force.
func (s *Set) Meter(e Entry) model.Meter { return meter(s.current(e.ID)) }

// OwnLevel is what a rule's own bucket owes, in units: everybody's, or with
// --each that of packets for whose sharer there was no room.
func (s *Set) OwnLevel(e Entry, now uint64) uint64 {
	return s.levelOf(e.ID, s.current(e.ID), load(&s.rule(e.ID).Shared), now)
}

// slotsIn are the slots of hosts, subnets and flows in some of the lines that
// keys have there as their first line, or as their second. Buckets move from
// first lines to second ones, so whoever looks at all lines for the first, and
// then at all for the second, misses none.
func (s *Set) slotsIn(from, to int, first bool) iter.Seq2[*bpf.AbiBucket, *bpf.AbiKey] {
	return func(yield func(*bpf.AbiBucket, *bpf.AbiKey) bool) {
		for i := from; i < to; i++ {
			for j := range lineSlots {
				slot, key := &s.lines[i].Slot[j], &s.keys[i*int(lineSlots)+int(j)]
				if print := atomic.LoadUint32(&slot.Fingerprint); print == 0 || isFirst(print) != first {
					continue
				}
				if !yield(slot, key) {
					return
				}
			}
		}
	}
}

// slots are those of one rule. One that moves meanwhile may come twice.
func (s *Set) slots(id uint32) iter.Seq2[*bpf.AbiBucket, *bpf.AbiKey] {
	return func(yield func(*bpf.AbiBucket, *bpf.AbiKey) bool) {
		if s.rule(id).HasSlots == 0 {
			return
		}
		for _, first := range []bool{true, false} {
			for slot, key := range s.slotsIn(0, len(s.lines), first) {
				if atomic.LoadUint32(&key.Id) == id && !yield(slot, key) {
					return
				}
			}
		}
	}
}

// Buckets are all sharers of a rule that owe something now. What tells flows
// apart that share a bucket is none.
func (s *Set) Buckets(e Entry, now uint64) iter.Seq[Bucket] {
	rule := s.current(e.ID)
	return func(yield func(Bucket) bool) {
		for slot, key := range s.slots(e.ID) {
			before, k := load(slot), *key
			if before.TAT&taken != 0 {
				continue
			}
			level := s.levelOf(e.ID, rule, before, now)
			places, print := s.places(k, rule.Salt), atomic.LoadUint32(&slot.Fingerprint)
			// The key is that of the level if nobody took the slot meanwhile.
			if level == 0 || k.Id != e.ID || isFlow(k) && e.Each.Kind != policy.EachFlow || print != places[0].print && print != places[1].print {
				continue
			}
			b := Bucket{LevelBytes: model.Bytes(level)}
			if e.Each.Kind == policy.EachFlow {
				b.Flow = Flow{address(k.Src, k.Family), address(k.Dst, k.Family), k.Proto, networkPort(k.Sport), networkPort(k.Dport)}
			} else {
				far := address(k.Src, k.Family)
				b.Subnet = netip.PrefixFrom(far, eachBits(e.Each, far))
			}
			if !yield(b) {
				return
			}
		}
	}
}

// settle readies the buckets of a rule for another clock: each one is as if
// charged just now, as only the old clock could tell how long it has been idle.
func (s *Set) settle(id uint32, m model.Meter, now uint64) {
	s.rewrite(id, settleBy(m, now))
}

func settleBy(m model.Meter, now uint64) func(model.Bucket) (model.Bucket, bool) {
	return func(b model.Bucket) (model.Bucket, bool) { return m.Owing(m.Level(b, now), now), true }
}

// clamp lets no bucket of a rule owe more than the rule can hold.
func (s *Set) clamp(id uint32, m model.Meter) { s.rewrite(id, clampTo(m, s.now)) }

// clampTo asks for the time once for each bucket, after it was read: what was
// charged to it since a time before would be forgiven.
func clampTo(m model.Meter, clock func() uint64) func(model.Bucket) (model.Bucket, bool) {
	return func(b model.Bucket) (model.Bucket, bool) {
		now := clock()
		return m.Owing(m.Most(), now), m.Level(b, now) > m.Most()
	}
}

// rewrite changes buckets of a rule, while packets charge them.
func (s *Set) rewrite(id uint32, change func(model.Bucket) (next model.Bucket, wanted bool)) {
	rewriteBucket(&s.rule(id).Shared, change)
	for slot := range s.slots(id) {
		rewriteBucket(slot, change)
	}
}

// rewriteBucket changes a bucket while packets charge it. Where another key takes
// the slot, or its bucket moves, nothing is to be done here any more.
func rewriteBucket(b *bpf.AbiBucket, change func(model.Bucket) (next model.Bucket, wanted bool)) {
	print := atomic.LoadUint32(&b.Fingerprint)
	for {
		before := settled(b)
		next, wanted := change(before)
		if !wanted || atomic.LoadUint32(&b.Fingerprint) != print {
			return
		}
		atomic.StoreUint32(&b.Tick, next.Tick)
		if atomic.CompareAndSwapUint64(&b.Tat, before.TAT, next.TAT) {
			return
		}
	}
}

// settled is a bucket when no CPU is about to give its slot to another key, or to
// move it, which takes as long as a packet.
func settled(b *bpf.AbiBucket) model.Bucket {
	for {
		if now := load(b); now.TAT&taken == 0 {
			return now
		}
		runtime.Gosched()
	}
}

// free gives all slots of a rule back that is not in force: another rule's
// clock would not know that they have drained.
func (s *Set) free(id uint32) {
	for slot := range s.slots(id) {
		print := atomic.LoadUint32(&slot.Fingerprint)
		before := settled(slot)
		// As packets do: take it, if it is still what it was, then let go of it.
		if atomic.LoadUint32(&slot.Fingerprint) != print || !atomic.CompareAndSwapUint64(&slot.Tat, before.TAT, before.TAT|taken) {
			continue
		}
		atomic.StoreUint32(&slot.Fingerprint, 0)
		atomic.StoreUint64(&slot.Tat, 0)
	}
}
