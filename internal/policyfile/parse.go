package policyfile

import (
	"cmp"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"
	"unicode"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// maxDevice is the longest device name in bytes, including alternative names.
const maxDevice = 127

var (
	fileKeys      = []string{"defaults", "plans", "pools", "colours", "devices"}
	deviceKeys    = append([]string{"defaults", "pool", "egress", "ingress"}, labelKeys...)
	directionKeys = append([]string{"match", "defaults", "pool"}, labelKeys...)
)

// Parse parses a policy file; the name is for errors. The error is of type Errors and lists
// all mistakes, or only the first one if the file is not YAML. Each rule is valid on all
// devices. The File refers to the text, which must not change.
func Parse(name string, text []byte) (*File, error) {
	lines := 0
	if len(text) >= largeFile {
		lines = pieceLines
	}
	return parse(name, text, lines)
}

// parse parses a file by pieces of so many lines, or as a whole if lines is 0.
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
		r.report(0, "the file is empty; write devices: {} for a policy without rules")
	}
	switch {
	case lines > 0 && (r.broken || len(r.pieces) > 0):
		return parse(name, source.text, 0)
	case err != nil:
		return nil, err
	case len(r.problems) > 0:
		return nil, r.errors(r.problems)
	}
	r.warnings = r.errors(r.warned)
	return &r.File, nil
}

// A reader makes a File of the nodes of its text.
type reader struct {
	File
	problems []problem
	faults   int                // the number of problems, and of uses of something that was reported
	warned   []problem          // warnings
	pieces   map[uint32][]piece // not read yet, by the offset of the key before them
	current  *section           // if it is of one device: what is in it may be within its pools
	broken   bool               // there is a YAML error, which the pieces may have caused
}

// yaml parses a part of the text, which has some lines before it. It returns nil if the
// part is empty, and an error if it is not YAML.
func (r *reader) yaml(text []byte, before int) (*node, error) {
	reported := len(r.problems)
	t := tree{r, r.cursor(), before}
	root, err := t.parse(text)
	if err != nil {
		r.broken = true
		at, message := r.syntaxError(err)
		return nil, Errors{{r.name, at.line, at.column, message}}
	}
	r.broken = r.broken || len(r.problems) > reported
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
	if e := given["pools"]; e != nil {
		r.namePools(&e.value)
	}
	var ofFile parcel
	if e := given["colours"]; e != nil {
		r.option(&ofFile, policy.FindOption("colours"), &e.value)
	}
	defaults := r.defaults(ofFile, given["defaults"])
	if e := given["plans"]; e != nil {
		r.readPlans(&e.value)
	}
	if e := given["pools"]; e != nil {
		r.readPools(&e.value, defaults)
	}
	if given["devices"] == nil {
		if len(r.problems) == 0 {
			r.errorf(root, "devices is missing; write devices: {} for a policy without rules")
		}
		return
	}
	devices := &given["devices"].value
	// Sections must not move, because exactly points at them.
	r.devices = make([]section, 0, len(devices.entries))
	patterns := map[string]*section{}
	for _, e := range r.entries(devices, "devices", "eth0: {egress: {10.0.0.0/24: 10mbit}}") {
		s := section{at: e.key.start, key: e.key.text, pattern: IsPattern(e.key.text)}
		if err := CheckDevice(s.key); err != nil {
			r.errorf(&e.key, "%w", err)
			continue
		}
		name, others := s.key, patterns
		if !s.pattern {
			name, others = s.name(), r.exactly
		}
		if first := others[name]; first != nil {
			r.errorf(&e.key, "device %s appears twice, first in line %d; merge the two", name, r.line(first.at))
			continue
		}
		if !s.pattern {
			r.current = &s
		}
		r.section(&s, &e.value, defaults)
		r.current = nil
		r.devices = append(r.devices, s)
		others[name] = &r.devices[len(r.devices)-1]
	}
	r.checkPools()
}

// possible reports whether a name is valid for a device, like the kernel's dev_valid_name.
func possible(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/ \t\n\v\f\r")
}

