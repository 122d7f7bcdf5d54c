package bpf_test

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// These tests run in real time, on two CPUs. They assert nothing about how fast
// a machine is: a bound holds for the time that passed, however long it was.

// live is an egress hook with the clock of the kernel.
func live() bpf.AbiHook { return bpf.AbiHook{L2Bytes: 14, Secret: secret} }

// onEachCPU runs work on two CPUs at once, each on its own thread, and returns
// the time in ns from before the first packet to after the last.
func onEachCPU(t *testing.T, work func(cpu int) error) uint64 {
	t.Helper()
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		t.Fatal(err)
	}
	var cpus []int
	for cpu := range 1024 {
		if allowed.IsSet(cpu) && len(cpus) < 2 {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) < 2 {
		testenv.Skip(t, "needs two CPUs")
	}
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	errs := make([]error, len(cpus))
	for i, cpu := range cpus {
		ready.Add(1)
		done.Go(func() {
			// The thread ends with the goroutine, so its affinity does not outlive the test.
			runtime.LockOSThread()
			var one unix.CPUSet
			one.Set(cpu)
			errs[i] = unix.SchedSetaffinity(0, &one)
			ready.Done()
			<-start
			if errs[i] == nil {
				errs[i] = work(i)
			}
		})
	}
	ready.Wait()
	began := maps.Now()
	close(start)
	done.Wait()
	took := maps.Now() - began
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	return took
}

// leaked is what a rate lets through in a time, in bytes, rounded up.
func leaked(rate policy.Rate, ns uint64) uint64 {
	return uint64(float64(rate)/8e9*float64(ns)*(1+1e-9)) + 1
}

// hosts is a program that sends each packet to one of so many hosts, at random.
func hosts(tb testing.TB, next *ebpf.Program, n int32) *ebpf.Program {
	const last = 14 + 19 // byte of the destination
	return before(tb, "hosts", next,
		asm.FnGetPrandomU32.Call(),
		asm.Mod.Imm(asm.R0, n),
		asm.LoadMem(asm.R2, asm.R6, 76, asm.Word), // data
		asm.LoadMem(asm.R3, asm.R6, 80, asm.Word), // data_end
		asm.Mov.Reg(asm.R4, asm.R2),
		asm.Add.Imm(asm.R4, last+1),
		asm.JGT.Reg(asm.R4, asm.R3, "on"),
		asm.StoreMem(asm.R2, last, asm.R0, asm.Byte),
	)
}

func packets(full, short int) int {
	if testing.Short() {
		return short
	}
	return full
}

// Two CPUs on one bucket never admit more than one would.
func TestTwoCPUsOneBucket(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for _, algorithm := range algorithms {
		for _, each := range sharings {
			// From so slow that nearly all is excess to so fast that nearly all is charged.
			for _, rate := range []policy.Rate{1_000_000, 10_000_000_000, 400_000_000_000} {
				t.Run(fmt.Sprintf("%v/%v/%v", algorithm, policy.Each{Kind: each}, rate), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 1, Buckets: 64}, live())
					rule := policy.Rule{
						Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: 10 * size,
						Algorithm: algorithm, Each: policy.Each{Kind: each}, Fail: policy.Closed,
					}
					e := r.put(rule, 0)
					send(t, r.program(), frame, meta{}) // so that there is a bucket
					before := r.counters()[e.ID]
					took := onEachCPU(t, func(int) error {
						_, err := r.program().Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(packets(500_000, 50_000))})
						return err
					})
					c, bound := since(before, r.counters()[e.ID]), rule.Capacity+leaked(rate, took)
					if each != policy.EachAll && r.spillWasUsed() {
						bound *= 2 // by packets that lost the bucket to the other CPU too often
					}
					if c.PassedBytes > bound {
						t.Errorf("%d bytes passed in %d ns, at most %d may", c.PassedBytes, took, bound)
					}
					if c.PassedBytes < rule.Capacity-size {
						t.Errorf("only %d bytes passed: not even the capacity", c.PassedBytes)
					}
					if c.PassedPackets*size != c.PassedBytes || c.ExcessPackets != c.DroppedPackets {
						t.Errorf("counters contradict each other: %+v", c)
					}
				})
			}
		}
	}
}

// spillWasUsed reports whether anything was ever charged to the own bucket of the first rule.
func (r *rig) spillWasUsed() bool {
	r.Helper()
	return binary.NativeEndian.Uint64(r.firstRule()) != 0 // its bucket's TAT, which was 0 when it was put
}

