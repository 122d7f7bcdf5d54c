package policy

import (
	"net/netip"
	"testing"
)

// TestDSCPNames compares each number with its name, and with class selectors and assured forwarding as RFC 2474 and RFC 2597
// make them.
func TestDSCPNames(t *testing.T) {
	for dscp := range uint8(64) {
		if got, err := ParseDSCP(DSCPName(dscp)); got != dscp || err != nil {
			t.Errorf("%d is %s, which is %d, %v", dscp, DSCPName(dscp), got, err)
		}
	}
	for class := range uint8(8) {
		if got, want := DSCPName(class<<3), "CS"+string('0'+class); got != want {
			t.Errorf("%d is %s, not %s", class<<3, got, want)
		}
	}
	for class := uint8(1); class <= 4; class++ {
		for drop := uint8(1); drop <= 3; drop++ {
			dscp := class<<3 | drop<<1
			if got, want := DSCPName(dscp), "AF"+string('0'+class)+string('0'+drop); got != want {
				t.Errorf("%d is %s, not %s", dscp, got, want)
			}
			if got, want := DefaultColours.Of(dscp), Colour(drop-1); got != want {
				t.Errorf("%s is %v by default, not %v", DSCPName(dscp), got, want)
			}
			m := DefaultColours
			if m.Add(dscp, Green); m.Of(dscp) != Green {
				t.Errorf("%s did not become green", DSCPName(dscp))
			}
		}
	}
	for _, dscp := range []uint8{0, 1, 8, 44, 46, 63} {
		if got := DefaultColours.Of(dscp); got != Green {
			t.Errorf("%s is %v by default", DSCPName(dscp), got)
		}
	}
}

// TestDefaultColours makes rules of limits that say as little as they can.
func TestDefaultColours(t *testing.T) {
	prefix := netip.MustParsePrefix("10.0.0.0/24")
	usual := Colours{Green: ActionPass, Yellow: ActionPass, Red: ActionDrop}
	for _, test := range []struct {
		limit          Limit
		want           func(*Colours)
		rate, capacity uint64 // of the second limit
	}{
		{Limit{Rate: 80e6, Algorithm: SRTCM}, func(c *Colours) { c.EBS = 3e6 }, 80e6, 3e6},
		{Limit{Rate: 8e6, Algorithm: SRTCM, Colours: ColourOptions{EBS: Capacity{duration: 1e9}}}, func(c *Colours) { c.EBS = 1e6 }, 8e6, 1e6},
		{Limit{Rate: 80e6, Algorithm: TRTCM, Colours: ColourOptions{PIR: 160e6}}, func(c *Colours) { c.PIR, c.PBS = 160e6, 6e6 }, 160e6, 6e6},
		{Limit{Rate: 8e6, Algorithm: TRTCM, Colours: ColourOptions{PIR: 16e6, PBS: Capacity{duration: 1e9}}},
			func(c *Colours) { c.PIR, c.PBS = 16e6, 2e6 }, 16e6, 2e6},
		{Limit{Rate: 8e6, Algorithm: RFC4115, Colours: ColourOptions{EIR: 8e5}}, func(c *Colours) { c.EIR, c.EBS = 8e5, 128<<10 }, 8e5, 128 << 10},
		{Limit{Rate: 8e6, Algorithm: RFC4115, Colours: ColourOptions{EIR: 8e5, EBS: Capacity{duration: 1e9}}},
			func(c *Colours) { c.EIR, c.EBS = 8e5, 1e5 }, 8e5, 1e5},
		{Limit{Rate: 80e6, Algorithm: SRTCM, Colours: ColourOptions{Aware: true}},
			func(c *Colours) { c.EBS, c.Aware, c.In = 3e6, true, DefaultColours }, 80e6, 3e6},
	} {
		test.limit.Name, test.limit.Shadow = "x", &Draft{Limit: Limit{Rate: 1e6}}
		r, err := test.limit.Rule(prefix)
		want := usual
		if test.want(&want); err != nil || r.Colours != want {
			t.Errorf("%+v: %v, %+v, want %+v", test.limit, err, r.Colours, want)
		}
		second, ok := r.Second()
		wantSecond := Rule{Prefix: prefix, Rate: Rate(test.rate), Capacity: test.capacity, Each: r.Each, Colours: r.Colours}
		wantSecond.Colours.Green, wantSecond.Colours.Yellow, wantSecond.Colours.Red = ActionPass, ActionPass, ActionPass
		if r.Algorithm == SRTCM {
			wantSecond.Capacity += r.Capacity
		}
		if !ok || second != wantSecond {
			t.Errorf("%+v: the second limit is %+v", test.limit, second)
		}
		proposed, _ := r.Proposed()
		own := r.Colours
		own.PBS, own.EBS = proposed.Colours.PBS, proposed.Colours.EBS
		if proposed.Algorithm != r.Algorithm || proposed.Colours != own {
			t.Errorf("%+v: the shadow is %+v", test.limit, proposed)
		}
	}
	for _, l := range []Limit{{Rate: 8e6}, {Rate: Unlimited, Algorithm: TRTCM}} {
		r, err := l.Rule(prefix)
		if second, ok := r.Second(); err != nil || ok || second != (Rule{}) || r.Colours != (Colours{}) {
			t.Errorf("%+v: %v, %+v has the second limit %+v", l, err, r, second)
		}
	}
}

