package replay

import (
	"errors"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// longEra is half of the time (ns) after which the ticks of buckets repeat, 73 years: more than
// any bucket takes to drain.
const longEra = uint64(1) << (32 + model.TickBits - 1)

// errLongEra is that nobody could tell how old a bucket is.
var errLongEra = errors.New("the trace goes on for 146 years without a pause in which all buckets drain, and no meter remembers that long; cut it into parts")

// An era is a time in which the ticks of buckets tell when they were charged. A
// trace may go on for longer: in a pause that drains all buckets, another begins.
type era struct {
	idle             uint64 // ns after which any bucket has drained
	from, until, now uint64 // ns: the times of its packets, and of the last one
	begun            bool
}

func newEra(l Limits) (e era) {
	for _, r := range l.Rules {
		if r.Rate != policy.Unlimited {
			e.idle = max(e.idle, (uint64(model.NewLimit(r).Idle)+1)<<model.TickBits)
		}
	}
	return e
}

// next goes to the time of the next packet, and reports whether that is in another era, which begins with empty buckets.
func (e *era) next(at uint64) (another bool, err error) {
	from, until := min(e.from, at), max(e.until, at)
	switch paused := at > e.now && at-e.now > e.idle || at < e.now && e.now-at > longEra; {
	case !e.begun:
		from, until = at, at
	case until-from <= longEra:
	case paused:
		from, until, another = at, at, true
	case until-from >= 2*longEra-1<<model.TickBits:
		return false, errLongEra
	}
	e.from, e.until, e.now, e.begun = from, until, at, true
	return another, nil
}
