// Command bench measures shapectl beside the limiters of the kernel: `make bench`.
// Each suite yields figures with their spread, which become docs/benchmarks.md and
// docs/bench/benchmarks.json. It needs root.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

var (
	suiteFlag = flag.String("suite", "", "suites to run, separated by commas (default: all)")
	quick     = flag.Bool("quick", false, "only show that every suite runs: seconds instead of minutes; the figures mean little")
	docs      = flag.String("o", "docs",
		"write benchmarks.md and bench/benchmarks.json into this folder; with -suite, the figures of the other suites there are kept")
	render    = flag.Bool("render", false, "measure nothing: write the page again from bench/benchmarks.json")
	guestFlag = flag.String("guest", "", "measure this suite in a virtual machine and print the figures "+
		"(the suites instructions, accuracy, queue and pools use it)")
)

// A suite measures, and cleans up after itself even if it is interrupted.
type suite struct {
	name, title string
	here, guest func()   // on this machine, and in a guest; either may be nil
	how         []string // options of guest.sh
}

// suites are in the order in which they run and are reported.
var suites = []suite{
	{name: "program", title: "Many flows, prefixes and CPUs", here: program},
	{name: "traffic", title: "Time added per packet", here: traffic},
	{name: "instructions", title: "Instructions added per packet", guest: instructions, how: []string{"-i"}},
	{name: "accuracy", title: "How exact a rate is", here: accuracy, guest: guestAccuracy, how: []string{"-c", "2"}},
	{name: "queue", title: "Queues", guest: queue, how: []string{"-i", "-t", "3600"}},
	{name: "setup", title: "Loading and changing rules", here: setup},
	{name: "policy", title: "Whole policies on the command line", here: policies},
	{name: "pools", title: "Pools and fair shares", guest: guestPools, how: []string{"-i", "-t", "3600"}},
	{name: "hooks", title: "Rules on many devices", here: hooks},
}

// record takes samples.
var record func(Result)

// add records samples of a figure.
func add(name, subject, unit, note string, samples ...float64) {
	record(Result{Case: name, Subject: subject, Unit: unit, Note: note, Samples: samples})
}

// say reports progress, because a run takes minutes.
func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// rounds is how often each figure is measured: an odd number, so that one of them is the median.
func rounds(full int) int { return unlessQuick(full, 1) }

func unlessQuick[T any](full, small T) T {
	if *quick {
		return small
	}
	return full
}

func main() {
	flag.Parse()
	err := try(run)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() {
	switch {
	case *guestFlag != "":
		inside(*guestFlag)
		return
	case *render:
		must(readReport(*docs)).write(*docs)
		return
	case os.Geteuid() != 0:
		check(errors.New("measuring needs root, to load programs and make network namespaces; run it with sudo"))
	}
	chosen := choose(*suiteFlag)
	r := report{Machine: thisMachine(), Runs: map[string]measured{}}
	if *suiteFlag != "" {
		before, err := readReport(*docs)
		if err == nil {
			err = r.keep(before, chosen)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			check(err)
		}
	}
	now := measured{Date: time.Now().Format(time.DateOnly), Shapectl: firstLine("git", "describe", "--tags", "--always", "--dirty"), Quick: *quick}
	if k := thisMachine().Kernel; k != r.Machine.Kernel {
		now.Kernel = k
	}
	for _, s := range suites {
		if slices.Contains(chosen, s.name) {
			r.measure(s)
			r.Runs[s.name] = now
		}
	}
	r.write(*docs)
}

// measure runs a suite.
func (r *report) measure(s suite) {
	start := time.Now()
	say("%s: %s", s.name, s.title)
	record = func(f Result) {
		f.Suite = s.name
		r.record(f)
		if s.guest != nil { // each figure takes long
			say("  %s, %s: %.6g %s", f.Case, f.Subject, f.Samples, f.Unit)
		}
	}
	if s.here != nil {
		s.here()
	}
	if s.guest != nil {
		s.inGuest()
	}
	r.summarize()
	say("%s: %v", s.name, time.Since(start).Round(time.Second))
}

// choose reads a list of suites. An empty list means all of them.
func choose(list string) (chosen []string) {
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	for name := range strings.SplitSeq(cmp.Or(list, strings.Join(names, ",")), ",") {
		if !slices.Contains(names, name) {
			check(fmt.Errorf("suite %q does not exist; use %s", name, strings.Join(names, ", ")))
		}
		chosen = append(chosen, name)
	}
	return chosen
}

// ctx ends when the user interrupts the run.
var ctx, stop = signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)

// Any error ends the run. Thus check and must panic with it, and try returns it as an error: in main, and at the end of
// each thread.
type failure struct{ error }

func check(err error) { fail(err) }

func must[T any](value T, err error) T {
	fail(err)
	return value
}

