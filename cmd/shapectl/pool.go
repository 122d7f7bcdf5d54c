package main

import (
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// setPool changes a pool, or makes it. It is there if its Pool is set.
func (e *env) setPool(n *loader.Namespace, of target, have policy.Rule, limit limitFlags) error {
	switch {
	case limit.Gives("name"):
		return inputf("a pool keeps its name; leave --name out, or make another pool with --new, and let the rules be within it")
	case limit.matched:
		return inputf("--match is of rules, and this is a pool; leave it out")
	case have.Pool:
		if want, err := limit.over(&have, 0); of.isNew && err == nil && want != have {
			return inputf("there already is a pool %s with other values; nothing was changed; to change it, leave --new out", plain.Line(of.name))
		}
		return e.changePools(n, limit, have)
	case strings.ContainsAny(of.name, "*?["):
		return inputf("a new pool cannot have *, ? or [ in its name, which 'show --pools' takes as a pattern; choose another name")
	}
	pool, err := limit.Pool(of.name)
	if above, _ := findPool(n, string(limit.Within)); err != nil && !limit.Gives("rate") && above.Pool {
		return inputf("a new pool needs a rate of its own; for all that pool %s has, give --rate %v", plain.Line(above.Label.Name), above.Rate)
	}
	if err != nil {
		return inputError(err)
	}
	return e.put(n, limit, policy.Table{Rules: []policy.Rule{pool}})
}

// changePools changes pools in the options that were given.
func (e *env) changePools(n *loader.Namespace, limit limitFlags, pools ...policy.Rule) error {
	for i := range pools {
		pool, err := limit.over(&pools[i], 0)
		if err != nil {
			return inputError(err)
		}
		if of := pools[i].Cluster.Name; of != "" && pool.Cluster.Name == "" && !limit.Gives("rate") {
			return inputf("pool %s has %v together with the other hosts of cluster %s, and would have it for itself; give its own --rate, or remove the pool; nothing was changed",
				plain.Line(pool.Label.Name), pool.Rate, plain.Line(string(of)))
		}
		pools[i] = pool
	}
	policy.SortRules(pools)
	return e.put(n, limit, policy.Table{Rules: pools})
}

// checkWithin returns an error if a pool that --within names does not exist.
func (e *env) checkWithin(n *loader.Namespace, limit limitFlags) error {
	name := string(limit.Within)
	if _, found := findPool(n, name); found || name == "" {
		return nil
	}
	if err := n.Readable(); err != nil {
		return err
	}
	return inputf("there is no pool %s; %s", plain.Line(name), didYouMean(name, poolNames(n), "make it first: "+e.suggest("set --new --rate RATE", name)))
}

func poolNames(n *loader.Namespace) (names []string) {
	for _, p := range poolTree(n).Nodes {
		names = append(names, p.Pool.Label.Name)
	}
	return names
}

func findPool(n *loader.Namespace, name string) (policy.Rule, bool) {
	h := n.Pools()
	defer h.Close()
	if h.Set == nil {
		return policy.Rule{}, false
	}
	entry, found := h.Set.Find(policy.PoolKey(name))
	if !found { // the last change may have removed it
		return policy.Rule{}, false
	}
	return entry.Rule, true
}
