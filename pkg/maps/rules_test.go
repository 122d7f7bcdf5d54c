package maps_test

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func rule(prefix string, rate policy.Rate, capacity uint64) policy.Rule {
	return policy.Rule{Prefix: netip.MustParsePrefix(prefix), Rate: rate, Capacity: capacity}
}

// randomPrefix is a random prefix. Many such prefixes contain each other.
func randomPrefix(roll *rand.Rand) netip.Prefix {
	p, err := randomAddr(roll).Prefix(0)
	for err == nil && p.Bits() == 0 && roll.IntN(50) != 0 {
		a := randomAddr(roll)
		p, err = a.Prefix(roll.IntN(a.BitLen() + 1))
	}
	if err != nil {
		panic(err)
	}
	return p
}

// randomAddr is an address near others, because most of its bits have one of few patterns.
func randomAddr(roll *rand.Rand) netip.Addr {
	if roll.IntN(2) == 0 {
		return netip.AddrFrom4([4]byte{10, byte(roll.IntN(3)), byte(roll.IntN(3)), byte(roll.Uint32())})
	}
	var b [16]byte
	copy(b[:], []byte{0x20, 0x01, 0x0d, 0xb8})
	for _, i := range []int{4, 7, 8, 12, 15} {
		b[i] = byte(roll.IntN(4))
	}
	b[15] = byte(roll.Uint32())
	return netip.AddrFrom16(b)
}

// An oracle is rules in a plain map.
type oracle map[netip.Prefix]policy.Rule

func (o oracle) match(a netip.Addr) (best policy.Rule, ok bool) {
	for p, r := range o {
		if p.Contains(a) && (!ok || p.Bits() > best.Prefix.Bits()) {
			best, ok = r, true
		}
	}
	return best, ok
}

// Thousands of prefixes are added and deleted. Commands and packets find the rules of a plain map.
func TestRulesAgainstOracle(t *testing.T) {
	seed := testenv.Seed(t)
	roll := rand.New(rand.NewPCG(seed, 0))
	rules, rounds := 2048, testenv.Rounds(t, 4) // as many as there are lines, so that some prefixes continue in the next line
	r := newRig(t, maps.Size{Rules: uint32(rules), Buckets: 4})
	want := oracle{}
	for round := range rounds {
		for len(want) < rules*(round+2)/(rounds+1) {
			p := randomPrefix(roll)
			new := policy.Rule{Prefix: p, Rate: policy.Rate(1e9 + roll.Uint64N(1e9)), Capacity: 1 << 20}
			if _, there := want[p]; there {
				continue
			}
			r.put(new)
			want[p] = new
		}
		for range 5 { // a change, and a deletion of each kind
			for p := range want {
				if roll.IntN(2) == 0 {
					new := want[p]
					new.Capacity++
					r.put(new)
					want[p] = new
				} else {
					if !r.Delete(p) || r.Delete(p) {
						t.Fatalf("%v is not deleted once", p)
					}
					delete(want, p)
				}
				break
			}
		}
		checkRules(r, want)
		for range 300 {
			a := randomAddr(roll)
			checkMatch(r, want, a)
		}
		for range 50 {
			p := randomPrefix(roll)
			e, ok := r.Find(p)
			if w, there := want[p]; ok != there || e.Rule != w {
				t.Fatalf("Find(%v) = %+v %v, want %+v", p, e, ok, w)
			}
		}
	}
	for p := range want {
		if len(want)%100 == 0 {
			checkRules(r, want)
		}
		r.Delete(p)
		delete(want, p)
	}
	checkRules(r, want)
	if r.send(policy.GCRA, to("10.0.0.1"), 100); r.Any(maps.Exists) {
		t.Error("rules are left of none")
	}
}

// checkRules compares all rules, and checks that no two have the same id.
func checkRules(r *rig, want oracle) {
	r.Helper()
	ids, last := map[uint32]bool{}, netip.Prefix{}
	got := r.Rules()
	for _, e := range got {
		if ids[e.ID] {
			r.Fatalf("two rules have id %d", e.ID)
		}
		ids[e.ID] = true
		if w, ok := want[e.Prefix]; !ok || e.Rule != w {
			r.Fatalf("rule %+v is in force, want %+v", e.Rule, w)
		}
		if c := cmp.Or(last.Addr().Compare(e.Prefix.Addr()), cmp.Compare(last.Bits(), e.Prefix.Bits())); last.IsValid() && c >= 0 {
			r.Fatalf("%v is listed before %v", last, e.Prefix)
		}
		last = e.Prefix
	}
	if len(got) != len(want) {
		r.Fatalf("%d rules are in force, want %d", len(got), len(want))
	}
}

