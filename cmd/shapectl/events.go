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
	"github.com/shapectl/shapectl/internal/report"
)

type eventsOptions struct {
	kinds  []string
	count  int // 0 for no end
	during time.Duration
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
  quota-80          80 % of a quota is used, of a rule, a pool, or a host that has one
  quota-used-up     quota and grace are used up; the rate after them is in force
  quota-restored    after one of these: a period began, or 'topup' gave bytes back; not of a steady quota
  lease-begun       a pool with a cluster got a lease on a part of the cluster's rate
  lease-ended       the lease was not renewed; the safe share is in force
  left-out          events were left out, and no other event followed to count them

An overflow starts with the first excess packet after a second without one. Packets cause at most 100 events a second;
left_out counts the rest. At most eight processes can listen. Packets that conform are never slowed down; excess packets
are, while a process listens.`,
		Example: `  shapectl events
  shapectl events eth0 --kind overflow --kind change -j
  shapectl events --kind change-expired -j | while read -r event; do page-me "$event"; done`,
		ValidArgsFunction: e.completeNamed(true, nil),
		RunE: func(cmd *cobra.Command, given []string) error {
			set := cmd.Flags().Changed
			switch {
			case set("count") && o.count < 1:
				return inputf("events: --count %d is out of range; use 1 or more", o.count)
			case set("for") && o.during <= 0:
				return inputf("events: --for %v is out of range; use a longer time", o.during)
			}
			return e.events(given, o)
		},
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&o.kinds, "kind", nil, "only events of this `kind`, or of all kinds with this first word (change, device, lease); repeatable")
	flags.IntVar(&o.count, "count", 0, "end after `N` events")
	flags.Var(duration(&o.during), "for", "end after this `time`, such as 60s")
	e.completes(cmd, "kind", cobra.FixedCompletions(report.EventKinds, cobra.ShellCompDirectiveNoFileComp))
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
		if e.json {
			failed = event.JSONLine(e.out)
		} else {
			_, failed = fmt.Fprintln(e.out, event.Line())
		}
		if told++; failed != nil || told == o.count {
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
