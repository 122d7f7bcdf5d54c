package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Limit is what a rule says as people write it, before it is known for which
// network and link: a capacity may be a time, an overhead the name of a link's.
type Limit struct {
	Rate      Rate
	Capacity  Capacity // the zero Capacity is chosen from the rate
	Algorithm Algorithm
	Each      Each
	Excess    Excess
	Queue     Queue    // the zero Queue is chosen from the rate
	ECNAbove  ECNAbove // 0 is chosen
	Order     Order
	Penalty   Penalty
	Fail      Fail
	Overhead  Overhead // "" for none
	MPU       MPU
	Name      Name
	Note      Note
	Shadow    *Limit // of which only some parts may be set; nil for none
}

// Set sets an option of the limit, by one of its names, from text.
func (l *Limit) Set(key, value string) error {
	o := FindOption(key)
	if o == nil {
		return fmt.Errorf("%.64q is unknown; use %s", key, oneOf(append(optionNames(true), optionNames(false)...)))
	}
	return o.Value(l).Set(value)
}

// optionNames are those of the options that a shadow may have, or of the others.
func optionNames(shadow bool) (names []string) {
	for _, o := range Options {
		if o.Shadow == shadow {
			names = append(names, o.Name)
		}
	}
	return names
}

// ParseShadow reads the limit of a shadow as people write it on a command line
// ("rate=50mbit,capacity=100ms,each=host"); nil for "none".
func ParseShadow(text string) (*Limit, error) {
	if text == "none" {
		return nil, nil
	}
	l, given := new(Limit), map[string]bool{}
	for part := range strings.SplitSeq(text, ",") {
		key, value, found := strings.Cut(part, "=")
		if !found {
			return nil, fmt.Errorf("shadow %.100q: write it such as rate=50mbit,capacity=100ms", text)
		}
		name := LimitKey(key)
		if given[name] {
			return nil, fmt.Errorf("shadow %.100q: %s is given twice", text, name)
		}
		given[name] = true
		if o := FindOption(name); o != nil && !o.Shadow {
			return nil, fmt.Errorf("shadow %.100q: a shadow has no %s of its own; use %s", text, name, oneOf(optionNames(true)))
		}
		if err := l.Set(name, value); err != nil {
			return nil, fmt.Errorf("shadow %.100q: %w", text, err)
		}
	}
	return l, nil
}

// Rule is the valid rule for a network on a device whose frames have l2Bytes of
// link header (14 or 0).
func (l Limit) Rule(prefix netip.Prefix, l2Bytes uint8) (r Rule, err error) {
	if r, err = l.Resolve(prefix, l2Bytes); err == nil {
		err = r.Validate()
	}
	r.Each = r.Each.Canonical(prefix)
	r.Shadow.Each = r.Shadow.Each.Canonical(prefix)
	return r, err
}

// Resolve is Rule with any capacity, also less than a full packet. The rule may not be
// valid. With an error it has what could be resolved.
func (l *Limit) Resolve(prefix netip.Prefix, l2Bytes uint8) (r Rule, err error) {
	r.Prefix = prefix
	if l.Rate == 0 {
		return r, errors.New("rate is missing; say how much, such as 10mbit, or unlimited")
	}
	for _, o := range Options {
		err = cmp.Or(err, o.resolve(l, &r, l2Bytes))
	}
	if l.Shadow == nil || err != nil {
		return r, err
	}
	proposed, err := l.Shadow.Resolve(prefix, l2Bytes)
	if err != nil {
		return r, fmt.Errorf("shadow: %w", err)
	}
	r.Shadow = NewShadow(proposed)
	return r, nil
}
