package keeper

import (
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

// give gives a device the rules of these tables and no others, also where
// something had taken those that it had off it.
func (k *Keeper) give(s surveyed, dev netinfo.Device, tables []policy.Table, from string) error {
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
	if err != nil {
		return err
	}
	for _, t := range tables {
		event := Event{Device: dev.Name, Direction: t.Direction, Rules: len(t.Rules), Policy: from}
		for _, d := range done {
			if d.Direction == t.Direction {
				event.Change = d.Hook
			}
		}
		k.Told(event)
	}
	return nil
}