// firstRule is what the map has of it, its bucket first.
func (r *rig) firstRule() []byte {
	r.Helper()
	rule, err := r.set.Replacements()[bpf.ShapectlMapRules].LookupBytes(uint32(0))
	if err != nil || rule == nil {
		r.Fatal("the first rule is not there: ", err)
	}
	return rule
}

// slotsAreSound looks at a table at rest: no slot is left half taken, and no key
// has two, be they in one line or in two. A key is known by its first line and its
// fingerprint there: second_line and second_print of bucket.h the other way around.
func (r *rig) slotsAreSound() {
	r.Helper()
	type key struct{ line, print uint32 }
	table, has := r.set.Replacements()[".data.table"], map[key]int{}
	lines := make([]bpf.AbiLine, table.ValueSize()/uint32(unsafe.Sizeof(bpf.AbiLine{})))
	if err := table.Lookup(uint32(0), lines); err != nil {
		r.Fatal(err)
	}
	for i, line := range lines {
		for _, slot := range line.Slot {
			if slot.Tat&1 != 0 {
				r.Errorf("line %d: a slot was left half taken: %+v", i, line.Slot)
			}
			k := key{uint32(i), slot.Fingerprint}
			switch {
			case slot.Fingerprint == 0:
				continue
			case slot.Fingerprint%2 == 0:
				k = key{(uint32(i) ^ (slot.Fingerprint+1)>>3) & uint32(len(lines)-1), slot.Fingerprint + 1}
			}
			if has[k]++; has[k] > 1 {
				r.Errorf("line %d: key %#x of line %d has %d slots", i, k.print, k.line, has[k])
			}
		}
	}
}

// Keys share a table of one line, whose buckets drain all the time, so that
// slots change hands. A slot is taken only when its bucket is empty, so what
// passes on each of the four is bounded as if one key had it, and so is what
// passes on the spill bucket.
func TestSlotsChangeHands(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for _, algorithm := range algorithms {
		for _, keys := range []uint64{1, 3, 4, 5, 8, 12} {
			// Two packets at a time; drained within the test thousands of times, or a few.
			for _, rate := range []policy.Rate{20_000_000_000, 100_000_000} {
				t.Run(fmt.Sprintf("%v/%d keys/%v", algorithm, keys, rate), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, live())
					rule := policy.Rule{
						Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: 2 * size,
						Algorithm: algorithm, Each: policy.Each{Kind: policy.EachHost}, Fail: policy.Closed,
					}
					e := r.put(rule, 0)
					p := hosts(t, r.program(), int32(keys))
					took := onEachCPU(t, func(int) error {
						_, err := p.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(packets(400_000, 50_000))})
						return err
					})
					c, bound := r.counters()[e.ID], (min(keys, 4)+1)*(rule.Capacity+leaked(rate, took))
					if c.PassedBytes > bound {
						t.Errorf("%d bytes passed in %d ns, at most %d may", c.PassedBytes, took, bound)
					}
					if c.PassedBytes < size {
						t.Error("nothing passed")
					}
					r.slotsAreSound()
				})
			}
		}
	}
}

// inStep are programs for two CPUs that send a packet at the same virtual time,
// over and over, each time so much later that any bucket has drained. A CPU that
// waits too long for the other leaves the packet to that one. done is how many
// times there were a packet, or two.
func inStep(t *testing.T, next *ebpf.Program, gap uint) (programs [2]*ebpf.Program, done func() uint64) {
	t.Helper()
	const apart = 64 // bytes: two cache lines
	rounds, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 2 * apart, MaxEntries: 1})
	testenv.Must(t, err)
	t.Cleanup(func() { rounds.Close() })
	for cpu := range programs {
		mine, other := int16(cpu*apart), int16(apart-cpu*apart)
		programs[cpu] = before(t, "in_step", next,
			asm.LoadMapValue(asm.R8, rounds.FD(), 0),
			asm.Mov.Imm(asm.R1, 1),
			asm.AddAtomic.Mem(asm.R8, asm.R1, asm.DWord, mine),
			asm.LoadMem(asm.R9, asm.R8, mine, asm.DWord),
			asm.Mov.Imm(asm.R7, 2000),
			asm.LoadMem(asm.R1, asm.R8, other, asm.DWord).WithSymbol("wait"),
			asm.JGE.Reg(asm.R1, asm.R9, "send"),
			asm.Sub.Imm(asm.R7, 1),
			asm.JNE.Imm(asm.R7, 0, "wait"),
			asm.Mov.Imm(asm.R0, -1),
			asm.Return(),
			asm.LSh.Imm(asm.R9, int32(gap)).WithSymbol("send"),
			asm.StoreMem(asm.R6, 152, asm.R9, asm.DWord), // tstamp
		)
	}
	return programs, func() uint64 {
		value := make([]byte, 2*apart)
		testenv.Must(t, rounds.Lookup(uint32(0), &value))
		return min(binary.NativeEndian.Uint64(value), binary.NativeEndian.Uint64(value[apart:]))
	}
}

