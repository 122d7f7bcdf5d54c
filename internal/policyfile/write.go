package policyfile

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v4"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Write writes a policy file of which Parse and File.Tables make these tables
// again, with rules in their order: valid ones, as policy.Limit.Rule makes them. A
// comment, if there is such a function and it has one, ends the line of its rule. A
// direction of a device has one table only.
func Write(w io.Writer, tables []policy.Table, comment func(device string, d policy.Direction, p netip.Prefix) string) error {
	of, err := byDevice(tables)
	if err != nil {
		return err
	}
	out := bufio.NewWriter(w)
	if len(of) == 0 {
		fmt.Fprintln(out, "devices: {}")
	} else {
		fmt.Fprintln(out, "devices:")
	}
	for _, device := range slices.Sorted(maps.Keys(of)) {
		key, err := deviceKey(device)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "  %s:\n", key)
		for _, t := range of[device] {
			fmt.Fprintf(out, "    %v:\n", t.Direction)
			if t.Match != t.Direction.FarSide() {
				fmt.Fprintf(out, "      match: %v\n", t.Match)
			}
			spell := speller(policy.Limit{}, 0)
			for i := range t.Rules {
				r := &t.Rules[i]
				fmt.Fprintf(out, "      %s: %s", networkKey(r.Prefix), spell(r))
				if comment != nil {
					if text := harmless(comment(device, t.Direction, r.Prefix)); text != "" {
						fmt.Fprintf(out, "  # %s", text)
					}
				}
				out.WriteByte('\n')
			}
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	return nil
}

// byDevice is the tables of each device that have rules, all of them valid, in the
// order of policy.SortTables.
func byDevice(tables []policy.Table) (map[string][]policy.Table, error) {
	of := map[string][]policy.Table{}
	for _, t := range tables {
		same := func(other policy.Table) bool { return other.Direction == t.Direction }
		if slices.ContainsFunc(of[t.Device], same) {
			return nil, fmt.Errorf("write a policy: %s %v has two tables", t.Device, t.Direction)
		}
		for i := range t.Rules {
			if err := t.Rules[i].Validate(); err != nil {
				return nil, fmt.Errorf("write a policy: %s %v %v: %w", t.Device, t.Direction, t.Rules[i].Prefix, err)
			}
		}
		if len(t.Rules) > 0 {
			of[t.Device] = append(of[t.Device], t)
		}
	}
	for _, tables := range of {
		policy.SortTables(tables)
	}
	return of, nil
}

// deviceKey is the key of a section of just this device, also inside of braces.
func deviceKey(device string) (string, error) {
	if !utf8.ValidString(device) {
		return "", fmt.Errorf("write a policy: the name of device %q is not UTF-8, as a file has to be; rename it", device)
	}
	if !possible(device) {
		return "", fmt.Errorf("write a policy: device %q is not a name that a device can have", device)
	}
	if plain.Line(device) != device {
		return strconv.Quote(escape(device)), nil // YAML has the escapes of Go
	}
	name := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: escape(device)}
	key, err := yaml.Dump(&yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle, Content: []*yaml.Node{name}})
	if err != nil {
		return "", fmt.Errorf("write a policy: device %q: %w", device, err)
	}
	return strings.TrimSuffix(strings.TrimPrefix(string(key), "["), "]\n"), nil
}

// networkKey is an address where it is one, unless it ends in a colon as keys do.
func networkKey(p netip.Prefix) string {
	if s := p.Addr().String(); p.IsSingleIP() && !strings.HasSuffix(s, ":") {
		return s
	}
	return p.String()
}

// harmless is a text that fits behind # in a line.
func harmless(comment string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(comment, " "), func(c rune) bool {
		return unicode.IsSpace(c) || !unicode.IsGraphic(c)
	}), " ")
}

// spell is a value that makes r of defaults on a device whose frames have l2Bytes
// of link header, as short as it can be.
func spell(usual policy.Limit, r *policy.Rule, l2Bytes uint8) string {
	parts := needed(usualAt(r.Rate, usual), r, l2Bytes)
	if len(parts) == 1 && parts[0].key == "rate" {
		return parts[0].text
	}
	return "{" + inBraces(freshParts(parts)) + "}"
}

// speller is spell for many rules, most of which say what others do.
func speller(usual policy.Limit, l2Bytes uint8) func(*policy.Rule) string {
	known := map[policy.Rule]string{}
	return func(r *policy.Rule) string {
		key := *r // but for its network, of which spell takes the family and the length
		wide, _ := r.Prefix.Addr().Prefix(0)
		key.Prefix = netip.PrefixFrom(wide.Addr(), r.Prefix.Bits())
		text, ok := known[key]
		if !ok {
			if text = spell(usual, r, l2Bytes); len(known) < maxKnown {
				known[key] = text
			}
		}
		return text
	}
}

// needed is the parts that make r of a limit, which is usual at its rate.
func needed(usual policy.Limit, r *policy.Rule, l2Bytes uint8) []part {
	parts := differing(usual, r, l2Bytes)
	switch s, ok := proposed(r); {
	case ok && !sameShadow(usual.Shadow, &s, l2Bytes):
		own := freshParts(differing(policy.Limit{}, &s, l2Bytes))
		parts = append(parts, part{key: "shadow", text: "{" + inBraces(own) + "}"})
	case !ok && usual.Shadow != nil:
		parts = append(parts, part{key: "shadow", text: noShadow})
	}
	return parts
}

// proposed is what a shadow makes a rule, but for the algorithm, which it does not say.
func proposed(r *policy.Rule) (policy.Rule, bool) {
	s, ok := r.Proposed()
	s.Algorithm = policy.GCRA
	return s, ok
}

// sameShadow says whether a shadow that a limit may have is the one proposed.
func sameShadow(l *policy.Limit, proposed *policy.Rule, l2Bytes uint8) bool {
	return l != nil && len(differing(*l, proposed, l2Bytes)) == 0
}

// decide are the options on which the defaults and the use of others depend.
var decide = []string{"rate", "algorithm", "each", "excess"}

// differing is the parts but the shadow that make r of a limit.
func differing(l policy.Limit, r *policy.Rule, l2Bytes uint8) (parts []part) {
	said := policy.Rule{Rate: l.Rate, Algorithm: l.Algorithm, Each: l.Each.Canonical(r.Prefix), Excess: l.Excess}
	made := madeOf(l, r, l2Bytes)
	for _, o := range policy.Options {
		same, decides := o.Same(&made, r), slices.Contains(decide, o.Name)
		switch {
		case decides:
			same = o.Same(&said, r)
		case o.Name == "overhead" && l.Overhead != "": // a keyword may say an mpu, too
			same = made.Framing == r.Framing
		}
		if same {
			continue
		}
		p := part{key: o.Name, text: o.Text(r)}
		parts = append(parts, p)
		if !decides { // the default of one option may come from another
			l = over(l, []part{p})
			made = madeOf(l, r, l2Bytes)
		}
	}
	return parts
}

// madeOf is the rule that a limit makes which decides as r does. What the limit says that is none of such a rule's is not r's.
func madeOf(l policy.Limit, r *policy.Rule, l2Bytes uint8) policy.Rule {
	l.Rate, l.Algorithm, l.Each, l.Excess, l.Shadow = r.Rate, r.Algorithm, r.Each, r.Excess, nil
	dropIdle(&l, r)
	made, err := l.Resolve(r.Prefix, l2Bytes)
	if err != nil { // more than there can be, at this rate
		made.Capacity, made.Queue, made.ECNAbove = 0, 0, 0
	}
	return made
}
