package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

func deleteCommand(e *env) *cobra.Command {
	var kind string
	cmd := &cobra.Command{
		Use:   "delete DEV ingress|egress CIDR|any | NAME [ingress|egress]",
		Short: "Delete a rule or pool",
		Long: `Delete a rule. If there is no such rule, delete says so and succeeds. A name that nothing has is an error. The pools of a
device go with the last rule in them.

NAME is the exact name of something that is there. All of it goes at one moment:

  rules      all with this name, on all devices, and the pools that limit only them
  a pool     if nothing is within it
  a device   its rules for any; 'shapectl flush' deletes all its rules

If NAME may mean several of these, delete deletes nothing, and lists a command for each. --kind says which is meant.

any stands for 0.0.0.0/0 and ::/0. DEV may be a pattern, see 'shapectl help patterns': delete removes the rule for
exactly this network from each matching device. shapectl detaches where no rule is left.

With --confirm, the change reverts after that time unless you run 'shapectl confirm' before, as with
'shapectl apply --confirm'.`,
		Example: `  shapectl delete eth0 egress 10.0.0.0/24
  shapectl delete eth0 egress any --confirm 60s
  shapectl delete 'tap*' egress any
  shapectl delete alice
  shapectl delete vm102 --confirm 60s`,
		Args:              args(1, 3),
		ValidArgsFunction: e.completeNamed(false, func() bool { return kind == kindPool }),
		RunE: func(_ *cobra.Command, given []string) error {
			want, err := parseTarget("delete", kind, given)
			switch {
			case err != nil:
				return err
			case want.networks == nil:
				return e.deleteNamed(want)
			}
			return e.delete(want)
		},
	}
	e.addConfirm(cmd.Flags())
	addKind(cmd.Flags(), &kind)
	return cmd
}

func (e *env) delete(want target) error {
	doing := fmt.Sprintf("delete %s on %s %s", want.networks, plain.Line(want.name), want.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		hooks, err := want.hooksToChange(n)
		defer loader.CloseHooks(hooks)
		if err != nil {
			return err
		}
		if len(hooks) == 0 {
			if slices.ContainsFunc(n.Collected, want.matchesDevice) {
				return e.deleted([]report.Rule{})
			}
			if err := mayBeGone(want.name); err != nil && !want.pattern {
				return err
			}
		}
		found := want.rules(hooks)
		if found == nil {
			return e.nothing(report.Rules{}, "nothing to delete: "+want.none())
		}
		return e.removeWithPools(n, "", nil, found)
	})
}

// removeWithPools is remove for rules and the pools that go with them: see ownPools.
func (e *env) removeWithPools(n *loader.Namespace, who string, own func(policy.Rule) bool, found []namedHook) error {
	pools := n.Pools()
	defer pools.Close()
	return e.remove(n, who, append(found, ownPools(n, pools, own, found)...)...)
}

// remove deletes rules and pools, and says what limits their packets now. who is the one whose rules these are, if anybody.
func (e *env) remove(n *loader.Namespace, who string, found ...namedHook) error {
	rules, networks, hooks := toDelete(found...)
	done, err := n.Delete(e.asked(), networks, hooks...)
	if err != nil {
		return err
	}
	until, err := e.pending(n, "delete", done)
	if e.confirm > 0 && until != 0 {
		for i := range rules {
			rules[i].RevertsInNS, rules[i].Confirm = live.Ahead(until), e.suggest("confirm")
		}
	}
	if err != nil {
		return err
	}
	if err := e.deleted(rules); err != nil {
		return err
	}
	if !e.json {
		fmt.Fprint(e.out, limitedNow(who, found))
	}
	if who != "" && e.confirm == 0 { // else the pools must stay until then
		e.sayUnused(n, rules)
	}
	return nil
}

// toDelete describes rules that are to be deleted, and says which these are.
func toDelete(all ...namedHook) (rules report.Rules, networks func(*loader.Hook) []netip.Prefix, hooks []*loader.Hook) {
	rules = report.Rules{}
	of := map[*loader.Hook][]netip.Prefix{}
	for _, h := range all {
		hooks = append(hooks, h.Hook)
		for _, entry := range h.rules {
			rules, of[h.Hook] = append(rules, report.Describe(h.Hook, entry)), append(of[h.Hook], entry.Prefix)
		}
	}
	return rules, func(h *loader.Hook) []netip.Prefix { return of[h] }, hooks
}

// containing is the rule for the narrowest network that contains all of p.
func containing(s *maps.Set, p netip.Prefix) (next maps.Entry, found bool) {
	for bits := p.Bits(); bits >= 0 && !found; bits-- {
		if wider, err := p.Addr().Prefix(bits); err == nil {
			next, found = s.Find(wider)
		}
	}
	return next, found
}

