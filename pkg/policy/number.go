package policy

import (
	"fmt"
	"math"
	"math/big"
	"regexp"
	"strconv"
	"strings"
)

// maxInput bounds what an error echoes back and how large the arithmetic gets.
const maxInput = 64

var plainNumber = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]*)$`)

// splitNumber splits s into decimal digits with at most one point between them, and a unit
// of ASCII letters and slashes, which may be empty, and may follow a space. The example is a valid value for
// errors.
func splitNumber(what, s, example string) (number, unit string, err error) {
	parts := plainNumber.FindStringSubmatch(s)
	switch {
	case s == "":
		return "", "", fmt.Errorf("%s is empty; write one such as %s", what, example)
	case len(s) > maxInput:
		return "", "", fmt.Errorf("%s %.16q... is %d characters long; write one such as %s", what, s, len(s), example)
	case s[0] == '-':
		return "", "", fmt.Errorf("%s %q is negative; write one such as %s", what, s, example)
	case s[0] < '0' || s[0] > '9':
		return "", "", fmt.Errorf("%s %q does not start with a digit; write one such as %s", what, s, example)
	case parts == nil:
		return "", "", fmt.Errorf("%s %q is not a plain decimal number with a unit; write one such as %s", what, s, example)
	}
	return parts[1], parts[2], nil
}

// scale multiplies a number from splitNumber by its unit. The product is at most
// math.MaxUint64; whole is false if it has a fraction, which is cut off.
func scale(number string, unit uint64) (v uint64, whole bool) {
	exact, _ := new(big.Rat).SetString(number)
	exact.Mul(exact, new(big.Rat).SetUint64(unit))
	n := new(big.Int).Quo(exact.Num(), exact.Denom())
	if !n.IsUint64() {
		return math.MaxUint64, exact.IsInt()
	}
	return n.Uint64(), exact.IsInt()
}

var (
	sizeNames     = []string{"B", "kB", "MB", "GB", "TB"}
	byteRateNames = []string{"B/s", "kB/s", "MB/s", "GB/s", "TB/s"}
	timeNames     = []string{"ns", "us", "ms", "s"}
)

// human writes (high*2^64 + low) / divisor with four significant digits. The quotient is in
// the first unit, and each unit is a thousand of the one before it.
func human(high, low, divisor uint64, units []string) string {
	n := new(big.Int).SetUint64(high)
	n.Or(n.Lsh(n, 64), new(big.Int).SetUint64(low))
	n.Mul(n, big.NewInt(1e4)).Quo(n, new(big.Int).SetUint64(divisor))
	digits := fmt.Sprintf("%05d", n)
	before := len(digits) - 4 // digits before the point, in the first unit
	unit := min((before-1)/3, len(units)-1)
	before -= 3 * unit
	behind := max(0, 4-before)
	shown := before + behind
	rounded, _ := strconv.ParseUint(digits[:shown], 10, 64)
	if digits[shown] >= '5' {
		rounded++
	}
	digits = fmt.Sprintf("%0*d", behind+1, rounded)
	whole, fraction := digits[:len(digits)-behind], strings.TrimRight(digits[len(digits)-behind:], "0")
	if whole == "1000" && unit < len(units)-1 { // rounding carried: 999.96 kB is 1 MB
		whole, unit = "1", unit+1
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return whole + " " + units[unit]
}

func numberText[T int16 | uint16](n T) string { return strconv.Itoa(int(n)) }
