package model

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// reno makes a rule send as TCP NewReno does: packets of segmentation offload at 1 Gbit/s, up to a window in each round trip.
func (p *party) reno(rtt float64) {
	const mss, least, line, timeout = 1514, 2 * 1514, 8, 200e6 // bytes, bytes, ns a byte, ns
	window, threshold, inFlight, lost := 10.0*mss, 1e9, 0.0, 0.0
	p.size = 5 * mss
	p.pace = func(passes bool) (gap float64) {
		size := float64(p.size)
		if inFlight += size; !passes {
			lost += size
		}
		gap = size * line
		if inFlight >= window {
			gap = rtt
			switch {
			case lost == inFlight:
				threshold, window, gap = max(window/2, least), mss, timeout
			case lost > 0:
				window = max(window*.7, least)
				threshold, gap = window, 2*rtt
			case window < threshold:
				window *= 2
			default:
				window += mss
			}
			inFlight, lost = 0, 0
		}
		p.size = uint64(max(mss, min(65226, window-inFlight, window/2)))
		return gap
	}
}

// constant makes a rule send packets of one size at a rate in bytes/s.
func (p *party) constant(random *rand.Rand, size, rate float64) {
	p.size = uint64(size)
	p.pace = func(bool) float64 { return size / rate * 1e9 * (0.7 + 0.6*random.Float64()) }
}

// bursts makes a rule send for a time in ns, and then be idle for as long, again and again.
func (p *party) bursts(ns float64) {
	pace, sent := p.pace, 0.0
	p.pace = func(passes bool) (gap float64) {
		gap = pace(passes)
		if sent += gap; sent > ns {
			gap, sent = gap+ns, 0
		}
		return gap
	}
}

// exchange lets the rules of a tree send until a time (ns). Each packet of a flood is of a new flow.
func (p *party) exchange(random *rand.Rand, end float64, floods ...*party) {
	all := p.rules()
	for _, f := range all {
		f.next = random.Float64() * 1e8
	}
	heap.Init(&all)
	for all[0].next < end {
		f := all[0]
		if slices.Contains(floods, f) {
			f.sharer = Sharer{}
		}
		f.sent += f.size
		passes := f.offer(1e9 + uint64(f.next))
		if passes {
			f.got += f.size
		}
		f.next += f.pace(passes)
		heap.Fix(&all, 0)
	}
}

// A small flow loses nothing in a home that fills its part of a full access point beside TCP, or beside a flood of new flows
// in another home. Busy homes get the same, so the flood gets no more than its part.
func TestLightFlows(t *testing.T) {
	const rate, ms = policy.Rate(30e6), 1e6
	for _, test := range []struct {
		rtt   float64 // ns
		tcp   [2]int  // flows of each home
		flood bool    // in the second home
	}{
		{rtt: .05 * ms, tcp: [2]int{4, 4}},
		{rtt: 5 * ms, tcp: [2]int{2, 4}},
		{rtt: 20 * ms, tcp: [2]int{4, 4}},
		{rtt: 5 * ms, tcp: [2]int{4, 0}, flood: true},
	} {
		t.Run(fmt.Sprintf("%+v", test), func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(13, 0))
			ap := poolParty(rate, 0)
			flow := func(home *party) *party {
				return home.add(&party{Rule: policy.Rule{Rate: 100 * rate, Capacity: 100 << 20}})
			}
			for _, n := range test.tcp {
				home := ap.addPool(rate*5/6, 0)
				flow(home).constant(random, 242, 15e3)
				for range n {
					flow(home).reno(test.rtt)
				}
			}
			var flood *party
			if test.flood {
				flood = flow(ap.members[1])
				flood.constant(random, 1470, 6e6)
			}
			ap.start()
			ap.exchange(random, 20e9, flood)
			var got [2]float64
			for i, home := range ap.members {
				for _, f := range home.members {
					got[i] += float64(f.got)
				}
				if light := home.members[0]; light.sent-light.got > 0 && !(test.flood && i == 1) {
					t.Errorf("home %d: a small flow lost %d bytes of %d", i, light.sent-light.got, light.sent)
				}
			}
			if sum := got[0] + got[1]; math.Abs(got[0]-got[1]) > 0.05*sum || sum < 0.98*float64(rate)/8*20 {
				t.Errorf("the homes got %.0f and %.0f bytes", got[0], got[1])
			}
		})
	}
}

