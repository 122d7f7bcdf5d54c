package main

import "testing"

// Rates that no link has are refused wherever one can be said, with what was meant.
func TestRatesThatNobodyMeans(t *testing.T) {
	r := newRig(t)
	trace := r.policy("time_ns,bytes\n0,100\n")
	for rate, says := range map[string]string{"10": "did you mean 10mbit?", "500gbit": "did you mean 500mbit or unlimited?"} {
		file := r.policy("devices: {va: {egress: {10.0.0.0/24: " + rate + "}}}\n")
		shadow := r.policy("devices: {va: {egress: {10.0.0.0/24: {rate: 1mbit, shadow: {rate: " + rate + "}}}}}\n")
		for _, args := range [][]string{
			{"set", "va", "egress", "10.0.0.0/24", "--rate", rate},
			{"set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit", "--shadow", "rate=" + rate},
			{"apply", file}, {"apply", shadow}, {"diff", file},
			{"replay", trace, "--rate", rate},
		} {
			r.refused(exitInput, says, args...)
		}
	}
	if rules := r.show(); len(rules) > 0 {
		t.Errorf("rules: %+v", rules)
	}
}
