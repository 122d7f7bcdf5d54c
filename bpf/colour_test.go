//go:build !guest

package bpf_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/testenv/rtemeter"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

var coloured = []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115}

// DSCPs by colour: with which packets come in, and which they get.
var (
	dscpIn  = [...]uint8{0, 12, 14}
	dscpOut = [...]uint8{10, 20, 30}
)

// inColours completes a rule with colours: packets of all colours pass, and tell theirs by their DSCP.
func inColours(r policy.Rule) policy.Rule {
	r.Colours.Green, r.Colours.Yellow, r.Colours.Red = policy.SetDSCP(dscpOut[0]), policy.SetDSCP(dscpOut[1]), policy.SetDSCP(dscpOut[2])
	if r.Colours.Aware {
		r.Colours.In = policy.DefaultColours
	}
	return r
}

// painted returns a frame of n bytes with the DSCP of a colour. Beyond 3500 bytes it is a GSO packet of one segment.
func painted(host netip.Addr, n uint64, in policy.Colour, now uint64) ([]byte, meta) {
	m := meta{now: now}
	length := int(n)
	if n > 3500 {
		length, m.wireLen, m.segs, m.segSize = 100, uint32(n), 1, 1
	}
	if host.Is4() {
		return ether(typeIPv4, ip4{proto: protoUDP, tos: dscpIn[in] << 2, dst: host.String()}.with(udpHeader(1, 2), zeros(length-42))), m
	}
	return ether(typeIPv6, ip6{proto: protoUDP, class: dscpIn[in] << 2, dst: host.String()}.with(udpHeader(1, 2), zeros(length-62))), m
}

// colourOf returns the colour that a packet has got, and checks that nothing else of it has changed.
func colourOf(tb testing.TB, before, after []byte) policy.Colour {
	tb.Helper()
	class := after[15]
	if before[14]>>4 == 6 {
		class = after[14]<<4 | after[15]>>4
	} else if onesSum(after[14:34]) != 0xffff {
		tb.Errorf("wrong checksum in %x", after)
	}
	for c, dscp := range dscpOut {
		if class>>2 != dscp {
			continue
		}
		same := bytes.Clone(after)
		copy(same[14:16], before[14:16])
		if before[14]>>4 == 4 {
			copy(same[24:26], before[24:26])
		}
		if !bytes.Equal(before, same) {
			tb.Errorf("packet\n%x became\n%x", before, after)
		}
		return policy.Colour(c)
	}
	tb.Fatalf("class %#x in %x", class, after)
	return 0
}

// A colouredRig is a rule with colours, and its model by key.
type colouredRig struct {
	*rig
	entry maps.Entry
	model *model.Coloured
	pairs map[netip.Addr]*model.Pair
	count [3]uint64 // bytes by colour
}

func (r *colouredRig) pair(host netip.Addr) *model.Pair {
	if r.entry.Each.Kind == policy.EachAll {
		host = netip.Addr{}
	}
	if r.pairs[host] == nil {
		r.pairs[host] = &model.Pair{}
	}
	return r.pairs[host]
}

// offer sends a packet through the program, and compares its colour with that of the model.
func (r *colouredRig) offer(host netip.Addr, now, n uint64, in policy.Colour) policy.Colour {
	r.Helper()
	before, m := painted(host, n, in, now)
	verdict, after := send(r, r.program(), before, m)
	if verdict != next {
		r.Fatalf("verdict %d", verdict)
	}
	pair := r.pair(host)
	was := *pair
	got, want := colourOf(r, before, after), r.model.Offer(pair, now, n, in)
	if got != want {
		r.Fatalf("%d bytes to %v at %d ns, in %v: %v, want %v (levels %+v)", n, host, now, in, got, want, r.model.Levels(was, now))
	}
	r.count[got] += n
	return got
}

