package reconciler

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// dropPools deletes the pools that the policy defines for devices that are gone. One that is not as in the policy is
// somebody else's.
func (r *Reconciler) dropPools(n *loader.Namespace) error {
	h := n.Pools()
	defer h.Close()
	if h.Set == nil {
		return nil
	}
	devices, err := netinfo.Devices()
	if err != nil {
		return err
	}
	here := map[string]bool{}
	for _, dev := range devices {
		here[dev.Name] = true
	}
	var gone []string
	for _, p := range h.Set.Policy() {
		if device := p.Label.Owner.Device; device == "" || here[device] {
			continue
		}
		if want := find(r.ownPools(p), p); want != nil && (p == *want || p == want.WithoutGuarantee()) {
			gone = append(gone, p.Label.Name)
		}
	}
	slices.Sort(gone)
	slices.Reverse(gone) // the pool of a direction is within that of its device
	var keys []netip.Prefix
	for _, name := range gone {
		keys = append(keys, policy.PoolKey(name))
	}
	unused := h.Set.Store.Unused(keys)
	if _, err := n.Delete(loader.ApplyOptions{}, func(*loader.Hook) []netip.Prefix { return unused }, h); !errors.Is(err, loader.ErrPending) {
		return err
	}
	return nil
}

// comparePools warns of pools that are there, and so stay as they are, but differ from those of the policy.
func (r *Reconciler) comparePools(n *loader.Namespace, pools policy.Table, from string) {
	h := n.Pools()
	defer h.Close()
	if h.Set == nil {
		return
	}
	for _, want := range pools.Rules {
		have, found := h.Set.Find(want.Prefix)
		name := want.Label.Name
		if !found || have.WithoutGuarantee() == want.WithoutGuarantee() || r.differ[name] == have.Rule {
			continue
		}
		if r.differ == nil {
			r.differ = map[string]policy.Rule{}
		}
		r.differ[name] = have.Rule
		var changes []string
		for _, c := range policy.Changes(&have.Rule, &want) {
			changes = append(changes, c.String())
		}
		r.OnWarning(fmt.Errorf("pool %q is not as in %s, and watch does not change it: to change %s, apply the file",
			name, from, strings.Join(changes, ", ")))
	}
}

// ownPools returns the pools that the policy defines for the device of a pool. For an error there are none: whoever
// applies the policy to the device reports it.
func (r *Reconciler) ownPools(pool policy.Rule) []policy.Rule {
	pools, _ := r.policy.OwnPools(policyfile.Device{Name: pool.Label.Owner.Device})
	return pools
}

// find returns the rule for the network of another one, or the pool with its name; nil if there is none.
func find(rules []policy.Rule, of policy.Rule) *policy.Rule {
	i := slices.IndexFunc(rules, func(r policy.Rule) bool { return r.Prefix == of.Prefix })
	if i < 0 {
		return nil
	}
	return &rules[i]
}

// guarantee gives rules and pools the guarantees that waited for room, as far as there is room now: to all of a device,
// or to none.
func (r *Reconciler) guarantee() error {
	if r.missing || !r.policy.HasGuarantees() {
		return nil
	}
	n, err := r.write()
	if err != nil || n == nil {
		return err
	}
	defer n.Close()
	if n.Readable() != nil || n.Pending() != nil {
		return nil // serve reports it
	}
	tables, err := n.Tables(loader.Attached)
	if err != nil {
		r.OnWarning(err)
		return nil
	}
	waiting := r.waiting(tables)
	full := map[policy.Within]policy.Guarantee{} // by pool: the smallest guarantee that it had no room for
	r.full = nil
	began := time.Now()
	for _, who := range oldestFirst(waiting) {
		first := waiting[who][0].Rules[0]
		if least, ok := full[first.Within]; ok && first.Guarantee >= least {
			continue
		}
		if time.Since(began) > turnTime {
			r.isFull(string(first.Within), policy.Rule{}) // which it is not: look again
			continue
		}
		switch _, err := n.Put(loader.ApplyOptions{}, waiting[who]...); {
		case err == nil:
			r.OnNotice(who + " has its guarantees now")
		case isNoRoom(err):
			full[first.Within] = first.Guarantee
			r.keepFull(n, err)
		default:
			r.OnWarning(fmt.Errorf("give %s its guarantees: %w", who, err))
		}
	}
	return nil
}

