package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// beats reports whether one figure is better than another of the same unit.
func (r Result) beats(other Result) bool {
	switch units[r.Unit] {
	case higher:
		return r.Median > other.Median
	case nearOne:
		return math.Abs(r.Median-1) < math.Abs(other.Median-1)
	default:
		return r.Median < other.Median
	}
}

// winTable lists each case in which a peer has a better figure than a way of shapectl.
func winTable(results []Result) string {
	var b strings.Builder
	for _, s := range suites {
		for _, t := range tablesOf(s.name, results) {
			unit := t.units()[0] // the others are ratios of it
			for _, column := range t.columns() {
				for _, subject := range t.subjects() {
					mine, ok := t.find(column, subject, unit)
					if !ok || !ours(subject) || mine.Rounds == 0 {
						continue
					}
					if better := t.better(mine); len(better) > 0 {
						b.WriteString(row(t.Title, column, fmt.Sprintf("%s %s", number(mine.Median), unit), subject, strings.Join(better, "; ")))
					}
				}
			}
		}
	}
	if b.Len() == 0 {
		return "In no case here.\n"
	}
	return "Every case here in which a peer's median is better than that of shapectl, or of one of its ways. \"Within the\n" +
		"noise\" is where the quartiles overlap.\n\n" +
		row("", "case", "figure", "of", "is behind") + rule(5, 0) + b.String()
}

// better are the peers whose figures beat one of ours, best first.
func (t table) better(mine Result) (list []string) {
	var winners []Result
	for _, r := range t.results {
		if r.column() == mine.column() && r.Unit == mine.Unit && r.Rounds > 0 && peer(r.Subject) && r.beats(mine) {
			winners = append(winners, r)
		}
	}
	slices.SortStableFunc(winners, func(a, b Result) int {
		switch {
		case a.beats(b):
			return -1
		case b.beats(a):
			return 1
		}
		return 0
	})
	for _, r := range winners {
		text := r.Subject + " " + number(r.Median)
		if r.Low <= mine.High && mine.Low <= r.High {
			text += " (within the noise)"
		}
		if r.Note != "" {
			text += " (" + r.Note + ")"
		}
		list = append(list, text)
	}
	return list
}
