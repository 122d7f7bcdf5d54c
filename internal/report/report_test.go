package report

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// TestJSONOfLists writes lists of any length as the standard library would.
func TestJSONOfLists(t *testing.T) {
	rate := uint64(1e6)
	rule := Rule{Item: shown("eth0", policy.Egress, "10.0.0.0/24", 1e6, nil).Item, Sentence: "<a> & b", Buckets: []live.Bucket{{Name: "10.0.0.1", Bytes: 7}, {Name: "10.0.0.2", Bytes: 8, SecondBytes: &rate, WaitNS: &rate}}}
	for _, v := range []any{
		[]Rule{}, []Rule{rule}, []Rule{rule, rule, rule}, []any{1, "two", nil, []int{}}, Differences{{CIDR: "::/0"}}, rule, nil,
	} {
		var got, want bytes.Buffer
		e := json.NewEncoder(&want)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			t.Fatal(err)
		}
		if err := JSON(&got, v); err != nil || got.String() != want.String() {
			t.Errorf("JSON of %T: %v, got\n%swant\n%s", v, err, got.String(), want.String())
		}
	}
}

// queues are rules that delay, one of each kind: 10 kB at 1 MB/s, of which the second lets 4 kB leave at once.
func queues() (leaky, gcra policy.Rule) {
	leaky = policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: 8e6, Capacity: 10000, Algorithm: policy.Leaky, Excess: policy.Delay, ECNAbove: 5e6}
	gcra = leaky
	gcra.Algorithm, gcra.Capacity, gcra.Queue, gcra.ECNAbove = policy.GCRA, 4000, 6000, policy.Never
	return leaky, gcra
}

func TestRuleOfQueue(t *testing.T) {
	leaky, gcra := queues()
	drop := policy.Rule{Prefix: leaky.Prefix, Rate: 8e6, Capacity: 10000}
	for _, test := range []struct {
		rule policy.Rule
		want string
	}{
		{leaky, `"capacity_bytes":10000,"queue_bytes":10000,"longest_wait_ns":10000000,"ecn_above_ns":5000000,`},
		{gcra, `"capacity_bytes":4000,"queue_bytes":6000,"longest_wait_ns":6000000,"ecn_above_ns":null,`},
		{drop, `"capacity_bytes":10000,"queue_bytes":0,"longest_wait_ns":0,"ecn_above_ns":null,`},
		{policy.Rule{Prefix: leaky.Prefix, Rate: policy.Unlimited}, `"capacity_bytes":null,"queue_bytes":0,"longest_wait_ns":0,"ecn_above_ns":null,`},
	} {
		b, err := json.Marshal(onEth0(test.rule, maps.Counters{DelayedPackets: 3, DelayedBytes: 4}, 0))
		if got := string(b); err != nil || !strings.Contains(got, test.want) || !strings.Contains(got, `"delayed_packets":3,"delayed_bytes":4,`) {
			t.Errorf("%v: %s, want %s", err, got, test.want)
		}
	}
}

// TestOptionsAreTold finds each option of a limit in the JSON of a rule, and of a shadow if that has it.
func TestOptionsAreTold(t *testing.T) {
	prefix := netip.MustParsePrefix("10.0.0.0/24")
	told := func(r policy.Rule) (rule, shadow string) {
		out := asRead(policy.Table{Rules: []policy.Rule{r}}, live.Item{})
		out.Sentence = ""
		text := func(v any) string {
			s, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			return string(s)
		}
		return text(out), text(&live.Shadow{Rule: r})
	}
	for _, o := range policy.Options {
		if o.Name == "shadow" {
			continue // it is a limit of its own
		}
		tried := false
		for _, l := range []policy.Limit{
			{Rate: 8e6}, {Rate: 8e6, Excess: policy.Delay}, {Rate: 8e6, Algorithm: policy.Leaky}, {Rate: 8e7, Within: "uplink"},
			{Rate: 8e7, Within: "uplink", Each: policy.Each{Kind: policy.EachHost}, Guarantee: 1e6, Members: 9},
			{Rate: 8e7, Cluster: policy.Cluster{Name: "gold"}},
			{Rate: 8e7, Adapt: policy.Adapt{Min: 1e6}},
			{Rate: 8e6, Algorithm: policy.SRTCM},
			{Rate: 9e6, Also: policy.Also{Packets: 9, PacketBurst: 5, Flows: 9, Quota: policy.Quota{Bytes: 9, Period: "day"}, Then: 1e6}},
			{Rate: 8e6, Algorithm: policy.TRTCM, Colours: policy.ColourOptions{PIR: 16e6, Aware: true}},
			{Rate: 8e6, Algorithm: policy.RFC4115, Colours: policy.ColourOptions{EIR: 1e6}},
		} {
			without, err := l.Rule(prefix)
			if l.Cluster.Name != "" || l.Adapt.Min != 0 {
				without, err = l.Pool("pool")
			}
			if err != nil {
				t.Fatal(err)
			}
			choices := strings.Split(o.Value(new(policy.Limit)).Type(), "|")
			for _, text := range append(choices, "9mbit", "123456b", "3ms", "64", "192.0.2.1", "true", "AF11=red", "dscp:AF11", "3c:22:fb:12:34:56", "5gb/month", "UTC") {
				if l.Set(o.Name, text) != nil {
					continue
				}
				r, err := l.Rule(prefix)
				if o.PoolOnly {
					r, err = l.Pool("pool")
				}
				if err != nil || o.Same(&without, &r) {
					continue
				}
				tried = true
				was, shadowWas := told(without)
				is, shadowIs := told(r)
				if was == is || o.Shadow && shadowWas == shadowIs {
					t.Errorf("%s %s is not told: %s", o.Name, text, is)
				}
			}
		}
		if !tried {
			t.Errorf("%s has no value here that a rule could have", o.Name)
		}
	}
}
