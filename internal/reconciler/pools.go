package reconciler

import (
	"fmt"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

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
		r.warnOnce(fmt.Errorf("pool %q is not as in %s, and serve does not change it: to change %s, apply the file",
			want.Label.Name, from, strings.Join(changes, ", ")))
	}
}

// guarantee gives the guarantees that wait to those who have room now, and tells who has none.
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
	if err != nil {
		r.OnWarning(err)
		return nil
	}
	for i := range tables {
		tables[i].Rules = slices.DeleteFunc(slices.Clone(tables[i].Rules), func(p policy.Rule) bool { return p.Label.Waits == 0 })
	}
	tables = slices.DeleteFunc(tables, func(t policy.Table) bool { return len(t.Rules) == 0 })
	if len(tables) > 0 { // devices that appear do not wait for more
		if _, err := n.Put(loader.ApplyOptions{}, tables...); err != nil {
			r.OnWarning(fmt.Errorf("give guarantees that have room now: %w", err))
			return nil
		}
	}
	for who := range r.waits {
		if !slices.ContainsFunc(n.Claims, func(c *policy.Claim) bool { return c.Who == who && c.NoRoom != nil }) {
			delete(r.waits, who)
		}
	}
	for _, c := range n.Claims {
		if c.NoRoom == nil {
			r.OnNotice(c.Who + " has its guarantees now")
		}
	}
	r.sayWaiting(n.Claims)
	return nil
}

// sayWaiting tells who has no room, once.
func (r *Reconciler) sayWaiting(claims []*policy.Claim) {
	for _, c := range claims {
		if c.NoRoom != nil && !r.waits[c.Who] {
			r.waits[c.Who] = true
			r.OnNotice(fmt.Sprintf("%s has its guarantees only when there is room, and until then what other guarantees leave: %v", c.Who, c.NoRoom))
		}
	}
}
