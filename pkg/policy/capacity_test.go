package policy

import (
	"math"
	"math/big"
	"net/netip"
	"strings"
	"testing"
	"time"
)

func TestParseCapacity(t *testing.T) {
	for _, test := range []struct {
		in, text string
		want     uint64 // bytes at 10mbit
	}{
		// What iproute2's size suffixes stand for.
		{"1600", "1600b", 1600},
		{"1600b", "1600b", 1600},
		{"64k", "64kb", 65536},
		{"64kb", "64kb", 65536},
		{"1m", "1mb", 1 << 20},
		{"1MB", "1mb", 1 << 20},
		{"1g", "1gb", 1 << 30},
		{"1gb", "1gb", 1 << 30},

		{"1KiB", "1kb", 1024},
		{"1mib", "1mb", 1 << 20},
		{"1.5gib", "1536mb", 3 << 29},
		{"1.5kb", "1536b", 1536},
		{"1", "1b", 1},
		{"1024g", "1024gb", 1 << 40},
		{"100ms", "100ms", 125000},
		{"0.1s", "100ms", 125000},
		{"1s", "1s", 1_250_000},
		{"1000MS", "1s", 1_250_000},
		{"800ns", "800ns", 1},
		{"801ns", "801ns", 2},
		{"1ns", "1ns", 1},
		{"1.5us", "1500ns", 2},
	} {
		c, err := parseCapacity("capacity", test.in)
		if err != nil {
			t.Errorf("parseCapacity(%q): %v", test.in, err)
			continue
		}
		if got, err := c.resolve("capacity", 10_000_000, nil, false); err != nil || got != test.want {
			t.Errorf("%q at 10mbit is %d, %v; want %d", test.in, got, err, test.want)
		}
		if c.String() != test.text {
			t.Errorf("String of %q is %q, want %q", test.in, c, test.text)
		}
	}
}

func TestParseCapacityRefuses(t *testing.T) {
	for in, part := range map[string]string{
		"":                            "empty",
		"0":                           "zero",
		"0ms":                         "zero",
		"-1kb":                        "negative",
		"64kbit":                      "in bits",
		"1Mbit":                       "in bits",
		"1.0001":                      "whole number of bytes",
		"0.5b":                        "whole number of bytes",
		"0.5ns":                       "whole number of nanoseconds",
		"10min":                       `unknown unit "min"`,
		"1tb":                         `unknown unit "tb"`,
		"1e6":                         "not a plain decimal",
		"lots":                        "does not start with a digit",
		"1099511627777":               "above 1024gb",
		"1025gb":                      "above 1024gb",
		"18446744073709551616gb":      "above 1024gb",
		"18446744073709551616s":       "292 years",
		"9223372036854775808ns":       "292 years",
		strings.Repeat("1", 65) + "b": "66 characters long",
	} {
		c, err := parseCapacity("capacity", in)
		wantError(t, err, "capacity ", part)
		if c != (Capacity{}) {
			t.Errorf("%q is refused, but returned %v", in, c)
		}
	}
}

func TestResolve(t *testing.T) {
	longest := Capacity{duration: math.MaxInt64}
	for _, test := range []struct {
		c    Capacity
		r    Rate
		want uint64
	}{
		{Capacity{duration: 1}, MinRate, 1},
		{Capacity{duration: time.Millisecond}, MinRate, 1},
		{Capacity{duration: time.Millisecond + 1}, MinRate, 2},
		{Capacity{duration: 3 * time.Millisecond}, 9000, 4},
		{Capacity{duration: time.Second}, MaxRate, 50_000_000_000},
		{Capacity{duration: 21_990_232_555}, MaxRate, 1_099_511_627_750},
		{Capacity{bytes: 100}, MaxRate, 100},
		{Capacity{duration: 100 * 24 * time.Hour}, MinRate, 8_640_000_000},
	} {
		if got, err := test.c.resolve("capacity", test.r, nil, false); err != nil || got != test.want {
			t.Errorf("%v at %v is %d, %v; want %d", test.c, test.r, got, err, test.want)
		}
	}
	for _, test := range []struct {
		c    Capacity
		r    Rate
		part string
	}{
		{Capacity{bytes: 1}, 7999, "below 8kbit"},
		{Capacity{duration: 1}, MaxRate + 1, "above 400gbit"},
		{Capacity{duration: 21_990_232_556}, MaxRate, "above 1024gb"},
		{longest, MaxRate, "above 1024gb"},
		// The first whose bytes do not fit 64 bits.
		{Capacity{duration: 368_934_881_474_191_033}, MaxRate, "above 1024gb"},
	} {
		_, err := test.c.resolve("capacity", test.r, nil, false)
		wantError(t, err, test.part)
	}
}

// TestParseQueueRefuses checks that errors name the queue, not the capacity.
func TestParseQueueRefuses(t *testing.T) {
	for _, in := range []string{"", "1x", "0", "0.5b", "1kbit", "0.5ns", "1025gb", "18446744073709551616s"} {
		wantError(t, valueOf("queue").Set(in), "queue ")
	}
	_, err := Limit{Rate: MaxRate, Excess: Delay, Queue: Capacity{duration: 22 * time.Second}}.Rule(netip.MustParsePrefix("10.0.0.0/24"))
	if err == nil || err.Error() != "queue 22s at 400gbit is above 1024gb, the largest there is; lower it" {
		t.Errorf("a queue that is too large: %v", err)
	}
}

