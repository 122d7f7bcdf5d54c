// Package importer converts the limits of other tools to tables of rules. It lists
// everything that it does not carry over: what it is, where it was, why, and what to do.
// It reads traffic control, and changes nothing.
package importer

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Imported is the result of an import.
type Imported struct {
	Tables []policy.Table // sorted, as are their rules; each rule is valid
	Left   []Left         // what was not carried over, in the order of the source
	Notes  []string       // general differences from the other tool

	origins map[place]origin
}

// Left is something that was not carried over, or was changed.
type Left struct {
	Kind   string // all of a kind have the same Why and Advice
	Where  string // a line, a handle
	What   string
	Why    string
	Advice string
}

// A place is where a rule is.
type place struct {
	tableKey
	prefix netip.Prefix
}

// Comment is where the source has a rule, in one line; "" if its name or note tells.
func (i Imported) Comment(device string, d policy.Direction, p netip.Prefix) string {
	return i.origins[place{tableKey{device, d}, p}].comment
}

// Rules returns the number of rules.
func (i Imported) Rules() (n int) {
	for _, t := range i.Tables {
		n += len(t.Rules)
	}
	return n
}

// examples is the number of things of a kind that a line lists.
const examples = 3

// Lines describes what is left, in one line for each kind: first what gives subscribers more than they have in the
// source, then in the order of the source.
func (i Imported) Lines() (lines []string) {
	var order []Left
	kinds := map[Left][]string{}
	for _, l := range i.Left {
		kind := Left{Kind: l.Kind, Why: l.Why, Advice: l.Advice}
		if kinds[kind] == nil {
			order = append(order, kind)
		}
		kinds[kind] = append(kinds[kind], l.Where+" ("+l.What+")")
	}
	slices.SortStableFunc(order, func(a, b Left) int {
		last := func(l Left) int {
			if l.Kind == shared.kind || l.Kind == noRate.kind {
				return 0
			}
			return 1
		}
		return last(a) - last(b)
	})
	for _, kind := range order {
		named := kinds[kind]
		if n := len(named) - examples; n > 0 {
			named = append(named[:examples], fmt.Sprintf("%d more", n))
		}
		lines = append(lines, fmt.Sprintf("%s: %s: %s; %s", kind.Kind, list(named), kind.Why, kind.Advice))
	}
	return lines
}

// reason is what all things of a kind have in common.
type reason struct{ kind, why, advice string }

// collector collects rules and what is left.
type collector struct {
	Imported
	tables map[tableKey]*policy.Table
	cut    map[string]bool // names and notes that were reported as too long
}

// An origin is where a rule comes from.
type origin struct{ where, comment string }

type tableKey struct {
	device    string
	direction policy.Direction
}

func newCollector() *collector {
	return &collector{Imported{origins: map[place]origin{}}, map[tableKey]*policy.Table{}, map[string]bool{}}
}

func (c *collector) leave(r reason, where, format string, args ...any) {
	c.Left = append(c.Left, Left{r.kind, where, clean(fmt.Sprintf(format, args...)), r.why, r.advice})
}

// note adds a note once.
func (c *collector) note(s string) {
	if !slices.Contains(c.Notes, s) {
		c.Notes = append(c.Notes, s)
	}
}

var (
	raised = reason{"small burst", "a bucket must hold a full packet",
		fmt.Sprintf("it was raised to %d bytes", policy.MinCapacity)}
	lowered = reason{"large burst", "a bucket holds at most 1024gb", "it was lowered to that"}
	outside = reason{"rate out of range", fmt.Sprintf("rates are %v to %v", policy.MinRate, policy.MaxRate),
		"no rule was made; write one with a rate in that range"}
	refused  = reason{"limit that no rule can have", "the rule would not be valid", "no rule was made; write one by hand"}
	longName = reason{"long name", fmt.Sprintf("a name has at most %d bytes", policy.MaxName), "it was cut"}
	longNote = reason{"long note", fmt.Sprintf("a note has at most %d bytes", policy.MaxNote), "it was cut"}
	twice    = reason{"duplicate network", "a network of a device and direction has one rule",
		"the first one was kept; remove the wrong one"}
)

