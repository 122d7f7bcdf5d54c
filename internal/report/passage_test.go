package report

import (
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// What pools do is said in the answer, and once more with the reason.
func TestPassageText(t *testing.T) {
	pool := NewPoolLevel(policy.Rule{Label: policy.Label{Name: "a"}, Rate: 1_000_000, Capacity: 1000}, 0)
	inPool := &Refusal{Kind: KindPool, Name: "a", Reason: Capacity}
	for _, test := range []struct {
		stop        Stop
		answer, now string
	}{
		{Stop{Verdict: "pass"}, "they pass now", "conforms, and passes"},
		{Stop{Verdict: "pass", Passage: Passage{Borrowed: true}}, "they pass now, borrowed", "conforms, and passes, borrowed"},
		{Stop{Verdict: "pass", Passage: Passage{Guaranteed: true}}, "they pass now, guaranteed", "conforms, and passes, guaranteed"},
		{Stop{Verdict: "pass", Passage: Passage{Guaranteed: true, GuaranteedBy: "b"}},
			"they pass now, guaranteed by pool b", "conforms, and passes, guaranteed by pool b"},
		{Stop{Verdict: "delay", WaitNS: 5000}, "they wait 5us", "waits 5us"},
		{Stop{Verdict: "mark", WaitNS: 5000}, "they wait 5us, marked by ECN", "waits 5us, and is marked by ECN if it allows that"},
		{Stop{Verdict: "delay", WaitNS: 5000, HeldBack: new(false)}, "they pass now, NOT DELAYED", "passes: nothing delays it by 5us"},
		{Stop{Verdict: "lost"}, "they are LOST", "is lost: no ifb device lets it enter again"},
		{Stop{Verdict: "drop", WaitNS: 5000, Passage: Passage{RefusedBy: inPool}}, "pool a decides; they are dropped now", "is excess in pool a: dropped"},
		{Stop{Verdict: "mark", WaitNS: 5000, Passage: Passage{RefusedBy: inPool}},
			"pool a decides; they are marked by ECN now", "is excess in pool a: marked by ECN if the packet allows it, else dropped"},
		{Stop{Verdict: "drop", Passage: Passage{RefusedBy: &Refusal{Kind: KindPool, Name: "a", Reason: Share, Sharer: "10.0.0.7"}}},
			"they are beyond the fair share of 10.0.0.7, and dropped now", "is beyond the fair share of 10.0.0.7 in pool a: dropped"},
		{Stop{Verdict: "pass", Passage: Passage{RefusedBy: &Refusal{Kind: KindRule, Name: "10.0.0.0/24", Reason: Capacity}}},
			"they are excess, and pass", "is excess: counted, and passes"},
	} {
		s := test.stop
		s.Rule, s.Pools, s.Counted = new("10.0.0.0/24"), []PoolLevel{pool}, &Counted{PacketBytes: 1514, Bytes: 1514}
		if got := s.answer(); !strings.HasSuffix(got, test.answer) {
			t.Errorf("%+v: the answer is %q, want %q", test.stop, got, test.answer)
		}
		var text strings.Builder
		s.now(&text)
		got := strings.Join(strings.Fields(text.String()), " ")
		if want := "now a packet of 1514 bytes " + test.now; got != want && !strings.HasPrefix(got, want+" later") {
			t.Errorf("%+v: now %q, want %q", test.stop, got, want)
		}
	}
}

func TestPoolLevelText(t *testing.T) {
	rule := policy.Rule{Label: policy.Label{Name: "a"}, Rate: 1_000_000, Capacity: 1000}
	plain := NewPoolLevel(rule, 0)
	rule.Within, rule.Guarantee, rule.Excess, rule.Queue = "b", 500_000, policy.Delay, 3000
	all := NewPoolLevel(rule, 2000<<20)
	all.Sharing = Sharing{Share: "host", Sharer: "10.0.0.7", WithinShare: new(true), ActiveSharers: new(uint64(3))}
	all.PassedPackets, all.DroppedPackets = 30, 10
	beyond := plain
	beyond.Sharing = Sharing{Share: "member", Sharer: "c", WithinShare: new(false)}
	for _, test := range []struct {
		pool    PoolLevel
		decides bool
		want    string
	}{
		{plain, false, "a: 1mbit; empty, of 1000 bytes"},
		{all, false, "a: 1mbit within b, 500kbit guaranteed; 2000 of 4000 bytes (50.0 % full); fair shares by host, 3 active; 25% of 40 packets refused"},
		{beyond, true, "a, decides: 1mbit; empty, of 1000 bytes; fair shares by member, c is beyond its share"},
	} {
		if got := test.pool.text(test.decides); got != test.want {
			t.Errorf("%q, want %q", got, test.want)
		}
	}
}