func FuzzParseCapacity(f *testing.F) {
	for _, seed := range []string{"64kb", "1.5mib", "1600", "100ms", "1.5us", "0.5ns", "64kbit", "1e3", "1024gb", "9223372036854775807ns", "-1", "0x10", "1 b"} {
		f.Add(seed, uint64(10_000_000))
	}
	f.Fuzz(func(t *testing.T, s string, rate uint64) {
		r := MinRate + Rate(rate)%(MaxRate-MinRate+1)
		bytes := oracle(s, func(unit string) (int64, bool) {
			size, ok := map[string]int64{
				"": 1, "b": 1, "k": 1024, "kb": 1024, "kib": 1024,
				"m": 1048576, "mb": 1048576, "mib": 1048576,
				"g": 1073741824, "gb": 1073741824, "gib": 1073741824,
			}[strings.ToLower(unit)]
			return size, ok
		})
		nanoseconds := oracle(s, func(unit string) (int64, bool) {
			size, ok := map[string]int64{"ns": 1, "us": 1000, "ms": 1000000, "s": 1000000000}[strings.ToLower(unit)]
			return size, ok
		})
		if nanoseconds != nil && nanoseconds.IsInt64() {
			// Rounded up: -(-x div 1), with Euclidean division.
			v := new(big.Int).Mul(nanoseconds, big.NewInt(-int64(r)))
			bytes = v.Neg(v.Div(v, big.NewInt(8_000_000_000)))
		}
		c, err := parseCapacity("capacity", s)
		var got uint64
		if err == nil {
			if back, err := parseCapacity("capacity", c.String()); err != nil || back != c {
				t.Fatalf("parseCapacity(%q) = %v, %v; want %v", c, back, err, c)
			}
			got, err = c.resolve("capacity", r, nil, false)
		}
		if bytes == nil || bytes.Sign() == 0 || bytes.Cmp(big.NewInt(1<<40)) > 0 {
			if err == nil {
				t.Fatalf("%q at %v is %d, want an error", s, r, got)
			}
			wantOneLine(t, err)
			return
		}
		if err != nil || got != bytes.Uint64() {
			t.Fatalf("%q at %v is %d, %v; want %v", s, r, got, err, bytes)
		}
	})
}

func FuzzCapacityString(f *testing.F) {
	f.Add(uint64(125000), int64(time.Second))
	f.Add(uint64(1<<40), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, bytes uint64, d int64) {
		for _, c := range []Capacity{
			{bytes: 1 + bytes%MaxCapacity},
			{duration: time.Duration(1 + d&(math.MaxInt64-1))},
		} {
			if got, err := parseCapacity("capacity", c.String()); err != nil || got != c {
				t.Errorf("parseCapacity(%q) = %v, %v", c, got, err)
			}
		}
	})
}

// A burst lasts as long at another rate. One of the least size does not grow beyond the default.
func TestRescaled(t *testing.T) {
	for _, c := range []struct {
		capacity string
		rates    []Rate
		usual    func(Rate) uint64
		want     uint64
	}{
		{"64kb", []Rate{10_000_000, 50_000_000}, DefaultCapacity, 320 << 10},
		{"1250000b", []Rate{10_000_000, 50_000_000}, DefaultCapacity, 6_250_000},
		{"64kb", []Rate{10_000_000, 8_000, 10_000_000}, DefaultCapacity, 375_000},
		{"64kb", []Rate{10_000_000, 8_000, 600_000, 10_000_000}, DefaultCapacity, 375_000},
		{"50000b", []Rate{10_000_000, 8_000, 10_000_000}, DefaultQueue, 62_500},
	} {
		var got Capacity
		if err := got.Set(c.capacity); err != nil {
			t.Fatal(err)
		}
		for i := range c.rates[1:] {
			got = got.Rescaled(c.rates[i], c.rates[i+1], c.usual)
		}
		if got.bytes != c.want {
			t.Errorf("%s at %v: %d bytes, not %d", c.capacity, c.rates, got.bytes, c.want)
		}
	}
}

func TestMostIn(t *testing.T) {
	usual := Rule{Rate: 20e6, Capacity: DefaultCapacity(20e6)}
	for name, test := range map[string]struct {
		change      func(*Rule)
		second, ten Rate
	}{
		"the default":     {func(*Rule) {}, 26e6, 20.6e6},
		"a short burst":   {func(r *Rule) { r.Capacity = 125_000 }, 21e6, 20.1e6},
		"ECN":             {func(r *Rule) { r.Excess = ECN }, 32e6, 21.2e6},
		"a queue":         {func(r *Rule) { r.Excess, r.Queue = Delay, 1e6 }, 26e6, 20.6e6},
		"an even output":  {func(r *Rule) { r.Excess, r.Algorithm = Delay, Leaky }, 20e6, 20e6},
		"excess passes":   {func(r *Rule) { r.Excess = Pass }, Unlimited, Unlimited},
		"each connection": {func(r *Rule) { r.Each.Kind = EachFlow }, Unlimited, Unlimited},
		"colours":         {func(r *Rule) { r.Algorithm = SRTCM }, Unlimited, Unlimited},
		"no rate":         {func(r *Rule) { r.Rate, r.Capacity = Unlimited, 0 }, Unlimited, Unlimited},
	} {
		r := usual
		test.change(&r)
		if second, ten := r.MostIn(time.Second), r.MostIn(10*time.Second); second != test.second || ten != test.ten {
			t.Errorf("%s: %v in 1 s, %v in 10 s; want %v, %v", name, second, ten, test.second, test.ten)
		}
	}
}
