package report

import (
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// What drops or refuses most is first, the rule before its pool. A pool that only has rules within it that drop comes where
// its use does.
func TestWorst(t *testing.T) {
	var rules Rules
	add := func(name string, pool bool, passed, dropped, refused uint64) {
		r := policy.Rule{Rate: 8e6, Capacity: 100000, Pool: pool, Label: policy.Label{Name: name}}
		before := NewRule("", policy.Egress, policy.MatchDst, r, maps.Counters{}, 0)
		after := maps.Counters{PassedBytes: passed, PassedPackets: 1, DroppedBytes: dropped, DroppedPackets: dropped}
		if pool {
			after.DroppedBytes, after.DroppedPackets = refused, refused
		}
		out := NewRule("", policy.Egress, policy.MatchDst, r, after, 0)
		if pool {
			out.Lost(maps.Loss{MatchedPackets: 1 + dropped, DroppedPackets: dropped, DroppedBytes: dropped})
		}
		out.Since(before.Sample(), 1e9)
		rules = append(rules, out)
	}
	add("around", true, 500, 9000, 0)
	add("refuses", true, 1000, 9000, 9000)
	add("idle", false, 0, 0, 0)
	add("near", false, 990000, 0, 0)
	add("less", false, 100, 10, 0)
	add("drops", false, 100, 9000, 0)
	add("detached", false, 0, 0, 0)
	rules[len(rules)-1].Attached = new(false)
	var names []string
	for _, r := range NewTop(time.Now(), time.Second, rules, nil, nil).Rules {
		names = append(names, r.Name)
	}
	if got := strings.Join(names, " "); got != "detached drops refuses less near around idle" {
		t.Errorf("the order is %s", got)
	}
}
