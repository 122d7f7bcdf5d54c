package loader

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// table is rules for the rig's direction of va.
func (r *rig) table(rules ...policy.Rule) policy.Table {
	rules = slices.Clone(rules)
	policy.SortRules(rules)
	return policy.Table{Device: "va", Direction: r.direction, Match: r.direction.FarSide(), Rules: rules}
}

// apply brings a policy into force.
func (r *rig) apply(o ApplyOptions, tables ...policy.Table) (done []Applied) {
	r.t.Helper()
	r.write(func(n *Namespace) (err error) {
		done, err = n.Apply(tables, o)
		return err
	})
	return done
}

func (r *rig) rollback() {
	r.t.Helper()
	r.write(func(n *Namespace) error { _, err := n.Rollback(); return err })
}

// changeOf is the last change of a hook, as its program sees it.
func changeOf(t *testing.T, h *Hook) (c bpf.AbiChange) {
	t.Helper()
	testenv.Must(t, h.Set.Store.Replacements()[".data.change"].Lookup(uint32(0), &c))
	return c
}

// A switched hook is flooded while its rules are switched.
type switched struct {
	*rig
	six      bool // IPv4 addresses below stand for IPv6 addresses in the kernel
	hook     *Hook
	witness  *witness
	regimes  []regime
	counters map[uint32]maps.Counters // by id: of rules that are or may be again in force
	gone     maps.Counters            // of all rules that were removed for good
	flood    []*source
	slow     []*source
}

// newSwitched prepares a hook that begins with these rules.
func newSwitched(r *rig, six bool, rules []policy.Rule) *switched {
	r.t.Helper()
	s := &switched{
		rig: r, six: six, witness: r.witness("va", r.direction),
		regimes: []regime{{from: maps.Now(), rules: rules}}, counters: map[uint32]maps.Counters{},
	}
	for _, far := range []string{"10.0.0.7", "10.0.0.8", "10.0.0.9", "10.1.0.1"} {
		s.flood = append(s.flood, s.source(far, 1514, 80, 900, 128))
	}
	for _, far := range quiet {
		s.slow = append(s.slow, s.source(far.String(), 500, 80))
	}
	return s
}

func (s *switched) source(far string, sizes ...int) *source {
	f := s.rig.source(far, sizes...)
	if s.six {
		to := maps.Flow{Src: near6.Addr(), Dst: six(f.far), Proto: unix.IPPROTO_UDP, SrcPort: 5000, DstPort: 53}
		if s.direction == policy.Ingress {
			to.Src, to.Dst = to.Dst, to.Src
		}
		for i, size := range sizes {
			f.frames[i] = datagram(to, size)
		}
	}
	return f
}

// real are rules with the addresses that they have in the kernel.
func (s *switched) real(rules []policy.Rule) []policy.Rule {
	rules = slices.Clone(rules)
	for i := range rules {
		if r := &rules[i]; s.six {
			r.Prefix = sixNet(r.Prefix)
			if r.Each.Kind == policy.EachSubnet {
				r.Each.Bits += 96
			}
		}
	}
	return rules
}

// quiet are the addresses to which so little is sent that every packet conforms in every variety.
var quiet = []netip.Addr{netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("10.2.0.2"), netip.MustParseAddr("10.3.0.1"), netip.MustParseAddr("10.9.0.1")}

// A variety is what changes between policies, besides rates, capacities and prefixes.
type variety struct {
	scopes     []policy.Each
	algorithms bool // all rules may have the same algorithm
}

// rules returns a random policy.
func (v variety) rules(random *rand.Rand) (rules []policy.Rule) {
	any := func(prefix string) policy.Rule {
		return rule(prefix, func(r *policy.Rule) {
			r.Rate = []policy.Rate{1e6, 8e6, 25e6, 60e6}[random.IntN(4)]
			r.Capacity = []uint64{1514, 5000, 30000, 150000}[random.IntN(4)]
			r.Algorithm = policy.Algorithm(random.IntN(2))
			r.Each = v.scopes[random.IntN(len(v.scopes))].Canonical(r.Prefix)
		})
	}
	rules = append(rules, any("10.0.0.0/24"))
	for _, prefix := range []string{"10.0.0.7/32", "10.0.0.8/31", "10.0.0.0/15"} {
		if random.IntN(2) == 0 {
			rules = append(rules, any(prefix))
		}
	}
	// For quiet addresses, the rate is more than enough.
	for i, prefix := range []string{"10.2.0.0/16", "10.3.0.0/16"} {
		enough := any(prefix)
		enough.Rate, enough.Capacity = policy.Rate(1+random.IntN(4))*1e9, 1<<20
		if random.IntN(4) == 0 {
			enough = policy.Rule{Prefix: enough.Prefix, Rate: policy.Unlimited, Algorithm: enough.Algorithm}
		}
		if !v.algorithms {
			enough.Algorithm = policy.Algorithm(i)
		}
		rules = append(rules, enough)
	}
	policy.SortRules(rules)
	return rules
}