// A CPU never sees a charge with the tick of an older one, by which the bucket
// would have drained: of two packets at the same time, just one fits.
func TestChargeIsSeenWithItsTick(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	for _, algorithm := range algorithms {
		for _, each := range []policy.EachKind{policy.EachAll, policy.EachHost} {
			t.Run(fmt.Sprintf("%v/%v", algorithm, policy.Each{Kind: each}), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, egress())
				e := r.put(policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: 1e9, Capacity: uint64(len(frame)),
					Algorithm: algorithm, Each: policy.Each{Kind: each}, Fail: policy.Closed,
				}, 0)
				const gap = model.TickBits + 3
				if idle := r.set.Meter(e).Idle; idle >= 1<<(gap-model.TickBits) {
					t.Fatalf("buckets have drained after %d ticks only", idle)
				}
				programs, done := inStep(t, r.program(), gap)
				// Until they met often enough.
				for r.set.Counters(e.ID).ExcessPackets < uint64(packets(100_000, 20_000)) {
					onEachCPU(t, func(cpu int) error {
						_, err := programs[cpu].Run(&ebpf.RunOptions{Data: frame, Repeat: 50_000})
						return err
					})
					if c := r.set.Counters(e.ID); c.PassedPackets != done() {
						t.Fatalf("%d packets passed at %d times, at each of which one fits", c.PassedPackets, done())
					}
				}
			})
		}
	}
}

// Two CPUs that meet a new key at the same time give it one slot. Here the key
// is the time, so both meet each new one at once; in a small table most lines are
// full then, and keys take slots of their second lines, and buckets move.
func TestNewKeyOnTwoCPUs(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for i, buckets := range []uint32{1 << 18, 1 << 18, 1 << 16, 1 << 16} {
		algorithm := algorithms[i%2]
		t.Run(fmt.Sprintf("%v/%d buckets", algorithm, buckets), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: buckets}, live())
			// So slow that no slot is ever given back, with room for one packet.
			rule := policy.Rule{
				Prefix: prefix("10.0.0.0/8"), Rate: 8, Capacity: size,
				Algorithm: algorithm, Each: policy.Each{Kind: policy.EachHost}, Fail: policy.Closed,
			}
			e := r.put(rule, 0)
			const host = 14 + 18 // two bytes of the destination
			p := before(t, "time_of_day", r.program(),
				asm.FnKtimeGetNs.Call(),
				asm.RSh.Imm(asm.R0, 9),
				asm.LoadMem(asm.R2, asm.R6, 76, asm.Word), // data
				asm.LoadMem(asm.R3, asm.R6, 80, asm.Word), // data_end
				asm.Mov.Reg(asm.R4, asm.R2),
				asm.Add.Imm(asm.R4, host+2),
				asm.JGT.Reg(asm.R4, asm.R3, "on"),
				asm.StoreMem(asm.R2, host, asm.R0, asm.Half),
			)
			onEachCPU(t, func(int) error {
				_, err := p.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(packets(1_000_000, 300_000))})
				return err
			})
			r.slotsAreSound()
			sharers := uint64(len(slices.Collect(r.set.Buckets(e, maps.Now()))))
			if c := r.counters()[e.ID]; c.PassedPackets > sharers+1 { // one on the spill bucket
				t.Errorf("%d packets passed, of %d hosts with room for one each", c.PassedPackets, sharers)
			}
			if sharers < 1000 {
				t.Errorf("only %d hosts: the CPUs met none", sharers)
			}
		})
	}
}

