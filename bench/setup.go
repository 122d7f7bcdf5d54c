package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite setup loads many rules and changes one of them. It measures the time and the kernel memory.

// An outcome has the samples of loading rules once and changing them. It is empty if that was not tried.
type outcome struct {
	Seconds   []float64
	Random    []float64 // µs to change a rule, a random one each time
	Same      []float64 // µs to change a rule, always the same one
	KernelMiB []float64
}

// A contender is a subject of the suite setup.
type contender struct {
	subject string
	most    int    // the largest number of rules to try
	why     string // no more rules are tried
	note    string
	slow    bool // each change takes long
	load    loadFunc
}

// A loadFunc loads n rules, and makes so many changes of each kind.
type loadFunc func(ctx context.Context, n, changes int) (outcome, error)

var contenders = []contender{
	{subject: name(policy.GCRA), most: 1_000_000, load: loadOurs(policy.EachAll)},
	{subject: name(policy.GCRA) + ", each host", most: 1_000_000, load: loadOurs(policy.EachHost),
		note: "a table for a million hosts"},
	{subject: "HTB classes, u32 hash tables", most: 65_534, load: loadPeer(htbRules, "tc", "-batch", "-"),
		why:  "an HTB qdisc has at most 65 534 classes",
		note: "addresses of one /16; loaded by `tc -batch`, changed through netlink"},
	{subject: "nft map of limits", most: 100_000, slow: true, load: loadPeer(nftMapRules, "nft", "-f", "-"),
		why: "not tried: 100 000 already take long", note: "prefixes that do not overlap; each change runs nft"},
	{subject: "nft set with limits", most: 100_000, slow: true, load: loadPeer(nftSetRules, "nft", "-f", "-"),
		why: "not tried: 100 000 already take long", note: "prefixes that do not overlap; each change runs nft"},
}

func setup(ctx context.Context, o options) error {
	sizes := []struct {
		rules, rounds int
		changes       int // of each kind per round
		slowChanges   int // the same for slow contenders
	}{
		{1000, 5, 51, 15}, {10_000, 3, 51, 5}, {100_000, 3, 51, 1}, {1_000_000, 3, 51, 1},
	}
	if o.quick {
		sizes = sizes[:1]
		sizes[0].changes, sizes[0].slowChanges = 3, 3
	}
	for _, size := range sizes {
		for _, l := range contenders {
			if size.rules > l.most {
				l.report(o, size.rules, l.why, outcome{})
				continue
			}
			o.say("  %s rules: %s", count(size.rules), l.subject)
			changes := size.changes
			if l.slow {
				changes = size.slowChanges
			}
			for range o.rounds(size.rounds) {
				one, err := l.load(ctx, size.rules, changes)
				if err != nil {
					return fmt.Errorf("%s, %d rules: %w", l.subject, size.rules, err)
				}
				l.report(o, size.rules, l.note, one)
			}
		}
	}
	return nil
}

func (c contender) report(o options, rules int, note string, out outcome) {
	for _, f := range []struct {
		table, unit string
		samples     []float64
	}{
		{"Time to load rules", unitSeconds, out.Seconds},
		{"Time to change one rule, a random one each time", unitMicroseconds, out.Random},
		{"Time to change one rule, always the same one", unitMicroseconds, out.Same},
		{"Kernel memory of rules", unitMiB, out.KernelMiB},
	} {
		o.add(f.table+": "+count(rules), c.subject, f.unit, note, f.samples...)
	}
}

// loadOurs loads mixed rules. Creating them replaces reading them from a file, and is not measured.
func loadOurs(each policy.EachKind) loadFunc {
	return func(_ context.Context, n, changes int) (out outcome, err error) {
		size := maps.Size{Rules: uint32(n), Buckets: 1}
		if each != policy.EachAll {
			size.Buckets = 1 << 20
		}
		random := newRandom()
		rules := mixedRules(random, n)
		for i := range rules {
			rules[i].Capacity, rules[i].Each = 1<<20, policy.Each{Kind: each}
		}
		debug.FreeOSMemory()
		before := settledMemory()
		start := time.Now()
		var made owned
		defer made.Close()
		_, set, err := made.loaded(size, rules)
		if err != nil {
			return out, err
		}
		out.Seconds, out.KernelMiB = []float64{time.Since(start).Seconds()}, []float64{kernelMemory() - before}
		out.Random, out.Same, err = changeRules(random, n, changes, func(i int) func() error {
			rule := rules[i]
			rule.Rate = someRate(random)
			return func() error {
				_, err := set.Put(rule)
				return err
			}
		})
		return out, err
	}
}

// A changeRule prepares a change of the i-th rule. The preparation is not measured.
type changeRule func(i int) (do func() error)

// changeRules makes changes of random rules, of n, and then as many of a single one.
func changeRules(r *rand.Rand, n, changes int, change changeRule) (random, same []float64, err error) {
	one := r.IntN(n)
	for i := range 2 * changes {
		us := &same
		which := one
		if i < changes {
			us, which = &random, r.IntN(n)
		}
		do := change(which)
		start := time.Now()
		if err := do(); err != nil {
			return nil, nil, err
		}
		*us = append(*us, float64(time.Since(start))/float64(time.Microsecond))
	}
	return random, same, nil
}

func someRate(r *rand.Rand) policy.Rate { return policy.Rate(1+r.IntN(1000)) * 1_000_000 }

// kernelMemory returns the memory of the kernel in MiB: slab objects, vmalloc areas and
// per-CPU data. It includes other activity, so differences below about 1 MiB mean nothing.
func kernelMemory() (mib float64) {
	for _, part := range []string{"SUnreclaim", "VmallocUsed", "Percpu"} {
		mib += readMiB("/proc/meminfo", part)
	}
	return mib
}

// settledMemory returns kernelMemory when it has stopped changing, because the kernel frees
// deleted objects with a delay.
func settledMemory() float64 {
	const still, patience = 200 * time.Millisecond, 5 * time.Second
	now := kernelMemory()
	for begin := time.Now(); time.Since(begin) < patience; {
		time.Sleep(still)
		before := now
		if now = kernelMemory(); now > before-0.5 && now < before+0.5 {
			break
		}
	}
	return now
}

// runCommand runs a command in the calling thread's network namespace, with its standard input.
func runCommand(ctx context.Context, input, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(input)
	_, err := watchCommand(cmd)
	return err
}

// watchCommand runs a command, and returns the peak of the memory of its process in MiB, without maps, which it shares
// with the kernel.
func watchCommand(cmd *exec.Cmd) (peakMiB float64, err error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	// The kernel knows the peak only with maps.
	ended := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			peakMiB = max(peakMiB, readMiB(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid), "RssAnon"))
			select {
			case <-ended:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	err = cmd.Wait()
	close(ended)
	looking.Wait()
	if err != nil {
		return peakMiB, fmt.Errorf("%s: %w: %.300s", cmd, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return peakMiB, nil
}
