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
	slices.SortStableFunc(rules, func(a, b Rule) int { return a.Compare(b.Item) })
}

// Names are the names of all rules.
func (rules Rules) Names() []string {
	names := make([]string, len(rules))
	for i := range rules {
		names[i] = rules[i].Label.Name
	}
	return names
}

// Tree writes each pool with all that is within it below, a line each. of is how many pools and rules there were.
// Wide adds the columns of a wide table.
func Tree(w io.Writer, rows []live.Row, rules Rules, of int, wide bool, width int) error {
	text, branches := bufio.NewWriter(w), slices.Clone(rules)
	for i := range rows {
		branches[i].depth = rows[i].Depth
	}
	if err := writeTable(text, branches, branchColumns(branches, wide), width); err != nil {
		return err
	}
	if len(rules) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rules), plain.Count(of, "limit"))
	}
	rules.pending(text, lastReverts)
	return text.Flush()
}

// branchColumns are those of pools and rules that have a depth.
func branchColumns(branches Rules, wide bool) []column[Rule] {
	first := called(branches.havePools())
	first.cell = func(r *Rule) string { return strings.Repeat("  ", r.depth) + r.calledBy() }
	network := cell("NETWORK", false, func(r *Rule) string {
		if r.Label.Name == "" || r.IsPool() {
			return ""
		}
		return r.Network()
	})
	columns := []column[Rule]{first, places(), network}
	told := []string{"POOL", "NAME", "DEVICE", "NETWORK", "WITHIN"}
	for _, c := range (Table{Wide: wide}).columns(branches) {
		if c.right || wide && !slices.Contains(told, c.head) {
			columns = append(columns, c)
		}
	}
	return columns
}