// since begins a regime with these rules at a time.
func (s *switched) since(from uint64, rules []policy.Rule, reverted bool) {
	s.t.Helper()
	if last := s.regimes[len(s.regimes)-1].from; from <= last {
		s.t.Fatalf("a regime from %d on after one from %d on", from, last)
	}
	s.regimes = append(s.regimes, regime{from, rules, reverted})
}

func (s *switched) last() []policy.Rule { return s.regimes[len(s.regimes)-1].rules }

// count reads all counters, none of which may decrease. sets are all rules that may still be in
// force; the counters of other rules are read for the last time.
func (s *switched) count(sets ...[]policy.Rule) {
	s.t.Helper()
	now := map[uint32]bool{}
	for _, rules := range sets {
		for _, rule := range s.real(rules) {
			e, _ := s.hook.Set.Find(rule.Prefix)
			now[e.ID] = true
			if _, ok := s.counters[e.ID]; !ok {
				s.counters[e.ID] = maps.Counters{}
			}
		}
	}
	waited := false
	for id, before := range s.counters {
		if !now[id] && !waited {
			// A program may still be applying a rule that was in force.
			if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, 1, 0, 0); errno != 0 {
				s.t.Fatal(errno)
			}
			waited = true
		}
		c := s.hook.Set.Store.Counters(id)
		if c.PassedPackets < before.PassedPackets || c.DroppedPackets < before.DroppedPackets || c.PassedBytes < before.PassedBytes || c.DroppedBytes < before.DroppedBytes {
			s.t.Errorf("counters of rule %d decreased from %+v to %+v", id, before, c)
		}
		s.counters[id] = c
		if !now[id] {
			s.gone = plus(s.gone, c)
			delete(s.counters, id)
		}
	}
}

func plus(a, b maps.Counters) maps.Counters {
	a.PassedPackets += b.PassedPackets
	a.DroppedPackets += b.DroppedPackets
	a.ContendedPackets += b.ContendedPackets
	return a
}

// check ends the test unless every packet was metered once, by the rules in force.
func (s *switched) check() {
	s.t.Helper()
	o, all := newOracle(s.regimes), s.witness.passages(s.t)
	o.check(s.t, all)
	var sent uint64
	for _, f := range slices.Concat(s.flood, s.slow) {
		sent += f.sent
	}
	passed := map[[4]byte]uint64{}
	for _, p := range all {
		passed[p.Far]++
	}
	sum := s.gone
	for _, c := range s.counters {
		sum = plus(sum, c)
	}
	least, most := o.matched(all)
	s.t.Logf("%s: %d regimes, %d packets sent, %d seen, rules passed %d and dropped %d", s.direction, len(s.regimes), sent, len(all), sum.PassedPackets, sum.DroppedPackets)
	if n := sum.PassedPackets; n < least || n > most {
		s.t.Errorf("%s: of %d packets seen behind the limits, %d to %d matched a rule, but rules passed %d", s.direction, len(all), least, most, n)
	}
	if sum.ContendedPackets > 0 {
		s.t.Errorf("%s: %d packets found a contended bucket", s.direction, sum.ContendedPackets)
	}
	if s.direction == policy.Ingress {
		return // under load, the kernel drops packets before any program sees them
	}
	if came := uint64(len(all)) + sum.DroppedPackets; came != sent {
		s.t.Errorf("%d packets were sent, and %d passed or were dropped by a rule", sent, came)
	}
	for _, f := range s.slow {
		if n := passed[f.far.As4()]; n != f.sent {
			s.t.Errorf("of %d packets to %v, which every policy passes, %d passed", f.sent, f.far, n)
		}
	}
}

