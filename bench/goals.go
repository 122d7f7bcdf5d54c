package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// A goal is what shapectl set out to reach.
type goal struct {
	what    string
	bound   float64
	least   bool                           // the figure must not be below bound, rather than not above
	unit    string                         // "" for that of figures
	figures []figure                       // all of them have to reach it
	divisor *figure                        // by which figures are divided, if any
	compute func([]Result) (float64, bool) // in place of figures
	explain []figure                       // what else to tell
}

// A figure names a result.
type figure struct{ suite, name, subject, unit string }

func (f figure) in(results []Result) (Result, bool) {
	i := slices.IndexFunc(results, func(r Result) bool {
		return r.Suite == f.suite && r.Case == f.name && r.Subject == f.subject && r.Unit == f.unit && r.Rounds > 0
	})
	if i < 0 {
		return Result{}, false
	}
	return results[i], true
}

// each are the figures of several subjects in several cases.
func each(suite, unit string, names, subjects []string) (list []figure) {
	for _, name := range names {
		for _, subject := range subjects {
			list = append(list, figure{suite, name, subject, unit})
		}
	}
	return list
}

const (
	bareCase   = "Instructions per packet without a limiter"
	neverBite  = "Instructions added per packet: limits that never bite"
	mostDrop   = "Instructions added per packet: dropping nine tenths"
	million    = "1 000 000"
	binMillion = "1 048 576"
)

var (
	bothAlgorithms = []string{"shapectl gcra", "shapectl leaky"}
	policeFigure   = figure{"instructions", neverBite, "tc police", unitInstructions}
	setupSubjects  = []string{"shapectl gcra", "shapectl gcra, each host"}
	holdingBack    = []string{
		"shapectl leaky, delay", "shapectl leaky, delay, ECN", "shapectl gcra, delay", "shapectl gcra, delay, sparse first",
	}
)

func instructionsOf(name string, subjects ...string) []figure {
	return each("instructions", unitInstructions, []string{name}, subjects)
}

// atPaces are the cases of a table of the suite queue.
func atPaces(table string) (names []string) {
	for _, p := range paces {
		names = append(names, fmt.Sprintf("%s: %v", table, p.rate))
	}
	return names
}

func millionPrefixes(family string) []figure {
	return each("program", unitTrie, []string{
		family + " prefixes, addresses in all prefixes: " + million,
		family + " prefixes, any address: " + million,
	}, bothAlgorithms)
}

func millionPolicy(subjects ...string) []figure {
	return each("policy", unitSeconds, []string{commandTime + ": " + million}, subjects)
}

var droppedKinds = func() (names []string) {
	for _, k := range kindsOfRule {
		names = append(names, "dropped by passed: "+k.column)
	}
	return names
}()

