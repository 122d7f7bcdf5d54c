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
		Use:   "set DEV ingress|egress CIDR --rate RATE [flags]",
		Short: "Set a rule, or change it",
		Long: `Set a rule, or change it: a flag that is not given has its default, also where
the rule was set with another value before. Buckets owe what they owed, up to
the new capacity, and counters go on.

With --excess delay packets are held back and not dropped, until their turn comes:
with --algorithm leaky all of them, so that they leave evenly, --capacity being
how much may wait, or how long; with gcra those beyond the capacity, which leaves at
once, up to --queue. What finds the queue full is dropped, and what would wait for
longer than --ecn-above is marked, where it can be. No packet waits for more than 9s.
With --order sparse-first a packet of a flow that has none waiting, and that sends
no more than 2 KiB in the time that a full queue takes, goes ahead of all that wait,
so that in any time capacity and queue may leave beyond what the rate lets through.
It is the qdisc fq of the device that holds packets back; without fq the rate is
kept by drops alone.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl set eth0 ingress 0.0.0.0/0 --rate 1gbit --capacity 20ms
  shapectl set eth0 egress 10.0.0.9 --rate unlimited
  shapectl set wg0 ingress 2001:db8::/32 --rate 1.5MB/s --each /64 --excess ecn
  shapectl set eth0 egress 0.0.0.0/0 --rate 19mbit --algorithm leaky --excess delay --capacity 50ms
  shapectl set eth0 egress 10.0.1.0/24 --rate 50mbit --capacity 64kb --excess delay --order sparse-first`,
		Args:              args(3, 3),
		ValidArgsFunction: e.completeRule,
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
			return e.set(rule, limit)
		},
	}
	limit.add(cmd.Flags(), "the far side")
	limit.addLabel(cmd.Flags())
	e.addSetupFQ(cmd.Flags())
	shadow := flagValue{"rate=RATE,...", "none", func(s string) (err error) {
		limit.Shadow, err = policy.ParseShadow(s)
		return err
	}}
	once(cmd.Flags(), shadow, "shadow", "a limit that is proposed, and only counts what it would have refused")
	return cmd
}

func (e *env) set(which filterRules, limit limitFlags) error {
	doing := fmt.Sprintf("set %s on %s %s", which.prefix, which.device, which.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		dev, err := device(which.device)
		if err != nil {
			return err
		}
		rule, err := limit.Rule(*which.prefix, dev.L2Bytes)
		if err != nil {
			return inputError(err)
		}
		change, err := n.Put(dev, *which.direction, limit.match, rule)
		if err != nil {
			return err
		}
		if change.Upgraded {
			e.say("%s %s: the program of another build was replaced; rules, buckets and counters were kept", dev.Name, which.direction)
		}
		if change.Reattached != "" {
			e.say("%s %s: was not in force (%s); all its rules are attached again", dev.Name, which.direction, change.Reattached)
		}
		which.device, which.prefix = dev.Name, &rule.Prefix
		rules, err := findRules(n, which)
		if err != nil {
			return err
		}
		if err := e.print(rules, rules.Sentences); err != nil {
			return err
		}
		return e.queued(n, dev.Name, change)
	})
}
