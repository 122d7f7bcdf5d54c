package policyfile

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	shadowKeys   = keys(func(o *policy.Option) bool { return o.Shadow })
	defaultsKeys = keys(func(o *policy.Option) bool { return !o.Label && !o.PoolOnly && !o.Fact }, "shadow")
	labelKeys    = keys(func(o *policy.Option) bool { return o.Label })
	planKeys     = slices.Concat(defaultsKeys, labelKeys)
	poolKeys     = keys(func(o *policy.Option) bool { return !o.RuleOnly && o.Name != "name" }, "shadow")
	poolWithPlan = slices.Concat([]string{"plan"}, poolKeys)
	ruleKeys     = slices.Concat([]string{"plan"}, planKeys, keys(func(o *policy.Option) bool { return o.Fact && !o.PoolOnly }))
	hostKeys     = slices.Concat([]string{"plan", "line"}, planKeys)
)

// keys returns the names of some options, then others, then the aliases of the options.
func keys(of func(*policy.Option) bool, others ...string) (names []string) {
	var aliases []string
	for _, o := range policy.Options {
		if of(o) {
			names, aliases = append(names, o.Name), append(aliases, o.Aliases...)
		}
	}
	return slices.Concat(names, others, aliases)
}

// noShadow removes the shadow of defaults or a plan.
const noShadow = "none"

// noPool takes a rule out of the pool of defaults or a plan, and a pool out of its cluster.
const noPool = "none"

// A part is an option, or the shadow, with its value in a file.
type part struct {
	key    string // the option's name, or shadow; plan only where a rule is written
	text   string
	shadow *policy.Limit // the value of the key shadow; nil for none
	at     uint32        // the offset of the value
}

// value returns the value in YAML.
func (p part) value() string {
	switch {
	case (p.key == "within" || p.key == "cluster") && p.text == "":
		return noPool
	case p.key == "plan" || p.key == "within" || p.key == "cluster" || slices.Contains([]string{"host", "owner", "line"}, p.key) || slices.Contains(labelKeys, p.key):
		return word(p.text)
	case p.key == "colours":
		return "{" + colourEntries.Replace(p.text) + "}"
	}
	return p.text
}

// colourEntries turns policy.ColourMap.String into the entries of a mapping.
var colourEntries = strings.NewReplacer("=", ": ", ",", ", ")

func (p part) set(l *policy.Limit) error {
	if p.key == "shadow" {
		l.Shadow = p.shadow
		return nil
	}
	return l.Set(p.key, p.text)
}

// over returns a limit with parts set.
func over(l policy.Limit, parts []part) policy.Limit {
	for _, p := range parts {
		if err := p.set(&l); err != nil {
			panic(err) // the reader checked it
		}
	}
	return l
}

// A parcel is the parts of a rule, a plan or defaults.
type parcel struct {
	parts []part
	plan  *plan // of a rule; nil for none
	bad   bool  // it has an error that is reported already
}

// A plan is options that several rules and pools share. A rule that names the plan by its key has
// its options, and its note too if the rule has no note. The name of the plan is only
// shown, instead of the key, and becomes Label.Plan of its rules.
type plan struct {
	parcel
	key   string
	shown string // the name, or the key for none; two plans may have the same name
	at    uint32
}

// over returns a limit with the options of the plan, if it is not nil.
func (p *plan) over(l policy.Limit) policy.Limit {
	if p == nil {
		return l
	}
	return over(l, p.parts)
}

// usualAt returns the defaults for rules of a rate: without options that an unlimited rule
// cannot have, if it is that.
func usualAt(rate policy.Rate, usual policy.Limit) policy.Limit {
	if rate == policy.Unlimited {
		usual.Shadow = nil
		for _, o := range policy.Options {
			if o.LimitedOnly {
				o.Reset(&usual)
			}
		}
	}
	return usual
}

// limits makes the limits of a direction.
type limits struct {
	usual    policy.Limit
	defaults parcel
	known    map[ruleText]*made // most rules have the text of another one
}

// A ruleText is the text of a rule, and the properties of its network that matter.
type ruleText struct {
	text         string
	family, bits int
}

// maxKnown bounds the size of each cache.
const maxKnown = 1 << 16

