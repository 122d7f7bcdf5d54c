package explain

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	near, far = netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.0.0.7")
	eth0      = netinfo.Device{Name: "eth0", Index: 2, MTU: 1500, L2Bytes: 14}
	eth1      = netinfo.Device{Name: "eth1", Index: 3, MTU: 1500, L2Bytes: 14}
	lo        = netinfo.Device{Name: "lo", Index: 1, Loopback: true}
	foreign   = netinfo.ChainEntry{At: "tcx", ID: 9, Name: "theirs"}
	ours      = netinfo.ChainEntry{At: "tcx", ID: 7, Name: "shapectl", Ours: true}
)

// limited is a stop on eth0 with a rule of 10.0.0.0/24 that drops excess packets.
func limited(d policy.Direction) *Stop {
	s := &Stop{
		Hop: netinfo.Hop{Device: eth0, Direction: d}, Frame: 1000, Path: []netinfo.ChainEntry{ours},
		Hook: &Hook{Name: "eth0", Device: eth0, Direction: d, Match: d.FarSide(), State: loader.Attached, Status: "attached"},
		Rule: &Rule{Rule: policy.Rule{Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: 15_625_000, Capacity: 5000}},
	}
	s.Rule.Bucket = &Bucket{Key: "10.0.0.0/24"}
	return s
}

// delays makes the rule one that delays.
func (s *Stop) delays() {
	r := &s.Rule.Rule
	r.Algorithm, r.Excess, r.ECNAbove, s.Queue = policy.Leaky, policy.Delay, policy.Never, &doctor.Queue{}
}

func through(ifb fq.Ifb) doctor.Queue { return doctor.Queue{State: ifb.State, Ifb: &ifb} }

// full makes the bucket so that no packet conforms.
func (s *Stop) full() { s.Rule.Bucket.Level = s.Rule.Capacity << model.UnitBits }

