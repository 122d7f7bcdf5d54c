package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func poolCommand(e *env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool set|delete|show ...",
		Short: "Share one rate among rules",
		Long: `Set, delete and show pools. A pool is a named limit that rules draw from, on any device and in both directions.

A packet passes if its rule and all pools above have room. It is then charged to all of them; if one refuses it, to
none. Pools may be within other pools.`,
		Example: `  shapectl pool set uplink --new --rate 1gbit --share member
  shapectl set eth0 egress 10.0.0.7 --rate 200mbit --within uplink --guarantee 20mbit
  shapectl show --tree`,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) > 0 {
				return unknownCommand(cmd, given[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			return inputf("pool: what to do is missing; use set, delete or show")
		},
	}
	cmd.AddCommand(poolSetCommand(e), poolDeleteCommand(e), poolShowCommand(e))
	return cmd
}

func poolSetCommand(e *env) *cobra.Command {
	var limit limitFlags
	var isNew bool
	cmd := &cobra.Command{
		Use:   "set NAME [flags]",
		Short: "Change a pool, or make one with --new",
		Long: `Change a pool: only what the flags say changes. At a new rate, a burst or queue lasts as long as before. NAME is no
pattern.

With --new, make a pool, which needs a rate. If it exists already with what the flags say, that is a success; if it differs,
nothing is changed. Without --new, a name that does not exist is an error, so a typo makes no pool.

To change several pools at one moment, edit what 'shapectl export' prints, and run 'shapectl apply --confirm 60s' with it.`,
		Example: `  shapectl pool set uplink --new --rate 1gbit --share member
  shapectl pool set ap-1 --new --rate 100mbit --within uplink --guarantee 20mbit
  shapectl pool set ap-1 --rate 150mbit`,
		Args:              args(1, 1),
		ValidArgsFunction: e.completePool,
		RunE: func(cmd *cobra.Command, given []string) error {
			limit.given = cmd.Flags().Changed
			e.noteRates(cmd)
			if !limit.any() {
				return inputf("pool set: what to set is missing; give a rate, such as --rate 1gbit")
			}
			if err := policy.CheckPoolName(given[0]); err != nil {
				return inputf("pool set: %w", err)
			}
			return e.setPool(given[0], limit, isNew)
		},
	}
	limit.addPool(cmd.Flags())
	cmd.Flags().BoolVar(&isNew, "new", false, "make the pool")
	e.addConfirm(cmd.Flags())
	e.addSetupFQ(cmd.Flags())
	groupFlags(cmd.Flags(), queueFlagsTitle, "setup-fq")
	e.completes(cmd, "within", e.completeWithin)
	return cmd
}

func (e *env) setPool(name string, limit limitFlags, isNew bool) error {
	return e.with(loader.Write, "set pool "+plain.Line(name), func(n *loader.Namespace) error {
		if err := e.checkWithin(n, limit); err != nil {
			return err
		}
		have, found := findPool(n, name)
		if found {
			if want, err := limit.over(&have, 0); isNew && err == nil && want != have {
				return inputf("there already is a pool %s with other values; nothing was changed; to change it, leave --new out", plain.Line(name))
			}
			return e.changePools(n, limit, have)
		}
		if strings.ContainsAny(name, "*?[") {
			return e.noPattern(n, name, limit)
		}
		if !isNew {
			return e.noPool(n, name)
		}
		pool, err := limit.Pool(name)
		if above, _ := findPool(n, string(limit.Within)); err != nil && !limit.given("rate") && above.Pool {
			return inputf("a new pool needs a rate of its own; for all that pool %s has, give --rate %v", plain.Line(above.Label.Name), above.Rate)
		}
		if err != nil {
			return inputError(err)
		}
		return e.put(n, policy.Table{Rules: []policy.Rule{pool}})
	})
}

// noPattern is the error for a new pool whose name is a pattern: show takes patterns, and so may be thought of set.
func (e *env) noPattern(n *loader.Namespace, name string, limit limitFlags) error {
	var commands []string
	if policyfile.IsPattern(name) {
		pools, err := e.findRules(n, filterRules{pools: true, pool: name}, measure.Details{})
		if err != nil {
			return err
		}
		flags := limit.all() + e.how()
		for _, pool := range slices.Sorted(slices.Values(pools.Names())) {
			commands = append(commands, e.suggest("pool set"+flags, pool))
		}
	}
	if commands == nil {
		return inputf("there is no such pool, and a new one cannot have *, ? or [ in its name, which 'pool show' takes as a pattern")
	}
	return inputf("set takes no pattern, and a new pool cannot have *, ? or [ in its name; nothing was changed; %s", e.either(commands))
}

