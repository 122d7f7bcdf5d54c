// Package importer converts the limits of other tools to tables of rules. It lists
// everything that it does not carry over: what it is, where it was, why, and what to do.
// It reads traffic control, and changes nothing.
package importer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Imported is the result of an import.
type Imported struct {
	Tables []policy.Table // sorted, the pools first; each rule is valid
	Left   []Left         // what was not carried over: by effect, then in the order of the source
	Notes  []string       // general differences from the other tool

	origins map[place]*origin
}

// Left is something that was not carried over, or was changed.
type Left struct {
	reason
	Where string `json:"where"` // a line, a handle
	What  string `json:"what"`
}

// reason is what all things of a kind have in common.
type reason struct {
	effect
	Kind   string `json:"kind"`
	Why    string `json:"why"`
	Advice string `json:"advice"`
}

// effect is what a reason does to the limits of the source. The most important one is first.
type effect int

const (
	unblocks effect = iota // a network has no limit that may have to be blocked, or of which nothing is known
	loosens                // a network has a higher limit, or none
	lowers                 // a network has less than the source says
	other
)

// A place is where a rule is.
type place struct {
	tableKey
	prefix netip.Prefix
}

// Rules returns the number of rules, and Pools that of pools.
func (i Imported) Rules() int { return i.count(false) }
func (i Imported) Pools() int { return i.count(true) }

func (i Imported) count(pools bool) (n int) {
	for _, t := range i.Tables {
		if t.IsPools() == pools {
			n += len(t.Rules)
		}
	}
	return n
}

// Lines describes what is left, in one line for each reason: in the order of Left. If there are many places,
// a line counts them and has one; it has all places where a network may have to be blocked.
func (i Imported) Lines() (lines []string) {
	const few = 3
	var reasons []reason
	of := map[reason][]Left{}
	for _, l := range i.Left {
		if of[l.reason] == nil {
			reasons = append(reasons, l.reason)
		}
		of[l.reason] = append(of[l.reason], l)
	}
	for _, r := range reasons {
		var places []string
		for _, l := range of[r] {
			places = append(places, l.Where+" ("+l.What+")")
		}
		where := strings.Join(places, ", ")
		switch n := len(places); {
		case n <= few || r.effect == unblocks:
		case r.effect == lowers: // first those who lose most
			where = fmt.Sprintf("%d places, such as %s", n, strings.Join(places[:few], ", "))
		default:
			where = fmt.Sprintf("%d places, such as %s", n, places[0])
		}
		lines = append(lines, fmt.Sprintf("%s in %s: %s; %s", r.Kind, where, r.Why, r.Advice))
	}
	return lines
}

// collector collects rules and what is left. Of tools that apply limits in order, it collects entries first.
type collector struct {
	Imported
	entries []entry
	tables  map[tableKey]*policy.Table
	left    map[Left]bool
	err     error // why the source cannot be read
}

// An origin is where a rule or pool comes from.
type origin struct {
	where string
	who   string // whose it is, for reports
	kept  bool   // its guarantee is not lowered
}

type tableKey struct {
	device    string
	direction policy.Direction
}

func newCollector() *collector {
	return &collector{Imported: Imported{origins: map[place]*origin{}}, tables: map[tableKey]*policy.Table{}, left: map[Left]bool{}}
}

// fail keeps the first reason why the source cannot be read.
func (c *collector) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *collector) leave(r reason, where, format string, args ...any) {
	l := Left{r, where, clean(fmt.Sprintf(format, args...))}
	if !c.left[l] {
		c.left[l] = true
		c.Left = append(c.Left, l)
	}
}

func (c *collector) note(s string) {
	if !slices.Contains(c.Notes, s) {
		c.Notes = append(c.Notes, s)
	}
}

// byHand is an advice.
const byHand = "no rule was made; write one by hand if you need it"

