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
	defaultsKeys = keys(func(o *policy.Option) bool { return !o.Label && !o.PoolOnly && !o.Fact })
	labelKeys    = keys(func(o *policy.Option) bool { return o.Label })
	planKeys     = slices.Concat(defaultsKeys, labelKeys)
	poolKeys     = keys(func(o *policy.Option) bool { return !o.RuleOnly && o.Name != "name" })
	poolWithPlan = slices.Concat([]string{"plan"}, poolKeys)
	ruleKeys     = slices.Concat([]string{"plan"}, planKeys, keys(func(o *policy.Option) bool { return o.Fact && !o.PoolOnly }))
	hostKeys     = slices.Concat([]string{"plan", "line"}, planKeys)
)

// keys returns the names of some options, then their aliases.
func keys(of func(*policy.Option) bool) (names []string) {
	var aliases []string
	for _, o := range policy.Options {
		if of(o) {
			names, aliases = append(names, o.Name), append(aliases, o.Aliases...)
		}
	}
	return slices.Concat(names, aliases)
}

// noShadow removes the shadow of defaults or a plan.
const noShadow = "none"

// noPool takes a rule out of the pool of defaults or a plan, and a pool out of its cluster.
const noPool = "none"

// value returns an option that a draft gives as a value in YAML.
func value(o *policy.Option, d *policy.Draft) string {
	text := o.Value(&d.Limit).String()
	switch {
	case o.Name == "shadow" && d.Shadow == nil:
		return noShadow
	case o.Name == "shadow":
		return "{" + inBraces(d.Shadow) + "}"
	case text == "" && (o.Name == "within" || o.Name == "cluster"):
		return noPool
	case o.Label || o.Fact || o.Name == "within" || o.Name == "cluster":
		return word(text)
	case o.Name == "colours":
		return "{" + colourEntries.Replace(text) + "}"
	}
	return text
}

// colourEntries turns policy.ColourMap.String into the entries of a mapping.
var colourEntries = strings.NewReplacer("=", ": ", ",", ", ")

// A parcel is what a rule, a pool, a plan or defaults give.
type parcel struct {
	policy.Draft
	places places
	plan   *plan // of a rule or pool; nil for none
	bad    bool  // it has an error that is reported already
}

// A place is where the value of an option is.
type place struct {
	option *policy.Option
	at     uint32 // its offset
}

type places []place

// of returns the offset of the value of an option.
func (all places) of(name string) (at uint32, found bool) {
	for _, place := range all {
		if place.option.Name == name {
			at, found = place.at, true // the narrowest is the last
		}
	}
	return at, found
}

// mark says that an option is given, and where.
func (p *parcel) mark(o *policy.Option, at uint32) {
	p.Mark(o)
	p.places = append(p.places, place{o, at})
}

// gives reports whether a rule or its plan gives an option.
func (p *parcel) gives(o *policy.Option) bool { return p.Has(o) || p.plan != nil && p.plan.Has(o) }

// over returns the parcel over that of a surrounding place.
func (p parcel) over(wider parcel) parcel {
	return parcel{Draft: p.Draft.Over(wider.Draft), places: slices.Concat(wider.places, p.places), bad: p.bad || wider.bad}
}