// A shadow has what it does not say of its rule, and is refused what its rule's algorithm has no use for.
func TestShadowWithColours(t *testing.T) {
	for _, test := range []struct {
		options []string
		shadow  string
		part    string // of the error; "" for none
		pir     Rate
	}{
		{[]string{"algorithm=trtcm", "pir=20mbit"}, "rate=5mbit", "", 20e6},
		{[]string{"algorithm=trtcm", "pir=20mbit"}, "cir=5mbit,pir=9mbit,cbs=64kb,pbs=100ms", "", 9e6},
		{[]string{"algorithm=trtcm", "pir=20mbit"}, "rate=30mbit", "shadow: pir 20mbit is below the rate 30mbit", 0},
		{[]string{"algorithm=trtcm", "pir=20mbit"}, "rate=5mbit,ebs=64kb", "shadow: ebs has no use with the algorithm trtcm", 0},
		{[]string{"algorithm=rfc4115", "eir=20mbit"}, "rate=5mbit,eir=8kbit,ebs=64kb", "", 0},
		{[]string{"algorithm=trtcm"}, "rate=5mbit", "pir is missing", 0}, // of the rule
		{nil, "rate=5mbit,pir=9mbit", "shadow: pir 9mbit has no use with the algorithm gcra; use trtcm", 0},
	} {
		l := limitOf(t, test.options)
		var err error
		if l.Shadow, err = ParseShadow(test.shadow); err != nil {
			t.Fatal(err)
		}
		r, err := l.Rule(netip.MustParsePrefix("10.0.0.0/24"))
		if test.part != "" {
			wantError(t, err, test.part)
		} else if err != nil || r.Shadow.PIR != test.pir {
			t.Errorf("%v, shadow %s: %v, %+v", test.options, test.shadow, err, r.Shadow)
		}
	}
	r, err := Limit{Within: "uplink", Algorithm: SRTCM, Shadow: &Draft{Limit: Limit{Rate: 5e6}}}.Rule(netip.MustParsePrefix("10.0.0.0/24"))
	if proposed, ok := r.Proposed(); err != nil || !ok || proposed.Algorithm != GCRA {
		t.Errorf("of a rule that has only its pools: %v, %+v", err, proposed)
	}
	_, err = ParseShadow("rate=5mbit,algorithm=trtcm")
	wantError(t, err, "a shadow has no algorithm of its own")
}

// Options that a limit without colours has are refused with what to do, also those whose value in a rule is zero.
func TestColoursRefused(t *testing.T) {
	for _, test := range []struct {
		options string
		set     []string
		part    string
	}{
		{"a rule", []string{"green=dscp:CS0"}, "green has no use with the algorithm gcra; use srtcm, trtcm or rfc4115, or leave it out"},
		{"an exception", []string{"rate=unlimited", "algorithm=srtcm", "green=dscp:CS0"}, "green has no use in an unlimited rule; leave it out"},
		{"pbs alone", []string{"algorithm=trtcm", "pbs=100ms"}, "pir is missing"},
		{"pbs alone", []string{"pbs=100ms"}, "pbs has no use with the algorithm gcra"},
		{"ebs", []string{"algorithm=rfc4115", "ebs=100ms"}, "eir is missing"},
		{"a large burst", []string{"algorithm=trtcm", "pir=400gbit", "pbs=99s"}, "pbs 99s at 400gbit is above 1024gb"},
	} {
		_, err := limitOf(t, test.set).Rule(netip.MustParsePrefix("10.0.0.0/24"))
		wantError(t, err, test.part)
	}
	_, err := Limit{Rate: 8e6, Algorithm: SRTCM}.Pool("uplink")
	wantError(t, err, "algorithm srtcm has no use in a pool, which gives packets no colours; use gcra or leaky")
	_, err = Limit{Rate: 8e6, Colours: ColourOptions{PIR: 9e6}}.Pool("uplink")
	wantError(t, err, "pir has no use in a pool; a pool gives packets no colours, so leave it out")
}
