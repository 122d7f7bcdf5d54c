package bpf_test

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

// Packets of any size, although a test run takes less than a page of data: a
// rule's overhead makes them smaller or bigger than they are, and what is more
// is said to be segments of one packet.
const (
	shrink = -34  // a frame of 34 + n bytes counts as n: from 1 byte to 64 KiB
	grow   = 1000 // each segment counts 1000 more: from 1 KiB to 512 KiB
)

// sized is a UDP packet from a host that counts as n bytes under a rule of that overhead.
func sized(host netip.Addr, n uint64, overhead int, now uint64) ([]byte, meta) {
	const segment = 1 // gso_size
	length, m := int(n)-overhead, meta{now: now}
	if length > 3000 {
		for segs := 2; ; segs++ {
			rest := int(n) - segs*overhead
			if rest > 1<<16 {
				continue
			}
			headers := segs - 1 // of all segments but the first
			length = 100 + headers*segment
			length += (rest - length) % headers
			m.wireLen, m.segs, m.segSize = uint32(rest), uint32(segs), segment
			break
		}
	}
	frame := udp(addr("192.0.2.1"), host, 0)[:34] // of its UDP header only what fits
	copy(frame[26:], host.AsSlice())
	copy(frame[30:], addr("10.9.9.9").AsSlice())
	return append(frame, make([]byte, length-34)...), m
}

// A twin is a rule in the kernel, and the model of the bucket of each sharer.
type twin struct {
	*rig
	rule    policy.Rule
	entry   maps.Entry
	meter   model.Meter
	buckets map[netip.Addr]*model.Bucket
	want    maps.Counters
	packets int
}

func newTwin(r *rig, rule policy.Rule, now uint64) *twin {
	t := &twin{rig: r, buckets: map[netip.Addr]*model.Bucket{}}
	t.set.Delete(rule.Prefix)
	t.rule, t.entry, t.meter = rule, r.put(rule, now), meterOf(rule)
	return t
}

func meterOf(rule policy.Rule) model.Meter {
	return model.New(uint64(rule.Rate), rule.Capacity, rule.Penalty.Kind != policy.PenaltyNone, uint64(rule.Penalty.Duration))
}

// change sets the rule anew, at a virtual time. What is owed stays owed, up to
// the new capacity, and idling counts from the change.
func (t *twin) change(rule policy.Rule, now uint64) {
	t.Helper()
	old := t.meter
	t.rule, t.entry, t.meter = rule, t.put(rule, now), meterOf(rule)
	t.meter.Continue(old, now)
	for _, b := range t.buckets {
		level := old.Level(*b, now)
		if t.meter.Capacity < old.Capacity || t.meter.Penalty < old.Penalty {
			level = min(level, t.meter.Most())
		}
		*b = t.meter.Owing(level, now)
	}
	if m := t.set.Meter(t.entry); m != t.meter {
		t.Fatalf("packet %d: the kernel's meter is %+v, the model's %+v", t.packets, m, t.meter)
	}
}

// level is what the kernel's bucket of a host owes.
func (t *twin) level(host netip.Addr, now uint64) uint64 {
	if t.rule.Each.Kind == policy.EachAll {
		return t.set.OwnLevel(t.entry, now)
	}
	flow := maps.Flow{Src: host, Dst: addr("10.9.9.9"), Proto: 17}
	return t.set.Level(t.entry, policy.MatchSrc, flow, now)
}

// offer sends a packet, and compares the verdict and the level that it leaves.
func (t *twin) offer(host netip.Addr, now, n uint64, ect bool) model.Verdict {
	t.Helper()
	sharer := host
	if t.rule.Each.Kind == policy.EachAll {
		sharer = netip.Addr{}
	}
	b := t.buckets[sharer]
	if b == nil {
		b = &model.Bucket{}
		t.buckets[sharer] = b
	}
	before := *b
	want := t.meter.Offer(b, now, n, ect && t.rule.Excess == policy.ECN)
	frame, m := sized(host, n, int(t.rule.Framing.Overhead), now)
	if ect {
		frame[15] |= 2
	}
	verdict, _ := send(t, t.program(t.rule.Algorithm), frame, m)
	t.packets++
	wantVerdict := next
	switch {
	case want == model.Pass:
		t.want = sum(t.want, passed(n))
	case want == model.Mark:
		t.want = sum(t.want, marked(n))
	case t.rule.Excess == policy.Pass:
		t.want = sum(t.want, shadowed(n))
	default:
		t.want = sum(t.want, dropped(n))
		wantVerdict = drop
	}
	if verdict != wantVerdict {
		c := t.set.Counters(t.entry.ID)
		t.Fatalf("packet %d, %d bytes at %d ns: verdict %#x, the model says %d\nrule %+v\nmeter %+v\nbucket %+v\ncounters %+v",
			t.packets, n, now, verdict, want, t.rule, t.meter, before, c)
	}
	if got, want := t.level(host, now), t.meter.Level(*b, now); got != want {
		t.Fatalf("packet %d, %d bytes at %d ns: level %d units, the model says %d\nrule %+v\nmeter %+v\nbucket %+v",
			t.packets, n, now, got, want, t.rule, t.meter, before)
	}
	return want
}

