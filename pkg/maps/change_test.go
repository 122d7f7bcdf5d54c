package maps_test

import (
	"errors"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// reopenable pins the maps of a rig. reopen opens them again, as another process does.
func reopenable(r *rig) (reopen func()) {
	r.program() // loads it while the first set is open
	dir := privateBPFFS(r.T)
	testenv.Must(r.T, r.Store.Pin(dir))
	return func() {
		r.Helper()
		store, err := shapemaps.Open(dir, true)
		testenv.Must(r.T, err)
		r.Cleanup(func() { store.Close() })
		store.UseClock(func() uint64 { return r.now })
		r.Set.Store.Close()
		r.Set = store.View(view)
	}
}

// The first change of a process finds out which ids are free: those that no rule and no
// shadow uses.
func TestFirstChangeOfAProcess(t *testing.T) {
	one := rule("10.1.0.0/16", 1e9, 2000)
	shadowed := one
	shadowed.Shadow = policy.Shadow{Rate: 1e6, Capacity: 2000}
	var others []policy.Rule
	for _, p := range []string{"10.2.0.0/16", "10.3.0.0/16", "10.4.0.0/16", "10.5.0.0/16"} {
		others = append(others, rule(p, 1e9, 2000))
	}
	prepare := func(r *rig, rules ...policy.Rule) { r.prepare(rules...) }
	for name, c := range map[string]struct {
		before policy.Rule
		first  func(r *rig, reopen func())
		left   []policy.Rule
		room   int
	}{
		"deleted":           {one, func(r *rig, _ func()) { r.Delete(one.Prefix) }, nil, 3},
		"deleted, shadowed": {shadowed, func(r *rig, _ func()) { r.Delete(one.Prefix) }, nil, 3},
		"shadow gone":       {shadowed, func(r *rig, _ func()) { r.put(one) }, []policy.Rule{one}, 2},
		"shadow changed": {shadowed, func(r *rig, _ func()) {
			other := shadowed
			other.Shadow.Rate++
			r.put(other)
			r.put(shadowed)
		}, []policy.Rule{shadowed}, 1},
		"shadowed": {one, func(r *rig, _ func()) { r.put(shadowed) }, []policy.Rule{shadowed}, 1},
		"killed, then the same prefix": {one, func(r *rig, reopen func()) {
			prepare(r, one, others[0])
			reopen()
			r.Store.Abandon()
			r.put(others[0])
		}, []policy.Rule{one, others[0]}, 1},
		"killed, then another policy": {one, func(r *rig, reopen func()) {
			prepare(r, shadowed)
			reopen()
			r.Store.Abandon()
			prepare(r, one, others[1])
			r.Store.Time(r.now, shapemaps.Never)
			testenv.Must(t, r.Store.Arm())
			r.Store.Commit()
			reopen()
		}, []policy.Rule{one, others[1]}, 1},
		"cleared": {shadowed, func(r *rig, _ func()) { r.Store.Clear(r.Set) }, nil, 3},
		"killed while cleared": {shadowed, func(r *rig, reopen func()) {
			defer func() {
				recover()
				step.Hook = nil
				reopen()
			}()
			step.Hook = func(what string, _ bool) error {
				if what == "remove a prefix" {
					panic("killed")
				}
				return nil
			}
			r.Store.Clear(r.Set)
		}, nil, 3},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, shapemaps.Size{Rules: 3, Buckets: 4, Affected: 1})
			reopen := reopenable(r)
			r.put(c.before)
			reopen()
			c.first(r, reopen)
			want := oracle{}
			for _, rule := range c.left {
				want[rule.Prefix] = rule
			}
			checkRules(r, want)
			for _, rule := range others {
				if _, there := want[rule.Prefix]; there {
					continue
				}
				if len(want) == len(c.left)+c.room {
					if _, err := r.Put(rule); !errors.Is(err, shapemaps.ErrFull) {
						t.Errorf("with no id left, Put says %v", err)
					}
					continue
				}
				r.put(rule)
				want[rule.Prefix] = rule
				checkRules(r, want)
			}
			checkRules(r, want)
		})
	}
}

