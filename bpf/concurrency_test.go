package bpf_test

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
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

// These tests run in real time, on two CPUs. They do not depend on the speed of the
// machine: each bound is for the time that has passed.

// live returns an egress hook with the kernel's clock.
func live() bpf.AbiHook { return bpf.AbiHook{L2Bytes: 14, Secret: secret} }

// onEachCPU runs work on two CPUs at the same time, each on its own thread. It returns
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
			// The thread ends with the goroutine, so its affinity and signals do not outlive the test.
			runtime.LockOSThread()
			var one unix.CPUSet
			one.Set(cpu)
			// A signal would end a test run early, and the library would begin it again.
			urgent := unix.Sigset_t{Val: [16]uint64{1 << (unix.SIGURG - 1)}}
			errs[i] = errors.Join(unix.SchedSetaffinity(0, &one), unix.PthreadSigmask(unix.SIG_BLOCK, &urgent, nil))
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

// leaked returns the bytes that a rate allows in a time, rounded up.
func leaked(rate policy.Rate, ns uint64) uint64 {
	return uint64(float64(rate)/8e9*float64(ns)*(1+1e-9)) + 1
}

// hosts returns a program that sends each packet to one of n random hosts.
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

// Two CPUs on one bucket never admit more than one CPU would.
func TestTwoCPUsOneBucket(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for _, algorithm := range algorithms {
		for _, each := range scopes {
			// From rates so low that nearly all is excess to rates so high that nearly all is charged.
			for _, rate := range []policy.Rate{1_000_000, 10_000_000_000, 400_000_000_000} {
				t.Run(fmt.Sprintf("%v/%v/%v", algorithm, policy.Each{Kind: each}, rate), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 1, Buckets: 64}, live())
					rule := policy.Rule{
						Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: 10 * size,
						Algorithm: algorithm, Each: policy.Each{Kind: each}, Fail: policy.Closed,
					}
					e := r.put(rule, 0)
					send(t, r.program(), frame, meta{}) // allocates the bucket
					before := r.counters()[e.ID]
					count := uint64(testenv.Rounds(t, 100_000))
					took := onEachCPU(t, func(int) error {
						_, err := r.program().Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(count)})
						return err
					})
					c, bound := since(before, r.counters()[e.ID]), rule.Capacity+leaked(rate, took)
					if each != policy.EachAll && r.spillWasUsed() {
						bound *= 2 // for packets that found the bucket contended
					}
					if c.PassedBytes > bound {
						t.Errorf("%d bytes passed in %d ns, want at most %d", c.PassedBytes, took, bound)
					}
					if c.PassedBytes < rule.Capacity-size {
						t.Errorf("only %d bytes passed, which is less than the capacity", c.PassedBytes)
					}
					if c.PassedPackets*size != c.PassedBytes || c.ExcessPackets != c.DroppedPackets || c.PassedPackets+c.DroppedPackets != 2*count {
						t.Errorf("counters contradict each other: %+v", c)
					}
				})
			}
		}
	}
}

