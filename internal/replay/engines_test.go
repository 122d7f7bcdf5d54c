package replay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	stdmaps "maps"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// both offers each packet to the kernel and to the model. Its error is the first packet for which they differ.
type both struct {
	kernel  *Kernel
	model   *Model
	packets uint64
}

func (b *both) Offer(p *trace.Packet) (Result, error) {
	b.packets++
	kernel, err := b.kernel.Offer(p)
	if err != nil {
		return kernel, err
	}
	want, err := b.model.Offer(p)
	if err == nil && kernel != want {
		err = fmt.Errorf("packet %d: the kernel says %+v; the model says %+v", b.packets, kernel, want)
	}
	return kernel, err
}

func (b *both) Close() error { return b.kernel.Close() }

// newBoth returns both engines until the test ends. The kernel's table is small, because a large one is slow to create.
func newBoth(t *testing.T, l Limits) *both {
	t.Helper()
	testenv.Root(t)
	k, err := newKernel(l, 1<<16)
	testenv.Must(t, err)
	t.Cleanup(func() { k.Close() })
	return &both{kernel: k, model: NewModel(l)}
}

// offer offers all packets of a trace. An error of the engine ends the test.
func offer(t *testing.T, e Engine, data string) (all []Result) {
	t.Helper()
	in, err := trace.Open(strings.NewReader(data))
	testenv.Must(t, err)
	var p trace.Packet
	for {
		if err := in.Next(&p); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		r, err := e.Offer(&p)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
}

// eachVector offers all test vectors to rules that rulesOf makes of them, with one engine.
func eachVector(t *testing.T, rulesOf func(testenv.Trace, []testenv.Step) []policy.Rule, check func(t *testing.T, results []Result, steps []testenv.Step)) {
	t.Helper()
	var l Limits
	var traces []testenv.Trace
	for _, v := range testenv.Vectors(t) {
		for _, rule := range rulesOf(v, v.Steps(t)) {
			rule.Prefix = prefix(fmt.Sprintf("10.0.0.%d/32", len(l.Rules)))
			l.Rules, traces = append(l.Rules, rule), append(traces, v)
		}
	}
	e := newBoth(t, l)
	for i, v := range traces {
		t.Run(fmt.Sprintf("%s/%v", v.Name, l.Rules[i].Algorithm), func(t *testing.T) {
			var results []Result
			steps := v.Steps(t)
			for _, s := range steps {
				r, err := e.Offer(&trace.Packet{Time: s.Now, Bytes: s.Bytes, EtherType: typeIPv4, Network: ip4("192.0.2.1", fmt.Sprint("10.0.0.", i), 17, 0)})
				testenv.Must(t, err)
				results = append(results, r)
			}
			check(t, results, steps)
		})
	}
}

// Both engines give the verdicts and levels of the test vectors, packet by packet.
func TestVectors(t *testing.T) {
	eachVector(t, func(v testenv.Trace, _ []testenv.Step) []policy.Rule {
		gcra := everything(policy.Rate(v.Rate), v.Capacity)
		leaky := gcra
		leaky.Algorithm = policy.Leaky
		return []policy.Rule{gcra, leaky}
	}, func(t *testing.T, results []Result, steps []testenv.Step) {
		for i, r := range results {
			s := steps[i]
			if r.Time != s.Now || r.Bytes != s.Bytes || (r.Verdict == model.Pass) != s.Pass {
				t.Fatalf("packet %d: %+v, want %+v", i+1, r, s)
			}
			// The vectors round to a thousandth of a byte, the data path to units of 2^-20.
			if got := float64(r.Level) / (1 << 20); math.Abs(got-s.Level) > 0.0005+3.0/(1<<20) {
				t.Fatalf("packet %d: level %v, want %v", i+1, got, s.Level)
			}
		}
	})
}

// A queue gives the departure times of the test vectors, up to 1 ns of rounding. So does a
// gcra rule with a capacity of one byte and the rest as its queue.
func TestVectorDepartures(t *testing.T) {
	most := 0
	eachVector(t, func(v testenv.Trace, steps []testenv.Step) []policy.Rule {
		if !slices.ContainsFunc(steps, func(s testenv.Step) bool { return s.Departs }) {
			return nil
		}
		leaky := everything(policy.Rate(v.Rate), v.Capacity)
		leaky.Algorithm, leaky.Excess, leaky.ECNAbove = policy.Leaky, policy.Delay, policy.Never
		gcra := leaky
		gcra.Algorithm, gcra.Capacity, gcra.Queue = policy.GCRA, 1, v.Capacity-1
		return []policy.Rule{leaky, gcra}
	}, func(t *testing.T, results []Result, steps []testenv.Step) {
		delayed := 0
		for i, r := range results {
			s := steps[i]
			want := model.Pass
			switch {
			case !s.Pass:
				want = model.Drop
			case s.Departure > s.Now:
				want = model.Delay
				delayed++
			}
			if r.Time != s.Now || r.Verdict != want || s.Pass && r.Departure()+1-s.Departure > 2 {
				t.Fatalf("packet %d: %+v departs at %d ns, want %+v", i+1, r, r.Departure(), s)
			}
		}
		most = max(most, delayed)
	})
	if most < 10 {
		t.Errorf("at most %d packets of a vector were delayed", most)
	}
}

// Both engines agree on every packet of captures: our own, and real and hostile ones. One of our own can be read.
func TestCaptures(t *testing.T) {
	t.Run("own", func(t *testing.T) {
		own := testenv.Captures(t)
		if read, limited := replayAll(t, own); read != len(own) || limited < 80 {
			t.Errorf("of %d captures, %d were read, with %d packets that a rule can match", len(own), read, limited)
		}
	})
	t.Run("shared", func(t *testing.T) {
		shared := map[string][]byte{}
		for _, name := range testenv.Shared(t, "pcaps/*.pcap*") {
			data, err := os.ReadFile(name)
			testenv.Must(t, err)
			shared[name] = data
		}
		if len(shared) == 0 {
			t.Skip("needs captures, in ../shared/pcaps")
		}
		if read, limited := replayAll(t, shared); read < 200 || limited < 1500 {
			t.Errorf("of %d captures, %d were read, with %d packets that a rule can match", len(shared), read, limited)
		}
	})
}

// replayAll offers all captures to both engines, and returns how many could be read, and how many packets a rule matched.
func replayAll(t *testing.T, captures map[string][]byte) (read, limited int) {
	for _, match := range []policy.Match{policy.MatchDst, policy.MatchSrc} {
		l := bothFamilies(8000, 1514, policy.EachFlow)
		l.Match = match
		e := newBoth(t, l)
		const noon = uint64(1) << 61
		start := noon
		read, limited = 0, 0
		for _, name := range slices.Sorted(stdmaps.Keys(captures)) {
			in, err := trace.Open(bytes.NewReader(captures[name]))
			if err != nil {
				if len(err.Error()) < 20 {
					t.Errorf("%s: refused by %q", name, err)
				}
				continue
			}
			read++
			var p trace.Packet
			latest, first := start, uint64(0)
			for err = in.Next(&p); err == nil; err = in.Next(&p) {
				// The next trace begins when all buckets of the last one have drained.
				if first == 0 {
					first = p.Time
				}
				p.Time += start - first
				latest = max(latest, p.Time)
				r, err := e.Offer(&p)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if r.Limited {
					limited++
				}
				if r.Spilled || r.Contended {
					t.Errorf("%s: %+v", name, r)
				}
			}
			if err != io.EOF && !errors.As(err, new(trace.DamagedError)) {
				t.Errorf("%s: %v", name, err)
			}
			start = latest + uint64(time.Hour)
			if start > 2*noon {
				start, e = noon, newBoth(t, l)
			}
		}
	}
	return read, limited
}

// Both engines agree on random frames, most of them malformed: on the rule, the bucket
// key, the bytes and the verdict.
func TestBrokenFrames(t *testing.T) {
	seed := testenv.Seed(t)
	roll := rand.New(rand.NewPCG(seed, 1))
	for _, excess := range []policy.Excess{policy.Drop, policy.ECN, policy.Pass, policy.Delay} {
		for _, each := range []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow} {
			l := bothFamilies(80000, 3000, each)
			for i := range l.Rules {
				l.Rules[i].Excess, l.Rules[i].Algorithm = excess, policy.Algorithm(roll.IntN(2))
				l.Rules[i].Framing = policy.Framing{Overhead: int16(roll.IntN(120) - 64), MPU: uint16(roll.IntN(2) * 84)}
				if excess == policy.Delay {
					queued(&l.Rules[i], roll)
					if l.Rules[i].Algorithm == policy.GCRA && each != policy.EachFlow {
						l.Rules[i].Order = policy.Order(roll.IntN(2))
					}
				}
			}
			e, now, limited := newBoth(t, l), uint64(time.Hour), 0
			verdicts := map[model.Verdict]int{}
			for range 1500 {
				p := randomFrame(roll)
				now += roll.Uint64N(uint64(30 * time.Millisecond))
				p.Time = now - roll.Uint64N(1000)
				r, err := e.Offer(p)
				if err != nil {
					t.Fatalf("excess %v, each %v: EtherType %#x, %x, %d bytes: %v", excess, policy.Each{Kind: each}, p.EtherType, p.Network, p.Bytes, err)
				}
				if r.Limited {
					limited++
				}
				verdicts[r.Verdict]++
			}
			if limited < 500 {
				t.Errorf("only %d frames were IP", limited)
			}
			sparseFirst := slices.ContainsFunc(l.Rules, func(r policy.Rule) bool { return r.Order == policy.SparseFirst })
			if excess == policy.Delay && each == policy.EachAll && !sparseFirst && (verdicts[model.Delay] < 20 || verdicts[model.Mark] < 5) {
				t.Errorf("too few delayed or marked packets with %+v: %v", l.Rules, verdicts)
			}
		}
	}
}

