package loader

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func at(rate policy.Rate, capacity uint64) func(*policy.Rule) {
	return func(r *policy.Rule) { r.Rate, r.Capacity = rate, capacity }
}

// wide is a rate with the default capacity.
func wide(rate policy.Rate) func(*policy.Rule) { return at(rate, policy.DefaultCapacity(rate)) }

// unlimited makes a rule that has only its pools.
func unlimited(r *policy.Rule) { r.Rate, r.Capacity = policy.Unlimited, 0 }

// onDevice is rules for packets that leave a device.
func onDevice(name string, rules []policy.Rule) policy.Table {
	rules = slices.Clone(rules)
	policy.SortRules(rules)
	return policy.Table{Device: name, Direction: policy.Egress, Match: policy.MatchDst, Rules: rules}
}

// An allowance is a rate to which some sources together keep, by a token bucket of their own. So what they send conforms
// to any limit of that rate with a larger burst, however late the sender gets the CPU.
type allowance struct {
	rate    policy.Rate
	sources []*source
	room    float64 // bytes
	last    uint64
	turn    int
}

// allowedBurst is half of the smallest burst of a guarantee.
const allowedBurst = 16 << 10

// keepWithin sends what allowances allow until it is stopped.
func (r *rig) keepWithin(all ...*allowance) (stop func()) {
	var over atomic.Bool
	var done sync.WaitGroup
	done.Go(func() {
		for began := maps.Now(); !over.Load(); time.Sleep(500 * time.Microsecond) {
			for _, a := range all {
				now := maps.Now()
				a.room = min(a.room+float64(a.rate)/8e9*float64(now-max(a.last, began)), allowedBurst)
				a.last = now
				for f := a.sources[a.turn%len(a.sources)]; a.room >= float64(len(f.frames[0])); f = a.sources[a.turn%len(a.sources)] {
					if err := f.by.Send(f.stamped(maps.Now())); err != nil {
						r.t.Error(err)
						return
					}
					a.room -= float64(len(f.frames[0]))
					a.turn++
					f.sent++
				}
			}
		}
	})
	stop = func() {
		over.Store(true)
		done.Wait()
	}
	r.t.Cleanup(stop)
	return stop
}

