package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// lease is that of a pool now.
func (r *rig) lease(pool string) (l maps.Lease) {
	r.t.Helper()
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(r.t, err)
	defer n.Close()
	h := n.Pools()
	defer h.Close()
	l, ok := h.Set.Lease(policy.PoolKey(pool))
	if !ok {
		r.t.Fatalf("pool %s has no cluster", pool)
	}
	return l
}

func isOver(l maps.Lease) bool { return maps.Now() >= l.Until }

// Leases come and go with the store and serve, which tells of each change once.
func TestLeases(t *testing.T) {
	t.Parallel()
	r, store := newRig(t), testenv.NewRedis(t)
	r.env["SHAPECTL_STORE"] = store.URL
	a := r.watch("--cluster-host", "h1")
	a.says("no pool has a cluster; waiting for one")
	r.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer")
	if l := r.lease("up"); l.Until != 0 || l.Safe != policy.MinRate {
		t.Errorf("before the first lease: %+v", l)
	}
	a.says("pool up: a lease is in force")
	testenv.Eventually(t, "the only host gets the whole rate", func() bool { return r.lease("up").Rate == 100_000_000 })
	if got := r.result(r.command(pageless()...)); got.code != exitInput || !strings.Contains(got.err, "another process renews the leases") {
		t.Errorf("a second serve: %+v", got)
	}

	store.Kill()
	a.says("cannot get leases from the store at")
	a.says("pool up: the lease ended, and the safe share is in force")
	time.Sleep(time.Second) // for messages that repeat
	store.Start()
	a.says("gives leases again")
	a.says("the store was emptied or may have lost writes; leases for cluster customer come again")
	a.says("pool up: a lease is in force")

	r.refused(exitInput, "would have it for itself; give its own --rate", "set", "up", "--cluster", "none")
	r.ok("set", "up", "--cluster", "none", "--rate", "1mbit")
	a.says("no pool has a cluster; waiting for one")
	r.ok("set", "up", "--cluster", "customer")
	a.says("pool up: a lease is in force")
	a.ends(syscall.SIGTERM)
	a.says("stopped; leases end within 2s")
	for what, times := range a.heard {
		if n := strings.Count(a.err.String(), what); n != times {
			t.Errorf("it says %q %d times, and not %d: %s", what, n, times, &a.err)
		}
	}
}

// A leasedPool is what show says of a pool with a cluster.
type leasedPool struct {
	Rate   uint64  `json:"rate_bits_per_second"`
	Leased *bool   `json:"leased"`
	Lease  *uint64 `json:"lease_bits_per_second"`
	EndsIn *uint64 `json:"lease_ends_in_ns"`
	Safe   *uint64 `json:"safe_bits_per_second"`
}

// Commands show what a pool may use now.
func TestLeasesAreShown(t *testing.T) {
	t.Parallel()
	r, store := newRig(t), testenv.NewRedis(t)
	r.ok("set", "alone", "--new", "--rate", "1mbit")
	r.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer", "--cluster-safe", "10mbit")
	shown := func(pool string) leasedPool {
		t.Helper()
		var all []leasedPool
		testenv.Must(t, json.Unmarshal([]byte(r.ok("show", "--pools", pool, "-j")), &all))
		return all[0]
	}
	says := func(want string, command ...string) {
		t.Helper()
		if got := r.run(command...); !strings.Contains(bare(got.out), want) {
			t.Errorf("%v does not say %q: %+v", command, want, got)
		}
	}
	metric := func(name, value string) {
		t.Helper()
		s := r.serve("--history", "none")
		text := s.metrics()
		if want := "\nshapectl_pool_" + name + "{pool=\"up\"} " + value + "\n"; !strings.Contains(text, want) || strings.Contains(text, name+"{pool=\"alone\"}") {
			t.Errorf("metrics have no %q", want)
		}
		s.ends(syscall.SIGTERM)
	}
	if p := shown("alone"); p.Leased != nil || p.Lease != nil || p.EndsIn != nil || p.Safe != nil {
		t.Errorf("without a cluster: %+v", p)
	}
	if p := shown("up"); p.Leased == nil || *p.Leased || p.Lease != nil || p.EndsIn != nil || *p.Safe != 10_000_000 || p.Rate != 100_000_000 {
		t.Errorf("before the first lease: %+v", p)
	}
	says("lease none; its safe share of 10.0mbit is in force", "show", "--pools", "up")
	says("[lease: none; its safe share of 10.0mbit is in force]", "show", "--sentences")
	says("up 10.0mbit safe of 100mbit", "show", "--tree")
	says("no lease was ever granted to up (10mbit): the safe share is in force", "doctor")
	metric("leased", "0")
	metric("safe_bits_per_second", "1e+07")

	// What packets meet on this host is what answers are about.
	r.ok("set", "va", "egress", "10.0.0.0/24", "--within", "up")
	says("\"capacity_bytes\": 375000,", "explain", "-j", "va", "egress", "10.0.0.7")
	r.ok("delete", "va", "egress", "10.0.0.0/24")

	told := r.events("--kind", "lease")
	a := r.watch("--cluster-store", store.URL)
	told.tells(0, "a lease", func(e report.Event) bool { return e.Kind == report.LeaseBegun && e.Pool == "up" })
	testenv.Eventually(t, "all of the rate", func() bool { return r.lease("up").Rate == 100_000_000 })
	if p := shown("up"); !*p.Leased || *p.Lease != 100_000_000 || *p.EndsIn == 0 || *p.EndsIn > 2e9 || *p.Safe != 10_000_000 {
		t.Errorf("with a lease: %+v", p)
	}
	says("lease 100mbit of 100mbit for ", "show", "--pools", "up")
	says("up 100mbit leased of 100mbit", "show", "--tree")
	metric("leased", "1")
	metric("lease_bits_per_second", "1e+08")
	if got := r.run("doctor"); strings.Contains(got.out, "lease") {
		t.Errorf("doctor: %s", got.out)
	}
	a.ends(syscall.SIGTERM)
	told.tells(1, "its end", func(e report.Event) bool { return e.Kind == report.LeaseEnded && e.Pool == "up" })
	says("the lease ended of up (", "doctor")
	told.stops(syscall.SIGTERM)
}

