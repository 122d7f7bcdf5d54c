package bpf_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	shapemaps "github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A mirror is a policy in the kernel, and its model.
type mirror struct {
	*rig
	overhead int16
	rules    map[netip.Prefix]*mirrored
	undo     map[netip.Prefix]*mirrored // rules after a revert; nil if no change is pending
	packets  int
}

// change updates the model for a change that begins at now.
func (m *mirror) change(want []policy.Rule, now uint64) {
	m.undo, m.rules = m.rules, map[netip.Prefix]*mirrored{}
	for _, rule := range want {
		switch old := m.undo[rule.Prefix]; {
		case old == nil:
			m.rules[rule.Prefix] = newMirrored(rule, now)
		case old.rule == rule:
			m.rules[rule.Prefix] = old
		default:
			m.rules[rule.Prefix] = old.becoming(rule, now)
		}
	}
}

// keepFIFO updates the model when the start of a change becomes known.
func (m *mirror) keepFIFO(want []policy.Rule, from uint64) {
	for _, rule := range want {
		if old := m.rules[rule.Prefix]; old != nil && old.limited() && rule.Rate != policy.Unlimited {
			old.keepFIFO(rule, from)
		}
	}
}

// keepFIFOBack is keepFIFO for a rollback.
func (m *mirror) keepFIFOBack(at uint64) {
	for p, old := range m.undo {
		if new := m.rules[p]; new != nil && new != old && old.limited() && new.limited() {
			new.keepFIFO(old.rule, at)
		}
	}
}

// revert updates the model for the end of a change, which was planned or is a rollback. Rules that were absent or
// unlimited meanwhile aged by their own clocks.
func (m *mirror) revert(now uint64, planned bool) {
	for p, old := range m.undo {
		new := m.rules[p]
		if new != old && planned {
			*old.fifo = max(*old.fifo, now+uint64(policy.MaxWait))
		}
		if new != nil && new != old && old.limited() && new.limited() {
			old.limit.Succeed(new.limit.Meter, now)
		}
	}
	m.rules, m.undo = m.undo, nil
}

// match returns the model's rule of the longest prefix, or nil.
func (m *mirror) match(host netip.Addr) (best *mirrored) {
	for p, r := range m.rules {
		if p.Contains(host) && (best == nil || p.Bits() > best.rule.Prefix.Bits()) {
			best = r
		}
	}
	return best
}

// offer sends a packet through the program, and compares the verdict.
func (m *mirror) offer(host netip.Addr, now, n uint64, ect bool) {
	m.Helper()
	m.packets++
	frame, packet := sized(host, n, int(m.overhead), now)
	if ect {
		frame[15] |= 2
	}
	m.at(now)
	e, found := m.set.Match(host)
	var asked model.Outcome
	if found && e.Rate != policy.Unlimited {
		asked = m.asked(e, host, now, n, ect)
	}
	verdict, _, departure := sendTimed(m, m.program(), frame, packet)
	r := m.match(host)
	if r == nil {
		if verdict != next {
			m.Fatalf("packet %d to %v at %d ns: verdict %#x, the model has no rule", m.packets, host, now, verdict)
		}
		return
	}
	before := *r.bucket(keyOf(r.rule, host))
	want := r.offer(host, now, n, ect)
	*r.counts = sum(*r.counts, segments(packet.packets(), countersOf(want, n)))
	if (verdict == drop) != (want.Verdict == model.Drop) || verdict != drop && verdict != next || departure != want.Departure ||
		r.limited() && !sameOutcome(asked, want) {
		m.Fatalf("packet %d, %d bytes from %v at %d ns: verdict %#x, departure %d\nmodel     %+v\npredicted %+v\nrule %+v\nlimit %+v\nkernel's %+v\nbucket %+v, level %d units",
			m.packets, n, host, now, verdict, departure, want, asked, r.rule, r.limit, m.set.Store.Meter(e), before, r.limit.Level(before, now))
	}
}

// compare compares the rules, and their counters and shared buckets.
func (m *mirror) compare(now uint64) {
	m.Helper()
	m.at(now)
	entries := m.set.Rules()
	if len(entries) != len(m.rules) {
		m.Fatalf("%d rules are in force, the model has %d", len(entries), len(m.rules))
	}
	for _, e := range entries {
		r := m.rules[e.Prefix]
		if r == nil || e.Rule != r.rule {
			m.Fatalf("rule %+v is in force, the model has %+v", e.Rule, r)
		}
		if got, want := m.set.Store.Counters(e.ID), countedBy(r.rule, *r.counts); got != want {
			m.Errorf("%v: counters\n%+v, want\n%+v", e.Prefix, got, want)
		}
		if !r.limited() {
			continue
		}
		if got, want := m.set.Store.SharedLevel(e, now), r.limit.Level(*r.buckets[bucketKey{}], now); got != want {
			m.Errorf("%v: the level of its shared bucket is %d units at %d ns, in the model %d", e.Prefix, got, now, want)
		}
	}
	if m.Failed() {
		m.FailNow()
	}
}