// Nor do they with two buckets, in any colour.
func TestTwoCPUsTwoBuckets(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for _, each := range scopes[:2] {
		for _, rate := range []policy.Rate{1_000_000, 10_000_000_000} {
			rule := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: 10 * size, Each: policy.Each{Kind: each}, Fail: policy.Closed}
			rule.Colours.Green, rule.Colours.Yellow, rule.Colours.Red = policy.ActionPass, policy.ActionPass, policy.ActionDrop
			srtcm, trtcm, rfc4115 := rule, rule, rule
			srtcm.Algorithm, srtcm.Colours.EBS = policy.SRTCM, 20*size
			trtcm.Algorithm, trtcm.Colours.PIR, trtcm.Colours.PBS = policy.TRTCM, 2*rate, 30*size
			rfc4115.Algorithm, rfc4115.Colours.EIR, rfc4115.Colours.EBS = policy.RFC4115, 2*rate, 20*size
			for _, rule := range []policy.Rule{srtcm, trtcm, rfc4115} {
				t.Run(fmt.Sprintf("%v/%v/%v", rule.Algorithm, rule.Each, rate), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 2, Buckets: 64, Colours: true}, live())
					e := r.put(rule, 0)
					send(t, r.program(), frame, meta{}) // allocates the buckets
					before := r.counters()[e.ID]
					count := uint64(testenv.Rounds(t, 100_000))
					took := onEachCPU(t, func(int) error {
						_, err := r.program().Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(count)})
						return err
					})
					after := r.counters()[e.ID]
					green, yellow := after.GreenBytes-before.GreenBytes, after.YellowBytes-before.YellowBytes
					both := rule.Capacity + rule.Colours.EBS + leaked(rate, took)
					switch rule.Algorithm {
					case policy.TRTCM:
						both = rule.Colours.PBS + leaked(rule.Colours.PIR, took)
					case policy.RFC4115:
						both += leaked(rule.Colours.EIR, took)
					}
					bound := rule.Capacity + leaked(rate, took)
					if each != policy.EachAll && r.spillWasUsed() {
						bound, both = 2*bound, 2*both // for packets that found the buckets contended
					}
					if green > bound || green+yellow > both {
						t.Errorf("%d green bytes and %d yellow ones passed in %d ns, want at most %d, and together %d", green, yellow, took, bound, both)
					}
					if least := 30 * size; green+yellow < least-2*size || green < rule.Capacity-size {
						t.Errorf("only %d green bytes and %d yellow ones passed", green, yellow)
					}
					c := since(before, after)
					if c.PassedBytes != c.PassedPackets*size || c.PassedPackets+c.DroppedPackets != 2*count {
						t.Errorf("counters contradict each other: %+v", c)
					}
					if c.ContendedPackets == 0 && c.PassedBytes != green+yellow {
						t.Errorf("%d bytes passed, but %d have a colour that does", c.PassedBytes, green+yellow)
					}
				})
			}
		}
	}
}

// spillWasUsed reports whether any packet was charged to the spill bucket of the first rule.
func (r *rig) spillWasUsed() bool {
	r.Helper()
	return binary.NativeEndian.Uint64(r.firstRule()) != 0 // the TAT of its bucket, which is 0 until the first charge
}

// firstRule returns the first rule in the map, which begins with its bucket.
func (r *rig) firstRule() []byte {
	r.Helper()
	rule, err := r.set.Store.Replacements()[bpf.ShapectlMapRules].LookupBytes(uint32(0))
	if err != nil || rule == nil {
		r.Fatal("read the first rule: ", err)
	}
	return rule
}

// slotsAreSound checks a table without traffic: no slot is locked, and no key has two
// slots in its two lines. A key is identified by its first line and its fingerprint
// there, which follow from second_line and second_fingerprint of bpf/table.h.
func (r *rig) slotsAreSound() {
	r.Helper()
	type key struct{ line, fingerprint uint32 }
	table, has := r.set.Store.Replacements()[".data.table"], map[key]int{}
	lines := make([]bpf.AbiLine, table.ValueSize()/uint32(unsafe.Sizeof(bpf.AbiLine{})))
	if err := table.Lookup(uint32(0), lines); err != nil {
		r.Fatal(err)
	}
	for i, line := range lines {
		for _, slot := range line.Slot {
			if slot.Tat&1 != 0 {
				r.Errorf("line %d: a slot is locked: %+v", i, line.Slot)
			}
			k := key{uint32(i), slot.Fingerprint}
			switch {
			case slot.Fingerprint == 0:
				continue
			case slot.Fingerprint%2 == 0:
				k = key{(uint32(i) ^ (slot.Fingerprint+1)>>3) & uint32(len(lines)-1), slot.Fingerprint + 1}
			}
			if has[k]++; has[k] > 1 {
				r.Errorf("line %d: key %#x of line %d has %d slots", i, k.fingerprint, k.line, has[k])
			}
		}
	}
}

