package policyfile

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"sort"
	"unicode/utf8"
)

// A source is the text of a policy, or of a part of it, with its lines.
type source struct {
	name  string
	text  []byte
	lines []uint32 // the offset of each
	files []part   // in the order of the text
}

// newSource splits a text into lines. If the text has a character that is not allowed, it
// returns an error and the character's offset.
func newSource(name string, text []byte) (s source, at int, err error) {
	s.name, s.text = name, text
	if uint64(len(text)) > math.MaxUint32 {
		return s, 0, fmt.Errorf("the file has %d bytes, and less than 4 GiB are allowed; merge networks", len(text))
	}
	afterMark := len(text) - len(bytes.TrimPrefix(text, []byte("\uFEFF")))
	s.lines = append(make([]uint32, 0, bytes.Count(text, []byte("\n"))+1), uint32(afterMark))
	for i := 0; i < len(text); {
		c, size := utf8.DecodeRune(text[i:])
		switch {
		case c == '\n':
			s.lines = append(s.lines, uint32(i+1))
		case c == utf8.RuneError && size == 1:
			return s, i, fmt.Errorf("byte %#x is not UTF-8; save the file as UTF-8", text[i])
		case c == '\r' && (i+1 == len(text) || text[i+1] != '\n'):
			return s, i, fmt.Errorf("a carriage return has no line feed after it; end lines with a line feed")
		case c == '\uFEFF' && i == 0, c == '\t', c == '\r':
		case c < ' ', c >= 0x7f && c < 0xa0, c == '\u2028', c == '\u2029', c == '\uFEFF', c == '\uFFFE', c == '\uFFFF':
			return s, i, fmt.Errorf("character %U is not allowed in a policy; remove it", c)
		}
		i += size
	}
	s.findParts()
	return s, 0, nil
}

// located is an error at a position.
func (s *source) located(at position, message string) Error {
	name, line := s.inPart(at.line)
	return Error{cmp.Or(name, s.name), line, at.column, message}
}

// A position is a line and a column, in characters, both from 1.
type position struct{ line, column int }

// A cursor converts between offsets and positions. It counts the characters of a line only
// once if offsets ascend, because a line can be the whole file.
type cursor struct {
	source *source
	here   position
	offset int // of here
}

func (s *source) cursor() cursor {
	return cursor{s, position{1, 1}, int(s.lines[0])}
}

// goTo goes to the start of a line, or stays if the target is ahead in the same line.
func (c *cursor) goTo(line int, ahead bool) {
	if line != c.here.line || !ahead {
		c.here, c.offset = position{line, 1}, int(c.source.lines[line-1])
	}
}

// at returns the position of an offset.
func (c *cursor) at(offset int) position {
	c.goTo(c.source.line(uint32(offset)), offset >= c.offset)
	if offset > c.offset {
		c.here.column += utf8.RuneCount(c.source.text[c.offset:offset])
		c.offset = offset
	}
	return c.here
}

// find returns the offset of a position, at most the end of the text.
func (c *cursor) find(at position) int {
	text := c.source.text
	if at.line > len(c.source.lines) {
		return len(text)
	}
	c.goTo(at.line, at.column >= c.here.column)
	for c.here.column < at.column && c.offset < len(text) {
		_, size := utf8.DecodeRune(text[c.offset:])
		c.offset += size
		c.here.column++
	}
	return c.offset
}

// line returns the number of the line of an offset.
func (s *source) line(offset uint32) int {
	return max(1, sort.Search(len(s.lines), func(i int) bool { return s.lines[i] > offset }))
}

// lineText returns a line without its line feed.
func (s *source) lineText(line int) []byte {
	return s.text[s.lines[line-1]:s.lineEnd(line)]
}

// lineEnd returns the offset of the line feed, or carriage return, that ends a line.
func (s *source) lineEnd(line int) int {
	end := len(s.text)
	if line < len(s.lines) {
		end = int(s.lines[line]) - 1
	}
	if end > 0 && s.text[end-1] == '\r' && end < len(s.text) {
		end--
	}
	return end
}

// skip returns the first offset from i on that is not a space, a comma or in a comment.
func (s *source) skip(i int) int {
	for i < len(s.text) {
		switch c := s.text[i]; {
		case c == '#':
			next := bytes.IndexByte(s.text[i:], '\n')
			if next < 0 {
				return len(s.text)
			}
			i += next
		case c == ',' || isSpace(c):
			i++
		default:
			return i
		}
	}
	return i
}

func isSpace(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

// quoteEnd returns the offset after the text in quotes that begins at i. It is false if the
// quotes are not closed in the line.
func (s *source) quoteEnd(i int) (end int, ok bool) {
	quote := s.text[i]
	for i++; i < len(s.text) && s.text[i] != '\n'; i++ {
		switch c := s.text[i]; {
		case c == '\\' && quote == '"':
			i++
		case c == quote && quote == '\'' && i+1 < len(s.text) && s.text[i+1] == quote:
			i++
		case c == quote:
			return i + 1, true
		}
	}
	return 0, false
}