// Policies with all kinds of rules replace each other under a flood. No packet violates the
// window bound, is metered twice, or is metered by no rule. No packet to a quiet address is lost.
func TestSwitchedUnderFlood(t *testing.T) {
	t.Parallel()
	together := variety{scopes: []policy.Each{{}}}
	others := variety{scopes: []policy.Each{{}}, algorithms: true}
	shared := variety{scopes: []policy.Each{{}, {Kind: policy.EachHost}, {Kind: policy.EachSubnet, Bits: 31}}, algorithms: true}
	for _, c := range []struct {
		name      string
		mode      Mode
		variety   variety
		both, six bool // both directions; IPv6
		switches  int  // reverts included
	}{
		{"tcx", TCX, together, false, false, 50},
		{"clsact, both directions, IPv6", Clsact, others, true, true, 20},
		// With keys a change takes ten times as long, because it reads a large table.
		{"tcx, both directions, keys", TCX, shared, true, false, 10},
		{"clsact, keys, IPv6", Clsact, shared, false, true, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			switches := testenv.Rounds(t, c.switches)
			random := rand.New(rand.NewPCG(testenv.Seed(t), 0))
			rules := func() []policy.Rule { return c.variety.rules(random) }
			egress := newRig(t, c.mode, policy.Egress)
			hooks := []*switched{newSwitched(egress, c.six, rules())}
			if c.both {
				ingress := *egress
				ingress.direction, ingress.sender = policy.Ingress, testenv.NewSender(t, "vb")
				hooks = append(hooks, newSwitched(&ingress, c.six, rules()))
			}
			tables := func() (tables []policy.Table) {
				for _, s := range hooks {
					tables = append(tables, s.table(s.real(s.last())...))
				}
				return tables
			}
			egress.apply(ApplyOptions{}, tables()...)
			for _, s := range hooks {
				s.hook = s.rig.hook("va")
				s.count(s.last())
			}
			var flood, slow []*source
			for _, s := range hooks {
				flood, slow = append(flood, s.flood...), append(slow, s.slow...)
			}
			sendings := []*sending{egress.keepSending(0, flood...), egress.keepSending(1e6, slow...)}
			began, how := time.Now(), map[string]int{}
			for len(hooks[0].regimes) <= switches && !t.Failed() {
				end := []string{"for good", "for good", "for good", "confirmed", "expired", "rolled back"}[random.IntN(6)]
				how[end]++
				switchOnce(egress, hooks, end, rules, random)
			}
			t.Logf("%d switches in %v: %v", switches, time.Since(began), how)
			for _, o := range sendings {
				o.stop()
			}
			for _, s := range hooks {
				if s.direction == policy.Ingress {
					testenv.Eventually(t, "packets on ingress", func() bool {
						before := len(s.witness.passages(t))
						time.Sleep(50 * time.Millisecond)
						return len(s.witness.passages(t)) == before
					})
				}
				s.count(s.last())
				s.check()
			}
			for _, s := range hooks {
				s.flush()
			}
			egress.nothingLeft()
		})
	}
}

// switchOnce switches all hooks to other rules, and reverts the change unless end says otherwise.
func switchOnce(r *rig, hooks []*switched, end string, rules func() []policy.Rule, random *rand.Rand) {
	r.t.Helper()
	before, next := make([][]policy.Rule, len(hooks)), make([][]policy.Rule, len(hooks))
	var tables []policy.Table
	for i, s := range hooks {
		before[i], next[i] = s.last(), rules()
		for slices.Equal(next[i], before[i]) {
			next[i] = rules() // the same rules would not be a change
		}
		tables = append(tables, s.table(s.real(next[i])...))
	}
	var o ApplyOptions
	switch end {
	case "confirmed", "rolled back":
		o.Confirm = time.Minute
	case "expired":
		o.Confirm = time.Duration(1+random.IntN(20)) * time.Millisecond
	}
	r.apply(o, tables...)
	changes := make([]bpf.AbiChange, len(hooks))
	for i, s := range hooks {
		changes[i] = changeOf(r.t, s.hook)
		if changes[i].From != changes[0].From || changes[i].Until != changes[0].Until {
			r.t.Errorf("hooks switch at different times: %+v, %+v", changes[0], changes[i])
		}
		s.since(changes[i].From, next[i], false)
		s.count(before[i], next[i])
	}
	time.Sleep(time.Duration(random.IntN(10)) * time.Millisecond)
	switch end {
	case "confirmed":
		r.write(func(n *Namespace) error { return confirm(n) })
		if random.IntN(2) == 0 {
			return
		}
		fallthrough // a confirmed change can be rolled back, too
	case "rolled back":
		r.rollback()
		for i, s := range hooks {
			s.since(changeOf(r.t, s.hook).Until, before[i], true)
			s.count(before[i])
		}
	case "expired":
		waitUntil(changes[0].Until)
		for i, s := range hooks {
			s.since(changes[i].Until, before[i], true)
			s.count(before[i], next[i])
		}
	}
}

