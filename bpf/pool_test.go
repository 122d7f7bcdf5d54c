package bpf_test

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A mirroredStage is the model of a rule or pool in a tree, and its counters.
type mirroredStage struct {
	*mirrored
	entry     maps.Entry
	guarantee *mirrored // nil for none
	shadow    *mirrored // of a pool; nil for none
	above     *mirroredStage
	share     *model.Share // nil for none
	sharers   map[string]*model.Sharer
}

// renew gives a pool a random lease.
func (f *forest) renew(s *mirroredStage, now uint64, roll dice) {
	f.Helper()
	some := func() policy.Rate { return max(policy.Rate(roll(uint64(s.rule.Rate))), policy.MinRate) }
	f.at(now)
	testenv.Must(f, f.set.Store.Pools().Renew(s.rule.Prefix, maps.Lease{Rate: some(), Safe: some(), Until: now + roll(1<<(1+roll(34)))}))
}

// lease sets the model of a pool with a cluster to its lease. TestLeases checks the clock of that.
func (f *forest) lease(s *mirroredStage, now uint64) {
	f.at(now)
	for ; s != nil; s = s.above {
		if s.rule.HasLeases() {
			s.limit.Meter = f.set.Store.Meter(s.entry)
		}
	}
}

// weigh gives a rule another weight in its pool.
func (f *forest) weigh(s *mirroredStage, now uint64, w policy.Weight) {
	f.Helper()
	s.rule.Weight = w
	f.at(now)
	_, err := f.set.Put(s.rule)
	testenv.Must(f, err)
	if s.entry, _ = f.set.Find(s.rule.Prefix); s.limited() {
		s.limit.Meter = f.set.Store.Meter(s.entry)
	}
}

// sharer is that of a packet of a host, which is of a member of the pool.
func (s *mirroredStage) sharer(host netip.Addr, member *mirroredStage) *model.Sharer {
	key := host.String() // each host has one flow
	switch {
	case s.rule.Share.Kind == policy.ShareSubnet:
		key = netip.PrefixFrom(host, int(s.rule.Share.Bits)).Masked().String()
	case s.rule.Share.Kind == policy.ShareMember:
		key = fmt.Sprintf("%p", member)
	}
	if s.sharers[key] == nil {
		s.sharers[key] = &model.Sharer{}
	}
	return s.sharers[key]
}

// A forest is rules and pools in the kernel, and their model.
type forest struct {
	*rig
	rules, pools []*mirroredStage
	packets      int
	ears         *ears // nil if nobody listens
}

func newForest(tb testing.TB, buckets uint32) *forest {
	return &forest{rig: newRig(tb, maps.Size{Views: 2, Rules: 64, Buckets: buckets, Labels: 256, Shares: 64, Leases: 64, Affected: 64, Pools: true}, bySource())}
}

// putIn sets a rule or pool at a virtual time.
func (f *forest) putIn(r policy.Rule, now uint64) *mirroredStage {
	f.Helper()
	set, list := f.set, &f.rules
	if r.Pool {
		set, list = f.set.Store.Pools(), &f.pools
	}
	f.at(now)
	_, err := set.Put(r)
	testenv.Must(f, err)
	e, found := set.Find(r.Prefix)
	if !found || e.Rule != r {
		f.Fatalf("put %+v, found %+v", r, e.Rule)
	}
	s := &mirroredStage{mirrored: newMirrored(r, now), entry: e}
	if g, ok := r.Guaranteed(); ok {
		s.guarantee = newMirrored(g, now)
	}
	if proposed, ok := r.Proposed(); ok {
		s.shadow = newMirrored(proposed, now)
	}
	if r.Share.Kind != policy.ShareNone {
		share := f.share(e)
		s.share, s.sharers = &share, map[string]*model.Sharer{}
	}
	for _, pool := range f.pools {
		if pool.rule.Label.Name == string(r.Within) {
			s.above = pool
		}
	}
	if f.lease(s, now); r.HasLeases() {
		*s.bucket(bucketKey{}) = s.limit.WithLevel(0, now)
	}
	*list = append(*list, s)
	return s
}

