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

// Write writes a policy file of which Parse and File.Tables make these tables again,
// with rules in their order. Rules must be valid, and as policy.Limit.Rule makes them.
// Plans are made of the rules that follow them: rules that differ from most of the
// others say how. A comment, if there is such a function and it returns one, ends the
// line of its rule. A direction of a device has one table only. The error is a LeftOutError
// if all but some devices were written.
func Write(w io.Writer, tables []policy.Table, comment func(device string, d policy.Direction, p netip.Prefix) string) error {
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
	for _, p := range sortedPlans(plans) {
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
				fmt.Fprintf(out, "      %s: %s", networkKey(r.Prefix), spell.value(r))
				if comment != nil {
					if text := harmless(comment(device, t.Direction, r.Prefix)); text != "" {
						fmt.Fprintf(out, "  # %s", text)
					}
				}
				out.WriteByte('\n')
			}
			for _, h := range hosts[side{device, t.Direction}] {
				fmt.Fprintf(out, "      %v: %s\n", h.mac, h.value(spell))
			}
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write a policy: %w", err)
	}
	return left.orNil()
}

// A LeftOutError is why a policy was written without some devices: a text for each.
type LeftOutError []string

func (e LeftOutError) Error() string { return strings.Join(e, "; ") }

func (e LeftOutError) orNil() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

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
				return nil, nil, fmt.Errorf("%s %v %v: %w", t.Device, t.Direction, r.Prefix, err)
			}
		}
		if t.IsPools() {
			pools = slices.SortedFunc(slices.Values(t.Rules), comparePools)
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
	if !possible(device) {
		return "", fmt.Errorf("device %q is not a valid device name", device)
	}
	if plain.Line(device) != device {
		return strconv.Quote(escape(device)), nil // YAML has the escapes of Go
	}
	name := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: escape(device)}
	key, err := yaml.Dump(&yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle, Content: []*yaml.Node{name}})
	if err != nil {
		return "", fmt.Errorf("device %q: %w", device, err)
	}
	return strings.TrimSuffix(strings.TrimPrefix(string(key), "["), "]\n"), nil
}

// networkKey returns a network as a key: an address alone, unless it ends in a colon, which
// YAML would read as the end of the key.
func networkKey(p netip.Prefix) string {
	if s := p.Addr().String(); p.IsSingleIP() && !strings.HasSuffix(s, ":") {
		return s
	}
	return p.String()
}

// harmless returns a text in one line, for a comment.
func harmless(comment string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(comment, " "), func(c rune) bool {
		return unicode.IsSpace(c) || !unicode.IsGraphic(c)
	}), " ")
}

// A speller writes rules and pools. It remembers values, because most rules have the value of another one.
type speller struct {
	plans map[string]*plan // by how they are shown
	known map[policy.Rule]spelling
}

// A spelling is the value of rules that differ only in network, name and note.
type spelling struct {
	short      string // the value without name and note, if it needs no braces
	parts      string // that value in braces, without the braces
	name, note string // of rules that do not set one
}

// value returns the shortest value in YAML that makes r.
func (s *speller) value(r *policy.Rule) string {
	wide, _ := r.Prefix.Addr().Prefix(0)
	key := *r // only family and length of its network matter
	key.Prefix, key.Label.Name, key.Label.Note = netip.PrefixFrom(wide.Addr(), r.Prefix.Bits()), "", ""
	common, ok := s.known[key]
	if !ok {
		if common = s.spell(key); len(s.known) < maxKnown {
			s.known[key] = common
		}
	}
	if r.Label.Name == common.name && r.Label.Note == common.note && common.short != "" {
		return common.short
	}
	parts := common.parts
	add := func(key, text string) {
		if parts != "" {
			parts += ", "
		}
		parts += key + ": " + word(text)
	}
	if r.Label.Name != common.name {
		add("name", r.Label.Name)
	}
	if r.Label.Note != common.note {
		add("note", r.Label.Note)
	}
	return "{" + parts + "}"
}