// Policies replace each other. Changes stay, revert or are abandoned, in one process or
// several. Single rules are set and deleted in between. Commands and packets always see the
// rules of a plain map. There is room for only two policies, so no id may be lost.
func TestPoliciesAgainstOracle(t *testing.T) {
	const most = 30 // rules
	roll := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	r := newRig(t, shapemaps.Size{Rules: 2 * 2 * most, Buckets: 4, Affected: 1, Labels: uint32(2 * 2 * most * labelParts)})
	reopen := reopenable(r)
	prefixes := make([]netip.Prefix, 2*most) // few, so that they are used again
	for i := range prefixes {
		prefixes[i] = randomPrefix(roll)
	}
	randomRule := func() policy.Rule { return randomRule(roll, prefixes[roll.IntN(len(prefixes))]) }
	have := oracle{}
	for range testenv.Rounds(t, 30) {
		if roll.IntN(8) == 0 {
			reopen()
		}
		next, want := nextPolicy(roll, have, most, randomRule)
		if got := r.Any(shapemaps.InForce); got != (len(have) > 0) {
			t.Fatalf("InForce says %v of %v", got, have)
		}
		switch end := roll.IntN(6); end {
		case 0: // single rules, which end the last change
			for range roll.IntN(10) {
				one := randomRule()
				if _, there := have[one.Prefix]; there && roll.IntN(3) == 0 {
					if !r.Delete(one.Prefix) {
						t.Fatalf("there was no %v to delete", one.Prefix)
					}
					delete(have, one.Prefix)
				} else if there || len(have) < most {
					_, err := r.Put(one)
					testenv.Must(t, err)
					have[one.Prefix] = one
				}
			}
		case 1: // killed before the change was armed
			r.prepare(want...)
			checkRules(r, have)
			if roll.IntN(2) == 0 {
				r.Store.Time(r.now+1e6, r.now+1e9)
			}
			reopen()
			r.Store.Abandon()
		default:
			if d, expect := shapemaps.Count(r.prepare(want...)), difference(have, next); d != expect {
				t.Fatalf("prepared %+v, want %+v", d, expect)
			}
			checkRules(r, have)
			until := shapemaps.Never
			if end == 2 {
				until = r.now + 1e9
			}
			r.Store.Time(r.now+1e6, until)
			testenv.Must(t, r.Store.Arm())
			checkRules(r, have)
			r.now += 1e6
			r.Store.Commit()
			checkRules(r, next)
			if end == 2 { // expires
				r.now += 1e9
			} else {
				have = next
			}
			if roll.IntN(2) == 0 {
				checkPackets(r, roll, have)
				r.Store.Finish()
			}
		}
		checkRules(r, have)
		checkPackets(r, roll, have)
	}
	for p := range have {
		r.Delete(p)
	}
	r.Store.Finish()
	if n := storedLabels(r); n != 0 {
		t.Errorf("%d parts of labels are left without a rule", n)
	}
}

// randomRule is a rule that often has a shadow or a label.
func randomRule(roll *rand.Rand, p netip.Prefix) policy.Rule {
	rule := policy.Rule{Prefix: p, Rate: policy.Rate(1e9 + roll.Uint64N(4)), Capacity: 1 << 20}
	if roll.IntN(3) == 0 {
		rule.Shadow = policy.Shadow{Rate: policy.Rate(1e8 + roll.Uint64N(2)), Capacity: 1 << 18}
	}
	if roll.IntN(2) == 0 {
		rule.Label = randomLabel(roll)
	}
	return rule
}

// nextPolicy is a policy of at most most rules, some of them those of have.
func nextPolicy(roll *rand.Rand, have oracle, most int, randomRule func() policy.Rule) (next oracle, rules []policy.Rule) {
	next = oracle{}
	add := func(rule policy.Rule) {
		if len(next) < most {
			next[rule.Prefix] = rule
		}
	}
	changes := roll.IntN(4)
	for p, rule := range have {
		switch {
		case changes == 0 || roll.IntN(2) == 0:
			add(rule)
		case roll.IntN(2) == 0:
			other := randomRule()
			other.Prefix = p
			add(other)
		}
	}
	for range changes * roll.IntN(15) {
		add(randomRule())
	}
	rules = slices.Collect(maps.Values(next))
	policy.SortRules(rules)
	return next, rules
}

