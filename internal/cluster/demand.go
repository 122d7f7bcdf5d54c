package cluster

import "time"

// A demand is the rate that a pool's senders would use if it was not limited, as far as its counters tell.
type demand struct {
	at              uint64 // ns
	passed, refused uint64 // bytes by then
	use, offered    uint64 // bits per second since the sample before
	rate            uint64 // in force then
	limited         bool   // senders were, by that
	wanted          uint64
}

const (
	// shortest is the least time between two samples. In less, a burst looks like a high rate.
	shortest = uint64(100 * time.Millisecond)
	// headroom is how much more than its demand a pool asks for, as 1/headroom.
	headroom = 64
)

// measure takes another sample. Whoever sends without regard for drops offers what he wants. TCP offers hardly more than
// passes, however much it could use. So a pool that is in use to its limit, with few drops, asks for twice its rate.
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
	use, refused, rate := rateOf(p.Passed-d.passed), rateOf(p.Refused-d.refused), p.Lease.At(now)
	offered := use + refused
	want := offered + offered/headroom
	limited := use > rate-rate/(2*headroom) || refused > use/512 && use > rate/2
	// With a higher rate, TCP offers more. Who does not, or was not limited before, offers what he wants.
	elastic := refused < use/4 && (offered > above(d.offered) || d.limited && rate <= above(d.rate))
	if limited && elastic {
		want = max(want, 2*rate)
	}
	d.at, d.passed, d.refused = now, p.Passed, p.Refused
	d.use, d.offered, d.rate, d.limited = use, offered, rate, limited
	d.wanted = min(want, p.Rate)
}

// above is a rate that is higher by more than chance.
func above(rate uint64) uint64 { return rate + rate/16 }
