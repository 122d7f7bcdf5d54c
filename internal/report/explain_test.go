package report

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

func TestAbout(t *testing.T) {
	for ns, want := range map[uint64]string{
		0: "0s", 1: "1ns", 999: "999ns", 9999: "10us", 10001: "10us", 77_871_234: "77.9ms",
		1_000_000_000: "1s", 29_999_999_999: "30s", 3_600_000_000_001: "1h0m0s", 1<<64 - 1: "1280555h33m20s",
	} {
		if got := About(ns); got != want {
			t.Errorf("%d ns is about %s, want %s", ns, got, want)
		}
	}
}

// Nothing that can be folded is wider than a terminal, and no word gets lost.
func TestFactIsFolded(t *testing.T) {
	text := strings.Repeat("seven letters and ", 30) + "end"
	var s strings.Builder
	fact(&s, "note", text)
	lines := strings.Split(strings.TrimSuffix(s.String(), "\n"), "\n")
	for i, line := range lines {
		full := len(line)+len(" letters") > screenWidth
		if len(line) > screenWidth || !full && i < len(lines)-1 {
			t.Errorf("line %d has %d columns: %q", i, len(line), line)
		}
		if i > 0 && !strings.HasPrefix(line, strings.Repeat(" ", labelWidth+4)) {
			t.Errorf("line %d does not hang below the first: %q", i, line)
		}
	}
	if got := strings.Join(strings.Fields(s.String()), " "); got != "note "+text {
		t.Errorf("%q has become %q", text, got)
	}
}

// level is a stop of a bucket that is said to be as it is.
func level(change func(*Stop)) string {
	p := Stop{
		Answer: Answer{Device: "va", Direction: "egress", Rule: new("10.0.0.0/24"), Attached: new(true), Verdict: "pass", Bytes: 1000},
		Match:  "dst", Address: "10.0.0.7", State: "attached", Sentence: "says",
		Bucket: &Level{
			Key: "10.0.0.7", LevelBytes: 100, CapacityBytes: 5000, HoldsBytes: 5000, EmptyNS: 100e9, Conforms: true, RoomPackets: 4, RoomBytes: 4900,
		},
	}
	change(&p)
	var s strings.Builder
	p.text(&s, map[string]bool{})
	return p.now() + "\n" + s.String()
}

// bare is text as if lines had no end.
func bare(text string) string { return strings.Join(strings.Fields(text), " ") }

