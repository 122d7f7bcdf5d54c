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

func TestPatterns(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		r.taps(3)
		all := r.policy("devices:\n  tap*: {egress: {10.0.0.0/24: 1mbit, 10.0.1.0/24: 2mbit}, ingress: {10.0.0.0/24: 3mbit}}\n" +
			"  va: {egress: {10.0.0.0/24: 1mbit}}\n")
		r.ok("apply", all)
		for args, want := range map[string]int{
			"tap*": 9, "tap* egress": 6, "tap? ingress 10.0.0.0/24": 3, "tap[01] egress 10.0.1.0/24": 2,
			"*": 10, "tap[^0]": 6, "v*": 1, "vb*": 0, "tap* egress 10.9.0.0/16": 0, `\tap*`: 9,
		} {
			if rules := r.show(strings.Fields(args)...); len(rules) != want {
				t.Errorf("show %s: %d rules, and there are %d: %+v", args, len(rules), want, rules)
			}
		}
		r.refused(exitInput, "there is no device that matches x*, and no rule, plan or pool has such a name", "show", "x*")
		r.refused(exitInput, "there is no device that matches x*", "show", "-j", "x*")
		r.prints("[]\n", "show", "-j", "vb*")

		r.prints("deleted: tap0 egress: 10.0.1.0/24 as a whole gets 2mbit (250 kB/s), burst 131.1 kB (524.3 ms); excess is dropped (gcra)\n"+
			"deleted: tap2 egress: 10.0.1.0/24 as a whole gets 2mbit (250 kB/s), burst 131.1 kB (524.3 ms); excess is dropped (gcra)\n"+
			"tap0 egress 10.0.1.0/24, tap2 egress 10.0.1.0/24 are unlimited now\n",
			"delete", "tap[02]", "egress", "10.0.1.0/24")
		if out := r.ok("delete", "tap*", "egress", "10.0.1.0/24"); strings.Count(out, "deleted: ") != 1 || !strings.HasPrefix(out, "deleted: tap1 egress") {
			t.Errorf("a rule that one of three has: %q", out)
		}
		r.prints("nothing to delete: no device that matches tap* has an egress rule for 10.0.1.0/24\n", "delete", "tap*", "egress", "10.0.1.0/24")
		r.prints("nothing to delete: no device that matches x* has an ingress rule for 10.0.0.0/24\n", "delete", "x*", "ingress", "10.0.0.0/24")
		r.prints("[]\n", "delete", "-j", "tap*", "egress", "10.0.1.0/24")
		if out := r.ok("delete", "-j", "tap*", "ingress", "10.0.0.0/24"); strings.Count(out, `"state": "deleted"`) != 3 {
			t.Errorf("rules that are deleted: %s", out)
		}
		r.has("tap0 egress 10.0.0.0/24 1000000", "tap1 egress 10.0.0.0/24 1000000", "tap2 egress 10.0.0.0/24 1000000", "va egress 10.0.0.0/24 1000000")
		if hooks := r.hooks(); len(hooks) != 4 {
			t.Errorf("hooks without a rule are attached: %v", hooks)
		}

		r.prints("no device that matches tap* has ingress rules\n", "flush", "tap*", "ingress")
		r.prints("no device that matches x* has rules\n", "flush", "x*")
		r.prints("[]\n", "flush", "-j", "x*")
		r.ok("apply", all)
		if out := r.ok("flush", "tap*", "egress"); strings.Count(out, "deleted: tap") != 6 || strings.Count(out, "\n") != 6 {
			t.Errorf("flush of one direction: %q", out)
		}
		if out := r.ok("flush", "-j", "tap*"); strings.Count(out, `"state": "deleted"`) != 3 {
			t.Errorf("flush: %s", out)
		}
		r.has("va egress 10.0.0.0/24 1000000")
		r.ok("flush", "*")
		r.nothingLeft()
	})
}

