package policy

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"strconv"
	"strings"
	"unicode"
)

// maxInput bounds what an error echoes back and how large the arithmetic gets.
const maxInput = 64

// splitNumber cuts s into plain decimal digits with at most one point inside
// them, and a unit of ASCII letters and slashes, which may be empty. The
// example, a valid value, goes into the errors.
func splitNumber(what, s, example string) (number, unit string, err error) {
	switch {
	case s == "":
		return "", "", fmt.Errorf("%s is empty; write one such as %s", what, example)
	case len(s) > maxInput:
		return "", "", fmt.Errorf("%s %.16q... is %d characters long; write one such as %s", what, s, len(s), example)
	case strings.ContainsFunc(s, unicode.IsSpace):
		return "", "", fmt.Errorf("%s %q has a space in it; write %q", what, s, strings.Join(strings.Fields(s), ""))
	case s[0] == '-':
		return "", "", fmt.Errorf("%s %q is negative; write one such as %s", what, s, example)
	}
	end := digits(s)
	if end == 0 {
		return "", "", fmt.Errorf("%s %q does not start with a digit; write one such as %s", what, s, example)
	}
	if rest := s[end:]; rest != "" && rest[0] == '.' {
		if n := digits(rest[1:]); n > 0 {
			end += 1 + n
		}
	}
	number, unit = s[:end], s[end:]
	if strings.ContainsFunc(unit, func(r rune) bool {
		return r != '/' && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
	}) {
		return "", "", fmt.Errorf("%s %q is not a plain decimal number with a unit; write one such as %s", what, s, example)
	}
	return number, unit, nil
}

func digits(s string) int {
	return len(s) - len(strings.TrimLeft(s, "0123456789"))
}

// scale multiplies a number from splitNumber by its unit. It stops at
// math.MaxUint64, and whole says whether nothing was left behind the point.
func scale(number string, unit uint64) (v uint64, whole bool) {
	integer, fraction, _ := strings.Cut(number, ".")
	n, _ := new(big.Int).SetString(integer+fraction, 10)
	n.Mul(n, new(big.Int).SetUint64(unit))
	tens := new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(len(fraction))), nil)
	n, rest := n.QuoRem(n, tens, new(big.Int))
	if !n.IsUint64() {
		return math.MaxUint64, rest.Sign() == 0
	}
	return n.Uint64(), rest.Sign() == 0
}

var (
	sizeNames     = []string{"B", "kB", "MB", "GB", "TB"}
	byteRateNames = []string{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}
	timeNames     = []string{"ns", "us", "ms", "s"}
)

// human writes high*2^64 + low by a divisor of up to 2^54, counted in the first
// unit, with four significant digits in the unit that fits; each unit is a
// thousand of the one before it, and the last one counts less than 2^64.
func human(high, low, divisor uint64, units []string) string {
	wholeHigh, wholeLow, rest := divide(high, low, divisor)
	size := uint64(1) // of the unit
	for i, unit := range units {
		isLast := i == len(units)-1
		above, whole, _ := divide(wholeHigh, wholeLow, size)
		if !isLast && (above > 0 || whole >= 1000) {
			size *= 1000
			continue
		}
		power := uint64(1000) // of the digits behind the point
		for w := whole; w >= 10 && power > 1; w /= 10 {
			power /= 10
		}
		var rounded uint64 // number of parts of 1/power
		switch part := size / power; {
		case part == 0:
			h, l := bits.Mul64(low, power)
			_, parts, rest := divide(h, l, divisor)
			rounded = parts + half(rest, divisor)
		case part == 1:
			rounded = wholeLow + half(rest, divisor)
		default:
			l, carry := bits.Add64(wholeLow, part/2, 0)
			_, rounded, _ = divide(wholeHigh+carry, l, part)
		}
		// Rounding may carry into the next unit: 999.96 kB is 1 MB.
		if !isLast && rounded >= 1000*power {
			size *= 1000
			continue
		}
		s := strconv.FormatUint(rounded/power, 10)
		if fraction := rounded % power; fraction > 0 {
			digits := strconv.FormatUint(power+fraction, 10)[1:]
			s += "." + strings.TrimRight(digits, "0")
		}
		return s + " " + unit
	}
	return ""
}

// divide divides a number of 128 bits.
func divide(high, low, by uint64) (quotientHigh, quotientLow, rest uint64) {
	quotientHigh, rest = high/by, high%by
	quotientLow, rest = bits.Div64(rest, low, by)
	return quotientHigh, quotientLow, rest
}

// half is what is added for a rest that is half of the divisor or more.
func half(rest, divisor uint64) uint64 {
	if rest >= divisor-rest {
		return 1
	}
	return 0
}

func numberText[T int16 | uint16](n T) string { return strconv.Itoa(int(n)) }
