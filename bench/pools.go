package main

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite pools measures pools and fair shares: what they cost, and who gets how much.

// pools measures on this machine, without delay.
func pools() { sharing("without delay", 0) }

// guestPools measures in the guest.
func guestPools() {
	chains()
	oracle()
	sharing("20 ms round trip", roundTrip, htbCoDel, isolatingCAKE)
}

var flowShare, memberShare = policy.Share{Kind: policy.ShareFlow}, policy.Share{Kind: policy.ShareMember}

// chains measures the instructions of a packet through a rule with nested pools above it.
func chains() {
	countingInstructions(func() {
		alone := samplesOf(newLane(bare, limit{}, addressOf(0), counted))
		for _, n := range unlessQuick([]int{0, 1, 2, 4, 8}, []int{0, 1}) {
			for _, c := range []struct {
				name, note     string
				lowest, others policy.Share // of the lowest pool, or of the rule if there are no pools, and of the others
			}{
				{name: "shapectl"}, {name: "shapectl, share flow", lowest: flowShare},
				{name: "HTB", note: "a class for each pool and for the rule; at most 8 levels"},
				{name: "shapectl, share member", lowest: memberShare, others: memberShare},
			} {
				if n == 0 && c.lowest == memberShare || n == 8 && c.name == "HTB" {
					continue
				}
				chain := &tree{rate: ample.rate}
				if n == 0 {
					chain.share = c.lowest
				}
				for i := range n {
					chain = &tree{rate: ample.rate, share: c.others, members: []*tree{chain}}
					if i == 0 {
						chain.share = c.lowest
					}
				}
				set := func(a *arena, _ limit) { chain.put(a) }
				if c.name == "HTB" {
					set = func(a *arena, _ limit) { a.tc(chain.htb()) }
				}
				newLane(limiter{name: c.name, note: c.note, set: set}, ample, addressOf(0), counted).
					added(fmt.Sprintf("Instructions added per packet, by the number of pools above its rule: %d", n), alone)
			}
		}
	})
}

// HTB as an oracle: a hundred subscribers of four access points in one uplink send UDP through pools, and through HTB
// with the same tree. HTB divides among subscribers what the uplink has beyond the guarantees of access points, and
// shapectl among access points. In these loads that is the same.

const (
	uplinkRate  = 20_000_000
	subscribers = 100
	sites       = 4
	// partRate is a subscriber's part if all send much.
	partRate = uplinkRate / subscribers
)

// A load changes the tree and what subscribers send.
type load struct {
	name string
	site func(i int, t *tree)
	home func(i int, t *tree)
}

// even changes every second subscriber.
func even(change func(*tree)) func(i int, t *tree) {
	return func(i int, t *tree) {
		if i%2 == 0 {
			change(t)
		}
	}
}

var loads = []load{
	{name: "half send little", home: even(func(t *tree) { t.quarters = 2 })},
	{name: "an access point sends nothing", home: func(i int, t *tree) {
		if i < subscribers/sites {
			t.quarters = 0
		}
	}},
	{name: "access points are full", site: func(i int, t *tree) {
		t.rate = policy.Rate(10-i) * uplinkRate / 40
		t.guarantee = policy.Guarantee(t.rate)
	}},
	{name: "access points have guarantees", site: func(i int, t *tree) { t.guarantee = policy.Guarantee(i+1) * uplinkRate / 10 }},
	{name: "half have a guarantee", home: even(func(t *tree) { t.guarantee = partRate })},
	{name: "half have a low rate", home: even(func(t *tree) { t.rate = partRate / 4 })},
	{name: "weights 1, 2 and 4", home: func(i int, t *tree) { t.weight = []policy.Weight{0, 2, 4}[i%3] }},
}

// tree returns the tree of a load.
func (l load) tree() *tree {
	uplink := &tree{rate: uplinkRate, share: memberShare}
	for i := range sites {
		site := &tree{rate: uplinkRate / 2, guarantee: uplinkRate / sites, share: memberShare}
		if l.site != nil {
			l.site(i, site)
		}
		for k := range subscribers / sites {
			home := &tree{rate: uplinkRate / 4, quarters: 8 + k%5}
			if l.home != nil {
				l.home(i*subscribers/sites+k, home)
			}
			site.members = append(site.members, home)
		}
		uplink.members = append(uplink.members, site)
	}
	return uplink
}

