package policy

import (
	"errors"
	"fmt"
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

// Name is the name of a rule, as an option of a Limit. Two rules may have the same.
type Name string

// Note is a remark about a rule, as an option of a Limit.
type Note string

// LineOf is the device of the line that a pool is of, by the name that it had when 'shapectl line' made it; "" for none.
type LineOf string

// Set accepts a text that Label.Name can have; an empty one removes the name.
func (n *Name) Set(s string) error { return setText(n, "name", s, MaxName) }

// Set accepts a text that Label.Note can have; an empty one removes the note.
func (n *Note) Set(s string) error { return setText(n, "note", s, MaxNote) }

// Set accepts the name of a device; an empty one removes it.
func (l *LineOf) Set(s string) error { return setText(l, "line", s, MaxName) }

func (n Name) String() string   { return string(n) }
func (n Note) String() string   { return string(n) }
func (l LineOf) String() string { return string(l) }
func (n Name) Type() string     { return "text" }
func (n Note) Type() string     { return "text" }
func (l LineOf) Type() string   { return "device" }

func setText[T ~string](v *T, what, s string, most int) error {
	err := checkText(what, s, most)
	if err == nil {
		*v = T(s)
	}
	return err
}

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

func resolveName(l *Limit, r *Rule) error {
	r.Label.Name = string(l.Name)
	return nil
}

func resolveNote(l *Limit, r *Rule) error {
	r.Label.Note = string(l.Note)
	return nil
}

func itself(s string) string { return s }

// quoteIfNeeded returns one word as it is, and any other text in double quotes.
func quoteIfNeeded(s string) string {
	if s == "" || strings.ContainsFunc(s, func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("-_.,:/=+", c)
	}) {
		return strconv.Quote(s)
	}
	return s
}
