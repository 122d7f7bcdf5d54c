package policyfile

import (
	"bytes"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v4"
)

// A policy that includes files is one text: the texts of these files follow its own, each as a YAML document behind a line
// with its name. So the policy that is recorded or sent is complete.

const partLine = "--- # included "

// A part is a file that a policy includes.
type part struct {
	name string
	line int // of its partLine; its text begins in the next one
}

var includeKey = regexp.MustCompile(`(?m)^include:(.*\n?(?:[ \t#-].*\n?|\r?\n)*)`)

// Include returns the text of a policy with the texts of the files that it includes. Their names are relative to that of the
// policy, which is not a file if it is "-". A text that has them already stays as it is. The error is of type Errors.
func Include(name string, text []byte, read func(name string) ([]byte, error)) ([]byte, error) {
	at := includeKey.FindSubmatchIndex(text)
	if at == nil || bytes.Contains(text, []byte("\n"+partLine)) {
		return text, nil
	}
	refuse := func(format string, args ...any) error {
		return Errors{{name, 1 + bytes.Count(text[:at[0]], []byte("\n")), 1, fmt.Sprintf(format, args...)}}
	}
	var names []string
	if err := yaml.Unmarshal(text[at[2]:at[3]], &names); err != nil {
		return nil, refuse("include is not a list of files; write it such as include: [isp.yaml]")
	}
	all := slices.Clone(text)
	for _, file := range names {
		if !filepath.IsAbs(file) {
			file = filepath.Join(filepath.Dir(name), file)
		}
		more, err := read(file)
		if err != nil {
			return nil, refuse("include: %v", err)
		}
		if includeKey.Match(more) {
			return nil, refuse("%s includes files itself; include them here instead", file)
		}
		all = append(bytes.TrimSuffix(all, []byte("\n")), "\n"+partLine+strconv.Quote(file)+"\n"...)
		all = append(all, bytes.TrimPrefix(more, []byte("\uFEFF"))...)
	}
	return all, nil
}

// Included are the files that the policy includes, in its order.
func (f *File) Included() (names []string) {
	for _, p := range f.files {
		names = append(names, p.name)
	}
	return names
}

// findParts finds the files that the text includes.
func (s *source) findParts() {
	if !bytes.Contains(s.text, []byte("\n"+partLine)) {
		return
	}
	for line := range s.lines {
		if quoted, found := bytes.CutPrefix(s.lineText(line+1), []byte(partLine)); found {
			if name, err := strconv.Unquote(string(quoted)); err == nil {
				s.files = append(s.files, part{name, line + 1})
			}
		}
	}
}

// inPart returns the file of a line, "" for that of the policy, and the number that the line has there.
func (s *source) inPart(line int) (name string, number int) {
	for _, p := range slices.Backward(s.files) {
		if line > p.line {
			return p.name, line - p.line
		}
	}
	return "", line
}

// where is the line of an offset, for an error.
func (s *source) where(offset uint32) string {
	name, number := s.inPart(s.line(offset))
	if name != "" {
		return fmt.Sprintf("line %d of %s", number, name)
	}
	return fmt.Sprintf("line %d", number)
}

// merge adds the entries of a mapping to another one. Where both have a value, that of the policy itself wins. Two included
// files must not have different ones.
func (r *reader) merge(into, from *node) {
	if into.kind != mapping || from.kind != mapping {
		r.errorf(from, "this is not a mapping such as devices: {eth0: {egress: {10.0.0.0/24: 10mbit}}}")
		return
	}
	at := map[string]int{}
	for i, e := range slices.Backward(into.entries) {
		at[e.key.text] = i
	}
	into.end = into.start // it has no text of its own
	for _, e := range from.entries {
		i, found := at[e.key.text]
		if !found {
			at[e.key.text] = len(into.entries)
			into.entries = append(into.entries, e)
			continue
		}
		have, whole := &into.entries[i], e.key.text == "shadow" || e.key.text == "colours" || e.key.text == "include"
		file, _ := r.inPart(r.line(have.value.start))
		switch {
		case !whole && (have.value.kind == mapping || e.value.kind == mapping):
			have.value.spellOut()
			e.value.spellOut()
			r.merge(&have.value, &e.value)
		case file != "" && !bytes.Equal(r.text[have.value.start:have.value.end], r.text[e.value.start:e.value.end]):
			r.errorf(&e.key, "%s is also in %s, with another value; remove one of them", shorten(e.key.text), r.where(have.key.start))
		}
	}
}

// spellOut makes a rate or a plan that is the whole value of a limit an option.
func (n *node) spellOut() {
	if n.kind != text {
		return
	}
	key := node{kind: text, start: n.start, end: n.start, text: "plan"}
	if looksLikeRate(n.text) {
		key.text = "rate"
	}
	*n = node{kind: mapping, start: n.start, end: n.start, entries: []entry{{key, *n}}}
}
