package main

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/pkg/loader"
)

// A quotaKeeper writes what is used of quotas into a file, and renews the calendars of their periods.
type quotaKeeper struct {
	env     *env
	options loader.Options
	pulse.Pulse

	kept loader.Kept
	told string // the last trouble
}

// Variables for tests.
var keepEvery, renewEvery = time.Minute, time.Hour

// aStep is by how much a clock differs from CLOCK_MONOTONIC after a second if it was set.
const aStep = 100 * time.Millisecond

func (k *quotaKeeper) run(ctx context.Context, ready func()) error {
	k.options.Renews, k.options.Patience = true, aStep
	return netns.Stay(ctx, k.env.netns, func(ctx context.Context) error {
		defer k.kept.Close()
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		var renewed, kept time.Time
		was := clockOffsets()
		for more := true; more; more = k.Wait(ctx, ticker.C) {
			now := clockOffsets()
			stepped := (now[0]-was[0]).Abs() > aStep || (now[1]-was[1]).Abs() > aStep
			if (stepped || time.Since(renewed) >= renewEvery) && k.did(k.renew()) {
				renewed, was = time.Now(), now
			}
			if !stepped { // else it is tried again
				was = now
			}
			if time.Since(kept) >= keepEvery && k.did(k.kept.KeepUsed(k.options)) {
				kept = time.Now()
			}
			ready()
		}
		k.options.Patience = time.Second
		k.did(k.kept.KeepUsed(k.options))
		return nil
	})
}

func (k *quotaKeeper) renew() error {
	n, err := k.kept.Read(k.options)
	if err != nil {
		return err
	}
	defer n.Close()
	return n.RenewCalendars()
}

// did tells of an error once. It returns false if a command was in the way.
func (k *quotaKeeper) did(err error) bool {
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false
	}
	text := ""
	if err != nil && !errors.Is(err, fs.ErrPermission) { // the sandbox needs no rights
		text = err.Error()
	}
	if text != "" && text != k.told {
		k.env.note(text)
	}
	k.told = text
	return true
}

// clockOffsets are how far CLOCK_REALTIME and CLOCK_TAI are ahead of CLOCK_MONOTONIC.
func clockOffsets() (ahead [2]time.Duration) {
	var of, mono unix.Timespec
	for i, clock := range []int32{unix.CLOCK_REALTIME, unix.CLOCK_TAI} {
		must(unix.ClockGettime(clock, &of))
		must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono))
		ahead[i] = time.Duration(of.Nano() - mono.Nano())
	}
	return ahead
}
