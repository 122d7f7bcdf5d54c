package policyfile

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// maxDevice is the longest name of a device in bytes, alternative names included.
const maxDevice = 127

var (
	fileKeys      = []string{"defaults", "plans", "devices"}
	deviceKeys    = []string{"defaults", "egress", "ingress"}
	directionKeys = []string{"match", "defaults"}
)

// Parse reads a policy file. The name is for errors, which are of type Errors and
// all that the file has, or the first only if it is not YAML. Each rule is valid on
// any device. The File keeps the text, which is not to be changed.
func Parse(name string, text []byte) (*File, error) {
	lines := 0
	if len(text) >= largeFile {
		lines = pieceLines
	}
	return parse(name, text, lines)
}

// parse reads a file by pieces of so many lines, or as a whole if that is 0.
func parse(name string, text []byte, lines int) (*File, error) {
	source, at, err := newSource(text)
	r := &reader{File: File{name: name, source: source, exactly: map[string]*section{}}}
	if err != nil {
		return nil, r.errorAt(uint32(at), err.Error())
	}
	if lines > 0 {
		r.pieces, text = cut(source, lines)
	}
	root, err := r.yaml(text, 0)
	switch {
	case root != nil && root.kind != nothing:
		r.policy(root)
	case err == nil && len(r.problems) == 0:
		r.report(0, "the file says nothing; write devices: {} if no device is to have rules")
	}
	switch {
	case lines > 0 && (r.torn || len(r.pieces) > 0):
		return parse(name, source.text, 0)
	case err != nil:
		return nil, err
	case len(r.problems) > 0:
		return nil, r.errors(r.problems)
	}
	r.warnings = r.errors(r.useless)
	return &r.File, nil
}

// A reader makes a File of the nodes of its text.
type reader struct {
	File
	problems []problem
	faults   int       // problems, and each use of what is not valid and reported already
	useless  []problem // that are warnings
	plans    map[string]*plan
	pieces   map[uint32][]piece // that are not read yet, by the offset of the key before
	torn     bool               // something is not YAML for policies, and perhaps because of the pieces
}

// yaml is what a part of the text says that has some lines before it; nil if that
// is nothing, or an error if it is not YAML.
func (r *reader) yaml(text []byte, before int) (*node, error) {
	reported := len(r.problems)
	t := tree{r, r.cursor(), before}
	root, err := t.parse(text)
	if err != nil {
		r.torn = true
		at, message := r.syntaxError(err)
		return nil, Errors{{r.name, at.line, at.column, message}}
	}
	r.torn = r.torn || len(r.problems) > reported
	return root, nil
}

func (r *reader) report(offset uint32, message string) {
	r.faults++
	r.problems = append(r.problems, problem{offset, message})
}

func (r *reader) errorf(n *node, format string, args ...any) {
	r.report(n.start, fmt.Errorf(format, args...).Error())
}

func (r *reader) policy(root *node) {
	given := r.keys(root, "a policy", "devices: {eth0: {egress: {10.0.0.0/24: 10mbit}}}", fileKeys)
	defaults := r.defaults(parcel{}, given["defaults"])
	if e := given["plans"]; e != nil {
		r.readPlans(&e.value)
	}
	if given["devices"] == nil {
		if len(r.problems) == 0 {
			r.errorf(root, "devices is missing; write devices: {} if no device is to have rules")
		}
		return
	}
	devices := &given["devices"].value
	r.key, r.inside = given["devices"].key.start, root.braces
	r.place, r.usual = devices.place(), over(policy.Limit{}, defaults.parts)
	// Sections do not move when there are more: exactly points at them.
	r.devices = make([]section, 0, len(devices.entries))
	patterns := map[string]*section{}
	for _, e := range r.entries(devices, "devices", "eth0: {egress: {10.0.0.0/24: 10mbit}}") {
		s := section{span: e.span(), place: e.value.place(), key: e.key.text, pattern: IsPattern(e.key.text)}
		if err := CheckDevice(s.key); err != nil {
			r.errorf(&e.key, "%w", err)
			continue
		}
		name, others := s.key, patterns
		if !s.pattern {
			name, others = s.name(), r.exactly
		}
		if first := others[name]; first != nil {
			r.errorf(&e.key, "device %s is there twice, first in line %d; put all of it in one place", name, r.line(first.span.key))
			continue
		}
		r.section(&s, &e.value, defaults)
		r.reach(s.span.end)
		r.devices = append(r.devices, s)
		others[name] = &r.devices[len(r.devices)-1]
	}
}