// A small flow loses nothing beside downloads, however large their packets are, also where the access point above is the bottleneck.
func TestLightBesideLarge(t *testing.T) {
	for _, rate := range []policy.Rate{2e6, 10.5e6, 20e6, 50e6} {
		for _, downloads := range []int{1, 4, 8, 16} {
			for _, rtt := range []float64{5e4, 1e6, 2e7} { // ns
				for _, above := range []string{"nothing", "a full access point", "one with a guarantee"} {
					t.Run(fmt.Sprintf("%v/%d downloads/%v ns/below %s", rate, downloads, rtt, above), func(t *testing.T) {
						t.Parallel()
						for seed := range uint64(testenv.Rounds(t, 1)) {
							random := rand.New(rand.NewPCG(17, seed))
							top := poolParty(rate, 0)
							home := top
							switch above {
							case "a full access point":
								home = top.addPool(rate*5/2, 0)
							case "one with a guarantee":
								home = top.addPool(rate*5/2, policy.Guarantee(rate)/10)
							}
							light := home.add(&party{Rule: policy.Rule{Rate: policy.Unlimited}})
							light.constant(random, 120, 60*120)
							for range downloads {
								home.add(&party{Rule: policy.Rule{Rate: policy.Unlimited}}).reno(rtt * (0.7 + 0.6*random.Float64()))
							}
							top.start()
							home.share.ByMember = false
							top.exchange(random, 10e9)
							if light.got < light.sent {
								t.Errorf("seed %d: %d of %d packets were lost", seed, (light.sent-light.got)/120, light.sent/120)
							}
						}
					})
				}
			}
		}
	}
}

// In a pool that is faster than the full one above, a member that offers less than its part loses next to nothing beside TCP: while
// that starts, 0.3 % of 85 %.
func TestLightInFasterPools(t *testing.T) {
	const rate = policy.Rate(100e6)
	for _, faster := range []policy.Rate{1, 5} {
		for _, load := range []float64{.4, .85} {
			for _, rtt := range []float64{5e4, 1e6, 5e6, 3e7} { // ns
				t.Run(fmt.Sprintf("%d times/%v of its part/%v ns", faster, load, rtt), func(t *testing.T) {
					t.Parallel()
					random := rand.New(rand.NewPCG(13, 0))
					uplink := poolParty(rate, 0)
					for i := range 2 {
						tower := uplink.addPool(faster*rate, 0)
						for range 3 - i {
							tower.add(&party{Rule: policy.Rule{Rate: policy.Unlimited}}).reno(rtt)
						}
					}
					light := uplink.members[0].members[0]
					light.constant(random, 1000, load*float64(rate)/8/6)
					uplink.start()
					uplink.exchange(random, 10e9)
					if lost := float64(light.sent-light.got) / float64(light.sent); lost > 0 && load < .5 || lost > 0.003 {
						t.Errorf("it lost %.2f %%", 100*lost)
					}
				})
			}
		}
	}
}

