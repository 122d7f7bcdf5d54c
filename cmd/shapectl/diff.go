package main

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func diffCommand(e *env) *cobra.Command {
	var summary bool
	cmd := &cobra.Command{
		Use:   "diff FILE|- [flags]",
		Short: "Show what 'shapectl apply' would change",
		Long: `Show what 'shapectl apply' would change, and change nothing.

+ marks a rule that apply would add, - a rule that it would remove, and ~ a rule that it would change. A rule that
is set but not in force counts as one to add. --summary counts the rules and pools to add and to remove, and for each
option those that would change, with the first names. Devices that do not exist are left out, with a warning. diff also
warns if apply would refuse the policy, as far as it can know, or leave out guarantees for which a pool has no room. Like apply, diff refuses another 'match' for a
direction that has rules.

Exit codes: 0 nothing would change; 3 something would change.`,
		Example: `  shapectl diff policy.yaml
  shapectl diff policy.yaml --summary`,
		Args:              args(1, 1),
		ValidArgsFunction: completePolicy,
		RunE:              func(_ *cobra.Command, given []string) error { return e.diff(given[0], summary) },
	}
	cmd.Flags().BoolVar(&summary, "summary", false, "count what would change, by kind")
	return cmd
}

func (e *env) diff(name string, summary bool) error {
	f, _, err := e.readPolicy(name)
	if err != nil {
		return fmt.Errorf("diff: %w", err)
	}
	e.warnOf(f.Warnings())
	return e.with(loader.Read, "diff "+name, func(n *loader.Namespace) error {
		want, err := goalOf(n, f)
		if err != nil {
			return err
		}
		e.sayMissing(want.absent, want.unmatched)
		there, err := n.Tables(loader.Attached, loader.Detached)
		if err != nil {
			return err
		}
		tables := policy.BesidePods(want.tables, there)
		have, refused := n.Check(tables)
		if empty := removesAll(n, f, want); empty != nil {
			refused = empty
		}
		e.sayNoRoom(n, f)
		switch {
		case have == nil, errors.Is(refused, loader.ErrMatch):
			return refused
		case refused != nil:
			e.say("shapectl: apply would refuse this: %w", e.advise(refused))
		}
		differences := report.NewDifferences(policy.Diff(have, tables))
		if summary {
			all := differences.Summary()
			err = e.print(all, differences.SummaryText(all))
		} else {
			err = e.print(differences, differences.Text)
		}
		if err != nil || len(differences) == 0 {
			return err
		}
		return errDiffers
	})
}

func exportCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "export",
		Short: "Print the rules in force as a policy file",
		Long: `Print the rules in force as a policy file, but for those of pods. To apply that file would change nothing.

A policy file cannot name a device whose name is not UTF-8. export leaves such a device out, with exit code 4.`,
		Example: `  shapectl export >policy.yaml`,
		Args:    args(0, 0),
		RunE:    func(*cobra.Command, []string) error { return e.export() },
	}
}

func (e *env) export() error {
	if e.json {
		s, err := e.readRules(&target{command: "export"}, reads{})
		if s == nil {
			return err
		}
		rules := report.Rules{}
		for _, it := range s.found {
			rules = append(rules, e.rule(s, it, target{}, true))
		}
		return errors.Join(report.JSON(e.out, rules), err)
	}
	return e.with(loader.Read, "export", func(n *loader.Namespace) error {
		tables, err := n.Tables(loader.Attached, loader.Detached)
		if err != nil {
			return err
		}
		text := new(bytes.Buffer) // so that an error prints no part of a policy
		err = policyfile.Write(text, policy.PodTables(tables, false))
		var left policyfile.LeftOutError
		if err != nil && !errors.As(err, &left) {
			return inputError(err)
		}
		if _, err := text.WriteTo(e.out); err != nil || left == nil {
			return err
		}
		return e.degraded("export: the policy lacks rules: %w", left)
	})
}
