package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/bpf"
	datapath "github.com/shapectl/shapectl/internal/program"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// The suite "setup" brings many rules into force and changes one of them:
// what that takes in time, in the memory of the process that does it, and in
// the kernel's.

// An outcome is what it took to bring rules into force once, and to change them.
type outcome struct {
	Seconds   float64
	KernelMiB float64
	Random    []float64 // µs to change a rule, another one each time
	Same      []float64 // µs to change the same one again and again

	ProcessMiB float64 // at its peak
}

// A contender is one that setup compares.
type contender struct {
	subject string
	most    int // as many rules as are tried
	why     string
	note    string
	slow    bool // to change
	load    func(ctx context.Context, n, changes int) (outcome, error)
}

var contenders = []contender{
	{subject: name(policy.GCRA), most: 1_000_000, load: loadOurs(policy.EachAll)},
	{subject: name(policy.GCRA) + ", each host", most: 1_000_000, load: loadOurs(policy.EachHost),
		note: "with room for a million hosts"},
	{subject: "HTB classes, u32 hash tables", most: 65_534, load: loadHTB,
		why: "an HTB qdisc has 65 534 classes at most", note: "addresses of one /16; changed by netlink, loaded by `tc -batch`"},
	{subject: "nft map of limits", most: 100_000, slow: true, load: loadNftMap,
		why: "not tried, as 100 000 already take long", note: "prefixes that do not overlap; each change is a call of nft"},
	{subject: "nft set with limits", most: 100_000, slow: true, load: loadNftSet,
		why: "not tried, as 100 000 already take long", note: "prefixes that do not overlap; each change is a call of nft"},
}

func setup(ctx context.Context, o options) (results []Result, err error) {
	sizes := []struct {
		rules, rounds int
		changes       int // of each kind in a round
		slowChanges   int // the same where each one may take seconds
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
				for _, f := range figures {
					results = append(results, Result{Case: f.table + ": " + count(size.rules), Subject: l.subject, Unit: f.unit, Note: l.why})
				}
				continue
			}
			o.say("  %s rules: %s", count(size.rules), l.subject)
			changes := size.changes
			if l.slow {
				changes = size.slowChanges
			}
			var all []outcome
			for range o.rounds(size.rounds) {
				one, err := l.load(ctx, size.rules, changes)
				if err != nil {
					return nil, fmt.Errorf("%s, %d rules: %w", l.subject, size.rules, err)
				}
				all = append(all, one)
			}
			for _, f := range figures {
				var samples []float64
				for _, one := range all {
					samples = append(samples, f.of(one)...)
				}
				r := newResult(f.table+": "+count(size.rules), l.subject, f.unit, samples)
				r.Note = l.note
				results = append(results, r)
			}
		}
	}
	return results, nil
}

var figures = []struct {
	table, unit string
	of          func(outcome) []float64
}{
	{"time to load rules", unitSeconds, func(o outcome) []float64 { return []float64{o.Seconds} }},
	{"time to change one rule, another each time", unitMicroseconds, func(o outcome) []float64 { return o.Random }},
	{"time to change one rule, the same again", unitMicroseconds, func(o outcome) []float64 { return o.Same }},
	{"kernel memory of rules", unitMiB, func(o outcome) []float64 { return []float64{o.KernelMiB} }},
	{"peak memory of the process that loads rules", unitMiB, func(o outcome) []float64 { return []float64{o.ProcessMiB} }},
}

// loadOurs has this program run once more with -load, so that its memory is that of loading alone.
func loadOurs(each policy.EachKind) func(ctx context.Context, n, changes int) (outcome, error) {
	return func(ctx context.Context, n, changes int) (out outcome, err error) {
		self, err := os.Executable()
		if err != nil {
			return out, err
		}
		what, err := json.Marshal(loading{Rules: n, Changes: changes, Each: each})
		if err != nil {
			return out, err
		}
		var stdout bytes.Buffer
		if _, err = runCommand(ctx, nil, &stdout, self, "-load", string(what)); err != nil {
			return out, err
		}
		err = json.Unmarshal(stdout.Bytes(), &out)
		return out, err
	}
}

// loading says what runs with -load, as JSON.
type loading struct {
	Rules   int
	Changes int
	Each    policy.EachKind
}