// checkMatch compares the rule that decides over an address: by Match, and by the counters after a packet.
func checkMatch(r *rig, want oracle, a netip.Addr) {
	r.Helper()
	e, ok := r.Match(a)
	w, there := want.match(a)
	if ok != there || e.Rule != w {
		r.Fatalf("Match(%v) = %v %v, want %v %v", a, e.Prefix, ok, w.Prefix, there)
	}
	if !ok {
		return
	}
	r.now += uint64(time.Second)
	before := r.Store.Counters(e.ID)
	r.send(policy.GCRA, to(a.String()), 100)
	after := r.Store.Counters(e.ID)
	if after.PassedPackets != before.PassedPackets+1 {
		r.Fatalf("a packet to %v was not counted under %v", a, e.Prefix)
	}
}

func TestFull(t *testing.T) {
	const room = 50
	r := newRig(t, maps.Size{Rules: room, Buckets: 4})
	want := oracle{}
	for i := range room {
		new := rule(fmt.Sprintf("10.0.%d.0/24", i), 1e9, 2000)
		r.put(new)
		want[new.Prefix] = new
	}
	more := rule("10.1.0.0/16", 1e9, 2000)
	for range 2 {
		if changed, err := r.Put(more); changed || !errors.Is(err, maps.ErrFull) {
			t.Fatalf("one more: changed %v, error %v, want ErrFull", changed, err)
		}
	}
	checkRules(r, want)
	// A change of a rule needs no room.
	again := want[netip.MustParsePrefix("10.0.7.0/24")]
	again.Rate++
	r.put(again)
	want[again.Prefix] = again
	r.Delete(netip.MustParsePrefix("10.0.9.0/24"))
	delete(want, netip.MustParsePrefix("10.0.9.0/24"))
	r.put(more)
	want[more.Prefix] = more
	checkRules(r, want)
}

// All options of a rule are kept. Setting the same rule again changes nothing.
func TestPutIsIdempotent(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 4, Buckets: 64})
	four, six := netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8::/32")
	var rules []policy.Rule
	for _, p := range []netip.Prefix{four, six} {
		base := policy.Rule{Prefix: p, Rate: 64001, Capacity: 1514}
		rules = append(rules, base)
		add := func(change func(*policy.Rule)) {
			new := base
			change(&new)
			rules = append(rules, new)
		}
		add(func(r *policy.Rule) { r.Rate = policy.MinRate })
		add(func(r *policy.Rule) { r.Rate = policy.MaxRate })
		add(func(r *policy.Rule) { r.Rate, r.Capacity = policy.Unlimited, 0 })
		add(func(r *policy.Rule) { r.Capacity = policy.MaxCapacity })
		add(func(r *policy.Rule) { r.Algorithm = policy.Leaky })
		add(func(r *policy.Rule) { r.Each.Kind = policy.EachHost })
		add(func(r *policy.Rule) { r.Each.Kind = policy.EachFlow })
		for _, bits := range []int{p.Bits() + 1, p.Addr().BitLen() - 1} {
			add(func(r *policy.Rule) { r.Each = policy.Each{Kind: policy.EachSubnet, Bits: uint8(bits)} })
		}
		add(func(r *policy.Rule) { r.Excess = policy.ECN })
		add(func(r *policy.Rule) { r.Excess = policy.Pass })
		add(func(r *policy.Rule) { r.Fail = policy.Closed })
		add(func(r *policy.Rule) { r.Framing = policy.Framing{Overhead: policy.MinOverhead, MPU: policy.MaxMPU} })
		add(func(r *policy.Rule) { r.Framing = policy.Framing{Overhead: policy.MaxOverhead} })
		for _, penalty := range []policy.Penalty{{Kind: policy.PenaltyFill}, {Kind: policy.PenaltyHold, Duration: 1}, {Kind: policy.PenaltyHold, Duration: policy.MaxPenalty}} {
			add(func(r *policy.Rule) { r.Algorithm, r.Penalty = policy.Leaky, penalty })
		}
	}
	for _, rule := range rules {
		if err := rule.Validate(); err != nil {
			t.Fatalf("%+v: %v", rule, err)
		}
		r.put(rule)
		if changed, err := r.Put(rule); changed || err != nil {
			t.Errorf("%+v, again: changed %v, error %v", rule, changed, err)
		}
	}
	if got := len(r.Rules()); got != 2 {
		t.Errorf("%d rules are in force, want 2", got)
	}
}

