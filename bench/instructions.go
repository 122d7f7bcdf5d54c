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

// The suite instructions measures in a guest whose clock counts the instructions of its only
// CPU: these figures have no noise. They do not include the effect of caches; traffic does.

// instructionSubjects are the subjects, in the order in which they are reported.
func instructionSubjects() []competitor {
	var coloured []competitor
	for _, a := range []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115} {
		for _, e := range []policy.EachKind{policy.EachAll, policy.EachHost} {
			coloured = append(coloured, shapectl(a, e, loader.TCX))
		}
	}
	return slices.Concat([]competitor{emptyTCX, clockTCX}, shapectlModes(), coloured, []competitor{
		shapectl(policy.GCRA, policy.EachAll, loader.Clsact),
		police, tbf, htb, cake, nftOneLimit, nftSet, hashlimitAll, hashlimitHost,
	})
}

// ample is a limit to which all packets conform.
var ample = limit{rate: 10e9, capacity: 10 << 20}

// settled is the warm-up of lanes here. Its packets also make a sample: enough to average the ticks of the clock.
var settled = warmUp{settle: 3 * time.Second, packets: 4000}

// An instructionCounter counts the instructions of packets.
type instructionCounter struct {
	options
	ctx  context.Context
	bare float64 // instructions of a packet without a limiter
}

// instructions measures in the guest.
func instructions(ctx context.Context, o options) error {
	if o.quick && o.only == "" {
		o.only = "shapectl gcra, each all"
	}
	// Only the sender may use the CPU.
	debug.SetGCPercent(-1)
	return onLastCPU(func() error {
		m := &instructionCounter{options: o, ctx: ctx}
		for _, family := range []netip.Addr{target, target6} {
			if err := m.family(family); err != nil {
				return err
			}
		}
		return nil
	})
}

// without measures packets without a limiter, for comparison.
func (m *instructionCounter) without(to netip.Addr) (samples []float64, err error) {
	p, err := newLane(m.ctx, bare, limit{}, settled, to)
	if err != nil {
		return nil, err
	}
	samples, err = m.measure(p)
	m.bare, _, _ = summarize(samples)
	return samples, err
}

// family measures all subjects with packets to an address.
func (m *instructionCounter) family(to netip.Addr) error {
	family, passing, dropping := "IPv4", allConform, mostDropped
	if to.Is6() {
		family = "IPv6"
		passing, dropping = strings.Replace(passing, ":", ", IPv6:", 1), strings.Replace(dropping, ":", ", IPv6:", 1)
	}
	samples, err := m.without(to)
	if err != nil {
		return err
	}
	m.add(bareCase+": "+family, noLimiter, unitInstructions, "", samples...)
	for _, s := range instructionSubjects() {
		reference := slices.Contains(references, s.name)
		if !reference && !m.chosen(s.name) || to.Is6() && !ours(s.name) {
			continue
		}
		p, err := newLane(m.ctx, s, ample, settled, to)
		if err != nil {
			return err
		}
		if err := m.added(p, passing); err != nil {
			return err
		}
		if reference {
			continue
		}
		if p, err = newDroppingLane(m.ctx, s, to, settled, 0.85*p.nanoseconds, 0.05); err != nil {
			return err
		}
		if err := m.added(p, dropping); err != nil {
			return err
		}
	}
	return nil
}

// added measures the instructions that the limiter of a lane adds to a packet, and closes the lane.
func (m *instructionCounter) added(p *lane, name string) error {
	samples, err := m.measure(p)
	if err != nil {
		return err
	}
	for i := range samples {
		samples[i] -= m.bare
	}
	m.add(name, p.name, unitInstructions, p.note, samples...)
	return nil
}

// measure returns the instructions of a packet in a lane, and closes the lane.
func (m *instructionCounter) measure(p *lane) (samples []float64, err error) {
	defer p.Close()
	rounds := 5
	if m.quick {
		rounds = 1
	}
	for range rounds {
		ns, err := p.send(settled.packets)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		samples = append(samples, ns) // a nanosecond of the guest is an instruction
	}
	return samples, nil
}