// While excess is offered, a rule's bucket is full to within a packet, also across changes
// of rate and capacity: a change loses no room.
func TestNoGapWhileSwitched(t *testing.T) {
	some := rule("10.0.0.0/24", func(r *policy.Rule) { r.Rate, r.Capacity = 2e6, 250000 })
	faster, smaller, larger := some, some, some
	faster.Rate *= 8
	smaller.Capacity, larger.Capacity = 150000, 350000
	for _, c := range []struct {
		name     string
		mode     Mode
		others   []policy.Rule
		capacity uint64 // the smallest
		confirm  time.Duration
	}{
		{"rates", TCX, []policy.Rule{faster, some}, some.Capacity, 0},
		{"capacities", Clsact, []policy.Rule{smaller, some}, smaller.Capacity, 0},
		{"both", TCX, []policy.Rule{faster, smaller}, smaller.Capacity, 0},
		{"a capacity that reverts", TCX, []policy.Rule{larger}, some.Capacity, 50 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, c.mode, policy.Egress)
			r.apply(ApplyOptions{}, r.table(some))
			h, w, flood := r.hook("va"), r.witness("va", r.direction), r.source("10.0.0.7", 1514, 80, 900)
			regimes := []regime{{from: maps.Now(), rules: []policy.Rule{some}}}
			sent := r.keepSending(0, flood)
			// A bucket counts as full if it is short by no more than this: the next packet may
			// be larger than the room, and pauses of the sender up to 1 ms are not recorded.
			const hair = 3 * 1514
			least := float64(some.Capacity) - hair
			for i := range testenv.Rounds(t, 16) {
				have, next := regimes[len(regimes)-1].rules[0], c.others[i%len(c.others)]
				full := func() bool { return r.level(h, have)+hair > have.Capacity }
				testenv.Eventually(t, "a full bucket", full)
				r.apply(ApplyOptions{Confirm: c.confirm}, r.table(next))
				change := changeOf(t, h)
				regimes = append(regimes, regime{from: change.From, rules: []policy.Rule{next}})
				if c.confirm == 0 {
					continue
				}
				waitUntil(change.Until)
				regimes = append(regimes, regime{from: change.Until, rules: []policy.Rule{have}, reverted: true})
				passed := r.counters(h, have).PassedBytes
				testenv.Eventually(t, "a bucket that lets packets through", func() bool { return r.counters(h, have).PassedBytes > passed+hair })
			}
			last := regimes[len(regimes)-1].rules[0]
			testenv.Eventually(t, "a full bucket", func() bool { return r.level(h, last)+hair > last.Capacity })
			sent.stop()
			o, all := newOracle(regimes), w.passages(t)
			o.check(t, all)
			passed := 0.0
			for _, p := range all {
				passed += float64(p.Bytes)
			}
			least += o.between(some.Prefix, all[0].Passed, sent.last)
			// In a pause of the sender the bucket drained, perhaps until it was empty.
			lost := 0.0
			for _, pause := range sent.pauses {
				drained := o.between(some.Prefix, pause[0], pause[1])
				if drained > float64(c.capacity)/2 {
					lost += drained
				}
			}
			least -= lost
			if passed < least {
				t.Errorf("%.0f bytes passed, want at least %.0f", passed, least)
			}
			t.Logf("%.0f bytes passed, want at least %.0f, which excludes %.0f lost in pauses of the sender", passed, least, lost)
		})
	}
}

// An abandoned change leaves nothing that a later one would use.
func TestByteClocksAfterAbandonedChange(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	full := rule("10.0.0.0/24", slow)
	r.put(full)
	r.send("10.0.0.7", 200, 1000)
	h := r.openHook(Write, "va")
	faster := full
	faster.Rate *= 1000
	testenv.Must(t, h.Set.Prepare([]policy.Difference{{Have: &full, Want: &faster}}, func(int) {}))
	from := maps.Now() + 1e9
	h.Set.Store.Time(from, from+1e9)
	h.Set.Store.Abandon() // as the next command does after a command that was killed here
	before := r.level(h, full)
	r.apply(ApplyOptions{Confirm: time.Millisecond})
	waitUntil(changeOf(t, h).Until)
	if after := r.level(r.hook("va"), full); after > before || after < before-2000 {
		t.Errorf("the level was %d bytes, and after the change %d", before, after)
	}
	r.send("10.0.0.7", 10, 1000)
	h = r.hook("va")
	if c := r.counters(h, full); c.PassedPackets != 100 {
		t.Errorf("%d packets passed of 100 that the bucket holds", c.PassedPackets)
	}
}

