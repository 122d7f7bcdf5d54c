package loader

import (
	"bytes"
	"fmt"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/pkg/maps"
)

// mostPolicy is how many bytes of packed policies are recorded: Linux refuses larger values of a map, and nothing is known then.
const mostPolicy = 3<<20 - 1<<10 // which are 4 MiB of JSON

// Policies are those that were applied, as KeepPolicy was given them; nil for one that is not known. Single rules may have been changed since.
type Policies struct {
	Now      []byte // in force
	Reverted []byte // in force once the last change has reverted
	Lasts    bool   // that change is not pending, but can be rolled back
	Undone   []byte // the last one, if its change has reverted
}

// A policyRecord is the record of the policy in force as it was applied, because its file may change.
type policyRecord struct {
	Now, Before, Undone []byte
	ByChange            bool // the last change replaces Before by Now, and is not over, or a killed command prepared it
}

// KeepPolicy records the policy that is in force from now on.
func (n *Namespace) KeepPolicy(p []byte) error {
	if n.pins.foreign != nil {
		return nil // this build changes nothing of another layout
	}
	if n.pins.dir == "" && len(p) == 0 { // none is recorded
		return nil
	}
	if n.pins.dir == "" {
		if err := n.pins.makeHome(); err != nil {
			return err
		}
	}
	return n.pins.keepPolicy(p, false)
}

// keepPolicy records the policy that is in force from now on, or once the change that is prepared begins.
func (s *bpfState) keepPolicy(p []byte, byChange bool) error {
	record, err := s.dir.policies()
	if err != nil {
		return err
	}
	last := s.followPolicy(record)
	switch {
	case bytes.Equal(p, last.Now):
		return nil
	case byChange:
		record = policyRecord{Before: last.Now, Undone: last.Undone, ByChange: true}
	case last.Undone != nil:
		record = policyRecord{Undone: last.Undone}
	}
	record.Now = p
	return s.dir.keepPolicies(record)
}

// Policies returns the policy in force, and what a revert would change or has changed.
func (n *Namespace) Policies() (Policies, error) {
	if n.pins.dir == "" {
		return Policies{}, nil
	}
	record, err := n.pins.dir.policies()
	return n.pins.followPolicy(record), err
}

// followPolicy applies the state of the last change to a record.
func (s *bpfState) followPolicy(p policyRecord) Policies {
	switch state := s.state(); {
	case !p.ByChange:
		return Policies{Now: p.Now, Reverted: p.Now, Undone: p.Undone}
	case s.store == nil: // another layout cannot be read
		return Policies{Now: p.Now, Reverted: p.Now}
	case state == maps.Pending, state == maps.Committed:
		return Policies{Now: p.Now, Reverted: p.Before, Lasts: state == maps.Committed}
	case state == maps.Expired:
		return Policies{Now: p.Before, Reverted: p.Before, Undone: p.Now}
	}
	return Policies{Now: p.Before, Reverted: p.Before, Undone: p.Undone} // it has not begun
}

// state is that of the last change.
func (s *bpfState) state() maps.ChangeState {
	if s.store == nil {
		return maps.NoChange
	}
	state, _ := s.store.Change()
	return state
}

// settlePolicy records the policy that is in force, before a change is forgotten.
func (s *bpfState) settlePolicy() error {
	record, err := s.dir.policies()
	if err != nil || !record.ByChange {
		return err
	}
	p := s.followPolicy(record)
	return s.dir.keepPolicies(policyRecord{Now: p.Now, Undone: p.Undone})
}

// policies reads the record.
func (dir home) policies() (p policyRecord, err error) {
	err = bpffs.Recorded(dir.pin(policyPin), &p)
	return p, err
}

// keepPolicies replaces the record.
func (dir home) keepPolicies(p policyRecord) error {
	if size := len(p.Now) + len(p.Before) + len(p.Undone); size == 0 || size > mostPolicy {
		return bpffs.Unlink(dir.pin(policyPin))
	}
	if err := bpffs.Record(dir.pin(policyPin), p); err != nil {
		return fmt.Errorf("record the policy in force: %w", err)
	}
	return nil
}
