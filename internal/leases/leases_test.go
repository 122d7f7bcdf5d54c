package leases

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/adapt"
	"github.com/shapectl/shapectl/internal/cluster"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// listen returns a keeper, and a function that wants it to have said texts that begin with these since the last call.
func listen(t *testing.T) (k *Keeper, says func(want ...string)) {
	var said []string
	k = &Keeper{Say: func(text string) { said = append(said, text) }, Advise: func(err error) error { return err }}
	return k, func(want ...string) {
		t.Helper()
		if !slices.EqualFunc(said, want, strings.HasPrefix) {
			t.Errorf("it says %q, not %q", said, want)
		}
		said = nil
	}
}

// Each change of leases is told once, those of several pools together, and so is the loss of the store.
func TestNewsOfLeases(t *testing.T) {
	k, says := listen(t)
	n := &leaseNews{Keeper: k}
	until := func(name string, end uint64) (p cluster.Pool) { p.Name, p.Lease.Until = name, end; return p }
	seen := func(now uint64, pools ...cluster.Pool) {
		n.seen(now, pools)
		n.seen(now, pools)
	}
	seen(0)
	seen(1, until("a", 10), until("b", 10), until("c", 0))
	seen(9, until("a", 10), until("b", 20), until("c", 0))
	says("no pool has a cluster; waiting for one", "pools a, b: a lease is in force")
	seen(10, until("a", 10), until("b", 20), until("c", 0))
	n.stops()
	says("pool a: the lease ended, and the safe share is in force", "stopped; leases end within 2s")
	seen(11)
	n.stops()
	says("no pool has a cluster; waiting for one")
	for now, err := range []error{nil, errors.New("refused"), errors.New("no route"), nil, nil} {
		n.reached(uint64(now)*1e9, "S", err)
	}
	says("cannot get leases from the store at S: refused; leases end within 2s", "the store at S gives leases again, after 2s")
}

// What an answer of the store means is told when it changes. Of two processes with one name only that is told, once a minute.
func TestNewsOfAnswers(t *testing.T) {
	first, granted, leaves := cluster.Request{Rate: 1}, cluster.Request{Rate: 1, Granted: 1}, cluster.Request{}
	k, says := listen(t)
	n := &leaseNews{Keeper: k, statuses: map[string]cluster.Status{}}
	for _, c := range []struct {
		seconds uint64
		request cluster.Request
		answer  cluster.Status
	}{
		{1, first, cluster.Quiet}, {2, first, cluster.OK}, {3, granted, cluster.Quiet}, {4, granted, cluster.Quiet}, // no lease was lost before 3
		{5, granted, cluster.Broken}, {6, granted, cluster.Old}, {7, granted, cluster.Broken}, {8, leaves, cluster.Broken}, {9, first, cluster.Broken},
		{10, granted, cluster.Replaced}, {11, granted, cluster.OK}, {12, granted, cluster.Quiet}, {69, granted, cluster.Replaced}, {70, granted, cluster.Replaced},
	} {
		n.heard(c.seconds*1e9, []cluster.Call{{Cluster: "a", Request: c.request}}, []cluster.Answer{{Status: c.answer}})
	}
	const broken, taken = "the key of cluster a in the store holds something else", "another process acts for this host in cluster a"
	says("the store was emptied or may have lost writes; leases for cluster a", broken, broken, taken, taken)
	calls := []cluster.Call{{Cluster: "y", Request: first}, {Cluster: "x", Request: first}, {Cluster: "y", Member: "2", Request: first}}
	n.heard(1e12, calls, slices.Repeat([]cluster.Answer{{Status: cluster.Newer}}, 3))
	says("the store has records of a newer version for clusters x, y;")
}

// newPools lets set a pool in a network namespace of the test, and want a keeper to see that it has a rate.
func newPools(t *testing.T, k *Keeper) (set func(policy.Limit), gets func(*loader.Lessee, policy.Rate)) {
	testenv.NewNetns(t)
	k.Options = loader.Options{BPFFS: testenv.BPFFS(t)}
	set = func(l policy.Limit) {
		pool, err := l.Pool("p")
		testenv.Must(t, err)
		n, err := loader.Write(k.Options)
		testenv.Must(t, err)
		_, err = n.Put(loader.ApplyOptions{}, policy.Table{Rules: []policy.Rule{pool}})
		n.Close()
		testenv.Must(t, err)
	}
	return set, func(l *loader.Lessee, want policy.Rate) {
		t.Helper()
		testenv.Must(t, l.Pools(k.Options, func(pools *maps.Set) bool {
			if lease, _ := pools.Lease(policy.PoolKey("p")); lease.At(maps.Now()) != want {
				t.Errorf("the pool gets %v, not %v", lease.At(maps.Now()), want)
			}
			return true
		}))
	}
}

