package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// applyToDevices gives devices their rules of a policy, and leaves everything else as it is.
func (e *env) applyToDevices(o applyOptions) error {
	f, err := e.policyToApply(o)
	if err != nil {
		return fmt.Errorf("apply: %w", err)
	}
	var failed []error
	for _, name := range o.devices {
		failed = append(failed, e.with(loader.WriteFirst, "apply "+f.Path+" to "+plain.Line(name), func(n *loader.Namespace) error {
			return e.applyToDevice(n, f, name, o.verbose)
		}))
	}
	return errors.Join(failed...)
}

// applyToDevice gives a device the rules of the policy, or of the one that is in force instead, as of a device that appears.
func (e *env) applyToDevice(n *loader.Namespace, f lastgood.Policy, name string, verbose bool) error {
	dev, err := device(name)
	if err != nil {
		return err
	}
	now, reverted, err := inforce.Phases(n, f)
	if err != nil {
		return err
	}
	want, on, err := tablesOn(dev, now.File)
	if err != nil {
		return err
	}
	then := want
	if reverted.File != now.File {
		if then, _, err = tablesOn(dev, reverted.File); err != nil {
			return err
		}
	}
	if len(want) == 0 && len(then) == 0 {
		if now.File == nil {
			return inputf("this policy was not confirmed, and reverted; apply it again, or correct it; nothing was changed")
		}
		return inputf("the policy has no rules for %s, only for %s; name the device or a pattern for it in the policy; nothing was changed",
			plain.Line(name), plain.List(plain.Lines(now.Devices())))
	}
	if now.File != f.File && reverted.File != f.File {
		e.say("%s was not confirmed, and reverted: %s gets the rules of the policy in force, %s", f.Path, plain.Line(name), now.Path)
	}
	done, err := n.ApplyNew(want, then, nil)
	if err != nil {
		return err
	}
	_, noRoom := waiting(n)
	if len(want) > 0 {
		changed, err := n.ApplyTo(dev, want)
		if err != nil {
			return err
		}
		_, noRoom = waiting(n)
		done = append(done, changed...)
		e.sayUnseen(now.File, on)
	}
	if err := e.applied(report.Applied{Hooks: hooksChanged(done), Pools: poolsChanged(done), Verbose: verbose}, true); err != nil || noRoom == nil {
		return err
	}
	return e.degraded("apply %s to %s: without its guarantees, which have no room: %v", f.Path, plain.Line(name), noRoom)
}

// tablesOn are the rules that a policy has for a device, and all its pools, the device's own included; nil if it has none
// for it.
func tablesOn(dev netinfo.Device, f *policyfile.File) (tables []policy.Table, on policyfile.Device, err error) {
	if f == nil {
		return nil, on, nil
	}
	devices, err := policyDevices(f)
	if err != nil {
		return nil, on, err
	}
	at := slices.IndexFunc(devices, func(d policyfile.Device) bool { return d.Name == dev.Name })
	if at < 0 {
		return nil, on, noDevice(dev.Name) // it has just gone
	}
	on = devices[at]
	if tables, err = f.For(on); err != nil {
		return nil, on, inputError(err)
	}
	own, err := f.OwnPools(on)
	if err != nil {
		return nil, on, inputError(err)
	}
	if len(tables)+len(own) == 0 {
		return nil, on, nil
	}
	pools := f.Pools()
	pools.Rules = append(pools.Rules, own...)
	policy.SortRules(pools.Rules)
	return append(tables, pools), on, nil
}
