package loader

import (
	"encoding/json"
	"fmt"

	"github.com/cilium/ebpf"
)

// reattachedPin keeps what Reattach did last, for those who tell of events.
const reattachedPin = "reattached"

// Reattached is what Reattach did last.
type Reattached struct {
	At    uint64 // in ns of maps.Now; 0 if it did nothing yet
	Hooks []Side
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
