package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

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

// Rules whose device is gone, has moved away or lost its program are those of its name.
func TestPatternsOfAbsentDevices(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		r.taps(4)
		r.ok("apply", r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}, ingress: {10.0.0.0/24: 1mbit}}}\n"))
		_, other := testenv.NewNamedNetns(t)
		testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "tap0"), other.FD()))
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap1")))
		testenv.Must(t, netlink.LinkSetName(testenv.Link(t, "tap2"), "was2"))
		if rules := r.show("tap*"); len(rules) != 6 {
			t.Errorf("show: %+v", rules)
		}
		removed := "tap1" // and with clsact nothing is left on a device that moves
		if moved := r.show("tap0"); !moved[0].Attached {
			removed = "tap0, tap1"
		}
		r.removes(removed, "delete", "tap*", "egress", "10.0.0.0/24")
		r.ok("flush", "tap*")
		r.has("was2 egress 10.0.0.0/24 1000000", "was2 ingress 10.0.0.0/24 1000000")
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "was2")))
		r.removes("tap2", "flush", "was*")
		r.nothingLeft()
	})
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
