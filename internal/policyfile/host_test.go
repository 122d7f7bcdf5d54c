package policyfile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	tablet = policy.MAC{0x3c, 0x22, 0xfb, 0x12, 0x34, 0x56}
	phone  = policy.MAC{0x3c, 0x22, 0xfb, 0, 0, 1}
)

func addresses(all ...string) (parsed []netip.Addr) {
	for _, a := range all {
		parsed = append(parsed, netip.MustParseAddr(a))
	}
	return parsed
}

func bridge(name string) Device {
	return Device{Name: name, L2Bytes: 14, Neighbours: map[policy.MAC][]netip.Addr{
		tablet: addresses("2001:db8::7", "192.168.1.7"),
		phone:  addresses("192.168.1.8"),
	}}
}

// listed lists the rules and pools of tables, a line for each.
func listed(tables []policy.Table) string {
	var out strings.Builder
	for _, t := range tables {
		for _, r := range t.Rules {
			who := fmt.Sprintf("%s %v %v %s", t.Device, t.Direction, r.Prefix, r.Label.Name)
			if r.Pool {
				who = "pool " + r.Label.Name
			}
			fmt.Fprintf(&out, "%s: %v", who, r.Rate)
			if r.Within != "" {
				fmt.Fprintf(&out, " within %s", r.Within)
			}
			if r.Framing.Overhead != 0 {
				fmt.Fprintf(&out, " overhead %d", r.Framing.Overhead)
			}
			fmt.Fprintf(&out, " (%s; %v)\n", r.Label.Note, r.Label.Host)
		}
	}
	return out.String()
}

