package loader

import (
	"fmt"
	"testing"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Leases outlive the command that renewed them, and the growth of the store by further clusters.
func TestLeasesStay(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	leased := func(i int) policy.Rule {
		return pool(fmt.Sprint("pool ", i), func(p *policy.Rule) {
			p.Cluster = policy.Cluster{Name: policy.ClusterName(p.Label.Name), Safe: policy.MinRate * 2}
		})
	}
	first := leased(0)
	want := maps.Lease{Rate: policy.MinRate * 3, Safe: policy.MinRate * 2, Until: maps.Now() + 1e12}
	for i := range 9 {
		r.write(func(n *Namespace) error { return putPools(n, leased(i)) })
		if i == 0 {
			r.write(func(n *Namespace) error {
				h := n.Pools()
				defer h.Close()
				return h.Set.Renew(first.Prefix, want)
			})
		}
		r.write(func(n *Namespace) error {
			h := n.Pools()
			defer h.Close()
			got, ok := h.Set.Lease(first.Prefix)
			if !ok || got != want {
				t.Errorf("with %d clusters, the lease is %+v %v", i+1, got, ok)
			}
			last, ok := h.Set.Lease(leased(i).Prefix)
			if fresh := (maps.Lease{Rate: policy.MinRate * 2, Safe: policy.MinRate * 2}); i > 0 && (!ok || last != fresh) {
				t.Errorf("a new lease is %+v %v", last, ok)
			}
			return nil
		})
	}
}

// TestLeaseOfAnotherCluster gives a pool with a lease another cluster, which has
// granted nothing.
func TestLeaseOfAnotherCluster(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	of := func(cluster policy.ClusterName) policy.Rule {
		return pool("p", func(p *policy.Rule) { p.Cluster.Name = cluster })
	}
	key := of("a").Prefix
	r.write(func(n *Namespace) error { return putPools(n, of("a")) })
	for _, cluster := range []policy.ClusterName{"b", "c"} {
		r.write(func(n *Namespace) error {
			h := n.Pools()
			defer h.Close()
			return h.Set.Renew(key, maps.Lease{Rate: policy.MinRate * 9, Safe: policy.MinRate * 8, Until: maps.Now() + 1e12, Known: 1e9, Epoch: 1})
		})
		r.write(func(n *Namespace) error { return putPools(n, of(cluster)) })
		r.write(func(n *Namespace) error {
			h := n.Pools()
			defer h.Close()
			if got, ok := h.Set.Lease(key); !ok || got != (maps.Lease{Rate: policy.MinRate, Safe: policy.MinRate}) {
				t.Errorf("in cluster %s: %+v %v", cluster, got, ok)
			}
			return nil
		})
	}
}

// A pool that adapts has a lease for each side of a change. Those of earlier changes are free again.
func TestLeasesOfAdapting(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	adapting := func(rate policy.Rate) policy.Rule {
		return pool("p", func(p *policy.Rule) { p.Rate, p.Adapt.Min = rate, policy.MinRate })
	}
	key, leases := adapting(1e6).Prefix, uint32(0)
	for i := range policy.Rate(20) {
		rate := 1e6 + i*1e5
		r.write(func(n *Namespace) error { return putPools(n, adapting(rate)) })
		r.write(func(n *Namespace) error {
			h := n.Pools()
			defer h.Close()
			if got, ok := h.Set.Lease(key); !ok || got.At(maps.Now()) != rate || got.Safe != rate {
				t.Errorf("change %v: %+v %v", i, got, ok)
			}
			if i == 2 {
				leases = h.Set.Store.Size().Leases
			}
			if got := h.Set.Store.Size().Leases; i > 2 && got != leases {
				t.Errorf("change %v: room for %d leases, after %d", i, got, leases)
			}
			return nil
		})
	}
	r.write(func(n *Namespace) error { return putPools(n, pool("p", func(*policy.Rule) {})) })
	r.write(func(n *Namespace) error {
		h := n.Pools()
		defer h.Close()
		if got, ok := h.Set.Lease(key); ok {
			t.Errorf("without adaptation: %+v", got)
		}
		return nil
	})
}
