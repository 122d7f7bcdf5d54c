package main

import (
	"errors"
	"net/netip"
	"strconv"

	"github.com/spf13/pflag"

	"github.com/shapectl/shapectl/pkg/policy"
)

// limitFlags are the flags that say what a rule does, for each command that takes one.
type limitFlags struct {
	policy.Limit
	match policy.Match
}

// add adds the flags; side says which address is matched if none is named.
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
	once(f, &l.match, "match", "the address that CIDR is compared with (default: "+side+")")
	f.Lookup("match").DefValue = "" // its usage says which
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

// tinyRule is the rule that the limit, which has a rate, makes for a network. Its capacity may be less than a full packet.
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

// A flagValue is the value of a flag of a kind that has no type.
type flagValue struct {
	kind, initially string
	set             func(string) error
}

func (v flagValue) Set(s string) error { return v.set(s) }
func (v flagValue) String() string     { return v.initially }
func (v flagValue) Type() string       { return v.kind }

// once adds a flag that may be given one time only, as two names of one flag may not disagree.
func once(f *pflag.FlagSet, v pflag.Value, name, usage string) {
	f.Var(&onceValue{Value: v}, name, usage)
}

type onceValue struct {
	pflag.Value
	given bool
}

func (o *onceValue) Set(s string) error {
	if o.given {
		return errors.New("it was given already, under this name or another")
	}
	o.given = true
	return o.Value.Set(s)
}

// byteCount is a number of bytes.
func byteCount(bytes *uint64) flagValue {
	return flagValue{"bytes", "0", func(s string) (err error) {
		if *bytes, err = strconv.ParseUint(s, 10, 64); err != nil {
			return errors.New("write a whole number of bytes")
		}
		return nil
	}}
}
