package loader

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// pool is a pool of 10 mbit.
func pool(name string, changes ...func(*policy.Rule)) policy.Rule {
	r := policy.Rule{Pool: true, Prefix: policy.PoolKey(name), Rate: 1e7, Capacity: 200000, Label: policy.Label{Name: name}}
	for _, change := range changes {
		change(&r)
	}
	return r
}

func in(name policy.Within) func(*policy.Rule) { return func(r *policy.Rule) { r.Within = name } }
func guarantee(g policy.Guarantee) func(*policy.Rule) {
	return func(r *policy.Rule) { r.Guarantee = g }
}
func shared(r *policy.Rule) { r.Share.Kind = policy.ShareMember }

// delayed makes a pool delay its packets by at most 160 ms.
func delayed(r *policy.Rule) {
	r.Queue, r.Excess, r.ECNAbove = r.Capacity, policy.Delay, policy.ECNAbove(50*time.Millisecond)
}

// A chain of pools whose keys are in another order than they need.
var (
	uplink = pool("uplink", shared)
	site   = pool("site", in("uplink"), guarantee(2e6))
	sector = pool("sector", in("site"))
	inSite = rule("10.0.0.0/24", in("site"), guarantee(5e5))
)

func poolTable(pools ...policy.Rule) policy.Table {
	pools = slices.Clone(pools)
	policy.SortRules(pools)
	return policy.Table{Rules: pools}
}

// poolsOn applies pools, and rules for both directions of va.
func poolsOn(n *Namespace, o ApplyOptions, pools, egress, ingress []policy.Rule) error {
	_, err := n.Apply(append([]policy.Table{poolTable(pools...)}, both(egress, ingress)...), o)
	return err
}

// onPeer is a rule on another device than va.
func onPeer(r policy.Rule) policy.Table {
	return policy.Table{Device: "vb", Direction: policy.Egress, Match: policy.MatchDst, Rules: []policy.Rule{r}}
}

func putPools(n *Namespace, pools ...policy.Rule) error {
	_, err := n.Put(ApplyOptions{}, poolTable(pools...))
	return err
}

func readyPools(r *rig) {
	r.write(func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, []policy.Rule{stays, inSite}, nil)
	})
}

// otherPools moves a rule from a pool that goes to one that comes.
func otherPools(n *Namespace, o ApplyOptions) error {
	moved := inSite
	moved.Within = "sector"
	return poolsOn(n, o, []policy.Rule{pool("sector", in("uplink")), pool("uplink"), pool("empty")}, []policy.Rule{stays, moved}, []policy.Rule{rule("10.0.0.0/24", in("uplink"))})
}

var withPools = []steppedCommand{
	{"first pool", false, func(r *rig) {}, func(n *Namespace) error { return putPools(n, uplink) }},
	{"first pools together", false, func(r *rig) {}, func(n *Namespace) error { return putPools(n, uplink, site, sector) }},
	{"first pools and rules", true, func(r *rig) {}, func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, []policy.Rule{stays, inSite}, nil)
	}},
	{"other pools", false, readyPools, func(n *Namespace) error { return otherPools(n, ApplyOptions{}) }},
	{"no pools", false, readyPools, func(n *Namespace) error {
		return policyOn(n, ApplyOptions{Confirm: time.Hour}, []policy.Rule{stays, one}, nil)
	}},
	{"rule of a pool", false, readyPools, func(n *Namespace) error { return putOn(n, rule("10.0.1.0/24", in("uplink"))) }},
	{"growth with pools", false, func(r *rig) {
		readyPools(r)
		r.write(func(n *Namespace) error {
			return withHook(n, func(h *Hook) error { return h.Set.Load(fillers(leastRules - 6)) })
		})
	}, func(n *Namespace) error { return putOn(n, rule("10.0.1.0/24", in("site"))) }},
	{"rollback of pools", false, func(r *rig) {
		readyPools(r)
		r.write(func(n *Namespace) error { return otherPools(n, ApplyOptions{Confirm: time.Hour}) })
	}, func(n *Namespace) error { _, err := n.Rollback(); return err }},
	{"delete the last pool", false, func(r *rig) { r.setPools(uplink) }, func(n *Namespace) error {
		return deletePools(n, "uplink")
	}},
}

func init() { stepped = append(stepped, withPools...) }

