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

const (
	keepEvery  = time.Minute
	renewEvery = time.Hour
	// aStep is by how much a clock differs from CLOCK_MONOTONIC after a second if it was set.
	aStep = 100 * time.Millisecond
)

func (k *quotaKeeper) run(ctx context.Context, ready func()) error {
	k.options.Renews = true
	return netns.Stay(ctx, k.env.netns, func(ctx context.Context) error {
		defer k.kept.Close()
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		k.do((*loader.Namespace).RenewCalendars, (*loader.Namespace).KeepUsed)
		ready()
		renewed, kept, was := time.Now(), time.Now(), clockOffsets()
		for k.Wait(ctx, ticker.C) {
			now := clockOffsets()
			if time.Since(renewed) >= renewEvery || (now[0]-was[0]).Abs() > aStep || (now[1]-was[1]).Abs() > aStep {
				k.do((*loader.Namespace).RenewCalendars)
				renewed = time.Now()
			}
			if was = now; time.Since(kept) >= keepEvery {
				k.do((*loader.Namespace).KeepUsed)
				kept = time.Now()
			}
		}
		k.do((*loader.Namespace).KeepUsed)
		return nil
	})
}

// do does something to the namespace, and tells once if that fails. It is tried again.
func (k *quotaKeeper) do(what ...func(*loader.Namespace) error) {
	n, err := k.kept.Read(k.options)
	if err == nil {
		defer n.Close()
		for _, f := range what {
			err = errors.Join(err, f(n))
		}
	}
	text := ""
	if err != nil && !errors.Is(err, fs.ErrPermission) { // the sandbox needs no rights
		text = err.Error()
	}
	if text != "" && text != k.told {
		k.env.note(text)
	}
	k.told = text
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