// of returns the limit of a rule for a network.
func (l *limits) of(p parcel, prefix netip.Prefix) policy.Limit {
	var ofPlan []part
	if p.plan != nil {
		ofPlan = p.plan.parts
	}
	parts := slices.Concat(ofPlan, p.parts)
	limit := over(l.usual, parts)
	saysRate := slices.ContainsFunc(p.parts, func(p part) bool { return p.key == "rate" })
	unlimited := limit.Rate == policy.Unlimited || limit.Rate == 0 && limit.Within != ""
	switch {
	case unlimited && saysRate: // the rule keeps what it can of its plan
		limit = over(usualAt(policy.Unlimited, p.plan.over(l.usual)), p.parts)
	case unlimited:
		limit = over(usualAt(policy.Unlimited, l.usual), parts)
	}
	dropIdle(&limit, &policy.Rule{
		Prefix: prefix, Algorithm: limit.Algorithm, Each: limit.Each, Excess: limit.Excess, Penalty: limit.Penalty,
		Within: limit.Within, Guarantee: limit.Guarantee, Colours: policy.Colours{Aware: bool(limit.Colours.Aware)},
	})
	// A rule that overrides the plan's treatment of excess does not want its queue, and
	// one that overrides its pool does not want its guarantee.
	wanted := slices.DeleteFunc(slices.Clone(ofPlan), func(ofPlan part) bool {
		o := policy.FindOption(ofPlan.key) // nil for a shadow
		if unlimited && saysRate && (o == nil || o.LimitedOnly) {
			return true
		}
		return slices.ContainsFunc(p.parts, func(said part) bool { return depends(ofPlan.key, said.key) })
	})
	return over(limit, append(wanted, p.parts...))
}

// depends reports whether an option, or the shadow, has a use only with some values of another option.
func depends(key, on string) bool {
	o := policy.FindOption(key)
	return o != nil && o.DependsOn(on)
}

// dropIdle resets the options of a limit that have no use beside those of r.
func dropIdle(l *policy.Limit, r *policy.Rule) {
	for _, o := range policy.Options {
		if !o.Useful(r) {
			o.Reset(l)
		}
	}
}

// made returns the meaning of a rule, given its text without the label; nil if it is not
// valid.
func (r *reader) made(of *limits, prefix netip.Prefix, e *entry, text []byte) *made {
	family := prefix.Addr().BitLen()
	if known := of.known[ruleText{string(text), family, prefix.Bits()}]; known != nil {
		return known
	}
	faults := r.faults
	p := r.rule(&e.value)
	if r.faults > faults || of.defaults.bad {
		return nil
	}
	limit := of.of(p, prefix)
	rule, err := limit.Rule(prefix)
	if err != nil {
		r.blame(err, e.key.start, p, of.defaults)
		return nil
	}
	if p.plan != nil {
		rule.Label.Plan = p.plan.shown
	}
	out := &made{&rule, string(limit.Name), string(limit.Note)}
	if len(of.known) < maxKnown {
		of.known[ruleText{string(text), family, prefix.Bits()}] = out
	}
	return out
}

// labelled returns m with the name and note of a rule.
func (m *made) labelled(label []part) *made {
	if label == nil {
		return m
	}
	l := over(policy.Limit{Name: policy.Name(m.name), Note: policy.Note(m.note)}, label)
	return &made{m.rule, string(l.Name), string(l.Note)}
}

// cutLabel removes name and note from a rule, because they are different for most rules.
// The text is the rest of the rule, which many rules have in common.
func (r *reader) cutLabel(n *node) (text []byte, label []part) {
	isLabel := func(e entry) bool { return slices.Contains(labelKeys, e.key.text) }
	if !slices.ContainsFunc(n.entries, isLabel) {
		return r.text[n.start:n.end], nil
	}
	cut, at := node{kind: mapping, start: n.start}, n.start
	n.entries = slices.DeleteFunc(n.entries, func(e entry) bool {
		if isLabel(e) {
			cut.entries = append(cut.entries, e)
			text = append(text, r.text[at:e.key.start]...)
			at = e.value.end
		}
		return isLabel(e)
	})
	return append(text, r.text[at:max(at, n.end)]...), r.parts(&cut, "a rule", labelKeys).parts
}

// blame reports a rule that is not valid, at the option that the error begins with.
func (r *reader) blame(err error, key uint32, rule, defaults parcel) {
	message := err.Error()
	word, _, _ := strings.Cut(message, " ")
	word = strings.TrimSuffix(word, ":")
	named := func(p part) bool { return p.key == word }
	if i := slices.IndexFunc(rule.parts, named); i >= 0 {
		key = rule.parts[i].at
	} else if p := rule.plan; p != nil && slices.ContainsFunc(p.parts, named) {
		message += fmt.Sprintf(" (from plan %s, line %d)", p.key, r.line(p.at))
	} else if i := slices.IndexFunc(defaults.parts, named); i >= 0 {
		message += fmt.Sprintf(" (from defaults, line %d)", r.line(defaults.parts[i].at))
	}
	r.report(key, message)
}

