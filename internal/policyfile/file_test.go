package policyfile

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

const small = `# a comment
defaults:
  each: host
plans:
  gold: {rate: 100mbit, capacity: 100ms}
  silver: {rate: 50mbit, shadow: {rate: 40mbit}}
devices:
  tap*:
    egress:
      10.0.0.0/24: 10mbit
      10.0.0.9: unlimited
      10.0.1.7: gold
      2001:db8::/32: {plan: gold, each: /64, excess: ecn}
    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, shadow: {rate: 500mbit, each: host}, overhead: ethernet}
      ::/0: silver
`

func mustParse(t *testing.T, text string) *File {
	t.Helper()
	f, err := Parse("p.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func mustTables(t *testing.T, f *File, devices ...Device) []policy.Table {
	t.Helper()
	tables, absent, err := f.Tables(devices)
	if err != nil || len(absent) > 0 {
		t.Fatalf("%v, absent are %v", err, absent)
	}
	return tables
}

// written returns the file that Write makes of tables.
func written(t *testing.T, tables []policy.Table) string {
	t.Helper()
	var out strings.Builder
	if err := Write(&out, tables); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestTables compares the rules of files with what Write makes of them.
func TestTables(t *testing.T) {
	for _, test := range []struct {
		name, text, want string
		devices          []Device
	}{
		{"each kind", small, `plans:
  gold: {rate: 100mbit, capacity: 1250000b, each: host}
  silver: {rate: 50mbit, each: host, shadow: {rate: 40mbit}}
devices:
  tap0:
    egress:
      10.0.0.0/24: {rate: 10mbit, each: host}
      10.0.0.9: unlimited
      10.0.1.7: gold
      2001:db8::/32: {plan: gold, each: /64, excess: ecn}
    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, each: host, overhead: 24, mpu: 84, shadow: {rate: 500mbit, each: host}}
      ::/0: silver
  tapwg:
    egress:
      10.0.0.0/24: {rate: 10mbit, each: host}
      10.0.0.9: unlimited
      10.0.1.7: gold
      2001:db8::/32: {plan: gold, each: /64, excess: ecn}
    ingress:
      match: dst
      0.0.0.0/0: {rate: 1gbit, each: host, overhead: 38, mpu: 84, shadow: {rate: 500mbit, each: host}}
      ::/0: silver
`, []Device{{Name: "tapwg", L2Bytes: 0}, {Name: "lo", L2Bytes: 0}, {Name: "tap0", L2Bytes: 14}}},

		{"the narrowest decides", `
defaults: {rate: 1mbit, capacity: 64kb, each: host, excess: ecn, fail: closed, shadow: 512kbit, algorithm: leaky}
plans: {p: {each: flow}}
devices:
  eth0:
    defaults: {rate: 2mbit, shadow: none, penalty: fill}
    egress:
      defaults: {cir: 3mbit, penalty: none}
      10.0.0.0/24: {}
      10.0.1.0/24: {plan: p, excess: drop}
      10.0.2.0/24: unlimited
      10.0.3.0/24: {rate: unlimited, algorithm: gcra}
    ingress: {10.0.0.0/24: 4mbit}
  eth1: {egress: {10.0.0.0/24: p, 10.0.1.0/24: {shadow: {rate: 256kbit, burst: 100ms}}}}
`, `plans:
  p: {rate: 3mbit, capacity: 64kb, algorithm: leaky, each: flow, fail: closed}
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 3mbit, capacity: 64kb, algorithm: leaky, each: host, excess: ecn, fail: closed}
      10.0.1.0/24: p
      10.0.2.0/24: {rate: unlimited, algorithm: leaky, fail: closed}
      10.0.3.0/24: {rate: unlimited, fail: closed}
    ingress:
      10.0.0.0/24: {rate: 4mbit, capacity: 64kb, algorithm: leaky, each: host, excess: ecn, penalty: fill, fail: closed}
  eth1:
    egress:
      10.0.0.0/24: {plan: p, rate: 1mbit, excess: ecn, shadow: {rate: 512kbit}}
      10.0.1.0/24: {rate: 1mbit, capacity: 64kb, algorithm: leaky, each: host, excess: ecn, fail: closed, shadow: {rate: 256kbit, capacity: 3200b}}
`, []Device{{Name: "eth0", L2Bytes: 14}, {Name: "eth1", L2Bytes: 14}}},

		{"queue options of rules that do not delay", `
defaults: {excess: delay, queue: 40ms, ecn-above: never, order: sparse-first}
plans: {calls: {rate: 2mbit, queue: 10ms}, games: {rate: 3mbit, order: sparse-first}}
devices:
  eth0:
    egress:
      10.0.0.0/24: 10mbit
      10.0.1.0/24: {rate: 10mbit, excess: drop}
      10.0.2.0/24: {rate: 10mbit, algorithm: leaky}
      10.0.3.0/24: {rate: 10mbit, algorithm: leaky, capacity: 20ms, ecn-above: 1ms}
      10.0.4.0/24: unlimited
      10.0.5.0/24: calls
      10.0.6.0/24: {plan: calls, excess: ecn}
      10.0.7.0/24: {plan: calls, algorithm: leaky}
      10.0.8.0/24: {rate: 10mbit, capacity: 64kb, queue: 20000, ecn-above: 7ms}
      10.0.9.0/24: {rate: 10mbit, each: flow, order: fifo}
      10.0.10.0/24: {rate: 10mbit, each: flow}
      10.0.11.0/24: {plan: games, each: flow}
      10.0.12.0/24: {plan: games, each: host}
    ingress:
      defaults: {excess: drop}
      10.0.0.0/24: 10mbit
      10.0.1.0/24: {rate: 10mbit, excess: delay}
`, `plans:
  calls: {rate: 2mbit, excess: delay, queue: 2500b, ecn-above: never, order: sparse-first}
  games: {rate: 3mbit, each: flow, excess: delay, queue: 15000b, ecn-above: never}
devices:
  eth0:
    egress:
      10.0.0.0/24: {rate: 10mbit, excess: delay, queue: 50000b, ecn-above: never, order: sparse-first}
      10.0.1.0/24: 10mbit
      10.0.2.0/24: {rate: 10mbit, algorithm: leaky, excess: delay, ecn-above: never}
      10.0.3.0/24: {rate: 10mbit, capacity: 25000b, algorithm: leaky, excess: delay, ecn-above: 1ms}
      10.0.4.0/24: unlimited
      10.0.5.0/24: calls
      10.0.6.0/24: {plan: calls, excess: ecn}
      10.0.7.0/24: {plan: calls, algorithm: leaky}
      10.0.8.0/24: {rate: 10mbit, capacity: 64kb, excess: delay, queue: 20000b, ecn-above: 7ms, order: sparse-first}
      10.0.9.0/24: {rate: 10mbit, each: flow, excess: delay, queue: 50000b, ecn-above: never}
      10.0.10.0/24: {rate: 10mbit, each: flow, excess: delay, queue: 50000b, ecn-above: never}
      10.0.11.0/24: games
      10.0.12.0/24: {plan: games, each: host, order: sparse-first}
    ingress:
      10.0.0.0/24: 10mbit
      10.0.1.0/24: {rate: 10mbit, excess: delay, queue: 50000b, ecn-above: never, order: sparse-first}
`, []Device{{Name: "eth0", L2Bytes: 14}}},

		{"pools", `
defaults: {each: host, excess: ecn}
plans:
  gold: {rate: 20mbit, within: ap-1, guarantee: 1mbit, members: 5}
  calls: {within: ap-1, guarantee: 1mbit}
pools:
  both: 50mbit
  uplink: {rate: 1gbit, share: member}
  ap-1: {rate: 100mbit, within: uplink, guarantee: 90mbit, weight: 4, share: /64, note: "on the roof: \"7\""}
  site: {rate: 1gbit, cluster: "site: 7", cluster-weight: 3, cluster-floor: 2mbit, cluster-safe: 8kbit}
  fixed: {rate: 1gbit, cluster: fixed, cluster-share: 2mbit}
  "null": {rate: 1mbit, within: "Müller & Söhne: #1"}
  'yes': 1mbit
  "Müller & Söhne: #1": {rate: 10mbit, excess: delay, capacity: 64kb}
devices:
  eth0:
    defaults: {weight: 2}
    egress:
      10.0.0.7: {rate: 20mbit, within: ap-1, guarantee: 5mbit, each: all, weight: 1}
      10.0.0.8: gold
      10.0.0.9: {plan: gold, within: none}
      10.0.0.10: {plan: gold, each: all}
      10.0.0.11: {plan: gold, guarantee: none}
      10.0.0.12: {plan: gold, rate: unlimited, guarantee: none, weight: 1}
      10.0.0.13: calls
      10.0.0.14: {within: both, overhead: 4}
      10.0.0.15: {rate: 1mbit, share: flow, each: all}
      2001:db8:7::/48: {within: "null", name: x}
    ingress:
      defaults: {within: both, guarantee: 10kbit, members: 5}
      10.0.0.0/24: {rate: 1mbit}
      10.0.0.1: {}
      10.0.0.2: unlimited
      10.0.0.3: {rate: unlimited, within: ""}
`, `plans:
  calls: {guarantee: 1mbit, weight: 2}
  gold: {rate: 20mbit, each: host, excess: ecn, guarantee: 1mbit, members: 5, weight: 2}
pools:
  "Müller & Söhne: #1": {rate: 10mbit, capacity: 64kb, excess: delay}
  ap-1: {rate: 100mbit, excess: ecn, within: uplink, guarantee: 90mbit, weight: 4, share: /64, note: "on the roof: \"7\""}
  both: {rate: 50mbit, excess: ecn}
  fixed: {rate: 1gbit, excess: ecn, cluster: fixed, cluster-share: 2mbit}
  "null": {rate: 1mbit, excess: ecn, within: "Müller & Söhne: #1"}
  site: {rate: 1gbit, excess: ecn, cluster: "site: 7", cluster-weight: 3, cluster-floor: 2mbit, cluster-safe: 8kbit}
  uplink: {rate: 1gbit, excess: ecn, share: member}
  yes: {rate: 1mbit, excess: ecn}
devices:
  eth0:
    egress:
      10.0.0.7: {rate: 20mbit, excess: ecn, within: ap-1, guarantee: 5mbit}
      10.0.0.8: {plan: gold, within: ap-1}
      10.0.0.9: {plan: gold, rate: 20mbit, each: host, within: none}
      10.0.0.10: {plan: gold, each: all, within: ap-1}
      10.0.0.11: {plan: gold, within: ap-1, guarantee: none}
      10.0.0.12: {plan: gold, rate: unlimited, within: ap-1, guarantee: none, weight: 1}
      10.0.0.13: {plan: calls, within: ap-1}
      10.0.0.14: {overhead: 4, within: both, weight: 2}
      10.0.0.15: {rate: 1mbit, excess: ecn, share: flow}
      2001:db8:7::/48: {within: "null", weight: 2, name: x}
    ingress:
      10.0.0.0/24: {rate: 1mbit, each: host, excess: ecn, within: both, guarantee: 10kbit, members: 5, weight: 2}
      10.0.0.1: {within: both, guarantee: 10kbit, weight: 2}
      10.0.0.2: {within: both, guarantee: 10kbit, weight: 2}
      10.0.0.3: unlimited
`, []Device{{Name: "eth0", L2Bytes: 14}}},

		{"names and notes", `
plans:
  gold-1: {rate: 100mbit, excess: ecn, capacity: 100ms, name: Gold 100, note: sold until 2024}
  silver: 50mbit
devices:
  eth0:
    egress:
      10.0.0.1: gold-1
      10.0.0.2: {plan: gold-1, name: alice}
      10.0.0.3: {plan: gold-1, name: "O'Brien, \"Bob\"", note: pays late}
      10.0.0.4: {plan: gold-1, note: "", rate: 300mbit}
      10.0.0.5: {plan: gold-1, rate: unlimited}
      10.0.0.6: {plan: silver, name: "alice "}
      10.0.0.7:
        name: Müller
        rate: 1mbit
      any: {rate: 1gbit, name: line, note: "\u200d"}
`, `plans:
  Gold-100: {rate: 100mbit, capacity: 1250000b, excess: ecn, name: Gold 100, note: sold until 2024}
  silver: 50mbit
devices:
  eth0:
    egress:
      0.0.0.0/0: {rate: 1gbit, name: line, note: "\u200d"}
      10.0.0.1: Gold-100
      10.0.0.2: {plan: Gold-100, name: alice}
      10.0.0.3: {plan: Gold-100, name: "O'Brien, \"Bob\"", note: pays late}
      10.0.0.4: {plan: Gold-100, rate: 300mbit, capacity: 3750000b, note: ""}
      10.0.0.5: {plan: Gold-100, rate: unlimited}
      10.0.0.6: {plan: silver, name: "alice "}
      10.0.0.7: {rate: 1mbit, name: Müller}
      ::/0: {rate: 1gbit, name: line, note: "\u200d"}
`, []Device{{Name: "eth0", L2Bytes: 14}}},

		{"names of devices and directions", `
plans:
  silver: {rate: 50mbit, note: of the plan}
devices:
  eth0:
    name: alice
    note: site 7
    egress:
      any: silver
      10.0.0.1: {rate: 1mbit, name: ""}
      10.0.0.2: {rate: 1mbit, note: "", name: bob}
    ingress:
      name: alice, up
      note: ""
      defaults: {fail: closed}
      10.0.0.1: 1mbit
`, `plans:
  silver: {rate: 50mbit, note: of the plan}
devices:
  eth0:
    egress:
      0.0.0.0/0: {plan: silver, name: alice}
      10.0.0.1: {rate: 1mbit, note: site 7}
      10.0.0.2: {rate: 1mbit, name: bob}
      ::/0: {plan: silver, name: alice}
    ingress:
      10.0.0.1: {rate: 1mbit, fail: closed, name: "alice, up"}
`, []Device{{Name: "eth0", L2Bytes: 14}}},

		{"a device name overrides patterns", `
devices:
  "*": {egress: {0.0.0.0/0: 1mbit}}
  tap1: {ingress: {0.0.0.0/0: 2mbit}}
  tap2: {}
  'a\*': {egress: {0.0.0.0/0: 3mbit}}
`, `devices:
  "a\\*":
    egress:
      0.0.0.0/0: 3mbit
  ab:
    egress:
      0.0.0.0/0: 1mbit
  tap1:
    ingress:
      0.0.0.0/0: 2mbit
`, []Device{{Name: "tap2", L2Bytes: 14}, {Name: "ab", L2Bytes: 14}, {Name: "tap1", L2Bytes: 14}, {Name: "a*", L2Bytes: 14}}},

		{"numbers are bits per second and bytes", `
devices: {eth0: {egress: {10.0.0.0/24: 1000000, 10.0.1.0/24: {rate: 8000000, capacity: 250000, overhead: -4, mpu: 64}}}}
`, `devices:
  eth0:
    egress:
      10.0.0.0/24: 1mbit
      10.0.1.0/24: {rate: 8mbit, capacity: 250000b, overhead: -4, mpu: 64}
`, []Device{{Name: "eth0", L2Bytes: 14}}},

		{"colours", `
colours: {AF12: yellow, cs1: red, 63: red}
pools: {uplink: {rate: 1gbit, share: host}}
defaults: {algorithm: trtcm, pir: 20mbit, excess: ecn, colour-aware: true, yellow: dscp:AF12}
devices:
  eth0:
    egress:
      10.0.0.1: 10mbit
      10.0.0.2: {cir: 10mbit, cbs: 300ms, pbs: 100ms, pir: 30mbit, green: ecn, red: pass, shadow: {rate: 5mbit}}
      10.0.0.3: {rate: 10mbit, colours: {BE: yellow}, each: host, yellow: dscp:0, shadow: {rate: 5mbit, pir: 9mbit, pbs: 64kb}}
      10.0.0.4: {rate: 10mbit, colours: "AF13=red", algorithm: srtcm, ebs: 64kb}
      10.0.0.5: {rate: 10mbit, colour-aware: false, algorithm: rfc4115, eir: 1mbit, yellow: pass}
      10.0.0.6: unlimited
      10.0.0.7: {rate: 10mbit, algorithm: gcra, within: uplink}
      10.0.0.8: {within: uplink}
      3c:22:fb:12:34:56: {rate: 5mbit, name: tablet}
`, `pools:
  uplink: {rate: 1gbit, excess: ecn, share: host}
devices:
  eth0:
    egress:
      10.0.0.1: {rate: 10mbit, algorithm: trtcm, pir: 20mbit, colour-aware: true, colours: {CS1: red, AF12: yellow, 63: red}, yellow: dscp:AF12}
      10.0.0.2: {rate: 10mbit, algorithm: trtcm, pir: 30mbit, pbs: 375000b, colour-aware: true, colours: {CS1: red, AF12: yellow, 63: red}, green: ecn, yellow: dscp:AF12, red: pass, shadow: {rate: 5mbit}}
      10.0.0.3: {rate: 10mbit, algorithm: trtcm, each: host, pir: 20mbit, colour-aware: true, colours: {CS0: yellow}, yellow: dscp:CS0, shadow: {rate: 5mbit, pir: 9mbit, pbs: 64kb}}
      10.0.0.4: {rate: 10mbit, algorithm: srtcm, ebs: 64kb, colour-aware: true, colours: {AF13: red}, yellow: dscp:AF12}
      10.0.0.5: {rate: 10mbit, algorithm: rfc4115, eir: 1mbit}
      10.0.0.6: unlimited
      10.0.0.7: {rate: 10mbit, excess: ecn, within: uplink}
      10.0.0.8: {within: uplink}
      3c:22:fb:12:34:56: {rate: 5mbit, excess: ecn, name: tablet}
`, []Device{{Name: "eth0", L2Bytes: 14}}},

		{"nothing", "devices: {eth0: {egress: {match: src}, defaults: {each: host}}}", "devices: {}\n", []Device{{Name: "eth0", L2Bytes: 14}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			tables := mustTables(t, mustParse(t, test.text), test.devices...)
			if got := written(t, tables); got != test.want {
				t.Errorf("got\n%s\nwant\n%s", got, test.want)
			}
		})
	}
}

func TestAbsent(t *testing.T) {
	f := mustParse(t, `devices: {eth1: {}, 'x\*y': {}, tap*: {}, eth0: {egress: {0.0.0.0/0: 1mbit}}}`)
	tables, absent, err := f.Tables([]Device{{Name: "lo", L2Bytes: 0}})
	if want := []string{"eth1", "x*y", "eth0"}; len(tables) > 0 || !slices.Equal(absent, want) || err != nil {
		t.Errorf("got %v, %v, %v; want %v to be absent", tables, absent, err, want)
	}
	if tables, err := f.For(Device{Name: "eth0", L2Bytes: 14}); len(tables) != 1 || tables[0].Device != "eth0" || err != nil {
		t.Errorf("got %v, %v", tables, err)
	}
}

func TestDeviceThatTwoPatternsMatch(t *testing.T) {
	f := mustParse(t, "devices:\n  tap*: {egress: {0.0.0.0/0: 1mbit}}\n  '*[1-3]': {}\n  tap2: {}\n")
	want := `p.yaml:3:3: device tap1 matches *[1-3] here and tap* in line 2; narrow one of the patterns, or give the device its own section`
	_, _, err := f.Tables([]Device{{Name: "tap1", L2Bytes: 14}, {Name: "tap2", L2Bytes: 14}, {Name: "tap4", L2Bytes: 14}, {Name: "x3", L2Bytes: 14}})
	if err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if _, err := f.For(Device{Name: "tap1", L2Bytes: 14}); err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestWarnings(t *testing.T) {
	for _, test := range []struct {
		networks string
		covered  []string
	}{
		{"10.0.0.0/24 10.0.0.0/25 10.0.0.128/25", []string{"10.0.0.0/24"}},
		{"10.0.0.0/24 10.0.0.0/25 10.0.0.128/26 10.0.0.192/26", []string{"10.0.0.0/24"}},
		{"10.0.0.0/24 10.0.0.0/25 10.0.0.128/26 10.0.0.192/27", nil},
		{"10.0.0.0/24 10.0.0.1/32 10.0.0.2/31 10.0.0.4/30", nil},
		{"10.0.0.0/24 10.0.1.0/24", nil},
		{"10.0.0.0/24 10.0.0.128/25", nil},
		{"10.0.0.0/30 10.0.0.0/32 10.0.0.1/32 10.0.0.2/31", []string{"10.0.0.0/30"}},
		{"0.0.0.0/0 0.0.0.0/1 128.0.0.0/1 ::/0", []string{"0.0.0.0/0"}},
		{"255.255.255.254/31 255.255.255.255 255.255.255.254", []string{"255.255.255.254/31"}},
		{"::/0 ::/1 8000::/1 8000::/2 c000::/2", []string{"::/0", "8000::/1"}},
		{"2001:db8::/32 2001:db8::/33 2001:db8:8000::/33", []string{"2001:db8::/32"}},
	} {
		text := "devices:\n  eth0:\n    egress:\n"
		var want Errors
		for i, network := range strings.Fields(test.networks) {
			text += "      " + network + ": 1mbit\n"
			if slices.Contains(test.covered, network) {
				want = append(want, Error{"p.yaml", 4 + i, 7, "the rule for " + network +
					" never applies: longer networks in this direction cover all of it; remove it, or one of them"})
			}
		}
		if got := mustParse(t, text).Warnings(); !slices.Equal(got, want) {
			t.Errorf("%s: got %v, want %v", test.networks, got, want)
		}
	}
}

// TestWriteDeviceNames writes devices whose names are special in YAML, or are patterns.
func TestWriteDeviceNames(t *testing.T) {
	var tables []policy.Table
	var devices []Device
	for _, name := range []string{"eth0", "null", "-", "*", "a[b]", `a\b`, "a,b", "{x}", "#1", "a#", "'", `"`, "é", "1", "true", "~", "&a", "!", "%", "@", "?", "-a", strings.Repeat("n", 127)} {
		tables = append(tables, policy.Table{Device: name, Direction: policy.Ingress, Match: policy.MatchSrc, Rules: []policy.Rule{
			{Prefix: netip.MustParsePrefix("::/128"), Rate: policy.Unlimited},
			{Prefix: netip.MustParsePrefix("2001:db8::/128"), Rate: policy.Unlimited},
			{Prefix: netip.MustParsePrefix("2001:db8::1/128"), Rate: policy.Unlimited},
		}})
		devices = append(devices, Device{Name: name, L2Bytes: 14})
	}
	policy.SortTables(tables)
	text := written(t, tables)
	for _, key := range []string{"\n      ::/128: ", "\n      2001:db8::/128: ", "\n      2001:db8::1: "} {
		if !strings.Contains(text, key) {
			t.Errorf("%q is not in\n%s", key, text)
		}
	}
	if got := mustTables(t, mustParse(t, text), devices...); !reflect.DeepEqual(got, tables) {
		t.Errorf("got %v of\n%s", got, text)
	}
}

// full is a writer that always fails.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no room") }

func TestWriteErrors(t *testing.T) {
	good := mustTables(t, mustParse(t, "devices: {eth0: {egress: {10.0.0.0/24: 1mbit}}}"), Device{Name: "eth0", L2Bytes: 14})
	bad := func(change func(*policy.Table)) []policy.Table {
		tables := []policy.Table{good[0]}
		tables[0].Rules = slices.Clone(good[0].Rules)
		change(&tables[0])
		return tables
	}
	for want, tables := range map[string][]policy.Table{
		`the name of device "e\xff" is not UTF-8, which a policy file must be; rename it`:                          bad(func(t *policy.Table) { t.Device = "e\xff" }),
		"write a policy: eth0 egress has two tables":                                                               {good[0], good[0]},
		"write a policy: eth0 egress 10.0.0.0/24: rate 7bit is below 8kbit, the slowest rate; did you mean 7mbit?": bad(func(t *policy.Table) { t.Rules[0].Rate = 7 }),
	} {
		if err := Write(new(bytes.Buffer), tables); err == nil || err.Error() != want {
			t.Errorf("Write: got %v, want %s", err, want)
		}
	}
	within := bad(func(t *policy.Table) { t.Rules[0].Within = "uplink" })
	pool, err := policy.Limit{Rate: 1e9}.Pool("uplink")
	if err != nil {
		t.Fatal(err)
	}
	pools := func(p policy.Rule) []policy.Table {
		return append([]policy.Table{{Rules: []policy.Rule{p}}}, within...)
	}
	if err := Write(io.Discard, pools(pool)); err != nil {
		t.Error(err)
	}
	slow := pool
	slow.Rate = 7
	within[0].Rules[0].Guarantee = 1e6
	small := pool
	small.Rate = 999_999
	for want, tables := range map[string][]policy.Table{
		`write a policy: eth0 egress 10.0.0.0/24: within "uplink": there is no such pool; make it first, or name another one`:                         within,
		`write a policy: pool "uplink": rate 7bit is below 8kbit, the slowest rate; did you mean 7mbit?`:                                              pools(slow),
		`write a policy: pool "uplink": rate 999.999kbit is less than the guarantees within the pool, which add up to 1mbit; raise it, or lower them`: pools(small),
	} {
		if err := Write(io.Discard, tables); err == nil || err.Error() != want {
			t.Errorf("Write: got %v, want %s", err, want)
		}
	}
	// All other devices are written, with the plans that they use.
	plans := mustParse(t, "plans: {gold: 1mbit, silver: 2mbit}\ndevices: {eth0: {egress: {10.0.0.0/24: gold}}, x: {egress: {10.0.0.0/24: silver}}}")
	some := mustTables(t, plans, Device{Name: "eth0", L2Bytes: 14}, Device{Name: "x", L2Bytes: 14})
	some[1].Device = "e\xff"
	var out bytes.Buffer
	if err := Write(&out, some); !errors.As(err, new(LeftOutError)) || out.String() != "plans:\n  gold: 1mbit\ndevices:\n  eth0:\n    egress:\n      10.0.0.0/24: gold\n" {
		t.Errorf("Write: %v, got %s", err, &out)
	}
	if err := Write(full{}, good); err == nil || err.Error() != "write a policy: no room" {
		t.Errorf("Write: got %v", err)
	}
}

// TestSameText has rules with the same text and networks of different lengths and families.
func TestSameText(t *testing.T) {
	const text = "devices:\n  eth0:\n    egress:\n" +
		"      10.0.0.0/16: {rate: 8mbit, each: /24}\n      10.0.1.0/24: {rate: 8mbit, each: /24}\n      10.0.2.0/24: {rate: 8mbit, each: /24}\n" +
		"      2001::/16: {rate: 8mbit, each: /24}\n"
	tables, _, err := mustParse(t, text).Tables([]Device{{Name: "eth0", L2Bytes: 14}})
	if err != nil {
		t.Fatal(err)
	}
	subnets := policy.Each{Kind: policy.EachSubnet, Bits: 24}
	want := []policy.Each{subnets, {}, {}, subnets}
	for i, r := range tables[0].Rules {
		if r.Each != want[i] {
			t.Errorf("%v has a bucket for each %v, want %v", r.Prefix, r.Each, want[i])
		}
	}
	var out strings.Builder
	if err := Write(&out, tables); err != nil {
		t.Fatal(err)
	}
	if want := strings.ReplaceAll(text, ".0/24: {rate: 8mbit, each: /24}", ".0/24: 8mbit"); out.String() != want {
		t.Errorf("it is written as\n%s, want\n%s", out.String(), want)
	}
	if _, err := Parse("test.yaml", []byte(text+"      10.0.3.0/28: {rate: 8mbit, each: /24}\n")); err == nil {
		t.Error("subnets that are wider than their network are valid")
	}
}

// TestWritePlans derives plans from rules that follow them.
func TestWritePlans(t *testing.T) {
	rule := func(network, plan string, rate policy.Rate, note string) policy.Rule {
		r, err := policy.Limit{Rate: rate, Note: note}.Rule(netip.MustParsePrefix(network))
		if err != nil {
			t.Fatal(err)
		}
		r.Label.Plan = plan
		return r
	}
	tables := []policy.Table{{Device: "eth0", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{
		rule("10.0.0.1/32", "gold", 2e6, "a"),
		rule("10.0.0.2/32", "gold", 1e6, "b"),
		rule("10.0.0.3/32", "gold", 1e6, "b"),
		rule("10.0.0.4/32", "Gold 100", 3e6, "alone"),
		rule("10.0.0.5/32", "Gold-100", 4e6, ""),
		rule("10.0.0.6/32", "null", 5e6, "y"),
		rule("10.0.0.7/32", "unlimited", policy.Unlimited, ""),
		rule("10.0.0.8/32", "100", 6e6, ""),
		rule("10.0.0.9/32", "#", 7e6, ""),
		rule("10.0.0.10/32", "null", 5e6, "z"),
	}}}
	want := `plans:
  Gold-100: 4mbit
  Gold-100-2: {rate: 3mbit, name: Gold 100}
  gold: {rate: 1mbit, note: b}
  "null": 5mbit
  plan: {rate: 7mbit, name: "#"}
  plan-100: {rate: 6mbit, name: 100}
  plan-unlimited: {rate: unlimited, name: unlimited}
devices:
  eth0:
    egress:
      10.0.0.1: {plan: gold, rate: 2mbit, note: a}
      10.0.0.2: gold
      10.0.0.3: gold
      10.0.0.4: {plan: Gold-100-2, note: alone}
      10.0.0.5: Gold-100
      10.0.0.6: {plan: "null", note: y}
      10.0.0.7: plan-unlimited
      10.0.0.8: plan-100
      10.0.0.9: plan
      10.0.0.10: {plan: "null", note: z}
`
	text := written(t, tables)
	if text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	if got := mustTables(t, mustParse(t, text), Device{Name: "eth0", L2Bytes: 14}); !reflect.DeepEqual(got, tables) {
		t.Errorf("got %v", got)
	}
}

// TestNamesShareRules checks that a name for each rule does not cost a limit for each rule.
func TestNamesShareRules(t *testing.T) {
	f := mustParse(t, `plans: {gold: {rate: 1mbit, note: x}}
devices:
  eth0:
    egress:
      10.0.0.1: {plan: gold, name: alice}
      10.0.0.2: {plan: gold, name: "bob"}
      10.0.0.3: {plan: gold, name: carl, note: ""}
`)
	rules := f.exactly["eth0"].tables[0].rules
	for i, want := range []policy.Label{{Plan: "gold", Name: "alice", Note: "x"}, {Plan: "gold", Name: "bob", Note: "x"}, {Plan: "gold", Name: "carl"}} {
		if got := rules[i].on(Device{Name: "eth0", L2Bytes: 14}).Label; got != want {
			t.Errorf("label %+v, want %+v", got, want)
		}
	}
	if rules[0].rule != rules[1].rule {
		t.Error("two rules that differ in their names have a limit each")
	}
}
