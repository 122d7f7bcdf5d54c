package main

import (
	"slices"
	"strings"
)

// A Result is one figure: what one subject took in one case, over all rounds.
type Result struct {
	Suite   string
	Case    string // "table: column"; each table of the report has a chart
	Subject string // a row: who was measured
	Unit    string // one of units
	Median  float64
	Low     float64 // lower quartile
	High    float64 // upper quartile
	Rounds  int
	Note    string `json:",omitempty"` // that of its samples
}

// table and column are the parts of Case.
func (r Result) table() string {
	table, _, _ := strings.Cut(r.Case, ": ")
	return table
}

func (r Result) column() string {
	_, column, _ := strings.Cut(r.Case, ": ")
	return column
}

// Units of results.
const (
	unitNanoseconds  = "ns"        // a packet
	unitClock        = "x clock"   // cost by that of the clock program, within a round
	unitEmpty        = "x empty"   // cost by that of the empty program
	unitHot          = "x one hot" // cost by that of one bucket that is always charged
	unitPassing      = "x passing" // cost by that of the same packet where it conforms
	unitTrie         = "x trie"    // cost by that of an LPM trie of the same prefixes
	unitTrieBucket   = "x trie, clock and bucket"
	unitLRU          = "x LRU"        // cost by that of an LRU hash map of the same keys
	unitOneCPU       = "x one CPU"    // packets of two CPUs by those of one
	unitInstructions = "instructions" // a packet, beyond those without a limiter
	unitDelivered    = "of rate"      // delivered bytes by those that the rate allows
	unitMillionths   = "millionths"   // of the rate, that the delivered rate is off by
	unitSeconds      = "s"
	unitMicroseconds = "µs"
	unitMiB          = "MiB"

	unitGoodput  = "goodput, %"           // of the payload that full frames at the rate have
	unitLost     = "lost, %"              // of TCP's segments
	unitAgain    = "retransmitted per MB" // segments per MB of payload
	unitPing50   = "ping p50, ms"
	unitPing99   = "ping p99, ms"
	unitUnponged = "pings lost, %"
	unitAnswer50 = "request p50, ms" // until its answer is there
	unitAnswer99 = "request p99, ms"
	unitGap1     = "gap p1" // between packets, by what the rate takes for one
	unitGap50    = "gap p50"
	unitGap99    = "gap p99"
	unitGaps     = "% of gaps"
)

// better says which of two figures of a unit is the better one.
type better int

const (
	lower better = iota
	higher
	nearOne
	neither // it only tells how others came about
)

var units = map[string]better{
	unitNanoseconds: lower, unitClock: lower, unitEmpty: lower, unitHot: lower, unitPassing: lower,
	unitTrie: lower, unitTrieBucket: lower, unitLRU: lower, unitOneCPU: higher,
	unitInstructions: lower, unitDelivered: nearOne, unitMillionths: lower,
	unitSeconds: lower, unitMicroseconds: lower, unitMiB: lower,
	unitGoodput: higher, unitLost: lower, unitAgain: lower, unitPing50: lower, unitPing99: lower, unitUnponged: lower,
	unitAnswer50: lower, unitAnswer99: lower, unitGap1: nearOne, unitGap50: nearOne, unitGap99: nearOne, unitGaps: neither,
}

// ours reports whether a subject is shapectl, in any of its ways.
func ours(subject string) bool { return strings.HasPrefix(subject, "shapectl") }

// Subjects that are there to compare with, and limit nothing.
const (
	emptyProgram = "empty program"
	clockProgram = "clock program"
	memoryFloor  = "clock and one cache line"
	noLimiter    = "no limiter"
)

var references = []string{emptyProgram, clockProgram, memoryFloor, sharedAdd, sharedCAS, sharedClock, noLimiter}

// peer reports whether a subject is somebody else's, with which shapectl competes.
func peer(subject string) bool { return !ours(subject) && !slices.Contains(references, subject) }

// summarize returns the median of the samples and their quartiles; zeros where there are none.
func summarize(samples []float64) (median, low, high float64) {
	if len(samples) == 0 {
		return 0, 0, 0
	}
	sorted := slices.Sorted(slices.Values(samples))
	return quantile(sorted, 0.5), quantile(sorted, 0.25), quantile(sorted, 0.75)
}

// quantile is that of sorted samples, with a straight line between neighbours.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// Taken are samples of a figure.
type taken struct {
	Case, Subject, Unit string
	Note                string // what a reader must know to compare it fairly
	Samples             []float64
}

// resultsOf are the figures of a suite, in the order in which their first samples were taken.
func resultsOf(suite string, all []taken) (results []Result) {
	samples := map[figure][]float64{}
	for _, t := range all {
		f := figure{suite, t.Case, t.Subject, t.Unit}
		if _, known := samples[f]; !known {
			results = append(results, Result{Suite: suite, Case: t.Case, Subject: t.Subject, Unit: t.Unit, Note: t.Note})
		}
		samples[f] = append(samples[f], t.Samples...)
	}
	for i, r := range results {
		of := samples[figure{suite, r.Case, r.Subject, r.Unit}]
		results[i].Rounds = len(of)
		results[i].Median, results[i].Low, results[i].High = summarize(of)
	}
	return results
}
