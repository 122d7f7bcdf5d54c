package maps_test

import (
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Delays covers rules in all phases of a change.
func TestDelays(t *testing.T) {
	drops := rule("10.0.0.0/8", 1e9, 2000)
	delays := drops
	delays.Algorithm, delays.Excess, delays.ECNAbove = policy.Leaky, policy.Delay, policy.Never
	r := newRig(t, shapemaps.Size{Rules: 3, Buckets: 4})
	is := func(why string, want bool) {
		t.Helper()
		if r.Any(shapemaps.Delays) != want {
			t.Errorf("%s: %v", why, !want)
		}
	}
	change := func(to policy.Rule) {
		t.Helper()
		r.prepare(to)
		is("while a change is ready", true)
		r.Store.Time(r.now, shapemaps.Never)
		testenv.Must(t, r.Store.Arm())
		r.Store.Commit()
		is("while a change may be reverted", true)
		r.Store.Finish()
	}
	r.put(drops)
	is("drops", false)
	change(delays)
	is("delays", true)
	change(drops)
	is("drops again", false)
	r.put(delays)
	is("set to delay", true)
	r.Delete(delays.Prefix)
	is("deleted", false)
}
