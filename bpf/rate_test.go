package bpf_test

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The window bound of the specification, over every window of a trace, for the
// kernel's program. At most the capacity (or one larger packet) and rate * time
// pass. While excess is offered throughout, at least rate * time less the capacity
// and one packet pass. CPU clocks differ and rules change: then the rate is that of
// each moment, and the level that a smaller capacity cuts off may pass again.
func TestEveryWindow(t *testing.T) {
	seed := testenv.Seed(t)
	const packets = 1500
	r := matchSource(t)
	for i := range testenv.Rounds(t, 24) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r.TB = t
			roll := rand.New(rand.NewPCG(seed, uint64(i)))
			overload := i%2 == 0
			overhead := []int16{shrink, grow}[i/2%2]
			least, largest := sizes(overhead)
			largest = least + roll.Uint64N(largest-least)
			rule := func() policy.Rule {
				rule := policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: policy.Rate(8000 << roll.IntN(26)),
					Algorithm: algorithms[i/4%2], Each: policy.Each{Kind: scopes[i/8%3]},
					Framing: policy.Framing{Overhead: overhead},
				}
				rule.Rate += policy.Rate(roll.Uint64N(uint64(rule.Rate)))
				// A bucket that refused a packet must not be empty when the next one arrives.
				rule.Capacity = 2*largest + roll.Uint64N(1<<(10+roll.IntN(12)))
				if !overload {
					rule.Capacity = 1514 + roll.Uint64N(2*largest)
					if rule.Algorithm == policy.Leaky && roll.IntN(2) == 0 {
						rule.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(1 + roll.IntN(1e6))}
					}
				}
				return rule
			}
			clock := 1e9 + starts[roll.IntN(len(starts)-1)] // clock of the first CPU
			now, host := clock, addr("10.0.0.7")
			twin := newTwin(r, rule(), now)
			var w testenv.Windows
			grain, roomiest := int64(10), twin.rule.Capacity // millionths of a byte
			for p := range packets {
				if p%400 == 399 && i%3 > 0 {
					next := rule()
					w.Raise(int64(next.Capacity) - int64(twin.rule.Capacity))
					twin.change(next, now)
					grain, roomiest = grain+10, max(roomiest, next.Capacity)
				}
				n := least + roll.Uint64N(largest-least+1)
				before := twin.counts.PassedBytes
				twin.offer(host, now, n, false)
				passed := twin.counts.PassedBytes - before
				most, least := w.Packet(passed)
				if most > 1e6*int64(max(twin.rule.Capacity, n))+grain && passed > 0 {
					t.Fatalf("packet %d of %d bytes: %d millionths of a byte more passed than %v allows, capacity %d\n%+v",
						p, n, most, twin.rule.Rate, twin.rule.Capacity, twin.rule)
				}
				if overload && -least > 1e6*int64(roomiest+largest)+grain {
					t.Fatalf("packet %d of %d bytes: %d millionths of a byte less passed than %v allows, capacity %d\n%+v",
						p, n, -least, twin.rule.Rate, twin.rule.Capacity, twin.rule)
				}
				full := n * 8e9 / uint64(twin.rule.Rate) // ns in which this packet drains
				if overload {
					clock += roll.Uint64N(full/3 + 1)
				} else {
					clock += roll.Uint64N(3*full+1) * roll.Uint64N(2)
				}
				then := now
				now = clock
				if i%4 < 2 && !overload {
					now -= roll.Uint64N(3) * 500_000 // the clock of one of three CPUs
				}
				w.Leak(uint64(twin.rule.Rate), int64(now-then))
				grain += 1 + int64(float64(clock-then)/float64(1<<52)*1e6) // because rate_units is rounded up
			}
		})
	}
}

// Packets per step of time: at the highest rate, 40 bytes pass within a nanosecond.
const together = 16