// A command is killed while it arms a change, or before the change begins. After the next
// command, all hooks have the old rules, or all have the new ones.
func TestKilledBeforeAnArmedChangeBegins(t *testing.T) {
	for _, later := range []time.Duration{0, 50 * time.Millisecond} {
		for _, armed := range []bool{false, true} {
			t.Run(fmt.Sprintf("armed %v, %v later", armed, later), func(t *testing.T) {
				egress := newRig(t, TCX, policy.Egress)
				ingress := *egress
				ingress.direction, ingress.sender = policy.Ingress, testenv.NewSender(t, "vb")
				ingress.passed = attachForeign(t, "va", policy.Ingress, link.Tail())
				old, next := rule("10.0.0.0/24"), rule("10.0.0.0/24", leaky)
				tables := func(rule policy.Rule) []policy.Table {
					return []policy.Table{egress.table(rule), ingress.table(rule)}
				}
				egress.apply(ApplyOptions{}, tables(old)...)
				egress.killedArming(tables(next), armed, later)
				var have []policy.Table
				egress.write(func(n *Namespace) (err error) {
					have, err = n.Tables(Attached)
					return err
				})
				want := tables(old)
				if armed {
					want = tables(next)
				}
				if !slices.EqualFunc(have, want, sameTable) {
					t.Errorf("rules are %v, and ought to be %v", have, want)
				}
				for _, r := range []*rig{egress, &ingress} {
					r.meters(want[0].Rules[0], "10.0.0.7", 5)
					r.flush()
				}
				egress.nothingLeft()
			})
		}
	}
}

// killedArming does what Apply does until just before it arms the change, or with armed until just after that. The
// change begins later than with Apply.
func (r *rig) killedArming(tables []policy.Table, armed bool, later time.Duration) {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		orders, err := planner{n}.plan(onlyThese, ApplyOptions{}, tables)
		if err != nil {
			return err
		}
		defer orders.close()
		defer func() { recover() }() // so that nothing is cleaned up
		return n.pins.changing(func() error {
			testenv.Must(r.t, errors.Join(orders.claim(&n.pins), orders.attach(&n.pins)))
			for _, o := range orders {
				testenv.Must(r.t, o.Set.Prepare(o.steps, func(int) {}))
			}
			_, err := inTime(maps.Now, maps.Never, func(moment uint64) error {
				n.pins.store.Time(moment+uint64(later), maps.Never)
				if !armed {
					return nil
				}
				return n.pins.store.Arm()
			})
			testenv.Must(r.t, err)
			panic("killed")
		})
	})
}

func sameTable(a, b policy.Table) bool {
	return a.Device == b.Device && a.Direction == b.Direction && a.Match == b.Match && slices.Equal(a.Rules, b.Rules)
}

// many are n rules of 1 mbit for addresses to which no test sends packets.
func many(n int) (rules []policy.Rule) {
	for i := range n {
		r := rule("172.16.0.0/32")
		r.Prefix = netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(16 + i>>16), byte(i >> 8), byte(i)}), 32)
		rules = append(rules, r)
	}
	return rules
}

