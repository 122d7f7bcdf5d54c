package policy

import (
	"strings"
	"testing"
)

// poolOf returns a pool, changed by each of edits.
func poolOf(name string, edits ...func(*Rule)) Rule {
	r := Rule{Prefix: PoolKey(name), Pool: true, Rate: 10_000_000, Capacity: 125_000, Label: Label{Name: name}}
	for _, edit := range edits {
		edit(&r)
	}
	return r
}

func TestPool(t *testing.T) {
	l := limitOf(t, []string{"within=uplink", "guarantee=1mbit", "weight=3", "share=member", "excess=delay", "note=x"})
	r, err := l.Pool("ap 1")
	if err != nil || !r.Pool || r.Prefix != PoolKey("ap 1") || r.Label.Name != "ap 1" {
		t.Fatalf("%v, got %+v", err, r)
	}
	if again, err := (Draft{}).Missing(&r).Pool("ap 1"); err != nil || again != r {
		t.Errorf("%v: it became %+v, was %+v", err, again, r)
	}
	if PoolKey("ap 1") == PoolKey("ap 2") || !PoolKey("").IsSingleIP() {
		t.Error("pools have the same key")
	}
}

func TestPoolRefuses(t *testing.T) {
	for _, test := range []struct {
		edit func(*Rule)
		part string
	}{
		{func(r *Rule) { r.Label.Name = "" }, "the name of a pool is empty"},
		{func(r *Rule) { r.Label.Name = "none" }, "a pool cannot be called none, which stands for no pool"},
		{func(r *Rule) { r.Label.Name = strings.Repeat("n", 65) }, "has 65 bytes"},
		{func(r *Rule) { r.Label.Name = "a\nb" }, `pool "a\nb" has a control character`},
		{func(r *Rule) { r.Prefix = PoolKey("other") }, `pool "uplink" has the key of another one`},
		{func(r *Rule) { r.Within = "uplink" }, `within "uplink" is the pool itself`},
		{func(r *Rule) { r.Rate, r.Capacity = Unlimited, 0 }, "rate unlimited would limit nothing"},
		{func(r *Rule) { r.Rate = 7 }, "rate 7bit is below 8kbit"},
		{func(r *Rule) { r.Each.Kind = EachHost }, "each has no use in a pool; a pool has one bucket"},
		{func(r *Rule) { r.Algorithm, r.Penalty.Kind = Leaky, PenaltyFill }, "penalty has no use in a pool"},
		{func(r *Rule) { r.Framing.Overhead = 4 }, "overhead has no use in a pool; set it in rules"},
		{func(r *Rule) { r.Fail = Closed }, "fail has no use in a pool"},
		{func(r *Rule) { r.Members = 5 }, "members has no use in a pool"},
		{func(r *Rule) { r.Excess = Pass }, "excess pass would limit nothing in a pool"},
		{func(r *Rule) { r.Shadow = Shadow{Rate: 1e6, Capacity: 125_000, Each: Each{Kind: EachHost}} }, "shadow: each has no use in a pool"},
		{func(r *Rule) { r.Shadow = Shadow{Rate: 1e6, Capacity: 125_000, Each: Each{EachSubnet, 32}} }, "shadow: each has no use in a pool"},
		{func(r *Rule) { r.Shadow = Shadow{Rate: 1e6, Capacity: 1} }, "shadow: capacity"},
		{func(r *Rule) { r.Label.Plan = "gold" }, "plan has no use in a pool"},
		{func(r *Rule) { r.Guarantee = 5e6 }, "guarantee 5mbit has no use with no pool to draw from"},
		{func(r *Rule) { r.Cluster.Floor = 5e6 }, "cluster-floor 5mbit has no use with no cluster; name one with cluster"},
		{func(r *Rule) { r.Cluster = Cluster{Name: "gold", Weight: 1} }, "cluster-weight has the value 1"},
		{func(r *Rule) { r.Cluster = Cluster{Name: "gold", Floor: 20e6} }, "cluster-floor 20mbit is above the rate 10mbit of all hosts together"},
		{func(r *Rule) { r.Cluster = Cluster{Name: "gold", Share: 20e6} }, "cluster-share 20mbit is above the rate"},
		{func(r *Rule) { r.Cluster = Cluster{Name: "gold", Safe: 7} }, "cluster-safe 7bit is below 8kbit"},
		{func(r *Rule) { r.Cluster = Cluster{Name: "gold", Share: 1e6, Floor: 1e6} }, "cluster-floor 1mbit has no use with cluster-share, which is fixed"},
		{func(r *Rule) { r.Cluster = Cluster{Name: "gold", Share: 1e6, Weight: 2} }, "cluster-weight 2 has no use with cluster-share"},
		{func(r *Rule) { r.Adapt.Above = 5e6 }, "adapt-above 5ms has no use with no lowest rate to adapt to; give one with adapt-min"},
		{func(r *Rule) { r.Adapt.To = "192.0.2.1" }, "adapt-to has no use with no lowest rate to adapt to"},
		{func(r *Rule) { r.Adapt.Min, r.Cluster.Name = 5e6, "gold" }, "adapt-min has no use with a cluster, with which other hosts decide on the rate"},
		{func(r *Rule) { r.Adapt.Min = 20e6 }, "adapt-min 20mbit is above the rate 10mbit; lower it, or raise the rate"},
		{func(r *Rule) { r.Adapt.Min = 7 }, "adapt-min 7bit is below 8kbit"},
		{func(r *Rule) { r.Adapt = Adapt{Min: 5e6, Above: 30e6} }, "adapt-above has the value 30ms; use 0 for it"},
		{func(r *Rule) { r.Adapt = Adapt{Min: 5e6, Above: 1} }, "adapt-above 1ns is shorter than 1ms"},
		{func(r *Rule) { r.Adapt = Adapt{Min: 5e6, Above: 11e9} }, "adapt-above 11s is longer than 10s"},
		{func(r *Rule) { r.Adapt = Adapt{Min: 5e6, To: "192.0.2.1,::ffff:192.0.2.2"} }, "is not written as 192.0.2.1,192.0.2.2"},
		{func(r *Rule) { r.Cluster.Name = "none" }, `cluster "none" is no name; leave it out`},
		{func(r *Rule) { r.Share = Share{ShareSubnet, 129} }, "share /129 is not a prefix length"},
	} {
		r := poolOf("uplink", test.edit)
		wantError(t, r.Validate(), test.part)
	}
	for name, part := range map[string]string{"": "the name of a pool is empty", "none": "cannot be called none"} {
		_, err := Limit{Rate: 1e6}.Pool(name)
		wantError(t, err, part)
	}
	_, err := Limit{Within: "uplink"}.Pool("a")
	wantError(t, err, "rate is missing; say how much, such as 1gbit")
}