func TestJudgeStop(t *testing.T) {
	egress, ingress := policy.Egress, policy.Ingress
	for _, test := range []struct {
		name    string
		d       policy.Direction
		change  func(*Stop)
		verdict string
		says    []string // in the warnings and the note, which are none otherwise
	}{
		{"conforms", egress, func(*Stop) {}, "pass", []string{"its burst is short"}},
		{"excess", egress, (*Stop).full, "drop", []string{"its burst is short"}},
		{"no rule matches", egress, func(s *Stop) { s.Rule = nil; s.Path = []netinfo.ChainEntry{foreign, ours} }, "pass", nil},
		{"no rules", ingress, func(s *Stop) { s.Hook, s.Rule = nil, nil; s.Path = []netinfo.ChainEntry{foreign} }, "pass", nil},
		{"rules of another bpffs", egress, func(s *Stop) {
			s.Hook, s.Rule = nil, nil
			s.Path = []netinfo.ChainEntry{{At: "tcx", ID: 9, Name: "shapectl"}}
		}, "unknown", []string{"limits of shapectl are already on the device"}},
		{"rules of another layout", egress, func(s *Stop) { s.Hook, s.Rule, s.Unreadable = nil, nil, maps.ErrOtherLayout }, "unknown", []string{"cannot be read", "another version"}},
		{"unlimited", egress, func(s *Stop) { s.Rule.Rate, s.Rule.Bucket = policy.Unlimited, nil }, "pass", nil},
		{"by the other side", egress, func(s *Stop) { s.Hook.Match, s.Rule, s.Undecided = policy.MatchSrc, nil, true },
			"unknown", []string{"depends on the source address", "--flow udp,192.0.2.1:5000,10.0.0.7:53"}},
		{"by the other side, whose address does not matter", egress, func(s *Stop) { s.Hook.Match = policy.MatchSrc }, "pass", []string{"its burst is short"}},
		{"a bucket for each host of the other side", egress, func(s *Stop) {
			s.Hook.Match, s.Rule.Each.Kind, s.Rule.Bucket = policy.MatchSrc, policy.EachHost, nil
		}, "unknown", []string{"each host has a bucket"}},
		{"a bucket for each flow", egress, func(s *Stop) { s.Rule.Each.Kind = policy.EachFlow; s.Rule.Bucket = nil },
			"unknown", []string{"--flow udp,192.0.2.1:5000,10.0.0.7:53"}},
		{"a bucket for each flow, from there", ingress, func(s *Stop) { s.Rule.Each.Kind = policy.EachFlow; s.Rule.Bucket = nil },
			"unknown", []string{"--flow udp,10.0.0.7:5000,192.0.2.1:53"}},
		{"detached", egress, func(s *Stop) { s.full(); s.Hook.State, s.Path = loader.Detached, nil },
			"pass", []string{"something else detached"}},
		{"gone", egress, func(s *Stop) {
			s.full()
			s.Hook.State, s.Hook.Device, s.Device, s.Path = loader.Gone, netinfo.Device{}, netinfo.Device{}, nil
		}, "pass", []string{"was deleted"}},
		{"spilled", egress, func(s *Stop) { s.full(); s.Rule.Excess = policy.ECN; s.Rule.Bucket.Spilled = true }, "drop", nil},
		{"marked", egress, func(s *Stop) { s.full(); s.Rule.Excess = policy.ECN }, "mark", nil},

		{"after a program", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{foreign, ours} }, "pass", []string{"before the limit, packets pass program theirs (tcx, id 9)", "ending the chain"}},
		{"after a program without a name", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "tcx", ID: 5}, ours} }, "pass", []string{"packets pass program 5 (tcx)"}},
		{"after another limit", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "tcx", ID: 5, Name: "shapectl"}, ours} },
			"pass", []string{"lower of the two rates decides"}},
		{"after XDP", ingress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "xdp", ID: 5, Name: "early"}, ours} }, "pass", []string{"an XDP program (early)"}},
		{"after a chain", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "netfilter", Name: "chain c"}, ours} },
			"pass", []string{"packets pass chain c (netfilter): those that it drops"}},
		{"before a program", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{ours, foreign} }, "pass", []string{"its burst is short"}},

		{"held by fq", egress, func(s *Stop) { s.delays(); s.Queue.State = fq.State{Kind: "fq", HasFQ: true} }, "pass", nil},
		{"delayed by nothing", egress, func(s *Stop) { s.delays(); s.Queue.State = fq.State{Kind: "pfifo"} },
			"pass", []string{"eth0 has pfifo", "--setup-fq"}},
		{"waits for a flow unknown", egress, func(s *Stop) {
			s.delays()
			s.Queue.State = fq.State{Kind: "fq", HasFQ: true}
			r := &s.Rule.Rule
			r.Algorithm, r.Queue, r.Order = policy.GCRA, 10_000, policy.SparseFirst
			s.Rule.Bucket.FIFO, s.Rule.Bucket.Level = true, r.Capacity<<model.UnitBits
		}, "delay", []string{"for a flow that has packets waiting"}},
		{"sparse flow goes ahead", egress, func(s *Stop) {
			s.delays()
			s.Queue.State = fq.State{Kind: "fq", HasFQ: true}
			r := &s.Rule.Rule
			r.Algorithm, r.Queue, r.Order, s.Rule.Bucket.Level = policy.GCRA, 10_000, policy.SparseFirst, r.Capacity<<model.UnitBits
		}, "pass", nil},
		{"no ifb", ingress, (*Stop).delays, "lost", []string{"the ifb device for delayed packets is gone"}},
		{"no ifb, and excess", ingress, func(s *Stop) { s.delays(); s.full() }, "drop", []string{"is gone"}},
		{"ifb is down", ingress, func(s *Stop) { s.delays(); *s.Queue = through(fq.Ifb{Name: "ifb2"}) }, "lost", []string{"ifb2", "is down"}},
		{"ifb without fq", ingress, func(s *Stop) {
			s.delays()
			*s.Queue = through(fq.Ifb{Name: "ifb2", Up: true, State: fq.State{Kind: "pfifo"}})
		},
			"pass", []string{"ifb2 has pfifo", "set one of the rules again"}},
		{"past a program by the ifb", ingress, func(s *Stop) {
			s.delays()
			s.Path = append(s.Path, foreign)
			*s.Queue = through(fq.Ifb{Name: "ifb2", Up: true, State: fq.State{Kind: "fq", HasFQ: true}})
		}, "pass", []string{"after the limit, packets pass program theirs (tcx, id 9), but not"}},
	} {
		s, p := limited(test.d), Packets{}
		if test.change(s); test.d == egress {
			p.Dst = far
		} else {
			p.Src = far
		}
		got := judgeStop(&p, s)
		if got.Verdict != test.verdict || got.Conforms != (test.verdict == "pass" || test.verdict == "delay") {
			t.Errorf("%s: the verdict is %s, want %s; it conforms: %v", test.name, got.Verdict, test.verdict, got.Conforms)
		}
		if got.WaitNS > 0 && (got.Verdict == "pass" || got.Verdict == "unknown") {
			t.Errorf("%s: it passes, and waits %d ns", test.name, got.WaitNS)
		}
		limited := s.Rule != nil && s.Rule.Bucket != nil && !report.NotInForce(got.Attached)
		if (got.DecidedBy != nil) != limited || limited && (*got.DecidedBy != "10.0.0.0/24" || *got.LevelBytes != got.Bucket.LevelBytes || *got.CapacityBytes != 5000) {
			t.Errorf("%s: %+v", test.name, got.Answer)
		}
		said := strings.Join(append(got.Warnings, got.Note), "; ")
		for _, want := range test.says {
			if !strings.Contains(said, want) {
				t.Errorf("%s: %q does not say %q", test.name, said, want)
			}
		}
		if test.says == nil && said != "" {
			t.Errorf("%s: it says %q", test.name, said)
		}
		decides := slices.IndexFunc(got.Chain, func(a report.Attached) bool { return a.Decides })
		if want := s.Rule != nil && deciderOf(s.Path) >= 0; decides >= 0 != want || want && !got.Chain[decides].Ours {
			t.Errorf("%s: of %+v entry %d decides", test.name, got.Chain, decides)
		}
		if got.Chain == nil != (s.Name == "") {
			t.Errorf("%s: the chain is %v on device %q", test.name, got.Chain, s.Name)
		}
	}
}

