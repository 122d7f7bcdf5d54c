package main

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite queue has each limiter carry TCP, with a ping beside it, and UDP at
// twice the rate. It does so in a guest whose clock counts instructions: what a
// packet waits there is what the limiter makes it wait, whatever the host does.

const (
	oneFlow   = "One TCP flow"
	localFlow = "One TCP flow from the limiter's host"
	fourFlows = "Four TCP flows and a sparse one"
	byLength  = "Queue length, one TCP flow at %v, %v round trip"
	spacing   = "Spacing of packets"
	spread    = "Cumulative gaps between packets at %v"
)

// roundTrip is that of a path through a country or two.
const roundTrip = 20 * time.Millisecond

// queueLengths are those among which the usual one was chosen.
var queueLengths = []time.Duration{
	20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond,
}

// A pace is how long a rate is looked at: in so many packets that quartiles mean something.
type pace struct {
	rate         policy.Rate
	settle, part time.Duration
	gaps         int // between packets
}

var paces = []pace{
	{1e6, 4 * time.Second, 5 * time.Second, 1000},
	{10e6, 3 * time.Second, 1500 * time.Millisecond, 2000},
	{100e6, 3 * time.Second, 1500 * time.Millisecond, 2000},
}

// commonPace is that of what is not measured at all rates.
var commonPace = paces[1]

// queue measures in the guest.
func queue(ctx context.Context, o options) error {
	m := queueMeter{options: o, ctx: ctx, common: commonPace}
	m.subjects = slices.DeleteFunc(queueSubjects(), func(s competitor) bool { return !o.chosen(s.name) })
	rates, lengths := paces, queueLengths
	if o.quick {
		m.common, lengths = pace{paces[0].rate, time.Second / 2, time.Second / 4, 20}, queueLengths[1:2]
		rates = []pace{m.common}
	}
	for _, r := range rates {
		if err := m.tcp(oneFlow, offer{pace: r, roundTrip: roundTrip, flows: 1}); err != nil {
			return err
		}
	}
	if err := m.tcp(localFlow, offer{pace: m.common, roundTrip: roundTrip, flows: 1, local: true}); err != nil {
		return err
	}
	if err := m.tcp(fourFlows, offer{pace: m.common, roundTrip: roundTrip, flows: 4, asks: true}); err != nil {
		return err
	}
	for _, r := range rates {
		if err := m.udp(r); err != nil {
			return err
		}
	}
	for _, length := range lengths {
		if err := m.length(length); err != nil {
			return err
		}
	}
	return nil
}

// mostTime is more than anything takes that a limiter does here.
const mostTime = 3 * time.Minute

// inTime does something that may wait for the kernel for ever: after that time
// the error says where it is. It then still runs; the program is to end.
func inTime[T any](most time.Duration, f func() (T, error)) (result T, err error) {
	done := make(chan error, 1)
	var got T
	go func() {
		var err error
		got, err = f()
		done <- err
	}()
	select {
	case err := <-done:
		return got, err
	case <-time.After(most):
		stacks := make([]byte, 1<<20)
		return result, fmt.Errorf("not done after %v:\n%s", most, stacks[:runtime.Stack(stacks, true)])
	}
}

type queueMeter struct {
	options
	ctx      context.Context
	common   pace // of what is not measured at all rates
	subjects []competitor
}

// tcp has each limiter carry what is offered. What ECN is to a peer is looked at in the usual case only.
func (m queueMeter) tcp(table string, o offer) error {
	for _, s := range m.subjects {
		if s.ecn && peer(s.name) && (o.local || o.rate != m.common.rate) {
			continue
		}
		if err := m.carry(fmt.Sprintf("%s: %v", table, o.rate), s, o); err != nil {
			return err
		}
	}
	return nil
}

// length has a queue of ours that is so long carry a flow over a long path.
func (m queueMeter) length(long time.Duration) error {
	l := policy.Limit{Algorithm: policy.Leaky, Excess: policy.Delay}
	if err := l.Capacity.Set(long.String()); err != nil {
		return err
	}
	one, at := told("delay", l), m.common
	at.part *= 2 // a longer path takes longer to come round
	for _, s := range []competitor{one, withECN(one)} {
		if !m.chosen(s.name) {
			continue
		}
		name := fmt.Sprintf(byLength+": %v", at.rate, 4*roundTrip, long)
		if err := m.carry(name, s, offer{pace: at, roundTrip: 4 * roundTrip, flows: 1}); err != nil {
			return err
		}
	}
	return nil
}

// carry has a limiter carry what is offered, and reports what became of it.
func (m queueMeter) carry(name string, s competitor, o offer) error {
	c, err := inTime(mostTime, func() (carried, error) { return carry(m.ctx, s, o, m.rounds(4)) })
	if err != nil {
		return fmt.Errorf("%s, %s: %w", name, s.name, err)
	}
	for _, f := range []struct {
		unit    string
		samples []float64
	}{
		{unitGoodput, c.goodput}, {unitLost, []float64{c.lost}}, {unitAgain, c.again},
		{unitPing50, quantiles(c.pings, 0.5)}, {unitPing99, quantiles(c.pings, 0.99)}, {unitUnponged, []float64{c.unponged}},
		{unitAnswer50, quantiles(c.answers, 0.5)}, {unitAnswer99, quantiles(c.answers, 0.99)},
	} {
		if len(f.samples) > 0 {
			m.add(name, s.name, f.unit, s.note, f.samples...)
		}
	}
	return nil
}

// quantiles are those of each of several lists in order; none of an empty list.
func quantiles(lists [][]float64, q float64) (list []float64) {
	for _, l := range lists {
		if len(l) > 0 {
			list = append(list, quantile(l, q))
		}
	}
	return list
}

// spreadUp are where the shares of gaps are taken.
var spreadUp = []float64{0.5, 0.75, 0.9, 0.97, 0.99, 1.01, 1.03, 1.1, 1.25, 1.5, 2}

// udp has each limiter carry twice the rate, and reports the gaps behind it.
func (m queueMeter) udp(at pace) error {
	for _, s := range m.subjects {
		if s.ecn {
			continue // UDP here is not marked
		}
		ratios, err := inTime(mostTime, func() ([]float64, error) { return gaps(m.ctx, s, at) })
		if err != nil {
			return fmt.Errorf("%s, %v, %s: %w", spacing, at.rate, s.name, err)
		}
		slices.Sort(ratios)
		name := fmt.Sprintf("%s: %v", spacing, at.rate)
		m.add(name, s.name, unitGap1, s.note, quantile(ratios, 0.01))
		m.add(name, s.name, unitGap50, s.note, quantile(ratios, 0.5))
		m.add(name, s.name, unitGap99, s.note, quantile(ratios, 0.99))
		if at.rate != m.common.rate {
			continue
		}
		for _, up := range spreadUp {
			m.add(fmt.Sprintf(spread+": %g", at.rate, up), s.name, unitGaps, "", 100*shareUpTo(ratios, up))
		}
	}
	return nil
}

// shareUpTo is the share of samples, which are in order, that are at most that.
func shareUpTo(sorted []float64, most float64) float64 {
	n := slices.IndexFunc(sorted, func(one float64) bool { return one > most })
	if n < 0 {
		return 1
	}
	return float64(n) / float64(len(sorted))
}
