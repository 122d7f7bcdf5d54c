package main

import (
	"net/netip"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/pkg/policy"
)

// limitFlags are the flags of a limit, for set and replay.
type limitFlags struct {
	policy.Limit
	match        policy.Match
	named, noted bool // a name, a note was given
}

// label is the label of a rule that has one already: it keeps the name and the note that are not given.
// What is set by hand follows no plan.
func (l *limitFlags) label(given, have policy.Label) policy.Label {
	given.Plan = ""
	if !l.named {
		given.Name = have.Name
	}
	if !l.noted {
		given.Note = have.Note
	}
	return given
}

// add adds the flags. side describes the default of --match.
func (l *limitFlags) add(f *pflag.FlagSet, side string) {
	for _, o := range policy.Options {
		if o.Label {
			continue
		}
		once(f, o.Value(&l.Limit), o.Name, o.Help)
		if o.HelpDefault != "" {
			f.Lookup(o.Name).DefValue = o.HelpDefault
		}
	}
	once(f, &l.match, "match", "address to compare (default "+side+")")
	f.Lookup("match").DefValue = "" // its usage has the default
	groupFlags(f, limitFlagsTitle, "rate", "capacity", "algorithm", "each", "excess", "penalty")
	groupFlags(f, queueFlagsTitle, "queue", "ecn-above", "order")
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(policy.LimitKey(name))
	})
}

// addLabel adds the flags of options that are texts for people.
func (l *limitFlags) addLabel(f *pflag.FlagSet) {
	for _, o := range policy.Options {
		if o.Label {
			once(f, o.Value(&l.Limit), o.Name, o.Help)
		}
	}
}

// tinyRule is the rule of the limit for a network. Its capacity may be less than a full packet. The limit must have a rate.
func (l *limitFlags) tinyRule(prefix netip.Prefix, l2Bytes uint8) (policy.Rule, error) {
	r, err := l.Resolve(prefix, l2Bytes)
	if err != nil {
		return r, err
	}
	full := r
	full.Capacity = max(r.Capacity, policy.MinCapacity)
	if r.Excess == policy.Delay {
		if err := r.ValidateWait(); err != nil {
			return r, err
		}
		if r.Queue > 0 {
			full.Queue = max(r.Queue, policy.MinCapacity)
		}
	}
	r.Each = r.Each.Canonical(prefix)
	return r, full.Validate()
}
