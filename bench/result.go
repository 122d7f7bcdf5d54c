package main

import (
	"slices"
	"strings"
)

// A Result is one figure: that of one subject in one case, over all rounds.
type Result struct {
	Suite   string
	Case    string // "table: column"; each table of the report has a chart
	Subject string // a row
	Unit    string // one of units
	Median  float64
	Low     float64 // lower quartile
	High    float64 // upper quartile
	Rounds  int
	Note    string `json:",omitempty"` // what a fair comparison must consider
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
	unitClock        = "x clock"   // relative to the clock program, within a round
	unitEmpty        = "x empty"   // relative to the empty program
	unitHot          = "x one hot" // relative to one bucket that is always the same
	unitTrie         = "x trie"    // relative to an LPM trie of the same prefixes
	unitTrieBucket   = "x trie, clock and bucket"
	unitLRU          = "x LRU"        // relative to an LRU hash map of the same keys
	unitOneCPU       = "x one CPU"    // throughput relative to one CPU
	unitInstructions = "instructions" // per packet, minus those without a limiter
	unitDelivered    = "of rate"      // delivered bytes relative to the rate
	unitMillionths   = "millionths"   // absolute error relative to the rate
	unitSeconds      = "s"
	unitMicroseconds = "µs"
	unitMiB          = "MiB"

	unitGoodput       = "goodput, %"           // of the payload of full frames at the rate
	unitLost          = "lost, %"              // of TCP segments
	unitRetransmitted = "retransmitted per MB" // segments per MB of payload
	unitPing50        = "ping p50, ms"
	unitPing99        = "ping p99, ms"
	unitPingsLost     = "pings lost, %"
	unitAnswer50      = "request p50, ms" // until its answer
	unitAnswer99      = "request p99, ms"
	unitGap1          = "gap p1" // between packets, relative to the time of one at the rate
	unitGap50         = "gap p50"
	unitGap99         = "gap p99"

	unitCubic    = "cubic, %" // of what arrived
	unitBBR      = "bbr, %"
	unitUDP      = "udp, %"
	unitOffThird = "worst, % off a third"
	unitTotal    = "total, % of the rate"
	unitOffHTB   = "% off HTB's"
	unitOffHTB50 = "median, % off HTB's"
)

// better says which of two figures of a unit is better.
type better int

const (
	lower better = iota
	higher
	nearOne
	neither // for information
)

var units = map[string]better{
	unitNanoseconds: lower, unitClock: lower, unitEmpty: lower, unitHot: lower,
	unitTrie: lower, unitTrieBucket: lower, unitLRU: lower, unitOneCPU: higher,
	unitInstructions: lower, unitDelivered: nearOne, unitMillionths: lower,
	unitSeconds: lower, unitMicroseconds: lower, unitMiB: lower,
	unitGoodput: higher, unitLost: lower, unitRetransmitted: lower, unitPing50: lower, unitPing99: lower, unitPingsLost: lower,
	unitAnswer50: lower, unitAnswer99: lower, unitGap1: nearOne, unitGap50: nearOne, unitGap99: nearOne,
	unitCubic: neither, unitBBR: neither, unitUDP: neither, unitOffThird: lower, unitTotal: higher,
	unitOffHTB: lower, unitOffHTB50: lower,
}

// ours reports whether a subject is a mode of shapectl.
func ours(subject string) bool { return strings.HasPrefix(subject, "shapectl") }

// References: subjects that limit nothing.
const (
	emptyProgram = "empty program"
	clockProgram = "clock program"
	memoryFloor  = "clock and one cache line"
	noLimiter    = "no limiter"
)

var references = []string{emptyProgram, clockProgram, memoryFloor, sharedAdd, sharedCAS, sharedClock, noLimiter}

// peer reports whether a subject is neither shapectl nor a reference.
func peer(subject string) bool { return !ours(subject) && !slices.Contains(references, subject) }

// summarize returns the median of samples and their quartiles, or zeros without samples.
func summarize(samples []float64) (median, low, high float64) {
	if len(samples) == 0 {
		return 0, 0, 0
	}
	sorted := slices.Sorted(slices.Values(samples))
	return quantile(sorted, 0.5), quantile(sorted, 0.25), quantile(sorted, 0.75)
}

// quantile returns a quantile of sorted samples, interpolated between neighbours.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// A measurement is samples of a figure.
type measurement struct {
	Case, Subject, Unit string
	Note                string // what a fair comparison must consider
	Samples             []float64
}

// resultsOf returns the figures of a suite, in the order of their first samples.
func resultsOf(suite string, all []measurement) (results []Result) {
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
