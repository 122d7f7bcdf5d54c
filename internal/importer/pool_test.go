package importer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// TestBalance makes random trees of pools. Their guarantees must be possible, and each is lowered if and only if a pool
// above it cannot guarantee all of its members.
func TestBalance(t *testing.T) {
	const trees, most = 300, 30
	lowered, kept := 0, 0
	for seed := range uint64(trees) {
		random := rand.New(rand.NewPCG(seed, 0))
		rate := func(below policy.Rate) policy.Rate {
			return policy.MinRate + policy.Rate(random.Uint64N(uint64(below-policy.MinRate)+1))
		}
		c := newCollector()
		names := []policy.Within{""}
		member := func() policy.Rule {
			r := policy.Rule{Rate: rate(1e9), Within: names[random.IntN(len(names))], Weight: 2}
			if r.Capacity = policy.DefaultCapacity(r.Rate); r.Within == "" {
				r.Weight = 0
			} else if random.IntN(3) > 0 {
				r.Guarantee = policy.Guarantee(rate(r.Rate))
			}
			return r
		}
		for range random.IntN(most) {
			p := member()
			p.Share.Kind = policy.ShareMember
			names = append(names, c.addPool("pool", "", "", p, "here"))
		}
		for i := range random.IntN(most) {
			r := member()
			r.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32)
			if !c.add(tableKey{"eth1", policy.Egress}, policy.MatchDst, r, "here", "") {
				t.Fatalf("seed %d: %+v", seed, c.Left)
			}
		}
		before := map[netip.Prefix]policy.Rule{}
		for _, table := range c.tables {
			for _, r := range table.Rules {
				before[r.Prefix] = r
			}
		}
		i := c.imported()
		if err := policy.CheckPools(i.Tables); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		over := map[policy.Within]bool{}
		for _, l := range i.Left {
			_, rest, _ := strings.Cut(l.What, `"`)
			of, _, _ := strings.Cut(rest, `"`)
			over[policy.Within(of)] = true
		}
		members := map[policy.Within]int{}
		for _, table := range i.Tables {
			for _, r := range table.Rules {
				members[r.Within]++
			}
		}
		for _, table := range i.Tables {
			for _, r := range table.Rules {
				had := before[r.Prefix].Guarantee
				above := false
				for name := r.Within; name != ""; name = before[policy.PoolKey(string(name))].Within {
					above = above || over[name]
				}
				switch {
				case above:
					lowered++
				case r.Guarantee < had || r.Guarantee > had && (!r.Pool || members[policy.Within(r.Label.Name)] == 0):
					t.Errorf("seed %d: %v has %v guaranteed, not %v", seed, r.Label.Name, r.Guarantee, had)
				default:
					kept++
				}
				if r.Pool && (members[policy.Within(r.Label.Name)] > 1) != (r.Share.Kind == policy.ShareMember) {
					t.Errorf("seed %d: %q has %d members and share %v", seed, r.Label.Name, members[policy.Within(r.Label.Name)], r.Share)
				}
				if (members[r.Within] > 1 && r.Within != "") != (r.Weight == 2) {
					t.Errorf("seed %d: weight %v of one of %d members", seed, r.Weight, members[r.Within])
				}
			}
		}
	}
	if lowered < trees || kept < trees {
		t.Errorf("%d guarantees were lowered, %d kept", lowered, kept)
	}
}

// TestBalanceProportion lowers guarantees in proportion, at each level.
func TestBalanceProportion(t *testing.T) {
	c := newCollector()
	pool := func(rate policy.Rate, within policy.Within, g policy.Guarantee) policy.Within {
		return c.addPool("pool", "", "", policy.Rule{Rate: rate, Capacity: 1e6, Within: within, Guarantee: g}, "here")
	}
	top := pool(90e6, "", 0)
	left, right := pool(60e6, top, 10e6), pool(60e6, top, 0)
	for i, r := range []struct {
		within    policy.Within
		guarantee policy.Guarantee
	}{{left, 100e6}, {left, 20e6}, {right, 60e6}, {right, 8000}} {
		rule := policy.Rule{Rate: 100e6, Capacity: 1e6, Within: r.within, Guarantee: r.guarantee}
		rule.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32)
		c.add(tableKey{"eth1", policy.Egress}, policy.MatchDst, rule, "here", "")
	}
	i := c.imported()
	var got []string
	for _, table := range i.Tables {
		for _, r := range table.Rules {
			got = append(got, r.Guarantee.String())
		}
	}
	const want = "none 45mbit none 37500kbit 7500kbit 44994kbit none"
	if s := strings.Join(got, " "); s != want {
		t.Errorf("guarantees are %s, not %s", s, want)
	}
	for k, want := range []string{`120mbit in "pool #2", whose rate is 60mbit`, `60008kbit in "pool #3", whose rate is 60mbit`} {
		if len(i.Left) != 3 || i.Left[k+1].What != want || i.Left[k+1].reason != overbooked {
			t.Errorf("left: %+v", i.Left)
		}
	}
}

// TestPoolNames gives each pool its own name, which fits.
func TestPoolNames(t *testing.T) {
	long := strings.Repeat("é", 40)
	c := newCollector()
	for _, test := range []struct{ title, id, ending, want string }{
		{"Smith", "1", " down", "Smith down"},
		{"Smith", "2", " down", "Smith (2) down"},
		{"Smith", "2", " down", "Smith #3 down"},
		{"Smith", "", " up", "Smith up"},
		{"Smith", "", " up", "Smith #2 up"},
		{long, "1", " down", long[:58] + " down"},
		{long, "2", " down", long[:54] + " (2) down"},
		{"x", strings.Repeat("2", 80), " up", "x up"},
		{"x", strings.Repeat("2", 80), " up", "x (" + strings.Repeat("2", 32) + ") up"},
	} {
		r := policy.Rule{Rate: 1e6, Capacity: 1e6}
		if got := c.addPool(test.title, test.id, test.ending, r, "here"); string(got) != test.want {
			t.Errorf("%+v: %q", test, got)
		}
	}
	if len(c.Left) > 0 {
		t.Error(fmt.Sprint(c.Left))
	}
}
