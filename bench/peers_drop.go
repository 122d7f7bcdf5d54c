package main

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/shapectl/shapectl/pkg/policy"
)

// newDroppingLane sets a limiter up such that a tenth of what is sent passes.
// The rate for that follows from how fast the sender is, which follows from
// what a drop costs: it is found by trying, from what a packet takes about. The
// share may be off by tolerance times what it is to be, and by once more for
// each try: on a noisy machine the sender's speed changes between them.
func newDroppingLane(ctx context.Context, s competitor, to netip.Addr, w warmUp,
	nanoseconds, tolerance float64) (*lane, error) {
	frame := float64(smallFrame)
	if to.Is6() {
		frame += 20
	}
	rate, share := frame*8*1e9/nanoseconds/10, 0.0
	for try := range 10 {
		p, err := newLane(ctx, s, limit{policy.Rate(rate), max(4096, uint64(rate/8/100))}, w, to)
		if err != nil {
			return nil, err
		}
		if share, err = p.drained(w.packets); err != nil {
			p.Close()
			return nil, fmt.Errorf("%s: %w", s.name, err)
		}
		if off := 1 + tolerance*float64(1+try); share > 0.1/off && share < 0.1*off {
			p.drops = true
			return p, nil
		}
		p.Close()
		rate *= 0.1 / max(share, 0.01)
	}
	return nil, fmt.Errorf("%s: no rate lets a tenth through: %.2g pass at %v", s.name, share, policy.Rate(rate))
}

// drained sends until a full bucket is no longer what lets packets through,
// and returns the share of packets that passed then.
func (p *lane) drained(packets int) (share float64, err error) {
	for range 200 {
		if share, err = p.passing(packets); err != nil || share < 0.5 {
			break
		}
	}
	if err != nil {
		return 0, err
	}
	return p.passing(packets)
}

// passing sends packets, and returns the share of them that passed.
func (p *lane) passing(packets int) (share float64, err error) {
	before, err := p.sent()
	if err != nil {
		return 0, err
	}
	if _, err := p.send(packets); err != nil {
		return 0, err
	}
	after, err := p.sent()
	return float64(after-before) / float64(packets), err
}