// A name that could be a pattern is that of a device, where there is one or its rules are left.
func TestExactNameWinsOverPattern(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		const name = "a*b"
		for i, device := range []string{name, "axb", "[", `a\b`} {
			testenv.Must(t, addVeth(device, fmt.Sprintf("peer%d", i)))
			r.ok("set", device, "egress", "10.0.0.0/24", "--rate", "1mbit")
			r.ok("set", device, "egress", "10.0.1.0/24", "--rate", "1mbit")
		}
		for args, want := range map[string]int{"a*b": 2, "a*b egress 10.0.0.0/24": 1, "a**b": 6, `a\*?`: 2, `a\*[b]`: 2, "[": 2, "[[]": 2, `a\b`: 2, `\[`: 2, `a\*b`: 2, `a[\!x]b`: 2, "a[^*]b": 4} {
			if rules := r.show(strings.Fields(args)...); len(rules) != want {
				t.Errorf("show %s: %d rules, and there are %d: %+v", args, len(rules), want, rules)
			}
		}
		r.ok("delete", `a\*b`, "egress", "10.0.0.0/24")
		r.prints("nothing to delete: a*b egress has no rule for 10.0.0.0/24\n", "delete", name, "egress", "10.0.0.0/24")
		r.refused(exitInput, "a*b egress has no rule for 10.0.0.0/24", "show", name, "egress", "10.0.0.0/24")
		r.ok("flush", name)
		r.prints("a*b has no rules\n", "flush", name)
		r.ok("flush", "[")
		if rules := r.show("axb"); len(rules) != 2 {
			t.Errorf("rules of another device are %+v", rules)
		}
		r.ok("set", name, "egress", "10.0.0.0/24", "--rate", "1mbit")
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, name)))
		if rules := r.show(name); len(rules) != 1 || rules[0].Attached {
			t.Errorf("rules of a deleted device are %+v", rules)
		}
		r.removes(name, "flush", name)
		if rules := r.show("axb"); len(rules) != 2 {
			t.Errorf("rules of another device are %+v", rules)
		}
		r.ok("flush", name) // now it is a pattern
		r.ok("flush", "--all")
		r.nothingLeft()
	})
}

