package policyfile

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// NoRoom says that pools have no room for the guarantees of some devices that match patterns.
type NoRoom struct {
	Devices []string // which have their rules without guarantees
	Of      int      // devices with guarantees, of patterns or by name
	Problem Errors   // of the pools, with all guarantees
}

// Waiting are the devices; none for nil.
func (n *NoRoom) Waiting() []string {
	if n == nil {
		return nil
	}
	return n.Devices
}

func (n *NoRoom) Error() string {
	return fmt.Sprintf("no room for the guarantees of %d of %s: %s; until there is room, they get what other guarantees leave, at worst nothing",
		len(n.Devices), plain.Count(n.Of, "device"), plain.List(n.Devices))
}

// A claim is what one device of a pattern has with guarantees: rules and pools.
type claim struct {
	device string
	*section
	rules []*policy.Rule
	had   []policy.Rule // as the policy says
}

func (c *claim) give() {
	for i, r := range c.rules {
		*r = c.had[i]
	}
}

func (c *claim) wait() {
	for _, r := range c.rules {
		*r = r.WithoutGuarantee()
	}
}

// TablesWithRoom is Tables, but a device of a pattern whose guarantees have no room in a pool gets its rules and pools
// without them, as from 'shapectl watch'. Devices that have a guarantee in live, which is called only then, keep it
// before others, and the first of devices come first. It is an error if a pattern has more guarantees than there is room
// for one device of it alone. Without an error, missing is nil if there is room for all.
func (f *File) TablesWithRoom(devices []Device, live func() []policy.Table) (tables []policy.Table, missing *NoRoom, err error) {
	if tables, err = f.allTables(devices); err != nil {
		return nil, nil, err
	}
	problems := f.poolProblems(policy.NewTree(tables))
	if len(problems) == 0 {
		return tables, nil, nil
	}
	missing = &NoRoom{Of: f.guaranteed(tables), Problem: f.errors(problems)}
	claims := f.claims(tables)
	for _, c := range claims {
		c.wait()
	}
	if without := f.poolProblems(policy.NewTree(tables)); len(without) > 0 {
		return nil, nil, missing.Problem
	}
	tried := map[*section]bool{}
	for _, c := range claims {
		if tried[c.section] {
			continue
		}
		tried[c.section] = true
		c.give()
		alone := f.poolProblems(policy.NewTree(tables))
		if c.wait(); len(alone) > 0 {
			return nil, nil, f.errors(alone) // there can never be room for a device of this pattern
		}
	}
	has := map[string]bool{}
	for _, t := range live() {
		for _, r := range t.Rules {
			if r.Guarantee != 0 {
				has[cmp.Or(t.Device, r.Label.Owner.Device)] = true
			}
		}
	}
	place := map[string]int{}
	for i, d := range devices {
		if place[d.Name] = i; !has[d.Name] {
			place[d.Name] += len(devices)
		}
	}
	slices.SortFunc(claims, func(a, b *claim) int { return cmp.Compare(place[a.device], place[b.device]) })
	full := map[*section]bool{}
	var give func([]*claim)
	give = func(claims []*claim) { // as one after the other, with fewer trees
		claims = slices.DeleteFunc(slices.Clone(claims), func(c *claim) bool {
			if full[c.section] {
				missing.Devices = append(missing.Devices, c.device)
			}
			return full[c.section]
		})
		for _, c := range claims {
			c.give()
		}
		if len(policy.NewTree(tables).Problems()) == 0 {
			return
		}
		for _, c := range claims {
			c.wait()
		}
		if len(claims) == 1 {
			full[claims[0].section] = true // other devices of it need as much
			missing.Devices = append(missing.Devices, claims[0].device)
			return
		}
		give(claims[:len(claims)/2])
		give(claims[len(claims)/2:])
	}
	give(claims)
	return tables, missing, nil
}

// guaranteed counts the devices that have guarantees.
func (f *File) guaranteed(tables []policy.Table) int {
	devices := map[string]bool{}
	for _, t := range tables {
		for _, r := range t.Rules {
			if device := cmp.Or(t.Device, r.Label.Owner.Device); r.Guarantee != 0 && device != "" {
				devices[device] = true
			}
		}
	}
	return len(devices)
}

// claims returns what devices of patterns have with guarantees.
func (f *File) claims(tables []policy.Table) (claims []*claim) {
	byDevice := map[string]*claim{}
	for _, t := range tables {
		for i := range t.Rules {
			r := &t.Rules[i]
			device := cmp.Or(t.Device, r.Label.Owner.Device)
			s, _ := f.section(device)
			if r.Guarantee == 0 || s == nil || !s.pattern {
				continue
			}
			c := byDevice[device]
			if c == nil {
				c = &claim{device: device, section: s}
				byDevice[device], claims = c, append(claims, c)
			}
			c.rules, c.had = append(c.rules, r), append(c.had, *r)
		}
	}
	return claims
}

// HasGuarantees reports whether anything in the file has a guarantee.
func (f *File) HasGuarantees() bool {
	guaranteed := func(p *pool) bool { return p.rule.Guarantee != 0 }
	for _, p := range f.pools {
		if guaranteed(p) {
			return true
		}
	}
	return slices.ContainsFunc(f.devices, func(s section) bool {
		return slices.ContainsFunc(s.own, guaranteed) || slices.ContainsFunc(s.hostPools(), guaranteed) || slices.ContainsFunc(s.tables, func(t table) bool {
			return slices.ContainsFunc(t.rules, func(r rule) bool { return r.rule.Guarantee != 0 })
		})
	})
}