// nets are nested prefixes, and prefixes beside them.
var nets = []netip.Prefix{
	prefix("10.0.0.0/16"), prefix("10.0.0.0/24"), prefix("10.0.0.4/30"), prefix("10.0.0.5/32"), prefix("10.0.1.0/24"), prefix("0.0.0.0/0"),
}

// randomPolicy returns rules for some of the nets. A rule that exists is likely to stay, or to change in part.
func (m *mirror) randomPolicy(roll dice) (rules []policy.Rule) {
	for _, net := range nets {
		old := m.rules[net]
		switch n := roll(8); {
		case n == 0 || n < 4 && old == nil:
			continue
		case n < 3:
			rules = append(rules, old.rule)
			continue
		}
		rule := randomRule(net, roll, m.overhead)
		rule.Each = rule.Each.Canonical(net)
		if old != nil && roll(2) == 0 {
			if rule.Excess == policy.Delay && rule.Algorithm != old.rule.Algorithm {
				rule.Excess, rule.Queue, rule.ECNAbove, rule.Order = policy.Drop, 0, 0, policy.FIFO
			}
			rule.Algorithm, rule.Penalty = old.rule.Algorithm, policy.Penalty{}
			rule.Each = old.rule.Each
			if rule.Each.Kind == policy.EachFlow {
				rule.Order = policy.FIFO
			}
		}
		rules = append(rules, rule)
	}
	return rules
}

// play makes changes that last, are rolled back, or revert unconfirmed, and sends
// packets at any time.
func (m *mirror) play(roll dice, changes, packets int) {
	now := starts[roll(7)] // early enough before the end of the clock
	var some []netip.Addr
	for _, a := range []string{"10.0.0.1", "10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.1.1", "10.0.9.9", "11.0.0.1"} {
		some = append(some, addr(a))
	}
	// traffic sends packets until a random time, which it returns.
	traffic := func(until uint64) uint64 {
		for range 1 + roll(uint64(packets)) {
			if now >= until {
				break
			}
			host := some[roll(uint64(len(some)))]
			room, meter := uint64(1500), model.Meter{}
			if r := m.match(host); r != nil && r.limited() {
				room, meter = r.rule.Capacity, r.limit.Meter
				if b := r.buckets[keyOf(r.rule, host)]; b != nil && roll(2) == 0 {
					room -= min(room, meter.Level(*b, now)>>model.UnitBits)
				}
			}
			m.offer(host, now, randomSize(roll, m.overhead, room), roll(2) == 0)
			now = max(now, min(later(roll, meter, now), until))
		}
		return until
	}
	soon := func() uint64 { return now + 1 + roll(1<<(1+roll(40))) }
	m.rules = map[netip.Prefix]*mirrored{}
	for range changes {
		want := m.randomPolicy(roll)
		m.at(now)
		m.prepare(want...)
		m.compare(now)
		if roll(8) == 0 {
			m.set.Store.Abandon()
			m.compare(now)
			continue
		}
		now = traffic(soon())
		m.at(now)
		from, until := min(soon(), now+shapemaps.MaxLead), shapemaps.Never
		confirm := roll(2) == 0
		if confirm {
			until = from + 1 + roll(1<<(1+roll(40)))
		}
		m.set.Store.Time(from, until)
		m.keepFIFO(want, from)
		testenv.Must(m, m.set.Store.Arm())
		now = traffic(from)
		m.change(want, from)
		m.at(now)
		m.set.Store.Commit()
		m.compare(now)
		switch roll(4) {
		case 0: // not confirmed
			if confirm {
				now = traffic(until)
				m.revert(until, true)
				m.compare(now)
				traffic(now + 1 + roll(1<<40))
				m.compare(now)
			}
		case 1: // confirmed
			if confirm {
				now = traffic(now + roll(until-now))
				m.at(now)
				testenv.Must(m, m.set.Store.Confirm())
			}
		case 2: // rolled back, or the command is killed before the last store
			if now = traffic(min(soon(), until-1)); now < until-1 {
				m.at(now)
				at := min(soon(), now+shapemaps.MaxLead, until)
				m.set.Store.TimeRevert(at)
				m.keepFIFOBack(at)
				if roll(3) == 0 {
					break
				}
				testenv.Must(m, m.set.Store.Revert(at))
				now = traffic(at)
				m.revert(at, false)
				m.compare(now)
			}
		}
		if state, at := m.set.Store.Change(); state == shapemaps.Pending {
			now = traffic(at)
			m.revert(at, true)
		}
		traffic(now + 1 + roll(1<<40))
		m.at(now)
		m.set.Store.Finish()
		m.compare(now)
		m.undo = nil
	}
}