// Four access points share an uplink and are offered many times what they have. Customers in them send just what is
// guaranteed to them, or to their access point. They lose no packet.
func TestGuaranteesUnderFlood(t *testing.T) {
	t.Parallel()
	r := newRig(t, TCX, policy.Egress)
	const promised = policy.Guarantee(200_000)
	pools := []policy.Rule{pool("uplink", wide(40e6), shared)}
	for i := range 4 {
		pools = append(pools, pool(fmt.Sprint("ap ", i), in("uplink"), wide(20e6), shared, guarantee(8e6)))
	}
	var rules []policy.Rule
	var kept []*allowance
	var flood []*source
	add := func(prefix, within string, changes ...func(*policy.Rule)) {
		rules = append(rules, rule(prefix, append(changes, in(policy.Within(within)))...))
	}
	keeps := func(rate policy.Rate, addresses ...string) {
		a := &allowance{rate: rate}
		for _, address := range addresses {
			a.sources = append(a.sources, r.source(address, 700))
		}
		kept = append(kept, a)
	}
	for i := range 10 {
		// The guarantee of a rule.
		host := fmt.Sprint("10.0.0.", i)
		add(host+"/32", "ap 0", wide(5e6), guarantee(promised))
		keeps(policy.Rate(promised), host)
		// Of a customer with two networks.
		customer := fmt.Sprint("customer ", i)
		pools = append(pools, pool(customer, in("ap 1"), wide(5e6), guarantee(promised)))
		one, two := fmt.Sprint("10.1.0.", i), fmt.Sprint("10.1.1.", i)
		add(one+"/32", customer, unlimited)
		add(two+"/32", customer, wide(2e6))
		keeps(policy.Rate(promised), one, two)
		// Of each host of a rule, of which one sends more.
		keeps(policy.Rate(promised), fmt.Sprint("10.2.0.", i))
		// Of an access point.
		add(fmt.Sprintf("10.3.0.%d/32", i), "ap 3", unlimited)
	}
	add("10.2.0.0/24", "ap 2", wide(5e6), guarantee(promised), eachHost, func(r *policy.Rule) { r.Members = 11 })
	keeps(8e6, "10.3.0.0", "10.3.0.1", "10.3.0.2", "10.3.0.3", "10.3.0.4", "10.3.0.5", "10.3.0.6", "10.3.0.7", "10.3.0.8", "10.3.0.9")
	flood = append(flood, r.source("10.2.0.77", 1514, 80))
	for i := range 3 {
		for j := range 10 {
			host := fmt.Sprintf("10.%d.9.%d", i, j)
			add(host+"/32", fmt.Sprint("ap ", i), wide(20e6), func(r *policy.Rule) { r.Weight = 200 })
			flood = append(flood, r.source(host, 1514, 80, 900))
		}
	}
	r.write(func(n *Namespace) error { return poolsOn(n, ApplyOptions{}, pools, rules, nil) })
	w := r.witness("va", policy.Egress)
	half := len(flood) / 2
	floods := []*sending{r.keepSending(0, flood[:half]...), r.keepSending(0, flood[half:]...)}
	time.Sleep(500 * time.Millisecond) // all pools are full
	began := maps.Now()
	stop := r.keepWithin(kept...)
	time.Sleep(time.Second)
	stop()
	took := maps.Now() - began
	for _, f := range floods {
		f.stop()
	}

	passed := map[netip.Addr]uint64{}
	for _, p := range w.passages(t) {
		passed[netip.AddrFrom4(p.Far)]++
	}
	var allowed, sent float64
	for _, a := range kept {
		allowed += float64(a.rate) / 8e9 * float64(took)
		for _, f := range a.sources {
			if passed[f.far] != f.sent {
				t.Errorf("of %d packets to %v, which are within a guarantee, %d passed", f.sent, f.far, passed[f.far])
			}
			sent += float64(f.sent * uint64(len(f.frames[0])))
		}
	}
	set := r.hook("va").Set.Store.Pools()
	up, _ := set.Find(policy.PoolKey("uplink"))
	refused := float64(0)
	for _, p := range pools {
		e, _ := set.Find(p.Prefix)
		refused += float64(set.Store.Counters(e.ID).DroppedBytes)
	}
	if refused == 0 || sent == 0 {
		t.Errorf("pools refused %.0f bytes, and %.0f were sent within guarantees", refused, sent)
	}
	t.Logf("%.0f bytes within guarantees, %.1f %% of what they allow; pools passed %d bytes and refused %.0f",
		sent, 100*sent/allowed, set.Store.Counters(up.ID).PassedBytes, refused)
	r.flush()
}

// everywhere is the network of all packets.
var everywhere = netip.MustParsePrefix("0.0.0.0/0")

// A history is the limits of a rule, pool or guarantee, as if all its packets were those of one rule.
type history struct {
	regimes []regime
	unsure  float64 // bytes by which its clock may be too fast
	id      uint32
	counted []counted
}

// counted is how many bytes had passed at a time, and what room the bucket had.
type counted struct {
	at, bytes uint64
	room      float64
}

// count reads what has passed a limit. A packet may pass meanwhile.
func (h *history) count(t *testing.T, set *maps.Set, e maps.Entry) {
	t.Helper()
	if h.id != e.ID && h.counted != nil {
		t.Fatalf("the limit %+v has the id %d, and before %d", e.Rule, e.ID, h.id)
	}
	h.id = e.ID
	now := maps.Now()
	room := float64(e.Capacity) - float64(model.Bytes(set.Store.SharedLevel(e, now)))
	h.counted = append(h.counted, counted{now, set.Store.Counters(e.ID).PassedBytes, room})
}

// gained is how many bytes more have passed between two counts than the rate and the room explain. It is below 0 if
// the bucket was empty meanwhile.
func (h *history) gained(from, to counted) float64 {
	return float64(to.bytes-from.bytes) + to.room - from.room - newOracle(h.regimes).between(everywhere, from.at, to.at)
}