// limitedNow says what limits the packets of deleted rules now, a line for each answer. An exemption that nothing follows
// changes nothing.
func limitedNow(who string, deleted []namedHook) (says string) {
	of := map[string][]string{}
	var answers []string
	for _, h := range deleted {
		for _, r := range h.rules {
			if r.Pool || policy.IsMark(r.Prefix) { // from now on, their addresses decide
				continue
			}
			answer := "unlimited"
			if next, found := containing(h.Set, r.Prefix); found && next.Rate != policy.Unlimited {
				answer = "limited by the rule for " + policy.NetworkText(next.Prefix)
			} else if found && next.Within != "" {
				answer = "limited only by pool " + plain.Line(string(next.Within))
			} else if !r.Limits() {
				continue
			}
			if of[answer] == nil {
				answers = append(answers, answer)
			}
			of[answer] = append(of[answer], fmt.Sprintf("%s %s %s", plain.Line(h.Name()), h.Direction, policy.NetworkText(r.Prefix)))
		}
	}
	for _, answer := range answers {
		subject, verb := plain.List(of[answer]), "is"
		if who != "" && len(answers) == 1 {
			subject = plain.Line(who)
		} else if len(of[answer]) > 1 {
			verb = "are"
		}
		says += subject + " " + verb + " " + answer + " now\n"
	}
	return says
}

// deleted prints rules as they were before they were deleted, and of which hooks those
// were that cannot be read. JSON has only rules, so then these are messages.
func (e *env) deleted(rules report.Rules, others ...*loader.Hook) error {
	for i := range rules {
		at := *rules[i].Place // which rules that stay may have, too
		at.InForce, at.Status = false, "deleted"
		rules[i].Place = &at
	}
	for _, other := range others {
		says := fmt.Sprintf("%s %s: all rules, which this shapectl could not read", plain.Line(other.Name()), other.Direction)
		if e.json {
			e.say("shapectl: deleted: %s", says)
		} else {
			fmt.Fprintln(e.out, "deleted: "+says)
		}
	}
	rules.SortByPlace()
	return e.print(rules, rules.Deleted)
}

func flushCommand(e *env) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "flush DEV [ingress|egress] | --all",
		Short: "Delete all rules of a device, or of all devices",
		Long: `Delete all rules of a device, or of all devices, and detach shapectl.

With --confirm, the rules come back after that time unless you run 'shapectl confirm' before.

DEV may be a pattern, see 'shapectl help patterns'. flush also deletes rules that another version of shapectl
set. It deletes the pools that a policy gave the device, its directions and hosts there, unless other rules need them,
and says which other pools have no rule any more.
With --all, it also deletes all pools. If there are only rules of another bpffs, they stay, and the exit code is 4.

Without --confirm, flush also removes the fq qdisc of --setup-fq, and the kernel's default takes its place; no other command
does, but 'shapectl line DEV off'. Packets queued there, or in the ifb device of ingress, have 1s to leave. The others are lost.`,
		Example: `  shapectl flush eth0
  shapectl flush 'tap*' egress --confirm 60s
  shapectl flush --all`,
		Args: func(cmd *cobra.Command, given []string) error {
			if all {
				return args(0, 0)(cmd, given)
			}
			return args(1, 2)(cmd, given)
		},
		ValidArgsFunction: e.complete(devices, directions),
		RunE: func(_ *cobra.Command, given []string) error {
			if all {
				return e.flush(target{}, true)
			}
			want, err := parseTarget("flush", "", given)
			if err != nil {
				return err
			}
			return e.flush(want, false)
		},
	}
	e.addConfirm(cmd.Flags())
	cmd.Flags().BoolVar(&all, "all", false, "flush all devices of the network namespace")
	return cmd
}

// flush deletes the rules of devices that pass the filter, or all rules and pools.
func (e *env) flush(want target, all bool) error {
	who := want.String()
	doing := "flush " + plain.Line(who)
	if all {
		doing = "flush --all"
	}
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		var hooks []*loader.Hook
		var err error
		if all {
			hooks, err = n.Hooks()
		} else {
			hooks, err = want.hooksToChange(n)
		}
		defer func() { loader.CloseHooks(hooks) }()
		var others []*loader.Hook
		if other, ok := errors.AsType[*loader.OtherLayoutError](err); ok {
			dev, _ := netinfo.DeviceByName(want.name)
			for _, h := range other.Hooks {
				if h.Device.Index == dev.Index { // a cgroup is known only by that
					h.Device = dev
				}
			}
			others = slices.DeleteFunc(other.Hooks, func(h *loader.Hook) bool { return !want.matchesHook(h.Device.Name, h.Direction) })
		} else if err != nil {
			return err
		}
		switch {
		case all:
			hooks = append(hooks, n.Pools())
		case !want.pattern:
			slices.Reverse(hooks) // ingress first
		}
		found := want.rules(hooks)
		gone, _, _ := toDelete(found...)
		if e.confirm > 0 && others != nil {
			return inputf("%s %v has rules that cannot be read, nor come back; leave --confirm out", plain.Line(others[0].Name()), others[0].Direction)
		}
		pools := n.Pools()
		defer pools.Close()
		var own []namedHook
		if !all { // else all pools are among the rules
			own = ownPools(n, pools, want.owns, found)
		}
		if e.confirm > 0 && len(gone)+len(own) > 0 {
			if want.pattern {
				who = "" // it may match others, too
			}
			return e.remove(n, who, append(found, own...)...)
		}
		if err := n.Flush(append(others, hooks...)...); err != nil {
			return err
		}
		if own != nil {
			deleted, networks, hooks := toDelete(own...)
			if _, err := n.Delete(loader.ApplyOptions{}, networks, hooks...); err == nil {
				gone = append(gone, deleted...)
			} else if !errors.Is(err, loader.ErrPending) {
				return err
			}
		}
		removed, err := e.removeFQs(func(dev netinfo.Device) (bool, error) { return want.matchesHook(dev.Name, policy.Egress), nil })
		if err != nil {
			return err
		}
		any := len(gone)+len(others) > 0 || !all && (removed || slices.ContainsFunc(n.Collected, want.matchesDevice))
		if !any && !all && !want.pattern && len(hooks) == 0 {
			if err := mayBeGone(want.name); err != nil {
				return err
			}
		}
		if !any {
			why := want.none()
			if all {
				why = "no rules are left"
			}
			if elsewhere, _ := e.sayElsewhere(n, want); elsewhere {
				return errors.Join(e.deleted(report.Rules{}), errDegraded)
			}
			return e.nothing(report.Rules{}, why)
		}
		if err := e.deleted(gone, others...); err != nil {
			return err
		}
		e.sayUnused(n, gone)
		return nil
	})
}