func TestRefusedPatterns(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	for _, c := range []struct{ pattern, says string }{
		{"v[", "malformed pattern"}, {"[a-", "malformed pattern"}, {`v*\`, "malformed pattern"},
		{"v[!b]", "write [^ to negate"}, {"[a-c]?[!x-z]", "write [^ to negate"},
		{"v* ", "not a valid device name"}, {"v*/", "not a valid device name"}, {"*\n", "not a valid device name"},
		{"", "there is no device \"\""},
	} {
		r.refused(exitInput, c.says, "flush", c.pattern)
		r.refused(exitInput, c.says, "delete", c.pattern, "egress", "10.0.0.0/24")
		if c.says == "not a valid device name" {
			c.says = "no rule, plan or pool has such a name"
		}
		if c.pattern != "" {
			r.refused(exitInput, c.says, "show", c.pattern)
		}
	}
	r.refused(exitInput, "the first argument is empty", "show", "")
	r.refused(exitInput, "there is no device v*", "set", "v*", "egress", "10.0.0.0/24", "--rate", "1mbit")
	r.refused(exitInput, "takes", "flush", "--all", "v*")
	if got := r.run("__complete", "flush", "v*", ""); !strings.HasPrefix(got.out, "ingress\negress\n") {
		t.Errorf("completed are %q", got.out)
	}
	r.has("va egress 10.0.0.0/24 1000000")
}

// A change that is not confirmed keeps patterns from the rules that take part in it, and from no others.
func TestPatternsAndPendingChange(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		r.taps(2)
		first := "devices:\n  tap0: {egress: {10.0.0.0/24: 1mbit}}\n  va: {egress: {10.0.0.0/24: 1mbit}}\n"
		r.ok("apply", r.policy(first))
		r.ok("apply", r.policy(first+"  tap1: {egress: {10.0.0.0/24: 1mbit}}\n"), "--confirm", "1h")
		r.refused(exitInput, "not confirmed yet", "flush", "tap*")
		r.refused(exitInput, "not confirmed yet", "delete", "tap*", "egress", "10.0.0.0/24")
		if rules := r.show("tap*"); len(rules) != 2 {
			t.Errorf("rules are %+v", rules)
		}
		r.ok("rollback")
		r.ok("flush", "tap*")
		r.has("va egress 10.0.0.0/24 1000000")
		r.ok("flush", "*")
		r.nothingLeft()
	})
}

// What a policy has left without a rule has no rules, and nothing of it stays.
func TestPatternsOfEmptyHooks(t *testing.T) {
	t.Parallel()
	for _, devices := range []string{"{}", "{va: {egress: {10.0.0.0/24: 1mbit}}}"} {
		eachHook(t, func(t *testing.T, r *rig) {
			r.taps(3)
			r.ok("apply", r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}}, va: {egress: {10.0.0.0/24: 1mbit}}}\n"))
			r.ok("apply", r.policy("devices: "+devices+"\n"))
			r.prints("no device that matches tap* has rules; 'shapectl show' lists all rules\n", "show", "tap*")
			r.prints("nothing to delete: no device that matches tap* has an egress rule for 10.0.0.0/24\n", "delete", "tap*", "egress", "10.0.0.0/24")
			r.prints("no device that matches tap* has rules\n", "flush", "tap*")
			r.ok("flush", "va")
			r.nothingLeft()
		})
	}
}

// A hook that is kept for a rollback only is as good as none for whoever names its device.
func TestDeviceWithoutRulesAfterAChange(t *testing.T) {
	t.Parallel()
	one, both := "devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n", "devices: {tap0: {egress: {10.0.0.0/24: 1mbit}}, va: {egress: {10.0.0.0/24: 1mbit}}}\n"
	for name, change := range map[string]func(r *rig){
		"apply": func(r *rig) {
			r.ok("apply", r.policy(both))
			r.ok("apply", r.policy(one))
		},
		"expiry": func(r *rig) {
			r.ok("apply", r.policy(one))
			r.ok("apply", r.policy(both), "--confirm", "1s")
			sleepUntil(r.pending())
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.taps(1)
			for _, set := range []string{"10.0.0.0/24", "10.0.1.0/24 --match src"} {
				change(r)
				r.ok(append(strings.Fields("set tap0 egress "+set), "--rate", "2mbit")...)
				r.has("tap0 egress "+set[:11]+" 2000000", "va egress 10.0.0.0/24 1000000")
				r.ok("flush", "--all")
			}
			change(r)
			r.prints("tap0 has no rules\n", "flush", "tap0")
			r.has("va egress 10.0.0.0/24 1000000")
			r.ok("flush", "va")
			r.nothingLeft()
		})
	}
}

// Any name of a device names its rules.
func TestAlternativeName(t *testing.T) {
	r := newRig(t)
	const name = "a-name-longer-than-15"
	testenv.Must(t, netlink.LinkAddAltName(testenv.Link(t, "va"), name))
	set := []string{"egress", "10.0.0.0/24", "--rate", "1mbit"}
	r.ok(append([]string{"set", "va"}, set...)...)
	r.ok(append([]string{"set", name}, set...)...)
	r.ok("set", name, "ingress", "10.0.0.0/24", "--rate", "2mbit")
	if rules := r.show(name); len(rules) != 2 || rules[0].Device != "va" {
		t.Errorf("show: %+v", rules)
	}
	if out := r.ok("explain", name, "egress", "10.0.0.1"); !strings.HasPrefix(out, "to 10.0.0.1, by va egress: ") {
		t.Errorf("explain: %q", out)
	}
	r.ok("delete", name, "egress", "10.0.0.0/24")
	r.has("va ingress 10.0.0.0/24 2000000")
	r.ok("flush", name)
	r.nothingLeft()
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

// Rules of another layout are flushed by a pattern that matches their device, and others stay.
func TestPatternsAndOtherLayout(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		r.taps(2)
		r.ok("apply", r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}}, va: {egress: {10.0.0.0/24: 1mbit}}}\n"))
		r.makeOtherLayout()
		r.refused(exitKernel, "nothing was changed", "show", "tap*")
		r.refused(exitKernel, "nothing was changed", "delete", "tap*", "egress", "10.0.0.0/24")
		r.refused(exitKernel, "nothing was changed", "show", "x*") // names of rules cannot be read either
		r.prints("no device that matches x* has rules\n", "flush", "x*")
		r.prints("no device that matches tap* has ingress rules\n", "flush", "tap*", "ingress")
		if got := r.run("flush", "tap*"); got.code != exitDone || got.err != "" || got.out != "deleted: tap0 egress: all rules, which this shapectl could not read\n"+
			"deleted: tap1 egress: all rules, which this shapectl could not read\n" {
			t.Errorf("flush: %+v", got)
		}
		if hooks := r.hooks(); len(hooks) != 1 {
			t.Errorf("hooks are %v", hooks)
		}
		if got := r.run("flush", "v*"); got.code != exitDone {
			t.Errorf("flush: %+v", got)
		}
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