// share is the clock and the wheels of a rule or pool in the kernel.
func (f *forest) share(e maps.Entry) model.Share {
	f.Helper()
	_, stages := f.set.Store.Stages(e, policy.MatchDst, maps.Flow{Dst: addr("10.0.0.1")}, start)
	if stages[0].Share == nil {
		f.Fatalf("%+v has no share", e.Rule)
	}
	return *stages[0].Share
}

// stages are the rule, and the pools above it.
func (f *forest) stages(s *mirroredStage, host netip.Addr, now uint64) (all []*mirroredStage, at []model.Stage) {
	var member *mirroredStage
	for ; s != nil; s = s.above {
		stage := model.Stage{Limit: s.limit, Share: s.share, Weight: 1}
		if member != nil {
			stage.Weight = uint64(member.rule.Weight.Value())
		}
		if s.share != nil {
			stage.Sharer = s.sharer(host, member)
		}
		member = s
		if s.limited() {
			b := s.bucket(keyOf(s.rule, host))
			stage.State.Level, stage.State.Departs = s.limit.Level(*b, now), b.Departs
		}
		if s.rule.Order == policy.SparseFirst {
			stage.State.Flow = s.limit.Meter.Level(*s.bucket(bucketKey{host: host, flow: true}), now)
			flow := maps.Flow{Src: host, Dst: addr("10.9.9.9"), Proto: protoUDP}
			stage.State.FIFO = f.set.Store.State(s.entry, policy.MatchSrc, flow, now).FIFO // TestSparseOrderOverLeases checks that
		}
		if s.guarantee != nil {
			if s.rule.Each.Kind != policy.EachAll {
				stage.Members = uint64(s.rule.Members)
				stage.TogetherLevel = s.guarantee.limit.Level(*s.guarantee.bucket(bucketKey{}), now)
			}
			stage.Guarantee = s.guarantee.limit
			stage.GuaranteeLevel = s.guarantee.limit.Level(*s.guarantee.bucket(keyOf(s.rule, host)), now)
		}
		all, at = append(all, s), append(at, stage)
	}
	return all, at
}

// asked is the passage that the set predicts for a packet of a host.
func (f *forest) asked(e maps.Entry, host netip.Addr, p model.Packet) model.Passage {
	flow := maps.Flow{Src: host, Dst: addr("10.9.9.9"), Proto: protoUDP}
	_, stages := f.set.Store.Stages(e, policy.MatchSrc, flow, p.Time)
	return model.Climb(stages, p)
}

