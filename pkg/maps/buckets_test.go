package maps_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func randomFlow(roll *rand.Rand, dst netip.Addr) maps.Flow {
	src := dst.AsSlice()
	for i := range src[2:] {
		src[2+i] = byte(roll.Uint32())
	}
	from, _ := netip.AddrFromSlice(src)
	return maps.Flow{
		Src: from, Dst: dst, Proto: []uint8{6, 17, 33, 132, 136}[roll.IntN(5)],
		SrcPort: uint16(roll.Uint32()), DstPort: uint16(roll.Uint32()),
	}
}

// State finds the bucket that the kernel made for a packet, and Buckets lists all buckets
// that are not empty. Both hash and mask addresses as the programs do.
func TestBucketsAreFound(t *testing.T) {
	seed := testenv.Seed(t)
	const size, second = 200, uint64(time.Second)
	for _, c := range []struct {
		prefix string
		each   policy.Each
	}{
		{"10.0.0.0/8", policy.Each{Kind: policy.EachHost}},
		{"10.0.0.0/8", policy.Each{Kind: policy.EachSubnet, Bits: 30}},
		{"10.0.0.0/8", policy.Each{Kind: policy.EachSubnet, Bits: 13}},
		{"10.0.0.0/8", policy.Each{Kind: policy.EachFlow}},
		{"2001:db8::/32", policy.Each{Kind: policy.EachHost}},
		{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 36}},
		{"2001:db8::/32", policy.Each{Kind: policy.EachSubnet, Bits: 127}},
		{"2001:db8::/32", policy.Each{Kind: policy.EachFlow}},
	} {
		t.Run(fmt.Sprintf("%s %v", c.prefix, c.each), func(t *testing.T) {
			roll := rand.New(rand.NewPCG(seed, 0))
			r := newRig(t, maps.Size{Rules: 4, Buckets: 1 << 14})
			new := rule(c.prefix, 1600, 1000) // a packet drains in a second
			new.Each = c.each
			e := r.put(new)
			// Another rule's buckets lie between them.
			other := rule("172.16.0.0/12", 8, 1000)
			other.Each.Kind = policy.EachFlow
			o := r.put(other)
			type bucketKey struct {
				subnet netip.Prefix
				flow   maps.Flow
			}
			name := func(f maps.Flow) bucketKey {
				switch c.each.Kind {
				case policy.EachFlow:
					return bucketKey{flow: f}
				case policy.EachHost:
					return bucketKey{subnet: netip.PrefixFrom(f.Dst, f.Dst.BitLen())}
				}
				p, _ := f.Dst.Prefix(int(c.each.Bits))
				return bucketKey{subnet: p}
			}
			early, late := map[bucketKey]uint64{}, map[bucketKey]uint64{}
			var flows []maps.Flow
			others := map[maps.Flow]bool{}
			for i := range 600 {
				if i == 300 {
					for _, f := range flows {
						if got := r.units(e, f) >> 20; got != early[name(f)] {
							t.Fatalf("%v has %d bytes, want %d", name(f), got, early[name(f)])
						}
					}
					r.now += 6 * second // no bucket has more than 1000 bytes
				}
				f := randomFlow(roll, randomHost(roll, new.Prefix))
				if i%10 == 3 {
					f = randomFlow(roll, randomHost(roll, other.Prefix))
					r.send(policy.GCRA, f, size)
					others[f] = true
					continue
				}
				levels := early
				if i >= 300 {
					levels = late
				}
				if levels[name(f)] == 1000 {
					continue
				}
				if !r.send(policy.GCRA, f, size) {
					t.Fatalf("a packet of %v is dropped, whose bucket has %d bytes", name(f), levels[name(f)])
				}
				levels[name(f)] += size
				flows = append(flows, f)
			}
			got := map[bucketKey]uint64{}
			for _, b := range r.Store.Buckets([]maps.Entry{e}, r.clock) {
				s := bucketKey{b.Subnet, b.Flow}
				if _, twice := got[s]; twice {
					t.Errorf("%v is listed twice", s)
				}
				got[s] = b.LevelBytes
			}
			for s, want := range late {
				if got[s] != want {
					t.Errorf("%v is listed with %d bytes, want %d", s, got[s], want)
				}
			}
			for s := range got {
				if late[s] == 0 {
					t.Errorf("%v is listed, and its bucket is empty", s)
				}
			}
			n := 0
			for _, b := range r.Store.Buckets([]maps.Entry{o}, r.clock) {
				n++
				if !others[b.Flow] {
					t.Errorf("%v is listed with the other rule", b.Flow)
				}
			}
			if n != len(others) {
				t.Errorf("the other rule has %d flows, want %d", n, len(others))
			}
			if got := r.Store.SharedLevel(e, r.now); got != 0 {
				t.Errorf("the spill bucket has %d units", got)
			}
		})
	}
}

