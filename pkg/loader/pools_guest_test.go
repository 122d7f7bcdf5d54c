//go:build guest

package loader

import (
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A pool that begins to delay sets up the fq of the devices whose rules draw from it.
func TestFQForPools(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.options.SetupFQ = true
	r.write(func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, []policy.Rule{inSite}, nil)
	})
	r.write(func(n *Namespace) error {
		if err := putPools(n, pool("uplink", delayed)); err != nil {
			return err
		}
		s, err := fq.Look(testenv.Link(t, "va").Attrs().Index)
		if err == nil && !s.Ours() {
			t.Errorf("there is no fq: %+v", s)
		}
		return err
	})
}

// On ingress, the device has an ifb for as long as a pool delays.
func TestIfbForPools(t *testing.T) {
	r := newRig(t, TCX, policy.Ingress)
	r.write(func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, nil, []policy.Rule{inSite})
	})
	for _, pool := range []policy.Rule{uplink, pool("uplink", shared, delayed), uplink} {
		r.setPools(pool)
		if got, want := r.hook("va").Set.Ifb() != 0, pool.Excess == policy.Delay; got != want {
			t.Errorf("with %v, there is an ifb: %t", pool, got)
		}
	}
}