// since adds a limit that is in force from some time between two times on. The higher rate counts from the first of them,
// or up to the second.
func (h *history) since(from, to uint64, limit policy.Rule) {
	limit = policy.Rule{Prefix: everywhere, Rate: limit.Rate, Capacity: limit.Capacity}
	if last := len(h.regimes) - 1; last >= 0 {
		have := h.regimes[last].rules[0]
		if have == limit {
			return
		}
		h.unsure += math.Abs(float64(have.Rate)-float64(limit.Rate)) / 8e9 * float64(to-from)
		if have.Rate > limit.Rate {
			from = to
		}
	}
	h.regimes = append(h.regimes, regime{from: from, rules: []policy.Rule{limit}})
}

// A changingTree is a tree of pools on two devices, which is flooded while it is changed.
type changingTree struct {
	*rig
	random     *rand.Rand
	guarantees bool          // change, and capacities do not
	pools      []policy.Rule // in force
	rules      []policy.Rule // the first half for va
	limits     map[netip.Prefix]*history
	promises   map[netip.Prefix]*history // the guarantees of rules and pools
}

const treeMembers = 3 // of each of two access points

func newChangingTree(r *rig, guarantees bool, random *rand.Rand) *changingTree {
	x := &changingTree{
		rig: r, random: random, guarantees: guarantees,
		limits: map[netip.Prefix]*history{}, promises: map[netip.Prefix]*history{},
	}
	x.pools = []policy.Rule{pool("uplink", shared), pool("ap 0", in("uplink"), shared), pool("ap 1", in("uplink"), shared)}
	for i := range 2 * treeMembers {
		x.rules = append(x.rules, rule(fmt.Sprintf("10.%d.%d.0/24", i%2, i), in(policy.Within(fmt.Sprint("ap ", i%2)))))
	}
	x.pools, x.rules = x.next()
	return x
}

// next are other rates, capacities, weights and guarantees for all pools and rules. The uplink has less than the access
// points, and these less than their members.
func (x *changingTree) next() (pools, rules []policy.Rule) {
	pools, rules = slices.Clone(x.pools), slices.Clone(x.rules)
	for i := range pools {
		x.change(&pools[i], i == 0, !x.guarantees)
	}
	for i := range rules {
		x.change(&rules[i], false, !x.guarantees)
	}
	return pools, rules
}

// change changes a pool or rule.
func (x *changingTree) change(r *policy.Rule, uplink, capacity bool) {
	roll := func(n int) int { return x.random.IntN(n) }
	switch {
	case uplink:
		r.Rate = []policy.Rate{6e6, 9e6, 12e6, 15e6}[roll(4)]
	case r.Pool:
		r.Rate = []policy.Rate{15e6, 20e6, 40e6}[roll(3)]
	default:
		r.Rate = []policy.Rate{6e6, 14e6, 30e6}[roll(3)]
	}
	if capacity {
		r.Capacity = []uint64{40_000, 100_000, 200_000}[roll(3)]
	}
	if !uplink {
		r.Weight = []policy.Weight{0, 2, 8}[roll(3)]
	}
	switch {
	case !x.guarantees || uplink:
	case r.Pool: // what is guaranteed in it is less
		r.Guarantee = []policy.Guarantee{500e3, 600e3, 800e3}[roll(3)]
	case r.Prefix.Addr().As4()[2] < 4: // two members of each access point
		r.Guarantee = []policy.Guarantee{50e3, 100e3, 240e3}[roll(3)]
	}
}

func (x *changingTree) tables() []policy.Table {
	return []policy.Table{poolTable(x.pools...), onDevice("va", x.rules[:treeMembers]), onDevice("vb", x.rules[treeMembers:])}
}

// since notes that the tree is in force from some time between two times on.
func (x *changingTree) since(from, to uint64) {
	note := func(all map[netip.Prefix]*history, p netip.Prefix, limit policy.Rule) {
		if all[p] == nil {
			all[p] = new(history)
		}
		all[p].since(from, to, limit)
	}
	for _, r := range slices.Concat(x.pools, x.rules) {
		note(x.limits, r.Prefix, r)
		if g, ok := r.Guaranteed(); ok {
			note(x.promises, r.Prefix, g)
		}
	}
}