// queued gives a rule a queue: its whole capacity, or at least half of it.
func queued(r *policy.Rule, roll *rand.Rand) {
	r.Excess = policy.Delay
	if r.Algorithm == policy.GCRA {
		holds := r.Capacity
		r.Capacity = 1 + roll.Uint64N(holds)/2
		r.Queue = holds - r.Capacity
	}
	_, longest := r.Waiting()
	r.ECNAbove = 1 + policy.ECNAbove(roll.Int64N(1+int64(longest)/2))
}

func randomFrame(roll *rand.Rand) *trace.Packet {
	host := func() string { return fmt.Sprintf("10.0.0.%d", 1+roll.IntN(3)) }
	host6 := func() string { return fmt.Sprintf("2001:db8::%d", 1+roll.IntN(3)) }
	protos := []byte{1, 6, 17, 33, 47, 50, 58, 132, 136, 253}
	proto, tos := protos[roll.IntN(len(protos))], byte(roll.Uint32())
	kind, network := uint16(typeIPv4), []byte(nil)
	upper := ports(uint16(roll.IntN(2)), 53, roll.IntN(40))
	if roll.IntN(2) == 0 {
		network = ip4(host(), host(), proto, tos, upper...)
		if roll.IntN(4) == 0 {
			network[6] = byte(roll.Uint32())
		}
	} else {
		kind = typeIPv6
		chain := []byte{0, 43, 44, 51, 60, 135, 139, 140}
		for range roll.IntN(10) * roll.IntN(2) {
			ext := make([]byte, 8*(1+roll.IntN(2)))
			ext[0], ext[1] = proto, byte(len(ext)/8-1)
			proto = chain[roll.IntN(len(chain))]
			switch proto {
			case unix.IPPROTO_AH:
				ext[1] = byte(len(ext)/4 - 2)
			case unix.IPPROTO_FRAGMENT:
				ext = ext[:8]
				ext[3] = []byte{0, 1, 0, 8, byte(roll.Uint32())}[roll.IntN(5)]
			}
			upper = append(ext, upper...)
		}
		if proto == unix.IPPROTO_ICMPV6 {
			upper[0] = byte(130 + roll.IntN(10))
		}
		network = ip6(host6(), host6(), proto, tos, upper...)
	}
	tags := []uint16{typeVLAN, typeQinQ, typeVLAN}[:roll.IntN(4)*roll.IntN(2)]
	kind, network = tagged(kind, network, tags...)
	switch roll.IntN(8) {
	case 0: // flip any bit
		network[roll.IntN(len(network))] ^= 1 << roll.IntN(8)
	case 1, 2: // flip a bit of the first bytes, which matter most
		network[roll.IntN(min(len(network), 10))] ^= 1 << roll.IntN(8)
	case 3: // cut off
		network = network[:roll.IntN(len(network)+1)]
	case 4:
		kind = []uint16{0x0806, 46, typeIPv4, typeIPv6, typeVLAN, 0}[roll.IntN(6)]
	}
	p := at(0, kind, network)
	if roll.IntN(3) == 0 { // captured in part
		p.Bytes += roll.Uint64N(1500)
	}
	return p
}

