package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Limit is the options of a rule as people write them, before its network and device are
// known: a capacity can be a time, and an overhead the name of a kind of link.
type Limit struct {
	Rate      Rate
	Capacity  Capacity // zero for the default, which depends on the rate
	Algorithm Algorithm
	Each      Each
	Excess    Excess
	Queue     Capacity // zero for the default, which depends on the rate
	ECNAbove  ECNAbove // 0 for the default
	Order     Order
	Penalty   Penalty
	Colours   ColourOptions
	Fail      Fail
	Overhead  Overhead // "" for none
	MPU       uint16
	Within    Within
	Guarantee Guarantee
	Members   Members
	Weight    Weight
	Share     Share
	NAT       Switch
	Cluster   Cluster
	Adapt     Adapt
	Name      string
	Note      string
	Host      MAC
	Waits     Guarantee
	Owner     Owner
	Line      LineOf
	Also      Also
	Shadow    *Draft // with options whose Option.Shadow is true; nil for none
}

// Set parses the value of an option and sets it. The key is the option's name or an alias.
func (l *Limit) Set(key, value string) error {
	if o := FindOption(key); o != nil {
		return o.Value(l).Set(value)
	}
	return fmt.Errorf("%.64q is unknown; use %s", key, oneOf(append(optionNames(true), optionNames(false)...)))
}

// optionNames lists the options that a shadow can have, or the other ones.
func optionNames(shadow bool) (names []string) {
	for _, o := range Options {
		if o.Shadow == shadow {
			names = append(names, o.Name)
		}
	}
	return names
}

// ParseShadow parses a shadow as it is written on a command line:
// "rate=50mbit,capacity=100ms,each=host". It returns nil for "none".
func ParseShadow(text string) (*Draft, error) {
	if text == none {
		return nil, nil
	}
	d := new(Draft)
	for part := range strings.SplitSeq(text, ",") {
		key, value, found := strings.Cut(part, "=")
		if !found {
			return nil, fmt.Errorf("shadow %.100q: write it like rate=50mbit,capacity=100ms", text)
		}
		o, err := FindOption(key), error(nil)
		switch {
		case o == nil || !o.Shadow:
			err = fmt.Errorf("a shadow has no %.64s of its own; use %s", key, oneOf(optionNames(true)))
		case d.Has(o):
			err = fmt.Errorf("%s is given twice", o.Name)
		default:
			err = d.Give(o, value)
		}
		if err != nil {
			return nil, fmt.Errorf("shadow %.100q: %w", text, err)
		}
	}
	return d, nil
}

// Rule makes a rule for a network on any device: see Rule.On. It returns an error if the rule is not valid.
func (l Limit) Rule(prefix netip.Prefix) (r Rule, err error) {
	if r, err = l.Resolve(prefix); err == nil {
		err = r.Validate()
	}
	r.Each = r.Each.Canonical(prefix)
	return r, err
}

// Resolve is Rule without the validation. After an error, the rule has the options that
// could be resolved.
func (l *Limit) Resolve(prefix netip.Prefix) (Rule, error) {
	return l.resolve(Rule{Prefix: prefix})
}

// Tiny is Rule for a replay: the capacity and the queue may be less than a full packet. The limit must have a rate.
func (l *Limit) Tiny(prefix netip.Prefix) (Rule, error) {
	r, err := l.Resolve(prefix)
	if err != nil {
		return r, err
	}
	full := r
	for _, size := range []*uint64{&full.Capacity, &full.Queue, &full.Colours.PBS, &full.Colours.EBS} {
		if *size > 0 {
			*size = max(*size, MinCapacity)
		}
	}
	r.Each = r.Each.Canonical(prefix)
	return r, cmp.Or(r.validateWait(), full.Validate())
}

// resolve completes a rule that has a network, or a pool that has a key.
func (l *Limit) resolve(r Rule) (_ Rule, err error) {
	switch {
	case l.Rate != 0 || l.Also.some():
	case r.Pool:
		return r, errors.New("rate is missing; say how much, such as 1gbit")
	case l.Within == "":
		return r, errors.New("rate is missing; say how much, such as 10mbit, or unlimited")
	}
	for _, o := range Options {
		err = cmp.Or(err, o.resolve(l, &r))
	}
	return r, err
}
