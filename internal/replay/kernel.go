package replay

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// buckets is the number of slots of the kernel engine: twice that of a namespace.
	buckets = 1 << 21

	linkHeader = 14 // bytes, of the frames for the program

	// A test run accepts less than a page of data. So each packet claims to be a GSO
	// packet of one segment, which counts wire_len plus the overhead of the rule. The
	// overhead is reduced by leastFrame, so that a packet of one byte can have headers.
	// A packet above maxWire has the overhead bigOverhead, and several segments.
	leastFrame  = linkHeader + ipv4Header
	maxWire     = 1 << 16
	bigOverhead = 16000

	contextTime = 152 // tstamp in struct __sk_buff

	// Return values of the program.
	next uint32 = 0xffffffff // TCX_NEXT
	drop uint32 = 2          // TC_ACT_SHOT
)

// Kernel is the engine that runs the program of the data path in test runs. The
// clock is that of the trace, and no device is involved.
type Kernel struct {
	compiled
	set     *maps.Set
	program *ebpf.Program
	entries []entry // of rules
	pools   []entry
	begun   bool
	frame   []byte
	after   []byte // the frame of the last packet after the program
	context [192]byte
}

// An entry is a rule or pool in the kernel.
type entry struct {
	maps.Entry
	seen       maps.Counters
	guaranteed uint64 // packets that its guarantee has passed
	big        bool
}

// NewKernel returns an engine with empty buckets. The error wraps fs.ErrPermission
// if the process may not load programs.
func NewKernel(l Limits) (*Kernel, error) { return newKernel(l, buckets) }

func newKernel(l Limits, slots uint32) (_ *Kernel, err error) {
	var steps []policy.Difference
	for _, r := range l.all() {
		steps = append(steps, policy.Difference{Want: &r})
	}
	size := maps.Needs(steps...)
	size.Buckets, size.Affected = size.Buckets*slots, 0
	hook := bpf.AbiHook{L2Bytes: linkHeader, VirtualClock: 1, Replay: 1}
	if l.Match == policy.MatchSrc {
		hook.MatchSrc = 1
	}
	k := &Kernel{
		compiled: compile(l), entries: make([]entry, len(l.Rules)), pools: make([]entry, len(l.Pools)),
		frame: make([]byte, linkHeader, linkHeader+trace.MaxHeaders), after: make([]byte, linkHeader+trace.MaxHeaders),
	}
	for i := range hook.Secret { // without a secret, a flow and its replies share a bucket
		hook.Secret[i] = rand.Uint32()
	}
	store, err := maps.New(size, hook)
	if err != nil {
		return nil, err
	}
	k.set = store.View(0)
	defer func() {
		if err != nil {
			k.Close()
		}
	}()
	if k.program, err = program.Load(store, store.Hook()); err != nil {
		return nil, err
	}
	return k, nil
}

// begin sets all pools and rules as of just before the first packet. The age of a bucket as old as
// the clock itself would be ambiguous.
func (k *Kernel) begin(now uint64) (err error) {
	now -= min(now, slack)
	for i, pool := range k.Pools {
		if k.pools[i].Entry, err = put(k.set.Store.Pools(), pool, now); err != nil {
			return err
		}
	}
	for i := range k.Rules {
		if err := k.put(i, false, now); err != nil {
			return err
		}
	}
	k.begun = true
	return nil
}

// put sets a rule for small or big packets, and keeps levels.
func (k *Kernel) put(i int, forBig bool, now uint64) error {
	rule := k.Rules[i]
	rule.Label = policy.Label{} // packets need no text
	rule.Framing.Overhead -= leastFrame
	if forBig {
		rule.Framing = policy.Framing{Overhead: bigOverhead}
	}
	e, err := put(k.set, rule, now)
	k.entries[i].Entry, k.entries[i].big = e, forBig
	return err
}

func put(in *maps.Set, rule policy.Rule, now uint64) (maps.Entry, error) {
	in.Store.UseClock(func() uint64 { return now })
	if _, err := in.Put(rule); err != nil {
		return maps.Entry{}, err
	}
	e, ok := in.Find(rule.Prefix)
	if !ok {
		return e, fmt.Errorf("the rule for %v is missing after it was set", rule.Prefix)
	}
	return e, nil
}

// Offer implements Engine.
func (k *Kernel) Offer(t *trace.Packet) (Result, error) {
	if !k.begun {
		if err := k.begin(t.Time); err != nil {
			return Result{}, err
		}
	}
	p := read(t)
	r := Result{Rule: NoRule, Limited: p.ip && !p.nd, Time: t.Time, Bytes: t.Bytes}
	if !p.ip && (t.EtherType == typeIPv4 && len(t.Network) < ipv4Header || t.EtherType == typeIPv6 && len(t.Network) < ipv6Header) {
		return r, nil // test runs and programs reject an incomplete network header
	}
	wire, segments := t.Bytes+leastFrame, uint64(1)
	i := k.match(p)
	if i != NoRule {
		n := model.Counted(t.Bytes, k.Rules[i].Framing)
		if k.entries[i].big != (wire > maxWire) && (wire > maxWire || n <= bigOverhead+trace.MaxHeaders+linkHeader) {
			// A time a little earlier prevents that a packet that steps back finds a lower level.
			if err := k.put(i, wire > maxWire, t.Time-min(t.Time, slack)); err != nil {
				return r, err
			}
		}
		if k.entries[i].big {
			if n > maxWire {
				segments = (n - maxWire + bigOverhead - 1) / bigOverhead
			}
			wire = n - segments*bigOverhead
		}
	}
	k.frame = append(k.frame[:linkHeader], t.Network...)
	binary.BigEndian.PutUint16(k.frame[12:], t.EtherType)
	// struct __sk_buff of linux/bpf.h, besides tstamp: wire_len, gso_segs, gso_size.
	binary.NativeEndian.PutUint64(k.context[contextTime:], t.Time)
	binary.NativeEndian.PutUint32(k.context[160:], uint32(min(wire, maxWire))) // no rule counts more
	binary.NativeEndian.PutUint32(k.context[164:], uint32(segments))
	binary.NativeEndian.PutUint32(k.context[176:], 1)
	var after [len(k.context)]byte
	run := ebpf.RunOptions{Data: k.frame, Context: k.context[:], ContextOut: after[:]}
	if i != NoRule && k.Rules[i].Algorithm.HasColours() {
		run.DataOut = k.after[:len(k.frame)]
	}
	verdict, err := k.program.Run(&run)
	if err != nil {
		return r, fmt.Errorf("run the program on a packet of %d bytes: %w", len(k.frame), err)
	}
	r.Wait = binary.NativeEndian.Uint64(after[contextTime:]) - t.Time
	return r, k.account(&r, p, i, verdict)
}

