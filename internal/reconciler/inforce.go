package reconciler

import (
	"fmt"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
)

// record records the policy as the one in force, once.
func (r *Reconciler) record(n *loader.Namespace, from lastgood.Policy) {
	if r.recorded {
		return
	}
	if err := inforce.Keep(n, from.File, from.Path, from.Text, false); err != nil {
		r.OnWarning(err)
	}
	r.recorded = true
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
