package main

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

func TestTreeForHTB(t *testing.T) {
	got := (&tree{rate: 9e6, members: []*tree{
		{rate: 5e6, guarantee: 4e6, members: []*tree{{rate: 2e6, guarantee: 1e6}}}, {rate: 3e6, weight: 2},
	}}).htb()
	for _, want := range []string{
		"class add dev near parent 1: classid 1:1000 htb rate 9000000bit ceil 9000000bit quantum 1514\n",
		"class add dev near parent 1:1000 classid 1:1001 htb rate 4000000bit ceil 5000000bit quantum 1514\n",
		"class add dev near parent 1:1001 classid 1:1 htb rate 1000000bit ceil 2000000bit quantum 1514\n",
		"class add dev near parent 1:1000 classid 1:2 htb rate 8bit ceil 3000000bit quantum 3028\n",
		"u32 ht 2:0: match ip dst 10.1.2.0 flowid 1:1\n",
		"u32 ht 2:1: match ip dst 10.1.2.1 flowid 1:2\n",
		"qdisc add dev near parent 1:2 pfifo limit 24\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
}

// In each load, somebody gets less than he sends, and pools can give their members all guarantees.
func TestLoads(t *testing.T) {
	for _, l := range loads {
		uplink := l.tree()
		if n := len(uplink.leaves()); n != subscribers {
			t.Errorf("%s: %d subscribers", l.name, n)
		}
		sent, low := 0, uint64(0)
		for _, site := range uplink.members {
			var guaranteed policy.Guarantee
			for _, home := range site.members {
				sent += home.quarters * partRate / 4
				guaranteed += home.guarantee
			}
			if guaranteed > site.guarantee {
				t.Errorf("%s: %v of %v is guaranteed", l.name, guaranteed, site.guarantee)
			}
			low += uint64(site.guarantee)
		}
		if sent < uplinkRate*5/4 || low > uplinkRate {
			t.Errorf("%s: %d bit/s are sent, and %d guaranteed", l.name, sent, low)
		}
	}
}

func TestDifferences(t *testing.T) {
	got := differences([]uint64{90, 0, 220, 300, 1}, []uint64{100, 0, 200, 300, 0})
	if want := []float64{0, 10, 10, 100}; len(got) != len(want) || !near(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