func TestColoursAsInModel(t *testing.T) {
	seed := testenv.Seed(t)
	hosts := []netip.Addr{addr("10.9.9.1"), addr("10.9.9.2"), addr("10.9.77.1")}
	hosts6 := []netip.Addr{addr("2001:db8:1::1"), addr("2001:db8:1::2")}
	for i, algorithm := range coloured {
		r := newRig(t, maps.Size{Rules: 8, Buckets: 1 << 10, Colours: true}, egress())
		for _, aware := range []bool{false, true} {
			for _, each := range []policy.EachKind{policy.EachAll, policy.EachHost} {
				for j, hosts := range [][]netip.Addr{hosts, hosts6} {
					t.Run(fmt.Sprintf("%v/%v/%v/%d", algorithm, aware, policy.Each{Kind: each}, j), func(t *testing.T) {
						r.TB = t
						random := rand.New(rand.NewPCG(seed, uint64(i*100+j)))
						rule := policy.Rule{
							Prefix: prefix([]string{"10.0.0.0/8", "2001:db8:1::/48"}[j]), Rate: 3_000_000, Capacity: 20_000,
							Algorithm: algorithm, Each: policy.Each{Kind: each}, Colours: policy.Colours{Aware: aware},
						}
						switch algorithm {
						case policy.TRTCM:
							rule.Colours.PIR, rule.Colours.PBS = 6_000_000, 30_000
						case policy.RFC4115:
							rule.Colours.EIR, rule.Colours.EBS = 2_000_000, 10_000
						case policy.SRTCM:
							rule.Colours.EBS = 10_000
						}
						now := uint64(time.Hour)
						r.set.Delete(rule.Prefix)
						c := &colouredRig{rig: r, entry: r.put(inColours(rule), now), pairs: map[netip.Addr]*model.Pair{}}
						c.model = model.NewColoured(c.entry.Rule)
						for range 2000 {
							switch random.IntN(4) {
							case 0:
								now += random.Uint64N(uint64(5 * time.Millisecond))
							case 1:
								now += random.Uint64N(uint64(100 * time.Microsecond))
							case 2:
								now += random.Uint64N(uint64(time.Millisecond))
							}
							if random.IntN(200) == 0 {
								now += random.Uint64N(uint64(time.Minute))
							}
							size := 64 + random.Uint64N(1451)
							if random.IntN(20) == 0 {
								size = 64 + random.Uint64N(30000)
							}
							c.offer(hosts[random.IntN(len(hosts))], now, size, policy.Colour(random.IntN(3)))
						}
						for colour, bytes := range c.count {
							if bytes == 0 {
								t.Errorf("no packet is %v", policy.Colour(colour))
							}
						}
						counters := r.set.Store.Counters(c.entry.ID)
						if got := [3]uint64{counters.GreenBytes, counters.YellowBytes, counters.RedBytes}; got != c.count {
							t.Errorf("bytes by colour %v, want %v", got, c.count)
						}
						if counters.ContendedPackets+counters.SpilledPackets+counters.DroppedPackets > 0 {
							t.Errorf("counters %+v", counters)
						}
					})
				}
			}
		}
	}
}

// The program gives packets the colours of DPDK's meters.
func TestColoursAsInDPDK(t *testing.T) {
	t.Parallel()
	seed := testenv.Seed(t)
	meters := rtemeter.Start(t)
	random := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, maps.Size{Rules: 8, Colours: true}, egress())
	host := addr("10.9.9.9")
	now := uint64(time.Hour)
	for range testenv.Rounds(t, 200) {
		trace := meters.Trace(random, coloured[random.IntN(3)], random.IntN(2) == 0, 40)
		rule := inColours(trace.Rule)
		rule.Prefix = prefix("10.0.0.0/8")
		r.set.Delete(rule.Prefix)
		r.put(rule, now)
		for i, p := range trace.Packets {
			before, m := painted(host, max(p.Bytes, 42), p.In, now+p.Time)
			_, after := send(t, r.program(), before, m)
			if got := colourOf(t, before, after); got != p.Colour {
				t.Fatalf("%+v: packet %d, %+v, is %v", rule, i, p, got)
			}
		}
		now += trace.Packets[len(trace.Packets)-1].Time + uint64(time.Hour)
	}
}

