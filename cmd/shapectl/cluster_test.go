package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/gomodule/redigo/redis"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

func (r *rig) clusters(args ...string) (all report.Clusters) {
	r.t.Helper()
	out := r.ok(append([]string{"cluster", "status", "-j"}, args...)...)
	testenv.Must(r.t, json.Unmarshal([]byte(out), &all))
	return all
}

func TestClusterStatus(t *testing.T) {
	t.Parallel()
	r, store := newRig(t), testenv.NewRedis(t)
	r.env["SHAPECTL_STORE"] = store.URL
	r.prints("no clusters\n", "cluster", "status")
	r.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer-7", "--cluster-safe", "10mbit")
	r.ok("set", "bulk", "--new", "--rate", "8mbit", "--cluster", "b*")
	a := r.watch("--cluster-host", "gate-1")
	testenv.Eventually(t, "a lease on the whole rate", func() bool {
		all := r.clusters("customer-7")
		return len(all[0].Members) == 1 && all[0].Members[0].LeaseBits == 100_000_000
	})
	all := r.clusters()
	if len(all) != 2 || all[0].Cluster != "b*" || all[1].Cluster != "customer-7" || all[1].RateBits != 100_000_000 {
		t.Fatalf("the clusters are %+v", all)
	}
	if m := all[1].Members[0]; m.Host != "gate-1" || m.Pool != "up" || m.State != report.Live || m.SafeBits != 10_000_000 || m.RateBits != 100_000_000 {
		t.Errorf("its member is %+v", m)
	}
	text := bare(r.ok("cluster", "status", "customer-7"))
	if want := "customer-7: 100mbit for 1 host; 0 used, 100mbit leased HOST POOL DEMAND USE LEASE SAFE AGE STATE gate-1 up"; !strings.HasPrefix(text, want) {
		t.Errorf("status: %s", text)
	}
	broken, err := redis.Dial("unix", strings.TrimPrefix(store.URL, "unix://"))
	testenv.Must(t, err)
	defer broken.Close()
	_, err = broken.Do("SET", "{shapectl}:broken", "x")
	testenv.Must(t, err)
	got := r.run("cluster", "status")
	if got.code != exitDegraded || !strings.Contains(got.out, "customer-7: 100mbit for 1 host") || !strings.Contains(got.err, `cluster "broken": WRONGTYPE`) {
		t.Errorf("with a broken one: %+v", got)
	}
	_, err = broken.Do("DEL", "{shapectl}:broken")
	testenv.Must(t, err)
	r.refused(exitInput, "did you mean customer-7?", "cluster", "status", "customer-8")
	r.refused(exitInput, "another --prefix", "cluster", "status", "customer-7", "--prefix", "other")

	r.refused(exitInput, "host gate-1 is live", "cluster", "forget", "customer-7", "gate-1")
	if out := r.ok("cluster", "forget", "customer-7", "gate-2"); out != "nothing to forget: cluster customer-7 has no such host; 'shapectl cluster status customer-7' lists all\n" {
		t.Errorf("forget another host: %q", out)
	}
	r.prints("nothing is reserved for missing hosts\n", "cluster", "forget", "customer-7", "--missing")
	testenv.Must(t, a.cmd.Process.Kill())
	// Time passes for the store only while others ask.
	other := newRig(t)
	other.env["SHAPECTL_STORE"] = store.URL
	other.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer-7")
	other.watch("--cluster-host", "gate-2")
	testenv.Eventually(t, "the first host is silent", func() bool {
		m := r.clusters("customer-7")[0].Members
		return len(m) == 2 && m[0].State == report.Silent && m[1].LeaseBits == 90_000_000
	})
	text = bare(r.ok("cluster", "status", "customer-7"))
	for _, want := range []string{"2 hosts (1 silent); 0 used, 100mbit leased", "gate-1 up - - - 10.0mbit", "'shapectl cluster forget customer-7 HOST'"} {
		if !strings.Contains(text, want) {
			t.Errorf("the status has no %q: %s", want, text)
		}
	}
	r.prints("forgot host gate-1 of cluster customer-7; 10.0mbit are free for the others\n", "cluster", "forget", "customer-7", "gate-1")
	testenv.Eventually(t, "the other host has all", func() bool { return other.lease("up").Rate == 100_000_000 })

	store.Kill()
	got = r.run("cluster", "status")
	if got.code != exitKernel || !strings.Contains(got.err, "cluster status: ask the store at ") {
		t.Errorf("without the store: %+v", got)
	}
}

