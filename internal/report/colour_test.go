package report

import (
	"encoding/json"
	"io"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// coloured are rules with colours, one of each algorithm, and one without.
func coloured(t *testing.T) (srtcm, trtcm, rfc4115, plain policy.Rule) {
	t.Helper()
	rule := func(cidr string, l policy.Limit) policy.Rule {
		r, err := l.Rule(netip.MustParsePrefix(cidr))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	shadow := policy.Draft{Limit: policy.Limit{Rate: 2e6}}
	srtcm = rule("10.0.0.0/24", policy.Limit{Rate: 1e6, Algorithm: policy.SRTCM})
	trtcm = rule("10.0.1.0/24", policy.Limit{
		Rate: 1e6, Algorithm: policy.TRTCM, Each: policy.Each{Kind: policy.EachHost}, Shadow: &shadow,
		Colours: policy.ColourOptions{PIR: 2e6, Aware: true},
	})
	rfc4115 = rule("10.0.2.0/24", policy.Limit{Rate: 1e6, Algorithm: policy.RFC4115, Colours: policy.ColourOptions{EIR: 500e3}})
	return srtcm, trtcm, rfc4115, rule("10.0.3.0/24", policy.Limit{Rate: 1e6})
}

// byColours are 60 % green, 30 % yellow and 10 % red packets.
var byColours = maps.Counters{
	PassedPackets: 90, PassedBytes: 90_000, DroppedPackets: 10, DroppedBytes: 10_000, ExcessPackets: 40, ExcessBytes: 40_000,
	GreenPackets: 60, GreenBytes: 60_000, YellowPackets: 30, YellowBytes: 30_000, RedPackets: 10, RedBytes: 10_000,
}

func TestColoursInJSON(t *testing.T) {
	srtcm, trtcm, rfc4115, plain := coloured(t)
	for _, test := range []struct {
		rule policy.Rule
		want string
	}{
		{srtcm, `"pir_bits_per_second":null,"pbs_bytes":null,"eir_bits_per_second":null,"ebs_bytes":131072,"colour_aware":false,"colours":null,"green":"pass","yellow":"pass","red":"drop"`},
		{trtcm, `"pir_bits_per_second":2000000,"pbs_bytes":131072,"eir_bits_per_second":null,"ebs_bytes":null,"colour_aware":true,"colours":"AF12=yellow,AF13=red,AF22=yellow,AF23=red,AF32=yellow,AF33=red,AF42=yellow,AF43=red"`},
		{rfc4115, `"pir_bits_per_second":null,"pbs_bytes":null,"eir_bits_per_second":500000,"ebs_bytes":131072,"colour_aware":false`},
		{plain, `"pir_bits_per_second":null,"pbs_bytes":null,"eir_bits_per_second":null,"ebs_bytes":null,"colour_aware":null,"colours":null,"green":null,"yellow":null,"red":null`},
	} {
		b, err := json.Marshal(onEth0(test.rule, byColours, 0))
		counted := `"green_packets":60,"green_bytes":60000,"yellow_packets":30,"yellow_bytes":30000,"red_packets":10,"red_bytes":10000`
		if got := string(b); err != nil || !strings.Contains(got, test.want) || !strings.Contains(got, counted) {
			t.Errorf("%v: %s, want %s and %s", err, got, test.want, counted)
		}
	}
	proposed, _ := trtcm.Proposed()
	b, _ := json.Marshal(&live.Shadow{Rule: proposed, Counters: byColours})
	for _, want := range []string{`"refused_packets":10,`, `"seen_packets":100,`, `"yellow_packets":30,`, `"pir_bits_per_second":2000000,"pbs_bytes":131072,`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the shadow is %s", b)
		}
	}
	out := remade(onEth0(trtcm, byColours, 0), func(it *live.Item) { it.Shadow = &live.Shadow{Rule: proposed, Counters: byColours, Room: 100} })
	same(t, "shadows", text(t, func(w io.Writer) error { return Rules{out}.Shadows(w, 1, 100) }), `
RULE         DEVICE            SHADOW    SEEN  WOULD DROP  COLOURS
10.0.1.0/24  eth0 egress  2mbit/2mbit  100 kB         10%  60% green, 30% yellow, 10% red
`)
}

func TestColoursInTables(t *testing.T) {
	srtcm, trtcm, rfc4115, plain := coloured(t)
	var rules Rules
	for _, r := range []policy.Rule{srtcm, trtcm, rfc4115, plain} {
		out := onEth0(r, byColours, 1000)
		if out.HasColours() {
			out = remade(out, func(it *live.Item) { it.Second = 65536 })
			out.Buckets = []live.Bucket{{Name: "10.0.0.7", Bytes: 1000, SecondBytes: &out.Second}}
		} else {
			out = remade(out, func(it *live.Item) { it.GreenPackets, it.YellowPackets, it.RedPackets = 0, 0, 0 })
		}
		rules = append(rules, out)
	}
	table := func(wide bool) string {
		return text(t, Table{Rules: rules, Of: len(rules), Wide: wide}.Text)
	}
	same(t, "table", table(false), `
DEVICE       NETWORK                      RATE   PASSED  DROPPED
eth0 egress  10.0.0.0/24                 1mbit  90.0 kB      10%
eth0 egress  10.0.1.0/24  1mbit/2mbit per host  90.0 kB      10%
eth0 egress  10.0.2.0/24         1mbit+500kbit  90.0 kB      10%
eth0 egress  10.0.3.0/24                 1mbit  90.0 kB      10%
`)
	before := maps.Counters{
		PassedBytes: 30_000, PassedPackets: 30, DroppedBytes: 5000, DroppedPackets: 5, ExcessPackets: 10, GreenBytes: 20_000, YellowBytes: 10_000, RedBytes: 5000,
	}
	measured := slices.Clone(rules)
	for i := range measured {
		measured[i] = since(measured[i], live.Counts{Counters: before}, time.Second)
	}
	same(t, "measured", text(t, Table{Rules: measured, Of: len(rules)}.Text), `
DEVICE       NETWORK                      RATE      USE  OF RATE    GREEN   YELLOW       RED  DROPPED
eth0 egress  10.0.0.0/24                 1mbit  480kbit      48%  320kbit  160kbit  40.0kbit     7.7%
eth0 egress  10.0.1.0/24  1mbit/2mbit per host  480kbit           320kbit  160kbit  40.0kbit     7.7%
eth0 egress  10.0.2.0/24         1mbit+500kbit  480kbit      32%  320kbit  160kbit  40.0kbit     7.7%
eth0 egress  10.0.3.0/24                 1mbit  480kbit      48%                                 7.7%
`)
	same(t, "wide", table(true), `
DEVICE       NETWORK                      RATE  ON EXCESS              ALGORITHM   BURST     PBS     EBS    LEVEL  LEVEL 2  PACKETS   PASSED  EXCESS  DROPS  GREEN  YELLOW  RED  DROPPED  FULL
eth0 egress  10.0.0.0/24                 1mbit  yellow pass, red drop  srtcm      131 kB          131 kB  1.00 kB  65.5 kB       90  90.0 kB      40     10     60      30   10      10%  0.8%
eth0 egress  10.0.1.0/24  1mbit/2mbit per host  yellow pass, red drop  trtcm      131 kB  131 kB          1.00 kB  65.5 kB       90  90.0 kB      40     10     60      30   10      10%  0.8%
eth0 egress  10.0.2.0/24         1mbit+500kbit  yellow pass, red drop  rfc4115    131 kB          131 kB  1.00 kB  65.5 kB       90  90.0 kB      40     10     60      30   10      10%  0.8%
eth0 egress  10.0.3.0/24                 1mbit  drop                   gcra       131 kB                  1.00 kB                90  90.0 kB      40     10      0       0    0      10%  0.8%
`)
	same(t, "buckets", text(t, func(w io.Writer) error { return rules[:2].BucketsText(w, "", 2, 80) }), `
KEY       RULE         DEVICE         LEVEL  FULL      LEVEL 2
10.0.0.7  10.0.0.0/24  eth0 egress  1.00 kB  0.8%  65.5 kB 50%
10.0.0.7  10.0.1.0/24  eth0 egress  1.00 kB  0.8%  65.5 kB 50%
`)
	rules[2].Sentence = "says"
	same(t, "detail", text(t, rules[2].Detail), `
says
  state      in force, by tcx
  full       0.8%
  level      1.00 kB
  level 2    65.5 kB
  passed     90.0 kB in 90 packets
  excess     40.0 kB in 40 packets
  dropped    10.0 kB in 10 packets, 10%
  green      60.0 kB in 60 packets
  yellow     30.0 kB in 30 packets
  red        10.0 kB in 10 packets
`)
	if got, want := rules[2].Facts(), "60% green, 30% yellow, 10% red; "+rules[2].Item.Sentence(); got != want {
		t.Errorf("facts: %s, want %s", got, want)
	}
}

// What is used is compared with the rate of all packets that pass by their colour.
func TestUseOfColours(t *testing.T) {
	srtcm, trtcm, rfc4115, _ := coloured(t)
	trtcm.Each = policy.Each{}
	dropsYellow := rfc4115
	dropsYellow.Colours.Yellow = policy.ActionDrop
	for _, test := range []struct {
		rule policy.Rule
		want float64
	}{{srtcm, 100}, {trtcm, 50}, {rfc4115, 66.67}, {dropsYellow, 100}} {
		r := since(onEth0(test.rule, maps.Counters{PassedBytes: 125_000, PassedPackets: 100}, 0), live.Counts{}, time.Second)
		if r.UsePercent().N != test.want {
			t.Errorf("%v: %v %%, want %v", test.rule.Algorithm, r.UsePercent().N, test.want)
		}
	}
}