// A keeper of clusters goes on without the store and beside a command, and a lease is only for a pool that is still the same.
func TestCluster(t *testing.T) {
	k, says := listen(t)
	set, gets := newPools(t, k)
	clustered := func(name policy.ClusterName, rate policy.Rate) {
		set(policy.Limit{Rate: rate, Cluster: policy.Cluster{Name: name, Safe: 1e6}})
	}
	store, err := cluster.Open(cluster.Options{URL: "unix:///nowhere"})
	testenv.Must(t, err)
	r := &Cluster{Keeper: *k, Store: store, lessee: loader.NewLessee(loader.ClusterLeases), agent: cluster.New("h", 1)}
	defer r.lessee.Close()
	r.news = &leaseNews{Keeper: &r.Keeper, statuses: map[string]cluster.Status{}}
	step := func(most time.Duration) {
		t.Helper()
		if wait, err := r.step(t.Context()); err != nil || wait < notSooner || wait > most {
			t.Errorf("it waits for %v, and not at most %v: %v", wait, most, err)
		}
	}
	step(lookEvery)
	clustered("c", 20e6)
	step(200 * time.Millisecond)
	says("no pool has a cluster", "cannot get leases from the store at /nowhere")
	n, err := loader.Write(k.Options)
	testenv.Must(t, err)
	step(againAfter)
	n.Close()
	testenv.Must(t, errors.Join(r.unlessPassing(maps.ErrOtherLayout), r.unlessPassing(maps.ErrOtherLayout)))
	says("cannot renew leases: ")
	if err := r.unlessPassing(loader.ErrLessee); !errors.Is(err, loader.ErrLessee) {
		t.Errorf("beside another process: %v", err)
	}

	for _, c := range []struct {
		cluster    policy.ClusterName
		rate, gets policy.Rate
	}{{"c", 20e6, 8e6}, {"c", 10e6, 4e6}, {"d", 10e6, 1e6}} {
		var read []cluster.Pool
		testenv.Must(t, r.lessee.Pools(k.Options, func(set *maps.Set) bool { read = r.pools.read(set); return true }))
		calls := r.agent.Ask(maps.Now()+3600e9, read, true)
		clustered(c.cluster, c.rate)
		testenv.Must(t, r.take(calls, []cluster.Answer{{Lease: 8e6, Safe: 1e6, Epoch: 1, Turn: 1}}, nil))
		gets(r.lessee, c.gets)
	}
}

// One process adapts pools, and tells when no reflector answers. The lease is only for a pool that is still the same.
func TestLine(t *testing.T) {
	k, says := listen(t)
	set, gets := newPools(t, k)
	adapting := func(least, rate policy.Rate) {
		set(policy.Limit{Rate: rate, Adapt: policy.Adapt{Min: least, To: "192.0.2.1"}})
	}
	a := &Line{Keeper: *k, lessee: loader.NewLessee(loader.LineLeases), controller: adapt.New()}
	defer a.lessee.Close()
	step := func(want time.Duration, pings bool) {
		t.Helper()
		for range 2 {
			if wait := a.step(); wait != want || (a.pinger != nil) != pings {
				t.Errorf("it waits for %v, and pings: %v", wait, a.pinger != nil)
			}
		}
	}
	set(policy.Limit{Rate: 20e6})
	step(lookEvery, false)
	other := loader.NewLessee(loader.LineLeases)
	testenv.Must(t, other.Pools(k.Options, func(*maps.Set) bool { return true }))
	adapting(2e6, 20e6)
	step(lookEvery, false)
	says("another process adapts")
	other.Close()
	step(adapt.Every, true)

	silent := maps.Now() + uint64(6*time.Second)
	a.tellSilence(silent)
	a.unheard = errors.New("this one")
	a.tellSilence(silent)
	says("none of 192.0.2.1 answers pings, so rates stay as they are: ping 192.0.2.1: ")
	a.controller.Heard(silent, a.controller.Reflectors()[0], silent-1)
	a.tellSilence(silent)
	says("pings are answered again, and rates adapt")

	read := []adapt.Pool{{Name: "p", Rate: 20e6}}
	a.renew(read, []adapt.Lease{{Pool: "p", Rate: 4e6, Why: "why"}})
	gets(a.lessee, 4e6)
	says(`pool "p" now gets 4mbit of 20mbit: why`)
	for _, c := range []struct{ least, rate policy.Rate }{{3.5e6, 20e6}, {2e6, 10e6}} {
		adapting(c.least, c.rate)
		a.renew(read, []adapt.Lease{{Pool: "p", Rate: 3e6, Why: "why"}})
		gets(a.lessee, 4e6)
	}
	says()
	set(policy.Limit{Rate: 20e6})
	step(lookEvery, false)
	testenv.Must(t, other.Pools(k.Options, func(*maps.Set) bool { return true })) // as this one has none
	other.Close()
}
