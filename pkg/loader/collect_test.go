package loader

import (
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A change that left a hook without a rule is ended once it is old, and not before; one that is pending is not.
func TestEndOldChange(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		one := rule("10.0.0.0/24")
		none := policy.Table{Device: "va", Direction: r.direction, Match: r.direction.FarSide()}
		ends := func(age time.Duration, want bool) {
			t.Helper()
			r.write(func(n *Namespace) error {
				for {
					more, err := n.EndOldChange(age)
					if more != want || err != nil {
						t.Errorf("ended after %v: %v, %v", age, more, err)
					}
					if !more || err != nil {
						return err
					}
					want = false
				}
			})
		}
		r.apply(ApplyOptions{}, r.table(one))
		ends(0, false) // every hook has a rule
		r.apply(ApplyOptions{Confirm: time.Hour}, none)
		ends(0, false)
		r.write(func(n *Namespace) error { return n.Confirm() })
		ends(time.Hour, false)
		r.write(func(n *Namespace) error { _, err := n.Rollback(); return err })
		r.inForce(one)
		r.apply(ApplyOptions{}, none)
		ends(0, true)
		r.nothingLeft()
	})
}