// account reads the result of a packet from counters and buckets. The kernel decides
// which rule matches; expected is only the first one to look at.
func (k *Kernel) account(r *Result, p packet, expected int, verdict uint32) error {
	for n := range k.entries {
		i := (n + max(expected, 0)) % len(k.entries)
		e := &k.entries[i]
		now := k.set.Store.Counters(e.ID)
		now.ExemptPackets = 0 // no rule limits those
		if before := e.seen; now != before {
			e.seen = now
			r.Rule = i
			k.result(r, p, e, before)
			break
		}
	}
	if (verdict == drop) != (r.Verdict == model.Drop) {
		return fmt.Errorf("the program returns %#x for a packet that it counts as %v", verdict, r.Verdict)
	}
	return nil
}

// result fills in the result of a packet from the counters and the bucket of its rule.
func (k *Kernel) result(r *Result, p packet, e *entry, before maps.Counters) {
	now := e.seen
	r.Bytes = now.PassedBytes + now.DroppedBytes - before.PassedBytes - before.DroppedBytes
	r.Contended = now.ContendedPackets > before.ContendedPackets
	// A rule counts packets that pools mark or delay as it counts its own excess packets or delayed ones.
	r.Excess = now.ExcessPackets+now.DelayedPackets > before.ExcessPackets+before.DelayedPackets && r.Wait == 0
	switch {
	case now.DroppedPackets > before.DroppedPackets:
		r.Verdict = model.Drop
	case now.MarkedPackets > before.MarkedPackets:
		r.Verdict = model.Mark
	case r.Wait > 0:
		r.Verdict = model.Delay
	}
	r.key, r.sharer = k.key(r.Rule, p), k.sharer(r.Rule, p)
	k.climb(r, e)
	switch {
	case e.Rate == policy.Unlimited:
		return
	case e.Algorithm.HasColours():
		k.colour(r, p, e, before)
		return
	}
	r.Level = k.set.Store.State(e.Entry, k.Match, p.flow, r.Time).Level
	if r.Spilled = now.SpilledPackets > before.SpilledPackets; r.Spilled {
		r.Level = k.set.Store.SharedLevel(e.Entry, r.Time)
	}
}

// colour fills in what a rule with colours decides.
func (k *Kernel) colour(r *Result, p packet, e *entry, before maps.Counters) {
	switch now := e.seen; {
	case now.RedPackets > before.RedPackets:
		r.Colour = policy.Red
	case now.YellowPackets > before.YellowPackets:
		r.Colour = policy.Yellow
	}
	r.Excess = r.Colour != policy.Green // and not a green packet that is dropped
	if r.Verdict != model.Drop {
		r.DSCP = read(&trace.Packet{EtherType: binary.BigEndian.Uint16(k.frame[12:]), Network: k.after[linkHeader:len(k.frame)]}).dscp
	}
	s := k.set.Store.State(e.Entry, k.Match, p.flow, r.Time)
	r.Level, r.Second = s.Level, model.NewColoured(e.Rule).E(model.Levels{First: s.Level, Second: s.Second})
	r.Spilled = e.seen.SpilledPackets > before.SpilledPackets
}

// climb tells from the counters of a rule and the pools above it which of them refused or guaranteed a packet.
func (k *Kernel) climb(r *Result, e *entry) {
	if r.Verdict == model.Drop {
		r.RefusedBy = k.names[r.Rule]
	}
	for i, number := range k.chains[r.Rule] {
		if i > 0 {
			e = &k.pools[number-len(k.Rules)]
			before := e.seen
			e.seen = k.set.Store.Counters(e.ID)
			r.Pools[i-1] = k.set.Store.SharedLevel(e.Entry, r.Time)
			if e.seen.DroppedPackets > before.DroppedPackets {
				r.RefusedBy = k.names[number]
			}
		}
		if guarantee, ok := k.set.Store.Guarantee(e.Entry); ok {
			before := e.guaranteed
			e.guaranteed = k.set.Store.Counters(guarantee.ID).PassedPackets
			if r.GuaranteedBy == "" && e.guaranteed > before {
				r.GuaranteedBy = k.names[number]
			}
		}
	}
}

// Close implements Engine.
func (k *Kernel) Close() error {
	if k.program != nil {
		k.program.Close()
	}
	return k.set.Store.Close()
}