// offer offers a packet of a host to a rule, and compares verdict, departure time, levels and counters.
func (f *forest) offer(s *mirroredStage, host netip.Addr, now, n uint64, ect bool) model.Passage {
	f.Helper()
	f.packets++
	packet := model.Packet{Time: now, Bytes: n, ECT: ect}
	f.lease(s, now)
	all, at := f.stages(s, host, now)
	asked := f.asked(s.entry, host, packet)
	want := model.Climb(at, packet)
	if !reflect.DeepEqual(asked, want) {
		f.Fatalf("packet %d, %d bytes at %d ns: predicted %+v\nmodel %+v\nrule %+v\nstages %+v", f.packets, n, now, asked, want, s.rule, at)
	}
	frame, m := sized(host, n, int(s.rule.Framing.Overhead), now)
	if ect {
		frame[15] |= 2
	}
	if f.ears != nil {
		f.ears.renew(f, now)
	}
	verdict, _, departure := sendTimed(f, f.program(), frame, m)
	if (verdict == drop) != (want.Verdict == model.Drop) || verdict != drop && verdict != next || departure != want.Departure {
		f.Fatalf("packet %d, %d bytes at %d ns: verdict %#x, departure %d\nmodel %+v\nrule %+v\nstages %+v", f.packets, n, now, verdict, departure, want, s.rule, at)
	}
	if f.ears != nil {
		f.ears.hear(f, all, want, host)
	}
	*s.counts = sum(*s.counts, segments(m.packets(), countersOf(want.Outcome, n)))
	for i, stage := range all {
		if stage.shadow != nil && (want.Refuses == i || want.Refuses == model.NoStage) {
			stage.propose(now, n, m.packets())
		}
		key := keyOf(stage.rule, host)
		switch {
		case want.Refuses == i && i > 0:
			*stage.counts = sum(*stage.counts, segments(m.packets(), dropped(n)))
		case want.Refuses != model.NoStage || i == 0:
		default:
			one := passed(n)
			if want.At[i].Verdict != model.Pass {
				one = shadowed(n)
			}
			if want.At[i].Verdict == model.Mark {
				one = marked(n)
			}
			*stage.counts = sum(*stage.counts, segments(m.packets(), one))
		}
		if stage.limited() && want.At[i].Level != at[i].Level {
			*stage.bucket(key) = stage.limit.WithLevel(want.At[i].Level, now)
		}
		stage.bucket(key).Departs = want.At[i].Departs
		if stage.rule.Order == policy.SparseFirst && want.At[i].Flow != at[i].State.Flow {
			*stage.bucket(bucketKey{host: host, flow: true}) = stage.limit.WithLevel(want.At[i].Flow, now)
		}
		want.ChargeSharer(at, i, n)
		if stage.share != nil {
			if got := f.share(stage.entry); got != *stage.share {
				f.Fatalf("packet %d: share of stage %d is\n%+v, in the model\n%+v\n%+v", f.packets, i, got, *stage.share, want)
			}
		}
		if stage.guarantee != nil && want.ChargesGuarantee(i) {
			stage.guarantee.limit.Charge(stage.guarantee.bucket(key), now, n<<model.UnitBits)
			if at[i].Members != 0 {
				stage.guarantee.limit.Charge(stage.guarantee.bucket(bucketKey{}), now, model.Together(n, at[i].Members))
			}
			c := passed(n)
			c = segments(m.packets(), c)
			c.ExtraPackets = 0
			*stage.guarantee.counts = sum(*stage.guarantee.counts, c)
		}
		flow := maps.Flow{Src: host, Dst: addr("10.9.9.9"), Proto: protoUDP}
		if got := f.set.Store.State(stage.entry, policy.MatchSrc, flow, now).Level; stage.limited() && got != stage.limit.Level(*stage.bucket(key), now) {
			f.Fatalf("packet %d, %d bytes at %d ns: level of stage %d is %d units, in the model %d\n%+v", f.packets, n, now, i, got, stage.limit.Level(*stage.bucket(key), now), want)
		}
		if stage.guarantee != nil {
			g, _ := f.set.Store.Guarantee(stage.entry)
			got, model := f.set.Store.State(g, policy.MatchSrc, flow, now).Level, stage.guarantee.limit.Level(*stage.guarantee.bucket(key), now)
			if got != model {
				f.Fatalf("packet %d: level of the guarantee of stage %d is %d units, in the model %d\n%+v", f.packets, i, got, model, want)
			}
		}
	}
	return want
}

// propose offers a packet to the shadow of a pool. A large packet conforms if one of bpf.AbiLayoutSHARED_BYTES does.
func (s *mirroredStage) propose(now, n uint64, packets int) {
	b, one := s.shadow.bucket(bucketKey{}), passed(n)
	level := s.shadow.limit.Level(*b, now)
	if level+min(n, uint64(bpf.AbiLayoutSHARED_BYTES))<<model.UnitBits <= s.shadow.limit.Capacity {
		*b = s.shadow.limit.WithLevel(level+n<<model.UnitBits, now)
	} else {
		one = shadowed(n)
	}
	*s.shadow.counts = sum(*s.shadow.counts, segments(packets, one))
}

func (f *forest) counted() {
	f.Helper()
	for _, s := range slices.Concat(f.rules, f.pools) {
		if got, want := f.set.Store.Counters(s.entry.ID), countedBy(s.rule, *s.counts); got != want {
			f.Errorf("counters of %+v:\n%+v, want\n%+v", s.rule, got, want)
		}
		if s.shadow != nil {
			shadow, ok := f.set.Store.Shadow(s.entry)
			if got := f.set.Store.Counters(shadow.ID); !ok || got != *s.shadow.counts {
				f.Errorf("counters of the shadow of %+v:\n%+v, want\n%+v", s.rule, got, *s.shadow.counts)
			}
		}
		if s.guarantee == nil {
			continue
		}
		g, ok := f.set.Store.Guarantee(s.entry)
		if got := f.set.Store.Counters(g.ID); !ok || got != *s.guarantee.counts {
			f.Errorf("counters of the guarantee of %+v:\n%+v, want\n%+v", s.rule, got, *s.guarantee.counts)
		}
	}
}

