package replay

import (
	"maps"
	"time"

	"github.com/shapectl/shapectl/internal/model"
)

const (
	firstSweep = 1 << 16
	// slack is how far (ns) a trace may step back in time without a change to buckets.
	slack = uint64(100 * time.Millisecond)
)

// A table has a T for each bucket key. Missing keys have the zero T.
type table[T any] struct {
	of      map[bucketKey]*T
	sweepAt int
}

func newTable[T any]() table[T] { return table[T]{map[bucketKey]*T{}, firstSweep} }

func (t *table[T]) get(k bucketKey) *T {
	v := t.of[k]
	if v == nil {
		v = new(T)
		t.of[k] = v
	}
	return v
}

// sweep removes entries that are equivalent to a zero T. It runs only when the table has twice the entries that
// the last sweep kept, so its cost per packet is small.
func (t *table[T]) sweep(isEmpty func(bucketKey, *T) bool) {
	if len(t.of) < t.sweepAt {
		return
	}
	maps.DeleteFunc(t.of, isEmpty)
	t.sweepAt = max(firstSweep, 2*len(t.of))
}

func drained(l *model.Limit, b model.Bucket, now uint64) bool {
	return l.Level(b, now-min(now, slack)) == 0
}
