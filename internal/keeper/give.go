package keeper

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A gift is the rules that a device is to get, in directions that have none.
type gift struct {
	dev    netinfo.Device
	tables []policy.Table
}

// give gives devices their rules, all together; each on its own if that fails.
func (k *Keeper) give(n *loader.Namespace, gifts []gift, from string) {
	if len(gifts) == 0 {
		return
	}
	var tables []policy.Table
	for _, g := range gifts {
		tables = append(tables, g.tables...)
	}
	done, err := n.Give(tables)
	switch {
	case err == nil:
		k.tell(tables, done, from)
	case len(gifts) == 1:
		k.warn(gifts[0].dev, err)
	default:
		for i := range gifts {
			k.give(n, gifts[i:i+1], from)
		}
	}
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
