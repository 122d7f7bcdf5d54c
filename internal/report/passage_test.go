package report

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// What pools do is said of the packet, and what they did just now of the rule.
func TestPassageText(t *testing.T) {
	pool := NewPoolLevel(policy.Rule{Label: policy.Label{Name: "a"}, Rate: 1_000_000, Capacity: 1000}, 0)
	pool.Sharer = "10.0.0.7"
	const rule, lately = "10.0.0.0/24", "; in the last 0.2 s, the rule used 600kbit"
	refused := func(by, reason string) Passage { return Passage{RefusedBy: &by, RefusedReason: reason} }
	watched := func(p Passage, packets, drops uint64) Passage {
		p.WatchedNS, p.UseBits, p.RecentPackets, p.RecentDrops = 204e6, new(uint64(600_000)), packets, drops
		return p
	}
	limited := watched(Passage{LimitedBy: new("a")}, 12, 3)
	byPackets := limited
	byPackets.LimitedReason, byPackets.Limited.Packets = TooManyPackets, 2000
	byRule := watched(refused("a", Capacity), 12, 6)
	byRule.LimitedBy = new(rule)
	for _, test := range []struct {
		verdict       string
		wait          uint64
		passage       Passage
		decision, now string
	}{
		{"pass", 0, Passage{}, rule + " decides", "passes now"},
		{"pass", 0, Passage{BorrowedBy: []string{rule, "a"}}, rule + " decides", "passes now, borrowed by 10.0.0.0/24 and a"},
		{"pass", 0, Passage{GuaranteedBy: new(rule)}, rule + " decides", "passes now, guaranteed"},
		{"pass", 0, Passage{GuaranteedBy: new("a"), BorrowedBy: []string{rule}}, rule + " decides",
			"passes now, borrowed by 10.0.0.0/24, guaranteed by pool a"},
		{"delay", 5000, Passage{}, rule + " decides", "waits 5us"},
		{"mark", 5000, Passage{}, rule + " decides", "waits 5us, and is marked by ECN if it allows that"},
		{"lost", 0, Passage{}, rule + " decides", "is LOST: no ifb device lets it enter again"},
		{"drop", 5000, refused("a", Capacity), rule + " matches, and pool a decides", "is dropped now by pool a; it conforms in 5us, if no others come"},
		{"mark", 5000, refused("a", Capacity), rule + " matches, and pool a decides",
			"is marked by ECN now by pool a if it allows that, else dropped; it conforms in 5us, if no others come"},
		{"drop", 5000, refused("a", Share), rule + " matches, and pool a decides",
			"is dropped now by pool a, as it is beyond the fair share of 10.0.0.7; it conforms in 5us, if no others come"},
		{"pass", 5000, refused(rule, Capacity), rule + " decides", "passes now, counted as excess by 10.0.0.0/24; it conforms in 5us, if no others come"},
		{"pass", 0, watched(Passage{}, 12, 0), rule + " decides" + lately, "passes now"},
		{"drop", 0, watched(refused("a", Capacity), 12, 0), rule + " matches, and pool a decides" + lately,
			"is dropped now by pool a; it conforms in 0s, if no others come"},
		{"pass", 0, watched(Passage{}, 0, 0), rule + " decides" + lately, "passes now"},
		{"pass", 0, limited, rule + " matches, and pool a decides" + lately + ", and 25% of 12 packets were dropped", "passes now; pool a limited such packets just now"},
		{"pass", 0, byPackets, rule + " matches, and pool a decides" + lately + ", and 25% of 12 packets were dropped",
			"passes now; pool a limited such packets just now, as there were more than 2k packets per second"},
		{"drop", 0, byRule, rule + " decides" + lately + ", and 50% of 12 packets were dropped", "is dropped now by pool a; it conforms in 0s, if no others come"},
	} {
		s := Stop{Answer: Answer{Rule: new(rule), Bytes: 1514, Verdict: test.verdict, WaitNS: test.wait}, Passage: test.passage}
		s.Pools = []PoolLevel{pool}
		if s.DecidedBy = test.passage.LimitedBy; s.DecidedBy == nil {
			s.DecidedBy = test.passage.RefusedBy
		}
		if got := s.decision(); got != test.decision {
			t.Errorf("%+v: the decision is %q, want %q", test, got, test.decision)
		}
		if got, want := s.now(), "a packet of 1514 bytes "+test.now; got != want {
			t.Errorf("%+v: now %q, want %q", test, got, want)
		}
	}
	s := Stop{Answer: Answer{Rule: new(rule), Verdict: "delay", WaitNS: 5000}, Passage: Passage{Pools: []PoolLevel{pool}}, HeldBack: new(false)}
	if got := s.now(); !strings.HasSuffix(got, "passes now: nothing delays it by 5us") {
		t.Errorf("without fq: %q", got)
	}
}

func TestPoolLevelText(t *testing.T) {
	rule := policy.Rule{Label: policy.Label{Name: "a"}, Rate: 1_000_000, Capacity: 1000}
	plain := NewPoolLevel(rule, 0)
	rule.Within, rule.Guarantee, rule.Excess, rule.Queue = "b", 500_000, policy.Delay, 3000
	all := NewPoolLevel(rule, 2000<<20)
	all.Sharing = Sharing{Share: "host", Sharer: "10.0.0.7", WithinShare: new(true), ActiveSharers: new(uint64(3))}
	all.PassedPackets, all.RefusedPackets = 30, 10
	used := all
	used.UseBits, used.RecentRefusals = new(uint64(900_000)), 2
	below := used
	below.PassedPackets, below.RefusedPackets, below.RecentRefusals, below.ActiveSharers = 0, 0, 0, new(uint64)
	full := used
	full.Full = true
	beyond := plain
	beyond.Sharing = Sharing{Share: "member", Sharer: "c", WithinShare: new(false)}
	for _, test := range []struct {
		pool PoolLevel
		want string
	}{
		{plain, "a: 1mbit; empty"},
		{all, "a: 1mbit, 500kbit guaranteed; 50% full; 3 active hosts; 25% refused"},
		{used, "a: 1mbit, 500kbit guaranteed; 900kbit used now; 3 active hosts; 25% refused, 2 packets just now"},
		{full, "a: 1mbit, 500kbit guaranteed; full, 900kbit used now; 3 active hosts; 25% refused, 2 packets just now"},
		{below, "a: 1mbit, 500kbit guaranteed; 900kbit used now"},
		{beyond, "a: 1mbit; empty"},
	} {
		if got := test.pool.text(); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}
