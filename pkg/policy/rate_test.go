package policy

import (
	"math"
	"strings"
	"testing"
)

func TestParseRate(t *testing.T) {
	for _, test := range []struct {
		in   string
		want Rate
	}{
		// What iproute2's rate suffixes stand for.
		{"64000", 64000},
		{"8000bit", 8000},
		{"8kbit", 8000},
		{"1mbit", 1_000_000},
		{"1gbit", 1_000_000_000},
		{"0.4tbit", 400_000_000_000},
		{"8kibit", 8192},
		{"1mibit", 1_048_576},
		{"1gibit", 1_073_741_824},
		{"0.25tibit", 274_877_906_944},
		{"64Kibit", 65536},
		{"10MBIT", 10_000_000},

		{"10Mbit/s", 10_000_000},
		{"10mibit/S", 10_485_760},
		{"1.5mbit", 1_500_000},
		{"64.001kbit", 64001},
		{"010mbit", 10_000_000},
		{"8000.000", 8000},
		{"1000B/s", 8000},
		{"125kB/s", 1_000_000},
		{"125KB/s", 1_000_000},
		{"125MB/s", 1_000_000_000},
		{"1.25MB/s", 10_000_000},
		{"1GB/s", 8_000_000_000},
		{"0.05TB/s", 400_000_000_000},
		{"1KiB/s", 8192},
		{"1MiB/s", 8_388_608},
		{"1GiB/S", 8_589_934_592},
		{"0.000000008tbit", 8000},
		{"400gbit", MaxRate},
		{"unlimited", Unlimited},
		{"Unlimited", Unlimited},
	} {
		got, err := ParseRate(test.in)
		if err != nil || got != test.want {
			t.Errorf("ParseRate(%q) = %d, %v; want %d", test.in, got, err, test.want)
		}
	}
}

func TestParseRateRefuses(t *testing.T) {
	if _, err := ParseRate("10mbps"); err == nil || err.Error() != `rate "10mbps" is ambiguous: tc reads it as bytes, most people mean bits; did you mean 10mbit or 10MB/s?` {
		t.Errorf("10mbps: %v", err)
	}
	for in, part := range map[string]string{
		"10bps":    "did you mean 10bit or 10B/s?",
		"10kbps":   "did you mean 10kbit or 10kB/s?",
		"1.5Gbps":  "did you mean 1.5gbit or 1.5GB/s?",
		"1MiBps":   "did you mean 1mibit or 1MiB/s?",
		"10M":      "did you mean 10mbit or 10MB/s?",
		"10k":      "did you mean 10kbit or 10kB/s?",
		"10Gi":     "did you mean 10gibit or 10GiB/s?",
		"10MB":     "did you mean 10mbit or 10MB/s?",
		"10Mb/s":   "did you mean 10mbit or 10MB/s?",
		"500b/s":   "did you mean 500bit or 500B/s?",
		"none":     "a rule can be unlimited, and a pool always has a rate",
		"":         "empty",
		"0":        "zero",
		"0mbit":    "zero",
		"0.0mbit":  "zero",
		"-5mbit":   "negative",
		"-":        "negative",
		"NaN":      "does not start with a digit",
		"inf":      "does not start with a digit",
		".5mbit":   "does not start with a digit",
		"+5mbit":   "does not start with a digit",
		"fast":     "does not start with a digit",
		"1e6":      "not a plain decimal",
		"1e+6":     "not a plain decimal",
		"0x10":     "not a plain decimal",
		"1_000":    "not a plain decimal",
		"1,5mbit":  "not a plain decimal",
		"1.mbit":   "not a plain decimal",
		"1.5.mbit": "not a plain decimal",
		"5%":       "not a plain decimal",
		// The Kelvin sign is k in lower case.
		"1\u212abit":                  "not a plain decimal",
		"10mbit\x00":                  "not a plain decimal",
		"10  mbit":                    "not a plain decimal",
		"10mbit\n":                    "not a plain decimal",
		"1e":                          `unknown unit "e"`,
		"10/s":                        `unknown unit "/s"`,
		"10pbit":                      `unknown unit "pbit"`,
		"10mbits":                     `unknown unit "mbits"`,
		"0.0001kbit":                  "whole number of bits",
		"8.5":                         "has no unit; did you mean 8.5mbit?",
		"10":                          "is below 8kbit, the slowest rate; did you mean 10mbit?",
		"7999":                        "did you mean 7999kbit?",
		"7bit":                        "did you mean 7mbit?",
		"1kbit":                       "below 8kbit, the slowest rate; raise it",
		"1kibit":                      "slowest rate; raise it",
		"999B/s":                      "did you mean 999kB/s?",
		"0.5kB/s":                     "slowest rate; raise it",
		"0.000000001tbit":             "below 8kbit, the slowest rate; raise it",
		"500gbit":                     "is above 400gbit, the fastest rate; did you mean 500mbit or unlimited?",
		"1tbit":                       "did you mean 1gbit or unlimited?",
		"1tibit":                      "did you mean 1gibit or unlimited?",
		"100GB/s":                     "did you mean 100MB/s or unlimited?",
		"400000000001":                "above 400gbit, the fastest rate; lower it or use unlimited",
		"18446744073709551615":        "above 400gbit",
		"18446744073709551616":        "above 400gbit",
		"99999999999999999999tbit":    "above 400gbit",
		strings.Repeat("9", maxInput): "above 400gbit",
		strings.Repeat("9", 1<<20):    "1048576 characters long",
	} {
		t.Run(in[:min(len(in), 30)], func(t *testing.T) {
			r, err := ParseRate(in)
			wantError(t, err, "rate ", part)
			if r != 0 {
				t.Errorf("refused, but returned %v", r)
			}
		})
	}
}