// CheckPattern returns an error if a key is malformed as a pattern.
func CheckPattern(key string) error {
	if _, err := path.Match(key, ""); err != nil {
		return fmt.Errorf("device %q is a malformed pattern; use * for any characters, ? for one, [a-z] for one of a range, and \\ before a character to match it literally", shorten(key))
	}
	if strings.Contains(escaped.ReplaceAllString(key, "_"), "[!") {
		return fmt.Errorf(`device %q has [!, which does not negate; write [^ to negate, or [\! to match a ! itself`, shorten(key))
	}
	return nil
}

// CheckDevice returns an error if a key is neither a valid pattern nor, without its
// escapes, a valid device name.
func CheckDevice(key string) error {
	if err := CheckPattern(key); err != nil {
		return err
	}
	name, pattern := key, IsPattern(key)
	if !pattern {
		name = Unescape(key)
	}
	switch {
	case !possible(name):
		return fmt.Errorf("device %q is not a valid device name; write one such as eth0, or a pattern such as tap*", shorten(key))
	case !pattern && len(name) > maxDevice:
		return fmt.Errorf("device %q has %d bytes; a device name has at most %d", shorten(key), len(name), maxDevice)
	}
	return nil
}

func (r *reader) section(s *section, n *node, defaults parcel) {
	given := r.keys(n, "a device", "egress: {10.0.0.0/24: 10mbit}", deviceKeys)
	defaults = r.defaults(defaults, given["defaults"])
	defaults = r.label(r.ownPool(s, given, "", defaults), given)
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		if e := given[d.String()]; e != nil {
			s.tables = append(s.tables, r.table(s, d, e, defaults))
		}
	}
}

func (r *reader) table(s *section, d policy.Direction, e *entry, defaults parcel) table {
	n := &e.value
	t := table{direction: d, match: d.FarSide()}
	entries := r.entries(n, "a direction", "10.0.0.0/24: 10mbit")
	given := map[string]*entry{}
	for i := range entries {
		if e := &entries[i]; slices.Contains(directionKeys, e.key.text) {
			r.give(given, e)
		}
	}
	if e := given["match"]; e != nil {
		t.matchAt = e.key.start
		if text, ok := r.scalar(&e.value, "match", "dst or src"); ok {
			if err := t.match.Set(text); err != nil {
				r.errorf(&e.value, "%w", err)
			}
		}
	}
	defaults = r.defaults(defaults, given["defaults"])
	defaults = r.label(r.ownPool(s, given, d.String(), defaults), given)
	limits := &limits{defaults, map[ruleText]*made{}}
	t.rules = make([]rule, 0, len(entries))
	for i := range entries {
		e := &entries[i]
		if slices.Contains(directionKeys, e.key.text) {
			continue
		}
		r.entry(s, &t, limits, e)
		if n.braces {
			continue
		}
		for _, p := range r.pieces[e.key.start] {
			more := r.piece(p)
			for i := range more {
				r.entry(s, &t, limits, &more[i])
			}
		}
		delete(r.pieces, e.key.start)
	}
	slices.SortFunc(t.rules, func(a, b rule) int {
		return cmp.Or(policy.ComparePrefix(a.prefix, b.prefix), cmp.Compare(a.at, b.at))
	})
	r.contradictions(t.rules)
	return t
}

// piece returns the rules of a piece of a direction.
func (r *reader) piece(p piece) []entry {
	root, err := r.yaml(r.text[r.lines[p.from-1]:r.lineEnd(p.to-1)], p.from-1)
	if root == nil || err != nil {
		return nil // the file is parsed as a whole
	}
	return r.entries(root, "a direction", "10.0.0.0/24: 10mbit")
}

// entry adds the rules or the host of an entry to a direction.
func (r *reader) entry(s *section, t *table, limits *limits, e *entry) {
	if isNetwork(e.key.text) || !policy.IsMAC(e.key.text) {
		t.rules = r.rules(t.rules, limits, e)
	} else if h := r.host(s, t, limits, e); h != nil {
		t.hosts = append(t.hosts, h)
	}
}

