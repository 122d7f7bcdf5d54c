package replay

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

func summarize(t *testing.T, l Limits, csv string) Figures {
	t.Helper()
	s := NewSummary(l)
	for _, r := range offer(t, NewModel(l), csv) {
		s.Add(r)
	}
	return s.Sum()
}

// Every number of this trace was computed by hand: 1000 bytes/s, 2000 bytes.
func TestSummary(t *testing.T) {
	l := Limits{Rules: []policy.Rule{everything(8000, 2000)}}
	const second = "000000000"
	s := summarize(t, l, strings.Join([]string{
		"5" + second + ",1500", // level 1500
		"5" + second + ",600",  // refused
		"5300000000,900",       // 1200: refused
		"6" + second + ",1000", // 500: 1500
		"8500000000,3000",      // larger than the bucket, which is empty
		"8600000000,100",       // 2900: refused
		"9" + second + ",100",  // refused
		"9500000000,100",       // 2000: the last one refused
		"9700000000,100",       // 1800: 1900
		"9100000000,100",       // back in time, 2500: refused
		"100" + second + ",1", "100" + second + ",1",
	}, "\n"))
	want := Figures{
		OfferedPackets: 12, OfferedBytes: 7502, PassedPackets: 6, PassedBytes: 5602, ExcessPackets: 6, ExcessBytes: 1900, DroppedPackets: 6, DroppedBytes: 1900,
		FirstNS: 5e9, DurationNS: 95e9, Pools: []ReplayedPool{}, HighestLevelBytes: 3000, LosslessCapacityBytes: new(uint64(3500)),
		// From the packet that passed at 9.7 s to those at 100 s; one was dropped between them.
		LongestGapFromNS: 9_700_000_000, LongestGapNS: 90_300_000_000,
	}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, want\n%+v", s, want)
	}
}

// A queue of 3000 bytes at 1000 bytes/s: which packets are delayed, for how long, and which are excess.
func TestSummaryOfQueue(t *testing.T) {
	rule := everything(8000, 3000)
	rule.Algorithm, rule.Excess, rule.ECNAbove = policy.Leaky, policy.Delay, policy.ECNAbove(1500*time.Millisecond)
	s := summarize(t, Limits{Rules: []policy.Rule{rule}}, strings.Join([]string{
		"0,1000",           // departs immediately
		"0,1000", "0,1000", // depart after 1 s, and, marked, after 2 s
		"0,500", "500000000,600", // excess
		"500000000,500",  // marked after 2.5 s, 3 s after the first
		"20000000000,50", // departs immediately
	}, "\n"))
	want := Figures{
		OfferedPackets: 7, OfferedBytes: 4650, PassedPackets: 5, PassedBytes: 3550, DroppedPackets: 2, DroppedBytes: 1100, ExcessPackets: 2, ExcessBytes: 1100,
		DelayedPackets: 3, DelayedBytes: 2500, MarkedPackets: 2, MarkedBytes: 1500, LongestDelayNS: 2_500_000_000, MeanDelayNS: 5_500_000_000 / 3,
		// From the third departure at 2 s to that at 3 s; two packets were dropped between them.
		LongestGapFromNS: 2e9, LongestGapNS: 1e9, DurationNS: 20e9, HighestLevelBytes: 3000, LosslessCapacityBytes: new(uint64(4100)), Pools: []ReplayedPool{},
	}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("%+v, want\n%+v", s, want)
	}
}

// The lossless capacity is the smallest one: with one byte less, a packet is excess.
func TestLosslessCapacity(t *testing.T) {
	seed := testenv.Seed(t)
	for i := range 60 {
		roll := rand.New(rand.NewPCG(seed, uint64(i)))
		rate := policy.Rate(8000 << roll.IntN(22))
		var csv strings.Builder
		now := uint64(1e9)
		for range 300 {
			n := 1 + roll.Uint64N(1500)
			fmt.Fprintf(&csv, "%d,%d\n", now, n)
			now += roll.Uint64N(1 + n*8e9/uint64(rate)*uint64(1+i%3))
			if roll.IntN(20) == 0 {
				now -= min(now, 1e6)
			}
		}
		l := Limits{Rules: []policy.Rule{everything(rate, 1514)}}
		known := summarize(t, l, csv.String()).LosslessCapacityBytes
		if known == nil || *known == 0 {
			t.Fatalf("trace %d: no lossless capacity", i)
		}
		least := *known
		for _, algorithm := range []policy.Algorithm{policy.GCRA, policy.Leaky} {
			for capacity, wantLoss := range map[uint64]bool{least: false, least + 1: false, 2 * least: false, least - 1: true, least / 2: true} {
				l.Rules[0].Capacity, l.Rules[0].Algorithm = capacity, algorithm
				s := summarize(t, l, csv.String())
				if (s.ExcessPackets > 0) != wantLoss {
					t.Errorf("trace %d at %v: with %d bytes (least %d), excess %+v", i, rate, capacity, least, s.ExcessPackets)
				}
				if again := *s.LosslessCapacityBytes; again != least {
					t.Errorf("trace %d: %d bytes from a bucket of %d, %d before", i, again, capacity, least)
				}
				delays := l
				delays.Rules = slices.Clone(l.Rules)
				queued(&delays.Rules[0], roll)
				if q := summarize(t, delays, csv.String()); q.ExcessPackets != s.ExcessPackets || q.ExcessBytes != s.ExcessBytes {
					t.Errorf("trace %d: with %+v, excess %+v, want %+v", i, delays.Rules[0], q.ExcessPackets, s.ExcessPackets)
				}
			}
		}
	}
}

type gap struct{ from, ns uint64 }