// Keys share a table of one line. Their buckets drain all the time, so slots are
// reallocated. A slot is only reallocated when its bucket is empty. So the traffic
// through each of the four slots and the spill bucket is bounded as for one key.
func TestSlotReallocation(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for _, algorithm := range algorithms {
		for _, keys := range []uint64{1, 3, 4, 5, 8, 12} {
			// Two packets at a time. The bucket drains thousands of times within the test, or a few times.
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
						_, err := p.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(testenv.Rounds(t, 100_000))})
						return err
					})
					c, bound := r.counters()[e.ID], (min(keys, 4)+1)*(rule.Capacity+leaked(rate, took))
					if c.PassedBytes > bound {
						t.Errorf("%d bytes passed in %d ns, want at most %d", c.PassedBytes, took, bound)
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

// inStep returns programs for two CPUs that both send a packet at the same virtual
// time, repeatedly. Between two times any bucket drains. A CPU that waits too long for
// the other one skips a time. done returns the number of times with at least one
// packet. Unless the slower CPU catches up, it skips the times that the other one has skipped.
func inStep(t *testing.T, next *ebpf.Program, gap uint, catchUp bool) (programs [2]*ebpf.Program, done func() uint64) {
	t.Helper()
	const apart = 64 // bytes: two cache lines
	ahead := int32(1)
	if catchUp {
		ahead = math.MaxInt32
	}
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
			asm.Mov.Imm(asm.R0, -1).WithSymbol("skip"),
			asm.Return(),
			asm.Sub.Reg(asm.R1, asm.R9).WithSymbol("send"),
			asm.JGT.Imm(asm.R1, ahead, "skip"),
			asm.LSh.Imm(asm.R9, int32(gap)),
			asm.StoreMem(asm.R6, 152, asm.R9, asm.DWord), // tstamp
		)
	}
	return programs, func() uint64 {
		value := make([]byte, 2*apart)
		testenv.Must(t, rounds.Lookup(uint32(0), &value))
		return min(binary.NativeEndian.Uint64(value), binary.NativeEndian.Uint64(value[apart:]))
	}
}

// A CPU never sees a charge with an older tick, by which the bucket would be empty:
// of two packets at the same time, exactly one conforms.
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
				if idle := r.set.Store.Meter(e).Idle; idle >= 1<<(gap-model.TickBits) {
					t.Fatalf("buckets are empty only after %d ticks", idle)
				}
				programs, done := inStep(t, r.program(), gap, true)
				// Until the CPUs have met often enough.
				for r.set.Store.Counters(e.ID).ExcessPackets < 50_000 {
					onEachCPU(t, func(cpu int) error {
						_, err := programs[cpu].Run(&ebpf.RunOptions{Data: frame, Repeat: 50_000})
						return err
					})
					if c := r.set.Store.Counters(e.ID); c.PassedPackets != done() {
						t.Fatalf("%d packets passed at %d times, want one at each", c.PassedPackets, done())
					}
				}
			})
		}
	}
}

// disturbed sends n times m packets while another CPU changes a rule or pool in memory all the time, as many CPUs do in a flood.
func (r *rig) disturbed(e maps.Entry, change func(*bpf.AbiRule), frame []byte) {
	r.Helper()
	m, p := r.set.Store.Replacements()[bpf.ShapectlMapRules], r.program()
	memory, err := unix.Mmap(m.FD(), 0, int(m.ValueSize()*m.MaxEntries()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	testenv.Must(r, err)
	rule, over := (*bpf.AbiRule)(unsafe.Pointer(&memory[e.ID*m.ValueSize()])), make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
			}
			for range 1000 {
				change(rule)
			}
		}
	})
	for range testenv.Rounds(r, 50) {
		if _, err = p.Run(&ebpf.RunOptions{Data: frame, Repeat: 10_000}); err != nil {
			break
		}
	}
	close(over)
	done.Wait()
	testenv.Must(r, errors.Join(err, unix.Munmap(memory)))
}

