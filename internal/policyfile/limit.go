package policyfile

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v4"

	"github.com/shapectl/shapectl/pkg/policy"
)

var (
	limitKeys   = []string{"rate", "capacity", "algorithm", "each", "excess", "penalty", "fail", "overhead", "mpu", "shadow"}
	aliasKeys   = []string{"cir", "cbs", "burst"}
	planKeys    = slices.Concat(limitKeys, aliasKeys)
	ruleKeys    = slices.Concat(planKeys, []string{"plan"})
	shadowKeys  = []string{"rate", "capacity", "each", "penalty", "overhead", "mpu", "cir", "cbs", "burst"}
	limitedOnly = []string{"capacity", "each", "excess", "penalty", "shadow"}
)

// noShadow is the text of a shadow that is none, to be without that of defaults or a plan.
const noShadow = "none"

// A part is one part of a limit that a file gives.
type part struct {
	key    string // as policy.LimitKey has it
	text   string
	shadow *policy.Limit // of the part shadow; nil for none
	at     position
}

func (p part) set(l *policy.Limit) error {
	if p.key == "shadow" {
		l.Shadow = p.shadow
		return nil
	}
	return l.Set(p.key, p.text)
}

// over sets parts over a limit. They are valid.
func over(l policy.Limit, parts []part) policy.Limit {
	for _, p := range parts {
		if err := p.set(&l); err != nil {
			panic(err)
		}
	}
	return l
}

// limits makes the limits of a direction.
type limits struct {
	defaults []part
	usual    policy.Limit // what a rule is that says nothing
	hole     policy.Limit // and one that is unlimited
	short    map[string]*policy.Limit
}

func newLimits(defaults []part) *limits {
	var useful []part
	for _, p := range defaults {
		if !slices.Contains(limitedOnly, p.key) {
			useful = append(useful, p)
		}
	}
	return &limits{defaults, over(policy.Limit{}, defaults), over(policy.Limit{}, useful), map[string]*policy.Limit{}}
}

// of is the limit of a rule that is made of parts. Of the defaults, what only
// limits have does not go to a rule that is unlimited.
func (l *limits) of(parts []part) *policy.Limit {
	limit := over(l.usual, parts)
	if limit.Rate == policy.Unlimited {
		limit = over(l.hole, parts)
		limit.Rate = policy.Unlimited // which may be a default itself
	}
	return &limit
}

// limit is that of a rule, nil if it is not valid.
func (r *reader) limit(of *limits, prefix netip.Prefix, key, value *yaml.Node) *policy.Limit {
	var parts []part
	var p *plan
	var limit *policy.Limit
	if value.Kind == yaml.ScalarNode {
		limit = of.short[value.Value]
	}
	if limit == nil {
		var ok bool
		if parts, p, ok = r.ruleParts(value); !ok {
			return nil
		}
		all := parts
		if p != nil {
			all = slices.Concat(p.parts, parts)
		}
		limit = of.of(all)
	}
	if err := valid(limit, prefix); err != nil {
		if value.Kind == yaml.ScalarNode && parts == nil { // found among the short ones
			parts, p, _ = r.ruleParts(value)
		}
		r.blame(err, key, parts, p, of.defaults)
		return nil
	}
	if value.Kind == yaml.ScalarNode {
		of.short[value.Value] = limit
	}
	return limit
}

// valid is why a limit makes no rule for a network on some device.
func valid(l *policy.Limit, prefix netip.Prefix) error {
	_, err := l.Rule(prefix, 0)
	if err == nil && (l.Overhead != "" || l.Shadow != nil && l.Shadow.Overhead != "") {
		_, err = l.Rule(prefix, 14)
	}
	return err
}

// blame reports a rule that is not valid where the part stands that is named first.
func (r *reader) blame(err error, key *yaml.Node, own []part, p *plan, defaults []part) {
	message := err.Error()
	word, _, _ := strings.Cut(message, " ")
	named := func(p part) bool { return p.key == strings.TrimSuffix(word, ":") }
	if i := slices.IndexFunc(own, named); i >= 0 {
		r.errs = append(r.errs, r.errorAt(own[i].at, message)...)
		return
	}
	if p != nil && slices.ContainsFunc(p.parts, named) {
		message += fmt.Sprintf(" (%s is of plan %s, line %d)", strings.TrimSuffix(word, ":"), p.name, p.at.line)
	} else if i := slices.IndexFunc(defaults, named); i >= 0 {
		message += fmt.Sprintf(" (%s is of the defaults, line %d)", defaults[i].key, defaults[i].at.line)
	}
	r.errs = append(r.errs, r.errorAt(at(key), message)...)
}

// ruleParts is what the value of a rule says, and the plan that it names.
func (r *reader) ruleParts(n *yaml.Node) (parts []part, p *plan, ok bool) {
	if n.Kind == yaml.MappingNode {
		return r.parts(n, "a rule", ruleKeys)
	}
	text, ok := r.scalar(n, "a rule", "a rate, unlimited, a plan, or a mapping such as {rate: 10mbit, each: host}")
	if !ok {
		return nil, nil, false
	}
	if looksLikeRate(text) {
		own, ok := r.part("rate", n)
		return []part{own}, nil, ok
	}
	p, ok = r.plan(n, text)
	return nil, p, ok
}

