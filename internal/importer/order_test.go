package importer

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestOrder checks that rules and pools give each address all limits of its entries, up to the first that is final, for
// random entries. It has no other limits, and lacks some only if that is reported.
func TestOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	key := tableKey{"eth0", policy.Egress}
	exact := 0
	const rulesets = 2000
	for range rulesets {
		s := newCollector()
		for n := range 1 + r.IntN(8) {
			e := entry{key: key, conditions: conditions{side: toward}, prefix: smallPrefix(r), until: everyEntry * r.IntN(2), where: "here"}
			switch r.IntN(5) {
			case 0: // an exception
			case 1:
				if n > 0 && s.entries[n-1].limit != nil {
					e.limit = s.entries[n-1].limit
					break
				}
				fallthrough
			default:
				e.limit = &limit{Rule: policy.Rule{Rate: policy.Rate(10_000 + n), Capacity: policy.MinCapacity}, where: "here"}
			}
			s.entries = append(s.entries, e)
		}
		s.make()
		i := s.imported()
		testenv.Must(t, policy.CheckPools(i.Tables))
		reported := slices.ContainsFunc(i.Left, func(l Left) bool { return l.reason == stacked })
		if !reported {
			exact++
		}
		for host := range 16 {
			address := netip.AddrFrom4([4]byte{10, 0, 0, byte(host)})
			want := map[policy.Rate]bool{}
			for _, e := range s.entries {
				if !e.prefix.Contains(address) {
					continue
				}
				if e.limit != nil {
					want[e.limit.Rate] = true
				}
				if e.until > 0 {
					break
				}
			}
			got := ratesOf(i.Tables, address)
			for _, rate := range got {
				if !want[rate] {
					t.Fatalf("%v has %v, not %v: %+v of %+v", address, got, want, i.Tables, s.entries)
				}
			}
			if len(got) != len(want) && !reported {
				t.Fatalf("%v has %v, not all of %v: %+v of %+v", address, got, want, i.Tables, s.entries)
			}
		}
	}
	if exact < rulesets*9/10 {
		t.Errorf("%d of %d rulesets were expressed", exact, rulesets)
	}
}

// smallPrefix returns a network within 10.0.0.0/28.
func smallPrefix(r *rand.Rand) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(16))}), 28+r.IntN(5)).Masked()
}

// ratesOf returns the rates of the longest prefix and its pools.
func ratesOf(tables []policy.Table, address netip.Addr) (rates []policy.Rate) {
	var rule policy.Rule
	length := -1
	pools := policy.NewTree(tables)
	for _, t := range tables {
		for _, r := range t.Rules {
			if !r.Pool && r.Prefix.Contains(address) && r.Prefix.Bits() > length {
				rule, length = r, r.Prefix.Bits()
			}
		}
	}
	if length >= 0 && rule.Rate != policy.Unlimited {
		rates = append(rates, rule.Rate)
	}
	for within := rule.Within; within != ""; {
		pool := pools.Find(within.String()).Pool
		rates, within = append(rates, pool.Rate), pool.Within
	}
	return rates
}