// count reads what has passed all rules and pools, and what was charged to guarantees.
func (x *changingTree) count() {
	x.t.Helper()
	n, err := Read(x.options)
	testenv.Must(x.t, err)
	defer n.Close()
	for _, set := range append(n.pins.sets(), n.pins.store.Pools()) {
		for _, e := range set.Rules() {
			x.limits[e.Prefix].count(x.t, set, e)
			if g, ok := set.Store.Guarantee(e); ok {
				x.promises[e.Prefix].count(x.t, set, g)
			}
		}
	}
}

// changeOnce changes the tree in one of several ways, and notes when.
func (x *changingTree) changeOnce(h *Hook) (how string) {
	x.t.Helper()
	pools, rules := x.pools, x.rules
	began := maps.Now()
	how = []string{"one pool", "one rule", "several", "all", "all", "expired", "rolled back"}[x.random.IntN(7)]
	switch how {
	case "one pool", "one rule", "several":
		var tables []policy.Table
		x.pools, x.rules = slices.Clone(pools), slices.Clone(rules)
		if how != "one rule" {
			i := x.random.IntN(len(pools))
			x.change(&x.pools[i], i == 0, false)
			tables = append(tables, poolTable(x.pools[i]))
		}
		if how != "one pool" {
			i := x.random.IntN(len(rules))
			x.change(&x.rules[i], false, false)
			tables = append(tables, onDevice([]string{"va", "vb"}[i/treeMembers], x.rules[i:i+1]))
		}
		x.write(func(n *Namespace) error { _, err := n.Put(ApplyOptions{}, tables...); return err })
		x.since(began, maps.Now())
		return how
	}
	for slices.Equal(x.pools, pools) && slices.Equal(x.rules, rules) {
		x.pools, x.rules = x.next() // the same would not be a change
	}
	var o ApplyOptions
	switch how {
	case "expired":
		o.Confirm = time.Duration(1+x.random.IntN(20)) * time.Millisecond
	case "rolled back":
		o.Confirm = time.Minute
	}
	x.apply(o, x.tables()...)
	change := changeOf(x.t, h)
	x.since(change.From, change.From)
	switch how {
	case "all":
		return how
	case "expired":
		waitUntil(change.Until)
	case "rolled back":
		x.rollback()
		change = changeOf(x.t, h)
	}
	x.pools, x.rules = pools, rules
	x.since(change.Until, change.Until)
	return how
}

// below reports whether a rule or pool draws from a pool.
func (x *changingTree) below(r, pool policy.Rule) bool {
	if r.Prefix == pool.Prefix {
		return false
	}
	for r.Within != "" && string(r.Within) != pool.Label.Name {
		i := slices.IndexFunc(x.pools, func(p policy.Rule) bool { return p.Label.Name == string(r.Within) })
		r = x.pools[i]
	}
	return r.Within != ""
}

// check ends the test if in any window more passed a rule or pool than its limits allow, or if a pool or guarantee
// gained or lost bytes.
func (x *changingTree) check(all []passage, sent ...*sending) {
	x.t.Helper()
	const burst = 32 << 10 // of each guarantee
	// Between the test of a level and its charge, a packet of each other CPU may pass.
	others := float64(fullFrame * (len(sent) - 1))
	for _, r := range slices.Concat(x.pools, x.rules) {
		o := newOracle(x.limits[r.Prefix].regimes)
		if r.Pool {
			o.beyond = others
		}
		for _, member := range slices.Concat(x.pools, x.rules) {
			if member.Guarantee != 0 && x.below(member, r) {
				o.beyond += burst + others
			}
		}
		var passed []passage
		for _, p := range all {
			if from := x.rules[p.Far[2]]; from.Prefix == r.Prefix || x.below(from, r) {
				passed = append(passed, p)
			}
		}
		o.check(x.t, passed)
	}
	lost := func(h *history, empties time.Duration) (bytes float64) {
		for _, s := range sent {
			for _, pause := range s.pauses {
				if pause[1]-pause[0] > uint64(empties) {
					bytes += newOracle(h.regimes).between(everywhere, pause[0], pause[1])
				}
			}
		}
		return bytes
	}
	const slack = 2 * fullFrame // packets may pass while the counters are read
	for i, pool := range x.pools {
		h := x.limits[pool.Prefix]
		gained := h.gained(h.counted[0], h.counted[len(h.counted)-1])
		if gained > slack {
			x.t.Errorf("pool %s gained %.0f bytes", pool.Label.Name, gained)
		}
		if i > 0 {
			continue // only the uplink is full all the time
		}
		if most := lost(h, 5*time.Millisecond) + h.unsure + slack; gained < -most {
			x.t.Errorf("pool %s lost %.0f bytes, at most %.0f of them in pauses of the senders", pool.Label.Name, -gained, most)
		}
		x.t.Logf("pool %s gained %.0f bytes", pool.Label.Name, gained)
	}
	for prefix, h := range x.promises {
		gained := h.gained(h.counted[0], h.counted[len(h.counted)-1])
		if gained > slack || gained < -lost(h, 100*time.Millisecond)-h.unsure-slack {
			x.t.Errorf("the guarantee of %v gained %.0f bytes", prefix, gained)
		}
	}
}

