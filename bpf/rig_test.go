package bpf_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Return values of the program.
const (
	next uint32 = 0xffffffff // TCX_NEXT
	drop uint32 = 2          // TC_ACT_SHOT
)

var algorithms = []policy.Algorithm{policy.GCRA, policy.Leaky}

// A rig is the maps and program of a hook, without a device. Subtests that share
// a rig set TB.
type rig struct {
	testing.TB
	set    *maps.Set
	loaded *ebpf.Program
	load   func() *ebpf.Program // for as long as the set is open
}

// secret is fixed, so that keys have the same slots in each run.
var secret = [12]uint32{
	0x9e3779b9, 0x7f4a7c15, 0xbf58476d, 0x1ce4e5b9, 0x94d049bb, 0x133111eb,
	0x2545f491, 0x4f6cdd1d, 0xd6e8feb8, 0x6659fd93, 0xa0761d64, 0x78bd642f,
}

// egress returns a hook of an Ethernet device whose clock is each packet's timestamp.
func egress() bpf.AbiHook { return bpf.AbiHook{L2Bytes: 14, VirtualClock: 1, Secret: secret} }

func ingress() bpf.AbiHook {
	h := egress()
	h.Ingress, h.MatchSrc = 1, 1
	return h
}

func newRig(tb testing.TB, size maps.Size, hook bpf.AbiHook) *rig {
	tb.Helper()
	testenv.Root(tb)
	store, err := maps.New(size, hook)
	testenv.Must(tb, err)
	set := store.View(0)
	tb.Cleanup(func() { set.Store.Close() })
	r := &rig{TB: tb, set: set}
	r.load = func() *ebpf.Program {
		p, err := program.Load(set.Store, set.Store.Hook())
		testenv.Must(tb, err)
		tb.Cleanup(func() { p.Close() })
		return p
	}
	return r
}

// program loads the program on first use.
func (r *rig) program() *ebpf.Program {
	if r.loaded == nil {
		r.loaded = r.load()
	}
	return r.loaded
}

// at sets the clock of the set.
func (r *rig) at(now uint64) { r.set.Store.UseClock(func() uint64 { return now }) }

// put sets a rule at a virtual time, and returns the rule in force.
func (r *rig) put(rule policy.Rule, now uint64) maps.Entry {
	r.Helper()
	r.at(now)
	if _, err := r.set.Put(rule); err != nil {
		r.Fatal(err)
	}
	e, ok := r.set.Find(rule.Prefix)
	if !ok || e.Rule != rule {
		r.Fatalf("put %+v, found %+v", rule, e)
	}
	return e
}

// prepare prepares a change of the set to exactly these rules.
func (r *rig) prepare(want ...policy.Rule) {
	r.Helper()
	policy.SortRules(want)
	have := policy.Table{Rules: r.set.Policy()}
	testenv.Must(r, r.set.Prepare(have.Diff(policy.Table{Rules: want}), func(int) {}))
}

// A meta is the metadata of a packet's skb.
type meta struct {
	now     uint64
	wireLen uint32
	segs    uint32
	segSize uint32
	cut     uint32 // for the program cutter: bytes to keep
	mark    uint32
}

// packets is the number of packets on the wire, if the kernel has counted them.
func (m meta) packets() int { return max(1, int(m.segs)) }

// context is struct __sk_buff (linux/bpf.h) for a test run.
func (m meta) context() []byte {
	c := make([]byte, 192)
	binary.NativeEndian.PutUint32(c[8:], m.mark)
	binary.NativeEndian.PutUint32(c[48:], m.cut) // cb[0]
	binary.NativeEndian.PutUint64(c[152:], m.now)
	binary.NativeEndian.PutUint32(c[160:], m.wireLen)
	binary.NativeEndian.PutUint32(c[164:], m.segs)
	binary.NativeEndian.PutUint32(c[176:], m.segSize)
	return c
}

// send runs a program on one packet, and returns the resulting packet.
func send(tb testing.TB, p *ebpf.Program, frame []byte, m meta) (verdict uint32, after []byte) {
	tb.Helper()
	verdict, after, _ = sendTimed(tb, p, frame, m)
	return verdict, after
}

// sendTimed is send, and also returns the packet's departure time.
func sendTimed(tb testing.TB, p *ebpf.Program, frame []byte, m meta) (verdict uint32, after []byte, leaves uint64) {
	tb.Helper()
	context := m.context()
	o := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+64), Context: context, ContextOut: make([]byte, len(context))}
	verdict, err := p.Run(&o)
	if err != nil {
		tb.Fatalf("run with %d bytes: %v", len(frame), err)
	}
	return verdict, o.DataOut, binary.NativeEndian.Uint64(o.ContextOut.([]byte)[152:])
}

func assemble(tb testing.TB, name string, code asm.Instructions) *ebpf.Program {
	tb.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: name, Type: ebpf.SchedCLS, Instructions: code, License: "Dual BSD/GPL"})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { p.Close() })
	return p
}

// before returns a program that changes a packet and calls the next program. A test
// run alone cannot make every packet that a device can.
func before(tb testing.TB, name string, next *ebpf.Program, code ...asm.Instruction) *ebpf.Program {
	tb.Helper()
	chain, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	testenv.Must(tb, err)
	tb.Cleanup(func() { chain.Close() })
	if err := chain.Put(uint32(0), next); err != nil {
		tb.Fatal(err)
	}
	code = append(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, code...)
	return assemble(tb, name, append(code,
		asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("on"),
		asm.LoadMapPtr(asm.R2, chain.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, -1),
		asm.Return(),
	))
}

