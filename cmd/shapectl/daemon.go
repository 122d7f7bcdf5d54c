package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/reconciler"
)

// A daemon runs loops until one of them ends, and tells the service manager about them. A loop begins when those before it
// are ready, so limits are in force even if what comes later fails.
type daemon struct {
	env    *env
	reload func() // reads all files again
	loops  []loop
}

// A loop calls ready once, and runs until ctx is done. alive returns nil if it makes progress now. does says what the loop
// does, once all are ready.
type loop struct {
	name  string
	run   func(ctx context.Context, ready func()) error
	alive func(ctx context.Context) error
	does  func() string
}

func (d *daemon) add(name string, run func(context.Context, func()) error, alive func(context.Context) error, does func() string) {
	d.loops = append(d.loops, loop{name, run, alive, does})
}

// started says what all loops do, and returns that.
func (d *daemon) started() string {
	var all []string
	for _, l := range d.loops {
		if what := l.does(); what != "" {
			d.env.note(what)
			all = append(all, what)
		}
	}
	return strings.Join(all, "; ")
}

func (d *daemon) run(ctx context.Context, hangup <-chan os.Signal) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ready, ended := make(chan struct{}, len(d.loops)), make(chan error, len(d.loops))
	begun, running := 0, 0
	begin := func() {
		l := d.loops[begun]
		begun, running = begun+1, running+1
		go func() { ended <- l.run(ctx, sync.OnceFunc(func() { ready <- struct{}{} })) }()
	}
	begin()
	var dogs <-chan time.Time
	var patience time.Duration
	var failed error
	done := ctx.Done()
	for running > 0 {
		select {
		case <-ready:
			if begun < len(d.loops) {
				if ctx.Err() == nil {
					begin()
				}
				continue
			}
			d.env.notify(sd.SdNotifyReady + "\nSTATUS=" + d.started())
			debug.SetGCPercent(10) // garbage is rare from now on, and what is kept is much
			debug.FreeOSMemory()   // reading the policy took several times as much as serve needs now
			var err error
			if patience, err = sd.SdWatchdogEnabled(false); err != nil {
				d.env.note(err.Error())
			}
			if patience > 0 {
				ticker := time.NewTicker(patience / 2)
				defer ticker.Stop()
				dogs = ticker.C
			}
		case <-dogs:
			d.checkLoops(ctx, patience/2)
		case <-hangup:
			d.reloads()
		case err := <-ended:
			running--
			if failed == nil {
				failed = err
			}
			stop()
		case <-done:
			done = nil
			d.env.notify(sd.SdNotifyStopping)
		}
	}
	if done != nil { // all loops ended at once
		d.env.notify(sd.SdNotifyStopping)
	}
	return failed
}

// reloads reloads, and tells the service manager so.
func (d *daemon) reloads() {
	var now unix.Timespec
	must(unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	d.env.notify(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", sd.SdNotifyReloading, now.Nano()/1000))
	d.reload()
	d.env.notify(sd.SdNotifyReady)
}

// checkLoops tells the service manager that all loops make progress, if they do.
func (d *daemon) checkLoops(ctx context.Context, patience time.Duration) {
	asked, cancel := context.WithTimeout(ctx, patience)
	go func() {
		defer cancel()
		for _, l := range d.loops {
			if err := l.alive(asked); err != nil {
				if ctx.Err() == nil {
					d.env.note(fmt.Sprintf("%s does not answer: %v", l.name, err))
				}
				return
			}
		}
		d.env.notify(sd.SdNotifyWatchdog)
	}()
}

// A lockedWriter is for several goroutines.
type lockedWriter struct {
	mu sync.Mutex
	to io.Writer
}

func (w *lockedWriter) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(text)
}

// A limited is a direction of a device that got rules.
type limited struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Rules     int    `json:"rules"`
	Policy    string `json:"policy"`
	Sentence  string `json:"sentence"`
}

// reconciled writes a line about the rules that were applied.
func (e *env) reconciled(event reconciler.Event) {
	if e.json {
		json.NewEncoder(e.out).Encode(limited{event.Device, event.Direction.String(), event.Rules, event.Policy, event.String()})
	} else {
		fmt.Fprintln(e.out, plain.Line(event.String()))
	}
	if was := event.Change.Replaced; was != "" {
		e.note(e.replacedByFQ(event.Device, was))
	}
	if event.Change.Lacks != 0 {
		e.note(fmt.Sprintf("%s: its fq has too little room for the packets that may be queued; %s says what to do", plain.Line(event.Device), e.suggest("doctor", event.Device)))
	}
}

// note writes a message, in as many lines as it has.
func (e *env) note(text string) {
	for line := range strings.Lines(text) {
		e.say("shapectl: serve: %s", line)
	}
}

// notify reports a state to the service manager, if there is one.
func (e *env) notify(state string) {
	if _, err := sd.SdNotify(false, state); err != nil {
		e.say("shapectl: tell the service manager %s: %w", state, err)
	}
}
