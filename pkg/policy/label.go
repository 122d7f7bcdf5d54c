package policy

import (
	"crypto/sha256"
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

// ShortName is a text as a name. One that is too long ends with a hash, so that it stays another one than others.
func ShortName(s string) string {
	if len(s) <= MaxName {
		return s
	}
	end := fmt.Sprintf("~%.6x", sha256.Sum256([]byte(s)))
	return strings.ToValidUTF8(s[:MaxName-len(end)], "") + end
}

const (
	CNINote       = "cni "                 // begins the notes of what shapectl-cni makes
	NamespaceNote = "kubernetes namespace" // is that of the pools of namespaces, which shapectl-kubernetes makes
)

// PodDirections are the directions of the host's end of a pod's veth pair, in the words of annotations.
var PodDirections = map[Direction]string{Egress: "ingress", Ingress: "egress"}

// NamespacePool is the name of the pool of a namespace in Kubernetes, in a direction in the words of annotations. Networks may have
// pools for their pods, so there is one within each of these.
func NamespacePool(namespace, direction string, within Within) string {
	name := "namespace " + namespace + " " + direction
	if within != "" {
		name += " within " + string(within)
	}
	return ShortName(name)
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
