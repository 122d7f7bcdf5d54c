package report

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

func TestDifferences(t *testing.T) {
	prefix := netip.MustParsePrefix("10.0.0.0/24")
	rule := func(l policy.Limit) *policy.Rule {
		r, err := l.Rule(prefix)
		if err != nil {
			t.Fatal(err)
		}
		return &r
	}
	named := rule(policy.Limit{Rate: 1e6})
	named.Label = policy.Label{Name: "alice \x1b", Plan: "gold"}
	shadowed := rule(policy.Limit{Rate: 1e6})
	shadowed.Shadow = policy.NewShadow(*rule(policy.Limit{Rate: 5e5}))
	differ := func(device string, have, want *policy.Rule) policy.Difference {
		d := policy.Difference{Device: device, Direction: policy.Egress, Have: have, Want: want, HaveMatch: policy.MatchDst, WantMatch: policy.MatchDst}
		return d
	}
	all := NewDifferences([]policy.Difference{
		differ("tap10", rule(policy.Limit{Rate: 1e6}), nil),
		differ("tap2", nil, rule(policy.Limit{Rate: 1e6, Each: policy.Each{Kind: policy.EachHost}, Excess: policy.Delay, Algorithm: policy.Leaky})),
		differ("tap3", rule(policy.Limit{Rate: 1e6}), rule(policy.Limit{Rate: 2e6, Excess: policy.ECN})),
		differ("tap3", rule(policy.Limit{Rate: 1e6}), named),
		differ("tap3", rule(policy.Limit{Rate: 1e6}), shadowed),
		differ("tap3", nil, rule(policy.Limit{Rate: policy.Unlimited})),
		differ("a\nb", nil, named),
	})
	same(t, "differences", text(t, all.Text), `
3 rules to add, 3 to change, 1 to remove on 4 devices
a\nb egress
  + 10.0.0.0/24  1mbit, name alice \u001b, plan gold
tap2 egress
  + 10.0.0.0/24  1mbit, algorithm leaky, each host, excess delay
tap3 egress
  ~ 10.0.0.0/24  rate 1mbit -> 2mbit, excess drop -> ecn
  ~ 10.0.0.0/24  name none -> "alice \x1b", plan none -> gold
  ~ 10.0.0.0/24  shadow none -> rate=500kbit
  + 10.0.0.0/24  unlimited
tap10 egress
  - 10.0.0.0/24  1mbit
`)
	if got := all[2].Options; len(got) != 2 || got[0] != (OptionChange{Option: "rate", Have: "1mbit", Want: "2mbit"}) {
		t.Errorf("options: %+v", got)
	}
	same(t, "none", text(t, Differences{}.Text), "nothing to change\n")
}

// A summary has a line for each kind of change, with the names of those whose rules or pools these are.
func TestSummary(t *testing.T) {
	pool := func(name string, rate policy.Rate) *policy.Rule {
		r, err := policy.Limit{Rate: rate}.Pool(name)
		if err != nil {
			t.Fatal(err)
		}
		return &r
	}
	member := func(address, name string, within policy.Within) *policy.Rule {
		return &policy.Rule{Prefix: netip.MustParsePrefix(address), Rate: policy.Unlimited, Within: within, Label: policy.Label{Name: name}}
	}
	inn, farm := member("10.0.0.1/32", "Inn (1)", "1 down"), member("10.0.0.2/32", "Farm\x1b (2)", "mast")
	all := NewDifferences([]policy.Difference{
		{Have: pool("1 down", 1e6), Want: pool("1 down", 2e6)},
		{Have: pool("mast", 1e6), Want: pool("mast", 2e6)},
		{Device: "eth1", Want: inn},
		{Device: "eth1", Have: farm},
		{Device: "eth1", Have: member("10.0.0.3/32", "", "mast")},
	})
	summary := all.Summary()
	same(t, "summary", text(t, all.SummaryText(summary)), `
1 rule to add, 2 to remove on 1 device
2 pools to change
  change rate              2  1 down, mast
  add                      1  Inn (1)
  remove                   2  Farm\u001b (2), 10.0.0.3
`)
	same(t, "none", text(t, Differences{}.SummaryText(nil)), "nothing to change\n")
}

func TestApplied(t *testing.T) {
	ok := HookChange{Device: "tap0", Direction: "egress", Added: 2}
	again := HookChange{Device: "a\nb", Direction: "ingress", Changed: 1, Reattached: "detached"}
	upgraded := HookChange{Device: "tap2", Direction: "egress", Upgraded: true}
	for want, a := range map[string]Applied{
		"nothing to change\n":         {},
		"2 rules added on 1 device\n": {Hooks: []HookChange{ok}},
		"2 rules added, 1 changed on 2 devices\na\\nb ingress: attached again (was: detached)\n": {Hooks: []HookChange{ok, again}},
		"2 rules added on 1 device\ntap0 egress: 2 rules added\n":                                {Hooks: []HookChange{ok}, Verbose: true},
		"no rule changed on 1 device\nreplaced the programs of another build\n":                  {Hooks: []HookChange{upgraded}},
		"no rule changed on 1 device\ntap2 egress: replaced the program of another build\n":      {Hooks: []HookChange{upgraded}, Verbose: true},
	} {
		same(t, fmt.Sprintf("%+v", a), text(t, a.Text), want)
	}
}
