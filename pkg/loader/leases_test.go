package loader

import (
	"fmt"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// lease is that of a pool now; false for none.
func (r *rig) lease(name string) (l maps.Lease, ok bool) {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		h := n.Pools()
		defer h.Close()
		l, ok = h.Set.Lease(policy.PoolKey(name))
		return nil
	})
	return l, ok
}

func (r *rig) renew(name string, l maps.Lease) {
	r.t.Helper()
	r.write(func(n *Namespace) error {
		h := n.Pools()
		defer h.Close()
		return h.Set.Renew(policy.PoolKey(name), l)
	})
}

// setPools sets pools by a command of its own.
func (r *rig) setPools(pools ...policy.Rule) {
	r.t.Helper()
	r.write(func(n *Namespace) error { return putPools(n, pools...) })
}

func inCluster(name policy.ClusterName, safe policy.Rate) func(*policy.Rule) {
	return func(p *policy.Rule) { p.Cluster = policy.Cluster{Name: name, Safe: safe} }
}

// Leases outlive the command that renewed them, and the growth of the store by further clusters.
func TestLeasesStay(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	want, fresh := maps.Lease{Rate: policy.MinRate * 3, Safe: policy.MinRate * 2, Until: maps.Now() + 1e12}, maps.Lease{Rate: policy.MinRate * 2, Safe: policy.MinRate * 2}
	for i := range 9 {
		name := fmt.Sprint("pool ", i)
		r.setPools(pool(name, inCluster(policy.ClusterName(name), policy.MinRate*2)))
		if got, ok := r.lease(name); !ok || got != fresh {
			t.Errorf("a new lease is %+v %v", got, ok)
		}
		if i == 0 {
			r.renew(name, want)
		}
		if got, ok := r.lease("pool 0"); !ok || got != want {
			t.Errorf("with %d clusters, the lease is %+v %v", i+1, got, ok)
		}
	}
}

// A pool with a lease gets another cluster, which has granted nothing.
func TestLeaseOfAnotherCluster(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.setPools(pool("p", inCluster("a", 0)))
	for _, cluster := range []policy.ClusterName{"b", "c"} {
		r.renew("p", maps.Lease{Rate: policy.MinRate * 9, Safe: policy.MinRate * 8, Until: maps.Now() + 1e12, Known: 1e9, Epoch: 1})
		r.setPools(pool("p", inCluster(cluster, 0)))
		if got, ok := r.lease("p"); !ok || got != (maps.Lease{Rate: policy.MinRate, Safe: policy.MinRate}) {
			t.Errorf("in cluster %s: %+v %v", cluster, got, ok)
		}
	}
}

// A pool that adapts has a lease for each side of a change. Those of earlier changes are free again.
func TestLeasesOfAdapting(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	var room uint32
	for i := range policy.Rate(20) {
		rate := 1e6 + i*1e5
		r.setPools(pool("p", func(p *policy.Rule) { p.Rate, p.Adapt.Min = rate, policy.MinRate }))
		if got, ok := r.lease("p"); !ok || got.At(maps.Now()) != rate || got.Safe != rate {
			t.Errorf("change %v: %+v %v", i, got, ok)
		}
		n, err := Read(r.options)
		testenv.Must(t, err)
		if got := n.pins.store.Size().Leases; i <= 2 {
			room = got
		} else if got != room {
			t.Errorf("change %v: room for %d leases, after %d", i, got, room)
		}
		n.Close()
	}
	r.setPools(pool("p"))
	if got, ok := r.lease("p"); ok {
		t.Errorf("without adaptation: %+v", got)
	}
}
