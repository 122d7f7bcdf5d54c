package line

import (
	"reflect"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

const others = `
pools:
  uplink: 1gbit
  eth1 egress: {rate: 5mbit, line: eth1, owner: br-lan egress tv}
devices:
  eth0:
    egress: {match: src, 192.168.1.20: {rate: unlimited, name: server}, 192.168.1.30: {rate: 1mbit, within: uplink}}
  eth1:
    egress: {any: {within: eth1 egress}}
  br-lan:
    egress: {192.168.1.0/24: {rate: 5mbit, each: host}}
`

// What a line makes is found again among other rules and pools, which stay as they are.
func TestDivide(t *testing.T) {
	l := docsis()
	text, err := l.Policy()
	if err != nil {
		t.Fatal(err)
	}
	rest := tables(t, []byte(others), "eth0", "eth1", "br-lan")
	s := Divide("", "eth0", rest)
	if s.Line != nil || !reflect.DeepEqual(s.Others, rest) {
		t.Errorf("before there is a line, it is %+v; others: %+v", s.Line, s.Others)
	}
	own := tables(t, text, "eth0")
	all, err := s.With(own)
	if err != nil {
		t.Fatal(err)
	}
	s = Divide("", "eth0", all)
	if !reflect.DeepEqual(s.Line, own) || !reflect.DeepEqual(s.Others, rest) {
		t.Errorf("the line is %+v, want %+v; others: %+v, want %+v", s.Line, own, s.Others, rest)
	}
	if again, err := s.With(own); err != nil || !reflect.DeepEqual(again, all) {
		t.Errorf("once more: %+v, %v", again, err)
	}
	if without, err := s.With(nil); err != nil || !reflect.DeepEqual(without, rest) {
		t.Errorf("off: %+v, %v", without, err)
	}
	if m := s.Match(policy.Egress); m != policy.MatchSrc {
		t.Errorf("match is %v", m)
	}
	if m := Divide("", "eth2", all).Match(policy.Ingress); m != policy.MatchSrc {
		t.Errorf("without rules, match is %v", m)
	}
	if devices := s.Devices(); !reflect.DeepEqual(devices, []string{"eth0"}) {
		t.Errorf("devices are %v", devices)
	}
}

// A line is found by the old name of its device and by the new one.
func TestDivideRenamed(t *testing.T) {
	text, err := docsis().Policy()
	if err != nil {
		t.Fatal(err)
	}
	own := tables(t, text, "eth0")
	for i := range own {
		if !own[i].IsPools() {
			own[i].Device = "wan0"
		}
	}
	for _, device := range []string{"eth0", "wan0"} {
		if s := Divide("", device, own); !reflect.DeepEqual(s.Line, own) || len(s.Others) > 0 {
			t.Errorf("by the name %s, the line is %+v; others: %+v", device, s.Line, s.Others)
		}
	}
	if s := Divide("", "eth1", own); s.Line != nil {
		t.Errorf("another device has the line %+v", s.Line)
	}
}

func TestConflicts(t *testing.T) {
	text, err := docsis().Policy()
	if err != nil {
		t.Fatal(err)
	}
	own := tables(t, text, "eth0")
	up := docsis()
	up.Down = Direction{}
	text, err = up.Policy()
	if err != nil {
		t.Fatal(err)
	}
	onlyUp := tables(t, text, "eth0")
	flows := docsis()
	flows.Share, flows.Up.Match, flows.Down.Match = policy.ShareFlow, policy.MatchDst, policy.MatchSrc
	if text, err = flows.Policy(); err != nil {
		t.Fatal(err)
	}
	otherMatch := tables(t, text, "eth0")
	for _, c := range []struct {
		name, have string
		want       []policy.Table
		says       string
	}{
		{"a rule for all IPv4", "devices: {eth0: {egress: {match: src, 0.0.0.0/0: 1mbit}}}", own,
			"eth0 egress has a rule for 0.0.0.0/0 that this line did not make; delete it first: 'shapectl -n x delete eth0 egress 0.0.0.0/0'"},
		{"a rule for all IPv6 in a pool", "pools: {p: 1mbit}\ndevices: {eth0: {ingress: {match: dst, '::/0': {within: p}}}}", own,
			"eth0 ingress has a rule for ::/0 that this line did not make"},
		{"a pool with that name", "devices: {eth0: {egress: {match: src, pool: 1mbit, 192.0.2.1: {}}}}", own,
			`there is a pool "eth0 egress" that this line did not make`},
		{"a pool of another line's name", "pools: {eth0 ingress: {rate: 1mbit, line: eth1, owner: br-lan egress tv}}\ndevices: {}", own,
			`there is a pool "eth0 ingress" that this line did not make`},
		{"the other address", "devices: {eth0: {egress: {192.0.2.1: unlimited}}}", own, "match the dst address of packets"},
		{"the other address, and flows", "devices: {eth0: {egress: {192.0.2.1: unlimited}}}", otherMatch, ""},
		{"a rule for all in the other direction", "devices: {eth0: {ingress: {any: 1mbit}}}", onlyUp, ""},
		{"a rule for one host", "devices: {eth0: {egress: {match: src, 192.0.2.1: unlimited}}}", own, ""},
		{"another device", "devices: {eth1: {egress: {any: 1mbit}}}", own, ""},
		{"of the line, but with the other match", "pools: {eth0 egress: {rate: 1mbit, line: eth0, owner: eth0 egress}}\ndevices: {eth0: {egress: {any: {within: eth0 egress}}}}", own,
			"the line on eth0 is shared by connections, and now would be by hosts with addresses of their own; to change that, remove it first: 'shapectl -n x line eth0 off'"},
		{"a rule within a pool that goes", "pools: {eth0 egress: {rate: 1mbit, line: eth0, owner: eth0 egress}}\ndevices: {eth0: {egress: {192.0.2.1: {rate: 1mbit, within: eth0 egress}}}}", nil,
			`other limits need pools of the line that would go; delete them first, or move them with --within none: eth0 egress 192.0.2.1/32: within "eth0 egress": there is no such pool`},
		{"a rule within a pool that stays", "pools: {eth0 egress: {rate: 1mbit, line: eth0, owner: eth0 egress}}\ndevices: {eth0: {egress: {match: src, 192.0.2.1: {rate: 1mbit, within: eth0 egress}}}}", own, ""},
		{"a pool within a pool that goes", "pools: {eth0 ingress: {rate: 1mbit, line: eth0, owner: eth0 ingress}, p: {rate: 1mbit, within: eth0 ingress}}\ndevices: {}", onlyUp,
			`other limits need pools of the line that would go; delete them first, or move them with --within none: pool "p": within "eth0 ingress": there is no such pool`},
	} {
		s := Divide("x", "eth0", tables(t, []byte(c.have), devicesIn(c.have)...))
		_, err := s.With(c.want)
		switch {
		case c.says == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s: %v, want %q", c.name, err, c.says)
		}
	}
}

func devicesIn(text string) (names []string) {
	for _, name := range []string{"eth0", "eth1"} {
		if _, devices, _ := strings.Cut(text, "devices:"); strings.Contains(devices, name+":") {
			names = append(names, name)
		}
	}
	return names
}
