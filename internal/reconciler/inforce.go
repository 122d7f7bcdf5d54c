package reconciler

import (
	"bytes"
	"fmt"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
)

// record records the policy as the one in force, unless a change is pending, which has a record of its own.
func (r *Reconciler) record(n *loader.Namespace, from lastgood.Policy) {
	if until, _, _ := n.PendingChange(); until != 0 || from.Text == nil {
		return
	}
	r.unrecorded = false
	if r.packed.File != from.File {
		r.packed = packedPolicy{from.File, inforce.Pack(from.File, from.Path, from.Text)}
	}
	if err := n.KeepPolicy(r.packed.PackedPolicy, false); err != nil {
		r.OnWarning(err)
	}
}

// A packedPolicy is a policy as it is recorded.
type packedPolicy struct {
	*policyfile.File
	loader.PackedPolicy
}

// reattach attaches programs that something else has detached. If another command has the lock, the next sweep does it.
func (r *Reconciler) reattach() error {
	n, err := r.write()
	if err != nil || n == nil {
		return err
	}
	defer n.Close()
	again, err := n.Reattach()
	for _, h := range again {
		r.OnNotice(fmt.Sprintf("%s %s: attached again; something else had detached shapectl's program, and its rules limited nothing", plain.Line(h.Device), h.Direction))
	}
	if err != nil {
		r.OnWarning(fmt.Errorf("attach programs again: %w", err))
	}
	return nil
}

// inForce returns the policy in force for devices that appear, and the one that is once a pending change has reverted. It
// is that of the file, unless the change that brought that one is pending or was reverted.
func (r *Reconciler) inForce(n *loader.Namespace) (now, reverted lastgood.Policy) {
	last, err := n.Policies()
	if err != nil {
		r.OnWarning(err)
	}
	if until, _, _ := n.PendingChange(); until != 0 {
		now, reverted = r.parsed(last.Now), r.parsed(last.Reverted)
		if len(last.Now) > 0 && len(last.Reverted) == 0 {
			reverted = r.nothing()
		}
		if now.File == r.policy.File || reverted.File == r.policy.File {
			return now, reverted
		}
	}
	if len(last.Undone) == 0 || r.parsed(last.Undone).File != r.policy.File {
		return r.policy, r.policy
	}
	if len(last.Now) > 0 {
		now = r.parsed(last.Now)
		return now, now
	}
	if !r.undone {
		r.undone = true
		r.OnNotice("the change to " + r.policy.Path + " was reverted, and there was no policy before; devices that appear get no rules until the file is written again")
	}
	now = r.nothing()
	return now, now
}

// parsed is a policy that was recorded. Another build may have applied one that this one cannot read.
func (r *Reconciler) parsed(packed loader.PackedPolicy) lastgood.Policy {
	path, text, err := packed.Unpack()
	if err != nil || bytes.Equal(text, r.policy.Text) {
		return r.policy
	}
	if last, found := r.applied[string(text)]; found {
		return last
	}
	f, err := policyfile.Parse(path, text)
	if err != nil {
		return r.policy
	}
	r.applied = map[string]lastgood.Policy{string(text): {File: f, Path: path, Text: text}}
	return r.applied[string(text)]
}
