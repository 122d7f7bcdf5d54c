package report

import (
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// named is a rule with a name.
func named(name string, d policy.Direction, cidr string, rate policy.Rate, within policy.Within) Rule {
	return shown("eth0", d, cidr, rate, func(r *policy.Rule) { r.Within, r.Label.Name = within, name })
}

// subscriberPools are two access points, and pools that one subscriber alone has.
func subscriberPools() Rules {
	pool := func(name string, rate policy.Rate, within policy.Within) Rule {
		r := policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Rate: rate, Within: within, Label: policy.Label{Name: name}}
		return asRead(policy.Table{Rules: []policy.Rule{r}}, live.Item{})
	}
	return Rules{
		pool("mast north", 1e9, ""), pool("mast south", 1e9, ""),
		pool("alice", 5e7, "mast north"),
		pool("bob", 3e8, "mast north"), pool("bob egress", 2e8, "bob"), pool("bob ingress", 2e7, "bob"),
		pool("family", 1e8, "mast south"),
	}
}

// namesOf are the names of a view, their rows, and the number of rules without one.
func namesOf(r *live.Reading, v live.View) (names []TopName, rows []live.Row, unnamed int) {
	v.By = "name"
	rows, _ = r.Rows(v)
	top := NewTop(r, v)
	return top.Names, slices.DeleteFunc(rows, func(r live.Row) bool { return r.Name == nil }), len(top.Rules)
}

// The rules with a name have one line: what they may have in each direction by the pools that are theirs alone, and the
// pool above.
func TestByName(t *testing.T) {
	out, in := policy.Egress, policy.Ingress
	perHost := remade(shown("eth0", out, "10.0.6.0/24", 1e6, eachHost), func(it *live.Item) { it.Label.Name = "hosts" })
	rules := Rules{
		passed(named("alice", out, "10.0.0.1/32", policy.Unlimited, "alice"), 300, 300_000, 100),
		passed(named("alice", out, "2001:db8:1::/48", policy.Unlimited, "alice"), 100, 100_000, 0),
		named("alice", in, "10.0.0.1/32", policy.Unlimited, "alice"),
		named("bob", out, "10.0.0.2/32", 1e8, "bob egress"),
		named("bob", out, "2001:db8:2::/48", 4e7, "bob egress"),
		named("bob", in, "10.0.0.2/32", policy.Unlimited, "bob ingress"),
		named("carol", out, "10.0.0.3/32", policy.Unlimited, "family"),
		named("dave", out, "10.0.0.4/32", 3e7, "family"),
		named("eve", out, "10.0.0.5/32", 2e7, ""),
		named("eve", out, "2001:db8:5::/48", 2e7, ""),
		named("eve", in, "10.0.0.5/32", policy.Unlimited, ""),
		perHost,
		shown("eth0", out, "10.0.7.0/24", 1e9, nil),
	}
	all := readingOf(append(subscriberPools(), rules...))
	names, rows, unnamed := namesOf(all, live.View{Sort: "name"})
	same(t, "names", text(t, func(w io.Writer) error { return Names(w, rows, len(names), unnamed, 80) }), `
NAME   POOL            EGRESS  PASSED    INGRESS  DROPPED
alice  mast north      50mbit  400 kB     50mbit      20%
bob    mast north     140mbit       0     20mbit
carol  family         as pool       0
dave   family          30mbit       0
eve                    40mbit       0  unlimited
hosts              1mbit/host       0
1 rule without a name
`)
	alice := names[0]
	if e := alice.Sides[0]; e.Rules != 2 || *e.RateBits != 5e7 || e.PassedPackets != 400 || e.DroppedPackets != 100 || alice.Sides[1].Rules != 1 {
		t.Errorf("alice: %+v", alice.Sides)
	}
	if carol := names[2]; carol.Sides[0].RateBits != nil || len(carol.Sides) != 1 || carol.DroppedPercent != nil {
		t.Errorf("carol: %+v", carol)
	}

	// Of some rules, too, the pools that they share with others are known.
	one, _, _ := namesOf(all, live.View{Chosen: func(it *live.Item) bool { return it.Label.Name == "carol" && !it.IsPool() }})
	if got := fmt.Sprint(one[0].Sides[0].Pools); got != "[family]" {
		t.Errorf("carol alone is in the pools %s", got)
	}

	busyFor1s(all)
	for _, test := range []struct{ by, first string }{
		{"name", "alice"}, {"rate", "carol"}, {"use", "alice"}, {"passed", "alice"}, {"dropped", "alice"},
	} {
		if names, rows, _ = namesOf(all, live.View{Sort: test.by}); names[0].Name != test.first {
			t.Errorf("by %s, %s is the first", test.by, names[0].Name)
		}
	}
	same(t, "names, measured", text(t, func(w io.Writer) error { return Names(w, rows[:1], len(names), unnamed, 0) }), `
NAME   POOL        EGRESS       USE  INGRESS  DROPPED
alice  mast north  50mbit  3.20mbit   50mbit      20%
1 of 6 names
1 rule without a name
`)

	// A quota is a name's own if it is that of its rules, or of a pool that no other name is in.
	all = readingOf(append(withQuota(subscriberPools(), 60e9, "bob", "family"), withQuota(rules, 20e9, "bob", "eve", "hosts")...))
	all.Items[slices.IndexFunc(all.Items, func(it live.Item) bool { return it.Label.Name == "eve" })].Used = maps.NewQuota(100e9, 100e9)
	names, rows, _ = namesOf(all, live.View{Sort: "quota"})
	same(t, "names with quotas", text(t, func(w io.Writer) error { return Names(w, rows[:3], 3, 0, 80) }), `
NAME   POOL         EGRESS  PASSED    INGRESS  DROPPED           LEFT
eve                 40mbit       0  unlimited           used up: drop
bob    mast north  140mbit       0     20mbit                 40.0 GB
alice  mast north   50mbit  400 kB     50mbit      20%
`)
	if eve, bob := names[0].Quota, names[1].Quota; !eve.UsedUp || bob.UsedBytes != 60e9 || names[2].Quota != nil {
		t.Errorf("the quotas are %+v, %+v, %+v", eve, bob, names[2].Quota)
	}
}

