package policyfile

import (
	"bufio"
	"bytes"
	"cmp"
	"io"
	"slices"
	"sort"
	"strings"
)

// An editor changes entries of a source. It keeps order, spelling, blank lines and
// comments, except the comments of entries that it removes.
type editor struct {
	source
	newline string
	indent  int // of the entries of a mapping, relative to its key
	edits   []edit
}

// An edit replaces the text between two offsets.
type edit struct {
	from, to int
	text     string
}

// A fresh entry is not in the source yet.
type fresh struct {
	key, value string
	inner      []fresh // instead of a value
}

// A change changes the mapping that is the value of a key.
type change struct {
	place
	key     uint32 // the offset of the key
	inside  bool   // the mapping is inside other braces
	entries []span
	gone    map[uint32]bool // removed entries, by the offsets of their keys
	first   []fresh         // added before the entries in the source
	last    []fresh         // added after them
}

func (e *editor) replace(from, to int, text string) {
	e.edits = append(e.edits, edit{from, to, text})
}

func (e *editor) writeTo(w io.Writer) error {
	// Insertions at one offset keep their order, and come before a replacement there.
	sort.SliceStable(e.edits, func(i, j int) bool {
		a, b := e.edits[i], e.edits[j]
		return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.to, b.to)) < 0
	})
	out, at := bufio.NewWriter(w), 0 // Flush returns its first error
	for _, one := range e.edits {
		out.Write(e.text[at:one.from])
		out.WriteString(one.text)
		at = one.to
	}
	out.Write(e.text[at:])
	return out.Flush()
}

func (e *editor) apply(c change) {
	sort.Slice(c.entries, func(i, j int) bool { return c.entries[i].key < c.entries[j].key })
	switch {
	case len(c.gone)+len(c.first)+len(c.last) == 0:
	case !c.braces:
		e.changeLines(c)
	case c.inside || len(c.entries) > 0:
		e.changeBraces(c)
	default: // {} after a key in its own line
		e.replace(len(bytes.TrimRight(e.text[:c.start], " \t")), int(c.end), "")
		e.insertLines(e.line(c.end), e.column(c.key)+e.indent, slices.Concat(c.first, c.last))
	}
}

// changeLines changes a mapping whose entries are lines. Entries without a blank line or a
// comment between them are a group. The comment above a group is removed with its last
// entry.
func (e *editor) changeLines(c change) {
	column := e.column(c.entries[0].key)
	for i := 0; i < len(c.entries); {
		end := i + 1
		all := c.gone[c.entries[i].key]
		for end < len(c.entries) && e.line(c.entries[end].key) == e.lastLine(c.entries[end-1], column)+1 {
			all = all && c.gone[c.entries[end].key]
			end++
		}
		group := c.entries[i:end]
		if all {
			e.removeGroup(group, column, end == len(c.entries))
		} else {
			for _, s := range group {
				if c.gone[s.key] {
					e.removeLines(e.line(s.key), e.lastLine(s, column))
				}
			}
		}
		i = end
	}
	colon := e.colon(int(c.key))
	if len(c.gone) == len(c.entries) && len(c.first)+len(c.last) == 0 {
		e.replace(colon+1, colon+1, " {}")
		return
	}
	e.insertLines(e.line(uint32(colon)), column, c.first)
	e.insertLines(e.lastLine(c.entries[len(c.entries)-1], column), column, c.last)
}

// removeGroup removes entries and the comments above them. It removes the blank lines above
// too if there are some below, or if the mapping ends.
func (e *editor) removeGroup(group []span, column int, end bool) {
	first, last := e.line(group[0].key), e.lastLine(group[len(group)-1], column)
	for first > 1 && e.comment(first-1) == column {
		first--
	}
	if end || e.blank(last+1) {
		for first > 1 && e.blank(first-1) {
			first--
		}
	}
	e.removeLines(first, last)
}

// lastLine returns the last line of an entry, including comments below it that are indented
// more than its key.
func (e *editor) lastLine(s span, column int) int {
	line := e.line(s.end)
	for line < len(e.lines) && e.comment(line+1) > column {
		line++
	}
	return line
}

// comment returns the indentation of a line that has only a comment, or -1.
func (e *editor) comment(line int) int {
	text := e.lineText(line)
	trimmed := bytes.TrimLeft(text, " ")
	if len(trimmed) == 0 || trimmed[0] != '#' {
		return -1
	}
	return len(text) - len(trimmed)
}

func (e *editor) blank(line int) bool {
	return line <= len(e.lines) && len(bytes.TrimSpace(e.lineText(line))) == 0
}

// column returns the indentation of a key that begins its line.
func (e *editor) column(key uint32) int { return int(key - e.lines[e.line(key)-1]) }

// removeLines removes lines. The first one must not be the first of the source.
func (e *editor) removeLines(first, last int) {
	e.replace(e.lineEnd(first-1), e.lineEnd(last), "")
}

// insertLines inserts entries below a line.
func (e *editor) insertLines(line, column int, entries []fresh) {
	if len(entries) > 0 {
		var s strings.Builder
		e.appendLines(&s, column, entries)
		e.replace(e.lineEnd(line), e.lineEnd(line), s.String())
	}
}

func (e *editor) appendLines(s *strings.Builder, column int, entries []fresh) {
	for _, f := range entries {
		s.WriteString(e.newline + strings.Repeat(" ", column) + f.key + ":")
		if f.inner != nil {
			e.appendLines(s, column+e.indent, f.inner)
		} else {
			s.WriteString(" " + f.value)
		}
	}
}

func (e *editor) changeBraces(c change) {
	if len(c.gone) == len(c.entries) {
		e.replace(int(c.start)+1, int(c.end)-1, inBraces(slices.Concat(c.first, c.last)))
		return
	}
	if len(c.first) > 0 {
		e.replace(int(c.start)+1, int(c.start)+1, inBraces(c.first)+", ")
	}
	kept := len(c.entries) - 1 // the last that stays
	for c.gone[c.entries[kept].key] {
		kept--
	}
	for i, s := range c.entries {
		switch {
		case i > kept:
			e.replace(int(c.entries[i-1].end), int(s.end), "")
		case c.gone[s.key]:
			e.replace(int(s.key), int(c.entries[i+1].key), "")
		}
	}
	if len(c.last) > 0 {
		last := c.entries[kept]
		between := ", "
		if begin := e.lines[e.line(last.key)-1]; begin > c.start {
			if indent := e.text[begin:last.key]; len(bytes.TrimSpace(indent)) == 0 {
				between = "," + e.newline + string(indent)
			}
		}
		e.replace(int(last.end), int(last.end), between+inBraces(c.last))
	}
}

func inBraces(entries []fresh) string {
	var all []string
	for _, f := range entries {
		if f.inner != nil {
			f.value = "{" + inBraces(f.inner) + "}"
		}
		all = append(all, f.key+": "+f.value)
	}
	return strings.Join(all, ", ")
}
