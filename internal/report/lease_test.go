package report

import (
	"testing"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestRateNow: what packets meet comes before the rate of the whole cluster.
func TestRateNow(t *testing.T) {
	for want, lease := range map[string]*maps.Lease{
		"10gbit": nil, "3.00gbit leased of 10gbit": {Rate: 3e9, Safe: 1e9, Until: maps.Never}, "1.00gbit safe of 10gbit": {Rate: 3e9, Safe: 1e9},
	} {
		r := remade(shownPool("home", "", 0, 0, 0), func(it *live.Item) { it.Rate, it.Lease = 10e9, lease })
		if got := r.RateText(); got != want {
			t.Errorf("%s, not %s", got, want)
		}
	}
	r := remade(shownPool("home", "", 0, 0, 0), func(it *live.Item) {
		it.Rate, it.At, it.Lease = 10e9, 3e9, &maps.Lease{Rate: 3e9, Safe: 1e9, Until: 5e9}
	})
	if got, want := r.lease(), "3.00gbit of 10gbit for 2s unless renewed, then 1.00gbit"; got != want {
		t.Errorf("%s, not %s", got, want)
	}
}

// TestPoolRate has rules that have only pools: one with a lease, and one that was not read.
func TestPoolRate(t *testing.T) {
	within := func(pool policy.Within) func(r *policy.Rule) { return func(r *policy.Rule) { r.Within = pool } }
	leased := remade(shownPool("leased", "", 0, 0, 0), func(it *live.Item) { it.Lease = &maps.Lease{Rate: 12_345_678, Until: maps.Never} })
	all := readingOf(Rules{
		remade(shownPool("home", "", 0, 0, 0), func(it *live.Item) { it.Rate = 5e7 }), leased,
		shown("eth0", policy.Egress, "10.0.0.7/32", policy.Unlimited, within("home")),
		shown("eth0", policy.Egress, "10.0.0.8/32", policy.Unlimited, within("leased")),
		shown("eth0", policy.Egress, "10.0.0.9/32", policy.Unlimited, within("gone")),
		shown("eth0", policy.Egress, "10.0.0.10/32", 2e7, within("home")),
		shown("eth0", policy.Egress, "10.0.0.11/32", policy.Unlimited, nil),
	})
	var rules Rules
	for i := range all.Items[2:] {
		rules = append(rules, NewRule(&all.Items[2+i]))
	}
	same(t, "rules", text(t, Table{Rules: rules, Of: len(rules)}.Text), `
DEVICE       NETWORK    WITHIN                             RATE
eth0 egress  10.0.0.7   home                        50mbit/pool
eth0 egress  10.0.0.8   leased  12.3mbit leased of 100mbit/pool
eth0 egress  10.0.0.9   gone                            as pool
eth0 egress  10.0.0.10  home                             20mbit
eth0 egress  10.0.0.11                                unlimited
`)
}
