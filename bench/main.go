// Command bench measures what shapectl costs, beside the limiters that a
// kernel comes with: `make bench`. Each suite yields figures with their spread,
// which become docs/benchmarks.md with its charts and docs/benchmarks.json. It needs root.
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

// options are what every suite goes by.
type options struct {
	quick  bool        // only show that it runs: few rounds, small sizes, every figure
	only   string      // how names of subjects begin, with semicolons in between, where a suite can leave others out
	other  string      // another build of the command, which the suite hooks measures, too; "" for none
	log    io.Writer   // what is being done, a line each
	report func(taken) // takes samples down
}

// say tells the user what is being done, as a run takes minutes.
func (o options) say(format string, args ...any) {
	fmt.Fprintf(o.log, format+"\n", args...)
}

// rounds is how often each figure is taken: an odd number, so that one of them is the median.
func (o options) rounds(full int) int {
	if o.quick {
		return 3
	}
	return full
}

// add reports samples of a figure; that there are none is said of it, too.
func (o options) add(name, subject, unit, note string, samples ...float64) {
	o.report(taken{name, subject, unit, note, samples})
}

// chosen reports whether a subject is to be measured.
func (o options) chosen(subject string) bool {
	return slices.ContainsFunc(strings.Split(o.only, ";"), func(begin string) bool {
		return strings.HasPrefix(subject, begin)
	})
}

// A suite measures, and cleans up after itself also when ctx is cancelled.
type suite struct {
	name  string
	title string
	here  func(ctx context.Context, o options) error // on this machine; nil if nothing
	guest func(ctx context.Context, o options) error // in a guest; nil if nothing
	how   []string                                   // options of guest.sh for that
}

// suites are in the order in which they run and are reported.
var suites = []suite{
	{name: "program", title: "What a program costs", here: program},
	{name: "traffic", title: "What a packet costs on a veth pair", here: traffic},
	{name: "instructions", title: "What a packet costs in instructions", guest: instructions, how: []string{"-i"}},
	{name: "accuracy", title: "How near to the rate", here: accuracy, guest: guestAccuracy, how: []string{"-c", "2"}},
	{name: "queue", title: "Holding back instead of dropping", guest: queue, how: []string{"-i", "-t", "3600"}},
	{name: "setup", title: "Setting up and changing rules", here: setup},
	{name: "policy", title: "Whole policies on the command line", here: policies},
	{name: "hooks", title: "Rules on many devices", here: hooks},
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
	only := flags.String("suite", "", "suites to run, with commas between them (default: all)")
	quick := flags.Bool("quick", false,
		"only show that every suite runs: seconds instead of minutes, figures that mean little")
	docs := flags.String("o", "",
		"folder for benchmarks.md, benchmarks.json and charts; with -suite, the other suites' figures there are kept")
	render := flags.Bool("render", false, "run nothing: write benchmarks.md and charts anew from benchmarks.json")
	load := flags.String("load", "", "load rules, print what that took, and end: what the suite setup runs")
	subjects := flags.String("only", "", "in the suites traffic, instructions, accuracy and queue, "+
		"only subjects whose names begin like this, or like one of several with semicolons in between")
	other := flags.String("other", "",
		"path of another build of shapectl, which the suite hooks measures, too, in turn with this one")
	task := flags.String("guest", "", "measure this in a virtual machine and print the figures: "+
		"what the suites instructions, accuracy and queue run")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *task != "" {
		return guest(ctx, *task, os.Stdout)
	}
	if *load != "" {
		return loadRules(*load, os.Stdout)
	}
	if *render {
		r, err := readReport(*docs)
		if err != nil {
			return err
		}
		return r.write(*docs)
	}
	if os.Geteuid() != 0 {
		return errors.New("loading programs and making network namespaces needs root: run it with sudo")
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
	o := options{quick: *quick, only: *subjects, other: *other, log: os.Stderr}
	for _, s := range suites {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		start := time.Now()
		o.say("%s: %s", s.name, s.title)
		var all []taken
		o.report = func(t taken) {
			all = append(all, t)
			if s.guest != nil { // where each one takes long
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
		return r.markdown(os.Stdout)
	}
	return r.write(*docs)
}

// choose reads a list of suites; all of them where it is empty.
func choose(list string) (chosen []string, err error) {
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	chosen = strings.Split(cmp.Or(list, strings.Join(names, ",")), ",")
	for _, name := range chosen {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("no suite is called %q: use %s", name, strings.Join(names, ", "))
		}
	}
	return chosen, nil
}
