package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// badness is lower for a better figure of the same unit.
func (r Result) badness() float64 {
	switch units[r.Unit] {
	case higher:
		return -r.Median
	case nearOne:
		return math.Abs(r.Median - 1)
	default:
		return r.Median
	}
}

// beats reports whether one figure is better than another of the same unit.
func (r Result) beats(other Result) bool { return r.badness() < other.badness() }

// compared are the units of a table in which subjects compete: no ratio of the first one.
func (t table) compared() []string {
	return slices.DeleteFunc(t.units(), func(unit string) bool {
		return units[unit] == neither || unit != t.units()[0] && strings.HasPrefix(unit, "x ")
	})
}

// leadTable has a line for each suite with peers: which of them beat every mode of shapectl in how many cases, and
// the case with the greatest lead.
func leadTable(results []Result) string {
	b := row("suite", "peers, and their cases", "the greatest lead") + rule(3, 0)
	for _, s := range suites {
		var peers []string
		ahead, cases := map[string]int{}, map[string]int{}
		greatest, example := 0.0, ""
		for _, t := range tablesOf(s.name, results) {
			for _, r := range t.results {
				if !peer(r.Subject) || r.Rounds == 0 || !slices.Contains(t.compared(), r.Unit) {
					continue
				}
				best, ok := t.best(r)
				if !ok {
					continue
				}
				if cases[r.Subject]++; cases[r.Subject] == 1 {
					peers = append(peers, r.Subject)
				}
				if !r.beats(best) || r.overlaps(best) {
					continue
				}
				ahead[r.Subject]++
				if lead := r.lead(best); lead > greatest {
					greatest = lead
					example = fmt.Sprintf("%s, %s: %s %s, ours %s", r.Case, r.Unit, r.Subject, number(r.Median), number(best.Median))
				}
			}
		}
		var list []string
		for _, p := range peers {
			if ahead[p] > 0 {
				list = append(list, fmt.Sprintf("%s %d of %d", p, ahead[p], cases[p]))
			}
		}
		if len(peers) > 0 {
			page := fmt.Sprintf("[%s](%s/%s)", s.title, detailDir, s.page())
			b += row(page, cmp.Or(strings.Join(list, "; "), "none"), example)
		}
	}
	return b
}

// best is the best of our figures in the case of a peer's; false if there is none.
func (t table) best(theirs Result) (best Result, ok bool) {
	for _, r := range t.results {
		if r.column() == theirs.column() && r.Unit == theirs.Unit && r.Rounds > 0 && ours(r.Subject) && (!ok || r.beats(best)) {
			best, ok = r, true
		}
	}
	return best, ok
}

// lead is how much better a figure is than another one of the same unit, as a part of the greater of the two.
func (r Result) lead(other Result) float64 {
	return (other.badness() - r.badness()) / max(math.Abs(r.Median), math.Abs(other.Median))
}

// overlaps reports whether the quartiles of two figures overlap.
func (r Result) overlaps(other Result) bool { return r.Low <= other.High && other.Low <= r.High }