// Packets of every size count their bytes and the overhead.
func TestSizes(t *testing.T) {
	sizes := []uint64{1, 2, 33, 34, 35, 60, 1514, 3000, 4096, 9000, 65501, 65502, 65503, 65536, 65537, 1, 66000, 40000, 16001, 19000, 20000, 3000, 81535, 81537, 100000, 524288, 64, 1 << 20, 1<<24 - 1000, 1<<24 - 1}
	var l Limits
	for _, f := range []policy.Framing{{}, {Overhead: 38, MPU: 84}, {Overhead: -64}, {Overhead: 256, MPU: 256}} {
		for _, each := range []policy.EachKind{policy.EachAll, policy.EachFlow} {
			rule := everything(1_000_000_000, 1<<26)
			rule.Prefix, rule.Framing, rule.Each.Kind = prefix(fmt.Sprintf("10.0.0.%d/32", len(l.Rules))), f, each
			l.Rules = append(l.Rules, rule)
		}
	}
	e := newBoth(t, l)
	for i, rule := range l.Rules {
		now, f := uint64(0), rule.Framing
		for _, n := range sizes {
			now += 1000
			r, err := e.Offer(&trace.Packet{Time: now, Bytes: n, EtherType: typeIPv4, Network: ip4("192.0.2.1", fmt.Sprint("10.0.0.", i), 17, 0)})
			testenv.Must(t, err)
			want := max(int64(n)+int64(f.Overhead), int64(f.MPU), 0)
			if r.Bytes != uint64(min(want, 1<<24-1)) || r.Rule != i || r.Verdict != model.Pass {
				t.Errorf("%v: %d bytes are counted as %+v", f, n, r)
			}
		}
	}
}

