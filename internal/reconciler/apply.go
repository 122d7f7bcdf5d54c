package reconciler

import (
	"errors"
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A target is a device, the rules to apply, in directions that have none, and the pools that the policy defines for it.
type target struct {
	dev    netinfo.Device
	tables []policy.Table
	pools  []policy.Rule
}

// apply applies the rules of all targets together, with the pools that these need. If that fails, it applies the
// remaining rules target by target. A target whose guarantees have no room in a pool gets its rules without them.
func (r *Reconciler) apply(n *loader.Namespace, targets []target, from lastgood.Policy) {
	var tables []policy.Table
	pools := from.Pools()
	for _, target := range targets {
		tables, pools.Rules = append(tables, target.tables...), append(pools.Rules, target.pools...)
	}
	if len(tables) == 0 && !slices.ContainsFunc(pools.Rules, isOfHost) {
		return
	}
	err := r.applyNew(n, tables, pools, from.Path)
	switch {
	case err == nil:
	case len(targets) > 1:
		for _, next := range targets {
			r.apply(n, []target{next}, from)
		}
	case isNoRoom(err):
		problem, _ := errors.AsType[policy.PoolError](err)
		for i := range tables {
			tables[i] = withoutGuarantees(tables[i])
		}
		if err := r.applyNew(n, tables, withoutGuarantees(pools), from.Path); err != nil {
			r.warn(targets[0].dev, err)
			return
		}
		r.keepFull(n, err)
		r.OnNotice(fmt.Sprintf("%s has its guarantees only when there is room, and until then what other guarantees leave: %v", targets[0].dev.Name, problem))
	default:
		r.warn(targets[0].dev, err)
	}
}

// applyNew applies tables to directions that have no rules, and reports those that are done.
func (r *Reconciler) applyNew(n *loader.Namespace, tables []policy.Table, pools policy.Table, from string) error {
	r.comparePools(n, pools, from)
	done, err := n.ApplyNew(append(slices.Clone(tables), pools))
	for _, t := range tables {
		i := slices.IndexFunc(done, func(d loader.Applied) bool { return d.Device == t.Device && d.Direction == t.Direction })
		if i >= 0 {
			r.OnApply(Event{Device: t.Device, Direction: t.Direction, Rules: len(t.Rules), Policy: from, Change: done[i].Hook})
		}
	}
	return err
}

// isOfHost reports whether a pool is of a host. There is one also while no address of the host is known.
func isOfHost(p policy.Rule) bool {
	_, _, ok := policyfile.SideOfHost(&p)
	return ok
}

func isNoRoom(err error) bool {
	problem, ok := errors.AsType[policy.PoolError](err)
	return ok && problem.NoRoom
}

func withoutGuarantees(t policy.Table) policy.Table {
	t.Rules = slices.Clone(t.Rules)
	for i := range t.Rules {
		t.Rules[i] = t.Rules[i].WithoutGuarantee()
	}
	return t
}

// warn reports an error of a device, unless the device was deleted meanwhile.
func (r *Reconciler) warn(dev netinfo.Device, err error) {
	if exists(dev) {
		r.OnWarning(fmt.Errorf("apply rules to %s: %w", dev.Name, err))
	}
}
