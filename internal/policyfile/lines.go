package policyfile

import (
	"bytes"
	"strings"
)

// The YAML library takes microseconds and a kilobyte for each rule. So lines that are clearly a key and its value are read here,
// but for the first one of lines with the same indentation: where the library finds that one in a mapping, the others follow it.
// If it finds it elsewhere, as in a text of several lines, the whole file is parsed by the library.

// clearDepth is how deeply braces are nested in a clear line.
const clearDepth = 3

// cut returns the entries of clear lines, by the offset of the key before them, and the text without these lines. Line numbers
// in the rest stay the same.
func (s *source) cut() (entries map[uint32][]entry, rest []byte) {
	entries = map[uint32][]entry{}
	copied, first, indent := 0, entry{}, -1 // of the lines before, if they are clear
	for line := 1; line <= len(s.lines); line++ {
		text := s.lineText(line)
		blank := bytes.TrimLeft(text, " ")
		if len(blank) == 0 || blank[0] == '#' {
			continue
		}
		e, ok := s.clear(line)
		switch in := len(text) - len(blank); {
		case !ok:
			indent = -1
		case in != indent:
			first, indent = e, in
		default:
			rest = append(rest, s.text[copied:s.lines[line-1]]...)
			copied = s.lineEnd(line)
			entries[first.key.start] = append(entries[first.key.start], e)
		}
	}
	return entries, append(rest, s.text[copied:]...)
}

// clear returns the entry of a line that is clearly one.
func (s *source) clear(line int) (e entry, ok bool) {
	at, end := int(s.lines[line-1]), s.lineEnd(line)
	e.key, at = s.clearText(s.spaces(at, end), end, false)
	if e.value, at = s.clearValue(s.colon(at, end), end, 0); at < 0 {
		return e, false
	}
	after := s.spaces(at, end)
	return e, after == end || after > at && s.text[after] == '#'
}

// spaces is the offset after spaces; -1 stays.
func (s *source) spaces(at, end int) int {
	for at >= 0 && at < end && s.text[at] == ' ' {
		at++
	}
	return at
}

// colon is the offset of the value after a colon and spaces at an offset; -1 if there is none.
func (s *source) colon(at, end int) int {
	if at < 0 || at+2 >= end || s.text[at] != ':' || s.text[at+1] != ' ' {
		return -1
	}
	return s.spaces(at+1, end)
}

// clearValue reads a text, or a mapping in braces, and returns the offset after it; -1 if it is neither.
func (s *source) clearValue(at, end, depth int) (n node, after int) {
	if at < 0 || at >= end || s.text[at] != '{' {
		return s.clearText(at, end, depth > 0)
	}
	n = node{kind: mapping, braces: true, start: uint32(at)}
	for more := depth < clearDepth; more; {
		var e entry
		if e.key, at = s.clearText(s.spaces(at+1, end), end, true); at < 0 {
			return n, -1
		}
		if e.value, at = s.clearValue(s.colon(at, end), end, depth+1); at < 0 {
			return n, -1
		}
		if n.entries == nil { // there are seldom braces in braces
			n.entries = make([]entry, 0, 1+bytes.Count(s.text[at:end], []byte(": ")))
		}
		n.entries = append(n.entries, e)
		if at = s.spaces(at, end); at == end || s.text[at] != ',' && s.text[at] != '}' {
			return n, -1
		}
		if more = s.text[at] == ','; !more {
			n.end = uint32(at + 1)
			return n, at + 1
		}
	}
	return n, -1
}

// unescape resolves the escapes of a clear text. It has no zero byte, as newSource allows none.
var unescape = strings.NewReplacer(`\\`, "\x00", `\"`, `"`)

// clearText reads a text, which ends before a colon and a space, and in braces before a comma or brace. It returns the offset
// after it; -1 if it is not clear.
func (s *source) clearText(at, end int, braces bool) (n node, after int) {
	if at < 0 || at >= end {
		return n, -1
	}
	n = node{kind: text, start: uint32(at)}
	if quote := s.text[at]; quote == '"' || quote == '\'' {
		after, ok := s.quoteEnd(at)
		if !ok || after > end {
			return n, -1
		}
		n.end, n.text = uint32(after), string(s.text[at+1:after-1])
		if quote == '\'' {
			n.text = strings.ReplaceAll(n.text, "''", "'")
		} else if strings.Contains(n.text, `\`) {
			if n.text = unescape.Replace(n.text); strings.Contains(n.text, `\`) {
				return n, -1
			}
			n.text = strings.ReplaceAll(n.text, "\x00", `\`)
		}
		return n, after
	}
	after = at
	for ; after < end; after++ {
		c := s.text[after]
		next := byte(' ')
		if after+1 < end {
			next = s.text[after+1]
		}
		if c == ':' && next == ' ' || c == ' ' && next == '#' || braces && (c == ',' || c == '}') {
			break
		}
		inWord := c >= 0x80 || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !inWord && (after == at || strings.IndexByte(" :./-_+@%", c) < 0) || c == ':' && (next == ',' || next == '}') {
			return n, -1
		}
	}
	n.text = string(bytes.TrimRight(s.text[at:after], " "))
	n.end = n.start + uint32(len(n.text))
	if n.text == "" || strings.EqualFold(n.text, "null") {
		return n, -1
	}
	return n, int(n.end)
}
