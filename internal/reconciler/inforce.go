package reconciler

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
)

// record records the policy of the file as the one in force, unless a change is pending, which has a record of its own.
func (r *Reconciler) record(n *loader.Namespace, from lastgood.Policy) {
	if n.Pending() != nil || from.Text == nil || r.file == "" {
		return
	}
	r.unrecorded = false
	if r.packed.File != from.File {
		r.packed = packedPolicy{from.File, inforce.Pack(from.File, from.Path, from.Text)}
	}
	if err := n.KeepPolicy(r.packed.Packed); err != nil {
		r.OnWarning(err)
	}
}

// A packedPolicy is a policy as it is recorded.
type packedPolicy struct {
	*policyfile.File
	inforce.Packed
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

// inForce returns the policy in force for devices that appear, and the one that is once the last change has reverted.
func (r *Reconciler) inForce(n *loader.Namespace) (now, reverted lastgood.Policy) {
	if r.file == "" {
		return r.recorded(n)
	}
	now, reverted, err := inforce.Phases(n, r.policy)
	if err != nil {
		r.OnWarning(err)
	}
	if now.File == nil && reverted.File == nil && !r.undone {
		r.undone = true
		r.OnNotice("the change to " + r.policy.Path + " was reverted, and there was no policy before; devices that appear get no rules until the file is written again")
	}
	for _, p := range []*lastgood.Policy{&now, &reverted} {
		if p.File == nil {
			*p = nothing(r.file)
		}
	}
	return now, reverted
}

// recorded returns the same where there is no file. The record goes with the last device, so what was read before counts then.
func (r *Reconciler) recorded(n *loader.Namespace) (now, reverted lastgood.Policy) {
	last, err := n.Policies()
	if err != nil {
		r.OnWarning(err)
	}
	if len(last.Now)+len(last.Reverted)+len(last.Undone) == 0 {
		return r.policy, r.policy
	}
	of := func(p inforce.Packed) lastgood.Policy {
		if len(p) == 0 {
			return nothing("")
		}
		return inforce.Parsed(p, r.policy)
	}
	return of(last.Now), of(last.Reverted)
}

// adopt reads the policy in force. An unconfirmed one is none to remember.
func (r *Reconciler) adopt() error {
	if r.policy.File == nil {
		r.policy = nothing("")
	}
	n, err := loader.Read(r.Options)
	if err != nil {
		return err
	}
	defer n.Close()
	now, reverted := r.recorded(n)
	if r.policy = now; n.Pending() != nil {
		r.policy = reverted
	}
	return nil
}
