package main

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// An offer is TCP traffic through a limiter, and the duration of its measurement.
type offer struct {
	pace
	roundTrip time.Duration // without the limiter
	local     bool          // sent by the limiter's host, rather than forwarded
	flows     int           // bulk connections
	asks      bool          // another connection with small requests
}

// carried is the result of an offer, for each part of the time or for all of it.
type carried struct {
	goodput       []float64   // % of the payload of full frames at the rate
	lost          float64     // % of segments
	retransmitted []float64   // segments per MB of payload
	pings         [][]float64 // ms, sorted
	pingsLost     float64     // % of pings
	answers       [][]float64 // ms, sorted
}

// fullPayload is the TCP payload of a frame of maximum length.
const fullPayload = maxFrame - 14 - 20 - 32

// carry sends an offer through a limiter, and returns the result for so many parts of the time.
func carry(ctx context.Context, s competitor, o offer, parts int) (c carried, err error) {
	p, err := newPath(ctx, o.roundTrip)
	if err != nil {
		return c, err
	}
	defer p.Close()
	from := p.source
	if o.local {
		from = p.near
	}
	if s.ecn {
		if err := askForECN(from); err != nil {
			return c, err
		}
	}
	if err := s.set(ctx, p.arena, limit{o.rate, policy.DefaultCapacity(o.rate)}); err != nil {
		return c, err
	}
	inFlight := uint64(o.rate) * uint64(o.roundTrip) / (maxFrame * 8 * uint64(time.Second))
	if err := p.begin(ctx, from, inFlight/uint64(o.flows)); err != nil {
		return c, err
	}
	flows, err := p.open(from, slices.Repeat([]netip.Addr{target}, o.flows+1)...)
	if err != nil {
		return c, err
	}
	defer flows.close()
	asking, full := flows[0], flows[1:]
	for _, s := range full {
		s.fill()
	}
	if err := sleep(ctx, o.settle); err != nil {
		return c, err
	}

	during, stop := context.WithTimeout(ctx, time.Duration(parts)*o.part)
	defer stop()
	// Pings use at most 1 % of the rate.
	every := max(5*time.Millisecond, time.Duration(100*pingFrame*8*uint64(time.Second)/uint64(o.rate)))
	var pings, answers []echo
	var pingErr, askErr error
	var running sync.WaitGroup
	running.Go(func() { pings, pingErr = p.ping(during, from, every) })
	if o.asks {
		running.Go(func() { answers, askErr = asking.ask(during, 50*time.Millisecond) })
	}
	marks, err := full.watch(ctx, parts, o.part)
	running.Wait()
	if err := errors.Join(err, pingErr, askErr, ctx.Err()); err != nil {
		return c, err
	}
	c.count(marks, float64(o.rate), o.local)
	c.pings, c.pingsLost = inParts(pings, marks)
	c.answers, _ = inParts(answers, marks)
	return c, nil
}

// count computes the results of connections between marks. Senders retransmit lost segments,
// unless the kernel reports drops to them.
func (c *carried) count(marks []mark, rate float64, reported bool) {
	for i := range marks[1:] {
		from, to := marks[i], marks[i+1]
		bytes := float64(to.bytes - from.bytes)
		c.goodput = append(c.goodput, 100*bytes*8/to.at.Sub(from.at).Seconds()/(rate*fullPayload/maxFrame))
		c.retransmitted = append(c.retransmitted, float64(to.retransmitted-from.retransmitted)/max(bytes/1e6, 1e-6))
	}
	from, to := marks[0], marks[len(marks)-1]
	sent := float64(to.sent - from.sent)
	gone := max(0, sent-float64(to.arrived-from.arrived)) // queued segments arrive that were sent before
	if !reported {
		gone = min(gone, float64(to.retransmitted-from.retransmitted)) // queued segments are not lost
	}
	c.lost = 100 * gone / max(sent, 1)
}

// inParts returns the times of echoes in ms, sorted, for each part between two marks, and the
// percentage of all echoes without an answer.
func inParts(echoes []echo, marks []mark) (parts [][]float64, unanswered float64) {
	for i := range marks[1:] {
		var ms []float64
		for _, e := range echoes {
			if !e.at.Before(marks[i].at) && e.at.Before(marks[i+1].at) && e.took > 0 {
				ms = append(ms, float64(e.took)/1e6)
			}
		}
		slices.Sort(ms)
		parts = append(parts, ms)
	}
	for _, e := range echoes {
		if e.took == 0 {
			unanswered += 100 / float64(len(echoes))
		}
	}
	return parts, unanswered
}
