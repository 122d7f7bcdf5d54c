package keeper

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A surveyed is a namespace, open for changes, and what rules there are in it.
type surveyed struct {
	namespace *loader.Namespace
	hooks     []*loader.Hook
	inForce   map[int]bool // by index: whether a device has rules in force
}

// survey looks at all hooks of a namespace. With the error comes what could be looked at.
func survey(n *loader.Namespace) (surveyed, error) {
	hooks, err := n.Hooks()
	s := surveyed{namespace: n, hooks: hooks, inForce: map[int]bool{}}
	for _, h := range hooks {
		if h.InForce() {
			s.inForce[h.Device.Index] = true
		}
	}
	return s, err
}

func (s surveyed) Close() {
	for _, h := range s.hooks {
		h.Close()
	}
}

// lost reports whether a device has rules that are not in force.
func (s surveyed) lost(dev netinfo.Device) bool {
	return slices.ContainsFunc(s.hooks, func(h *loader.Hook) bool { return h.Name() == dev.Name && !h.InForce() })
}

// A turn is devices that are to get rules, and these.
type turn struct {
	devices []netinfo.Device
	tables  []policy.Table
}

// add has a device get tables.
func (t *turn) add(dev netinfo.Device, tables []policy.Table) {
	t.devices = append(t.devices, dev)
	t.tables = append(t.tables, tables...)
}

// give gives devices without hooks their rules, all together; each on its own if that fails.
func (k *Keeper) give(s surveyed, t turn, from string) {
	if len(t.devices) == 0 {
		return
	}
	done, err := s.namespace.Give(t.tables)
	if err == nil {
		k.tell(t.tables, done, from)
		return
	}
	if len(t.devices) == 1 {
		k.warn(t.devices[0], err)
		return
	}
	for _, dev := range t.devices {
		k.give(s, turn{[]netinfo.Device{dev}, tablesOf(t.tables, dev.Name)}, from)
	}
}

func tablesOf(tables []policy.Table, device string) (its []policy.Table) {
	for _, t := range tables {
		if t.Device == device {
			its = append(its, t)
		}
	}
	return its
}

// repair gives a device the rules of these tables and no others, where something had
// taken those that it had off it.
func (k *Keeper) repair(s surveyed, dev netinfo.Device, tables []policy.Table, from string) error {
	for _, h := range s.hooks {
		if h.InForce() || h.Name() != dev.Name {
			continue
		}
		i := slices.IndexFunc(tables, func(t policy.Table) bool { return t.Direction == h.Direction && t.Match == h.Match() })
		if i < 0 {
			if err := s.namespace.Flush(h); err != nil {
				return err
			}
		}
	}
	done, err := s.namespace.Apply(tables, loader.ApplyOptions{Only: dev.Name})
	if err == nil {
		k.tell(tables, done, from)
	}
	return err
}

func (k *Keeper) tell(tables []policy.Table, done []loader.Applied, from string) {
	for _, t := range tables {
		event := Event{Device: t.Device, Direction: t.Direction, Rules: len(t.Rules), Policy: from}
		for _, d := range done {
			if d.Device == t.Device && d.Direction == t.Direction {
				event.Change = d.Hook
			}
		}
		k.Told(event)
	}
}

// warn tells what is the matter with a device, unless it is that it was deleted meanwhile.
func (k *Keeper) warn(dev netinfo.Device, err error) {
	if isThere(dev) {
		k.Warned(fmt.Errorf("give %s its rules: %w", dev.Name, err))
	}
}
