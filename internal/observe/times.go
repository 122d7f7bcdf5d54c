package observe

import (
	"cmp"
	"math/bits"
	"slices"
	"time"
)

// Times are round-trip times: a log-linear histogram with 64 bins for each power of two.
// The zero Times are none.
type Times struct {
	Samples  uint64
	Min, Max time.Duration
	sum      time.Duration
	bins     []bin // those that are not empty, in order
}

// A bin has the samples from floor(number) to floor(number+1).
type bin struct{ number, samples uint32 }

const (
	subBits  = 6
	baseBits = 10 // bins are of at least 1024 ns
)

func (t *Times) add(d time.Duration) {
	if t.Samples == 0 || d < t.Min {
		t.Min = d
	}
	t.Max = max(t.Max, d)
	t.Samples++
	t.sum += d
	number := binOf(d)
	i, found := slices.BinarySearchFunc(t.bins, number, func(b bin, n uint32) int { return cmp.Compare(b.number, n) })
	if !found {
		t.bins = slices.Insert(t.bins, i, bin{number: number})
	}
	t.bins[i].samples++
}

// binOf is the number of the bin of a time, and floor the least time in a bin.
func binOf(d time.Duration) uint32 {
	v := uint64(max(d, 0)) >> baseBits
	e := max(bits.Len64(v)-subBits-1, 0)
	return uint32(e)<<subBits + uint32(v>>e)
}

func floor(number uint32) time.Duration {
	e := max(int(number>>subBits)-1, 0)
	return time.Duration(number-uint32(e)<<subBits) << e << baseBits
}

// Mean is 0 without samples.
func (t Times) Mean() time.Duration {
	if t.Samples == 0 {
		return 0
	}
	return t.sum / time.Duration(t.Samples)
}

// Quantile is the time that a part of all samples (0.5 for the median) does not exceed; 0
// without samples. Its error is at most a bin, 1.6 %.
func (t Times) Quantile(part float64) time.Duration {
	rank := part * float64(t.Samples)
	for _, b := range t.bins {
		n := float64(b.samples)
		if rank <= n {
			from, to := floor(b.number), floor(b.number+1)
			return min(max(from+time.Duration(rank/n*float64(to-from)), t.Min), t.Max)
		}
		rank -= n
	}
	return t.Max
}
