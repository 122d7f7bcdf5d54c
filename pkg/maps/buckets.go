package maps

import (
	"fmt"
	"iter"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

const tatBusy = 1 // TAT_BUSY of abi.h

// Now is the data path's time: CLOCK_MONOTONIC, in ns.
func Now() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // fails only for a clock that does not exist
	return uint64(ts.Nano())
}

// Clocks are the time of the wall clock and that of Now, at the same instant.
func Clocks() (wall time.Time, now uint64) {
	for { // again if this process was made to wait in between
		before := Now()
		wall, now = time.Now(), Now()
		if now-before < uint64(time.Millisecond) {
			return wall, now
		}
	}
}

// A Flow is a packet's 5-tuple; ports are 0 where a protocol has none.
type Flow struct {
	Src, Dst         netip.Addr
	Proto            uint8
	SrcPort, DstPort uint16
}

// protocols are those that people know by name; all have ports but ICMP.
var protocols = map[uint8]string{1: "icmp", 6: "tcp", 17: "udp", 33: "dccp", 58: "icmp6", 132: "sctp", 136: "udplite"}

// ParseFlow reads a flow as String writes it: a protocol by name or number, source and
// destination, with ports if the protocol has them ("udp,192.0.2.1:5000,10.0.0.7:53").
func ParseFlow(s string) (f Flow, err error) {
	parts := strings.Split(s, ",")
	if len(parts) != 3 {
		return f, fmt.Errorf("flow %.100q: write protocol, source and destination, such as udp,192.0.2.1:5000,10.0.0.7:53", s)
	}
	number, err := strconv.ParseUint(parts[0], 10, 8)
	f.Proto = uint8(number)
	if err != nil {
		f.Proto = 0
		for n, name := range protocols {
			if name == strings.ToLower(parts[0]) {
				f.Proto = n
			}
		}
		if f.Proto == 0 {
			return f, fmt.Errorf("flow %.100q: protocol %q is unknown; use tcp, udp, sctp, dccp, udplite, icmp, icmp6 or a number", s, parts[0])
		}
	}
	var ends [2]netip.AddrPort
	for i, text := range parts[1:] {
		if addr, err := netip.ParseAddr(text); err == nil {
			ends[i] = netip.AddrPortFrom(addr, 0)
		} else if ends[i], err = netip.ParseAddrPort(text); err != nil {
			return f, fmt.Errorf("flow %.100q: %q is neither an address nor an address and a port (10.0.0.7:53, [2001:db8::7]:53)", s, text)
		}
	}
	f.Src, f.SrcPort, f.Dst, f.DstPort = ends[0].Addr(), ends[0].Port(), ends[1].Addr(), ends[1].Port()
	if f.Src.Is4() != f.Dst.Is4() || f.Src.Zone() != "" || f.Dst.Zone() != "" || f.Src.Is4In6() || f.Dst.Is4In6() {
		return f, fmt.Errorf("flow %.100q: write two IPv4 addresses or two IPv6 addresses, without zones", s)
	}
	return f, nil
}

