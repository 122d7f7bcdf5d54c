package policyfile

import (
	"fmt"
	"path"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

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
	r := &reader{File: File{name: name, text: text, exactly: map[string]*section{}}}
	if root := r.document(); root != nil {
		r.policy(root)
	}
	if len(r.errs) > 0 {
		r.errs.sort()
		return nil, r.errs
	}
	r.warnings.sort()
	return &r.File, nil
}

// A reader makes a File of the nodes of its text.
type reader struct {
	File
	errs  Errors
	plans map[string]*plan
}

type plan struct {
	name  string
	parts []part
	at    position
	bad   bool // and said so already
}

func (r *reader) policy(root *yaml.Node) {
	given := map[string]*yaml.Node{}
	for key, value := range r.pairs(root, "a policy", "devices: {eth0: {egress: {10.0.0.0/24: 10mbit}}}") {
		if r.known(key, fileKeys, given) {
			given[key.Value] = value
		}
	}
	defaults := r.defaults(nil, given["defaults"])
	r.readPlans(given["plans"])
	devices := given["devices"]
	if devices == nil {
		if len(r.errs) == 0 {
			r.errorf(root, "devices is missing; write devices: {} if no device is to have rules")
		}
		return
	}
	// Sections do not move when there are more: exactly points at them.
	r.devices = make([]section, 0, len(devices.Content)/2)
	patterns := map[string]*yaml.Node{}
	for key, value := range r.pairs(devices, "devices", "eth0: {egress: {10.0.0.0/24: 10mbit}}") {
		s := section{key: key.Value, pattern: isPattern(key.Value), at: at(key)}
		if !r.validDevice(key, s) {
			continue
		}
		name, first := s.key, position{}
		if s.pattern {
			if other := patterns[name]; other != nil {
				first = at(other)
			}
			patterns[name] = key
		} else if other := r.exactly[s.name()]; other != nil {
			first = other.at
		}
		if first != (position{}) {
			r.errorf(key, "device %s is there twice, first in line %d; put all of it in one place", name, first.line)
			continue
		}
		r.devices = append(r.devices, s)
		section := &r.devices[len(r.devices)-1]
		if !s.pattern {
			r.exactly[s.name()] = section
		}
		r.device(section, value, defaults)
	}
}

func (r *reader) validDevice(key *yaml.Node, s section) bool {
	_, malformed := path.Match(s.key, "")
	name := s.key
	if !s.pattern {
		name = s.name()
	}
	switch {
	case malformed != nil:
		r.errorf(key, "device %.64q is a malformed pattern; use * for any letters, ? for one, [a-z] for one of these, and \\ before what is meant as it is", s.key)
	case name == "" || name == "." || name == ".." || strings.ContainsFunc(name, func(c rune) bool {
		return c == '/' || unicode.IsSpace(c)
	}):
		r.errorf(key, "device %.64q is not a name that a device can have; write one such as eth0, or a pattern such as tap*", s.key)
	case !s.pattern && len(name) > maxDevice:
		r.errorf(key, "device %.32q... has a name of %d bytes; no device's is longer than %d", s.key, len(name), maxDevice)
	default:
		return true
	}
	return false
}

func (r *reader) device(s *section, n *yaml.Node, defaults []part) {
	given := map[string]*yaml.Node{}
	keys := map[string]*yaml.Node{}
	for key, value := range r.pairs(n, "a device", "egress: {10.0.0.0/24: 10mbit}") {
		if _, err := policy.ParsePrefix(key.Value); err == nil {
			r.errorf(key, "network %s is not below a direction; write it below egress or ingress", key.Value)
			continue
		}
		if r.known(key, deviceKeys, given) {
			given[key.Value], keys[key.Value] = value, key
		}
	}
	defaults = r.defaults(defaults, given["defaults"])
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		if value := given[d.String()]; value != nil {
			s.tables = append(s.tables, r.table(d, value, defaults))
		}
	}
}

func (r *reader) table(d policy.Direction, n *yaml.Node, defaults []part) table {
	t := table{direction: d, match: d.FarSide()}
	var networks []*yaml.Node // keys and values, as in a node
	given := map[string]*yaml.Node{}
	for key, value := range r.pairs(n, "a direction", "10.0.0.0/24: 10mbit") {
		switch {
		case key.Value == "match" || key.Value == "defaults":
			if r.known(key, directionKeys, given) {
				given[key.Value] = value
			}
		default:
			networks = append(networks, key, value)
		}
	}
	if side := given["match"]; side != nil {
		if text, ok := r.scalar(side, "match", "dst or src"); ok {
			if err := t.match.Set(text); err != nil {
				r.errorf(side, "%w", err)
			}
		}
	}
	limits := newLimits(r.defaults(defaults, given["defaults"]))
	t.rules = make([]rule, 0, len(networks)/2)
	for i := 0; i < len(networks); i += 2 {
		key, value := networks[i], networks[i+1]
		networks[i], networks[i+1] = nil, nil // a large file has many
		prefix, err := policy.ParsePrefix(key.Value)
		if err != nil {
			r.errs = append(r.errs, r.errorAt(at(key), notNetwork(key.Value, err))...)
			continue
		}
		if limit := r.limit(limits, prefix, key, value); limit != nil {
			t.rules = append(t.rules, rule{prefix, limit, at(key)})
		}
	}
	t.sort()
	r.contradictions(t.rules)
	return t
}