// The answer of a path is that of the hook that does worst to the packets, and of two alike the first.
func TestAnswer(t *testing.T) {
	for _, test := range []struct{ stops, want string }{
		{"", ""}, {"pass", "pass"}, {"pass,pass by a", "pass by a"}, {"pass by a,pass by b", "pass by a"}, {"pass by a,pass lately b", "pass lately b"},
		{"pass lately a,delay by b", "delay by b"}, {"mark by a,unknown,delay by b", "unknown"}, {"unknown,drop by a,lost by b", "drop by a"}, {"lost,drop by b", "lost"},
	} {
		var stops []report.Stop
		for i, name := range strings.Split(test.stops, ",") {
			s := report.Stop{Answer: report.Answer{Device: name, Bytes: uint64(i)}}
			words := strings.Fields(name)
			if len(words) == 0 {
				continue
			}
			if s.Verdict = words[0]; len(words) > 1 {
				s.DecidedBy = &words[2]
			}
			if strings.Contains(name, "lately") {
				s.LimitedBy = &words[2]
			}
			stops = append(stops, s)
		}
		if got := answer(stops); got.Device != test.want || test.want == "" && (got.Verdict != "pass" || !got.Conforms) {
			t.Errorf("%q: %+v, want %q", test.stops, got, test.want)
		}
	}
}

// Below a VLAN its tag counts, too.
func TestJudgeTagged(t *testing.T) {
	s := limited(policy.Egress)
	s.Tags = 2
	if got := judgeStop(&Packets{Dst: far}, s); got.Bytes != 1008 {
		t.Errorf("1000 bytes with two tags: %+v", got.Answer)
	}
}

// along are the hops of a direction on devices.
func along(d policy.Direction, devices ...netinfo.Device) (down netinfo.Descent) {
	for _, dev := range devices {
		down.Hops = append(down.Hops, netinfo.Hop{Device: dev, Direction: d})
	}
	return down
}

func TestJudgeLegs(t *testing.T) {
	br, tun := netinfo.Device{Name: "br", Index: 8, Kind: "bridge"}, netinfo.Device{Name: "tun", Index: 9}
	own := func(end netip.Addr) Leg {
		return Leg{End: end, Route: netinfo.Route{Device: lo, Next: end, Local: true}}
	}
	to := func(end netip.Addr, d policy.Direction, dev netinfo.Device) Leg {
		return Leg{End: end, Route: netinfo.Route{Device: dev, Next: end}, Descent: along(d, dev)}
	}
	by := func(l Leg, change func(*Leg)) Leg { change(&l); return l }
	for want, legs := range map[string][2]Leg{
		"leave by eth0": {{}, to(far, policy.Egress, eth0)},
		"come in by eth0 (where those to 10.0.0.7 leave)":  {to(far, policy.Ingress, eth0), {}},
		"are this host's own, and leave by eth0":           {own(near), to(far, policy.Egress, eth0)},
		"are this host's own, and have no route (refused)": {own(near), {End: far, NoRoute: reason("refused")}},
		"stay on this host, by lo":                         {own(near), own(near)},
		"are for this host itself":                         {{}, own(near)},
		"come in by any device, if at all (to 10.0.0.7: network is unreachable), and are for this host itself": {
			{End: far, NoRoute: unix.ENETUNREACH}, own(near)},
		"leave by eth0, then eth1, to 192.0.2.1": {{}, by(to(far, policy.Egress, eth0), func(l *Leg) {
			l.Route.Next, l.Descent = near, along(policy.Egress, eth0, eth1)
		})},
		"come in by eth1 (where those to 192.0.2.1 leave), and would leave by eth0, if this host forwarded them (permission denied)": {
			to(near, policy.Ingress, eth1), by(to(far, policy.Egress, eth0), func(l *Leg) { l.Unwilling = unix.EACCES })},
		"leave by br, by one of its ports":    {{}, by(to(far, policy.Egress, br), func(l *Leg) { l.Ports = []netinfo.Device{eth0, eth1} })},
		"leave by tun, wrapped":               {{}, by(to(far, policy.Egress, tun), func(l *Leg) { l.Tunnel = new(netinfo.Tunnel) })},
		"leave by tun, wrapped, to 192.0.2.1": {{}, by(to(far, policy.Egress, tun), func(l *Leg) { l.Tunnel = &netinfo.Tunnel{Remote: near} })},
		"come in by tun, wrapped, from 192.0.2.1 (where those to 10.0.0.7 leave)": {
			by(to(far, policy.Ingress, tun), func(l *Leg) { l.Tunnel = &netinfo.Tunnel{Remote: near} }), {}},
	} {
		if got := Judge(Facts{Routed: true, In: legs[0], Out: legs[1]}).How; got != want {
			t.Errorf("packets that %s are said to %s", want, got)
		}
	}
}

