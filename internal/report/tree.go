package report

import (
	"bufio"
	"fmt"
	"io"
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

// A branch is a pool or rule with the number of pools above it.
type branch struct {
	*Rule
	depth int
}

// Tree writes each pool with all that is within it below, a line each.
func (rules Rules) Tree(w io.Writer, width int) error {
	within, there, alone := map[string][]*Rule{}, map[string]bool{}, 0
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
	var branches []branch
	var grow func(above string, depth int)
	grow = func(above string, depth int) {
		for _, pools := range []bool{true, false} {
			for _, r := range within[above] {
				if r.IsPool() != pools {
					continue
				}
				if branches = append(branches, branch{r, depth}); pools {
					grow(r.Name, depth+1)
				}
			}
		}
	}
	grow("", 0)
	text := bufio.NewWriter(w)
	if len(branches) == 0 {
		text.WriteString("no pools\n")
		return text.Flush()
	}
	columns := []column[branch]{{head: "POOL OR RULE", cell: (*branch).name, cut: func(*branch) bool { return true }}}
	for _, c := range (Table{}).columns(rules) {
		if c.right {
			columns = append(columns, column[branch]{head: c.head, right: true, always: c.always, cell: func(b *branch) string { return c.cell(b.Rule) }})
		}
	}
	if err := writeTable(text, branches, columns, width); err != nil {
		return err
	}
	if alone > 0 {
		fmt.Fprintf(text, "%s in no pool\n", plain.Count(alone, "rule"))
	}
	rules.pending(text)
	return text.Flush()
}

// name is how a line of the tree begins.
func (b *branch) name() string {
	says := plain.Line(b.Name)
	if !b.IsPool() {
		says = strings.TrimSpace(b.where() + " " + b.network() + " " + says)
	}
	return strings.Repeat("  ", b.depth) + says
}
