package importer

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Rules hold each address to what the first entry that has it says, whatever the order of the entries was.
func TestOrderIsKept(t *testing.T) {
	r := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	key := tableKey{"eth0", policy.Egress}
	for range 2000 {
		s := &ruleset{collector: newCollector()}
		for range 1 + r.IntN(8) {
			e := entry{key: key, side: toward, prefix: smallPrefix(r), until: everyEntry, where: "here"}
			switch r.IntN(5) {
			case 0: // an exception
			case 1:
				if n := len(s.entries); n > 0 && s.entries[n-1].limit != nil {
					e.limit = s.entries[n-1].limit
					break
				}
				fallthrough
			default:
				e.limit = &limit{rate: policy.Rate(1000 * (1 + r.IntN(1000))), capacity: policy.MinCapacity}
			}
			s.entries = append(s.entries, e)
		}
		s.make()
		rules := s.imported().Tables
		for host := range 16 {
			address := netip.AddrFrom4([4]byte{10, 0, 0, byte(host)})
			want := policy.Unlimited
			if i := slices.IndexFunc(s.entries, func(e entry) bool { return e.prefix.Contains(address) }); i >= 0 && s.entries[i].limit != nil {
				want = s.entries[i].limit.rate
			}
			if got := rateOf(rules, address); got != want {
				t.Fatalf("%v has %v, not %v: %+v of %+v", address, got, want, rules, s.entries)
			}
		}
	}
}

// smallPrefix is a network within 10.0.0.0/28.
func smallPrefix(r *rand.Rand) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(16))}), 28+r.IntN(5)).Masked()
}

// rateOf is the rate of the longest prefix; unlimited if there is none.
func rateOf(tables []policy.Table, address netip.Addr) policy.Rate {
	rate, length := policy.Unlimited, -1
	for _, t := range tables {
		for _, r := range t.Rules {
			if r.Prefix.Contains(address) && r.Prefix.Bits() > length {
				rate, length = r.Rate, r.Prefix.Bits()
			}
		}
	}
	return rate
}

// What can not be kept is told: where packets had to conform to two limits, or none of the others.
func TestWhatOrderIsLost(t *testing.T) {
	a, b := &limit{rate: 1000, capacity: 2000, where: "a"}, &limit{rate: 3000, capacity: 2000, where: "b"}
	egress := tableKey{"eth0", policy.Egress}
	p := netip.MustParsePrefix
	for _, test := range []struct {
		name    string
		entries []entry
		kinds   []reason
		rules   int
	}{
		{"a narrower one after a wider one that lets go on", []entry{
			{prefix: p("10.0.0.0/24"), limit: a}, {prefix: p("10.0.0.1/32"), limit: b},
		}, []reason{stacked}, 2},
		{"a wider one after a narrower one that lets go on", []entry{
			{prefix: p("10.0.0.1/32"), limit: a}, {prefix: p("10.0.0.0/24"), limit: b},
		}, []reason{stacked}, 2},
		{"excess that goes on", []entry{
			{prefix: p("10.0.0.1/32"), limit: a, until: everyEntry, excessUntil: everyEntry}, {prefix: p("10.0.0.0/24"), limit: b},
		}, []reason{stacked}, 2},
		{"excess that is dropped in between", []entry{
			{prefix: p("10.0.0.1/32"), limit: a, until: everyEntry, excessUntil: 1}, {prefix: p("10.0.0.0/24"), limit: b},
		}, nil, 2},
		{"one after the other for a network", []entry{
			{prefix: p("10.0.0.0/24"), limit: b}, {prefix: p("10.0.0.0/24"), limit: a},
		}, []reason{sameNetwork}, 1},
		{"never reached", []entry{
			{prefix: p("10.0.0.0/24"), limit: a, until: everyEntry}, {prefix: p("10.0.0.1/32"), limit: b},
		}, []reason{unreached}, 1},
		{"past a ban", []entry{
			{prefix: p("10.0.0.0/24"), drops: true, until: everyEntry}, {prefix: p("10.0.0.1/32"), limit: b},
		}, []reason{unreached}, 0},
		{"the end of a chain", []entry{
			{prefix: p("10.0.0.0/24"), until: 2}, {prefix: p("10.0.0.0/24"), limit: a}, {prefix: p("10.0.0.0/24"), limit: b},
		}, []reason{unreached}, 1},
		{"an exception from a later limit only", []entry{
			{prefix: p("10.0.0.0/16"), limit: a}, {prefix: p("10.0.0.1/32"), until: everyEntry}, {prefix: p("10.0.0.0/24"), limit: b},
		}, []reason{stacked, exceptions}, 2},
		{"some packets of a network pass", []entry{
			{prefix: p("10.0.0.0/24"), partial: "port 22", until: everyEntry}, {prefix: p("10.0.0.1/32"), limit: b},
		}, []reason{exceptions}, 1},
		{"some packets of another network pass", []entry{
			{prefix: p("10.1.0.0/24"), partial: "port 22", until: everyEntry}, {prefix: p("10.0.0.1/32"), limit: b},
		}, nil, 1},
		{"the other side", []entry{
			{side: toward, prefix: p("10.0.0.0/24"), limit: a}, {side: from, prefix: p("10.0.0.1/32"), limit: b},
		}, []reason{otherSide}, 1},
		{"who comes from there passes", []entry{
			{side: from, prefix: p("192.0.2.0/24"), until: everyEntry}, {side: toward, prefix: p("10.0.0.1/32"), limit: b},
		}, []reason{exceptions}, 1},
		{"two networks", []entry{
			{prefix: p("10.0.0.0/24"), limit: a}, {prefix: p("10.0.1.0/24"), limit: a},
		}, []reason{shared}, 2},
		{"one within the other", []entry{
			{prefix: p("10.0.0.0/24"), limit: a}, {prefix: p("10.0.0.1/32"), limit: a},
		}, nil, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := &ruleset{collector: newCollector()}
			for _, e := range test.entries {
				e.key, e.where = egress, "here"
				s.entries = append(s.entries, e)
			}
			s.make()
			i := s.imported()
			var kinds []string
			for _, l := range i.Left {
				kinds = append(kinds, l.Kind)
			}
			var want []string
			for _, r := range test.kinds {
				want = append(want, r.kind)
			}
			if !slices.Equal(kinds, want) {
				t.Errorf("left: %q, not %q", kinds, want)
			}
			if i.Rules() != test.rules {
				t.Errorf("%d rules, not %d: %+v", i.Rules(), test.rules, i.Tables)
			}
		})
	}
}

// One side is matched: that by which most limits go, or the far one.
func TestSideOfATable(t *testing.T) {
	l := &limit{rate: 1000, capacity: 2000}
	for _, test := range []struct {
		direction policy.Direction
		sides     []side
		want      policy.Match
	}{
		{policy.Egress, []side{toward, from, from}, policy.MatchSrc},
		{policy.Egress, []side{toward, from}, policy.MatchDst},
		{policy.Ingress, []side{toward, from}, policy.MatchSrc},
		{policy.Ingress, []side{toward, toward, either, either}, policy.MatchDst},
		{policy.Ingress, []side{either}, policy.MatchSrc},
	} {
		s := &ruleset{collector: newCollector()}
		for i, side := range test.sides {
			s.entries = append(s.entries, entry{
				key: tableKey{"eth0", test.direction}, side: side, limit: l, until: everyEntry,
				prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 32),
			})
		}
		s.make()
		if got := s.imported().Tables[0].Match; got != test.want {
			t.Errorf("%v of %v: %v, not %v", test.direction, test.sides, got, test.want)
		}
	}
}
