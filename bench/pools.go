package main

import (
	"context"
	"fmt"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite pools measures pools and fair shares: what they cost, and who gets how much.

// pools measures on this machine, without delay.
func pools(ctx context.Context, o options) error {
	return sharing(ctx, o, noDelay, 0, sharingSubjects())
}

// guestPools measures in the guest.
func guestPools(ctx context.Context, o options) error {
	if err := chains(ctx, o); err != nil {
		return err
	}
	if err := oracle(ctx, o); err != nil {
		return err
	}
	return sharing(ctx, o, delayed, roundTrip, append(sharingSubjects(), htbCoDel, isolatingCAKE))
}

const throughPools = "Instructions added per packet, by the number of pools above its rule"

var (
	poolDepths = []int{0, 1, 2, 4, 8}
	// Of the lowest pool, or of the rule if there are no pools, and of all pools.
	noShare, flowShare, memberShare = policy.Share{}, policy.Share{Kind: policy.ShareFlow}, policy.Share{Kind: policy.ShareMember}
)

// chains measures the instructions of a packet through nested pools.
func chains(ctx context.Context, o options) error {
	depths := poolDepths
	if o.quick {
		depths = depths[:2]
	}
	gc := debug.SetGCPercent(-1) // only the sender may use the CPU
	defer debug.SetGCPercent(gc)
	return onLastCPU(func() error {
		m := &instructionCounter{options: o, ctx: ctx}
		if _, err := m.without(addressOf(0)); err != nil {
			return err
		}
		for _, n := range depths {
			for _, s := range chainSubjects(n) {
				if !o.chosen(s.name) {
					continue
				}
				p, err := newLane(ctx, s, ample, settled, addressOf(0))
				if err != nil {
					return err
				}
				if err := m.added(p, fmt.Sprintf("%s: %d", throughPools, n)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// chainSubjects are limiters with a rule, and a chain of n pools above it.
func chainSubjects(n int) []competitor {
	chain := func(l limit, lowest, others policy.Share) *tree {
		t := &tree{rate: l.rate}
		for i := range n {
			t = &tree{rate: l.rate, share: others, members: []*tree{t}}
			if i == 0 {
				t.share = lowest
			}
		}
		if n == 0 && lowest.Kind == policy.ShareFlow {
			t.share = lowest
		}
		return t
	}
	with := func(name string, lowest, others policy.Share) competitor {
		return competitor{name: name, set: func(_ context.Context, a *arena, l limit) error { return chain(l, lowest, others).put(a) }}
	}
	list := []competitor{
		with("shapectl", noShare, noShare), with("shapectl, share flow", flowShare, noShare),
		with("shapectl, share member", memberShare, memberShare),
		{name: "HTB", note: "a class for each pool and for the rule; at most 8 levels", set: func(ctx context.Context, a *arena, l limit) error {
			return a.tc(ctx, chain(l, noShare, noShare).htb())
		}},
	}
	switch n {
	case 0:
		return slices.Delete(list, 2, 3)
	case 8:
		return list[:3] // HTB refuses nine levels
	}
	return list
}

// A tree is a pool with its members, or a subscriber, who has none.
type tree struct {
	rate      policy.Rate
	guarantee policy.Guarantee
	weight    policy.Weight
	share     policy.Share // of a pool
	members   []*tree
	quarters  int // what a subscriber sends, in quarters of its part
}

// leaves are the subscribers.
func (t *tree) leaves() (list []*tree) {
	if t.members == nil {
		return []*tree{t}
	}
	for _, m := range t.members {
		list = append(list, m.leaves()...)
	}
	return list
}

// put sets shapectl up: a pool for each pool, and a rule for each subscriber.
func (t *tree) put(a *arena) error {
	var tables []policy.Table
	subscribers := 0
	var add func(t *tree, within string) error
	add = func(t *tree, within string) error {
		l := policy.Limit{Rate: t.rate, Guarantee: t.guarantee, Weight: t.weight, Share: t.share, Within: policy.Within(within)}
		if t.members == nil {
			r, err := l.Rule(netip.PrefixFrom(addressOf(subscribers), 32))
			subscribers++
			tables = append(tables, rulesOf(r))
			return err
		}
		name := fmt.Sprintf("pool-%d", len(tables))
		p, err := l.Pool(name)
		tables = append(tables, policy.Table{Rules: []policy.Rule{p}})
		for _, m := range t.members {
			if err == nil {
				err = add(m, name)
			}
		}
		return err
	}
	if err := add(t, ""); err != nil {
		return err
	}
	return a.putTables(loader.TCX, tables...)
}

// htb returns commands of tc for the same tree of classes. A subscriber's queue holds 100 ms of its rate.
func (t *tree) htb() string {
	const filter = "filter add dev " + nearDevice + " parent 1: prio 1 protocol ip "
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("qdisc add dev %s root handle 1: htb", nearDevice)
	line(filter + "u32")
	line(filter + "handle 2: u32 divisor 256")
	line(filter+"u32 ht 800:: match ip dst %v hashkey mask 0x000000ff at 16 link 2:", netip.PrefixFrom(addressOf(0), 24))
	subscribers, inner := 0, 0x1000
	var add func(t *tree, parent string)
	add = func(t *tree, parent string) {
		number := subscribers + 1
		if t.members == nil {
			line(filter+"u32 ht 2:%x: match ip dst %v flowid 1:%x", subscribers, addressOf(subscribers), number)
			subscribers++
		} else {
			number = inner
			inner++
		}
		class := fmt.Sprintf("1:%x", number)
		line("class add dev %s parent %s classid %s htb rate %dbit ceil %dbit quantum %d",
			nearDevice, parent, class, max(uint64(t.guarantee), 8), uint64(t.rate), maxFrame*int(t.weight.Value()))
		if t.members == nil {
			line("qdisc add dev %s parent %s pfifo limit %d", nearDevice, class, max(10, uint64(t.rate)/8/10/maxFrame))
		}
		for _, m := range t.members {
			add(m, class)
		}
	}
	all := *t
	all.guarantee = policy.Guarantee(t.rate)
	add(&all, "1:")
	return b.String()
}