// Slots change hands packet by packet, so that each key's share is known: its own bucket
// wherever it is, and what it gets of the spare one.
func TestSlotsChangeHandsFairly(t *testing.T) {
	for _, algorithm := range algorithms {
		for _, keys := range []int{3, 5, 12} {
			t.Run(fmt.Sprintf("%v/%d keys", algorithm, keys), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, live())
				const size = 1000
				rule := policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: 40_000_000, Capacity: 2 * size,
					Algorithm: algorithm, Each: policy.Each{Kind: policy.EachFlow}, Fail: policy.Closed,
				}
				r.put(rule, 0)
				p, passed := r.program(), make([]atomic.Uint64, keys)
				took := onEachCPU(t, func(cpu int) error {
					frames := make([][]byte, keys)
					for key := range keys {
						frames[key] = ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(uint16(key), 2), zeros(958)))
					}
					for i := range packets(60_000, 6000) {
						// In bursts, so that buckets of the others drain meanwhile.
						key := (i/(100*(cpu+1)) + i%2) % keys
						verdict, err := p.Run(&ebpf.RunOptions{Data: frames[key]})
						if err != nil {
							return err
						}
						if verdict != drop {
							passed[key].Add(size)
						}
					}
					return nil
				})
				one := rule.Capacity + leaked(rule.Rate, took) // on one bucket
				total := uint64(0)
				for key := range passed {
					n := passed[key].Load()
					total += n
					if n > 2*one {
						t.Errorf("%d bytes of key %d passed, its own and the spill bucket let through %d", n, key, 2*one)
					}
				}
				if bound := uint64(min(keys, 4)+1) * one; total > bound {
					t.Errorf("%d bytes passed, the buckets let through %d", total, bound)
				}
				r.slotsAreSound()
			})
		}
	}
}

// A spray of new flows takes no bucket from a flow that owes something, and all
// of it together gets no more than the empty slots and the spill bucket hold.
func TestSpray(t *testing.T) {
	const buckets = 1 << 12
	for _, algorithm := range algorithms {
		t.Run(fmt.Sprint(algorithm), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: buckets}, live())
			const size = 1000
			// So slow that nothing drains in any time that a test takes.
			rule := policy.Rule{
				Prefix: prefix("10.0.0.0/8"), Rate: 80, Capacity: 4 * size,
				Algorithm: algorithm, Each: policy.Each{Kind: policy.EachFlow}, Fail: policy.Closed,
			}
			e := r.put(rule, 0)
			busy := ether(typeIPv4, ip4{src: "198.51.100.1", proto: protoUDP}.with(udpHeader(1000, 53), zeros(958)))
			flow := maps.Flow{Src: addr("198.51.100.1"), Dst: addr(far4), Proto: protoUDP, SrcPort: 1000, DstPort: 53}
			p, first := r.program(), maps.Now()
			send(t, p, busy, meta{}) // it has its bucket before the spray begins
			mine := uint64(size)
			flows := packets(1<<20, 1<<16)
			spray := randomFlow(t, p, int32(flows))
			var over atomic.Bool
			onEachCPU(t, func(cpu int) error {
				if cpu == 0 {
					defer over.Store(true)
					_, err := spray.Run(&ebpf.RunOptions{Data: busy, Repeat: uint32(flows)})
					return err
				}
				for !over.Load() {
					verdict, err := p.Run(&ebpf.RunOptions{Data: busy})
					if err != nil {
						return err
					}
					if verdict != drop {
						mine += size
					}
				}
				return nil
			})
			now := maps.Now()
			took := now - first
			if bound := rule.Capacity + leaked(rule.Rate, took); mine > bound {
				t.Errorf("%d bytes of the busy flow passed, at most %d may", mine, bound)
			}
			if got := model.Bytes(r.set.State(e, policy.MatchDst, flow, now).Level) + leaked(rule.Rate, took); got < mine {
				t.Errorf("the busy flow owes %d bytes less than it sent", mine-got)
			}
			held, sharers := uint64(0), 0
			for b := range r.set.Buckets(e, now) {
				held += b.LevelBytes
				sharers++
			}
			if sharers > buckets || sharers < buckets*9/10 {
				t.Errorf("%d flows have a bucket, of %d that there are", sharers, buckets)
			}
			spare := model.Bytes(r.set.SharedLevel(e, now))
			if spare > rule.Capacity || spare+size <= rule.Capacity {
				t.Errorf("the spill bucket owes %d bytes, want it full: %d", spare, rule.Capacity)
			}
			if c, bound := r.counters()[e.ID], held+rule.Capacity+(buckets+1)*leaked(rule.Rate, took); c.PassedBytes > bound {
				t.Errorf("%d bytes passed, %d of them on buckets of flows: the spare one has no room for the rest", c.PassedBytes, held)
			}
			r.slotsAreSound()
			if !slices.ContainsFunc(slices.Collect(r.set.Buckets(e, now)), func(b maps.Bucket) bool { return b.Flow == flow }) {
				t.Error("the busy flow has no bucket any more")
			}
		})
	}
}

