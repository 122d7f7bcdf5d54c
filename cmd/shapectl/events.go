package main

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/events"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

type eventsOptions struct {
	kinds   []string
	journal bool
	run     string
	count   int // 0 for no end
	during  time.Duration
}

func eventsCommand(e *env) *cobra.Command {
	var o eventsOptions
	cmd := &cobra.Command{
		Use:   "events [DEV|ADDRESS|CIDR|NAME]... [flags]",
		Short: "Print events: buckets that overflow, changes, devices that come and go",
		Long: `Print events as they happen, one a line, until it is stopped. Arguments choose devices, networks, rules or pools. DEV
and NAME may be patterns. The kinds are:

  overflow          a bucket begins to drop, mark, queue or pass excess packets
  penalty           the same, and the rule has a penalty
  guarantee         packets within a guarantee are refused, or a guarantee has no room
  change-begun      a change of many rules is in force;
  change-confirmed  'shapectl confirm' keeps it,
  change-reverted   'shapectl rollback' undid it,
  change-expired    or nobody confirmed it in time
  device-appeared   a device that has rules, or had, was created or renamed,
  device-gone       or deleted
  rules-changed     rules or pools were added, removed or changed
  left-out          events of packets were left out, and no other event followed to count them

An overflow begins with the first excess packet after a second without one. At most 100 events of packets are printed
in a second; left_out counts the others. At most eight processes may listen. Packets that pass are not slowed down;
excess packets are, while somebody listens.

--run runs a program for each event, without arguments. It gets the event as JSON on stdin, and in its environment as
SHAPECTL_KIND, SHAPECTL_DEVICE and so on. It runs for one event after another, at most 30 times a minute.
SHAPECTL_RUNS_LEFT_OUT counts the events since the last run for which it was not run. A run is killed after a minute.`,
		Example: `  shapectl events
  shapectl events eth0 --kind overflow --kind change -j
  shapectl events --journal
  shapectl events --kind change-expired --run /usr/local/bin/page-me`,
		ValidArgsFunction: e.orPool(e.labelled(e.completeNetwork, nameAndPlanOf)),
		RunE: func(cmd *cobra.Command, given []string) error {
			set := cmd.Flags().Changed
			switch {
			case set("count") && o.count < 1:
				return inputf("events: --count %d is out of range; use 1 or more", o.count)
			case set("for") && o.during <= 0:
				return inputf("events: --for %v is out of range; use a longer time", o.during)
			case set("run") && o.run == "":
				return inputf("events: --run names no program")
			}
			return e.events(given, o)
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&o.kinds, "kind", nil, "only events of this `kind`, or of all kinds that begin with it (change, device); may be given again")
	flags.BoolVar(&o.journal, "journal", false, "write to the journal of systemd, with fields, instead of to stdout")
	flags.StringVar(&o.run, "run", "", "run this `program` for each event")
	flags.IntVar(&o.count, "count", 0, "end after `N` events")
	flags.Var(duration(&o.during), "for", "end after this `time`, such as 60s")
	e.completes(cmd, "kind", cobra.FixedCompletions(report.EventKinds, cobra.ShellCompDirectiveNoFileComp))
	e.completes(cmd, "run", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		return nil, cobra.ShellCompDirectiveDefault
	})
	return cmd
}

func (e *env) events(given []string, o eventsOptions) (err error) {
	only, err := events.ParseFilter(given)
	if err != nil {
		return inputf("events: %w", err)
	}
	listen := events.Options{Only: only, OnProblem: func(err error) { e.say("shapectl: events: %v", e.advise(err)) }}
	for _, name := range o.kinds {
		kinds, err := report.KindsOf(name)
		if err != nil {
			return inputf("events: --kind: %w", err)
		}
		listen.Kinds = append(listen.Kinds, kinds...)
	}
	if listen.Kinds != nil {
		listen.Kinds = append(listen.Kinds, report.LeftOut)
	}
	if listen.Loader, err = e.options(); err == nil {
		listen.Loader, err = listen.Loader.Settled()
	}
	if err != nil {
		return err
	}
	sinks, done, err := e.eventSinks(o)
	if err != nil {
		return err
	}
	defer func() { done() }()
	ctx, stop := signal.NotifyContext(e.context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if o.during > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.during)
		defer cancel()
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	told := 0
	var failed error
	on := func(event report.Event) {
		if failed != nil || o.count > 0 && told == o.count {
			return
		}
		for _, sink := range sinks {
			if failed = sink(event); failed != nil {
				end()
				return
			}
		}
		if told++; told == o.count {
			end()
		}
	}
	ready := func() { e.notify("READY=1") }
	if e.feed != nil {
		err = e.feed.Listen(ctx, listen.Kinds, only, ready, on)
	} else {
		err = loader.In(e.netns, func() error { return events.Listen(ctx, listen, ready, on) })
	}
	if errors.Is(err, maps.ErrListeners) {
		err = fmt.Errorf("%w; end one of them", err)
	}
	if err != nil {
		return fmt.Errorf("events: %w", e.advise(err))
	}
	if failed != nil {
		return exitError{fmt.Errorf("events: %w", failed), exitDegraded}
	}
	return nil
}

// eventSinks are where events go. done ends them.
func (e *env) eventSinks(o eventsOptions) (sinks []func(report.Event) error, done func(), err error) {
	done = func() {}
	switch {
	case o.journal:
		journal, err := events.OpenJournal(events.JournalSocket)
		if err != nil {
			return nil, nil, exitError{fmt.Errorf("events: %w; is systemd-journald running?", err), exitMissing}
		}
		sinks, done = append(sinks, journal.Write), func() { journal.Close() }
	case e.json:
		sinks = append(sinks, func(event report.Event) error { return event.JSONLine(e.out) })
	default:
		sinks = append(sinks, func(event report.Event) error {
			_, err := fmt.Fprintln(e.out, event.Line())
			return err
		})
	}
	if o.run == "" {
		return sinks, done, nil
	}
	runner, err := events.NewRunner(o.run, e.err, func(err error) { e.say("shapectl: events: %v", err) })
	if err != nil {
		done()
		return nil, nil, inputf("events: --run: %w; name a program that may be executed, without arguments", err)
	}
	before := done
	return append(sinks, func(event report.Event) error { runner.Run(event); return nil }), func() {
		if n := runner.Close(); n > 0 {
			e.say("shapectl: events: %s was not run for %s", plain.Line(o.run), plain.Count(n, "event"))
		}
		before()
	}, nil
}
