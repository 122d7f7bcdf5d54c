//go:build guest

package wire

import (
	"fmt"
	"slices"
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
