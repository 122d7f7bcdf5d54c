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

// tinyRule is the rule that the limit makes for a network, also with a capacity of less than a full packet.
func (l *limitFlags) tinyRule(prefix netip.Prefix, l2Bytes uint8) (policy.Rule, error) {
	r, err := l.Resolve(prefix, l2Bytes)
	if err != nil {
		return r, err
	}
	check := r
	if r.Rate != policy.Unlimited {
		check.Capacity = max(r.Capacity, policy.MinCapacity)
	}
	if r.Excess == policy.Delay && r.Rate != policy.Unlimited {
		if err := r.ValidateWait(); err != nil {
			return r, err
		}
		if r.Queue > 0 {
			check.Queue = max(r.Queue, policy.MinCapacity)
		}
	}
	r.Each = r.Each.Canonical(prefix)
	return r, check.Validate()
}

// shadowFlag is the limit of a shadow on the command line.
type shadowFlag struct{ limit **policy.Limit }

func (s shadowFlag) Set(text string) (err error) {
	*s.limit, err = policy.ParseShadow(text)
	return err
}

func (s shadowFlag) String() string { return "none" }
func (s shadowFlag) Type() string   { return "rate=RATE,..." }

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
type byteCount uint64

func (c *byteCount) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return errors.New("write a whole number of bytes")
	}
	*c = byteCount(n)
	return nil
}

func (c *byteCount) String() string { return strconv.FormatUint(uint64(*c), 10) }
func (c *byteCount) Type() string   { return "bytes" }
