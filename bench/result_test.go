package main

import "testing"

func TestSummarize(t *testing.T) {
	for _, c := range []struct {
		samples           []float64
		median, low, high float64
	}{
		{nil, 0, 0, 0},
		{[]float64{7}, 7, 7, 7},
		{[]float64{2, 1}, 1.5, 1.25, 1.75},
		{[]float64{5, 1, 3, 2, 4}, 3, 2, 4},
		{[]float64{4, 1, 3, 2}, 2.5, 1.75, 3.25},
		{[]float64{1, 1, 1, 1, 1000}, 1, 1, 1}, // one disturbed round has no effect
	} {
		before := append([]float64(nil), c.samples...)
		median, low, high := summarize(c.samples)
		if median != c.median || low != c.low || high != c.high {
			t.Errorf("%v: median %v, quartiles %v and %v; want %v, %v and %v", before, median, low, high, c.median, c.low, c.high)
		}
		for i := range before {
			if c.samples[i] != before[i] {
				t.Fatalf("%v became %v: rounds must stay in order, because ratios pair them", before, c.samples)
			}
		}
	}
}

// Every other subject is a peer, so a new one cannot be missing where peers win.
func TestPeer(t *testing.T) {
	for subject, want := range map[string]bool{
		"shapectl gcra": false, "shapectl leaky, each flow": false,
		emptyProgram: false, noLimiter: false, sharedCAS: false,
		"tc police": true, lruMap: true, "anything else": true,
	} {
		if peer(subject) != want {
			t.Errorf("%q is a peer: %v", subject, !want)
		}
	}
}

func TestNumber(t *testing.T) {
	for f, want := range map[float64]string{
		0: "0", 1: "1", 0.25: "0.25", 12.345: "12.3", 999.4: "999", 1234.6: "1 235", 1048576: "1 048 576",
		0.00001234: "0.000012", 2.0004: "2", -3.21: "-3.21", -1234: "-1 234", 999.9: "1 000", 1e6: "1 000 000",
	} {
		if got := number(f); got != want {
			t.Errorf("%v reads %q, not %q", f, got, want)
		}
	}
}
