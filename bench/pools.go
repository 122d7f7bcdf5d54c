package main

import (
	"fmt"
	"math"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite pools measures pools and fair shares: what they cost, and who gets how much.

// guestPools measures in the guest.
func guestPools() {
	chains()
	sharing()
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

// sharing sends the three senders through each limiter at each rate, and records how far the worst part is from a third.
func sharing() {
	subjects := []limiter{
		shaping("share flow", policy.Limit{Share: flowShare}), shaping("no share", policy.Limit{}), htbOfThree, htbCoDel, isolatingCAKE,
	}
	rates := []policy.Rate{20e6, 100e6, 500e6}
	for _, rate := range unlessQuick(rates, rates[:1]) {
		for _, s := range subjects {
			for _, w := range share(s, rate) {
				third, worst := float64(w[0]+w[1]+w[2])/3, 0.0
				for _, bytes := range w {
					worst = max(worst, math.Abs(float64(bytes)/third-1))
				}
				add(fmt.Sprintf("Cubic, BBR and UDP, 20 ms round trip: %v", rate), s.name, "worst, % off a third", s.note, 100*worst)
			}
		}
	}
}

// share returns the bytes of each of the three senders that pass a limiter, in several windows.
func share(s limiter, rate policy.Rate) (windows []window) {
	a := newPath()
	defer a.Close()
	// The far end accepts packets to all addresses of the rules, and UDP.
	ip(a.far, fmt.Sprintf("route add local %v dev far\n", everything))
	check(unix.Bind(a.socket(a.far), &unix.SockaddrInet4{Port: farPort}))
	arrived := a.count(len(senders), "count_pass")
	udp := a.newSender(a.source, floodPayload, senders[2])
	s.set(a, limit{rate, policy.DefaultCapacity(rate)})
	tcp := a.open(senders[:2]...)
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