// oracle compares shares with those of HTB, under each load at the same time.
func oracle() {
	settle, part := unlessQuick(8*time.Second, time.Second/2), unlessQuick(20*time.Second, time.Second/2)
	for _, l := range unlessQuick(loads, loads[:1]) {
		t, name := l.tree(), "100 subscribers beside HTB with the same tree: "+l.name
		var ours, htb window
		together(
			func() { ours = t.carry(settle, part, t.put) },
			func() { htb = t.carry(settle, part, func(a *arena) { a.tc(t.htb()) }) })
		off := differences(ours.bytes, htb.bytes)
		add(name, "shapectl", "% off HTB's", "", off[len(off)-1])
		add(name, "shapectl", "median, % off HTB's", "", quantile(off, 0.5))
		add(name, "shapectl", "total, % of the rate", "", ours.part(uplinkRate))
		add(name, "HTB", "total, % of the rate", "", htb.part(uplinkRate))
	}
}

// differences are those of bytes from other bytes, in %, sorted: 100 of those from nothing. It leaves out who got nothing
// from both.
func differences(bytes, others []uint64) (off []float64) {
	for i, b := range bytes {
		switch {
		case others[i] > 0:
			off = append(off, 100*math.Abs(float64(b)/float64(others[i])-1))
		case b > 0:
			off = append(off, 100)
		}
	}
	slices.Sort(off)
	return off
}

// carry sends what the subscribers send through a limiter, and returns what arrives of each.
func (t *tree) carry(settle, part time.Duration, set func(*arena)) (w window) {
	a := newArena()
	defer a.Close()
	arrived := a.count(subscribers, "count_drop")
	set(a)
	var targets []netip.Addr
	for i := range subscribers {
		home := t.members[i*sites/subscribers].members[i%(subscribers/sites)]
		targets = append(targets, slices.Repeat([]netip.Addr{addressOf(i)}, home.quarters)...)
	}
	newRandom().Shuffle(len(targets), func(i, k int) { targets[i], targets[k] = targets[k], targets[i] })
	a.newSender(a.near, floodPayload, targets...).flooding(policy.Rate(len(targets)*partRate/4), func() {
		w = arrived.windows(settle, part, 1)[0]
	})
	return w
}

// Three senders in one rate: TCP with Cubic, TCP with BBR, and UDP that sends twice the rate. Each has an address.
var senders = []netip.Addr{addressOf(0), addressOf(1), addressOf(2)}

// htbOfThree has a class for each sender, with a queue as long as shapectl's burst for its part.
var htbOfThree = limiter{
	name: "HTB, a class each", note: "each class has a third of the rate, and borrows",
	set: func(a *arena, l limit) {
		t := tree{rate: l.rate}
		for range senders {
			t.members = append(t.members, &tree{rate: l.rate, guarantee: policy.Guarantee(l.rate) / policy.Guarantee(len(senders))})
		}
		a.tc(t.htb())
	},
}

// sharing sends the three senders through each limiter at each rate. Not every machine has the others.
func sharing(table string, roundTrip time.Duration, others ...limiter) {
	subjects := append([]limiter{
		shaping("share flow", policy.Limit{Share: flowShare}), shaping("no share", policy.Limit{}), htbOfThree,
	}, others...)
	rates := []policy.Rate{20e6, 100e6, 500e6}
	for _, rate := range unlessQuick(rates, rates[:1]) {
		for _, s := range subjects {
			name := fmt.Sprintf("Cubic, BBR and UDP, %s: %v", table, rate)
			for _, w := range share(s, rate, roundTrip) {
				total, worst := w.total(), 0.0
				for _, bytes := range w.bytes {
					worst = max(worst, math.Abs(float64(bytes)/total*float64(len(w.bytes))-1))
				}
				add(name, s.name, "worst, % off a third", s.note, 100*worst)
				for i, unit := range []string{"cubic, %", "bbr, %", "udp, %"} {
					add(name, s.name, unit, s.note, 100*float64(w.bytes[i])/total)
				}
				add(name, s.name, "total, % of the rate", s.note, w.part(rate))
			}
		}
	}
}

// share returns the bytes of each of the three senders that pass a limiter, in several windows.
func share(s limiter, rate policy.Rate, roundTrip time.Duration) (windows []window) {
	a := newPath(roundTrip)
	defer a.Close()
	// The far end accepts packets to all addresses of the rules, and UDP.
	ip(a.far, fmt.Sprintf("route add local %v dev far\n", everything))
	check(unix.Bind(a.socket(a.far, unix.AF_INET, unix.SOCK_DGRAM, 0), &unix.SockaddrInet4{Port: farPort}))
	arrived := a.count(len(senders), "count_pass")
	udp := a.newSender(a.source, floodPayload, senders[2])
	s.set(a, limit{rate, policy.DefaultCapacity(rate)})
	tcp := a.open(a.source, senders[:2]...)
	defer tcp.close()
	for i, control := range []string{"cubic", "bbr"} {
		tcp[i].control(control)
		tcp[i].fill()
	}
	udp.flooding(2*rate, func() {
		windows = arrived.windows(unlessQuick(4*time.Second, time.Second/2), unlessQuick(3*time.Second, time.Second/5), rounds(5))
	})
	return windows
}