// Two hosts share a rate. When one is gone for good, the other gets what the first cannot use.
func TestHostsShareARate(t *testing.T) {
	t.Parallel()
	store := testenv.NewRedis(t)
	var rigs []*rig
	var netns []*testenv.Netns
	for range 2 {
		r := &rig{t, map[string]string{"SHAPECTL_STORE": store.URL}}
		netns = append(netns, testenv.NewNetns(t))
		r.env["SHAPECTL_BPFFS"] = testenv.BPFFS(t)
		r.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer", "--cluster-safe", "10mbit")
		rigs = append(rigs, r)
	}
	sum := func() (sum policy.Rate) {
		for i, r := range rigs {
			testenv.Must(t, netns[i].Do(func() error {
				if l := r.lease("up"); isOver(l) {
					sum += l.Safe
				} else {
					sum += l.Rate
				}
				return nil
			}))
		}
		return sum
	}
	var daemons []*process
	for i, r := range rigs {
		testenv.Must(t, netns[i].Do(func() error {
			daemons = append(daemons, r.watch("--cluster-host", fmt.Sprint("h", i)))
			return nil
		}))
	}
	testenv.Eventually(t, "both have an equal part", func() bool {
		if sum := sum(); sum > 100_000_000 {
			t.Fatalf("together they have %v", sum)
		}
		l := rigs[1].lease("up")
		return !isOver(l) && l.Rate == 50_000_000
	})
	testenv.Must(t, daemons[0].cmd.Process.Kill())
	testenv.Eventually(t, "the other one has all but the safe share", func() bool { return rigs[1].lease("up").Rate == 90_000_000 })
}

// Where the pools are is one network namespace, and where the store is another.
func TestStoreElsewhere(t *testing.T) {
	t.Parallel()
	name, _ := testenv.NewNamedNetns(t)
	testenv.NewNetns(t)
	r, store := &rig{t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(t)}}, testenv.NewRedis(t)
	r.ok("-n", name, "set", "up", "--new", "--rate", "100mbit", "--cluster", "customer")
	a := r.watch("-n", name, "--cluster-store", store.URL)
	a.says("/" + name + " in the store")
	a.says("pool up: a lease is in force")
	a.ends(syscall.SIGINT)
}

// serve renews leases beside its other work, which goes on without the store.
func TestServeRenewsLeases(t *testing.T) {
	t.Parallel()
	r, store := newRig(t), testenv.NewRedis(t)
	r.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer")
	r.refused(exitInput, "--cluster-host needs --cluster-store", "serve", "--cluster-host", "h1")
	s := r.serve(r.policy(watched), "--cluster-store", "unix:///nowhere")
	s.says("cluster: cannot get leases from the store at /nowhere")
	testenv.Veth(t, "tap0", "xb")
	s.says("tap0 egress")
	s.ends(syscall.SIGTERM)
	s = r.serve("--cluster-store", store.URL, "--cluster-host", "h1")
	s.says("asking for leases for host h1")
	s.says("cluster: pool up: a lease is in force")
	s.ends(syscall.SIGTERM)
}