// TestPart checks that the parts of a pool add up to it, but for the least capacity.
func TestPart(t *testing.T) {
	pool := poolOf("uplink", delay(GCRA), func(r *Rule) { r.Queue = 50_001 })
	for _, test := range []struct {
		rate            Rate
		capacity, queue uint64
	}{{10e6, 125_000, 50_001}, {20e6, 125_000, 50_001}, {5e6, 62_500, 25_000}, {MinRate, MinCapacity, MinCapacity}} {
		got, want := pool.Part(test.rate), pool
		want.Rate, want.Capacity, want.Queue = min(test.rate, pool.Rate), test.capacity, test.queue
		if got != want || got.Validate() != nil {
			t.Errorf("%v: %v, %+v; want %+v", test.rate, got.Validate(), got, want)
		}
	}
}

// TestGuaranteed checks that small guarantees hold some packets.
func TestGuaranteed(t *testing.T) {
	for _, test := range []struct {
		guarantee Guarantee
		capacity  uint64
	}{{8000, minGuaranteeBurst}, {8e6, 300_000}} {
		r := ruleOn("10.0.0.0/24", func(r *Rule) { r.Guarantee, r.Each.Kind, r.Framing.MPU = test.guarantee, EachHost, 64 })
		got, ok := r.Guaranteed()
		if want := (Rule{Prefix: r.Prefix, Rate: Rate(test.guarantee), Capacity: test.capacity, Each: r.Each, Framing: r.Framing}); !ok || got != want {
			t.Errorf("%v: %v, %+v; want %+v", test.guarantee, ok, got, want)
		}
	}
	if _, ok := ruleOn("10.0.0.0/24").Guaranteed(); ok {
		t.Error("a rule without a guarantee has one")
	}
}

func TestWithoutGuarantee(t *testing.T) {
	r := ruleOn("10.0.0.0/24", func(r *Rule) { r.Within, r.Guarantee, r.Members, r.Each.Kind = "up", 4e6, 5, EachHost })
	r.Label.Note = "paid"
	want := r
	want.Guarantee, want.Label.Waits = 0, 4e6
	got := r.WithoutGuarantee()
	if got != want || got.Validate() != nil || got.WithoutGuarantee() != got {
		t.Errorf("got %+v", got)
	}
	got.Guarantee = 1e6
	wantError(t, got.Validate(), "waits", "guarantee 1mbit")
}

func TestOwner(t *testing.T) {
	for text, want := range map[string]Owner{
		"": {}, "tap7": {Device: "tap7", Whole: true}, "tap7 egress": {Device: "tap7", Direction: Egress},
		"tap7 ingress Ann & Bob": {Device: "tap7", Host: "Ann & Bob"},
	} {
		var o Owner
		if err := o.Set(text); err != nil || o != want || o.String() != text {
			t.Errorf("%q: %+v, %v", text, o, err)
		}
	}
	for _, bad := range []string{" egress", "tap7 up", "tap7 egress\n", "tap7 " + strings.Repeat("x", 200)} {
		o := Owner{Device: "as it was"}
		if err := o.Set(bad); err == nil || o.Device != "as it was" {
			t.Errorf("%q: %+v", bad, o)
		}
	}
}