// Far is the address on the side that rules match.
func (f Flow) Far(match policy.Match) netip.Addr {
	if match == policy.MatchSrc {
		return f.Src
	}
	return f.Dst
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

// A Bucket is a bucket of a rule, with its key.
type Bucket struct {
	Subnet      netip.Prefix // of a host or subnet; invalid for a flow
	Flow        Flow
	LevelBytes  uint64
	SecondBytes uint64 // of a rule with colours: the level of E, or with trtcm of P
}

func load(b *bpf.AbiBucket) model.Bucket {
	return model.Bucket{TAT: atomic.LoadUint64(&b.Tat), Tick: atomic.LoadUint32(&b.Tick)}
}

// buckets are the buckets of all rules: a shared bucket for each rule, and the slots of
// the table.
type buckets struct {
	rules
	lines   []bpf.AbiLine
	seconds []bpf.AbiLine // the second buckets of slots
	keys    []bpf.AbiKey
}

// State is the state that a packet of flow would meet now. With Spilled, the table has no
// room for its key, and the packet would be charged to the spill bucket.
func (bs *buckets) State(e Entry, match policy.Match, flow Flow, now uint64) (state model.State) {
	state.Level, state.Departs = bs.SharedLevel(e, now), atomic.LoadUint64(&bs.rule(e.ID).Departs)
	if e.Each.Kind != policy.EachAll {
		key := makeKey(e.ID, e.Each, match, flow)
		if level, ok := bs.slotLevel(e.ID, key, now); ok {
			state.Level, state.Departs = level, 0
		} else {
			state.Spilled = true
		}
		if slot := bs.slotOf(key, bs.current(e.ID).Salt); slot != nil {
			state.Departs = atomic.LoadUint64(&bs.keys[bs.indexOf(slot)].Departs)
		}
	}
	bs.addFlow(&state, e, match, flow, now)
	return state
}

// addFlow adds the state of the flow in the queue of a rule or pool, if sparse flows go first there.
func (bs *buckets) addFlow(state *model.State, e Entry, match policy.Match, flow Flow, now uint64) {
	if e.Order != policy.SparseFirst {
		return
	}
	level, ok := bs.slotLevel(e.ID, makeKey(e.ID, policy.Each{Kind: policy.EachFlow}, match, flow), now)
	state.Flow = level
	v := bs.current(e.ID)
	state.FIFO = !ok || now < atomic.LoadUint64(&bs.rule(e.ID).FifoUntil) || bs.leaseEnded(v, now) ||
		v.reverted && now < bs.change.Until+uint64(policy.MaxWait)
}

// slotLevel is the level of a key's slot, in units, or that of a new one if the key has no slot. ok is false
// if the key could not get one either, by the rules of bpf/table.h.
func (bs *buckets) slotLevel(id uint32, key bpf.AbiKey, now uint64) (level uint64, ok bool) {
	rule := bs.current(id)
	if slot := bs.slotOf(key, rule.Salt); slot != nil {
		return bs.levelOf(rule, load(slot), now), true
	}
	level, places := bs.levelOf(rule, model.Bucket{}, now), bs.places(key, rule.Salt)
	if bs.emptySlots(places[0].line, now)+bs.emptySlots(places[1].line, now) > 0 {
		return level, true
	}
	for _, p := range places {
		for i := range bs.lines[p.line].Slot {
			moved := place{p.line, atomic.LoadUint32(&bs.lines[p.line].Slot[i].Fingerprint)}
			if isFirst(moved.fingerprint) && bs.emptySlots(bs.second(moved).line, now) > 0 {
				return level, true
			}
		}
	}
	return 0, false
}

// slotOf is the slot that a key has, or nil.
func (bs *buckets) slotOf(key bpf.AbiKey, salt uint32) *bpf.AbiBucket {
	for _, p := range bs.places(key, salt) {
		for i := range bs.lines[p.line].Slot {
			if slot := &bs.lines[p.line].Slot[i]; atomic.LoadUint32(&slot.Fingerprint) == p.fingerprint {
				return slot
			}
		}
	}
	return nil
}

// Slots is how full the table is.
type Slots struct {
	All   int
	InUse int // their buckets are not empty, so no other key can get them
}

// Slots counts the slots of the table.
func (bs *buckets) Slots(now uint64) Slots {
	n := Slots{All: len(bs.lines) * int(lineSlots)}
	for i := range bs.lines {
		n.InUse += int(lineSlots) - bs.emptySlots(uint32(i), now)
	}
	return n
}

// emptySlots is how many slots of a line are free for any key.
func (bs *buckets) emptySlots(line uint32, now uint64) (n int) {
	for i := range lineSlots {
		if bs.isEmpty(line, i, now) {
			n++
		}
	}
	return n
}

// isEmpty is is_empty of bpf/table.h. It allows for CPUs whose clock is behind.
func (bs *buckets) isEmpty(line, i uint32, now uint64) bool {
	const skew = 1 << 20 // SKEW_NS
	slot, key := &bs.lines[line].Slot[i], &bs.keys[line*lineSlots+i]
	b := load(slot)
	if b.TAT == 0 && atomic.LoadUint32(&slot.Fingerprint) == 0 {
		return true
	}
	id := atomic.LoadUint32(&key.Id)
	if key.Sharer != 0 && id < bs.room() {
		return b.TAT&tatBusy == 0 && !bs.isActive(slot, key)
	}
	if b.TAT&tatBusy != 0 || id >= bs.room() {
		return false
	}
	v, now := bs.current(id), now-min(now, skew)
	if bs.levelOf(v, b, now) != bs.levelOf(v, model.Bucket{}, now) {
		return false
	}
	limit, second := bs.secondOf(slot)
	return second == nil || bs.secondLevel(limit, second, now) == bs.levelOf(bs.current(limit), model.Bucket{}, now)
}

// secondLevel is the level of a second bucket by the limit with that id, in units.
func (bs *buckets) secondLevel(id uint32, b *bpf.AbiBucket, now uint64) uint64 {
	return bs.levelOf(bs.current(id), load(b), now)
}

// ColourLevels are the levels that a packet of flow would meet now under a rule with colours.
func (bs *buckets) ColourLevels(e Entry, match policy.Match, flow Flow, now uint64) (l model.Levels) {
	second, _ := bs.Second(e)
	l = bs.SharedLevels(e, now)
	if e.Each.Kind == policy.EachAll {
		return l
	}
	key := makeKey(e.ID, e.Each, match, flow)
	first, ok := bs.slotLevel(e.ID, key, now)
	if !ok {
		return l // of the spill buckets
	}
	l = model.Levels{First: first, Second: bs.levelOf(bs.current(second.ID), model.Bucket{}, now)}
	if slot := bs.slotOf(key, bs.current(e.ID).Salt); slot != nil {
		if id, b := bs.secondOf(slot); b != nil && id == second.ID {
			l.Second = bs.secondLevel(second.ID, b, now)
		}
	}
	return l
}

// KeyName is the bucket key of a packet of flow, as people read it.
func KeyName(e Entry, match policy.Match, flow Flow) string {
	far := flow.Far(match)
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

// Meter is the meter of a rule by the parameters in force.
func (rs *rules) Meter(e Entry) model.Meter { return rs.meterAt(rs.current(e.ID), rs.now()) }

// SharedLevel is the level of a rule's shared bucket, in units. With --each that is the
// spill bucket.
func (bs *buckets) SharedLevel(e Entry, now uint64) uint64 {
	return bs.levelOf(bs.current(e.ID), load(&bs.rule(e.ID).Shared), now)
}

// SharedLevels are the levels of both shared buckets of a rule with colours.
func (bs *buckets) SharedLevels(e Entry, now uint64) model.Levels {
	second, _ := bs.Second(e)
	return model.Levels{First: bs.SharedLevel(e, now), Second: bs.SharedLevel(second, now)}
}

// slotsIn are the slots in use in some lines: those in the first line of their key, or those
// in the second. Buckets only move from first lines to second ones. So one pass for the first
// lines, and then one for the second lines, miss no bucket.
func (bs *buckets) slotsIn(from, to int, first bool) iter.Seq2[*bpf.AbiBucket, *bpf.AbiKey] {
	return func(yield func(*bpf.AbiBucket, *bpf.AbiKey) bool) {
		lines := bs.lines[from:to]
		for i := range lines {
			line := &lines[i].Slot
			at := func(j int) uint32 { return atomic.LoadUint32(&line[j].Fingerprint) }
			if at(0)|at(1)|at(2)|at(3) == 0 {
				continue // most lines are empty
			}
			for j := range line {
				if fingerprint := at(j); fingerprint == 0 || isFirst(fingerprint) != first {
					continue
				}
				if !yield(&line[j], &bs.keys[(from+i)*int(lineSlots)+j]) {
					return
				}
			}
		}
	}
}

// slots are the slots of some rules, by id. A slot that moves meanwhile may appear twice.
func (bs *buckets) slots(of func(id uint32) bool) iter.Seq2[*bpf.AbiBucket, *bpf.AbiKey] {
	return func(yield func(*bpf.AbiBucket, *bpf.AbiKey) bool) {
		for _, first := range []bool{true, false} {
			for slot, key := range bs.slotsIn(0, len(bs.lines), first) {
				if of(atomic.LoadUint32(&key.Id)) && !yield(slot, key) {
					return
				}
			}
		}
	}
}

// indexOf is the number of a slot in the table.
func (bs *buckets) indexOf(slot *bpf.AbiBucket) uintptr {
	return (uintptr(unsafe.Pointer(slot)) - uintptr(unsafe.Pointer(&bs.lines[0]))) / unsafe.Sizeof(*slot)
}

// secondOf is the second bucket of a slot and the id of its limit, or nil if it has none.
func (bs *buckets) secondOf(slot *bpf.AbiBucket) (id uint32, b *bpf.AbiBucket) {
	if len(bs.seconds) < len(bs.lines) {
		return 0, nil
	}
	n := bs.indexOf(slot)
	if bs.keys[n].Paired == 0 {
		return 0, nil
	}
	return atomic.LoadUint32(&bs.keys[n].Second), &bs.seconds[n/uintptr(lineSlots)].Slot[n%uintptr(lineSlots)]
}

// Buckets are the buckets of a rule that are not empty now, without the shared bucket and
// the words of sparse flows.
func (bs *buckets) Buckets(e Entry, now uint64) iter.Seq[Bucket] {
	return func(yield func(Bucket) bool) {
		for _, b := range bs.BucketsOf([]Entry{e}, func() uint64 { return now }) {
			if !yield(b) {
				return
			}
		}
	}
}

// BucketsOf are the Buckets of many rules, each with the index of its rule. It reads the table once for all of them, which
// takes a while: packets charge buckets meanwhile, so it asks for the time again.
func (bs *buckets) BucketsOf(rules []Entry, now func() uint64) iter.Seq2[int, Bucket] {
	index := map[uint32]int{}
	for i, e := range rules {
		if bs.rule(e.ID).HasSlots != 0 {
			index[e.ID] = i
		}
	}
	has := func(id uint32) bool { _, ok := index[id]; return ok }
	return func(yield func(int, Bucket) bool) {
		if len(index) == 0 {
			return
		}
		at := now()
		for slot, key := range bs.slots(has) {
			before, k := load(slot), *key
			i, ok := index[k.Id]
			if !ok || before.TAT&tatBusy != 0 || k.Sharer != 0 {
				continue
			}
			b := bs.bucketIn(rules[i], slot, before, k, at)
			if b.LevelBytes > rules[i].Capacity {
				at = now()
				b = bs.bucketIn(rules[i], slot, before, k, at)
			}
			if b.LevelBytes|b.SecondBytes == 0 {
				continue
			}
			if !yield(i, b) {
				return
			}
		}
	}
}

// bucketIn is the bucket in a slot whose word and key were read; the zero Bucket if it is empty, or not one of the rule.
func (bs *buckets) bucketIn(e Entry, slot *bpf.AbiBucket, word model.Bucket, k bpf.AbiKey, now uint64) (b Bucket) {
	rule := bs.current(k.Id)
	level := bs.levelOf(rule, word, now)
	places, fingerprint := bs.places(k, rule.Salt), atomic.LoadUint32(&slot.Fingerprint)
	// Level and key belong together if no other key got the slot meanwhile.
	is := fingerprint == places[0].fingerprint || fingerprint == places[1].fingerprint
	if id, second := bs.secondOf(slot); second != nil && e.Algorithm.HasColours() && id == bs.current(e.ID).Second {
		levels := model.Levels{First: level, Second: bs.secondLevel(id, second, now)}
		b.SecondBytes = model.Bytes(model.NewColoured(e.Rule).E(levels))
	}
	if level == 0 && b.SecondBytes == 0 || !is || isFlow(k) && e.Each.Kind != policy.EachFlow {
		return Bucket{}
	}
	b.LevelBytes = model.Bytes(level)
	if e.Each.Kind == policy.EachFlow {
		b.Flow = Flow{address(k.Src, k.Family), address(k.Dst, k.Family), k.Proto, networkPort(k.Sport), networkPort(k.Dport)}
	} else {
		far := address(k.Src, k.Family)
		b.Subnet = netip.PrefixFrom(far, eachBits(e.Each, far))
	}
	return b
}

// settled is a bucket that no CPU is about to move or to allocate to another key. It waits
// for as long as a packet takes.
func settled(b *bpf.AbiBucket) model.Bucket {
	for {
		if now := load(b); now.TAT&tatBusy == 0 {
			return now
		}
		runtime.Gosched()
	}
}

// freeSlots frees all slots of a rule that is not in force, and second buckets of its limit: by the clock of another
// one they might not be empty.
func (bs *buckets) freeSlots(id uint32) {
	if bs.rule(id).HasSlots == 0 {
		return
	}
	if bs.hook.Colours != 0 {
		for i := range bs.keys {
			if key := &bs.keys[i]; key.Paired != 0 && atomic.LoadUint32(&key.Second) == id {
				key.Paired = 0
				atomic.StoreUint32(&bs.seconds[i/int(lineSlots)].Slot[i%int(lineSlots)].Fingerprint, 0)
			}
		}
	}
	for slot := range bs.slots(func(of uint32) bool { return of == id }) {
		fingerprint := atomic.LoadUint32(&slot.Fingerprint)
		before := settled(slot)
		// Without a lock, which would stay if the process was killed. A packet that moves the bucket meanwhile moves it to its
		// second line, where it is found, too.
		if atomic.CompareAndSwapUint32(&slot.Fingerprint, fingerprint, 0) {
			atomic.CompareAndSwapUint64(&slot.Tat, before.TAT, 0)
		}
	}
}
