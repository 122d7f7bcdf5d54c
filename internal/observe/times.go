package observe

import (
	"math/bits"
	"time"
)

// Times are round-trip times: a log-linear histogram with 16 bins for each power of two.
// The zero Times are none.
type Times struct {
	Samples   uint64
	Min, Max  time.Duration
	sum       time.Duration
	histogram []uint32
}

const (
	subBits  = 4
	baseBits = 10 // bins are of at least 1024 ns
)

func (t *Times) add(d time.Duration) {
	if t.Samples == 0 || d < t.Min {
		t.Min = d
	}
	t.Max = max(t.Max, d)
	t.Samples++
	t.sum += d
	i := bin(d)
	if i >= len(t.histogram) {
		t.histogram = append(t.histogram, make([]uint32, i+1-len(t.histogram))...)
	}
	t.histogram[i]++
}

// bin is the bin of a time, and floor the least time in a bin.
func bin(d time.Duration) int {
	v := uint64(max(d, 0)) >> baseBits
	e := max(bits.Len64(v)-subBits-1, 0)
	return e<<subBits + int(v>>e)
}

func floor(i int) time.Duration {
	e := max(i>>subBits-1, 0)
	return time.Duration(i-e<<subBits) << e << baseBits
}

// Add adds the samples of other.
func (t *Times) Add(other Times) {
	if other.Samples == 0 {
		return
	}
	if t.Samples == 0 || other.Min < t.Min {
		t.Min = other.Min
	}
	t.Max = max(t.Max, other.Max)
	t.Samples += other.Samples
	t.sum += other.sum
	if n := len(other.histogram) - len(t.histogram); n > 0 {
		t.histogram = append(t.histogram, make([]uint32, n)...)
	}
	for i, n := range other.histogram {
		t.histogram[i] += n
	}
}

// Mean is 0 without samples.
func (t Times) Mean() time.Duration {
	if t.Samples == 0 {
		return 0
	}
	return t.sum / time.Duration(t.Samples)
}

// Quantile is the time that a part of all samples (0.5 for the median) does not exceed; 0
// without samples. Its error is at most a bin, 6 %.
func (t Times) Quantile(part float64) time.Duration {
	rank := part * float64(t.Samples)
	for i, n := range t.histogram {
		if rank <= float64(n) && n > 0 {
			from, to := floor(i), floor(i+1)
			return min(max(from+time.Duration(rank/float64(n)*float64(to-from)), t.Min), t.Max)
		}
		rank -= float64(n)
	}
	return t.Max
}
