package policyfile

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// taps gives each tap a pool, and a pool for what it receives, within that.
const taps = `pools: {uplink: {rate: 1gbit, share: member}}
devices:
  tap*:
    pool: {rate: 300mbit, within: uplink, guarantee: 4mbit}
    egress:
      pool: 200mbit
      any: {}
      10.0.0.0/8: {rate: unlimited, within: none}
    ingress: {any: 250mbit, 10.0.0.1: {within: uplink}}
`

func mergedInto(t *testing.T, like string, devices []Device, tables []policy.Table) string {
	t.Helper()
	var out bytes.Buffer
	if err := Merge(&out, mustParse(t, like), devices, tables); err != nil {
		t.Fatal(err)
	}
	mustParse(t, out.String())
	return out.String()
}

func TestOwnPools(t *testing.T) {
	f := mustParse(t, taps)
	want := `pools:
  tap0: {rate: 300mbit, within: uplink, guarantee: 4mbit}
  tap0 egress: {rate: 200mbit, within: tap0}
  uplink: {rate: 1gbit, share: member}
devices:
  tap0:
    egress:
      0.0.0.0/0: {rate: unlimited, within: tap0 egress}
      10.0.0.0/8: unlimited
      ::/0: {rate: unlimited, within: tap0 egress}
    ingress:
      0.0.0.0/0: {rate: 250mbit, within: tap0}
      10.0.0.1: {rate: unlimited, within: uplink}
      ::/0: {rate: 250mbit, within: tap0}
`
	got := strings.ReplaceAll(written(t, mustTables(t, f, Device{Name: "tap0", L2Bytes: 14}, Device{Name: "eth0", L2Bytes: 14})), ": {within: ", ": {rate: unlimited, within: ")
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	// A second device has pools of its own.
	if tables := mustTables(t, f, Device{Name: "tap0", L2Bytes: 14}, Device{Name: "tap1", L2Bytes: 14}); len(tables[0].Rules) != 5 {
		t.Errorf("got %+v", tables[0])
	}
	// A rule can be within the pool of its device though its plan names another one.
	f = mustParse(t, "pools: {up: 1gbit}\nplans: {gold: {within: up}}\ndevices:\n  eth1: {pool: {rate: 1mbit, share: flow}, egress: {10.0.0.1: {plan: gold, within: eth1}, 10.0.0.2: gold}}\n")
	if tables := mustTables(t, f, Device{Name: "eth1", L2Bytes: 14}); tables[1].Rules[0].Within != "eth1" || tables[1].Rules[1].Within != "up" {
		t.Errorf("got %+v", tables)
	}
}

func TestOwnPoolErrors(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{"pools: {tap0: 1mbit}\ndevices: {tap0: {pool: 1mbit}}\n", `2:18: pool "tap0" of the device is also among the pools; rename that one`},
		{"devices: {tap0: {pool: {share: flow}}}\n", "1:18: rate is missing"},
		{"devices: {tap0: {pool: {rate: 1mbit, each: host}}}\n", "1:38: each has no use in a pool"},
		{"devices: {none: {pool: 1mbit}}\n", "1:18: a pool cannot be called none"},
		{"devices: {tap0: {pool: {rate: 1mbit, within: up}}}\n", `1:46: pool "up" is unknown`},
		{"devices: {eth0: {egress: {10.0.0.1: {within: tap*}}}, tap*: {pool: 1mbit}}\n", `pool "tap*" is unknown`},
		{"pools: {up: 1mbit}\ndevices: {tap0: {pool: 1mbit, defaults: {within: up}}}\n", "2:42: within names the pool of all rules here, and so does pool in line 2"},
		{"pools: {up: 1mbit}\ndevices:\n  tap0: {pool: {rate: 1mbit, within: up, guarantee: 800kbit}}\n  tap1: {pool: {rate: 1mbit, within: up, guarantee: 800kbit}}\n", `1:13: pool "up": rate 1mbit is less than the guarantees`},
		{"devices: {tap0: {pool: {rate: 1mbit, within: tap0 egress}, egress: {pool: 1mbit}}}\n", `pool "tap0 egress" is unknown`},
		{"devices: {tap0: {pool: 1mbit}, eth0: {egress: {any: {within: tap0}}}}\n", `1:62: pool "tap0" is unknown`},
	} {
		_, err := Parse("p.yaml", []byte(test.text))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", test.text, err, test.want)
		}
	}
	for _, test := range []struct{ text, device, want string }{
		{"pools: {tap0: 1mbit}\ndevices: {tap*: {pool: 1mbit}}\n", "tap0", `p.yaml:2:18: pool "tap0" of the device is also in line 1; rename that one`},
		{"devices: {'no*': {pool: 1mbit}}\n", "none", "p.yaml:1:19: a pool cannot be called none"},
		{"pools: {up: 1mbit}\ndevices: {tap*: {pool: {rate: 2mbit, within: up, guarantee: 1001kbit}}}\n", "tap0", `p.yaml:1:13: pool "up": rate 1mbit is less than the guarantees`},
		{"devices: {tap*: {pool: {rate: 2mbit}, egress: {any: {rate: 2mbit, guarantee: 1500kbit}}}}\n", "tap0", `p.yaml:1:31: pool "tap0": rate 2mbit is less than the guarantees`},
	} {
		_, _, err := mustParse(t, test.text).Tables([]Device{{Name: test.device, L2Bytes: 14}})
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", test.text, err, test.want)
		}
	}
}