var goals = []goal{
	{what: "`each all` adds fewer instructions than `tc police`", bound: 1, unit: "x tc police",
		figures: instructionsOf(neverBite, "shapectl gcra, each all"), divisor: &policeFigure},
	{what: "`each all`, aim", bound: 345, figures: instructionsOf(neverBite, "shapectl gcra, each all")},
	{what: "`each host` and `each flow`", bound: 500,
		figures: instructionsOf(neverBite, "shapectl gcra, each host", "shapectl gcra, each flow")},
	{what: "`each host` and `each flow`, aim", bound: 440,
		figures: instructionsOf(neverBite, "shapectl gcra, each host", "shapectl gcra, each flow")},
	{what: "dropping takes no more instructions than passing", bound: 1, unit: "x passing", compute: droppingInstructions},
	{what: "dropping takes no more time than passing, in the program", bound: 1,
		figures: each("program", unitPassing, droppedKinds, bothAlgorithms)},
	{what: "100 IPv6 prefixes of mixed lengths, random addresses in them", bound: 1.3, figures: each("program", unitTrieBucket,
		[]string{"IPv6 prefixes, addresses in all prefixes: 100"}, bothAlgorithms)},
	{what: "a million IPv4 prefixes of mixed lengths, random addresses", bound: 0.25, figures: millionPrefixes("IPv4")},
	{what: "a million IPv6 prefixes of mixed lengths, random addresses", bound: 0.25, figures: millionPrefixes("IPv6")},
	{what: "a million live flows by one that is always the same", bound: 3,
		figures: each("program", unitHot, []string{"live flows, each in turn: " + binMillion}, bothAlgorithms)},
	{what: "a million live flows by an LRU hash map of them", bound: 0.6,
		figures: each("program", unitLRU, []string{"live flows, each in turn: " + binMillion}, bothAlgorithms)},
	{what: "one bucket, packets of two CPUs", bound: 1.6, least: true,
		figures: each("program", unitOneCPU, []string{"packets of two CPUs: one bucket"}, bothAlgorithms),
		explain: append(
			each("program", unitOneCPU, []string{"packets of two CPUs: one bucket"},
				[]string{sharedClock, sharedCAS, sharedAdd}),
			each("program", unitNanoseconds, []string{"time from packet to packet, two CPUs: one bucket"},
				[]string{"shapectl gcra", sharedClock, sharedCAS, sharedAdd})...)},
	{what: "error of the rate: every peer's by ours", bound: 10, least: true, unit: "x ours", compute: rateError},
	{what: "goodput of one TCP flow that is held back", bound: 95, least: true,
		figures: each("queue", unitGoodput, atPaces(oneFlow), holdingBack)},
	{what: "segments sent again where packets are held back and marked", bound: 0.1,
		figures: each("queue", unitAgain, append(atPaces(oneFlow), fourFlows+": "+commonPace.rate.String()),
			holdingBack[1:2])},
	{what: "gaps between packets that are held back, 99 % of them", bound: 1.1,
		figures: each("queue", unitGap99, atPaces(spacing), holdingBack[:1])},
	{what: "ping p99 beside four flows that are held back and marked", bound: 1.5, unit: "x CAKE",
		figures: each("queue", unitPing99, []string{fourFlows + ": " + commonPace.rate.String()}, holdingBack[1:2]),
		divisor: &figure{"queue", fourFlows + ": " + commonPace.rate.String(), "CAKE, ECN", unitPing99}},
	{what: "ping p99 beside four flows that are held back, sparse flows first", bound: 1.5, unit: "x CAKE",
		figures: each("queue", unitPing99, []string{fourFlows + ": " + commonPace.rate.String()}, holdingBack[3:4]),
		divisor: &figure{"queue", fourFlows + ": " + commonPace.rate.String(), "CAKE", unitPing99}},
	{what: "a million rules loaded into the kernel", bound: 3,
		figures: each("setup", unitSeconds, []string{"time to load rules: " + million}, setupSubjects)},
	{what: "one of a million rules changed", bound: 1000,
		figures: each("setup", unitMicroseconds, []string{
			"time to change one rule, another each time: " + million,
			"time to change one rule, the same again: " + million,
		}, setupSubjects)},
	{what: "a policy of a million prefixes applied, no rules before", bound: 10, figures: millionPolicy(applyFirst)},
	{what: "the same one applied again", bound: 6, figures: millionPolicy(applyAgain)},
	{what: "applied with 1 % of it changed", bound: 7, figures: millionPolicy(applyChanged)},
	{what: "diff of it", bound: 6, figures: millionPolicy(diffSame, diffChanged)},
	{what: "export of it", bound: 3, figures: millionPolicy(exportRules)},
	{what: "one rule of it set by the command", bound: 1, figures: millionPolicy(setOne)},
	{what: "memory of a command with it, without maps", bound: 1536,
		figures: each("policy", unitMiB, []string{commandMemory + ": " + million},
			[]string{applyFirst, applyAgain, applyChanged, diffSame, diffChanged, exportRules, setOne})},
	{what: "rules in both directions of 200 devices applied, no rules before", bound: 1,
		figures: []figure{{"hooks", hooksTime + ": 200", hooksFirst, unitSeconds}}},
	{what: "the rates of all of them changed", bound: 0.5,
		figures: []figure{{"hooks", hooksTime + ": 200", hooksRates, unitSeconds}}},
	{what: "rules of 20 new devices in force under `watch`", bound: 0.3,
		figures: []figure{{"hooks", fmt.Sprintf(hooksWatch, 20) + ": 0", hooksWatched, unitSeconds}}},
	{what: "kernel memory of four rules on each of 1 000 devices", bound: 100,
		figures: []figure{{"hooks", hooksMemory + ": 1 000", hooksShared, unitMiB}}},
	{what: "the same with `--each host`", bound: 300,
		figures: []figure{{"hooks", hooksMemory + ": 1 000", hooksHosts, unitMiB}}},
}

