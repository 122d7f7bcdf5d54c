package model

import (
	"fmt"
	"testing"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

// These tests have rows of others as data: docs/judges.md says whose they are, and where they differ.

// Requests of throttled are packets of 3000 bytes here, so that its rates are whole numbers of bits per second.
func TestGCRAOfThrottled(t *testing.T) {
	type row struct {
		at           time.Duration
		quantity     uint64
		limited      bool
		remaining    uint64
		reset, retry time.Duration // retry is -1 for none
	}
	const request = 3000
	sec := time.Second
	for _, test := range []struct {
		limit  uint64 // requests at once
		period time.Duration
		rows   []row
	}{
		{5, sec, []row{
			{0, 6, true, 5, 0, -1},
			{0, 1, false, 4, sec, -1},
			{0, 1, false, 3, 2 * sec, -1},
			{0, 1, false, 2, 3 * sec, -1},
			{0, 1, false, 1, 4 * sec, -1},
			{0, 1, false, 0, 5 * sec, -1},
			{0, 1, true, 0, 5 * sec, sec},
			{3000 * time.Millisecond, 1, false, 2, 3000 * time.Millisecond, -1},
			{3100 * time.Millisecond, 1, false, 1, 3900 * time.Millisecond, -1},
			{4000 * time.Millisecond, 1, false, 1, 4000 * time.Millisecond, -1},
			{8000 * time.Millisecond, 1, false, 4, 1000 * time.Millisecond, -1},
			{9500 * time.Millisecond, 1, false, 4, 1000 * time.Millisecond, -1},
			{9500 * time.Millisecond, 0, false, 4, sec, -1},
			{9500 * time.Millisecond, 2, false, 2, 3 * sec, -1},
			{9500 * time.Millisecond, 5, true, 2, 3 * sec, 3 * sec},
			{15000 * time.Millisecond, 6, true, 5, 0, -1},
		}},
		{1, sec / 300, []row{{0, 1, false, 0, sec / 300, -1}, {0, 1, true, 0, sec / 300, sec / 300}, {0, 1, true, 0, sec / 300, sec / 300}}},
		{2, 30 * sec, []row{{0, 1, false, 1, 30 * sec, -1}, {0, 1, false, 0, 60 * sec, -1}, {0, 1, true, 0, 60 * sec, 30 * sec}}},
	} {
		l, b := NewLimit(policy.Rule{Rate: policy.Rate(8 * request * sec / test.period), Capacity: test.limit * request}), Bucket{}
		for i, r := range test.rows {
			now := uint64(time.Hour + r.at)
			p := Packet{Time: now, Bytes: r.quantity * request}
			if r.quantity > test.limit {
				// throttled refuses it for ever. A packet that is larger than the burst passes if the bucket is empty, or nothing
				// would ever pass: section 3 of the contract.
				if o := l.Decide(State{Level: l.Level(b, now)}, p); o.Excess {
					t.Errorf("%v, row %d: %+v", test.period, i, o)
				}
			} else if o := l.Offer(&b, nil, false, p); o.Excess != r.limited || r.limited && !near(o.Wait, r.retry) {
				t.Errorf("%v, row %d: excess %v, wait %v; want %v, %v", test.period, i, o.Excess, time.Duration(o.Wait), r.limited, r.retry)
			}
			level := l.Level(b, now)
			if got := (l.Capacity - level) / (request << UnitBits); got != r.remaining || !near(l.Drain(level), r.reset) {
				t.Errorf("%v, row %d: %d requests left, empty in %v; want %d, %v", test.period, i, got, time.Duration(l.Drain(level)), r.remaining, r.reset)
			}
		}
	}
}

// near allows for whole nanoseconds and bits per second.
func near(ns uint64, want time.Duration) bool { return (time.Duration(ns) - want).Abs() <= want/1e6+1 }

// DPDK's own tests of its meters: a packet a byte below and above each burst size comes to full buckets.
func TestRowsOfDPDK(t *testing.T) {
	const cir, second, cbs, burst = 8 * 46_000_000, 8 * 69_000_000, 2048, 4096
	const green, yellow, red = policy.Green, policy.Yellow, policy.Red
	sizes := [4]uint64{cbs - 1, cbs + 1, burst - 1, burst + 1}
	for _, algorithm := range coloured {
		for _, test := range []struct {
			aware bool
			in    policy.Colour
			out   [4]policy.Colour
		}{
			{false, green, [4]policy.Colour{green, yellow, yellow, red}},
			{true, green, [4]policy.Colour{green, yellow, yellow, red}},
			{true, yellow, [4]policy.Colour{yellow, yellow, yellow, red}},
			{true, red, [4]policy.Colour{red, red, red, red}},
		} {
			l := NewColoured(colouredRule(algorithm, test.aware, cir, cbs, second, burst))
			for i, size := range sizes {
				if got := l.Offer(&Pair{}, uint64(time.Second), size, test.in); got != test.out[i] {
					t.Errorf("%v, aware %v: %d bytes in %v are %v, want %v", algorithm, test.aware, size, test.in, got, test.out[i])
				}
			}
		}
	}
	for _, test := range []struct {
		algorithm           policy.Algorithm
		cir, second         policy.Rate
		cbs, burst          uint64
		dpdkTakes, weDiffer bool
	}{
		{policy.SRTCM, cir, 0, cbs, burst, true, false},
		{policy.SRTCM, cir, 0, 0, 0, false, false},
		{policy.SRTCM, 0, 0, cbs, burst, false, false},
		{policy.SRTCM, cir, 0, cbs, 0, true, false},
		{policy.SRTCM, cir, 0, 0, burst, true, true}, // a rule has a CBS of at least a full packet
		{policy.TRTCM, cir, second, cbs, burst, true, false},
		{policy.TRTCM, 0, second, cbs, burst, false, false},
		{policy.TRTCM, cir, second, 0, burst, false, false},
		{policy.TRTCM, cir, second, cbs, 0, false, false},
		{policy.TRTCM, cir, 0, cbs, burst, false, false},
		{policy.TRTCM, cir, cir - 8, cbs, burst, false, false},
		{policy.RFC4115, cir, second, cbs, burst, true, false},
		{policy.RFC4115, cir, second, 0, burst, false, false},
		{policy.RFC4115, cir, second, cbs, 0, false, true}, // no packet is yellow then
	} {
		r := colouredRule(test.algorithm, false, test.cir, test.cbs, test.second, test.burst)
		r.Prefix = policy.Everything[0]
		r.Colours.Green, r.Colours.Yellow, r.Colours.Red = policy.ActionPass, policy.ActionPass, policy.ActionDrop
		if err := r.Validate(); (err == nil) == (test.dpdkTakes == test.weDiffer) {
			t.Errorf("%+v: %v", test, err)
		}
	}
}

// The service configuration test of ITU-T Y.1564 in virtual time: steps up to the CIR (A.2), CIR and EIR (B), more than both (C),
// and bursts (D); with frames that have colours (B.1, C.1) and without. Bounds are bytes.
func TestServiceConfigurationOfY1564(t *testing.T) {
	const cir, eir, line, cbs, ebs, seconds = 10_000_000, 5_000_000, 1_000_000_000, 40_000, 30_000, 10
	for _, algorithm := range []policy.Algorithm{policy.TRTCM, policy.RFC4115} {
		for _, size := range []uint64{64, 128, 256, 512, 1024, 1280, 1518} {
			t.Run(fmt.Sprintf("%v/%d", algorithm, size), func(t *testing.T) {
				second, burst, frame := policy.Rate(eir), uint64(ebs), float64(size)
				if algorithm == policy.TRTCM {
					second, burst = cir+eir, cbs+ebs
				}
				start := func(aware bool) *service {
					return &service{l: NewColoured(colouredRule(algorithm, aware, cir, cbs, second, burst)), size: frame, now: 1e12}
				}
				bytes := func(rate float64) float64 { return rate * seconds / 8 }
				is := func(what string, got, least, most float64) {
					say := t.Logf
					if got < least || got > most {
						say = t.Errorf
					}
					say("%s: %.0f bytes, want %.0f to %.0f", what, got, least, most)
				}
				for _, step := range []float64{.25, .5, .75, 1} {
					s := start(false)
					s.send(step*cir, 0, s.frames(step*cir, seconds))
					is(fmt.Sprintf("A.2, %.0f %% of the CIR, not green", 100*step), s.got[policy.Yellow]+s.got[policy.Red], 0, 0)
				}
				for _, test := range []struct {
					name string
					over float64 // times the EIR
					room float64 // bytes that the bursts allow beyond the rates
				}{{"B", 1, 0}, {"C", 1.25, cbs + ebs}} {
					s := start(false)
					s.send(cir+test.over*eir, 0, s.frames(cir+test.over*eir, seconds))
					is(test.name+".2, green", s.got[policy.Green], bytes(cir)-frame, bytes(cir)+cbs)
					is(test.name+".2, passed", s.got[policy.Green]+s.got[policy.Yellow], bytes(cir+eir)-2*frame, bytes(cir+eir)+test.room)
					if algorithm == policy.TRTCM {
						continue // yellow frames take from P, so green ones may be red beside too many of them (RFC 2698)
					}
					s = start(true)
					s.send(cir, test.over*eir, s.frames(cir, seconds))
					is(test.name+".1, green", s.got[policy.Green], bytes(cir)-frame, bytes(cir))
					is(test.name+".1, yellow", s.got[policy.Yellow], bytes(eir)-2*frame, bytes(eir)+test.room)
				}
				for _, test := range []struct {
					name         string
					rate, refill float64 // bits per second, s
					frames       int     // whole ones that each bucket holds
					most         policy.Colour
				}{
					{"D.1", cir, 8. * cbs / cir, int(cbs / size), policy.Green},
					{"D.2", cir + eir, max(8.*cbs/cir, 8.*ebs/eir), int(cbs/size + ebs/size), policy.Yellow},
				} {
					frames := test.frames
					for _, more := range []int{0, int(float64(frames)*test.rate/(line-test.rate)) + 4} { // tokens come meanwhile
						s := start(false)
						for range 2 {
							s.now += test.refill * 1e9
							s.send(line, 0, frames+more)
							s.now += test.refill / 2 * 1e9
							s.send(test.rate, 0, 9*frames)
						}
						beyond := s.got[policy.Red]
						if test.most == policy.Green {
							beyond += s.got[policy.Yellow]
						}
						is(fmt.Sprintf("%s, beyond a burst of %d frames", test.name, frames+more), beyond, min(float64(more), 2)*frame, float64(2*more)*frame)
					}
				}
			})
		}
	}
}

// A service is a meter to which frames of one size are sent.
type service struct {
	l         *Coloured
	p         Pair
	size, now float64    // bytes, ns
	got       [3]float64 // bytes by colour
}

func (s *service) frames(rate, seconds float64) int { return int(rate * seconds / 8 / s.size) }

// send sends green frames at a rate, and meanwhile yellow ones at another rate, which may be 0.
func (s *service) send(rate, yellow float64, frames int) {
	green, sent, gap := 0, 0, func(rate float64) float64 { return s.size * 8e9 / rate }
	for green < frames {
		in, at := policy.Green, float64(green)*gap(rate)
		if other := float64(sent) * gap(yellow); yellow > 0 && other < at {
			in, at = policy.Yellow, other
			sent++
		} else {
			green++
		}
		s.got[s.l.Offer(&s.p, uint64(s.now+at), uint64(s.size), in)] += s.size
	}
	s.now += float64(frames) * gap(rate)
}
