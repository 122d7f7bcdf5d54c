package maps_test

import (
	"fmt"
	stdmaps "maps"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A pool uses the quota of its cluster as far as that grants it: nothing at first, and the same after changes, reverts and in the
// next period. Another cluster has granted nothing, and a grant to a pool that was replaced is of no use.
func TestClusterQuota(t *testing.T) {
	r := newRig(t, maps.Size{Rules: 16, Buckets: 4, Labels: 64, Leases: 4, Pools: true, Also: true})
	pools, key := r.Store.Pools(), policy.PoolKey("gold")
	pool := func(cluster policy.ClusterName, quota uint64) policy.Rule {
		return policy.Rule{
			Prefix: key, Pool: true, Rate: 8e9, Capacity: 1 << 30, Label: policy.Label{Name: "gold"}, Cluster: policy.Cluster{Name: cluster, Safe: 8e9},
			Also: policy.Also{Quota: policy.Quota{Bytes: quota, Period: "day"}, Zone: "UTC", Then: policy.ThenDrop},
		}
	}
	quota := func() maps.ClusterQuota {
		e, _ := pools.Find(key)
		return pools.ClusterQuota(e, r.now)
	}
	passes := func(what string, want int) {
		t.Helper()
		got := 0
		for r.now += 2e9; r.send(policy.GCRA, to("10.1.1.1"), 1000); r.now++ {
			got++
		}
		if got != want {
			t.Errorf("%s: %d packets pass, want %d; %+v", what, got, want, quota())
		}
	}
	grant := func(bytes uint64, instance uint32) {
		t.Helper()
		testenv.Must(t, pools.Renew(key, maps.Lease{Rate: 8e9, Safe: 8e9, Grant: maps.Grant{Bytes: bytes, Instance: instance}}))
	}
	put := func(want policy.Rule) {
		t.Helper()
		_, err := pools.Put(want)
		testenv.Must(t, err)
	}
	put(pool("c", 1e6))
	member := rule("10.0.0.0/8", policy.Unlimited, 0)
	member.Within = "gold"
	r.put(member)
	passes("at first", 1)
	grant(4000, quota().Instance)
	grant(8000, quota().Instance^2)
	passes("granted", 3)
	put(pool("c", 2e6))
	passes("with another quota", 0)
	e, _ := pools.Find(key)
	want := pool("c", 3e6)
	testenv.Must(t, pools.Prepare([]policy.Difference{{Have: &e.Rule, Want: &want}}, nil))
	r.Store.Time(r.now, r.now+60e9)
	testenv.Must(t, r.Store.Arm())
	grant(6000, quota().Instance)
	passes("while a change is pending", 2)
	r.now += 60e9
	passes("reverted", 0)
	if q := quota(); q.Whole != 2e6 || q.Used != 6000 || q.Bytes != 6000 || q.Day != 0 {
		t.Errorf("the quota is %+v", q)
	}
	r.now += 86400e9
	passes("the next day", 6)
	if q := quota(); q.Used != 6000 || q.Day != 1 {
		t.Errorf("the next day, the quota is %+v", q)
	}
	put(pool("d", 2e6))
	passes("in another cluster", 0)
	put(pool("", 10_000))
	passes("alone", 4)
	if q := quota(); q != (maps.ClusterQuota{}) {
		t.Errorf("alone, the quota is %+v", q)
	}
}

// Each host goes on from what it used before, if half of the slots are enough for all.
func TestUsedBefore(t *testing.T) {
	const hosts = 1 << 15
	r := newRig(t, maps.Size{Rules: 16, Buckets: 2 * hosts, Labels: 64, Also: true})
	before := maps.Used{Period: "month", Zone: "UTC", Time: time.Unix(1, 0), Keys: map[string]uint64{}}
	for host := range hosts {
		before.Keys[fmt.Sprintf("10.0.%d.%d/32", host>>8, host&255)] = uint64(1000 + host)
	}
	r.Store.Earlier = func(string) (maps.Used, bool) { return before, true }
	each := rule("10.0.0.0/8", policy.Unlimited, 0)
	each.Each = policy.Each{Kind: policy.EachHost}
	each.Also = policy.Also{Quota: policy.Quota{Bytes: 1e6, Period: before.Period}, Zone: before.Zone, Then: policy.ThenDrop}
	r.put(each)
	if got := r.Store.Used()[0].Keys; !stdmaps.Equal(got, before.Keys) {
		t.Errorf("%d of %d hosts go on", len(got), hosts)
	}
}