// spell returns the spelling of a rule without name and note.
func (s *speller) spell(r policy.Rule) (out spelling) {
	p := s.plans[r.Label.Plan]
	parts := missing(p, &r)
	if p != nil {
		parts = slices.Insert(parts, 0, part{key: "plan", text: p.key})
	}
	label := p.over(policy.Limit{})
	out.name, out.note = string(label.Name), string(label.Note)
	parts = slices.DeleteFunc(parts, func(p part) bool { return slices.Contains(labelKeys, p.key) })
	if len(parts) == 1 && (parts[0].key == "rate" || p != nil) {
		out.short = parts[0].value()
	}
	out.parts = inBraces(parts)
	return out
}

// missing returns the parts that r needs beside a plan, nil for none.
func missing(p *plan, r *policy.Rule) []part {
	parts := needed(usualAt(r.Rate, p.over(policy.Limit{})), r)
	if p == nil {
		return parts
	}
	made, err := new(limits).of(parcel{parts: parts, plan: p}, r.Prefix).Rule(r.Prefix)
	if made.Label.Plan = r.Label.Plan; err == nil && made == *r {
		return parts
	}
	// The plan has options that have no use with these defaults. This is an error unless
	// the rule sets the options that decide.
	for _, key := range decide {
		o := policy.FindOption(key)
		said := func(p part) bool { return p.key == key }
		idle := func(p part) bool { return depends(p.key, key) && !policy.FindOption(p.key).Useful(r) }
		if slices.ContainsFunc(parts, said) || key != "rate" && !slices.ContainsFunc(p.parts, idle) {
			continue
		}
		if text := o.Text(r); r.Rate != policy.Unlimited || !o.LimitedOnly {
			parts = append(parts, part{key: key, text: text})
		}
	}
	return parts
}

func inBraces(parts []part) string {
	var entries []string
	for _, p := range parts {
		entries = append(entries, p.key+": "+p.value())
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

// needed returns the parts that r needs beside the options of a limit.
func needed(usual policy.Limit, r *policy.Rule) []part {
	parts := differing(usual, r)
	switch s, ok := r.Proposed(); {
	case ok && !sameShadow(usual.Shadow, r):
		own := differing(policy.Limit{}.Inherit(r), &s)
		limit := over(policy.Limit{}, own)
		parts = append(parts, part{key: "shadow", text: "{" + inBraces(own) + "}", shadow: &limit})
	case !ok && usual.Shadow != nil:
		parts = append(parts, part{key: "shadow", text: noShadow})
	}
	return parts
}

// sameShadow reports whether the shadow of a limit, nil for none, makes the shadow of r.
func sameShadow(l *policy.Limit, r *policy.Rule) bool {
	if l == nil {
		return false
	}
	whole := l.Inherit(r)
	made, err := whole.Resolve(r.Prefix)
	made.Each = made.Each.Canonical(r.Prefix)
	return err == nil && policy.NewShadow(made) == r.Shadow
}

// decide lists the options on which the defaults and the use of others depend.
var decide = []string{"rate", "algorithm", "each", "excess", "within"}

// differing returns the parts that r needs beside a limit, except the shadow.
func differing(l policy.Limit, r *policy.Rule) (parts []part) {
	said := policy.Rule{Rate: l.Rate, Algorithm: l.Algorithm, Each: l.Each.Canonical(r.Prefix), Excess: l.Excess, Within: l.Within}
	if l.Rate == 0 && r.Within != "" {
		said.Rate = policy.Unlimited
	}
	made := madeOf(l, r)
	for _, o := range policy.Options {
		same, decides := o.Same(&made, r), slices.Contains(decide, o.Name)
		if decides {
			same = o.Same(&said, r) || !o.Useful(r)
		}
		if same {
			continue
		}
		p := part{key: o.Name, text: o.Text(r)}
		parts = append(parts, p)
		if !decides { // defaults of later options may depend on it
			l = over(l, []part{p})
			made = madeOf(l, r)
		}
	}
	return parts
}

// madeOf returns the rule of a limit with the deciding options of r. It drops options of
// the limit that have no use then.
func madeOf(l policy.Limit, r *policy.Rule) policy.Rule {
	l.Rate, l.Algorithm, l.Each, l.Excess, l.Within, l.Shadow = r.Rate, r.Algorithm, r.Each, r.Excess, r.Within, nil
	dropIdle(&l, r)
	made, err := l.Resolve(r.Prefix)
	if err != nil { // a value is too large at this rate
		made.Capacity, made.Queue, made.ECNAbove, made.Colours.PBS = 0, 0, 0, 0
	}
	return made
}
