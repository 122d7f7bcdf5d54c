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

// maxDepth is deeper than any policy.
const maxDepth = 50

// A node is a YAML node that policies can have: text in one line, or a mapping. Other nodes
// are odd.
type node struct {
	kind       kind
	braces     bool   // a mapping in { }
	start, end uint32 // offsets without comments; an odd node has only a start
	text       string
	entries    []entry // of a mapping
}

type kind uint8

const (
	odd     kind = iota // reported already
	nothing             // null
	list
	text
	mapping
)

// An entry is a key and its value.
type entry struct{ key, value node }

// A tree converts YAML to nodes of a source.
type tree struct {
	*notes
	cursor cursor
	cut    map[uint32][]entry // see source.cut
}

// parse returns the roots of the documents of a text that are not empty: one, and one for each file that it includes. The error
// is for text that is not YAML. It reports YAML that policies cannot use.
func (t *tree) parse(text []byte) (roots []node, err error) {
	loader, err := yaml.NewLoader(bytes.NewReader(text), yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth))))
	if err != nil {
		return nil, err
	}
	for {
		var document yaml.Node
		if err = loader.Load(&document); errors.Is(err, io.EOF) {
			return roots, nil
		} else if err != nil {
			return nil, err
		}
		if root := t.node(document.Content[0]); root.kind == nothing {
			continue
		} else if roots = append(roots, root); len(roots) > 1+len(t.files) {
			t.report(uint32(t.at(&document)), "a second document begins here; a policy is one document, so remove the --- or move the rest to another file, which this one includes")
			return nil, nil
		}
	}
}

// at returns the offset of a node.
func (t *tree) at(n *yaml.Node) int {
	return t.cursor.find(position{n.Line, n.Column})
}

func (t *tree) node(n *yaml.Node) node {
	start := uint32(t.at(n))
	out := node{start: start, end: start}
	if why := notPlain(n); why != "" {
		t.report(out.start, why)
		return out
	}
	switch n.Kind {
	case yaml.SequenceNode:
		out.kind = list
	case yaml.ScalarNode:
		t.scalar(n, &out)
	case yaml.MappingNode:
		t.mapping(n, &out)
	}
	return out
}

// notPlain returns why a policy cannot use a YAML node, or "".
func notPlain(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.AliasNode:
		return fmt.Sprintf("*%.64s is an alias in YAML, which policies cannot use; use a plan, or put quotes around a pattern", n.Value)
	case n.Anchor != "":
		return fmt.Sprintf("&%.64s is an anchor in YAML, which policies cannot use; use a plan instead", n.Anchor)
	case n.Style&yaml.TaggedStyle != 0 || n.Tag == "!":
		return fmt.Sprintf("%.64s is a tag in YAML, which policies cannot use; remove it", n.Tag)
	case n.Tag == "!!merge":
		return "<< merges mappings in YAML, which policies cannot use; use a plan instead"
	}
	return ""
}

func (t *tree) scalar(n *yaml.Node, out *node) {
	start := int(out.start)
	end, ok := 0, false
	switch {
	case n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle) != 0:
		end, ok = t.quoteEnd(start)
	case n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) == 0:
		end = start + len(n.Value)
		ok = end <= len(t.text) && string(t.text[start:end]) == n.Value
	}
	switch {
	case !ok:
		t.report(out.start, "this text spans several lines; write it in one line, and put a colon after a key")
	case n.Tag == "!!null":
		out.kind = nothing
	default:
		out.kind = text
	}
	out.text, out.end = n.Value, uint32(end)
}

