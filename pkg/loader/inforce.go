package loader

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/shapectl/shapectl/pkg/maps"
)

// policyPin keeps the policy in force as it was applied, because its file may change.
const (
	policyPin  = "policy"
	mostPolicy = 4<<20 - 16 // bytes: Linux refuses larger values of a map, and nothing is known then
)

// Policies are those that were applied, as KeepPolicy was given them; nil for one that is not known. Single rules may have been changed since.
type Policies struct {
	Now      []byte // in force
	Reverted []byte // in force once the pending change has reverted
	Undone   []byte // the last one, if its change has reverted
}

// A policyRecord is what policyPin has.
type policyRecord struct {
	now, other []byte
	began      uint64 // the change that replaced other by now, in ns of maps.Now; or undone, or 0
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
		if err := n.makeHome(); err != nil {
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
		record.other, record.began = last.Now, n.pins.store.Begins()
	case last.Undone != nil:
		record.other, record.began = last.Undone, undone
	}
	record.now = p
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
	isLast := s.store != nil && p.began == s.store.Begins()
	switch {
	case p.began == undone:
		return Policies{p.now, p.now, p.other}
	case isLast && state == maps.Expired:
		return Policies{p.other, p.other, p.now}
	case isLast && state == maps.Pending:
		return Policies{p.now, p.other, nil}
	}
	return Policies{p.now, p.now, nil}
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
	if p.Undone == nil || record.began == undone {
		return nil
	}
	return s.dir.keepPolicies(policyRecord{p.Now, p.Undone, undone})
}

// policies reads the record.
func (dir home) policies() (p policyRecord, err error) {
	record, err := readRecord(dir.pin(policyPin))
	if err != nil || len(record) < 16 {
		return p, err
	}
	p.began = binary.NativeEndian.Uint64(record)
	length := min(binary.NativeEndian.Uint64(record[8:]), uint64(len(record)-16))
	p.now, p.other = record[16:16+length], record[16+length:]
	return p, nil
}

// keepPolicies replaces the record.
func (dir home) keepPolicies(p policyRecord) error {
	if size := len(p.now) + len(p.other); size == 0 || size > mostPolicy {
		return unlink(dir.pin(policyPin))
	}
	var record []byte
	record = binary.NativeEndian.AppendUint64(record, p.began)
	record = binary.NativeEndian.AppendUint64(record, uint64(len(p.now)))
	record = append(append(record, p.now...), p.other...)
	if err := dir.replaceRecord(policyPin, record); err != nil {
		return fmt.Errorf("record the policy in force: %w", err)
	}
	return nil
}
