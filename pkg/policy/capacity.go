package policy

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
)

const (
	// MinCapacity is the smallest capacity of a rule in bytes: one full
	// Ethernet frame, without which no full packet ever conforms while the
	// bucket holds anything.
	MinCapacity = 1514
	// MaxCapacity is the largest capacity in bytes: 1 TiB.
	MaxCapacity = 1 << 40
)

// Capacity is how much a bucket holds, as people write it: bytes, or the time
// in which the rule's rate would drain them. The zero Capacity is not set.
type Capacity struct {
	bytes    uint64
	duration time.Duration
}

// sizeUnits are those of tc: all of them are binary.
var sizeUnits = map[string]uint64{
	"": 1, "b": 1,
	"k": 1 << 10, "kb": 1 << 10, "kib": 1 << 10,
	"m": 1 << 20, "mb": 1 << 20, "mib": 1 << 20,
	"g": 1 << 30, "gb": 1 << 30, "gib": 1 << 30,
}

var timeUnits = map[string]uint64{"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}

// ParseCapacity reads a size in the units of tc, where kb and mb are binary
// (64kb is 65536 bytes, a bare number is bytes), or a time (100ms) in s, ms,
// us or ns. Any capacity of 1 byte or 1 ns up to MaxCapacity is read; what a
// rule takes is for Rule.Validate to say.
func ParseCapacity(s string) (Capacity, error) { return parseCapacity("capacity", s) }

func parseCapacity(what, s string) (Capacity, error) {
	number, unit, err := splitNumber(what, s, "64kb or 100ms")
	if err != nil {
		return Capacity{}, err
	}
	lower := strings.ToLower(unit)
	if _, ok := timeUnits[lower]; ok {
		d, err := parseTime(what, s, number, lower)
		return Capacity{duration: d}, err
	}
	size, ok := sizeUnits[lower]
	if strings.HasSuffix(lower, "bit") {
		return Capacity{}, fmt.Errorf("%s %q is in bits; write it in bytes such as 64kb, or as a time such as 100ms", what, s)
	}
	if !ok {
		return Capacity{}, fmt.Errorf("%s %q has the unknown unit %q; use b, kb, mb, gb, or a time in s, ms, us, ns", what, s, unit)
	}
	v, whole := scale(number, size)
	switch {
	case !whole:
		return Capacity{}, fmt.Errorf("%s %q is not a whole number of bytes; round it to one", what, s)
	case v == 0:
		return Capacity{}, fmt.Errorf("%s %q is zero and would let nothing pass; write one such as 64kb or 100ms", what, s)
	}
	if err := checkMaxCapacity(what, func() string { return strconv.Quote(s) }, v); err != nil {
		return Capacity{}, err
	}
	return Capacity{bytes: v}, nil
}

// parseTime reads a time above zero; the unit, in lower case, may be unknown.
func parseTime(what, s, number, unit string) (time.Duration, error) {
	size, ok := timeUnits[unit]
	if !ok {
		return 0, fmt.Errorf("%s %q is not in a unit of time; use s, ms, us or ns, such as 30s", what, s)
	}
	v, whole := scale(number, size)
	switch {
	case !whole:
		return 0, fmt.Errorf("%s %q is not a whole number of nanoseconds; round it to one", what, s)
	case v == 0:
		return 0, fmt.Errorf("%s %q is zero; write a longer time", what, s)
	case v > math.MaxInt64:
		return 0, fmt.Errorf("%s %q is longer than 292 years; write a shorter time", what, s)
	}
	return time.Duration(v), nil
}

func checkMaxCapacity(what string, spelled func() string, bytes uint64) error {
	if bytes > MaxCapacity {
		return fmt.Errorf("%s %s is above 1024gb, the largest there is; lower it", what, spelled())
	}
	return nil
}

// Resolve is the capacity in bytes for a rule of rate r. A time is counted
// exactly and rounded up to a whole byte.
func (c Capacity) Resolve(r Rate) (uint64, error) { return c.resolve("capacity", r) }

func (c Capacity) resolve(what string, r Rate) (uint64, error) {
	if r == Unlimited {
		return 0, fmt.Errorf("%s %v has no use at rate %v; leave it out", what, c, r)
	}
	if err := checkRate(r.String, r); err != nil {
		return 0, err
	}
	switch {
	case c.bytes > 0:
		return c.bytes, nil
	case c.duration > 0:
		v := bytesIn(c.duration, r)
		return v, checkMaxCapacity(what, func() string { return fmt.Sprintf("%v at %v", c, r) }, v)
	}
	return 0, fmt.Errorf("%s is not set; write one such as 64kb or 100ms", what)
}

// bytesIn is what passes at rate r in d, rounded up, at most math.MaxUint64.
func bytesIn(d time.Duration, r Rate) uint64 {
	const bitNanoseconds = 8 * uint64(time.Second) // in a byte per second
	hi, lo := bits.Mul64(uint64(r), uint64(d))
	lo, carry := bits.Add64(lo, bitNanoseconds-1, 0)
	hi += carry
	if hi >= bitNanoseconds {
		return math.MaxUint64
	}
	v, _ := bits.Div64(hi, lo, bitNanoseconds)
	return v
}

// drainTime is how long rate r takes over so many bytes, for people to read.
func drainTime(bytes uint64, r Rate) string {
	if r == 0 {
		return "never drains"
	}
	high, low := bits.Mul64(bytes, 8*uint64(time.Second))
	return human(high, low, uint64(r), timeNames)
}

// String is a spelling that ParseCapacity reads back: 64kb, 125000b, 100ms; it
// is empty for a Capacity that is not set.
func (c Capacity) String() string {
	switch {
	case c.duration > 0:
		return timeString(c.duration)
	case c.bytes == 0:
		return ""
	}
	return inLargest(c.bytes, sizeUnits, "gb", "mb", "kb", "b")
}

// sizeText is a spelling that ParseCapacity reads so many bytes of; empty for none.
func sizeText(bytes uint64) string { return Capacity{bytes: bytes}.String() }

func timeString(d time.Duration) string {
	return inLargest(uint64(d), timeUnits, "s", "ms", "us", "ns")
}

// inLargest writes v in the first of names that it is a whole number of.
func inLargest(v uint64, units map[string]uint64, names ...string) string {
	for _, name := range names {
		if size := units[name]; v%size == 0 {
			return strconv.FormatUint(v/size, 10) + name
		}
	}
	panic("the last unit is not 1")
}

// Set reads s as ParseCapacity does.
func (c *Capacity) Set(s string) error {
	v, err := ParseCapacity(s)
	if err == nil {
		*c = v
	}
	return err
}

func (c Capacity) Type() string { return "size|time" }

func resolveCapacity(l *Limit, r *Rule, _ uint8) (err error) {
	switch given := l.Capacity != (Capacity{}); {
	case given && r.Rate == Unlimited:
		return errors.New("capacity has no use in an unlimited rule; leave it out")
	case given:
		r.Capacity, err = l.Capacity.Resolve(r.Rate)
	case r.Rate == Unlimited:
	case l.Algorithm == Leaky && l.Excess == Delay:
		r.Capacity = DefaultQueue(r.Rate)
	default:
		r.Capacity = DefaultCapacity(r.Rate)
	}
	return err
}

func fitCapacity(r *Rule) error {
	if r.Capacity < MinCapacity {
		return fmt.Errorf("capacity of %d bytes (%s at %v) is less than one full packet; use %d or more",
			r.Capacity, drainTime(r.Capacity, r.Rate), r.Rate, MinCapacity)
	}
	return checkMaxCapacity("capacity", func() string { return fmt.Sprintf("of %d bytes", r.Capacity) }, r.Capacity)
}
