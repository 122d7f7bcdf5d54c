package loader

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Labels come into force with their rules, even if the store has to grow for them, and revert with them.
func TestApplyLabels(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	named := func(count int) []policy.Table {
		t := policy.Table{Device: "va", Direction: policy.Egress}
		for i := range count {
			t.Rules = append(t.Rules, rule(fmt.Sprintf("10.%d.%d.0/24", i>>8, i&255), func(r *policy.Rule) {
				r.Label = policy.Label{Plan: "gold", Name: fmt.Sprintf("subscriber %d of %d", i, count), Note: "a note"}
			}))
		}
		return []policy.Table{t}
	}
	same := func(want []policy.Table) {
		t.Helper()
		r.write(func(n *Namespace) error {
			have, err := n.Tables(Attached)
			if len(have) != 1 || !slices.Equal(have[0].Rules, want[0].Rules) {
				t.Errorf("%d rules in %d tables are not as applied", len(have[0].Rules), len(have))
			}
			return err
		})
	}
	for _, count := range []int{3, 700, 20} {
		r.apply(ApplyOptions{}, named(count)...)
		same(named(count))
	}
	r.apply(ApplyOptions{Confirm: 300 * time.Millisecond}, named(21)...)
	same(named(21))
	waitUntil(changeOf(t, r.hook("va")).Until)
	same(named(20))
}
