package replay

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func pool(name string, r policy.Rule) policy.Rule {
	r.Pool, r.Prefix, r.Label.Name = true, policy.PoolKey(name), name
	return r
}

// udp is a packet of n bytes from a port of a host.
func udp(now, n uint64, from, to string, port uint16) *trace.Packet {
	p := at(now, typeIPv4, ip4(from, to, 17, 0, ports(port, 53, 8)...))
	p.Bytes = n
	return p
}

// Both engines agree on every packet of rules in random trees of pools, also if the clock steps back.
func TestPools(t *testing.T) {
	seed := testenv.Seed(t)
	roll := rand.New(rand.NewPCG(seed, 3))
	refused, guaranteed := map[bool]int{}, map[bool]int{} // by whether a pool did
	for tree := range 12 {
		l := randomPools(roll)
		e, now, rate := newBoth(t, l), []uint64{0, uint64(time.Hour), 1 << 63}[tree%3], uint64(l.Rules[0].Rate)
		if l.Rules[0].Rate == policy.Unlimited {
			rate = uint64(l.Pools[0].Rate)
		}
		for range 1500 {
			now += roll.Uint64N(8 * 1500 * uint64(time.Second) / rate)
			p := randomFrame(roll)
			p.Time = now - min(now, roll.Uint64N(2)*roll.Uint64N(uint64(5*time.Millisecond)))
			if roll.IntN(10) == 0 {
				p.Bytes += roll.Uint64N(40_000)
			}
			r, err := e.Offer(p)
			if err != nil {
				t.Fatalf("tree %d: %v\n%+v", tree, err, l)
			}
			if r.RefusedBy != "" {
				refused[r.Pools != [policy.MaxDepth]uint64{} && r.RefusedBy[0] == 'p']++
			}
			if r.GuaranteedBy != "" {
				guaranteed[r.GuaranteedBy[0] == 'p']++
			}
		}
	}
	for who, n := range map[string]map[bool]int{"refused": refused, "guaranteed": guaranteed} {
		if n[false] == 0 || n[true] == 0 {
			t.Errorf("%s by rules %d packets, by pools %d", who, n[false], n[true])
		}
	}
}

// randomPools are rules for the addresses of randomFrame, and pools.
func randomPools(roll *rand.Rand) (l Limits) {
	rate := uint64(64_000) << roll.IntN(12)
	some := func() policy.Rate { return policy.Rate(rate/2 + roll.Uint64N(rate)) }
	put := func(r policy.Rule) policy.Rule {
		r.Rate, r.Capacity = some(), 1514+roll.Uint64N(20_000)
		if n := len(l.Pools); n > 0 && roll.IntN(5) > 0 {
			r.Within = policy.Within(l.Pools[max(0, n-1-roll.IntN(2))].Label.Name)
			r.Weight = []policy.Weight{0, 2, 7}[roll.IntN(3)]
			if roll.IntN(2) == 0 {
				r.Guarantee = policy.Guarantee(max(uint64(r.Rate)/(2+roll.Uint64N(8)), 8000))
			}
		}
		switch r.Excess = []policy.Excess{policy.Drop, policy.ECN, policy.Delay}[roll.IntN(3)]; {
		case r.Excess == policy.Delay:
			queued(&r, roll)
		case !r.Pool && roll.IntN(4) == 0:
			r.Excess = policy.Pass
		}
		return r
	}
	shares := []policy.Share{{}, {Kind: policy.ShareHost}, {Kind: policy.ShareSubnet, Bits: 127}, {Kind: policy.ShareFlow}, {Kind: policy.ShareMember}}
	for i := range 1 + roll.IntN(5) {
		l.Pools = append(l.Pools, put(pool(fmt.Sprint("p", i), policy.Rule{Share: shares[roll.IntN(5)]})))
	}
	for i, s := range []string{"10.0.0.0/8", "10.0.0.1/32", "2001:db8::/32"} {
		r := put(policy.Rule{Prefix: prefix(s)})
		r.Framing = policy.Framing{Overhead: int16(roll.IntN(100) - 50)}
		switch roll.IntN(4) {
		case 0:
			r.Each.Kind, r.Members = []policy.EachKind{policy.EachHost, policy.EachFlow}[roll.IntN(2)], 9
		case 1:
			r.Share = shares[roll.IntN(2)+2*(i/2)] // subnets only of IPv6
		case 2:
			if r.Within != "" && r.Excess == policy.Drop {
				r.Rate, r.Capacity = policy.Unlimited, 0
			}
		case 3:
			if r.Excess == policy.Delay && r.Algorithm == policy.GCRA {
				r.Order = policy.SparseFirst
			}
		}
		if r.Guarantee == 0 || r.Each.Kind == policy.EachAll {
			r.Members = 0
		}
		l.Rules = append(l.Rules, r)
	}
	return l
}

