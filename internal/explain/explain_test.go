package explain

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
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
	r.Algorithm, r.Excess, r.ECNAbove = policy.Leaky, policy.Delay, policy.Never
}

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
		{"conforms", egress, func(*Stop) {}, "pass", nil},
		{"excess", egress, (*Stop).full, "drop", nil},
		{"no rule matches", egress, func(s *Stop) { s.Rule = nil; s.Path = []netinfo.ChainEntry{foreign, ours} }, "pass", nil},
		{"no rules", ingress, func(s *Stop) { s.Hook, s.Rule = nil, nil; s.Path = []netinfo.ChainEntry{foreign} }, "pass", nil},
		{"rules of another layout", egress, func(s *Stop) { s.Hook, s.Rule, s.Unreadable = nil, nil, true }, "unknown", []string{"cannot be read", "another version"}},
		{"unlimited", egress, func(s *Stop) { s.Rule.Rate, s.Rule.Bucket = policy.Unlimited, nil }, "pass", nil},
		{"by the other side", egress, func(s *Stop) { s.Hook.Match = policy.MatchSrc; s.Rule = nil },
			"unknown", []string{"go by the source address", "--flow"}},
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

		{"after a program", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{foreign, ours} }, "pass", []string{"theirs runs before the limit", "ending the chain"}},
		{"after a program without a name", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "tcx", ID: 5}, ours} }, "pass", []string{"program 5 runs before"}},
		{"after another limit", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "tcx", ID: 5, Name: "shapectl"}, ours} },
			"pass", []string{"the lower rate decides"}},
		{"after XDP", ingress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "xdp", ID: 5, Name: "early"}, ours} }, "pass", []string{"the XDP program"}},
		{"after a chain", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{{At: "netfilter", Name: "chain c"}, ours} },
			"pass", []string{"chain c runs before the limit: what it drops or redirects"}},
		{"before a program", egress, func(s *Stop) { s.Path = []netinfo.ChainEntry{ours, foreign} }, "pass", nil},

		{"held by fq", egress, func(s *Stop) { s.delays(); s.Qdisc = fq.State{Kind: "fq", HasFQ: true} }, "pass", nil},
		{"delayed by nothing", egress, func(s *Stop) { s.delays(); s.Qdisc = fq.State{Kind: "pfifo"} },
			"pass", []string{"eth0 has pfifo", "--setup-fq"}},
		{"waits for a flow unknown", egress, func(s *Stop) {
			s.delays()
			s.Qdisc = fq.State{Kind: "fq", HasFQ: true}
			r := &s.Rule.Rule
			r.Algorithm, r.Queue, r.Order = policy.GCRA, 10_000, policy.SparseFirst
			s.Rule.Bucket.FIFO, s.Rule.Bucket.Level = true, r.Capacity<<model.UnitBits
		}, "delay", []string{"for a flow that has packets waiting"}},
		{"sparse flow goes ahead", egress, func(s *Stop) {
			s.delays()
			s.Qdisc = fq.State{Kind: "fq", HasFQ: true}
			r := &s.Rule.Rule
			r.Algorithm, r.Queue, r.Order, s.Rule.Bucket.Level = policy.GCRA, 10_000, policy.SparseFirst, r.Capacity<<model.UnitBits
		}, "pass", nil},
		{"no ifb", ingress, (*Stop).delays, "lost", []string{"the ifb device for delayed packets is gone"}},
		{"no ifb, and excess", ingress, func(s *Stop) { s.delays(); s.full() }, "drop", []string{"is gone"}},
		{"ifb is down", ingress, func(s *Stop) { s.delays(); s.Ifb = &fq.Ifb{Name: "ifb2"} }, "lost", []string{"ifb2", "is down"}},
		{"ifb without fq", ingress, func(s *Stop) { s.delays(); s.Ifb = &fq.Ifb{Name: "ifb2", Up: true, State: fq.State{Kind: "pfifo"}} },
			"pass", []string{"ifb2 has pfifo", "set one of the rules here again"}},
		{"past a program by the ifb", ingress, func(s *Stop) {
			s.delays()
			s.Path = append(s.Path, foreign)
			s.Ifb = &fq.Ifb{Name: "ifb2", Up: true, State: fq.State{Kind: "fq", HasFQ: true}}
		}, "pass", []string{"theirs runs after the limit"}},
	} {
		s, p := limited(test.d), Packets{Segments: 1}
		if test.change(s); test.d == egress {
			p.Dst = far
		} else {
			p.Src = far
		}
		got := judgeStop(p, *s)
		if got.Verdict != test.verdict {
			t.Errorf("%s: the verdict is %s, want %s", test.name, got.Verdict, test.verdict)
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

// Below a VLAN its tag counts, too.
func TestJudgeTagged(t *testing.T) {
	s := limited(policy.Egress)
	s.Tags = 2
	if got := judgeStop(Packets{Dst: far, Segments: 1}, *s); got.Counted.Bytes != 1008 {
		t.Errorf("1000 bytes with two tags: %+v", got.Counted)
	}
}

// A shadow counts by its own framing, and has a bucket of its own.
func TestJudgeShadow(t *testing.T) {
	s := limited(policy.Egress)
	s.Rule.Shadow = &Shadow{Rule: s.Rule.Rule, Bucket: Bucket{Key: "10.0.0.7", State: model.State{Level: s.Rule.Capacity << model.UnitBits}}}
	s.Rule.Shadow.Framing.Overhead = 24
	got := judgeStop(Packets{Dst: far, Segments: 1}, *s)
	if got.Verdict != "pass" || *got.Proposed != (report.Proposed{Key: "10.0.0.7", Bytes: 1024, LevelBytes: 5000, CapacityBytes: 5000}) {
		t.Errorf("%s, and the shadow: %+v", got.Verdict, got.Proposed)
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
	ports, wrapped := leaves, leaves
	ports.Ports = []netinfo.Device{eth1}
	wrapped.Tunnel = &netinfo.Tunnel{Underlay: eth1.Index, Remote: near}
	own := Leg{End: near, Route: netinfo.Route{Device: lo, Local: true}}
	on := func(dev netinfo.Device, d policy.Direction) Hook {
		return Hook{Name: dev.Name, Device: dev, Direction: d, Match: d.FarSide()}
	}
	bySource := on(eth1, policy.Egress)
	bySource.Match = policy.MatchSrc
	for _, test := range []struct {
		name    string
		hook    Hook
		in, out Leg
		want    string
		address netip.Addr
	}{
		{"another device", on(eth1, policy.Egress), Leg{}, leaves, "not met, as they leave by eth0", far},
		{"the other direction", on(eth0, policy.Ingress), Leg{}, leaves, "met if they come in by eth0", netip.Addr{}},
		{"a port", on(eth1, policy.Egress), Leg{}, ports, "met if eth1 is the port that they take", far},
		{"below a tunnel", on(eth1, policy.Egress), Leg{}, wrapped, "met by them wrapped: 'shapectl explain eth1 egress 192.0.2.1'", near},
		{"below a tunnel, by source", bySource, Leg{}, wrapped, "not met, as they leave by eth0, wrapped, to 192.0.2.1", netip.Addr{}},
		{"a device that is gone", Hook{Name: "old", Direction: policy.Egress}, Leg{}, leaves, "not met", far},
		{"the loopback, from here", on(lo, policy.Egress), own, Leg{}, "met if they stay on this host", far},
		{"the loopback, to here", on(lo, policy.Ingress), Leg{}, own, "met if they stay on this host", netip.Addr{}},
		{"the loopback, to elsewhere", on(lo, policy.Egress), Leg{}, leaves, "not met, as they leave by eth0", far},
		{"no route", on(eth1, policy.Ingress), Leg{End: far, NoRoute: netinfo.ErrNoRoute}, own, "met if they come in by eth1", netip.Addr{}},
	} {
		if got := metWhen("", test.hook, test.in, test.out); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
		if got := addressAt(test.hook, Packets{Dst: far}, test.in, test.out); got != test.address {
			t.Errorf("%s: the rules compare %s, want %s", test.name, got, test.address)
		}
	}
}

// A path tells which rules are elsewhere, and one that was asked for by its device of that alone.
func TestJudgeWay(t *testing.T) {
	s := limited(policy.Ingress)
	s.Hook.Status, s.Rule.Hides = "attached, was lan0", []policy.Rule{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}}
	path := Judge(Facts{Packets: Packets{Src: far, Segments: 1}, Stops: []Stop{*s}})
	if path.Packets != "from 10.0.0.7" || path.How != "that come in by eth0" || path.Elsewhere == nil {
		t.Errorf("on a device: %+v", path)
	}
	if got := path.Hooks[0]; got.State != "attached, was lan0" || got.Hides[0].Rule != "0.0.0.0/0" || *got.Rule != "10.0.0.0/24" {
		t.Errorf("the rule: %+v", got)
	}
	path = Judge(Facts{Packets: Packets{Dst: far}, Routed: true, Elsewhere: []Elsewhere{{Hook: *s.Hook, Rule: s.Rule.Rule}}})
	if len(path.Hooks) != 0 || len(path.Elsewhere) != 1 || path.Elsewhere[0].Brief.Rule != "10.0.0.0/24" || path.Elsewhere[0].Device != "eth0" || !*path.Elsewhere[0].Attached {
		t.Errorf("on no device: %+v", path)
	}
}
