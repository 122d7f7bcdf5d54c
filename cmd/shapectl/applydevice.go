package main

import (
	"errors"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// applyToDevice gives one device its rules of a policy, and leaves everything else as it is.
func (e *env) applyToDevice(o applyOptions) error {
	f, err := e.policyToApply(o)
	if err != nil {
		return prefixed("apply", err)
	}
	return e.with(loader.WriteFirst, "apply "+f.Path+" to "+plain.Line(o.device), func(n *loader.Namespace) error {
		dev, err := device(o.device)
		if err != nil {
			return err
		}
		want, on, err := tablesOn(dev, f.File)
		if err != nil {
			return err
		}
		done, err := n.ApplyNew(want, want)
		problem, noRoom := errors.AsType[policy.PoolError](err)
		if noRoom = noRoom && problem.NoRoom; noRoom {
			for _, t := range want {
				for i := range t.Rules {
					t.Rules[i] = t.Rules[i].WithoutGuarantee()
				}
			}
			done, err = n.ApplyNew(want, want)
		}
		if err != nil {
			return err
		}
		changed, err := n.ApplyTo(dev, want)
		if err != nil {
			return err
		}
		done = append(done, changed...)
		e.sayUnseen(f.File, on)
		if err := e.applied(report.Applied{Hooks: hooksChanged(done), Pools: poolsChanged(done), Verbose: o.verbose}, true); err != nil || !noRoom {
			return err
		}
		return e.degraded("apply %s to %s: without its guarantees, which have no room: %v", f.Path, plain.Line(dev.Name), problem)
	})
}

// tablesOn are the rules that a policy has for a device, and all its pools, the device's own included.
func tablesOn(dev netinfo.Device, f *policyfile.File) (tables []policy.Table, on policyfile.Device, err error) {
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
		return nil, on, inputf("the policy has no rules for %s, only for %s; name the device or a pattern for it in the policy; nothing was changed",
			plain.Line(dev.Name), plain.List(lines(f.Devices())))
	}
	pools := f.Pools()
	pools.Rules = append(pools.Rules, own...)
	policy.SortRules(pools.Rules)
	return append(tables, pools), on, nil
}
