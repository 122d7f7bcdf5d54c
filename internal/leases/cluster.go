// Package leases keeps the leases of pools in force: those that the store of a cluster grants, and those that follow a line.
package leases

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/cluster"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/pulse"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Keeper keeps the leases of the pools of a network namespace in force.
type Keeper struct {
	Options loader.Options
	Netns   string            // the name of the network namespace; "" for that of the process
	Say     func(text string) // is called with what changes
	Advise  func(error) error // adds what to do about an error
	pulse.Pulse

	told map[string]string // what was said last about something
}

// run takes one step after another in the network namespace until ctx is done. Each says how long to wait for the next.
func (k *Keeper) run(ctx context.Context, ready func(), step func(context.Context) (time.Duration, error)) error {
	return netns.Stay(ctx, k.Netns, func(ctx context.Context) error {
		for {
			wait, err := step(ctx)
			if err != nil {
				return err
			}
			ready()
			if !k.Pulse.Wait(ctx, time.After(wait)) {
				return nil
			}
		}
	})
}

func (k *Keeper) tell(format string, args ...any) { k.Say(fmt.Sprintf(format, args...)) }

// once says what is the matter with something, unless it was said last; "" for nothing.
func (k *Keeper) once(about, text string) {
	if k.told == nil {
		k.told = map[string]string{}
	}
	if text != k.told[about] && text != "" {
		k.Say(text)
	}
	k.told[about] = text
}

// A Cluster renews the leases of those pools that have a cluster.
type Cluster struct {
	Keeper
	Store *cluster.Store
	Host  string // how it is called in the store

	lessee *loader.Lessee
	agent  *cluster.Agent
	pools  clustered
	news   *leaseNews
}

const (
	// lookEvery is how often a keeper looks for pools that are new.
	lookEvery = time.Second
	// againAfter is when it tries again while another command is at work.
	againAfter = 250 * time.Millisecond
	// notSooner keeps it from asking in a tight loop, whatever happens.
	notSooner = 10 * time.Millisecond
)

// Asks says for whom it asks for leases.
func (r *Cluster) Asks() string {
	return fmt.Sprintf("asking for leases for host %s in the store at %s", plain.Line(r.Host), r.Store.Address())
}

// Run renews leases until ctx is done. It calls ready whenever it did. The error is that of netns.Stay, or why leases can never be
// renewed here.
func (r *Cluster) Run(ctx context.Context, ready func()) error {
	r.lessee, r.agent, r.pools = loader.NewLessee(loader.ClusterLeases), cluster.New(r.Host, rand.Uint64()), clustered{}
	r.news = &leaseNews{Keeper: &r.Keeper, leased: map[string]bool{}, statuses: map[string]cluster.Status{}}
	defer r.lessee.Close()
	err := r.run(ctx, ready, r.step)
	if err == nil {
		r.news.stops()
	}
	return err
}

// step renews the leases that are due, and returns how long to wait for the next.
func (r *Cluster) step(ctx context.Context) (wait time.Duration, err error) {
	var pools []cluster.Pool
	read := func(set *maps.Set) (renews bool) {
		pools = r.pools.read(set)
		return true // also before there is any: a second process would be a mistake
	}
	if err := r.lessee.Pools(r.Options, read); err != nil {
		return againAfter, r.unlessPassing(err)
	}
	now := maps.Now()
	r.news.seen(now, pools)
	if calls := r.agent.Ask(now, pools, r.pools.pending()); len(calls) > 0 {
		answers, err := r.ask(ctx, calls)
		if ctx.Err() != nil {
			return 0, nil
		}
		if err := r.unlessPassing(r.take(calls, answers, err)); err != nil {
			return 0, err
		}
	}
	wait = lookEvery
	if due, some := r.agent.Next(); some {
		wait = min(wait, max(notSooner, time.Duration(due)-time.Duration(maps.Now())))
	}
	return wait, nil
}

// ask sends calls to the store, not from the network namespace of -n but from that of the process.
func (r *Cluster) ask(ctx context.Context, calls []cluster.Call) (answers []cluster.Answer, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		answers, err = r.Store.Renew(ctx, calls)
	}()
	<-done
	return answers, err
}

// take takes the answers to calls, and puts new leases in force.
func (r *Cluster) take(calls []cluster.Call, answers []cluster.Answer, err error) error {
	now := maps.Now()
	r.news.reached(now, r.Store.Address(), err)
	for _, c := range calls[len(answers):] {
		r.agent.Lost(now, c)
	}
	calls = calls[:len(answers)]
	type granted struct {
		cluster policy.ClusterName
		rate    policy.Rate
		lease   maps.Lease
	}
	leases := map[string]granted{}
	for i, c := range calls {
		if pool, l, ok := r.agent.Hear(now, c, answers[i]); ok {
			leases[pool] = granted{policy.ClusterName(c.Cluster), policy.Rate(c.Request.Rate), l}
		}
	}
	r.news.heard(now, calls, answers)
	if len(leases) == 0 {
		return nil
	}
	return r.lessee.Renew(r.Options, func(pools *maps.Set) {
		for name, its := range leases {
			key := policy.PoolKey(name)
			// The pool may have changed since it asked.
			if have, found := pools.Find(key); found && have.Cluster.Name == its.cluster && have.Rate == its.rate {
				_ = pools.Renew(key, its.lease) // without it the pool gets the next one, or falls to its safe share
			}
		}
	})
}

// unlessPassing returns an error unless it passes, or another command has to end it.
func (r *Cluster) unlessPassing(err error) error {
	passes := errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, maps.ErrOtherLayout)
	if !passes {
		return err
	}
	if errors.Is(err, maps.ErrOtherLayout) {
		r.once("layout", "cannot renew leases: "+plain.OneLine(r.Advise(err)))
	}
	return nil
}

// leasing are the pools that have leases of a kind, as they were when rules were last changed: to find them, all rules are
// read.
type leasing struct {
	keys  []netip.Prefix
	stamp maps.Stamp
}

// find returns the keys of the pools that has selects.
func (l *leasing) find(pools *maps.Set, has func(*policy.Rule) bool) []netip.Prefix {
	if now := pools.Store.Stamp(); now != l.stamp {
		l.keys, l.stamp = nil, now
		for _, e := range pools.Rules() {
			if has(&e.Rule) {
				l.keys = append(l.keys, e.Prefix)
			}
		}
	}
	return l.keys
}

// clustered are the pools that have a cluster.
type clustered struct{ leasing }

// pending reports whether a revert may bring back pools that are not among those.
func (c *clustered) pending() bool {
	return c.stamp.State == maps.Pending || c.stamp.State == maps.Armed
}

// read returns the pools that have a cluster.
func (c *clustered) read(pools *maps.Set) (all []cluster.Pool) {
	for _, key := range c.find(pools, func(r *policy.Rule) bool { return r.Cluster.Name != "" }) {
		e, found := pools.Find(key)
		l, ok := pools.Lease(key)
		if !found || !ok {
			continue
		}
		of, counted := e.Cluster, pools.Store.Counters(e.ID)
		all = append(all, cluster.Pool{
			Name: e.Label.Name, Cluster: string(of.Name), Rate: uint64(e.Rate), Weight: uint64(of.Weight.Value()),
			Floor: uint64(of.Floor), Share: uint64(of.Share), Wants: uint64(of.Safe),
			Lease: l, Passed: counted.PassedBytes, Refused: counted.DroppedBytes, Quota: pools.ClusterQuota(e, maps.Now()),
		})
	}
	return all
}
