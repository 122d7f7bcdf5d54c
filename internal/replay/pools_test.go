package replay

import (
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
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

// Both engines agree on every packet of rules in random trees of pools, also if the clock steps back, while rules and pools are
// edited, change together, revert, and have leases.
func TestPools(t *testing.T) {
	seed := testenv.Seed(t)
	const inTree = 2500
	seen := map[string]int{}
	for tree := range testenv.Rounds(t, 12) {
		t.Run(fmt.Sprint(tree), func(t *testing.T) {
			roll := rand.New(rand.NewPCG(seed, uint64(tree)))
			c := newChanging(t, grower{roll, uint64(64_000) << roll.IntN(12)}, []uint64{uint64(time.Hour), 1 << 62, 1 << 63}[tree%3])
			c.seen = seen
			for range inTree {
				c.offer()
			}
		})
	}
	t.Log(seen)
	for _, what := range []string{
		"refused by a rule", "refused by a pool", "guaranteed by a rule", "guaranteed by a pool", "delay", "mark", "colour",
		"edit", "lease", "end of a lease", "plan", "begin", "confirm", "killed", "revert", "reverted", "finish",
	} {
		if seen[what] == 0 {
			t.Errorf("never seen: %s", what)
		}
	}
}

// A grower makes random rules and pools with about a rate.
type grower struct {
	*rand.Rand
	rate uint64
}

func (g grower) some() policy.Rate { return policy.Rate(g.rate/2 + g.Uint64N(g.rate)) }

// again returns a rule or pool with other numbers, in the tree of the pools above.
func (g grower) again(r policy.Rule, above []policy.Rule) policy.Rule {
	if r.Within != "" {
		r.Within = policy.Within(above[max(0, len(above)-1-g.IntN(2))].Label.Name)
		r.Weight = []policy.Weight{0, 2, 7}[g.IntN(3)]
	}
	if r.Guarantee != 0 && (r.Members == 0 || r.Rate == 0) {
		r.Guarantee = policy.Guarantee(max(g.rate/(4+g.Uint64N(16)), 8000))
	}
	if !r.Pool {
		r.Framing = policy.Framing{Overhead: int16(g.IntN(100) - 50)}
	}
	if r.Rate == policy.Unlimited || r.HasLeases() {
		return r
	}
	r.Rate = g.some()
	if r.Each.Kind != policy.EachAll && r.Within != "" && r.Capacity != 0 {
		return r // the program asks a key that has no bucket yet only after the pools, and guarantees it all
	}
	r.Capacity = 1514 + g.Uint64N(20_000)
	if r.Algorithm.HasColours() {
		colour(&r, r.Algorithm, r.Rate+g.some(), 1514+g.Uint64N(5000))
		r.Colours.Aware = g.IntN(2) == 0
		if r.Colours.Aware {
			r.Colours.In = policy.ColourMap{Yellow: g.Uint64() & g.Uint64()}
		}
		r.Colours.Yellow = []policy.Action{policy.ActionPass, policy.ActionECN, policy.SetDSCP(12)}[g.IntN(3)]
		return r
	}
	r.Queue, r.ECNAbove, r.Order, r.Penalty = 0, 0, policy.FIFO, policy.Penalty{}
	r.Algorithm, r.Excess = policy.Algorithm(g.IntN(2)), []policy.Excess{policy.Drop, policy.ECN, policy.Delay}[g.IntN(3)]
	switch {
	case r.Excess == policy.Delay:
		if queued(&r, g.Rand); r.Algorithm == policy.GCRA && r.Each.Kind != policy.EachFlow {
			r.Order = policy.Order(g.IntN(2))
		}
	case !r.Pool && g.IntN(4) == 0:
		r.Excess = policy.Pass
	case !r.Pool && r.Algorithm == policy.Leaky && g.IntN(4) == 0:
		r.Penalty.Kind = policy.PenaltyFill
	}
	return r
}

// tree returns rules for the addresses of randomFrame, and pools.
func (g grower) tree() (l Limits) {
	put := func(r policy.Rule) policy.Rule {
		if n := len(l.Pools); n > 0 && g.IntN(5) > 0 && !r.Algorithm.HasColours() {
			r.Within, r.Guarantee = "some", policy.Guarantee(g.IntN(2))
		}
		if r.Guarantee != 0 && r.Each.Kind != policy.EachAll {
			r.Members = 9
		}
		return g.again(r, l.Pools)
	}
	shares := []policy.Share{{}, {Kind: policy.ShareHost}, {Kind: policy.ShareSubnet, Bits: 127}, {Kind: policy.ShareFlow}, {Kind: policy.ShareMember}}
	for i := range 1 + g.IntN(5) {
		p := put(pool(fmt.Sprint("p", i), policy.Rule{Share: shares[min(g.IntN(7), 4)]}))
		if g.IntN(4) == 0 {
			p.Also = g.also()
		}
		if p.Order == policy.FIFO && p.Also.Quota.Bytes == 0 && g.IntN(3) == 0 {
			p.Cluster.Name = policy.ClusterName(p.Label.Name)
		}
		l.Pools = append(l.Pools, p)
	}
	for i, s := range []string{"10.0.0.0/8", "10.0.0.1/32", "2001:db8::/32"} {
		r := policy.Rule{Prefix: prefix(s)}
		switch g.IntN(6) {
		case 0, 1:
			r.Each.Kind = []policy.EachKind{policy.EachHost, policy.EachFlow}[g.IntN(2)]
		case 2, 3:
			r.Share = shares[g.IntN(2)+2*(i/2)] // subnets only of IPv6
		case 4:
			r.Algorithm, r.Each.Kind = coloured[g.IntN(3)], []policy.EachKind{policy.EachAll, policy.EachHost}[g.IntN(2)]
		}
		if r = put(r); r.Within != "" && r.Excess == policy.Drop && r.Each.Kind == policy.EachAll && r.Share.Kind == policy.ShareNone && g.IntN(2) == 0 {
			r = policy.Rule{Prefix: r.Prefix, Rate: policy.Unlimited, Within: r.Within, Guarantee: r.Guarantee, Weight: r.Weight}
		}
		if !r.Algorithm.HasColours() && r.Rate != policy.Unlimited && g.IntN(3) == 0 {
			if r.Also = g.also(); r.Each.Kind == policy.EachFlow {
				r.Also.Flows, r.Also.FlowBurst = 0, 0
			}
		}
		l.Rules = append(l.Rules, r)
	}
	return l
}

// also returns other limits that some packets exceed.
func (g grower) also() (a policy.Also) {
	if g.IntN(2) == 0 {
		a.Packets, a.PacketBurst = policy.PerSecond(1+g.rate/50_000), policy.Count(1+g.IntN(9))
	}
	if g.IntN(2) == 0 {
		a.Flows, a.FlowBurst = policy.PerSecond(1+g.rate/200_000), policy.Count(1+g.IntN(9))
	}
	if a == (policy.Also{}) || g.IntN(2) == 0 {
		a.Quota, a.Then = policy.Quota{Bytes: 1 + g.Uint64N(1<<20), Period: []policy.Period{"1h", "day"}[g.IntN(2)]}, policy.Then(max(g.rate/8, 8000))
	}
	return a
}

// Engines whose rules and pools change while packets come.
type changing struct {
	*both
	grower
	t             *testing.T
	now, turn     uint64        // ns: turn is when something has changed by time last
	from, until   uint64        // ns: when a change begins and reverts; or never
	rolls         bool          // it is rolled back
	before, after []policy.Rule // of the change
	ends          map[int]uint64
	seen          map[string]int
}

func newChanging(t *testing.T, g grower, now uint64) *changing {
	l := g.tree()
	roomy := Limits{Rules: slices.Clone(l.Rules), Pools: slices.Repeat(l.Pools, 3)} // for labels and leases of two versions
	for _, r := range slices.Repeat(l.Rules, 2) {
		roomy.Pools = append(roomy.Pools, pool("label", policy.Rule{Also: r.Also}))
	}
	roomy.Rules[0].Each.Kind = policy.EachFlow // a change may begin to tell flows apart
	c := &changing{
		both: newBoth(t, roomy), grower: g, t: t, now: now, turn: now, from: maps.Never, until: maps.Never,
		ends: map[int]uint64{},
	}
	c.model = NewModel(l)
	c.kernel.compiled = c.model.compiled
	testenv.Must(t, c.kernel.begin(now))
	for i := range c.leased() {
		c.model.stages[i].limit = &model.Limit{Meter: model.Meter{Capacity: 1 << 61}}
		c.lease(i, now-slack)
	}
	return c
}

// leased are the numbers of the pools with leases.
func (c *changing) leased() iter.Seq[int] {
	return func(yield func(int) bool) {
		for i, r := range c.model.rules {
			if r.HasLeases() && !yield(i) {
				return
			}
		}
	}
}

func (c *changing) at(now uint64) *maps.Set {
	c.kernel.set.Store.UseClock(func() uint64 { return now })
	return c.kernel.set
}

// lease lets the model of a pool go by the kernel's lease from a time on.
func (c *changing) lease(i int, at uint64) {
	s := c.model.stages[i]
	l, _ := c.kernel.set.Store.Pools().Lease(s.rule.Prefix)
	c.ends[i] = maps.Never
	if l.Until > at {
		c.ends[i] = l.Until
	}
	next := model.NewLimit(s.rule.Part(min(l.At(at), s.rule.Rate)))
	next.Whole = model.NewLimit(s.rule).Capacity
	next.Succeed(s.limit.Meter, at)
	s.limit = next
}

// pass lets time pass.
func (c *changing) pass(to uint64) {
	for {
		at, pool := min(c.from, c.until), -1
		for i, end := range c.ends {
			if end < at {
				at, pool = end, i
			}
		}
		if at > to {
			break
		}
		c.turn = at
		c.at(at)
		switch {
		case pool >= 0:
			c.lease(pool, at)
			c.seen["end of a lease"]++
		case at == c.from:
			c.from = maps.Never
			c.kernel.set.Store.Commit()
			c.become(c.after, at)
			c.seen["begin"]++
		default:
			for i, r := range c.before {
				if r != c.after[i] && !c.rolls {
					c.model.stages[i].fifo = max(c.model.stages[i].fifo, at+uint64(policy.MaxWait))
				}
			}
			c.until = maps.Never
			c.become(c.before, at)
			c.seen["reverted"]++
		}
	}
	c.now = to
	c.at(to)
}

// become lets both engines have other rules and pools from a time on.
func (c *changing) become(all []policy.Rule, at uint64) {
	for i, r := range all {
		s := c.model.stages[i]
		had := s.rule
		if s.become(r, at); had != r && r.HasLeases() {
			c.lease(i, at)
		}
	}
	n := len(c.model.Rules)
	c.model.compiled = compile(Limits{Rules: all[:n], Pools: all[n:], Match: c.model.Match})
	c.kernel.compiled = c.model.compiled
	for i, r := range all {
		set, e := c.kernel.set, &c.kernel.entries[min(i, n-1)]
		if i >= n {
			set, e = set.Store.Pools(), &c.kernel.pools[i-n]
		}
		e.Entry, _ = set.Find(r.Prefix)
		e.seen = set.Store.Counters(e.ID) // what is delayed counts as excess in a rule that does not delay
		e.seen.ExemptPackets = 0
	}
}

// become lets a rule or pool have other numbers from a time on, but for those of a lease.
func (s *stage) become(r policy.Rule, at uint64) {
	if s.rule == r {
		return
	}
	old, next := *s, newStage(r)
	s.rule = r
	if !r.HasLeases() && r.Rate != policy.Unlimited {
		s.limit = next.limit
		s.limit.Succeed(old.limit.Meter, at)
	}
	had, _ := old.rule.Guaranteed()
	if has, ok := r.Guaranteed(); ok && has != had {
		s.guarantee = next.guarantee
		s.guarantee.Succeed(old.guarantee.Meter, at)
	}
	if s.coloured = next.coloured; s.coloured != nil {
		s.coloured.First.Succeed(old.coloured.First, at)
		had, _ := old.rule.Second()
		if has, _ := r.Second(); has == had {
			s.coloured.Second = old.coloured.Second
		} else {
			s.coloured.Second.Succeed(old.coloured.Second, at)
		}
	}
	if s.share != nil {
		s.share.ShareParams = next.share.ShareParams
	}
}

// keepOrder has all packets wait in turn where the queue is another one from a time on.
func (s *stage) keepOrder(r policy.Rule, from uint64) {
	old := s.rule
	if r.Order == policy.SparseFirst && old.Excess == policy.Delay &&
		(old.Order != r.Order || old.Rate != r.Rate || old.Capacity != r.Capacity || old.Queue != r.Queue) {
		s.fifo = max(s.fifo, from+s.limit.LongestWait())
	}
}

// forgetWords forgets what members had in pools that they were in before. Each has one word, by the clock of the pool that
// charged it last.
func (c *changing) forgetWords(r Result) {
	if r.Rule == NoRule {
		return
	}
	chain := c.model.chains[r.Rule]
	for i, number := range chain[1:] {
		member := bucketKey{rule: chain[i]}
		if s := c.model.stages[number]; s.rule.Share.Kind != policy.ShareMember || s.sharers.get(member).TAT == 0 {
			continue
		}
		for other, s := range c.model.stages {
			if other != number {
				delete(s.sharers.of, member)
			}
		}
	}
}

// offer offers a packet some time after the last one, and maybe changes something before.
func (c *changing) offer() {
	gap := c.Uint64N(8 * 1500 * uint64(time.Second) / c.rate)
	if c.IntN(500) == 0 {
		gap *= 1 << c.IntN(14)
	}
	c.pass(c.now + gap)
	if c.IntN(30) == 0 {
		c.seen[c.act()]++
	}
	p := randomFrame(c.Rand)
	p.Time = max(c.now-c.Uint64N(2)*c.Uint64N(uint64(5*time.Millisecond)), c.turn)
	if c.IntN(10) == 0 {
		p.Bytes += c.Uint64N(40_000)
	}
	r, err := c.Offer(p)
	if err != nil {
		c.t.Fatalf("%v\n%+v", err, c.model.rules)
	}
	c.forgetWords(r)
	c.seen[r.Verdict.String()]++
	by := "a rule"
	if strings.HasPrefix(r.RefusedBy+r.GuaranteedBy, "p") {
		by = "a pool"
	}
	switch {
	case r.RefusedBy != "":
		c.seen["refused by "+by]++
	case r.GuaranteedBy != "":
		c.seen["guaranteed by "+by]++
	case r.Colour != policy.Green:
		c.seen["colour"]++
	}
}

// act does something at random, and says what.
func (c *changing) act() string {
	set := c.kernel.set
	soon := func() uint64 { return c.now + 1 + c.Uint64N(1<<(10+c.IntN(20))) }
	for i := range c.leased() {
		if c.IntN(2) > 0 {
			continue
		}
		pool := c.model.rules[i]
		l := maps.Lease{Rate: max(c.some()/2, policy.MinRate), Safe: max(c.some()/4, policy.MinRate), Until: soon()}
		if err := set.Store.Pools().Renew(pool.Prefix, l); errors.Is(err, maps.ErrBeginning) {
			return "nothing"
		} else if err != nil {
			c.t.Fatal(err)
		}
		c.lease(i, c.now)
		return "lease"
	}
	state, _ := set.Store.Change()
	switch state {
	case maps.Armed:
		return "nothing"
	case maps.Pending, maps.Committed:
		switch c.IntN(4) {
		case 0:
			if set.Store.Reverts() {
				return "nothing"
			}
			at := min(soon(), c.until)
			set.Store.TimeRevert(at)
			for i, r := range c.before {
				c.model.stages[i].keepOrder(r, at)
			}
			if c.IntN(3) == 0 {
				return "killed"
			}
			testenv.Must(c.t, set.Store.Revert(at))
			c.until, c.rolls = at, true
			return "revert"
		case 1:
			if state == maps.Pending {
				c.until = maps.Never
				testenv.Must(c.t, set.Store.Confirm())
				return "confirm"
			}
			set.Store.Finish()
			return "finish"
		}
		if state == maps.Pending {
			return "nothing"
		}
	case maps.Expired:
		if c.IntN(2) == 0 {
			set.Store.Finish()
			return "finish"
		}
	}
	if c.IntN(2) == 0 {
		return c.edit()
	}
	return c.plan()
}

// edited changes the numbers of a rule or pool. It returns the step of the kernel engine.
func (c *changing) edited(r *policy.Rule, i int) (d policy.Difference, in *maps.Set) {
	in, above := c.kernel.set, c.model.Pools
	if r.Pool {
		in, above = in.Store.Pools(), above[:i-len(c.model.Rules)]
	}
	have := *r
	*r = c.again(have, above)
	want := *r
	if !have.Pool {
		have.Framing.Overhead -= leastFrame
		want.Framing.Overhead -= leastFrame
	}
	if have == want {
		return d, in
	}
	return policy.Difference{Have: &have, Want: &want}, in
}

// edit edits a rule or pool at once.
func (c *changing) edit() string {
	after := slices.Clone(c.model.rules)
	i := c.IntN(len(after))
	d, in := c.edited(&after[i], i)
	if d.Want == nil {
		return "nothing"
	}
	s := c.model.stages[i]
	if s.rule.Each.Kind != policy.EachAll {
		c.turn = c.now
	}
	s.keepOrder(*d.Want, c.now)
	_, err := in.Put(*d.Want)
	testenv.Must(c.t, err)
	c.become(after, c.now)
	return "edit"
}

// plan plans a change of some rules and pools together.
func (c *changing) plan() string {
	set, steps := c.kernel.set, map[*maps.Set][]policy.Difference{}
	after := slices.Clone(c.model.rules)
	for i := range after {
		if c.IntN(2) == 0 {
			if d, in := c.edited(&after[i], i); d.Want != nil {
				steps[in] = append(steps[in], d)
			}
		}
	}
	if len(steps) == 0 {
		return "nothing"
	}
	c.before, c.after = c.model.rules, after
	for in, steps := range steps {
		testenv.Must(c.t, in.Prepare(steps, func(int) {}))
	}
	c.from = min(c.now+1+c.Uint64N(1<<(10+c.IntN(20))), c.now+maps.MaxLead)
	if c.IntN(3) > 0 {
		c.until = c.from + 1 + c.Uint64N(1<<(10+c.IntN(24)))
	}
	c.rolls = false
	set.Store.Time(c.from, c.until)
	for i, r := range c.after {
		c.model.stages[i].keepOrder(r, c.from)
	}
	testenv.Must(c.t, set.Store.Arm())
	return "plan"
}

// A stream offers packets of one size at a rate, with times that are behind those of other streams.
type stream struct{ bits, bytes, behind uint64 }

// offerStreams offers streams for 10 s, each from a port of its own. It returns their rates of passed bits per second.
func offerStreams(t *testing.T, e Engine, streams ...stream) (passed []float64) {
	t.Helper()
	const start, seconds = uint64(time.Hour), 10
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
	if top := s.Sum().MostExcess; len(top) < 2 || top[0].Key != "udp,192.0.2.1,10.9.9.9" || top[0].Packets != firstSweep {
		t.Errorf("most excess: %+v", top)
	}
}
