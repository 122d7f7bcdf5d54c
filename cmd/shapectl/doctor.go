package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/shapectl/shapectl/internal/doctor"
	"github.com/shapectl/shapectl/internal/lastgood"
	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

func doctorCommand(e *env) *cobra.Command {
	var verbose bool
	cmd := &cobra.Command{
		Use:   "doctor [DEV]",
		Short: "Find what may bypass or break a limit",
		Long: `Find what may bypass or break a limit. Nothing is changed.

Without DEV, doctor looks at all devices that have rules. It checks the kernel, permissions, the bpffs, each
device, the other programs that are attached there, and whether packets pass a device twice or not at all.

doctor also names devices that lack rules of the policy in force: the one that was applied last, or that 'shapectl serve'
reads from a file, or /etc/shapectl/policy.yaml. It knows no policy if there was only 'shapectl set'.

A finding is ok, a note (limits are right), a warning (a limit may be wrong) or failed (something is missing, or
rules are not in force). doctor shows warnings, failures and a pending change. With -v or -j, it shows all findings.

Exit codes: 0 all limits are right; 4 a limit is not in force, or may be wrong; 5 a permission or a kernel
feature is missing.`,
		Example: `  shapectl doctor
  shapectl doctor eth0`,
		Args:              args(0, 1),
		ValidArgsFunction: e.complete(devices),
		RunE: func(_ *cobra.Command, given []string) error {
			return e.doctor(strings.Join(given, ""), verbose)
		},
	}
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "show all findings")
	return cmd
}

func (e *env) doctor(name string, verbose bool) error {
	facts, err := e.facts(name)
	if errors.Is(err, netinfo.ErrNoDevice) {
		return inputf("doctor: %w", noDevice(name))
	}
	if err != nil {
		return fmt.Errorf("doctor: %w", e.advise(err))
	}
	findings := doctor.Judge(facts)
	if facts.Policy == "" && e.contents == nil && e.netns == "" {
		findings = append(findings, servedFindings(name)...)
	}
	text := findings.Problems
	if verbose {
		text = findings.Text
	}
	return errors.Join(e.print(findings, text), verdict(findings))
}

// servedFindings are those that only a serve knows: what the policy that it follows lacks while none is in force.
func servedFindings(name string) (findings report.Findings) {
	path := "/api/v1/doctor"
	if name != "" {
		path += "?" + url.Values{"device": {name}}.Encode()
	}
	_, text, _ := askServe(path, http.Header{}, nil)
	if json.Unmarshal(text, &findings) != nil { // there is no serve, or it refuses
		return nil
	}
	return slices.DeleteFunc(findings, func(f report.Finding) bool { return f.Check != "policy" })
}

// facts are what doctor judges: of a device, or of all that have rules.
func (e *env) facts(name string) (facts doctor.Facts, err error) {
	o, err := e.options()
	if err != nil {
		return facts, err
	}
	err = netns.In(e.netns, func() error {
		follows, unreadable := e.policyFile()
		facts, err = doctor.Gather(o, name, follows)
		facts.Unreadable = unreadable
		return err
	})
	facts.Netns = e.netns
	return facts, err
}

// sayFinding writes a finding about a device as a warning.
func (e *env) sayFinding(f report.Finding) {
	e.say("%s %s: %s; %s", plain.Line(f.Device), f.Direction, f.Finding, f.Advice)
}

// policyFile is the policy that this serve follows or, for a command in the host's network namespace, that the units apply.
func (e *env) policyFile() (p lastgood.Policy, unreadable error) {
	if e.follows != "" {
		p, _ = lastgood.Load(e.follows, "") // serve tells what is wrong with it
		return p, nil
	}
	here, err := netns.ID("")
	host, unknown := netns.ID("1")
	if e.boots == "" || err != nil || unknown != nil || here != host {
		return p, nil
	}
	if p, unreadable = lastgood.Load(e.boots, ""); errors.Is(unreadable, fs.ErrNotExist) {
		return p, nil
	}
	return p, unreadable
}

// verdict is an error with the exit code of findings.
func verdict(findings []report.Finding) error {
	missing := func(f report.Finding) bool { return f.Status == report.Failed && f.Device == "" }
	if i := slices.IndexFunc(findings, missing); i >= 0 {
		return exitError{fmt.Errorf("doctor: what shapectl needs is missing (%s); the finding says what to do", findings[i].Check), exitMissing}
	}
	bad := func(f report.Finding) bool { return f.Status == report.Failed || f.Status == report.Warning }
	if slices.ContainsFunc(findings, bad) {
		return errDegraded
	}
	return nil
}