func pool(name string, r policy.Rule) policy.Rule {
	r.Pool, r.Prefix, r.Label.Name = true, policy.PoolKey(name), name
	return r
}

// Rules in random trees of pools: each packet has the verdict of the model, and changes levels and counters as
// in the model. Every other tree delays and marks nothing, so that it is known what listeners are told.
func TestPools(t *testing.T) {
	t.Parallel()
	const packets = 400
	f := newForest(t, 4096)
	random := rand.New(rand.NewPCG(testenv.Seed(t), 13))
	roll := func(n uint64) uint64 { return random.Uint64N(n) }
	weights := []policy.Weight{0, 2, 3, policy.MaxWeight}
	for tree := range testenv.Rounds(t, 30) {
		plain := tree%2 == 1
		f.rules, f.pools = nil, nil
		f.set.Store.Clear(f.set, f.set.Store.Pools())
		now := starts[roll(uint64(len(starts)-1))] // the last one is too close to the end of time
		rate := uint64(64_000) << roll(16)
		some := func() policy.Rate { return policy.Rate(rate/2 + roll(rate)) }
		within := func() policy.Within {
			if len(f.pools) == 0 || roll(5) == 0 {
				return ""
			}
			return policy.Within(f.pools[max(0, len(f.pools)-1-int(roll(3)))].rule.Label.Name)
		}
		guarantee := func(r *policy.Rule) {
			if r.Within != "" && roll(2) == 0 {
				r.Guarantee = max(policy.Guarantee(min(r.Rate, policy.Rate(rate)))/policy.Guarantee(1+roll(8)), 8000)
			}
		}
		for i := range 1 + roll(policy.MaxDepth) {
			p := pool(fmt.Sprint("pool ", tree, i), policy.Rule{Rate: some(), Capacity: 1514 + roll(1<<(8+roll(10))), Within: within()})
			if !plain {
				p.Excess = []policy.Excess{policy.Drop, policy.ECN, policy.Delay}[roll(3)]
				if roll(2) == 0 {
					p.Shadow = policy.Shadow{Rate: some() / 2, Capacity: 1514 + roll(1<<14)}
				}
			}
			if p.Excess == policy.Delay {
				p.Queue, p.ECNAbove = 1514+roll(rate/8+1), policy.ECNAbove(1+roll(1e9))
				p.Order = policy.Order(roll(2))
			}
			guarantee(&p)
			switch roll(5) {
			case 0:
				p.Cluster = policy.Cluster{Name: policy.ClusterName(p.Label.Name), Safe: min(some(), p.Rate)}
			case 1:
				p.Adapt = policy.Adapt{Min: min(some(), p.Rate), To: "192.0.2.1,2001:db8::1", Above: policy.AdaptAbove(roll(2) * 5e6)}
			}
			some := func() policy.Share {
				return []policy.Share{{}, {Kind: policy.ShareHost}, {Kind: policy.ShareSubnet, Bits: 31}, {Kind: policy.ShareFlow}, {Kind: policy.ShareMember}}[roll(5)]
			}
			if p.Share = some(); p.Within != "" {
				p.Weight = weights[roll(4)]
			}
			f.putIn(p, now)
		}
		overhead := []int16{shrink, grow}[roll(2)]
		if plain {
			overhead = 0
		}
		for i := range 1 + roll(4) {
			r := randomRule(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16), roll, overhead)
			r.Shadow, r.Order, r.Within = policy.Shadow{}, policy.FIFO, within()
			if plain {
				r.Excess, r.Queue, r.ECNAbove, r.Penalty = policy.Drop, 0, 0, policy.Penalty{}
			}
			if r.Rate != policy.Unlimited {
				r.Rate = some()
				r.Penalty = possiblePenalty(r)
				if r.Excess == policy.Delay {
					r.Capacity, r.Queue = 1514+roll(rate/8+1), 0
					if r.Algorithm == policy.GCRA {
						r.Queue = 1514 + roll(rate/8+1)
						if r.Each.Kind != policy.EachFlow {
							r.Order = policy.Order(roll(2))
						}
					}
				}
			}
			guarantee(&r)
			if r.Within != "" {
				r.Weight = weights[roll(4)]
			}
			if r.Rate != policy.Unlimited && r.Each.Kind == policy.EachAll && r.Penalty == (policy.Penalty{}) && roll(2) == 0 {
				r.Share = []policy.Share{{Kind: policy.ShareHost}, {Kind: policy.ShareSubnet, Bits: 31}, {Kind: policy.ShareFlow}}[roll(3)]
			}
			if r.Guarantee != 0 && r.Each.Kind != policy.EachAll {
				r.Members = policy.Members(1 + roll(7))
			}
			f.putIn(r, now)
		}
		f.listenAgain(now)
		for range packets {
			s := f.rules[roll(uint64(len(f.rules)))]
			host := s.rule.Prefix.Addr().As4()
			host[3] = byte(roll(3))
			if pool := f.pools[roll(uint64(len(f.pools)))]; pool.rule.HasLeases() && roll(10) == 0 {
				f.renew(pool, now, roll)
			}
			if s.rule.Within != "" && roll(20) == 0 {
				f.weigh(s, now, weights[roll(4)])
			}
			n := randomSize(roll, overhead, 1514)
			if plain {
				n = max(n, 60)
			}
			f.offer(s, netip.AddrFrom4(host), now, n, roll(2) == 0)
			now += roll(8 * 3000 * 1e9 / rate)
		}
		f.counted()
	}
}

