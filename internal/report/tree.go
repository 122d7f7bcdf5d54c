package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// Split separates pools from rules, and keeps the order of both.
func (rules Rules) Split() (pools, others Rules) {
	for _, r := range rules {
		if r.IsPool() {
			pools = append(pools, r)
		}
	}
	if pools == nil {
		return nil, rules
	}
	for _, r := range rules {
		if !r.IsPool() {
			others = append(others, r)
		}
	}
	return pools, others
}

// SortByPlace sorts rules that were read by device and direction, and pools by name.
func (rules Rules) SortByPlace() {
	slices.SortStableFunc(rules, func(a, b Rule) int { return a.it.Compare(b.it) })
}

// Names are the names of all rules.
func (rules Rules) Names() []string {
	names := make([]string, len(rules))
	for i := range rules {
		names[i] = rules[i].Name
	}
	return names
}

// Tree writes each pool with all that is within it below, a line each. of is how many pools and rules there were.
// Wide adds the columns of a wide table.
func Tree(w io.Writer, rows []live.Row, rules Rules, of int, wide bool, width int) error {
	text, branches := bufio.NewWriter(w), make([]row, len(rows))
	for i, r := range rows {
		branches[i] = row{Rule: &rules[i], depth: r.Depth}
	}
	place := places(branches)
	columns := []column{{
		head: "POOL OR RULE", cell: func(r *row) string { return r.name(r.where()) }, cut: func(*row) bool { return true }, least: leastBranch,
	}}
	if place.short != nil {
		columns[0].short = &short{columns[0].head, place.short.common, func(r *row) string { return r.name(place.short.cell(r)) }}
	}
	told := []string{"POOL", "NAME", place.head, "NETWORK", "WITHIN"} // by the first column
	for _, c := range (Table{Wide: wide}).columns(branches) {
		if c.right || wide && !slices.Contains(told, c.head) {
			columns = append(columns, c)
		}
	}
	if err := writeTable(text, branches, columns, width); err != nil {
		return err
	}
	if len(rules) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rules), plain.Count(of, "limit"))
	}
	rules.pending(text, lastReverts)
	return text.Flush()
}

// leastBranch is what a narrow screen leaves of how a line of the tree begins.
const leastBranch = 40

// name is how a line of the tree begins. where is the device and direction of a rule, as far as they are to be shown.
func (r *row) name(where string) string {
	words := []string{plain.Line(r.Name)}
	if !r.IsPool() {
		words = append(words, where, r.network())
	}
	if r.Name == r.Within { // the pool above has the name
		words[0] = ""
	}
	words = slices.DeleteFunc(words, func(word string) bool { return word == "" })
	return strings.Repeat("  ", r.depth) + strings.Join(words, " ")
}
