package report

import (
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// tested is a pool of 8 mbit.
func tested(name string, within policy.Within, share policy.ShareKind, guarantee policy.Guarantee) policy.Rule {
	return policy.Rule{
		Pool: true, Prefix: policy.PoolKey(name), Rate: 8e6, Capacity: 100_000, Within: within, Share: policy.Share{Kind: share}, Guarantee: guarantee,
		Label: policy.Label{Name: name},
	}
}

// member is a rule within a pool, without a rate of its own.
func member(network string, within policy.Within) policy.Rule {
	return shown("eth0", policy.Egress, network, policy.Unlimited, func(r *policy.Rule) { r.Within = within }).Item.Rule
}

// use is what a pool or rule counted, and its level.
func use(bytes, packets, refused, level uint64) live.Item {
	return live.Item{Level: level, Counts: live.Counts{Counters: maps.Counters{
		PassedBytes: bytes, PassedPackets: packets, DroppedPackets: refused, DroppedBytes: 1000 * refused, ExcessPackets: refused,
	}}}
}

// explained is what is said of a pool that did all that within an interval, and before that, what before says. Figures are by
// the name of a pool or the network of a rule.
func explained(t *testing.T, pool string, interval time.Duration, limits []policy.Rule, before, after map[string]live.Item) string {
	t.Helper()
	tables := []policy.Table{{}, {Device: "eth0", Direction: policy.Egress, Match: policy.MatchDst}}
	for _, r := range limits {
		to := &tables[1]
		if r.Pool {
			to = &tables[0]
		}
		to.Rules = append(to.Rules, r)
	}
	scene := livetest.Scene(tables...)
	read := func(at uint64, figures map[string]live.Item) *live.Reading {
		return scene.Read(at, func(l *live.Limit) live.Item {
			it := figures[l.Key.Pool+strings.TrimSuffix(l.Network, "/32")]
			it.Limit = l
			return it
		})
	}
	now := read(1e9+uint64(interval), after)
	now.Since(read(1e9, before))
	return text(t, ExplainPool(now.Find(live.Key{Pool: pool})).Text)
}

// A pool that members share is full if it leaves one of them less than that wants, and not if they use their own rates.
func TestExplainSharedPool(t *testing.T) {
	for _, test := range []struct {
		use  uint64 // bytes of a member per second
		want string
	}{{400_000, "in the last 1.0 s, pool ap is full: "}, {950_000, "in the last 1.0 s, pool ap limited none of its packets, "}} {
		got := explained(t, "ap", time.Second,
			[]policy.Rule{tested("ap", "", policy.ShareMember, 0), tested("home", "ap", policy.ShareFlow, 0), member("10.0.0.7/32", "home")}, nil,
			map[string]live.Item{"ap": use(950_000, 90, 0, 60_000), "home": use(test.use, 90, 9, 60_000), "10.0.0.7": use(test.use, 81, 9, 0)})
		if !strings.HasPrefix(got, test.want) {
			t.Errorf("a member uses %d bytes per second: it says\n%s", test.use, got)
		}
	}
}

// A pool without a guarantee may lose all where guaranteed members use the pool above. A sender that got nothing through
// may have stopped.
func TestExplainPoolWithoutGuarantee(t *testing.T) {
	loses := map[string]live.Item{"10.0.0.7": use(0, 0, 50, 0)}
	for _, test := range []struct {
		name      string
		guarantee policy.Guarantee
		before    map[string]live.Item
		want      string
	}{
		{"loses all", 0, nil, `
in the last 1.0 s, pool mine gets 0 of 8mbit; pool uplink is full: 7.90mbit of
    8mbit for its members; 100% of the packets of mine were dropped
`},
		{"silent", 0, loses, `
in the last 1.0 s, pool mine gets 0 of 8mbit; pool uplink is full: 7.90mbit of
    8mbit for its members
`},
		{"guaranteed", 1e6, nil, `
in the last 1.0 s, pool mine gets 0 of 8mbit; pool uplink is full: 7.90mbit of
    8mbit for its members; 100% of the packets of mine were dropped
`},
	} {
		other := use(987_500, 50, 0, 50_000)
		other.GuaranteedBytes = 950_000
		got := explained(t, "mine", time.Second, []policy.Rule{
			tested("mine", "uplink", policy.ShareNone, test.guarantee), tested("uplink", "", policy.ShareMember, 0), tested("other", "uplink", policy.ShareNone, 7e6),
			member("10.0.0.7/32", "mine"), member("10.0.0.8/32", "other"),
		}, test.before, map[string]live.Item{
			"mine": use(0, 0, 0, 50_000), "uplink": use(987_500, 100, 0, 50_000), "other": other, "10.0.0.7": loses["10.0.0.7"], "10.0.0.8": use(987_500, 50, 0, 0),
		})
		got, _, _ = strings.Cut(got, "POOL OR RULE")
		same(t, test.name, got, test.want)
	}
}

// Once its quota is used up, a pool is full at the rate after it. One without a rate has only other limits.
func TestExplainPoolWithoutQuota(t *testing.T) {
	home, figures := tested("home", "", policy.ShareNone, 0), use(125_000, 90, 9, 90_000)
	home.Also, figures.Used = policy.Also{Quota: policy.Quota{Bytes: 1e6, Period: "30d"}, Then: 1e6}, maps.NewQuota(1e6, 1e6)
	packets := home
	packets.Rate, packets.Also = policy.MaxRate, policy.Also{Packets: 100, Flows: 20_000}
	for want, home := range map[string]policy.Rule{"1.00mbit of 1mbit, as its quota is used up;": home, "1.00mbit, with a limit of 100 pps, 20k new/s;": packets} {
		got := explained(t, "home", time.Second, []policy.Rule{home, member("10.0.0.7/32", "home")}, nil, map[string]live.Item{"home": figures, "10.0.0.7": use(125_000, 90, 9, 0)})
		if want = "pool home is full: " + want; !strings.Contains(strings.Join(strings.Fields(got), " "), want) {
			t.Errorf("not %q:\n%s", want, got)
		}
	}
}

// What limits a pool is itself, a pool above, or nothing; and who uses most within it comes first.
func TestExplainPool(t *testing.T) {
	const shared, none = policy.ShareMember, policy.ShareNone
	for _, test := range []struct {
		name     string
		share    policy.ShareKind // of ap
		home, ap live.Item
		dropped  uint64 // packets of 10.0.0.8
		want     string
	}{
		{"itself", none, use(197_500, 110, 50, 90_000), use(197_500, 140, 0, 0), 50, `
in the last 0.2 s, pool home is full: 7.90mbit of 8mbit; 31% of the packets of
    home were dropped
POOL OR RULE  DEVICE          RATE       USE  OF RATE  DROPPED  REFUSED
ap                           8mbit  7.90mbit      99%      25%       0%
  home                       8mbit  7.90mbit      99%      31%      31%
    10.0.0.8  eth0 egress  as pool  4.00mbit               33%
    10.0.0.7  eth0 egress  as pool   400kbit                0%
1 more within it, with less or no use
`},
		{"the pool above, for whose sake it refuses", shared, use(100_000, 110, 50, 0), use(197_500, 140, 0, 45_000), 50, `
in the last 0.2 s, pool home gets 4.00mbit of 8mbit; pool ap is full: 7.90mbit
    of 8mbit for its members; 31% of the packets of home were dropped
POOL OR RULE  DEVICE          RATE       USE  OF RATE  DROPPED  REFUSED
ap                           8mbit  7.90mbit      99%      25%       0%
  home                       8mbit  4.00mbit      50%      31%      31%
    10.0.0.8  eth0 egress  as pool  4.00mbit               33%
    10.0.0.7  eth0 egress  as pool   400kbit                0%
1 more within it, with less or no use
`},
		{"a rule within it", none, use(100_000, 110, 0, 0), use(197_500, 140, 0, 0), 50, `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above; 31% of the packets of home were dropped by limits within it
POOL OR RULE  DEVICE          RATE       USE  OF RATE  DROPPED
ap                           8mbit  7.90mbit      99%      25%
  home                       8mbit  4.00mbit      50%      31%
    10.0.0.8  eth0 egress  as pool  4.00mbit               33%
    10.0.0.7  eth0 egress  as pool   400kbit                0%
1 more within it, with less or no use
`},
		{"nothing, as it has a burst", none, use(236_000, 110, 0, 0), use(197_500, 140, 0, 0), 0, `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above; its burst lets more than its rate pass for a moment
POOL OR RULE  DEVICE          RATE       USE  OF RATE
ap                           8mbit  7.90mbit      99%
  home                       8mbit  9.44mbit     118%
    10.0.0.8  eth0 egress  as pool  4.00mbit
    10.0.0.7  eth0 egress  as pool   400kbit
1 more within it, with less or no use
`},
		{"nothing, though a pool above is full", none, use(100_000, 110, 0, 0), use(197_500, 140, 60, 95_000), 0, `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above
POOL OR RULE  DEVICE          RATE       USE  OF RATE  REFUSED
ap                           8mbit  7.90mbit      99%      30%
  home                       8mbit  4.00mbit      50%       0%
    10.0.0.8  eth0 egress  as pool  4.00mbit
    10.0.0.7  eth0 egress  as pool   400kbit
1 more within it, with less or no use
`},
		{"nothing", none, live.Item{}, live.Item{}, 0, `
in the last 0.2 s, pool home limited none of its packets, and neither did a pool
    above
POOL OR RULE  DEVICE          RATE       USE
ap                           8mbit         0
  home                       8mbit         0
    10.0.0.8  eth0 egress  as pool  4.00mbit
    10.0.0.7  eth0 egress  as pool   400kbit
1 more within it, with less or no use
`},
	} {
		got := explained(t, "home", 200*time.Millisecond, []policy.Rule{
			tested("home", "ap", none, 0), tested("ap", "", test.share, 0),
			member("10.0.0.7/32", "home"), member("10.0.0.8/32", "home"), member("10.0.0.9/32", "home"), member("10.0.1.1/32", ""), member("10.0.2.1/32", "ap"),
		}, nil, map[string]live.Item{
			"home": test.home, "ap": test.ap, "10.0.0.7": use(10_000, 10, 0, 0), "10.0.0.8": use(100_000, 100, test.dropped, 0), "10.0.1.1": use(999_000, 999, 0, 0),
			"10.0.2.1": use(30_000, 40, 0, 0),
		})
		same(t, test.name, got, test.want)
	}
}