// Both buckets keep their room through changes at once, and through changes that begin at a moment and last or revert.
func TestColoursThroughChanges(t *testing.T) {
	t.Parallel()
	seed := testenv.Seed(t)
	hosts := []netip.Addr{addr("10.9.9.1"), addr("10.9.9.2")}
	for _, each := range []policy.EachKind{policy.EachAll, policy.EachHost} {
		t.Run(policy.Each{Kind: each}.String(), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, uint64(each)))
			r := newRig(t, maps.Size{Rules: 8, Buckets: 1 << 10, Colours: true}, egress())
			now := uint64(time.Hour)
			rule := func() policy.Rule {
				rate := func() policy.Rate { return policy.Rate(1_000_000 + random.Uint64N(9_000_000)) }
				burst := func() uint64 { return 1514 + random.Uint64N(30_000) }
				out := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: rate(), Capacity: burst(), Each: policy.Each{Kind: each}}
				switch random.IntN(3) {
				case 0:
					out.Algorithm, out.Colours.EBS = policy.SRTCM, burst()
				case 1:
					out.Algorithm, out.Colours.PIR, out.Colours.PBS = policy.TRTCM, out.Rate+rate(), burst()
				default:
					out.Algorithm, out.Colours.EIR, out.Colours.EBS = policy.RFC4115, rate(), burst()
				}
				return inColours(out)
			}
			plain := rule()
			plain.Algorithm, plain.Capacity, plain.Colours = policy.Leaky, 1514, policy.Colours{}
			plain.Penalty = policy.Penalty{Kind: policy.PenaltyHold, Duration: 50 * time.Millisecond}
			c := &colouredRig{rig: r, entry: r.put(plain, now), pairs: map[netip.Addr]*model.Pair{}}
			limit := model.NewLimit(plain)
			for _, host := range append(hosts, hosts...) { // keys have slots, and a penalty, before the rule has colours
				frame, m := painted(host, 1000, policy.Green, now)
				send(t, r.program(), frame, m)
				limit.Offer(&c.pair(host).First, nil, false, model.Packet{Time: now, Bytes: 1000})
			}
			c.entry = r.put(rule(), now)
			c.model = model.NewColoured(c.entry.Rule)
			c.model.First.Succeed(limit.Meter, now)
			c.model.Second.Succeed(model.Meter{}, now)
			// With another algorithm, a second bucket begins without room.
			become := func(rule policy.Rule, at uint64) {
				old := c.model
				c.entry.Rule, c.model = rule, model.NewColoured(rule)
				c.model.First.Succeed(old.First, at)
				if c.model.Kind == old.Kind {
					c.model.Second.Succeed(old.Second, at)
					return
				}
				c.model.Second.Succeed(model.Meter{}, at)
				for _, p := range c.pairs {
					p.Second = model.Bucket{}
				}
			}
			offer := func() {
				now += random.Uint64N(uint64(400 * time.Microsecond))
				host := hosts[random.IntN(2)]
				c.offer(host, now, 64+random.Uint64N(1451), policy.Green)
			}
			for range testenv.Rounds(t, 60) {
				for range random.IntN(30) {
					offer()
				}
				before, after := c.entry.Rule, rule()
				if random.IntN(3) == 0 {
					r.put(after, now)
					become(after, now)
					continue
				}
				r.at(now)
				r.prepare(after)
				from, until := now+uint64(5*time.Millisecond), uint64(maps.Never)
				if random.IntN(2) == 0 {
					until = from + uint64(5*time.Millisecond)
				}
				r.set.Store.Time(from, until)
				testenv.Must(t, r.set.Store.Arm())
				for now+uint64(time.Millisecond) < from {
					offer()
				}
				now = from
				r.at(now)
				r.set.Store.Commit()
				become(after, from)
				if until == maps.Never {
					continue
				}
				for now+uint64(time.Millisecond) < until {
					offer()
				}
				if random.IntN(2) == 0 {
					testenv.Must(t, r.set.Store.Confirm())
					continue
				}
				now = until
				become(before, until)
				for range random.IntN(10) {
					offer()
				}
				r.at(now)
				r.set.Store.Finish()
			}
		})
	}
}

