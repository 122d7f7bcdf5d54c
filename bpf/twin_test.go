package bpf_test

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Packets of any size, although a test run takes less than a page of data. A rule's
// overhead makes them smaller or larger, and a packet may claim to have several
// segments.
const (
	shrink = -34   // a frame of 34 + n bytes counts as n: from 1 byte to 64 KiB
	grow   = 1000  // each segment counts 1000 bytes more: from 1 KiB to 512 KiB
	swell  = 16000 // from 16 KiB to the maximum
)

// sizes returns the smallest and largest size of a packet with an overhead.
func sizes(overhead int16) (least, most uint64) {
	switch overhead {
	case grow:
		return 34 + grow, 512 << 10
	case swell:
		return 34 + swell, model.MaxPacket
	}
	return 1, 60000
}

// sized returns a UDP packet to a host that counts as n bytes under a rule with that overhead.
func sized(host netip.Addr, n uint64, overhead int, now uint64) ([]byte, meta) {
	const segment = 1 // gso_size
	length, m := int(n)-overhead, meta{now: now}
	if length > 3000 {
		for segs := 2; ; segs++ {
			rest := int(n) - segs*overhead
			if rest > 1<<16 {
				continue
			}
			headers := segs - 1 // of the segments after the first
			length = 100 + headers*segment
			length += (rest - length) % headers
			m.wireLen, m.segs, m.segSize = uint32(rest), uint32(segs), segment
			break
		}
	}
	frame := udp(addr("192.0.2.1"), host, 0)[:34] // cuts off part of the UDP header
	copy(frame[26:], host.AsSlice())
	copy(frame[30:], addr("10.9.9.9").AsSlice())
	return append(frame, make([]byte, length-34)...), m
}

// A bucketKey is the bucket key of a host, the zero key for the shared bucket, or the
// flow of a host in a shared queue.
type bucketKey struct {
	each policy.Each
	host netip.Addr
	flow bool
}

// keyOf returns the bucket key of a host under a rule.
func keyOf(rule policy.Rule, host netip.Addr) bucketKey {
	switch rule.Each.Kind {
	case policy.EachAll:
		host = netip.Addr{}
	case policy.EachSubnet:
		host = netip.PrefixFrom(host, int(rule.Each.Bits)).Masked().Addr()
	}
	return bucketKey{each: rule.Each, host: host}
}

// A mirrored rule is the model of a rule.
type mirrored struct {
	rule    policy.Rule
	limit   *model.Limit
	buckets map[bucketKey]*model.Bucket
	fifo    *uint64        // ns: until then sparse flows are queued, kept when the rule changes
	counts  *maps.Counters // kept when the rule changes; as counted by a rule that does not delay
}

// newMirrored returns a rule with empty buckets. The shared bucket exists, and ages,
// before its first charge.
func newMirrored(rule policy.Rule, now uint64) *mirrored {
	r := &mirrored{
		rule: rule, limit: model.NewLimit(rule), buckets: map[bucketKey]*model.Bucket{},
		fifo: new(uint64), counts: new(maps.Counters),
	}
	*r.bucket(bucketKey{}) = r.limit.WithLevel(0, now)
	return r
}

func (r *mirrored) limited() bool { return r.rule.Rate != policy.Unlimited }

func (r *mirrored) bucket(key bucketKey) *model.Bucket {
	if r.buckets[key] == nil {
		r.buckets[key] = &model.Bucket{}
	}
	return r.buckets[key]
}

// offer offers a packet of a host, which has one flow, to the model.
func (r *mirrored) offer(host netip.Addr, now, n uint64, ect bool) model.Outcome {
	packet, flow := model.Packet{Time: now, Bytes: n, ECT: ect}, r.bucket(bucketKey{r.rule.Each, host, true})
	b := r.bucket(keyOf(r.rule, host))
	o := r.limit.Offer(b, flow, now < *r.fifo, packet)
	if *b == (model.Bucket{}) && o.Excess { // the key has a slot by now
		*b = r.limit.WithLevel(0, now)
	}
	return o
}

