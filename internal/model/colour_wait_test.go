package model

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// After the time that Until returns, and not a ns before, Decide returns the better colour. As many packets as Room returns
// get it at once.
func TestColourUntil(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	never, waited := 0, 0
	for range 20_000 {
		r := policy.Rule{
			Prefix: netip.MustParsePrefix("10.0.0.0/24"), Rate: policy.Rate(8000 + random.Uint64N(1e9)), Capacity: 1514 + random.Uint64N(10_000),
			Algorithm: []policy.Algorithm{policy.SRTCM, policy.TRTCM, policy.RFC4115}[random.IntN(3)],
		}
		r.Colours.Aware = random.IntN(2) == 0
		switch r.Algorithm {
		case policy.TRTCM:
			r.Colours.PIR, r.Colours.PBS = r.Rate+policy.Rate(random.Uint64N(1e9)), 1514+random.Uint64N(10_000)
		case policy.RFC4115:
			r.Colours.EIR = policy.Rate(8000 + random.Uint64N(1e9))
			fallthrough
		default:
			r.Colours.EBS = random.Uint64N(3) / 2 * (1514 + random.Uint64N(10_000))
		}
		l, p, now := NewColoured(r), Pair{}, uint64(1e9)
		for range random.IntN(12) {
			now += random.Uint64N(1e6)
			l.Offer(&p, now, 64+random.Uint64N(3000), policy.Green)
		}
		bytes, in := 1+random.Uint64N(12_000), policy.Colour(random.IntN(3))
		levels := l.Levels(p, now)
		colour, _ := l.Decide(levels, bytes, in)
		for _, better := range []policy.Colour{policy.Green, policy.Yellow} {
			ns, ever := l.Until(levels, bytes, in, better)
			at := func(later uint64) policy.Colour {
				colour, _ := l.Decide(l.Levels(p, now+later), bytes, in)
				return colour
			}
			switch {
			case !ever:
				never++
				if got := at(1 << 45); got <= better { // all is empty
					t.Fatalf("%+v, %d bytes, %v in: never %v, but then it is %v", r, bytes, in, better, got)
				}
			case ns == 0 && colour > better, at(ns) > better:
				t.Fatalf("%+v, %+v, %d bytes, %v in: %v in %d ns, but then it is %v", r, levels, bytes, in, better, ns, at(ns))
			case ns > 0:
				waited++
				if got := at(ns - 1); got <= better {
					t.Fatalf("%+v, %+v, %d bytes, %v in: %v in %d ns, but before it is %v", r, levels, bytes, in, better, ns, got)
				}
			}
		}
		first, _ := l.Room(levels, bytes)
		after := levels
		for i := uint64(0); i <= first; i++ {
			if colour, after = l.Decide(after, bytes, policy.Green); (colour == policy.Green) != (i < first) {
				t.Fatalf("%+v, %+v, %d bytes: room for %d, and packet %d is %v", r, levels, bytes, first, i, colour)
			}
		}
	}
	if never < 1000 || waited < 1000 {
		t.Errorf("%d never get a colour, %d wait for it", never, waited)
	}
}
