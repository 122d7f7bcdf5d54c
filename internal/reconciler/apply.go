package reconciler

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A target is a device and the rules to apply, in directions that have none.
type target struct {
	dev    netinfo.Device
	tables []policy.Table
}

// apply applies the rules of all targets together, with the pools that these need. If that fails, it applies the
// remaining rules target by target.
func (r *Reconciler) apply(n *loader.Namespace, targets []target, from lastgood.Policy) {
	var tables []policy.Table
	for _, target := range targets {
		tables = append(tables, target.tables...)
	}
	if len(tables) == 0 {
		return
	}
	done, err := n.ApplyNew(append(tables, from.Pools()))
	r.report(tables, done, from.Path)
	switch {
	case err == nil:
	case len(targets) == 1:
		r.warn(targets[0].dev, err)
	default:
		for _, next := range targets {
			next.tables = slices.DeleteFunc(next.tables, func(t policy.Table) bool { return indexOf(t, done) >= 0 })
			r.apply(n, []target{next}, from)
		}
	}
}

// indexOf returns the index of a table in done, or -1.
func indexOf(t policy.Table, done []loader.Applied) int {
	return slices.IndexFunc(done, func(d loader.Applied) bool { return d.Device == t.Device && d.Direction == t.Direction })
}

// report calls OnApply for the tables that are done.
func (r *Reconciler) report(tables []policy.Table, done []loader.Applied, from string) {
	for _, t := range tables {
		if i := indexOf(t, done); i >= 0 {
			r.OnApply(Event{Device: t.Device, Direction: t.Direction, Rules: len(t.Rules), Policy: from, Change: done[i].Hook})
		}
	}
}

// warn reports an error of a device, unless the device was deleted meanwhile.
func (r *Reconciler) warn(dev netinfo.Device, err error) {
	if exists(dev) {
		r.OnWarning(fmt.Errorf("apply rules to %s: %w", dev.Name, err))
	}
}
