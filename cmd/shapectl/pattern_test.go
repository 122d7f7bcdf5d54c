package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

// taps makes devices tap0, tap1 and so on.
func (r *rig) taps(devices int) {
	r.t.Helper()
	for i := range devices {
		testenv.Must(r.t, addVeth(fmt.Sprintf("tap%d", i), fmt.Sprintf("peer%d", i)))
	}
}

// prints ends the test unless a command line succeeds and prints just that.
func (r *rig) prints(want string, args ...string) {
	r.t.Helper()
	if got := r.ok(args...); got != want {
		r.t.Errorf("shapectl %s: prints %q, not %q", strings.Join(args, " "), got, want)
	}
}

func TestPatternsOfManyDevices(t *testing.T) {
	t.Parallel()
	const devices = 100
	eachHook(t, func(t *testing.T, r *rig) {
		r.taps(devices)
		policy := r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}, ingress: {10.0.0.0/24: 1mbit}}}\n")
		for _, lines := range [][]string{{"flush tap*"}, {"delete tap* egress 10.0.0.0/24", "delete tap* ingress 10.0.0.0/24"}} {
			r.ok("apply", policy)
			if hooks := r.hooks(); len(hooks) != 2*devices {
				t.Fatalf("%d hooks", len(hooks))
			}
			testenv.Must(t, r.commands(lines...))
		}
		r.nothingLeft()
	})
}