// Hosts that do not come back after the store was emptied keep their safe shares, until an operator says that they are gone.
func TestClusterForgetMissing(t *testing.T) {
	t.Parallel()
	store := testenv.NewRedis(t)
	var rigs []*rig
	var daemons []*process
	for _, host := range []string{"gate-1", "gate-2"} {
		r := newRig(t)
		r.env["SHAPECTL_STORE"] = store.URL
		r.ok("set", "up", "--new", "--rate", "100mbit", "--cluster", "customer", "--cluster-safe", "10mbit")
		rigs, daemons = append(rigs, r), append(daemons, r.watch("--cluster-host", host))
	}
	r := rigs[1]
	has := func(rate int) func() bool { return func() bool { return int(r.lease("up").Rate) == rate } }
	testenv.Eventually(t, "both have a lease", has(50_000_000))
	testenv.Must(t, daemons[0].cmd.Process.Kill())
	store.Kill()
	store.Start()
	testenv.Eventually(t, "a lease beside the reserved share", func() bool {
		all := r.clusters()
		return len(all) == 1 && all[0].MissingBits == 10_000_000 && len(all[0].Members) == 1 && all[0].Members[0].LeaseBits == 90_000_000
	})
	if l := r.lease("up"); l.Rate > 90_000_000 {
		t.Errorf("the lease is %+v", l)
	}
	if text := bare(r.ok("cluster", "status")); !strings.Contains(text, "10.0mbit are reserved for hosts that have not come back") {
		t.Errorf("status: %s", text)
	}
	r.prints("forgot missing hosts of cluster customer; 10.0mbit are free for the others\n", "cluster", "forget", "customer", "--missing")
	testenv.Eventually(t, "the second host has all", has(100_000_000))
}

// The hosts of a cluster get parts of its quota, and keep them when the quota changes and without the store.
func TestClusterQuota(t *testing.T) {
	t.Parallel()
	store := testenv.NewRedis(t)
	set := []string{"set", "up", "--rate", "100mbit", "--cluster", "customer", "--cluster-safe", "10mbit", "--then", "1mbit", "--quota"}
	var r *rig
	left := func() uint64 { return r.show("--pools", "up")[0].QuotaLeftBytes }
	for _, host := range []string{"gate-1", "gate-2"} {
		r = newRig(t)
		r.env["SHAPECTL_STORE"] = store.URL
		r.refused(exitInput, "which hosts of a cluster cannot share", append(set, "1gb/30d", "--new")...)
		r.ok(append(set, "1gb/month", "--new")...)
		if n := left(); n != 0 {
			t.Errorf("before the first grant, %d bytes are left", n)
		}
		r.watch("--cluster-host", host)
		testenv.Eventually(t, "a grant of 2 s at the whole rate", func() bool { return left() == 25_000_000 })
	}
	var c report.ClusterStatus
	testenv.Eventually(t, "both are in the status", func() bool {
		c = r.clusters()[0]
		return c.QuotaGrantedBytes == 50_000_000
	})
	if m := c.Members[0]; c.QuotaBytes != 1<<30 || *m.UsedBytes != 0 || *m.GrantedBytes != 25_000_000 {
		t.Errorf("the status is %+v", c)
	}
	if text := bare(r.ok("cluster", "status")); !strings.Contains(text, "; 50.0 MB of the quota of 1.07 GB used or granted HOST POOL DEMAND USE LEASE GRANTED SAFE") {
		t.Errorf("status: %s", text)
	}
	store.Kill()
	r.ok(append(set, "2gb/month")...)
	if n := left(); n != 25_000_000 {
		t.Errorf("without the store, %d bytes are left", n)
	}
}
