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
	Of      int      // devices of patterns with guarantees
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

// TablesWithRoom is Tables, but a device of a pattern whose guarantees have no room in a pool gets its rules and pools
// without them, as from 'shapectl watch'. Devices that have a guarantee in live, which is called only then, keep it
// before others, and the first of devices come first. It is an error if a pattern has more guarantees than there is room
// for one device of it alone. Without an error, missing is nil if there is room for all.
func (f *File) TablesWithRoom(devices []Device, live func() []policy.Table) (tables []policy.Table, missing *NoRoom, err error) {
	all, err := f.allTables(devices)
	if err != nil {
		return nil, nil, err
	}
	problems := f.poolProblems(policy.NewTree(all))
	if len(problems) == 0 {
		return all, nil, nil
	}
	missing = &NoRoom{Problem: f.errors(problems)}
	patterns, turn := map[string]*section{}, map[string]int{}
	for i, d := range devices {
		turn[d.Name] = i + len(devices)
		if s, _ := f.section(d.Name); s != nil && s.pattern {
			patterns[d.Name] = s
		}
	}
	// without makes all devices of patterns wait but one.
	without := func(but string) (tables []policy.Table) {
		for _, t := range all {
			t.Rules = slices.Clone(t.Rules)
			for i, r := range t.Rules {
				if device := cmp.Or(t.Device, r.Label.Owner.Device); device != but && patterns[device] != nil {
					t.Rules[i] = r.WithoutGuarantee()
				}
			}
			tables = append(tables, t)
		}
		return tables
	}
	tables = without("")
	tree := policy.NewTree(tables)
	if len(f.poolProblems(tree)) > 0 {
		return nil, nil, missing.Problem
	}
	tried := map[*section]bool{nil: true}
	for _, d := range devices {
		if s := patterns[d.Name]; !tried[s] {
			tried[s] = true
			if alone := f.poolProblems(policy.NewTree(without(d.Name))); len(alone) > 0 {
				return nil, nil, f.errors(alone) // there can never be room for a device of this pattern
			}
		}
	}
	for _, t := range live() {
		for _, r := range t.Rules {
			if device := cmp.Or(t.Device, r.Label.Owner.Device); r.Guarantee != 0 && turn[device] >= len(devices) {
				turn[device] -= len(devices)
			}
		}
	}
	claims := tree.Grant(func(who string) int { return turn[who] })
	missing.Of = len(claims)
	for _, c := range claims {
		if c.NoRoom != nil {
			missing.Devices = append(missing.Devices, c.Who)
		}
	}
	return tables, missing, nil
}

// HasGuarantees reports whether anything in the file has a guarantee, or one that waits.
func (f *File) HasGuarantees() bool {
	has := func(r *policy.Rule) bool { return r.Guarantee != 0 || r.Label.Waits != 0 }
	guaranteed := func(p *pool) bool { return has(&p.rule) }
	for _, p := range f.pools {
		if guaranteed(p) {
			return true
		}
	}
	return slices.ContainsFunc(f.devices, func(s section) bool {
		return slices.ContainsFunc(s.allPools(), guaranteed) || slices.ContainsFunc(s.tables, func(t table) bool {
			return slices.ContainsFunc(t.rules, func(r rule) bool { return has(r.rule) })
		})
	})
}
