package bpf_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// BenchmarkCost compares what a packet costs in a program that only reads the
// clock (ratio 1) with what it costs in ours. The two take turns within each
// case, so that a noisy machine is noisy for both; x-clock is the median of
// the ratios, and low and high the quartiles around it.
func BenchmarkCost(b *testing.B) {
	clock := assemble(b, "clock", clockOnly)
	udp4 := udp(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.0.0.1"), 22)
	udp6 := udp(netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8:1::1"), 22)
	const flows = 1 << 20

	rule := func(prefix string, each policy.EachKind, rate policy.Rate) policy.Rule {
		return policy.Rule{
			Prefix: netip.MustParsePrefix(prefix), Rate: rate, Capacity: 1 << 20,
			Each: policy.Each{Kind: each},
		}
	}
	const never, always = policy.MaxRate, policy.MinRate
	cases := []struct {
		name   string
		packet []byte
		rule   policy.Rule
		random bool
	}{
		{"no-rule", udp4, rule("172.16.0.0/12", policy.EachAll, never), false},
		{"all", udp4, rule("10.0.0.0/8", policy.EachAll, never), false},
		{"all-excess", udp4, rule("10.0.0.0/8", policy.EachAll, always), false},
		{"all-ipv6", udp6, rule("2001:db8:1::/48", policy.EachAll, never), false},
		{"host", udp4, rule("10.0.0.0/8", policy.EachHost, never), false},
		{"flow", udp4, rule("10.0.0.0/8", policy.EachFlow, never), false},
		{"flow-ipv6", udp6, rule("2001:db8:1::/48", policy.EachFlow, never), false},
		{"flow-random-1M", udp4, rule("10.0.0.0/8", policy.EachFlow, never), true},
		{"flow-random-1M-live", udp4, rule("10.0.0.0/8", policy.EachFlow, 100_000), true},
	}
	for _, c := range cases {
		for _, algorithm := range []policy.Algorithm{policy.GCRA, policy.Leaky} {
			b.Run(fmt.Sprintf("%s/%s", c.name, algorithm), func(b *testing.B) {
				set, err := maps.New(maps.Size{Rules: 1024, Buckets: 4 * flows}, bpf.AbiHook{L2Bytes: 14})
				if err != nil {
					b.Fatal(err)
				}
				defer set.Close()
				program, err := loader.Load(algorithm, set)
				if err != nil {
					b.Fatal(err)
				}
				defer program.Close()
				c.rule.Algorithm = algorithm
				if _, err := set.Put(c.rule, maps.Now); err != nil {
					b.Fatal(err)
				}
				run, base := program, clock
				repeat := 100_000
				if c.random {
					run, base = randomFlow(b, program, flows), randomFlow(b, clock, flows)
					repeat = flows
				}
				nanoseconds(b, run, c.packet, 4*repeat) // warm up
				var ratios, costs []float64
				for b.Loop() {
					for range 11 {
						reference := nanoseconds(b, clock, c.packet, repeat)
						cost := nanoseconds(b, run, c.packet, repeat)
						if c.random {
							// Choosing a flow is not the program's cost.
							cost -= nanoseconds(b, base, c.packet, repeat) - reference
						}
						ratios = append(ratios, cost/reference)
						costs = append(costs, cost)
					}
				}
				slices.Sort(ratios)
				slices.Sort(costs)
				n := len(ratios)
				b.ReportMetric(costs[n/2], "ns/packet")
				b.ReportMetric(ratios[n/2], "x-clock")
				b.ReportMetric(ratios[n/4], "low")
				b.ReportMetric(ratios[3*n/4], "high")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

var clockOnly = asm.Instructions{
	asm.FnKtimeGetNs.Call(),
	asm.Mov.Imm(asm.R0, -1),
	asm.Return(),
}

// nanoseconds is what one run of a program takes, of so many in a row.
func nanoseconds(b *testing.B, p *ebpf.Program, packet []byte, repeat int) float64 {
	_, took, err := p.Benchmark(packet, repeat, b.StopTimer)
	if err != nil {
		b.Fatal(err)
	}
	b.StartTimer()
	return float64(took) / float64(time.Nanosecond)
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

// randomFlow is a program that gives each packet one of so many source
// addresses and hands it on: a test run itself only repeats one packet.
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

// udp is a frame with so many bytes of payload.
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
