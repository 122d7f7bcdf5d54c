package policy

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
)

const zeroText = "0"

const (
	// MinCapacity is the smallest capacity of a rule in bytes: one full
	// Ethernet frame. With less, a full packet conforms only to an empty bucket.
	MinCapacity = 1514
	// MaxCapacity is the largest capacity in bytes: 1 TiB.
	MaxCapacity = 1 << 40
)

// Capacity is the capacity of a bucket as people write it: bytes, or the time in which
// they drain at the rule's rate. The zero Capacity is not set.
type Capacity struct {
	bytes    uint64
	duration time.Duration
}

// zeroCapacity is one that is set to 0.
var zeroCapacity = Capacity{duration: -1}

// sizeUnits are those of tc: all of them are binary.
var sizeUnits = map[string]uint64{
	"": 1, "b": 1,
	"k": 1 << 10, "kb": 1 << 10, "kib": 1 << 10,
	"m": 1 << 20, "mb": 1 << 20, "mib": 1 << 20,
	"g": 1 << 30, "gb": 1 << 30, "gib": 1 << 30,
}

var timeUnits = map[string]uint64{"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}

// Set parses a size in the units of tc, where kb and mb are binary (64kb is 65536 bytes,
// and a number without a unit is bytes), or a time (100ms) in s, ms, us or ns. It accepts
// 1 byte or 1 ns up to MaxCapacity; Rule.Validate has narrower bounds.
func (c *Capacity) Set(s string) (err error) {
	*c, err = parseCapacity("capacity", s)
	return err
}

// ParseSize parses a number of bytes in the units of Capacity, up to MaxCapacity.
func ParseSize(s string) (uint64, error) {
	if s == "0" {
		return 0, nil
	}
	c, err := parseCapacity("size", s)
	if err == nil && c.bytes == 0 {
		err = fmt.Errorf("size %q is a time; write a number of bytes such as 1514 or 64kb", s)
	}
	return c.bytes, err
}

func parseCapacity(what, s string) (Capacity, error) {
	const example = "64kb or 100ms"
	number, unit, err := splitNumber(what, s, example)
	if err != nil {
		return Capacity{}, err
	}
	lower := strings.ToLower(unit)
	if timeUnits[lower] > 0 {
		d, err := parseTime(what, s, example)
		return Capacity{duration: d}, err
	}
	size := sizeUnits[lower]
	v, whole := scale(number, size)
	switch {
	case strings.HasSuffix(lower, "bit"):
		return Capacity{}, fmt.Errorf("%s %q is in bits; write it in bytes such as 64kb, or as a time such as 100ms", what, s)
	case size == 0:
		return Capacity{}, fmt.Errorf("%s %q has the unknown unit %q; use b, kb, mb, gb, or a time in s, ms, us, ns", what, s, unit)
	case !whole:
		return Capacity{}, fmt.Errorf("%s %q is not a whole number of bytes; round it to one", what, s)
	case v == 0:
		return Capacity{}, fmt.Errorf("%s %q is zero and would pass nothing; write one such as 64kb or 100ms", what, s)
	}
	if err := checkMaxCapacity(what, func() string { return strconv.Quote(s) }, v); err != nil {
		return Capacity{}, err
	}
	return Capacity{bytes: v}, nil
}

// parseTime parses a time above zero. The example is for errors, as in splitNumber.
func parseTime(what, s, example string) (time.Duration, error) {
	number, unit, err := splitNumber(what, s, example)
	if err != nil {
		return 0, err
	}
	size := timeUnits[strings.ToLower(unit)]
	v, whole := scale(number, size)
	switch {
	case size == 0:
		return 0, fmt.Errorf("%s %q is not in a unit of time; use s, ms, us or ns, such as 30s", what, s)
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

// resolve returns the capacity in bytes for a rule of rate r, or the usual one if it is not set and of use. A time is
// converted exactly and rounded up to a whole byte. Without a rate, the result only tells whether the capacity is set.
func (c Capacity) resolve(what string, r Rate, usual func(Rate) uint64, used bool) (uint64, error) {
	switch {
	case c == zeroCapacity:
		return 0, nil
	case r == 0, r == Unlimited:
		return max(c.bytes, uint64(c.duration)), nil
	case c != Capacity{}:
		if err := checkRate("rate", r.String, r); err != nil {
			return 0, err
		}
		v := c.bytes + bytesIn(c.duration, r) // one of them is 0
		return v, checkMaxCapacity(what, func() string { return fmt.Sprintf("%v at %v", c, r) }, v)
	case used:
		return usual(r), nil
	}
	return 0, nil
}

// Rescaled is the capacity in bytes that a rate of want takes as long to drain as the rate of
// have takes for c, at least MinCapacity. It is c if that is a time or not set. One that is below the default stays so: the time of
// MinCapacity is longer the lower the rate.
func (c Capacity) Rescaled(have, want Rate, usual func(Rate) uint64) Capacity {
	if c.bytes == 0 || have == 0 || have == Unlimited || want == Unlimited {
		return c
	}
	bytes := scaleUp(c.bytes, uint64(want), uint64(have))
	if c.bytes <= max(usual(have), MinCapacity) {
		bytes = min(bytes, usual(want))
	}
	return Capacity{bytes: max(bytes, MinCapacity)}
}

// bitNanoseconds is a byte times a second, in bits times nanoseconds.
const bitNanoseconds = 8 * uint64(time.Second)

// bytesIn returns the bytes that pass at rate r in d, rounded up, at most math.MaxUint64.
func bytesIn(d time.Duration, r Rate) uint64 {
	return scaleUp(uint64(d), uint64(r), bitNanoseconds)
}

// scaleUp returns v * by / of, rounded up, at most math.MaxUint64.
func scaleUp(v, by, of uint64) uint64 {
	high, low := bits.Mul64(v, by)
	low, carry := bits.Add64(low, of-1, 0)
	if high += carry; high >= of {
		return math.MaxUint64
	}
	quotient, _ := bits.Div64(high, low, of)
	return quotient
}

// drainTime returns how long rate r takes to drain bytes, for people to read.
func drainTime(bytes uint64, r Rate) string {
	if r == 0 {
		return "never drains"
	}
	high, low := bits.Mul64(bytes, bitNanoseconds)
	return human(high, low, uint64(r), timeNames)
}

// String is such as 64kb, 125000b or 100ms; empty if the capacity is not set.
func (c Capacity) String() string {
	switch {
	case c == zeroCapacity:
		return zeroText
	case c.duration > 0:
		return timeString(c.duration)
	case c.bytes == 0:
		return ""
	}
	return inLargest(c.bytes, sizeUnits, "gb", "mb", "kb", "b")
}

// sizeText returns a size as Capacity.Set parses it; empty for 0.
func sizeText(bytes uint64) string { return Capacity{bytes: bytes}.String() }

func timeString(d time.Duration) string {
	return inLargest(uint64(d), timeUnits, "s", "ms", "us", "ns")
}

// inLargest writes v in the first of the named units that divides it.
func inLargest(v uint64, units map[string]uint64, names ...string) string {
	for _, name := range names {
		if size := units[name]; v%size == 0 {
			return strconv.FormatUint(v/size, 10) + name
		}
	}
	panic("the last unit is not 1")
}

func (c Capacity) Type() string { return "size|time" }

func resolveCapacity(l *Limit, r *Rule) (err error) {
	r.Capacity, err = l.Capacity.resolve("capacity", r.Rate, l.DefaultCapacity, true)
	return err
}

// DefaultCapacity is the capacity in bytes at a rate, if the limit has none.
func (l *Limit) DefaultCapacity(r Rate) uint64 {
	if l.Algorithm == Leaky && l.Excess == Delay {
		return DefaultQueue(r)
	}
	return DefaultCapacity(r)
}

// MostIn returns the highest mean rate that a bucket of r lets through in d, beginning while it is empty. It is Unlimited if
// one bucket of r does not bound it.
func (r Rule) MostIn(d time.Duration) Rate {
	burst := max(r.Capacity, 1<<16) // a packet of GSO passes an empty bucket of any size
	switch {
	case r.Rate == Unlimited || r.Excess == Pass || r.Each.Kind == EachFlow || r.Algorithm.HasColours():
		return Unlimited
	case r.Excess == Delay && r.Algorithm == Leaky:
		return r.Rate
	case r.Excess == ECN:
		burst *= 2
	}
	return r.Rate + Rate(scaleUp(burst, bitNanoseconds, uint64(d)))
}

// IsHasty reports whether a bucket of r is so small that TCP over a short path may lose much of the rate: below two thirds of
// the default.
func (r Rule) IsHasty() bool {
	return r.Excess == Drop && r.Rate != Unlimited && !r.Algorithm.HasColours() && r.Capacity < DefaultCapacity(r.Rate)/3*2
}

func checkCapacity(r *Rule) error {
	return checkBurst("capacity", r.Capacity, r.Rate)
}

func checkBurst(what string, bytes uint64, r Rate) error {
	if bytes < MinCapacity {
		return fmt.Errorf("%s of %d bytes (%s at %v) is less than one full packet; use %d or more",
			what, bytes, drainTime(bytes, r), r, MinCapacity)
	}
	return checkMaxCapacity(what, func() string { return fmt.Sprintf("of %d bytes", bytes) }, bytes)
}
