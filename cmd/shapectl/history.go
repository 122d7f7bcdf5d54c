package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"slices"
	"time"

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

	lost    report.Losses
	failing bool
	before  []history.Series
	policy  string
	hashed  time.Time // when that was computed
}

// policyAge is how old the hash of a policy may be: options that the history does not keep may have changed.
const policyAge = 10 * time.Minute

func (c *recorder) run(ctx context.Context, ready func()) error {
	defer c.reader.Close()
	c.lost.Resume(c.env.history.Resumed())
	ready()
	ticker := time.NewTicker(history.DefaultInterval)
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
	samples := c.samples(r.Rules)
	if c.changed(samples) || time.Since(c.hashed) > policyAge {
		c.policy, c.hashed = c.env.policyHash(), time.Now()
	}
	c.env.history.Add(history.Reading{Time: r.Time, Mono: r.At, Policy: c.policy, Samples: samples})
}

// samples are what the history is to keep of rules and pools.
func (c *recorder) samples(all report.Rules) []history.Sample {
	rules, pools := all.Once()
	c.lost.Count(rules, pools, true)
	return report.Samples(slices.Concat(pools, rules))
}

// changed reports whether other rules are there than before, or with other parameters.
func (c *recorder) changed(samples []history.Sample) bool {
	if slices.EqualFunc(samples, c.before, func(s history.Sample, b history.Series) bool { return s.Series == b }) {
		return false
	}
	c.before = c.before[:0]
	for _, s := range samples {
		c.before = append(c.before, s.Series)
	}
	return true
}

// policyHash is the SHA-256 of what export prints: of the rules in force, however they came; "" if it cannot be told.
func (e *env) policyHash() string {
	var text bytes.Buffer
	export := &env{out: &text, err: io.Discard, getenv: e.getenv, netns: e.netns}
	if export.run([]string{"export"}) != exitDone {
		return ""
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256(text.Bytes()))
}
