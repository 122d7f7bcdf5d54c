package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
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
	switch {
	case u.Fixed != nil && u.State.HasFQ:
		return fmt.Sprintf("shorten the queue (--capacity or --queue); %v", u.Fixed)
	case u.Fixed != nil:
		return u.Fixed.Error()
	case u.State.HasFQ:
		return "shorten the queue (--capacity or --queue), or raise its horizon by --setup-fq"
	}
	return fmt.Sprintf("--setup-fq sets it up until %s", e.suggest("flush", u.Device))
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
	return e.degraded("%s: up to %d packets may be queued, but its fq holds only %d, and %d of one flow; %s",
		device, c.Lacks, s.Limit, s.FlowLimit, s.Advice("use --setup-fq"))
}

func (e *env) replacedByFQ(device, was string) string {
	return fmt.Sprintf("%s: its qdisc is now fq instead of %s; %s brings the default back", device, was, e.suggest("flush", device))
}

// removeFQs removes the fqs of --setup-fq from some devices, and reports whether there were any.
func (e *env) removeFQs(some func(netinfo.Device) (bool, error)) (any bool, err error) {
	indexes, err := fq.Devices()
	for _, index := range indexes {
		dev, here, lookup := netinfo.DeviceByIndex(index)
		if lookup != nil || !here {
			continue
		}
		is, failed := some(dev)
		var gone fq.Removal
		if is && failed == nil {
			gone, failed = fq.Remove(dev.Index)
		}
		if err = errors.Join(err, failed); gone.Kind == "" {
			continue
		}
		lost := ""
		if gone.Lost > 0 {
			lost = fmt.Sprintf("; queued packets lost: %d", gone.Lost)
		}
		e.say("%s: its qdisc is the default again: %s%s", plain.Line(dev.Name), gone.Kind, lost)
		any = true
	}
	return any, err
}
