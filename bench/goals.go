package main

import (
	"fmt"
	"math"
	"slices"
)

// A goal is a target of shapectl.
type goal struct {
	what    string
	bound   float64
	least   bool                           // bound is a lower bound, rather than an upper one
	unit    string                         // "" for the unit of figures
	figures []figure                       // all of them must meet the bound
	divisor *figure                        // figures are divided by it; may be nil
	compute func([]Result) (float64, bool) // instead of figures
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

// each returns the figures of several subjects in several cases.
func each(suite, unit string, names, subjects []string) (list []figure) {
	for _, name := range names {
		for _, subject := range subjects {
			list = append(list, figure{suite, name, subject, unit})
		}
	}
	return list
}

const (
	bareCase    = "Instructions per packet without a limiter"
	allConform  = "Instructions added per packet: all packets conform"
	mostDropped = "Instructions added per packet: 90 % dropped"
	million     = "1 000 000"
	binMillion  = "1 048 576"
)

var (
	bothAlgorithms = []string{"shapectl gcra", "shapectl leaky"}
	policeFigure   = figure{"instructions", allConform, "tc police", unitInstructions}
	setupSubjects  = []string{"shapectl gcra", "shapectl gcra, each host"}
	sharingFlows   = []string{"shapectl gcra, share flow"}
	delaying       = []string{
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

var goals = []goal{
	{what: "`each all`, instructions relative to `tc police`", bound: 1, unit: "x tc police",
		figures: instructionsOf(allConform, "shapectl gcra, each all"), divisor: &policeFigure},
	{what: "`each all`, instructions added (stretch)", bound: 345, figures: instructionsOf(allConform, "shapectl gcra, each all")},
	{what: "`each host` and `each flow`, instructions added", bound: 500,
		figures: instructionsOf(allConform, "shapectl gcra, each host", "shapectl gcra, each flow")},
	{what: "`each host` and `each flow`, instructions added (stretch)", bound: 440,
		figures: instructionsOf(allConform, "shapectl gcra, each host", "shapectl gcra, each flow")},
	{what: "drop a packet, instructions relative to passing it", bound: 1, unit: "x passing", compute: droppingInstructions},
	{what: "100 IPv6 prefixes of mixed lengths, random addresses in them", bound: 1.3, figures: each("program", unitTrieBucket,
		[]string{"IPv6 prefixes, addresses in all prefixes: 100"}, bothAlgorithms)},
	{what: "a million IPv4 prefixes of mixed lengths, random addresses", bound: 0.25, figures: millionPrefixes("IPv4")},
	{what: "a million IPv6 prefixes of mixed lengths, random addresses", bound: 0.25, figures: millionPrefixes("IPv6")},
	{what: "a million live flows, relative to a single one", bound: 3, unit: "x one flow",
		figures: each("program", unitHot, []string{"Live flows, in random order: " + binMillion}, bothAlgorithms)},
	{what: "a million live flows, relative to an LRU hash map", bound: 0.6,
		figures: each("program", unitLRU, []string{"Live flows, in random order: " + binMillion}, bothAlgorithms)},
	{what: "throughput of two CPUs with one bucket", bound: 1.6, least: true,
		figures: each("program", unitOneCPU, []string{"Throughput of two CPUs: one bucket"}, bothAlgorithms)},
	{what: "rate error of the best peer, relative to ours", bound: 10, least: true, unit: "x ours", compute: rateError},
	{what: "goodput of one delayed TCP flow", bound: 95, least: true, unit: "%",
		figures: each("queue", unitGoodput, atPaces(oneFlow), delaying)},
	{what: "retransmitted segments with `delay` and ECN", bound: 0.1, unit: "per MB",
		figures: each("queue", unitRetransmitted, append(atPaces(oneFlow), fourFlows+": "+commonPace.rate.String()),
			delaying[1:2])},
	{what: "99th percentile of gaps between delayed packets", bound: 1.1, unit: "x ideal",
		figures: each("queue", unitGap99, atPaces(spacing), delaying[:1])},
	{what: "ping p99 beside four delayed flows, with ECN", bound: 1.5, unit: "x CAKE",
		figures: each("queue", unitPing99, []string{fourFlows + ": " + commonPace.rate.String()}, delaying[1:2]),
		divisor: &figure{"queue", fourFlows + ": " + commonPace.rate.String(), "CAKE, ECN", unitPing99}},
	{what: "ping p99 beside four delayed flows, sparse flows first", bound: 1.5, unit: "x CAKE",
		figures: each("queue", unitPing99, []string{fourFlows + ": " + commonPace.rate.String()}, delaying[3:4]),
		divisor: &figure{"queue", fourFlows + ": " + commonPace.rate.String(), "CAKE", unitPing99}},
	{what: "load a million rules into the kernel", bound: 3,
		figures: each("setup", unitSeconds, []string{"Time to load rules: " + million}, setupSubjects)},
	{what: "change one of a million rules", bound: 1000,
		figures: each("setup", unitMicroseconds, []string{
			"Time to change one rule, a random one each time: " + million,
			"Time to change one rule, always the same one: " + million,
		}, setupSubjects)},
	{what: "apply a policy of a million prefixes, without rules before", bound: 10, figures: millionPolicy(applyFirst)},
	{what: "apply it again without changes", bound: 6, figures: millionPolicy(applyAgain)},
	{what: "apply it with 1 % changed", bound: 7, figures: millionPolicy(applyChanged)},
	{what: "`diff` of it", bound: 6, figures: millionPolicy(diffSame, diffChanged)},
	{what: "`export` of it", bound: 3, figures: millionPolicy(exportRules)},
	{what: "`set` one rule of it", bound: 1, figures: millionPolicy(setOne)},
	{what: "memory of a command with it, without maps", bound: 1536,
		figures: each("policy", unitMiB, []string{commandMemory + ": " + million},
			[]string{applyFirst, applyAgain, applyChanged, diffSame, diffChanged, exportRules, setOne})},
	{what: "each pool above a rule, instructions", bound: 90, unit: unitInstructions, compute: poolInstructions},
	{what: "fair shares, instructions", bound: 120, unit: unitInstructions, compute: shareInstructions},
	{what: "a rule without pools, instructions added", bound: beforePools + 2,
		figures: each("pools", unitInstructions, []string{throughPools + ": 0"}, []string{"shapectl"})},
	{what: "Cubic, BBR and UDP in one rate without delay, worst part", bound: 15,
		figures: each("pools", unitOffThird, atRates(noDelay), sharingFlows)},
	{what: "Cubic, BBR and UDP in one rate with 20 ms round trip, worst part", bound: 15,
		figures: each("pools", unitOffThird, atRates(delayed), sharingFlows)},
	{what: "parts of 100 subscribers in a tree, worst", bound: 5,
		figures: each("pools", unitOffHTB, atLoads(), []string{"shapectl"})},
	{what: "apply rules to both directions of 200 devices", bound: 1,
		figures: []figure{{"hooks", hooksTime + ": 200", hooksFirst, unitSeconds}}},
	{what: "change the rates of all of them", bound: 0.5,
		figures: []figure{{"hooks", hooksTime + ": 200", hooksRates, unitSeconds}}},
	{what: "`serve`: rules on 20 new devices", bound: 0.3,
		figures: []figure{{"hooks", fmt.Sprintf(hooksWatch, 20) + ": 0", hooksWatched, unitSeconds}}},
	{what: "kernel memory of four rules on each of 1 000 devices", bound: 100,
		figures: []figure{{"hooks", hooksMemory + ": 1 000", hooksShared, unitMiB}}},
	{what: "the same with `--each host`", bound: 300,
		figures: []figure{{"hooks", hooksMemory + ": 1 000", hooksHosts, unitMiB}}},
}

// value is the figure of a goal: the worst of its figures. It reports false unless all of them were measured.
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

// droppingInstructions is the instructions of a packet where 90 % are dropped, relative to a packet where
// all conform. They include the path through the stack. It is the worst of all modes of shapectl.
func droppingInstructions(results []Result) (worst float64, ok bool) {
	bare, found := figure{"instructions", bareCase + ": IPv4", noLimiter, unitInstructions}.in(results)
	if !found {
		return 0, false
	}
	for _, r := range results {
		if r.Suite != "instructions" || r.Case != mostDropped || !ours(r.Subject) || r.Rounds == 0 {
			continue
		}
		passing, found := figure{r.Suite, allConform, r.Subject, r.Unit}.in(results)
		if !found {
			return 0, false
		}
		worst, ok = max(worst, (bare.Median+r.Median)/(bare.Median+passing.Median)), true
	}
	return worst, ok
}

// beforePools is what a rule added before there were pools.
const beforePools = 387

func atRates(table string) (names []string) {
	for _, r := range sharedRates {
		names = append(names, fmt.Sprintf("%s: %v", table, r))
	}
	return names
}

func atLoads() (names []string) {
	for _, l := range loads {
		names = append(names, besideHTB+": "+l.name)
	}
	return names
}

// throughChain is the instructions that a subject adds below so many pools.
func throughChain(results []Result, pools int, subject string) (float64, bool) {
	r, ok := figure{"pools", fmt.Sprintf("%s: %d", throughPools, pools), subject, unitInstructions}.in(results)
	return r.Median, ok
}

// poolInstructions is the instructions of each pool above a rule: the worst of all numbers of pools.
func poolInstructions(results []Result) (worst float64, ok bool) {
	none, ok := throughChain(results, 0, "shapectl")
	for _, n := range poolDepths[1:] {
		all, found := throughChain(results, n, "shapectl")
		worst, ok = max(worst, (all-none)/float64(n)), ok && found
	}
	return worst, ok
}

// shareInstructions is the instructions that the shares of one pool add, by flow or by member.
func shareInstructions(results []Result) (worst float64, ok bool) {
	without, ok := throughChain(results, 1, "shapectl")
	for _, subject := range []string{"shapectl, share flow", "shapectl, share member"} {
		with, found := throughChain(results, 1, subject)
		worst, ok = max(worst, with-without), ok && found
	}
	return worst, ok
}

// rateError is the least rate error of a peer, relative to our greatest one: the worst of all cases.
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

// row is the goal in a table, and whether it is met.
func (g goal) row(results []Result) (line string, met bool) {
	bound, unit := "at most ", g.unit
	if g.least {
		bound = "at least "
	}
	if unit == "" {
		unit = g.figures[0].unit
	}
	figure, verdict := "not measured", ""
	if value, ok := g.value(results); ok {
		figure, verdict = number(value), "**no**"
		if met = value == g.bound || (value > g.bound) == g.least; met {
			verdict = "yes"
		}
	}
	return row(g.what, bound+number(g.bound)+" "+unit, figure, verdict), met
}

// goalTable compares all goals with their figures, or lists those that are not met.
func goalTable(results []Result, all bool) string {
	text, met := row("target", "bound", "figure", "met")+"|---|--:|--:|---|\n", 0
	for _, g := range goals {
		line, ok := g.row(results)
		if ok {
			met++
		}
		if all || !ok {
			text += line
		}
	}
	if all {
		return text
	}
	return fmt.Sprintf("%d of %d targets are met. The others:\n\n%s", met, len(goals), text)
}