// In a flood of excess packets on many CPUs, each packet is excess, whether or not its penalty could be written.
func TestPenaltyInAFlood(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 1}, live())
	e := r.put(policy.Rule{
		Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 3000, Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Second},
	}, 0)
	frame := toHost(1, 1000)
	for range 4 {
		send(t, r.program(), frame, meta{})
	}
	before := r.set.Store.Counters(e.ID)
	r.disturbed(e, func(rule *bpf.AbiRule) { rule.Shared.Tat ^= 2 }, frame)
	if c := since(before, r.set.Store.Counters(e.ID)); c.PassedPackets != 0 || c.ContendedPackets != 0 || c.DroppedPackets == 0 {
		t.Errorf("counted %+v, want dropped packets alone", c)
	}
}

// After so long that the clock has wrapped, two CPUs send a packet at the same time to an empty bucket with room for both. None
// of them takes the old charge for one in the future, by the tick of the other one.
func TestWrappedBucketOnTwoCPUs(t *testing.T) {
	const gap = 38 // 2^gap ns are three quarters of the clock's period at this rate
	frame := toHost(1, 1000)
	limit := policy.Rule{Rate: 400_000_000_000, Capacity: 3000}
	for name, rules := range map[string][]policy.Rule{
		"shared": {limit}, "host": {{Rate: limit.Rate, Capacity: limit.Capacity, Each: policy.Each{Kind: policy.EachHost}}},
		"pool": {{Rate: policy.Unlimited, Within: "up"}, pool("up", limit)},
	} {
		t.Run(name, func(t *testing.T) {
			f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 4, Buckets: 4, Labels: 16, Pools: len(rules) > 1}, egress())}
			for _, r := range slices.Backward(rules) {
				if !r.Pool {
					r.Prefix, r.Fail = prefix("10.0.0.0/8"), policy.Closed
				}
				f.putIn(r, 0)
			}
			programs, _ := inStep(t, f.program(), gap, false)
			for range 3 {
				onEachCPU(t, func(cpu int) error {
					_, err := programs[cpu].Run(&ebpf.RunOptions{Data: frame, Repeat: 50_000})
					return err
				})
			}
			if c := f.set.Store.Counters(f.rules[0].entry.ID); c.DroppedPackets != 0 || c.PassedPackets == 0 {
				t.Errorf("%d packets were dropped, and %d passed", c.DroppedPackets, c.PassedPackets)
			}
		})
	}
}

// Two CPUs that meet a new key at the same time allocate one slot to it. The key is the
// time, so both meet each new key together. In a small table most lines are full, so
// keys get slots of their second lines, and buckets move.
func TestNewKeyOnTwoCPUs(t *testing.T) {
	frame := ether(typeIPv4, ip4{proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	size := uint64(len(frame))
	for i, buckets := range []uint32{1 << 18, 1 << 18, 1 << 16, 1 << 16} {
		algorithm := algorithms[i%2]
		t.Run(fmt.Sprintf("%v/%d buckets", algorithm, buckets), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: buckets}, live())
			// At this rate no bucket drains, and each has room for one packet.
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
				_, err := p.Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(testenv.Rounds(t, 300_000))})
				return err
			})
			r.slotsAreSound()
			hosts := uint64(len(r.bucketsOf(e, maps.Now())))
			if c := r.counters()[e.ID]; c.PassedPackets > hosts+1 { // one through the spill bucket
				t.Errorf("%d packets passed for %d hosts, want one each", c.PassedPackets, hosts)
			}
			if hosts < 1000 {
				t.Errorf("only %d hosts have a bucket", hosts)
			}
		})
	}
}

// Slots are reallocated with each packet. The traffic of each key is bounded by its
// bucket and the spill bucket.
func TestSlotReallocationIsFair(t *testing.T) {
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
					for i := range testenv.Rounds(t, 12_000) {
						// In bursts, so that the buckets of other keys drain meanwhile.
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
				one := rule.Capacity + leaked(rule.Rate, took) // through one bucket
				total := uint64(0)
				for key := range passed {
					n := passed[key].Load()
					total += n
					if n > 2*one {
						t.Errorf("%d bytes of key %d passed, its bucket and the spill bucket allow %d", n, key, 2*one)
					}
				}
				if bound := uint64(min(keys, 4)+1) * one; total > bound {
					t.Errorf("%d bytes passed, the buckets allow %d", total, bound)
				}
				r.slotsAreSound()
			})
		}
	}
}