// Tests from here on run in virtual time, which stands still or is known for
// each packet, so what may pass is known to the byte whatever the CPUs do.

// crowd is more than any machine of ours has CPUs.
const crowd = 8

// inCrowd runs work in as many goroutines, each on a thread of its own while it is in the kernel.
func inCrowd(t *testing.T, work func(member int) error) {
	t.Helper()
	var done sync.WaitGroup
	errs := make([]error, crowd)
	for i := range errs {
		done.Go(func() { errs[i] = work(i) })
	}
	done.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// owed is what all buckets of a rule owe under one way of sharing, and its own one, in units.
func (r *rig) owed(e maps.Entry, now uint64) (sharers map[maps.Bucket]uint64, all, own uint64) {
	sharers = map[maps.Bucket]uint64{}
	for b := range r.set.Buckets(e, now) {
		units := r.set.State(e, policy.MatchDst, b.Flow, now).Level
		if b.Subnet.IsValid() {
			units = r.set.State(e, policy.MatchDst, maps.Flow{Dst: b.Subnet.Addr()}, now).Level
		}
		b.LevelBytes = 0
		sharers[b] = units
		all += units
	}
	return sharers, all, r.set.SharedLevel(e, now)
}

// all ways in which packets can share buckets.
var eaches = []policy.Each{{Kind: policy.EachAll}, {Kind: policy.EachHost}, {Kind: policy.EachSubnet, Bits: 31}, {Kind: policy.EachFlow}}

// toHost is a packet of a size to the nth host of 10.0.0.0/8, behind whom there is more to tell flows apart.
func toHost(n, size int) []byte {
	to := netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	frame := ether(typeIPv4, ip4{dst: to.String(), proto: protoUDP}.with(udpHeader(uint16(n), 53)))
	return append(frame, zeros(size-len(frame))...)
}

// While time stands still a bucket takes exactly what it holds, and each byte
// that passes is owed by exactly one bucket: new keys that all CPUs meet at the
// same time, too, and buckets that move while they are charged, as the table is full.
func TestNothingIsLostOrMadeUp(t *testing.T) {
	const size, holds, now = 100, 3, uint64(1e12)
	for _, algorithm := range algorithms {
		for i, each := range append(eaches, eaches[1:]...) {
			keys, buckets := packets(4000, 500), uint32(1<<17)
			if i >= len(eaches) {
				buckets = uint32(keys) // rounded up to a power of two
			}
			t.Run(fmt.Sprintf("%v/%v/%d buckets", algorithm, each, buckets), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 1, Buckets: buckets}, egress())
				e := r.put(policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000, Capacity: holds*size + size/2,
					Algorithm: algorithm, Each: each, Fail: policy.Closed,
				}, now)
				p := r.program()
				var passed atomic.Uint64
				inCrowd(t, func(int) error {
					for key := range keys {
						frame := toHost(2*key, size)
						for range 2 {
							verdict, err := p.Run(&ebpf.RunOptions{Data: frame, Context: meta{now: now}.context()})
							if err != nil {
								return err
							}
							if verdict == next {
								passed.Add(1)
							}
						}
					}
					return nil
				})
				sharers, all, own := r.owed(e, now)
				if got, want := passed.Load()*size<<model.UnitBits, all+own; got != want {
					t.Errorf("%d bytes passed, the buckets owe %d", passed.Load()*size, want>>model.UnitBits)
				}
				full := uint64(holds * size << model.UnitBits)
				if own != 0 && own > full || each.Kind == policy.EachAll && own != full {
					t.Errorf("the rule's own bucket owes %d units, full is %d", own, full)
				}
				for b, units := range sharers {
					if units != full {
						t.Errorf("%+v owes %d units, full is %d", b, units, full)
					}
				}
				// Whoever found all slots taken is left for the spill bucket.
				if each.Kind != policy.EachAll && len(sharers) != keys && own == 0 {
					t.Errorf("%d sharers have a bucket, of %d", len(sharers), keys)
				}
				r.slotsAreSound()
			})
		}
	}
}

