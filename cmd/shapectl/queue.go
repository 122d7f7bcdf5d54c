package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// addSetupFQ adds --setup-fq, for commands that bring rules into force.
func (e *env) addSetupFQ(f *pflag.FlagSet) {
	f.BoolVar(&e.setupFQ, "setup-fq", false,
		"set up the fq qdisc if the device lacks it")
}

// adviseFQ says how to set up the fq that the rules of a device need.
func (e *env) adviseFQ(u *loader.UnqueuedError) string {
	command := u.State.Command(u.Device, e.netns, u.Packets)
	switch {
	case u.State.HasFQ && u.Fixed == nil:
		return "shorten the queue (--capacity or --queue), or raise its horizon by --setup-fq, or: " + command
	case u.State.HasFQ:
		return "shorten the queue (--capacity or --queue), or raise its horizon: " + command
	case u.Fixed == nil:
		return fmt.Sprintf("--setup-fq sets it up until %s restores what is there now; or set it up yourself: %s", e.suggest("flush", u.Device), command)
	}
	return fmt.Sprintf("it stays, as %v; to replace it for good: %s", u.Fixed, command)
}

// queued warns of what a change of rules did to a device's fq. The error is errDegraded
// if the fq has too little room, or if packets now bypass a filter on ingress.
func (e *env) queued(n *loader.Namespace, device string, c loader.Change) error {
	if c.Replaced != "" {
		e.say("%s", e.replacedByFQ(device, c.Replaced))
	}
	if c.Lacks == 0 && !c.Redirected {
		return nil
	}
	dev, err := netinfo.DeviceByName(device)
	if err != nil {
		return err
	}
	if c.Redirected {
		behind, err := doctor.Behind(n, dev.Index, policy.Ingress)
		if err != nil || behind == "" {
			return err
		}
		return e.degraded("%s ingress: queued packets now enter behind %s, which does not see them; filter before that, or where packets are routed",
			device, behind)
	}
	s, err := fq.Look(dev.Index)
	if err != nil {
		return err
	}
	return e.degraded("%s: up to %d packets may be queued, but its fq holds only %d, and %d of one flow; use --setup-fq, or: %s",
		device, c.Lacks, s.Limit, s.FlowLimit, s.Command(device, e.netns, c.Lacks))
}

func (e *env) replacedByFQ(device, was string) string {
	return fmt.Sprintf("%s: its qdisc is now fq; %s restores %s", device, e.suggest("flush", device), was)
}

// restored says what flush did to a qdisc that --setup-fq replaced, and reports whether it did anything.
func (e *env) restored(device string, o fq.Outcome) bool {
	lost := ""
	if o.Lost > 0 {
		lost = fmt.Sprintf("; queued packets lost: %d", o.Lost)
	}
	switch {
	case o.Replaced:
		e.say("%s: its qdisc was changed after --setup-fq, so it stays %s", device, o.Kind)
	case o.Restored && o.Differs:
		e.say("%s: its qdisc is %s again, but differs from the one before --setup-fq: %s%s", device, o.Kind, o.Was, lost)
	case o.Restored:
		e.say("%s: its qdisc is %s again, as before%s", device, o.Kind, lost)
	}
	return o.Replaced || o.Restored
}