// run prints the outcome as JSON. Making the rules stands for reading them from a file, and is not counted.
func (l loading) run(w io.Writer) error {
	n := l.Rules
	size := maps.Size{Rules: uint32(n), Buckets: 1}
	if l.Each != policy.EachAll {
		size.Buckets = 1 << 20
	}
	random := newRandom()
	prefixes := append(mixedPrefixes(random, false, n/2), mixedPrefixes(random, true, n-n/2)...)
	rules := make([]policy.Rule, n)
	for i, p := range prefixes {
		rules[i] = policy.Rule{Prefix: p, Rate: someRate(random), Capacity: 1 << 20, Each: policy.Each{Kind: l.Each}}
	}
	if err := forgetPeak(); err != nil {
		return err
	}
	before := settledMemory()
	start := time.Now()
	store, err := maps.New(size, bpf.AbiHook{L2Bytes: ethernetBytes, Secret: secret()})
	if err != nil {
		return err
	}
	defer store.Close()
	p, err := datapath.Load(store, store.Hook())
	if err != nil {
		return err
	}
	defer p.Close()
	set := store.View(0)
	if err := set.Load(rules); err != nil {
		return err
	}
	out := outcome{Seconds: time.Since(start).Seconds(), KernelMiB: kernelMemory() - before}
	out.ProcessMiB, _ = peakMemory(os.Getpid())

	change := func(i int) (float64, error) {
		rule := rules[i]
		rule.Rate = someRate(random)
		start := time.Now()
		_, err := set.Put(rule)
		return microseconds(time.Since(start)), err
	}
	if out.Random, out.Same, err = changeRules(random, n, l.Changes, change); err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(out)
}

// changeRules changes one of n rules so often, another each time, and then one of them so often.
func changeRules(r *rand.Rand, n, changes int, change func(i int) (us float64, err error)) (random, same []float64, err error) {
	for range changes {
		us, err := change(r.IntN(n))
		if err != nil {
			return nil, nil, err
		}
		random = append(random, us)
	}
	one := r.IntN(n)
	for range changes {
		us, err := change(one)
		if err != nil {
			return nil, nil, err
		}
		same = append(same, us)
	}
	return random, same, nil
}

func someRate(r *rand.Rand) policy.Rate { return policy.Rate(1+r.IntN(1000)) * 1_000_000 }

func microseconds(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// kernelMemory is what the kernel has taken for itself in MiB: objects, large
// areas, and what each CPU has its own copy of. Others' doings are in it too,
// so differences below about 1 MiB mean nothing.
func kernelMemory() (mib float64) {
	data, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(data)) {
		name, rest, _ := strings.Cut(line, ":")
		switch name {
		case "SUnreclaim", "VmallocUsed", "Percpu":
			kib, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			mib += kib / 1024
		}
	}
	return mib
}

// settledMemory is kernelMemory once it has stopped changing: what was deleted
// just now is freed in the kernel's own time.
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

// runCommand runs a command in the calling thread's network namespace, and
// returns the most memory that it had at any time, in MiB.
func runCommand(ctx context.Context, stdin io.Reader, stdout io.Writer, command string, args ...string) (peakMiB float64, err error) {
	cmd := exec.CommandContext(ctx, command, args...)
	cmd.Stdin, cmd.Stdout = stdin, stdout
	return watchCommand(cmd, peakMemory)
}

// watchCommand runs a command, and returns the most that memory, in MiB, said of its process.
func watchCommand(cmd *exec.Cmd, memory func(pid int) (mib float64, ok bool)) (peakMiB float64, err error) {
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	// The kernel tells the peak only while the process lives; what it tells
	// its parent includes the parent's own, of the moment before exec.
	ended := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			if mib, ok := memory(cmd.Process.Pid); ok {
				peakMiB = max(peakMiB, mib)
			}
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

// forgetPeak begins the search for the peak of this process's memory anew,
// after all that is not needed any more has been given back.
func forgetPeak() error {
	debug.FreeOSMemory()
	return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) // proc(5): resets VmHWM
}

// peakMemory is the most that a process, which still lives, ever had.
func peakMemory(pid int) (mib float64, ok bool) { return statusMemory(pid, "VmHWM:") }

// ownMemory is what a process, which still lives, has for itself: no maps, which it shares with the kernel.
func ownMemory(pid int) (mib float64, ok bool) { return statusMemory(pid, "RssAnon:") }

func statusMemory(pid int, what string) (mib float64, ok bool) {
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(data)) {
		if rest, found := strings.CutPrefix(line, what); found {
			kib, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
			return kib / 1024, err == nil
		}
	}
	return 0, false
}

// inNamespace runs f in a network namespace of its own, which goes when f is done.
func inNamespace(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, and takes the namespace along
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("make a network namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}
