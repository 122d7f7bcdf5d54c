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
	lines := i.Lines()
	comment(&text, "", "Made by '"+command+"': "+summary(i, len(lines)))
	for _, line := range lines {
		comment(&text, "- ", "Not carried over: "+line)
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

// ImportedLines says what is left, in a line for each kind, what is otherwise, and how much there is of all.
func ImportedLines(w io.Writer, i importer.Imported) error {
	text, lines := bufio.NewWriter(w), i.Lines()
	for _, line := range lines {
		fmt.Fprintln(text, plain.Line("not carried over: "+line))
	}
	for _, note := range i.Notes {
		fmt.Fprintln(text, plain.Line("note: "+note))
	}
	fmt.Fprintln(text, summary(i, len(lines)))
	return text.Flush()
}

func summary(i importer.Imported, kinds int) string {
	rules := plain.Count(i.Rules(), "rule")
	if i.Rules() == 0 {
		rules = "no rules"
	}
	if n := i.Pools(); n > 0 {
		rules = plain.Count(n, "pool") + ", " + rules
	}
	switch things := len(i.Left); things {
	case 0:
		return rules + "; nothing was left out"
	case 1:
		return rules + "; 1 thing was not carried over"
	default:
		return fmt.Sprintf("%s; %d things of %s were not carried over (-j lists all)", rules, things, plain.Count(kinds, "kind"))
	}
}

// comment writes one in lines that fit a screen.
func comment(w *bytes.Buffer, bullet, text string) {
	text = strings.Join(strings.Fields(plain.Line(text)), " ")
	w.WriteString(plain.Fold(text, 100, "# "+bullet, "# "+strings.Repeat(" ", len(bullet))))
}