// mapping converts a mapping. It releases the nodes of n, because large files have many.
func (t *tree) mapping(n *yaml.Node, out *node) {
	out.kind, out.braces = mapping, n.Style&yaml.FlowStyle != 0
	out.entries = make([]entry, 0, len(n.Content)/2)
	at, known := int(out.start), true
	if out.braces {
		at++
	}
	for i := 0; i < len(n.Content); i += 2 {
		e := entry{t.node(n.Content[i]), t.node(n.Content[i+1])}
		n.Content[i], n.Content[i+1] = nil, nil
		known = known && e.key.known() && e.value.known()
		if known && !t.follows(at, e.key, out.braces) {
			t.report(e.key.start, "this is not written as key: value; write it so, with the key at the start of a line or inside braces")
			known = false
		}
		out.entries = append(out.entries, e)
		if more := t.cut[e.key.start]; more != nil && !out.braces {
			delete(t.cut, e.key.start)
			out.entries, e = append(out.entries, more...), more[len(more)-1]
		}
		at = int(e.value.end)
	}
	if known && out.braces {
		at = t.skip(at) + 1
	}
	if known {
		out.end = uint32(at)
	}
}

// known reports whether the end of a node is known.
func (n *node) known() bool {
	return n.kind == text || n.kind == mapping && n.end > n.start
}

// follows reports whether nothing but space, and in braces commas and comments, is between
// at and a key.
func (t *tree) follows(at int, key node, braces bool) bool {
	if braces {
		return t.skip(at) == int(key.start)
	}
	begin := t.lines[t.line(key.start)-1]
	return len(bytes.Trim(t.text[begin:key.start], " ")) == 0
}

// describe returns what a value is, for errors.
func (n *node) describe() string {
	switch n.kind {
	case list:
		return "a list"
	case mapping:
		return "a mapping"
	}
	return fmt.Sprintf("%q", shorten(n.text))
}

// shorten cuts long text that an error quotes.
func shorten(s string) string {
	if utf8.RuneCountInString(s) > 64 {
		return string([]rune(s)[:64]) + "..."
	}
	return s
}

// syntaxError returns the position of a YAML error, and the probable mistake.
func (s *source) syntaxError(err error) (at position, message string) {
	var load *yaml.LoadError
	if !errors.As(err, &load) || load.Mark.Line < 1 {
		return position{1, 1}, err.Error()
	}
	at = s.within(load.Mark)
	cursor := s.cursor()
	before := s.text[s.lines[at.line-1]:cursor.find(at)]
	indent := s.lineText(at.line)
	indent = indent[:len(indent)-len(bytes.TrimLeft(indent, " \t"))]
	context := ""
	if begin := s.within(load.ContextMark); load.ContextMark.Line > 0 && begin.line != at.line {
		context = fmt.Sprintf(", in the block that begins in line %d", begin.line)
	}
	says := func(part string) bool {
		return strings.Contains(load.Message, part) || strings.Contains(load.ContextMsg, part)
	}
	switch {
	case bytes.IndexByte(indent, '\t') >= 0:
		return at, "a tab indents this line; use spaces"
	case says("anchor"), says("an alias"):
		return at, `* begins an alias in YAML; put quotes around a pattern that begins with * or [, such as "*.100"`
	case says("max depth"):
		return at, "this is nested too deeply; close the brackets that are open"
	case says("a quoted scalar"):
		return s.within(load.ContextMark), "these quotes are not closed; close them"
	case says("could not find expected ':'"):
		return s.within(load.ContextMark), "a colon and a value are missing after this; write it like 10.0.0.0/24: 10mbit"
	case says("cannot start any token"):
		return at, "this character cannot begin a text in YAML; put quotes around the text"
	case says("',' or '}'"), says("',' or ']'"):
		return at, "a comma or a closing bracket is missing before this" + context
	case says("mapping values are not allowed") && bytes.Contains(before, []byte(": ")):
		return at, "this is the second colon in its line; write options as {rate: 10mbit, each: host}, and put text with a colon in quotes"
	case says("mapping values are not allowed"):
		at.column = len(indent) + 1
		return at, "this key is indented more than the line above, which already has a value; align it"
	case says("expected key") && len(bytes.TrimSpace(before)) == 0:
		return at, "the indentation of this line matches no line above; align it"
	case says("expected key"):
		return at, "this follows a value; remove it, or put quotes around the whole text"
	}
	return at, load.Message + context
}

// within returns the position of a mark, at most the last line.
func (s *source) within(m yaml.Mark) position {
	return position{min(max(1, m.Line), len(s.lines)), max(1, m.Column)}
}
