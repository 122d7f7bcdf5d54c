package policy

import (
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// MaxName is the largest length in bytes of the name of a rule or a plan.
	MaxName = 64
	// MaxNote is the largest length in bytes of a note.
	MaxNote = 256
)

// Label is what is known of a rule or pool and has no effect on packets. Each text is empty
// or valid UTF-8 in one line, without control characters, and not only blanks.
type Label struct {
	Plan string // how the plan that the rule follows is shown; at most MaxName bytes
	Name string // at most MaxName bytes
	Note string // of a person; at most MaxNote bytes

	Host  MAC       // the host whose addresses the limit is for
	Waits Guarantee // what is to be guaranteed once the pool above has room
	Owner Owner     // only of a pool
	Line  LineOf    // only of a pool
}

// FindName returns the one of names that somebody means who writes all of it, or only the ID in parentheses at its end, such as
// 10001 of "School (10001)". It is "" if there is none, or several have that ID.
func FindName(written string, names iter.Seq[string]) (found string) {
	several := false
	for name := range names {
		switch {
		case name == written:
			return name
		case strings.HasSuffix(name, " ("+written+")"):
			several = several || found != "" && found != name
			found = name
		}
	}
	if several || written == "" {
		return ""
	}
	return found
}

// LineOf is the device of the line that a pool is of, by the name that it had when 'shapectl line' made it; "" for none.
type LineOf string

func checkText(what, s string, most int) error {
	switch {
	case s == "":
		return nil
	case len(s) > most:
		return fmt.Errorf("%s %.32q... has %d bytes, and at most %d are allowed; shorten it", what, s, len(s), most)
	case !utf8.ValidString(s):
		return fmt.Errorf("%s %q is not valid UTF-8; write it as UTF-8", what, s)
	case strings.ContainsFunc(s, breaksLine):
		return fmt.Errorf("%s %q has a control character; remove it", what, s)
	case strings.TrimSpace(s) == "":
		return fmt.Errorf("%s %q has only blanks; write a %s, or nothing", what, s, what)
	}
	return nil
}

// breaksLine reports whether c is a control character or ends a line in YAML.
func breaksLine(c rune) bool {
	return unicode.IsControl(c) || c == '\u2028' || c == '\u2029'
}

// CheckPlan reports as an error why a plan cannot be shown by a text.
func CheckPlan(s string) error {
	if s == "" {
		return errors.New("the name of a plan is empty; write one such as gold")
	}
	return checkText("plan", s, MaxName)
}

// quoteIfNeeded returns one word as it is, and any other text in double quotes.
func quoteIfNeeded(s string) string {
	if s == "" || strings.ContainsFunc(s, func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("-_.,:/=+", c)
	}) {
		return strconv.Quote(s)
	}
	return s
}
