package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite "policy" brings whole policies into force as a user does, by the
// command: what each command takes in time, in memory, and in the kernel's.

const (
	commandTime   = "time of a command"
	commandMemory = "peak memory of a command, without maps"
	policyMemory  = "kernel memory of a policy"
)

// Subjects of this suite.
const (
	readFile     = "shapectl, reading the file alone"
	applyFirst   = "shapectl apply, no rules before"
	applyAgain   = "shapectl apply, nothing to change"
	applyChanged = "shapectl apply, 1 % changes"
	diffSame     = "shapectl diff, nothing differs"
	diffChanged  = "shapectl diff, 1 % differs"
	exportRules  = "shapectl export"
	setOne       = "shapectl set, one rule of them"
	policyMaps   = "shapectl, a bucket for each prefix"
)

func policies(ctx context.Context, o options) (results []Result, err error) {
	sizes := []struct{ rules, rounds int }{{1000, 5}, {100_000, 3}, {1_000_000, 3}}
	if o.quick {
		sizes = sizes[:1]
	}
	dir, err := os.MkdirTemp("", "bench-policy-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	binary, err := buildCommand(ctx, dir)
	if err != nil {
		return nil, err
	}
	for _, size := range sizes {
		o.say("  policies of %s prefixes", count(size.rules))
		s := samples{}
		p, err := newPolicy(dir, size.rules)
		if err != nil {
			return nil, err
		}
		for range o.rounds(size.rounds) {
			if err := p.round(ctx, binary, s); err != nil {
				return nil, fmt.Errorf("a policy of %d prefixes: %w", size.rules, err)
			}
		}
		for _, t := range []struct{ title, unit string }{{commandTime, unitSeconds}, {commandMemory, unitMiB}, {policyMemory, unitMiB}} {
			for _, subject := range []string{
				readFile, applyFirst, applyAgain, applyChanged, diffSame, diffChanged, exportRules, setOne, policyMaps,
			} {
				if taken := s[t.title][subject]; taken != nil {
					results = append(results, newResult(t.title+": "+count(size.rules), subject, t.unit, taken))
				}
			}
		}
	}
	return results, nil
}

// buildCommand builds shapectl as it is released, and returns its path.
func buildCommand(ctx context.Context, dir string) (path string, err error) {
	path = filepath.Join(dir, "shapectl")
	build := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", path, "github.com/shapectl/shapectl/cmd/shapectl")
	if output, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build shapectl: %w: %s", err, bytes.TrimSpace(output))
	}
	return path, nil
}

// samples are figures by table and subject.
type samples map[string]map[string][]float64

func (s samples) add(table, subject string, figure float64) {
	if s[table] == nil {
		s[table] = map[string][]float64{}
	}
	s[table][subject] = append(s[table][subject], figure)
}

// A policyCase is a policy in a file, and another that differs in a hundredth of its rules.
type policyCase struct {
	file, changed string
	one           policy.Rule // of the rules
}

func newPolicy(dir string, n int) (policyCase, error) {
	p := policyCase{
		file:    filepath.Join(dir, strconv.Itoa(n)+".yaml"),
		changed: filepath.Join(dir, strconv.Itoa(n)+"-changed.yaml"),
	}
	random := newRandom()
	rules := make([]policy.Rule, 0, n)
	for _, prefix := range append(mixedPrefixes(random, false, n/2), mixedPrefixes(random, true, n-n/2)...) {
		rules = append(rules, ruleOf(prefix, someRate(random)))
	}
	policy.SortRules(rules)
	p.one = rules[n/2]
	if err := writePolicy(p.file, nearTable(rules)); err != nil {
		return p, err
	}
	changed := slices.Clone(rules)
	for _, i := range random.Perm(n)[:n/100] {
		changed[i] = ruleOf(changed[i].Prefix, 2*changed[i].Rate)
	}
	return p, writePolicy(p.changed, nearTable(changed))
}

// ruleOf is what a file says with a rate alone.
func ruleOf(p netip.Prefix, r policy.Rate) policy.Rule {
	return policy.Rule{Prefix: p, Rate: r, Capacity: policy.DefaultCapacity(r)}
}

func nearTable(rules []policy.Rule) policy.Table {
	return policy.Table{Device: nearDevice, Direction: policy.Egress, Match: policy.MatchDst, Rules: rules}
}

func writePolicy(file string, tables ...policy.Table) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(policyfile.Write(f, tables, nil), f.Close())
}

// round takes each figure once, on a device of its own.
func (p policyCase) round(ctx context.Context, binary string, s samples) error {
	if err := p.read(s); err != nil {
		return err
	}
	a, err := newArena(ctx)
	if err != nil {
		return err
	}
	defer a.Close()
	before := settledMemory()
	for _, step := range []struct {
		subject string
		exit    int
		args    []string
	}{
		{applyFirst, 0, []string{"apply", p.file}},
		{applyAgain, 0, []string{"apply", p.file}},
		{diffSame, 0, []string{"diff", p.file}},
		{exportRules, 0, []string{"export"}},
		{diffChanged, 3, []string{"diff", p.changed}},
		{applyChanged, 0, []string{"apply", p.changed}},
		{setOne, 0, []string{"set", nearDevice, "egress", p.one.Prefix.String(), "--rate", "7777kbit"}},
	} {
		took, peak, err := a.command(ctx, binary, step.exit, step.args...)
		if err != nil {
			return err
		}
		s.add(commandTime, step.subject, took)
		s.add(commandMemory, step.subject, peak)
		if step.subject == applyFirst {
			s.add(policyMemory, policyMaps, settledMemory()-before)
		}
	}
	return nil
}

// command runs shapectl in the near namespace. It returns how long that took in seconds, and
// its memory without maps at its peak in MiB. Another exit code than wanted is an error.
func (a *arena) command(ctx context.Context, binary string, exit int, args ...string) (took, peak float64, err error) {
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = append(os.Environ(), "SHAPECTL_BPFFS="+a.bpffs)
	err = a.inNear(func() (err error) {
		start := time.Now()
		peak, err = watchCommand(cmd, ownMemory)
		took = time.Since(start).Seconds()
		return err
	})
	if failed := new(exec.ExitError); errors.As(err, &failed) && failed.ExitCode() == exit {
		err = nil
	}
	return took, peak, err
}

// read reads the file as the commands do, which is a part of what they take.
func (p policyCase) read(s samples) error {
	runtime.GC()
	start := time.Now()
	text, err := os.ReadFile(p.file)
	if err != nil {
		return err
	}
	f, err := policyfile.Parse(p.file, text)
	if err != nil {
		return err
	}
	if _, _, err := f.Tables([]policyfile.Device{{Name: nearDevice, L2Bytes: ethernetBytes}}); err != nil {
		return err
	}
	s.add(commandTime, readFile, time.Since(start).Seconds())
	return nil
}