func randomHost(roll *rand.Rand, p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= byte(roll.IntN(2)) << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// A change of the bucket scope starts with empty buckets; a change of the rate does not.
func TestChangeOfBucketScope(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 2, Buckets: 64})
	flow := to("10.1.1.1")
	new := rule("10.0.0.0/8", 8, 2000)
	new.Each.Kind = policy.EachHost
	r.put(new)
	r.send(policy.GCRA, flow, 1000)
	new.Excess = policy.Pass
	e := r.put(new)
	if got := r.units(e, flow) >> 20; got != 1000 {
		t.Errorf("another excess: the bucket has %d bytes, want 1000", got)
	}
	new.Each.Kind = policy.EachFlow
	e = r.put(new)
	if got := r.units(e, flow); got != 0 {
		t.Errorf("each flow: the bucket has %d units of its host", got)
	}
	for _, b := range r.Store.Buckets([]maps.Entry{e}, r.clock) {
		t.Errorf("each flow: %+v is listed", b)
	}
}

// State predicts the level that each packet meets, whether it is spilled, and so its
// verdict. The buckets of two rules fill a small table, drain, and replace each other.
func TestStatePredictsVerdicts(t *testing.T) {
	seed := testenv.Seed(t)
	roll := rand.New(rand.NewPCG(seed, 0))
	const slots, size = 64, 100
	r := newRig(t, maps.Size{Rules: 2, Buckets: slots})
	new := rule("10.0.0.0/8", 8000, 1000)
	new.Each.Kind = policy.EachHost
	flows := rule("2001:db8::/32", 16_000, 400)
	flows.Each.Kind = policy.EachFlow
	entries := []maps.Entry{r.put(new), r.put(flows)}
	sent := map[int][]maps.Flow{}
	spilled, room := 0, 0
	for range 20_000 {
		n := roll.IntN(2)
		e := entries[n]
		f := to(randomHost(roll, e.Prefix).String())
		if old := sent[n]; len(old) > 0 && roll.IntN(2) == 0 {
			f = old[len(old)-1-roll.IntN(min(len(old), slots))]
		}
		sent[n] = append(sent[n], f)
		r.now += roll.Uint64N(2_000_000)
		state, before := r.Store.State(e, policy.MatchDst, f, r.now), r.Store.Counters(e.ID)
		if spill := r.Store.SharedLevel(e, r.now); state.Spilled && state.Level != spill {
			t.Fatalf("%v spills and finds %d units, the spill bucket has %d", f, state.Level, spill)
		}
		want := model.NewLimit(e.Rule).Decide(state, model.Packet{Bytes: size})
		r.send(policy.GCRA, f, size)
		after := r.Store.Counters(e.ID)
		if got := after.SpilledPackets > before.SpilledPackets; got != state.Spilled {
			t.Fatalf("%v: spilled %v, said %v before", f, got, state.Spilled)
		}
		if passed := after.PassedPackets > before.PassedPackets; passed != (want.Verdict == model.Pass) {
			t.Fatalf("%v: passed %v, want %v", f, passed, want.Verdict)
		}
		if got := r.units(e, f); got != want.Level {
			t.Fatalf("%v has %d units, want %d", f, got, want.Level)
		}
		if state.Spilled {
			spilled++
		} else {
			room++
		}
	}
	if spilled < 1000 || room < 1000 {
		t.Errorf("%d packets spilled and %d did not: the test tells little", spilled, room)
	}
	if got := r.Store.Slots(r.now); got.All != slots || got.InUse == 0 || got.InUse > slots {
		t.Errorf("%+v of %d slots", got, slots)
	}
}

// A bucket that is charged while the table is read is not fuller than it can be.
func TestLevelsWhileCharged(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 1, Buckets: 64})
	hosts := rule("10.0.0.0/8", 8000, 1000)
	hosts.Each.Kind = policy.EachHost
	e := r.put(hosts)
	before := r.now
	r.now += 1e9
	r.send(policy.GCRA, to("10.1.1.1"), 1000)
	times := []uint64{before, r.now}
	now := func() uint64 {
		at := times[0]
		times = times[1:]
		return at
	}
	for _, b := range r.Store.Buckets([]maps.Entry{e}, now) {
		if b.LevelBytes != 1000 {
			t.Errorf("the level is %d bytes of 1000", b.LevelBytes)
		}
	}
	if len(times) > 0 {
		t.Error("nobody asked for the time again")
	}
}
