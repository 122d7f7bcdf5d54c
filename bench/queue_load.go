package main

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// An offer is the TCP that a limiter is to carry, and for how long it is looked at.
type offer struct {
	pace
	roundTrip time.Duration // without the limiter
	local     bool          // from the limiter's own machine, else through it
	flows     int           // connections that send as much as they can
	asks      bool          // one with small requests beside them
}

// carried is what became of an offer, in each part of its time or in all of it.
type carried struct {
	goodput  []float64   // % of the most payload that the rate has room for
	lost     float64     // % of segments
	again    []float64   // segments sent once more per MB of payload
	pings    [][]float64 // ms, in order
	unponged float64     // % of pings
	answers  [][]float64 // ms, in order
}

// fullPayload is what TCP puts into the largest frame.
const fullPayload = maxFrame - 14 - 20 - 32

// carry has a limiter carry what is offered, and tells what became of it in so many parts of the time.
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
	if err := p.begin(from, inFlight/uint64(o.flows)); err != nil {
		return c, err
	}
	flows, err := p.open(from, o.flows+1)
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
	// Pings take a hundredth of the rate at most.
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
	c.pings, c.unponged = inParts(pings, marks)
	c.answers, _ = inParts(answers, marks)
	return c, nil
}

// count tells what connections have done between marks. Unless senders are told
// of drops at once, they send again whatever is lost.
func (c *carried) count(marks []mark, rate float64, told bool) {
	for i := range marks[1:] {
		from, to := marks[i], marks[i+1]
		bytes := float64(to.bytes - from.bytes)
		c.goodput = append(c.goodput, 100*bytes*8/to.at.Sub(from.at).Seconds()/(rate*fullPayload/maxFrame))
		c.again = append(c.again, float64(to.again-from.again)/max(bytes/1e6, 1e-6))
	}
	from, to := marks[0], marks[len(marks)-1]
	sent := float64(to.sent - from.sent)
	gone := max(0, sent-float64(to.arrived-from.arrived)) // what waited at the beginning arrived without having been sent
	if !told {
		gone = min(gone, float64(to.again-from.again)) // what waits at the end is not lost
	}
	c.lost = 100 * gone / max(sent, 1)
}

// inParts are the times of echoes in ms and in order, by the two marks that
// they began between, and how many of all in % had no answer.
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
