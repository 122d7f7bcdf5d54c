// Command bench measures shapectl beside the limiters of the kernel: `make bench`.
// Each suite yields figures with their spread, which become docs/benchmarks.md and
// the pages, charts and figures in docs/bench. It needs root.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// options apply to every suite.
type options struct {
	quick  bool              // only show that it runs: few rounds, small sizes, every figure
	only   string            // prefixes of subjects' names, separated by semicolons; other subjects may be left out
	log    io.Writer         // progress, in lines
	report func(measurement) // records samples
}

// say reports progress, because a run takes minutes.
func (o options) say(format string, args ...any) {
	fmt.Fprintf(o.log, format+"\n", args...)
}

// rounds is how often each figure is measured: an odd number, so that one of them is the median.
func (o options) rounds(full int) int {
	if o.quick {
		return 1
	}
	return full
}

// add records samples of a figure. Without samples, the figure is reported as missing.
func (o options) add(name, subject, unit, note string, samples ...float64) {
	o.report(measurement{name, subject, unit, note, samples})
}

// chosen reports whether a subject is to be measured.
func (o options) chosen(subject string) bool {
	return slices.ContainsFunc(strings.Split(o.only, ";"), func(begin string) bool {
		return strings.HasPrefix(subject, begin)
	})
}

// A suite measures, and cleans up after itself even if ctx is cancelled.
type suite struct {
	name   string
	title  string
	method string                                     // for readers of its tables
	here   func(ctx context.Context, o options) error // on this machine; may be nil
	guest  func(ctx context.Context, o options) error // in a guest; may be nil
	how    []string                                   // options of guest.sh for the guest
}

// page is the file name of its page.
func (s suite) page() string { return s.name + ".md" }

// suites are in the order in which they run and are reported.
var suites = []suite{
	{name: "program", title: "Cost of the program", here: program, method: programMethod},
	{name: "traffic", title: "Cost per packet on a veth pair", here: traffic, method: trafficMethod},
	{name: "instructions", title: "Instructions per packet", method: instructionsMethod,
		guest: instructions, how: []string{"-i"}},
	{name: "accuracy", title: "Accuracy of the rate", method: accuracyMethod,
		here: accuracy, guest: guestAccuracy, how: []string{"-c", "2"}},
	{name: "queue", title: "Queueing instead of dropping", method: queueMethod,
		guest: queue, how: []string{"-i", "-t", "3600"}},
	{name: "setup", title: "Loading and changing rules", here: setup},
	{name: "policy", title: "Whole policies on the command line", here: policies},
	{name: "pools", title: "Pools and fair shares", here: pools, method: poolsMethod,
		guest: guestPools, how: []string{"-i", "-t", "3600"}},
	{name: "hooks", title: "Rules on many devices", here: hooks, method: hooksMethod},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	only := flags.String("suite", "", "suites to run, separated by commas (default: all)")
	quick := flags.Bool("quick", false,
		"only show that every suite runs: seconds instead of minutes; the figures mean little")
	docs := flags.String("o", "",
		"write benchmarks.md and bench/ into this folder; with -suite, the figures of the other suites there are kept")
	render := flags.Bool("render", false, "measure nothing: write the pages and charts again from bench/benchmarks.json")
	subjects := flags.String("only", "", "in the suites traffic, instructions, accuracy, queue and pools, "+
		"only subjects with one of these name prefixes, separated by semicolons")
	task := flags.String("guest", "", "measure this in a virtual machine and print the figures "+
		"(the suites instructions, accuracy, queue and pools use it)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *task != "" {
		return guest(ctx, *task, os.Stdout)
	}
	if *render {
		r, err := readReport(*docs)
		if err != nil {
			return err
		}
		return r.write(*docs)
	}
	if os.Geteuid() != 0 {
		return errors.New("measuring needs root, to load programs and make network namespaces; run it with sudo")
	}
	chosen, err := choose(*only)
	if err != nil {
		return err
	}
	r := report{Machine: thisMachine(), Runs: map[string]measured{}}
	if *docs != "" && *only != "" {
		before, err := readReport(*docs)
		if err == nil {
			err = r.keep(before, chosen)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	this := measured{Date: time.Now().Format(time.DateOnly), Shapectl: shapectlVersion(), Quick: *quick}
	if k := thisMachine().Kernel; k != r.Machine.Kernel {
		this.Kernel = k
	}
	o := options{quick: *quick, only: *subjects, log: os.Stderr}
	for _, s := range suites {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		start := time.Now()
		o.say("%s: %s", s.name, s.title)
		var all []measurement
		o.report = func(t measurement) {
			all = append(all, t)
			if s.guest != nil { // each figure takes long
				median, _, _ := summarize(t.Samples)
				o.say("  %s, %s: %.6g %s", t.Case, t.Subject, median, t.Unit)
			}
		}
		if s.here != nil {
			err = s.here(ctx, o)
		}
		if err == nil && s.guest != nil {
			err = inGuest(ctx, o, guestTask{s.name, o.only, o.quick}, s.how)
		}
		if err != nil {
			return fmt.Errorf("suite %s: %w", s.name, err)
		}
		results := resultsOf(s.name, all)
		r.Runs[s.name], r.Results = this, append(r.Results, results...)
		o.say("%s: %d figures in %v", s.name, len(results), time.Since(start).Round(time.Second))
	}
	if *docs == "" {
		return r.print(os.Stdout)
	}
	return r.write(*docs)
}

// choose reads a list of suites. An empty list means all of them.
func choose(list string) (chosen []string, err error) {
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	chosen = strings.Split(cmp.Or(list, strings.Join(names, ",")), ",")
	for _, name := range chosen {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("suite %q does not exist; use %s", name, strings.Join(names, ", "))
		}
	}
	return chosen, nil
}