// looksLikeRate says whether a text is rather a rate than the name of a plan.
func looksLikeRate(s string) bool {
	return s == "" || !unicode.IsLetter([]rune(s)[0]) || strings.EqualFold(s, policy.Unlimited.String())
}

// plan is the plan of a name. Where it is not valid, nothing more is to be said.
func (r *reader) plan(n *yaml.Node, name string) (*plan, bool) {
	if p := r.plans[name]; p != nil {
		return p, !p.bad
	}
	if len(r.plans) == 0 {
		r.errorf(n, "%.64q is no rate, and there are no plans; write a rate such as 10mbit, or unlimited", name)
		return nil, false
	}
	names := make([]string, 0, len(r.plans))
	for known := range r.plans {
		names = append(names, known)
	}
	slices.Sort(names)
	if len(names) > shown {
		names = names[:shown]
	}
	r.errorf(n, "plan %.64q is unknown; %s", name, didYouMean(name, names))
	return nil, false
}

// parts is what a mapping says of a limit; allowed are the keys that it may have.
func (r *reader) parts(n *yaml.Node, what string, allowed []string) (parts []part, p *plan, ok bool) {
	before := len(r.errs)
	given := map[string]*yaml.Node{}
	for key, value := range r.pairs(n, what, "rate: 10mbit") {
		name := policy.LimitKey(key.Value)
		if first := given[name]; first != nil {
			r.errorf(key, "%s is there twice, first as %s in line %d; take one of them out", name, first.Value, first.Line)
			continue
		}
		given[name] = key
		switch {
		case !slices.Contains(allowed, key.Value):
			r.unknownPart(key, what, allowed)
		case name == "plan":
			if text, ok := r.scalar(value, "plan", "the name of one"); ok {
				p, _ = r.plan(value, text)
			}
		case name == "shadow":
			if own, ok := r.shadow(value); ok {
				parts = append(parts, own)
			}
		default:
			if own, ok := r.part(name, value); ok {
				parts = append(parts, own)
			}
		}
	}
	return parts, p, len(r.errs) == before && (p == nil || !p.bad)
}

func (r *reader) unknownPart(key *yaml.Node, what string, allowed []string) {
	switch {
	case key.Value == "plan":
		r.errorf(key, "%s cannot be made of a plan; write its parts out", what)
	case slices.Contains(ruleKeys, key.Value):
		r.errorf(key, "%s has no %s of its own; %s", what, policy.LimitKey(key.Value), didYouMean("", allowed))
	default:
		r.errorf(key, "unknown key %.64q; %s", key.Value, didYouMean(key.Value, allowed))
	}
}

// part is one part by its own, valid or not in its place.
func (r *reader) part(name string, n *yaml.Node) (part, bool) {
	text, ok := r.scalar(n, name, "it in one word")
	if !ok {
		return part{}, false
	}
	p := part{key: name, text: text, at: at(n)}
	if err := p.set(new(policy.Limit)); err != nil {
		r.errorf(n, "%w", err)
		return part{}, false
	}
	return p, true
}

func (r *reader) shadow(n *yaml.Node) (part, bool) {
	p := part{key: "shadow", at: at(n)}
	if n.Kind == yaml.ScalarNode && n.Value == noShadow {
		return p, true
	}
	var parts []part
	if n.Kind == yaml.ScalarNode {
		rate, ok := r.part("rate", n)
		if !ok {
			return p, false
		}
		parts = []part{rate}
	} else {
		var ok bool
		if parts, _, ok = r.parts(n, "a shadow", shadowKeys); !ok {
			return p, false
		}
	}
	limit := over(policy.Limit{}, parts)
	p.shadow = &limit
	return p, true
}

// defaults is those of a wider place and what n says over them, which may be nil.
func (r *reader) defaults(wider []part, n *yaml.Node) []part {
	if n == nil {
		return wider
	}
	parts, _, _ := r.parts(n, "defaults", planKeys)
	all := slices.Clone(wider)
	for _, p := range parts {
		all = slices.DeleteFunc(all, func(w part) bool { return w.key == p.key })
	}
	return append(all, parts...)
}

func (r *reader) readPlans(n *yaml.Node) {
	r.plans = map[string]*plan{}
	if n == nil {
		return
	}
	for key, value := range r.pairs(n, "plans", "gold: {rate: 100mbit}") {
		name := key.Value
		if other := r.plans[name]; other != nil {
			r.errorf(key, "plan %.64s is there twice, first in line %d; take one of them out", name, other.at.line)
			continue
		}
		if !validPlan(name) {
			r.errorf(key, "plan %.64q could be taken for something else; begin its name with a letter, and use letters, digits, - _ or .", name)
			continue
		}
		p := &plan{name: name, at: at(key)}
		r.plans[name] = p
		var ok bool
		if value.Kind == yaml.ScalarNode {
			var rate part
			rate, ok = r.part("rate", value)
			p.parts = []part{rate}
		} else {
			p.parts, _, ok = r.parts(value, "a plan", planKeys)
		}
		p.bad = !ok
	}
}

func validPlan(name string) bool {
	return !looksLikeRate(name) && len(name) <= maxDevice && !strings.ContainsFunc(name, func(c rune) bool {
		return !unicode.IsLetter(c) && !unicode.IsDigit(c) && !strings.ContainsRune("-_.", c)
	})
}