// Changes of many rules that begin and revert at given times, with packets around
// them, give the same verdicts, counters and levels in the kernel as in the model.
func TestChangeIsModel(t *testing.T) {
	seed := testenv.Seed(t)
	t.Parallel()
	for i := range testenv.Rounds(t, 20) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			roll := rand.New(rand.NewPCG(seed, uint64(i)))
			m := &mirror{
				rig:      newRig(t, shapemaps.Size{Rules: 32, Buckets: 4096}, bySource()),
				overhead: []int16{shrink, grow, swell}[roll.Uint64N(3)],
			}
			m.play(roll.Uint64N, 12, 60)
			kept := slices.Collect(maps.Keys(m.rules))
			if len(kept) == 0 && m.packets == 0 {
				t.Error("no packet was sent")
			}
		})
	}
}

// A rule that changes its algorithm charges each packet once.
func TestChangeOfAlgorithm(t *testing.T) {
	for _, algorithm := range algorithms {
		t.Run("from "+algorithm.String(), func(t *testing.T) {
			m := &mirror{rig: newRig(t, shapemaps.Size{Rules: 2}, ingress())}
			rule := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 2000, Algorithm: algorithm}
			e := m.put(rule, 1e9)
			rule.Algorithm = algorithms[1-algorithm]
			m.prepare(rule)
			m.set.Store.Time(2e9, shapemaps.Never)
			testenv.Must(m, m.set.Store.Arm())
			frame := udp(addr("10.0.0.1"), addr("10.9.9.9"), 0)
			for i, now := range []uint64{2e9 - 1, 2e9, 2e9 + 1} {
				send(t, m.program(), frame, meta{now: now})
				if got := m.set.Store.Counters(e.ID).PassedPackets; got != uint64(i+1) {
					t.Fatalf("%d packets were charged, of %d", got, i+1)
				}
			}
			// One bucket: the charges of both algorithms have not drained yet.
			m.at(2e9 + 1)
			if level := m.set.Store.SharedLevel(e, 2e9+1); level <= 2*uint64(len(frame))<<model.UnitBits {
				t.Errorf("the level is %d units after three packets of %d bytes", level, len(frame))
			}
		})
	}
}

// After an edit, no packet overtakes those that are queued by the former rate, and together they keep to the rate in force.
func TestQueueKeepsTurns(t *testing.T) {
	const size, start, edit = 1000, uint64(1e9), uint64(1e9 + 1e6)
	for _, algorithm := range algorithms {
		for _, scope := range []policy.EachKind{policy.EachAll, policy.EachHost} {
			for _, rate := range []policy.Rate{800e6, 4e6} {
				t.Run(fmt.Sprintf("%v/%v/%v", algorithm, policy.Each{Kind: scope}, rate), func(t *testing.T) {
					r := newRig(t, shapemaps.Size{Rules: 2, Buckets: 64}, egress())
					rule := queue(algorithm, 8e6, 5*size, 100*size)
					rule.Framing, rule.Each.Kind = policy.Framing{}, scope
					r.put(rule, start)
					last := uint64(0)
					send := func(now uint64) (bytes uint64) {
						verdict, _, leaves := sendTimed(t, r.program(), toHost(1, size), meta{now: now})
						if verdict == drop {
							return 0
						}
						if leaves < last {
							t.Fatalf("a packet at %d ns departs at %d, before %d", now, leaves, last)
						}
						last = leaves
						return size
					}
					for range 100 {
						send(start)
					}
					rule.Rate = rate
					r.put(rule, edit)
					queued, sent := last, uint64(0)
					for now := edit; now < start+2e8; now += 2e5 {
						sent += send(now)
						if sent > 6*size+(last-queued)*uint64(rate)/8e9 {
							t.Fatalf("%d bytes more depart within %d ns after those that were queued", sent, last-queued)
						}
					}
				})
			}
		}
	}
}

