package policyfile

import (
	"fmt"
	"strings"
	"testing"
)

// TestPatternGuarantees checks that the guarantees of a pattern wait for room, because there may be any number of devices.
func TestPatternGuarantees(t *testing.T) {
	f := mustParse(t, "pools: {all: 10mbit, other: 1mbit}\ndevices:\n  tap*: {egress: {10.0.0.1: {within: all, guarantee: 4mbit}}}\n  eth0: {egress: {10.0.0.1: {within: all, guarantee: 7mbit}}}\n")
	tables := mustTables(t, f, Device{Name: "eth0", L2Bytes: 14}, Device{Name: "tap0", L2Bytes: 14})
	if len(tables) != 3 || len(tables[0].Rules) != 2 || tables[1].Rules[0].Label.Waits != 0 || tables[2].Rules[0].Guarantee != 0 || tables[2].Rules[0].Label.Waits != 4e6 {
		t.Errorf("got %+v", tables)
	}
	if tables := mustTables(t, mustParse(t, "pools: {all: 10mbit}\ndevices: {}\n")); len(tables) != 1 || tables[0].Rules[0].Label.Name != "all" {
		t.Errorf("without devices there are %+v", tables)
	}
}

// TestManyPools has lines of pools that look like rules, and more unknown names than are shown.
func TestManyPools(t *testing.T) {
	var text strings.Builder
	text.WriteString("pools:\n")
	for i := range 30 {
		fmt.Fprintf(&text, "  10.0.%d.1: {rate: 1gbit, within: 10.0.%d.1}\n", i, max(i-1, 0))
	}
	if _, err := Parse("p.yaml", []byte(strings.Replace(text.String(), ", within: 10.0.0.1", "", 1)+"devices: {}\n")); err == nil || !strings.Contains(err.Error(), "chain of 17 pools") {
		t.Errorf("got %v", err)
	}
	text.WriteString("devices:\n  eth0:\n    egress:\n")
	for i := range 2100 {
		fmt.Fprintf(&text, "      10.0.%d.%d: {within: 10.0.%d.1x}\n", i/256, i%256, i)
	}
	_, err := Parse("p.yaml", []byte(text.String()))
	errs, ok := err.(Errors)
	if !ok || len(errs) < 2100 || !strings.Contains(err.Error(), "did you mean 10.0.") || errs[len(errs)-1].Message != `pool "10.0.2099.1x" is unknown` {
		t.Errorf("got %v", err)
	}
}

// A pool has the options of its plan, and its own win. The defaults say nothing of rates, and who has them.
func TestPoolsWithPlans(t *testing.T) {
	const text = `defaults: {rate: 3mbit, guarantee: 1mbit, within: uplink, weight: 3, shadow: {rate: 2mbit}}
plans:
  gold: {rate: 50mbit, guarantee: 5mbit, within: uplink, share: flow, name: Gold 50, note: sold}
pools:
  uplink: 1gbit
  home-1: gold
  ap: {rate: 100mbit, within: uplink}
  home-2: {plan: gold, rate: 60mbit, within: ap}
  home-3: {plan: gold, within: none, note: free}
devices:
  eth0: {egress: {10.0.0.1: {within: home-1}}}
  tap*: {pool: {plan: gold, weight: 2}, egress: {any: {}}}
  tun*: {egress: {pool: 5mbit, 02:00:00:00:00:01: unlimited}}
`
	tables := mustTables(t, mustParse(t, text), Device{Name: "eth0", L2Bytes: 14}, Device{Name: "tap0", L2Bytes: 14})
	want := `  ap: {rate: 100mbit, within: uplink}
  home-1: {rate: 50mbit, within: uplink, guarantee: 5mbit, share: flow, note: sold}
  home-2: {rate: 60mbit, within: ap, guarantee: 5mbit, share: flow, note: sold}
  home-3: {rate: 50mbit, share: flow, note: free}
  tap0: {rate: 50mbit, within: uplink, weight: 2, share: flow, waits: 5mbit, owner: tap0, note: sold}
  uplink: 1gbit
`
	if got := written(t, tables); !strings.Contains(got, want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
