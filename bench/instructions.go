package main

import (
	"context"
	"fmt"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite instructions runs this very program in a guest whose clock counts
// the instructions of its one CPU: what a packet takes there is free of noise.
// It says nothing of caches; traffic does.

// instructionSubjects are what is measured, in the order in which it is reported.
func instructionSubjects() []competitor {
	return []competitor{
		emptyTCX, clockTCX,
		shapectl(policy.GCRA, policy.EachAll, loader.TCX),
		shapectl(policy.GCRA, policy.EachHost, loader.TCX),
		shapectl(policy.GCRA, policy.EachFlow, loader.TCX),
		shapectl(policy.Leaky, policy.EachAll, loader.TCX),
		shapectl(policy.Leaky, policy.EachHost, loader.TCX),
		shapectl(policy.Leaky, policy.EachFlow, loader.TCX),
		shapectl(policy.GCRA, policy.EachAll, loader.Clsact),
		police, tbf, htb, cake, nftOneLimit, nftSet,
		hashlimit("iptables-legacy", ""), hashlimit("iptables-legacy", "dstip"),
	}
}

// freely is a limit that never bites.
var freely = limit{rate: 10e9, capacity: 10 << 20}

// guestInstructions measures in the guest.
func guestInstructions(ctx context.Context, t guestTask, report func(Result) error) error {
	// Nothing but the sender is to use the CPU.
	debug.SetGCPercent(-1)
	release, err := pin()
	if err != nil {
		return err
	}
	defer release()
	m := &instructionCounter{ctx: ctx, guestTask: t, report: report}
	for _, family := range []netip.Addr{target, target6} {
		if err := m.family(family); err != nil {
			return err
		}
	}
	if !chosen(t.Only, "shapectl prefixes") {
		return nil
	}
	for _, s := range prefixSets {
		if err := m.prefixes(s); err != nil {
			return err
		}
	}
	return nil
}

// A prefixSet is how many rules there are, of how many lengths.
type prefixSet struct {
	column  string
	rules   int
	lengths []int
}

var prefixSets = []prefixSet{
	{"1 prefix", 1, []int{28}},
	{"100 prefixes", 100, []int{28}},
	{"1 000 of 4 lengths", 1000, []int{16, 20, 24, 28}},
	{"1 000 of 8 lengths", 1000, []int{14, 16, 18, 20, 22, 24, 26, 28}},
	{"10 000 prefixes", 10_000, []int{28}},
}

// prefixes measures many rules of ours, with packets to random addresses in their prefixes.
func (m *instructionCounter) prefixes(s prefixSet) error {
	prefixes := randomPrefixes(s.rules, s.lengths...)
	targets := randomTargets(prefixes, 1024)
	without, err := newLane(m.ctx, bare, limit{}, targets, settleTime, batch)
	if err != nil {
		return err
	}
	samples, err := m.measure(without)
	if err != nil {
		return err
	}
	m.bare, _, _ = summarize(samples)
	p, err := newLane(m.ctx, shapectlMany(prefixes), freely, targets, settleTime, batch)
	if err != nil {
		return err
	}
	return m.added(p, "Instructions added per packet, random addresses: "+s.column)
}

type instructionCounter struct {
	ctx context.Context
	guestTask
	report func(Result) error
	bare   float64
}

// batch is how many packets make a sample: enough for the ticks of the clock to even out.
const batch = 4000

// settleTime is what the kernel gets for what it has put off, before each figure.
const settleTime = 3 * time.Second

// family measures all subjects with packets to that address.
func (m *instructionCounter) family(to netip.Addr) error {
	family, passing, dropping := "IPv4", neverBite, mostDrop
	if to.Is6() {
		family = "IPv6"
		passing, dropping = strings.Replace(passing, ":", ", IPv6:", 1), strings.Replace(dropping, ":", ", IPv6:", 1)
	}
	without, err := newLane(m.ctx, bare, limit{}, []netip.Addr{to}, settleTime, batch)
	if err != nil {
		return err
	}
	samples, err := m.measure(without)
	if err != nil {
		return err
	}
	figure := newResult(bareCase+": "+family, noLimiter, unitInstructions, samples)
	m.bare = figure.Median
	if err := m.report(figure); err != nil {
		return err
	}
	for _, s := range instructionSubjects() {
		if reference := slices.Contains(references, s.name); !reference && !chosen(m.Only, s.name) || to.Is6() && !ours(s.name) {
			continue
		}
		if err := m.subject(s, to, passing, dropping); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// subject measures a limiter that never bites, and then one that lets a tenth through.
func (m *instructionCounter) subject(s competitor, to netip.Addr, passing, dropping string) error {
	p, err := newLane(m.ctx, s, freely, []netip.Addr{to}, settleTime, batch)
	if err != nil {
		return err
	}
	if err := m.added(p, passing); err != nil || slices.Contains(references, s.name) {
		return err
	}
	p, err = newDroppingLane(m.ctx, s, to, settleTime, 0.85*p.nanoseconds, batch, 0.05)
	if err != nil {
		return err
	}
	return m.added(p, dropping)
}

// added measures what a lane's limiter adds to a packet, and takes the lane away.
func (m *instructionCounter) added(p *lane, name string) error {
	samples, err := m.measure(p)
	if err != nil {
		return err
	}
	for i := range samples {
		samples[i] -= m.bare
	}
	r := newResult(name, p.name, unitInstructions, samples)
	r.Note = p.note
	return m.report(r)
}

// measure returns what a packet takes in a lane, in instructions, and takes the lane away.
func (m *instructionCounter) measure(p *lane) (samples []float64, err error) {
	defer p.Close()
	for range m.Rounds {
		ns, err := p.send(batch)
		if err != nil {
			return nil, err
		}
		samples = append(samples, ns) // the guest's nanosecond is an instruction
	}
	return samples, nil
}

// instructions runs this program in a guest, and reads its figures.
func instructions(ctx context.Context, o options) ([]Result, error) {
	rounds := 5
	if o.quick {
		rounds = 1
	}
	t := guestTask{Suite: "instructions", Only: o.only, Rounds: rounds}
	if o.quick && o.only == "" {
		t.Only = "shapectl gcra, each all"
	}
	return inGuest(ctx, o, t, "-i")
}