func longest(f Figures) gap { return gap{f.LongestGapFromNS, f.LongestGapNS} }

func TestLongestGap(t *testing.T) {
	rule := everything(8000, 1000)
	hosts := bothFamilies(8000, 1000, policy.EachHost)
	for name, c := range map[string]struct {
		csv  string
		want gap
	}{
		"nothing dropped":                  {"0,1000\n5000000000,1000\n", gap{}},
		"one":                              {"0,1000\n400000000,1000\n1000000000,1000\n", gap{0, 1_000_000_000}},
		"idle, without a drop":             {"0,1000\n400000000,1000\n1000000000,1000\n90000000000,1\n", gap{0, 1_000_000_000}},
		"the second":                       {"0,1000\n1,1000\n1000000000,1000\n1500000000,600\n2200000000,600\n", gap{1_000_000_000, 1_200_000_000}},
		"to the end":                       {"7,1000\n8,1000\n500,1000\n", gap{7, 493}},
		"one at the end, at the same time": {"7,1000\n7,1000\n", gap{7, 0}},
	} {
		if d := longest(summarize(t, Limits{Rules: []policy.Rule{rule}}, c.csv)); d != c.want {
			t.Errorf("%s: %+v, want %+v", name, d, c.want)
		}
	}
	// A packet of a sparse flow that overtakes a queued one is not the last departure.
	ahead := NewSummary(Limits{Rules: []policy.Rule{rule}})
	for _, r := range []Result{
		{Time: 0, Verdict: model.Delay, Wait: 5000}, {Time: 10}, {Time: 20, Verdict: model.Drop, Excess: true}, {Time: 30, Verdict: model.Delay, Wait: 5470},
	} {
		r.Limited, r.Bytes = true, 1000
		ahead.Add(r)
	}
	if d := longest(ahead.Sum()); d != (gap{5000, 500}) {
		t.Errorf("with a packet that overtakes: %+v", d)
	}
	// A packet of one bucket does not end the gap of another.
	m, s := NewModel(hosts), NewSummary(hosts)
	for i, host := range []int{1, 1, 2, 2, 1, 2, 1} {
		p := at(uint64(i)*1000, typeIPv4, ip4("192.0.2.1", fmt.Sprintf("10.0.0.%d", host), 17, 0, make([]byte, 966)...))
		r, err := m.Offer(p)
		testenv.Must(t, err)
		s.Add(r)
	}
	if d := longest(s.Sum()); d != (gap{0, 6000}) {
		t.Errorf("two hosts: %+v", d)
	}
}

func TestLosslessCapacityLimits(t *testing.T) {
	l := Limits{Rules: []policy.Rule{everything(8, 1)}}
	if n := summarize(t, l, "0,9000\n9000000000000,9000\n").LosslessCapacityBytes; n == nil || *n != 0 {
		t.Errorf("each packet finds an empty bucket: %v", n)
	}
	l.Rules[0].Also.Packets, l.Rules[0].Also.PacketBurst = 1, 1 // which no capacity makes up for
	if n := summarize(t, l, "0,1\n0,1\n").LosslessCapacityBytes; n != nil {
		t.Errorf("packets are too many: %d", *n)
	}
	l.Rules[0].Also = policy.Also{}
	s := NewSummary(l)
	m := NewModel(l)
	network := ip4("10.0.0.1", "10.0.0.2", 17, 0)
	p := at(1, typeIPv4, network)
	p.Bytes = 1<<24 - 1
	for range 1<<16 + 2 {
		r, err := m.Offer(p)
		testenv.Must(t, err)
		s.Add(r)
	}
	if n := s.Sum().LosslessCapacityBytes; n != nil {
		t.Errorf("above the largest capacity: %d", *n)
	}
}

// MostExcess is sorted, and not longer than requested.
func TestMostExcess(t *testing.T) {
	l := bothFamilies(8000, 1000, policy.EachHost)
	m, s := NewModel(l), NewSummary(l)
	send := func(host, packets, bytes int) {
		for range packets {
			p := at(uint64(time.Second), typeIPv4, ip4("192.0.2.1", fmt.Sprintf("10.0.0.%d", host), 17, 0, make([]byte, bytes-34)...))
			r, err := m.Offer(p)
			testenv.Must(t, err)
			s.Add(r)
		}
	}
	send(1, 10, 100) // no excess
	send(2, 11, 100)
	send(3, 6, 1000)
	send(4, 14, 100)
	if got, want := fmt.Sprint(s.Sum().MostExcess), "[{10.0.0.3 5 5000} {10.0.0.4 4 400} {10.0.0.2 1 100}]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	// Never limited: not IP, and neighbour discovery. Outside: other addresses.
	l = Limits{Rules: []policy.Rule{{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 1000}}}
	m, s = NewModel(l), NewSummary(l)
	for _, p := range []struct {
		kind    uint16
		network []byte
	}{
		{0x0806, make([]byte, 28)},
		{typeIPv6, ip6("fe80::1", "ff02::1:ff00:2", 58, 0, 135, 0, 0, 0)},
		{typeIPv6, ip6("fe80::1", "ff02::1", 58, 0, 128, 0, 0, 0)},
		{typeIPv4, ip4("10.0.0.1", "192.0.2.1", 17, 0)},
	} {
		r, err := m.Offer(at(1, p.kind, p.network))
		testenv.Must(t, err)
		s.Add(r)
	}
	if s.UnlimitedPackets != 2 || s.UnlimitedBytes != 42+58 || s.OutsidePackets != 2 || s.OutsideBytes != 58+34 || s.OfferedPackets != 0 || s.Packets() != 4 {
		t.Errorf("%+v", s)
	}
}