// A hook grows under a flood. Every packet is metered, and all buckets keep their levels.
func TestGrowthUnderFlood(t *testing.T) {
	sizes := []int{5000, 17000, 66000} // more than the room for 4096, 16384 and 65536
	r := newRig(t, TCX, policy.Egress)
	whole, hosts := rule("10.0.0.0/24", func(r *policy.Rule) { r.Rate, r.Capacity = 2e6, 100000 }), rule("10.0.1.0/24", slow, eachHost)
	rules := []policy.Rule{whole, hosts}
	r.apply(ApplyOptions{}, r.table(rules...))
	w := r.witness("va", r.direction)
	sources := []*source{r.source("10.0.0.7", 1514, 80, 900), r.source("10.0.1.7", 900, 80), r.source("10.0.1.8", 100)}
	began := maps.Now()
	sent := r.keepSending(0, sources...)
	for _, n := range sizes {
		began := time.Now()
		table := r.table(append(many(n), rules...)...)
		done := r.apply(ApplyOptions{}, table)
		t.Logf("%d rules in %v", n, time.Since(began))
		if len(done) != 1 || done[0].Hook.Upgraded {
			t.Errorf("%d rules: %+v", n, done)
		}
		if h := r.hook("va"); h.State != Attached || !slices.Equal(h.Set.Policy(), table.Rules) {
			t.Errorf("%d rules: not those that were applied are in force, or not attached", n)
		}
	}
	sent.stop()
	all := w.passages(t)
	newOracle([]regime{{from: began - 1, rules: rules}}).check(t, all)
	h := r.hook("va")
	a, b := r.counters(h, whole), r.counters(h, hosts)
	if sent := sources[0].sent; a.PassedPackets+a.DroppedPackets != sent {
		t.Errorf("%d packets were sent, and %d metered", sent, a.PassedPackets+a.DroppedPackets)
	}
	if sent := sources[1].sent + sources[2].sent; b.PassedPackets+b.DroppedPackets != sent {
		t.Errorf("%d packets were sent to hosts, and %d metered", sent, b.PassedPackets+b.DroppedPackets)
	}
	if n := uint64(len(all)); a.PassedPackets+b.PassedPackets != n {
		t.Errorf("%d packets came by, and %d passed", n, a.PassedPackets+b.PassedPackets)
	}
	r.flush()
	r.nothingLeft()
}

// A rule gets a shadow under traffic. A new generation of maps keeps the buckets. From then
// on the shadow counts each packet that the rule counts.
func TestShadowOfALiveRule(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		plain := rule("10.0.0.0/24", func(r *policy.Rule) { r.Rate, r.Capacity = 4e6, 100000 })
		shadowed := plain
		shadowed.Shadow = policy.Shadow{Rate: 1e6, Capacity: 20000, Each: policy.Each{Kind: policy.EachHost}}
		r.apply(ApplyOptions{}, r.table(plain))
		w, h := r.witness("va", r.direction), r.hook("va")
		began := maps.Now()
		sent := r.keepSending(0,
			r.source("10.0.0.7", 1514, 80), r.source("10.0.0.8", 80, 1514))
		metered := func() uint64 {
			c := r.counters(h, plain)
			return c.PassedPackets + c.DroppedPackets
		}
		testenv.Eventually(t, "a full bucket", func() bool { return r.counters(h, plain).DroppedPackets > 0 })
		before := metered()
		r.apply(ApplyOptions{}, r.table(shadowed))
		after := metered()
		h = r.hook("va")
		e := r.entry(h, plain)
		if e.Rule != shadowed {
			t.Errorf("the rule is %v", e.Rule)
		}
		testenv.Eventually(t, "a shadow that refuses", func() bool {
			affected, err := h.Set.Store.Affected(h.Set.Rules())
			testenv.Must(t, err)
			return len(affected[e.ID]) == 2
		})
		// Only the rule's rate changes: the shadow stays, and goes on counting.
		faster := shadowed
		faster.Rate *= 2
		r.apply(ApplyOptions{}, r.table(faster))
		c := changeOf(t, h)
		sent.stop()
		testenv.Eventually(t, "what was sent", func() bool {
			before := metered()
			time.Sleep(20 * time.Millisecond)
			return metered() == before
		})
		newOracle([]regime{{from: began - 1, rules: []policy.Rule{plain}}, {from: c.From, rules: []policy.Rule{faster}}}).check(t, w.passages(t))
		limit, ok := h.Set.Store.Shadow(e)
		if !ok {
			t.Fatal("there is no shadow")
		}
		shadow := h.Set.Store.Counters(limit.ID)
		if n := shadow.PassedPackets; n < metered()-after || n > metered()-before {
			t.Errorf("the shadow counted %d packets, and the rule %d to %d since", n, metered()-after, metered()-before)
		}
		// The shadow has a bucket for each host.
		most := 2 * (float64(shadowed.Shadow.Capacity) + float64(shadowed.Shadow.Rate)/8e9*float64(maps.Now()-began))
		if conform := float64(shadow.PassedBytes - shadow.ExcessBytes); conform > most || conform < 2*float64(shadowed.Shadow.Capacity)-2*1514 {
			t.Errorf("of two hosts %.0f bytes conform to the shadow, which lets %.0f through", conform, most)
		}
		affected, err := h.Set.Store.Affected(h.Set.Rules())
		testenv.Must(t, err)
		var packets, bytes uint64
		for _, one := range affected[e.ID] {
			packets, bytes = packets+one.Packets, bytes+one.Bytes
		}
		if packets != shadow.ExcessPackets || bytes != shadow.ExcessBytes || len(affected[e.ID]) != 2 {
			t.Errorf("affected: %+v, and the shadow counted %+v", affected, shadow)
		}
		if shadow.DroppedPackets != 0 || shadow.ContendedPackets != 0 {
			t.Errorf("the shadow: %+v", shadow)
		}
		r.flush()
		r.nothingLeft()
	})
}