// draft is the limit of a rule or pool, with its plan and defaults.
func (p *parcel) draft(usual policy.Draft) policy.Draft {
	usual = usual.As(policy.Usual)
	if p.plan != nil {
		usual = p.plan.As(policy.OfPlan).Over(usual)
	}
	return p.Draft.Over(usual)
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

// ownOptions are those that most rules and pools have for themselves. The rest many have in common.
var ownOptions = [...]*policy.Option{policy.FindOption("within"), policy.FindOption("note"), policy.FindOption("name")}

const ownName = 1 << 2 // the bit of a name in meaning.own

// A meaning is what rules for networks of one family and length, or pools, have in common.
type meaning struct {
	text         string // without ownOptions
	own          uint8  // a bit for each of ownOptions that they have
	family, bits int    // of the network
}

// maxKnown bounds the size of each cache.
const maxKnown = 1 << 16

// eachOwn calls f for the entries of a rule or pool that are ownOptions.
func eachOwn(n *node, f func(bit int, e *entry)) {
	for i := range n.entries {
		for bit, o := range ownOptions {
			if e := &n.entries[i]; e.key.text == o.Name && e.value.text != noPool {
				f(bit, e)
			}
		}
	}
}

// meaningOf returns the meaning of a rule or pool. It is false for one that has to be read as a whole.
func (r *reader) meaningOf(n *node) (m meaning, ok bool) {
	if ok = n.end > n.start; !ok {
		return m, false // it is merged from several
	}
	r.common = r.common[:0]
	at := n.start
	eachOwn(n, func(bit int, e *entry) {
		ok = ok && e.value.kind == text && m.own&(1<<bit) == 0
		m.own |= 1 << bit
		r.common = append(r.common, r.text[at:max(at, e.key.start)]...)
		at = e.value.end
	})
	r.common = append(r.common, r.text[at:max(at, n.end)]...)
	return m, ok
}

// made returns the meaning of a rule; nil if it is not valid.
func (r *reader) made(of *direction, prefix netip.Prefix, e *entry) *made {
	m, ok := r.meaningOf(&e.value)
	m.family, m.bits = prefix.Addr().BitLen(), prefix.Bits()
	if known := of.known[meaning{string(r.common), m.own, m.family, m.bits}]; ok && known != nil {
		return r.withOwn(known, m.own, &e.value)
	}
	p := r.limit(&e.value, "a rule", ruleKeys)
	if p.bad || of.defaults.bad {
		return nil
	}
	rule, err := p.draft(of.defaults.Draft).Rule(prefix)
	if err != nil {
		r.blame(err, e.key.start, p, of.defaults)
		return nil
	}
	if p.plan != nil {
		rule.Label.Plan = p.plan.shown
	}
	made := madeOf(&rule)
	r.know(of.known, m, ok, made)
	return made
}

// know remembers a meaning whose text is r.common.
func (r *reader) know(known map[meaning]*made, m meaning, ok bool, made *made) {
	if m.text = string(r.common); ok && len(known) < maxKnown {
		known[m] = made
	}
}

func madeOf(rule *policy.Rule) *made {
	return &made{rule, rule.Label.Name, rule.Label.Note, rule.Within}
}

// withOwn returns a meaning with the ownOptions that a rule or pool has; nil if they are not valid.
func (r *reader) withOwn(m *made, own uint8, n *node) *made {
	if own == 0 {
		return m
	}
	p, faults := &r.own, r.faults
	*p = parcel{places: p.places[:0]}
	eachOwn(n, func(bit int, e *entry) { r.option(p, ownOptions[bit], &e.value) })
	if r.faults > faults {
		return nil
	}
	out := *m
	for bit, set := range [...]func(){func() { out.within = p.Within }, func() { out.note = p.Note }, func() { out.name = p.Name }} {
		if own&(1<<bit) != 0 {
			set()
		}
	}
	return &out
}

// A limitReader reads limits: of rules, hosts, pools, plans, defaults and shadows.
type limitReader struct {
	notes
	plans   map[string]*plan // by key
	pools   map[string]*pool // by name
	current *section         // if it is of one device: what is in it may be within its pools
}

// blame reports a rule that is not valid, at the option that the error begins with.
func (r *limitReader) blame(err error, key uint32, rule, defaults parcel) {
	message := err.Error()
	word, _, _ := strings.Cut(message, " ")
	word = strings.TrimSuffix(word, ":")
	if at, found := rule.places.of(word); found {
		key = at
	} else if p := rule.plan; p != nil && p.Gives(word) {
		message += fmt.Sprintf(" (from plan %s, %s)", p.key, r.where(p.at))
	} else if at, found := defaults.places.of(word); found {
		message += fmt.Sprintf(" (from defaults, %s)", r.where(at))
	}
	r.report(key, message)
}

// limit reads a value that is a rate, a plan, or a mapping whose keys must be among allowed, which has plan if there may be one.
func (r *limitReader) limit(n *node, what string, allowed []string) (p parcel) {
	faults := r.faults
	mayPlan := slices.Contains(allowed, "plan")
	switch {
	case n.kind == mapping || n.kind != text && !mayPlan:
		return r.parts(n, what, allowed)
	case n.kind == text && (!mayPlan || looksLikeRate(n.text)):
		r.option(&p, policy.FindOption("rate"), n)
	default:
		if text, ok := r.scalar(n, what, "a rate, unlimited, a plan, or options such as {rate: 10mbit, each: host}"); ok {
			p.plan = r.plan(n, text)
		}
	}
	p.bad = r.faults > faults
	return p
}

// looksLikeRate reports whether a text is meant as a rate rather than a plan.
func looksLikeRate(s string) bool {
	return strings.IndexFunc(s, unicode.IsLetter) != 0 || strings.EqualFold(s, policy.Unlimited.String())
}

// plan returns the plan of a name. If there is none, it reports that and returns nil.
func (r *limitReader) plan(n *node, name string) *plan {
	p := r.plans[name]
	switch {
	case p == nil && len(r.plans) == 0:
		r.errorf(n, "%q is not a rate, and the file has no plans; write a rate such as 10mbit, or unlimited", shorten(name))
	case p == nil:
		unknown(&r.notes, n, "plan", name, r.plans)
	case p.bad:
		r.faults++
	}
	return p
}

// unknown reports a name that is not known.
func unknown[V any](r *notes, n *node, what, name string, known map[string]V) {
	if len(r.problems) > 100*shown { // it is not shown, and many may be known
		r.errorf(n, "%s %q is unknown", what, shorten(name))
		return
	}
	r.errorf(n, "%s %q is unknown; %s", what, shorten(name), didYouMean(name, slices.Sorted(maps.Keys(known))))
}

// knowsPool reports whether the file has a pool. If it has not, it reports that.
func (r *limitReader) knowsPool(n *node, name string) bool {
	switch {
	case r.pools[name] != nil, r.current.owns(name):
		return true
	case len(r.pools) == 0:
		r.errorf(n, "pool %q is unknown, and the file has no pools; write them such as pools: {%s: {rate: 1gbit}}", name, word(name))
	default:
		unknown(&r.notes, n, "pool", name, r.pools)
	}
	return false
}

// parts reads a mapping whose keys must be among allowed.
func (r *limitReader) parts(n *node, what string, allowed []string) (out parcel) {
	faults := r.faults
	entries := r.entries(n, what, "rate: 10mbit")
	seen := map[string]*node{}
	for i := range entries {
		key, value := &entries[i].key, &entries[i].value
		name := policy.LimitKey(key.text)
		if first := seen[name]; first != nil && r.again(seen, key, name, name, " as "+first.text+"; remove one of them") {
			continue
		}
		seen[name] = key
		switch {
		case !slices.Contains(allowed, key.text):
			r.unknownPart(key, what, allowed)
		case name == "plan":
			if text, ok := r.scalar(value, "plan", "the name of one"); ok {
				out.plan = r.plan(value, text)
			}
		default:
			r.option(&out, policy.FindOption(name), value)
		}
	}
	out.bad = r.faults > faults
	return out
}

func (r *limitReader) unknownPart(key *node, what string, allowed []string) {
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

// option reads an option, unless its value is not valid in any rule.
func (r *limitReader) option(p *parcel, o *policy.Option, n *node) {
	switch {
	case o.Name == "shadow":
		r.shadow(p, o, n)
		return
	case o.Name == "colours" && n.kind == mapping:
		r.colours(p, o, n)
		return
	}
	example := "one word"
	if o.Label {
		example = "text, in quotes if it has a colon or begins with a bracket"
	}
	text, ok := r.scalar(n, o.Name, example)
	if !ok {
		return
	}
	if slices.Contains([]string{"rate", "pir", "eir", "guarantee"}, o.Name) {
		if note := policy.BareRate(text); note != "" {
			r.warned = append(r.warned, problem{n.start, o.Name + " " + note})
		}
	}
	if r.value(p, o, text, n) && o.Name == "within" && p.Within != "" && !r.knowsPool(n, string(p.Within)) {
		p.Drop(o)
	}
}

// value gives a parcel the value of an option. It reports a value that is not valid, and whether it is.
func (r *limitReader) value(p *parcel, o *policy.Option, text string, n *node) bool {
	err := p.Give(o, text)
	if err != nil {
		r.errorf(n, "%w", err)
	} else {
		p.mark(o, n.start)
	}
	return err == nil
}

// colours reads a mapping from DSCPs to colours.
func (r *limitReader) colours(p *parcel, o *policy.Option, n *node) {
	faults := r.faults
	var all policy.ColourMap
	seen := map[string]*node{}
	entries := r.entries(n, "colours", "{AF12: yellow, AF13: red}")
	for i := range entries {
		key, value := &entries[i].key, &entries[i].value
		dscp, err := policy.ParseDSCP(key.text)
		if err != nil {
			r.errorf(key, "%w", err)
			continue
		}
		name := policy.DSCPName(dscp)
		r.again(seen, key, name, "DSCP "+name, "; remove one of them")
		var c policy.Colour
		if text, ok := r.scalar(value, "a colour", "green, yellow or red"); ok {
			if err := c.Set(text); err != nil {
				r.errorf(value, "%w", err)
			}
		}
		all.Add(dscp, c)
	}
	if r.faults == faults {
		r.value(p, o, all.String(), n)
	}
}

func (r *limitReader) shadow(p *parcel, o *policy.Option, n *node) {
	switch {
	case n.kind == text && n.text == noShadow:
	case n.kind == text && r.plans[n.text] != nil:
		r.errorf(n, "a shadow cannot use a plan; write the options instead")
		return
	default:
		d := r.limit(n, "a shadow", shadowKeys).Draft
		p.Shadow = &d
	}
	p.mark(o, n.start)
}

// defaults returns the defaults of the surrounding place, with those that are given over them.
func (r *limitReader) defaults(wider parcel, given map[string]*entry) parcel {
	if e := given["defaults"]; e != nil {
		return r.parts(&e.value, "defaults", defaultsKeys).over(wider)
	}
	return wider
}

// label returns defaults with the name and note of a device or direction, if any, over them.
func (r *limitReader) label(defaults parcel, given map[string]*entry) parcel {
	own := node{kind: mapping}
	for _, key := range labelKeys {
		if e := given[key]; e != nil {
			own.entries = append(own.entries, *e)
		}
	}
	return r.parts(&own, "", labelKeys).over(defaults)
}

func (r *limitReader) readPlans(n *node) {
	r.plans = map[string]*plan{}
	for _, e := range n.entries { // all of them, so that rules do not report bad ones as unknown
		r.plans[e.key.text] = &plan{parcel: parcel{bad: true}, key: e.key.text, at: e.key.start}
	}
	entries := r.entries(n, "plans", "gold: {rate: 100mbit}")
	seen := map[string]*node{}
	for i := range entries {
		key := &entries[i].key
		name := key.text
		if r.again(seen, key, name, "plan "+shorten(name), "; remove one of them") {
			continue
		}
		if !validPlan(name) {
			r.errorf(key, "plan %q is not a valid key; begin it with a letter, use letters, digits, -, _ and ., and not the word unlimited", shorten(name))
			continue
		}
		p := &plan{parcel: r.limit(&entries[i].value, "a plan", planKeys), key: name, shown: name, at: key.start}
		if p.Name != "" {
			p.shown = p.Name
		}
		p.Drop(policy.FindOption("name"))
		if err := policy.CheckPlan(p.shown); err != nil {
			r.errorf(key, "%w", err)
			p.bad = true
		}
		r.plans[name] = p
	}
}

func validPlan(name string) bool {
	return !looksLikeRate(name) && !strings.ContainsFunc(name, func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("-_.", c)
	})
}
