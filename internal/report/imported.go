package report

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/shapectl/shapectl/internal/importer"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/policyfile"
)

// An Imported is the policy that another tool's limits make, and what it lacks of them.
type Imported struct {
	Policy    string          `json:"policy"`    // the file
	Sentences []string        `json:"sentences"` // of each pool and rule of it, in its order
	Left      []importer.Left `json:"not_carried_over"`
	Notes     []string        `json:"notes"`
}

// ImportedPolicy is the policy of an import, under what it lacks; command is what it was made by.
func ImportedPolicy(command string, i importer.Imported) (string, error) {
	var text bytes.Buffer
	comment(&text, "", "Made by '"+command+"': "+summary(i))
	for _, line := range i.Lines() {
		comment(&text, "- ", line)
	}
	for _, note := range i.Notes {
		comment(&text, "- ", "Note: "+note)
	}
	text.WriteByte('\n')
	err := policyfile.Write(&text, i.Tables)
	return text.String(), err
}

// NewImported is all that is known of an import, with its policy.
func NewImported(policy string, i importer.Imported) Imported {
	r := Imported{Policy: policy, Sentences: []string{}, Left: append([]importer.Left{}, i.Left...), Notes: append([]string{}, i.Notes...)}
	for _, t := range i.Tables {
		for _, rule := range t.Rules {
			r.Sentences = append(r.Sentences, rule.Sentence(t.Device, t.Direction, t.Match))
		}
	}
	return r
}

// ImportedLines says how much there is of all, what is left, in a line for each kind, and what is otherwise.
func ImportedLines(w io.Writer, i importer.Imported) error {
	text := bufio.NewWriter(w)
	fmt.Fprintln(text, summary(i))
	for _, line := range i.Lines() {
		fmt.Fprintln(text, plain.Line(line))
	}
	for _, note := range i.Notes {
		fmt.Fprintln(text, plain.Line("note: "+note))
	}
	return text.Flush()
}

func summary(i importer.Imported) string {
	pools, rules := i.Count()
	text := plain.Count(rules, "rule")
	if rules == 0 {
		text = "no rules"
	}
	if pools > 0 {
		text = plain.Count(pools, "pool") + ", " + text
	}
	if len(i.Left) == 0 {
		return text + "; nothing was left out"
	}
	return fmt.Sprintf("%s; %s left out or changed (-j lists all, and why)", text, plain.Count(len(i.Left), "thing"))
}

// comment writes one in lines that fit a screen.
func comment(w *bytes.Buffer, bullet, text string) {
	text = strings.Join(strings.Fields(plain.Line(text)), " ")
	w.WriteString(plain.Fold(text, 100, "# "+bullet, "# "+strings.Repeat(" ", len(bullet))))
}
