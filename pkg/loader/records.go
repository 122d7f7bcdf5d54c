package loader

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf"
)

// Pins of records, each a map with a text of JSON.
const (
	policyPin     = "policy"
	authorPin     = "author"
	reattachedPin = "reattached"
)

// record records a value in the place of the last one. A killed command leaves one of the two.
func (dir home) record(pin string, value any) error {
	text, err := json.Marshal(value)
	aside := dir.pin(pin) + asideSuffix
	if err == nil {
		err = unlink(aside)
	}
	if err == nil {
		err = pinValue(aside, &ebpf.MapSpec{Name: "shapectl_" + pin, Type: ebpf.Array, ValueSize: uint32(len(text))}, text)
	}
	if err == nil {
		err = renamePins(aside, dir.pin(pin))
	}
	return err
}

// recorded reads a record, if there is one.
func (dir home) recorded(pin string, value any) error {
	m, err := ebpf.LoadPinnedMap(dir.pin(pin), &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", dir.pin(pin), err)
	}
	defer m.Close()
	text, err := m.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read %s: %w", dir.pin(pin), err)
	}
	json.Unmarshal(text, value) // one that cannot be read is none: another build made it
	return nil
}

// An Author is who made a pending change, with which command, and when in ns of maps.Now; zero if that is not known.
type Author struct {
	Who   string // see ApplyOptions
	Began uint64
}

// pending describes the change that is pending.
func (s *bpfState) pending() *PendingError {
	p := &PendingError{Until: s.store.Until()}
	if err := s.dir.recorded(authorPin, &p.Author); err != nil || p.Author.Began != s.store.Begins() {
		p.Author = Author{} // of an earlier change
	}
	return p
}

// Reattached is what Reattach did last.
type Reattached struct {
	At    uint64 // in ns of maps.Now; 0 if it did nothing yet
	Hooks []Side
}

// LastReattached is what Reattach did last, in any process.
func LastReattached(o Options) (r Reattached, err error) {
	at, err := locate(o)
	if err == nil {
		err = at.home().recorded(reattachedPin, &r)
	}
	return r, err
}