// rules appends the rule of an entry if it is valid. The key any has a rule for each
// family.
func (r *reader) rules(rules []rule, limits *limits, e *entry) []rule {
	var prefix netip.Prefix
	if e.key.text != policy.Any {
		var err error
		if prefix, err = policy.ParsePrefix(e.key.text); err != nil {
			r.errorf(&e.key, "%s", notNetwork(e.key.text, err))
			return rules
		}
	}
	faults := r.faults
	text, label := r.cutLabel(&e.value)
	add := func(p netip.Prefix) {
		if made := r.made(limits, p, e, text); made != nil && r.faults == faults {
			rules = append(rules, rule{e.key.start, p, made.labelled(label)})
		}
	}
	if e.key.text != policy.Any {
		add(prefix)
		return rules
	}
	for _, p := range policy.Everything {
		if r.faults == faults { // the second family would have the same errors
			add(p)
		}
	}
	return rules
}

func isNetwork(key string) bool {
	_, err := policy.ParsePrefix(key)
	return err == nil || key == policy.Any
}

// notNetwork returns the error for a key of a direction that is not a network.
func notNetwork(key string, err error) string {
	if strings.ContainsFunc(key, func(c rune) bool { return !unicode.IsLetter(c) }) {
		return err.Error()
	}
	if similar := plain.Similar(key, append(directionKeys, policy.Any)); similar != "" {
		return fmt.Sprintf("unknown key %q; did you mean %s?", shorten(key), similar)
	}
	return fmt.Sprintf("%q is not a network; write one such as 10.0.0.0/24, any for all, match or defaults", shorten(key))
}

// entries returns the entries of a mapping that have a key and a value.
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
	r.errorf(n, "%s cannot be %s; write it like %s", what, n.describe(), example)
	return nil
}

func noColon(key, value string) string {
	return fmt.Sprintf("a colon and a space are missing between key and value; did you mean %s: %s?", shorten(key), shorten(value))
}

// together splits a text that was meant as a key and a value.
func together(s string) (key, value string, ok bool) {
	at := strings.LastIndexAny(s, ": ")
	if at <= 0 || at == len(s)-1 {
		return "", "", false
	}
	key, value = strings.TrimRight(s[:at], ": "), s[at+1:]
	return key, value, isNetwork(key) || policy.IsMAC(key) || slices.Contains(ruleKeys, key)
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
		return shorten(key) + " has no value; write a rate, unlimited, or a plan"
	case what == "plans", what == "pools":
		return shorten(key) + " has no value; write a rate, or options such as {rate: 10mbit, each: host}"
	case slices.Contains(ruleKeys, key):
		return key + " has no value; write one, or remove it"
	case !slices.Contains(fileKeys, key) && what != "a device" && what != "devices":
		return fmt.Sprintf("%q has no value; put quotes around a text with a comma, or remove this", shorten(key))
	}
	return shorten(key) + " has no value; write {} for nothing"
}

// keys returns the entries of a mapping by key, which must be one of words.
func (r *reader) keys(n *node, what, example string, words []string) map[string]*entry {
	given := map[string]*entry{}
	entries := r.entries(n, what, example)
	for i := range entries {
		e := &entries[i]
		switch {
		case slices.Contains(words, e.key.text):
			r.give(given, e)
		case isNetwork(e.key.text):
			r.errorf(&e.key, "network %s is not in a direction; write it below egress or ingress of a device", e.key.text)
		case policy.IsMAC(e.key.text):
			r.errorf(&e.key, "host %s is not in a direction; write it below egress or ingress of a device", shorten(e.key.text))
		default:
			r.errorf(&e.key, "unknown key %q; %s", shorten(e.key.text), didYouMean(e.key.text, words))
		}
	}
	return given
}

// give adds an entry unless its key is there already.
func (r *reader) give(given map[string]*entry, e *entry) {
	if first := given[e.key.text]; first != nil {
		r.errorf(&e.key, "%s appears twice, first in line %d; merge the two", e.key.text, r.line(first.key.start))
		return
	}
	given[e.key.text] = e
}

// scalar returns the text of a value.
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
