package policyfile

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v4"

	"github.com/shapectl/shapectl/pkg/policy"
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

// findInclude returns the offsets of the key include and of its value; nil for none. It saves most texts the regular expression.
func findInclude(text []byte) []int {
	if !bytes.HasPrefix(text, []byte("include:")) && !bytes.Contains(text, []byte("\ninclude:")) {
		return nil
	}
	return includeKey.FindSubmatchIndex(text)
}

// Include returns the text of a policy with the texts of the files that it includes. Their names are relative to that of the
// policy, which is not a file if it is "-". A text that has them already stays as it is. The error is of type Errors.
func Include(name string, text []byte, read func(name string) ([]byte, error)) ([]byte, error) {
	at := findInclude(text)
	if at == nil || bytes.Contains(text, []byte("\n"+partLine)) {
		return text, nil
	}
	line := 1 + bytes.Count(text[:at[0]], []byte("\n"))
	var value yaml.Node
	var names []string
	if yaml.Unmarshal(text[at[2]:at[3]], &value) != nil || value.Decode(&names) != nil {
		return nil, Errors{{name, line, 1, "include is not a list of files; write it such as include: [isp.yaml]"}}
	}
	all := slices.Clone(text)
	for i, file := range names {
		if !filepath.IsAbs(file) {
			file = filepath.Join(filepath.Dir(name), file)
		}
		more, err := read(file)
		if path, ok := errors.AsType[*fs.PathError](err); ok {
			err = path.Err
		}
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = errors.New("there is no such file; correct the name, or take it out of the list")
		case err == nil && findInclude(more) != nil:
			err = errors.New("it includes files itself; include them here instead")
		}
		if err != nil {
			entry := value.Content[0].Content[i]
			if entry.Line == 1 {
				entry.Column += len("include:")
			}
			return nil, Errors{{name, line + entry.Line - 1, entry.Column, fmt.Sprintf("include %s: %v", file, err)}}
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

// merge adds the entries of a mapping to another one, which is at these keys. Where both have a value, that of the policy itself
// wins. Two included files must not have different ones.
func (r *reader) merge(into, from *node, keys ...string) {
	if into.kind != mapping || from.kind != mapping {
		r.errorf(from, "this is not a mapping such as devices: {eth0: {egress: {10.0.0.0/24: 10mbit}}}")
		return
	}
	if len(keys) == 3 { // of networks
		into.splitAny(from)
		from.splitAny(into)
	}
	at := map[string]int{}
	for i, e := range slices.Backward(into.entries) {
		at[meantBy(keys, e.key.text)] = i
	}
	into.end = into.start // it has no text of its own
	for _, e := range from.entries {
		key := meantBy(keys, e.key.text)
		i, found := at[key]
		if !found {
			at[key] = len(into.entries)
			into.entries = append(into.entries, e)
			continue
		}
		have, whole := &into.entries[i], key == "shadow" || key == "colours" || key == "include"
		file, _ := r.inPart(r.line(have.value.start))
		switch {
		case !whole && (have.value.kind == mapping || e.value.kind == mapping):
			have.value.spellOut()
			e.value.spellOut()
			r.merge(&have.value, &e.value, append(keys, key)...)
		case file != "" && !bytes.Equal(r.text[have.value.start:have.value.end], r.text[e.value.start:e.value.end]):
			r.errorf(&e.key, "%s is also in %s, with another value; remove one of them", shorten(e.key.text), r.where(have.key.start))
		}
	}
}

// meantBy returns what a key below others means, however it is spelled.
func meantBy(above []string, key string) string {
	switch {
	case len(above) == 1 && above[0] != "defaults":
		return key // a name
	case len(above) == 3:
		if p, err := policy.ParsePrefix(key); err == nil {
			return policy.CIDR(p)
		} else if mac, err := policy.ParseMAC(key); err == nil {
			return mac.String()
		}
	}
	return policy.LimitKey(key)
}

// splitAny replaces the key any by one for each family, if another mapping has such a network.
func (n *node) splitAny(other *node) {
	i := slices.IndexFunc(n.entries, func(e entry) bool { return e.key.text == policy.Any })
	if i < 0 || !slices.ContainsFunc(other.entries, func(e entry) bool {
		p, err := policy.ParsePrefix(e.key.text)
		return err == nil && slices.Contains(policy.Everything[:], p)
	}) {
		return
	}
	one := n.entries[i]
	n.entries = slices.Delete(n.entries, i, i+1)
	for _, p := range policy.Everything {
		one.key.text, one.value.entries = p.String(), slices.Clone(one.value.entries)
		n.entries = append(n.entries, one)
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