// A stream offers packets of one size at a rate, with times that are behind those of other streams.
type stream struct{ bits, bytes, behind uint64 }

// offerStreams offers streams for 20 s, each from a port of its own. It returns their rates of passed bits per second.
func offerStreams(t *testing.T, e Engine, streams ...stream) (passed []float64) {
	t.Helper()
	const start, seconds = uint64(time.Hour), 20
	due, bits := make([]uint64, len(streams)), make([]uint64, len(streams))
	for {
		next := 0
		for i := range due {
			if due[i] < due[next] {
				next = i
			}
		}
		if due[next] >= seconds*uint64(time.Second) {
			break
		}
		s := streams[next]
		r, err := e.Offer(udp(start+due[next]-s.behind, s.bytes, "192.0.2.1", "10.0.0.1", uint16(next)))
		testenv.Must(t, err)
		if r.Verdict != model.Drop {
			bits[next] += 8 * s.bytes
		}
		due[next] += 8 * s.bytes * uint64(time.Second) / s.bits
	}
	for _, n := range bits {
		passed = append(passed, float64(n)/seconds)
	}
	return passed
}

// Two streams offer twice the rate each, one of full packets and one of the largest GSO packets. First come, first
// served, small packets take all room before a large one fits. With fair shares each stream gets half of the rate.
func TestSharesOfLargePackets(t *testing.T) {
	for _, share := range []policy.ShareKind{policy.ShareNone, policy.ShareFlow} {
		rule := everything(10_000_000, 1<<19)
		rule.Share.Kind = share
		e := newBoth(t, Limits{Rules: []policy.Rule{rule}})
		got := offerStreams(t, e, stream{bits: 20_000_000, bytes: 1514}, stream{bits: 20_000_000, bytes: 65226})
		fair := min(got[0], got[1]) > 4.8e6 && max(got[0], got[1]) < 5.3e6
		if fair != (share == policy.ShareFlow) {
			t.Errorf("share %v: %.0f bit/s of small packets pass, %.0f of large ones", rule.Share, got[0], got[1])
		}
	}
}

// Sharers keep their debts if a packet comes with an earlier time than the one before it, as from another CPU.
func TestSharesIfTheClockStepsBack(t *testing.T) {
	rule := everything(10_000_000, 1<<19)
	rule.Share.Kind = policy.ShareFlow
	e := newBoth(t, Limits{Rules: []policy.Rule{rule}})
	got := offerStreams(t, e, stream{bits: 20_000_000, bytes: 1514}, stream{bits: 80_000_000, bytes: 1514, behind: 100_000})
	if min(got[0], got[1]) < 4.8e6 || max(got[0], got[1]) > 5.3e6 {
		t.Errorf("%.0f bit/s of one stream pass, %.0f of the other; want 5 Mbit/s each", got[0], got[1])
	}
}

// Memory for sharers is bounded, and the one with the most excess is not forgotten.
func TestManySharers(t *testing.T) {
	rule := everything(8_000_000, 20_000)
	rule.Share.Kind = policy.ShareFlow
	s := NewSummary(Limits{Rules: []policy.Rule{rule}})
	most := 0
	for i := range 4 * firstSweep {
		flow := maps.Flow{Dst: netip.MustParseAddr("10.9.9.9"), Src: netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), Proto: 17}
		if i%4 == 3 {
			flow.Src = netip.MustParseAddr("192.0.2.1")
		}
		s.Add(Result{Limited: true, Bytes: 1000, Verdict: model.Drop, Excess: true, sharer: flow})
		most = max(most, len(s.sharers.of))
	}
	if most > firstSweep+1 {
		t.Errorf("%d sharers were kept", most)
	}
	if top := s.MostExcess(1); len(top) != 1 || top[0].Key != "udp,192.0.2.1,10.9.9.9" || top[0].Excess.Packets != firstSweep {
		t.Errorf("most excess: %+v", top)
	}
}