func TestVerdictWords(t *testing.T) {
	excess := func(p *Stop) {
		p.Verdict, p.WaitNS, p.RefusedBy, p.RefusedReason = "drop", 500_000_000, p.Rule, Capacity
		b := p.Bucket
		b.LevelBytes, b.Conforms, b.RoomPackets, b.RoomBytes, b.WaitNS = 4500, false, 0, 0, 500_000_000
	}
	// queue makes the rule one that delays, with a level at which the packet waits.
	queue := func(p *Stop, r policy.Rule, level, wait uint64, verdict string) {
		b := p.Bucket
		b.CapacityBytes, b.HoldsBytes = r.Capacity, r.Capacity+r.Queue
		b.LevelBytes, b.WaitNS, b.RoomBytes, b.RoomPackets, p.Verdict = level, wait, 10000-level, (10000-level)/1000, verdict
		p.WaitNS = wait
		if b.Conforms = verdict != "drop"; !b.Conforms {
			p.RefusedBy, p.RefusedReason = p.Rule, Capacity
		}
	}
	leaky, gcra := queues()
	yes, no := true, false
	for _, test := range []struct {
		name   string
		change func(*Stop)
		want   []string
	}{
		{"conforms", func(*Stop) {}, []string{
			"bucket     of 10.0.0.7: 100 of 5000 bytes (2.0% full); empty in 1m40s if no more come",
			"a packet of 1000 bytes passes now; 10.0.0.0/24 has room for 4 such packets (4900 bytes)",
		}},
		{"empty", func(p *Stop) { p.Bucket.LevelBytes, p.Bucket.EmptyNS = 0, 0 }, []string{"bucket     of 10.0.0.7: 0 of 5000 bytes (0% full)\n"}},
		{"just one", func(p *Stop) { p.Bucket.RoomPackets = 1 }, []string{"room for 1 such packet (4900 bytes)"}},
		{"dropped", excess, []string{"a packet of 1000 bytes is dropped now by 10.0.0.0/24; it conforms in 500ms, if no others come\n"}},
		{"marked", func(p *Stop) { excess(p); p.Verdict = "mark" }, []string{"is marked by ECN now by 10.0.0.0/24 if it allows that, else dropped; it conforms in"}},
		{"counted only", func(p *Stop) { excess(p); p.Verdict = "pass" }, []string{"passes now, counted as excess by 10.0.0.0/24"}},
		{"held", func(p *Stop) {
			excess(p)
			p.Bucket.HeldNS = 29_871_000_000
		}, []string{
			"bucket     of 10.0.0.7: full, and kept full by the penalty for another 29.9s; empty in",
		}},
		{"an empty queue", func(p *Stop) { queue(p, leaky, 0, 0, "pass") }, []string{
			"bucket     of 10.0.0.7: 0 of 10000 bytes (0% full)",
			"a packet of 1000 bytes passes now; 10.0.0.0/24 has room for 10 such packets (10000 bytes)",
		}},
		{"an empty queue behind a bucket", func(p *Stop) { queue(p, gcra, 0, 0, "pass") }, []string{
			"bucket     of 10.0.0.7: 0 of 10000 bytes (0% full)",
		}},
		{"waits", func(p *Stop) { queue(p, leaky, 2000, 2e6, "delay"); p.HeldBack = &yes }, []string{
			"bucket     of 10.0.0.7: 2000 of 10000 bytes (20% full); empty in",
			"a packet of 1000 bytes waits 2ms; 10.0.0.0/24 has room for 8 such packets (8000 bytes)\n",
		}},
		{"waits behind a bucket", func(p *Stop) { queue(p, gcra, 5000, 2e6, "delay") }, []string{
			"bucket     of 10.0.0.7: 5000 of 10000 bytes (50% full); empty in", "a packet of 1000 bytes waits 2ms; 10.0.0.0/24 has room",
		}},
		{"waits and is marked", func(p *Stop) { queue(p, leaky, 6000, 6e6, "mark") }, []string{
			"a packet of 1000 bytes waits 6ms, and is marked by ECN if it allows that; 10.0.0.0/24 has room for 4 such packets",
		}},
		{"nothing delays", func(p *Stop) { queue(p, leaky, 2000, 2e6, "delay"); p.HeldBack = &no }, []string{
			"a packet of 1000 bytes passes now: nothing delays it by 2ms; 10.0.0.0/24 has room",
		}},
		{"lost", func(p *Stop) { queue(p, leaky, 2000, 2e6, "lost"); p.HeldBack = &no }, []string{
			"a packet of 1000 bytes is LOST: no ifb device lets it enter again",
		}},
		{"no room", func(p *Stop) { queue(p, leaky, 9500, 5e5, "drop") }, []string{
			"a packet of 1000 bytes is dropped now by 10.0.0.0/24; it conforms in 500us, if no others come",
		}},
		{"not in force", func(p *Stop) { excess(p); p.Attached, p.State, p.Verdict = new(false), "detached", "pass" }, []string{
			"rule       says [NOT IN FORCE: detached]", "a packet of 1000 bytes passes: the rule is NOT IN FORCE (detached)",
		}},
		{"a burst", func(p *Stop) { p.SpeedTestBits, p.FirstSecondBits = new(uint64(20.6e6)), new(uint64(26e6)) }, []string{
			"speed      a 10 s speed test shows up to 20.6mbit, its first second 26.0mbit; of payload alone, about 5% less",
		}},
		{"dropped below a full pool", func(p *Stop) {
			excess(p)
			p.Pools, p.LimitedBy = []PoolLevel{{Name: "ap-1"}}, new("ap-1")
		}, []string{"dropped now by 10.0.0.0/24; it conforms in 500ms, if no others come; pool ap-1 limited such packets just now\n"}},
		{"which flow is not known", func(p *Stop) {
			p.Verdict, p.Pools, p.DecidedBy, p.Note = "unknown", []PoolLevel{{Name: "ap-1"}}, new("ap-1"), "up to 50mbit"
		}, []string{"pool ap-1 limits them now; up to 50mbit\n"}},
		{"spilled", func(p *Stop) { p.Bucket.Spilled = true }, []string{"no room for 10.0.0.7: this is the rule's spill bucket"}},
		{"wider", func(p *Stop) {
			p.Hides = []Brief{{Rule: "10.0.0.0/8", limit: "2mbit"}, {Rule: "10.0.0.0/7", limit: "not limited"}}
		}, []string{
			"wider      overrides 10.0.0.0/8 (2mbit), 10.0.0.0/7 (not limited)",
		}},
	} {
		got := level(test.change)
		for _, want := range test.want {
			if !strings.Contains(bare(got), bare(want)) {
				t.Errorf("%s: %q is not in\n%s", test.name, want, got)
			}
		}
	}
}

func TestFewElsewhere(t *testing.T) {
	for count, lines := range map[int]int{1: 1, 4: 4, 5: 5, 100: 5} {
		path := Path{Packets: "to 10.0.0.7", How: "leave by va"}
		for i := range count {
			path.Elsewhere = append(path.Elsewhere, Elsewhere{
				Device: fmt.Sprint("tap", i), Direction: "egress", Brief: Brief{Rule: "0.0.0.0/0"}, Attached: true, State: "attached", When: "not on this path",
			})
		}
		var s strings.Builder
		if err := (Paths{path}).Text(&s); err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(s.String(), "\n") - 4; got != lines {
			t.Errorf("%d are told in %d lines, want %d:\n%s", count, got, lines, &s)
		}
		if more := strings.Contains(s.String(), " more, which -j lists"); more != (count > fewElsewhere) {
			t.Errorf("of %d: %s", count, &s)
		}
	}
}

func TestNewBrief(t *testing.T) {
	network := netip.MustParsePrefix("10.0.0.0/24")
	for want, r := range map[string]policy.Rule{
		"10.0.0.0/24 (unlimited)":        {Rate: policy.Unlimited},
		"10.0.0.0/24 (within a)":         {Rate: policy.Unlimited, Within: "a"},
		"10.0.0.0/24 (5mbit)":            {Rate: 5e6, Capacity: policy.DefaultCapacity(5e6)},
		"10.0.0.0/24 (5mbit, each host)": {Rate: 5e6, Capacity: policy.DefaultCapacity(5e6), Each: policy.Each{Kind: policy.EachHost}},
	} {
		r.Prefix = network
		if b := NewBrief(r, "va", policy.Egress, policy.MatchDst); b.String() != want || !strings.HasPrefix(b.Sentence, "va egress: ") {
			t.Errorf("%q, %q, want %q", b, b.Sentence, want)
		}
	}
}
