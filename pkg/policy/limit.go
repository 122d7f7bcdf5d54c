package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
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
	Overhead  string // as ParseFraming reads it; "" for none
	MPU       MPU
	Shadow    *Limit // of which only some parts may be set; nil for none
}

// MPU is the number of bytes that a packet counts at least.
type MPU uint16

// Set reads a whole number of bytes up to MaxMPU.
func (m *MPU) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return fmt.Errorf("mpu %.64q is not a whole number of bytes; write one of 0 to %d", s, MaxMPU)
	}
	if n > MaxMPU {
		return fmt.Errorf("mpu of %d bytes is out of range; use 0 to %d", n, MaxMPU)
	}
	*m = MPU(n)
	return nil
}

func (m MPU) String() string { return strconv.Itoa(int(m)) }

// Type names the value in a flag's help.
func (m MPU) Type() string { return "bytes" }

// limitKeys are the names of a limit's parts, those of a shadow first.
var limitKeys = []string{"rate", "capacity", "each", "penalty", "overhead", "mpu", "algorithm", "excess", "queue", "ecn-above", "order", "fail"}

const shadowKeys = 6 // of limitKeys

// LimitKey is the name of a part of a limit by any of its names.
func LimitKey(name string) string {
	switch name {
	case "cir":
		return "rate"
	case "cbs", "burst":
		return "capacity"
	}
	return name
}

// Set sets a part of the limit, by one of its names, from text.
func (l *Limit) Set(key, value string) error {
	switch LimitKey(key) {
	case "rate":
		return l.Rate.Set(value)
	case "capacity":
		return l.Capacity.Set(value)
	case "algorithm":
		return l.Algorithm.Set(value)
	case "each":
		return l.Each.Set(value)
	case "excess":
		return l.Excess.Set(value)
	case "queue":
		if err := l.Queue.Set(value); err != nil {
			return fmt.Errorf("queue: %w", err)
		}
		return nil
	case "ecn-above":
		return l.ECNAbove.Set(value)
	case "order":
		return l.Order.Set(value)
	case "penalty":
		return l.Penalty.Set(value)
	case "fail":
		return l.Fail.Set(value)
	case "overhead":
		_, err := ParseFraming(value, 0)
		l.Overhead = value
		return err
	case "mpu":
		return l.MPU.Set(value)
	}
	return fmt.Errorf("%.64q is unknown; use %s", key, oneOf(limitKeys))
}

// SetShadow is Set for the limit of a shadow, which has fewer parts.
func (l *Limit) SetShadow(key, value string) error {
	for i, name := range limitKeys {
		if name == LimitKey(key) && i >= shadowKeys {
			return fmt.Errorf("a shadow has no %s of its own; use %s", name, oneOf(limitKeys[:shadowKeys]))
		}
	}
	return l.Set(key, value)
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
		if given[LimitKey(key)] {
			return nil, fmt.Errorf("shadow %.100q: %s is given twice", text, LimitKey(key))
		}
		given[LimitKey(key)] = true
		if err := l.SetShadow(key, value); err != nil {
			return nil, fmt.Errorf("shadow %.100q: %w", text, err)
		}
	}
	return l, nil
}

// Rule is the valid rule for a network on a device whose frames have l2Bytes of
// link header (14 or 0).
func (l Limit) Rule(prefix netip.Prefix, l2Bytes uint8) (Rule, error) {
	r, err := l.Resolve(prefix, l2Bytes)
	if err == nil {
		err = r.Validate()
	}
	r.Each = r.Each.Canonical(prefix)
	r.Shadow.Each = r.Shadow.Each.Canonical(prefix)
	return r, err
}

// Resolve is Rule with any capacity, also less than a full packet. The rule may not be valid.
func (l Limit) Resolve(prefix netip.Prefix, l2Bytes uint8) (r Rule, err error) {
	r = Rule{
		Prefix: prefix, Rate: l.Rate, Algorithm: l.Algorithm, Each: l.Each, Excess: l.Excess,
		Penalty: l.Penalty, Fail: l.Fail, ECNAbove: l.ECNAbove, Order: l.Order,
	}
	if l.Overhead != "" {
		if r.Framing, err = ParseFraming(l.Overhead, l2Bytes); err != nil {
			return r, err
		}
	}
	if l.MPU != 0 {
		r.Framing.MPU = uint16(l.MPU)
	}
	switch {
	case l.Rate == 0:
		return r, errors.New("rate is missing; say how much, such as 10mbit, or unlimited")
	case l.Capacity != Capacity{} && l.Rate == Unlimited:
		return r, errors.New("capacity has no use in an unlimited rule; leave it out")
	case l.Capacity != Capacity{}:
		if r.Capacity, err = l.Capacity.Resolve(l.Rate); err != nil {
			return r, err
		}
	case l.Rate == Unlimited:
	case l.Algorithm == Leaky && l.Excess == Delay:
		r.Capacity = DefaultQueue(l.Rate)
	default:
		r.Capacity = DefaultCapacity(l.Rate)
	}
	if err := l.resolveQueue(&r); err != nil {
		return r, err
	}
	if l.Shadow != nil {
		s, err := l.Shadow.Resolve(prefix, l2Bytes)
		if err != nil {
			return r, fmt.Errorf("shadow: %w", err)
		}
		r.Shadow = Shadow{Rate: s.Rate, Capacity: s.Capacity, Each: s.Each, Penalty: s.Penalty, Framing: s.Framing}
	}
	return r, nil
}