// A packet that just fits is no excess of the shadow of a pool.
func TestShadowOfPoolIsFull(t *testing.T) {
	f := newForest(t, 4)
	f.putIn(pool("p", policy.Rule{Rate: 8e6, Capacity: 10_000, Shadow: policy.Shadow{Rate: 8e6, Capacity: 2000}}), start)
	s := f.putIn(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: policy.Unlimited, Within: "p"}, start)
	for range 3 {
		f.offer(s, addr("10.0.0.1"), start, 1000, false)
	}
	f.counted()
}

// Pools in random trees pass no more than their limits, over any window, whatever their rules do with excess packets, and with
// keys that find no slot. What a pool refuses does not pass by a penalty, and is not charged.
func TestPoolsBoundAllRules(t *testing.T) {
	t.Parallel()
	const packets = 400
	f, random := newForest(t, 4), rand.New(rand.NewPCG(testenv.Seed(t), 30))
	roll := func(n uint64) uint64 { return random.Uint64N(n) }
	for tree := range testenv.Rounds(t, 30) {
		f.rules, f.pools = nil, nil
		f.set.Store.Clear(f.set, f.set.Store.Pools())
		now, rate := uint64(1e12), uint64(64_000)<<roll(12)
		for i := range 1 + roll(4) {
			p := pool(fmt.Sprint("pool ", tree, i), policy.Rule{Rate: policy.Rate(rate), Capacity: 1514 + roll(10_000), Share: policy.Share{Kind: policy.ShareKind(roll(5))}})
			if p.Excess = []policy.Excess{policy.Drop, policy.Drop, policy.ECN, policy.Delay}[roll(4)]; p.Excess == policy.Delay {
				p.Queue, p.ECNAbove = 1514+roll(rate/8), policy.Never
			}
			if p.Share.Kind == policy.ShareSubnet {
				p.Share.Bits = 31
			}
			if i > 0 {
				p.Within = policy.Within(f.pools[i-1].rule.Label.Name)
			}
			f.putIn(p, now)
		}
		for i := range 1 + roll(4) {
			r := randomRule(netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16), roll, 0)
			r.Within, r.Fail = policy.Within(f.pools[roll(uint64(len(f.pools)))].rule.Label.Name), policy.Fail(roll(2))
			if r.Rate != policy.Unlimited && r.Excess != policy.Delay {
				r.Rate, r.Capacity = policy.Rate(rate<<roll(8)), 1514+roll(3000)
				if roll(2) == 0 {
					r.Algorithm, r.Excess, r.Each = policy.Leaky, policy.Drop, policy.Each{Kind: policy.EachHost}
					r.Penalty = policy.Penalty{Kind: policy.PenaltyFill}
				}
				r.Penalty = possiblePenalty(r)
			}
			f.putIn(r, now)
		}
		windows := make([]testenv.Windows, len(f.pools))
		for range packets {
			s, n := f.rules[roll(uint64(len(f.rules)))], 60+roll(1455>>(4*roll(2)))
			host := s.rule.Prefix.Addr().As4()
			host[3] = byte(roll(12))
			frame, m := sized(netip.AddrFrom4(host), n, 0, now)
			frame[15] |= byte(roll(2)) * 2
			verdict, _ := send(f, f.program(), frame, m)
			for i, p := range f.pools {
				passed, bound := uint64(0), p.rule.Capacity+p.rule.Queue
				for up := s; up != nil && verdict == next; up = up.above {
					if up == p {
						passed = n
					}
				}
				if p.rule.Excess == policy.ECN {
					bound *= 2
				}
				if most, _ := windows[i].Packet(passed); passed > 0 && most > int64(bound)*1e6+10 {
					t.Fatalf("tree %d: %d millionths of a byte more passed %+v than its rate allows, by %+v", tree, most, p.rule, s.rule)
				}
			}
			gap := roll(n*8e9/rate) >> 6
			if roll(16) == 0 {
				gap <<= 6 + roll(6)
			}
			for i, p := range f.pools {
				windows[i].Leak(uint64(p.rule.Rate), int64(gap))
			}
			now += gap
		}
	}
}

