package bpf_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Traces with verdicts that are known without a model.
func TestKnownTraces(t *testing.T) {
	type packet struct {
		ns, bytes uint64
		ect       bool
		verdict   model.Verdict
		level     uint64 // bytes
	}
	const pass, excess, mark = model.Pass, model.Drop, model.Mark
	r := matchSource(t)
	for name, c := range map[string]struct {
		rule    policy.Rule
		packets []packet
	}{
		"exactly full conforms": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500},
			[]packet{{0, 1000, false, pass, 1000}, {0, 500, false, pass, 1500}, {0, 1, false, excess, 1500}, {1000, 1, false, pass, 1500}, {1999, 1, false, excess, 1500}, {2000, 1, false, pass, 1500}},
		},
		"bigger than the bucket": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500},
			[]packet{{0, 1, false, pass, 1}, {999, 9000, false, excess, 1}, {1000, 9000, false, pass, 9000}, {8_000_000, 500, false, excess, 1001}, {8_501_000, 1000, false, pass, 1500}},
		},
		"back in time": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500},
			[]packet{{1_000_000_000, 1500, false, pass, 1500}, {999_900_000, 1, false, excess, 1600}, {1_000_001_000, 1, false, pass, 1500}},
		},
		"marked up to twice": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500, Excess: policy.ECN},
			[]packet{{0, 1500, true, pass, 1500}, {0, 1500, true, mark, 3000}, {0, 1, true, excess, 3000}, {0, 1, false, excess, 3000}, {1000, 1, true, mark, 3000}},
		},
		"fill": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500, Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyFill}},
			[]packet{{0, 600, false, pass, 600}, {0, 1000, false, excess, 1500}, {100_000, 200, false, excess, 1500}, {300_000, 200, false, pass, 1500}},
		},
		"hold": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500, Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Millisecond}},
			[]packet{{0, 600, false, pass, 600}, {0, 1000, false, excess, 2500}, {1_099_000, 100, false, excess, 2500}, {2_199_000, 100, false, pass, 1500}},
		},
		"TAT of 0": {
			policy.Rule{Rate: 8_000_000_000, Capacity: 1514}, // a byte per ns: the clock wraps after 2^44 ns
			[]packet{{1<<44 - 1500, 1500, false, pass, 1500}, {1<<44 - 1500, 100, false, excess, 1500}, {1 << 44, 1513, false, pass, 1513}},
		},
		"a day idle at 400 Gbit/s": {
			policy.Rule{Rate: 400_000_000_000, Capacity: 65536},
			[]packet{{5, 60000, false, pass, 60000}, {86_400_000_000_000, 65000, false, pass, 65000}, {86_400_000_000_000, 600, false, excess, 65000}},
		},
	} {
		for _, algorithm := range algorithms {
			if c.rule.Penalty.Kind != policy.PenaltyNone && algorithm != policy.Leaky {
				continue
			}
			for _, each := range scopes {
				t.Run(fmt.Sprintf("%s/%v/%v", name, algorithm, policy.Each{Kind: each}), func(t *testing.T) {
					r.TB = t
					rule := c.rule
					rule.Prefix, rule.Algorithm, rule.Each.Kind = prefix("10.0.0.0/8"), algorithm, each
					rule.Framing.Overhead = shrink
					twin := newTwin(r, rule, 0)
					for i, p := range c.packets {
						if v := twin.offer(addr("10.0.0.7"), p.ns, p.bytes, p.ect); v != p.verdict {
							t.Errorf("packet %d: verdict %d, want %d", i, v, p.verdict)
						}
						if got := model.Bytes(twin.level(addr("10.0.0.7"), p.ns)); got != p.level {
							t.Errorf("packet %d: level %d bytes, want %d", i, got, p.level)
						}
					}
					twin.counted()
				})
			}
		}
	}
}