// A flood of new flows takes no bucket from a flow with a level. All of it passes no
// more than the empty slots and the spill bucket allow.
func TestFlood(t *testing.T) {
	const buckets = 1 << 12
	for _, algorithm := range algorithms {
		t.Run(fmt.Sprint(algorithm), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1, Buckets: buckets}, live())
			const size = 1000
			// At this rate no bucket drains during the test.
			rule := policy.Rule{
				Prefix: prefix("10.0.0.0/8"), Rate: 80, Capacity: 4 * size,
				Algorithm: algorithm, Each: policy.Each{Kind: policy.EachFlow}, Fail: policy.Closed,
			}
			e := r.put(rule, 0)
			busy := ether(typeIPv4, ip4{src: "198.51.100.1", proto: protoUDP}.with(udpHeader(1000, 53), zeros(958)))
			flow := maps.Flow{Src: addr("198.51.100.1"), Dst: addr(far4), Proto: protoUDP, SrcPort: 1000, DstPort: 53}
			p, first := r.program(), maps.Now()
			send(t, p, busy, meta{}) // gets its bucket before the flood
			mine := uint64(size)
			const flows = 1 << 17
			flood := randomFlow(t, p, flows)
			var over atomic.Bool
			onEachCPU(t, func(cpu int) error {
				if cpu == 0 {
					defer over.Store(true)
					_, err := flood.Run(&ebpf.RunOptions{Data: busy, Repeat: flows})
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
				t.Errorf("%d bytes of the busy flow passed, want at most %d", mine, bound)
			}
			if got := model.Bytes(r.set.Store.State(e, policy.MatchDst, flow, now).Level) + leaked(rule.Rate, took); got < mine {
				t.Errorf("the level of the busy flow is %d bytes less than it sent", mine-got)
			}
			held, used := uint64(0), 0
			for _, b := range r.bucketsOf(e, now) {
				held += b.LevelBytes
				used++
			}
			if used > buckets || used < buckets*9/10 {
				t.Errorf("%d flows have a bucket, want nearly all of %d", used, buckets)
			}
			spill := model.Bytes(r.set.Store.SharedLevel(e, now))
			if spill > rule.Capacity || spill+size <= rule.Capacity {
				t.Errorf("the level of the spill bucket is %d bytes, want full: %d", spill, rule.Capacity)
			}
			if c, bound := r.counters()[e.ID], held+rule.Capacity+(buckets+1)*leaked(rule.Rate, took); c.PassedBytes > bound {
				t.Errorf("%d bytes passed, %d of them through buckets of flows: the rest exceeds the spill bucket", c.PassedBytes, held)
			}
			r.slotsAreSound()
			if !slices.ContainsFunc(r.bucketsOf(e, now), func(b maps.Bucket) bool { return b.Flow == flow }) {
				t.Error("the busy flow has lost its bucket")
			}
		})
	}
}

// The following tests run in virtual time, which is constant or known for each packet.
// So the expected bytes are exact, whatever the CPUs do.

// crowd is a number of goroutines that exceeds the number of CPUs.
const crowd = 8

// inCrowd runs work in crowd goroutines, each on a separate thread while in the kernel.
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

// levels returns the level of each bucket of a rule's keys, their sum, and the level of its shared bucket, in units.
func (r *rig) levels(e maps.Entry, now uint64) (keys map[maps.Bucket]uint64, sum, shared uint64) {
	keys = map[maps.Bucket]uint64{}
	for _, b := range r.bucketsOf(e, now) {
		units := r.set.Store.State(e, policy.MatchDst, b.Flow, now).Level
		if b.Subnet.IsValid() {
			units = r.set.Store.State(e, policy.MatchDst, maps.Flow{Dst: b.Subnet.Addr()}, now).Level
		}
		b.LevelBytes = 0
		keys[b] = units
		sum += units
	}
	return keys, sum, r.set.Store.SharedLevel(e, now)
}

