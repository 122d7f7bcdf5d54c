// Package policyfile reads, writes and compares policy files: the rules of all
// devices of a network namespace, in YAML. It imports pkg/policy, and a YAML
// library for the syntax; it does no I/O but to the writers that it is given.
package policyfile

import (
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

// A File is a policy as people write it, valid for whatever devices there are.
type File struct {
	name string
	source
	root    place        // with the spans of all keys
	key     uint32       // the offset of the key devices
	place                // of the devices
	usual   policy.Limit // as defaults make it
	devices []section
	exactly map[string]*section // those of devices that are not patterns, by name

	plansKey   uint32 // the offset of the key plans, if plansPlace has an end
	plansPlace place
	plans      map[string]*plan // by key

	warnings Errors
}

// A section is what a file says of a device, or of those that match a pattern.
type section struct {
	span
	place
	usual   policy.Limit
	key     string // as in the file
	pattern bool
	tables  []table
}

// A table is a policy.Table for devices that are not known yet.
type table struct {
	span
	place
	usual     policy.Limit
	direction policy.Direction
	match     policy.Match
	side      span   // of the key match, if it is there
	rules     []rule // in the order of policy.ComparePrefix
}

type rule struct {
	span
	prefix netip.Prefix
	*made
}

// made is what a rule says, for any network of one family and length. Rules that say the
// same share it. Those that differ in name and note alone share the rules.
type made struct {
	rules      *[2]policy.Rule // on devices without a link header, and with one
	name, note string
}

// on is the rule on a device.
func (r *rule) on(d Device) policy.Rule {
	out := r.rules[0]
	if d.L2Bytes > 0 {
		out = r.rules[1]
	}
	out.Prefix, out.Label.Name, out.Label.Note = r.prefix, r.name, r.note
	return out
}

// Device is a device that is there.
type Device struct {
	Name    string
	L2Bytes uint8 // of link header that each frame counts, 14 or 0
}

// Warnings is what is valid, but can hardly be meant: rules that can never decide,
// as longer networks of the same direction cover all of theirs. They are no errors,
// as a network may fill up one address at a time, and rules that were set may be so.
func (f *File) Warnings() Errors { return f.warnings }

// Tables is the policy of devices, sorted with sorted rules. Devices that the file
// does not name, and directions without rules, have no table; absent is as in Absent.
// The error, of type Errors, names devices that several patterns match.
func (f *File) Tables(devices []Device) (tables []policy.Table, absent []string, err error) {
	var errs Errors
	for _, d := range devices {
		of, err := f.For(d)
		if err != nil {
			errs = append(errs, err.(Errors)...)
		}
		tables = append(tables, of...)
	}
	if len(errs) > 0 {
		return nil, nil, errs
	}
	policy.SortTables(tables)
	return tables, f.Absent(devices), nil
}

// Absent is what the file names exactly and is not among devices, in the file's order.
func (f *File) Absent(devices []Device) (absent []string) {
	there := map[string]bool{}
	for _, d := range devices {
		there[d.Name] = true
	}
	for i := range f.devices {
		if s := &f.devices[i]; !s.pattern && !there[s.name()] {
			absent = append(absent, s.name())
		}
	}
	return absent
}

// Unmatched are the patterns that match none of devices, in the file's order.
func (f *File) Unmatched(devices []Device) (patterns []string) {
	for i := range f.devices {
		s := &f.devices[i]
		matches := func(d Device) bool { return Matches(s.key, d.Name) }
		if s.pattern && !slices.ContainsFunc(devices, matches) {
			patterns = append(patterns, s.key)
		}
	}
	return patterns
}

// For is the policy of one device: as Tables, which has the same error.
func (f *File) For(d Device) ([]policy.Table, error) {
	s, err := f.section(d.Name)
	if s == nil || err != nil {
		return nil, err
	}
	var tables []policy.Table
	for _, t := range s.tables {
		if len(t.rules) == 0 {
			continue
		}
		rules := make([]policy.Rule, len(t.rules))
		for i := range t.rules {
			rules[i] = t.rules[i].on(d)
		}
		tables = append(tables, policy.Table{Device: d.Name, Direction: t.direction, Match: t.match, Rules: rules})
	}
	policy.SortTables(tables)
	return tables, nil
}

// section is what the file says of a device; nil if nothing.
func (f *File) section(device string) (*section, error) {
	if s := f.exactly[device]; s != nil {
		return s, nil
	}
	var found *section
	for i := range f.devices {
		s := &f.devices[i]
		if !s.pattern || !Matches(s.key, device) {
			continue
		}
		if found != nil {
			return nil, f.errorAt(s.span.key, fmt.Sprintf(
				"device %s is matched by %s here and by %s in line %d; narrow one of them down, or give the device a section of its own",
				device, s.key, found.key, f.line(found.span.key)))
		}
		found = s
	}
	return found, nil
}

func (f *File) errorAt(offset uint32, message string) Errors {
	return f.errors([]problem{{offset, message}})
}

// Matches reports whether a pattern that CheckDevice accepts matches the name of a device.
func Matches(pattern, device string) bool {
	ok, _ := path.Match(pattern, device)
	return ok
}

// name is the device of a section that is not a pattern.
func (s *section) name() string { return Unescape(s.key) }

var (
	escaped = regexp.MustCompile(`(?s)\\(.)`)
	special = regexp.MustCompile(`[*?[\\]`)
)

// IsPattern reports whether any of the key stands for more than itself.
func IsPattern(key string) bool {
	return strings.ContainsAny(escaped.ReplaceAllString(key, ""), "*?[")
}

// escape is the key of a section of just this device.
func escape(device string) string { return special.ReplaceAllString(device, `\$0`) }

// Unescape is the device that a key names which is no pattern.
func Unescape(key string) string { return escaped.ReplaceAllString(key, "$1") }
