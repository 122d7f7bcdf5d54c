package model

import (
	"reflect"
	"testing"

	"github.com/shapectl/shapectl/pkg/policy"
)

// chain returns a rule of 8 Mbit/s and a pool of 4, with levels in bytes.
func chain(rule, pool uint64) []Stage {
	stages := []Stage{
		{Limit: NewLimit(policy.Rule{Rate: 8_000_000, Capacity: 10_000}), Weight: 1},
		{Limit: NewLimit(policy.Rule{Rate: 4_000_000, Capacity: 10_000, Pool: true}), Weight: 1},
	}
	stages[0].State.Level, stages[1].State.Level = rule<<UnitBits, pool<<UnitBits
	return stages
}

func TestUntil(t *testing.T) {
	const ruleNS, poolNS = 1000, 2000 // a byte
	guarantee := NewLimit(policy.Rule{Rate: 1_000_000, Capacity: 5000})
	for _, test := range []struct {
		name       string
		rule, pool uint64 // levels
		change     func([]Stage)
		want       uint64
	}{
		{"conforms", 9000, 9000, nil, 0},
		{"rule is full", 9500, 0, nil, 500 * ruleNS},
		{"pool is full", 0, 9500, nil, 500 * poolNS},
		{"pool takes longer", 9900, 9800, nil, 800 * poolNS},
		{"rule takes longer", 10000, 9100, nil, 1000 * ruleNS},
		{"only its pool", 0, 10000, func(s []Stage) { s[0].Limit = &Limit{} }, 1000 * poolNS},
		{"guaranteed", 0, 10000, func(s []Stage) { s[0].Guarantee = guarantee }, 0},
		{"guaranteed before the pool has room", 0, 12000, func(s []Stage) {
			s[0].Guarantee, s[0].GuaranteeLevel = guarantee, 4100<<UnitBits
		}, 100 * 8000},
		{"would be marked", 0, 10000, func(s []Stage) { s[1].Excess = policy.ECN }, 1000 * poolNS},
		{"passes as excess", 10000, 0, func(s []Stage) { s[0].Excess = policy.Pass }, 1000 * ruleNS},
	} {
		stages := chain(test.rule, test.pool)
		if test.change != nil {
			test.change(stages)
		}
		// Rates are rounded up.
		if got := Until(stages, Packet{Bytes: 1000, ECT: true}); got > test.want || got+2 < test.want {
			t.Errorf("%s: %d ns, want %d", test.name, got, test.want)
		}
	}
}

// A sharer that is beyond its share conforms when the clock has come near enough. A forecast changes nothing.
func TestForecastOfShare(t *testing.T) {
	stages := chain(0, 0)
	pool := &stages[1]
	pool.Share = &Share{ShareParams: pool.ShareParams()}
	pool.Sharer = &Sharer{}
	other, now := &Sharer{}, uint64(100e9)
	pool.Share.KeepTime(pool.Meter, now, 0)
	pool.Share.Charge(other, 1, 100_000)
	p := Packet{Time: now, Bytes: 1000}
	for Forecast(stages, p).Refuses == NoStage {
		pool.Share.Charge(pool.Sharer, 1, 1000)
	}
	for range 300 { // a debt of which a packet that is offered would forgive the most
		pool.Share.Charge(pool.Sharer, 1, 1000)
	}
	p.Time += 2e6 // the clock advances
	before, sharer := *pool.Share, *pool.Sharer
	if to := Forecast(stages, p); to.Refuses != 1 || !to.Beyond {
		t.Errorf("passage %+v", to)
	}
	if got, want := Tests(stages, p), []Test{{Conforms: true}, {Conforms: true, Share: BeyondShare}}; !reflect.DeepEqual(got, want) {
		t.Errorf("tests %+v, want %+v", got, want)
	}
	wait := Until(stages, p)
	if wait == 0 || wait > restNS {
		t.Errorf("it conforms in %d ns", wait)
	}
	if *pool.Share != before || *pool.Sharer != sharer {
		t.Error("a forecast has changed the share")
	}
	p.Time += wait - 1
	if to := Forecast(stages, p); to.Refuses != 1 {
		t.Errorf("it passes before that: %+v", to)
	}
	p.Time++
	if to := Forecast(stages, p); to.Refuses != NoStage {
		t.Errorf("it is refused then: %+v", to)
	}
}
