package events

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func TestFilter(t *testing.T) {
	packet := report.Event{Kind: report.Overflow, Device: "tap7", Network: "10.0.0.0/16", Address: "10.0.3.7", Name: "alice", Pool: "ap-1"}
	rules := report.Event{Kind: report.RulesChanged, Device: "tap8", Network: "10.1.0.0/16"}
	change := report.Event{Kind: report.ChangeBegun}
	leftOut := report.Event{Kind: report.LeftOut}
	several := report.Event{Kind: report.RulesChanged, Device: "eth1", Changed: []report.ChangedRule{{Network: "192.0.2.0/24"}, {Network: "10.1.3.0/24", Name: "bob"}}}
	for _, tt := range []struct {
		args string
		want []bool // of these five
	}{
		{"", []bool{true, true, true, true, true}},
		{"tap7", []bool{true, false, false, true, false}},
		{"tap*", []bool{true, true, false, true, false}},
		{"ap-1", []bool{true, false, false, true, false}},
		{"al*", []bool{true, false, false, true, false}},
		{"10.0.3.7", []bool{true, false, false, true, false}},
		{"10.0.3.8", []bool{false, false, false, true, false}},
		{"10.1.3.8", []bool{false, true, false, true, true}},
		{"10.0.0.0/15", []bool{true, true, false, true, true}},
		{"eth0 bob tap8", []bool{false, true, false, true, true}},
		{"eth1", []bool{false, false, false, true, true}},
		{"2001:db8::/32", []bool{false, false, false, true, false}},
	} {
		f, err := ParseFilter(strings.Fields(tt.args))
		testenv.Must(t, err)
		got := []bool{f.Matches(packet), f.Matches(rules), f.Matches(change), f.Matches(leftOut), f.Matches(several)}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%q lets %v through, want %v", tt.args, got, tt.want)
		}
	}
	for _, wrong := range []string{"[", "10.0.0.0/99", "2001:db8::/x"} {
		if _, err := ParseFilter([]string{wrong}); err == nil {
			t.Errorf("%q is no error", wrong)
		}
	}
}

func overflow() report.Event {
	level, capacity := uint64(900), uint64(1000)
	e := report.Event{Kind: report.Overflow, Device: "eth0", Direction: "egress", Network: "10.0.0.0/24", Key: "10.0.0.7", Address: "10.0.0.7",
		Excess: "dropped", LevelBytes: &level, CapacityBytes: &capacity}
	e.DescribePacket()
	return e
}

func TestSentences(t *testing.T) {
	e := overflow()
	check := func(want string) {
		t.Helper()
		if e.DescribePacket(); e.Sentence != want {
			t.Errorf("%q\nwant %q", e.Sentence, want)
		}
	}
	check("eth0 egress 10.0.0.0/24: the bucket of 10.0.0.7 is full (900 B of 1.00 kB); excess packets are dropped")
	e.Colours = &policy.Colours{Green: policy.ActionPass, Yellow: policy.ActionECN, Red: policy.ActionDrop}
	check("eth0 egress 10.0.0.0/24: packets of 10.0.0.7 are yellow or red, and are dropped")
	if e.Colour != "yellow or red" {
		t.Errorf("the colour is %q", e.Colour)
	}
	e.Colours.Red, e.Excess = policy.SetDSCP(12), "passed"
	check("eth0 egress 10.0.0.0/24: packets of 10.0.0.7 are red, and get AF12, and pass")
	e.Colours, e.Excess = nil, "delayed"
	check("eth0 egress 10.0.0.0/24: the bucket of 10.0.0.7 is full (900 B of 1.00 kB); excess packets are queued")
	e.Pool, e.Excess = "ap-1", "dropped"
	check(`eth0 egress 10.0.0.0/24: pool "ap-1" is full (900 B of 1.00 kB); excess packets are dropped; first address: 10.0.0.7`)
	e.Unit = policy.Flows
	check(`eth0 egress 10.0.0.0/24: pool "ap-1" is full (900 of 1000 new flows); excess packets are dropped; first address: 10.0.0.7`)
	e.Kind, e.Unit = report.GuaranteeFails, policy.Bytes
	check(`eth0 egress 10.0.0.0/24: pool "ap-1" refuses packets of 10.0.0.7 within its guarantee: it has no room for all guarantees`)
	e.Kind, e.Key = report.PenaltyStarts, e.Network
	check("eth0 egress 10.0.0.0/24: a penalty starts for the bucket (900 B of 1.00 kB)")

	e = overflow()
	e.Name, e.Sharer = "alice", "a flow of 10.0.0.7"
	check(`eth0 egress 10.0.0.0/24 ("alice"): a flow of 10.0.0.7 takes more than its share (900 B of 1.00 kB); excess packets are dropped`)
	e.Pool, e.Sharer = "ap-1", "10.0.0.0/24"
	check(`eth0 egress 10.0.0.0/24 ("alice") takes more than its share of pool "ap-1" (900 B of 1.00 kB); excess packets are dropped`)
	e.Sharer = "home-7"
	check(`eth0 egress 10.0.0.0/24 ("alice"): home-7 takes more than its share of pool "ap-1" (900 B of 1.00 kB); excess packets are dropped`)
	e = overflow()
	e.Network, e.Key = "10.0.0.7/32", "10.0.0.7/32"
	check("eth0 egress 10.0.0.7: the bucket is full (900 B of 1.00 kB); excess packets are dropped")
	e.Network, e.Key, e.Name = "2001:db8::/32", "2001:db8::7/128", "a\x1bb"
	check(`eth0 egress 2001:db8::/32 ("a\x1bb"): the bucket of 2001:db8::7 is full (900 B of 1.00 kB); excess packets are dropped`)
}

