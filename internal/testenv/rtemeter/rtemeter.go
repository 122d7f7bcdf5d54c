// Package rtemeter runs random traces through DPDK's three-colour meters (rte_meter.h), in virtual time. Only tests
// import it.
//
// DPDK decides as the RFCs do. It differs from them in time: tokens come once in a period, and a rate is up to 1 % higher
// than configured, because a period is cut off to whole cycles.
package rtemeter

import (
	"bufio"
	_ "embed"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

//go:embed testdata/rte_meter.c
var source string

// Meters is a process that runs DPDK's meters.
type Meters struct {
	tb  testing.TB
	in  *bufio.Writer
	out *bufio.Reader
}

// Start compiles the program and starts it. It skips the test without DPDK or a compiler.
func Start(tb testing.TB) *Meters {
	tb.Helper()
	flags, err := exec.Command("pkg-config", "--cflags", "libdpdk").Output()
	if _, gcc := exec.LookPath("gcc"); err != nil || gcc != nil {
		testenv.Skip(tb, "needs Debian's packages gcc, libc6-dev, pkg-config and libdpdk-dev")
	}
	program := filepath.Join(tb.TempDir(), "rte_meter")
	// Not with librte_eal, whose rte_get_tsc_hz the program replaces.
	args := append(strings.Fields(string(flags)), "-O2", "-Wall", "-Wextra", "-Werror", "-o", program,
		"-x", "c", "-", "-x", "none", "-l:librte_meter.a", "-lm")
	compile := exec.Command("gcc", args...)
	compile.Stdin = strings.NewReader(source)
	if said, err := compile.CombinedOutput(); err != nil {
		tb.Fatalf("compile testdata/rte_meter.c: %v\n%s", err, said)
	}
	cmd, said := exec.Command(program), new(strings.Builder)
	cmd.Stderr = said
	in, err := cmd.StdinPipe()
	testenv.Must(tb, err)
	out, err := cmd.StdoutPipe()
	testenv.Must(tb, err)
	testenv.Must(tb, cmd.Start())
	tb.Cleanup(func() {
		in.Close() // which ends it
		if err := cmd.Wait(); err != nil {
			tb.Errorf("DPDK's meters: %v: %s", err, said)
		}
	})
	return &Meters{tb: tb, in: bufio.NewWriter(in), out: bufio.NewReader(out)}
}

// A Trace is packets for one rule, and the colours that DPDK gives them. The rule has no prefix and no colour map, and may
// have burst sizes from 64 bytes on.
type Trace struct {
	Rule    policy.Rule
	Packets []Packet
}

// A Packet is a packet of a trace. No bucket has a part of a byte when it arrives.
type Packet struct {
	Time       uint64 // ns since the buckets were full
	Bytes      uint64 // 64 to 65535
	In, Colour policy.Colour
}

// params are those of a meter, in DPDK's units.
type params struct {
	kind       policy.Algorithm
	aware      bool
	hz         uint64 // of its clock
	cir, rate  uint64 // bytes per second
	cbs, burst uint64 // bytes
}

// Trace returns a random trace. Its rates are some for which DPDK's periods are exact, and packets arrive when all periods
// end.
func (m *Meters) Trace(r *rand.Rand, algorithm policy.Algorithm, aware bool, packets int) Trace {
	m.tb.Helper()
	p, cycles := m.draw(r, algorithm, aware)
	whole := gcd(p.hz, 1e9)
	step := cycles / (p.hz / whole) * (1e9 / whole) // ns
	// With a grain, buckets often have exactly the tokens that a packet needs.
	grain := []uint64{1, 64}[r.IntN(2)]
	p.cbs, p.burst = logarithmic(r, 64, 1<<22)/grain*grain, logarithmic(r, 64, 1<<22)/grain*grain
	largest := []uint64{1514, 65535}[r.IntN(2)]
	offers := float64(max(p.cir, p.rate)) * math.Exp2(2*r.Float64()-1) // bytes per second
	t := Trace{Rule: p.rule()}
	var at uint64 // steps
	for range packets {
		k := Packet{Bytes: max(logarithmic(r, 64, largest)/grain*grain, 64), In: policy.Colour(max(r.IntN(5)-2, 0))}
		if r.IntN(3) > 0 {
			gap := r.ExpFloat64() * 1.5 * float64(k.Bytes) / offers * 1e9 / float64(step*grain)
			if r.IntN(50) == 0 {
				gap *= 100
			}
			at += uint64(gap+r.Float64()) * grain
		}
		k.Time = at * step
		t.Packets = append(t.Packets, k)
	}
	_, colours := m.run(p, cycles, step, t.Packets)
	for i := range t.Packets {
		t.Packets[i].Colour = policy.Colour(colours[i] - '0')
	}
	return t
}

// draw returns rates for which DPDK is exact, and the number of cycles after which all of its periods end, in whole ns.
func (m *Meters) draw(r *rand.Rand, algorithm policy.Algorithm, aware bool) (p params, cycles uint64) {
	m.tb.Helper()
	rate := func() uint64 { // 8 kbit/s to 400 Gbit/s
		digits := []uint64{1, 2, 3, 4, 5, 7, 8, 12, 25, 64}[r.IntN(10)]
		return min(digits*uint64(math.Pow10(3+r.IntN(8))), 50e9)
	}
	for {
		p = params{kind: algorithm, aware: aware, cbs: 1, burst: 1, cir: rate(),
			hz: []uint64{1e9, 1.5e9, 2e9, 2.1e9, 2.4e9, 3e9, 3.7e9}[r.IntN(7)]}
		p.rate = p.cir
		switch {
		case algorithm == policy.SRTCM:
		case r.IntN(2) == 0:
			p.rate = min(p.cir*[]uint64{1, 2, 3, 5, 10, 100}[r.IntN(6)], 50e9)
		default:
			p.rate = rate()
		}
		if algorithm == policy.TRTCM {
			p.cir, p.rate = min(p.cir, p.rate), max(p.cir, p.rate)
		}
		periods, _ := m.run(p, 0, 1, nil)
		if periods[0]*p.cir == periods[1]*p.hz && periods[2]*p.rate == periods[3]*p.hz {
			return p, lcm(lcm(periods[0], periods[2]), p.hz/gcd(p.hz, 1e9))
		}
	}
}

// run returns the period of the first rate in cycles, its bytes in a period, and the same of the second rate; and the
// colours of packets, as digits. There are so many cycles in each step of ns.
func (m *Meters) run(p params, cycles, step uint64, packets []Packet) (periods [4]uint64, colours string) {
	m.tb.Helper()
	aware := 0
	if p.aware {
		aware = 1
	}
	fmt.Fprintln(m.in, p.kind, aware, p.hz, p.cir, p.cbs, p.rate, p.burst, len(packets))
	for _, k := range packets {
		fmt.Fprintln(m.in, k.Time/step*cycles, k.Bytes, uint8(k.In))
	}
	testenv.Must(m.tb, m.in.Flush())
	if _, err := fmt.Fscanln(m.out, &periods[0], &periods[1], &periods[2], &periods[3]); err != nil {
		m.tb.Fatalf("read what DPDK says of %+v: %v", p, err)
	}
	colours, err := m.out.ReadString('\n')
	testenv.Must(m.tb, err)
	if len(colours) != len(packets)+1 {
		m.tb.Fatalf("DPDK has %d colours for %d packets", len(colours)-1, len(packets))
	}
	return periods, colours
}

func (p params) rule() policy.Rule {
	r := policy.Rule{Algorithm: p.kind, Rate: policy.Rate(8 * p.cir), Capacity: p.cbs, Colours: policy.Colours{Aware: p.aware}}
	switch p.kind {
	case policy.SRTCM:
		r.Colours.EBS = p.burst
	case policy.TRTCM:
		r.Colours.PIR, r.Colours.PBS = policy.Rate(8*p.rate), p.burst
	case policy.RFC4115:
		r.Colours.EIR, r.Colours.EBS = policy.Rate(8*p.rate), p.burst
	}
	return r
}

// logarithmic returns a number from low to high. All orders of magnitude are equally likely.
func logarithmic(r *rand.Rand, low, high uint64) uint64 {
	return uint64(float64(low) * math.Pow(float64(high)/float64(low), r.Float64()))
}

func lcm(a, b uint64) uint64 { return a / gcd(a, b) * b }

func gcd(a, b uint64) uint64 {
	for b > 0 {
		a, b = b, a%b
	}
	return a
}
