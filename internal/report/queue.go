package report

import (
	"fmt"
	"strings"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Queue is what of a rule's excess may wait.
type Queue struct {
	QueueBytes    uint64 `json:"queue_bytes"`     // 0 for a rule that does not delay
	LongestWaitNS uint64 `json:"longest_wait_ns"` // that packets can be held back for
	// ECNAboveNS is how long a packet may wait without being marked; null where nothing is marked for that.
	ECNAboveNS *uint64 `json:"ecn_above_ns"`
}

func newQueue(r policy.Rule) Queue {
	bytes, longest := r.Waiting()
	q := Queue{QueueBytes: bytes, LongestWaitNS: uint64(longest)}
	if bytes > 0 && r.ECNAbove != policy.Never {
		above := uint64(r.ECNAbove)
		q.ECNAboveNS = &above
	}
	return q
}