// eaches are all bucket scopes.
var eaches = []policy.Each{{Kind: policy.EachAll}, {Kind: policy.EachHost}, {Kind: policy.EachSubnet, Bits: 31}, {Kind: policy.EachFlow}}

// toHost returns a packet of a size to the nth host of 10.0.0.0/8, with a port that depends on n.
func toHost(n, size int) []byte {
	to := netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	frame := ether(typeIPv4, ip4{dst: to.String(), proto: protoUDP}.with(udpHeader(uint16(n), 53)))
	return append(frame, zeros(size-len(frame))...)
}

// While time stands still, a bucket admits exactly its capacity, and each byte that
// passes is in exactly one bucket. That includes keys that all CPUs meet at the same
// time, and buckets that move during a charge because the table is full.
func TestEveryByteIsChargedOnce(t *testing.T) {
	const size, holds, now = 100, 3, uint64(1e12)
	for _, algorithm := range algorithms {
		for i, each := range append(eaches, eaches[1:]...) {
			keys, buckets := testenv.Rounds(t, 1000), uint32(1<<17)
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
				levels, sum, shared := r.levels(e, now)
				if got, want := passed.Load()*size<<model.UnitBits, sum+shared; got != want {
					t.Errorf("%d bytes passed, the levels are %d", passed.Load()*size, want>>model.UnitBits)
				}
				full := uint64(holds * size << model.UnitBits)
				if shared != 0 && shared > full || each.Kind == policy.EachAll && shared != full {
					t.Errorf("the level of the shared bucket is %d units, full is %d", shared, full)
				}
				for b, units := range levels {
					if units != full {
						t.Errorf("the level of %+v is %d units, full is %d", b, units, full)
					}
				}
				// A key that found no slot uses the spill bucket.
				if each.Kind != policy.EachAll && len(levels) != keys && shared == 0 {
					t.Errorf("%d keys have a bucket, of %d", len(levels), keys)
				}
				r.slotsAreSound()
			})
		}
	}
}

// The window bound with CPU clocks that differ by up to a millisecond, over every
// window of all packets sorted by time.
func TestSkewedClocks(t *testing.T) {
	const size, keys = 1000, 3
	for _, algorithm := range algorithms {
		for _, each := range eaches {
			for _, rate := range []policy.Rate{10_000_000, 20_000_000_000} {
				t.Run(fmt.Sprintf("%v/%v/%v", algorithm, each, rate), func(t *testing.T) {
					r := newRig(t, maps.Size{Rules: 1, Buckets: 1 << 12}, egress())
					// From one tick into the next, and not beyond: unlike a program, a test may be
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
						for i := range 1000 {
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
					if each.Kind != policy.EachAll && r.set.Store.SharedLevel(e, start) > 0 { // as of a time before all packets
						buckets = 2 // that of the key, and the spill bucket for packets that found it contended
					}
					var byKey [keys][]packet
					for _, trace := range traces {
						for key, packets := range trace {
							if each.Kind == policy.EachAll {
								key = 0
							}
							byKey[key] = append(byKey[key], packets...)
						}
					}
					for key, packets := range byKey {
						slices.SortFunc(packets, func(a, b packet) int { return cmp.Compare(a.now, b.now) })
						var w testenv.Windows
						for i, one := range packets {
							if i > 0 {
								w.Leak(uint64(rate)*uint64(buckets), int64(one.now-packets[i-1].now))
							}
							// Two units for each reading of the clock are less than four millionths of a byte.
							if most, _ := w.Packet(one.passed); most > buckets*int64(rule.Capacity*1e6+4) {
								t.Fatalf("key %d: %d millionths of a byte more passed than the rate allows, capacity %d",
									key, most, rule.Capacity)
							}
						}
					}
				})
			}
		}
	}
}

// A CPU that was stopped after it had read the time, for however long, finds a full bucket full, and leaves it so.
func TestStalledCPU(t *testing.T) {
	const now = uint64(1e12)
	frame := toHost(1, 1000)
	limit := policy.Rule{Rate: 80_000, Capacity: 30_000}
	for name, rules := range map[string][]policy.Rule{
		"shared": {limit}, "leaky": {{Rate: limit.Rate, Capacity: limit.Capacity, Algorithm: policy.Leaky}},
		"host": {{Rate: limit.Rate, Capacity: limit.Capacity, Each: policy.Each{Kind: policy.EachHost}}},
		"pool": {{Rate: policy.Unlimited, Within: "up"}, pool("up", limit)}, "pool above": {{Rate: policy.Unlimited, Within: "in"}, pool("in", policy.Rule{Rate: 1e9, Capacity: 1e6, Within: "up"}), pool("up", limit)},
	} {
		t.Run(name, func(t *testing.T) {
			f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 4, Buckets: 4, Labels: 16, Pools: len(rules) > 1}, egress())}
			for _, r := range slices.Backward(rules) {
				if !r.Pool {
					r.Prefix = prefix("10.0.0.0/8")
				}
				f.putIn(r, now-1e11)
			}
			passed := 0
			for _, back := range []uint64{0, 1e9, 3e9, 4e9, 10e9, 60e9, 0} {
				for range 40 {
					if verdict, _ := send(t, f.program(), frame, meta{now: now - back}); verdict == next {
						passed++
					}
				}
			}
			if passed != 30 {
				t.Errorf("%d packets passed, want 30", passed)
			}
		})
	}
}