// fail adds the place of the call that failed, unless err has one.
func fail(err error) {
	if err != nil && !errors.As(err, new(failure)) {
		_, file, line, _ := runtime.Caller(2)
		err = failure{fmt.Errorf("%s:%d: %w", filepath.Base(file), line, err)}
	}
	if err != nil {
		panic(failure{err})
	}
}

func try(f func()) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case failure:
			err = p
		default:
			panic(p)
		}
	}()
	f()
	return nil
}

// together runs functions at the same time. An error of one ends the run, and so the others.
func together(all ...func()) {
	errs := make([]error, len(all))
	var running sync.WaitGroup
	for i, f := range all {
		running.Go(func() {
			if errs[i] = try(f); errs[i] != nil {
				stop()
			}
		})
	}
	running.Wait()
	check(errors.Join(errs...))
}

// aside runs f on its own thread. f may change the state of the thread.
func aside(f func()) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked, so the thread ends with the goroutine
		done <- try(f)
	}()
	check(<-done)
}

// in runs f on its own thread in a network namespace.
func in(namespace netns.NsHandle, f func()) {
	aside(func() {
		check(netns.Set(namespace))
		f()
	})
}

// pinned runs f on a thread on one CPU.
func pinned(cpu int, f func()) {
	aside(func() {
		var one unix.CPUSet
		one.Set(cpu)
		check(unix.SchedSetaffinity(0, &one))
		f()
	})
}

// cpus returns the CPUs that this process may run on.
func cpus() (list []int) {
	var allowed unix.CPUSet
	check(unix.SchedGetaffinity(0, &allowed))
	for cpu := range len(allowed) * 64 {
		if allowed.IsSet(cpu) {
			list = append(list, cpu)
		}
	}
	return list
}

// onLastCPU runs f on a thread on the last CPU, because interrupts mostly go to the first one.
func onLastCPU(f func()) { pinned(slices.Max(cpus()), f) }

// sleep waits for a time.
func sleep(d time.Duration) {
	select {
	case <-ctx.Done():
		check(ctx.Err())
	case <-time.After(d):
	}
}

// interleave measures n subjects in each round, in random order, and calls each with the figures of the round. A machine
// that is slow for a while is slow for all of them.
func interleave(rounds, n int, measure func(i int) float64, each func(round []float64)) {
	for range rounds {
		round := make([]float64, n)
		for _, i := range rand.Perm(n) {
			check(ctx.Err())
			round[i] = measure(i)
		}
		each(round)
	}
}

// newRandom returns the same sequence in each run, so that all runs measure the same rules.
func newRandom() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }

// owned are what closes the resources of a case.
type owned []func()

func (o *owned) keep(close func()) { *o = append(*o, close) }

func (o *owned) Close() {
	for _, close := range *o {
		close()
	}
	*o = nil
}

// keepFD closes a file descriptor with the case.
func (o *owned) keepFD(fd int) { o.keep(func() { unix.Close(fd) }) }

// Some peers, and a clock that counts instructions, are not on every machine. For them
// the program runs itself in a virtual machine.

// guestKernel has tcx and all peers.
const guestKernel = "6.12"

// guestModules are the kernel modules of the suites and the peers.
const guestModules = "veth sch_ingress cls_bpf cls_matchall cls_u32 act_police sch_tbf sch_htb sch_cake " +
	"sch_fq sch_fq_codel sch_netem tcp_bbr nf_tables nft_limit nft_compat ip_tables iptable_raw xt_hashlimit"

// guestMark begins the lines with samples in the output of a guest.
const guestMark = "@samples "

// inside measures in the guest, and writes a line with the samples of each figure.
func inside(name string) {
	record = func(t Result) { fmt.Printf("%s%s\n", guestMark, must(json.Marshal(t))) }
	for _, s := range suites {
		if s.name == name {
			s.guest()
		}
	}
}

// inGuest runs a suite in a guest, and records its samples.
func (s suite) inGuest() {
	self := must(os.Executable())
	call := append([]string{guestKernel}, s.how...)
	for m := range strings.FieldsSeq(guestModules) {
		call = append(call, "-M", m)
	}
	call = append(call, "-p", "ip", "-p", "tc", "-p", "nft", "-p", iptables, "-f", self+":/bench",
		"--", "/bench", "-guest", s.name, "-quick="+strconv.FormatBool(*quick))
	c := exec.CommandContext(ctx, "scripts/guest.sh", call...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) } // guest.sh must stop its guest
	c.Stderr = os.Stderr
	output := must(c.StdoutPipe())
	check(c.Start())
	others := ""
	for lines := bufio.NewScanner(output); lines.Scan(); {
		line, marked := strings.CutPrefix(lines.Text(), guestMark)
		var t Result
		if marked && json.Unmarshal([]byte(line), &t) == nil {
			record(t)
		} else {
			others += line + "\n"
		}
	}
	if err := c.Wait(); err != nil {
		check(fmt.Errorf("measure in a guest: %w: %s", err, others))
	}
}