// counted compares all counters of the set.
func (t *twin) counted() {
	t.Helper()
	for id, got := range t.counters() {
		want := maps.Counters{}
		if uint32(id) == t.entry.ID {
			want = t.want
		}
		if got != want {
			t.Errorf("counters of rule %d:\n%+v, want\n%+v", id, got, want)
		}
	}
}

func sum(a, b maps.Counters) maps.Counters {
	a.PassedPackets += b.PassedPackets
	a.PassedBytes += b.PassedBytes
	a.ExcessPackets += b.ExcessPackets
	a.ExcessBytes += b.ExcessBytes
	a.DroppedPackets += b.DroppedPackets
	a.DroppedBytes += b.DroppedBytes
	a.MarkedPackets += b.MarkedPackets
	a.UnsurePackets += b.UnsurePackets
	return a
}

var sharings = []policy.EachKind{policy.EachAll, policy.EachHost, policy.EachFlow}

// matchSource is an egress hook, so that GSO counts by wire_len, whose rules go by the source.
func matchSource(t *testing.T) *rig {
	hook := egress()
	hook.MatchSrc = 1
	return newRig(t, maps.Size{Rules: 4, Buckets: 4096}, hook)
}

func TestVectors(t *testing.T) {
	r := matchSource(t)
	for _, trace := range testenv.Vectors(t) {
		steps := trace.Steps(t)
		for _, algorithm := range algorithms {
			for _, each := range sharings {
				t.Run(fmt.Sprintf("%s/%v/%v", trace.Name, algorithm, policy.Each{Kind: each}), func(t *testing.T) {
					r.TB = t
					twin := newTwin(r, policy.Rule{
						Prefix: prefix("10.0.0.0/8"), Rate: policy.Rate(trace.Rate), Capacity: trace.Capacity,
						Algorithm: algorithm, Each: policy.Each{Kind: each}, Framing: policy.Framing{Overhead: shrink},
					}, 0)
					for i, s := range steps {
						if v := twin.offer(addr("10.0.0.7"), s.Now, s.Bytes, false); (v == model.Pass) != s.Pass {
							t.Fatalf("row %d: verdict %d, want pass %v", i, v, s.Pass)
						}
					}
					twin.counted()
				})
			}
		}
	}
}

// Random packets at random times, with changes of the rule in between, get the
// same verdict and leave the same level in the kernel as in the model.
func TestKernelIsModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	traces, packets, changes := 60, 500, 6
	if testing.Short() {
		traces, packets, changes = 12, 200, 2
	}
	r := matchSource(t)
	for i := range traces {
		roll := rand.New(rand.NewPCG(seed, uint64(i)))
		overhead := []int16{shrink, grow}[roll.IntN(2)]
		rule := randomRule(roll, algorithms[i%2], overhead)
		rule.Each.Kind = sharings[i/2%3]
		name := fmt.Sprintf("%d-%v-%v-%v-%v", i, rule.Algorithm, rule.Each, rule.Excess, rule.Rate)
		t.Run(name, func(t *testing.T) {
			r.TB = t
			now := []uint64{1, 1e9, 1<<62 - 1e9, 1<<63 - 1e9, 1<<64 - 1 - uint64(400*24*time.Hour)}[roll.IntN(5)]
			end := now + uint64(399*24*time.Hour)
			twin := newTwin(r, rule, now)
			for p := range packets {
				if p%(packets/(changes+1)) == packets/(changes+1)-1 {
					rule := randomRule(roll, twin.rule.Algorithm, overhead)
					rule.Each = twin.rule.Each
					twin.change(rule, now)
				}
				host := netip.AddrFrom4([4]byte{10, 1, 0, byte(roll.IntN(5))})
				n := randomSize(roll, overhead, rule.Capacity)
				twin.offer(host, now, n, roll.IntN(2) == 0)
				now = later(roll, twin.meter, now, end)
			}
			twin.counted()
		})
	}
}

func randomRule(roll *rand.Rand, algorithm policy.Algorithm, overhead int16) policy.Rule {
	rate := uint64(8000)
	for range roll.IntN(27) { // to 400 Gbit/s, each power of two alike
		rate *= 2
	}
	rate = min(rate+roll.Uint64N(rate), 400_000_000_000)
	rule := policy.Rule{
		Prefix: prefix("10.0.0.0/8"), Rate: policy.Rate(rate),
		Capacity:  1514 + roll.Uint64N(1<<(4+roll.IntN(22))),
		Algorithm: algorithm,
		Excess:    policy.Excess(roll.IntN(3)),
		Framing:   policy.Framing{Overhead: overhead},
	}
	if algorithm != policy.Leaky {
		return rule
	}
	switch roll.IntN(4) {
	case 0:
		rule.Penalty.Kind = policy.PenaltyFill
	case 1:
		rule.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Duration(1 + roll.Int64N(int64(20*time.Second)))}
	}
	return rule
}