// Nor does it restart a fair clock: a host that is far beyond its share stays there.
func TestStalledCPUInShares(t *testing.T) {
	const now = uint64(1e12)
	f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 4, Buckets: 4, Labels: 16, Shares: 2, Pools: true}, egress())}
	f.putIn(pool("up", policy.Rule{Rate: 8_000_000, Capacity: 1e6, Share: policy.Share{Kind: policy.ShareHost}}), now-1e11)
	f.putIn(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "up"}, now-1e11)
	passes := func(at uint64) bool {
		verdict, _ := send(t, f.program(), toHost(1, 1000), meta{now: at})
		return verdict == next
	}
	sent := 0
	for passes(now) {
		sent++
	}
	if passes(now-3e9) || passes(now) || sent > 900 {
		t.Errorf("after %d packets, a host that was beyond its share is within it", sent)
	}
}

// Changes of a rule during traffic preserve every level.
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
				changes := testenv.Rounds(t, 60) // each waits for packets
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
								runtime.Gosched() // so that each capacity is used
							}
						}
						for sent.Load() < large/size {
							runtime.Gosched() // so that the bucket gets full
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
					if passed.Load() != small { // what is added comes at the rate, and no time passes
						t.Errorf("%d bytes passed, want %d", passed.Load(), small)
					}
					return
				}
				total := uint64(0)
				for _, each := range eaches {
					rule.Each = each
					_, sum, shared := r.levels(r.put(rule, now), now)
					total += sum
					if each.Kind == policy.EachAll {
						total += shared
					}
				}
				if passed.Load()<<model.UnitBits != total {
					t.Errorf("%d bytes passed, the levels are %d units, which are %d bytes", passed.Load(), total, total>>model.UnitBits)
				}
				if name == "rate" && passed.Load() != small {
					t.Errorf("%d bytes passed, want the capacity %d", passed.Load(), small)
				}
				r.slotsAreSound()
			})
		}
	}
}

// The same with the kernel's clock: a rule that changes all the time, even by one bit
// per second, passes no more than a rule that does not.
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
						for range testenv.Rounds(t, 10) {
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
					t.Errorf("%d bytes passed in %d ns, want at most %d", c.PassedBytes, took, bound)
				}
			})
		}
	}
}

