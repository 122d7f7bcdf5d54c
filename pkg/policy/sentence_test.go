package policy

import (
	"testing"
	"time"
)

func TestSentence(t *testing.T) {
	each := func(kind EachKind, bits uint8) func(*Rule) {
		return func(r *Rule) { r.Each = Each{kind, bits} }
	}
	excess := func(e Excess) func(*Rule) { return func(r *Rule) { r.Excess = e } }
	penalty := func(kind PenaltyKind, d time.Duration) func(*Rule) {
		return func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{kind, d} }
	}
	framing := func(overhead int16, mpu uint16) func(*Rule) {
		return func(r *Rule) { r.Framing = Framing{Overhead: overhead, MPU: mpu} }
	}
	named := func(name string) func(*Rule) { return func(r *Rule) { r.Label.Name = name } }
	host, flow := each(EachHost, 0), each(EachFlow, 0)
	const gets = " gets 10mbit (1.25 MB/s), burst 125 kB (100 ms)"
	for _, test := range []struct {
		rule  Rule
		dir   Direction
		match Match
		want  string
	}{
		{ruleOn("10.0.0.0/24", host), Egress, MatchDst,
			"eth0 egress: each host in 10.0.0.0/24 gets 10mbit (1.25 MB/s), burst 125 kB (100 ms); excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24"), Ingress, MatchSrc,
			"eth0 ingress: 10.0.0.0/24 as a whole" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", each(EachSubnet, 24)), Ingress, MatchSrc,
			"eth0 ingress: 10.0.0.0/24 as a whole" + gets + "; excess is dropped (gcra)"},
		{ruleOn("2001:db8::/32", each(EachSubnet, 64)), Egress, MatchDst,
			"eth0 egress: each /64 subnet of 2001:db8::/32" + gets + "; excess is dropped (gcra)"},
		{ruleOn("2001:db8::/32", each(EachSubnet, 128)), Egress, MatchDst,
			"eth0 egress: each host in 2001:db8::/32" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.5/32", host, func(r *Rule) { r.NAT = true }), Egress, MatchDst,
			"eth0 egress: each host behind NAT to 10.0.0.5" + gets + "; excess is dropped (gcra)"},
		{ruleOn("::/0", each(EachSubnet, 64), func(r *Rule) { r.NAT = true }), Ingress, MatchSrc,
			"eth0 ingress: each /64 subnet behind NAT from ::/0" + gets + "; excess is dropped (gcra)"},
		{ruleOn("0.0.0.0/0", func(r *Rule) { r.NAT, r.Share.Kind = true, ShareHost }), Egress, MatchDst,
			"eth0 egress: 0.0.0.0/0 as a whole" + gets + ", shared fairly by its hosts behind NAT; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", flow), Egress, MatchDst,
			"eth0 egress: each flow to 10.0.0.0/24" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.5/32", flow), Ingress, MatchSrc,
			"eth0 ingress: each flow from 10.0.0.5" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.5/32"), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped (gcra)"},
		{ruleOn("2001:db8::1/128", host), Egress, MatchDst,
			"eth0 egress: 2001:db8::1" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", host), Egress, MatchSrc,
			"eth0 egress by source address: each host in 10.0.0.0/24" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", flow), Ingress, MatchDst,
			"eth0 ingress by destination address: each flow to 10.0.0.0/24" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.5/32", excess(ECN)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is marked by ECN if the packet allows it, else dropped (gcra)"},
		{ruleOn("10.0.0.5/32", excess(Pass)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is counted but not dropped (gcra)"},
		{ruleOn("10.0.0.5/32", delay(Leaky)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets 10mbit (1.25 MB/s), queue 125 kB (100 ms); excess is delayed, marked by ECN beyond 1 ns, and dropped beyond the queue (leaky)"},
		{ruleOn("10.0.0.5/32", delay(Leaky), func(r *Rule) { r.ECNAbove = ECNAbove(100 * time.Millisecond) }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets 10mbit (1.25 MB/s), queue 125 kB (100 ms); excess is delayed, and dropped beyond the queue (leaky)"},
		{ruleOn("10.0.0.5/32", delay(GCRA), func(r *Rule) { r.Queue, r.ECNAbove = r.Capacity, Never }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + ", queue 125 kB (100 ms); excess is delayed, and dropped beyond the queue (gcra)"},
		{ruleOn("10.0.0.5/32", delay(GCRA), func(r *Rule) { r.Queue, r.Order = r.Capacity, SparseFirst }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + ", queue 125 kB (100 ms); excess is delayed but for sparse flows, marked by ECN beyond 1 ns, and dropped beyond the queue (gcra)"},
		{ruleOn("10.0.0.5/32", penalty(PenaltyFill, 0)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped, and fills the bucket (leaky)"},
		{ruleOn("10.0.0.5/32", penalty(PenaltyHold, 30*time.Second)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped, and keeps the bucket full for 30s (leaky)"},
		{ruleOn("10.0.0.5/32", func(r *Rule) { r.Fail = Closed }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped (gcra); what cannot be metered is dropped"},
		{ruleOn("10.0.0.5/32", framing(38, 84)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped (gcra); each packet counts 38 bytes more and at least 84 bytes"},
		{ruleOn("10.0.0.5/32", framing(-1, 0)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped (gcra); each packet counts 1 byte less"},
		{ruleOn("10.0.0.5/32", framing(0, 64)), Egress, MatchDst,
			"eth0 egress: 10.0.0.5" + gets + "; excess is dropped (gcra); each packet counts at least 64 bytes"},
		{ruleOn("10.0.0.0/25", unlimited), Egress, MatchDst,
			"eth0 egress: 10.0.0.0/25 is not limited"},
		{ruleOn("10.0.0.5/32", unlimited), Egress, MatchSrc,
			"eth0 egress by source address: 10.0.0.5 is not limited"},
		{ruleOn("10.0.0.5/32", func(r *Rule) { r.Rate, r.Capacity = MaxRate, MinCapacity }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets 400gbit (50 GB/s), burst 1.514 kB (30.28 ns); excess is dropped (gcra)"},
		{ruleOn("10.0.0.5/32", func(r *Rule) { r.Rate, r.Capacity = 8000, 65536 }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets 8kbit (1 kB/s), burst 65.54 kB (65.54 s); excess is dropped (gcra)"},
		{ruleOn("10.0.0.7/32", named("alice")), Egress, MatchDst,
			"eth0 egress: 10.0.0.7 (\"alice\")" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", host, named("a \"b\"\x1b")), Egress, MatchDst,
			"eth0 egress: each host in 10.0.0.0/24 (\"a \\\"b\\\"\\x1b\")" + gets + "; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", named("lab"), func(r *Rule) { r.Shadow = Shadow{Rate: 1e6, Capacity: 125_000} }), Egress, MatchDst,
			"eth0 egress: 10.0.0.0/24 (\"lab\") as a whole" + gets + "; excess is dropped (gcra); shadow: 10.0.0.0/24 as a whole gets 1mbit (125 kB/s), burst 125 kB (1 s)"},
		{ruleOn("10.0.0.0/25", unlimited, named("lab")), Egress, MatchDst,
			"eth0 egress: 10.0.0.0/25 (\"lab\") is not limited"},
		{ruleOn("10.0.0.7/32", func(r *Rule) { r.Within, r.Guarantee, r.Weight = "ap-1", 5e6, 4 }), Egress, MatchDst,
			"eth0 egress: 10.0.0.7" + gets + ", within pool \"ap-1\", 5mbit of it guaranteed, weight 4; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", host, func(r *Rule) { r.Within, r.Guarantee, r.Members = "a\x1b", 5e6, 50 }), Egress, MatchDst,
			"eth0 egress: each host in 10.0.0.0/24" + gets + ", within pool \"a\\x1b\", 5mbit of it guaranteed to each of at most 50; excess is dropped (gcra)"},
		{ruleOn("2001:db8::/32", func(r *Rule) { r.Share = Share{ShareSubnet, 56} }), Egress, MatchDst,
			"eth0 egress: 2001:db8::/32 as a whole" + gets + ", shared fairly by its /56 subnets; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", func(r *Rule) { r.Share.Kind, r.Within = ShareFlow, "ap-1" }), Egress, MatchDst,
			"eth0 egress: 10.0.0.0/24 as a whole" + gets + ", shared fairly by its flows, within pool \"ap-1\"; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", unlimited, named("lab"), func(r *Rule) { r.Within = "ap-1" }), Egress, MatchSrc,
			"eth0 egress by source address: 10.0.0.0/24 (\"lab\") is limited only by pool \"ap-1\""},
		{ruleOn("10.0.0.7/32", unlimited, framing(4, 0), func(r *Rule) { r.Within, r.Guarantee, r.Weight, r.Fail = "ap-1", 5e6, 2, Closed }), Egress, MatchDst,
			"eth0 egress: 10.0.0.7 is limited only by pool \"ap-1\", 5mbit of it guaranteed, weight 2; each packet counts 4 bytes more; what cannot be metered is dropped"},
		{poolOf("uplink", func(r *Rule) { r.Share.Kind = ShareMember }), Ingress, MatchDst,
			"pool \"uplink\"" + gets + ", shared fairly by its members; excess is dropped (gcra)"},
		{poolOf("a \"b\"", func(r *Rule) { r.Within, r.Share.Kind, r.Excess = "uplink", ShareHost, ECN }), Ingress, MatchDst,
			"pool \"a \\\"b\\\"\"" + gets + ", shared fairly by its hosts, within pool \"uplink\"; excess is marked by ECN if the packet allows it, else dropped (gcra)"},
		{poolOf("uplink", func(r *Rule) { r.Cluster = Cluster{Name: "gold", Weight: 3, Floor: 1e6, Safe: 5e5}; r.Within = "all" }), Ingress, MatchDst,
			"pool \"uplink\"" + gets + " for all hosts of cluster \"gold\" together, weight 3 on this one, at least 1mbit on this one, " +
				"500kbit on this one without a lease, within pool \"all\"; excess is dropped (gcra)"},
		{poolOf("uplink", func(r *Rule) { r.Cluster = Cluster{Name: "gold", Share: 1e6} }), Ingress, MatchDst,
			"pool \"uplink\"" + gets + " for all hosts of cluster \"gold\" together, 1mbit on this one; excess is dropped (gcra)"},
		{poolOf("uplink", func(r *Rule) { r.Adapt = Adapt{Min: 2e6} }), Ingress, MatchDst,
			"pool \"uplink\"" + gets + ", between 2mbit and 10mbit as the line's latency allows; excess is dropped (gcra)"},
		{poolOf("uplink", func(r *Rule) { r.Adapt = Adapt{Min: 2e6, Above: 5e6, To: "192.0.2.1,2001:db8::1"} }), Ingress, MatchDst,
			"pool \"uplink\"" + gets + ", between 2mbit and 10mbit as the line's latency allows, 5ms above the usual, to 192.0.2.1 and 2001:db8::1; excess is dropped (gcra)"},
		{ruleOn("10.0.0.0/24", colours(TRTCM), func(r *Rule) { r.Capacity, r.Colours.PBS, r.Colours.Aware = 375_000, 750_000, false }), Egress, MatchDst,
			"eth0 egress: 10.0.0.0/24 as a whole gets CIR 10mbit (1.25 MB/s), CBS 375 kB; PIR 20mbit, PBS 750 kB; yellow packets get AF12, red packets are dropped (trtcm)"},
		{ruleOn("10.0.0.0/24", host, colours(SRTCM), func(r *Rule) { r.Fail = Closed }), Egress, MatchDst,
			"eth0 egress: each host in 10.0.0.0/24 gets CIR 10mbit (1.25 MB/s), CBS 125 kB, EBS 1.514 kB; yellow packets get AF12, red packets are dropped (srtcm, colour-aware); what cannot be metered is dropped"},
		{ruleOn("10.0.0.5/32", colours(RFC4115), func(r *Rule) {
			r.Colours.In, r.Colours.Green, r.Colours.Yellow, r.Colours.Red = ColourMap{1 << 8, 1 | 1<<63}, SetDSCP(46), ActionPass, ActionECN
		}), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets CIR 10mbit (1.25 MB/s), CBS 125 kB; EIR 20mbit, EBS 1.514 kB; green packets get EF, yellow packets pass, red packets are marked by ECN if they allow it, else dropped (rfc4115, colour-aware with CS0=red CS1=yellow 63=red)"},
		{ruleOn("10.0.0.5/32", colours(TRTCM), func(r *Rule) { r.Shadow = Shadow{Rate: 1e6, Capacity: 125_000, PIR: 2e6, PBS: 250_000} }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets CIR 10mbit (1.25 MB/s), CBS 125 kB; PIR 20mbit, PBS 1.514 kB; yellow packets get AF12, red packets are dropped (trtcm, colour-aware); shadow: 10.0.0.5 gets CIR 1mbit (125 kB/s), CBS 125 kB; PIR 2mbit, PBS 250 kB"},
		// Not a valid rule, but it must still print.
		{ruleOn("10.0.0.5/32", func(r *Rule) { r.Rate = 0 }), Egress, MatchDst,
			"eth0 egress: 10.0.0.5 gets 0 (0 B/s), burst 125 kB (never drains); excess is dropped (gcra)"},
	} {
		if got := test.rule.Sentence("eth0", test.dir, test.match); got != test.want {
			t.Errorf("\n got %s\nwant %s", got, test.want)
		}
	}
}