func randomSize(roll *rand.Rand, overhead int16, capacity uint64) uint64 {
	least, most := uint64(1), uint64(60000)
	if overhead == grow {
		least, most = 1034, 512<<10
	}
	n := least + roll.Uint64N(1500)
	switch roll.IntN(5) {
	case 0:
		n = least + roll.Uint64N(most-least+1)
	case 1:
		n = capacity + roll.Uint64N(2)
	}
	return min(max(n, least), most)
}

// later is a time for the next packet: soon, when the bucket has drained, around
// its clock, after idling, or a little before.
func later(roll *rand.Rand, m model.Meter, now, end uint64) uint64 {
	gap := uint64(0)
	drain := m.Wait(m.Capacity, 1500)
	switch roll.IntN(12) {
	case 0, 1, 2:
	case 3, 4, 5, 6:
		gap = roll.Uint64N(2*drain + 2)
	case 7:
		gap = roll.Uint64N(uint64(time.Minute))
	case 8:
		gap = m.Wait(m.Capacity, m.Capacity>>model.UnitBits)
	case 9: // half around the clock, or all around
		if m.Slope > 1<<40 {
			gap = uint64(float64(1<<63)/float64(m.Slope)*(1<<32)) * (1 + roll.Uint64N(3))
		}
	case 10:
		gap = roll.Uint64N(uint64(m.Idle)+4) << model.TickBits
	case 11:
		if back := roll.Uint64N(1 << 20); back < now {
			return now - back
		}
	}
	if gap > end-now {
		return now
	}
	return now + gap
}

// Traces whose answer is known without any model.
func TestKnownTraces(t *testing.T) {
	type packet struct {
		ns, bytes uint64
		ect       bool
		verdict   model.Verdict
		level     uint64 // bytes
	}
	const pass, excess, mark = model.Pass, model.Excess, model.Mark
	r := matchSource(t)
	for name, c := range map[string]struct {
		rule    policy.Rule
		packets []packet
	}{
		"exactly full conforms": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500},
			[]packet{{0, 1000, false, pass, 1000}, {0, 500, false, pass, 1500}, {0, 1, false, excess, 1500}, {1000, 1, false, pass, 1500}, {1999, 1, false, excess, 1500}, {2000, 1, false, pass, 1500}},
		},
		"bigger than the bucket": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500},
			[]packet{{0, 1, false, pass, 1}, {999, 9000, false, excess, 1}, {1000, 9000, false, pass, 9000}, {8_000_000, 500, false, excess, 1001}, {8_501_000, 1000, false, pass, 1500}},
		},
		"back in time": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500},
			[]packet{{1_000_000_000, 1500, false, pass, 1500}, {999_900_000, 1, false, excess, 1600}, {1_000_001_000, 1, false, pass, 1500}},
		},
		"marked up to twice": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500, Excess: policy.ECN},
			[]packet{{0, 1500, true, pass, 1500}, {0, 1500, true, mark, 3000}, {0, 1, true, excess, 3000}, {0, 1, false, excess, 3000}, {1000, 1, true, mark, 3000}},
		},
		"fill": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500, Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyFill}},
			[]packet{{0, 600, false, pass, 600}, {0, 1000, false, excess, 1500}, {100_000, 200, false, excess, 1500}, {300_000, 200, false, pass, 1500}},
		},
		"hold": {
			policy.Rule{Rate: 8_000_000, Capacity: 1500, Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Millisecond}},
			[]packet{{0, 600, false, pass, 600}, {0, 1000, false, excess, 2500}, {1_099_000, 100, false, excess, 2500}, {2_199_000, 100, false, pass, 1500}},
		},
		"a day idle at 400 Gbit/s": {
			policy.Rule{Rate: 400_000_000_000, Capacity: 65536},
			[]packet{{5, 60000, false, pass, 60000}, {86_400_000_000_000, 65000, false, pass, 65000}, {86_400_000_000_000, 600, false, excess, 65000}},
		},
	} {
		for _, algorithm := range algorithms {
			if c.rule.Penalty.Kind != policy.PenaltyNone && algorithm != policy.Leaky {
				continue
			}
			for _, each := range sharings {
				t.Run(fmt.Sprintf("%s/%v/%v", name, algorithm, policy.Each{Kind: each}), func(t *testing.T) {
					r.TB = t
					rule := c.rule
					rule.Prefix, rule.Algorithm, rule.Each.Kind = prefix("10.0.0.0/8"), algorithm, each
					rule.Framing.Overhead = shrink
					twin := newTwin(r, rule, 0)
					for i, p := range c.packets {
						if v := twin.offer(addr("10.0.0.7"), p.ns, p.bytes, p.ect); v != p.verdict {
							t.Errorf("packet %d: verdict %d, want %d", i, v, p.verdict)
						}
						if got := model.Bytes(twin.level(addr("10.0.0.7"), p.ns)); got != p.level {
							t.Errorf("packet %d: level %d bytes, want %d", i, got, p.level)
						}
					}
					twin.counted()
				})
			}
		}
	}
}