// A revert brings back a pool's cluster, but no lease that the cluster has given to others meanwhile, and none of another one.
func TestLeaseAfterRevert(t *testing.T) {
	const before = "pools: {c: {rate: 10mbit, cluster: C}}\ndevices: {}\n"
	for name, after := range map[string]string{
		"another cluster": "pools: {c: {rate: 10mbit, cluster: D}}\ndevices: {}\n",
		"no cluster":      "pools: {c: {rate: 10mbit}}\ndevices: {}\n",
		"no pool":         "devices: {}\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.env["SHAPECTL_STORE"] = testenv.NewRedis(t).URL
			members := func(name string) int {
				for _, c := range r.clusters() {
					if c.Cluster == name {
						return len(c.Members)
					}
				}
				return 0
			}
			leased := func() bool {
				return strings.Contains(strings.ReplaceAll(r.ok("-j", "show", "--pools"), " ", ""), `"lease_bits_per_second":10000000,`)
			}
			r.ok("apply", r.policy(before))
			a := r.watch("--cluster-host", "h1")
			testenv.Eventually(t, "a lease", leased)

			r.ok("apply", r.policy(after), "--confirm", "3s", "--allow-empty")
			time.Sleep(1500 * time.Millisecond)
			if members("C") != 1 {
				t.Error("it left its cluster before the change was confirmed")
			}
			testenv.Eventually(t, "a lease after the revert", leased)

			r.ok("apply", r.policy(after), "--allow-empty")
			testenv.Eventually(t, "it leaves", func() bool { return members("C") == 0 })
			if name == "another cluster" {
				testenv.Eventually(t, "a lease of the other cluster", leased)
			}
			testenv.Must(t, a.cmd.Process.Kill())
			r.ok("rollback")
			if l := r.lease("c"); l.At(maps.Now()) != policy.MinRate || l.Safe != policy.MinRate {
				t.Errorf("the lease is %+v", l)
			}
		})
	}
}

// A lease on a raised rate must not outlast the raise.
func TestRaiseOfClusterIsReverted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.env["SHAPECTL_STORE"] = testenv.NewRedis(t).URL
	policyOf := func(rate string) string {
		return r.policy("pools: {c: {rate: " + rate + ", cluster: C}}\ndevices: {}\n")
	}
	r.ok("apply", policyOf("10mbit"))
	a := r.watch("--cluster-host", "h1")
	leased := func(rate policy.Rate) func() bool {
		return func() bool { l := r.lease("c"); return l.At(maps.Now()) == rate && l.Safe == rate }
	}
	testenv.Eventually(t, "a lease", leased(10_000_000))

	r.ok("apply", policyOf("80mbit"), "--confirm", "6s")
	testenv.Eventually(t, "a lease on the rate in trial", leased(80_000_000))
	testenv.Eventually(t, "a lease after the revert", leased(10_000_000))
	r.ok("apply", policyOf("80mbit"))
	testenv.Eventually(t, "a lease on the raised rate", leased(80_000_000))
	testenv.Must(t, a.cmd.Process.Kill())
	r.ok("rollback")
	if l := r.lease("c"); l.Rate != 10_000_000 || l.Safe != 10_000_000 {
		t.Errorf("after the rollback, the lease is %+v", l)
	}
}

// A name that a terminal or Redis could misread is refused.
func TestNameOfHost(t *testing.T) {
	r := newRig(t)
	for _, name := range []string{"a\tb", "a\nb", "\x1b[31m", "\xff\xfe", strings.Repeat("x", 256)} {
		r.refused(exitInput, "use at most 255 printable characters", "serve", "--cluster-store", "redis://127.0.0.1:1", "--cluster-host", name)
	}
}

// A lower rate lowers what each host has, with or without serve: together they must fit into it.
func TestLowerRateOfCluster(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.env["SHAPECTL_STORE"] = testenv.NewRedis(t).URL
	r.ok("set", "c", "--new", "--rate", "20mbit", "--cluster", "C")
	a := r.watch("--cluster-host", "h1")
	testenv.Eventually(t, "a lease", func() bool { return r.lease("c").Safe == 20_000_000 })
	testenv.Must(t, a.cmd.Process.Kill())
	a.cmd.Wait()
	for _, rate := range []string{"10mbit", "5mbit"} {
		r.ok("set", "c", "--rate", rate)
	}
	if l := r.lease("c"); l.Safe != 5_000_000 || l.Rate != 5_000_000 {
		t.Errorf("the lease is %+v", l)
	}
	r.ok("set", "c", "--rate", "20mbit")
	if l := r.lease("c"); l.Safe != 5_000_000 {
		t.Errorf("with a higher rate: %+v", l)
	}
}