// A trace may begin at any time, also near a wrap of the clock or of the ticks in buckets.
func TestFirstPacketAtAnyTime(t *testing.T) {
	var l Limits
	for i, rate := range []policy.Rate{8000, 10_000_000, 2_902_402_064, 400_000_000_000} {
		l.Rules = append(l.Rules, everything(rate, 1500))
		l.Rules[i].Prefix = prefix(fmt.Sprintf("10.0.0.%d/32", i))
	}
	for _, first := range []uint64{0, 1, 1 << 30, 1<<62 - 1, 1 << 62, 1<<63 - 1_000_000_000, 1 << 63, 1<<64 - 2} {
		e := newBoth(t, l)
		for i, rule := range l.Rules {
			for n, want := range []model.Verdict{model.Pass, model.Drop} {
				r, err := e.Offer(&trace.Packet{Time: first, Bytes: 1500, EtherType: typeIPv4, Network: ip4("192.0.2.1", fmt.Sprint("10.0.0.", i), 17, 0)})
				testenv.Must(t, err)
				if r.Verdict != want {
					t.Errorf("%v, packet %d at %d ns: %v, want %v", rule.Rate, n, first, r.Verdict, want)
				}
			}
		}
	}
}

// Both engines agree if big and small packets alternate and the clock steps back: after a packet so large that the kernel's
// rule changes for it, buckets are as full as before.
func TestAlternatingSizes(t *testing.T) {
	seed := testenv.Seed(t)
	roll, colours := rand.New(rand.NewPCG(seed, 2)), map[policy.Colour]int{}
	for i := range 12 {
		rule := everything(100_000_000, 1<<20)
		rule.Each.Kind = []policy.EachKind{policy.EachAll, policy.EachHost}[i%2]
		switch {
		case i >= 6:
			colour(&rule, coloured[i/2%3], 150_000_000, 1<<21)
		case i >= 2:
			rule.Algorithm = policy.Algorithm(i / 2 % 2)
			queued(&rule, roll)
		}
		e, now, excess := newBoth(t, Limits{Rules: []policy.Rule{rule}}), uint64(time.Hour), 0
		for range 100 {
			now += roll.Uint64N(uint64(60 * time.Millisecond))
			p := at(now-roll.Uint64N(slack), typeIPv4, ip4("192.0.2.1", fmt.Sprintf("10.0.0.%d", roll.IntN(2)), 17, 0))
			p.Bytes += roll.Uint64N(40_000)
			if roll.IntN(3) == 0 {
				p.Bytes += roll.Uint64N(3 << 20)
			}
			r, err := e.Offer(p)
			if err != nil {
				t.Fatal(err)
			}
			if colours[r.Colour]++; r.Excess {
				excess++
			}
		}
		if excess == 0 || excess > 80 {
			t.Errorf("%d of 100 packets are excess; the test needs 1 to 80", excess)
		}
	}
	if len(colours) < 3 {
		t.Errorf("%v packets by colour", colours)
	}
}

