package policyfile

import (
	"fmt"
	"sort"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
)

// Error is one mistake in a file. Line and Column, in characters, count from 1.
type Error struct {
	File         string
	Line, Column int
	Message      string // what is wrong, and what to do
}

// Error returns one line, whatever the file's name and text are.
func (e Error) Error() string {
	return plain.Line(fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Message))
}

// Errors lists all mistakes in a file, in its order.
type Errors []Error

// shown is the number of errors that are printed.
const shown = 20

// Error returns a line for each of the first 20 errors, and one with the number of others.
func (e Errors) Error() string {
	var lines []string
	for _, one := range e[:min(len(e), shown)] {
		lines = append(lines, one.Error())
	}
	if more := len(e) - len(lines); more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(lines, "\n")
}

// A problem is an Error whose line and column are not known yet.
type problem struct {
	at      uint32 // the offset
	message string
}

// errors sorts problems and converts them to errors.
func (f *File) errors(problems []problem) (errs Errors) {
	sort.SliceStable(problems, func(i, j int) bool { return problems[i].at < problems[j].at })
	cursor := f.cursor()
	for _, p := range problems {
		errs = append(errs, f.located(cursor.at(int(p.at)), p.message))
	}
	return errs
}

// didYouMean returns the end of a message about a word that is not one of words.
func didYouMean(word string, words []string) string {
	if similar := plain.Similar(word, words); similar != "" {
		return "did you mean " + similar + "?"
	}
	last := len(words) - 1
	switch {
	case last == 0:
		return "use " + words[0]
	case last > shown:
		return fmt.Sprintf("use one of %d such as %s", len(words), words[0])
	}
	return "use " + strings.Join(words[:last], ", ") + " or " + words[last]
}
