package policy

import "time"

const (
	// defaultDrain is longer than TCP's shortest retransmission timeout, 200 ms on
	// Linux. A sender that lost a whole window is silent for that long, and a bucket
	// that drains sooner loses the rate meanwhile. At 20 mbit and a round trip up to
	// 0.5 ms, cubic and BBR reach half of the rate with 100 ms, and 97 % with 200 ms.
	// From 3 to 30 ms, 50 ms are enough. Over 100 ms, cubic reaches 68 % with 50 ms. A
	// speed test would be within 3 % with 40 ms or less (docs/concepts.md has the curve).
	defaultDrain = 300 * time.Millisecond
	// minDefaultCapacity holds two of the largest packets of segmentation offload. With
	// less, BBR at 1 mbit stays at a tenth of the rate.
	minDefaultCapacity = 128 << 10
)

// DefaultCapacity returns the default capacity in bytes of a rule of rate r that does not
// delay packets. It is large enough for TCP to reach the rate.
func DefaultCapacity(r Rate) uint64 {
	return max(minDefaultCapacity, bytesIn(defaultDrain, r))
}

const (
	// With a queue of 50 ms, one cubic flow reaches 99 % of 5 to 100 mbit over a round
	// trip of 20 ms or 80 ms. With 20 ms more packets are lost. With 100 ms a ping
	// beside it takes longer, and nothing else changes.
	defaultDelay = 50 * time.Millisecond
	// At 1 mbit, 50 ms are four packets, and 8 % are lost. With 16 KiB 1.6 % are lost.
	minDefaultQueue = 16 << 10
)

// DefaultQueue returns the default length in bytes of the queue of a rule of rate r. At
// low rates it is half of what MaxWait allows.
func DefaultQueue(r Rate) uint64 {
	return max(min(minDefaultQueue, bytesIn(MaxWait/2, r)), bytesIn(defaultDelay, r))
}

// defaultECNAbove is half of the longest delay. Cubic nearly halves its window after a
// mark, so the queue must keep the link busy meanwhile. With half of 50 ms, cubic reaches
// 98 to 99 % of 5 to 100 mbit over a round trip of 20 ms, and 89 % over 80 ms. With 5 ms,
// it reaches 75 to 96 % and 60 to 67 %. A ping beside it takes 18 ms instead of 40.
func defaultECNAbove(longest time.Duration) ECNAbove {
	return ECNAbove(max(longest/2, 1))
}
