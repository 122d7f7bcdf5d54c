package leases

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/adapt"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/ping"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Line adapts the rates of those pools of a network namespace that adapt to a line. It pings only while there are any.
type Line struct {
	Keeper
	lessee     *loader.Lessee
	controller *adapt.Controller
	pinger     *ping.Pinger // nil while no pool adapts
	pools      leasing
	unheard    error // why the last ping was not sent
}

// Run adapts until ctx is done. It calls ready whenever it did. The error is that of netns.Stay.
func (a *Line) Run(ctx context.Context, ready func()) error {
	a.lessee, a.controller, a.pools = loader.NewLessee(loader.LineLeases), adapt.New(), leasing{}
	defer a.lessee.Close()
	defer a.rest()
	return a.run(ctx, ready, func(context.Context) (time.Duration, error) { return a.step(), nil })
}

// step adapts the pools now, and returns how long to wait for the next time. What it cannot do does not end serve.
func (a *Line) step() (wait time.Duration) {
	var pools []adapt.Pool
	err := a.lessee.Pools(a.Options, func(set *maps.Set) (renews bool) {
		pools = a.read(set)
		return len(pools) > 0
	})
	if errors.Is(err, unix.EWOULDBLOCK) {
		return againAfter
	}
	if a.fails(err); err != nil || len(pools) == 0 {
		a.rest()
		return lookEvery
	}
	if a.pinger == nil {
		a.pinger = ping.New(maps.Now)
	}
	for _, answer := range a.pinger.Heard() {
		a.controller.Heard(answer.At, answer.From, answer.Sent)
	}
	now := maps.Now()
	if leases := a.controller.Decide(now, pools); len(leases) > 0 {
		a.renew(pools, leases)
	}
	a.tellSilence(now)
	if to, ok := a.controller.Next(maps.Now()); ok {
		if err := a.pinger.Send(to); err != nil {
			a.unheard = err
		}
	}
	return adapt.Every
}

// rest sends no pings until a pool adapts again.
func (a *Line) rest() {
	if a.pinger != nil {
		a.pinger.Close()
		a.pinger, a.controller, a.unheard = nil, adapt.New(), nil
		a.once("silence", "")
	}
}

// fails tells once why rates do not adapt; nil for no problem.
func (a *Line) fails(err error) {
	text := ""
	switch {
	case errors.Is(err, loader.ErrLessee):
		text = "another process adapts the rates of pools in this network namespace; this one does not"
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		text = "cannot adapt the rates of pools: " + plain.OneLine(a.Advise(err))
	}
	a.once("adapting", text)
}

// tellSilence tells when no reflector answers, and when one does again.
func (a *Line) tellSilence(now uint64) {
	if !a.controller.Silent(now) {
		if a.told["silence"] != "" {
			a.Say("pings are answered again, and rates adapt")
		}
		a.once("silence", "")
		return
	}
	if a.told["silence"] != "" {
		return // what comes of single pings may differ
	}
	var all []string
	for _, addr := range a.controller.Reflectors() {
		all = append(all, addr.String())
	}
	text := fmt.Sprintf("none of %s answers pings, so rates stay as they are", plain.List(all))
	if a.unheard != nil {
		text += ": " + plain.OneLine(a.unheard)
	}
	a.once("silence", text)
}

// read returns the pools that adapt.
func (a *Line) read(set *maps.Set) (all []adapt.Pool) {
	now := maps.Now()
	for _, key := range a.pools.find(set, func(r *policy.Rule) bool { return r.Adapt.Min != 0 }) {
		e, found := set.Find(key)
		l, ok := set.Lease(key)
		if !found || !ok || e.Adapt.Min == 0 {
			continue
		}
		p := adapt.Pool{
			Name: e.Label.Name, Rate: e.Rate, Min: e.Adapt.Min, Above: e.Adapt.Above.Value(), To: e.Adapt.To.Addrs(),
			InForce: l.At(now), Passed: set.Store.Counters(e.ID).PassedBytes,
		}
		if e.Excess == policy.Delay {
			if level, m := set.Store.SharedLevel(e, now), set.Store.Meter(e); level > m.Burst {
				p.Waits = time.Duration(float64(model.Bytes(level-m.Burst)) * 8e9 / float64(p.InForce))
			}
		}
		all = append(all, p)
	}
	return all
}

// renew puts leases in force, and tells of changes.
func (a *Line) renew(pools []adapt.Pool, leases []adapt.Lease) {
	highest := map[string]policy.Rate{}
	for _, p := range pools {
		highest[p.Name] = p.Rate
	}
	err := a.lessee.Renew(a.Options, func(set *maps.Set) {
		until := maps.Now() + uint64(adapt.LeaseFor)
		for _, l := range leases {
			key := policy.PoolKey(l.Pool)
			have, found := set.Find(key)
			// The pool may have changed since it was read. Then it is read again at once.
			if !found || have.Adapt.Min == 0 || have.Rate != highest[l.Pool] || l.Rate < have.Adapt.Min {
				continue
			}
			if err := set.Renew(key, maps.Lease{Rate: l.Rate, Safe: have.Rate, Until: until}); err == nil && l.Why != "" {
				a.Say(fmt.Sprintf("pool %q now gets %v of %v: %s", l.Pool, l.Rate, have.Rate, l.Why))
			}
		}
	})
	if !errors.Is(err, unix.EWOULDBLOCK) {
		a.fails(err)
	}
}