func (r *reader) rule(n *node) parcel { return r.planned(n, "a rule", ruleKeys) }

// planned reads a value that is a rate, a plan, or a mapping whose keys must be among allowed.
func (r *reader) planned(n *node, what string, allowed []string) parcel {
	if n.kind == mapping {
		return r.parts(n, what, allowed)
	}
	text, ok := r.scalar(n, what, "a rate, unlimited, a plan, or options such as {rate: 10mbit, each: host}")
	switch {
	case !ok:
		return parcel{}
	case looksLikeRate(text):
		return parcel{parts: r.part("rate", n)}
	}
	return parcel{plan: r.plan(n, text)}
}

// looksLikeRate reports whether a text is meant as a rate rather than a plan.
func looksLikeRate(s string) bool {
	return strings.IndexFunc(s, unicode.IsLetter) != 0 || strings.EqualFold(s, policy.Unlimited.String())
}

// plan returns the plan of a name. If there is none, it reports that and returns nil.
func (r *reader) plan(n *node, name string) *plan {
	switch p := r.plans[name]; {
	case p != nil:
		if p.bad {
			r.faults++
		}
		return p
	case len(r.plans) == 0:
		r.errorf(n, "%q is not a rate, and the file has no plans; write a rate such as 10mbit, or unlimited", shorten(name))
	case len(r.problems) > 100*shown: // it is not shown, and there may be many plans
		r.errorf(n, "plan %q is unknown", shorten(name))
	default:
		names := slices.Sorted(maps.Keys(r.plans))
		r.errorf(n, "plan %q is unknown; %s", shorten(name), didYouMean(name, names))
	}
	return nil
}

// parts reads a mapping whose keys must be among allowed.
func (r *reader) parts(n *node, what string, allowed []string) (out parcel) {
	entries := r.entries(n, what, "rate: 10mbit")
	given := map[string]*node{}
	for i := range entries {
		key, value := &entries[i].key, &entries[i].value
		name := policy.LimitKey(key.text)
		if first := given[name]; first != nil {
			r.errorf(key, "%s appears twice, first in line %d as %s; remove one of them", name, r.line(first.start), first.text)
			continue
		}
		given[name] = key
		switch {
		case !slices.Contains(allowed, key.text):
			r.unknownPart(key, what, allowed)
		case name == "plan":
			if text, ok := r.scalar(value, "plan", "the name of one"); ok {
				out.plan = r.plan(value, text)
			}
		default:
			out.parts = append(out.parts, r.part(name, value)...)
		}
	}
	return out
}

func (r *reader) unknownPart(key *node, what string, allowed []string) {
	switch {
	case key.text == "plan":
		r.errorf(key, "%s cannot use a plan; write the options instead", what)
	case what == "a pool" && key.text == "name":
		r.errorf(key, "the key of a pool is its name; remove this one")
	case what == "a pool" && slices.Contains(ruleKeys, key.text):
		r.errorf(key, "%w", policy.NotInPool(policy.LimitKey(key.text)))
	case what == "defaults" && slices.Contains(labelKeys, key.text):
		r.errorf(key, "defaults cannot set a %s; write it in rules, or for a whole device or direction beside its defaults", key.text)
	case key.text == "match":
		r.errorf(key, "match applies to a whole direction; write it next to the networks")
	case slices.Contains(ruleKeys, key.text):
		r.errorf(key, "%s cannot have %s; remove it", what, policy.LimitKey(key.text))
	case slices.Contains(poolKeys, key.text):
		r.errorf(key, "%s cannot have %s; write it in a pool", what, key.text)
	default:
		r.errorf(key, "unknown key %q; %s", shorten(key.text), didYouMean(key.text, allowed))
	}
}

// part reads one part. It returns none if the value is not valid in any rule.
func (r *reader) part(name string, n *node) []part {
	switch {
	case name == "shadow":
		return r.shadow(n)
	case name == "colours" && n.kind == mapping:
		return r.colours(n)
	}
	example := "one word"
	if slices.Contains(labelKeys, name) {
		example = "text, in quotes if it has a colon or begins with a bracket"
	}
	text, ok := r.scalar(n, name, example)
	if !ok {
		return nil
	}
	p := part{key: name, text: text, at: n.start}
	var l policy.Limit
	if err := p.set(&l); err != nil {
		r.errorf(n, "%w", err)
		return nil
	}
	if note := policy.BareRate(text); note != "" && slices.Contains([]string{"rate", "pir", "eir", "guarantee"}, name) {
		r.warned = append(r.warned, problem{n.start, name + " " + note})
	}
	if l.Within != "" && !r.knowsPool(n, string(l.Within)) {
		return nil
	}
	return []part{p}
}

