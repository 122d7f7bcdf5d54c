package explain

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// chain returns a rule of 8 Mbit/s and a pool of 4, with levels in bytes.
func chain(rule, pool uint64) []model.Stage {
	stages := []model.Stage{
		{Limit: model.NewLimit(policy.Rule{Rate: 8_000_000, Capacity: 10_000}), Weight: 1},
		{Limit: model.NewLimit(policy.Rule{Rate: 4_000_000, Capacity: 10_000, Pool: true}), Weight: 1},
	}
	stages[0].State.Level, stages[1].State.Level = rule<<model.UnitBits, pool<<model.UnitBits
	return stages
}

func TestWaits(t *testing.T) {
	const ruleNS, poolNS = 1000, 2000 // a byte
	guarantee := model.NewLimit(policy.Rule{Rate: 1_000_000, Capacity: 5000})
	for _, test := range []struct {
		name       string
		rule, pool uint64 // levels
		change     func([]model.Stage)
		want       uint64
	}{
		{"conforms", 9000, 9000, nil, 0},
		{"rule is full", 9500, 0, nil, 500 * ruleNS},
		{"pool is full", 0, 9500, nil, 500 * poolNS},
		{"pool takes longer", 9900, 9800, nil, 800 * poolNS},
		{"rule takes longer", 10000, 9100, nil, 1000 * ruleNS},
		{"only its pool", 0, 10000, func(s []model.Stage) { s[0].Limit = &model.Limit{} }, 1000 * poolNS},
		{"guaranteed", 0, 10000, func(s []model.Stage) { s[0].Guarantee = guarantee }, 0},
		{"guaranteed before the pool has room", 0, 12000, func(s []model.Stage) {
			s[0].Guarantee, s[0].GuaranteeLevel = guarantee, 4100<<model.UnitBits
		}, 100 * 8000},
		{"would be marked", 0, 10000, func(s []model.Stage) { s[1].Excess = policy.ECN }, 1000 * poolNS},
		{"passes as excess", 10000, 0, func(s []model.Stage) { s[0].Excess = policy.Pass }, 1000 * ruleNS},
	} {
		stages := chain(test.rule, test.pool)
		if test.change != nil {
			test.change(stages)
		}
		// Rates are rounded up.
		if got := waits(stages, model.Packet{Bytes: 1000, ECT: true}); got > test.want || got+2 < test.want {
			t.Errorf("%s: %d ns, want %d", test.name, got, test.want)
		}
	}
}

// A sharer that is beyond its share conforms when the clock has come near enough. A forecast changes nothing.
func TestForecastOfShare(t *testing.T) {
	stages := chain(0, 0)
	pool := &stages[1]
	pool.Share = &model.Share{ShareParams: pool.ShareParams()}
	pool.Sharer = &model.Sharer{}
	other, now := &model.Sharer{}, uint64(100e9)
	model.Climb(stages, model.Packet{Time: now})
	pool.Share.Charge(other, 1, 100_000)
	p := model.Packet{Time: now, Bytes: 1000}
	for forecast(stages, p).Refuses == model.NoStage {
		pool.Share.Charge(pool.Sharer, 1, 1000)
	}
	for range 300 { // a debt of which a packet that is offered would forgive the most
		pool.Share.Charge(pool.Sharer, 1, 1000)
	}
	p.Time += 2e6 // the clock advances
	before, sharer := *pool.Share, *pool.Sharer
	if to := forecast(stages, p); to.Refuses != 1 || !to.Beyond {
		t.Errorf("passage %+v", to)
	}
	if got, want := tests(stages, p), []test{{conforms: true}, {conforms: true, share: model.BeyondShare}}; !reflect.DeepEqual(got, want) {
		t.Errorf("tests %+v, want %+v", got, want)
	}
	wait := waits(stages, p)
	if wait == 0 || wait > uint64(time.Hour) {
		t.Errorf("it conforms in %d ns", wait)
	}
	if *pool.Share != before || *pool.Sharer != sharer {
		t.Error("a forecast has changed the share")
	}
	p.Time += wait - 1
	if to := forecast(stages, p); to.Refuses != 1 {
		t.Errorf("it passes before that: %+v", to)
	}
	p.Time++
	if to := forecast(stages, p); to.Refuses != model.NoStage {
		t.Errorf("it is refused then: %+v", to)
	}
}

// After the time that until returns, and not a ns before, Decide returns the better colour. As many packets as room returns
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
		l, p, now := model.NewColoured(r), model.Pair{}, uint64(1e9)
		for range random.IntN(12) {
			now += random.Uint64N(1e6)
			l.Offer(&p, now, 64+random.Uint64N(3000), policy.Green)
		}
		bytes, in := 1+random.Uint64N(12_000), policy.Colour(random.IntN(3))
		levels := l.Levels(p, now)
		colour, _ := l.Decide(levels, bytes, in)
		wait := until(l, levels, bytes, in)
		at := func(later uint64) policy.Colour {
			colour, _ := l.Decide(l.Levels(p, now+later), bytes, in)
			return colour
		}
		switch {
		case wait == nil:
			never++
			if got := at(1 << 45); got == policy.Green { // all is empty
				t.Fatalf("%+v, %d bytes, %v in: never green, but then it is", r, bytes, in)
			}
		case *wait == 0 && colour != policy.Green, at(*wait) != policy.Green:
			t.Fatalf("%+v, %+v, %d bytes, %v in: green in %d ns, but then it is %v", r, levels, bytes, in, *wait, at(*wait))
		case *wait > 0:
			waited++
			if at(*wait-1) == policy.Green {
				t.Fatalf("%+v, %+v, %d bytes, %v in: green in %d ns, but before, too", r, levels, bytes, in, *wait)
			}
		}
		first := room(l, levels, bytes)
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
