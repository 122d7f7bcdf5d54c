package replay

import (
	"errors"

	"github.com/shapectl/shapectl/bpf"
	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// longEra is half the time (ns) after which the ticks of buckets repeat: 73 years. Every bucket
// drains in less.
const longEra = uint64(1) << (32 + model.TickBits - 1)

// errLongEra means that the ages of buckets would be ambiguous.
var errLongEra = errors.New("the trace has 146 years without a pause in which all buckets drain, more than a meter can tell apart; cut it into parts")

// mostLate is how far (ns) the data path expects its clock to step back, and more.
const mostLate = uint64(bpf.AbiLayoutTICKS_LATE) << model.TickBits

// An era is a time in which the ticks of buckets are unambiguous. A longer trace has
// several: a new one begins after a pause in which all buckets drain, or where the clock steps back too far.
type era struct {
	idle             uint64 // ns after which every bucket has drained
	from, until, now uint64 // ns: the earliest, the latest and the last packet
	begun            bool
}

func newEra(l Limits) (e era) {
	for _, r := range l.all() {
		guaranteed, _ := r.Guaranteed()
		second, _ := r.Second()
		for _, limit := range []policy.Rule{r, guaranteed, second} {
			if limit.Rate != policy.Unlimited && limit.Rate != 0 {
				e.idle = max(e.idle, (uint64(model.NewLimit(limit).Idle)+1)<<model.TickBits)
			}
		}
	}
	return e
}

// next advances to the time of the next packet. It reports whether a new era, with empty buckets, begins there.
func (e *era) next(at uint64) (another bool, err error) {
	from, until := min(e.from, at), max(e.until, at)
	switch paused := at > e.now && at-e.now > e.idle; {
	case !e.begun:
		from, until = at, at
	case at < e.until && e.until-at > mostLate:
		from, until, another = at, at, true
	case until-from <= longEra/4: // the ticks of an edit reach back by up to longEra/2
	case paused:
		from, until, another = at, at, true
	case until-from >= 2*longEra-1<<model.TickBits:
		return false, errLongEra
	}
	e.from, e.until, e.now, e.begun = from, until, at, true
	return another, nil
}
