package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/leases"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/reconciler"
	"github.com/shapectl/shapectl/pkg/loader"
)

func watchCommand(e *env) *cobra.Command {
	var lastGood string
	cmd := &cobra.Command{
		Use:   "watch FILE [flags]",
		Short: "Apply a policy's rules to devices as they appear",
		Long: `Apply the rules of a policy to devices as they appear, until it is stopped. The rules stay in force.

A device appears when it is created, moved into the network namespace, or renamed to a name of the policy.
watch changes no direction that already has rules; 'shapectl apply' does. There are two exceptions. A device that was
renamed and has rules in the pool of its old name gets the rules and the pool of its new name. The rules of hosts with
a MAC address follow the neighbours of the device: watch adds and deletes them, with a message for each address, while
the pool of the host is in force. Then rollback is no longer possible. watch adds pools that the rules need, and changes
none. If the rules need fq and the device lacks it, watch sets it up with --setup-fq. Otherwise it warns, and sets no
rules there. Devices whose rules could not be set are tried again within ten seconds.

If a pool has no room for the guarantees of a device, the device gets its rules without them, as with 'shapectl apply',
and 'shapectl doctor' says so. When there is room, watch gives them, to the oldest device first. Then, and when it
removes the pool of a deleted device, rollback is no longer possible.

While a change of 'shapectl apply' is pending, a device that appears has the rules of the new policy, and after a
revert those of the old one. watch deletes nothing until the change is confirmed or has reverted.

watch reads FILE again on SIGHUP, and when a device appears after the file was changed. While FILE is not valid,
watch uses the copy in --last-good, or else the version that it read before. After a change that was not confirmed
or was rolled back, watch uses the policy from before it, or none if there was none, until FILE is written again. While
there is no FILE, watch sets no rules.

watch also attaches programs again that something else has detached, within ten seconds.

watch also adapts the rates of pools with --adapt-min to the latency of the line, whatever set them.

watch also removes the state of deleted devices and network namespaces. An hour after a change that left devices or
directions without rules, it frees their state, and rollback is no longer possible.`,
		Example:           `  shapectl watch /etc/shapectl/policy.yaml`,
		Args:              args(1, 1),
		ValidArgsFunction: completePolicy,
		RunE: func(cmd *cobra.Command, given []string) error {
			if cmd.Flags().Changed("last-good") && lastGood == "" {
				return inputf("watch: --last-good needs the name of a file; leave it out to use none")
			}
			return e.watch(given[0], lastGood)
		},
	}
	e.addSetupFQ(cmd.Flags())
	cmd.Flags().StringVar(&lastGood, "last-good", "", "use the policy in this `file` while FILE is not valid")
	return cmd
}

func (e *env) watch(file, lastGood string) error {
	o, err := e.options()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	reread := make(chan os.Signal, 1)
	signal.Notify(reread, syscall.SIGHUP)
	defer signal.Stop(reread)

	e.out, e.err = &lockedWriter{to: e.out}, &lockedWriter{to: e.err}
	r := e.reconciler(o)
	if err := r.Load(file, lastGood); err != nil {
		return inputf("watch: %w", err)
	}
	a := leases.Line{Keeper: e.keeper(o, e.note)}
	var adapts sync.WaitGroup
	ctx, end := context.WithCancel(ctx)
	defer adapts.Wait()
	defer end()
	err = netns.Stay(ctx, e.netns, func(ctx context.Context) error {
		return r.Run(ctx, reread, func() {
			e.note(watchesFor(r, file))
			e.notify("READY=1")
			adapts.Go(func() {
				// It fails only with the namespace, as r does.
				_ = a.Run(ctx, func() {})
			})
		})
	})
	if err != nil {
		return fmt.Errorf("watch: %w", e.advise(err))
	}
	e.notify("STOPPING=1")
	return nil
}

// reconciler makes a reconciler that tells what it does.
func (e *env) reconciler(o loader.Options) *reconciler.Reconciler {
	r := &reconciler.Reconciler{Options: o, OnApply: e.reconciled, OnNotice: e.note}
	r.OnWarning = func(err error) { e.note(e.advise(err).Error()) }
	return r
}

// watchesFor says what a reconciler watches for.
func watchesFor(r *reconciler.Reconciler, file string) string {
	return fmt.Sprintf("watching for %s, of %s", cmp.Or(plain.List(plain.Lines(r.Devices())), "no devices"), file)
}

// reconciled writes a line about the rules that were applied.
func (e *env) reconciled(event reconciler.Event) {
	if e.json {
		json.NewEncoder(e.out).Encode(struct {
			Device    string `json:"device"`
			Direction string `json:"direction"`
			Rules     int    `json:"rules"`
			Policy    string `json:"policy"`
			Sentence  string `json:"sentence"`
		}{event.Device, event.Direction.String(), event.Rules, event.Policy, event.String()})
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
		e.say("shapectl: watch: %s", line)
	}
}

// notify reports a state to the service manager, if there is one.
func (e *env) notify(state string) {
	path := e.getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	c, err := net.Dial("unixgram", path)
	if err == nil {
		_, err = c.Write([]byte(state))
		c.Close()
	}
	if err != nil {
		e.note(fmt.Sprintf("tell the service manager %s: %v", state, err))
	}
}
