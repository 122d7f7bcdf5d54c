package main

import (
	"fmt"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// addSetupFQ adds the flag of the commands that bring rules into force.
func (e *env) addSetupFQ(f *pflag.FlagSet) {
	f.BoolVar(&e.setupFQ, "setup-fq", false,
		"give a device whose rules delay the qdisc fq, if it lacks one; 'shapectl flush' puts back what there was")
}

// adviseFQ says how a device gets the fq that its rules need.
func (e *env) adviseFQ(u *loader.UnqueuedError) string {
	command := u.State.Command(u.Device, e.netns, u.Packets)
	switch {
	case u.State.HasFQ && u.Fixed == nil:
		return "shorten the wait (--capacity or --queue), or raise its horizon by --setup-fq, or: " + command
	case u.State.HasFQ:
		return "shorten the wait (--capacity or --queue), or raise its horizon: " + command
	case u.Fixed == nil:
		return fmt.Sprintf("--setup-fq sets it up, and 'shapectl flush' puts back what there is now; or set it up yourself: %s", command)
	}
	return fmt.Sprintf("--setup-fq does not replace it, as %v; if that may go for good: %s", u.Fixed, command)
}

// queued tells what became of a device's fq with a change of its rules. The
// error is errDegraded if that has too little room, or if what enters goes around
// a filter now, about which it is told.
func (e *env) queued(n *loader.Namespace, device string, c loader.Change) error {
	if c.Replaced != "" {
		e.say("%s", replacedByFQ(device, c.Replaced))
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
		return e.degraded("%s ingress: what is to wait is let in behind %s, which does not see it any more; filter before that, or where packets are routed",
			device, behind)
	}
	s, err := fq.Look(dev.Index)
	if err != nil {
		return err
	}
	return e.degraded("%s: up to %d packets may have to wait, but its fq holds %d, and %d of one flow, and drops what is more; --setup-fq mends that, or: %s",
		device, c.Lacks, s.Limit, s.FlowLimit, s.Command(device, e.netns, c.Lacks))
}

func replacedByFQ(device, was string) string {
	return fmt.Sprintf("%s: its qdisc is fq now; %s puts %s back, as it was", device, plain.Suggest("flush", device), was)
}

// restored tells what became of the qdisc of a device that was given an fq, if there is anything to tell.
func (e *env) restored(device string, o fq.Outcome) bool {
	lost := ""
	if o.Lost > 0 {
		lost = fmt.Sprintf("; packets that still waited are lost: %d", o.Lost)
	}
	switch {
	case o.Replaced:
		e.say("%s: somebody has changed its qdisc since it was given fq, so it stays as it is: %s", device, o.Kind)
	case o.Restored && o.Differs:
		e.say("%s: its qdisc is %s, which is not in all as it was before it was given fq: %s%s", device, o.Kind, o.Was, lost)
	case o.Restored:
		e.say("%s: its qdisc is %s again, as before it was given fq%s", device, o.Kind, lost)
	}
	return o.Replaced || o.Restored
}
