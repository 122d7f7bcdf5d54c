package reconciler

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// dropPools deletes the pools of devices that are gone, unless anything is within them.
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
		if device := p.Label.Owner.Device; device != "" && !here[device] {
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
		if !found || have.WithoutGuarantee() == want.WithoutGuarantee() {
			continue
		}
		var changes []string
		for _, c := range policy.Changes(&have.Rule, &want) {
			changes = append(changes, c.String())
		}
		r.warnOnce(fmt.Errorf("pool %q is not as in %s, and watch does not change it: to change %s, apply the file",
			want.Label.Name, from, strings.Join(changes, ", ")))
	}
}

// guarantee gives the guarantees that wait to those who have room now, and tells who has none. The oldest device comes first.
func (r *Reconciler) guarantee() error {
	if r.missing || !r.policy.HasGuarantees() {
		return nil
	}
	n, err := r.write()
	if err != nil || n == nil {
		return err
	}
	defer n.Close()
	pools := n.Pools()
	defer pools.Close()
	if n.Readable() != nil || n.Pending() != nil || pools.Set == nil || pools.Set.Store.Stamp() == r.granted {
		return nil // serve reports what cannot be read
	}
	r.granted = pools.Set.Store.Stamp()
	tables, err := n.Tables(loader.Attached)
	devices, errDevices := netinfo.Devices()
	if err = errors.Join(err, errDevices); err != nil {
		r.OnWarning(err)
		return nil
	}
	index := map[string]int{}
	for _, dev := range devices {
		index[dev.Name] = dev.Index
	}
	was, waits := r.waits, map[string]bool{}
	r.waits = waits
	wait := func(who string, err error) {
		if waits[who] = true; !was[who] {
			r.OnNotice(fmt.Sprintf("%s has its guarantees only when there is room, and until then what other guarantees leave: %v", who, err))
		}
	}
	var room []*policy.Claim
	for _, c := range policy.NewTree(tables).Grant(func(who string) int { return index[who] }) {
		if c.NoRoom == nil {
			room = append(room, c)
		} else {
			wait(c.Who, c.NoRoom)
		}
	}
	give := func(claims ...*policy.Claim) error {
		if err := put(n, tables, claims); err != nil {
			return err
		}
		for _, c := range claims {
			if told, found := was[c.Who]; told || !found { // else it got its rules only now
				r.OnNotice(c.Who + " has its guarantees now")
			}
		}
		return nil
	}
	allOrEach(room, give, func(c *policy.Claim, err error) {
		if policy.IsNoRoom(err) { // as what is kept for an absent device has it
			wait(c.Who, err)
		} else {
			r.OnWarning(fmt.Errorf("give %s its guarantees: %w", c.Who, err))
		}
	})
	return nil
}

// put puts what was claimed of tables into force.
func put(n *loader.Namespace, tables []policy.Table, claims []*policy.Claim) error {
	claimed := map[*policy.Rule]bool{}
	for _, c := range claims {
		for _, m := range c.Members {
			claimed[m.Rule] = true
		}
	}
	var some []policy.Table
	for _, t := range tables {
		all := t.Rules
		t.Rules = nil
		for i := range all {
			if claimed[&all[i]] {
				t.Rules = append(t.Rules, all[i])
			}
		}
		if t.Rules != nil {
			some = append(some, t)
		}
	}
	_, err := n.Put(loader.ApplyOptions{}, some...)
	return err
}
