package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func setCommand(e *env) *cobra.Command {
	var limit limitFlags
	var keep bool
	cmd := &cobra.Command{
		Use:   "set DEV ingress|egress CIDR|any --rate RATE | NAME [ingress|egress] [flags]",
		Short: "Set a rule, or change it",
		Long: `Set a rule, or change it. A flag that you leave out returns to its default; only --match, --name and --note
stay. The rule no longer follows a plan. With --keep, only what the flags say changes.

NAME stands for all rules that have exactly this name, on all devices. They change at one moment. Only what the
flags say changes, and the rules keep their plan. At a new rate, a burst or queue lasts as long as before; with
colours, burst sizes other than the default stay. If these rules have no rate of their own, and nothing else is within
their pools, then --rate and all other flags that a pool can have change these pools.

Rules or pools with different rates, such as for down and up, do not get one rate by NAME: give a direction, too. The
error lists their rates, and the commands.

any sets two rules, 0.0.0.0/0 and ::/0. Each has its own bucket and gets the whole rate.

With --within, packets are charged to a pool, too, which 'shapectl pool set --new' makes. Rules within one pool share its
rate, on any device and in both directions. A rule within a pool needs no rate of its own. It leaves its pool only if
you say so: with --within and another pool, or none.

With --confirm, the change reverts after that time unless you run 'shapectl confirm' before, as with
'shapectl apply'.`,
		Example: `  shapectl set eth0 egress 10.0.0.0/24 --rate 10mbit --each host
  shapectl set eth0 ingress any --rate 1gbit
  shapectl set alice egress --rate 50mbit
  shapectl set eth0 egress 10.0.0.7 --rate 20mbit --within uplink --guarantee 5mbit`,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) == 4 {
				if _, err := policy.ParseRate(given[3]); err == nil {
					return inputf("set: write the rate as a flag: --rate %s", given[3])
				}
			}
			return args(1, 3)(cmd, given)
		},
		ValidArgsFunction: e.labelled(e.completeNetwork, nameOf),
		RunE: func(cmd *cobra.Command, given []string) error {
			limit.given = cmd.Flags().Changed
			e.noteRates(cmd)
			if len(given) < 3 {
				if !limit.any() {
					return inputf("set: what to change is missing; it takes '%s'", cmd.UseLine())
				}
				name, err := parseName("set", given)
				if err != nil {
					return err
				}
				name.flags = limit.all() + e.how()
				name.ofPool = limit.written(func(o *policy.Option) bool { return !o.RuleOnly && o.Name != "name" }) + e.how()
				return e.setNamed(name, limit)
			}
			rule, err := parseFilter("set", given)
			if err != nil {
				return err
			}
			if keep {
				if !limit.any() {
					return inputf("set: --keep changes only what other flags say; give one, such as --rate")
				}
				return e.setKept(rule, limit)
			}
			if !limit.given("rate") && limit.Within == "" {
				return inputf("set: --rate is missing; say how much, such as --rate 10mbit, or --rate unlimited")
			}
			if limit.given("algorithm") && limit.Algorithm.HasColours() && (limit.Rate == policy.Unlimited || !limit.given("rate")) {
				return inputf("set: --algorithm %v has no use without a rate; add one, such as --rate 10mbit, or leave it out", limit.Algorithm)
			}
			return e.set(rule, limit)
		},
	}
	limit.add(cmd.Flags(), "dst on egress, src on ingress")
	limit.addLabel(cmd.Flags())
	limit.addShadow(cmd.Flags())
	cmd.Flags().BoolVar(&keep, "keep", false, "keep all options of the rule that no flag names")
	e.addConfirm(cmd.Flags())
	e.addSetupFQ(cmd.Flags())
	groupFlags(cmd.Flags(), queueFlagsTitle, "setup-fq")
	e.completes(cmd, "within", e.completeWithin)
	return cmd
}

// setOn calls set with the device and its hook, which is nil without rules.
func (e *env) setOn(which filterRules, limit limitFlags, set func(*loader.Namespace, netinfo.Device, *loader.Hook) error) error {
	doing := fmt.Sprintf("set %s on %s %s", which.networks, which.device, which.direction)
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
		if h != nil {
			defer h.Close()
		}
		return set(n, dev, h)
	})
}

// setKept changes rules that are there in the options that were given.
func (e *env) setKept(which filterRules, limit limitFlags) error {
	return e.setOn(which, limit, func(n *loader.Namespace, dev netinfo.Device, h *loader.Hook) error {
		none := inputf("there is no rule for %s whose options --keep could keep; leave --keep out for a new rule", which.networks)
		if h == nil {
			return none
		}
		t := policy.Table{Device: dev.Name, Direction: *which.direction, Match: h.Match()}
		var others []string
		for _, p := range which.networks {
			have, found := h.Set.Find(p)
			if !found {
				return none
			}
			rule, err := limit.over(&have.Rule, dev.L2Bytes)
			if err != nil {
				return inputError(err)
			}
			t.Rules = append(t.Rules, rule)
			others = limit.others(&have.Rule, &rule, others, "capacity", "queue", "pbs", "ebs")
		}
		if limit.given("match") {
			t.Match = limit.match
		}
		if err := e.put(n, t); err != nil {
			return err
		}
		e.sayOthers(dev, which, others, "")
		return nil
	})
}

// sayOthers tells of changes that no flag asks for.
func (e *env) sayOthers(dev netinfo.Device, which filterRules, changes []string, advice string) {
	if changes != nil {
		e.say("%s %s: also changed, as no flag keeps it: %s%s", plain.Line(dev.Name), which.direction, strings.Join(changes, ", "), advice)
	}
}

func (e *env) set(which filterRules, limit limitFlags) error {
	return e.setOn(which, limit, func(n *loader.Namespace, dev netinfo.Device, h *loader.Hook) error {
		switch {
		case limit.given("match"):
		case h != nil && h.Set.InForce():
			limit.match = h.Match() // of all rules of the direction
		default:
			limit.match = which.direction.FarSide()
		}
		var rules []policy.Rule
		var others []string
		for _, p := range which.networks {
			rule, err := limit.Rule(p, dev.L2Bytes)
			if err != nil {
				return inputError(err)
			}
			if h != nil {
				have, found := h.Set.Find(p)
				rule.Label = limit.label(rule.Label, have.Label)
				ofPool, _ := limit.split()
				switch {
				case !found:
				case have.Within != "" && !limit.given("within") && limit.Algorithm.HasColours():
					return inputf("this rule draws from pool %s, and a rule with colours draws from none; nothing was changed; add --within none",
						plain.Line(string(have.Within)))
				case have.Within != "" && !limit.given("within"):
					return inputf("this rule draws from pool %s, and no flag says that it stays there; nothing was changed; add --within %s to keep it there, "+
						"or --within none; or set the rate of the pool: %s",
						plain.Line(string(have.Within)), plain.Word(string(have.Within)), e.suggest("pool set"+ofPool+e.how(), string(have.Within)))
				default:
					others = limit.others(&have.Rule, &rule, others)
				}
			}
			rules = append(rules, rule)
		}
		if err := e.put(n, policy.Table{Device: dev.Name, Direction: *which.direction, Match: limit.match, Rules: rules}); err != nil {
			return err
		}
		e.sayOthers(dev, which, others, "; with --keep, what no flag names stays")
		return nil
	})
}