var (
	raised = reason{other, "small burst", "a bucket must hold a full packet",
		fmt.Sprintf("it was raised to %d bytes", policy.MinCapacity)}
	outside = reason{loosens, "rate out of range", fmt.Sprintf("rates are %v to %v", policy.MinRate, policy.MaxRate),
		"no rule was made; write one with a rate in that range"}
	refused  = reason{loosens, "limit that no rule can have", "the rule would not be valid", byHand}
	longText = reason{other, "long text", fmt.Sprintf("a name has at most %d bytes, a note %d", policy.MaxName, policy.MaxNote), "it was cut; shorten it"}
	narrower = reason{loosens, "limit with more conditions than an address", "a rule matches one address of a packet and nothing else",
		byHand}
	inPackets = reason{loosens, "limit in packets", "rules count bytes, not packets", byHand}
	twice     = reason{other, "duplicate network", "a network of a device and direction has one rule",
		"the first one was kept; remove the wrong one"}
)

// add adds a rule. It leaves out a rule that is not valid, or whose network has one
// already, and reports whether it added the rule. All rules of a table must have the same
// match.
func (c *collector) add(key tableKey, m policy.Match, r policy.Rule, where string) bool {
	at, of := place{key, r.Prefix}, policy.NetworkText(r.Prefix)
	if r.Pool {
		of = strconv.Quote(r.Label.Name)
	}
	if r.Rate != policy.Unlimited && r.Capacity < policy.MinCapacity {
		c.leave(raised, where, "%d bytes for %s", r.Capacity, of)
		r.Capacity = policy.MinCapacity
	}
	if err := r.Validate(); err != nil {
		c.leave(refused, where, "%v", err)
		return false
	}
	if c.taken(at, where) {
		return false
	}
	t := c.tables[key]
	if t == nil {
		t = &policy.Table{Device: key.device, Direction: key.direction, Match: m}
		c.tables[key] = t
	}
	t.Rules = append(t.Rules, r)
	c.origins[at] = &origin{where: where, who: of}
	return true
}

// taken reports whether a network has a rule already, and lists it then.
func (c *collector) taken(at place, where string) bool {
	first, found := c.origins[at]
	if found {
		c.leave(twice, where, "%s %s %s was in %s", at.device, at.direction, policy.NetworkText(at.prefix), first.where)
	}
	return found
}

func (c *collector) imported() Imported {
	c.balance()
	i := c.Imported
	for _, t := range c.tables {
		i.Tables = append(i.Tables, *t)
	}
	policy.SortTables(i.Tables)
	sort.SliceStable(i.Left, func(a, b int) bool { return i.Left[a].effect < i.Left[b].effect })
	return i
}

// fit cuts a text of the source that is too long, and lists it.
func (c *collector) fit(where, text string, most int) string {
	text = oneLine(text)
	if len(text) > most {
		c.leave(longText, where, "%.60q", text)
	}
	return cut(text, most)
}

// cut returns the first whole characters of a text.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for !utf8.RuneStart(text[most]) {
		most--
	}
	return strings.TrimRightFunc(text[:most], unicode.IsSpace)
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

// misread returns an error of type policyfile.Errors, which is about what ends at an offset of a text.
func misread(file string, text []byte, end int64, format string, args ...any) error {
	before := text[:max(0, min(end, int64(len(text))))]
	start := bytes.LastIndexByte(before, '\n') + 1
	line, column := 1+bytes.Count(before, []byte("\n")), utf8.RuneCount(before[start:])
	return policyfile.Errors{{File: file, Line: line, Column: max(1, column), Message: fmt.Sprintf(format, args...)}}
}

// readJSON reads a text, which has one value, and returns the offset of its end. The error is of type policyfile.Errors.
func readJSON(file string, text []byte, value any, advice string) (end int64, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	err = d.Decode(value)
	end = d.InputOffset()
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		return end, misread(file, text, syntax.Offset, "this is not JSON: %v; %s", err, advice)
	}
	if kind, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return end, misread(file, text, kind.Offset, "there is a %s where none can be; %s", kind.Value, advice)
	}
	if err != nil {
		return end, misread(file, text, int64(len(text)), "the text ends within an object; is the file cut off?")
	}
	if _, err := d.Token(); err != io.EOF {
		return end, misread(file, text, d.InputOffset(), "something follows the object; remove it")
	}
	return end, nil
}