// The longest prefix decides, by the source or the destination. Key returns the bucket key
// for each bucket scope.
func TestRules(t *testing.T) {
	rule := func(s string, rate policy.Rate, each policy.Each) policy.Rule {
		return policy.Rule{Prefix: prefix(s), Rate: rate, Capacity: 2000, Each: each}
	}
	host, flow := policy.Each{Kind: policy.EachHost}, policy.Each{Kind: policy.EachFlow}
	hole := policy.Rule{Prefix: prefix("10.1.0.9/32"), Rate: policy.Unlimited}
	leaky := rule("192.0.2.0/24", 8000, policy.Each{})
	leaky.Algorithm = policy.Leaky
	l := Limits{Rules: []policy.Rule{
		rule("10.0.0.0/8", 8000, policy.Each{}), rule("10.1.0.0/16", 8000, host), hole, leaky,
		rule("2001:db8::/32", 8000, policy.Each{Kind: policy.EachSubnet, Bits: 48}), rule("2001:db8:1::/64", 8000, flow),
	}}
	udp := ports(1000, 53, 4)
	cases := []struct {
		far      string
		rule     int
		dst, src string // keys by --match
	}{
		{"10.9.9.9", 0, "10.0.0.0/8", "10.0.0.0/8"},
		{"10.1.2.3", 1, "10.1.2.3", "10.1.2.3"},
		{"10.1.0.9", 2, "10.1.0.9/32", "10.1.0.9/32"},
		{"192.0.2.1", 3, "192.0.2.0/24", "192.0.2.0/24"},
		{"192.0.3.1", NoRule, "", ""},
		{"2001:db8:5:6::7", 4, "2001:db8:5::/48", "2001:db8:5::/48"},
		{"2001:db8:1::7", 5, "udp,[2001:db9::1]:1000,[2001:db8:1::7]:53", "udp,[2001:db8:1::7]:1000,[2001:db9::1]:53"},
		{"2001:db9::7", NoRule, "", ""},
	}
	for _, match := range []policy.Match{policy.MatchDst, policy.MatchSrc} {
		l.Match = match
		e := newBoth(t, l)
		for _, c := range cases {
			near := "198.51.100.1"
			kind, packet := uint16(typeIPv4), ip4
			if netip.MustParseAddr(c.far).Is6() {
				near, kind, packet = "2001:db9::1", typeIPv6, ip6
			}
			src, dst, want := near, c.far, c.dst
			if match == policy.MatchSrc {
				src, dst, want = dst, src, c.src
			}
			for i := range 40 {
				r, err := e.Offer(at(uint64(i), kind, packet(src, dst, 17, 0, udp...)))
				if err != nil {
					t.Fatalf("%s: %v", c.far, err)
				}
				got := ""
				if r.Rule != NoRule {
					got = l.Key(r)
				}
				full := r.Rule != NoRule && l.Rules[r.Rule].Rate != policy.Unlimited && uint64(i+1)*r.Bytes > 2000
				if r.Rule != c.rule || got != want || !r.Limited || (r.Verdict == model.Drop) != full || r.Excess != full {
					t.Errorf("%s by %v, packet %d: %+v with key %s", c.far, match, i, r, got)
				}
			}
		}
	}
}

