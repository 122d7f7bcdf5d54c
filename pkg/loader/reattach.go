package loader

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// reattachedPin keeps what Reattach did last, for those who tell of events.
const reattachedPin = "reattached"

// Reattached is what Reattach did last.
type Reattached struct {
	At    uint64 // in ns of maps.Now; 0 if it did nothing yet
	Hooks []Side
}

// A Side is a direction of a device.
type Side struct {
	Device    string
	Direction policy.Direction
}

// Reattach attaches the hooks that something else has detached, with the rules that they have. It returns them also with
// an error.
func (n *Namespace) Reattach() (again []Side, err error) {
	hooks, unread := n.Hooks()
	var detached orders
	for _, h := range hooks {
		if h.State != Detached {
			h.Close()
			continue
		}
		detached = append(detached, newOrder(h, h.Device, policy.Table{Device: h.Device.Name, Direction: h.Direction, Match: h.Match()}))
	}
	defer func() { detached.close() }()
	if len(detached) == 0 {
		return nil, unread
	}
	err = n.pins.changing(func() error { return detached.prepare(&n.pins, n.options) })
	for _, o := range detached {
		if o.State == Attached {
			again = append(again, Side{o.dev.Name, o.Direction})
		}
	}
	if len(again) > 0 {
		err = errors.Join(err, n.pins.dir.keepReattached(Reattached{maps.Now(), again}))
	}
	return again, errors.Join(unread, err)
}

func (dir home) keepReattached(r Reattached) error {
	record, err := json.Marshal(r)
	if err != nil {
		return err
	}
	spec := &ebpf.MapSpec{Name: "shapectl_again", Type: ebpf.Array, ValueSize: uint32(len(record))}
	return dir.replaceRecord(reattachedPin, spec, record)
}

// LastReattached is what Reattach did last, in any process.
func (n *Namespace) LastReattached() (r Reattached, err error) {
	if n.pins.dir == "" {
		return r, nil
	}
	record, err := readRecord(n.pins.dir.pin(reattachedPin))
	if err == nil && record != nil {
		err = json.Unmarshal(record, &r)
	}
	if err != nil {
		return Reattached{}, fmt.Errorf("read what was attached again: %w", err)
	}
	return r, nil
}
