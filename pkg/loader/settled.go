package loader

import (
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/pkg/maps"
)

// Settle records that the namespace is as goal wants it. Goal identifies all that decides what a command would do, such as the
// text of a policy and the devices, but for rules and what is attached.
func (n *Namespace) Settle(goal []byte) error {
	if n.pins.store == nil || n.pins.state() == maps.Pending {
		return nil
	}
	sum, err := settled(n, goal)
	if err != nil {
		return err
	}
	return bpffs.Record(n.pins.dir.pin(settledPin), sum)
}

// Settled reports whether goal was settled last, nothing has changed since, and all hooks are attached.
func (n *Namespace) Settled(goal []byte) bool {
	if n.pins.store == nil || bpffs.Exists(n.pins.dir.pin(busyPin)) || n.pins.lost != "" {
		return false
	}
	var last [sha256.Size]byte
	if sum, err := settled(n, goal); err != nil || bpffs.Recorded(n.pins.dir.pin(settledPin), &last) != nil || last != sum {
		return false
	}
	hooks, err := n.Hooks()
	defer CloseHooks(hooks)
	return err == nil && !slices.ContainsFunc(hooks, func(h *Hook) bool { return h.State != Attached || h.Unpinned })
}

// settled is a hash of goal, the generation of the maps, the stamp of their rules, and the policy that is recorded.
func settled(n *Namespace, goal []byte) (sum [sha256.Size]byte, err error) {
	generations, err := generationsIn(string(n.pins.dir))
	if err != nil {
		return sum, err
	}
	newest, err := identify(n.pins.dir.pin(generations[len(generations)-1])) // there is one, as there are maps
	if err != nil {
		return sum, err
	}
	policies, err := n.Policies()
	return sha256.Sum256(slices.Concat(goal, fmt.Append(nil, newest, n.pins.store.Stamp()), policies.Now)), err
}
