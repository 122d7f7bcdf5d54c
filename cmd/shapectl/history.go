package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/internal/report"
)

// A recorder reads all rules again and again for the history.
type recorder struct {
	env    *env
	reader *measure.Reader
	say    func(string)
	pulse.Pulse

	failing bool
}

func (c *recorder) run(ctx context.Context, ready func()) error {
	defer c.reader.Close()
	ready()
	ticker := time.NewTicker(history.Interval)
	defer ticker.Stop()
	for {
		c.record()
		if !c.Wait(ctx, ticker.C) {
			return nil
		}
	}
}

// record adds a reading. What could not be read as a whole is a gap.
func (c *recorder) record() {
	r, err := c.reader.Read(measure.What{})
	switch {
	case err != nil && !c.failing:
		c.say(fmt.Sprintf("history: read the rules: %s; until that works there is a gap", plain.OneLine(c.env.advise(err))))
	case err == nil && c.failing:
		c.say("history: the rules can be read again")
	}
	if c.failing = err != nil; c.failing {
		return
	}
	rules, pools := r.Rules.Once()
	c.env.history.Add(history.Reading{Time: r.Time, Mono: r.At, Slept: slept(), Samples: report.Samples(slices.Concat(pools, rules))})
}

// slept is for how many ns the host slept since it was started.
func slept() uint64 {
	var with, without unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &without))
	must(unix.ClockGettime(unix.CLOCK_BOOTTIME, &with))
	return uint64(with.Nano() - without.Nano())
}