// add adds a rule. It leaves out a rule that is not valid, or whose network has one
// already, and reports whether it added the rule. All rules of a table must have the same
// match.
func (c *collector) add(key tableKey, m policy.Match, r policy.Rule, where, comment string) bool {
	at := place{key, r.Prefix}
	if r.Rate != policy.Unlimited {
		switch {
		case r.Rate < policy.MinRate || r.Rate > policy.MaxRate:
			c.leave(outside, where, "%d bit/s for %s", uint64(r.Rate), name(r.Prefix))
			return false
		case r.Capacity < policy.MinCapacity:
			c.leave(raised, where, "%d bytes for %s", r.Capacity, name(r.Prefix))
			r.Capacity = policy.MinCapacity
		case r.Capacity > policy.MaxCapacity:
			c.leave(lowered, where, "%d bytes for %s", r.Capacity, name(r.Prefix))
			r.Capacity = policy.MaxCapacity
		}
	}
	if err := r.Validate(); err != nil {
		c.leave(refused, where, "%v", err)
		return false
	}
	if first, found := c.origins[at]; found {
		c.leave(twice, where, "%s %s %s was in %s", key.device, key.direction, name(r.Prefix), first.where)
		return false
	}
	t := c.tables[key]
	if t == nil {
		t = &policy.Table{Device: key.device, Direction: key.direction, Match: m}
		c.tables[key] = t
	}
	t.Rules = append(t.Rules, r)
	c.origins[at] = origin{where, clean(comment)}
	return true
}

func (c *collector) imported() Imported {
	i := c.Imported
	for _, t := range c.tables {
		policy.SortRules(t.Rules)
		i.Tables = append(i.Tables, *t)
	}
	policy.SortTables(i.Tables)
	return i
}

// name returns a network in the shortest form.
func name(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

// names lists the first networks of all.
func names(all []netip.Prefix) string {
	words := make([]string, len(all))
	for i, p := range all {
		words[i] = name(p)
	}
	return some(words)
}

// some lists the first words in a sentence, and the number of others.
func some(words []string) string {
	const room = 4
	if n := len(words); n > room {
		words = append(slices.Clone(words[:room-1]), fmt.Sprintf("%d more", n-room+1))
	}
	return list(words)
}

// list joins words in a sentence: "a, b and c".
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// label returns a label with texts of the source. It cuts texts that are too long, and
// lists them.
func (c *collector) label(where, name, note string) policy.Label {
	return policy.Label{Name: c.fit(where, name, policy.MaxName, longName), Note: c.fit(where, note, policy.MaxNote, longNote)}
}

func (c *collector) fit(where, text string, most int, r reason) string {
	text = oneLine(text)
	if len(text) <= most {
		return text
	}
	if key := r.kind + where + text; !c.cut[key] {
		c.cut[key] = true
		c.leave(r, where, "%.60q", text)
	}
	for !utf8.RuneStart(text[most]) {
		most--
	}
	return strings.TrimSpace(text[:most])
}

// oneLine replaces control characters, and characters that end a line in YAML, by spaces.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "\ufffd"), func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune("\u2028\u2029\ufeff", r)
	}), " ")
}

// clean returns a text of the source in one line, cut if it is too long to read.
func clean(s string) string {
	s = oneLine(s)
	const long = 200
	if runes := []rune(s); len(runes) > long {
		s = string(runes[:long]) + "..."
	}
	return s
}

// everything is the networks of all addresses.
var everything = policy.Everything[:]

// families returns the networks of all IPv4 addresses, all IPv6 addresses, or both.
func families(four, six bool) (all []netip.Prefix) {
	if four {
		all = append(all, everything[0])
	}
	if six {
		all = append(all, everything[1])
	}
	return all
}