type reason string

func (r reason) Error() string { return string(r) }

func TestMetWhen(t *testing.T) {
	leaves := Leg{End: far, Route: netinfo.Route{Device: eth0, Next: far}, Descent: along(policy.Egress, eth0)}
	ports := leaves
	ports.Ports = []netinfo.Device{eth1}
	own := Leg{End: near, Route: netinfo.Route{Device: lo, Local: true}}
	on := func(dev netinfo.Device, d policy.Direction) Hook {
		return Hook{Name: dev.Name, Device: dev, Direction: d, Match: d.FarSide()}
	}
	for _, test := range []struct {
		name    string
		hook    Hook
		in, out Leg
		met     bool
		want    string
	}{
		{"another device", on(eth1, policy.Egress), Leg{}, leaves, false, "not on this path"},
		{"the other direction", on(eth0, policy.Ingress), Leg{}, leaves, true, "met if they come in by eth0"},
		{"a port", on(eth1, policy.Egress), Leg{}, ports, true, "met if eth1 is the port that they take"},
		{"a device that is gone", Hook{Name: "old", Direction: policy.Egress}, Leg{}, leaves, false, "not on this path"},
		{"the loopback, to elsewhere", on(lo, policy.Egress), Leg{}, leaves, false, "not on this path"},
		{"a unit", on(netinfo.Cgroup("unit:a.service", netinfo.CgroupIndex(7)), policy.Egress), Leg{}, leaves, true, "met if unit:a.service sends them"},
		{"a unit, for forwarded packets", on(netinfo.Cgroup("unit:a.service", netinfo.CgroupIndex(7)), policy.Egress), leaves, leaves, false, "not on this path"},
		{"a unit, for local packets", on(netinfo.Cgroup("unit:a.service", netinfo.CgroupIndex(7)), policy.Ingress), own, own, false, "not on this path"},
		{"no route", on(eth1, policy.Ingress), Leg{End: far, NoRoute: netinfo.ErrNoRoute}, own, true, "met if they come in by eth1"},
	} {
		if met, when := metWhen(&test.hook, &test.in, &test.out); met != test.met || when != test.want {
			t.Errorf("%s: %v, %q, want %q", test.name, met, when, test.want)
		}
	}
}

