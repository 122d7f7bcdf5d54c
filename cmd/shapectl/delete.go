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

func deleteCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "delete DEV ingress|egress CIDR|any",
		Short: "Delete a rule",
		Long: `Delete a rule. If there is no such rule, delete says so and succeeds.

any stands for 0.0.0.0/0 and ::/0. DEV may be a pattern, see 'shapectl help patterns': each device that matches
loses its rule for exactly this network. A device and direction without rules is detached.`,
		Example: `  shapectl delete eth0 egress 10.0.0.0/24
  shapectl delete 'tap*' egress any`,
		Args:              args(3, 3),
		ValidArgsFunction: e.completeNetwork,
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
	doing := fmt.Sprintf("delete %s on %s %s", want.networks, want.device, want.direction)
	return e.with(loader.Write, doing, func(n *loader.Namespace) error {
		hooks, err := want.hooksToChange(n)
		defer loader.CloseHooks(hooks)
		if err != nil {
			return err
		}
		if len(hooks) == 0 {
			if slices.ContainsFunc(n.Collected(), want.matchesDevice) {
				return e.deleted([]report.Rule{})
			}
			if _, err := device(want.device); err != nil && !want.pattern {
				return err
			}
		}
		var deleted []report.Rule
		var having []*loader.Hook
		for _, h := range hooks {
			entries := want.entries(h.Set)
			for _, entry := range entries {
				deleted = append(deleted, describe(h, entry, nil))
			}
			if len(entries) > 0 {
				having = append(having, h)
			}
		}
		if deleted == nil {
			return e.nothingToDelete(want)
		}
		if _, err := n.Delete(want.networks, having...); err != nil {
			return err
		}
		return e.deleted(deleted)
	})
}

func (e *env) nothingToDelete(want filterRules) error {
	if e.json {
		return e.deleted([]report.Rule{})
	}
	says := "nothing to delete: %s %s has no rule for %s\n"
	if want.pattern {
		says = "nothing to delete: no device that matches %s has an %s rule for %s\n"
	}
	_, err := fmt.Fprintf(e.out, says, want.device, *want.direction, want.networks)
	return err
}

// deleted tells of rules that are no more, as they last were.
func (e *env) deleted(rules report.Rules) error {
	for i := range rules {
		rules[i].Attached, rules[i].State = new(bool), "deleted"
	}
	return e.print(rules, rules.Deleted)
}

func flushCommand(e *env) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "flush DEV [ingress|egress] | --all",
		Short: "Delete all rules of a device, or of all devices",
		Long: `Delete all rules of a device, or of all devices, and detach shapectl.

DEV may be a pattern, see 'shapectl help patterns'. flush also deletes rules that another version of shapectl
set, and rules that deleted network namespaces left on these devices.

If --setup-fq gave the device its fq, flush restores the former qdisc. No other command does. Packets queued
there, or in the ifb device of ingress, have 1s to leave. The others are lost.`,
		Example: `  shapectl flush eth0
  shapectl flush 'tap*' egress
  shapectl flush --all`,
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
	cmd.Flags().BoolVar(&all, "all", false, "flush all devices of the network namespace")
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
		if _, err := e.flushOrphans(n, filterRules{}); err != nil {
			return err
		}
		if _, err := e.restoreQdiscs(n, filterRules{}); err != nil {
			return err
		}
		if len(gone) == 0 && !discarded && !e.json {
			_, err := fmt.Fprintln(e.out, "no rules are left")
			return err
		}
		return e.deleted(gone)
	})
}

func rulesOf(h *loader.Hook) (rules []report.Rule) {
	for _, entry := range h.Set.Rules() {
		rules = append(rules, describe(h, entry, nil))
	}
	return rules
}

func (e *env) flush(want filterRules) error {
	return e.with(loader.Write, "flush "+want.device, func(n *loader.Namespace) error {
		hooks, err := want.hooksToChange(n)
		defer loader.CloseHooks(hooks)
		others, err := otherLayouts(err)
		if err != nil {
			return err
		}
		if !want.pattern {
			slices.Reverse(hooks) // ingress first
		}
		gone := []report.Rule{}
		for _, h := range hooks {
			gone = append(gone, rulesOf(h)...)
		}
		if err := n.Flush(hooks...); err != nil {
			return err
		}
		discarded, err := n.Discard(others...)
		for _, other := range discarded {
			e.tellDiscarded(other)
		}
		if err != nil {
			return err
		}
		orphans, err := e.flushOrphans(n, want)
		if err != nil {
			return err
		}
		restored, err := e.restoreQdiscs(n, want)
		if err != nil {
			return err
		}
		any := len(gone) > 0 || len(others) > 0 || orphans || restored ||
			slices.ContainsFunc(n.Collected(), want.matchesDevice)
		if !any && !want.pattern && len(hooks) == 0 {
			if _, err := device(want.device); err != nil {
				return err
			}
		}
		if any || e.json {
			return e.deleted(gone)
		}
		return e.nothingToFlush(want)
	})
}

func (e *env) nothingToFlush(want filterRules) (err error) {
	switch {
	case !want.pattern:
		_, err = fmt.Fprintf(e.out, "%s has no rules\n", want.device)
	case want.direction == nil:
		_, err = fmt.Fprintf(e.out, "no device that matches %s has rules\n", want.device)
	default:
		_, err = fmt.Fprintf(e.out, "no device that matches %s has %s rules\n", want.device, *want.direction)
	}
	return err
}

// restoreQdiscs puts back what the devices of a filter had, and reports whether there was anything to tell.
func (e *env) restoreQdiscs(n *loader.Namespace, want filterRules) (any bool, err error) {
	if want.direction != nil && *want.direction != policy.Egress {
		return false, nil
	}
	names := []string{want.device}
	if want.device == "" || want.pattern {
		devices, err := netinfo.Devices()
		if err != nil {
			return false, err
		}
		names = nil
		for _, dev := range devices {
			if want.matchesDevice(dev.Name) {
				names = append(names, dev.Name)
			}
		}
	}
	for _, name := range names {
		dev, err := netinfo.DeviceByName(name)
		if errors.Is(err, netinfo.ErrNoDevice) {
			continue
		}
		if err != nil {
			return any, err
		}
		outcome, err := n.RestoreQdisc(dev)
		if err != nil {
			return any, err
		}
		any = e.restored(name, outcome) || any
	}
	return any, nil
}

// flushOrphans lifts rules that network namespaces set which no longer exist, and reports whether there were any.
func (e *env) flushOrphans(n *loader.Namespace, want filterRules) (any bool, err error) {
	flushed, err := n.FlushOrphans(func(dev netinfo.Device, d policy.Direction) bool { return want.matches(dev.Name, d) })
	for _, o := range flushed {
		e.say("shapectl: %s %s: removed the rules of a network namespace that no longer exists", o.Device.Name, o.Direction)
	}
	return len(flushed) > 0, err
}

func (e *env) tellDiscarded(other *loader.OtherLayoutError) {
	e.say("%s %s: rules that another version of shapectl had set were deleted", other.Name(), other.Direction)
}
