package policy

import (
	"net/netip"
	"testing"
	"time"
)

// ruleOn returns a rule on prefix, changed by each of edits.
func ruleOn(prefix string, edits ...func(*Rule)) Rule {
	r := Rule{Prefix: netip.MustParsePrefix(prefix), Rate: 10_000_000, Capacity: 125_000}
	for _, edit := range edits {
		edit(&r)
	}
	return r
}

func unlimited(r *Rule) { r.Rate, r.Capacity = Unlimited, 0 }

// delay makes a rule delay packets.
func delay(a Algorithm) func(*Rule) {
	return func(r *Rule) {
		r.Algorithm, r.Excess, r.ECNAbove = a, Delay, 1
		if a == GCRA {
			r.Queue = MinCapacity
		}
	}
}

func TestValidate(t *testing.T) {
	for name, r := range map[string]Rule{
		"plain":               ruleOn("10.0.0.0/24"),
		"smallest":            ruleOn("10.0.0.0/24", func(r *Rule) { r.Rate, r.Capacity = MinRate, MinCapacity }),
		"largest":             ruleOn("10.0.0.0/24", func(r *Rule) { r.Rate, r.Capacity = MaxRate, MaxCapacity }),
		"host on one address": ruleOn("10.0.0.5/32", func(r *Rule) { r.Each = Each{Kind: EachHost} }),
		"own length":          ruleOn("10.0.0.0/24", func(r *Rule) { r.Each = Each{EachSubnet, 24} }),
		"each address":        ruleOn("2001:db8::/32", func(r *Rule) { r.Each = Each{EachSubnet, 128} }),
		"everything in IPv4":  ruleOn("0.0.0.0/0", func(r *Rule) { r.Each = Each{EachSubnet, 0} }),
		"flow":                ruleOn("::/0", func(r *Rule) { r.Each = Each{Kind: EachFlow} }),
		"fill":                ruleOn("10.0.0.0/24", func(r *Rule) { r.Algorithm, r.Penalty.Kind = Leaky, PenaltyFill }),
		"longest penalty":     ruleOn("10.0.0.0/24", func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{PenaltyHold, MaxPenalty} }),
		"penalty and ecn": ruleOn("10.0.0.0/24", func(r *Rule) {
			r.Algorithm, r.Penalty, r.Excess = Leaky, Penalty{PenaltyHold, time.Second}, ECN
		}),
		// 2^40 bytes and as many more.
		"longest penalty of a large bucket": ruleOn("10.0.0.0/24", func(r *Rule) {
			r.Rate, r.Capacity, r.Algorithm, r.Penalty = 8_000_000_000, MaxCapacity, Leaky, Penalty{PenaltyHold, 1 << 40}
		}),
		"queue":           ruleOn("10.0.0.0/24", delay(Leaky)),
		"longest wait":    ruleOn("10.0.0.0/24", delay(Leaky), func(r *Rule) { r.Capacity = 11_250_000 }),
		"no marks":        ruleOn("10.0.0.0/24", delay(Leaky), func(r *Rule) { r.ECNAbove = Never }),
		"burst and queue": ruleOn("10.0.0.0/24", delay(GCRA), func(r *Rule) { r.Queue = 11_250_000 }),
		"sparse first":    ruleOn("10.0.0.0/24", delay(GCRA), func(r *Rule) { r.Each.Kind, r.Order = EachHost, SparseFirst }),
		"one bucket":      ruleOn("10.0.0.0/24", func(r *Rule) { r.Each, r.Share.Kind = Each{EachSubnet, 24}, ShareHost }),
		"guarantees": ruleOn("10.0.0.0/24", func(r *Rule) {
			r.Within, r.Guarantee, r.Each.Kind, r.Members, r.Weight = "a", 10e6, EachHost, 1, MaxWeight
		}),
		"only pools": ruleOn("10.0.0.0/24", unlimited, func(r *Rule) {
			r.Within, r.Guarantee, r.Weight, r.Fail, r.Framing.MPU = "a", Guarantee(MaxRate), 2, Closed, 64
		}),
		"exception":       ruleOn("10.0.0.5/32", unlimited),
		"srtcm":           ruleOn("10.0.0.0/24", colours(SRTCM)),
		"trtcm":           ruleOn("10.0.0.0/24", colours(TRTCM), func(r *Rule) { r.Colours.PIR = r.Rate }),
		"no EBS":          ruleOn("10.0.0.0/24", colours(SRTCM), func(r *Rule) { r.Colours.EBS = 0 }),
		"no EBS, rfc4115": ruleOn("10.0.0.0/24", colours(RFC4115), func(r *Rule) { r.Colours.EBS = 0 }),
		"rfc4115":         ruleOn("10.0.0.0/24", colours(RFC4115), func(r *Rule) { r.Colours.EIR, r.Colours.EBS = MinRate, MaxCapacity }),
		"leaky exception": ruleOn("10.0.0.5/32", unlimited, func(r *Rule) { r.Algorithm = Leaky }),
	} {
		if err := r.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestValidateRefuses(t *testing.T) {
	fill := Penalty{Kind: PenaltyFill}
	for _, test := range []struct {
		edit func(*Rule)
		part string
	}{
		{func(r *Rule) { *r = Rule{} }, "network is not set"},
		{func(r *Rule) { r.Prefix = netip.MustParsePrefix("10.0.0.5/24") }, "host bits"},
		{func(r *Rule) { r.Prefix = netip.MustParsePrefix("::ffff:10.0.0.0/120") }, "IPv4 written as IPv6"},
		{func(r *Rule) { r.Rate = 0 }, "rate 0 is zero"},
		{func(r *Rule) { r.Rate = 7 }, "rate 7bit is below 8kbit"},
		{func(r *Rule) { r.Rate = MaxRate + 1 }, "rate 400000000.001kbit is above 400gbit"},
		{func(r *Rule) { r.Capacity = 0 }, "less than one full packet"},
		{func(r *Rule) { r.Capacity = MinCapacity - 1 }, "capacity of 1513 bytes (1.21 ms at 10mbit) is less than one full packet; use 1514 or more"},
		{func(r *Rule) { r.Capacity = MaxCapacity + 1 }, "above 1024gb"},
		{func(r *Rule) { r.Algorithm = 5 }, "algorithm has the unknown value 5"},
		{func(r *Rule) { r.Excess, r.Also = Pass, Also{Quota: Quota{1e6, "day"}, Then: ThenDrop} }, "then drop would drop nothing with excess pass"},
		{func(r *Rule) { r.Excess = 4 }, "excess has the unknown value 4"},
		{func(r *Rule) { r.Fail = 2 }, "fail has the unknown value 2"},
		{func(r *Rule) { r.Each.Kind = 4 }, "each has the unknown value 4"},
		{func(r *Rule) { r.Each = Each{EachHost, 1} }, "each host takes no prefix length"},
		{func(r *Rule) { r.Each = Each{EachSubnet, 23} }, "each /23 does not divide 10.0.0.0/24; use /24 to /32"},
		{func(r *Rule) { r.Each = Each{EachSubnet, 33} }, "each /33 does not divide"},
		{func(r *Rule) { r.Penalty = fill }, "penalty fill has no use with the algorithm gcra"},
		{func(r *Rule) { r.Algorithm, r.Penalty.Kind = Leaky, 3 }, "penalty has the unknown value 3"},
		{func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{PenaltyFill, 1} }, "penalty fill takes no time"},
		{func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{PenaltyNone, -1} }, "penalty none takes no time"},
		{func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{PenaltyHold, 0} }, "not above zero"},
		{func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{PenaltyHold, -time.Second} }, "penalty of -1s is not above zero"},
		{func(r *Rule) { r.Algorithm, r.Penalty = Leaky, Penalty{PenaltyHold, MaxPenalty + 1} }, "longer than 86400s"},
		{func(r *Rule) { r.Queue = 5000 }, "queue has no use with excess drop"},
		{func(r *Rule) { r.Excess, r.Queue = ECN, 5000 }, "queue has no use with excess ecn"},
		{func(r *Rule) { r.ECNAbove = 1 }, "ecn-above has no use with excess drop"},
		{func(r *Rule) { delay(Leaky)(r); r.Queue = 5000 }, "queue has no use with the algorithm leaky, whose capacity is the queue"},
		{func(r *Rule) { delay(GCRA)(r); r.Queue-- }, "queue of 1513 bytes (1.21 ms at 10mbit) is less than one full packet"},
		{func(r *Rule) { delay(GCRA)(r); r.Queue = 11_250_001 }, "queue of 11250001 bytes at 10mbit delays packets for up to 9 s, and 9s is the longest delay"},
		{func(r *Rule) { delay(Leaky)(r); r.Capacity = 12_500_000 }, "capacity of 12500000 bytes at 10mbit delays packets for up to 10 s"},
		{func(r *Rule) { delay(Leaky)(r); r.ECNAbove = 0 }, "ecn-above of 0 ns is not above zero"},
		{func(r *Rule) { delay(GCRA)(r); r.Order = 2 }, "order has the unknown value 2"},
		{func(r *Rule) { r.Order = SparseFirst }, "order sparse-first has no use with excess drop; leave it out, or use excess delay"},
		{func(r *Rule) { delay(Leaky)(r); r.Order = SparseFirst }, "order sparse-first has no use with the algorithm leaky, whose output never exceeds the rate; use the algorithm gcra"},
		{func(r *Rule) { delay(GCRA)(r); r.Each.Kind, r.Order = EachFlow, SparseFirst }, "order sparse-first has no use with each flow"},
		{func(r *Rule) { unlimited(r); r.Order = SparseFirst }, "order sparse-first has no use in an unlimited rule"},
		{func(r *Rule) { delay(Leaky)(r); r.Penalty = fill }, "penalty fill has no use with excess delay"},
		{func(r *Rule) { delay(GCRA)(r); r.Rate, r.Capacity = MaxRate, MaxCapacity }, "capacity and queue of 1099511629290 bytes together is above 1024gb"},
		{func(r *Rule) {
			r.Rate, r.Capacity, r.Algorithm, r.Penalty = 8_000_000_000, MaxCapacity, Leaky, Penalty{PenaltyHold, 1<<40 + 1}
		}, "more than a bucket can count; shorten it to 1099s or less"},
		{func(r *Rule) { r.Rate, r.Algorithm, r.Penalty = MaxRate, Leaky, Penalty{PenaltyHold, MaxPenalty} }, "shorten it to 43s"},
		{func(r *Rule) { r.Framing.Overhead = 257 }, "overhead of 257 bytes"},
		{func(r *Rule) { r.Framing.Overhead = -65 }, "overhead of -65 bytes"},
		{func(r *Rule) { r.Framing.MPU = 257 }, "mpu of 257 bytes"},
		{func(r *Rule) { r.Within = "none" }, `within "none" is no name; leave it out`},
		{func(r *Rule) { r.Within = "a\nb" }, `within "a\nb" has a control character`},
		{func(r *Rule) { r.Guarantee = 5e6 }, "guarantee 5mbit has no use with no pool to draw from; name one with within, or leave it out"},
		{func(r *Rule) { unlimited(r); r.Guarantee = 5e6 }, "guarantee 5mbit has no use with no pool"},
		{func(r *Rule) { r.Within, r.Guarantee = "a", 10_000_001 }, "guarantee 10000.001kbit is above the rate 10mbit; lower it, or raise the rate"},
		{func(r *Rule) { r.Within, r.Guarantee = "a", 7999 }, "7.999kbit is below 8kbit"},
		{func(r *Rule) { r.Within, r.Guarantee, r.Each.Kind = "a", 1e6, EachHost }, "guarantee 1mbit is for each bucket of the rule; say with members how many there are at most"},
		{func(r *Rule) { r.Members = 5 }, "members has no use with no pool"},
		{func(r *Rule) { r.Within, r.Members = "a", 5 }, "members has no use with no guarantee"},
		{func(r *Rule) { r.Within, r.Guarantee, r.Members, r.Each = "a", 1e6, 5, Each{EachSubnet, 24} }, "members has no use with each all, which has one bucket"},
		{func(r *Rule) { r.Weight = 2 }, "weight 2 has no use with no pool"},
		{func(r *Rule) { r.Within, r.Weight = "a", 1 }, "weight has the value 1; use 2 to 256, or 0 for 1"},
		{func(r *Rule) { r.Within, r.Weight = "a", 257 }, "weight has the value 257"},
		{func(r *Rule) { r.Share.Kind = 5 }, "share has the unknown value 5"},
		{func(r *Rule) { r.Share = Share{ShareHost, 1} }, "share host takes no prefix length"},
		{func(r *Rule) { r.Share.Kind = ShareMember }, "share member is for pools"},
		{func(r *Rule) { r.NAT, r.Share.Kind = true, ShareFlow }, "nat true has no use without hosts to tell apart; add each host or share host, or leave it out"},
		{func(r *Rule) { r.Share = Share{ShareSubnet, 23} }, "share /23 does not divide 10.0.0.0/24; use /24 to /32"},
		{func(r *Rule) { r.Share = Share{ShareSubnet, 33} }, "share /33 does not divide"},
		{func(r *Rule) { r.Share.Kind, r.Each.Kind = ShareHost, EachHost }, "share host has no use with each host, which has no bucket to share"},
		{func(r *Rule) { r.Share.Kind, r.Algorithm, r.Penalty = ShareHost, Leaky, fill }, "share host has no use with a penalty"},
		{func(r *Rule) { unlimited(r); r.Share.Kind = ShareHost }, "share host has no use in an unlimited rule; leave it out"},
		{func(r *Rule) { unlimited(r); r.Within, r.Each.Kind = "a", EachHost }, "each host has no use in a rule that has only its pools; give it a rate, or leave this out"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.PIR = 0 }, "pir is missing; say the peak rate, from the rate 10mbit up"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.PIR, r.Colours.EIR = 0, 5e6 }, "for a committed and an excess rate (eir) use rfc4115"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.PIR = 9_999_000 }, "pir 9.999mbit is below the rate 10mbit; raise it, or lower the rate"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.PIR = MaxRate + 1 }, "pir 400000000.001kbit is above 400gbit"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.PBS-- }, "pbs of 1513 bytes (605.2 us at 20mbit) is less than one full packet"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.PBS = MaxCapacity + 1 }, "pbs of 1099511627777 bytes is above 1024gb"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.EIR = 1e6 }, "eir 1mbit has no use with the algorithm trtcm; use rfc4115, or leave it out"},
		{func(r *Rule) { colours(TRTCM)(r); r.Colours.EBS = 2000 }, "ebs has no use with the algorithm trtcm; use srtcm or rfc4115, or leave it out"},
		{func(r *Rule) { colours(RFC4115)(r); r.Colours.EIR = 0 }, "eir is missing; say the rate of yellow packets, such as 5mbit, or for none use srtcm with ebs 0"},
		{func(r *Rule) { colours(RFC4115)(r); r.Colours.EIR = 7999 }, "eir 7.999kbit is below 8kbit"},
		{func(r *Rule) { colours(RFC4115)(r); r.Colours.EBS-- }, "ebs of 1513 bytes (605.2 us at 20mbit) is less than one full packet"},
		{func(r *Rule) { colours(RFC4115)(r); r.Colours.PIR = 20e6 }, "pir 20mbit has no use with the algorithm rfc4115; use trtcm, or leave it out"},
		{func(r *Rule) { colours(SRTCM)(r); r.Colours.EBS = 1 }, "ebs of 1 bytes (800 ns at 10mbit) is less than one full packet"},
		{func(r *Rule) { colours(SRTCM)(r); r.Colours.PBS = 2000 }, "pbs has no use with the algorithm srtcm; use trtcm, or leave it out"},
		{func(r *Rule) { colours(SRTCM)(r); r.Colours.In = ColourMap{} }, "colours has neither yellow nor red"},
		{func(r *Rule) { colours(SRTCM)(r); r.Colours.In.Red |= 1 << 12 }, "colours has a DSCP that is both yellow and red"},
		{func(r *Rule) { colours(SRTCM)(r); r.Colours.Aware = false }, "colours has no use with packets that all come in green; add colour-aware, or leave it out"},
		{func(r *Rule) { colours(SRTCM)(r); r.Colours.Green = ActionECN + 1 }, "green has the unknown value 68; use pass, drop, ecn or a DSCP"},
		{func(r *Rule) { r.Colours.Aware = true }, "colour-aware true has no use with the algorithm gcra; use srtcm, trtcm or rfc4115, or leave it out"},
		{func(r *Rule) { r.Colours.In = DefaultColours }, "colours has no use with the algorithm gcra"},
		{func(r *Rule) { r.Algorithm, r.Colours.Yellow = Leaky, ActionPass }, "yellow has no use with the algorithm leaky"},
		{func(r *Rule) { colours(SRTCM)(r); r.Excess = ECN }, "excess ecn has no use with the algorithm srtcm; say what happens to packets with green, yellow and red"},
		{func(r *Rule) { colours(SRTCM)(r); r.Queue = 5000 }, "queue has no use with the algorithm srtcm, which queues nothing; leave it out"},
		{func(r *Rule) { colours(SRTCM)(r); r.ECNAbove = 1 }, "ecn-above has no use with the algorithm srtcm, which queues nothing"},
		{func(r *Rule) { colours(SRTCM)(r); r.Order = SparseFirst }, "order sparse-first has no use with the algorithm srtcm, which queues nothing"},
		{func(r *Rule) { colours(SRTCM)(r); r.Penalty = fill }, "penalty fill has no use with the algorithm srtcm; leave it out, or use leaky"},
		{func(r *Rule) { colours(SRTCM)(r); r.Share.Kind = ShareHost }, "share host has no use with the algorithm srtcm, which has no shares; leave it out"},
		{func(r *Rule) { colours(SRTCM)(r); r.Within = "a" }, `within "a": the algorithm srtcm draws from no pool; use within none, or another algorithm`},
		{func(r *Rule) { colours(SRTCM)(r); r.Guarantee = 1e6 }, "guarantee 1mbit has no use with no pool"},
		{func(r *Rule) { colours(SRTCM)(r); r.Members = 5 }, "members has no use with no pool"},
		{func(r *Rule) { colours(SRTCM)(r); r.Weight = 2 }, "weight 2 has no use with no pool"},
		{func(r *Rule) { unlimited(r); colours(TRTCM)(r); r.Colours.PIR = 20e6 }, "algorithm trtcm has no use in an unlimited rule"},
		{func(r *Rule) { r.Rate = Unlimited }, "capacity has no use in an unlimited rule"},
		{func(r *Rule) { unlimited(r); r.Each.Kind = EachHost }, "each host has no use in an unlimited rule"},
		{func(r *Rule) { unlimited(r); r.Excess = ECN }, "excess ecn has no use in an unlimited rule"},
		{func(r *Rule) { unlimited(r); r.Penalty, r.Algorithm = fill, Leaky }, "penalty fill has no use in an unlimited rule"},
	} {
		r := ruleOn("10.0.0.0/24", test.edit)
		wantError(t, r.Validate(), test.part)
	}
}

