package loader

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"fmt"
	"io"
	"os"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/pkg/maps"
)

// policyPin keeps the policy in force as it was applied, because its file may change.
const policyPin = "policy"

// A PackedPolicy is the text of a policy, and the path of its file; nil for none.
type PackedPolicy []byte

// PackPolicy packs a policy. The path of standard input is "-".
func PackPolicy(path string, text []byte) PackedPolicy {
	var all bytes.Buffer
	w := gzip.NewWriter(&all)
	w.Write([]byte(path + "\x00")) // to memory
	w.Write(text)
	w.Close()
	return all.Bytes()
}

// Unpack is the reverse of PackPolicy.
func (p PackedPolicy) Unpack() (path string, text []byte, err error) {
	r, err := gzip.NewReader(bytes.NewReader(p))
	if err != nil {
		return "", nil, err
	}
	all, err := io.ReadAll(r)
	name, text, _ := bytes.Cut(all, []byte{0})
	return string(name), text, err
}

// A policyRecord is what policyPin has.
type policyRecord struct {
	now, before PackedPolicy
	began       uint64 // the change that replaced before, in ns of maps.Now; 0 for none
}

// KeepPolicy records the policy that is in force from now on. If the last change brought it into force, the policy
// before it is in force again when that change reverts.
func (n *Namespace) KeepPolicy(p PackedPolicy, byChange bool) error {
	if n.pins.dir == "" {
		if p == nil { // none is recorded
			return nil
		}
		if err := n.makeHome(); err != nil {
			return err
		}
	}
	record, _, err := n.pins.policies()
	if err != nil || bytes.Equal(p, record.now) {
		return err
	}
	if byChange && n.pins.store != nil {
		record.before, record.began = record.now, n.pins.store.Begins()
	}
	record.now = p
	return n.pins.dir.keepPolicies(record)
}

// Policy is the policy in force, nil if none is known.
func (n *Namespace) Policy() (PackedPolicy, error) {
	if n.pins.dir == "" {
		return nil, nil
	}
	record, _, err := n.pins.policies()
	return record.now, err
}

// policies is the record, without the change that it names if that has reverted.
func (s *bpfState) policies() (p policyRecord, reverted bool, err error) {
	record, err := readRecord(s.dir.pin(policyPin))
	if err != nil || len(record) < 16 {
		return p, false, err
	}
	p.began = binary.NativeEndian.Uint64(record)
	length := min(binary.NativeEndian.Uint64(record[8:]), uint64(len(record)-16))
	p.now, p.before = record[16:16+length], record[16+length:]
	if s.store != nil && p.began != 0 && s.store.Begins() == p.began {
		if state, _ := s.store.Change(); state == maps.Expired {
			return policyRecord{now: p.before}, true, nil
		}
	}
	return p, false, nil
}

// settlePolicy records the policy that is in force, before a change that has reverted is forgotten.
func (s *bpfState) settlePolicy() error {
	p, reverted, err := s.policies()
	if err != nil || !reverted {
		return err
	}
	return s.dir.keepPolicies(p)
}

// keepPolicies replaces the record.
func (dir home) keepPolicies(p policyRecord) error {
	if len(p.now)+len(p.before) == 0 {
		return unlink(dir.pin(policyPin))
	}
	var record []byte
	record = binary.NativeEndian.AppendUint64(record, p.began)
	record = binary.NativeEndian.AppendUint64(record, uint64(len(p.now)))
	record = append(append(record, p.now...), p.before...)
	spec := &ebpf.MapSpec{Name: "shapectl_policy", Type: ebpf.Array, ValueSize: uint32(len(record))}
	if err := dir.replaceRecord(policyPin, spec, record); err != nil {
		return fmt.Errorf("record the policy in force: %w", err)
	}
	return nil
}

// replaceRecord pins a record in the place of the last one. A killed command leaves one of the two.
func (dir home) replaceRecord(pin string, spec *ebpf.MapSpec, record []byte) error {
	aside := dir.pin(asideName)
	err := removeAll(aside)
	if err == nil {
		err = pinValue(aside, spec, record)
	}
	if err == nil {
		err = os.Rename(aside, dir.pin(pin))
	}
	return err
}