// However a rule changes between the algorithms, and back, over no window passes more than the rates in force and a burst allow.
func TestChangesOfColoursGiveNoRoom(t *testing.T) {
	t.Parallel()
	plain := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8e6, Capacity: 20_000}
	srtcm, trtcm := plain, plain
	srtcm.Algorithm, srtcm.Colours = policy.SRTCM, policy.Colours{EBS: 10_000, Green: policy.ActionPass, Yellow: policy.ActionPass, Red: policy.ActionDrop}
	trtcm.Algorithm, trtcm.Colours = policy.TRTCM, srtcm.Colours
	trtcm.Colours.EBS, trtcm.Colours.PIR, trtcm.Colours.PBS = 0, 16e6, 30_000
	leaky := plain
	leaky.Algorithm, leaky.Penalty = policy.Leaky, policy.Penalty{Kind: policy.PenaltyHold, Duration: 50 * time.Millisecond}
	rules := []policy.Rule{plain, leaky, srtcm, trtcm, byColour(plain, 4e6, 10_000)}
	rates, bursts := []float64{8e6, 8e6, 8e6, 16e6, 12e6}, []float64{20_000, 20_000, 30_000, 30_000, 30_000} // of all that passes
	for _, each := range []policy.EachKind{policy.EachAll, policy.EachHost} {
		t.Run(policy.Each{Kind: each}.String(), func(t *testing.T) {
			random := rand.New(rand.NewPCG(testenv.Seed(t), uint64(each)))
			r := newRig(t, maps.Size{Rules: 8, Buckets: 64, Colours: true}, egress())
			now, in := uint64(time.Hour), 0
			net, least := 0.0, 0.0 // passed bytes less those of the rates; the least of net and burst of all beginnings
			become := func(to int) { in, least = to, min(least, net+bursts[to]) }
			offer := func(until uint64) {
				for flood := random.IntN(3) > 0; now < until; {
					next := min(until, now+50_000+random.Uint64N(100_000))
					if !flood {
						next = until
					}
					net -= rates[in] / 8e9 * float64(next-now)
					now, least = next, min(least, net+bursts[in])
					if now == until {
						break
					}
					frame, m := painted(addr("10.1.1.1"), 1000, policy.Green, now)
					if verdict, _ := send(t, r.program(), frame, m); verdict != drop {
						net += 1000
					}
					if net > least+1001 {
						t.Fatalf("%.0f bytes more than the rates and a burst passed, at last by %v", net-least, rules[in].Algorithm)
					}
				}
			}
			soon := func() uint64 { return now + uint64(6*time.Millisecond) + random.Uint64N(uint64(40*time.Millisecond)) }
			for i := range rules {
				rules[i].Each.Kind = each
			}
			r.put(rules[0], now)
			least = bursts[0]
			for range testenv.Rounds(t, 40) {
				offer(soon())
				before, after := in, random.IntN(len(rules))
				how := random.IntN(4)
				if how == 0 {
					r.put(rules[after], now)
					become(after)
					continue
				}
				r.at(now)
				r.prepare(rules[after])
				from := now + uint64(5*time.Millisecond)
				until := from + uint64(60*time.Millisecond)
				r.set.Store.Time(from, until)
				testenv.Must(t, r.set.Store.Arm())
				offer(from)
				become(after)
				offer(soon())
				r.at(now)
				switch how {
				case 1:
					testenv.Must(t, r.set.Store.Confirm())
					continue
				case 2: // rolled back
					until = now + uint64(5*time.Millisecond)
					r.set.Store.TimeRevert(until)
					testenv.Must(t, r.set.Store.Revert(until))
				}
				offer(until)
				become(before)
				offer(soon())
				r.at(now)
				r.set.Store.Finish()
			}
		})
	}
}

// byColour makes a rule rfc4115: green and yellow packets pass.
func byColour(r policy.Rule, eir policy.Rate, ebs uint64) policy.Rule {
	r.Algorithm = policy.RFC4115
	r.Colours = policy.Colours{EIR: eir, EBS: ebs, Green: policy.ActionPass, Yellow: policy.ActionPass, Red: policy.ActionDrop}
	return r
}

// paint sends packets of 1000 bytes to a host at one moment, and returns how many got each colour.
func (r *rig) paint(e maps.Entry, host netip.Addr, count int, now uint64) (green, yellow, red uint64) {
	r.Helper()
	before := r.set.Store.Counters(e.ID)
	for range count {
		frame, m := painted(host, 1000, policy.Green, now)
		send(r, r.program(), frame, m)
	}
	after := r.set.Store.Counters(e.ID)
	return after.GreenPackets - before.GreenPackets, after.YellowPackets - before.YellowPackets, after.RedPackets - before.RedPackets
}