// colours reads a mapping from DSCPs to colours.
func (r *reader) colours(n *node) []part {
	faults := r.faults
	var all policy.ColourMap
	given := map[uint8]*node{}
	entries := r.entries(n, "colours", "{AF12: yellow, AF13: red}")
	for i := range entries {
		key, value := &entries[i].key, &entries[i].value
		dscp, err := policy.ParseDSCP(key.text)
		if err != nil {
			r.errorf(key, "%w", err)
			continue
		}
		if first := given[dscp]; first != nil {
			r.errorf(key, "DSCP %s appears twice, first in line %d; remove one of them", policy.DSCPName(dscp), r.line(first.start))
		}
		given[dscp] = key
		var c policy.Colour
		if text, ok := r.scalar(value, "a colour", "green, yellow or red"); ok {
			if err := c.Set(text); err != nil {
				r.errorf(value, "%w", err)
			}
		}
		all.Add(dscp, c)
	}
	p := part{key: "colours", text: all.String(), at: n.start}
	if r.faults > faults {
		return nil
	}
	if err := p.set(new(policy.Limit)); err != nil {
		r.errorf(n, "%w", err)
		return nil
	}
	return []part{p}
}

func (r *reader) shadow(n *node) []part {
	p := part{key: "shadow", at: n.start}
	switch {
	case n.kind == text && n.text == noShadow:
	case n.kind == text && r.plans[n.text] != nil:
		r.errorf(n, "a shadow cannot use a plan; write the options instead")
	default:
		limit := over(policy.Limit{}, r.rateOrParts(n, "a shadow", shadowKeys))
		p.shadow = &limit
	}
	return []part{p}
}

// rateOrParts reads a value that is a rate or a mapping.
func (r *reader) rateOrParts(n *node, what string, allowed []string) []part {
	if n.kind == text {
		return r.part("rate", n)
	}
	return r.parts(n, what, allowed).parts
}

// defaults returns the defaults of the surrounding place, with those of e, nil for none,
// over them.
func (r *reader) defaults(wider parcel, e *entry) parcel {
	if e == nil {
		return wider
	}
	faults := r.faults
	own := r.parts(&e.value, "defaults", defaultsKeys)
	own.bad = r.faults > faults
	return own.within(wider)
}

// label returns the defaults of a device or direction, with its name and note, if any, over them.
func (r *reader) label(defaults parcel, given map[string]*entry) parcel {
	faults := r.faults
	var own parcel
	for _, key := range labelKeys {
		if e := given[key]; e != nil {
			own.parts = append(own.parts, r.part(key, &e.value)...)
		}
	}
	own.bad = r.faults > faults
	return own.within(defaults)
}

// within returns defaults over those of the surrounding place.
func (p parcel) within(wider parcel) parcel {
	wide := slices.DeleteFunc(slices.Clone(wider.parts), func(w part) bool {
		return slices.ContainsFunc(p.parts, func(own part) bool { return own.key == w.key })
	})
	return parcel{parts: append(wide, p.parts...), bad: p.bad || wider.bad}
}

func (r *reader) readPlans(n *node) {
	r.plans = map[string]*plan{}
	for _, e := range n.entries { // all of them, so that rules do not report bad ones as unknown
		r.plans[e.key.text] = &plan{parcel: parcel{bad: true}, key: e.key.text, at: e.key.start}
	}
	entries := r.entries(n, "plans", "gold: {rate: 100mbit}")
	given := map[string]*node{}
	for i := range entries {
		key, value := &entries[i].key, &entries[i].value
		name := key.text
		switch first := given[name]; {
		case first != nil:
			r.errorf(key, "plan %s appears twice, first in line %d; remove one of them", shorten(name), r.line(first.start))
		case !validPlan(name):
			r.errorf(key, "plan %q is not a valid key; begin it with a letter, use letters, digits, -, _ and ., and not the word unlimited", shorten(name))
		default:
			given[name] = key
			faults := r.faults
			p := &plan{parcel: parcel{parts: r.rateOrParts(value, "a plan", planKeys)}, key: name, shown: name, at: key.start}
			p.parts = slices.DeleteFunc(p.parts, func(part part) bool {
				if part.key == "name" && part.text != "" {
					p.shown = part.text
				}
				return part.key == "name"
			})
			if err := policy.CheckPlan(p.shown); err != nil {
				r.errorf(key, "%w", err)
			}
			p.bad = r.faults > faults
			r.plans[name] = p
		}
	}
}

func validPlan(name string) bool {
	return !looksLikeRate(name) && !strings.ContainsFunc(name, func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("-_.", c)
	})
}
