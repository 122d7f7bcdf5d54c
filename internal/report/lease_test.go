package report

import (
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// TestRateNow: a screen shows what packets meet, not the rate of the whole cluster.
func TestRateNow(t *testing.T) {
	yes, no, rate, lease, safe := true, false, uint64(10e9), uint64(3e9), uint64(1e9)
	for want, r := range map[string]Rule{
		"10gbit":   {RateBits: &rate},
		"3.00gbit": {RateBits: &rate, Leased: &yes, rateNow: &lease},
		"1.00gbit": {RateBits: &rate, Leased: &no, rateNow: &safe},
	} {
		if got := r.RateNowText(); got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
}

// TestPoolRate has rules that have only pools: one with a lease, and one that was not read.
func TestPoolRate(t *testing.T) {
	within := func(r *policy.Rule) { r.Within = "home" }
	rules := Rules{
		shown("eth0", policy.Egress, "10.0.0.7/32", policy.Unlimited, within),
		shown("eth0", policy.Egress, "10.0.0.8/32", policy.Unlimited, within),
		shown("eth0", policy.Egress, "10.0.0.9/32", policy.Unlimited, within),
		shown("eth0", policy.Egress, "10.0.0.10/32", 2e7, within),
		shown("eth0", policy.Egress, "10.0.0.11/32", policy.Unlimited, nil),
	}
	yes, whole, lease := true, uint64(5e7), uint64(12_345_678)
	rules[0].SetPoolRate((&Rule{RateBits: &whole}).PoolRate())
	rules[1].SetPoolRate((&Rule{RateBits: &whole, Leased: &yes, rateNow: &lease}).PoolRate())
	rules.Sort("rate", false)
	same(t, "rules", text(t, Table{Rules: rules, Of: len(rules)}.Text), `
DEVICE       NETWORK    WITHIN           RATE
eth0 egress  10.0.0.9   home          as pool
eth0 egress  10.0.0.11              unlimited
eth0 egress  10.0.0.7   home      50mbit/pool
eth0 egress  10.0.0.10  home           20mbit
eth0 egress  10.0.0.8   home    12.3mbit/pool
`)
}