// A shadow goes by the DSCP with which a packet came in, not by that which the rule gave it.
func TestColouredShadow(t *testing.T) {
	now := uint64(time.Hour)
	r := newRig(t, maps.Size{Rules: 8, Colours: true, Affected: 16}, egress())
	rule := byColour(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8e6, Capacity: 2000}, 8e6, 1000)
	rule.Colours.Aware, rule.Colours.In, rule.Colours.Green = true, policy.DefaultColours, 14 // which comes in red
	rule.Shadow = policy.Shadow{Rate: rule.Rate, Capacity: rule.Capacity, EIR: rule.Colours.EIR, EBS: rule.Colours.EBS}
	e := r.put(rule, now)
	r.paint(e, addr("10.1.1.1"), 4, now)
	shadow, _ := r.set.Store.Shadow(e)
	c := r.set.Store.Counters(shadow.ID)
	if c.GreenPackets != 2 || c.YellowPackets != 1 || c.RedPackets != 1 || c.ExcessPackets != 2 {
		t.Errorf("the same limit counts %+v", c)
	}
}

// What a shadow would have dropped is what its colours say, also of packets that do not allow marks.
func TestColouredShadowDrops(t *testing.T) {
	now := uint64(time.Hour)
	r := newRig(t, maps.Size{Rules: 8, Colours: true, Affected: 16}, egress())
	rule := byColour(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8e6, Capacity: 2000}, 8e6, 1000)
	rule.Colours.Yellow, rule.Colours.Red = policy.ActionECN, policy.ActionPass
	rule.Shadow = policy.Shadow{Rate: rule.Rate, Capacity: rule.Capacity, EIR: rule.Colours.EIR, EBS: 3000}
	e := r.put(rule, now)
	r.paint(e, addr("10.1.1.1"), 7, now)
	shadow, _ := r.set.Store.Shadow(e)
	if c := r.set.Store.Counters(shadow.ID); c.PassedPackets != 4 || c.DroppedPackets != 3 || c.ExcessPackets != 5 || c.GreenPackets != 2 {
		t.Errorf("2 green packets pass, 3 yellow ones allow no mark, and 2 red ones pass: %+v", c)
	}
}

// A second limit that gets the id of an earlier one finds none of its buckets. In the smaller store, that id is 0.
func TestSecondLimitsBeginAnew(t *testing.T) {
	for _, rules := range []uint32{2, 4} {
		now, host := uint64(time.Hour), addr("10.1.1.1")
		r := newRig(t, maps.Size{Rules: rules, Buckets: 64, Colours: true}, egress())
		plain := policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: 8e6, Capacity: 20_000, Each: policy.Each{Kind: policy.EachHost}}
		r.put(policy.Rule{Prefix: prefix("10.2.0.0/16"), Rate: 8e6, Capacity: 20_000}, now)
		r.put(plain, now)
		r.set.Delete(prefix("10.2.0.0/16"))
		e := r.put(byColour(plain, 800e6, 20_000), now)
		now += uint64(time.Millisecond)
		r.paint(e, host, 40, now)
		r.put(plain, now)
		e = r.put(byColour(plain, 8000, 20_000), now)
		now += uint64(10 * time.Second)
		if green, yellow, red := r.paint(e, host, 50, now); green != 20 || yellow != 10 || red != 20 {
			t.Errorf("%d rules: %d green packets, %d yellow, %d red", rules, green, yellow, red)
		}
		l := r.set.Store.State(e, policy.MatchDst, maps.Flow{Src: addr("10.9.9.9"), Dst: host, Proto: 17}, now)
		if model.Bytes(l.Level) != 20_000 || model.Bytes(l.Second) != 20_000 {
			t.Errorf("%d rules: levels %+v", rules, l)
		}
		shown := func(first, second uint64) {
			t.Helper()
			var all []maps.Bucket
			for _, b := range r.set.Store.Buckets([]maps.Entry{e}, func() uint64 { return now }) {
				if b.Subnet.Addr() == host {
					all = append(all, b)
				}
			}
			if len(all) != 1 || all[0].LevelBytes != first || all[0].SecondBytes != second {
				t.Errorf("%d rules: buckets %+v, want levels %d and %d", rules, all, first, second)
			}
		}
		shown(20_000, 20_000)
		// Other keys, which fill the table, do not get the slot of E while that drains, which takes 20 s. C has a new one.
		now += uint64(time.Second)
		for i := range 100 {
			r.paint(e, addr(fmt.Sprintf("10.1.2.%d", i)), 1, now)
		}
		now += uint64(10 * time.Millisecond)
		shown(0, 18_990)
		if green, yellow, red := r.paint(e, host, 30, now); green != 20 || yellow != 1 || red != 9 {
			t.Errorf("%d rules, 1 s later: %d green packets, %d yellow, %d red", rules, green, yellow, red)
		}
	}
}

