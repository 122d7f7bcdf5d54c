package main

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

func diffCommand(e *env) *cobra.Command {
	return &cobra.Command{
		Use:   "diff FILE|-",
		Short: "Show what 'shapectl apply' would change",
		Long: `Show what 'shapectl apply' would change, and change nothing.

+ is a rule that apply would add, - one that it would remove, ~ one that it would change. A rule that is set but
not in force counts as one to add. Devices that do not exist are left out, with a warning. Like apply, diff
refuses to change which address (match) the rules of a direction compare.

Exit codes: 0 nothing would change; 3 something would.`,
		Example:           `  shapectl diff policy.yaml`,
		Args:              args(1, 1),
		ValidArgsFunction: completePolicy,
		RunE:              func(_ *cobra.Command, given []string) error { return e.diff(given[0]) },
	}
}

func (e *env) diff(name string) error {
	f, err := e.readPolicy(name)
	if err != nil {
		return fmt.Errorf("diff: %w", err)
	}
	e.warn(f)
	return e.with(loader.Read, "diff "+name, func(n *loader.Namespace) error {
		want, absent, unmatched, err := e.tables(f)
		if err != nil {
			return err
		}
		e.sayMissing(absent, unmatched)
		if err := removesAll(n, want, append(absent, unmatched...)); err != nil {
			e.say("shapectl: apply would refuse this: %w", err)
		}
		have, err := n.Tables(loader.Attached, loader.Unknown)
		if err != nil {
			return err
		}
		all := policy.Diff(have, want)
		for _, d := range all {
			if d.HaveMatch != d.WantMatch {
				return fmt.Errorf("%s %s: %w (%s)", plain.Line(d.Device), d.Direction, loader.ErrMatch, d.HaveMatch)
			}
		}
		differences := report.NewDifferences(all)
		if err := e.print(differences, differences.Text); err != nil || len(differences) == 0 {
			return err
		}
		return errDiffers
	})
}

func exportCommand(e *env) *cobra.Command {
	var like string
	cmd := &cobra.Command{
		Use:   "export [flags]",
		Short: "Print the rules in force as a policy file",
		Long: `Print the rules in force as a policy file. 'shapectl apply' of it changes nothing.

With --like, the output is that file with its comments, plans and order. It differs only where the rules in
force do.`,
		Example: `  shapectl export >policy.yaml
  shapectl export --like policy.yaml >new.yaml`,
		Args: args(0, 0),
		RunE: func(*cobra.Command, []string) error { return e.export(like) },
	}
	cmd.Flags().StringVar(&like, "like", "", "keep the comments, plans and order of this `file`")
	must(cmd.MarkFlagFilename("like", "yaml", "yml"))
	return cmd
}

func (e *env) export(like string) error {
	var f *policyfile.File
	if like != "" {
		var err error
		if f, err = e.readPolicy(like); err != nil {
			return fmt.Errorf("export: %w", err)
		}
	}
	return e.with(loader.Read, "export", func(n *loader.Namespace) error {
		if e.json {
			rules, err := findRules(n, filterRules{})
			return errors.Join(report.JSON(e.out, rules), err)
		}
		tables, err := n.Tables(loader.Attached, loader.Detached, loader.Unknown)
		if err != nil {
			return err
		}
		text := new(pages) // so that an error prints no part of a policy
		if f != nil {
			devices, unread := policyDevices()
			if unread != nil {
				return unread
			}
			err = policyfile.Merge(text, f, devices, tables)
		} else {
			err = policyfile.Write(text, tables, nil)
		}
		if err != nil {
			return inputError(err)
		}
		if len(*text) > 0 {
			(*text)[0] = bytes.TrimPrefix((*text)[0], []byte("\ufeff")) // it would be escaped, and is not needed
		}
		_, err = text.WriteTo(e.out)
		return err
	})
}
