package keeper

import (
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A gift is the rules that a device is to get, in directions that have none.
type gift struct {
	dev    netinfo.Device
	tables []policy.Table
}

// give gives devices their rules, all together; each on its own what it has not got, if that fails.
func (k *Keeper) give(n *loader.Namespace, gifts []gift, from string) {
	var tables []policy.Table
	for _, g := range gifts {
		tables = append(tables, g.tables...)
	}
	if len(tables) == 0 {
		return
	}
	done, err := n.ApplyNew(tables)
	k.tell(tables, done, from)
	switch {
	case err == nil:
	case len(gifts) == 1:
		k.warn(gifts[0].dev, err)
	default:
		for _, g := range gifts {
			g.tables = slices.DeleteFunc(g.tables, func(t policy.Table) bool { return of(t, done) >= 0 })
			k.give(n, []gift{g}, from)
		}
	}
}

// of is where a table is among those that are done, -1 if it is not.
func of(t policy.Table, done []loader.Applied) int {
	return slices.IndexFunc(done, func(d loader.Applied) bool { return d.Device == t.Device && d.Direction == t.Direction })
}

func (k *Keeper) tell(tables []policy.Table, done []loader.Applied, from string) {
	for _, t := range tables {
		if i := of(t, done); i >= 0 {
			k.Told(Event{Device: t.Device, Direction: t.Direction, Rules: len(t.Rules), Policy: from, Change: done[i].Hook})
		}
	}
}

// warn tells what is the matter with a device, unless it is that it was deleted meanwhile.
func (k *Keeper) warn(dev netinfo.Device, err error) {
	if isThere(dev) {
		k.Warned(fmt.Errorf("give %s its rules: %w", dev.Name, err))
	}
}
