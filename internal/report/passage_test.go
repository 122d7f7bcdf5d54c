package report

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// What pools do is said in the answer, and once more with the reason.
func TestPassageText(t *testing.T) {
	pool := NewPoolLevel(policy.Rule{Label: policy.Label{Name: "a"}, Rate: 1_000_000, Capacity: 1000}, 0)
	pool.Sharer = "10.0.0.7"
	inPool := Passage{RefusedBy: new("a"), RefusedReason: Capacity}
	for _, test := range []struct {
		stop        Stop
		answer, now string
	}{
		{Stop{Verdict: "pass"}, "they pass now", ""},
		{Stop{Verdict: "pass", Passage: Passage{BorrowedBy: []string{"10.0.0.0/24", "a"}}}, "they pass now, borrowed by 10.0.0.0/24 and a", ""},
		{Stop{Verdict: "pass", Passage: Passage{Guaranteed: true, GuaranteedBy: new("10.0.0.0/24")}}, "they pass now, guaranteed", ""},
		{Stop{Verdict: "pass", Passage: Passage{Guaranteed: true, GuaranteedBy: new("a"), BorrowedBy: []string{"10.0.0.0/24"}}},
			"they pass now, borrowed by 10.0.0.0/24, guaranteed by pool a", ""},
		{Stop{Verdict: "delay", WaitNS: 5000}, "they wait 5us", "waits 5us"},
		{Stop{Verdict: "mark", WaitNS: 5000}, "they wait 5us, marked by ECN", "waits 5us, and is marked by ECN if it allows that"},
		{Stop{Verdict: "delay", WaitNS: 5000, HeldBack: new(false)}, "they pass now, NOT DELAYED", "passes: nothing delays it by 5us"},
		{Stop{Verdict: "lost"}, "they are LOST", "is lost: no ifb device lets it enter again"},
		{Stop{Verdict: "drop", WaitNS: 5000, Passage: inPool}, "pool a decides; they are dropped now", "is excess in pool a: dropped"},
		{Stop{Verdict: "mark", WaitNS: 5000, Passage: inPool},
			"pool a decides; they are marked by ECN now", "is excess in pool a: marked by ECN if the packet allows it, else dropped"},
		{Stop{Verdict: "drop", Passage: Passage{RefusedBy: new("a"), RefusedReason: Share}},
			"they are beyond the fair share of 10.0.0.7, and dropped now", "is beyond the fair share of 10.0.0.7 in pool a: dropped"},
		{Stop{Verdict: "pass", Passage: Passage{RefusedBy: new("10.0.0.0/24"), RefusedReason: Capacity}},
			"they are excess, and pass", "is excess: counted, and passes"},
		{Stop{Verdict: "pass", Passage: Passage{WatchedNS: 204e6, UseBits: new(uint64(600_000)), RecentPackets: 12}},
			"10.0.0.0/24 matches; in the last 0.2 s, the rule used 600kbit, and none of 12 packets was dropped", ""},
		{Stop{Verdict: "drop", Passage: Passage{RefusedBy: new("a"), WatchedNS: 204e6, UseBits: new(uint64(600_000)), RecentPackets: 12}},
			"10.0.0.0/24 matches; in the last 0.2 s, the rule used 600kbit, and none of 12 packets was dropped", ""},
		{Stop{Verdict: "drop", Passage: Passage{
			RefusedBy: new("b"), WatchedNS: 204e6, UseBits: new(uint64(600_000)), RecentPackets: 12,
		}}, "10.0.0.0/24 matches; in the last 0.2 s, the rule used 600kbit, and none of 12 packets was dropped; pool b is full", ""},
		{Stop{Verdict: "pass", Passage: Passage{WatchedNS: 204e6, UseBits: new(uint64(0))}},
			"they pass now; the rule uses nothing now", ""},
		{Stop{Verdict: "pass", Passage: Passage{WatchedNS: 204e6, UseBits: new(uint64(600_000)), LimitedBy: new("a"), RecentPackets: 12, RecentDrops: 3}},
			"pool a decides; in the last 0.2 s, the rule used 600kbit, and 25% of 12 packets were dropped", ""},
		{Stop{Verdict: "drop", RateBits: new(uint64(1_000_000)), Passage: Passage{
			RefusedBy: new("a"), LimitedBy: new("10.0.0.0/24"), WatchedNS: 2e8, UseBits: new(uint64(990_000)), RecentPackets: 2, RecentDrops: 1,
		}}, "10.0.0.0/24 is limited by its own rate; in the last 0.2 s, the rule used 990kbit of 1mbit, and 50% of 2 packets were dropped", ""},
	} {
		s := test.stop
		s.Rule, s.Pools, s.Counted = new("10.0.0.0/24"), []PoolLevel{pool}, &Counted{PacketBytes: 1514, Bytes: 1514}
		if s.RefusedBy != nil && *s.RefusedBy == "b" {
			s.Pools = []PoolLevel{{Name: "b", Full: true}}
		}
		if got := s.answer(); !strings.HasSuffix(got, test.answer) {
			t.Errorf("%+v: the answer is %q, want %q", test.stop, got, test.answer)
		}
		var text strings.Builder
		s.now(&text)
		got := strings.Join(strings.Fields(text.String()), " ")
		if want := "now a packet of 1514 bytes " + test.now; test.now == "" && got != "" || test.now != "" && got != want && !strings.HasPrefix(got, want+" later") {
			t.Errorf("%+v: now %q, want %q", test.stop, got, want)
		}
	}
}