func sortedLines(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// hostPolicies are policies with hosts, and what they mean on a device with the neighbours of bridge.
var hostPolicies = []struct{ text, device, want string }{
	{`devices:
  br-lan:
    egress:
      3c:22:fb:12:34:56: {rate: 5mbit, name: tablet, note: Anna's, overhead: 24}
      192.168.1.0/24: 20mbit
      3C-22-FB-00-00-01: unlimited
    ingress:
      3c22.fb12.3456: 2mbit
`, "br-lan", `
			pool br-lan egress tablet: 5mbit (Anna's; 3c:22:fb:12:34:56)
			pool br-lan ingress 3c:22:fb:12:34:56: 2mbit (; 3c:22:fb:12:34:56)
			br-lan egress 192.168.1.0/24 : 20mbit (; )
			br-lan egress 192.168.1.7/32 tablet: unlimited within br-lan egress tablet overhead 24 (Anna's; 3c:22:fb:12:34:56)
			br-lan egress 192.168.1.8/32 3c:22:fb:00:00:01: unlimited (; 3c:22:fb:00:00:01)
			br-lan egress 2001:db8::7/128 tablet: unlimited within br-lan egress tablet overhead 24 (Anna's; 3c:22:fb:12:34:56)
			br-lan ingress 192.168.1.7/32 3c:22:fb:12:34:56: unlimited within br-lan ingress 3c:22:fb:12:34:56 (; 3c:22:fb:12:34:56)
			br-lan ingress 2001:db8::7/128 3c:22:fb:12:34:56: unlimited within br-lan ingress 3c:22:fb:12:34:56 (; 3c:22:fb:12:34:56)`},
	// A pattern, within the pool of its direction. A rule for an address wins over its host.
	{`devices:
  br*:
    egress:
      pool: 50mbit
      3c:22:fb:12:34:56: {rate: 5mbit, name: tablet}
      192.168.1.7: 1mbit
      3c:22:fb:00:00:01: unlimited
`, "br0", `
			pool br0 egress: 50mbit (; )
			pool br0 egress tablet: 5mbit within br0 egress (; 3c:22:fb:12:34:56)
			br0 egress 192.168.1.7/32 : 1mbit within br0 egress (; )
			br0 egress 192.168.1.8/32 3c:22:fb:00:00:01: unlimited within br0 egress (; 3c:22:fb:00:00:01)
			br0 egress 2001:db8::7/128 tablet: unlimited within br0 egress tablet (; 3c:22:fb:12:34:56)`},
	// One quota for all addresses.
	{`devices: {br-lan: {egress: {3c:22:fb:12:34:56: {quota: 20gb/month, then: 1mbit, name: guest}}}}`, "br-lan", `
			pool br-lan egress guest: 400gbit (; 3c:22:fb:12:34:56)
			br-lan egress 192.168.1.7/32 guest: unlimited within br-lan egress guest (; 3c:22:fb:12:34:56)
			br-lan egress 2001:db8::7/128 guest: unlimited within br-lan egress guest (; 3c:22:fb:12:34:56)`},
	// Two hosts with one limit. Defaults and plans that rules have.
	{`pools: {kids: {rate: 8mbit, share: member}}
plans: {child: {within: kids, note: bedtime}, home: {rate: 3mbit, each: host}}
defaults: {each: host, capacity: 50kb, fail: closed}
devices:
  br-lan:
    name: children
    egress: {3c:22:fb:12:34:56: child, 3c:22:fb:00:00:01: {plan: home, within: kids, weight: 2, name: phone}}
`, "br-lan", `
			pool kids: 8mbit (; )
			pool br-lan egress phone: 3mbit within kids (; 3c:22:fb:00:00:01)
			br-lan egress 192.168.1.7/32 3c:22:fb:12:34:56: unlimited within kids (bedtime; 3c:22:fb:12:34:56)
			br-lan egress 192.168.1.8/32 phone: unlimited within br-lan egress phone (; 3c:22:fb:00:00:01)
			br-lan egress 2001:db8::7/128 3c:22:fb:12:34:56: unlimited within kids (bedtime; 3c:22:fb:12:34:56)`},
}

func TestHosts(t *testing.T) {
	for _, test := range hostPolicies {
		f := mustParse(t, test.text)
		tables := mustTables(t, f, bridge(test.device))
		if got, want := sortedLines(listed(tables)), sortedLines(test.want); got != want {
			t.Errorf("%s\ngot\n%s\nwant\n%s", test.text, got, want)
		}
		for _, table := range tables {
			for i := 1; i < len(table.Rules); i++ {
				if policy.ComparePrefix(table.Rules[i-1].Prefix, table.Rules[i].Prefix) >= 0 {
					t.Errorf("%s: %v is not in order", test.text, table.Rules[i].Prefix)
				}
			}
			for i := range table.Rules {
				if err := table.Rules[i].Validate(); err != nil {
					t.Error(err)
				}
			}
		}
	}
}

// Without neighbours, hosts have their pools.
func TestHostsWithoutNeighbours(t *testing.T) {
	f := mustParse(t, "devices: {br*: {egress: {3c:22:fb:12:34:56: {rate: 5mbit, name: tablet}}}}\n")
	if got := listed(mustTables(t, f, Device{Name: "br0", L2Bytes: 14})); got != "pool br0 egress tablet: 5mbit (; 3c:22:fb:12:34:56)\n" {
		t.Error(got)
	}
	if macs := f.MACs(); len(macs) != 1 || !macs[tablet] {
		t.Error(macs)
	}
}

// A host has a bounded number of rules.
func TestManyAddresses(t *testing.T) {
	f := mustParse(t, "devices: {br0: {egress: {3c:22:fb:12:34:56: 5mbit}}}\n")
	d := Device{Name: "br0", L2Bytes: 14, Neighbours: map[policy.MAC][]netip.Addr{}}
	for a := netip.MustParseAddr("2001:db8::"); len(d.Neighbours[tablet]) <= MaxAddresses; a = a.Next() {
		d.Neighbours[tablet] = append(d.Neighbours[tablet], a)
	}
	tables := mustTables(t, f, d)
	if rules := tables[1].Rules; len(rules) != MaxAddresses {
		t.Errorf("%d rules", len(rules))
	}
}

func TestHostErrors(t *testing.T) {
	const mac = "3c:22:fb:12:34:56"
	for _, test := range []struct{ entries, want string }{
		{"01:00:5e:00:00:01: 1mbit", "1:29: MAC address 01:00:5e:00:00:01 is one of a group, not of a host"},
		{"00:00:00:00:00:00: 1mbit", "1:29: MAC address 00:00:00:00:00:00 is one that no host has"},
		{"3c:22:fb:12:34: 1mbit", `1:29: MAC address "3c:22:fb:12:34" does not have six bytes`},
		{"3c-22-fb-12-34-56-78-9a: 1mbit", "does not have six bytes"},
		{mac + ": 1mbit, 3C-22-FB-12-34-56: 2mbit", "1:55: host 3c:22:fb:12:34:56 appears twice, first in line 1"},
		{mac + ": {rate: 1mbit, name: a}, 3c:22:fb:00:00:01: {rate: 1mbit, name: a}", "1:72: host a has the name of the one in line 1"},
		{"match: src, " + mac + ": 1mbit", "1:41: host 3c:22:fb:12:34:56 is at the far side, but this direction matches src"},
		{mac + ": {rate: 1mbit, each: /64}", "each has no use in a pool"},
		{mac + ": {rate: 1mbit, share: member}", "share member would divide the rate among the addresses of one host"},
		{mac + ": {rate: 1mbit, guarantee: 1mbit}", "guarantee 1mbit has no use with no pool"},
		{mac + ": {within: up, guarantee: 1mbit}", "1:72: guarantee is for all addresses of a host together"},
		{mac + ": {rate: unlimited, capacity: 1mb}", "capacity has no use in an unlimited rule"},
		{mac + ": {note: x}", "rate is missing"},
		{mac + ": {rate: 1mbit, cluster: x}", "a host cannot have cluster; write it in a pool"},
		{mac + ": {rate: 1mbit, name: taken}", `pool "br0 egress taken" of the host is also among the pools`},
		{mac + ": {rate: 1mbit, name: a}, 10.0.0.1: {within: br0 egress a}", `pool "br0 egress a" is unknown`},
		{mac + ": {rate: 1mbit, note: " + strings.Repeat("x", 257) + "}", "at most 256 are allowed"},
		{mac + ": {rate: 1mbit, name: " + strings.Repeat("x", 60) + "}", "has 71 bytes, and at most 64 are allowed"},
		{mac + ": routed", "plan routed"},
	} {
		text := "devices: {br0: {egress: {   " + test.entries + "}}}\npools: {up: 2mbit, br0 egress taken: 1mbit}\nplans: {routed: {rate: 1mbit, each: /64}}\n"
		_, err := Parse("p.yaml", []byte(text))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", test.entries, err, test.want)
		}
	}
	for _, test := range []struct{ text, want string }{
		{"devices: {br0: {" + mac + ": 1mbit}}\n", "host 3c:22:fb:12:34:56 is not in a direction"},
		{"devices: {br0: {egress: '" + mac + " 1mbit'}}\n", "a colon and a space are missing"},
		{"pools: {up: 1mbit}\ndevices: {br0: {egress: {" + mac + ": {rate: 2mbit, within: up, guarantee: 2mbit}}}}\n", `1:9: pool "up": rate 1mbit is less than the guarantees`},
	} {
		_, err := Parse("p.yaml", []byte(test.text))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", test.text, err, test.want)
		}
	}
}

