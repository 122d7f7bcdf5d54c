package reconciler

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// wants are the rules of a policy for directions of a device that have none, and the pools that the policy defines for it.
type wants struct {
	tables []policy.Table
	pools  []policy.Rule
}

// empty reports whether there is nothing to apply.
func (w wants) empty() bool { return len(w.tables) == 0 && !slices.ContainsFunc(w.pools, isOfHost) }

// wantedOn is what a policy wants in those directions of a device that have no rules.
func wantedOn(dev policyfile.Device, from lastgood.Policy, has []policy.Direction) (w wants, err error) {
	if w.tables, err = from.For(dev); err == nil {
		w.pools, err = from.OwnPools(policyfile.Device{Name: dev.Name})
	}
	w.tables = slices.DeleteFunc(w.tables, func(t policy.Table) bool { return slices.Contains(has, t.Direction) })
	w.pools = slices.DeleteFunc(w.pools, func(p policy.Rule) bool {
		return isOfHost(p) && slices.Contains(has, p.Label.Owner.Direction)
	})
	return w, err
}

// A target is a device, what to apply, and what that shall be once the last change has reverted.
type target struct {
	dev     netinfo.Device
	renamed bool // it has rules, which are to be those of its new name
	wants
	reverted wants
}

// together are the tables of targets, and the pools that they draw from.
func together(targets []target, of func(target) wants, from lastgood.Policy) (tables []policy.Table, pools policy.Table) {
	for _, t := range targets {
		tables, pools.Rules = append(tables, of(t).tables...), append(pools.Rules, of(t).pools...)
	}
	pools.Rules = append(pools.Rules, from.Above(append(tables, pools)...)...)
	return tables, pools
}

// allOrEach does all at once, or if that fails, one after the other.
func allOrEach[T any](all []T, do func(...T) error, failed func(T, error)) {
	if len(all) > 1 && do(all...) == nil {
		return
	}
	for _, one := range all {
		if err := do(one); err != nil {
			failed(one, err)
		}
	}
}

// apply applies the rules of targets together, with the pools that these need.
func (r *Reconciler) apply(n *loader.Namespace, targets []target, from, reverted lastgood.Policy) error {
	tables, pools := together(targets, func(t target) wants { return t.wants }, from)
	tables = append(tables, pools)
	then, poolsThen := together(targets, func(t target) wants { return t.reverted }, reverted)
	then = append(then, poolsThen)
	done, err := n.ApplyNew(tables, then, from.Names)
	r.tell(tables, done, from)
	if err == nil {
		r.sayWaiting(n.Claims)
	}
	r.comparePools(n, pools, from.Path)
	for _, t := range targets {
		returned := func(d loader.Applied) bool { return d.Device == t.dev.Name && d.Hook.Reattached != "" }
		if err == nil && (t.renamed || slices.ContainsFunc(done, returned)) {
			r.compare(n, t, from)
		}
	}
	return err
}

// tell reports the tables that are done.
func (r *Reconciler) tell(tables []policy.Table, done []loader.Applied, from lastgood.Policy) {
	for _, t := range tables {
		i := slices.IndexFunc(done, func(d loader.Applied) bool { return d.Device == t.Device && d.Direction == t.Direction })
		if i >= 0 && !t.IsPools() {
			r.OnApply(Event{Device: t.Device, Direction: t.Direction, Rules: len(t.Rules), Policy: from.Path, Change: done[i].Hook})
		}
	}
}

// isOfHost reports whether a pool is of a host. There is one also while no address of the host is known.
func isOfHost(p policy.Rule) bool { return p.Label.Owner.Host != "" }

// warn reports an error of a device, unless the device was deleted meanwhile. The next sweep tries the device again.
func (r *Reconciler) warn(dev netinfo.Device, err error) {
	if exists(dev) {
		r.failed[dev.Index] = dev
		r.warnOnce(fmt.Errorf("apply rules to %s: %w", dev.Name, err))
	}
}

// warnOnce reports what does not change as long as it lasts.
func (r *Reconciler) warnOnce(err error) {
	if text := err.Error(); !r.warned[text] {
		r.warned[text] = true
		r.OnWarning(err)
	}
}
