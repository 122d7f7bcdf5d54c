package policyfile

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Write writes a policy file of which Parse and File.Tables make these tables again,
// with rules in their order. Rules must be valid, and as policy.Limit.Rule makes them.
// Plans are made of the rules that follow them: rules that differ from most of the
// others say how. A direction of a device has one table only. The error is a LeftOutError
// if all but some devices were written.
func Write(w io.Writer, tables []policy.Table) error {
	pools, of, err := byDevice(tables)
	if err == nil {
		err = policy.CheckPools(tables)
	}
	if err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	pools, hosts := foldHosts(pools, of)
	var left LeftOutError
	keys := map[string]string{}
	for _, device := range slices.Sorted(maps.Keys(of)) {
		if keys[device], err = DeviceKey(device); err != nil {
			left = append(left, err.Error())
			delete(of, device)
		}
	}
	out := bufio.NewWriter(w)
	plans := plansOf(of)
	spell := &speller{plans, map[policy.Rule]spelling{}}
	if len(plans) > 0 {
		fmt.Fprintln(out, "plans:")
	}
	for _, p := range slices.SortedFunc(maps.Values(plans), func(a, b *plan) int { return cmp.Compare(a.key, b.key) }) {
		fmt.Fprintf(out, "  %s: %s\n", word(p.key), p.value())
	}
	if len(pools) > 0 {
		fmt.Fprintln(out, "pools:")
	}
	for _, r := range pools {
		name := word(r.Label.Name)
		r.Label.Name = ""
		fmt.Fprintf(out, "  %s: %s\n", name, spell.value(&r))
	}
	if len(of) == 0 {
		fmt.Fprintln(out, "devices: {}")
	} else {
		fmt.Fprintln(out, "devices:")
	}
	for _, device := range slices.Sorted(maps.Keys(of)) {
		fmt.Fprintf(out, "  %s:\n", keys[device])
		for _, t := range of[device] {
			fmt.Fprintf(out, "    %v:\n", t.Direction)
			if t.Match != t.Direction.FarSide() {
				fmt.Fprintf(out, "      match: %v\n", t.Match)
			}
			for i := range t.Rules {
				r := &t.Rules[i]
				fmt.Fprintf(out, "      %s: %s\n", networkKey(r.Prefix), spell.value(r))
			}
			for _, h := range hosts[side{device, t.Direction}] {
				fmt.Fprintf(out, "      %v: %s\n", h.mac, h.value(spell))
			}
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	if left != nil {
		return left
	}
	return nil
}

// A LeftOutError is why a policy was written without some devices: a text for each.
type LeftOutError []string

func (e LeftOutError) Error() string { return strings.Join(e, "; ") }

// byDevice returns the pools by name, and the tables of each device that have rules, in the order of
// policy.SortTables. The error is for a rule that is not valid.
func byDevice(tables []policy.Table) (pools []policy.Rule, of map[string][]policy.Table, err error) {
	of = map[string][]policy.Table{}
	for _, t := range tables {
		same := func(other policy.Table) bool { return other.Direction == t.Direction }
		if slices.ContainsFunc(of[t.Device], same) {
			return nil, nil, fmt.Errorf("%s %v has two tables", t.Device, t.Direction)
		}
		for i := range t.Rules {
			r := &t.Rules[i]
			if err := r.Validate(); err != nil && r.Pool {
				return nil, nil, fmt.Errorf("pool %q: %w", r.Label.Name, err)
			} else if err != nil {
				return nil, nil, fmt.Errorf("%s %v %v: %w", t.Device, t.Direction, policy.CIDR(r.Prefix), err)
			}
		}
		if t.IsPools() {
			pools = slices.Clone(t.Rules)
			slices.SortFunc(pools, func(a, b policy.Rule) int { return cmp.Compare(a.Label.Name, b.Label.Name) })
		} else if len(t.Rules) > 0 {
			of[t.Device] = append(of[t.Device], t)
		}
	}
	for _, tables := range of {
		policy.SortTables(tables)
	}
	return pools, of, nil
}

// DeviceKey returns the key of a section for exactly this device, in lines or braces.
func DeviceKey(device string) (string, error) {
	if !utf8.ValidString(device) {
		return "", fmt.Errorf("the name of device %q is not UTF-8, which a policy file must be; rename it", device)
	}
	if policy.IsCgroup(device) {
		return word(device), CheckDevice(device)
	}
	if !possible(device) {
		return "", fmt.Errorf("device %q is not a valid device name", device)
	}
	return word(escape(device)), nil
}

// networkKey returns a network as a key: an address alone, unless it ends in a colon, which
// YAML would read as the end of the key.
func networkKey(p netip.Prefix) string {
	if s := policy.NetworkText(p); p.IsSingleIP() && !strings.HasSuffix(s, ":") {
		return s
	}
	return p.String()
}

// A speller writes rules and pools. It remembers values, because most rules have the value of another one.
type speller struct {
	plans map[string]*plan // by how they are shown
	known map[policy.Rule]spelling
}

// A spelling is the value of rules that differ only in network and ownOptions.
type spelling struct {
	short      string   // the value without ownOptions, if it needs no braces
	parts      []string // those of the value in braces; withinPart where the pool is
	name, note string   // of rules that do not set one
}

const withinPart = "within: "

// value returns the shortest value in YAML that makes r.
func (s *speller) value(r *policy.Rule) string {
	key := *r // only family and length of its network matter
	if wide, _ := r.Prefix.Addr().Prefix(0); !policy.IsMark(r.Prefix) {
		key.Prefix = netip.PrefixFrom(wide.Addr(), r.Prefix.Bits())
	}
	key.Label.Name, key.Label.Note = "", ""
	if r.Within != "" {
		key.Within = "any"
	}
	common, ok := s.known[key]
	if !ok {
		if common = s.spell(key); len(s.known) < maxKnown {
			s.known[key] = common
		}
	}
	if r.Label.Name == common.name && r.Label.Note == common.note && common.short != "" {
		return common.short
	}
	parts := slices.Clone(common.parts)
	if i := slices.Index(parts, withinPart); i >= 0 {
		parts[i] += word(string(r.Within))
	}
	if r.Label.Name != common.name {
		parts = append(parts, "name: "+word(r.Label.Name))
	}
	if r.Label.Note != common.note {
		parts = append(parts, "note: "+word(r.Label.Note))
	}
	return "{" + strings.Join(parts, ", ") + "}"
}

// spell returns the spelling of a rule without name and note.
func (s *speller) spell(r policy.Rule) (out spelling) {
	p := s.plans[r.Label.Plan]
	d := missing(p, &r)
	for _, key := range labelKeys {
		d.Drop(policy.FindOption(key))
	}
	given := d.Given()
	if p != nil {
		out.parts = []string{"plan: " + word(p.key)}
	}
	for _, o := range given {
		if part := o.Name + ": "; part == withinPart && r.Within != "" {
			out.parts = append(out.parts, part)
		} else {
			out.parts = append(out.parts, part+value(o, &d))
		}
	}
	switch {
	case p != nil:
		out.name, out.note = string(p.Name), string(p.Note)
		if len(given) == 0 {
			out.short = word(p.key)
		}
	case len(given) == 1 && given[0].Name == "rate":
		out.short = value(given[0], &d)
	}
	return out
}

// missing returns what r needs beside a plan, nil for none.
func missing(p *plan, r *policy.Rule) policy.Draft {
	if p == nil {
		return policy.Draft{}.Missing(r)
	}
	d := p.Missing(r)
	made, err := (&parcel{Draft: d, plan: p}).draft(policy.Draft{}).Rule(r.Prefix)
	if made.Label.Plan = r.Label.Plan; err == nil && made == *r {
		return d
	}
	// The plan has options that have no use with these defaults. This is an error unless
	// the rule sets the options that decide.
	for _, o := range policy.Options {
		idle := func(of *policy.Option) bool { return of.DependsOn(o.Name) && !of.Useful(r) }
		if !o.Decides || d.Has(o) || o.Name != "rate" && !slices.ContainsFunc(p.Given(), idle) || r.Rate == policy.Unlimited && o.LimitedOnly {
			continue
		}
		if err := d.Give(o, o.Text(r)); err != nil {
			panic(err) // the rule is valid
		}
	}
	return d
}

func inBraces(d *policy.Draft) string {
	var entries []string
	for _, o := range d.Given() {
		entries = append(entries, o.Name+": "+value(o, d))
	}
	return strings.Join(entries, ", ")
}

// word returns a text as a value in YAML, in quotes if it needs them.
func word(s string) string {
	isWord := func(c rune) bool { return unicode.IsLetter(c) || unicode.IsDigit(c) }
	first, _ := utf8.DecodeRuneInString(s)
	if !isWord(first) || strings.HasSuffix(s, " ") || strings.EqualFold(s, "null") ||
		strings.ContainsFunc(s, func(c rune) bool { return !isWord(c) && !strings.ContainsRune(" -_./@+", c) }) {
		return strconv.Quote(s) // YAML has the escapes of Go
	}
	return s
}