// Two CPUs charge a tree of pools from different rules. Pools pass no more than their rates and capacities, but for a
// packet of the other CPU, and each packet is charged to all levels or to none.
func TestPoolOnTwoCPUs(t *testing.T) {
	const cpus = 2
	var frames [cpus][]byte
	for cpu := range frames {
		frames[cpu] = ether(typeIPv4, ip4{dst: fmt.Sprintf("10.%d.0.1", cpu), proto: protoUDP}.with(udpHeader(1, 2), zeros(958)))
	}
	size := uint64(len(frames[0]))
	for _, share := range []policy.ShareKind{policy.ShareNone, policy.ShareFlow, policy.ShareMember} {
		for _, rate := range []policy.Rate{1_000_000, 1_000_000_000, 400_000_000_000} {
			t.Run(fmt.Sprintf("share %v/%v", policy.Share{Kind: share}, rate), func(t *testing.T) {
				hook := live()
				f := &forest{rig: newRig(t, maps.Size{Views: 2, Rules: 8, Buckets: 64, Labels: 16, Shares: 2, Pools: true}, hook)}
				top := f.putIn(pool("top", policy.Rule{Rate: rate, Capacity: 10 * size, Share: policy.Share{Kind: share}}), 0)
				low := f.putIn(pool("low", policy.Rule{Rate: rate, Capacity: 20 * size, Within: "top", Share: policy.Share{Kind: share}}), 0)
				var rules [cpus]*mirroredStage
				for cpu := range rules {
					rules[cpu] = f.putIn(policy.Rule{
						Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(cpu), 0, 0}), 16), Rate: policy.Unlimited, Within: "low", Fail: policy.Closed,
					}, 0)
				}
				program := f.program()
				took := onEachCPU(t, func(cpu int) error {
					_, err := program.Run(&ebpf.RunOptions{Data: frames[cpu], Repeat: uint32(testenv.Rounds(t, 60_000))})
					return err
				})
				var sum uint64
				for _, r := range rules {
					sum += f.set.Store.Counters(r.entry.ID).PassedBytes
				}
				for _, p := range []*mirroredStage{low, top} {
					c, bound := f.set.Store.Counters(p.entry.ID), p.rule.Capacity+leaked(p.rule.Rate, took)+(cpus-1)*size
					if c.PassedBytes > bound {
						t.Errorf("pool %s: %d bytes passed in %d ns, want at most %d", p.rule.Label.Name, c.PassedBytes, took, bound)
					}
					if c.PassedBytes != sum {
						t.Errorf("pool %s was charged %d bytes, and its rules passed %d", p.rule.Label.Name, c.PassedBytes, sum)
					}
				}
				least := 9 * size
				if share != policy.ShareNone {
					least = cpus * 3 * size // each sharer may be ahead by 3/8 of the capacity
				}
				if sum < least {
					t.Errorf("only %d bytes passed, want at least %d of the capacity", sum, least)
				}
			})
		}
	}
}