// Packets that a rule counted before it had colours have none.
func TestCountersBeginWithColours(t *testing.T) {
	now := uint64(time.Hour)
	r := newRig(t, maps.Size{Rules: 4, Colours: true}, egress())
	plain := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 3000}
	e := r.put(plain, now)
	r.paint(e, addr("10.1.1.1"), 10, now)
	e = r.put(byColour(plain, 8000, 2000), now)
	if green, yellow, red := r.paint(e, addr("10.1.1.1"), 10, now+uint64(3*time.Second)); green != 3 || yellow != 2 || red != 5 {
		t.Errorf("%d green packets, %d yellow, %d red", green, yellow, red)
	}
	if c := r.set.Store.Counters(e.ID); c.GreenPackets != 3 || c.PassedPackets != 8 || c.DroppedPackets != 12 {
		t.Errorf("%+v", c)
	}
}

// Packets that a rule counts while it has other colours, or none, have no colour after a revert, and excess packets stay so.
func TestCountersThroughReverts(t *testing.T) {
	plain := policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 3000}
	start, unlimited, srtcm := byColour(plain, 8000, 2000), plain, plain
	unlimited.Rate, unlimited.Capacity = policy.Unlimited, 0
	srtcm.Algorithm, srtcm.Colours.EBS = policy.SRTCM, 4000
	for name, middle := range map[string]policy.Rule{"gcra": plain, "unlimited": unlimited, "srtcm": inColours(srtcm)} {
		for _, end := range []string{"reverts", "is rolled back", "is rolled back once confirmed"} {
			t.Run(name+" "+end, func(t *testing.T) {
				now := uint64(time.Hour)
				r := newRig(t, maps.Size{Rules: 4, Colours: true}, egress())
				e := r.put(start, now)
				var excess uint64
				send := func() {
					t.Helper()
					r.paint(e, addr("10.1.1.1"), 10, now)
					c := r.set.Store.Counters(e.ID)
					if c.ExcessPackets < excess || c.ExcessPackets > c.PassedPackets+c.DroppedPackets {
						t.Errorf("%d excess packets after %d", c.ExcessPackets, excess)
					}
					excess = c.ExcessPackets
				}
				send()
				r.at(now)
				r.prepare(middle)
				from, until := now+uint64(5*time.Millisecond), uint64(maps.Never)
				if end != "is rolled back" {
					until = from + uint64(time.Second)
				}
				r.set.Store.Time(from, until)
				testenv.Must(t, r.set.Store.Arm())
				now = from
				r.at(now)
				r.set.Store.Commit()
				send()
				if end == "is rolled back once confirmed" {
					testenv.Must(t, r.set.Store.Confirm())
					until = maps.Never
					send()
				}
				if until == maps.Never {
					until = now + uint64(5*time.Millisecond)
					r.set.Store.TimeRevert(until)
					testenv.Must(t, r.set.Store.Revert(until))
					send()
				}
				now = until + uint64(10*time.Second)
				r.at(now)
				send()
				for _, when := range []string{"reverted", "finished"} {
					if c := r.set.Store.Counters(e.ID); c.GreenPackets != 6 || c.YellowPackets != 4 || c.RedPackets != 10 || c.GreenBytes != 6000 {
						t.Errorf("once it is %s: %+v", when, c)
					}
					r.set.Store.Finish()
				}
			})
		}
	}
}

