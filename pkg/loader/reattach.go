package loader

import (
	"encoding/json"
	"fmt"
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
	return dir.replaceRecord(reattachedPin, record)
}

// LastReattached is what Reattach did last, in any process.
func LastReattached(o Options) (r Reattached, err error) {
	at, err := locate(o)
	if err != nil {
		return r, err
	}
	record, err := readRecord(at.home().pin(reattachedPin))
	if err == nil && record != nil {
		err = json.Unmarshal(record, &r)
	}
	if err != nil {
		return Reattached{}, fmt.Errorf("read what was attached again: %w", err)
	}
	return r, nil
}
