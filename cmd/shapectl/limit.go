package main

import (
	"cmp"
	"slices"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// limitFlags are the flags of a limit, for set and replay.
type limitFlags struct {
	policy.Limit
	match policy.Match
	given func(flag string) bool // for set

	shadow string // as it was given
}

// any reports whether an option of a limit was given.
func (l *limitFlags) any() bool {
	return l.given("match") || l.given("shadow") || slices.ContainsFunc(policy.Options, l.has)
}

// has reports whether an option was given.
func (l *limitFlags) has(o *policy.Option) bool { return l.given(o.Name) }

// split returns the flags that were given of options that are of a pool, each after a space, and one of another option.
func (l *limitFlags) split(isOfPool func(*policy.Option) bool) (ofPool, other string) {
	ofPool = l.written(isOfPool)
	for _, o := range policy.Options {
		if l.has(o) && !isOfPool(o) {
			other = "--" + o.Name
		}
	}
	if l.given("match") {
		other = "--match"
	}
	return ofPool, other
}

// written returns some of the options that were given, and the shadow, as flags, each after a space.
func (l *limitFlags) written(some func(*policy.Option) bool) (flags string) {
	for _, o := range policy.Options {
		if !l.has(o) || !some(o) {
			continue
		}
		value := o.Value(&l.Limit).String()
		if !o.Label {
			value = cmp.Or(value, "none")
		}
		flags += flagText(o.Name, value)
	}
	if l.given("shadow") {
		flags += " --shadow " + plain.Word(l.shadow)
	}
	return flags
}

// flagText returns a flag with its value, after a space.
func flagText(name, value string) string {
	switch {
	case !isSwitch(name):
		return " --" + name + " " + plain.Word(value)
	case value == "true":
		return " --" + name
	}
	return " --" + name + "=" + value
}

// isSwitch reports whether the flag of an option needs no value.
func isSwitch(name string) bool {
	o := policy.FindOption(name)
	return o != nil && o.Value(new(policy.Limit)).Type() == "bool"
}

// all returns all flags of limits that were given, each after a space.
func (l *limitFlags) all() string {
	return l.written(func(*policy.Option) bool { return true }) + l.matchFlag()
}

// matchFlag returns --match after a space if it was given.
func (l *limitFlags) matchFlag() string {
	if !l.given("match") {
		return ""
	}
	return " --match " + l.match.String()
}

// over returns a rule with the options that were given. It keeps the others, but for those that
// have no use beside these. A burst and a queue last as long at another rate, but with colours, burst sizes are those of a
// contract.
func (l *limitFlags) over(have *policy.Rule, l2Bytes uint8) (policy.Rule, error) {
	limit, err := have.Limit()
	if err != nil {
		return policy.Rule{}, err
	}
	for _, o := range policy.Options {
		if l.has(o) {
			o.Copy(&limit, &l.Limit)
		}
	}
	if !l.given("capacity") && !limit.Algorithm.HasColours() {
		limit.Capacity = limit.Capacity.Rescaled(have.Rate, limit.Rate, limit.DefaultCapacity)
	}
	if !l.given("queue") {
		limit.Queue.Capacity = limit.Queue.Rescaled(have.Rate, limit.Rate, policy.DefaultQueue)
	}
	unlimited := limit.Rate == policy.Unlimited
	for _, o := range policy.Options {
		beside := policy.Rule{
			Algorithm: limit.Algorithm, Each: limit.Each, Excess: limit.Excess, Penalty: limit.Penalty,
			Within: limit.Within, Guarantee: limit.Guarantee, Cluster: limit.Cluster, Adapt: limit.Adapt,
			Colours: policy.Colours{Aware: bool(limit.Colours.Aware)},
		}
		if !l.has(o) && (!o.Useful(&beside) || unlimited && o.LimitedOnly) {
			o.Reset(&limit)
		}
	}
	if l.given("shadow") || unlimited {
		limit.Shadow = l.Shadow
	}
	if l.given("guarantee") {
		limit.Waits = 0
	}
	if have.Pool {
		return limit.Pool(have.Label.Name)
	}
	rule, err := limit.Rule(have.Prefix)
	rule = rule.On(l2Bytes)
	rule.Label.Plan = have.Label.Plan
	limited := rule
	if limited.Label = have.Label; limited != *have {
		rule.Label.Plan = "" // export makes plans of the rules that follow them
	}
	return rule, err
}

// optionGroups are the titles of flags in help. Those of other options are under otherFlagsTitle.
var optionGroups = map[string][]string{
	limitFlagsTitle:   {"rate", "capacity", "algorithm", "each", "excess", "penalty"},
	queueFlagsTitle:   {"queue", "ecn-above", "order"},
	clusterFlagsTitle: {"cluster", "cluster-weight", "cluster-floor", "cluster-share", "cluster-safe"},
	adaptFlagsTitle:   {"adapt-min", "adapt-above", "adapt-to"},
	colourFlagsTitle:  {"pir", "pbs", "eir", "ebs", "colour-aware", "colours", "green", "yellow", "red"},
	poolFlagsTitle:    {"within", "guarantee", "members", "weight", "share"},
}

// add adds the flags of some options. side describes the default of --match.
func (l *limitFlags) add(f *pflag.FlagSet, side string, some func(*policy.Option) bool) {
	for _, o := range policy.Options {
		if o.Fact || !some(o) {
			continue
		}
		once(f, o.Value(&l.Limit), o.Name, o.Help)
		if isSwitch(o.Name) {
			f.Lookup(o.Name).NoOptDefVal = "true"
		}
		if o.HelpDefault != "" {
			f.Lookup(o.Name).DefValue = o.HelpDefault
		}
		for title, names := range optionGroups {
			if slices.Contains(names, o.Name) {
				groupFlags(f, title, o.Name)
			}
		}
	}
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(policy.LimitKey(name))
	})
	once(f, &l.match, "match", "address to match (default "+side+")")
	f.Lookup("match").DefValue = "" // its usage has the default
}

// addShadow adds --shadow.
func (l *limitFlags) addShadow(f *pflag.FlagSet) {
	shadow := flagValue{"limit", "", func(s string) (err error) {
		l.shadow = s
		l.Shadow, err = policy.ParseShadow(s)
		return err
	}}
	once(f, shadow, "shadow", "limit that only counts, such as rate=5mbit")
}