// oldestFirst sorts what waits by the age of the devices. What belongs to none comes first.
func oldestFirst(waiting map[string][]policy.Table) []string {
	index := map[string]int{}
	for who := range waiting {
		if dev, err := netinfo.DeviceByName(who); err == nil {
			index[who] = dev.Index
		}
	}
	return slices.SortedFunc(maps.Keys(waiting), func(a, b string) int {
		return cmp.Or(cmp.Compare(index[a], index[b]), cmp.Compare(a, b))
	})
}

// keepFull keeps the pool that an error is about, as it is in force.
func (r *Reconciler) keepFull(n *loader.Namespace, err error) {
	problem, _ := errors.AsType[policy.PoolError](err)
	name := problem.Rule.Label.Name
	r.isFull(name, inForce(n, []string{name})[name])
}

func (r *Reconciler) isFull(pool string, as policy.Rule) {
	if r.full == nil {
		r.full = map[string]policy.Rule{}
	}
	r.full[pool] = as
}

// inForce returns the pools of these names as they are in force.
func inForce(n *loader.Namespace, names []string) map[string]policy.Rule {
	pools := map[string]policy.Rule{}
	h := n.Pools()
	defer h.Close()
	for _, name := range names {
		if h.Set == nil {
			break
		}
		if have, found := h.Set.Find(policy.PoolKey(name)); found {
			pools[name] = have.Rule
		}
	}
	return pools
}

// mayHaveRoom reports whether a pool that had no room for a guarantee has changed since. That a member of it gave up a
// guarantee is seen at the next sweep.
func (r *Reconciler) mayHaveRoom() bool {
	if len(r.full) == 0 {
		return false
	}
	n, err := loader.Read(r.Options)
	if err != nil {
		return false // serve or sweep reports it
	}
	defer n.Close()
	now := inForce(n, slices.Collect(maps.Keys(r.full)))
	for name, was := range r.full {
		if now[name] != was {
			return true
		}
	}
	return false
}

// waiting returns the rules and pools whose guarantees wait for room and that are otherwise as the policy says, with their
// guarantees: by device, or by pool if the pool belongs to no device.
func (r *Reconciler) waiting(tables []policy.Table) map[string][]policy.Table {
	waiting := map[string][]policy.Table{}
	add := func(who string, t policy.Table, want *policy.Rule, have policy.Rule) {
		if want == nil || want.WithoutGuarantee() != have {
			return
		}
		all := waiting[who]
		if i := slices.IndexFunc(all, func(other policy.Table) bool { return other.Device == t.Device && other.Direction == t.Direction }); i >= 0 {
			all[i].Rules = append(all[i].Rules, *want)
			return
		}
		t.Rules = []policy.Rule{*want}
		waiting[who] = append(all, t)
	}
	for _, t := range tables {
		var want []policy.Rule
		for _, have := range t.Rules {
			if have.Label.Waits == 0 {
				continue
			}
			who := cmp.Or(t.Device, have.Label.Owner.Device)
			switch {
			case !t.IsPools() && want == nil:
				want = r.rules(t)
			case t.IsPools() && who != "":
				want = r.ownPools(have)
			case t.IsPools():
				who, want = fmt.Sprintf("pool %q", have.Label.Name), r.policy.Pools().Rules
			}
			add(who, t, find(want, have), have)
		}
	}
	return waiting
}

// rules returns the rules that the policy has for a direction of a device.
func (r *Reconciler) rules(of policy.Table) []policy.Rule {
	dev, err := netinfo.DeviceByName(of.Device)
	if err != nil {
		return nil
	}
	tables, _ := r.policy.For(policyfile.Device{Name: dev.Name, L2Bytes: dev.L2Bytes})
	for _, t := range tables {
		if t.Direction == of.Direction && t.Match == of.Match {
			return t.Rules
		}
	}
	return nil
}