// A full pool is named, and who has which part of it.
func TestPassageFull(t *testing.T) {
	shares := func(kind, sharer string, active *uint64) Sharing {
		return Sharing{Share: kind, Sharer: sharer, ActiveSharers: active}
	}
	for _, test := range []struct {
		name    string
		change  func(home, ap *PoolLevel, p *Passage)
		decider int
		want    string
	}{
		{"room everywhere", func(_, _ *PoolLevel, _ *Passage) {}, -1, ""},
		{"first come, first served", func(_, ap *PoolLevel, _ *Passage) { ap.Full = true }, 1, "pool ap is full"},
		{"by member", func(_, ap *PoolLevel, _ *Passage) {
			ap.Full, ap.Sharing = true, shares("member", "home", new(uint64(24)))
		},
			1, "pool ap is full: 8mbit for 24 active members, and home gets its fair share"},
		{"sharers not counted", func(_, ap *PoolLevel, _ *Passage) { ap.Full, ap.Sharing = true, shares("/24", "10.0.0.0/24", nil) },
			1, "pool ap is full: 8mbit for its /24 subnets, and 10.0.0.0/24 gets its fair share"},
		{"sharer not known", func(_, ap *PoolLevel, _ *Passage) { ap.Full, ap.Sharing = true, shares("flow", "", new(uint64(1))) },
			1, "pool ap is full: 8mbit for 1 active flow"},
		{"use is known", func(home, ap *PoolLevel, p *Passage) {
			home.UseBits, ap.UseBits = new(uint64(3_000_000)), new(uint64(7_900_000))
			ap.Full, ap.Sharing, p.RecentDrops = true, shares("member", "home", new(uint64(2))), 1
		}, 1, "pool home gets 3.00mbit of 8mbit; pool ap is full: 7.90mbit of 8mbit for 2 active members"},
		{"its own use is known", func(home, _ *PoolLevel, _ *Passage) { home.Full, home.UseBits = true, new(uint64(7_900_000)) },
			0, "pool home is full: 7.90mbit of 8mbit"},
		{"the lowest of two", func(home, ap *PoolLevel, _ *Passage) { home.Full, ap.Full = true, true }, 0, "pool home is full"},
		{"refused by the shares of a pool below", func(home, ap *PoolLevel, p *Passage) {
			home.Sharing, p.RefusedBy, p.RefusedReason = shares("flow", "udp", nil), new("home"), Share
			ap.Full, ap.Sharing = true, shares("member", "home", new(uint64(2)))
		}, 1, "pool ap is full: 8mbit for 2 active members"},
		{"refused by shares alone", func(home, _ *PoolLevel, p *Passage) {
			home.Sharing, p.RefusedBy, p.RefusedReason = shares("flow", "udp", nil), new("home"), Share
		}, 0, ""},
		{"refused for lack of room", func(home, ap *PoolLevel, p *Passage) {
			home.Full, ap.Full, p.RefusedBy, p.RefusedReason = true, true, new("home"), Capacity
		}, 0, "pool home is full"},
		{"refused by the rule", func(_, ap *PoolLevel, p *Passage) {
			ap.Full, p.RefusedBy, p.RefusedReason = true, new("10.0.0.7/32"), Capacity
		}, -1, ""},
		{"guaranteed below", func(_, ap *PoolLevel, p *Passage) {
			ap.Full, ap.Sharing = true, shares("member", "home", new(uint64(2)))
			p.Guaranteed, p.GuaranteedBy = true, new("home")
		}, 1, "pool ap is full: 8mbit for 2 active members, but guaranteed packets pass"},
		{"another one limited them lately", func(home, ap *PoolLevel, p *Passage) {
			home.Full, ap.Full, p.RefusedBy, p.RefusedReason, p.LimitedBy = true, true, new("ap"), Capacity, new("home")
		}, 0, "pool home is full"},
		{"the rule limited them lately", func(_, ap *PoolLevel, p *Passage) {
			ap.Full, p.LimitedBy, p.RecentDrops = true, new("10.0.0.0/24"), 1
			ap.UseBits, ap.Sharing = new(uint64(7_900_000)), shares("member", "home", new(uint64(2)))
		}, -1, "pool ap is full, too: 7.90mbit of 8mbit for 2 active members"},
		{"nothing limited them lately", func(home, _ *PoolLevel, p *Passage) {
			p.RefusedBy, p.RefusedReason, p.RecentPackets = new("home"), Capacity, 9
		}, -1, ""},
		{"guaranteed above", func(home, _ *PoolLevel, p *Passage) {
			home.Full, home.Sharing = true, shares("host", "10.0.0.7", new(uint64(2)))
			p.Guaranteed, p.GuaranteedBy = true, new("ap")
		}, 0, "pool home is full: 8mbit for 2 active hosts, and 10.0.0.7 gets its fair share"},
	} {
		p := Passage{Pools: []PoolLevel{{Name: "home", RateBits: 8e6}, {Name: "ap", RateBits: 8e6}}}
		test.change(&p.Pools[0], &p.Pools[1], &p)
		if i, got := p.decider(), p.full(); i != test.decider || got != test.want {
			t.Errorf("%s: %d decides; %q, want %d, %q", test.name, i, got, test.decider, test.want)
		}
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
	beyond := plain
	beyond.Sharing = Sharing{Share: "member", Sharer: "c", WithinShare: new(false)}
	for _, test := range []struct {
		pool    PoolLevel
		decides bool
		want    string
	}{
		{plain, false, "a: 1mbit; empty"},
		{all, false, "a: 1mbit, 500kbit guaranteed; 50% full; 3 active hosts; 25% refused"},
		{used, false, "a: 1mbit, 500kbit guaranteed; 900kbit used now; 3 active hosts; 25% refused, 2 packets just now"},
		{below, false, "a: 1mbit, 500kbit guaranteed; 900kbit used now"},
		{beyond, true, "a, decides: 1mbit; empty"},
	} {
		if got := test.pool.text(test.decides); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}