// The window invariant for packets of CPUs whose clocks are up to a millisecond
// apart, over every window of all of them sorted by time.
func TestSkewedClocks(t *testing.T) {
	const size, keys = 1000, 3
	for _, algorithm := range algorithms {
		for _, each := range eaches {
			for _, rate := range []policy.Rate{10_000_000, 20_000_000_000} {
				t.Run(fmt.Sprintf("%v/%v/%v", algorithm, each, rate), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 1, Buckets: 1 << 12}, egress())
					// From one tick into the next, and not beyond: a test, unlike a program, may be
					// interrupted for long between reading its clock and sending the packet.
					start := uint64(1000)<<model.TickBits - 2_000_000
					step := min(uint64(size)*8e9/uint64(rate)/3, 20_000)
					rule := policy.Rule{
						Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: 10 * size,
						Algorithm: algorithm, Each: each, Fail: policy.Closed,
					}
					e := r.put(rule, start)
					p := r.program()
					type packet struct{ now, passed uint64 }
					traces := [crowd][keys][]packet{}
					var clock atomic.Uint64
					inCrowd(t, func(member int) error {
						skew := uint64(member) * 1_000_000 / (crowd - 1)
						for i := range packets(3000, 500) {
							key := i % keys
							now := start + clock.Add(step) - skew
							verdict, err := p.Run(&ebpf.RunOptions{Data: toHost(2*key, size), Context: meta{now: now}.context()})
							if err != nil {
								return err
							}
							passed := uint64(0)
							if verdict == next {
								passed = size
							}
							traces[member][key] = append(traces[member][key], packet{now, passed})
						}
						return nil
					})
					buckets := int64(1)
					if each.Kind != policy.EachAll && r.set.SharedLevel(e, start) > 0 { // as seen from before any packet
						buckets = 2 // its own, and the one for packets that lost it to another CPU too often
					}
					var shared [keys][]packet
					for _, trace := range traces {
						for key, packets := range trace {
							if each.Kind == policy.EachAll {
								key = 0
							}
							shared[key] = append(shared[key], packets...)
						}
					}
					for key, packets := range shared {
						slices.SortFunc(packets, func(a, b packet) int { return cmp.Compare(a.now, b.now) })
						var w testenv.Windows
						for i, one := range packets {
							if i > 0 {
								w.Leak(uint64(rate)*uint64(buckets), int64(one.now-packets[i-1].now))
							}
							// Two units for each time that the clock is read are less than four millionths of a byte.
							if most, _ := w.Packet(one.passed); most > buckets*int64(rule.Capacity*1e6+4) {
								t.Fatalf("key %d: %d millionths of a byte more passed than the rate let through, of a capacity of %d",
									key, most, rule.Capacity)
							}
						}
					}
				})
			}
		}
	}
}

// Changes of a rule, while packets run, make and lose nothing of what is owed.
func TestChangesWhilePacketsRun(t *testing.T) {
	const size, keys, now = 100, 50, uint64(1e12)
	const small, large = 1000 * size, 1500 * size
	for _, algorithm := range algorithms {
		for name, change := range map[string]func(rule *policy.Rule, i int){
			"rate":     func(rule *policy.Rule, i int) { rule.Rate = policy.Rate(8000 << (i % 20)) },
			"each":     func(rule *policy.Rule, i int) { rule.Each = eaches[i%len(eaches)] },
			"capacity": func(rule *policy.Rule, i int) { rule.Capacity = []uint64{small, large}[i%2] },
		} {
			t.Run(fmt.Sprintf("%v/%s", algorithm, name), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 1, Buckets: 1 << 12}, egress())
				rule := policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000, Capacity: small,
					Algorithm: algorithm, Fail: policy.Closed,
				}
				r.put(rule, now)
				p := r.program()
				var passed, sent atomic.Uint64
				var over atomic.Bool
				changes := packets(20_000, 4000)
				if name == "capacity" {
					changes = 24
				}
				inCrowd(t, func(member int) error {
					if member == 0 {
						defer over.Store(true)
						for i := range changes {
							change(&rule, i)
							r.at(now)
							if _, err := r.set.Put(rule); err != nil {
								return err
							}
							for until := sent.Load() + large/size; name == "capacity" && sent.Load() < until; {
								runtime.Gosched() // so that each capacity is filled
							}
						}
						return nil
					}
					for i := member; !over.Load(); i++ {
						verdict, err := p.Run(&ebpf.RunOptions{Data: toHost(2*(i%keys), size), Context: meta{now: now}.context()})
						if err != nil {
							return err
						}
						if verdict == next {
							passed.Add(size)
						}
						sent.Add(1)
					}
					return nil
				})
				if name == "capacity" {
					// Each time that it shrinks, what is beyond may pass again.
					if most := uint64(large + changes/2*(large-small)); passed.Load() > most || passed.Load() < large {
						t.Errorf("%d bytes passed, of %d to %d that may", passed.Load(), large, most)
					}
					return
				}
				total := uint64(0)
				for _, each := range eaches {
					rule.Each = each
					_, all, own := r.owed(r.put(rule, now), now)
					total += all
					if each.Kind == policy.EachAll {
						total += own
					}
				}
				if passed.Load()<<model.UnitBits != total {
					t.Errorf("%d bytes passed, the buckets owe %d units, which are %d", passed.Load(), total, total>>model.UnitBits)
				}
				if name == "rate" && passed.Load() != small {
					t.Errorf("%d bytes passed, and the bucket holds %d", passed.Load(), small)
				}
				r.slotsAreSound()
			})
		}
	}
}