// A change meets a bucket during a charge, again and again: no charge is lost.
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
					for range 25 {
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
			_, sum, shared := r.levels(e, now)
			if c := r.counters()[e.ID]; c.PassedBytes<<model.UnitBits != sum+shared || c.ExcessPackets > 0 {
				t.Errorf("%d bytes passed, the levels are %d units, which are %d bytes", c.PassedBytes, sum+shared, (sum+shared)>>model.UnitBits)
			}
		})
	}
}

// Buckets move to make room for new keys while packets charge them, again and again: no
// charge is lost or counted twice.
func TestMovesKeepEveryCharge(t *testing.T) {
	const host = 14 + 18 // two bytes of the destination
	// random sends each packet to a random host of a /16.
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
			for range testenv.Rounds(t, 100) {
				now += 1000 * uint64(time.Second) // all buckets are empty
				before := r.counters()[e.ID]
				onEachCPU(t, func(cpu int) error {
					_, err := programs[cpu].Run(&ebpf.RunOptions{Data: frames[cpu], Context: meta{now: now}.context(), Repeat: 2000})
					return err
				})
				_, sum, shared := r.levels(e, now)
				if c := since(before, r.counters()[e.ID]); c.PassedBytes<<model.UnitBits != sum+shared || c.ExcessPackets > 0 {
					t.Fatalf("%d bytes passed, the levels are %d units, which are %d bytes", c.PassedBytes, sum+shared, (sum+shared)>>model.UnitBits)
				}
				r.slotsAreSound()
			}
		})
	}
}

// No packet sees half of a change. One rule conforms always, with an overhead; the other
// has a full bucket and passes excess. Only a mix of both would drop a packet, or count
// a conforming packet without the overhead.
func TestChangeIsAtomicForPackets(t *testing.T) {
	const size, more, now = 100, 200, uint64(1e12)
	for _, algorithm := range algorithms {
		t.Run(fmt.Sprint(algorithm), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 1}, egress())
			lenient := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 1_000_000, Capacity: 2000, Algorithm: algorithm, Excess: policy.Pass}
			strict := lenient
			strict.Excess, strict.Framing.Overhead = policy.Drop, more
			e := r.put(lenient, now)
			p, run := r.program(), &ebpf.RunOptions{Data: toHost(1, size), Context: meta{now: now}.context(), Repeat: 10_000}
			_, err := p.Run(run) // fills the bucket of both
			testenv.Must(t, err)
			before := r.counters()[e.ID]
			// On a busy machine the packets' CPU may be preempted whenever one of the two rules is in force.
			bothSeen := func() bool {
				c := since(before, r.counters()[e.ID])
				return c.DroppedPackets > 0 && c.PassedPackets > 10_000
			}
			var begun, over, failed atomic.Bool
			var runs atomic.Int64
			onEachCPU(t, func(cpu int) error {
				if cpu == 0 {
					defer over.Store(true)
					for !begun.Load() {
						runtime.Gosched()
					}
					changes := testenv.Rounds(t, 30)
					for i := 0; i < changes || i < 100*changes && !bothSeen(); i++ {
						r.at(now)
						if _, err := r.set.Put([]policy.Rule{strict, lenient}[i%2]); err != nil {
							return err
						}
						// Then the packets get the time that they lack: the second run from here began after the change.
						for n := runs.Load(); i >= changes && runs.Load() < n+2 && !failed.Load(); {
							runtime.Gosched()
						}
					}
					return nil
				}
				for !over.Load() {
					_, err := p.Run(run)
					failed.Store(err != nil)
					begun.Store(true)
					if err != nil {
						return err
					}
					runs.Add(1)
				}
				return nil
			})
			c := since(before, r.counters()[e.ID])
			if c.DroppedBytes != (size+more)*c.DroppedPackets || c.PassedBytes != size*c.PassedPackets {
				t.Errorf("counted %+v: want %d bytes per packet that passed, and %d per packet that was dropped", c, size, size+more)
			}
			if c.PassedPackets == 0 || c.DroppedPackets == 0 {
				t.Errorf("counted %+v: one of the rules matched no packet", c)
			}
		})
	}
}
