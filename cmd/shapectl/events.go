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
	"github.com/shapectl/shapectl/internal/listener"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
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
		Short: "Print events: overflows, penalties, changes, devices",
		Long: `Print events as they happen, one per line, until stopped. Arguments choose devices, networks, rules or pools. DEV
and NAME may be patterns.

Kinds of events:

  overflow          a bucket starts to drop, mark, queue or count excess packets
  penalty           the same for a rule with a penalty
  guarantee         a pool refuses packets within a guarantee, or has no room for one
  change-begun      'apply', or a command with --confirm, changed rules
  change-confirmed  'shapectl confirm' kept the change
  change-reverted   'shapectl rollback' undid the change
  change-expired    nobody confirmed the change in time, so it reverted
  device-appeared   a device with rules was created or renamed
  device-gone       a device with rules was deleted or renamed
  rules-changed     rules or pools were added, removed or changed
  rules-missing     a device lacks rules of the policy in force, or something else detached its rules
  rules-restored    it has them again, or they were attached again
  lease-begun       a pool with a cluster got a lease on a part of the cluster's rate
  lease-ended       the lease was not renewed; the safe share is in force
  left-out          events were left out, and no other event followed to count them

An overflow starts with the first excess packet after a second without one. Packets cause at most 100 events a second;
left_out counts the rest. At most eight processes can listen. Packets that conform are never slowed down; excess packets
are, while a process listens.

--run runs a program for each event, without arguments. The program reads the event as JSON from stdin, or from
SHAPECTL_KIND, SHAPECTL_DEVICE and so on in its environment. It runs for one event at a time, at most 30 times a minute,
and is killed after a minute. SHAPECTL_RUNS_LEFT_OUT counts the events since its last run that it was not run for.`,
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
	flags.StringArrayVar(&o.kinds, "kind", nil, "only events of this `kind`, or of all kinds with this first word (change, device, lease); repeatable")
	flags.BoolVar(&o.journal, "journal", false, "write to the systemd journal, with fields, instead of stdout")
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
	if listen.Loader, err = e.options(); err != nil {
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
		err = netns.Stay(ctx, e.netns, func(ctx context.Context) error { return events.Listen(ctx, listen, ready, on) })
	}
	if errors.Is(err, listener.ErrFull) {
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