// A quota is told of once, until a period, a topup or time gives back enough of it.
func TestQuotaIsToldOnce(t *testing.T) {
	var told []string
	s := session{on: func(e report.Event) { told = append(told, strings.TrimPrefix(e.Kind, "quota-")) }}
	q, was := quotaOf{name: "home", prefix: policy.PoolKey("home")}, map[policy.Period]map[quotaUser]toldOf{}
	for _, step := range []struct {
		used             uint64
		steady, calendar string
	}{
		{900e3, "", ""}, {990e3, "", ""}, // it was so when the listener began
		{1000e3, "", ""}, {1099e3, "used-up", "used-up"}, {1050e3, "", "restored"}, {1100e3, "", "used-up"},
		{890e3, "", "restored"}, {1100e3, "used-up", "used-up"},
		{0, "", "restored"}, {799e3, "", ""}, {800e3, "80", "80"}, {701e3, "", "restored"}, {850e3, "", "80"}, {699e3, "", "restored"},
		{1100e3, "80 used-up", "80 used-up"},
	} {
		for period, want := range map[policy.Period]string{"1d": step.steady, "day": step.calendar} {
			q.entry.Also = policy.Also{Quota: policy.Quota{Bytes: 1e6, Period: period}, Grace: 1e5, Then: policy.ThenDrop}
			told, s.quotas.told = nil, map[quotaUser]toldOf{}
			s.lookAtQuota(q, "", maps.Quota{UsedBytes: step.used, LeftBytes: 1100e3 - step.used}, was[period])
			if got := strings.Join(told, " "); got != want {
				t.Errorf("%d of a %s used: told %q, want %q", step.used, period, got, want)
			}
			was[period] = s.quotas.told
		}
	}
}

// What a period gives back is told apart from what a top-up does.
func TestPeriodIsTold(t *testing.T) {
	var told report.Event
	s, was := session{on: func(e report.Event) { told = e }}, map[quotaUser]toldOf{}
	q := quotaOf{name: "home", prefix: policy.PoolKey("home")}
	q.entry.Also = policy.Also{Quota: policy.Quota{Bytes: 1e6, Period: "day"}, Then: policy.ThenDrop}
	for _, step := range []struct {
		used uint64
		ends time.Duration
		says string
	}{
		{900e3, time.Hour, "used 900 kB of its quota of 1.00 MB"}, {100e3, time.Hour, "has more left of its quota again: 100 kB of 1.00 MB are used"},
		{900e3, time.Hour, "used 900 kB of its quota of 1.00 MB"}, {1e6, time.Hour, "used up its quota: 1.00 MB of 1.00 MB; packets are dropped"},
		{0, 24 * time.Hour, "begins its quota anew: 0 of 1.00 MB are used; the full rate is in force again"},
	} {
		s.quotas.told = map[quotaUser]toldOf{}
		s.lookAtQuota(q, "10.0.0.7", maps.Quota{UsedBytes: step.used, LeftBytes: 1e6 - step.used, EndsNS: uint64(step.ends)}, was)
		was = s.quotas.told
		if want := `pool "home": 10.0.0.7 ` + step.says; told.Sentence != want || told.NewPeriod != (step.used == 0) {
			t.Errorf("%+v\nwant %q", told, want)
		}
	}
}
