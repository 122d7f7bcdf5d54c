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
	out := NewRule(device, d, d.FarSide(), r, maps.Counters{}, 0)
	out.Attached, out.State, out.Hook = new(true), "attached", "tcx"
	out.Sentence = r.Sentence(device, d, d.FarSide())
	return out
}

func eachHost(r *policy.Rule) { r.Each.Kind = policy.EachHost }

// passed gives a rule counters.
func passed(r Rule, packets, bytes, dropped uint64) Rule {
	r.PassedPackets, r.PassedBytes, r.DroppedPackets, r.DroppedBytes = packets, bytes, dropped, 1000*dropped
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
		r.Name, r.Plan = name, plan
		return r
	}
	gone := shown("tap3", out, "10.0.0.0/24", 1e6, nil)
	gone.Attached, gone.State = new(bool), "device is gone"
	moved := shown("tap4", out, "10.0.0.0/24", 1e6, nil)
	moved.State = "attached, but the device has moved to another namespace"
	bySource := shown("eth0", out, "10.0.0.0/24", 1e6, nil)
	bySource.Match = "src"
	left := uint64(59 * time.Second)
	pending := shown("eth0", out, "10.0.0.0/24", 1e6, nil)
	pending.Confirm = "'shapectl confirm'"
	pending.RevertsInNS = &left
	measured := passed(shown("eth0", out, "10.0.0.0/24", 10e6, nil), 2000, 2_000_000, 500)
	measured.Since(Sample{offered: 1000}, 2e9)
	perHost := passed(shown("eth0", out, "10.0.1.0/24", 10e6, eachHost), 2000, 2_000_000, 0)
	perHost.Since(Sample{passedBytes: 2_000_000, offered: 2000}, 2e9)
	marking := passed(shown("eth0", out, "10.0.3.0/24", 10e6, nil), 90, 100_000, 10)
	marking.ExcessPackets, marking.DelayedPackets = 30, 10
	fresh := shown("eth0", out, "10.0.2.0/24", 10e6, nil)
	fresh.Since(Sample{passedBytes: 1, offered: 2, dropped: 1}, 2e9)
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
DEVICE       NETWORK                        RATE   PASSED  DROPPED
eth0 egress  10.0.0.0/24             10mbit/host  1.23 MB       0%
eth0 egress  10.0.0.9                  unlimited    999 B       0%
eth0 egress  10.0.0.8                     10mbit  10.0 MB    <0.1%
eth0 egress  2001:db8:1:2::/64  1500mbit per /96   100 kB      10%
wg0 egress   ::/0                     8kbit/flow        0
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
NAME                         DIR      NETWORK            PLAN      RATE   PASSED
alice                        egress   10.0.3.7           gold    10mbit  5.00 kB
                             egress   2001:db8:1:2::/64  silver  10mbit        0
