package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func setCommand(e *env) *cobra.Command {
	var limit limitFlags
	var isNew bool
	cmd := &cobra.Command{
		Use:   "set DEV ingress|egress CIDR|any | NAME [ingress|egress] [flags]",
		Short: "Set a rule or pool, or change it",
		Long: `Set a rule, or change what the flags say of it. A new rule needs --rate or --within, and has defaults for the rest. At a
new rate, a burst or queue lasts as long as before; with colours, burst sizes other than the default stay.

any sets two rules, 0.0.0.0/0 and ::/0. Each has its own bucket and gets the whole rate.

NAME is the exact name of something that is there. All of it changes at one moment:

  rules      all with this name, on all devices. If they have no rate of their
             own, and only they are within their pools, then --rate and all
             other flags that a pool can have change these pools.
  a pool     Its name wins over that of rules within it. With a direction,
             NAME is that of the rules.
  a device   its rules for any, or their pools: what a pattern gave it.

Rules or pools with different rates, such as for down and up, do not get one rate by NAME: give a direction, too. The
error lists their rates, and the commands.

With --new, NAME is a new pool: a rate that rules share, on any device and in both directions. A packet passes if its rule
and all pools above have room. It is then charged to all of them; if one refuses it, to none. If the pool exists already
with what the flags say, that is a success; if it differs, nothing is changed.

With --within, a rule or pool draws from a pool. A rule within a pool needs no rate of its own. It leaves its pool with
--within none.

With --confirm, the change reverts after that time unless you run 'shapectl confirm' before, as with
'shapectl apply'.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl set eth0 ingress any --rate 1gbit
  shapectl set alice egress --rate 50mbit
  shapectl set vm102 --rate 400mbit --confirm 60s
  shapectl set uplink --new --rate 1gbit --share member
  shapectl set eth0 egress 10.0.0.7 --rate 200mbit --within uplink --guarantee 20mbit`,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) == 4 {
				if _, err := policy.ParseRate(given[3]); err == nil {
					return inputf("set: write the rate as a flag: --rate %s", given[3])
				}
			}
			return args(1, 3)(cmd, given)
		},
		ValidArgsFunction: e.orPool(e.labelled(e.completeNetwork, nameOf)),
		RunE: func(cmd *cobra.Command, given []string) error {
			limit.given = cmd.Flags().Changed
			e.noteRates(cmd)
			if !limit.any() {
				return inputf("set: what to change is missing; give a flag, such as --rate 10mbit")
			}
			if len(given) < 3 {
				of, err := parseName("set", given)
				if err != nil {
					return err
				}
				if isNew && of.direction != nil {
					return inputf("set: --new makes a pool, which has no direction; leave %v out", of.direction)
				}
				of.isNew, of.flags = isNew, limit.all()+e.how()
				return e.setNamed(of, limit)
			}
			if isNew {
				return inputf("set: --new makes a pool, and takes only its name; a new rule needs no flag")
			}
			which, err := parseFilter("set", given)
			if err != nil {
				return err
			}
			return e.set(which, limit)
		},
	}
	limit.add(cmd.Flags(), "dst on egress, src on ingress", func(*policy.Option) bool { return true })
	limit.addShadow(cmd.Flags())
	cmd.Flags().BoolVar(&isNew, "new", false, "make a pool")
	groupFlags(cmd.Flags(), poolFlagsTitle, "new")
	e.addConfirm(cmd.Flags())
	e.addSetupFQ(cmd.Flags())
	groupFlags(cmd.Flags(), queueFlagsTitle, "setup-fq")
	e.completes(cmd, "within", e.completeWithin)
	return cmd
}

// set sets rules by their networks.
func (e *env) set(which filterRules, limit limitFlags) error {
	doing := fmt.Sprintf("set %s on %s %s", which.networks, plain.Line(which.device), which.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		dev, err := device(which.device)
		if err != nil {
			return err
		}
		if err := e.checkWithin(n, limit); err != nil {
			return err
		}
		h, err := n.Find(dev.Name, *which.direction)
		if err != nil {
			return err
		}
		t := policy.Table{Device: dev.Name, Direction: *which.direction, Match: which.direction.FarSide()}
		if h != nil {
			defer h.Close()
		}
		switch {
		case limit.given("match"):
			t.Match = limit.match
		case h != nil && h.Set.InForce():
			t.Match = h.Match() // of all rules of the direction
		}
		for _, p := range which.networks {
			var have maps.Entry
			found := false
			if h != nil {
				have, found = h.Set.Find(p)
			}
			var rule policy.Rule
			if found {
				rule, err = limit.over(&have.Rule, dev.L2Bytes)
			} else {
				rule, err = limit.Rule(p, dev.L2Bytes)
			}
			if err != nil {
				return inputError(err)
			}
			t.Rules = append(t.Rules, rule)
		}
		return e.put(n, t)
	})
}
