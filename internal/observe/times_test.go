package observe

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Bins follow each other without gaps, and each is at most 1/64 wide.
func TestBins(t *testing.T) {
	for i := range uint32(1500) {
		from, to := floor(i), floor(i+1)
		if binOf(from) != i || binOf(to-1) != i || to <= from {
			t.Fatalf("bin %d has %d to %d, in the bins %d and %d", i, from, to-1, binOf(from), binOf(to-1))
		}
		if width := to - from; width > 1<<baseBits && width > from/64 {
			t.Errorf("bin %d is %v wide from %v on", i, width, from)
		}
	}
}

func TestQuantiles(t *testing.T) {
	var all []time.Duration
	var times Times
	var sum time.Duration
	for range 10000 {
		d := time.Duration(rand.ExpFloat64() * 2e7)
		all = append(all, d)
		times.add(d)
		sum += d
	}
	slices.Sort(all)
	for _, part := range []float64{0, 0.5, 0.95, 1} {
		want := all[min(int(part*10000), 9999)]
		if got := times.Quantile(part); (got - want).Abs() > want/64+2048 {
			t.Errorf("quantile %v is %v, want %v", part, got, want)
		}
	}
	if times.Samples != 10000 || times.Min != all[0] || times.Max != all[9999] || times.Mean() != sum/10000 {
		t.Errorf("%+v", times)
	}
	if none := (Times{}); none.Quantile(0.5) != 0 || none.Mean() != 0 {
		t.Error("no samples have a time")
	}
}