// becoming returns the rule after a change. Buckets keep their words. Those of another scope stay until they are in
// force again. An unlimited rule has none.
func (r *mirrored) becoming(rule policy.Rule, now uint64) *mirrored {
	next := newMirrored(rule, now)
	next.fifo, next.counts = r.fifo, r.counts
	if !next.limited() || !r.limited() {
		next.bucket(bucketKey{}).Departs = r.bucket(bucketKey{}).Departs
		return next
	}
	next.limit.Succeed(r.limit.Meter, now)
	next.buckets = r.buckets
	return next
}

// keepFIFO updates the model when the time of a change becomes known: sparse flows
// are queued, too, while packets of unknown flows may be queued from before.
func (r *mirrored) keepFIFO(to policy.Rule, from uint64) {
	same := r.rule.Order == to.Order && r.rule.Each == to.Each && r.rule.Rate == to.Rate && r.rule.Capacity == to.Capacity && r.rule.Queue == to.Queue
	if to.Order == policy.SparseFirst && r.rule.Excess == policy.Delay && !same {
		*r.fifo = max(*r.fifo, from+r.limit.LongestWait())
	}
}

// A twin is a rule in the kernel, and its model.
type twin struct {
	*rig
	*mirrored
	entry   maps.Entry
	packets int
}

func newTwin(r *rig, rule policy.Rule, now uint64) *twin {
	r.set.Delete(rule.Prefix)
	return &twin{rig: r, entry: r.put(rule, now), mirrored: newMirrored(rule, now)}
}

// change changes the rule at a virtual time.
func (t *twin) change(rule policy.Rule, now uint64) {
	t.Helper()
	if rule == t.rule {
		return
	}
	t.keepFIFO(rule, now)
	t.entry, t.mirrored = t.put(rule, now), t.becoming(rule, now)
	if m := t.set.Store.Meter(t.entry); t.limited() && m != t.limit.Meter {
		t.Fatalf("packet %d: the kernel's meter is %+v, the model's %+v", t.packets, m, t.limit.Meter)
	}
}

// asked returns the outcome that the set predicts for a packet of a host.
func (r *rig) asked(e maps.Entry, host netip.Addr, now, n uint64, ect bool) model.Outcome {
	flow := maps.Flow{Src: host, Dst: addr("10.9.9.9"), Proto: 17}
	return model.NewLimit(e.Rule).Decide(r.set.Store.State(e, policy.MatchSrc, flow, now), model.Packet{Time: now, Bytes: n, ECT: ect})
}

// sameOutcome compares two outcomes except for the flow's bucket, which few packets read, and departures that are over: a rule
// that comes back may have kept that of its former queue.
func sameOutcome(a, b model.Outcome) bool {
	for _, o := range []*model.Outcome{&a, &b} {
		o.Flow = 0
		if o.Departs < o.Departure {
			o.Departs = 0
		}
	}
	return a == b
}

// level returns the level in units of the kernel's bucket of a host.
func (t *twin) level(host netip.Addr, now uint64) uint64 {
	if t.rule.Each.Kind == policy.EachAll {
		return t.set.Store.SharedLevel(t.entry, now)
	}
	flow := maps.Flow{Src: host, Dst: addr("10.9.9.9"), Proto: 17}
	return t.set.Store.State(t.entry, policy.MatchSrc, flow, now).Level
}

// offer sends a packet, and compares the predicted outcome, the verdict, the level and
// the departure time.
func (t *twin) offer(host netip.Addr, now, n uint64, ect bool) model.Verdict {
	t.Helper()
	t.packets++
	b := t.bucket(keyOf(t.rule, host))
	before, asked := *b, t.asked(t.entry, host, now, n, ect)
	want := t.mirrored.offer(host, now, n, ect)
	frame, m := sized(host, n, int(t.rule.Framing.Overhead), now)
	if ect {
		frame[15] |= 2
	}
	verdict, _, departure := sendTimed(t, t.program(), frame, m)
	*t.counts = sum(*t.counts, segments(m.packets(), countersOf(want, n)))
	if (verdict == drop) != (want.Verdict == model.Drop) || verdict != drop && verdict != next || departure != want.Departure ||
		t.limited() && !sameOutcome(asked, want) {
		t.Fatalf("packet %d, %d bytes at %d ns: verdict %#x, departure %d\nmodel     %+v\npredicted %+v\nrule %+v\nlimit %+v\nbucket %+v\ncounters %+v",
			t.packets, n, now, verdict, departure, want, asked, t.rule, t.limit, before, t.set.Store.Counters(t.entry.ID))
	}
	if !t.limited() {
		return want.Verdict
	}
	// Compares later levels, too, because they depend on the bucket's tick.
	for _, at := range []uint64{now, now + (uint64(t.limit.Idle)-1)<<model.TickBits} {
		if got, want := t.level(host, at), t.limit.Level(*b, at); got != want {
			t.Fatalf("packet %d, %d bytes at %d ns: level %d units at %d ns, in the model %d\nrule %+v\nlimit %+v\nbucket %+v",
				t.packets, n, now, got, at, want, t.rule, t.limit, before)
		}
	}
	return want.Verdict
}

