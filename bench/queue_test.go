package main

import (
	"math"
	"slices"
	"testing"
	"time"
)

func TestCarriedCounts(t *testing.T) {
	start := time.Now()
	at := func(s float64, p progress) mark { return mark{start.Add(time.Duration(s * 1e9)), p} }
	var c carried
	c.count([]mark{
		at(0, progress{bytes: 1e6, sent: 1000, arrived: 990, retransmitted: 5}),
		at(1, progress{bytes: 2e6, sent: 1700, arrived: 1690, retransmitted: 8}),
		at(3, progress{bytes: 2e6 + 500, sent: 1800, arrived: 1710, retransmitted: 8}),
	}, 8e6, true)
	most := 1e6 * fullPayload / maxFrame // bytes a second
	if want := []float64{100 * 1e6 / most, 100 * 250 / most}; !near(c.goodput, want) {
		t.Errorf("goodput is %v %%, not %v", c.goodput, want)
	}
	if want := []float64{3, 0}; !near(c.retransmitted, want) {
		t.Errorf("%v retransmitted segments per MB, want %v", c.retransmitted, want)
	}
	if want := 100 * 80.0 / 800; c.lost != want {
		t.Errorf("%v %% were lost, not %v", c.lost, want)
	}
	for _, tc := range []struct {
		from, to progress
		reported bool
		want     float64
	}{
		{progress{sent: 10, arrived: 5}, progress{sent: 12, arrived: 9}, true, 0}, // more arrived than was sent
		{progress{sent: 10, arrived: 10, retransmitted: 1}, progress{sent: 60, arrived: 43, retransmitted: 3}, true, 34},
		{progress{sent: 10, arrived: 10, retransmitted: 1}, progress{sent: 60, arrived: 43, retransmitted: 3}, false, 4},
		{progress{sent: 10, arrived: 10, retransmitted: 1}, progress{sent: 60, arrived: 43, retransmitted: 30}, false, 34},
	} {
		if c.count([]mark{at(0, tc.from), at(1, tc.to)}, 8e6, tc.reported); c.lost != tc.want {
			t.Errorf("from %+v to %+v, reported %v: %v %% were lost, not %v", tc.from, tc.to, tc.reported, c.lost, tc.want)
		}
	}
}

func near(got, want []float64) bool {
	return slices.EqualFunc(got, want, func(a, b float64) bool { return math.Abs(a-b) < 1e-9 })
}

func TestEchoesInParts(t *testing.T) {
	start := time.Now()
	ms := func(n int) time.Time { return start.Add(time.Duration(n) * time.Millisecond) }
	parts, unanswered := inParts([]echo{
		{ms(0), 3 * time.Millisecond}, {ms(9), 2 * time.Millisecond}, {ms(10), 5 * time.Millisecond}, {ms(12), 0}, {ms(20), time.Millisecond},
	}, []mark{{at: ms(0)}, {at: ms(10)}, {at: ms(20)}})
	if len(parts) != 2 || !near(parts[0], []float64{2, 3}) || !near(parts[1], []float64{5}) {
		t.Errorf("%v ms in the parts, not [2 3] and [5]", parts)
	}
	if math.Abs(unanswered-20) > 1e-9 {
		t.Errorf("%v %% had no answer, not 20", unanswered)
	}
}