// pools are the pools in force, by name.
func (r *rig) pools() (all string) {
	r.t.Helper()
	n, err := Read(r.options)
	testenv.Must(r.t, err)
	defer n.Close()
	h := n.Pools()
	defer h.Close()
	if h.Set == nil {
		return ""
	}
	var names []string
	for _, p := range h.Set.Policy() {
		names = append(names, fmt.Sprintf("%s %v within %q guaranteed %v", p.Label.Name, p.Rate, p.Within, p.Guarantee))
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// Pools need no hook, and the state of the namespace goes with the last of both.
func TestPoolsWithoutHooks(t *testing.T) {
	eachMode(t, func(t *testing.T, r *rig) {
		r.setPools(uplink, sector, site)
		want := `sector 10mbit within "site" guaranteed none, site 10mbit within "uplink" guaranteed 2mbit, uplink 10mbit within "" guaranteed none`
		if got := r.pools(); got != want {
			t.Errorf("the pools are %s", got)
		}
		r.put(inSite)
		r.meters(inSite, "10.0.0.7", 3)
		r.flush()
		if got := r.pools(); got != want {
			t.Errorf("after the last hook the pools are %s", got)
		}
		r.write(func(n *Namespace) error {
			return errors.Join(deletePools(n, "sector"), deletePools(n, "uplink", "site"))
		})
		r.nothingLeft()
	})
}

// What would not be right with the pools that there are is refused, and nothing changes.
func TestPoolsAreChecked(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	var users []policy.Rule
	for i := range 5 {
		users = append(users, rule(fmt.Sprintf("10.0.%d.0/24", i), in("site"), guarantee(3e5)))
	}
	r.write(func(n *Namespace) error { return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, users, nil) })
	before := r.state()
	small := pool("site", in("uplink"), guarantee(1e6))
	for what, test := range map[string]struct {
		says    string
		command func(n *Namespace) error
	}{
		"a rule in no pool":    {"ap", func(n *Namespace) error { return putOn(n, rule("10.0.9.0/24", in("ap"))) }},
		"a guarantee too many": {"", func(n *Namespace) error { return putOn(n, rule("10.0.9.0/24", in("site"), guarantee(6e5))) }},
		"a pool too small":     {"", func(n *Namespace) error { return putPools(n, small) }},
		"a cycle":              {"", func(n *Namespace) error { return putPools(n, pool("uplink", in("site"))) }},
		"a policy without a pool": {"uplink", func(n *Namespace) error {
			return poolsOn(n, ApplyOptions{}, []policy.Rule{site}, users, nil)
		}},
		"a pool in use": {"in use: within it is va egress 10.0.0.0/24, va egress 10.0.1.0/24, va egress 10.0.2.0/24 and 2 more", func(n *Namespace) error {
			return deletePools(n, "site")
		}},
		"the pool of a pool": {"in use: within it is site", func(n *Namespace) error { return deletePools(n, "uplink") }},
	} {
		if err := r.try(test.command); !errors.As(err, new(policy.PoolError)) && !errors.Is(err, ErrPoolInUse) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v", what, err)
		}
		if now := r.state(); now != before {
			t.Fatalf("%s: there is\n%v\nwant\n%v", what, now, before)
		}
	}
	r.write(func(n *Namespace) error { return putOn(n, rule("10.0.9.0/24", in("site"), guarantee(5e5))) })
	r.write(func(n *Namespace) error { // a pool goes with all that is within it
		hooks, err := n.Hooks()
		hooks = append(hooks, n.Pools())
		defer CloseHooks(hooks)
		keys := []netip.Prefix{policy.PoolKey("site"), policy.PoolKey("uplink"), netip.MustParsePrefix("10.0.9.0/24")}
		for _, r := range users {
			keys = append(keys, r.Prefix)
		}
		return errors.Join(err, deleteFrom(n, hooks, keys...))
	})
	r.nothingLeft()
}

// Tables are of one phase, whenever a change reverts.
func TestTablesWhileChangeReverts(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.write(func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{Confirm: time.Hour}, []policy.Rule{uplink, site}, []policy.Rule{inSite}, nil)
	})
	n, err := Read(r.options)
	testenv.Must(t, err)
	defer n.Close()
	for reads, reverted := 0, false; !reverted; reads++ {
		left := reads
		n.pins.store.UseClock(func() uint64 {
			if left--; left >= 0 {
				return maps.Now()
			}
			return maps.Now() + 2*uint64(time.Hour)
		})
		tables, err := n.Tables(Attached)
		if err = errors.Join(err, policy.CheckPools(tables)); err != nil {
			t.Fatalf("reverted after the phase was read %d times: %v", reads, err)
		}
		reverted = left >= 0
	}
}

// Rules of a device that has moved to another namespace stay in their pools.
func TestPoolOfMovedDevice(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.write(func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, []policy.Rule{inSite}, nil)
	})
	r.moveAway()
	if err := r.try(func(n *Namespace) error { _, err := n.Apply(nil, ApplyOptions{}); return err }); !errors.As(err, new(policy.PoolError)) {
		t.Errorf("apply without the pool: %v", err)
	}
}

