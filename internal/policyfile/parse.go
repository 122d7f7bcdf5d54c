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
	fileKeys      = []string{"include", "defaults", "plans", "pools", "colours", "devices"}
	deviceKeys    = append([]string{"defaults", "pool", "egress", "ingress"}, labelKeys...)
	directionKeys = append([]string{"match", "defaults", "pool"}, labelKeys...)
)

// Parse parses a policy file; the name is for errors. The error is of type Errors and lists
// all mistakes, or only the first one if the file is not YAML. Each rule is valid on all
// devices. The File refers to the text, which must not change.
func Parse(name string, text []byte) (*File, error) { return parse(name, text, true) }

// parse is Parse, which cuts clear lines out or not.
func parse(name string, text []byte, cuts bool) (*File, error) {
	source, at, err := newSource(name, text)
	f := &File{source: source, exactly: map[string]*section{}, pools: map[string]*pool{}}
	if err != nil {
		return nil, f.errorAt(uint32(at), err.Error())
	}
	r := &reader{file: f, limitReader: limitReader{notes: notes{source: &f.source}, pools: f.pools}}
	roots, err := r.yaml(cuts)
	switch {
	case err != nil:
		return nil, err
	case len(roots) > 0:
		for i := range roots[1:] {
			r.merge(&roots[0], &roots[i+1])
		}
		r.policy(&roots[0])
	case len(r.problems) == 0:
		r.report(0, "the file is empty; write devices: {} for a policy without rules")
	}
	if len(r.problems) > 0 {
		return nil, f.errors(r.problems)
	}
	f.warnings = f.errors(r.warned)
	return f, nil
}

// yaml returns the documents of the text that are not empty, and an error if it is not YAML.
func (r *notes) yaml(cuts bool) (roots []node, err error) {
	t, text := tree{notes: r, cursor: r.cursor()}, r.text
	if cuts {
		t.cut, text = r.cut()
	}
	roots, err = t.parse(text)
	if cuts && (err != nil || len(r.problems) > 0 || len(t.cut) > 0) { // what was cut may have caused these
		r.problems, r.faults = nil, 0
		return r.yaml(false)
	}
	if err != nil {
		at, message := r.syntaxError(err)
		return nil, Errors{r.located(at, message)}
	}
	return roots, nil
}

// A reader makes a File of the nodes of its text.
type reader struct {
	limitReader
	file   *File
	common []byte // see meaningOf
	own    parcel // see withOwn
}

func (r *reader) policy(root *node) {
	given := r.keys(root, "a policy", "devices: {eth0: {egress: {10.0.0.0/24: 10mbit}}}", fileKeys)
	if e := given["pools"]; e != nil {
		for _, e := range e.value.entries { // before all that may be within them
			r.pools[e.key.text] = &pool{}
		}
	}
	if e := given["include"]; e != nil && len(r.files) == 0 {
		r.errorf(&e.key, "this includes no file; write it at the start of a line, such as include: [isp.yaml]")
	}
	var ofFile parcel
	if e := given["colours"]; e != nil {
		r.option(&ofFile, policy.FindOption("colours"), &e.value)
	}
	defaults := r.defaults(ofFile, given)
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
	r.file.devices = make([]section, 0, len(devices.entries))
	seen := map[bool]map[string]*node{true: {}, false: {}} // patterns, and others
	for _, e := range r.entries(devices, "devices", "eth0: {egress: {10.0.0.0/24: 10mbit}}") {
		s := section{at: e.key.start, key: e.key.text, pattern: IsPattern(e.key.text)}
		if err := CheckDevice(s.key); err != nil {
			r.errorf(&e.key, "%w", err)
			continue
		}
		name := s.device()
		if r.again(seen[s.pattern], &e.key, name, "device "+name, "; merge the two") {
			continue
		}
		if !s.pattern {
			r.current = &s
		}
		r.section(&s, &e.value, defaults)
		r.current = nil
		r.file.devices = append(r.file.devices, s)
		if !s.pattern {
			r.file.exactly[name] = &r.file.devices[len(r.file.devices)-1]
		}
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
	case policy.IsCgroup(name) && pattern:
		return fmt.Errorf("device %q: a cgroup has no pattern; name each one", shorten(key))
	case policy.IsCgroup(name):
		return policy.CheckCgroup(name)
	case !possible(name):
		return fmt.Errorf("device %q is not a valid device name; write one such as eth0, or a pattern such as tap*", shorten(key))
	case !pattern && len(name) > maxDevice:
		return fmt.Errorf("device %q has %d bytes; a device name has at most %d", shorten(key), len(name), maxDevice)
	}
	return nil
}

func (r *reader) section(s *section, n *node, defaults parcel) {
	given := r.keys(n, "a device", "egress: {10.0.0.0/24: 10mbit}", deviceKeys)
	defaults = r.around(s, given, "", defaults)
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		if e := given[d.String()]; e != nil {
			s.tables = append(s.tables, r.table(s, d, &e.value, defaults))
		}
	}
}

// A direction is one that is being read.
type direction struct {
	table
	section  *section
	defaults parcel
	known    map[meaning]*made
}

func (r *reader) table(s *section, of policy.Direction, n *node, defaults parcel) table {
	d := &direction{table: table{direction: of, match: of.FarSide()}, section: s, known: map[meaning]*made{}}
	entries := r.entries(n, "a direction", "10.0.0.0/24: 10mbit")
	given := r.named(entries, directionKeys)
	if e := given["match"]; e != nil {
		d.matchAt = e.key.start
		if text, ok := r.scalar(&e.value, "match", "dst or src"); ok {
			if err := d.match.Set(text); err != nil {
				r.errorf(&e.value, "%w", err)
			}
		}
	}
	d.defaults = r.around(s, given, of.String(), defaults)
	d.rules = make([]rule, 0, len(entries))
	for i := range entries {
		e := &entries[i]
		if slices.Contains(directionKeys, e.key.text) {
			continue
		}
		r.entry(d, e)
	}
	slices.SortFunc(d.rules, func(a, b rule) int {
		return cmp.Or(policy.ComparePrefix(a.prefix, b.prefix), cmp.Compare(a.at, b.at))
	})
	r.contradictions(d.rules)
	return d.table
}

// entry adds the rules or the host of an entry to a direction. The key any has a rule for each family.
func (r *reader) entry(d *direction, e *entry) {
	networks, err := policy.Everything[:], error(nil)
	if e.key.text != policy.Any { // a slice of ParseNetworks would be on the heap, for each rule
		var p netip.Prefix
		p, err = policy.ParsePrefix(e.key.text)
		networks = []netip.Prefix{p}
	}
	switch {
	case err != nil && policy.IsMAC(e.key.text):
		r.host(d, e)
		return
	case err != nil:
		r.errorf(&e.key, "%s", notNetwork(e.key.text, err))
		return
	}
	faults := r.faults
	for _, p := range networks {
		if r.faults > faults { // the second family would have the same errors
			return
		}
		if made := r.made(d, p, e); made != nil {
			d.rules = append(d.rules, rule{e.key.start, p, made})
		}
	}
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