// TestOrderLeaves checks rules and pools of ordered entries, and what is reported where they cannot express the order.
func TestOrderLeaves(t *testing.T) {
	a, b := &limit{Rule: policy.Rule{Rate: 10_000, Capacity: 2000}, where: "a"}, &limit{Rule: policy.Rule{Rate: 30_000, Capacity: 2000}, where: "b"}
	hosts := &limit{Rule: policy.Rule{Rate: 10_000, Capacity: 2000, Each: policy.Each{Kind: policy.EachHost}}, where: "d"}
	others := &limit{Rule: policy.Rule{Rate: 30_000, Capacity: 2000, Each: policy.Each{Kind: policy.EachHost}}, where: "c"}
	subnets := &limit{Rule: policy.Rule{Rate: 10_000, Capacity: 2000, Each: policy.Each{Kind: policy.EachSubnet, Bits: 24}}, where: "e"}
	egress := tableKey{"eth0", policy.Egress}
	p := netip.MustParsePrefix
	wide, narrow, inside, other := p("10.0.0.0/16"), p("10.0.0.0/24"), p("10.0.0.1/32"), p("10.0.1.0/24")
	for _, test := range []struct {
		name    string
		entries []entry
		kinds   []reason
		rates   []policy.Rate // of the rules, in order; unlimited ones too
	}{
		{"a narrower one after a wider one that lets go on", []entry{
			{prefix: narrow, limit: a}, {prefix: inside, limit: b},
		}, nil, []policy.Rate{10_000, policy.Unlimited, 30_000}},
		{"a wider one after a narrower one that lets go on", []entry{
			{prefix: inside, limit: a}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000, policy.Unlimited, 10_000}},
		{"a chain that ends in between", []entry{
			{prefix: inside, limit: a, until: 1}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000, policy.Unlimited, 10_000}},
		{"hooks that never see the same packet", []entry{
			{prefix: inside, limit: a, hook: "forward"}, {prefix: narrow, limit: b, hook: "output"},
		}, []reason{otherHook}, []policy.Rate{30_000, 10_000}},
		{"hooks that see the same packets", []entry{
			{prefix: inside, limit: a, hook: "forward"}, {prefix: narrow, limit: b, hook: "postrouting"},
		}, nil, []policy.Rate{30_000, policy.Unlimited, 10_000}},
		{"a total of hosts", []entry{
			{prefix: narrow, limit: hosts}, {prefix: wide, limit: b},
		}, nil, []policy.Rate{30_000, policy.Unlimited, 10_000}},
		{"hosts of a total", []entry{
			{prefix: narrow, limit: b}, {prefix: wide, limit: hosts},
		}, nil, []policy.Rate{30_000, 10_000, 10_000}},
		{"two limits of each host", []entry{
			{prefix: narrow, limit: hosts}, {prefix: wide, limit: others},
		}, []reason{stacked}, []policy.Rate{30_000, 10_000}},
		{"subnets of another total", []entry{
			{prefix: inside, limit: b}, {prefix: wide, limit: subnets},
		}, []reason{stacked}, []policy.Rate{10_000, 30_000}},
		{"totals that overlap", []entry{
			{prefix: narrow, limit: a}, {prefix: other, limit: a}, {prefix: narrow, limit: b}, {prefix: p("10.0.2.0/24"), limit: b},
		}, []reason{stacked}, []policy.Rate{10_000, 30_000, policy.Unlimited, policy.Unlimited, policy.Unlimited}},
		{"one after the other for a network", []entry{
			{prefix: narrow, limit: b}, {prefix: narrow, limit: a},
		}, nil, []policy.Rate{30_000, 10_000}},
		{"a higher one after the other", []entry{
			{prefix: narrow, limit: a}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000, 10_000}},
		{"never reached", []entry{
			{prefix: narrow, limit: a, until: everyEntry}, {prefix: inside, limit: b},
		}, nil, []policy.Rate{10_000}},
		{"a rate that no rule can have", []entry{
			{prefix: narrow, limit: &limit{Rule: policy.Rule{Rate: 1000}, where: "f"}, until: 1}, {prefix: inside, limit: b},
		}, nil, []policy.Rate{30_000}},
		{"past a ban", []entry{
			{prefix: narrow, drops: true, until: everyEntry}, {prefix: inside, limit: b},
		}, nil, nil},
		{"an exception that ends with its chain", []entry{
			{prefix: narrow, until: 2}, {prefix: narrow, limit: a}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000}},
		{"an exception that ends before a wider limit", []entry{
			{prefix: inside, until: 2}, {prefix: other, limit: a, until: everyEntry}, {prefix: wide, limit: b, until: everyEntry},
		}, nil, []policy.Rate{30_000, 10_000}},
		{"an exception from a later limit only", []entry{
			{prefix: wide, limit: a}, {prefix: inside, until: everyEntry}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{10_000, policy.Unlimited, 30_000, policy.Unlimited}},
		{"an exception after all limits", []entry{
			{prefix: wide, limit: a}, {prefix: inside, until: everyEntry},
		}, nil, []policy.Rate{10_000}},
		{"an exception within an exception", []entry{
			{prefix: inside, until: everyEntry}, {prefix: narrow, until: everyEntry}, {prefix: wide, limit: a, until: everyEntry},
		}, nil, []policy.Rate{10_000, policy.Unlimited}},
		{"some packets of a network pass", []entry{
			{prefix: narrow, conditions: conditions{partial: "port 22"}, until: everyEntry}, {prefix: inside, limit: b},
		}, []reason{exceptions}, []policy.Rate{30_000}},
		{"some packets of another network pass", []entry{
			{prefix: other, conditions: conditions{partial: "port 22"}, until: everyEntry}, {prefix: inside, limit: b},
		}, nil, []policy.Rate{30_000}},
		{"the other side", []entry{
			{conditions: conditions{side: toward}, prefix: narrow, limit: a}, {conditions: conditions{side: from}, prefix: inside, limit: b},
		}, []reason{otherSide}, []policy.Rate{10_000}},
		{"who comes from there passes", []entry{
			{conditions: conditions{side: from}, prefix: other, until: everyEntry}, {conditions: conditions{side: toward}, prefix: inside, limit: b},
		}, []reason{exceptions}, []policy.Rate{30_000}},
		{"what leaves this device passes", []entry{
			{prefix: inside, until: everyEntry, conditions: conditions{devices: [2][]string{policy.Egress: {"eth0"}}}}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000, policy.Unlimited}},
		{"what leaves another device passes", []entry{
			{prefix: inside, until: everyEntry, conditions: conditions{devices: [2][]string{policy.Egress: {"eth1"}}}}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000}},
		{"what enters another device passes", []entry{
			{prefix: inside, until: everyEntry, conditions: conditions{devices: [2][]string{policy.Ingress: {"eth1"}}}}, {prefix: narrow, limit: b},
		}, []reason{exceptions}, []policy.Rate{30_000}},
		{"what enters this device passes", []entry{
			{prefix: inside, until: everyEntry, conditions: conditions{devices: [2][]string{policy.Ingress: {"eth0"}}}}, {prefix: narrow, limit: b},
		}, nil, []policy.Rate{30_000}},
		{"two networks", []entry{
			{prefix: narrow, limit: a}, {prefix: other, limit: a},
		}, nil, []policy.Rate{10_000, policy.Unlimited, policy.Unlimited}}, // a pool and what is within it
		{"one within the other", []entry{
			{prefix: narrow, limit: a}, {prefix: inside, limit: a},
		}, nil, []policy.Rate{10_000}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newCollector()
			copies := map[*limit]*limit{}
			for _, e := range test.entries {
				if e.where = "here"; e.devices[policy.Ingress] == nil && e.devices[policy.Egress] == nil {
					e.key = egress
				}
				if of := e.limit; of != nil {
					if copies[of] == nil {
						l := *of
						copies[of] = &l
					}
					e.limit = copies[of]
				}
				s.entries = append(s.entries, e)
			}
			s.make()
			i := s.imported()
			var kinds, want []string
			for _, l := range i.Left {
				kinds = append(kinds, l.Kind)
			}
			for _, r := range test.kinds {
				want = append(want, r.Kind)
			}
			if !slices.Equal(kinds, want) {
				t.Errorf("left: %q, not %q", kinds, want)
			}
			var rates []policy.Rate
			for _, table := range i.Tables {
				for _, r := range table.Rules {
					rates = append(rates, r.Rate)
				}
			}
			if !slices.Equal(rates, test.rates) {
				t.Errorf("rules: %v, not %v", rates, test.rates)
			}
		})
	}
}

// TestTableSide checks that a table matches the side of the first limit that has one, or the far one.
func TestTableSide(t *testing.T) {
	l := &limit{Rule: policy.Rule{Rate: 10_000, Capacity: 2000}, where: "here"}
	for _, test := range []struct {
		direction policy.Direction
		sides     []side
		want      policy.Match
	}{
		{policy.Egress, []side{from, toward}, policy.MatchSrc},
		{policy.Egress, []side{either, toward, from}, policy.MatchDst},
		{policy.Ingress, []side{toward, from}, policy.MatchDst},
		{policy.Ingress, []side{either}, policy.MatchSrc},
	} {
		s := newCollector()
		for i, side := range test.sides {
			s.entries = append(s.entries, entry{
				key: tableKey{"eth0", test.direction}, conditions: conditions{side: side}, limit: l, until: everyEntry,
				prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32),
			})
		}
		s.make()
		tables := s.imported().Tables
		if got := tables[len(tables)-1].Match; got != test.want {
			t.Errorf("%v of %v: %v, not %v", test.direction, test.sides, got, test.want)
		}
	}
}