// notNetwork says what was meant by a key of a direction that is no network.
func notNetwork(key string, err error) string {
	if strings.ContainsFunc(key, func(c rune) bool { return !unicode.IsLetter(c) }) {
		return err.Error()
	}
	return fmt.Sprintf("unknown key %.64q; write a network, %s", key, didYouMean(key, directionKeys))
}

// pairs ranges over the keys and values of a mapping that are worth a look.
func (r *reader) pairs(n *yaml.Node, what, example string) func(func(key, value *yaml.Node) bool) {
	return func(yield func(key, value *yaml.Node) bool) {
		if !r.plain(n) {
			return
		}
		if n.Kind != yaml.MappingNode {
			r.errorf(n, "%s cannot be %s; write %s, each in a line of its own", what, describe(n), example)
			return
		}
		content := n.Content
		n.Content = nil // a large file has many
		for i := 0; i < len(content); i += 2 {
			key, value := content[i], content[i+1]
			content[i], content[i+1] = nil, nil
			if !r.plain(key) || !r.plain(value) {
				continue
			}
			if key.Kind != yaml.ScalarNode {
				r.errorf(key, "%s cannot be a key; write plain text, in quotes if it begins with [ or {", describe(key))
				continue
			}
			if value.Kind == yaml.ScalarNode && value.Tag == "!!null" {
				r.nothing(key, what)
				continue
			}
			if !yield(key, value) {
				return
			}
		}
	}
}

func (r *reader) nothing(key *yaml.Node, what string) {
	if name, value, cut := strings.Cut(key.Value, ":"); cut && name != "" && value != "" && !strings.Contains(value, ":") {
		r.errorf(key, "a space is missing behind a colon; did you mean %s: %s?", name, value)
		return
	}
	if what == "a direction" {
		r.errorf(key, "%.64s says nothing; write a rate, unlimited, or a plan", key.Value)
		return
	}
	r.errorf(key, "%.64s says nothing; write {} if nothing is meant", key.Value)
}

// plain says whether a node is without what policies have no use for.
func (r *reader) plain(n *yaml.Node) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		r.errorf(n, "*%.64s is an alias in YAML, which policies do not have; name a plan, or put quotes around a pattern", n.Value)
	case n.Anchor != "":
		r.errorf(n, "&%.64s is an anchor in YAML, which policies do not have; name a plan instead", n.Anchor)
	case n.Style&yaml.TaggedStyle != 0:
		r.errorf(n, "%.64s is a tag in YAML, which policies do not have; leave it out", n.Tag)
	case n.Kind == yaml.ScalarNode && n.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0:
		r.errorf(n, "text in several lines has no use here; write it in one")
	case n.Tag == "!!merge":
		r.errorf(n, "<< merges mappings in YAML, which policies do not; name a plan instead")
	default:
		return true
	}
	return false
}

// known says whether a key is one of words, and not given already under any of its names.
func (r *reader) known(key *yaml.Node, words []string, given map[string]*yaml.Node) bool {
	for _, w := range words {
		if w == key.Value {
			if first := given[w]; first != nil {
				r.errorf(key, "%s is there twice, first in line %d; put all of it in one place", w, first.Line)
				return false
			}
			return true
		}
	}
	r.errorf(key, "unknown key %.64q; %s", key.Value, didYouMean(key.Value, words))
	return false
}

// scalar is the text of a value.
func (r *reader) scalar(n *yaml.Node, what, example string) (string, bool) {
	if n.Kind != yaml.ScalarNode {
		r.errorf(n, "%s cannot be %s; write %s", what, describe(n), example)
		return "", false
	}
	return n.Value, true
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.SequenceNode:
		return "a list"
	case yaml.MappingNode:
		return "a mapping"
	}
	text := n.Value
	if utf8.RuneCountInString(text) > 64 {
		text = string([]rune(text)[:64]) + "..."
	}
	return fmt.Sprintf("%q", text)
}

func (r *reader) errorf(n *yaml.Node, format string, args ...any) {
	r.errs = append(r.errs, r.errorAt(at(n), fmt.Errorf(format, args...).Error())...)
}

func at(n *yaml.Node) position { return position{int32(n.Line), int32(n.Column)} }
