package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A recorder reads all rules again and again for the history.
type recorder struct {
	env    *env
	shared *live.Shared
	say    func(string)
	pulse.Pulse

	failing bool
	scene   *live.Scene // of which these are the series
	series  []*history.Series
}

func (c *recorder) run(ctx context.Context, ready func()) error {
	ready()
	ticker := time.NewTicker(history.Interval)
	defer ticker.Stop()
	for {
		c.record(ctx)
		if !c.Wait(ctx, ticker.C) {
			return nil
		}
	}
}

// record adds a reading. What could not be read as a whole is a gap.
func (c *recorder) record(ctx context.Context) {
	r, err := c.shared.Now(ctx, live.What{})
	switch {
	case err != nil && !c.failing:
		c.say(fmt.Sprintf("history: read the rules: %s; until that works there is a gap", plain.OneLine(c.env.advise(err))))
	case err == nil && c.failing:
		c.say("history: the rules can be read again")
	}
	if c.failing = err != nil; c.failing {
		return
	}
	c.env.history.Add(history.Reading{Time: r.Time, Mono: r.At, Slept: slept(), Samples: c.samples(r)})
	r.Release()
}

// samples are what the history is to keep of rules and pools.
func (c *recorder) samples(r *live.Reading) []history.Sample {
	all := r.Once()
	if c.scene != r.Scene() {
		c.scene, c.series = r.Scene(), make([]*history.Series, len(all))
		for i, it := range all {
			c.series[i] = seriesOf(it)
		}
	}
	samples := make([]history.Sample, len(all))
	for i, it := range all {
		if it.Also.Quota.Bytes != 0 { // how much is used changes without the rule
			if now := seriesOf(it); *now != *c.series[i] {
				c.series[i] = now
			}
		}
		samples[i] = history.Sample{Series: c.series[i], Counters: history.Counters{Passed: it.PassedBytes, Dropped: it.DroppedBytes}}
		if it.IsPool() { // what rules within it lost, the history knows
			samples[i].Dropped, samples[i].Refused = 0, it.DroppedBytes
		}
	}
	return samples
}

func seriesOf(it *live.Item) *history.Series {
	s := &history.Series{
		Key: it.Key, Plan: it.Label.Plan, Within: string(it.Within), Each: it.Scope(), Excess: it.Excess.String(),
		Guarantee: uint64(it.Guarantee), Aware: it.Colours.Aware, Detached: !it.Place.InForce,
	}
	if !it.IsPool() {
		s.Name = it.Label.Name
	}
	if it.Algorithm.HasColours() {
		s.Excess, s.Yellow = it.Colours.Red.String(), it.Colours.Yellow.String()
	}
	if it.Rate != policy.Unlimited {
		s.Rate, s.Capacity = uint64(it.Rate), it.Capacity+it.Queue
	}
	also := &it.Also
	if also.Quota.Bytes != 0 {
		s.Quota = also.Quota.String()
		if s.Each == "" {
			s.Quota += fmt.Sprintf(", %d%% used", it.Used.UsedBytes*10/(it.Used.UsedBytes+it.Used.LeftBytes)*10)
		}
	}
	switch {
	case s.Each == "" && it.Used.UsedUp():
		s.Other = "what follows the quota: " + also.Then.String()
	case also.Packets != 0:
		s.Other = also.Packets.String() + " packets/s"
	case also.Flows != 0:
		s.Other = also.Flows.String() + " new flows/s"
	}
	return s
}

// slept is for how many ns the host slept since it was started.
func slept() uint64 {
	var with, without unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &without))
	must(unix.ClockGettime(unix.CLOCK_BOOTTIME, &with))
	return uint64(with.Nano() - without.Nano())
}