// ticking is a program that advances the clock by ns before each group of packets.
func ticking(tb testing.TB, next *ebpf.Program, ns uint64) *ebpf.Program {
	const mark, tstamp = 8, 152
	return before(tb, "ticking", next,
		asm.LoadMem(asm.R2, asm.R6, mark, asm.Word),
		asm.Add.Imm(asm.R2, 1),
		asm.StoreMem(asm.R6, mark, asm.R2, asm.Word),
		asm.And.Imm(asm.R2, together-1),
		asm.JNE.Imm(asm.R2, 0, "on"),
		asm.LoadMem(asm.R2, asm.R6, tstamp, asm.DWord),
		asm.LoadImm(asm.R3, int64(ns), asm.DWord),
		asm.Add.Reg(asm.R2, asm.R3),
		asm.StoreMem(asm.R6, tstamp, asm.R2, asm.DWord),
	)
}

// After many packets of any size, the passed bytes match the rate, to one part
// in a million and to two units.
func TestLongRunRate(t *testing.T) {
	rates := []policy.Rate{8000, 64_001, 123_456_789, 10_000_000_000, 399_999_999_999, 400_000_000_000, policy.MaxRate}
	const repeat = uint64(1 << 18)
	r := matchSource(t)
	for i, rate := range rates {
		for j, n := range []uint64{40, 41, 1514, 65536, 512 << 10} {
			algorithm, each := algorithms[(i+j)%2], scopes[(i+j)%3]
			t.Run(fmt.Sprintf("%v-%v-%v-%d", rate, algorithm, policy.Each{Kind: each}, n), func(t *testing.T) {
				r.TB = t
				overhead := int16(shrink)
				if n > 60000 {
					overhead = grow
				}
				step := n * together * 8e9 / uint64(rate) * 2 / 3 // the offered load is 1.5 times the rate
				rule := policy.Rule{
					Prefix: prefix("10.0.0.0/8"), Rate: rate, Capacity: together * n, Algorithm: algorithm,
					Each: policy.Each{Kind: each}, Framing: policy.Framing{Overhead: overhead},
				}
				const start = uint64(987_654_321)
				host := addr("10.0.0.7")
				twin := newTwin(r, rule, start)
				for range together + 1 { // until the bucket is full
					twin.offer(host, start, n, false)
				}
				passedBefore, levelBefore := twin.counts.PassedBytes, twin.level(host, start)
				frame, m := sized(host, n, int(overhead), start)
				program := ticking(t, r.program(), step)
				_, err := program.Run(&ebpf.RunOptions{Data: frame, Context: m.context(), Repeat: uint32(repeat)})
				testenv.Must(t, err)
				elapsed := step * (repeat / together)
				c := r.counters()[twin.entry.ID]
				leaked := new(big.Rat).SetUint64(c.PassedBytes - passedBefore)
				level := twin.level(host, start+elapsed)
				leaked.Add(leaked, new(big.Rat).SetFrac64(int64(levelBefore)-int64(level), 1<<model.UnitBits))
				want := new(big.Rat).Mul(new(big.Rat).SetFrac64(int64(rate), 8e9), new(big.Rat).SetUint64(elapsed))
				allowed := new(big.Rat).Add(new(big.Rat).Quo(want, big.NewRat(1e6, 1)), big.NewRat(2, 1<<model.UnitBits))
				if off := new(big.Rat).Sub(leaked, want); off.Abs(off).Cmp(allowed) > 0 {
					t.Errorf("leaked %s bytes in %d ns, not %s", leaked.FloatString(6), elapsed, want.FloatString(6))
				}
				if total := c.SKBs(); total < repeat+together+1 { // a signal restarts a run, after some packets
					t.Errorf("%d packets ran, want at least %d", total, repeat+together+1)
				}
				if passed := c.PassedPackets / uint64(m.packets()); passed < repeat/2 {
					t.Errorf("only %d of %d packets passed: the sender is stuck", passed, repeat)
				}
			})
		}
	}
}