// A rule that packets do not pass is told only if it explains why another one decides, or none.
func TestExpects(t *testing.T) {
	rule := func(prefix, name string) policy.Rule {
		return policy.Rule{Prefix: netip.MustParsePrefix(prefix), Label: policy.Label{Name: name}}
	}
	for _, test := range []struct {
		rule     policy.Rule
		state    loader.State
		d        policy.Direction // 10.0.0.0/24 decides on egress
		expected bool
	}{
		{rule("10.0.0.7/32", ""), loader.Attached, policy.Egress, true},
		{rule("10.0.0.0/24", ""), loader.Attached, policy.Egress, false},
		{rule("10.0.0.0/24", "alice"), loader.Attached, policy.Egress, true},
		{rule("10.0.0.0/24", "bob"), loader.Attached, policy.Egress, false},
		{rule("0.0.0.0/0", ""), loader.Gone, policy.Egress, false},
		{rule("10.0.0.0/8", ""), loader.Attached, policy.Ingress, true},
		{rule("0.0.0.0/0", ""), loader.Attached, policy.Ingress, false},
		{rule("0.0.0.0/0", ""), loader.Gone, policy.Ingress, true},
	} {
		f := Facts{Packets: Packets{Name: "alice"}, Stops: []Stop{*limited(policy.Egress)}}
		e := Elsewhere{Hook: Hook{Direction: test.d, State: test.state}, Rule: test.rule}
		if got := f.expects(&e); got != test.expected {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

func TestExampleOf(t *testing.T) {
	for _, test := range []struct{ network, narrower, want string }{
		{"10.0.0.0/24", "", "10.0.0.1"},
		{"10.0.0.0/24", "10.0.0.1/32", "10.0.0.2"},
		{"10.0.0.0/24", "10.0.0.0/28", "10.0.0.17"},
		{"10.0.0.0/28", "10.0.0.0/29", "10.0.0.9"},
		{"10.0.0.0/31", "", "10.0.0.0"},
		{"10.0.0.7/32", "", "10.0.0.7"},
		{"0.0.0.0/0", "", "192.0.2.1"},
		{"2001:db8::/56", "2001:db8::/64", "2001:db8:0:1::1"},
		{"255.255.255.0/24", "255.255.255.0/24", "255.255.255.1"},
	} {
		network := netip.MustParsePrefix(test.network)
		decides := func(a netip.Addr) netip.Prefix {
			if p, err := netip.ParsePrefix(test.narrower); err == nil && p.Contains(a) {
				return p
			}
			return network
		}
		got := exampleOf(network, decides)
		if got.String() != test.want {
			t.Errorf("%+v: %s", test, got)
		}
	}
}

// A path tells which rules are elsewhere, and one that was asked for by its device of that alone.
func TestJudgeWay(t *testing.T) {
	s := limited(policy.Ingress)
	s.Hook.Status, s.Rule.Hides = "attached, was lan0", []policy.Rule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}
	path := Judge(Facts{Packets: Packets{Src: far}, Stops: []Stop{*s}})
	if path.Packets != "from 10.0.0.7" || path.How != "come in by eth0" || path.Elsewhere == nil {
		t.Errorf("on a device: %+v", path)
	}
	if got := path.Hooks[0]; got.State != "attached, was lan0" || got.Hides[0].Rule != "0.0.0.0/0" || *got.Rule != "10.0.0.0/24" {
		t.Errorf("the rule: %+v", got)
	}
	path = Judge(Facts{Packets: Packets{Dst: far}, Routed: true, Elsewhere: []Elsewhere{{Hook: *s.Hook, Rule: s.Rule.Rule}}})
	if len(path.Hooks) != 0 || len(path.Elsewhere) != 1 || path.Elsewhere[0].Brief.Rule != "10.0.0.0/24" || path.Elsewhere[0].Device != "eth0" || !path.Elsewhere[0].Attached {
		t.Errorf("on no device: %+v", path)
	}
}

// pooled is a rule of 10.0.0.0/24 that takes part in pools a and b, of which b is above. Each holds 5000 bytes.
func pooled() Stages {
	rule := func(name string, within policy.Within) policy.Rule {
		r := policy.Rule{Rate: 15_625_000, Capacity: 5000, Within: within, Pool: name != ""}
		r.Label.Name = name
		return r
	}
	var s Stages
	for _, r := range []policy.Rule{rule("", "a"), rule("a", "b"), rule("b", "")} {
		r.Prefix = netip.MustParsePrefix("10.0.0.0/24")
		s.Levels = append(s.Levels, Level{Entry: maps.Entry{Rule: r}})
		s.Model = append(s.Model, model.Stage{Limit: model.NewLimit(r), Weight: 1})
	}
	return s
}

// fill leaves room for so many bytes.
func (s Stages) fill(level int, room uint64) {
	s.Model[level].State.Level = (5000 - room) << model.UnitBits
}

// guarantee gives a level a guarantee, which has room.
func (s Stages) guarantee(level int) {
	s.Levels[level].Guarantee = 1_000_000
	limit, _ := s.Levels[level].Guaranteed()
	s.Model[level].Guarantee = model.NewLimit(limit)
}

// beyond makes a level one with shares, in which the packets are beyond theirs.
func (s Stages) beyond(level int) {
	m := &s.Model[level]
	m.Share, m.Sharer = &model.Share{ShareParams: m.ShareParams()}, &model.Sharer{}
	s.Levels[level].Share.Kind, s.Levels[level].Sharer = policy.ShareHost, "10.0.0.7"
	model.Climb([]model.Stage{*m}, model.Packet{Time: 1 << 40}) // advances the clock
	for m.Share.Judge(m.Meter, m.Sharer, 1, 1000, m.State.Level, new(model.Load)) == model.WithinShare {
		m.Share.Charge(m.Sharer, 1, 1000)
	}
}

// pooledRule is one in pools a and b.
func pooledRule() *Rule {
	r := limited(policy.Egress).Rule
	r.Stages = pooled()
	return r
}

func TestMostIn(t *testing.T) {
	s := pooled()
	for i, capacity := range []uint64{300_000, 200_000, 100_000} {
		s.Levels[i].Rate, s.Levels[i].Capacity = 8000, capacity
	}
	if got := s.mostIn(time.Second, 1000); *got != 808_000 {
		t.Errorf("the three levels let %d bit through in 1 s, want 808000", *got)
	}
	s.Levels[1].Also = policy.Also{Packets: 40, PacketBurst: 20}
	if got := s.mostIn(2*time.Second, 1000); *got != 100*8000/2 {
		t.Errorf("100 packets of 1000 bytes in 2 s: %d bit/s", *got)
	}
	s.Levels[1].Guarantee = 8000
	if got := s.mostIn(time.Second, 1000); got != nil {
		t.Errorf("beside a guarantee, the pools let %d bit through in 1 s", *got)
	}
	s.Levels = s.Levels[:1]
	s.Levels[0].Excess = policy.Pass
	if got := s.mostIn(time.Second, 1000); got != nil {
		t.Errorf("a level that drops nothing lets %d bit through in 1 s", *got)
	}
}

// Where the fair shares of a pool refuse a packet, a full pool above decides: it leaves the pool less than its rate.
func TestDecidedBy(t *testing.T) {
	for _, test := range []struct {
		change func(Stages)
		want   string
	}{
		{func(Stages) {}, "10.0.0.0/24"},
		{func(s Stages) { s.fill(1, 0); s.fill(2, 0) }, "a"},
		{func(s Stages) { s.beyond(1) }, "a"},
		{func(s Stages) { s.beyond(1); s.fill(2, 0) }, "b"},
		{func(s Stages) { s.beyond(0); s.fill(2, 0) }, "b"},
		{func(s Stages) { s.beyond(0) }, "10.0.0.0/24"},
	} {
		s := limited(policy.Egress)
		s.Rule = pooledRule()
		s.Rule.Stages.Now = 1 << 40
		test.change(s.Rule.Stages)
		if got := judgeStop(&Packets{Dst: far}, s); *got.DecidedBy != test.want || *got.CapacityBytes != 5000 {
			t.Errorf("%+v: want %s", got.Answer, test.want)
		}
	}
}

// Of a full pool that is shared by flow, it depends on the flow whether packets pass. The answer begins with its rate.
func TestNeedsFlow(t *testing.T) {
	for room, want := range map[uint64]string{5000: "pass", 0: "drop", 2500: "unknown"} {
		s := limited(policy.Egress)
		s.Rule = pooledRule()
		s.Rule.Stages.Levels[1].Share.Kind = policy.ShareFlow
		s.Rule.Stages.fill(1, room)
		got := judgeStop(&Packets{Dst: far}, s)
		if got.Verdict != want || !strings.Contains(got.Note, "up to 15.625mbit, shared by the flows of a:") {
			t.Errorf("with room for %d bytes: %s, want %s: %s", room, got.Verdict, want, got.Note)
		}
		if full := want != "pass"; full != (got.DecidedBy != nil && *got.DecidedBy == "a") {
			t.Errorf("with room for %d bytes: %+v", room, got.Answer)
		}
		var text strings.Builder
		if err := (report.Paths{{Answer: got.Answer, Hooks: []report.Stop{got}}}).Text(&text); err != nil {
			t.Fatal(err)
		}
		if first := strings.Contains(text.String(), " egress: pool a limits them now; up to 15.625mbit, shared by the"); first != (want == "unknown") {
			t.Errorf("with room for %d bytes: %s", room, &text)
		}
	}
}

// A pool is full as soon as it cannot serve more: with fair shares, its bucket does not fill up.
func TestFullPool(t *testing.T) {
	for _, test := range []struct {
		name         string
		room, packet uint64
		shares, full bool
	}{
		{"empty", 5000, 100, false, false},
		{"half full", 2500, 100, false, false},
		{"almost full", 300, 100, false, true},
		{"no room for a larger packet", 900, 1000, false, true},
		{"less than half full, with shares", 3500, 100, true, false},
		{"half full, with shares", 2600, 100, true, true},
	} {
		s := pooled()
		s.fill(1, test.room)
		if test.shares {
			s.Levels[1].Share.Kind = policy.ShareHost
		}
		if v, _, _ := s.Judge(test.packet); v.Pools[0].Full != test.full || v.Pools[1].Full {
			t.Errorf("%s: %+v", test.name, v.Pools)
		}
	}
}

// What limits packets is told by what passed and was refused while they were counted, and not by the levels of one moment.
func TestLimiter(t *testing.T) {
	const rule = "10.0.0.0/24"
	lately := func(of *Level, percent, refused uint64) {
		of.Lately = maps.Counters{
			PassedPackets: 20*percent + 1, PassedBytes: 15_625_000 / 8 / 100 * percent, ExcessPackets: refused, DroppedPackets: refused,
		}
	}
	for _, test := range []struct {
		name    string
		change  func(s *Stages, rule, a, b *Level)
		limiter string
		full    string // pools
	}{
		{"nothing", func(*Stages, *Level, *Level, *Level) {}, "", ""},
		{"little", func(_ *Stages, rule, a, b *Level) { lately(rule, 10, 0); lately(a, 20, 0); lately(b, 30, 0) }, "", ""},
		{"a subscriber's own pool, below a busy one", func(s *Stages, rule, a, b *Level) {
			rule.Rate = policy.Unlimited
			lately(rule, 98, 5)
			lately(a, 98, 5)
			lately(b, 100, 3)
			s.fill(2, 0)
		}, "a", "ab"},
		{"the rule itself", func(_ *Stages, rule, a, b *Level) { lately(rule, 95, 9); lately(a, 96, 0); lately(b, 99, 2) }, rule, ""},
		{"the rule, which has a bucket for each host", func(_ *Stages, rule, a, b *Level) {
			rule.Each.Kind = policy.EachHost
			lately(rule, 195, 9)
			lately(a, 20, 2)
		}, rule, ""},
		{"the rule, which spends its rate below a full pool that refuses more packets of others", func(s *Stages, rule, a, b *Level) {
			b.Share.Kind = policy.ShareMember
			s.fill(2, 2500)
			lately(rule, 100, 9)
			lately(a, 100, 0)
			lately(b, 99, 500)
		}, rule, "b"},
		{"the rule, which spent less than its rate, and what was in its bucket", func(s *Stages, rule, a, b *Level) {
			s.fill(0, 500)
			s.fill(2, 0)
			lately(rule, 100, 9)
			rule.Lately.PassedBytes -= 4500
			lately(b, 99, 500)
		}, rule, "b"},
		{"a full pool, above a rule whose bucket was empty at times", func(s *Stages, rule, a, b *Level) {
			s.fill(2, 0)
			lately(rule, 99, 9)
			lately(b, 99, 500)
		}, "b", "b"},
		{"a full pool, above a rule whose bucket was empty at first", func(s *Stages, rule, a, b *Level) {
			s.fill(2, 0)
			lately(rule, 100, 9)
			rule.Last = 4500
			lately(b, 99, 500)
		}, "b", "b"},
		{"a full pool, which refused packets of others only", func(s *Stages, rule, a, b *Level) {
			s.fill(2, 0)
			lately(rule, 100, 0)
			lately(b, 100, 500)
		}, "", "b"},
		{"a pool that was full for a moment", func(s *Stages, rule, a, b *Level) {
			s.fill(2, 0)
			lately(rule, 30, 0)
			lately(b, 39, 0)
		}, "", ""},
		{"a pool above, which leaves the one below less than its rate", func(s *Stages, rule, a, b *Level) {
			b.Share.Kind = policy.ShareMember
			s.fill(2, 3000)
			lately(rule, 40, 7)
			lately(a, 50, 7)
			lately(b, 100, 0)
		}, "b", "b"},
		{"a pool without a burst for what comes", func(_ *Stages, rule, a, b *Level) { lately(rule, 40, 7); lately(a, 50, 7) }, "a", "a"},
		{"a pool, while counters of rule and pool are read one after the other", func(_ *Stages, rule, a, b *Level) {
			lately(rule, 40, 101)
			lately(a, 50, 100)
		}, "a", "a"},
		{"a pool below which no rule has a rate", func(_ *Stages, rule, a, b *Level) {
			rule.Rate = policy.Unlimited
			lately(rule, 0, 2)
			lately(a, 0, 1)
		}, "a", "a"},
		{"one flow that loses packets seldom", func(s *Stages, rule, a, _ *Level) { s.fill(1, 10); lately(rule, 50, 1); lately(a, 97, 0) }, "a", "a"},
		{"a pool with a small burst, below a busy one", func(_ *Stages, rule, a, b *Level) {
			lately(rule, 40, 7)
			lately(a, 50, 7)
			lately(b, 92, 0)
		}, "a", "a"},
		{"a pool that was full at the start", func(s *Stages, rule, a, _ *Level) { s.fill(1, 10); lately(rule, 50, 1); lately(a, 88, 0) }, "a", "a"},
		{"a pool that was full at the end", func(_ *Stages, rule, a, _ *Level) { a.Last = 5000; lately(rule, 50, 1); lately(a, 88, 0) }, "a", "a"},
		{"shares that refuse what a busy pool above does not leave them", func(_ *Stages, rule, a, b *Level) {
			rule.Rate, a.Share.Kind = policy.Unlimited, policy.ShareFlow
			lately(rule, 30, 7)
			lately(a, 30, 7)
			lately(b, 80, 0)
		}, "b", "b"},
		{"shares that are half full below a full pool", func(s *Stages, rule, a, b *Level) {
			rule.Rate, a.Share.Kind, b.Share.Kind = policy.Unlimited, policy.ShareFlow, policy.ShareMember
			s.fill(1, 2500)
			s.fill(2, 2500)
			lately(rule, 80, 7)
			lately(a, 80, 7)
			lately(b, 99, 0)
		}, "b", "b"},
		{"shares that use their rate, below a full pool", func(s *Stages, rule, a, b *Level) {
			rule.Rate, a.Share.Kind = policy.Unlimited, policy.ShareFlow
			s.fill(2, 0)
			lately(rule, 97, 7)
			lately(a, 97, 7)
			lately(b, 99, 0)
		}, "a", "ab"},
		{"shares with a small burst", func(_ *Stages, rule, a, b *Level) {
			rule.Rate, a.Share.Kind = policy.Unlimited, policy.ShareFlow
			lately(rule, 40, 7)
			lately(a, 40, 7)
			lately(b, 60, 0)
		}, "a", "a"},
		{"a burst", func(_ *Stages, _, a, _ *Level) { lately(a, 120, 0) }, "", ""},
		{"nothing lately, but it is full", func(s *Stages, _, _, _ *Level) { s.fill(2, 0) }, "", "b"},
	} {
		s := pooled()
		s.Watched = 1e9
		test.change(&s, &s.Levels[0], &s.Levels[1], &s.Levels[2])
		v, _, _ := s.Judge(10)
		limiter, full := "", ""
		if v.LimitedBy != nil {
			limiter = *v.LimitedBy
		}
		for _, pool := range v.Pools {
			if pool.Full {
				full += pool.Name
			}
		}
		if limiter != test.limiter || full != test.full {
			t.Errorf("%s: %q limits, and %q is full; want %q and %q", test.name, limiter, full, test.limiter, test.full)
		}
		if want := s.Levels[0].Lately.PassedBytes * 8; v.UseBits == nil || *v.UseBits != want {
			t.Errorf("%s: it uses %v, want %d", test.name, v.UseBits, want)
		}
	}
}

func TestJudgeStages(t *testing.T) {
	const byteNS = 512
	const rule, beyond = "10.0.0.0/24", " beyond a share"
	for _, test := range []struct {
		name     string
		change   func(*Stages)
		verdict  string
		refused  string // "" for nothing
		covered  string
		waitNS   uint64 // 0 for any
		conforms string // of the pools
	}{
		{"all have room", func(*Stages) {}, "pass", "", "", 0, "ab"},
		{"rule is full", func(s *Stages) { s.fill(0, 0) }, "drop", rule, "", 1000 * byteNS, "ab"},
		{"pool is full", func(s *Stages) { s.fill(1, 900) }, "drop", "a", "", 100 * byteNS, "b"},
		{"upper pool is full", func(s *Stages) { s.fill(2, 0) }, "drop", "b", "", 1000 * byteNS, "a"},
		{"lowest full pool decides", func(s *Stages) { s.fill(1, 900); s.fill(2, 0) }, "drop", "a", "", 1000 * byteNS, ""},
		{"guaranteed", func(s *Stages) { s.guarantee(0); s.fill(1, 0); s.fill(2, 0) }, "pass", "", "guaranteed by 10.0.0.0/24", 0, ""},
		{"guaranteed by a pool", func(s *Stages) { s.guarantee(1); s.fill(2, 0) }, "pass", "", "guaranteed by a", 0, "a"},
		{"full below a guarantee", func(s *Stages) { s.guarantee(1); s.fill(1, 0) }, "drop", "a", "", 1000 * byteNS, "b"},
		{"borrowed", func(s *Stages) { s.guarantee(0); s.Model[0].GuaranteeLevel = 1 << 50 }, "pass", "", "10.0.0.0/24", 0, "ab"},
		{"only pools", func(s *Stages) { s.Levels[0].Rate, s.Model[0].Limit = policy.Unlimited, &model.Limit{}; s.fill(2, 0) },
			"drop", "b", "", 1000 * byteNS, "a"},
		{"marked by a pool", func(s *Stages) { s.Model[1].Excess = policy.ECN; s.fill(1, 0) }, "mark", "a", "", 1000 * byteNS, "b"},
		{"marked, and refused above", func(s *Stages) { s.Model[1].Excess = policy.ECN; s.fill(1, 0); s.fill(2, 0) }, "drop", "b", "", 1000 * byteNS, ""},
		{"passes as excess", func(s *Stages) { s.Model[0].Excess = policy.Pass; s.fill(0, 0) }, "pass", rule, "", 1000 * byteNS, "ab"},
		{"beyond a share", func(s *Stages) { s.beyond(2) }, "drop", "b" + beyond, "", 0, "ab"},
		{"beyond a share of the rule", func(s *Stages) { s.beyond(0) }, "drop", rule + beyond, "", 0, "ab"},
		{"beyond a share of a rule that passes excess packets", func(s *Stages) { s.beyond(0); s.Model[0].Excess = policy.Pass }, "pass", rule + beyond, "", 0, "ab"},
	} {
		s := pooled()
		s.Now = 1 << 40
		test.change(&s)
		v, verdict, waitNS := s.Judge(1000)
		refused, covered := "", strings.Join(v.BorrowedBy, " ")
		if v.RefusedBy != nil {
			refused = *v.RefusedBy + map[string]string{report.Share: beyond}[v.RefusedReason]
		}
		if v.GuaranteedBy != nil {
			covered += "guaranteed by " + *v.GuaranteedBy
		}
		conforms := ""
		for _, p := range v.Pools {
			if p.Conforms {
				conforms += p.Name
			}
		}
		if verdict.String() != test.verdict || refused != test.refused || covered != test.covered || conforms != test.conforms {
			t.Errorf("%s: %v, refused by %q, covered: %q, %q conform", test.name, verdict, refused, covered, conforms)
		}
		if waitNS > 0 == (test.refused == "") || test.waitNS != 0 && waitNS != test.waitNS {
			t.Errorf("%s: wait %d ns", test.name, waitNS)
		}
	}
}