// countersOf returns the counters for an outcome of a rule that does not delay.
func countersOf(o model.Outcome, n uint64) maps.Counters {
	switch {
	case o.Verdict == model.Drop:
		return dropped(n)
	case o.Verdict == model.Mark:
		return marked(n)
	case o.Excess || o.Verdict == model.Delay:
		return shadowed(n)
	}
	return passed(n)
}

// countedBy returns the counters of a rule, given those of the same rule without delay.
func countedBy(rule policy.Rule, c maps.Counters) maps.Counters {
	if rule.Excess == policy.Delay {
		c.DelayedPackets, c.DelayedBytes = c.ExcessPackets-c.DroppedPackets, c.ExcessBytes-c.DroppedBytes
		c.ExcessPackets, c.ExcessBytes = c.DroppedPackets, c.DroppedBytes
	}
	return c
}

// counted compares the rule's counters.
func (t *twin) counted() {
	t.Helper()
	if got, want := t.set.Store.Counters(t.entry.ID), countedBy(t.rule, *t.counts); got != want {
		t.Errorf("counters:\n%+v, want\n%+v", got, want)
	}
}

func sum(a, b maps.Counters) maps.Counters {
	a.PassedPackets += b.PassedPackets
	a.PassedBytes += b.PassedBytes
	a.ExcessPackets += b.ExcessPackets
	a.ExcessBytes += b.ExcessBytes
	a.DroppedPackets += b.DroppedPackets
	a.DroppedBytes += b.DroppedBytes
	a.MarkedPackets += b.MarkedPackets
	a.ContendedPackets += b.ContendedPackets
	a.ExtraPackets += b.ExtraPackets
	a.ExemptPackets += b.ExemptPackets
	return a
}

var scopes = []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow}

// bySource returns a hook where GSO counts by wire_len, as sized requires, and whose rules match the source.
func bySource() bpf.AbiHook {
	hook := egress()
	hook.MatchSrc, hook.Replay = 1, 1
	return hook
}

func matchSource(tb testing.TB) *rig {
	return newRig(tb, maps.Size{Rules: 4, Buckets: 4096}, bySource())
}

// Dice make a trace from random numbers, or from a fuzzer's bytes. They return numbers below n.
type dice func(n uint64) uint64

// loaded returns dice that read from bytes, and a function for the number of bytes left.
func loaded(data []byte) (_ dice, left func() int) {
	return func(n uint64) uint64 {
		var word [8]byte
		data = data[copy(word[:min(8, 1+bits.Len64(n-1)/8)], data):]
		return binary.LittleEndian.Uint64(word[:]) % n
	}, func() int { return len(data) }
}

// starts are times around which a clock in ns, or in ticks of 2^30 ns, has its limits.
var starts = []uint64{
	0, 1, 1 << model.TickBits, 1e15, 1<<62 - 1e12, 1<<62 - 1, 1<<63 - 1e12, 1 << 63,
	1<<64 - 1 - uint64(400*24*time.Hour), 1<<64 - 1e9,
}

