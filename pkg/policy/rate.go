package policy

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Rate is a speed in bits per second: MinRate to MaxRate, or Unlimited.
type Rate uint64

const (
	// MinRate is the slowest rate: 8 kbit/s, one kilobyte per second.
	MinRate Rate = 8_000
	// MaxRate is the fastest rate: 400 gbit/s.
	MaxRate Rate = 400_000_000_000
	// Unlimited is the rate of a rule that exempts its network from a wider rule.
	Unlimited Rate = math.MaxUint64
)

const unlimitedName = "unlimited"

type prefix struct {
	name, byteName string
	size           uint64
}

// prefixes scale a unit: by 1000 as in kbit, or by 1024 as in kibit. They are matched in
// lower case, and shown before B/s as byteName. Rate.String uses the last one that fits.
var prefixes = []prefix{
	{"", "", 1},
	{"ki", "Ki", 1 << 10}, {"mi", "Mi", 1 << 20}, {"gi", "Gi", 1 << 30}, {"ti", "Ti", 1 << 40},
	{"k", "k", 1e3}, {"m", "M", 1e6}, {"g", "G", 1e9}, {"t", "T", 1e12},
}

// ParseRate parses a rate in the units of tc (10mbit, 1.5gbit, 64kibit, or a number of
// bits per second), with or without /s, in any case; in bytes per second (1.25MB/s,
// 1MiB/s); or "unlimited". Ambiguous rates such as 10mbps or 10M are errors.
func ParseRate(s string) (Rate, error) {
	if strings.EqualFold(s, unlimitedName) {
		return Unlimited, nil
	}
	if s == none {
		return 0, fmt.Errorf("rate %q is unknown: a rule can be unlimited, and a pool always has a rate such as 10mbit", s)
	}
	number, unit, err := splitNumber("rate", s, "10mbit")
	if err != nil {
		return 0, err
	}
	size, err := rateUnit(s, number, unit)
	if err != nil {
		return 0, err
	}
	v, whole := scale(number, size)
	if !whole {
		if unit == "" {
			return 0, fmt.Errorf("rate %q has no unit; did you mean %smbit?", s, number)
		}
		return 0, fmt.Errorf("rate %q is not a whole number of bits per second; round it", s)
	}
	if err := checkRate("rate", func() string { return strconv.Quote(s) }, Rate(v)); err != nil {
		return 0, err
	}
	return Rate(v), nil
}

// BareRate returns a note about a rate that is a small number without a unit, as its writer may not mean bits per
// second; "" for any other text.
func BareRate(s string) string {
	const least = 1_000_000 // smaller ones may be meant in a larger unit
	if strings.Trim(s, "0123456789") != "" {
		return ""
	}
	if r, err := ParseRate(s); err != nil || r >= least {
		return ""
	}
	return fmt.Sprintf("%s without a unit is %s bit/s; for kbit write %skbit", s, s, s)
}

var rateUnits = regexp.MustCompile(`^([kmgt]?i?)(|b|bit|bit/s|b/s|bps)$`)

// cutUnit splits a unit into its prefix and the rest. It is false if the unit is unknown;
// ambiguous units are not.
func cutUnit(unit string) (p prefix, rest string, ok bool) {
	parts := rateUnits.FindStringSubmatch(strings.ToLower(unit))
	if parts == nil {
		return p, "", false
	}
	i := slices.IndexFunc(prefixes, func(p prefix) bool { return p.name == parts[1] })
	return prefixes[max(i, 0)], parts[2], i >= 0
}

