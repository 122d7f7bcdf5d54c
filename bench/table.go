package main

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A table is the results of one suite with the same part of Case before the colon.
type table struct {
	Suite   string
	Title   string
	results []Result
}

// tablesOf returns the tables of a suite, in the order of its results.
func tablesOf(suite string, results []Result) (tables []table) {
	for _, r := range results {
		if r.Suite != suite {
			continue
		}
		i := slices.IndexFunc(tables, func(t table) bool { return t.Title == r.table() })
		if i < 0 {
			i = len(tables)
			tables = append(tables, table{Suite: suite, Title: r.table()})
		}
		tables[i].results = append(tables[i].results, r)
	}
	return tables
}

// distinct returns the different values of a part of the results, in their order.
func (t table) distinct(part func(Result) string) (values []string) {
	for _, r := range t.results {
		if v := part(r); !slices.Contains(values, v) {
			values = append(values, v)
		}
	}
	return values
}

func (t table) columns() []string  { return t.distinct(Result.column) }
func (t table) subjects() []string { return t.distinct(func(r Result) string { return r.Subject }) }
func (t table) units() []string    { return t.distinct(func(r Result) string { return r.Unit }) }

func (t table) find(column, subject, unit string) (Result, bool) {
	i := slices.IndexFunc(t.results, func(r Result) bool {
		return r.column() == column && r.Subject == subject && r.Unit == unit
	})
	if i < 0 {
		return Result{}, false
	}
	return t.results[i], true
}

// Markdown returns the table with a column for each case, or for each unit if there are several units.
func (t table) Markdown() string {
	var b strings.Builder
	units := t.units()
	if len(units) == 1 {
		b.WriteString(row(append([]string{units[0]}, t.columns()...)...))
		b.WriteString(rule(1, len(t.columns())))
		for _, subject := range t.subjects() {
			cells := []string{subject}
			for _, column := range t.columns() {
				cells = append(cells, t.cell(column, subject, units[0]))
			}
			b.WriteString(row(cells...))
		}
	} else {
		b.WriteString(row(append([]string{"", ""}, units...)...))
		b.WriteString(rule(2, len(units)))
		for _, column := range t.columns() {
			for _, subject := range t.subjects() {
				cells := []string{column, subject}
				for _, unit := range units {
					cells = append(cells, t.cell(column, subject, unit))
				}
				if strings.Join(cells[2:], "") != "" {
					b.WriteString(row(cells...))
				}
			}
		}
	}
	b.WriteString("\n" + t.notes())
	return b.String()
}

func row(cells ...string) string { return "| " + strings.Join(cells, " | ") + " |\n" }

// rule returns the line below the head of a table: columns of text, then of numbers.
func rule(text, numbers int) string {
	return "|" + strings.Repeat("---|", text) + strings.Repeat("--:|", numbers) + "\n"
}

func (t table) cell(column, subject, unit string) string {
	r, ok := t.find(column, subject, unit)
	switch {
	case !ok:
		return ""
	case r.Rounds == 0:
		return "-"
	case r.Rounds == 1:
		return number(r.Median)
	}
	return fmt.Sprintf("%s (%s–%s)", number(r.Median), number(r.Low), number(r.High))
}

// notes returns the number of rounds, and the notes on subjects.
func (t table) notes() string {
	fewest, most := math.MaxInt, 0
	var notes []string
	for _, r := range t.results {
		if r.Rounds > 0 {
			fewest, most = min(fewest, r.Rounds), max(most, r.Rounds)
		}
		note := r.Note
		if note != "" && r.Rounds == 0 {
			note = "no figure for " + r.column() + ": " + note
		}
		if note = "- " + r.Subject + ": " + note + "\n"; r.Note != "" && !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	rounds := strconv.Itoa(most)
	if fewest < most {
		rounds = fmt.Sprintf("%d to %d", fewest, most)
	}
	return "Rounds: " + rounds + ".\n\n" + strings.Join(notes, "")
}

// number formats a figure with three digits, or all digits before the point.
func number(f float64) string {
	if math.Abs(f) >= 999.5 {
		return count(int(math.Round(f)))
	}
	s := strconv.FormatFloat(f, 'g', 3, 64)
	if strings.Contains(s, "e") {
		s = strconv.FormatFloat(f, 'f', 6, 64)
	}
	return s
}

// count formats a number with spaces between its thousands.
func count(n int) string {
	if n < 0 {
		return "-" + count(-n)
	}
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
