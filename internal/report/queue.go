package report

import (
	"fmt"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Queue is what of a rule's packets may wait.
type Queue struct {
	QueueBytes    uint64 `json:"queue_bytes"`     // 0 for a rule that holds nothing back
	LongestWaitNS uint64 `json:"longest_wait_ns"` // that there can be
	// ECNAboveNS is how long a packet may wait without being marked; null where none is marked for that.
	ECNAboveNS *uint64 `json:"ecn_above_ns"`
	Order      string  `json:"order"` // in which packets leave
	beyond     uint64  // of QueueBytes, those that the capacity does not count
}

// NewQueue is that of a rule.
func NewQueue(r policy.Rule) Queue {
	bytes, longest := r.Waiting()
	q := Queue{QueueBytes: bytes, LongestWaitNS: uint64(longest), Order: r.Order.String(), beyond: r.Queue}
	if bytes > 0 && r.ECNAbove != policy.Never {
		above := uint64(r.ECNAbove)
		q.ECNAboveNS = &above
	}
	return q
}

// holds is what a bucket and its queue hold together.
func (q Queue) holds(capacity uint64) uint64 { return capacity + q.beyond }

// delays says whether the rule holds packets back.
func (q Queue) delays() bool { return q.QueueBytes > 0 }

// filled says how full a sharer's bucket is, and its queue.
func (q Queue) filled(sharer string, level, capacity uint64) string {
	fill := func(level, of uint64) string {
		return fmt.Sprintf("%d of %d bytes (%s full)", level, of, percent(level, of))
	}
	switch {
	case !q.delays():
		return "bucket of " + sharer + ": " + fill(level, capacity)
	case q.beyond == 0:
		return "queue of " + sharer + ": " + fill(level, capacity)
	}
	inside := min(level, capacity)
	return "bucket of " + sharer + ": " + fill(inside, capacity) + ", queue: " + fill(level-inside, q.beyond)
}
