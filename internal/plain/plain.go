// Package plain escapes text from outside for terminals and shells. Names of devices and
// files may hold anything, and messages may be copied into a shell.
package plain

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// hidden reports whether a terminal would not show c, but act on it: end a line, move
// the cursor, or reverse text. Joiners are not hidden, as some languages need them.
func hidden(c rune) bool {
	const nonJoiner, joiner = '\u200c', '\u200d'
	if c >= ' ' && c <= '~' { // as nearly all are
		return false
	}
	return unicode.In(c, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) && c != nonJoiner && c != joiner
}

// appendEscaped escapes c as JSON does, so that escaped JSON keeps its meaning.
func appendEscaped(b []byte, c rune) []byte {
	if i := strings.IndexRune("\n\r\t", c); i >= 0 {
		return append(b, '\\', "nrt"[i])
	}
	for _, unit := range utf16.AppendRune(nil, c) {
		b = fmt.Appendf(b, `\u%04x`, unit)
	}
	return b
}

// Line is a text in one line. Hidden characters are escaped as in JSON (\n, \u001b), and
// bytes that are not UTF-8 as \xff.
func Line(s string) string {
	if !strings.ContainsFunc(s, hidden) && utf8.ValidString(s) {
		return s
	}
	b, _ := escape(nil, []byte(s), true, func(rune) bool { return false })
	return string(b)
}

// escape appends text to b, and escapes hidden characters that keep does not except. Unless the
// text is whole, rest is the start of a character that may continue.
func escape(b, text []byte, whole bool, keep func(rune) bool) (escaped, rest []byte) {
	for len(text) > 0 {
		c, size := utf8.DecodeRune(text)
		switch {
		case !whole && (!utf8.FullRune(text) || c == '\r' && len(text) == 1):
			return b, text
		case c == utf8.RuneError && size == 1:
			b = fmt.Appendf(b, `\x%02x`, text[0])
		case c == '\r' && len(text) > 1 && text[1] == '\n' && keep('\n'):
			b = append(b, '\r')
		case hidden(c) && !keep(c):
			b = appendEscaped(b, c)
		default:
			b = append(b, text[:size]...)
		}
		text = text[size:]
	}
	return b, nil
}

// A Writer escapes text as Line does, except for line ends and tabs. JSON keeps its meaning.
type Writer struct {
	to      io.Writer
	rest    []byte // the start of a character
	escaped []byte
}

// NewWriter makes a Writer. Call Flush after the last Write.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	if len(w.rest) == 0 && harmless(p) {
		return w.to.Write(p)
	}
	text := p
	if len(w.rest) > 0 {
		text = append(w.rest, p...)
	}
	escaped, rest := escape(w.escaped[:0], text, false, isLayout)
	w.escaped, w.rest = escaped, append([]byte(nil), rest...)
	if _, err := w.to.Write(escaped); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Flush writes the start of a character that did not continue.
func (w *Writer) Flush() error {
	escaped, _ := escape(nil, w.rest, true, isLayout)
	w.rest = nil
	if len(escaped) == 0 {
		return nil
	}
	_, err := w.to.Write(escaped)
	return err
}

func isLayout(c rune) bool { return c == '\n' || c == '\t' }

// harmless reports whether p is printable ASCII and layout. This is the common case.
func harmless(p []byte) bool {
	for _, c := range p {
		if (c < ' ' || c > '~') && c != '\n' && c != '\t' {
			return false
		}
	}
	return true
}

// Word quotes s for a POSIX shell. Newlines at the end of s are lost; no device name has any.
func Word(s string) string {
	switch {
	case s != "" && !strings.ContainsFunc(s, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("_-.,/:@+", c))
	}):
		return s
	case Line(s) == s:
		return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
	}
	// The shell prints what a terminal cannot show.
	var word strings.Builder
	for i := 0; i < len(s); {
		c, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case c == '%':
			word.WriteString("%%")
		case c == '\\':
			word.WriteString(`\\`)
		case c == '\'', c == '-', c == utf8.RuneError, hidden(c):
			for _, b := range []byte(s[i : i+size]) {
				fmt.Fprintf(&word, `\%03o`, b)
			}
		default:
			word.WriteString(s[i : i+size])
		}
		i += size
	}
	return `"$(printf '` + word.String() + `')"`
}

// Command is a command line of shapectl for a POSIX shell. verb may have flags, args are quoted.
// It has -n unless netns is empty, and -- if args look like flags.
func Command(netns, verb string, args ...string) string {
	command := "shapectl "
	if netns != "" {
		command += "-n " + Word(netns) + " "
	}
	command += verb
	if slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, "-") && arg != "-" }) {
		command += " --"
	}
	for _, arg := range args {
		command += " " + Word(arg)
	}
	return command
}

// Suggest is Command for a sentence, see Quoted.
func Suggest(netns, verb string, args ...string) string {
	return Quoted(Command(netns, verb, args...))
}

// Quoted puts a command between quotes, unless it has quotes of its own.
func Quoted(command string) string {
	if strings.ContainsAny(command, "'\"") {
		return command
	}
	return "'" + command + "'"
}

// OneLine is the text of an error in one line. Those that errors.Join has joined are separate.
func OneLine(err error) string {
	return strings.Join(strings.Fields(strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")), " ")
}

// Count is a number of things in a sentence: "1 rule", "2 rules".
func Count[N int | uint64](n N, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// Lines returns each text as Line does.
func Lines(texts []string) []string {
	out := make([]string, len(texts))
	for i, s := range texts {
		out[i] = Line(s)
	}
	return out
}

// List is the first few of names, and the number of the others.
func List(names []string) string {
	const few = 3
	if len(names) > few+1 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
	}
	return strings.Join(names, ", ")
}

// Fold breaks text at spaces into lines of at most width bytes; longer words stay whole. The first
// line begins with first, the others with rest.
func Fold(text string, width int, first, rest string) string {
	var lines strings.Builder
	line := first
	for i, word := range strings.Split(text, " ") {
		switch {
		case i == 0:
			line += word
		case len(line)+1+len(word) > width:
			lines.WriteString(strings.TrimRight(line, " ") + "\n")
			line = rest + word
		default:
			line += " " + word
		}
	}
	return lines.String() + line + "\n"
}
