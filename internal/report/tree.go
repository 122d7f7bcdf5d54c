package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

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

// Names are the names of all rules.
func (rules Rules) Names() []string {
	names := make([]string, len(rules))
	for i := range rules {
		names[i] = rules[i].Name
	}
	return names
}

// branches are all pools with what is within them below: pools, then rules, in their order, and of each only the
// first top; all for 0. It counts the rules that are in no pool.
func (rules Rules) branches(top int) (all []row, alone int) {
	within, there := map[string][]*Rule{}, map[string]bool{}
	for i := range rules {
		if rules[i].IsPool() {
			there[rules[i].Name] = true
		}
	}
	for i := range rules {
		above := rules[i].Within
		if !there[above] {
			above = ""
		}
		if above == "" && !rules[i].IsPool() {
			alone++
			continue
		}
		within[above] = append(within[above], &rules[i])
	}
	var grow func(above string, depth int)
	grow = func(above string, depth int) {
		for _, pools := range []bool{true, false} {
			left := cmp.Or(top, len(rules))
			for _, r := range within[above] {
				if r.IsPool() != pools || left == 0 {
					continue
				}
				left--
				if all = append(all, row{Rule: r, depth: depth}); pools {
					grow(r.Name, depth+1)
				}
			}
		}
	}
	grow("", 0)
	return all, alone
}

// KeepTop leaves the first n pools and the first n rules within each pool, with what is within these, and the rules
// that are in no pool.
func (rules Rules) KeepTop(n int) (kept Rules) {
	left := map[*Rule]bool{}
	all, _ := rules.branches(0)
	for _, b := range all {
		left[b.Rule] = true
	}
	some, _ := rules.branches(n)
	for _, b := range some {
		left[b.Rule] = false
	}
	for i := range rules {
		if !left[&rules[i]] {
			kept = append(kept, rules[i])
		}
	}
	return kept
}

// Tree writes each pool with all that is within it below, a line each. of is how many pools and rules there were.
// Wide adds the columns of a wide table.
func (rules Rules) Tree(w io.Writer, of int, wide bool, width int) error {
	branches, alone := rules.branches(0)
	text := bufio.NewWriter(w)
	if len(branches) == 0 {
		text.WriteString("no pools\n")
		return text.Flush()
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
		fmt.Fprintf(text, "%d of %d pools and rules\n", len(rules), of)
	}
	if alone > 0 {
		fmt.Fprintf(text, "%s in no pool\n", plain.Count(alone, "rule"))
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