// While a change is pending, the pools that it brings or removes may not be used, and pools do not change.
func TestPoolsWhileChangeIsPending(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	readyPools(r)
	r.write(func(n *Namespace) error { return otherPools(n, ApplyOptions{Confirm: time.Hour}) })
	for what, command := range map[string]func(n *Namespace) error{
		"a rule of a new pool": func(n *Namespace) error {
			_, err := n.Put(ApplyOptions{}, onPeer(rule("10.0.9.0/24", in("sector"))))
			return err
		},
		"a pool":         func(n *Namespace) error { return putPools(n, pool("other")) },
		"a pool deleted": func(n *Namespace) error { return deletePools(n, "empty") },
		"rules of a new device": func(n *Namespace) error {
			_, err := n.ApplyNew([]policy.Table{onPeer(rule("10.0.9.0/24", in("sector")))}, nil, nil)
			return err
		},
	} {
		if err := r.try(command); !errors.Is(err, ErrPending) {
			t.Errorf("%s: %v", what, err)
		}
	}
	r.write(func(n *Namespace) error {
		_, err := n.Put(ApplyOptions{}, onPeer(two))
		return err
	})
}

// A device that appears gets its rules, with those of their pools that are missing.
func TestPoolsOfNewHook(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	faster := pool("uplink", shared, func(r *policy.Rule) { r.Rate = 2e7 })
	r.setPools(faster)
	r.write(func(n *Namespace) error {
		done, err := n.ApplyNew(append([]policy.Table{poolTable(uplink, sector, site)}, both([]policy.Rule{inSite, rule("10.0.1.0/24", in("uplink"))}, nil)...), nil, nil)
		if len(done) != 1 || done[0].Device != "va" {
			t.Errorf("done: %+v", done)
		}
		return err
	})
	want := `site 10mbit within "uplink" guaranteed 2mbit, uplink 20mbit within "" guaranteed none`
	if got := r.pools(); got != want {
		t.Errorf("the pools are %s", got)
	}
	r.meters(inSite, "10.0.0.7", 3)
}

// A rollback brings pools back, with those that rules of devices that appeared since need.
func TestRollbackOfPools(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	readyPools(r)
	before := r.state()
	r.write(func(n *Namespace) error { return otherPools(n, ApplyOptions{}) })
	r.write(func(n *Namespace) error {
		done, err := n.Rollback()
		if len(done) != 3 || done[0].Device != "" || done[0].Rules != (maps.Difference{Added: 1, Removed: 2, Changed: 1}) {
			t.Errorf("done: %+v", done)
		}
		return err
	})
	if now := r.state(); now.hooks != before.hooks {
		t.Errorf("there is\n%v\nwant\n%v", now, before)
	}
	r.write(func(n *Namespace) error { return otherPools(n, ApplyOptions{}) })
	r.write(func(n *Namespace) error {
		_, err := n.ApplyNew([]policy.Table{onPeer(rule("10.0.9.0/24", in("sector")))}, nil, nil)
		return err
	})
	if err := r.try(func(n *Namespace) error { _, err := n.Rollback(); return err }); !errors.Is(err, ErrNoChange) {
		t.Errorf("rollback under a new rule: %v", err)
	}
}

// Rules of devices that appeared since and that draw from no pool do not stand in its way.
func TestRollbackOfPoolsUnderOtherRules(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	readyPools(r)
	before := r.pools()
	r.write(func(n *Namespace) error { return otherPools(n, ApplyOptions{}) })
	r.write(func(n *Namespace) error { _, err := n.ApplyNew([]policy.Table{onPeer(two)}, nil, nil); return err })
	r.rollback()
	if now := r.pools(); now != before {
		t.Errorf("the pools are %s, want %s", now, before)
	}
}

// A device whose rules draw from a pool that delays is looked at as if they delayed themselves.
func TestPoolsThatDelay(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	delays := pool("uplink", delayed)
	r.write(func(n *Namespace) error {
		return poolsOn(n, ApplyOptions{}, []policy.Rule{uplink, site}, []policy.Rule{inSite}, nil)
	})
	for what, command := range map[string]func(n *Namespace) error{
		"set": func(n *Namespace) error { return putPools(n, delays) },
		"apply": func(n *Namespace) error {
			return poolsOn(n, ApplyOptions{}, []policy.Rule{delays, site}, []policy.Rule{inSite}, nil)
		},
	} {
		if err := r.try(command); !errors.As(err, new(*UnqueuedError)) && !errors.Is(err, fq.ErrNoFQ) {
			t.Errorf("%s on a device without fq: %v", what, err)
		}
	}
	r.setPools(pool("other", delayed))
}

// Pools of another layout, without any hook, are only flushed.
func TestPoolsOfAnotherLayout(t *testing.T) {
	r := newRig(t, TCX, policy.Egress)
	r.setPools(uplink)
	r.anotherLayout()
	if err := r.try(func(n *Namespace) error { return putPools(n, uplink) }); !isOtherLayout(err) {
		t.Errorf("set: %v", err)
	}
	r.write(flushEverything)
	r.nothingLeft()
}
