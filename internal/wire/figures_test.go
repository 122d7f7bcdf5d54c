//go:build guest

package wire

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// quantiles formats a sample.
func quantiles(sample []time.Duration) string {
	if len(sample) == 0 {
		return "none"
	}
	return fmt.Sprintf("min %v, p1 %v, p50 %v, p99 %v, max %v", slices.Min(sample), quantile(sample, 0.01),
		quantile(sample, 0.5), quantile(sample, 0.99), slices.Max(sample))
}

// quantile returns the value that a share of a sample does not exceed.
func quantile(sample []time.Duration, share float64) time.Duration {
	s := slices.Clone(sample)
	slices.Sort(s)
	return s[int(share*float64(len(s)-1))]
}

// histogram formats the distribution of the gaps between packets around the even gap.
func histogram(gaps []time.Duration, even time.Duration) string {
	// The upper ends of bins, in percent of the even gap.
	ends := []int{1, 50, 90, 95, 98, 99, 101, 102, 105, 110, 150, 1e9}
	counts := make([]int, len(ends))
	for _, g := range gaps {
		counts[slices.IndexFunc(ends, func(end int) bool { return g*100 < even*time.Duration(end) })]++
	}
	var b strings.Builder
	from := "0"
	for i, n := range counts {
		to := fmt.Sprint(ends[i], " %")
		if i == len(ends)-1 {
			to = "more"
		}
		if n > 0 {
			fmt.Fprintf(&b, "  %5s to %5s  %6d  %s\n", from, to, n, strings.Repeat("#", (n*50+len(gaps)-1)/len(gaps)))
		}
		from = fmt.Sprint(ends[i])
	}
	return strings.TrimSuffix(b.String(), "\n")
}