// An each is a bucket scope, for tests that are the same for all scopes.
var each = map[string]policy.Each{"all": {}, "host": {Kind: policy.EachHost}, "flow": {Kind: policy.EachFlow}, "/24": {Kind: policy.EachSubnet, Bits: 24}}

// words are all words that packets have charged: of buckets, sharers and queues.
func words(r *rig) (words []byte) {
	r.Helper()
	words, err := r.Store.Replacements()[".data.table"].LookupBytes(uint32(0))
	testenv.Must(r.T, err)
	rules := r.Store.Replacements()[bpf.ShapectlMapRules]
	for id := range rules.MaxEntries() {
		rule, err := rules.LookupBytes(id)
		testenv.Must(r.T, err)
		words = append(words, rule[:unsafe.Offsetof(bpf.AbiRule{}.FifoUntil)]...)
	}
	return words
}

// An edit of a rate or capacity writes no bucket. The room of a bucket stays, to the unit, up to the new capacity, however long
// ago it was charged and however often the rule changes; room that is added comes at the rate.
func TestEditsKeepRoom(t *testing.T) {
	const second = uint64(time.Second)
	for name, each := range each {
		for _, penalty := range []policy.Penalty{{}, {Kind: policy.PenaltyHold, Duration: time.Second}} {
			t.Run(fmt.Sprint(name, " ", penalty), func(t *testing.T) {
				r := newRig(t, maps.Size{Rules: 2, Buckets: 64})
				flows := []maps.Flow{to("10.1.1.1"), to("10.2.2.2"), to("10.3.3.3")} // full, with some room, and idle
				var e maps.Entry
				set := func(rate policy.Rate, capacity uint64) {
					new := rule("10.0.0.0/8", rate, capacity)
					new.Each, new.Algorithm, new.Penalty = each, policy.Leaky, penalty
					e = r.put(new)
				}
				room := func(flow maps.Flow) int64 { return int64(e.Capacity<<model.UnitBits) - int64(r.units(e, flow)) }
				set(8000, 20_000)
				for range 8 {
					r.send(policy.Leaky, flows[0], 3000)
				}
				r.now += 10 * second
				r.send(policy.Leaky, flows[1], 1600)
				for _, edit := range []struct {
					rate     policy.Rate
					capacity uint64
				}{
					{8001, 20_000}, {1e9, 20_001}, {400e9, 9000}, {8, 50_000}, {1e6, 8999}, {64_001, 2000}, {8, 2000}, {1e12 / 8, 50_000}, {8000, 30_000},
				} {
					before := words(r)
					var had []int64
					for _, flow := range flows {
						had = append(had, room(flow))
					}
					set(edit.rate, edit.capacity)
					for i, flow := range flows {
						if got, want := room(flow), min(had[i], int64(edit.capacity)<<model.UnitBits); got != want {
							t.Fatalf("at %v and %d bytes, bucket %d has room for %d units, want %d", edit.rate, edit.capacity, i, got, want)
						}
					}
					if !bytes.Equal(words(r), before) {
						t.Fatalf("at %v and %d bytes, the edit wrote a bucket", edit.rate, edit.capacity)
					}
				}
				for i, flow := range flows {
					had := room(flow)
					r.now += second
					if came := room(flow) - had; came < 1000<<model.UnitBits-64 || came > 1000<<model.UnitBits+64 {
						t.Errorf("in a second at 8 kbit/s, bucket %d got room for %d units", i, came)
					}
				}
				r.now += 60 * second
				for i, flow := range flows {
					if got := r.units(e, flow); got != 0 {
						t.Errorf("after a minute, bucket %d has %d units", i, got)
					}
				}
			})
		}
	}
}

