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
	var whole, first, second Times
	for i := range 10000 {
		d := time.Duration(rand.ExpFloat64() * 2e7)
		all = append(all, d)
		whole.add(d)
		if i%3 == 0 {
			first.add(d)
		} else {
			second.add(d)
		}
	}
	first.Add(second)
	slices.Sort(all)
	for _, part := range []float64{0, 0.5, 0.95, 1} {
		want := all[min(int(part*10000), 9999)]
		for _, got := range []time.Duration{whole.Quantile(part), first.Quantile(part)} {
			if diff := (got - want).Abs(); diff > want/64+2048 {
				t.Errorf("quantile %v is %v, want %v", part, got, want)
			}
		}
	}
	if first.Samples != 10000 || first.Min != all[0] || first.Max != all[9999] || first.Mean() != whole.Mean() {
		t.Errorf("sums of parts differ from the whole: %v %v", first, whole)
	}
	if none := (Times{}); none.Quantile(0.5) != 0 || none.Mean() != 0 {
		t.Error("no samples have a time")
	}
}
