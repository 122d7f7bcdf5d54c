package cluster

import "time"

// A demand is the rate that a pool's senders would use if it was not limited, as far as its counters tell.
type demand struct {
	at              uint64 // ns
	passed, refused uint64 // bytes by then
	use             uint64 // bits per second since the sample before
	recent          []ask
}

// An ask is a rate that was asked for at a time.
type ask struct{ at, rate uint64 }

const (
	// shortest is the least time between two samples. In less, a burst looks like a high rate.
	shortest = uint64(100 * time.Millisecond)
	// remembered is for how long a demand counts after it was measured. TCP sends less for some round-trip times after
	// each loss; its lease must not follow that.
	remembered = uint64(750 * time.Millisecond)
)

// measure takes another sample. Whoever sends without regard for drops offers what he wants. TCP offers hardly more than
// passes, however much it could use. So a pool that is in use to its limit asks for twice its rate.
func (d *demand) measure(now uint64, p Pool) {
	elapsed := now - d.at
	if d.at == 0 || p.Passed < d.passed || p.Refused < d.refused {
		*d = demand{at: now, passed: p.Passed, refused: p.Refused}
		return
	}
	if elapsed < shortest {
		return
	}
	rateOf := func(bytes uint64) uint64 { return uint64(float64(bytes) * 8 * float64(time.Second) / float64(elapsed)) }
	use, refused := rateOf(p.Passed-d.passed), rateOf(p.Refused-d.refused)
	want, rate := use+refused, p.Lease.At(now)
	want += want / 20
	if limit := rate - rate/20; use > limit || refused > 0 && use > rate/2 {
		want = max(want, 2*rate)
	}
	d.at, d.passed, d.refused, d.use = now, p.Passed, p.Refused, use
	kept := d.recent[:0]
	for _, a := range d.recent {
		if a.at+remembered > now {
			kept = append(kept, a)
		}
	}
	d.recent = append(kept, ask{now, min(want, p.Rate)})
}

// wanted is the largest recent demand in bits per second.
func (d *demand) wanted() (rate uint64) {
	for _, a := range d.recent {
		rate = max(rate, a.rate)
	}
	return rate
}
