package policyfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"
	"go.yaml.in/yaml/v4/plugin/loaderlimits"
)

// maxDepth is far deeper than a policy goes.
const maxDepth = 50

// document is the root of the only document of the file; nil if there is none,
// and said so.
func (r *reader) document() *yaml.Node {
	if err := r.characters(); err != nil {
		r.errs = err
		return nil
	}
	loader, err := yaml.NewLoader(bytes.NewReader(r.text), yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth))))
	if err != nil {
		panic(err) // of the options
	}
	var document, another yaml.Node
	err = loader.Load(&document)
	if errors.Is(err, io.EOF) || err == nil && len(document.Content) == 1 && document.Content[0].Tag == "!!null" {
		r.errs = r.errorAt(position{1, 1}, "the file says nothing; write devices: {} if no device is to have rules")
		return nil
	}
	if err == nil {
		err = loader.Load(&another)
		if err == nil {
			r.errorf(&another, "another document begins; a policy is one, so take out the --- or put the other in a file of its own")
			return nil
		}
	}
	if !errors.Is(err, io.EOF) {
		r.errs = r.syntaxError(err)
		return nil
	}
	return document.Content[0]
}

// characters reports the first character that has no place in a policy.
func (r *reader) characters() Errors {
	line, begin := 1, 0
	text := r.text
	fail := func(i int, format string, args ...any) Errors {
		column := utf8.RuneCount(text[begin:i]) + 1
		return r.errorAt(position{int32(line), int32(column)}, fmt.Sprintf(format, args...))
	}
	for i := 0; i < len(text); {
		c, size := rune(text[i]), 1
		if c >= utf8.RuneSelf {
			c, size = utf8.DecodeRune(text[i:])
		}
		switch {
		case c == '\n':
			line, begin = line+1, i+1
		case c == utf8.RuneError && size == 1:
			return fail(i, "byte %#x is not UTF-8; save the file as UTF-8", text[i])
		case c == '\uFEFF' && i == 0:
			begin = size
		case c == '\r' && (i+1 == len(text) || text[i+1] != '\n'):
			return fail(i, "a carriage return stands alone; end lines with a line feed")
		case c < ' ' && c != '\t' && c != '\r', c == 0x7f, c >= 0x80 && c < 0xa0, c == '\u2028', c == '\u2029',
			c == '\uFEFF', c == '\uFFFE', c == '\uFFFF':
			return fail(i, "character %U has no place in a policy; take it out", c)
		}
		i += size
	}
	return nil
}

func (r *reader) syntaxError(err error) Errors {
	var load *yaml.LoadError
	if !errors.As(err, &load) {
		return r.errorAt(position{1, 1}, err.Error())
	}
	at := position{int32(max(1, load.Mark.Line)), int32(max(1, load.Mark.Column))}
	message := load.Message
	if load.ContextMsg != "" {
		message += " " + load.ContextMsg
		if load.ContextMark.Line > 0 && load.ContextMark.Line != load.Mark.Line {
			message += fmt.Sprintf(" that begins in line %d", load.ContextMark.Line)
		}
	}
	if hint := r.hint(load, at); hint != "" {
		message = hint
	}
	return r.errorAt(at, message)
}

// hint says what was probably meant by what is not YAML; "" if nothing is known.
func (r *reader) hint(err *yaml.LoadError, at position) string {
	line, _, _ := strings.Cut(string(after(r.text, int(at.line))), "\n")
	indent := line[:len(line)-len(strings.TrimLeft(line, " \t"))]
	switch {
	case strings.Contains(indent, "\t"):
		return "a tab indents this line; use spaces"
	case strings.Contains(err.Message, "anchor") || strings.Contains(err.ContextMsg, "an alias"):
		return "* begins an alias in YAML; put quotes around a pattern that begins with it, such as \"*.100\""
	}
	return ""
}

// after is a text from a line on.
func after(text []byte, line int) []byte {
	for ; line > 1; line-- {
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	return text
}
