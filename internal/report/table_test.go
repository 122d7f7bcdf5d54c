package report

import (
	"bytes"
	"io"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// shown is a rule of a device as show has it, attached and without traffic.
func shown(device string, d policy.Direction, cidr string, rate policy.Rate, change func(*policy.Rule)) Rule {
	r := policy.Rule{Prefix: netip.MustParsePrefix(cidr), Rate: rate, Capacity: policy.DefaultCapacity(rate)}
	if rate == policy.Unlimited {
		r.Capacity = 0
	}
	if change != nil {
		change(&r)
	}
	return asRead(policy.Table{Device: device, Direction: d, Match: d.FarSide(), Rules: []policy.Rule{r}}, live.Item{})
}

// asRead is the rule or pool of a table, with figures.
func asRead(of policy.Table, figures live.Item) Rule {
	r := livetest.Scene(of).Read(1e9, func(l *live.Limit) live.Item {
		figures.Limit = l
		return figures
	})
	return remade(Rule{Item: &r.Items[0]}, func(*live.Item) {})
}

// onEth0 is asRead on egress of eth0.
func onEth0(r policy.Rule, c maps.Counters, level uint64) Rule {
	return asRead(policy.Table{Device: "eth0", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{r}}, live.Item{Counts: live.Counts{Counters: c}, Level: level})
}

// remade is the rule with other figures or parameters.
func remade(r Rule, change func(*live.Item)) Rule {
	it, l, e, at := *r.Item, *r.Limit, *r.Entry, *r.Place
	it.Limit, l.Entry, l.Place = &l, &e, &at
	change(&it)
	changed := live.NewScene([]live.Place{at}, [][]maps.Entry{{e}}).Read(it.At, func(l *live.Limit) live.Item {
		it.Limit = l
		return it
	})
	out := NewRule(&changed.Items[0])
	out.Sentence = it.Sentence()
	return out
}

// since is the rule as it was measured over an interval, which began with these counts.
func since(r Rule, before live.Counts, interval time.Duration) Rule {
	return remade(r, func(it *live.Item) { it.Since(it.At-uint64(interval), &before) })
}

func eachHost(r *policy.Rule) { r.Each.Kind = policy.EachHost }

// passed gives a rule counters.
func passed(r Rule, packets, bytes, dropped uint64) Rule {
	return remade(r, func(it *live.Item) {
		it.PassedPackets, it.PassedBytes, it.DroppedPackets, it.DroppedBytes = packets, bytes, dropped, 1000*dropped
	})
}

// readingOf has all these rules and pools.
func readingOf(rules Rules) *live.Reading {
	var tables []policy.Table
	figures := map[live.Key]live.Item{}
	pools, others := rules.Split()
	for _, r := range append(pools, others...) {
		at := r.Place
		if n := len(tables); n == 0 || tables[n-1].Device != at.Device || tables[n-1].Direction != at.Direction {
			tables = append(tables, policy.Table{Device: at.Device, Direction: at.Direction, Match: at.Match})
		}
		t := &tables[len(tables)-1]
		t.Rules, figures[r.Key] = append(t.Rules, r.Item.Rule), *r.Item
	}
	return livetest.Scene(tables...).Read(1e10, func(l *live.Limit) live.Item {
		it := figures[l.Key]
		it.Limit = l
		return it
	})
}

// busyFor1s is the reading a second after one in which nothing had been counted.
func busyFor1s(r *live.Reading) *live.Reading {
	before := r.Scene().Read(r.At-1e9, func(l *live.Limit) live.Item { return live.Item{Limit: l} })
	r.Since(before)
	return r
}

func text(t *testing.T, write func(io.Writer) error) string {
	t.Helper()
	var b bytes.Buffer
	if err := write(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func same(t *testing.T, what, got, want string) {
	t.Helper()
	if want = strings.TrimPrefix(want, "\n"); got != want {
		t.Errorf("%s, got\n%swant\n%s", what, got, want)
	}
}

func TestTable(t *testing.T) {
	out, in := policy.Egress, policy.Ingress
	named := func(r Rule, name, plan string) Rule {
		return remade(r, func(it *live.Item) { it.Label.Name, it.Label.Plan = name, plan })
	}
	state := func(r Rule, inForce bool, status string) Rule {
		return remade(r, func(it *live.Item) { it.Place.InForce, it.Place.Status = inForce, status })
	}
	gone := state(shown("tap3", out, "10.0.0.0/24", 1e6, nil), false, "device is gone")
	moved := state(shown("tap4", out, "10.0.0.0/24", 1e6, nil), true, "attached, but the device has moved to another namespace")
	bySource := remade(shown("eth0", out, "10.0.0.0/24", 1e6, nil), func(it *live.Item) { it.Place.Match = policy.MatchSrc })
	pending := shown("eth0", out, "10.0.0.0/24", 1e6, nil)
	pending.Confirm, pending.Item.RevertsInNS = "'shapectl confirm'", new(uint64(59*time.Second))
	counts := func(packets, bytes, dropped uint64) live.Counts {
		return live.Counts{Counters: maps.Counters{PassedPackets: packets, PassedBytes: bytes, DroppedPackets: dropped}}
	}
	measured := since(passed(shown("eth0", out, "10.0.0.0/24", 10e6, nil), 2000, 2_000_000, 500), counts(1000, 0, 0), 2*time.Second)
	perHost := since(passed(shown("eth0", out, "10.0.1.0/24", 10e6, eachHost), 2000, 2_000_000, 0), counts(2000, 2_000_000, 0), 2*time.Second)
	marking := remade(passed(shown("eth0", out, "10.0.3.0/24", 10e6, nil), 90, 100_000, 10), func(it *live.Item) { it.ExcessPackets, it.DelayedPackets = 30, 10 })
	fresh := since(shown("eth0", out, "10.0.2.0/24", 10e6, nil), counts(1, 1, 1), 2*time.Second)
	for name, test := range map[string]struct {
		table Table
		want  string
	}{
		"one": {Table{Rules: Rules{shown("eth0", in, "0.0.0.0/0", 1e9, nil)}}, `
DEVICE        NETWORK     RATE
eth0 ingress  0.0.0.0/0  1gbit
`},
		"scopes": {Table{Rules: Rules{
			passed(shown("eth0", out, "10.0.0.0/24", 10e6, eachHost), 1000, 1_234_567, 0),
			passed(shown("eth0", out, "10.0.0.9/32", policy.Unlimited, nil), 7, 999, 0),
			passed(shown("eth0", out, "10.0.0.8/32", 10e6, eachHost), 10000, 9_999_999, 1),
			passed(shown("eth0", out, "2001:db8:1:2::/64", 1.5e9, func(r *policy.Rule) { r.Each = policy.Each{Kind: policy.EachSubnet, Bits: 96} }), 900, 99_960, 100),
			shown("wg0", out, "::/0", 8000, func(r *policy.Rule) { r.Each.Kind = policy.EachFlow }),
		}}, `
DEVICE       NETWORK                       RATE   PASSED  DROPPED
eth0 egress  10.0.0.0/24            10mbit/host  1.23 MB       0%
eth0 egress  10.0.0.9                 unlimited    999 B       0%
eth0 egress  10.0.0.8                    10mbit  10.0 MB    <0.1%
eth0 egress  2001:db8:1:2::/64  1.5gbit per /96   100 kB      10%
wg0 egress   ::/0                    8kbit/flow        0
`},
		"states": {Table{Rules: Rules{shown("tap2", out, "10.0.0.0/24", 1e6, nil), gone, moved}}, `
DEVICE       NETWORK       RATE  STATE
tap2 egress  10.0.0.0/24  1mbit
tap3 egress  10.0.0.0/24  1mbit  NOT IN FORCE: device is gone
tap4 egress  10.0.0.0/24  1mbit  attached, but the device has moved to another namespace
`},
		"names": {Table{Width: 80, Rules: Rules{
			named(passed(shown("tap2", out, "10.0.3.7/32", 10e6, nil), 10, 5000, 0), "alice", "gold"),
			named(shown("tap2", out, "2001:db8:1:2::/64", 10e6, nil), "", "silver"),
			named(shown("tap2", in, "10.0.3.8/32", 10e6, nil), "Smith & Sons, 3rd floor, behind the second door on the left", "gold"),
			named(shown("tap2", in, "10.0.3.9/32", 10e6, nil), "a\nb\x1b[31m", ""),
		}}, `
NAME                    DEVICE        NETWORK            PLAN      RATE   PASSED
alice                   tap2 egress   10.0.3.7           gold    10mbit  5.00 kB
                        tap2 egress   2001:db8:1:2::/64  silver  10mbit        0
Smith & So... the left  tap2 ingress  10.0.3.8           gold    10mbit        0
a\nb\u001b[31m          tap2 ingress  10.0.3.9                   10mbit        0
`},
		"wide": {Table{Wide: true, Width: 80, Rules: Rules{named(shown("tap2", out, "10.0.3.7/32", 10e6, nil), "alice", ""), shown("tap2", out, "10.0.3.8/32", 10e6, nil)}}, `
NAME   DEVICE       NETWORK     RATE  ON EXCESS  ALGORITHM   BURST
alice  tap2 egress  10.0.3.7  10mbit  drop       gcra       375 kB
       tap2 egress  10.0.3.8  10mbit  drop       gcra       375 kB
`},
		"match": {Table{Rules: Rules{bySource, shown("eth0", in, "10.0.0.0/24", 1e6, nil)}}, `
DEVICE        NETWORK      BY    RATE
eth0 egress   10.0.0.0/24  src  1mbit
eth0 ingress  10.0.0.0/24       1mbit
`},
		"some": {Table{Rules: Rules{shown("eth0", in, "0.0.0.0/0", 1e9, nil)}, Of: 300}, `
DEVICE        NETWORK     RATE
eth0 ingress  0.0.0.0/0  1gbit
1 of 300 rules
`},
		"measured": {Table{Rules: Rules{measured, perHost, fresh}}, `
DEVICE       NETWORK             RATE       USE  OF RATE  DROPPED
eth0 egress  10.0.0.0/24       10mbit  8.00mbit      80%      33%
eth0 egress  10.0.1.0/24  10mbit/host         0
eth0 egress  10.0.2.0/24       10mbit
`},
		"excess": {Table{Excess: true, Rules: Rules{marking}}, `
DEVICE       NETWORK        RATE  PASSED  DROPPED  EXCESS
eth0 egress  10.0.3.0/24  10mbit  100 kB      10%     40%
`},
		"pending": {Table{Rules: Rules{pending}}, `
DEVICE       NETWORK       RATE
eth0 egress  10.0.0.0/24  1mbit
the last change is not confirmed: it reverts in 59s, at TIME, unless confirmed by 'shapectl confirm'
`},
	} {
		got := text(t, test.table.Text)
		same(t, name, regexp.MustCompile(`\d\d:\d\d:\d\d`).ReplaceAllString(got, "TIME"), test.want)
	}
}

func TestFigures(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0", 1: "1 B", 999: "999 B", 1000: "1.00 kB", 1005: "1.00 kB", 9994: "9.99 kB", 9999: "10.0 kB", 99_949: "99.9 kB", 99_951: "100 kB",
		999_499: "999 kB", 999_500: "1.00 MB", 1 << 63: "9.22 EB",
	} {
		if got := Bytes(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
	for p, want := range map[float64]string{0: "0%", 0.01: "<0.1%", 0.1: "0.1%", 9.94: "9.9%", 9.95: "10%", 100: "100%"} {
		if got := percentText(p); got != want {
			t.Errorf("%v is %s, want %s", p, got, want)
		}
	}
	if bits := Bits(9_812_345); bits != "9.81mbit" {
		t.Errorf("bits: %s", bits)
	}
}

func TestDetail(t *testing.T) {
	busy := remade(passed(shown("eth0", policy.Egress, "10.0.0.0/24", 10e6, nil), 1_234_567, 1_234_567_890, 12_345), func(it *live.Item) {
		it.ExcessPackets, it.ExcessBytes, it.Level, it.MarkedPackets = 20_000, 20e6, 37_500, 7
		it.Label.Name, it.Label.Plan, it.Label.Note = "alice", "gold", "moved in 2024\n"
	})
	busy = since(busy, live.Counts{Counters: maps.Counters{PassedPackets: 1_234_500, PassedBytes: 1_200_000_000, DroppedPackets: 12_345}}, time.Second)
	host := remade(shown("eth0", policy.Egress, "10.0.0.0/24", 10e6, eachHost), func(it *live.Item) {
		it.ActiveBuckets, it.Level, it.SpilledPackets = new(uint64), 1000, 1
		it.Place.InForce, it.Place.Status = false, "detached"
	})
	for want, r := range map[string]Rule{`
eth0 egress: 10.0.0.0/24 ("alice") as a whole gets 10mbit (1.25 MB/s), burst 375
    kB (300 ms); excess is dropped (gcra)
  state      in force, by tcx
  full       10%
  note       moved in 2024\n
  plan       gold
  level      37.5 kB
  passed     1.23 GB in 1.23M packets
  excess     20.0 MB in 20.0k packets
  dropped    12.3 MB in 12.3k packets, 0%
  marked     7 packets
  use        277mbit
  of rate    2765%
`: busy, `
eth0 egress: each host in 10.0.0.0/24 gets 10mbit (1.25 MB/s), burst 375 kB (300
    ms); excess is dropped (gcra)
  state      NOT IN FORCE: detached
  full       0.3%
  level      1.00 kB
  passed     0 packets
  spilled    1 packet
`: host} {
		same(t, r.Network(), text(t, r.Detail), want)
	}
}

func TestBuckets(t *testing.T) {
	leaky, _ := queues()
	wait := uint64(2_500_000)
	delaying := asRead(policy.Table{Device: "eth0", Direction: policy.Ingress, Match: policy.MatchSrc, Rules: []policy.Rule{leaky}}, live.Item{})
	delaying.Buckets = []live.Bucket{{Name: "10.0.0.1", Bytes: 2500, WaitNS: &wait}, {Name: "10.0.0.2", Bytes: 9999}}
	hosts := shown("eth0", policy.Egress, "10.0.1.0/24", 1e6, eachHost)
	hosts.Buckets = []live.Bucket{{Name: "10.0.1.9", Bytes: 13_107}}
	empty := shown("eth0", policy.Egress, "10.0.2.0/24", 1e6, eachHost)
	empty.Buckets = []live.Bucket{}
	rules := Rules{delaying, hosts, empty}
	of := rules.KeepFullest(0, "")
	same(t, "all", text(t, func(w io.Writer) error { return rules.BucketsText(w, "", of, 80) }), `
KEY       RULE         DEVICE          LEVEL  FULL     WAIT
10.0.0.2  10.0.0.0/24  eth0 ingress  10.0 kB  100%  dropped
10.0.0.1  10.0.0.0/24  eth0 ingress  2.50 kB   25%    2.5ms
10.0.1.9  10.0.1.0/24  eth0 egress   13.1 kB   10%
`)
	if of = rules.KeepFullest(2, ""); of != 3 || len(rules[0].Buckets) != 2 || rules[0].Buckets[0].Name != "10.0.0.2" || len(rules[1].Buckets) != 0 || rules[2].Buckets == nil {
		t.Errorf("the fullest of %d: %+v", of, rules)
	}
	same(t, "some", text(t, func(w io.Writer) error { return rules.BucketsText(w, "", of, 80) }), `
KEY       RULE         DEVICE          LEVEL  FULL     WAIT
10.0.0.2  10.0.0.0/24  eth0 ingress  10.0 kB  100%  dropped
10.0.0.1  10.0.0.0/24  eth0 ingress  2.50 kB   25%    2.5ms
2 of 3 buckets
`)
	pool := shownPool("uplink", "", 0, 0, 0)
	pool = remade(pool, func(it *live.Item) { it.Capacity = 10_000 })
	pool.Buckets = []live.Bucket{{Name: "pool", Bytes: 1000}}
	pooled := Rules{pool, hosts}
	same(t, "of a pool", text(t, func(w io.Writer) error { return pooled.BucketsText(w, "", 2, 80) }), `
KEY       POOL OR RULE  DEVICE         LEVEL  FULL
10.0.1.9  10.0.1.0/24   eth0 egress  13.1 kB   10%
          uplink                     1.00 kB   10%
`)
}

func TestShadows(t *testing.T) {
	r := shown("eth0", policy.Egress, "10.0.0.0/24", 1e9, nil)
	proposed := func(each policy.EachKind) policy.Rule {
		return policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: 50e6, Each: policy.Each{Kind: each}}
	}
	affected := make([]live.Affected, 60000)
	affected[0].Subnet = "10.0.0.7"
	r.Shadow = &live.Shadow{Rule: proposed(policy.EachHost), Counters: maps.Counters{PassedBytes: 3_000_000, DroppedBytes: 1_000_000, ExcessBytes: 1_000_000}, Room: 65536, Affected: affected}
	all := shown("eth0", policy.Egress, "10.0.1.0/24", 1e9, nil)
	all.Shadow = &live.Shadow{Rule: proposed(policy.EachAll), Room: 65536}
	rules := Rules{all, shown("eth0", policy.Egress, "10.0.2.0/24", 1e9, nil), r}.WithShadow()
	slices.Reverse(rules)
	same(t, "shadows", text(t, func(w io.Writer) error { return rules.Shadows(w, 3, 80) }), `
RULE              SHADOW     SEEN  WOULD DROP   HOSTS  MOST AFFECTED
10.0.0.0/24  50mbit/host  4.00 MB         25%  60.0k+  10.0.0.7
10.0.1.0/24       50mbit        0          0%       0
all rules: eth0 egress
2 of 3 rules
`)
}
