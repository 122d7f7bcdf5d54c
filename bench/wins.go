package main

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// badness is less for a better figure, among those of a unit.
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

// winTable lists each case in which a peer has a better figure than shapectl, or than one of its ways.
func winTable(results []Result) string {
	var b, notes strings.Builder
	for _, s := range suites {
		for _, t := range tablesOf(s.name, results) {
			for i, unit := range t.units() {
				if units[unit] == neither || i > 0 && strings.HasPrefix(unit, "x ") { // a ratio of the first
					continue
				}
				for _, subject := range t.subjects() {
					cases, note := t.wins(subject, unit)
					if cases == nil {
						continue
					}
					b.WriteString(row(t.Title+", "+unit, subject, strings.Join(cases, "<br>")))
					if line := "- " + subject + ": " + note + "\n"; note != "" && !strings.Contains(notes.String(), line) {
						notes.WriteString(line)
					}
				}
			}
		}
	}
	if b.Len() == 0 {
		return "In no case here.\n"
	}
	return "Every case here in which a peer's median is better than that of shapectl, or of one of its ways; ~ where\n" +
		"the quartiles overlap.\n\n" +
		row("", "peer", "its figure, and ours") + rule(3, 0) + b.String() + "\n" + notes.String()
}

// wins are the cases in which a subject is a peer whose figure of that unit is
// better than one of ours, and what must be known of it.
func (t table) wins(subject, unit string) (cases []string, note string) {
	for _, column := range t.columns() {
		if r, ok := t.find(column, subject, unit); ok && peer(subject) && r.Rounds > 0 {
			if lost := t.behind(r); lost != "" {
				cases, note = append(cases, lost), r.Note
			}
		}
	}
	return cases, note
}

// behind says which of our figures a peer's beats in its case; "" if none.
func (t table) behind(theirs Result) string {
	var all, beaten []Result
	for _, r := range t.results {
		if r.column() == theirs.column() && r.Unit == theirs.Unit && r.Rounds > 0 && ours(r.Subject) {
			all = append(all, r)
			if theirs.beats(r) {
				beaten = append(beaten, r)
			}
		}
	}
	if len(beaten) == 0 {
		return ""
	}
	var names []string
	near := ""
	for _, r := range beaten {
		if theirs.Low <= r.High && r.Low <= theirs.High {
			near = "~"
		}
		names = append(names, strings.TrimPrefix(r.Subject, "shapectl "))
	}
	slices.SortStableFunc(beaten, func(a, b Result) int { return cmp.Compare(a.badness(), b.badness()) })
	text := near + number(theirs.Median) + " against " + number(beaten[0].Median)
	if last := len(beaten) - 1; last > 0 {
		text += " to " + number(beaten[last].Median)
	}
	if len(beaten) < len(all) {
		text += " (" + strings.Join(names, "; ") + ")"
	}
	if column := theirs.column(); column != "" {
		text = column + ": " + text
	}
	return text
}
