package importer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// TestBalance makes random trees of pools. Their guarantees must be possible, and protected ones are kept if all of them fit.
func TestBalance(t *testing.T) {
	const trees, most = 300, 30
	lowered, kept, protected := 0, 0, 0
	for seed := range uint64(trees) {
		random := rand.New(rand.NewPCG(seed, 0))
		rate := func(below policy.Rate) policy.Rate {
			return policy.MinRate + policy.Rate(random.Uint64N(uint64(below-policy.MinRate)+1))
		}
		c := newCollector()
		names := []policy.Within{""}
		member := func() policy.Rule {
			r := policy.Rule{Rate: rate(1e9), Within: names[random.IntN(len(names))]}
			if r.Capacity = policy.DefaultCapacity(r.Rate); r.Within != "" && random.IntN(3) > 0 {
				r.Guarantee = policy.Guarantee(rate(r.Rate))
			}
			return r
		}
		for range random.IntN(most) {
			names = append(names, c.addPool("pool", "", member(), "here"))
		}
		key := tableKey{"eth1", policy.Egress}
		for i := range random.IntN(most) {
			r := member()
			r.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32)
			if !c.add(key, policy.MatchDst, r, "here") {
				t.Fatalf("seed %d: %+v", seed, c.Left)
			}
			c.origins[place{key, r.Prefix}].kept = random.IntN(8) == 0
		}
		before := map[netip.Prefix]policy.Rule{}
		for _, table := range c.tables {
			for _, r := range table.Rules {
				before[r.Prefix] = r
			}
		}
		must := map[policy.Within]uint64{} // what is guaranteed to protected rules within pools
		above := func(r policy.Rule, f func(pool policy.Rule)) {
			for r.Within != "" {
				r = before[policy.PoolKey(string(r.Within))]
				f(r)
			}
		}
		isKept := func(r policy.Rule) bool { return !r.Pool && c.origins[place{key, r.Prefix}].kept }
		for _, r := range before {
			if isKept(r) {
				above(r, func(p policy.Rule) { must[policy.Within(p.Label.Name)] += uint64(r.Guarantee) })
			}
		}
		i := c.imported()
		if err := policy.CheckPools(i.Tables); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for _, table := range i.Tables {
			for _, r := range table.Rules {
				possible := isKept(r)
				above(r, func(p policy.Rule) { possible = possible && must[policy.Within(p.Label.Name)] <= uint64(p.Rate) })
				switch had := before[r.Prefix].Guarantee; {
				case r.Guarantee < had && possible || r.Guarantee > had && !r.Pool:
					t.Errorf("seed %d: %v has %v guaranteed, not %v", seed, r.Prefix, r.Guarantee, had)
				case r.Guarantee < had:
					lowered++
				case possible && had != 0:
					protected++
				default:
					kept++
				}
			}
		}
	}
	if lowered < trees || kept < trees || protected < trees/2 {
		t.Errorf("%d guarantees were lowered, %d kept, %d protected", lowered, kept, protected)
	}
}

// TestBalanceSteps lowers guarantees by the same steps for all, at each level.
func TestBalanceSteps(t *testing.T) {
	c := newCollector()
	pool := func(rate policy.Rate, within policy.Within, g policy.Guarantee) policy.Within {
		return c.addPool("pool", "", policy.Rule{Rate: rate, Capacity: 1e6, Within: within, Guarantee: g}, "here")
	}
	top := pool(90e6, "", 0)
	left, right := pool(60e6, top, 10e6), pool(60e6, top, 0)
	for i, r := range []struct {
		within    policy.Within
		guarantee policy.Guarantee
	}{{left, 100e6}, {left, 20e6}, {right, 60e6}, {right, 8000}} {
		rule := policy.Rule{Rate: 100e6, Capacity: 1e6, Within: r.within, Guarantee: r.guarantee}
		rule.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32)
		c.add(tableKey{"eth1", policy.Egress}, policy.MatchDst, rule, "here")
	}
	i := c.imported()
	var got []string
	for _, table := range i.Tables {
		for _, r := range table.Rules {
			got = append(got, r.Guarantee.String())
		}
	}
	const want = "none 45mbit none 37.5mbit 7.5mbit 33.75mbit none"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("guarantees are %s, not %s", s, want)
	}
	for k, want := range []string{
		`10.0.0.0: 37.5mbit of 100mbit, because 120mbit are guaranteed within "pool #2", whose rate is 60mbit`,
		`10.0.0.2: 33.75mbit of 60mbit, because 60.008mbit are guaranteed within "pool #3", whose rate is 60mbit`,
		`"pool #2": 45mbit of 60mbit, because 120mbit are guaranteed within "pool", whose rate is 90mbit`,
	} {
		if !slices.ContainsFunc(i.Left, func(l Left) bool { return l.What == want && l.reason == overbooked }) {
			t.Errorf("number %d, %s, is not in %+v", k, want, i.Left)
		}
	}
}

// TestPoolNames gives each pool its own name, which fits.
func TestPoolNames(t *testing.T) {
	long := strings.Repeat("é", 40)
	c := newCollector()
	for _, test := range []struct{ title, ending, want string }{
		{"Smith", " down", "Smith down"},
		{"Smith", " down", "Smith #2 down"},
		{"Smith", " up", "Smith up"},
		{long, " down", long[:58] + " down"},
		{long, " down", long[:56] + " #2 down"},
	} {
		r := policy.Rule{Rate: 1e6, Capacity: 1e6}
		if got := c.addPool(test.title, test.ending, r, "here"); string(got) != test.want {
			t.Errorf("%+v: %q", test, got)
		}
	}
	if len(c.Left) > 0 {
		t.Error(fmt.Sprint(c.Left))
	}
}
