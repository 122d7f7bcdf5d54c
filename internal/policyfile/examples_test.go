package policyfile

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// TestExamples parses each example and checks some of its rules.
func TestExamples(t *testing.T) {
	type rule struct {
		device, direction, prefix, sentence string
	}
	tests := map[string]struct {
		devices []Device
		without []string // rules
		rules   []rule
	}{
		"isp.yaml": {
			devices: []Device{{Name: "eth0", L2Bytes: 14}, {Name: "eth1", L2Bytes: 14}},
			without: []string{"eth0"},
			rules: []rule{
				{"eth1", "egress", "100.64.0.0/16", "each host in 100.64.0.0/16 gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms), within pool \"north down\", weight 50; excess is marked by ECN if the packet allows it, else dropped (gcra)"},
				{"eth1", "egress", "2001:db8:4000::/36", "each /64 subnet of 2001:db8:4000::/36 gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms), within pool \"north down\", weight 50; excess is marked by ECN if the packet allows it, else dropped (gcra)"},
				{"eth1", "egress", "100.64.1.4/32", "100.64.1.4 (\"okafor\") gets 300mbit (37.5 MB/s), burst 11.25 MB (300 ms), shared fairly by its flows, within pool \"north down\", 20mbit of it guaranteed; excess is marked by ECN if the packet allows it, else dropped (gcra)"},
				{"eth1", "ingress", "2001:db8:4000:1100::/56", "2001:db8:4000:1100::/56 (\"mueller\") is limited only by pool \"mueller up\""},
				{"eth1", "egress", "198.51.100.0/28", "198.51.100.0/28 (\"bakery\") is limited only by pool \"bakery down\""},
				{"eth1", "ingress", "100.64.255.2/32", "100.64.255.2 (\"measuring\") is not limited"},
			},
		},
		"mef-profile.yaml": {
			devices: []Device{{Name: "eth0", L2Bytes: 14}, {Name: "eth1", L2Bytes: 14}},
			without: []string{"eth0"},
			rules: []rule{
				{"eth1", "egress", "10.7.1.0/24", "10.7.1.0/24 (\"north office\") as a whole gets CIR 20mbit (2.5 MB/s), CBS 131.1 kB; EIR 10mbit, EBS 131.1 kB; green packets get AF11, yellow packets get AF12, red packets are dropped (rfc4115); each packet counts 4 bytes more and at least 64 bytes"},
				{"eth1", "egress", "10.7.2.0/24", "10.7.2.0/24 (\"bank\") as a whole gets CIR 20mbit (2.5 MB/s), CBS 131.1 kB; EIR 10mbit, EBS 131.1 kB; green packets get AF11, yellow packets get AF12, red packets are dropped (rfc4115, colour-aware with LE=yellow AF12=yellow AF22=yellow); each packet counts 4 bytes more and at least 64 bytes"},
				{"eth1", "egress", "10.7.3.0/24", "10.7.3.0/24 (\"archive\") as a whole gets CIR 5mbit (625 kB/s), CBS 131.1 kB, EBS 1.049 MB; green packets get AF11, yellow packets get AF12, red packets are dropped (srtcm); each packet counts 4 bytes more and at least 64 bytes"},
				{"eth1", "egress", "10.7.4.0/22", "each host in 10.7.4.0/22 gets CIR 10mbit (1.25 MB/s), CBS 262.1 kB, EBS 0 B; green packets get AF12, yellow packets pass, red packets are dropped (srtcm); each packet counts 4 bytes more and at least 64 bytes"},
				{"eth1", "egress", "10.8.1.0/24", "10.8.1.0/24 (\"site 7 voice\") as a whole gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms), within pool \"site 7\", 30mbit of it guaranteed; excess is dropped (gcra); each packet counts 4 bytes more and at least 64 bytes"},
			},
		},
		"hosting.yaml": {
			devices: []Device{{Name: "eno1", L2Bytes: 14}, {Name: "vnet0", L2Bytes: 14}, {Name: "vnet12", L2Bytes: 14}, {Name: "tap100i0", L2Bytes: 14}, {Name: "tap104i0", L2Bytes: 14}, {Name: "tap105i0", L2Bytes: 14}, {Name: "tap117i0", L2Bytes: 14}},
			without: []string{"eno1", "tap100i0"},
			rules: []rule{
				{"vnet12", "ingress", "0.0.0.0/0", "0.0.0.0/0 is limited only by pool \"vnet12 ingress\""},
				{"tap105i0", "egress", "10.20.0.0/16", "10.20.0.0/16 (\"storage\") is not limited"},
				{"tap104i0", "egress", "::/0", "::/0 is limited only by pool \"tap104i0 egress\""},
				{"tap117i0", "ingress", "0.0.0.0/0", "0.0.0.0/0 (\"abuse\") as a whole gets 1mbit (125 kB/s), burst 131.1 kB (1.049 s); excess is dropped, and keeps the bucket full for 10s (leaky)"},
			},
		},
		"home-gateway.yaml": {
			devices: []Device{{Name: "br-lan", L2Bytes: 14}, {Name: "eth0", L2Bytes: 14}, {Name: "wlan0", L2Bytes: 14}},
			without: []string{"wlan0"},
			rules: []rule{
				{"eth0", "egress", "0.0.0.0/0", "0.0.0.0/0 is limited only by pool \"up\"; each packet counts 4 bytes more and at least 64 bytes"},
				{"eth0", "egress", "192.168.100.1/32", "192.168.100.1 (\"modem\") is not limited"},
				{"br-lan", "egress", "192.168.1.0/24", "each host in 192.168.1.0/24 gets 22mbit (2.75 MB/s), burst 825 kB (300 ms); excess is dropped (gcra)"},
				{"br-lan", "egress", "192.168.50.0/24", "192.168.50.0/24 (\"guests\") as a whole gets 10mbit (1.25 MB/s), burst 375 kB (300 ms); excess is dropped (gcra)"},
			},
		},
		"wireguard.yaml": {
			devices: []Device{{Name: "eth0", L2Bytes: 14}, {Name: "wg0", L2Bytes: 0}},
			without: []string{"eth0"},
			rules: []rule{
				{"wg0", "egress", "10.66.0.0/24", "each host in 10.66.0.0/24 gets 50mbit (6.25 MB/s), burst 1.875 MB (300 ms); excess is marked by ECN if the packet allows it, else dropped (gcra); each packet counts 60 bytes more"},
				{"wg0", "ingress", "10.70.5.0/24", "10.70.5.0/24 (\"Ostend office\") as a whole gets 5mbit (625 kB/s), burst 125 kB (200 ms); excess is marked by ECN if the packet allows it, else dropped (gcra); each packet counts 60 bytes more"},
				{"wg0", "ingress", "10.66.0.200/32", "10.66.0.200 (\"backups\") is not limited"},
			},
		},
		"dns-server.yaml": {
			devices: []Device{{Name: "eth0", L2Bytes: 14}},
			rules: []rule{
				{"eth0", "ingress", "0.0.0.0/0", "each host in 0.0.0.0/0 gets 1mbit (125 kB/s), burst 131.1 kB (1.049 s); excess is dropped (gcra)"},
				{"eth0", "ingress", "::/0", "each /64 subnet of ::/0 gets 1mbit (125 kB/s), burst 131.1 kB (1.049 s); excess is dropped (gcra)"},
				{"eth0", "egress", "192.0.2.0/24", "each flow to 192.0.2.0/24 (\"large ISP\") gets 500mbit (62.5 MB/s), burst 18.75 MB (300 ms); excess is dropped (gcra)"},
				{"eth0", "ingress", "198.51.100.53/32", "198.51.100.53 (\"secondary\") is not limited"},
			},
		},
		"backup.yaml": {
			devices: []Device{{Name: "eth0", L2Bytes: 14}},
			rules: []rule{
				{"eth0", "egress", "0.0.0.0/0", "0.0.0.0/0 as a whole gets 100mbit (12.5 MB/s), burst 3.75 MB (300 ms); excess is marked by ECN if the packet allows it, else dropped (gcra)"},
				{"eth0", "egress", "10.0.0.0/8", "10.0.0.0/8 is not limited"},
				{"eth0", "egress", "10.99.0.0/16", "10.99.0.0/16 (\"second site\") as a whole gets 500mbit (62.5 MB/s), burst 18.75 MB (300 ms); excess is marked by ECN if the packet allows it, else dropped (gcra)"},
				{"eth0", "ingress", "fc00::/7", "each host in fc00::/7 gets 2gbit (250 MB/s), burst 75 MB (300 ms); excess is dropped (gcra)"},
			},
		},
	}
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) != len(tests) {
		t.Fatalf("%d examples have %d tests: %v", len(files), len(tests), err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		t.Run(name, func(t *testing.T) {
			test := tests[name]
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			f, err := Parse(name, text)
			if err != nil {
				t.Fatal(err)
			}
			if w := f.Warnings(); len(w) > 0 {
				t.Errorf("warns: %v", w)
			}
			tables, absent, err := f.Tables(test.devices)
			if err != nil || len(absent) > 0 {
				t.Fatalf("%v, absent are %v", err, absent)
			}
			for _, d := range test.devices {
				has := slices.ContainsFunc(tables, func(table policy.Table) bool { return table.Device == d.Name })
				if without := slices.Contains(test.without, d.Name); has == without {
					t.Errorf("%s has rules: %v", d.Name, has)
				}
			}
			for _, want := range test.rules {
				if got := describe(tables, want.device, want.direction, want.prefix); got != want.sentence {
					t.Errorf("\n got %s\nwant %s", got, want.sentence)
				}
			}
			for _, table := range tables {
				// The machines are not trusted, and can forge their source address.
				exempts := slices.ContainsFunc(table.Rules, func(r policy.Rule) bool { return r.Rate == policy.Unlimited })
				if table.Direction == policy.Ingress && table.Match == policy.MatchSrc && exempts && name == "hosting.yaml" {
					t.Errorf("%s ingress exempts packets by their source", table.Device)
				}
			}
			var out bytes.Buffer
			if err := Write(&out, tables); err != nil {
				t.Fatal(err)
			}
			again, err := Parse("again.yaml", out.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			if same, _, err := again.Tables(test.devices); err != nil || !reflect.DeepEqual(same, tables) {
				t.Errorf("%v, written as\n%s", err, out.String())
			}
		})
	}
}

// Both families of a home share a pool in each direction, whose rate is below that of the line.
func TestExampleLineRates(t *testing.T) {
	text, err := os.ReadFile("../../examples/home-gateway.yaml")
	if err != nil {
		t.Fatal(err)
	}
	f, err := Parse("home-gateway.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	tables, _, err := f.Tables([]Device{{Name: "eth0", L2Bytes: 14}})
	if err != nil {
		t.Fatal(err)
	}
	rates := map[policy.Within]policy.Rate{}
	for _, table := range tables {
		for _, r := range table.Rules {
			if table.IsPools() {
				rates[policy.Within(r.Label.Name)] = r.Rate
			}
		}
	}
	for direction, line := range map[policy.Direction]policy.Rate{policy.Egress: 10e6, policy.Ingress: 50e6} {
		var of []policy.Within
		for _, table := range tables {
			for _, r := range table.Rules {
				if table.Direction == direction && !table.IsPools() && r.Prefix.Bits() == 0 {
					of = append(of, r.Within)
				}
			}
		}
		if len(of) != 2 || of[0] != of[1] || rates[of[0]] == 0 || rates[of[0]] > line {
			t.Errorf("%v: rules for all hosts are within %q, with %v of %v", direction, of, rates, line)
		}
	}
}

// describe returns the sentence of a rule without its device, and the rate of its shadow.
func describe(tables []policy.Table, device, direction, prefix string) string {
	for _, table := range tables {
		for _, r := range table.Rules {
			if table.Device == device && table.Direction.String() == direction && r.Prefix == netip.MustParsePrefix(prefix) {
				shadow := r.Shadow
				r.Shadow = policy.Shadow{}
				sentence := r.Says(table.Match)
				if shadow != (policy.Shadow{}) {
					sentence += "; proposed is " + shadow.Rate.String()
				}
				return sentence
			}
		}
	}
	return "nothing"
}