// TestDefaultsOfPools has defaults for pools, which pools override.
func TestDefaultsOfPools(t *testing.T) {
	f := mustParse(t, `defaults: {rate: 1mbit, excess: ecn, capacity: 20kb, each: host, overhead: 4, weight: 7, shadow: 500kbit}
pools: {a: 1mbit, b: {rate: 1mbit, excess: drop, within: a}}
devices: {tap*: {defaults: {excess: delay, queue: 30kb}, pool: {rate: 1mbit, within: b}, egress: {pool: {rate: 1mbit, excess: drop}}}}
`)
	want := `pools:
  a: {rate: 1mbit, capacity: 20kb, excess: ecn}
  b: {rate: 1mbit, capacity: 20kb, within: a}
  tap0: {rate: 1mbit, capacity: 20kb, excess: delay, queue: 30kb, within: b}
  tap0 egress: {rate: 1mbit, capacity: 20kb, within: tap0}
devices: {}
`
	if got := written(t, mustTables(t, f, Device{Name: "tap0", L2Bytes: 14})); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	_, err := Parse("p.yaml", []byte("defaults: {excess: pass}\npools: {a: 1mbit}\ndevices: {}\n"))
	if want := "p.yaml:2:9: excess pass would limit nothing in a pool; use another one, or propose a rate with shadow (from defaults, line 1)"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestMergeOwnPools(t *testing.T) {
	const named = "devices:\n  tap0:\n    pool: {rate: 1mbit}  # sold\n    egress: {any: {}, pool: 500kbit}\n"
	of := func(rate string) string {
		return fmt.Sprintf("pools: {uplink: {rate: 1gbit, share: member}, tap0: {rate: %s, within: uplink, guarantee: 4mbit}, tap0 egress: {rate: 200mbit, within: tap0}}\n", rate) +
			"devices: {tap0: {egress: {any: {within: tap0 egress}, 10.0.0.0/8: unlimited}, ingress: {any: {rate: 250mbit, within: tap0}, 10.0.0.1: {within: uplink}}}}\n"
	}
	for name, test := range map[string]struct{ like, live, want string }{
		"as the pattern has it":                    {taps, of("300mbit"), taps},
		"a device is gone, and its pools are left": {taps, strings.Replace(of("300mbit"), "devices: {tap0:", "devices: {}  # {tap0:", 1), taps},
		"not as the pattern has it":                {taps, of("100mbit"), "uplink: {rate: 1gbit, share: member}, tap0: {rate: 100mbit, within: uplink, guarantee: 4mbit}"},
		"another device draws from it":             {taps, strings.Replace(of("300mbit"), "devices: {", "devices: {eth0: {egress: {any: {within: tap0}}}, ", 1), "tap0: {rate: 300mbit, within: uplink, guarantee: 4mbit}"},
		"a rate": {
			named, "pools: {tap0: 2mbit, tap0 egress: {rate: 400kbit, within: tap0}}\ndevices: {tap0: {egress: {any: {within: tap0 egress}}}}\n",
			"devices:\n  tap0:\n    pool: {rate: 2mbit}  # sold\n    egress: {any: {}, pool: 400kbit}\n",
		},
		"without pools": {named, "devices: {tap0: {egress: {any: 1mbit}}}\n", "devices:\n  tap0:\n    egress: {any: {rate: 1mbit, within: none}}\n"},
		"one of two":    {named, "pools: {tap0: 1mbit}\ndevices: {tap0: {egress: {any: {within: tap0}}}}\n", "devices:\n  tap0:\n    pool: {rate: 1mbit}  # sold\n    egress: {any: {within: tap0}}\n"},
		"only pools":    {named, "pools: {tap0: 1mbit, tap0 egress: {rate: 500kbit, within: tap0}}\ndevices: {}\n", "devices:\n  tap0:\n    pool: {rate: 1mbit}  # sold\n    egress: {pool: 500kbit}\n"},
		"two pools for one rule": {
			named, "pools: {tap0: 1mbit, tap0 egress: {rate: 500kbit, within: tap0}}\ndevices: {tap0: {egress: {0.0.0.0/0: {within: tap0}, '::/0': {within: tap0 egress}}}}\n",
			"devices:\n  tap0:\n    pool: {rate: 1mbit}  # sold\n    egress: {pool: 500kbit, 0.0.0.0/0: {within: tap0}, ::/0: {}}\n",
		},
		"lent": {
			named, "pools: {tap0: 1mbit, tap0 egress: {rate: 500kbit, within: tap0}}\ndevices: {tap0: {egress: {any: {within: tap0 egress}}}, eth0: {egress: {any: {within: tap0}}}}\n",
			"devices:\n  eth0:\n    egress:\n      0.0.0.0/0: {within: tap0}\n      ::/0: {within: tap0}\n  tap0:\n    egress:\n      0.0.0.0/0: {within: tap0 egress}\n" +
				"      ::/0: {within: tap0 egress}\npools:\n  tap0: 1mbit\n  tap0 egress: {rate: 500kbit, within: tap0}\n",
		},
		"nothing": {named, "devices: {}\n", "devices: {}\n"},
	} {
		devices := []Device{{Name: "eth0", L2Bytes: 14}, {Name: "tap0", L2Bytes: 14}}
		live := mustTables(t, mustParse(t, test.live), devices...)
		if strings.Contains(name, "is gone") {
			devices = devices[:1]
		}
		got := mergedInto(t, test.like, devices, live)
		if test.like == named && got != test.want || !strings.Contains(got, test.want) {
			t.Errorf("%s: got\n%s\nwant\n%s", name, got, test.want)
		}
		if again := mustTables(t, mustParse(t, got), devices...); len(devices) > 1 && written(t, again) != written(t, live) {
			t.Errorf("%s: got\n%s\nwant\n%s", name, written(t, again), written(t, live))
		}
	}
}
