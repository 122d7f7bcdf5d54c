package report

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A pool that members share is full if it leaves one of them less than that wants, and not if they use their own rates.
func TestExplainSharedPool(t *testing.T) {
	for _, test := range []struct {
		use  uint64 // bytes of a member per second
		want string
	}{{400_000, "in the last 1.0 s, pool ap is full: "}, {950_000, "in the last 1.0 s, pool ap limited none of its packets, "}} {
		ap := policy.Rule{Pool: true, Prefix: policy.PoolKey("ap"), Rate: 8e6, Capacity: 100_000, Share: policy.Share{Kind: policy.ShareMember}}
		home := policy.Rule{Pool: true, Prefix: policy.PoolKey("home"), Rate: 8e6, Capacity: 100_000, Share: policy.Share{Kind: policy.ShareFlow}, Within: "ap"}
		ap.Label.Name, home.Label.Name = "ap", "home"
		rules := Rules{
			NewRule("", 0, 0, ap, maps.Counters{PassedBytes: 950_000}, 60_000),
			NewRule("", 0, 0, home, maps.Counters{PassedBytes: test.use, ExcessPackets: 9, DroppedPackets: 9}, 60_000),
		}
		for i := range rules {
			rules[i].Lost(maps.Loss{MatchedPackets: 90, DroppedPackets: 9})
			rules[i].Since(Sample{}, 1e9)
		}
		if got := text(t, rules.ExplainPool("ap").Text); !strings.HasPrefix(got, test.want) {
			t.Errorf("a member uses %d bytes per second: it says\n%s", test.use, got)
		}
	}
}

// A pool without a guarantee may lose all where guaranteed members use the pool above. A sender that got nothing through
// may have stopped.
func TestExplainPoolWithoutGuarantee(t *testing.T) {
	const second = 1_000_000_000
	pool := func(name string, guarantee policy.Guarantee, passed, guaranteed, matched, dropped uint64) Rule {
		r := policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Rate: 8e6, Capacity: 100_000, Guarantee: guarantee, Label: policy.Label{Name: name}}
		if name != "uplink" {
			r.Within = "uplink"
		} else {
			r.Share.Kind = policy.ShareMember
		}
		out := NewRule("", 0, 0, r, maps.Counters{PassedBytes: passed}, 50_000)
		out.Guaranteed(maps.Counters{PassedBytes: guaranteed})
		out.Lost(maps.Loss{MatchedPackets: matched, DroppedPackets: dropped})
		return out
	}
	for _, test := range []struct {
		name  string
		mine  Rule
		since Sample
		want  string
	}{
		{"loses all", pool("mine", 0, 0, 0, 50, 50), Sample{}, `
in the last 1.0 s, pool mine gets 0 of 8mbit; pool uplink is full: 7.90mbit of
    8mbit for its members; 100% of the packets of mine were dropped; mine has no
    guarantee, and guaranteed members of uplink use 7.60mbit
`},
		{"silent", pool("mine", 0, 0, 0, 50, 50), Sample{offered: 50, dropped: 50}, `
in the last 1.0 s, pool mine gets 0 of 8mbit; pool uplink is full: 7.90mbit of
    8mbit for its members; none of its packets came, and 100% were dropped so
    far; mine has no guarantee, and guaranteed members of uplink use 7.60mbit
`},
		{"guaranteed", pool("mine", 1e6, 0, 0, 50, 50), Sample{}, `
in the last 1.0 s, pool mine gets 0 of 8mbit; pool uplink is full: 7.90mbit of
    8mbit for its members; 100% of the packets of mine were dropped
`},
	} {
		uplink, other := pool("uplink", 0, 987_500, 0, 100, 50), pool("other", 7e6, 987_500, 950_000, 50, 0)
		test.mine.Since(test.since, second)
		uplink.Since(Sample{}, second)
		other.Since(Sample{}, second)
		got, _, _ := strings.Cut(text(t, Rules{test.mine, uplink, other}.ExplainPool("mine").Text), "  pool  ")
		same(t, test.name, got, test.want)
	}
}

