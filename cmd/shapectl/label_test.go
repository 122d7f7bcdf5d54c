package main

import (
	"strings"
	"testing"
)

// A rule is found by its name and its plan. They outlast all changes of the rule that do not concern them, and a
// rollback brings them back.
func TestLabels(t *testing.T) {
	r := newRig(t)
	named := r.policy(`plans:
  gold: {rate: 2mbit, note: pays in May}
devices:
  va:
    egress:
      10.0.0.7: {plan: gold, name: alice}
      10.0.0.8: {plan: gold, name: bob, note: two phones}
      10.0.1.0/24: {rate: 1mbit, name: "café \"at the corner\""}
`)
	shows := func(what string, networks ...string) {
		t.Helper()
		var got []string
		for _, rule := range r.show(what) {
			got = append(got, rule.CIDR)
		}
		if strings.Join(got, " ") != strings.Join(networks, " ") {
			t.Errorf("show %s finds %v, want %v", what, got, networks)
		}
	}
	labels := func(want ...string) {
		t.Helper()
		var got []string
		for _, rule := range r.show() {
			got = append(got, strings.Join([]string{rule.Plan, rule.Name, rule.Note}, "/"))
		}
		if strings.Join(got, "; ") != strings.Join(want, "; ") {
			t.Errorf("labels are %q, want %q", got, want)
		}
	}
	alice, bob, cafe := "gold/alice/pays in May", "gold/bob/two phones", `/café "at the corner"/`

	r.ok("apply", named)
	labels(alice, bob, cafe)
	shows("alice", "10.0.0.7/32")
	shows("gold", "10.0.0.7/32", "10.0.0.8/32")
	shows("CORNER", "10.0.1.0/24")
	shows("10.0.0.8", "10.0.0.8/32")
	shows("10.0.1.9", "10.0.1.0/24")
	shows("10.0.0.0/16", "10.0.0.7/32", "10.0.0.8/32", "10.0.1.0/24")

	r.send("10.0.0.7", 3, 1000)
	exported := r.command("apply", "-")
	exported.Stdin = strings.NewReader(r.ok("export"))
	if got := r.result(exported); got.code != exitDone || got.out != "nothing to change\n" {
		t.Errorf("apply of what was exported: %+v", got)
	}
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "3mbit") // which is no longer that of the plan
	labels("/alice/pays in May", bob, cafe)
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "3mbit", "--name", "Alice B", "--note", "")
	labels("/Alice B/", bob, cafe)
	if rule := r.show("Alice B")[0]; rule.PassedPackets != 3 {
		t.Errorf("after two changes, %d packets have passed, want 3", rule.PassedPackets)
	}
	if got := r.run("diff", named); got.code != exitDiffers || !strings.Contains(strings.Join(strings.Fields(got.out), " "), `rate 3mbit -> 2mbit, name "Alice B" -> alice, note none -> "pays in May"`) {
		t.Errorf("diff: %+v", got)
	}
	r.ok("apply", named)
	labels(alice, bob, cafe)
	r.ok("rollback")
	labels("/Alice B/", bob, cafe)
	r.refused(exitInput, "no rule, plan or pool has that name", "show", "carol")
	r.refused(exitInput, "name", "set", "va", "egress", "10.0.0.9", "--rate", "1mbit", "--name", "a\x1b[31mb")
}