// play offers a trace to a rule in the kernel and in the model. The clock wraps at most
// once.
func play(r *rig, net netip.Prefix, roll dice, more func() bool, changes uint64) {
	overhead := []int16{shrink, grow, swell}[roll(3)]
	now := starts[roll(uint64(len(starts)))]
	t := newTwin(r, randomRule(net, roll, overhead), now)
	for more() {
		if changes > 0 && roll(64) == 0 {
			changes--
			t.change(randomRule(net, roll, overhead), now)
		}
		host := net.Addr().As4()
		host[3] = byte(roll(5))
		room := t.rule.Capacity
		if b := t.buckets[keyOf(t.rule, netip.AddrFrom4(host))]; b != nil && roll(2) == 0 {
			room -= min(room, t.limit.Level(*b, now)>>model.UnitBits)
		}
		t.offer(netip.AddrFrom4(host), now, randomSize(roll, overhead, room), roll(2) == 0)
		now = later(roll, t.limit.Meter, now)
	}
	t.counted()
}

// randomRule returns a rule with random options. All orders of magnitude are equally likely.
func randomRule(net netip.Prefix, roll dice, overhead int16) policy.Rule {
	rule := policy.Rule{
		Prefix: net, Rate: policy.Unlimited, Algorithm: algorithms[roll(2)],
		Framing: policy.Framing{Overhead: overhead},
	}
	if roll(20) == 0 {
		return rule
	}
	rate := uint64(1) << (3 + roll(37))
	rate += roll(rate)
	if roll(4) == 0 {
		rate = []uint64{8, 8000, 8_000_000_000, 8_589_934_592, 400_000_000_000, 1_000_000_000_000}[roll(6)]
	}
	rule.Rate = policy.Rate(min(rate, uint64(policy.MaxRate)))
	rule.Capacity = 1514 + roll(1<<(4+roll(22)))
	if roll(8) == 0 {
		rule.Capacity = 1514 + roll(1<<40-1514)
	}
	rule.Excess = policy.Excess(roll(4))
	if rule.Excess == policy.Delay {
		randomQueue(&rule, roll)
	}
	rule.Each.Kind = policy.EachKind(roll(4))
	if rule.Each.Kind == policy.EachSubnet {
		rule.Each.Bits = 31
	}
	if rule.Excess == policy.Delay && rule.Algorithm == policy.GCRA && rule.Each.Kind != policy.EachFlow {
		rule.Order = policy.Order(roll(2))
	}
	if rule.Algorithm == policy.Leaky && rule.Excess != policy.Delay {
		switch roll(4) {
		case 0:
			rule.Penalty.Kind = policy.PenaltyFill
		case 1:
			rule.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(1 + roll(1<<(1+roll(46))))}
		}
		rule.Penalty = possiblePenalty(rule)
	}
	return rule
}

// possiblePenalty returns the penalty of a rule, or none if a bucket could not hold it.
func possiblePenalty(rule policy.Rule) policy.Penalty {
	rule.Framing = policy.Framing{} // those of this test are not valid
	if rule.Validate() != nil {
		return policy.Penalty{}
	}
	return rule.Penalty
}

// randomQueue makes a rule delay, if a packet at its rate can leave in time.
func randomQueue(rule *policy.Rule, roll dice) {
	most := uint64(rule.Rate) / 8 * uint64(policy.MaxWait/time.Second)
	if most <= policy.MinCapacity {
		rule.Excess = policy.Drop
		return
	}
	rule.ECNAbove = policy.ECNAbove(1 + roll(uint64(policy.MaxWait)))
	if roll(4) == 0 {
		rule.ECNAbove = policy.Never
	}
	if rule.Algorithm == policy.Leaky {
		rule.Capacity = min(rule.Capacity, most)
		return
	}
	rule.Queue = policy.MinCapacity + roll(min(most, policy.MaxCapacity-rule.Capacity+1)-policy.MinCapacity+1)
	if room := uint64(policy.MaxCapacity); rule.Capacity+rule.Queue > room {
		rule.Capacity = room - rule.Queue
	}
}

// randomSize returns any size, or one that exactly fills the room or just does not.
func randomSize(roll dice, overhead int16, room uint64) uint64 {
	least, most := sizes(overhead)
	n := least + roll(1500)
	switch roll(8) {
	case 0:
		n = least + roll(most-least+1)
	case 1, 2:
		n = room + roll(3) - 1
	case 3:
		n = []uint64{least, most}[roll(2)]
	}
	n = min(max(n, least), most)
	if overhead == swell && n < 3*swell {
		n = min(n, swell+3000) // a single segment is too long for a test run, and two are too short
	}
	return n
}

