package policyfile

import "bytes"

// A large file is parsed by pieces, because the YAML library needs a kilobyte for each rule
// until it has parsed all. A run of lines that are clearly rules is cut out, except its
// first line, and parsed a few thousand lines at a time. These lines mean the same by
// themselves as in their place. If that is not certain, the file is parsed as a whole.

const (
	// largeFile is the smallest size in bytes of a file that is parsed by pieces.
	largeFile = 1 << 20
	// pieceLines is the largest number of lines of a piece.
	pieceLines = 4096
)

// A piece is the lines of a source from one to before another.
type piece struct{ from, to int }

// cut returns pieces of a source, by the offset of the key before them, and the source
// without them. Line numbers in the rest stay the same.
func cut(s source, lines int) (pieces map[uint32][]piece, rest []byte) {
	pieces = map[uint32][]piece{}
	copied := 0
	for line := 1; line <= len(s.lines); line++ {
		indent, ok := ruleLine(s.lineText(line))
		if !ok {
			continue
		}
		first, last := line, line
		for next := line + 1; next <= len(s.lines); next++ {
			text := s.lineText(next)
			if in, ok := ruleLine(text); ok && in == indent {
				last = next
			} else if text = bytes.TrimLeft(text, " "); len(text) > 0 && text[0] != '#' {
				break
			}
		}
		line = last
		if last-first < lines {
			continue
		}
		for from := first + 1; from <= last; from += lines {
			key := s.lines[first-1] + uint32(indent)
			pieces[key] = append(pieces[key], piece{from, min(from+lines, last+1)})
		}
		rest = append(rest, s.text[copied:s.lines[first]]...)
		rest = append(rest, bytes.Repeat([]byte("\n"), last-first-1)...)
		copied = s.lineEnd(last)
	}
	return pieces, append(rest, s.text[copied:]...)
}

var (
	networkBytes = set("0123456789abcdefABCDEF.:/")
	valueBytes   = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-/_@+{}:, ")
)

func init() {
	for c := 0x80; c < 0x100; c++ { // bytes of characters beyond ASCII
		valueBytes[c] = true
	}
}

func set(bytes string) (in [256]bool) {
	for _, c := range []byte(bytes) {
		in[c] = true
	}
	return in
}

func only(text []byte, in *[256]bool) bool {
	for _, c := range text {
		if !in[c] {
			return false
		}
	}
	return true
}

// ruleLine reports whether a line is clearly a network and its rule, and its indentation.
func ruleLine(line []byte) (indent int, ok bool) {
	text := bytes.TrimLeft(line, " ")
	indent = len(line) - len(text)
	key, value, ok := bytes.Cut(text, []byte(": "))
	if !ok || !bytes.ContainsAny(key, ".:") || !only(key, &networkBytes) {
		return 0, false
	}
	if value, ok = withoutQuotes(value); !ok {
		return 0, false
	}
	if open := bytes.Count(value, []byte("{")); open > 0 {
		if value[0] != '{' || value[len(value)-1] != '}' || bytes.Count(value, []byte("}")) != open {
			return 0, false
		}
	}
	return indent, len(value) > 0 && only(value, &valueBytes)
}

// withoutQuotes removes the comment after a value, and replaces each text in quotes by a
// word. It is false if quotes are not closed in the line.
func withoutQuotes(value []byte) (out []byte, ok bool) {
	if bytes.IndexByte(value, '"') < 0 && bytes.IndexByte(value, '\'') < 0 {
		value, _, _ = bytes.Cut(value, []byte(" #"))
		return bytes.TrimSpace(value), true
	}
	s := source{text: value}
	begins := true // whether a text can begin here
	for i := 0; i < len(value); i++ {
		c := value[i]
		switch {
		case c == '#' && i > 0 && value[i-1] == ' ':
			return bytes.TrimSpace(out), true
		case begins && (c == '"' || c == '\''):
			end, ok := s.quoteEnd(i)
			if !ok || end < len(value) && bytes.IndexByte([]byte(" ,}\r"), value[end]) < 0 {
				return nil, false
			}
			i, c = end-1, 'x'
		}
		if c != ' ' {
			begins = c == '{' || c == ',' || c == ':'
		}
		out = append(out, c)
	}
	return bytes.TrimSpace(out), true
}