// changePools changes pools in the options that were given.
func (e *env) changePools(n *loader.Namespace, limit limitFlags, pools ...policy.Rule) error {
	for i := range pools {
		pool, err := limit.over(&pools[i], 0)
		if err != nil {
			return inputError(err)
		}
		if of := pools[i].Cluster.Name; of != "" && pool.Cluster.Name == "" && !limit.given("rate") {
			return inputf("pool %s has %v together with the other hosts of cluster %s, and would have it for itself; give its own --rate, or remove the pool; nothing was changed",
				plain.Line(pool.Label.Name), pool.Rate, plain.Line(string(of)))
		}
		pools[i] = pool
	}
	policy.SortRules(pools)
	return e.put(n, policy.Table{Rules: pools})
}

// noPool is the error for a pool to be changed that does not exist.
func (e *env) noPool(n *loader.Namespace, name string) error {
	pools, err := e.findRules(n, filterRules{pools: true}, measure.Details{})
	if err != nil {
		return err
	}
	meant := ""
	if similar := plain.SimilarName(name, pools.Names()); similar != "" {
		meant = "did you mean " + plain.Line(similar) + "? "
	}
	return inputf("there is no pool %s; %sto make it, give --new; nothing was changed", plain.Line(name), meant)
}

// checkWithin returns an error if a pool that --within names does not exist.
func (e *env) checkWithin(n *loader.Namespace, limit limitFlags) error {
	name := string(limit.Within)
	if _, found := findPool(n, name); found || name == "" {
		return nil
	}
	pools, err := e.findRules(n, filterRules{pools: true}, measure.Details{})
	if err != nil {
		return err
	}
	if similar := plain.SimilarName(name, pools.Names()); similar != "" {
		return inputf("there is no pool %s; did you mean %s?", plain.Line(name), plain.Line(similar))
	}
	return inputf("there is no pool %s; make it first: %s", plain.Line(name), e.suggest("pool set --new --rate RATE", name))
}

func findPool(n *loader.Namespace, name string) (policy.Rule, bool) {
	h := n.Pools()
	defer h.Close()
	if h.Set == nil {
		return policy.Rule{}, false
	}
	entry, found := h.Set.Find(policy.PoolKey(name))
	return entry.Rule, found
}

func poolDeleteCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:               "delete NAME",
		Short:             "Delete a pool",
		Long:              `Delete a pool that nothing is within. If there is no such pool, delete says so and succeeds.`,
		Example:           `  shapectl pool delete ap-1`,
		Args:              args(1, 1),
		ValidArgsFunction: e.completePool,
		RunE:              func(_ *cobra.Command, given []string) error { return e.deletePool(given[0]) },
	}
}

func (e *env) deletePool(name string) error {
	return e.with(loader.Write, "delete pool "+plain.Line(name), func(n *loader.Namespace) error {
		pools, err := e.findRules(n, filterRules{pools: true}, measure.Details{Sentences: true})
		if err != nil {
			return err
		}
		if i := slices.Index(pools.Names(), name); i >= 0 {
			if _, err := n.DeletePool(name); err != nil {
				return err
			}
			return e.deleted(pools[i : i+1])
		}
		none := filterRules{pools: true, pool: name}
		if similar := plain.SimilarName(name, pools.Names()); similar != "" {
			e.say("shapectl: %s; did you mean %s?", none.none(), plain.Line(similar))
		}
		return e.nothingToDelete(none)
	})
}

func poolShowCommand(e *env) *cobra.Command {
	var o showOptions
	cmd := &cobra.Command{
		Use:   "show [NAME] [flags]",
		Short: "Show pools and what happened to their packets",
		Long: `Show all pools, those whose name matches a pattern, or one in full. 'shapectl show NAME' also shows what is within a
pool.

PASSED and BORROWED count since a pool was set, or with --interval over that time. BORROWED is what passed beyond
the pool's guarantee. DROPPED is what the packets of all rules now within the pool lost, whoever dropped them: also
their rules, and pools below and above. REFUSED is what the pool dropped itself. Both are shares of all packets of
these rules, since these were set.`,
		Example: `  shapectl pool show
  shapectl pool show uplink --interval 1s
  shapectl pool show 'home-*' --sort dropped --top 10`,
		Args:              args(0, 1),
		ValidArgsFunction: e.completePool,
		RunE: func(cmd *cobra.Command, given []string) error {
			want := filterRules{pools: true}
			if len(given) > 0 {
				if want.pool = given[0]; want.pool == "" {
					return inputf("pool show: the name is empty; leave it out for all pools")
				}
			}
			if err := o.check(cmd); err != nil {
				return err
			}
			return e.show(want, false, o)
		},
	}
	o.addFlags(e, cmd, "name", "show only the first `N` pools")
	return cmd
}

// noRuleBut says that a name which no rule has is that of a pool.
func (e *env) noRuleBut(n *loader.Namespace, verb string, of ruleName) error {
	if _, found := findPool(n, of.name); !found {
		return nil
	}
	return inputf("no %s has that name, but a pool does; write %s", of.rule(), e.suggest("pool "+verb+of.ofPool, of.name))
}