// rateUnit returns the bits per second of one unit.
func rateUnit(s, number, unit string) (uint64, error) {
	p, rest, ok := cutUnit(unit)
	switch {
	case !ok:
		return 0, fmt.Errorf("rate %q has the unknown unit %q; use bit, kbit, mbit, gbit, kibit, mibit, kB/s or MB/s", s, unit)
	case unit == "", rest == "bit", rest == "bit/s":
		return p.size, nil
	case rest == "b/s" && strings.Contains(unit, "B"): // Mb/s is megabits to many
		return 8 * p.size, nil
	}
	why := "it may mean bits or bytes"
	if rest == "bps" {
		why = "tc reads it as bytes, most people mean bits"
	}
	return 0, fmt.Errorf("rate %q is ambiguous: %s; did you mean %s%sbit or %s%sB/s?",
		s, why, number, p.name, number, p.byteName)
}

// checkRate returns an error for rates that a rule cannot have. what is the option; spelled returns r as it
// was written, in quotes or not.
func checkRate(what string, spelled func() string, r Rate) error {
	switch {
	case r == 0:
		return fmt.Errorf("%s %s is zero and would pass nothing; the slowest is %v", what, spelled(), MinRate)
	case r < MinRate:
		advice, units := "raise it", map[string]string{"": "m"}
		if r >= 1000 {
			units[""] = "k"
		}
		if meant := inUnit(spelled(), units); meant != "" {
			advice = "did you mean " + meant + "?"
		}
		return fmt.Errorf("%s %s is below %v, the slowest rate; %s", what, spelled(), MinRate, advice)
	case r > MaxRate:
		advice := "lower it or use " + unlimitedName
		if meant := inUnit(spelled(), map[string]string{"m": "k", "g": "m", "t": "g", "mi": "ki", "gi": "mi", "ti": "gi"}); meant != "" {
			advice = "did you mean " + meant + " or " + unlimitedName + "?"
		}
		return fmt.Errorf("%s %s is above %v, the fastest rate; %s", what, spelled(), MaxRate, advice)
	}
	return nil
}

func checkOwnRate(r *Rule) error {
	if r.Rate == Unlimited {
		return nil
	}
	return checkRate("rate", r.Rate.String, r.Rate)
}

// inUnit writes a rate with the prefix that units maps its own to; "" if there is none, or
// if the result is not a valid rate.
func inUnit(spelled string, units map[string]string) string {
	spelled = strings.Trim(spelled, `"`)
	unit := strings.TrimLeft(spelled, "0123456789.")
	number := strings.TrimSuffix(spelled, unit)
	from, rest, _ := cutUnit(unit)
	to, _, ok := cutUnit(units[from.name])
	if !ok || to.name == "" {
		return ""
	}
	meant := number + to.name + "bit"
	if rest == "b/s" {
		meant = number + to.byteName + "B/s"
	}
	if r, err := ParseRate(meant); err != nil || r == Unlimited {
		return ""
	}
	return meant
}

// String is r in the largest decimal unit of tc that needs at most three decimals, or in a binary one if that
// divides it and kbit does not: 10mbit, 1.5mbit, 64.001kbit, 1mibit. ParseRate parses it.
func (r Rate) String() string {
	switch r {
	case 0:
		return "0" // what pflag takes for a flag without a default
	case Unlimited:
		return unlimitedName
	}
	bits, largest, step := uint64(r), prefixes[0], uint64(1)
	binary := bits%1000 != 0 && bits%1024 == 0
	for _, p := range prefixes {
		last := p.size / 1000 // the third decimal
		if binary {
			last = p.size
		}
		if binary == (p.size%1000 != 0) && bits >= p.size && bits%last == 0 {
			largest, step = p, last
		}
	}
	number := fmt.Sprintf("%d.%03d", bits/largest.size, bits%largest.size/step)
	return strings.TrimRight(strings.TrimRight(number, "0"), ".") + largest.name + "bit"
}

// Bytes is the rate in bytes per second for people to read, with four significant digits:
// "1.25 MB/s".
func (r Rate) Bytes() string {
	if r == Unlimited {
		return unlimitedName
	}
	return human(0, uint64(r), 8, byteRateNames)
}

func (r *Rate) Set(s string) (err error) {
	*r, err = ParseRate(s)
	return err
}

func (r Rate) Type() string { return "rate" }
