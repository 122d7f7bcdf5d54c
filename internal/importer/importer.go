// Package importer converts the limits of other tools to tables of rules. It lists
// everything that it does not carry over: what it is, where it was, why, and what to do.
// It reads traffic control, and changes nothing.
package importer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
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
}

// Left is something that was not carried over, or was changed.
type Left struct {
	reason
	Where string // a line, a handle
	What  string
}

// reason is what all things of a kind have in common.
type reason struct {
	effect
	Kind, Why, Advice string
}

// effect is what a reason does to the limits of the source. The most important one is first.
type effect int

const (
	unblocks effect = iota // a network has no limit that may have to be blocked, or of which nothing is known
	loosens                // a network has a higher limit, or none
	lowers                 // a network has less than the source says
	other
)

func (e effect) String() string {
	return [...]string{"no limit", "higher limit or none", "less", "different"}[e]
}

// A place is where a rule is.
type place struct {
	tableKey
	prefix netip.Prefix
}

// Count returns the numbers of pools and rules.
func (i Imported) Count() (pools, rules int) {
	for _, t := range i.Tables {
		if t.IsPools() {
			pools += len(t.Rules)
		} else {
			rules += len(t.Rules)
		}
	}
	return pools, rules
}

// mostLines is how many lines Lines returns at most.
const mostLines = 8

// Lines describes what is left, in one line for each reason, in the order of Left: how much there is, the first places, and what
// to do.
func (i Imported) Lines() (lines []string) {
	var reasons []reason
	of := map[reason][]Left{}
	for _, l := range i.Left {
		if of[l.reason] == nil {
			reasons = append(reasons, l.reason)
		}
		of[l.reason] = append(of[l.reason], l)
	}
	for n, r := range reasons {
		if more := len(reasons) - n; len(lines) == mostLines-1 && more > 1 {
			return append(lines, fmt.Sprintf("%d other kinds", more))
		}
		all, shown, often := of[r], 1, ""
		if r.effect == unblocks {
			shown = 3 // customers
		}
		if len(all) > shown {
			often = fmt.Sprintf("%d times, such as ", len(all))
		}
		var places []string
		for _, l := range all[:min(shown, len(all))] {
			places = append(places, l.Where+" ("+l.What+")")
		}
		lines = append(lines, fmt.Sprintf("%v: %s, %s%s; %s", r.effect, r.Kind, often, strings.Join(places, ", "), r.Advice))
	}
	return lines
}

// collector collects rules and what is left. Of tools that apply limits in order, it collects entries first.
type collector struct {
	Imported
	entries []entry
	tables  map[tableKey]*policy.Table
	origins map[place]*origin
	left    map[Left]bool
	protect string // how guarantees are protected, as the end of an advice; "" if they cannot be
	err     error  // why the source cannot be read
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
	return &collector{tables: map[tableKey]*policy.Table{}, origins: map[place]*origin{}, left: map[Left]bool{}}
}

// fail keeps the first reason why the source cannot be read.
func (c *collector) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *collector) leave(r reason, where, format string, args ...any) {
	const most = 400
	l := Left{r, where, cut(oneLine(fmt.Sprintf(format, args...)), most)}
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
	if first := c.origins[at]; first != nil {
		c.leave(twice, where, "%s %s %s was in %s", at.device, at.direction, of, first.where)
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

func (c *collector) imported() Imported {
	c.balance()
	i := c.Imported
	for _, t := range c.tables {
		i.Tables = append(i.Tables, *t)
	}
	policy.SortTables(i.Tables)
	slices.SortStableFunc(i.Left, func(a, b Left) int { return cmp.Compare(a.effect, b.effect) })
	return i
}

// cut returns the first whole characters of a text.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.TrimRightFunc(strings.ToValidUTF8(text[:most], ""), unicode.IsSpace)
}

// oneLine replaces control characters, and characters that end a line in YAML, by spaces.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, "\ufffd"), func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r) || strings.ContainsRune("\u2028\u2029\ufeff", r)
	}), " ")
}

// readJSON reads a text with one value, whose numbers are json.Number. The error is of type policyfile.Errors.
func readJSON(file string, text []byte, advice string) (value any, err error) {
	text = bytes.TrimPrefix(text, []byte(byteOrderMark))
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	err = d.Decode(&value)
	at, why := int64(len(text)), "the text ends within an object; is the file cut off?"
	if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
		at, why = syntax.Offset, fmt.Sprintf("this is not JSON: %v; %s", err, advice)
	} else if err == nil {
		if _, err := d.Token(); err == io.EOF {
			return value, nil
		}
		at, why = d.InputOffset(), "something follows the object; remove it"
	}
	before := text[:at]
	line, column := 1+bytes.Count(before, []byte("\n")), utf8.RuneCount(before[bytes.LastIndexByte(before, '\n')+1:])
	return nil, policyfile.Errors{{File: file, Line: line, Column: max(1, column), Message: why}}
}
