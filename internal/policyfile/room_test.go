package policyfile

import (
	"fmt"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// As many devices of patterns as have room get their guarantees: first those that have them now, then those that came
// first. The others get all but guarantees.
func TestTablesWithRoom(t *testing.T) {
	f := mustParse(t, `pools:
  uplink: 1gbit
  small: {rate: 100mbit, within: uplink, guarantee: 50mbit}
devices:
  eth0: {egress: {any: {rate: 100mbit, within: uplink, guarantee: 50mbit}}}
  tap*:
    pool: {rate: 200mbit, within: uplink, guarantee: 50mbit}
    egress: {any: {guarantee: 10mbit, note: sold}}
  veth*: {egress: {10.0.0.0/24: {within: small, guarantee: 20mbit}}}
`)
	devices := []Device{{Name: "eth0", L2Bytes: 14}}
	for i := range 25 {
		devices = append(devices, Device{Name: fmt.Sprint("tap", i), L2Bytes: 14})
	}
	for i := range 3 {
		devices = append(devices, Device{Name: fmt.Sprint("veth", i), L2Bytes: 14})
	}
	live := func() []policy.Table {
		return []policy.Table{
			{Rules: []policy.Rule{{Pool: true, Guarantee: 1, Label: policy.Label{Name: "tap20", Owner: policy.Owner{Device: "tap20"}}}}},
			{Device: "veth2", Rules: []policy.Rule{{Guarantee: 1}}},
		}
	}
	tables, missing, err := f.TablesWithRoom(devices, live)
	if err != nil {
		t.Fatal(err)
	}
	// Of 1 gbit, 850 mbit are left for 17 devices, and in the pool small there is room for two.
	if got, want := strings.Join(missing.Devices, " "), "tap16 tap17 tap18 tap19 tap21 tap22 tap23 tap24 veth1"; got != want || missing.Of != 28 {
		t.Errorf("without room: %s of %d, want %s", got, missing.Of, want)
	}
	if says := missing.Error(); !strings.HasPrefix(says, "no room for the guarantees of 9 of 28 devices: tap16, tap17, tap18 and 6 more; ") ||
		!strings.Contains(missing.Problem.Error(), `p.yaml:2:11: pool "uplink": rate 1gbit is less than the guarantees within the pool, which add up to 1400mbit`) {
		t.Error(says)
	}
	for _, table := range tables {
		for _, r := range table.Rules {
			waits := table.Device == "tap24" || r.Label.Name == "tap24"
			if is := r.Label.Waits != 0; waits != is && (waits || r.Label.Name == "tap0" || table.Device == "tap0") {
				t.Errorf("%s%s waits: %t", table.Device, r.Label.Name, is)
			}
		}
	}
	if err := policy.CheckPools(tables); err != nil {
		t.Error(err)
	}
	if _, missing, err := f.TablesWithRoom(devices[:16], live); missing != nil || err != nil {
		t.Errorf("with room for all: %v, %v", missing, err)
	}
}

// A guarantee that never fits is a mistake in the file.
func TestGuaranteeThatNeverFits(t *testing.T) {
	f := mustParse(t, `pools: {up: 10mbit}
devices: {"v*": {pool: {rate: 20mbit, within: up, guarantee: 11mbit}, egress: {any: {}}}}
`)
	_, _, err := f.TablesWithRoom([]Device{{Name: "v0", L2Bytes: 14}, {Name: "v1", L2Bytes: 14}}, func() []policy.Table { return nil })
	if err == nil || !strings.Contains(err.Error(), `pool "up": rate 10mbit is less than the guarantees within the pool, which add up to 11mbit`) {
		t.Error(err)
	}
}
