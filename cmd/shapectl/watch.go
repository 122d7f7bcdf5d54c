package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/reconciler"
	"github.com/shapectl/shapectl/pkg/loader"
)

func watchCommand(e *env) *cobra.Command {
	var lastGood string
	cmd := &cobra.Command{
		Use:   "watch FILE",
		Short: "Give devices that appear the rules that a policy has for them",
		Long: `Give devices the rules that the policy in FILE has for them when they appear: are
made, or moved into the network namespace, or get a name of the policy.
It goes on until it is told to end; the rules stay.

A direction that has rules in force is left alone. 'shapectl apply' changes those.
What is pinned for devices and network namespaces that no longer exist is removed,
and so is, after an hour, what a policy left without a rule that could be rolled back.
Without --setup-fq, a device that lacks an fq and whose rules delay gets none of
its rules, which is said.

FILE is read again on SIGHUP, and when it has changed before a device appears; it
holds for devices that appear from then on. While it does not validate, the last
good policy counts: that in the file of --last-good, in which 'shapectl apply
--last-good' keeps what it has applied, or else the one that was read before.`,
		Example: `  shapectl watch /etc/shapectl/policy.yaml --last-good /var/lib/shapectl/policy.yaml`,
		Args:    args(1, 1),
		RunE: func(cmd *cobra.Command, given []string) error {
			if cmd.Flags().Changed("last-good") && lastGood == "" {
				return inputf("watch: --last-good needs the name of a file; leave it out to use none")
			}
			return e.watch(given[0], lastGood)
		},
	}
	e.addSetupFQ(cmd.Flags())
	cmd.Flags().StringVar(&lastGood, "last-good", "", "the `file` of the policy to use where FILE does not validate")
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

	r := &reconciler.Reconciler{Options: o, OnApply: e.reconciled, OnNotice: e.note}
	r.OnWarning = func(err error) { e.note(e.advise(err).Error()) }
	if err := r.Load(file, lastGood); err != nil {
		return inputf("watch: %w", err)
	}
	err = loader.In(e.netns, func() error {
		return r.Run(ctx, reread, func() { e.notify("READY=1") })
	})
	if err != nil {
		return fmt.Errorf("watch: %w", e.advise(err))
	}
	e.notify("STOPPING=1")
	return nil
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
		e.note(replacedByFQ(event.Device, was))
	}
	if event.Change.Lacks != 0 {
		e.note(fmt.Sprintf("%s: its fq has too little room for what may have to wait; %s says what to do", event.Device, plain.Suggest("doctor", event.Device)))
	}
}

// note tells what is not as it should be, or not as it was, in as many lines as that has.
func (e *env) note(text string) {
	for line := range strings.Lines(text) {
		e.say("shapectl: watch: %s", line)
	}
}

// notify tells the service manager that started this, if one did, how far it is.
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