// A change that takes long to prepare begins later. A pending change that reverts by itself
// before a revert could be prepared is left to that.
func TestInTime(t *testing.T) {
	const ms = uint64(time.Millisecond)
	broken := errors.New("broken")
	for _, c := range []struct {
		took   []uint64 // duration of each preparation; the last one repeats
		fails  error    // of a preparation that is not late
		latest uint64
		lead   uint64 // of the last preparation; 0 for none
		err    error
	}{
		{[]uint64{0}, nil, maps.Never, 20 * ms, nil},
		{[]uint64{20 * ms}, nil, maps.Never, 20 * ms, nil},
		{[]uint64{20*ms + 1, 40 * ms}, nil, maps.Never, 60*ms + 3, nil},
		{[]uint64{100 * ms, 300 * ms}, nil, maps.Never, 300 * ms, nil},
		{[]uint64{100 * ms, 301 * ms, 300 * ms}, nil, maps.Never, 903 * ms, nil},
		{[]uint64{5000 * ms, 500 * ms}, nil, maps.Never, maps.MaxLead, nil},
		{[]uint64{maps.MaxLead}, nil, maps.Never, maps.MaxLead, nil},
		{[]uint64{maps.MaxLead + 1}, nil, maps.Never, 0, ErrBusy},
		{[]uint64{0}, nil, 1000*ms + 40*ms, 20 * ms, nil},
		{[]uint64{0}, nil, 1000*ms + 40*ms - 1, 0, nil},
		{[]uint64{0}, nil, 999 * ms, 0, nil},
		{[]uint64{21 * ms}, nil, 1000*ms + 140*ms, 0, nil},
		{[]uint64{0}, broken, maps.Never, 0, broken},
		{[]uint64{21 * ms, 0}, broken, maps.Never, 0, broken},
	} {
		now, times, last := 1000*ms, 0, uint64(0)
		at, err := inTime(func() uint64 { return now }, c.latest, func(at uint64) error {
			last = at - now
			now += c.took[min(times, len(c.took)-1)]
			times++
			if now > at {
				return maps.ErrLate
			}
			return c.fails
		})
		if !errors.Is(err, c.err) || (at > 0) != (c.lead > 0) || at > 0 && last != c.lead {
			t.Errorf("prepared in %v before %d: at %d, %d ahead, error %v; want %d and %v", c.took, c.latest, at, last, err, c.lead, c.err)
		}
	}
}

// A new store has room for a few more rules than the policy has.
func TestRoomForAFewMore(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	rules := many(leastRules + 904)
	r.apply(ApplyOptions{}, r.table(rules...))
	size := r.hook("va").Set.Store.Size()
	rules = append(rules, rule("192.0.2.0/24"))
	r.put(rules[len(rules)-1])
	h := r.hook("va")
	if got := h.Set.Store.Size(); got != size || got.Rules != 5156 {
		t.Errorf("room for %+v, and with one more for %+v, want 5156 and the same", size, got)
	}
	policy.SortRules(rules)
	if !slices.Equal(h.Set.Policy(), rules) {
		t.Error("other rules are in force")
	}
	r.flush()
}

func TestGrowth(t *testing.T) {
	for have, want := range map[uint32]uint32{leastRules: 4 * leastRules, 1<<18 - 1: 4 * (1<<18 - 1), 1 << 18: 1 << 19, 1 << 20: 1 << 21} {
		if got := growth(have); got != want {
			t.Errorf("a store of %d rules grows to %d, want %d", have, got, want)
		}
	}
}