// A bucket that drained long ago is empty after any change of the rate, although its clock has advanced by half of its period.
// If the capacity grows, it has the room that it had.
func TestEditOfIdleBucket(t *testing.T) {
	for name, each := range each {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 2, Buckets: 64})
			for idle := 100 * time.Second; idle < 400*time.Second; idle += 100 * time.Second {
				flow := to("10.1.1.1")
				rates := []policy.Rate{400e9, 10e6, 8000}
				for _, rate := range rates {
					new := rule("10.0.0.0/8", rate, 125000)
					new.Each = each
					e := r.put(new)
					if got := r.units(e, flow); got > 2 {
						t.Fatalf("idle for %v: the level is %d units at %v", idle, got, rate)
					}
					if rate == rates[0] {
						r.send(policy.GCRA, flow, 3000)
					}
					r.now += uint64(idle)
				}
				if !r.send(policy.GCRA, flow, 3000) {
					t.Errorf("idle for %v: a packet does not pass", idle)
				}
				r.now += uint64(idle)
				larger := rule("10.0.0.0/8", 8000, 125000+7)
				larger.Each = each
				if e, want := r.put(larger), uint64(7); r.units(e, flow) != want<<20 {
					t.Errorf("idle for %v: %d bytes more of capacity made the level %d units", idle, want, r.units(e, flow))
				}
				r.Delete(netip.MustParsePrefix("10.0.0.0/8"))
			}
		})
	}
}

// A rule that was unlimited starts with empty buckets.
func TestUnlimitedAndBack(t *testing.T) {
	for name, each := range each {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 2, Buckets: 4})
			limited := rule("10.0.0.0/8", 8, 2000)
			limited.Each = each
			flow := to("10.1.1.1")
			r.put(limited)
			r.send(policy.GCRA, flow, 2000)
			if r.send(policy.GCRA, flow, 2000) {
				t.Fatal("a full bucket lets a packet pass")
			}
			r.put(rule("10.0.0.0/8", policy.Unlimited, 0))
			for range 10 {
				if !r.send(policy.GCRA, flow, 2000) {
					t.Fatal("unlimited, a packet is dropped")
				}
			}
			e := r.put(limited)
			if got := r.units(e, flow); got != 0 {
				t.Errorf("limited again, the level is %d units", got)
			}
			if !r.send(policy.GCRA, flow, 2000) || r.send(policy.GCRA, flow, 1000) {
				t.Error("limited again, the first packet does not pass, or more than that does")
			}
			if c := r.Store.Counters(e.ID); c.PassedPackets != 12 || c.DroppedPackets != 2 {
				t.Errorf("counters did not go on: %+v", c)
			}
		})
	}
}

// A new rule starts with empty buckets, even with the id of a deleted rule whose clock was far
// ahead or far behind.
func TestReuseOfIDs(t *testing.T) {
	for name, each := range each {
		r := newRig(t, maps.Size{Rules: 1, Buckets: 4})
		r.now = uint64(1000 * time.Second)
		for _, rates := range [][2]policy.Rate{{8, 400e9}, {400e9, 8}, {1e9, 8000}, {8000, 8000}} {
			t.Run(fmt.Sprintf("%s/%v then %v", name, rates[0], rates[1]), func(t *testing.T) {
				r.T = t
				hosts := []string{"10.1.1.1", "10.2.2.2", "10.3.3.3", "10.4.4.4"}
				first, second := rule("10.0.0.0/8", rates[0], 2000), rule("10.0.0.0/9", rates[1], 2000)
				first.Each, second.Each = each, each
				e := r.put(first)
				for _, host := range hosts {
					r.send(policy.GCRA, to(host), 1900)
				}
				r.Delete(first.Prefix)
				r.now += 3e9
				if r.send(policy.GCRA, to(hosts[0]), 2000); r.send(policy.GCRA, to(hosts[0]), 2000) == false {
					t.Fatal("a rule that is gone drops a packet")
				}
				again := r.put(second)
				if again.ID != e.ID {
					t.Fatalf("id %d, want %d again", again.ID, e.ID)
				}
				if c := r.Store.Counters(again.ID); c != (maps.Counters{}) {
					t.Errorf("counters begin with %+v", c)
				}
				for _, b := range r.Store.Buckets([]maps.Entry{again}, r.clock) {
					t.Errorf("%+v has a level to begin with", b)
				}
				for i, host := range hosts {
					if got := r.units(again, to(host)); got != 0 && (i == 0 || each.Kind != policy.EachAll) {
						t.Errorf("the level of %s is %d units to begin with", host, got)
					}
					passed := r.send(policy.GCRA, to(host), 1900)
					if want := i == 0 || each.Kind != policy.EachAll; passed != want {
						t.Errorf("the first packet to %s passed: %v, want %v", host, passed, want)
					}
				}
				// Each got a slot of the only line: none was charged to the spill bucket.
				if got := r.Store.SharedLevel(again, r.now); got != 0 && each.Kind != policy.EachAll {
					t.Errorf("the level of the spill bucket is %d units", got)
				}
				r.Delete(second.Prefix)
			})
		}
	}
}