// withQuota gives a quota to the rules and pools with a name, of which so much is used.
func withQuota(rules Rules, used uint64, who ...string) Rules {
	rules = slices.Clone(rules)
	for i, r := range rules {
		if slices.Contains(who, r.Label.Name) {
			rules[i] = remade(r, func(it *live.Item) {
				it.Also.Quota, it.Also.Then = policy.Quota{Bytes: 100e9, Period: "month"}, policy.ThenDrop
				it.Used = maps.NewQuota(100e9, used)
			})
		}
	}
	return rules
}

// Long names can be told apart on a narrow screen.
func TestLongNames(t *testing.T) {
	var rules Rules
	for i := range 2 {
		for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
			r := named(fmt.Sprintf("north-customer-%05d", i), d, "10.0.0.1/32", 1e7, policy.Within(fmt.Sprintf("access-point-hill-%02d", i)))
			rules = append(rules, passed(r, 3000, 3_000_000, 1000))
		}
	}
	for i := range 2 { // which another name draws from, too
		pool := fmt.Sprintf("access-point-hill-%02d", i)
		rules = append(rules, shownPool(pool, "", 0, 0, 0), named("", policy.Egress, "10.0.0.2/32", 1e7, policy.Within(pool)))
	}
	names, rows, _ := namesOf(busyFor1s(readingOf(rules)), live.View{Sort: "name"})
	same(t, "long names", text(t, func(w io.Writer) error { return Names(w, rows, len(names), 0, 80) }), `
NAME                  POOL          EGRESS       USE  INGRESS       USE  DROPPED
north-customer-00000  acces...l-00  10mbit  24.0mbit   10mbit  24.0mbit      25%
north-customer-00001  acces...l-01  10mbit  24.0mbit   10mbit  24.0mbit      25%
`)
}
