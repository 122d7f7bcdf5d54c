package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite policy applies whole policies with the command, like a user. It measures the
// time and memory of each command, and the kernel memory.

const (
	commandTime   = "Time of a command"
	commandMemory = "Peak memory of a command, without maps"
	policyMemory  = "Kernel memory of a policy"
)

// Subjects of this suite.
const (
	readFile     = "shapectl, reading the file only"
	applyFirst   = "shapectl apply, no rules before"
	applyAgain   = "shapectl apply, nothing to change"
	applyChanged = "shapectl apply, 1 % changes"
	diffSame     = "shapectl diff, no difference"
	diffChanged  = "shapectl diff, 1 % differs"
	exportRules  = "shapectl export"
	setOne       = "shapectl set, one of the rules"
	policyMaps   = "shapectl, one bucket for each prefix"
)

func policies(ctx context.Context, o options) error {
	sizes := []struct{ rules, rounds int }{{1000, 5}, {100_000, 3}, {1_000_000, 3}}
	if o.quick {
		sizes = sizes[:1]
	}
	return withCommand(ctx, func(dir, binary string) error {
		for _, size := range sizes {
			o.say("  policies of %s prefixes", count(size.rules))
			p, err := newPolicy(dir, size.rules)
			if err != nil {
				return err
			}
			for range o.rounds(size.rounds) {
				if err := p.round(ctx, o, binary); err != nil {
					return fmt.Errorf("a policy of %d prefixes: %w", size.rules, err)
				}
			}
		}
		return nil
	})
}

// withCommand builds shapectl like a release, and calls f with its path and a folder for files.
func withCommand(ctx context.Context, f func(dir, binary string) error) error {
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "shapectl")
	if err := runCommand(ctx, "", "go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w",
		"-o", binary, "github.com/shapectl/shapectl/cmd/shapectl"); err != nil {
		return fmt.Errorf("build shapectl: %w", err)
	}
	return f(dir, binary)
}

// A policyCase is a policy in a file, and a second one in which 1 % of the rules differ.
type policyCase struct {
	size          string // number of rules, as text
	file, changed string
	one           policy.Rule // one of the rules
}

func newPolicy(dir string, n int) (policyCase, error) {
	p := policyCase{
		size:    count(n),
		file:    filepath.Join(dir, strconv.Itoa(n)+".yaml"),
		changed: filepath.Join(dir, strconv.Itoa(n)+"-changed.yaml"),
	}
	random := newRandom()
	near := policy.Table{Device: nearDevice, Direction: policy.Egress, Match: policy.MatchDst}
	near.Rules = mixedRules(random, n)
	policy.SortRules(near.Rules)
	p.one = near.Rules[n/2]
	if err := writePolicy(p.file, near); err != nil {
		return p, err
	}
	for _, i := range random.Perm(n)[:n/100] {
		near.Rules[i] = ruleOf(near.Rules[i].Prefix, 2*near.Rules[i].Rate)
	}
	return p, writePolicy(p.changed, near)
}

func writePolicy(file string, tables ...policy.Table) error {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(policyfile.Write(f, tables), f.Close())
}

// round measures each figure once, on a new device.
func (p policyCase) round(ctx context.Context, o options, binary string) error {
	if err := p.read(o); err != nil {
		return err
	}
	a, err := newArena(ctx)
	if err != nil {
		return err
	}
	defer a.Close()
	before := settledMemory()
	return a.steps(ctx, binary, []step{
		{applyFirst, 0, []string{"apply", p.file}},
		{applyAgain, 0, []string{"apply", p.file}},
		{applyChanged, 0, []string{"apply", p.changed}},
		{diffSame, 0, []string{"diff", p.changed}},
		{diffChanged, 3, []string{"diff", p.file}},
		{exportRules, 0, []string{"export"}},
		{setOne, 0, []string{"set", nearDevice, "egress", p.one.Prefix.String(), "--rate", "7777kbit"}},
	}, func(subject string, took, peak float64) {
		o.add(commandTime+": "+p.size, subject, unitSeconds, "", took)
		o.add(commandMemory+": "+p.size, subject, unitMiB, "", peak)
		if subject == applyFirst {
			o.add(policyMemory+": "+p.size, policyMaps, unitMiB, "", settledMemory()-before)
		}
	})
}

// A step is a command of shapectl, and its exit code.
type step struct {
	subject string
	exit    int
	args    []string
}

// steps runs commands one after another, and calls each with their time and memory.
func (a *arena) steps(ctx context.Context, binary string, steps []step, each func(subject string, took, peak float64)) error {
	for _, s := range steps {
		took, peak, err := a.command(ctx, binary, s.exit, s.args...)
		if err != nil {
			return err
		}
		each(s.subject, took, peak)
	}
	return nil
}

// shapectlCommand returns a command of shapectl with its pins in the arena.
func (a *arena) shapectlCommand(ctx context.Context, binary string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, binary, args...)
	cmd.Env = append(os.Environ(), "SHAPECTL_BPFFS="+a.bpffs)
	return cmd
}

// command runs shapectl in the near namespace. It returns its time in seconds, and its peak
// memory without maps in MiB. An unexpected exit code is an error.
func (a *arena) command(ctx context.Context, binary string, exit int, args ...string) (took, peak float64, err error) {
	cmd := a.shapectlCommand(ctx, binary, args...)
	err = in(a.near, func() (err error) {
		start := time.Now()
		peak, err = watchCommand(cmd)
		took = time.Since(start).Seconds()
		return err
	})
	if failed := new(exec.ExitError); errors.As(err, &failed) && failed.ExitCode() == exit {
		err = nil
	}
	return took, peak, err
}

// read reads the file like the commands, as a part of their time.
func (p policyCase) read(o options) error {
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
	o.add(commandTime+": "+p.size, readFile, unitSeconds, "", time.Since(start).Seconds())
	return nil
}