// A written policy means what is in force.
func TestWriteHosts(t *testing.T) {
	for _, test := range hostPolicies {
		for _, d := range []Device{bridge(test.device), {Name: test.device, L2Bytes: 14}} {
			tables := mustTables(t, mustParse(t, test.text), d)
			text := written(t, tables)
			if strings.Contains(text, "follows") {
				t.Errorf("written without its hosts:\n%s", text)
			}
			if got, want := listed(mustTables(t, mustParse(t, text), d)), listed(tables); got != want {
				t.Errorf("%s\nmeans\n%s\nand ought to mean\n%s", text, got, want)
			}
		}
	}
}

// Rules that no entry of a host would make are written as they are.
func TestWriteOddHosts(t *testing.T) {
	tables := mustTables(t, mustParse(t, hostPolicies[0].text), bridge("br-lan"))
	change := func(all bool, f func(*policy.Rule)) {
		t.Helper()
		changed := slices.Clone(tables)
		for i := range changed {
			changed[i].Rules = slices.Clone(changed[i].Rules)
		}
		for i := range changed[1].Rules {
			if r := &changed[1].Rules[i]; r.Within == "br-lan egress tablet" && (all || i == 1) {
				f(r)
			}
		}
		text := written(t, changed)
		if !strings.Contains(text, "pools:\n  br-lan egress tablet: ") || !strings.Contains(text, "      2001:db8::7: {") {
			t.Errorf("got\n%s", text)
		}
		if got := listed(mustTables(t, mustParse(t, text), bridge("br-lan"))); got != listed(changed) {
			t.Errorf("%s\nmeans\n%s\nand ought to mean\n%s", text, got, listed(changed))
		}
	}
	change(false, func(r *policy.Rule) { r.Framing.Overhead = 8 })
	for _, all := range []bool{true, false} {
		change(all, func(r *policy.Rule) { r.Label.Note = "" })
		change(all, func(r *policy.Rule) { r.Label.Name = "phone" })
		change(all, func(r *policy.Rule) { r.Rate, r.Capacity = 1e6, 1<<17 })
	}
	other, err := policy.Limit{Within: "br-lan egress tablet"}.Rule(single)
	if err != nil {
		t.Fatal(err)
	}
	text := written(t, append(slices.Clone(tables), policy.Table{Device: "eth0", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{other}}))
	if !strings.Contains(text, "pools:\n  br-lan egress tablet: ") {
		t.Errorf("another device draws from the pool of a host: got\n%s", text)
	}
}