// Excess packets are marked, dropped or passed, and a penalty keeps the bucket full. The level shows it.
func TestExcess(t *testing.T) {
	const csv = "0,1000\n0,1000\n0,1000\n1000000000,500\n"
	leaky := policy.Rule{Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Second}}
	for name, c := range map[string]struct {
		rule policy.Rule
		want string // verdict, whether it is excess, and level in bytes
	}{
		"drop":    {policy.Rule{}, "pass 1000, drop! 1000, drop! 1000, pass 500"},
		"ecn":     {policy.Rule{Excess: policy.ECN}, "pass 1000, mark! 2000, mark! 3000, mark! 2500"},
		"pass":    {policy.Rule{Excess: policy.Pass}, "pass 1000, pass! 1000, pass! 1000, pass 500"},
		"penalty": {leaky, "pass 1000, drop! 2500, drop! 2500, drop! 2500"},
	} {
		t.Run(name, func(t *testing.T) {
			rule := c.rule
			rule.Prefix, rule.Rate, rule.Capacity = prefix("0.0.0.0/0"), 8000, 1500
			var got []string
			for _, r := range offer(t, newBoth(t, Limits{Rules: []policy.Rule{rule}}), csv) {
				mark := ""
				if r.Excess {
					mark = "!"
				}
				got = append(got, fmt.Sprintf("%v%s %d", r.Verdict, mark, r.LevelBytes()))
			}
			if s := strings.Join(got, ", "); s != c.want {
				t.Errorf("%s, want %s", s, c.want)
			}
		})
	}
}

// If the kernel's table is full, its result says that the spill bucket was charged. Then the
// engines disagree.
func TestFullTable(t *testing.T) {
	testenv.Root(t)
	l := bothFamilies(8000, 2000, policy.EachHost)
	k, err := newKernel(l, 4)
	testenv.Must(t, err)
	defer k.Close()
	b := &both{kernel: k, model: NewModel(l)}
	for i := range 6 {
		r, err := b.Offer(at(uint64(i), typeIPv4, ip4("192.0.2.1", fmt.Sprintf("10.0.0.%d", i), 17, 0, make([]byte, 1000)...)))
		if r.Spilled != (i >= 4) {
			t.Errorf("packet %d: %+v", i, r)
		}
		if (err != nil) != (i >= 4) {
			t.Errorf("packet %d: %v", i, err)
		}
	}
}

// Drained buckets are removed, without an effect on any verdict.
func TestDrainedBucketsAreRemoved(t *testing.T) {
	const hosts = 4 * firstSweep
	l := bothFamilies(1_000_000, 3000, policy.EachHost)
	m, alone, s := NewModel(l), NewModel(l), NewSummary(l)
	most, now, excess := 0, uint64(0), uint64(0)
	network := ip4("192.0.2.1", "10.0.0.0", 17, 0, make([]byte, 986)...)
	for i := range 2 * hosts {
		now += 20_000
		host := i
		if i%4 == 3 {
			host = 0 // always above its rate
		}
		network[17], network[18], network[19] = byte(host>>16), byte(host>>8), byte(host)
		p := at(now, typeIPv4, network)
		r, err := m.Offer(p)
		testenv.Must(t, err)
		s.Add(r)
		if r.Excess {
			excess++
		}
		if host == 0 {
			want, err := alone.Offer(p)
			testenv.Must(t, err)
			if r != want {
				t.Fatalf("packet %d: %+v; without other hosts %+v", i, r, want)
			}
		} else if r.Excess {
			t.Fatalf("packet %d: %+v", i, r)
		}
		most = max(most, len(m.buckets.of), len(s.accounts.of))
	}
	if most > firstSweep+1 {
		t.Errorf("%d buckets were kept", most)
	}
	// 1 Mbit/s of 100 Mbit/s.
	if top := s.Sum().MostExcess; len(top) != 1 || top[0].Key != "10.0.0.0" || top[0].Packets != excess || excess < hosts/2*8/10 {
		t.Errorf("excess %d, %+v", excess, top)
	}
}