// owns reports whether a pool is of a device of the filter, or of its direction.
func (want target) owns(p policy.Rule) bool {
	o := p.Label.Owner
	return o.Device != "" && want.matchesDevice(o.Device) && (o.Whole || want.matchesHook(o.Device, o.Direction))
}

// ownPools are the pools of devices and hosts that nothing but deleted rules is within: those that have such rules, and those
// above; and any pool for which own is true. If own is nil, the pools of hosts stay: other addresses may come. They are of the hook of all pools;
// nil for none.
func ownPools(n *loader.Namespace, pools *loader.Hook, own func(policy.Rule) bool, deleted []namedHook) []namedHook {
	if pools.Set == nil {
		return nil
	}
	emptied, gone := map[string]bool{}, map[string]int{}
	for _, h := range deleted {
		for _, r := range h.rules {
			gone[string(r.Within)]++
			p, _ := pools.Set.Find(policy.PoolKey(string(r.Within)))
			if o := p.Label.Owner; o.Device != "" && (o.Host == "" || own != nil) {
				emptied[p.Label.Name] = true
			}
		}
	}
	if own == nil && len(emptied) == 0 { // the tree takes a while
		return nil
	}
	its := namedHook{Hook: pools}
	tree := poolTree(n)
	var goes func(*policy.Node) bool
	goes = func(node *policy.Node) bool {
		mine := own != nil && own(*node.Pool)
		if len(node.Rules) > gone[node.Pool.Label.Name] || node.Pool.Label.Owner.Device == "" && !mine {
			return false
		}
		lost := mine || emptied[node.Pool.Label.Name]
		for _, below := range node.Below {
			if lost = goes(below); !lost {
				return false
			}
		}
		return lost
	}
	for _, entry := range pools.Set.Rules() {
		if node := tree.Find(entry.Label.Name); node != nil && goes(node) {
			its.rules = append(its.rules, entry)
		}
	}
	if its.rules == nil {
		return nil
	}
	return []namedHook{its}
}

// sayUnused says which pools of deleted rules have no rule any more.
func (e *env) sayUnused(n *loader.Namespace, gone []report.Rule) {
	if !slices.ContainsFunc(gone, func(r report.Rule) bool { return r.Within != "" }) {
		return
	}
	tree, known := poolTree(n), map[*policy.Node]bool{}
	var unused []string // those within others first
	for _, r := range gone {
		for node := tree.Find(string(r.Within)); node != nil && !known[node] && !used(node); node = node.Above {
			unused, known[node] = append(unused, node.Pool.Label.Name), true
		}
	}
	if unused == nil {
		return
	}
	e.say("shapectl: %s left without a rule: %s; %s deletes the first, %s all rules and pools", plain.Count(len(unused), "pool"),
		plain.List(plain.Lines(unused)), e.suggest("delete", unused[0]), e.suggest("flush --all"))
}

// used reports whether there is a rule in a pool, or in one within it.
func used(n *policy.Node) bool { return len(n.Rules) > 0 || slices.ContainsFunc(n.Below, used) }

// sayElsewhere says which devices of a filter have limits that this command cannot see. It reports whether any have, and whether
// these may be those of other namespaces.
func (e *env) sayElsewhere(n *loader.Namespace, want target) (any, others bool) {
	found, others := loader.Elsewhere(n, want.matchesHook)
	if found != nil {
		e.say("shapectl: %s: %w", plain.List(plain.Lines(found)), e.advise(loader.ErrElsewhere))
	}
	return found != nil, others
}
