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

// A node is what policies have of YAML: text in one line, or a mapping. Anything
// else is an odd one.
type node struct {
	kind       kind
	braces     bool   // a mapping in { }
	start, end uint32 // in the source, comments not included; of an odd one start only
	text       string
	entries    []entry // of a mapping
}

type kind uint8

const (
	odd     kind = iota // and reported already
	nothing             // text that is null in YAML
	list
	text
	mapping
)

// An entry is a key and what is behind the colon.
type entry struct{ key, value node }

// A span is where an entry is in the source: its key and its value, which has an end.
type span struct{ key, value, end uint32 }

func (e *entry) span() span { return span{e.key.start, e.value.start, e.value.end} }

// A place is where a mapping is.
type place struct {
	start, end uint32
	braces     bool
	spans      []span // of entries that only are there, such as defaults
}

// reach makes lines end where the last of their entries does, which may be in a piece.
func (p *place) reach(end uint32) {
	if !p.braces {
		p.end = max(p.end, end)
	}
}

func (n *node) place() place { return place{start: n.start, end: n.end, braces: n.braces} }

// shift moves a node that was read from an offset on to where it is.
func (n *node) shift(offset uint32) {
	n.start, n.end = n.start+offset, n.end+offset
	for i := range n.entries {
		n.entries[i].key.shift(offset)
		n.entries[i].value.shift(offset)
	}
}

// A tree turns YAML into nodes of a source.
type tree struct {
	*reader
	cursor cursor
	before int // lines before what is parsed
}

// parse is the root of the only document of a text that stands in the source; nil if
// there is none. What is not YAML is an error; what is, but not for policies, is reported.
func (t *tree) parse(text []byte) (*node, error) {
	loader, err := yaml.NewLoader(bytes.NewReader(text), yaml.WithPlugin(loaderlimits.New(loaderlimits.DepthValue(maxDepth))))
	if err != nil {
		return nil, err
	}
	var document, another yaml.Node
	if err = loader.Load(&document); err != nil {
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		return nil, err
	}
	switch err = loader.Load(&another); {
	case err == nil:
		t.report(uint32(t.at(&another)), "another document begins; a policy is one, so take out the --- or put the other in a file of its own")
		return nil, nil
	case !errors.Is(err, io.EOF):
		return nil, err
	}
	root := t.node(document.Content[0])
	return &root, nil
}

// at is the offset of a node.
func (t *tree) at(n *yaml.Node) int {
	return t.cursor.find(position{t.before + n.Line, n.Column})
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

// notPlain is why YAML has no place in a policy, if it has not.
func notPlain(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.AliasNode:
		return fmt.Sprintf("*%.64s is an alias in YAML, which policies do not have; name a plan, or put quotes around a pattern", n.Value)
	case n.Anchor != "":
		return fmt.Sprintf("&%.64s is an anchor in YAML, which policies do not have; name a plan instead", n.Anchor)
	case n.Style&yaml.TaggedStyle != 0 || n.Tag == "!":
		return fmt.Sprintf("%.64s is a tag in YAML, which policies do not have; leave it out", n.Tag)
	case n.Tag == "!!merge":
		return "<< merges mappings in YAML, which policies do not; name a plan instead"
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
		t.report(out.start, "this text goes over several lines; write it in one, and a colon behind what is a key")
	case n.Tag == "!!null":
		out.kind = nothing
	default:
		out.kind = text
	}
	out.text, out.end = n.Value, uint32(end)
}

// mapping takes what it has read from n, as a large file has much of it.
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
			t.report(e.key.start, "this is not written as key: value; write it so, with the key at the beginning of a line or inside of braces")
			known = false
		}
		at = int(e.value.end)
		out.entries = append(out.entries, e)
	}
	if known && out.braces {
		at = t.skip(at) + 1
	}
	if known {
		out.end = uint32(at)
	}
}

// known says whether the end of a node is.
func (n *node) known() bool {
	return n.kind == text || n.kind == mapping && n.end > n.start
}

// follows says whether a key follows what is before at: in its line, or in braces.
func (t *tree) follows(at int, key node, braces bool) bool {
	if braces {
		return t.skip(at) == int(key.start)
	}
	begin := t.lines[t.line(key.start)-1]
	return len(bytes.Trim(t.text[begin:key.start], " ")) == 0
}

// describe says in an error what a value is.
func (n *node) describe() string {
	switch n.kind {
	case list:
		return "a list"
	case mapping:
		return "a mapping"
	}
	return fmt.Sprintf("%q", shorten(n.text))
}

// shorten cuts what an error repeats.
func shorten(s string) string {
	if utf8.RuneCountInString(s) > 64 {
		return string([]rune(s)[:64]) + "..."
	}
	return s
}

// syntaxError says where a text is not YAML, and what is probably wrong.
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
		context = fmt.Sprintf(", in what begins in line %d", begin.line)
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
		return at, "no policy has so many things inside of one another; close what is open"
	case says("a quoted scalar"):
		return s.within(load.ContextMark), "these quotes do not end; close them"
	case says("could not find expected ':'"):
		return s.within(load.ContextMark), "a colon and a value are missing behind this; write it such as 10.0.0.0/24: 10mbit"
	case says("cannot start any token"):
		return at, "this character cannot begin a text in YAML; put quotes around the text"
	case says("',' or '}'"), says("',' or ']'"):
		return at, "a comma or a closing bracket is missing before this" + context
	case says("mapping values are not allowed") && bytes.Contains(before, []byte(": ")):
		return at, "this is the second colon in its line; write parts as {rate: 10mbit, each: host}, and text with a colon in quotes"
	case says("mapping values are not allowed"):
		at.column = len(indent) + 1
		return at, "this key is indented further than what stands above and has a value already; align it"
	case says("expected key") && len(bytes.TrimSpace(before)) == 0:
		return at, "this line is indented as none above it; align it with what it belongs to"
	case says("expected key"):
		return at, "this stands behind a value; take it out, or put quotes around all of it"
	}
	return at, load.Message + context
}

// within is a mark that may be behind the end.
func (s *source) within(m yaml.Mark) position {
	return position{min(max(1, m.Line), len(s.lines)), max(1, m.Column)}
}
