package policy

import (
	"math"
	"math/big"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// wantOneLine checks the form of every error of the package.
func wantOneLine(t *testing.T, err error) {
	t.Helper()
	s := err.Error()
	if strings.ContainsFunc(s, unicode.IsControl) {
		t.Errorf("error is not one printable line: %q", s)
	}
	if strings.HasSuffix(s, ".") || strings.HasPrefix(s, "failed") || !unicode.IsLower(rune(s[0])) {
		t.Errorf("error is not in the house form: %s", s)
	}
	if len(s) > 10*maxInput {
		t.Errorf("error is %d bytes long: %s", len(s), s)
	}
}

// wantError checks the form of err, and that it contains each of parts.
func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("accepted; want an error with %q", parts)
		return
	}
	wantOneLine(t, err)
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error lacks %q: %v", part, err)
		}
	}
}

var oracleNumber = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]*)$`)

// oracle parses s in rational arithmetic. It is nil if s is not a whole number of a known
// unit.
func oracle(s string, unit func(string) (int64, bool)) *big.Int {
	m := oracleNumber.FindStringSubmatch(s)
	if m == nil || len(s) > maxInput {
		return nil
	}
	size, ok := unit(m[2])
	v, _ := new(big.Rat).SetString(m[1])
	if v.Mul(v, big.NewRat(size, 1)); !ok || !v.IsInt() {
		return nil
	}
	return v.Num()
}

func TestScaleSaturates(t *testing.T) {
	for _, test := range []struct {
		number string
		unit   uint64
		want   uint64
		whole  bool
	}{
		{"18446744073709551615", 1, math.MaxUint64, true},
		{"18446744073709551616", 1, math.MaxUint64, true},
		{"18446744073709551615.5", 1, math.MaxUint64, false},
		{"99999999999999999999", 1 << 40, math.MaxUint64, true},
		{"1.5", 1000, 1500, true},
		{"0.0005", 1000, 0, false},
		{"007", 1, 7, true},
	} {
		if v, whole := scale(test.number, test.unit); v != test.want || whole != test.whole {
			t.Errorf("scale(%s, %d) = %d, %v; want %d, %v", test.number, test.unit, v, whole, test.want, test.whole)
		}
	}
}

func TestHuman(t *testing.T) {
	for _, test := range []struct {
		bytes uint64
		want  string
	}{
		{0, "0 B"},
		{1, "1 B"},
		{999, "999 B"},
		{1000, "1 kB"},
		{1514, "1.514 kB"},
		{65536, "65.54 kB"},
		{125000, "125 kB"},
		{999_949, "999.9 kB"},
		{999_950, "1 MB"},
		{100_000_000, "100 MB"},
		{1 << 40, "1.1 TB"},
		{12_345_678_000_000_000, "12346 TB"},
	} {
		if got := human(0, test.bytes, 1, sizeNames); got != test.want {
			t.Errorf("human(%d) = %q, want %q", test.bytes, got, test.want)
		}
	}
}

// humanByRat is human in rational arithmetic.
func humanByRat(v *big.Rat, units []string) string {
	for ; ; units = units[1:] {
		whole := new(big.Int).Quo(v.Num(), v.Denom()).String()
		s := v.FloatString(max(0, 4-len(whole)))
		integer, fraction, _ := strings.Cut(s, ".")
		if len(integer) <= 3 || len(units) == 1 {
			if fraction = strings.TrimRight(fraction, "0"); fraction != "" {
				integer += "." + fraction
			}
			return integer + " " + units[0]
		}
		v = new(big.Rat).Quo(v, big.NewRat(1000, 1))
	}
}

func TestHumanAgainstFractions(t *testing.T) {
	roll := rand.New(rand.NewPCG(1, 2))
	for range 50_000 {
		high, low, divisor := roll.Uint64()>>(40+roll.IntN(25)), roll.Uint64(), roll.Uint64()>>(10+roll.IntN(54))+1
		if roll.IntN(2) == 0 {
			high, low = 0, low>>roll.IntN(64)
		}
		if roll.IntN(3) == 0 { // halves of what is shown, and just less
			power := uint64(math.Pow10(roll.IntN(10)))
			high, low, divisor = 0, uint64(roll.IntN(20_000))*power*1000-roll.Uint64N(2), 2000
		}
		num := new(big.Int).Lsh(new(big.Int).SetUint64(high), 64)
		num.Or(num, new(big.Int).SetUint64(low))
		want := humanByRat(new(big.Rat).SetFrac(num, new(big.Int).SetUint64(divisor)), timeNames)
		if got := human(high, low, divisor, timeNames); got != want {
			t.Fatalf("human(%v / %d) = %q, want %q", num, divisor, got, want)
		}
	}
}