// The same with the kernel's clock: a rule that is changed all the time, if only
// by a bit per second, lets no more through than one that is not.
func TestChangesOnALiveClock(t *testing.T) {
	const size = 1000
	frame := toHost(1, size)
	for _, algorithm := range algorithms {
		for _, each := range eaches {
			t.Run(fmt.Sprintf("%v/%v", algorithm, each), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 1, Buckets: 64}, live())
				rule := policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000_000, Capacity: 10 * size,
					Algorithm: algorithm, Each: each, Fail: policy.Closed,
				}
				e := r.put(rule, maps.Now())
				send(t, r.program(), frame, meta{})
				before := r.counters()[e.ID]
				var over atomic.Bool
				took := onEachCPU(t, func(cpu int) error {
					if cpu == 0 {
						defer over.Store(true)
						for range packets(20, 5) {
							rule.Rate ^= 1
							if _, err := r.set.Put(rule); err != nil {
								return err
							}
						}
						return nil
					}
					for sent := false; !sent || !over.Load(); sent = true {
						if _, err := r.program().Run(&ebpf.RunOptions{Data: frame, Repeat: 10_000}); err != nil {
							return err
						}
					}
					return nil
				})
				bound := rule.Capacity + leaked(rule.Rate|1, took)
				if c := since(before, r.counters()[e.ID]); c.PassedBytes > bound || c.PassedBytes < rule.Capacity {
					t.Errorf("%d bytes passed in %d ns, at most %d may", c.PassedBytes, took, bound)
				}
			})
		}
	}
}

// A change meets a bucket just as a packet charges it, again and again: no charge is lost.
func TestChangesKeepEveryCharge(t *testing.T) {
	const size, now = 100, uint64(1e12)
	for i, each := range []policy.Each{{Kind: policy.EachAll}, {Kind: policy.EachHost}} {
		algorithm := algorithms[i]
		t.Run(fmt.Sprintf("%v/%v", algorithm, each), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: 4}, egress())
			rule := policy.Rule{
				Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000, Capacity: policy.MaxCapacity,
				Algorithm: algorithm, Each: each, Fail: policy.Closed,
			}
			e := r.put(rule, now)
			p := r.program()
			var over atomic.Bool
			onEachCPU(t, func(cpu int) error {
				if cpu == 0 {
					defer over.Store(true)
					for range packets(50, 20) {
						rule.Rate ^= 1
						r.at(now)
						if _, err := r.set.Put(rule); err != nil {
							return err
						}
					}
					return nil
				}
				for !over.Load() {
					if _, err := p.Run(&ebpf.RunOptions{Data: toHost(1, size), Context: meta{now: now}.context(), Repeat: 10_000}); err != nil {
						return err
					}
				}
				return nil
			})
			_, all, own := r.owed(e, now)
			if c := r.counters()[e.ID]; c.PassedBytes<<model.UnitBits != all+own || c.ExcessPackets > 0 {
				t.Errorf("%d bytes passed, the buckets owe %d units, which are %d", c.PassedBytes, all+own, (all+own)>>model.UnitBits)
			}
		})
	}
}

