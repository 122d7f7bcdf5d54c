package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite queue sends TCP through each limiter, with a ping beside it, and UDP at twice
// the rate. It runs in a guest whose clock counts instructions: only the limiter delays a
// packet there, whatever the host does.

const (
	oneFlow   = "One TCP flow"
	localFlow = "One TCP flow from the limiter's host"
	fourFlows = "Four TCP flows and a sparse one"
	byLength  = "Queue length, one TCP flow at %v, %v round trip"
	spacing   = "Spacing of packets"
)

// roundTrip is typical of a path within a country.
const roundTrip = 20 * time.Millisecond

// queueLengths are the candidates for the default.
var queueLengths = []time.Duration{
	20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 200 * time.Millisecond,
}

// A pace is the duration of a measurement at a rate. It has enough packets for quartiles.
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

// commonPace is for cases that are measured at one rate only.
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

type queueMeter struct {
	options
	ctx      context.Context
	common   pace // for cases at one rate only
	subjects []competitor
}

// tcp sends TCP through each limiter. Peers with ECN are measured at the common rate only.
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

// length sends a flow over a long path through our queue of a length.
func (m queueMeter) length(long time.Duration) error {
	l := policy.Limit{Algorithm: policy.Leaky, Excess: policy.Delay}
	if err := l.Capacity.Set(long.String()); err != nil {
		return err
	}
	one, at := mode("delay", l), m.common
	at.part *= 2 // the round trip is longer
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

// carry sends TCP through a limiter, and reports the result.
func (m queueMeter) carry(name string, s competitor, o offer) error {
	c, err := carry(m.ctx, s, o, m.rounds(4))
	if err != nil {
		return fmt.Errorf("%s, %s: %w", name, s.name, err)
	}
	for _, f := range []struct {
		unit    string
		samples []float64
	}{
		{unitGoodput, c.goodput}, {unitLost, []float64{c.lost}}, {unitRetransmitted, c.retransmitted},
		{unitPing50, quantiles(c.pings, 0.5)}, {unitPing99, quantiles(c.pings, 0.99)}, {unitPingsLost, []float64{c.pingsLost}},
		{unitAnswer50, quantiles(c.answers, 0.5)}, {unitAnswer99, quantiles(c.answers, 0.99)},
	} {
		if len(f.samples) > 0 {
			m.add(name, s.name, f.unit, s.note, f.samples...)
		}
	}
	return nil
}

// quantiles returns a quantile of each of several sorted lists. It skips empty lists.
func quantiles(lists [][]float64, q float64) (list []float64) {
	for _, l := range lists {
		if len(l) > 0 {
			list = append(list, quantile(l, q))
		}
	}
	return list
}

// udp sends twice the rate through each limiter, and reports the gaps behind it.
func (m queueMeter) udp(at pace) error {
	for _, s := range m.subjects {
		if s.ecn {
			continue // UDP here is not marked
		}
		ratios, err := gaps(m.ctx, s, at)
		if err != nil {
			return fmt.Errorf("%s, %v, %s: %w", spacing, at.rate, s.name, err)
		}
		slices.Sort(ratios)
		name := fmt.Sprintf("%s: %v", spacing, at.rate)
		m.add(name, s.name, unitGap1, s.note, quantile(ratios, 0.01))
		m.add(name, s.name, unitGap50, s.note, quantile(ratios, 0.5))
		m.add(name, s.name, unitGap99, s.note, quantile(ratios, 0.99))
	}
	return nil
}