// possible reports whether a device can have a name, as the kernel's dev_valid_name does.
func possible(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/ \t\n\v\f\r")
}

// CheckDevice reports as an error why a key can be neither a pattern nor, without
// its escapes, the name of a device.
func CheckDevice(key string) error {
	_, malformed := path.Match(key, "")
	name, pattern := key, IsPattern(key)
	if !pattern {
		name = Unescape(key)
	}
	switch {
	case malformed != nil:
		return fmt.Errorf("device %q is a malformed pattern; use * for any letters, ? for one, [a-z] for one of these, and \\ before what is meant as it is", shorten(key))
	case strings.Contains(escaped.ReplaceAllString(key, "_"), "[!"):
		return fmt.Errorf(`device %q has [!, which negates nothing; write [^ for any but these, or [\! for a ! as it is`, shorten(key))
	case !possible(name):
		return fmt.Errorf("device %q is not a name that a device can have; write one such as eth0, or a pattern such as tap*", shorten(key))
	case !pattern && len(name) > maxDevice:
		return fmt.Errorf("device %q has a name of %d bytes; no device's is longer than %d", shorten(key), len(name), maxDevice)
	}
	return nil
}

func (r *reader) section(s *section, n *node, defaults parcel) {
	given := r.keys(n, "a device", "egress: {10.0.0.0/24: 10mbit}", deviceKeys)
	if own := given["defaults"]; own != nil {
		defaults = r.defaults(defaults, own)
		s.spans = append(s.spans, own.span())
	}
	s.usual = over(policy.Limit{}, defaults.parts)
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		if e := given[d.String()]; e != nil {
			t := r.table(d, e, defaults)
			s.reach(t.span.end)
			s.tables = append(s.tables, t)
		}
	}
	s.span.end = s.place.end
}

func (r *reader) table(d policy.Direction, e *entry, defaults parcel) table {
	n := &e.value
	t := table{span: e.span(), place: n.place(), direction: d, match: d.FarSide()}
	entries := r.entries(n, "a direction", "10.0.0.0/24: 10mbit")
	given := map[string]*entry{}
	for i := range entries {
		if e := &entries[i]; slices.Contains(directionKeys, e.key.text) {
			r.give(given, e)
			t.spans = append(t.spans, e.span())
		}
	}
	if e := given["match"]; e != nil {
		t.side = e.span()
		if text, ok := r.scalar(&e.value, "match", "dst or src"); ok {
			if err := t.match.Set(text); err != nil {
				r.errorf(&e.value, "%w", err)
			}
		}
	}
	defaults = r.defaults(defaults, given["defaults"])
	t.usual = over(policy.Limit{}, defaults.parts)
	limits := &limits{t.usual, defaults, map[saying]*made{}}
	t.rules = make([]rule, 0, len(entries))
	for i := range entries {
		e := &entries[i]
		if slices.Contains(directionKeys, e.key.text) {
			continue
		}
		t.rules = r.rules(t.rules, limits, e)
		if n.braces {
			continue
		}
		for _, p := range r.pieces[e.key.start] {
			more := r.piece(p)
			for i := range more {
				t.rules = r.rules(t.rules, limits, &more[i])
			}
		}
		delete(r.pieces, e.key.start)
	}
	for _, rule := range t.rules {
		t.reach(rule.end)
	}
	t.span.end = t.place.end
	slices.SortFunc(t.rules, func(a, b rule) int {
		return cmp.Or(policy.ComparePrefix(a.prefix, b.prefix), cmp.Compare(a.key, b.key))
	})
	r.contradictions(t.rules)
	return t
}

// piece is the rules of a piece of a direction.
func (r *reader) piece(p piece) []entry {
	root, err := r.yaml(r.text[r.lines[p.from-1]:r.lineEnd(p.to-1)], p.from-1)
	if root == nil || err != nil {
		return nil // and the file is read as a whole
	}
	return r.entries(root, "a direction", "10.0.0.0/24: 10mbit")
}

// rules adds a rule, if it is valid, to those before.
func (r *reader) rules(rules []rule, limits *limits, e *entry) []rule {
	prefix, err := policy.ParsePrefix(e.key.text)
	if err != nil {
		r.errorf(&e.key, "%s", notNetwork(e.key.text, err))
	} else if made := r.made(limits, prefix, e); made != nil {
		rules = append(rules, rule{e.span(), prefix, made})
	}
	return rules
}