// What limits a pool is itself, a pool above, or nothing; and who uses most within it comes first.
func TestExplainPool(t *testing.T) {
	const interval = 200_000_000 // ns
	pool := func(name string, within policy.Within, share policy.ShareKind, level, use, matched, dropped, refused uint64) Rule {
		r := policy.Rule{
			Pool: true, Prefix: policy.PoolKey(name), Rate: 8e6, Capacity: 100_000, Within: within, Share: policy.Share{Kind: share},
			Label: policy.Label{Name: name},
		}
		out := NewRule("", 0, 0, r, maps.Counters{PassedBytes: use / 40, DroppedPackets: refused, ExcessPackets: refused}, level)
		out.Lost(maps.Loss{MatchedPackets: matched, DroppedPackets: dropped})
		out.Since(Sample{}, interval)
		return out
	}
	rule := func(network string, within policy.Within, packets uint64, dropped uint64) Rule {
		r := passed(shown("eth0", policy.Egress, network, policy.Unlimited, func(r *policy.Rule) { r.Within = within }), packets, 1000*packets, dropped)
		r.Since(Sample{}, interval)
		return r
	}
	const member, none = policy.ShareMember, policy.ShareNone
	members := Rules{
		rule("10.0.0.7/32", "home", 10, 0), rule("10.0.0.8/32", "home", 100, 50), rule("10.0.0.9/32", "home", 0, 0), rule("10.0.1.1/32", "", 999, 0),
	}
	for _, test := range []struct {
		name     string
		home, ap Rule
		want     string
	}{
		{"itself", pool("home", "ap", none, 90_000, 7_900_000, 160, 50, 50), pool("ap", "", none, 0, 7_900_000, 200, 60, 0), `
in the last 0.2 s, pool home is full: 7.90mbit of 8mbit; 31% of the packets of
    home were dropped
  pool       home: 8mbit; 7.90mbit used now; 31% refused
  pool       ap: 8mbit; 7.90mbit used now
`},
		{"the pool above, for whose sake it refuses", pool("home", "ap", none, 0, 4_000_000, 160, 50, 50), pool("ap", "", member, 45_000, 7_900_000, 200, 60, 0), `
in the last 0.2 s, pool home gets 4.00mbit of 8mbit; pool ap is full: 7.90mbit
    of 8mbit for its members; 31% of the packets of home were dropped
  pool       home: 8mbit; 4.00mbit used now; 31% refused
  pool       ap: 8mbit; 7.90mbit used now; its members
`},
		{"a rule within it", pool("home", "ap", none, 0, 4_000_000, 160, 50, 0), pool("ap", "", none, 0, 7_900_000, 200, 60, 0), `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above; limits within it dropped 31% of its packets
  pool       home: 8mbit; 4.00mbit used now
  pool       ap: 8mbit; 7.90mbit used now
`},
		{"nothing, though a pool above is full", pool("home", "ap", none, 0, 4_000_000, 160, 0, 0), pool("ap", "", none, 95_000, 7_900_000, 200, 60, 60), `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above
  pool       home: 8mbit; 4.00mbit used now
  pool       ap: 8mbit; 7.90mbit used now; 30% refused
`},
		{"nothing", pool("home", "ap", none, 0, 0, 0, 0, 0), pool("ap", "", none, 0, 0, 0, 0, 0), `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above
  pool       home: 8mbit; 0 used now
  pool       ap: 8mbit; 0 used now
`},
	} {
		got := append(Rules{test.home, test.ap}, members...).ExplainPool("home")
		same(t, test.name, text(t, got.Text), test.want+`  within it  eth0 egress 10.0.0.8 uses 4.00mbit, and loses 33%
  within it  eth0 egress 10.0.0.7 uses 400kbit
  within it  1 more, with less or no use
`)
	}
}
