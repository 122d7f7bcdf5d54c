package main

import (
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
)

// doctorSays ends the test unless doctor ends so and says all of these.
func (r *rig) doctorSays(code int, says ...string) {
	r.t.Helper()
	got := r.run("doctor")
	for _, text := range says {
		if !strings.Contains(bare(got.out), text) {
			r.t.Fatalf("doctor does not say %q: %s%s", text, got.out, got.err)
		}
	}
	if got.code != code {
		r.t.Fatalf("doctor: exit code %d, not %d: %s%s", got.code, code, got.out, got.err)
	}
}

func addTap(t *testing.T, name string) {
	t.Helper()
	testenv.Veth(t, name, "peer"+name)
}

// Nothing runs that gives a device its rules: doctor, metrics and events name it, whatever else changes.
func TestDeviceWithoutItsRules(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	addTap(t, "tap8")
	r.doctorSays(exitDone)
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap8")))
	file := r.policy(watched)
	r.run("apply", file)
	r.doctorSays(exitDone)
	r.writeFile(file, "devices: {}\n") // it is not applied
	events := r.events("--kind", "rules-missing", "--kind", "rules-restored")
	addTap(t, "tap9")
	for range 2 {
		r.doctorSays(exitDegraded, "failed tap9 egress policy: 1 rule of the policy in force, "+file+", missing", "'shapectl apply "+file+"'", "if they are not wanted, take them out of the policy, and apply it")
		r.ok("set", "vb", "egress", "10.0.0.0/24", "--rate", "1mbit")
	}
	events.says("tap9 egress: 1 of 1 rules of the policy in force are missing")
	s := r.serve(file + "-not") // which sets no rules
	text := s.metrics()
	for _, want := range []string{"\nshapectl_devices_without_rules 1\n", `shapectl_missing_rules{device="tap9",direction="egress"} 1`} {
		if !strings.Contains(text, want) {
			t.Errorf("the metrics have no %q", want)
		}
	}
	s.ends(syscall.SIGTERM)
	r.writeFile(file, watched)
	r.ok("apply", file)
	r.doctorSays(exitDone)
	events.says("tap9 egress: no rule is missing any more")
	r.ok("delete", "va", "egress", "10.0.0.9")
	r.doctorSays(exitDegraded, "warning va egress policy: 1 rule of the 2 that the policy in force, "+file+", has here missing: 10.0.0.9/32")
	r.ok("flush", "--all")
	r.doctorSays(exitDone)
}

// What something else detaches from a device is attached again while serve runs, and this is said.
func TestDetachedProgramIsAttachedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = "clsact"
	r.ok("set", "vb", "egress", "10.0.0.0/24", "--rate", "1mbit")
	s := r.serve(r.policy(watched))
	events := r.events("--kind", "rules")
	for _, device := range []string{"va", "vb"} {
		filters, err := netlink.FilterList(testenv.Link(t, device), netlink.HANDLE_MIN_EGRESS)
		testenv.Must(t, err)
		for _, f := range filters {
			testenv.Must(t, netlink.FilterDel(f))
		}
	}
	for _, device := range []string{"va", "vb"} {
		s.says(device + " egress: attached again")
		events.says(device + " egress: attached again")
	}
	r.has("va egress 10.0.0.0/24 1000000", "va egress 10.0.0.9/32 0", "va ingress 10.0.0.0/24 3000000", "vb egress 10.0.0.0/24 1000000")
}

// A flush takes the record of the policy with the rules. What is missing then, doctor asks a serve that follows a file.
func TestDoctorAfterAFlushUnderServe(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	file := r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}}\n")
	s := r.serve(file)
	r.env[socketEnv] = s.socket
	for _, args := range [][]string{{"doctor"}, {"doctor", "va"}} {
		if got := r.result(r.command(args...)); got.code != exitDone {
			t.Errorf("%q before the flush: %+v", args, got)
		}
	}
	r.ok("flush", "--all")
	for _, args := range [][]string{{"doctor"}, {"doctor", "va"}} {
		got := r.result(r.command(args...))
		if want := "failed va egress policy: 1 rule of the policy in force, " + file + ", missing"; got.code != exitDegraded || !strings.Contains(bare(got.out), want) {
			t.Errorf("%q after it: %+v", args, got)
		}
	}
	if got := r.result(r.command("doctor", "vb")); got.code != exitDone {
		t.Errorf("of another device: %+v", got)
	}
	s.ends(syscall.SIGTERM)
}
