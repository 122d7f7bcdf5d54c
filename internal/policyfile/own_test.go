package policyfile

import (
	"strings"
	"testing"
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

func TestOwnPools(t *testing.T) {
	f := mustParse(t, taps)
	want := `pools:
  tap0: {rate: 300mbit, within: uplink, waits: 4mbit, owner: tap0}
  tap0 egress: {rate: 200mbit, within: tap0, owner: tap0 egress}
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
		{"pools: {up: 1mbit}\ndevices:\n  tap0: {pool: {rate: 1mbit, within: up, guarantee: 800kbit}}\n  tap1: {pool: {rate: 1mbit, within: up, guarantee: 800kbit}}\n", `1:9: pool "up": rate 1mbit is less than the guarantees`},
		{"devices: {tap0: {pool: {rate: 1mbit, within: tap0 egress}, egress: {pool: 1mbit}}}\n", `pool "tap0 egress" is unknown`},
		{"devices: {tap0: {pool: 1mbit}, eth0: {egress: {any: {within: tap0}}}}\n", `1:62: pool "tap0" is unknown`},
		{"devices:\n  vm*: {egress: {pool: 1mbit, any: {}}}\n  vm7:\n    egress: {pool: 100mbit, any: {}}\n    ingress: {pool: 100mbit, match: dst}\n", "5:15: no rule is within this pool, so it limits nothing; add any: {} to ingress, or remove the pool"},
		{"devices: {tap0: {pool: 1mbit, egress: {any: {rate: 1mbit, within: none}}}}\n", "1:18: no rule is within this pool, so it limits nothing; add egress: {any: {}} or ingress: {any: {}} to the device, or remove"},
		{"devices: {tap*: {pool: 1mbit, egress: {pool: 1mbit}}}\n", "1:40: no rule is within this pool, so it limits nothing; add any: {} to egress"},
	} {
		_, err := Parse("p.yaml", []byte(test.text))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %s", test.text, err, test.want)
		}
	}
	for _, test := range []struct{ text, device, want string }{
		{"pools: {tap0: 1mbit}\ndevices: {tap*: {pool: 1mbit, egress: {any: {}}}}\n", "tap0", `p.yaml:2:18: pool "tap0" of the device is also in line 1; rename that one`},
		{"devices: {'no*': {pool: 1mbit, egress: {any: {}}}}\n", "none", "p.yaml:1:19: a pool cannot be called none"},
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
devices: {tap*: {defaults: {excess: delay, queue: 30kb}, pool: {rate: 1mbit, within: b}, egress: {pool: {rate: 1mbit, excess: drop}, any: {rate: unlimited, each: all, excess: drop, overhead: 0, shadow: none}}}}
`)
	want := `pools:
  a: {rate: 1mbit, capacity: 20kb, excess: ecn}
  b: {rate: 1mbit, capacity: 20kb, within: a}
  tap0: {rate: 1mbit, capacity: 20kb, excess: delay, queue: 30kb, within: b, owner: tap0}
  tap0 egress: {rate: 1mbit, capacity: 20kb, within: tap0, owner: tap0 egress}
devices:
  tap0:
    egress:
      0.0.0.0/0: {within: tap0 egress, weight: 7}
      ::/0: {within: tap0 egress, weight: 7}
`
	if got := written(t, mustTables(t, f, Device{Name: "tap0", L2Bytes: 14})); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	_, err := Parse("p.yaml", []byte("defaults: {excess: pass}\npools: {a: 1mbit}\ndevices: {}\n"))
	if want := "p.yaml:2:9: excess pass would limit nothing in a pool; use another one, or propose a rate with shadow (from defaults, line 1)"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}
