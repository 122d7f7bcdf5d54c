package policy

import "time"

const (
	// defaultDrain outlasts TCP's shortest retransmission timeout, 200 ms on
	// Linux: a sender that lost a whole window stays silent for that long, and a
	// bucket that drains sooner throws away what the rate would have let through
	// meanwhile. Cubic and BBR on a short path, 5 mbit to 1 gbit, reach 46 to 50 %
	// of the rate with 100 ms, 90 % with 200 ms, 94 to 97 % with 300 ms (of at
	// most 97 %, the rest being headers), and no more with 400 ms.
	defaultDrain = 300 * time.Millisecond
	// defaultLeast holds two of the largest packets that segmentation offload
	// makes; with less, BBR at 1 mbit gets stuck at a tenth of the rate.
	defaultLeast = 128 << 10
)

// DefaultCapacity is the capacity in bytes of a rule of rate r that does not
// say one, and does not hold packets back: what lets TCP reach the rate.
func DefaultCapacity(r Rate) uint64 {
	return max(defaultLeast, bytesIn(defaultDrain, r))
}

const (
	defaultWait       = 50 * time.Millisecond
	defaultLeastQueue = 16 << 10
	defaultECNAbove   = ECNAbove(5 * time.Millisecond)
)

// DefaultQueue is the length in bytes of the queue of a rule of rate r that
// does not say one.
func DefaultQueue(r Rate) uint64 {
	return max(defaultLeastQueue, bytesIn(defaultWait, r))
}