// A guarantee gives its burst beyond the pool only once, however often it is taken away and given again.
func TestGuaranteeGivesNoRoom(t *testing.T) {
	const guarantee, burst, step = 80_000, 32 << 10, uint64(100 * time.Millisecond)
	for _, each := range []policy.EachKind{policy.EachAll, policy.EachHost} {
		t.Run(policy.Each{Kind: each}.String(), func(t *testing.T) {
			f := newForest(t, 64)
			now := uint64(time.Hour)
			f.putIn(pool("up", policy.Rule{Rate: 8000, Capacity: 2000}), now)
			with := policy.Rule{
				Prefix: prefix("10.0.0.0/16"), Rate: 8_000_000, Capacity: 1 << 20, Within: "up", Guarantee: guarantee,
				Each: policy.Each{Kind: each}, Members: 1,
			}
			without := with
			without.Guarantee, without.Members = 0, 0
			passed, atMost := 0.0, 2000.0+burst+1000
			for i := range 40 {
				rule := with
				if i%2 == 1 {
					rule = without
				} else {
					atMost += guarantee / 8 * float64(step) / 1e9
				}
				atMost += 1000 * float64(step) / 1e9 // of the pool
				f.put(rule, now)
				for end := now + step; now < end; now += step / 100 {
					frame, m := sized(addr("10.0.0.1"), 1000, 0, now)
					if verdict, _, _ := sendTimed(f, f.program(), frame, m); verdict != drop {
						passed += 1000
					}
				}
			}
			if passed > atMost {
				t.Errorf("%.0f bytes passed, want at most %.0f", passed, atMost)
			}
		})
	}
}

// Guarantees raise the level of a pool far beyond its capacity. It keeps this debt in a long overload, at a lower rate, and
// when a change reverts. But only so many members are guaranteed as the rule says.
func TestDebtOfPools(t *testing.T) {
	const members, packets, bytes = 1000, 21, 1500 // within the burst of each guarantee
	f := newForest(t, 8192)
	up := f.putIn(pool("up", policy.Rule{Rate: 8_000_000, Capacity: 100_000}), 0)
	rule := f.putIn(policy.Rule{
		Prefix: prefix("10.0.0.0/16"), Rate: 8_000_000, Capacity: 1 << 20, Within: "up", Guarantee: 8000, Members: members,
		Each: policy.Each{Kind: policy.EachHost},
	}, 0)
	others := f.putIn(policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: policy.Unlimited, Within: "up"}, 0)
	now := uint64(1e9)
	level := func(what string, want uint64) {
		t.Helper()
		_, stages := f.set.Store.Stages(others.entry, policy.MatchSrc, maps.Flow{Src: addr("10.1.0.1"), Dst: addr("10.9.9.9"), Proto: protoUDP}, now)
		if got := model.Bytes(stages[1].State.Level); got < want-want/100_000 || got > want+want/100_000 {
			t.Fatalf("%s, the level is %d bytes, want %d", what, got, want)
		}
	}
	for i := range 2 * members {
		for range packets {
			f.offer(rule, netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), now, bytes, false)
		}
	}
	passed := f.set.Store.Counters(rule.entry.ID).PassedBytes
	if all := uint64(members * (32 << 10)); passed > all+100_000 || passed < all-all/100 {
		t.Errorf("%d bytes passed, want at most the bursts of %d guarantees, %d bytes", passed, members, all)
	}
	level("at first", passed)
	for range 20 { // s
		now += 1e9
		f.offer(others, addr("10.1.0.1"), now, bytes, false)
	}
	level("after an overload", passed-20_000_000)

	lower := up.rule
	lower.Rate, lower.Capacity = 4_000_000, 50_000
	f.at(now)
	_, err := f.set.Store.Pools().Put(lower)
	testenv.Must(t, err)
	level("at a lower rate", passed-20_050_000)

	set := f.set.Store.Pools()
	testenv.Must(t, set.Prepare([]policy.Difference{{Have: &lower, Want: &up.rule}}, func(int) {}))
	set.Store.Time(now+1000, now+1e9)
	testenv.Must(t, set.Store.Arm())
	now += 5e8
	f.at(now)
	set.Store.Commit()
	level("with a change in force", passed-20_500_000)
	now += 1e9
	f.at(now)
	level("after the change has reverted", passed-20_500_000-500_000-50_000-250_000)
	frame, m := sized(addr("10.0.0.1"), bytes, 0, now)
	if verdict, _, _ := sendTimed(f, f.program(), frame, m); verdict != next {
		t.Fatalf("verdict %#x for a guaranteed packet", verdict)
	}
	level("after a packet", passed-20_500_000-500_000-50_000-250_000+bytes)
}