func difference(have, next oracle) (d shapemaps.Difference) {
	for p, rule := range next {
		if old, there := have[p]; !there {
			d.Added++
		} else if old != rule {
			d.Changed++
		}
	}
	for p := range have {
		if _, there := next[p]; !there {
			d.Removed++
		}
	}
	return d
}

// checkPackets compares the rules that decide over packets to addresses in prefixes, and to random addresses.
func checkPackets(r *rig, roll *rand.Rand, want oracle) {
	r.Helper()
	for p := range want {
		if roll.IntN(4) == 0 {
			checkMatch(r, want, p.Addr())
		}
	}
	for range 10 {
		checkMatch(r, want, randomAddr(roll))
	}
	got := r.Policy()
	if len(got) != len(want) || slices.ContainsFunc(got, func(rule policy.Rule) bool { return want[rule.Prefix] != rule }) {
		r.Fatalf("Policy is %v, want %v", got, want)
	}
}

// A rollback that is killed before its last store leaves the end that was planned, with the room for that.
func TestKilledRollback(t *testing.T) {
	for _, rate := range []policy.Rate{8e5, 16e6} {
		r := newRig(t, shapemaps.Size{Rules: 2, Buckets: 4})
		one := rule("10.0.0.0/8", 8e6, 100_000)
		e := r.put(one)
		next := one
		next.Rate = rate
		r.prepare(next)
		until := r.now + 20e6
		r.Store.Time(r.now, until)
		testenv.Must(t, r.Store.Arm())
		r.Store.Commit()
		for range 60 {
			r.send(policy.GCRA, to("10.0.0.1"), 1500)
		}
		r.Store.TimeRevert(r.now + 5e6)
		for ; r.now < until; r.now += 1e6 {
			if got, want := r.Store.SharedLevel(e, r.now), 60*1500<<20-(r.now+20e6-until)*uint64(rate)/8e9<<20; got+8 < want || got > want+8 {
				t.Errorf("at %v, %d ns before the end, the level is %d units, want %d", rate, until-r.now, got, want)
			}
		}
		if got, want := r.Store.SharedLevel(e, until+1e6), 60*1500<<20-(20*uint64(rate)+uint64(one.Rate))/8e3<<20; got+8 < want || got > want+8 {
			t.Errorf("at %v, reverted, the level is %d units, want %d", rate, got, want)
		}
	}
}

// A pool from which a rule draws before a change may go only once the change is over, and then the one above it, too.
func TestUnusedPools(t *testing.T) {
	r := newRig(t, shapemaps.Size{Rules: 4, Buckets: 4, Labels: 16, Pools: true})
	above := policy.Within("")
	for _, name := range []string{"metal", "gold"} {
		_, err := r.Store.Pools().Put(policy.Rule{Prefix: policy.PoolKey(name), Pool: true, Rate: 8e6, Capacity: 100_000, Within: above, Label: policy.Label{Name: name}})
		testenv.Must(t, err)
		above = policy.Within(name)
	}
	unused := func(when string, want int) {
		t.Helper()
		if got := r.Store.Unused(func(policy.Rule) bool { return true }); len(got) != want {
			t.Errorf("%s: %d pools are unused, want %d", when, len(got), want)
		}
	}
	unused("without rules", 2)
	one := rule("10.0.0.0/8", 8e6, 100_000)
	one.Within = "gold"
	r.put(one)
	one.Within = ""
	r.prepare(one)
	r.Store.Time(r.now, shapemaps.Never)
	testenv.Must(t, r.Store.Arm())
	r.Store.Commit()
	unused("while the rule can be within it again", 0)
	r.Store.Finish()
	unused("after the change", 2)
}