// A member that offers 80 % of its part loses nothing to a flood of new flows of the other one, whatever is between.
func TestLightFlowsTakeNoMore(t *testing.T) {
	const rate = policy.Rate(20e6)
	for _, test := range []struct {
		name     string
		homes    int
		byHost   bool // the uplink has shares by host
		between  bool // the pools of homes have no shares
		capacity uint64
	}{
		{name: "by member", homes: 1},
		{name: "by host", homes: 1, byHost: true},
		{name: "many homes in a pool without shares", homes: 20, between: true},
		{name: "many homes", homes: 20},
		{name: "bursts into a small bucket", homes: 1, capacity: 125_000},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			random := rand.New(rand.NewPCG(13, 1))
			uplink := poolParty(rate, 0)
			if test.capacity != 0 {
				uplink.Capacity = test.capacity
			}
			var floods []*party
			for i, homes := range []int{test.homes, 1} {
				ap := uplink.addPool(rate*9/10, 0)
				if test.between {
					ap.Share = policy.Share{}
				}
				for range homes {
					flow := ap.addPool(rate*8/10, 0).add(&party{Rule: policy.Rule{Rate: 100 * rate, Capacity: 100 << 20}})
					if flow.constant(random, 1470, 1e6); i == 0 {
						flow.constant(random, 1470, 5e6/float64(homes))
						floods = append(floods, flow)
						if test.capacity != 0 {
							flow.bursts(2e8)
						}
					}
				}
			}
			uplink.start()
			uplink.share.ByMember = !test.byHost
			uplink.exchange(random, 10e9, floods...)
			if b := uplink.members[1].members[0].members[0]; b.got < b.sent*99/100 {
				t.Errorf("it lost %d bytes of %d", b.sent-b.got, b.sent)
			}
		})
	}
}

// volleys makes a rule send so many packets at once.
func (p *party) volleys(n int) {
	pace, sent, wait := p.pace, 0, 0.0
	p.pace = func(passes bool) (gap float64) {
		wait += pace(passes)
		if sent++; sent%n == 0 {
			gap, wait = wait, 0
		}
		return gap
	}
}

// Where a bucket has four packets for each sharer, one that offers up to 89 % of its part loses nothing, also in bursts of
// a quarter of its part of the bucket, of which 64 KiB and 300 ms count. Floods beside it use the rest of the rate.
func TestSharesInSmallBuckets(t *testing.T) {
	const size = 1514
	for _, rate := range []policy.Rate{2e6, 10e6} {
		for _, capacity := range []uint64{8 * size, 16 * size, 41 * size, 82 * size} {
			for _, n := range []int{2, 3, 8} {
				if capacity < uint64(4*n*size) {
					continue
				}
				t.Run(fmt.Sprintf("%v/%d bytes/%d sharers", rate, capacity, n), func(t *testing.T) {
					t.Parallel()
					part := float64(rate) / 8 / float64(n)
					burst := min(float64(capacity), 64<<10, float64(rate)/8*0.3) / 4 / float64(n)
					for _, on := range []float64{0, 1e7, 5e7, 1.5e8} { // ns; 0 for a constant rate
						for _, bytes := range []float64{200, size} { // of a packet
							for _, load := range []float64{0.2, 0.89} {
								random := rand.New(rand.NewPCG(30, 0))
								p := poolParty(rate, 0)
								p.Capacity = capacity
								send := func(size, rate float64) *party {
									m := p.add(&party{Rule: policy.Rule{Rate: 1e9, Capacity: 100 << 20}})
									m.constant(random, size, rate)
									return m
								}
								light := send(bytes, load*part)
								light.volleys(int(burst / bytes))
								for range n - 1 {
									if flood := send(size, 8*part); on > 0 {
										flood.bursts(on)
									}
								}
								p.start()
								const end = 3e9
								p.exchange(random, end)
								var got uint64
								for _, m := range p.members {
									got += m.got
								}
								what := fmt.Sprintf("%v of its part in packets of %v bytes, floods for %v ns", load, bytes, on)
								if light.got < light.sent {
									t.Errorf("%s: lost %.2f %%", what, 100*float64(light.sent-light.got)/float64(light.sent))
								}
								if least := 0.98 * float64(rate) / 8e9 * (end - 1e8); on == 0 && float64(got) < least {
									t.Errorf("%s: %d bytes passed in all, want %.0f", what, got, least)
								}
							}
						}
					}
				})
			}
		}
	}
}