// Buckets move to make room for new keys just as packets charge them, again and
// again: no charge is lost or counted twice.
func TestMovesKeepEveryCharge(t *testing.T) {
	const host = 14 + 18 // two bytes of the destination
	// random sends each packet to one of so many hosts of a /16.
	random := func(next *ebpf.Program, hosts int32) *ebpf.Program {
		return before(t, "random", next,
			asm.FnGetPrandomU32.Call(),
			asm.And.Imm(asm.R0, hosts-1),
			asm.LoadMem(asm.R2, asm.R6, 76, asm.Word), // data
			asm.LoadMem(asm.R3, asm.R6, 80, asm.Word), // data_end
			asm.Mov.Reg(asm.R4, asm.R2),
			asm.Add.Imm(asm.R4, host+2),
			asm.JGT.Reg(asm.R4, asm.R3, "on"),
			asm.StoreMem(asm.R2, host, asm.R0, asm.Half),
		)
	}
	for _, algorithm := range algorithms {
		t.Run(fmt.Sprint(algorithm), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: 64}, egress())
			now := uint64(1e12)
			e := r.put(policy.Rule{
				Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000_000, Capacity: policy.MaxCapacity,
				Algorithm: algorithm, Each: policy.Each{Kind: policy.EachHost}, Fail: policy.Closed,
			}, now)
			frames := [2][]byte{toHost(1<<16, 100), toHost(2<<16, 164)}
			programs := [2]*ebpf.Program{random(r.program(), 16), random(r.program(), 1<<15)}
			for range packets(300, 50) {
				now += 1000 * uint64(time.Second) // all have drained
				before := r.counters()[e.ID]
				onEachCPU(t, func(cpu int) error {
					_, err := programs[cpu].Run(&ebpf.RunOptions{Data: frames[cpu], Context: meta{now: now}.context(), Repeat: 2000})
					return err
				})
				_, all, own := r.owed(e, now)
				if c := since(before, r.counters()[e.ID]); c.PassedBytes<<model.UnitBits != all+own || c.ExcessPackets > 0 {
					t.Fatalf("%d bytes passed, the buckets owe %d units, which are %d", c.PassedBytes, all+own, (all+own)>>model.UnitBits)
				}
				r.slotsAreSound()
			}
		})
	}
}

// No packet sees half of a change: one rule has room for everything and counts
// more than there is, the other has no room and lets pass what does not fit.
// Only a mix of the two would drop, or count a packet that fits as it is.
func TestNoPacketSeesHalfOfAChange(t *testing.T) {
	const size, more, now = 100, 200, uint64(1e12)
	for _, algorithm := range algorithms {
		t.Run(fmt.Sprint(algorithm), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1}, egress())
			lenient := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000, Capacity: 2000, Algorithm: algorithm, Excess: policy.Pass}
			roomy := lenient
			roomy.Capacity, roomy.Excess, roomy.Framing.Overhead = policy.MaxCapacity, policy.Drop, more
			e := r.put(roomy, now)
			p, run := r.program(), &ebpf.RunOptions{Data: toHost(1, size), Context: meta{now: now}.context(), Repeat: 10_000}
			_, err := p.Run(run) // enough to fill the other one
			testenv.Must(t, err)
			// On a busy machine the packets' CPU may rest whenever the rule is one of the two.
			bothSeen := func() bool {
				c := r.counters()[e.ID]
				return c.ExcessPackets > 0 && c.PassedPackets > c.ExcessPackets+10_000
			}
			var begun, over atomic.Bool
			onEachCPU(t, func(cpu int) error {
				if cpu == 0 {
					defer over.Store(true)
					for !begun.Load() {
						runtime.Gosched()
					}
					changes := packets(60, 20)
					for i := 0; i < changes || i < 100*changes && !bothSeen(); i++ {
						r.at(now)
						if _, err := r.set.Put([]policy.Rule{lenient, roomy}[i%2]); err != nil {
							return err
						}
					}
					return nil
				}
				for !over.Load() {
					if _, err := p.Run(run); err != nil {
						begun.Store(true)
						return err
					}
					begun.Store(true)
				}
				return nil
			})
			c := r.counters()[e.ID]
			fit := c.PassedPackets - c.ExcessPackets
			if c.DroppedPackets > 0 || c.ExcessBytes != size*c.ExcessPackets || c.PassedBytes-c.ExcessBytes != (size+more)*fit {
				t.Errorf("counted %+v: want %d bytes of each that is excess and %d of each that is not, and nothing dropped", c, size, size+more)
			}
			if fit == 0 || c.ExcessPackets == 0 {
				t.Errorf("counted %+v: one of the rules saw no packet", c)
			}
		})
	}
}