// Cleared rules are removed for good: no later rule makes one visible again.
func TestClear(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 4, Buckets: 4})
	for _, p := range []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.0.0/8", "2001:db8::/32"} {
		r.put(rule(p, 8, 100))
	}
	r.Store.Clear(r.Set)
	if r.Any(maps.Exists) || len(r.Rules()) != 0 {
		t.Errorf("cleared, these are left: %+v", r.Rules())
	}
	for range 3 {
		if !r.send(policy.GCRA, to("10.0.0.1"), 100) {
			t.Error("cleared, a packet is dropped")
		}
	}
	want := oracle{}
	for _, p := range []string{"10.9.0.0/24", "2001:db9::/32", "10.9.1.0/24", "11.0.0.0/8"} {
		new := rule(p, 8000, 2000)
		r.put(new)
		want[new.Prefix] = new
		checkRules(r, want)
	}
	if e, ok := r.Match(netip.MustParseAddr("10.0.0.1")); ok {
		t.Errorf("%v is in force again", e.Prefix)
	}
}

// All addresses of a family match the same rule, or none, unless there is a longer prefix.
func TestMatchAny(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 20})
	check := func(when string, ipv6, found, same bool) {
		t.Helper()
		e, gotFound, gotSame := r.MatchAny(ipv6)
		if gotFound != found || gotSame != same || found && (e.Prefix.Bits() != 0 || e.Prefix.Addr().Is6() != ipv6) {
			t.Errorf("%s, IPv6 %v: %v, %v, %v", when, ipv6, e.Prefix, gotFound, gotSame)
		}
	}
	check("without rules", false, false, true)
	r.put(rule("0.0.0.0/0", 8000, 2000))
	check("with a rule for IPv4", false, true, true)
	check("with a rule for IPv4", true, false, true)
	r.put(rule("::/0", 8000, 2000))
	r.put(rule("10.0.0.0/8", 8000, 2000))
	check("with a longer prefix", false, false, false)
	check("with a longer prefix of IPv4", true, true, true)
	r.Delete(netip.MustParsePrefix("10.0.0.0/8"))
	check("without it again", false, true, true)
	r.put(rule("2001:db8::1/128", 8000, 2000))
	check("with a host", true, false, false)
	check("with a host of IPv6", false, true, true)
}

// Load sets the same rules as a Put of each rule.
func TestLoad(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 200, Buckets: 4})
	want := oracle{}
	var rules []policy.Rule
	for i := range 100 {
		for _, p := range []string{fmt.Sprintf("10.%d.0.0/%d", i, 16+i%17), fmt.Sprintf("2001:db8:%x::/%d", i, 48+i%81)} {
			new := rule(netip.MustParsePrefix(p).Masked().String(), 1e9, 2000)
			rules, want[new.Prefix] = append(rules, new), new
		}
	}
	if err := r.Load(rules); err != nil {
		t.Fatal(err)
	}
	checkRules(r, want)
	for i := range 100 {
		checkMatch(r, want, netip.AddrFrom4([4]byte{10, byte(i), 0, byte(i)}))
	}
	if err := r.Load([]policy.Rule{rule("11.0.0.0/8", 1e9, 2000)}); !errors.Is(err, maps.ErrFull) {
		t.Errorf("one more: error %v, want ErrFull", err)
	}
	checkRules(r, want)
	for _, rule := range rules {
		r.Delete(rule.Prefix)
	}
	if r.Any(maps.Exists) {
		t.Error("all deleted, some are left")
	}
}
