package policyfile

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// TestPatternGuarantees checks that the guarantees of a pattern count once for each device.
func TestPatternGuarantees(t *testing.T) {
	f := mustParse(t, "pools: {all: 10mbit, other: 1mbit}\ndevices:\n  tap*: {egress: {10.0.0.1: {within: all, guarantee: 4mbit}}}\n  eth0: {egress: {10.0.0.1: {within: all, guarantee: 7mbit}}}\n")
	tables := mustTables(t, f, Device{Name: "eth0", L2Bytes: 14})
	if len(tables) != 2 || !tables[0].IsPools() || len(tables[0].Rules) != 2 {
		t.Errorf("got %+v", tables)
	}
	_, _, err := f.Tables([]Device{{Name: "eth0", L2Bytes: 14}, {Name: "tap0", L2Bytes: 14}})
	if want := `p.yaml:1:14: pool "all": rate 10mbit is less than the guarantees within the pool, which add up to 11mbit; raise it, or lower them`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if tables := mustTables(t, mustParse(t, "pools: {all: 10mbit}\ndevices: {}\n")); len(tables) != 1 || tables[0].Rules[0].Label.Name != "all" {
		t.Errorf("without devices there are %+v", tables)
	}
}

// TestMergeAbsentGuarantees has a device that does not exist, and so none of the rules in force.
func TestMergeAbsentGuarantees(t *testing.T) {
	f := mustParse(t, "pools: {all: 10mbit}\ndevices:\n  gone0: {egress: {10.0.0.1: {within: all, guarantee: 4mbit}}}\n  eth0: {egress: {10.0.0.1: {within: all, guarantee: 6mbit}}}\n")
	tables, _, err := f.Tables([]Device{{Name: "eth0", L2Bytes: 14}})
	if err != nil {
		t.Fatal(err)
	}
	tables[1].Rules[0].Guarantee = 6_000_001
	var out bytes.Buffer
	err = Merge(&out, f, []Device{{Name: "eth0", L2Bytes: 14}}, tables)
	if want := `write a policy: pool "all": rate 10mbit is less than the guarantees within the pool, which add up to 10000001bit; raise it, or lower them`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	// The rules of gone0 stay, so their pool does.
	if err := Merge(&out, f, []Device{{Name: "eth0", L2Bytes: 14}}, nil); err != nil || !strings.Contains(out.String(), "{all: 10mbit}") || strings.Contains(out.String(), "eth0") {
		t.Errorf("%v, got\n%s", err, &out)
	}
}

// TestManyPools has lines of pools that look like rules, and more unknown names than are shown.
func TestManyPools(t *testing.T) {
	var text strings.Builder
	text.WriteString("pools:\n")
	for i := range 30 {
		fmt.Fprintf(&text, "  10.0.%d.1: {rate: 1gbit, within: 10.0.%d.1}\n", i, max(i-1, 0))
	}
	if _, err := parse("p.yaml", []byte(strings.Replace(text.String(), ", within: 10.0.0.1", "", 1)+"devices: {}\n"), 20); err == nil || !strings.Contains(err.Error(), "chain of 17 pools") {
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

// TestMergeKeepsPools has pools that only defaults name.
func TestMergeKeepsPools(t *testing.T) {
	for _, text := range []string{
		"defaults: {within: a}\npools: {a: {rate: 1mbit, within: b}, b: 1mbit}\ndevices: {}\n",
		"pools: {a: 1mbit}\ndevices: {eth0: {defaults: {within: a}}}\n",
		"pools: {a: 1mbit}\ndevices: {eth0: {egress: {defaults: {within: a}}}}\n",
		"pools: {a: 1mbit}\nplans: {gold: {within: a}}\ndevices: {}\n",
	} {
		var out bytes.Buffer
		if err := Merge(&out, mustParse(t, text), []Device{{Name: "eth0", L2Bytes: 14}}, nil); err != nil || out.String() != text {
			t.Errorf("%v: %s became %s", err, text, &out)
		}
	}
}

// TestMergeDropsPools has pools that only defaults of what goes name.
func TestMergeDropsPools(t *testing.T) {
	f := mustParse(t, "pools: {a: 1mbit, b: 1mbit}\ndevices: {eth0: {defaults: {within: a}, egress: {any: 1mbit}}, eth1: {egress: {defaults: {within: b}, any: 1mbit}, ingress: {any: 1mbit}}}\n")
	live := mustTables(t, mustParse(t, "devices: {eth1: {ingress: {any: 1mbit}}}"), Device{Name: "eth1", L2Bytes: 14})
	var out bytes.Buffer
	err := Merge(&out, f, []Device{{Name: "eth0", L2Bytes: 14}, {Name: "eth1", L2Bytes: 14}}, live)
	if want := "pools: {}\ndevices: {eth1: {ingress: {any: 1mbit}}}\n"; err != nil || out.String() != want {
		t.Errorf("%v, got\n%s\nwant\n%s", err, &out, want)
	}
}

// A pool has the options of its plan, and its own win. What the file becomes keeps the plan, unless the pool has changed.
func TestPoolsWithPlans(t *testing.T) {
	const text = `plans:
  gold: {rate: 50mbit, guarantee: 5mbit, within: uplink, share: flow, name: Gold 50, note: sold}
pools:
  uplink: 1gbit
  home-1: gold
  ap: {rate: 100mbit, within: uplink, guarantee: 50mbit}
  home-2: {plan: gold, rate: 60mbit, within: ap} # pays more
  home-3: {plan: gold, within: none, note: free}
devices:
  eth0: {egress: {10.0.0.1: {within: home-1}}}
  tap*: {pool: {plan: gold, weight: 2}, egress: {any: {}}}
`
	devices := []Device{{Name: "eth0", L2Bytes: 14}, {Name: "tap0", L2Bytes: 14}}
	tables := mustTables(t, mustParse(t, text), devices...)
	pools := &tables[0]
	want := `  home-1: {rate: 50mbit, within: uplink, guarantee: 5mbit, share: flow, note: sold}
  home-2: {rate: 60mbit, within: ap, guarantee: 5mbit, share: flow, note: sold}
  home-3: {rate: 50mbit, share: flow, note: free}
  tap0: {rate: 50mbit, within: uplink, guarantee: 5mbit, weight: 2, share: flow, note: sold}
`
	if got := written(t, tables); !strings.Contains(got, want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := mergedInto(t, text, devices, tables); got != text {
		t.Errorf("unchanged, it becomes\n%s", got)
	}
	for i := range pools.Rules {
		if p := &pools.Rules[i]; p.Label.Name == "home-1" || p.Label.Name == "home-2" {
			p.Weight = 3
		}
	}
	merged := mergedInto(t, text, devices, tables)
	again := mustTables(t, mustParse(t, merged), devices...)
	if got, want := written(t, again), written(t, tables); got != want || strings.Count(merged, "plan: gold") != 2 || !strings.Contains(merged, "# pays more") {
		t.Errorf("changed, it becomes\n%s", merged)
	}
}