// Buckets move to make room for others. So few keys spill in a table that is 88 % full: each has two.
func TestColouredKeysMove(t *testing.T) {
	now := uint64(time.Hour)
	r := newRig(t, maps.Size{Rules: 4, Buckets: 1024, Colours: true}, egress())
	e := r.put(byColour(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 2000, Each: policy.Each{Kind: policy.EachHost}}, 8000, 2000), now)
	host := func(i int) netip.Addr { return addr(fmt.Sprintf("10.1.%d.%d", i/256, i%256)) }
	spilled := func() uint64 { return r.set.Store.Counters(e.ID).SpilledPackets }
	var without [450]bool // a slot, for some of its packets
	for i := range without {
		before := spilled()
		r.paint(e, host(i), 3, now)
		without[i] = spilled() > before
	}
	before := spilled()
	if before > 100 { // 0 to 40; without moves, 250 to 460
		t.Errorf("%d packets of 1350 spilled", before)
	}
	// Wherever the two buckets of a host are, they have one packet of yellow left.
	for i := range without {
		green, yellow, red := r.paint(e, host(i), 2, now)
		if !without[i] && (green != 0 || yellow != 1 || red != 1 || spilled() != before) {
			t.Errorf("%v: %d green packets, %d yellow, %d red, %d spilled", host(i), green, yellow, red, spilled()-before)
		}
		before = spilled()
	}
}

// Listeners are told of red packets, and of others that are dropped, with what happened to the packet.
func TestEventsOfColours(t *testing.T) {
	for _, c := range []struct {
		yellow, red policy.Action
		packets     int // of 1000 bytes: two are green, then one is yellow
		want        string
	}{
		{policy.ActionPass, policy.ActionDrop, 3, ""},
		{policy.ActionPass, policy.ActionDrop, 4, "dropped"},
		{policy.ActionDrop, policy.ActionPass, 3, "dropped"},
		{policy.ActionECN, policy.ActionPass, 3, "dropped"}, // the packets do not allow marks
		{policy.ActionPass, policy.ActionECN, 4, "dropped"},
		{12, 14, 4, "passed"},
	} {
		r := newRig(t, maps.Size{Rules: 8, Colours: true}, egress())
		rule := byColour(policy.Rule{Prefix: prefix("10.0.0.0/8"), Rate: 8000, Capacity: 2000}, 8000, 1000)
		rule.Colours.Yellow, rule.Colours.Red = c.yellow, c.red
		e := r.put(rule, start)
		l := r.listen(start, 100, allEvents...)
		r.paint(e, addr("10.1.1.1"), c.packets, start)
		var want []string
		if c.want != "" {
			want = []string{"overflow 10.0.0.0/8 " + c.want + " 10.0.0.0/8"}
		}
		if got := r.told(l); !slices.Equal(got, want) {
			t.Errorf("yellow %v, red %v, %d packets: told %q, want %q", c.yellow, c.red, c.packets, got, want)
		}
	}
}

// Where a program cannot call the next one, a packet has the verdict of --fail, and counts as contended.
func TestFailedTailCall(t *testing.T) {
	for _, fail := range []policy.Fail{policy.Open, policy.Closed} {
		t.Run(fmt.Sprint(fail), func(t *testing.T) {
			r := newRig(t, maps.Size{Rules: 4, Colours: true}, egress())
			plain := policy.Rule{Prefix: prefix("10.1.0.0/16"), Rate: 8000, Capacity: 2000, Fail: fail}
			with := plain
			with.Prefix, with.Algorithm, with.Colours.EBS = prefix("10.0.0.0/16"), policy.SRTCM, 2000
			rules, p := []maps.Entry{r.put(inColours(with), 1e9), r.put(plain, 1e9)}, r.program()
			testenv.Must(t, r.set.Store.Replacements()[bpf.ShapectlMapPrograms].Delete(r.set.Store.Hook().Kind))
			want, at := next, func(c maps.Counters) uint64 { return c.PassedPackets }
			if fail == policy.Closed {
				want, at = drop, func(c maps.Counters) uint64 { return c.DroppedPackets }
			}
			for _, e := range rules {
				frame := ether(typeIPv4, ip4{proto: protoUDP, dst: e.Prefix.Addr().Next().String()}.with(udpHeader(1, 2), zeros(958)))
				if verdict, _ := send(t, p, frame, meta{now: 1e9, segs: 2, segSize: 500}); verdict != want {
					t.Errorf("%v: verdict %#x", e.Prefix, verdict)
				}
				if c := r.set.Store.Counters(e.ID); at(c) != 2 || c.ContendedPackets != 2 {
					t.Errorf("%v: counted %+v", e.Prefix, c)
				}
			}
		})
	}
}
