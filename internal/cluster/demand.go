package cluster

import "time"

// A demand is the rate that a pool's senders would use if it was not limited, as far as its counters tell.
type demand struct {
	at              uint64 // ns
	passed, refused uint64 // bytes by then
	use, offered    uint64 // bits per second since the sample before
	rate            uint64 // in force then
	limited         uint64 // when senders last were, by that
	starved         bool   // it was limited by so little that TCP could not show what it wants
	wanted, keeps   uint64 // see Request
}

const (
	// shortest is the least time between two samples. In less, a burst looks like a high rate.
	shortest = uint64(100 * time.Millisecond)
	// headroom is how much more than its demand a pool asks for, as 1/headroom.
	headroom = 64
	// few drops are less than 1/few of what passes.
	few   = 512
	greed = 4
	// remembered is for how long a pool that was limited asks for nearly its rate: TCP sends less for some round-trip times
	// after each loss, and nothing until it sends again. Its lease must not follow that.
	remembered = uint64(time.Second)
)

// measure takes another sample. Whoever sends without regard for drops goes on to offer what he wants. TCP offers hardly
// more than passes, however much it could use, and with a small burst much less than the rate. So the pool asks for several
// times its rate where few packets are dropped, and also where senders have only begun: max-min fairness bounds what it gets.
func (d *demand) measure(now uint64, p Pool) {
	elapsed := now - d.at
	if d.at == 0 || p.Passed < d.passed || p.Refused < d.refused {
		*d = demand{at: now, passed: p.Passed, refused: p.Refused}
		if p.Lease.Until != 0 { // until more is known, it wants what another process got for it
			d.wanted, d.keeps = uint64(p.Lease.At(now)), uint64(p.Lease.At(now))
		}
		return
	}
	if elapsed < shortest {
		return
	}
	rateOf := func(bytes uint64) uint64 { return uint64(float64(bytes) * 8 * float64(time.Second) / float64(elapsed)) }
	use, refused, rate := rateOf(p.Passed-d.passed), rateOf(p.Refused-d.refused), uint64(p.Lease.At(now))
	offered := use + refused
	want := offered + offered/headroom
	steady := offered < d.offered+d.offered/4 && d.offered < offered+offered/4
	switch overload := refused > use/4 && offered > rate+rate/4; {
	case overload:
		if d.starved = !steady; d.starved {
			want = max(want, greed*rate, uint64(p.Lease.Safe))
		}
		d.limited = now
	case refused > use/few || use > rate-rate/(2*headroom):
		// Who offers no more than with a lower rate, or when he was not limited, may have what he wants.
		want = max(want, rate)
		if offered > d.offered+d.offered/16 || d.limited == d.at && rate <= d.rate+d.rate/16 {
			want = max(want, greed*rate)
		}
		d.limited = now
	case now-d.limited < remembered:
		most := max(offered, d.offered)
		want = max(want, min(rate-rate/8, most+most/4))
		if d.starved && now-d.limited < remembered/2 {
			want = max(want, uint64(p.Lease.Safe))
		}
	default:
		d.starved = false
	}
	d.at, d.passed, d.refused = now, p.Passed, p.Refused
	d.use, d.offered, d.rate = use, offered, rate
	d.wanted, d.keeps = min(want, p.Rate), 0
	if use > rate/2 {
		d.keeps = rate / 2
	}
}
