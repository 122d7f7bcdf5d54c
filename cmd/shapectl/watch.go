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
	"syscall"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/keeper"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
)

func watchCommand(e *env) *cobra.Command {
	var lastGood string
	cmd := &cobra.Command{
		Use:   "watch FILE",
		Short: "Apply a policy's rules to devices as they appear",
		Long: `Apply the rules of the policy in FILE to devices when they appear: when they are
created, moved into the network namespace, or renamed to a name of the policy.
It runs until it is stopped; the rules stay.

A direction that has rules in force is left alone: 'shapectl apply' changes those.
Pins of devices and network namespaces that no longer exist are removed. What an
apply left without a rule is kept for a rollback, and freed after an hour.
Without --setup-fq, a device without an fq qdisc gets none of its rules if any of
them delays packets. A message says so.

FILE is read again on SIGHUP, and when it has changed before a device appears. It
then applies to devices that appear later. While it is not valid, the last good
policy is used: the file of --last-good, which 'shapectl apply --last-good'
writes, or else the policy that was read before.`,
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

	k := &keeper.Keeper{Options: o, Told: e.kept, Noted: e.note}
	k.Warned = func(err error) { e.note(e.advise(err).Error()) }
	if err := k.Load(file, lastGood); err != nil {
		return inputf("watch: %w", err)
	}
	err = loader.In(e.netns, func() error {
		e.note(fmt.Sprintf("watching for %s, of %s", cmp.Or(plain.List(lines(k.Devices())), "no devices"), file))
		return k.Run(ctx, reread, func() { e.notify("READY=1") })
	})
	if err != nil {
		return fmt.Errorf("watch: %w", e.advise(err))
	}
	e.notify("STOPPING=1")
	return nil
}

// kept writes a line about rules that are in force now.
func (e *env) kept(event keeper.Event) {
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
		e.note(fmt.Sprintf("%s: its fq qdisc has too little room for the packets that may be queued; %s says what to do", plain.Line(event.Device), plain.Suggest("doctor", event.Device)))
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