func TestRateString(t *testing.T) {
	for _, test := range []struct {
		rate        Rate
		text, bytes string
	}{
		{0, "0", "0 B/s"},
		{8, "8bit", "1 B/s"},
		{9, "9bit", "1.125 B/s"},
		{64001, "64.001kbit", "8 kB/s"},
		{1_500_000, "1.5mbit", "187.5 kB/s"},
		{10_000_000, "10mbit", "1.25 MB/s"},
		{1024, "1kibit", "128 B/s"},
		{1_048_576, "1mibit", "131.1 kB/s"},
		{2_048_000, "2.048mbit", "256 kB/s"},
		{7_999_999, "7999.999kbit", "1 MB/s"},
		{400_000_000_000, "400gbit", "50 GB/s"},
		{1_000_000_000_000, "1tbit", "125 GB/s"},
		{Unlimited, "unlimited", "unlimited"},
		{math.MaxUint64 - 1, "18446744073709551.614kbit", "2305843 TB/s"},
	} {
		if got := test.rate.String(); got != test.text {
			t.Errorf("String of %d is %q, want %q", uint64(test.rate), got, test.text)
		}
		if got := test.rate.Bytes(); got != test.bytes {
			t.Errorf("Bytes of %d is %q, want %q", uint64(test.rate), got, test.bytes)
		}
	}
}

func FuzzRateString(f *testing.F) {
	for _, seed := range []uint64{8, 64001, 1 << 20, 1_500_000, 1e12, math.MaxUint64} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, v uint64) {
		r := Rate(v)
		if r != Unlimited {
			r = MinRate + r%(MaxRate-MinRate+1)
		}
		if got, err := ParseRate(r.String()); err != nil || got != r {
			t.Errorf("ParseRate(%q) = %d, %v; want %d", r, uint64(got), err, uint64(r))
		}
	})
}

func oracleRateUnit(unit string) (int64, bool) {
	bits := map[string]int64{
		"": 1, "bit": 1,
		"kbit": 1000, "mbit": 1000000, "gbit": 1000000000, "tbit": 1000000000000,
		"kibit": 1024, "mibit": 1048576, "gibit": 1073741824, "tibit": 1099511627776,
	}
	lower := strings.ToLower(unit)
	if size, ok := bits[lower]; ok {
		return size, true
	}
	if name, ok := strings.CutSuffix(lower, "bit/s"); ok {
		size, ok := bits[name+"bit"]
		return size, ok
	}
	if name, ok := strings.CutSuffix(lower, "b/s"); ok && unit[len(unit)-3] == 'B' {
		size, ok := bits[name+"bit"]
		return 8 * size, ok
	}
	return 0, false
}

func FuzzParseRate(f *testing.F) {
	for _, seed := range []string{"10mbit", "1.5Gbit/s", "0.0001kbit", "125MB/s", "10mbps", "10Mb/s", "10M", "1 kbit", "1e6", "18446744073709551616", "0x8", "unlimited", "1tibit", "1\u212abit"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseRate(s)
		if strings.EqualFold(s, "unlimited") {
			if err != nil || got != Unlimited {
				t.Fatalf("ParseRate(%q) = %v, %v", s, got, err)
			}
			return
		}
		want := oracle(s, oracleRateUnit)
		if want == nil || !want.IsInt64() || want.Int64() < int64(MinRate) || want.Int64() > int64(MaxRate) {
			if err == nil {
				t.Fatalf("ParseRate(%q) = %v, want an error", s, got)
			}
			wantOneLine(t, err)
			return
		}
		if err != nil || int64(got) != want.Int64() {
			t.Fatalf("ParseRate(%q) = %d, %v; want %v", s, uint64(got), err, want)
		}
		if back, err := ParseRate(got.String()); err != nil || back != got {
			t.Fatalf("ParseRate(%q) = %d, %v; want %d", got, uint64(back), err, uint64(got))
		}
	})
}

// A small number without a unit may be meant in another one.
func TestBareRate(t *testing.T) {
	for text, want := range map[string]string{
		"9500":      "9500 without a unit is 9500 bit/s; for kbit write 9500kbit",
		"999999":    "999999 without a unit is 999999 bit/s; for kbit write 999999kbit",
		"1000000":   "",
		"9500bit":   "",
		"9.5":       "",
		"100":       "",
		"unlimited": "",
		"":          "",
	} {
		if got := BareRate(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
