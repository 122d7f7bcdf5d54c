package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func setCommand(e *env) *cobra.Command {
	var limit limitFlags
	cmd := &cobra.Command{
		Use:   "set DEV ingress|egress CIDR|any --rate RATE [flags]",
		Short: "Set a rule, or change it",
		Long: `Set a rule, or change it. A flag that is not given has its default, but for --name and --note: a rule keeps
them. A rule that is set follows no plan any more.

any is 0.0.0.0/0 and ::/0. Each of the two has a bucket of its own and gets the rate.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl set eth0 ingress any --rate 1gbit`,
		Args:              args(3, 3),
		ValidArgsFunction: e.completeNetwork,
		RunE: func(cmd *cobra.Command, given []string) error {
			rule, err := parseFilter("set", given)
			if err != nil {
				return err
			}
			if !cmd.Flags().Changed("rate") {
				return inputf("set: --rate is missing; say how much, such as --rate 10mbit, or --rate unlimited")
			}
			if !cmd.Flags().Changed("match") {
				limit.match = rule.direction.FarSide()
			}
			limit.named, limit.noted = cmd.Flags().Changed("name"), cmd.Flags().Changed("note")
			return e.set(rule, limit)
		},
	}
	limit.add(cmd.Flags(), "the far side")
	limit.addLabel(cmd.Flags())
	shadow := flagValue{"limit", "", func(s string) (err error) {
		limit.Shadow, err = policy.ParseShadow(s)
		return err
	}}
	once(cmd.Flags(), shadow, "shadow", "limit that only counts: rate=5mbit,each=host")
	e.addSetupFQ(cmd.Flags())
	groupFlags(cmd.Flags(), queueFlagsTitle, "setup-fq")
	return cmd
}

func (e *env) set(which filterRules, limit limitFlags) error {
	doing := fmt.Sprintf("set %s on %s %s", which.networks, which.device, which.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		dev, err := device(which.device)
		if err != nil {
			return err
		}
		h, err := n.Find(dev.Name, *which.direction)
		if err != nil {
			return err
		}
		if h != nil {
			defer h.Close()
		}
		var rules []policy.Rule
		for _, p := range which.networks {
			rule, err := limit.Rule(p, dev.L2Bytes)
			if err != nil {
				return inputError(err)
			}
			if h != nil {
				have, _ := h.Set.Find(p)
				rule.Label = limit.label(rule.Label, have.Label)
			}
			rules = append(rules, rule)
		}
		change, err := n.Put(dev, *which.direction, limit.match, rules...)
		if err != nil {
			return err
		}
		if change.Upgraded {
			e.say("%s %s: the program of another build was replaced; rules, buckets and counters were kept", dev.Name, which.direction)
		}
		if change.Reattached != "" {
			e.say("%s %s: was not in force (%s); all its rules are attached again", dev.Name, which.direction, change.Reattached)
		}
		which.device = dev.Name
		set, err := findRules(n, which)
		if err != nil {
			return err
		}
		if err := e.print(set, set.Sentences); err != nil {
			return err
		}
		return e.queued(n, dev.Name, change)
	})
}