// value is the figure of a goal: the worst of those that have to reach it;
// false unless all of them were taken.
func (g goal) value(results []Result) (worst float64, ok bool) {
	if g.compute != nil {
		return g.compute(results)
	}
	by := Result{Median: 1}
	if g.divisor != nil {
		if by, ok = g.divisor.in(results); !ok {
			return 0, false
		}
	}
	for i, f := range g.figures {
		r, ok := f.in(results)
		if !ok {
			return 0, false
		}
		v := r.Median / by.Median
		if i == 0 || g.least == (v < worst) {
			worst = v
		}
	}
	return worst, true
}

// droppingInstructions is the most that a packet takes where nine tenths are
// dropped by what it takes where none is, its way through the stack included, of all ways of shapectl.
func droppingInstructions(results []Result) (worst float64, ok bool) {
	bare, found := figure{"instructions", bareCase + ": IPv4", noLimiter, unitInstructions}.in(results)
	if !found {
		return 0, false
	}
	for _, r := range results {
		if r.Suite != "instructions" || r.Case != mostDrop || !ours(r.Subject) || r.Rounds == 0 {
			continue
		}
		passing, found := figure{r.Suite, neverBite, r.Subject, r.Unit}.in(results)
		if !found {
			return 0, false
		}
		worst, ok = max(worst, (bare.Median+r.Median)/(bare.Median+passing.Median)), true
	}
	return worst, ok
}

// rateError is the least error of a peer's rate by the greatest of ours, of all cases that both are in.
func rateError(results []Result) (least float64, ok bool) {
	for _, t := range tablesOf("accuracy", results) {
		for _, column := range t.columns() {
			mine, theirs := 0.0, math.Inf(1)
			for _, subject := range t.subjects() {
				r, found := t.find(column, subject, unitMillionths)
				switch {
				case !found || r.Rounds == 0:
				case ours(subject):
					mine = max(mine, r.Median)
				case peer(subject):
					theirs = min(theirs, r.Median)
				}
			}
			if math.IsInf(theirs, 1) || mine == 0 {
				continue
			}
			if ratio := theirs / mine; !ok || ratio < least {
				least, ok = ratio, true
			}
		}
	}
	return least, ok
}

// goalTable says what was to be reached, and what was.
func goalTable(results []Result) string {
	var b, notes strings.Builder
	b.WriteString(row("target", "bound", "figure", "met") + "|---|--:|--:|---|\n")
	for _, g := range goals {
		bound := "at most "
		if g.least {
			bound = "at least "
		}
		unit := g.unit
		if unit == "" {
			unit = g.figures[0].unit
		}
		bound += number(g.bound) + " " + unit
		reached, met := "not measured", ""
		v, ok := g.value(results)
		if ok {
			reached, met = number(v), "**no**"
		}
		if ok && (v == g.bound || (v > g.bound) == g.least) {
			met = "yes"
		}
		b.WriteString(row(g.what, bound, reached, met))
		if len(g.explain) > 0 && ok {
			fmt.Fprintf(&notes, "\nBeside \"%s\":\n\n", g.what)
			for _, f := range g.explain {
				if r, ok := f.in(results); ok {
					fmt.Fprintf(&notes, "- %s: %s %s (%s)\n", f.subject, number(r.Median), r.Unit, r.table())
				}
			}
		}
	}
	return b.String() + notes.String() + "\n"
}