// A shadow that a change removes or replaces returns with a rollback, with its counters.
func TestShadowAfterRollback(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		shadowed := rule("10.0.0.0/24", slow, func(r *policy.Rule) {
			r.Shadow = policy.Shadow{Rate: 8, Capacity: 2000}
		})
		plain, other := shadowed, shadowed
		plain.Shadow = policy.Shadow{}
		other.Shadow.Capacity = 3000
		for _, next := range [][]policy.Rule{{plain}, {other}, {rule("10.0.1.0/24")}, {}} {
			for _, end := range []string{"rollback", "expiry"} {
				r.apply(ApplyOptions{}, r.table(shadowed))
				counted := func() maps.Counters {
					h := r.hook("va")
					shadow, ok := h.Set.Store.Shadow(r.entry(h, shadowed))
					if !ok {
						t.Fatal("there is no shadow")
					}
					return h.Set.Store.Counters(shadow.ID)
				}
				before := counted()
				r.send("10.0.0.7", 5, 1000)
				var o ApplyOptions
				if end == "expiry" {
					o.Confirm = 100 * time.Millisecond
				}
				r.apply(o, r.table(next...))
				until := changeOf(t, r.hook("va")).Until
				r.send("10.0.0.7", 7, 1000)
				unseen := maps.Now() < until
				if end == "rollback" {
					r.rollback()
				} else {
					waitUntil(until)
				}
				r.inForce(shadowed)
				reverted := counted()
				if n := reverted.PassedPackets - before.PassedPackets; n < 5 || unseen && n != 5 {
					t.Errorf("%v, %s: the shadow counted %d packets of 5", next, end, n)
				}
				r.send("10.0.0.7", 3, 1000)
				if c := counted(); c.PassedPackets != reverted.PassedPackets+3 || c.ExcessPackets != reverted.ExcessPackets+3 {
					t.Errorf("%v, %s: the shadow counted %+v, and before 3 packets %+v", next, end, c, reverted)
				}
			}
		}
		r.flush()
		r.nothingLeft()
	})
}

// Apply for some devices changes no others, but checks what these draw from pools. A final change cannot be rolled back,
// and leaves nothing behind.
func TestApplyToSomeDevices(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		testenv.Veth(t, "xa", "xb")
		limit := func(prefix string, within policy.Within) policy.Rule {
			rule, err := policy.Limit{Rate: 1_000_000, Within: within}.Rule(netip.MustParsePrefix(prefix))
			testenv.Must(t, err)
			return rule
		}
		pool, err := policy.Limit{Rate: 2_000_000}.Pool("p")
		testenv.Must(t, err)
		pools := policy.Table{Rules: []policy.Rule{pool}}
		other := r.table(limit("10.0.0.0/24", "p"))
		other.Device = "xa"
		is := func(want ...policy.Table) {
			t.Helper()
			r.write(func(n *Namespace) error {
				have, err := n.Tables(Attached)
				policy.SortTables(want)
				if len(want) > 0 && len(policy.Diff(have, want)) > 0 || len(have) != len(want) {
					t.Errorf("there is %+v, want %+v", have, want)
				}
				return err
			})
		}
		r.apply(ApplyOptions{}, pools, r.table(limit("10.0.1.0/24", "")), other)

		mine := r.table(limit("10.0.2.0/24", "p"))
		ignored := other
		ignored.Rules = []policy.Rule{limit("10.0.3.0/24", "")}
		done := r.apply(ApplyOptions{Devices: []string{"va"}}, pools, mine, ignored)
		if len(done) != 1 || done[0].Device != "va" || done[0].Rules != (maps.Difference{Added: 1, Removed: 1}) {
			t.Errorf("done: %+v", done)
		}
		is(pools, mine, other)

		r.write(func(n *Namespace) error {
			if _, err := n.Apply(nil, ApplyOptions{Devices: []string{"va"}}); !errors.As(err, new(policy.PoolError)) {
				t.Errorf("a pool that is in use goes: %v", err)
			}
			return nil
		})
		is(pools, mine, other)

		r.apply(ApplyOptions{Devices: []string{"va"}, Final: true}, pools)
		is(pools, other)
		r.write(func(n *Namespace) error {
			if _, err := n.Rollback(); !errors.Is(err, ErrNoChange) {
				t.Errorf("rollback of a final change: %v", err)
			}
			return nil
		})
		r.apply(ApplyOptions{Final: true})
		is()
		if pins := testenv.Pins(t, r.options.BPFFS); len(pins) != 0 {
			t.Errorf("left behind: %v", pins)
		}
	})
}