// notNetwork says what was meant by a key of a direction that is no network.
func notNetwork(key string, err error) string {
	if strings.ContainsFunc(key, func(c rune) bool { return !unicode.IsLetter(c) }) {
		return err.Error()
	}
	if similar := plain.Similar(key, directionKeys); similar != "" {
		return fmt.Sprintf("unknown key %q; did you mean %s?", shorten(key), similar)
	}
	return fmt.Sprintf("%q is no network; write one such as 10.0.0.0/24, or match or defaults", shorten(key))
}

// entries is those of a mapping that say something.
func (r *reader) entries(n *node, what, example string) []entry {
	switch n.kind {
	case odd:
		r.faults++
		return nil
	case mapping:
		return slices.DeleteFunc(n.entries, func(e entry) bool { return !r.says(&e, what) })
	}
	if key, value, ok := together(n.text); ok {
		r.errorf(n, "%s", noColon(key, value))
		return nil
	}
	r.errorf(n, "%s cannot be %s; write it such as %s", what, n.describe(), example)
	return nil
}

func noColon(key, value string) string {
	return fmt.Sprintf("no colon and space are between key and value; did you mean %s: %s?", shorten(key), shorten(value))
}

// together takes a text apart that was meant as a key and a value.
func together(s string) (key, value string, ok bool) {
	at := strings.LastIndexAny(s, ": ")
	if at <= 0 || at == len(s)-1 {
		return "", "", false
	}
	key, value = strings.TrimRight(s[:at], ": "), s[at+1:]
	_, err := policy.ParsePrefix(key)
	return key, value, err == nil || slices.Contains(ruleKeys, key)
}

func (r *reader) says(e *entry, what string) bool {
	switch {
	case e.key.kind == odd || e.value.kind == odd:
		r.faults++
	case e.key.kind != text:
		r.errorf(&e.key, "%s cannot be a key; write plain text, in quotes if it begins with [ or {", e.key.describe())
	case e.value.kind == nothing:
		r.errorf(&e.key, "%s", saysNothing(what, e.key.text))
	default:
		return true
	}
	return false
}

func saysNothing(what, key string) string {
	name, value, ok := together(key)
	switch {
	case ok:
		return noColon(name, value)
	case what == "a direction":
		return shorten(key) + " says nothing; write a rate, unlimited, or a plan"
	case what == "plans":
		return shorten(key) + " says nothing; write a rate, or parts such as {rate: 10mbit, each: host}"
	case slices.Contains(ruleKeys, key):
		return key + " says nothing; write what it is, or take it out"
	case !slices.Contains(fileKeys, key) && what != "a device" && what != "devices":
		return fmt.Sprintf("%q says nothing; put quotes around a text with a comma, or take this out", shorten(key))
	}
	return shorten(key) + " says nothing; write {} if nothing is meant"
}

// keys is the entries of a mapping whose keys are some of words.
func (r *reader) keys(n *node, what, example string, words []string) map[string]*entry {
	given := map[string]*entry{}
	entries := r.entries(n, what, example)
	for i := range entries {
		e := &entries[i]
		_, err := policy.ParsePrefix(e.key.text)
		switch {
		case slices.Contains(words, e.key.text):
			r.give(given, e)
		case err == nil:
			r.errorf(&e.key, "network %s is not in a direction; write it below egress or ingress of a device", e.key.text)
		default:
			r.errorf(&e.key, "unknown key %q; %s", shorten(e.key.text), didYouMean(e.key.text, words))
		}
	}
	return given
}

// give adds an entry that is not given yet.
func (r *reader) give(given map[string]*entry, e *entry) {
	if first := given[e.key.text]; first != nil {
		r.errorf(&e.key, "%s is there twice, first in line %d; put all of it in one place", e.key.text, r.line(first.key.start))
		return
	}
	given[e.key.text] = e
}

// scalar is the text of a value.
func (r *reader) scalar(n *node, what, example string) (string, bool) {
	switch n.kind {
	case odd:
		r.faults++
		return "", false
	case text:
		return n.text, true
	}
	r.errorf(n, "%s cannot be %s; write %s", what, n.describe(), example)
	return "", false
}
