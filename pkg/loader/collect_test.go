package loader

import (
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A change that left a hook without a rule ends once it is old, unless it is pending.
func TestEndOldChange(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		one := rule("10.0.0.0/24")
		none := policy.Table{Device: "va", Direction: r.direction, Match: r.direction.FarSide()}
		end := func(age time.Duration) {
			t.Helper()
			r.write(func(n *Namespace) error {
				return n.EndOldChange(age)
			})
		}
		r.apply(ApplyOptions{}, r.table(one))
		end(0) // every hook has a rule
		r.apply(ApplyOptions{Confirm: time.Hour}, none)
		end(0)
		r.write(func(n *Namespace) error { return confirm(n) })
		end(time.Hour)
		r.write(func(n *Namespace) error { _, err := n.Rollback(); return err })
		r.inForce(one)
		r.apply(ApplyOptions{}, none)
		end(0)
		r.nothingLeft()
	})
}