// Both engines exempt genuine neighbour discovery, and limit packets that a router would forward.
func TestNeighbourDiscovery(t *testing.T) {
	big := make([]byte, 1237)
	for _, c := range []struct {
		name     string
		src, dst string
		message  []byte
		bytes    uint64 // on the wire, if more than captured
		exempt   bool
	}{
		{"resolution", "2001:db8::1", "ff02::1:ff00:2", []byte{135, 0, 0, 0}, 0, true},
		{"duplicate address detection", "::", "ff02::1:ff00:2", []byte{135, 0, 0, 0}, 0, true},
		{"probe", "fe80::1", "2001:db8::2", []byte{135, 0, 0, 0}, 0, true},
		{"answer", "2001:db8::2", "fe80::1", []byte{136, 0, 0, 0}, 0, true},
		{"answer to a probe from a global address", "2001:db8::2", "2001:db8::1", []byte{136, 0, 0, 0}, 0, false},
		{"router solicitation", "fe80::1", "ff02::2", []byte{133, 0, 0, 0}, 0, true},
		{"router advertisement", "fe80::1", "ff02::1", []byte{134, 0, 0, 0}, 0, true},
		{"router advertisement from afar", "2001:db8::1", "ff02::1", []byte{134, 0, 0, 0}, 0, false},
		{"redirect", "fe80::1", "2001:db8::2", []byte{137, 0, 0, 0}, 0, true},
		{"redirect to all", "fe80::1", "ff02::1", []byte{137, 0, 0, 0}, 0, false},
		{"longer than discovery may be", "fe80::1", "fe80::2", append([]byte{135, 0, 0, 0}, big...), 0, false},
		{"longer, and cut off", "fe80::1", "fe80::2", append([]byte{135, 0, 0, 0}, big...)[:8], 14 + 40 + 1241, false},
		{"far longer than it says", "fe80::1", "fe80::2", []byte{135, 0, 0, 0}, 200_000, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			network := ip6(c.src, c.dst, unix.IPPROTO_ICMPV6, 0, c.message...)
			if c.bytes > 0 && !c.exempt {
				binary.BigEndian.PutUint16(network[4:], uint16(c.bytes-14-40))
			}
			p := at(1, typeIPv6, network)
			p.Bytes = max(p.Bytes, c.bytes)
			r, err := newBoth(t, bothFamilies(8000, 1000, policy.EachAll)).Offer(p)
			testenv.Must(t, err)
			if r.Limited == c.exempt || (r.Rule == NoRule) != c.exempt {
				t.Errorf("%+v, want exempt %v", r, c.exempt)
			}
		})
	}
}

// A packet counts its length in the trace, also a large one in a tunnel that was captured before segmentation.
func TestBigPacketsInTunnels(t *testing.T) {
	inner := ip4("172.16.0.1", "172.16.0.2", unix.IPPROTO_TCP, 0, append(ports(1, 2, 8), append([]byte{0x50}, make([]byte, 7)...)...)...)
	for name, network := range map[string][]byte{
		"IP in IP": ip4("192.0.2.1", "10.0.0.1", 4, 0, inner...),
		"GRE":      ip4("192.0.2.1", "10.0.0.1", 47, 0, append([]byte{0, 0, 8, 0}, inner...)...),
	} {
		for _, size := range []uint64{100, 60_000, 66_000, 300_000, 1<<24 - 1} {
			p := at(1, typeIPv4, network)
			p.Bytes = size
			r, err := newBoth(t, bothFamilies(8000, 1000, policy.EachAll)).Offer(p)
			testenv.Must(t, err)
			if r.Bytes != size {
				t.Errorf("%s: %d bytes counted as %d", name, size, r.Bytes)
			}
		}
	}
}

// The key of a host differs from that of a flow of the host to itself, which --order sparse-first needs.
func TestKeysOfHostsAndFlows(t *testing.T) {
	for _, match := range []policy.Match{policy.MatchDst, policy.MatchSrc} {
		l := bothFamilies(1e9, 1<<20, policy.EachHost)
		l.Match = match
		host := netip.MustParseAddr("10.0.0.1")
		c, p := compile(l), packet{ip: true, flow: maps.Flow{Src: host, Dst: host}}
		if rule := c.match(p); c.key(rule, p) == (bucketKey{rule, p.flow}) {
			t.Errorf("match %v: both are %+v", match, p.flow)
		} else if name := l.Key(Result{key: c.key(rule, p)}); name != "10.0.0.1" {
			t.Errorf("match %v: the key is %s", match, name)
		}
	}
}
