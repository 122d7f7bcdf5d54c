package main

import "testing"

// set --keep changes what its flags say, and nothing else: not the plan, the name or the burst's time.
func TestSetKeep(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "10mbit", "--each", "host", "--capacity", "100ms", "--name", "alice")
	r.send("10.0.0.7", 2, 1000)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--keep", "--rate", "20mbit")
	rule := r.show("va", "egress", "10.0.0.0/24")[0]
	if rule.Rate != 20e6 || rule.Each != "host" || rule.Name != "alice" || rule.Capacity != 250_000 || rule.PassedPackets != 2 {
		t.Errorf("after --keep the rule is %+v", rule)
	}
	r.refused(exitInput, "there is no rule for 10.0.1.0/24", "set", "va", "egress", "10.0.1.0/24", "--keep", "--rate", "20mbit")
	r.refused(exitInput, "there is no rule for 10.0.0.0/24", "set", "va", "ingress", "10.0.0.0/24", "--keep", "--rate", "20mbit")
	r.refused(exitInput, "give one", "set", "va", "egress", "10.0.0.0/24", "--keep")
}