// later returns a time for the next packet: soon, when the bucket is empty, around the
// wrap of its clock, after ticks or years without packets, or a little earlier.
func later(roll dice, m model.Meter, now uint64) uint64 {
	if m.RateUnits == 0 {
		return now + roll(1e9)
	}
	const year = uint64(365 * 24 * time.Hour)
	gap, drain := uint64(0), m.Wait(m.Capacity, 1500)
	switch roll(16) {
	case 0, 1, 2:
	case 3, 4, 5, 6:
		gap = roll(2*drain + 2)
	case 7:
		gap = roll(uint64(time.Minute))
	case 8:
		gap = m.Wait(m.Capacity, m.Capacity>>model.UnitBits)
	case 9: // a quarter, half or all of the clock's period
		if m.RateUnits > 1<<32 {
			quarter, _ := bits.Div64(1<<30, 0, m.RateUnits)
			gap = min(quarter*(1+roll(12)), 50*year) + roll(2000)
		}
	case 10:
		gap = roll(uint64(m.Idle)+4) << model.TickBits
	case 11:
		gap = uint64(m.Idle)<<model.TickBits - roll(1<<model.TickBits)
	case 12:
		gap = roll(10 * year)
	case 13: // backwards, as from one CPU to another
		return now - min(roll(1<<20), now)
	case 14: // or by more than between any two CPUs
		return now - min(roll(3<<model.TickBits), now)
	case 15:
		gap = roll(2000)
	}
	return now + min(gap, 100*year)
}

// Random packets at random times, with changes of the rule, get the same verdict and
// leave the same level in the kernel as in the model.
func TestKernelIsModel(t *testing.T) {
	seed := testenv.Seed(t)
	t.Parallel()
	r := matchSource(t)
	for i := range testenv.Rounds(t, 16) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r.TB = t
			roll, left := rand.New(rand.NewPCG(seed, uint64(i))), 600
			play(r, prefix("10.0.0.0/24"), roll.Uint64N, func() bool { left--; return left >= 0 }, 3)
		})
	}
}

// FuzzKernelIsModel plays a trace made from a fuzzer's bytes.
func FuzzKernelIsModel(f *testing.F) {
	// A new rule for each trace while there are free ids: reusing an id takes a while.
	traces := uint32(0)
	r := newRig(f, maps.Size{Rules: 8192, Buckets: 4096}, bySource())
	r.program() // while f can still report an error
	for i := range uint64(40) {
		roll, data := rand.New(rand.NewPCG(i, 0)), make([]byte, 400)
		for j := range data {
			data[j] = byte(roll.Uint32())
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r.TB = t
		net := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(traces >> 8 & 31), byte(traces)}), 24)
		traces++
		roll, left := loaded(data[:min(len(data), 2000)])
		changes := roll(3) / 2 * 3
		play(r, net, roll, func() bool { return left() > 0 }, changes)
	})
}

// Buckets of another scope are empty when that scope is in force again, even if their
// clock wrapped meanwhile and the new clock is too slow to show it.
func TestOldScopeReturnsEmpty(t *testing.T) {
	r := matchSource(t)
	host, now := addr("10.0.0.7"), uint64(1e9)
	rule := policy.Rule{
		Prefix: prefix("10.0.0.0/8"), Rate: 400_000_000_000, Capacity: 1 << 20,
		Each: policy.Each{Kind: policy.EachFlow}, Framing: policy.Framing{Overhead: shrink},
	}
	twin := newTwin(r, rule, now)
	twin.offer(host, now, 60000, false)
	rule.Each.Kind = policy.EachAll
	twin.change(rule, now)
	now += uint64(264 * time.Second) // three quarters of the clock's period
	rule.Rate, rule.Capacity = 8, 1<<30
	twin.change(rule, now)
	rule.Each.Kind = policy.EachFlow
	twin.change(rule, now)
	if got := twin.level(host, now); got != (1<<30-1<<20)<<model.UnitBits { // the room that it had when the capacity grew
		t.Errorf("the level of a flow that drained long ago is %d units", got)
	}
	twin.offer(host, now, 60000, false)
	twin.counted()
}
