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
	// A queue of 50 ms lets one cubic flow reach 99 % of 5 to 100 mbit over 20 ms
	// there and back, and as much over 80 ms; 20 ms of it lose more packets, 100 ms
	// only keep a ping beside it waiting for longer.
	defaultWait = 50 * time.Millisecond
	// At 1 mbit, 50 ms are four packets, of which 8 % are lost; 16 KiB lose 1.6 %.
	defaultLeastQueue = 16 << 10
)

// DefaultQueue is the length in bytes of the queue of a rule of rate r that
// does not say one. At low rates it is what is valid with room to spare.
func DefaultQueue(r Rate) uint64 {
	return max(min(defaultLeastQueue, bytesIn(MaxWait/2, r)), bytesIn(defaultWait, r))
}

// defaultECNAbove is half of the longest wait. Cubic halves its window, nearly,
// for any mark in a round trip, so what is queued then has to keep the link busy:
// with half of 50 ms it reaches 98 to 99 % over 20 ms there and back at 5 to 100
// mbit and 89 % over 80 ms, where 5 ms leave it at 75 to 96 % and 60 to 67 %. A
// ping beside it waits for 18 ms instead of 40.
func defaultECNAbove(longest time.Duration) ECNAbove {
	return ECNAbove(max(longest/2, 1))
}
