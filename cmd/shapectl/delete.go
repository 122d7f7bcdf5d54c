package main

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func (e *env) deleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "delete DEV ingress|egress CIDR",
		Short:             "Delete a rule",
		Long:              "Delete a rule. Deleting the last one of a device and direction detaches shapectl from it.\nWhere there is no such rule, nothing is to be done, which is said.",
		Args:              args(3, 3),
		ValidArgsFunction: e.completeRule,
		RunE: func(_ *cobra.Command, given []string) error {
			want, err := parseFilter("delete", given)
			if err != nil {
				return err
			}
			return e.delete(want)
		},
	}
}

func (e *env) delete(want filterRules) error {
	doing := fmt.Sprintf("delete %s on %s %s", want.prefix, want.device, want.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		h, err := n.Find(want.device, *want.direction)
		if err != nil {
			return err
		}
		if h == nil {
			if slices.Contains(n.Collected(), want.device) {
				return e.deleted([]report.Rule{})
			}
			if _, err := device(want.device); err != nil {
				return err
			}
			return e.nothingToDelete(want)
		}
		defer h.Close()
		entry, ok := h.Set.Find(*want.prefix)
		if !ok {
			return e.nothingToDelete(want)
		}
		deleted := describe(h, entry, nil)
		if _, err := n.Delete(h, entry.Rule); err != nil {
			return err
		}
		return e.deleted([]report.Rule{deleted})
	})
}

// nothingToDelete tells that all is so already.
func (e *env) nothingToDelete(want filterRules) error {
	if e.json {
		return e.deleted([]report.Rule{})
	}
	_, err := fmt.Fprintf(e.out, "nothing to delete: %s %s has no rule for %s\n", want.device, *want.direction, *want.prefix)
	return err
}

// deleted tells of rules that are no more, as they last were.
func (e *env) deleted(rules []report.Rule) error {
	for i := range rules {
		rules[i].Attached, rules[i].State = false, "deleted"
	}
	if e.json {
		return report.JSON(e.out, rules)
	}
	for _, r := range rules {
		if _, err := fmt.Fprintln(e.out, "deleted: "+r.Sentence); err != nil {
			return err
		}
	}
	return nil
}

func (e *env) flushCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "flush DEV [ingress|egress] | --all",
		Short: "Delete all rules of a device, or of all devices",
		Long: `Delete all rules of a device, or of one direction, and detach shapectl from it;
with --all, those of all devices of the network namespace. It also deletes rules
that another version of shapectl has set, and those that network namespaces which
no longer exist had set on these devices. If a device was given fq by --setup-fq,
it gets the qdisc back that it had; only this does that. What waits in that fq, or
in the ifb of ingress, has 1s to leave; the rest is lost.`,
		Args: func(cmd *cobra.Command, given []string) error {
			if all {
				return args(0, 0)(cmd, given)
			}
			return args(1, 2)(cmd, given)
		},
		ValidArgsFunction: e.completeRule,
		RunE: func(_ *cobra.Command, given []string) error {
			if all {
				return e.flushAll()
			}
			want, err := parseFilter("flush", given)
			if err != nil {
				return err
			}
			return e.flush(want)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "all devices of the network namespace")
	return cmd
}

func (e *env) flushAll() error {
	return e.with(loader.Write, "flush --all", func(n *loader.Namespace) error {
		gone, discarded := []report.Rule{}, false
		err := n.FlushAll(func(h *loader.Hook) { gone = append(gone, rulesOf(h)...) }, func(other *loader.OtherLayoutError) {
			e.tellDiscarded(other)
			discarded = true
		})
		if err != nil {
			return err
		}
		devices, err := netinfo.Devices()
		if err != nil {
			return err
		}
		if _, err := e.flushOrphans(n, func(netinfo.Device, policy.Direction) bool { return true }); err != nil {
			return err
		}
		for _, dev := range devices {
			if _, err := e.restoreQdisc(n, dev.Name); err != nil {
				return err
			}
		}
		if len(gone) == 0 && !discarded && !e.json {
			_, err := fmt.Fprintln(e.out, "no rules are left")
			return err
		}
		return e.deleted(gone)
	})
}

// rulesOf are the rules of a hook as they are now.
func rulesOf(h *loader.Hook) (rules []report.Rule) {
	for _, entry := range h.Set.Rules() {
		rules = append(rules, describe(h, entry, nil))
	}
	return rules
}

func (e *env) flush(want filterRules) error {
	return e.with(loader.Write, "flush "+want.device, func(n *loader.Namespace) error {
		directions := []policy.Direction{policy.Ingress, policy.Egress}
		if want.direction != nil {
			directions = []policy.Direction{*want.direction}
		}
		gone := []report.Rule{}
		any := slices.Contains(n.Collected(), want.device)
		for _, d := range directions {
			rules, found, err := e.flushDirection(n, want.device, d)
			if err != nil {
				return err
			}
			any = any || found
			gone = append(gone, rules...)
		}
		orphans, err := e.flushOrphans(n, func(dev netinfo.Device, d policy.Direction) bool {
			return dev.Name == want.device && slices.Contains(directions, d)
		})
		if err != nil {
			return err
		}
		any = any || orphans
		if want.direction == nil || *want.direction == policy.Egress {
			restored, err := e.restoreQdisc(n, want.device)
			if err != nil {
				return err
			}
			any = any || restored
		}
		if !any {
			if _, err := device(want.device); err != nil {
				return err
			}
			if !e.json {
				_, err := fmt.Fprintf(e.out, "%s has no rules\n", want.device)
				return err
			}
		}
		return e.deleted(gone)
	})
}

// flushOrphans lifts rules that network namespaces set which no longer exist, and reports whether there were any.
func (e *env) flushOrphans(n *loader.Namespace, which func(netinfo.Device, policy.Direction) bool) (any bool, err error) {
	flushed, err := n.FlushOrphans(which)
	for _, o := range flushed {
		e.say("shapectl: %s %s: removed the rules of a network namespace that no longer exists", o.Device.Name, o.Direction)
	}
	return len(flushed) > 0, err
}

// restoreQdisc puts back what a device had before it was given fq, and reports whether there was anything to tell.
func (e *env) restoreQdisc(n *loader.Namespace, name string) (told bool, err error) {
	dev, err := netinfo.DeviceByName(name)
	if errors.Is(err, netinfo.ErrNoDevice) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	outcome, err := n.RestoreQdisc(dev)
	if err != nil {
		return false, err
	}
	return e.restored(name, outcome), nil
}

// flushDirection flushes one direction, and reports which rules it had, and
// whether it had any: those of another layout can not be told.
func (e *env) flushDirection(n *loader.Namespace, name string, d policy.Direction) (gone []report.Rule, found bool, err error) {
	h, err := n.Find(name, d)
	var other *loader.OtherLayoutError
	if errors.As(err, &other) {
		return nil, true, e.discard(n, other)
	}
	if h == nil || err != nil {
		return nil, false, err
	}
	defer h.Close()
	gone = rulesOf(h)
	return gone, true, n.Flush(h)
}

// discard flushes what another version has set.
func (e *env) discard(n *loader.Namespace, other *loader.OtherLayoutError) error {
	if err := n.Discard(other); err != nil {
		return err
	}
	e.tellDiscarded(other)
	return nil
}

func (e *env) tellDiscarded(other *loader.OtherLayoutError) {
	e.say("%s %s: rules that another version of shapectl had set were deleted", other.Name(), other.Direction)
}