// colours gives a rule an algorithm with colours.
func colours(a Algorithm) func(*Rule) {
	return func(r *Rule) {
		r.Algorithm, r.Colours = a, Colours{Aware: true, In: DefaultColours, Green: ActionPass, Yellow: SetDSCP(12), Red: ActionDrop}
		switch a {
		case SRTCM:
			r.Colours.EBS = MinCapacity
		case TRTCM:
			r.Colours.PIR, r.Colours.PBS = 2*r.Rate, MinCapacity
		case RFC4115:
			r.Colours.EIR, r.Colours.EBS = 2*r.Rate, MinCapacity
		}
	}
}

// TestDefaultQueue checks that rules with the default queue are valid at all rates.
func TestDefaultQueue(t *testing.T) {
	for _, rate := range []Rate{MinRate, 14563, 14564, 29127, 1_000_000, MaxRate} {
		for _, algorithm := range []Algorithm{GCRA, Leaky} {
			r, err := Limit{Rate: rate, Algorithm: algorithm, Excess: Delay}.Rule(netip.MustParsePrefix("10.0.0.0/24"))
			if _, longest := r.Waiting(); err != nil || longest < 50*time.Millisecond || r.ECNAbove != ECNAbove(longest/2) {
				t.Errorf("%v, %v: %v, waits for up to %v, is marked above %v", rate, algorithm, err, longest, r.ECNAbove)
			}
		}
	}
}