// A CPU may charge a packet long after it read the time: here from before a change reverted, while
// others have charged the bucket since. That packet stays charged, and so do those of the others.
func TestLatePacketAfterRevert(t *testing.T) {
	const size, from, until = 1000, uint64(2e9), uint64(3) << model.TickBits // a tick begins when the change reverts
	for _, algorithm := range algorithms {
		rule := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8_000_000, Capacity: 2 * size, Algorithm: algorithm}
		ofHost, pool := rule, rule
		ofHost.Each.Kind = policy.EachHost
		pool.Prefix, pool.Pool, pool.Label.Name = policy.PoolKey("uplink"), true, "uplink"
		for name, limit := range map[string]policy.Rule{"rule": rule, "host": ofHost, "pool": pool} {
			t.Run(fmt.Sprintf("%v/%s", algorithm, name), func(t *testing.T) {
				r := newRig(t, shapemaps.Size{Views: 2, Rules: 4, Buckets: 64, Labels: 8, Pools: true}, egress())
				set := r.set
				if limit.Pool {
					set = r.set.Store.Pools()
				}
				r.at(1e9)
				_, err := set.Put(limit)
				testenv.Must(t, err)
				if limit.Pool {
					r.put(policy.Rule{Prefix: rule.Prefix, Rate: policy.Unlimited, Within: "uplink"}, 1e9)
				}
				larger := limit
				larger.Capacity = 20 * size
				testenv.Must(t, set.Prepare([]policy.Difference{{Have: &limit, Want: &larger}}, func(int) {}))
				set.Store.Time(from, until)
				testenv.Must(t, set.Store.Arm())
				send := func(now uint64, bytes int, verdicts ...uint32) {
					t.Helper()
					for i, want := range verdicts {
						if got, _ := send(t, r.program(), toHost(1, bytes), meta{now: now}); got != want {
							t.Errorf("packet %d: verdict %#x, want %#x", i, got, want)
						}
					}
				}
				send(until-1, size, slices.Repeat([]uint32{next}, 18)...) // room for two is left
				send(until, size, next)
				send(until-1, size/2, next) // the late one
				send(until, size, drop)
				send(until+1e6, size, next, drop) // one packet has drained
			})
		}
	}
}

// A shadow counts the packets and hosts that its limit would refuse, and changes no verdict.
func TestShadowIsModel(t *testing.T) {
	roll := rand.New(rand.NewPCG(testenv.Seed(t), 0))
	live := []policy.Rule{
		{Rate: policy.Unlimited},
		{Rate: 80_000, Capacity: 3000},
		{Rate: 80_000, Capacity: 3000, Algorithm: policy.Leaky, Penalty: policy.Penalty{Kind: policy.PenaltyFill}, Excess: policy.ECN},
	}
	for _, rule := range live {
		for _, each := range []policy.Each{{}, {Kind: policy.EachHost}, {Kind: policy.EachSubnet, Bits: 30}, {Kind: policy.EachFlow}} {
			t.Run(rule.Rate.String()+" "+each.String(), func(t *testing.T) {
				r := newRig(t, shapemaps.Size{Rules: 2, Buckets: 1024, Affected: 4096}, ingress())
				rule.Prefix = prefix("10.0.0.0/24")
				rule.Shadow = policy.Shadow{Rate: 40_000, Capacity: 2000, Each: each, Framing: policy.Framing{Overhead: 20, MPU: 100}}
				now := uint64(1e9)
				e := r.put(rule, now)
				proposed, _ := rule.Proposed()
				alone := rule
				alone.Shadow = policy.Shadow{}
				bare, shadow := newMirrored(alone, now), newMirrored(proposed, now)
				var want shapemaps.Counters
				affected := map[netip.Prefix]*shapemaps.Affected{}
				for range 400 {
					host := netip.AddrFrom4([4]byte{10, 0, 0, byte(roll.Uint32N(8))})
					n := uint64(34 + roll.Uint32N(1400))
					now += uint64(roll.Uint32N(100e6))
					frame := make([]byte, n)
					copy(frame, udp(host, addr("10.9.9.9"), 0)[:34])
					verdict, _ := send(t, r.program(), frame, meta{now: now})
					if o := bare.offer(host, now, n, false); (verdict == drop) != o.Excess {
						t.Fatalf("verdict %#x, want %v as without a shadow", verdict, o.Verdict)
					}
					counted := max(n+20, 100)
					want = sum(want, passed(counted))
					if shadow.offer(host, now, counted, false).Excess {
						want.ExcessPackets++
						want.ExcessBytes += counted
						bits := 32
						if each.Kind == policy.EachSubnet {
							bits = 30
						}
						subnet := netip.PrefixFrom(host, bits).Masked()
						if affected[subnet] == nil {
							affected[subnet] = &shapemaps.Affected{Subnet: subnet}
						}
						affected[subnet].Packets++
						affected[subnet].Bytes += counted
					}
				}
				limit, _ := r.set.Store.Shadow(e)
				got := r.set.Store.Counters(limit.ID)
				if got != want || want.ExcessPackets == 0 || want.ExcessPackets == want.PassedPackets {
					t.Errorf("the shadow counted\n%+v, want\n%+v", got, want)
				}
				all, err := r.set.Store.Affected(r.set.Rules())
				testenv.Must(t, err)
				if len(all[e.ID]) != len(affected) {
					t.Errorf("%d hosts are affected, want %d", len(all[e.ID]), len(affected))
				}
				for _, h := range all[e.ID] {
					if affected[h.Subnet] == nil || *affected[h.Subnet] != h {
						t.Errorf("affected: %+v, want %+v", h, affected[h.Subnet])
					}
				}
			})
		}
	}
}