// A tree changes its rates, weights, guarantees and capacities under a flood on two devices. No window of any rule, pool
// or guarantee has more bytes than the limits in force allow, and nothing that they allow is lost.
func TestTreeChangesUnderFlood(t *testing.T) {
	for _, guarantees := range []bool{false, true} {
		t.Run(map[bool]string{false: "capacities", true: "guarantees"}[guarantees], func(t *testing.T) {
			t.Parallel()
			r := newRig(t, TCX, policy.Egress)
			x := newChangingTree(r, guarantees, rand.New(rand.NewPCG(testenv.Seed(t), 0)))
			x.since(maps.Now(), maps.Now())
			r.apply(ApplyOptions{}, x.tables()...)
			witnesses := []*witness{r.witness("va", policy.Egress), r.witness("vb", policy.Egress)}
			var sent []*sending
			for i := range witnesses {
				var flood []*source
				for _, rule := range x.rules[i*treeMembers : (i+1)*treeMembers] {
					f := r.source(rule.Prefix.Addr().Next().String(), 1514, 80, 900)
					f.by = testenv.NewSender(t, []string{"va", "vb"}[i])
					flood = append(flood, f)
				}
				sent = append(sent, r.keepSending(80_000, flood...))
			}
			h, how := r.hook("va"), map[string]int{}
			x.count()
			began, changes := time.Now(), testenv.Rounds(t, 30)
			for range changes {
				how[x.changeOnce(h)]++
				x.count()
				if t.Failed() {
					break
				}
			}
			t.Logf("%d changes in %v: %v", changes, time.Since(began), how)
			x.count()
			for _, s := range sent {
				s.stop()
			}
			all := slices.Concat(witnesses[0].passages(t), witnesses[1].passages(t))
			slices.SortStableFunc(all, func(a, b passage) int { return cmp.Compare(a.Passed, b.Passed) })
			x.check(all, sent...)
			x.charged()
			r.write(func(n *Namespace) error { return flushEverything(n) })
			r.nothingLeft()
		})
	}
}

// charged ends the test unless each packet was charged to its rule and to all pools above.
func (x *changingTree) charged() {
	x.t.Helper()
	n, err := Read(x.options)
	testenv.Must(x.t, err)
	defer n.Close()
	passed, refused := map[netip.Prefix]uint64{}, uint64(0)
	for _, set := range append(n.pins.sets(), n.pins.store.Pools()) {
		for _, e := range set.Rules() {
			c := set.Store.Counters(e.ID)
			passed[e.Prefix] += c.PassedBytes
			refused += c.DroppedBytes
			if c.ContendedPackets > 0 {
				x.t.Errorf("%v: %d packets found a contended bucket", e.Prefix, c.ContendedPackets)
			}
		}
	}
	for _, pool := range x.pools {
		var sum uint64
		for _, r := range x.rules {
			if x.below(r, pool) {
				sum += passed[r.Prefix]
			}
		}
		if passed[pool.Prefix] != sum {
			x.t.Errorf("pool %s was charged %d bytes, and its rules passed %d", pool.Label.Name, passed[pool.Prefix], sum)
		}
	}
	x.t.Logf("%d bytes passed, and %d were refused", passed[x.pools[0].Prefix], refused)
}
