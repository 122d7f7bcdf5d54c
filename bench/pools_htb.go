package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// HTB as an oracle: a hundred subscribers of four access points in one uplink send UDP through pools, and through HTB
// with the same tree. HTB divides among subscribers what the uplink has beyond the guarantees of access points, and
// shapectl among access points. In these loads that is the same.

const (
	besideHTB   = "100 subscribers beside HTB with the same tree"
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

var loads = []load{
	{name: "half send little", home: func(i int, t *tree) {
		if i%2 == 0 {
			t.quarters = 2
		}
	}},
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
	{name: "half have a guarantee", home: func(i int, t *tree) {
		if i%2 == 0 {
			t.guarantee = partRate
		}
	}},
	{name: "half have a low rate", home: func(i int, t *tree) {
		if i%2 == 0 {
			t.rate = partRate / 4
		}
	}},
	{name: "weights 1, 2 and 4", home: func(i int, t *tree) { t.weight = []policy.Weight{0, 2, 4}[i%3] }},
}

// tree returns the tree of a load.
func (l load) tree() *tree {
	member := policy.Share{Kind: policy.ShareMember}
	uplink := &tree{rate: uplinkRate, share: member}
	for i := range sites {
		site := &tree{rate: uplinkRate / 2, guarantee: uplinkRate / sites, share: member}
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
func oracle(ctx context.Context, o options) error {
	if !o.chosen("shapectl") {
		return nil
	}
	settle, part, all := 8*time.Second, 20*time.Second, loads
	if o.quick {
		settle, part, all = time.Second/2, time.Second/2, loads[:1]
	}
	for _, l := range all {
		t, name := l.tree(), besideHTB+": "+l.name
		var ours, htb window
		var ourErr, htbErr error
		var running sync.WaitGroup
		running.Go(func() { ours, ourErr = t.carry(ctx, settle, part, t.put) })
		running.Go(func() { htb, htbErr = t.carry(ctx, settle, part, func(a *arena) error { return a.tc(ctx, t.htb()) }) })
		running.Wait()
		if err := errors.Join(ourErr, htbErr); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		off := differences(ours.bytes, htb.bytes)
		o.add(name, "shapectl", unitOffHTB, "", off[len(off)-1])
		o.add(name, "shapectl", unitOffHTB50, "", quantile(off, 0.5))
		o.add(name, "shapectl", unitTotal, "", ours.part(uplinkRate))
		o.add(name, "HTB", unitTotal, "", htb.part(uplinkRate))
	}
	return nil
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
func (t *tree) carry(ctx context.Context, settle, part time.Duration, set func(*arena) error) (w window, err error) {
	a, err := newArena(ctx)
	if err != nil {
		return w, err
	}
	defer a.Close()
	arrived, err := a.count(subscribers, drop)
	if err != nil {
		return w, err
	}
	if err := set(a); err != nil {
		return w, err
	}
	var targets []netip.Addr
	for i, s := range t.leaves() {
		targets = append(targets, slices.Repeat([]netip.Addr{addressOf(i)}, s.quarters)...)
	}
	random := newRandom()
	random.Shuffle(len(targets), func(i, k int) { targets[i], targets[k] = targets[k], targets[i] })
	from, err := a.newSender(a.near, floodPayload, targets...)
	if err != nil {
		return w, err
	}
	end := flooding(ctx, from, policy.Rate(len(targets)*partRate/4))
	windows, err := arrived.windows(ctx, settle, part, 1)
	if err = errors.Join(err, end()); err == nil {
		w = windows[0]
	}
	return w, err
}