Smith & Sons, 3rd floor,...  ingress  10.0.3.8           gold    10mbit        0
a\nb\u001b[31m               ingress  10.0.3.9                   10mbit        0
all rules: tap2
`},
		"wide": {Table{Wide: true, Width: 80, Rules: Rules{named(shown("tap2", out, "10.0.3.7/32", 10e6, nil), "alice", ""), shown("tap2", out, "10.0.3.8/32", 10e6, nil)}}, `
NAME   DEVICE       NETWORK     RATE  ALGORITHM  ON EXCESS   BURST
alice  tap2 egress  10.0.3.7  10mbit  gcra       drop       375 kB
       tap2 egress  10.0.3.8  10mbit  gcra       drop       375 kB
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

func TestSort(t *testing.T) {
	rule := func(device, cidr, name string, rate policy.Rate, bytes, dropped uint64) Rule {
		r := passed(shown(device, policy.Egress, cidr, rate, nil), 10, bytes, dropped)
		r.Name, r.UseBits = name, &bytes
		return r
	}
	rules := Rules{
		rule("tap10", "10.0.0.0/24", "bob", 1e6, 3, 0), rule("tap2", "10.0.10.0/24", "", policy.Unlimited, 1, 9),
		rule("tap2", "10.0.9.0/24", "alice", 2e6, 2, 5),
	}
	// The first drops none, but marks and delays more than the others drop.
	rules[0].ExcessPackets, rules[0].DelayedPackets, rules[1].ExcessPackets, rules[2].ExcessPackets = 4, 4, 9, 5
	for by, want := range map[string]string{
		"excess": "10.0.0.0/24 10.0.10.0/24 10.0.9.0/24",
		"device": "10.0.10.0/24 10.0.9.0/24 10.0.0.0/24", "network": "10.0.0.0/24 10.0.9.0/24 10.0.10.0/24",
		"name": "10.0.9.0/24 10.0.0.0/24 10.0.10.0/24", "plan": "10.0.10.0/24 10.0.9.0/24 10.0.0.0/24",
		"rate": "10.0.10.0/24 10.0.9.0/24 10.0.0.0/24", "use": "10.0.0.0/24 10.0.9.0/24 10.0.10.0/24",
		"passed": "10.0.0.0/24 10.0.9.0/24 10.0.10.0/24", "dropped": "10.0.10.0/24 10.0.9.0/24 10.0.0.0/24",
	} {
		sorted := slices.Clone(rules)
		sorted.Sort(by, false)
		var got []string
		for _, r := range sorted {
			got = append(got, r.CIDR)
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("by %s: %s, want %s", by, got, want)
		}
		if !slices.Contains(Sorts, by) {
			t.Errorf("%s is not among %v", by, Sorts)
		}
	}
}

func TestNatural(t *testing.T) {
	names := []string{"", "eth0", "tap", "tap1", "tap2", "tap010", "tap10a", "tap10b", "tap99999999999999999999", "wg0"}
	for i, a := range names {
		for j, b := range names {
			if got := Natural(a, b); got > 0 != (i > j) || got < 0 != (i < j) {
				t.Errorf("%q and %q compare as %d", a, b, got)
			}
		}
	}
}

func TestFigures(t *testing.T) {
	for n, want := range map[uint64]string{
		0: "0", 1: "1 B", 999: "999 B", 1000: "1.00 kB", 1005: "1.00 kB", 9994: "9.99 kB", 9999: "10.0 kB", 99_949: "99.9 kB", 99_951: "100 kB",
		999_499: "999 kB", 999_500: "1.00 MB", 1 << 63: "9.22 EB",
	} {
		if got := bytesText(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
	for p, want := range map[float64]string{0: "0%", 0.01: "<0.1%", 0.1: "0.1%", 9.94: "9.9%", 9.95: "10%", 100: "100%"} {
		if got := percentText(p); got != want {
			t.Errorf("%v is %s, want %s", p, got, want)
		}
	}
	if bits := bitsText(9_812_345); bits != "9.81mbit" {
		t.Errorf("bits: %s", bits)
	}
	if width := displayWidth("aß名e\u0301"); width != 5 {
		t.Errorf("width %d", width)
	}
}

// A change that is measured knows nothing of a rule that was set anew meanwhile.
func TestSince(t *testing.T) {
	r := passed(shown("eth0", policy.Egress, "10.0.0.0/24", 8e6, nil), 100, 1_000_000, 25)
	r.ExcessPackets, r.DelayedPackets = 35, 20
	r.Since(Sample{passedBytes: 500_000, offered: 25, excess: 5}, 1e9)
	if *r.UseBits != 4e6 || *r.UsePercent != 50 || *r.DroppedPercent != 25 || *r.ExcessPercent != 50 || *r.IntervalNS != 1e9 {
		t.Errorf("%d bit/s, %v %%, dropped %v %%, excess %v %%", *r.UseBits, *r.UsePercent, *r.DroppedPercent, *r.ExcessPercent)
	}
	r.UseBits, r.UsePercent = nil, nil
	if r.Since(Sample{passedBytes: 1_000_001}, 1e9); r.UseBits != nil || r.UsePercent != nil || r.DroppedPercent != nil || r.ExcessPercent != nil {
		t.Errorf("after it was set anew: %+v", r)
	}
}

func TestDetail(t *testing.T) {
	busy := passed(shown("eth0", policy.Egress, "10.0.0.0/24", 10e6, nil), 1_234_567, 1_234_567_890, 12_345)
	busy.ExcessPackets, busy.ExcessBytes, busy.LevelBytes, busy.MarkedPackets = 20_000, 20e6, 37_500, 7
	busy.Name, busy.Plan, busy.Note = "alice", "gold", "moved in 2024\n"
	busy.Since(Sample{passedBytes: 1_200_000_000, offered: 1_234_500 + 12_345, dropped: 12_345}, 1e9)
	host := shown("eth0", policy.Egress, "10.0.0.0/24", 10e6, eachHost)
	host.ActiveBuckets, host.LevelBytes, host.SpilledPackets = new(uint64), 1000, 1
	host.Attached, host.State = new(bool), "detached"
	for want, r := range map[string]Rule{`
eth0 egress: 10.0.0.0/24 as a whole gets 10mbit (1.25 MB/s), burst 375 kB (300
    ms); excess is dropped (gcra)
  name       alice
  plan       gold
  note       moved in 2024\n
  state      in force, by tcx
  use        277mbit, 2765% of the rate, over 1s
  passed     1.23 GB in 1.23M packets
  dropped    12.3 MB in 12.3k packets, 1.0% of packets
  excess     20.0 MB in 20.0k packets
  marked     7 packets
  level      37.5 kB of 375 kB, 10% of the bucket
`: busy, `
eth0 egress: each host in 10.0.0.0/24 gets 10mbit (1.25 MB/s), burst 375 kB (300
    ms); excess is dropped (gcra)
  state      NOT IN FORCE: detached
  passed     nothing yet
  spilled    1 packet
  level      1.00 kB of 375 kB, 0.3% of the spill bucket
  buckets    0 in use
`: host} {
		same(t, r.CIDR, text(t, r.Detail), want)
	}
}

func TestBuckets(t *testing.T) {
	leaky, _ := queues()
	wait := uint64(2_500_000)
	delaying := NewRule("eth0", policy.Ingress, policy.MatchSrc, leaky, maps.Counters{}, 0)
	delaying.Buckets = []Bucket{{"10.0.0.1", 2500, nil, &wait}, {"10.0.0.2", 9999, nil, nil}}
	hosts := shown("eth0", policy.Egress, "10.0.1.0/24", 1e6, eachHost)
	hosts.Buckets = []Bucket{{"10.0.1.9", 13_107, nil, nil}}
	empty := shown("eth0", policy.Egress, "10.0.2.0/24", 1e6, eachHost)
	empty.Buckets = []Bucket{}
	rules := Rules{delaying, hosts, empty}
	of := rules.KeepFullest(0)
	same(t, "all", text(t, func(w io.Writer) error { return rules.BucketsText(w, of, 80) }), `
RULE         DEVICE        KEY         LEVEL  FULL     WAIT
10.0.1.0/24  eth0 egress   10.0.1.9  13.1 kB   10%
10.0.0.0/24  eth0 ingress  10.0.0.2  10.0 kB  100%  dropped
10.0.0.0/24  eth0 ingress  10.0.0.1  2.50 kB   25%    2.5ms
`)
	if of = rules.KeepFullest(2); of != 3 || len(rules[0].Buckets) != 1 || rules[0].Buckets[0].Key != "10.0.0.2" || len(rules[1].Buckets) != 1 || rules[2].Buckets == nil {
		t.Errorf("the fullest of %d: %+v", of, rules)
	}
	same(t, "some", text(t, func(w io.Writer) error { return rules.BucketsText(w, of, 80) }), `
RULE         DEVICE        KEY         LEVEL  FULL     WAIT
10.0.1.0/24  eth0 egress   10.0.1.9  13.1 kB   10%
10.0.0.0/24  eth0 ingress  10.0.0.2  10.0 kB  100%  dropped
2 of 3 buckets
`)
	pool := shownPool("uplink", "", 0, 0, 0)
	pool.Buckets, *pool.CapacityBytes = []Bucket{{"pool", 1000, nil, nil}}, 10_000
	pooled := Rules{pool, hosts}
	same(t, "of a pool", text(t, func(w io.Writer) error { return pooled.BucketsText(w, 2, 80) }), `
POOL OR RULE  DEVICE       KEY         LEVEL  FULL
10.0.1.0/24   eth0 egress  10.0.1.9  13.1 kB   10%
uplink        pool                   1.00 kB   10%
`)
}

func TestShadows(t *testing.T) {
	r := shown("eth0", policy.Egress, "10.0.0.0/24", 1e9, nil)
	r.Shadow = &Shadow{
		RateBits: 50e6, Each: "host", SeenBytes: 4_000_000, RefusedBytes: 1_000_000, AffectedHosts: 60000, AffectedLimit: 65536,
		Affected: []Affected{{"10.0.0.7", 700, 900_000}},
	}
	all := shown("eth0", policy.Egress, "10.0.1.0/24", 1e9, nil)
	all.Shadow = &Shadow{RateBits: 50e6, Each: "all", AffectedLimit: 65536}
	rules := Rules{all, shown("eth0", policy.Egress, "10.0.2.0/24", 1e9, nil), r}.WithShadow()
	for _, by := range []string{"use", "dropped", "excess"} {
		sorted := slices.Clone(rules)
		if sorted.Sort(by, true); len(sorted) != 2 || sorted[0].CIDR != r.CIDR {
			t.Errorf("by %s: %+v", by, sorted)
		}
	}
	rules.Sort("dropped", true)
	same(t, "shadows", text(t, func(w io.Writer) error { return rules.Shadows(w, 3, 80) }), `
RULE              SHADOW     SEEN  WOULD DROP   HOSTS  MOST AFFECTED
10.0.0.0/24  50mbit/host  4.00 MB         25%  60.0k+  10.0.0.7
10.0.1.0/24       50mbit        0          0%       0
all rules: eth0 egress
2 of 3 rules
`)
	rules[1].Share = "flow"
	if got := text(t, func(w io.Writer) error { return rules.Shadows(w, 2, 80) }); !strings.HasSuffix(got, `
a shadow has no shares, so with those of 10.0.1.0/24 others may lose, and less
    or more
`) {
		t.Errorf("of a rule with shares, it says\n%s", got)
	}
}
