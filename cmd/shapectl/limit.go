package main

import (
	"slices"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// limitFlags are the flags of a limit, for set and replay.
type limitFlags struct {
	policy.Draft
	match   policy.Match
	matched bool     // it was given
	left    []string // the plans that rules do not follow any more
	flags   *pflag.FlagSet
}

// mark finds which flags were given.
func (l *limitFlags) mark(f *pflag.FlagSet) {
	for _, o := range policy.Options {
		if f.Changed(o.Name) {
			l.Mark(o)
		}
	}
	l.flags, l.matched = f, f.Changed("match")
}

// any reports whether anything was given.
func (l *limitFlags) any() bool { return l.matched || l.Given() != nil }

// written returns the flags that were given, each after a space, of options for which some is true; and one of the others.
func (l *limitFlags) written(some func(*policy.Option) bool) (flags, other string) {
	l.flags.Visit(func(f *pflag.Flag) {
		switch o := policy.FindOption(f.Name); {
		case o != nil && some(o):
			flags += flagText(f)
		case o != nil || f.Name == "match":
			other = "--" + f.Name
		}
	})
	return flags, other
}

// all returns all flags of limits that were given, each after a space.
func (l *limitFlags) all() string {
	flags, match := l.written(func(*policy.Option) bool { return true })
	if match != "" {
		flags += flagText(l.flags.Lookup("match"))
	}
	return flags
}

// over returns a rule with the options that were given. It keeps the others, but for those that
// have no use beside these. A burst and a queue last as long at another rate, but with colours, burst sizes are those of a
// contract.
func (l *limitFlags) over(have *policy.Rule, l2Bytes uint8) (policy.Rule, error) {
	d := l.Over(policy.Draft{}.Missing(have).As(policy.Usual))
	if d.Shadow != nil {
		d.Mark(policy.FindOption("shadow")) // also of a rule that becomes unlimited
	}
	if !l.Gives("capacity") && !d.Algorithm.HasColours() {
		d.Capacity = d.Capacity.Rescaled(have.Rate, d.Rate, d.DefaultCapacity)
	}
	if !l.Gives("queue") {
		d.Queue = d.Queue.Rescaled(have.Rate, d.Rate, policy.DefaultQueue)
	}
	if l.Gives("guarantee") {
		d.Drop(policy.FindOption("waits"))
	}
	if have.Pool {
		return d.Pool(have.Label.Name)
	}
	rule, err := d.Rule(have.Prefix)
	rule = rule.On(l2Bytes)
	rule.Label.Plan = have.Label.Plan
	limited := rule
	if limited.Label = have.Label; limited != *have && have.Label.Plan != "" {
		rule.Label.Plan = "" // export makes plans of the rules that follow them
		if !slices.Contains(l.left, have.Label.Plan) {
			l.left = append(l.left, have.Label.Plan)
		}
	}
	return rule, err
}

// table is what becomes of rules for networks on a hook, which is nil if a direction of a device has no rules yet. If onlyThere, it
// makes no new rules. With an error, it has the rules before the one that is wrong.
func (l *limitFlags) table(dev netinfo.Device, d policy.Direction, h *loader.Hook, of networks, onlyThere bool) (policy.Table, error) {
	t := policy.Table{Device: dev.Name, Direction: d, Match: d.FarSide()}
	switch {
	case l.matched:
		t.Match = l.match
	case h != nil && h.Set.Any(maps.InForce):
		t.Match = h.Match() // of all rules of the direction
	}
	for _, p := range of {
		var have maps.Entry
		found := false
		if h != nil {
			have, found = h.Set.Find(p)
		}
		var rule policy.Rule
		var err error
		switch {
		case found:
			rule, err = l.over(&have.Rule, dev.L2Bytes)
		case onlyThere:
			continue
		default:
			rule, err = l.Rule(p)
			rule = rule.On(dev.L2Bytes)
		}
		if err != nil {
			return t, err
		}
		t.Rules = append(t.Rules, rule)
	}
	return t, nil
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
		if o.Value(&l.Limit).Type() == "bool" {
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
