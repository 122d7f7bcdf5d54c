// Package policyfile parses and writes policy files: the rules of all devices of
// a network namespace, in YAML. It does no I/O except to the writers that callers pass.
//
//	plans:
//	  gold: {rate: 100mbit, name: Gold 100, note: sold until 2024}
//	pools:
//	  uplink: {rate: 1gbit, share: member}
//	devices:
//	  eth0:
//	    egress:
//	      any: 1gbit                                  # 0.0.0.0/0 and ::/0, each with its own bucket
//	      10.0.1.7: {plan: gold, name: alice, within: uplink}
//
// The name of a plan is shown instead of its key. The note of a plan is that of its rules
// without a note; a rule with an empty note has none. A device and a direction may have a name
// and a note, for their rules without one. Defaults have neither. Those of the file apply to pools, too, except what notOfPools lists.
//
// The key colours of a file is a default for colour-aware rules: the colours of DSCPs.
//
// A device and a direction may have a pool of their own, which their rules are within. It has the name of the device, or
// that of the direction, such as "tap0 egress". In the section of a pattern, each device has such a pool.
//
// The key of a rule may be a MAC address instead of a network. Such a host has a pool, such as "tap0 egress alice", and a
// rule within it for each address that a neighbour of the device has.
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

// A File is a parsed policy file. It is valid for all devices.
type File struct {
	source
	devices  []section
	exactly  map[string]*section // sections without a pattern, by device
	pools    map[string]*pool    // by name
	warnings Errors
}

// A section is the part of a file for one device, or for those that match a pattern.
type section struct {
	at      uint32 // the offset of its key
	key     string // as in the file
	pattern bool
	own     []*pool // the pools of the device and its directions; those of a pattern have its key in place of the device
	tables  []table
}

// A table is a policy.Table whose device is not known yet.
type table struct {
	direction policy.Direction
	match     policy.Match
	matchAt   uint32 // the offset of the key match, if it is there
	rules     []rule // in the order of policy.ComparePrefix
	hosts     []*host
}

type rule struct {
	at     uint32 // the offset of its key
	prefix netip.Prefix
	*made
}

// made is a rule or pool without its network or, if it is a pool, its name. Those with the same text share it. Those that differ
// only in ownOptions share the rule in it.
type made struct {
	rule       *policy.Rule
	name, note string
	within     policy.Within
}

// on returns the rule on a device.
func (r *rule) on(d Device) policy.Rule {
	out := r.rule.On(d.L2Bytes)
	out.Prefix, out.Label.Name, out.Label.Note, out.Within = r.prefix, r.name, r.note, r.within
	return out
}

// Device is a device that exists.
type Device struct {
	Name    string
	L2Bytes uint8 // length of the link header that each frame counts, 14 or 0
	// Neighbours are the addresses of its neighbours that File.MACs has, without an order.
	Neighbours map[policy.MAC][]netip.Addr
}

// Warnings lists small rates without a unit, and rules that never apply, because longer networks of the same direction
// cover all of theirs. These are not errors: a network may fill up one address at a time.
func (f *File) Warnings() Errors { return f.warnings }

// Tables returns the tables of the pools and devices, sorted and with sorted rules. Devices without a
// section and directions without rules have no table. See Absent for absent. The guarantees of devices that match patterns wait
// for room, as there may be any number of these. The error, of type Errors, lists devices that several patterns match, or what
// is wrong with pools.
func (f *File) Tables(devices []Device) (tables []policy.Table, absent []string, err error) {
	pools := f.Pools()
	var errs Errors
	for _, d := range devices {
		of, err := f.For(d)
		var own []policy.Rule
		if err == nil {
			own, err = f.OwnPools(d)
		}
		if err != nil {
			errs = append(errs, err.(Errors)...)
		}
		if !f.Names(d.Name) {
			all := policy.WithoutGuarantees(append(of, policy.Table{Rules: own}))
			of, own = all[:len(of)], all[len(of)].Rules
		}
		tables, pools.Rules = append(tables, of...), append(pools.Rules, own...)
	}
	if len(errs) > 0 {
		return nil, nil, errs
	}
	if len(pools.Rules) > 0 {
		policy.SortRules(pools.Rules)
		tables = append(tables, pools)
	}
	policy.SortTables(tables)
	if slices.ContainsFunc(f.devices, func(s section) bool { return s.pattern }) { // Parse has checked the others
		if problems := f.poolProblems(policy.NewTree(tables).Problems()...); len(problems) > 0 {
			return nil, nil, f.errors(problems)
		}
	}
	return tables, f.Absent(devices), nil
}

// Absent returns the devices that have a section of their own but are not in devices, in
// the file's order.
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

// Unmatched returns the patterns that match none of devices, in the file's order.
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

// Devices are the devices that the file names, and its patterns, in its order.
func (f *File) Devices() (keys []string) {
	for i := range f.devices {
		keys = append(keys, f.devices[i].key)
	}
	return keys
}

// Cgroups are the cgroups that the file names, sorted.
func (f *File) Cgroups() (names []string) {
	for name := range f.exactly {
		if policy.IsCgroup(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Names reports whether the policy has a section for just that device.
func (f *File) Names(device string) bool { return f.exactly[device] != nil }

// For returns the tables of one device, without those of pools. The error is for a device that several patterns match.
func (f *File) For(d Device) ([]policy.Table, error) {
	s, err := f.section(d.Name)
	if s == nil || err != nil {
		return nil, err
	}
	var tables []policy.Table
	for _, t := range s.tables {
		rules := make([]policy.Rule, len(t.rules))
		for i := range t.rules {
			rules[i] = t.rules[i].on(d)
			rules[i].Within = s.poolOn(rules[i].Within, d.Name)
		}
		if rules = s.addHosts(rules, &t, d); len(rules) > 0 {
			tables = append(tables, policy.Table{Device: d.Name, Direction: t.direction, Match: t.match, Rules: rules})
		}
	}
	policy.SortTables(tables)
	return tables, nil
}

// section returns the section of a device, or nil.
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
			return nil, f.errorAt(s.at, fmt.Sprintf(
				"device %s matches %s here and %s in %s; narrow one of the patterns, or give the device its own section",
				device, s.key, found.key, f.where(found.at)))
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

// name returns the device of a section that is not a pattern.
func (s *section) name() string { return Unescape(s.key) }

var (
	escaped = regexp.MustCompile(`(?s)\\(.)`)
	special = regexp.MustCompile(`[*?[\\]`)
)

// IsPattern reports whether the key has a wildcard that is not escaped.
func IsPattern(key string) bool {
	return strings.ContainsAny(escaped.ReplaceAllString(key, ""), "*?[")
}

// escape returns the key of a section for exactly this device.
func escape(device string) string { return special.ReplaceAllString(device, `\$0`) }

// Unescape returns the device of a key that is not a pattern.
func Unescape(key string) string {
	if policy.IsCgroup(key) { // has no pattern
		return key
	}
	return escaped.ReplaceAllString(key, "$1")
}
