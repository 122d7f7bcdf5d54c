package loader

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// One process renews leases. It follows the maps when they are replaced, and does not wait for commands.
func TestLessee(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	pool := func(name string) policy.Rule { return pool(name, inCluster(policy.ClusterName(name), 0)) }
	l, other := NewLessee(ClusterLeases), NewLessee(ClusterLeases)
	defer l.Close()
	defer other.Close()
	names := func(l *Lessee) (names []string, err error) {
		err = l.Pools(r.options, func(pools *maps.Set) bool {
			for _, e := range pools.Rules() {
				names = append(names, e.Label.Name)
			}
			return true
		})
		return names, err
	}
	has := func(want int) {
		t.Helper()
		if got, err := names(l); err != nil || len(got) != want {
			t.Errorf("the pools are %v, %v", got, err)
		}
	}
	renews := func(name string, rate policy.Rate) {
		t.Helper()
		testenv.Must(t, l.Renew(r.options, func(pools *maps.Set) {
			lease := maps.Lease{Rate: rate, Safe: 8_000, Until: maps.Now() + 1e9, Known: 24_000}
			testenv.Must(t, pools.Renew(policy.PoolKey(name), lease))
		}))
		if lease, ok := r.lease(name); !ok || lease.Rate != rate || lease.Known != 24_000 {
			t.Errorf("the lease of %s is %+v", name, lease)
		}
	}
	held := func(want bool) {
		t.Helper()
		for range 2 { // it lets go of the lock
			if got, err := HasLessee(r.options, ClusterLeases); err != nil || got != want {
				t.Errorf("a process that renews leases: %v, %v", got, err)
			}
		}
		if got, err := HasLessee(r.options, LineLeases); err != nil || got {
			t.Errorf("a process that renews leases of another kind: %v, %v", got, err)
		}
	}
	held(false)
	has(0) // there are no maps
	r.setPools(pool("a"))
	held(false)
	has(1)
	held(true)
	renews("a", 500_000)
	if _, err := names(other); !errors.Is(err, ErrLessee) {
		t.Errorf("a second one: %v", err)
	}
	line, none := NewLessee(LineLeases), NewLessee(ClusterLeases)
	defer line.Close()
	if got, err := names(line); err != nil || len(got) != 1 {
		t.Errorf("one for leases of another kind: %v, %v", got, err)
	}
	if err := none.Pools(r.options, func(*maps.Set) bool { return false }); err != nil {
		t.Errorf("one that renews nothing: %v", err)
	}
	r.write(func(n *Namespace) error {
		if err := l.Renew(r.options, func(*maps.Set) { t.Error("beside another command") }); !errors.Is(err, unix.EWOULDBLOCK) {
			t.Errorf("with a command at work: %v", err)
		}
		return nil
	})

	before, err := CurrentGeneration(r.options)
	testenv.Must(t, err)
	r.setPools(pool("b"), pool("c"), pool("d")) // for whose names there is no room
	if after, err := CurrentGeneration(r.options); err != nil || after == before {
		t.Errorf("the maps were not replaced: %v", err)
	}
	has(4)
	renews("b", 400_000)

	r.write(func(n *Namespace) error { return deletePools(n, "a", "b", "c", "d") })
	if pins := testenv.Pins(t, r.options.BPFFS); len(pins) != 0 {
		t.Errorf("without rules there are pins: %v", pins)
	}
	has(0)
	r.setPools(pool("a"))
	has(1)
	renews("a", 300_000)
	if _, err := names(other); !errors.Is(err, ErrLessee) {
		t.Errorf("a second one, after all rules were deleted: %v", err)
	}
	l.Close()
	held(false)
	if got, err := names(other); err != nil || len(got) != 1 {
		t.Errorf("once the first one is gone: %v, %v", got, err)
	}
}

// While no pool has leases to renew, a Lessee keeps no maps open, and looks again when rules change.
func TestLesseeRests(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	l := NewLessee(LineLeases)
	defer l.Close()
	for i, name := range []string{"first", "second", ""} {
		if name != "" {
			r.setPools(pool(name))
		}
		looked := 0
		for range 2 {
			testenv.Must(t, l.Pools(r.options, func(pools *maps.Set) bool { looked = len(pools.Rules()); return false }))
		}
		if want := []int{1, 2, 0}[i]; looked != want || l.kept.store != nil {
			t.Errorf("it saw %d pools, want %d, and has the maps %v", looked, want, l.kept.store)
		}
	}
}