// randomFlow returns a program that sets one of flows source addresses at random, because
// a test run only repeats one packet.
func randomFlow(tb testing.TB, next *ebpf.Program, flows int32) *ebpf.Program {
	tb.Helper()
	const source = 14 + 12
	return before(tb, "random_flow", next,
		asm.FnGetPrandomU32.Call(),
		asm.And.Imm(asm.R0, flows-1),
		asm.LoadMem(asm.R2, asm.R6, 76, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R6, 80, asm.Word), // data_end
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, source+4),
		asm.JGT.Reg(asm.R4, asm.R3, "on"),
		asm.StoreMem(asm.R2, source, asm.R0, asm.Word),
	)
}

// cutter returns a program that truncates a packet to meta.cut bytes.
func cutter(tb testing.TB, next *ebpf.Program) *ebpf.Program {
	return before(tb, "cutter", next,
		asm.LoadMem(asm.R2, asm.R6, 48, asm.Word),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnSkbChangeTail.Call(),
	)
}

// pusher returns a program that pushes VLAN tags. The kernel keeps the last one in the
// skb's metadata.
func pusher(tb testing.TB, next *ebpf.Program, tags ...uint16) *ebpf.Program {
	var code asm.Instructions
	for i, kind := range tags {
		bigEndian := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, kind))
		code = append(code,
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Imm(asm.R2, int32(bigEndian)),
			asm.Mov.Imm(asm.R3, int32(i+1)),
			asm.FnSkbVlanPush.Call(),
		)
	}
	return before(tb, "pusher", next, code...)
}

// udp returns a frame with a payload of the given number of bytes.
func udp(src, dst netip.Addr, payload int) []byte {
	frame := make([]byte, 14, 128)
	length := uint16(8 + payload)
	if src.Is4() {
		frame[12], frame[13] = 0x08, 0x00
		frame = append(frame, 0x45, 0, 0, byte(20+length), 0, 0, 0, 0, 64, 17, 0, 0)
	} else {
		frame[12], frame[13] = 0x86, 0xdd
		frame = append(frame, 0x60, 0, 0, 0, 0, byte(length), 17, 64)
	}
	frame = append(frame, src.AsSlice()...)
	frame = append(frame, dst.AsSlice()...)
	frame = append(frame, byte(rand.Uint32()), 1, 0, 53, 0, byte(length), 0, 0)
	return append(frame, make([]byte, payload)...)
}

// bucketsOf are the buckets of a rule.
func (r *rig) bucketsOf(e maps.Entry, now uint64) (all []maps.Bucket) {
	for _, b := range r.set.Store.Buckets([]maps.Entry{e}, func() uint64 { return now }) {
		all = append(all, b)
	}
	return all
}

// counters returns the counters of all ids, in use or not.
func (r *rig) counters() []maps.Counters {
	r.Helper()
	all := make([]maps.Counters, r.set.Store.Size().Rules)
	for id := range all {
		all[id] = r.set.Store.Counters(uint32(id))
	}
	return all
}

// since returns the difference of two counters.
func since(before, after maps.Counters) maps.Counters {
	after.PassedPackets -= before.PassedPackets
	after.PassedBytes -= before.PassedBytes
	after.ExcessPackets -= before.ExcessPackets
	after.ExcessBytes -= before.ExcessBytes
	after.DroppedPackets -= before.DroppedPackets
	after.DroppedBytes -= before.DroppedBytes
	after.DelayedPackets -= before.DelayedPackets
	after.DelayedBytes -= before.DelayedBytes
	after.MarkedPackets -= before.MarkedPackets
	after.ContendedPackets -= before.ContendedPackets
	after.ExtraPackets -= before.ExtraPackets
	after.ExemptPackets -= before.ExemptPackets
	after.SpilledPackets -= before.SpilledPackets
	return after
}

func passed(bytes uint64) maps.Counters {
	return maps.Counters{PassedPackets: 1, PassedBytes: bytes}
}

func dropped(bytes uint64) maps.Counters {
	return maps.Counters{ExcessPackets: 1, ExcessBytes: bytes, DroppedPackets: 1, DroppedBytes: bytes}
}

// shadowed is an excess packet that passes unchanged.
func shadowed(bytes uint64) maps.Counters {
	return maps.Counters{ExcessPackets: 1, ExcessBytes: bytes, PassedPackets: 1, PassedBytes: bytes}
}

// spilled returns c for a packet that was charged to the spill bucket.
func spilled(c maps.Counters) maps.Counters {
	c.SpilledPackets = 1
	return c
}

func marked(bytes uint64) maps.Counters {
	c := shadowed(bytes)
	c.MarkedPackets = 1
	return c
}

// segments returns the counters of a GSO packet of n segments, given those of a single packet of equal bytes.
func segments(n int, one maps.Counters) maps.Counters {
	for _, packets := range []*uint64{
		&one.PassedPackets, &one.ExcessPackets, &one.DroppedPackets, &one.DelayedPackets, &one.MarkedPackets, &one.ContendedPackets,
	} {
		*packets *= uint64(n)
	}
	one.ExtraPackets = uint64(n - 1)
	return one
}

func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
