package loader

import (
	"bytes"
	"fmt"
	"math"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/pkg/maps"
)

// mostPolicy is how many bytes of packed policies are recorded: Linux refuses larger values of a map, and nothing is known then.
const mostPolicy = 3<<20 - 1<<10 // which are 4 MiB of JSON

// Policies are those that were applied, as KeepPolicy was given them; nil for one that is not known. Single rules may have been changed since.
type Policies struct {
	Now      []byte // in force
	Reverted []byte // in force once the pending change has reverted
	Undone   []byte // the last one, if its change has reverted
}

// A policyRecord is the record of the policy in force as it was applied, because its file may change.
type policyRecord struct {
	Now, Other []byte
	Began      uint64 // the change that replaced Other by Now, in ns of maps.Now; or undone, or 0
}

// undone says that the change that brought the other policy has reverted.
const undone = math.MaxUint64

// KeepPolicy records the policy that is in force from now on. If the last change brought it into force, the policy
// before it is in force again when that change reverts.
func (n *Namespace) KeepPolicy(p []byte, byChange bool) error {
	if n.pins.foreign != nil {
		return nil // this build changes nothing of another layout
	}
	if n.pins.dir == "" && p == nil { // none is recorded
		return nil
	}
	if n.pins.dir == "" {
		if err := n.pins.makeHome(); err != nil {
			return err
		}
	}
	record, err := n.pins.dir.policies()
	if err != nil {
		return err
	}
	last := n.pins.followPolicy(record)
	switch {
	case bytes.Equal(p, last.Now):
		return nil
	case byChange && n.pins.store != nil:
		record.Other, record.Began = last.Now, n.pins.store.Begins()
	case last.Undone != nil:
		record.Other, record.Began = last.Undone, undone
	}
	record.Now = p
	return n.pins.dir.keepPolicies(record)
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
	state := s.state()
	isLast := s.store != nil && p.Began == s.store.Begins()
	switch {
	case p.Began == undone:
		return Policies{p.Now, p.Now, p.Other}
	case isLast && state == maps.Expired:
		return Policies{p.Other, p.Other, p.Now}
	case isLast && state == maps.Pending:
		return Policies{p.Now, p.Other, nil}
	}
	return Policies{p.Now, p.Now, nil}
}

// state is that of the last change.
func (s *bpfState) state() maps.ChangeState {
	if s.store == nil {
		return maps.NoChange
	}
	state, _ := s.store.Change()
	return state
}

// settlePolicy records the policy that is in force, before a change that has reverted is forgotten.
func (s *bpfState) settlePolicy() error {
	record, err := s.dir.policies()
	if err != nil {
		return err
	}
	p := s.followPolicy(record)
	if p.Undone == nil || record.Began == undone {
		return nil
	}
	return s.dir.keepPolicies(policyRecord{p.Now, p.Undone, undone})
}

// policies reads the record.
func (dir home) policies() (p policyRecord, err error) {
	err = bpffs.Recorded(dir.pin(policyPin), &p)
	return p, err
}

// keepPolicies replaces the record.
func (dir home) keepPolicies(p policyRecord) error {
	if size := len(p.Now) + len(p.Other); size == 0 || size > mostPolicy {
		return bpffs.Unlink(dir.pin(policyPin))
	}
	if err := bpffs.Record(dir.pin(policyPin), p); err != nil {
		return fmt.Errorf("record the policy in force: %w", err)
	}
	return nil
}
