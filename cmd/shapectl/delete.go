package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func (e *env) deleteCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "delete DEV ingress|egress CIDR",
		Short:             "Delete a rule",
		Long:              "Delete a rule. Deleting the last one of a device and direction detaches shapectl from it.",
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
			if _, err := device(n, want.device); err != nil {
				return err
			}
			return noRule(want)
		}
		defer h.Close()
		entry, ok := h.Set.Find(*want.prefix)
		if !ok {
			return noRule(want)
		}
		deleted := describe(h, entry, nil)
		if _, err := n.Delete(h, entry.Rule); err != nil {
			return err
		}
		return e.deleted([]report.Rule{deleted})
	})
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
	all := false
	cmd := &cobra.Command{
		Use:   "flush DEV [ingress|egress] | flush --all",
		Short: "Delete all rules of a device",
		Long: `Delete all rules of a device, or of one direction, or of all devices of the
network namespace, also of those that are gone, and detach shapectl from them.
It also deletes rules that another version of shapectl has set. If the device was
given fq by --setup-fq, it gets the qdisc back that it had; only this does that.
What waits in that fq, or in the ifb of ingress, has 1s to leave; the rest is lost.`,
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

func (e *env) flush(want filterRules) error {
	return e.with(loader.Write, "flush "+want.device, func(n *loader.Namespace) error {
		directions := []policy.Direction{policy.Ingress, policy.Egress}
		if want.direction != nil {
			directions = []policy.Direction{*want.direction}
		}
		gone := []report.Rule{}
		any := false
		for _, d := range directions {
			rules, found, err := e.flushDirection(n, want.device, d)
			if err != nil {
				return err
			}
			any = any || found
			gone = append(gone, rules...)
		}
		if want.direction == nil || *want.direction == policy.Egress {
			restored, err := e.restoreQdisc(n, want.device)
			if err != nil {
				return err
			}
			any = any || restored
		}
		if !any {
			if _, err := device(n, want.device); err != nil {
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

// restoreQdisc puts back what a device had before it was given fq, and reports whether there was anything to tell.
func (e *env) restoreQdisc(n *loader.Namespace, name string) (told bool, err error) {
	dev, err := n.Device(name)
	if errors.Is(err, loader.ErrNoDevice) {
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
	return rulesOf(h), true, n.Flush(h)
}

func rulesOf(h *loader.Hook) []report.Rule {
	entries := h.Set.Rules()
	rules := make([]report.Rule, len(entries))
	for i, entry := range entries {
		rules[i] = describe(h, entry, nil)
	}
	return rules
}

// discard flushes what another version has set.
func (e *env) discard(n *loader.Namespace, other *loader.OtherLayoutError) error {
	if err := n.Discard(other); err != nil {
		return err
	}
	fmt.Fprintf(e.err, "%s %s: rules that another version of shapectl had set were deleted\n", other.Name(), other.Direction)
	return nil
}

func (e *env) flushAll() error {
	return e.with(loader.Write, "flush all devices", func(n *loader.Namespace) error {
		gone := []report.Rule{}
		err := n.EachHook(func(h *loader.Hook, err error) error {
			var other *loader.OtherLayoutError
			if errors.As(err, &other) {
				return e.discard(n, other)
			}
			if err != nil {
				return err
			}
			gone = append(gone, rulesOf(h)...)
			return n.Flush(h)
		})
		if err != nil {
			return err
		}
		devices, err := n.Devices()
		if err != nil {
			return err
		}
		for _, d := range devices {
			if _, err := e.restoreQdisc(n, d.Name); err != nil {
				return err
			}
		}
		return e.deleted(gone)
	})
}
