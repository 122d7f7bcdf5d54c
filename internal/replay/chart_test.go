package replay

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A chart has a few hundred intervals, however long the trace is, and they hold all of it.
func TestChartBins(t *testing.T) {
	l := Limits{Rules: []policy.Rule{everything(8000, 2000)}}
	for _, gap := range []uint64{0, 1, 1000, 1_000_000, 1_000_000_000, 1 << 49} {
		c := NewChart(l)
		const packets = 5000
		start := uint64(1 << 40)
		for i := range uint64(packets) {
			r := Result{Time: start + i*gap, Bytes: 100, Level: i << 20}
			if i%4 == 0 {
				r.Verdict = model.Drop
			}
			c.Add(r)
			if len(c.bins) > MostBins {
				t.Fatalf("gap %d: %d bins", gap, len(c.bins))
			}
		}
		c.Add(Result{Time: start - 1, Bytes: 7})           // before the first
		c.Add(Result{Time: start, Bytes: 9, Rule: NoRule}) // no rule
		offered, passed, level, covered := uint64(0), uint64(0), uint64(0), uint64(len(c.bins))*c.width
		for _, b := range c.bins {
			offered, passed, level = offered+b.offered, passed+b.passed, max(level, b.level)
		}
		if offered != packets*100+7 || passed != packets*75+7 || level != (packets-1)<<20 {
			t.Errorf("gap %d: offered %d, passed %d, level %d", gap, offered, passed, level>>20)
		}
		if last := (packets - 1) * gap; covered <= last || covered-last > c.width {
			t.Errorf("gap %d: %d ns of %d", gap, covered, last)
		}
		if gap >= 1000 && len(c.bins) < MostBins/2 {
			t.Errorf("gap %d: only %d bins", gap, len(c.bins))
		}
		if c.bins[0].offered < 107 {
			t.Errorf("gap %d: the first bin has %+v", gap, c.bins[0])
		}
	}
}

// Delayed packets are in the chart at their departure time, even if that is after the last packet.
func TestChartOfQueue(t *testing.T) {
	c := NewChart(Limits{Rules: []policy.Rule{everything(8000, 2000)}})
	for i := range uint64(400) {
		c.Add(Result{Time: i * 1000, Bytes: 10, Verdict: model.Delay, Wait: 400_000})
	}
	c.Add(Result{Time: 0, Bytes: 10, Verdict: model.Mark, Wait: 799_000})
	c.Add(Result{Time: 0, Bytes: 10, Verdict: model.Drop})
	if c.width != 2000 || len(c.bins) != 400 {
		t.Fatalf("%d bins of %d ns", len(c.bins), c.width)
	}
	for i, b := range c.bins {
		want := bin{offered: 20}
		switch {
		case i == 0:
			want.offered += 20
		case i >= 200:
			want = bin{passed: 20}
		}
		if i == 399 {
			want.passed += 10
		}
		if b != want {
			t.Errorf("bin %d has %+v, want %+v", i, b, want)
		}
	}
}

// A panel has what is in the chart, in bit/s and bytes, and marks of the limit.
func TestPanels(t *testing.T) {
	one := everything(8_000_000, 20000)
	each, queue, trtcm, srtcm := one, one, one, one
	each.Each.Kind = policy.EachHost
	queue.Excess, queue.Queue, queue.ECNAbove = policy.Delay, 5000, policy.Never
	colour(&trtcm, policy.TRTCM, 16_000_000, 30000)
	colour(&srtcm, policy.SRTCM, 0, 30000)
	for name, c := range map[string]struct {
		rule          policy.Rule
		rates, levels string // layers with their highest values, and marks
	}{
		"one":   {one, "offered 9.766e+06, passes 9.766e+06; rate 8e+06", "level 1.98e+04; burst 2e+04"},
		"each":  {each, "offered 9.766e+06, passes 9.766e+06; rate of each 8e+06", "highest level 1.98e+04; burst 2e+04"},
		"queue": {queue, "offered 9.766e+06, leaves 9.766e+06; rate 8e+06", "level 1.98e+04; burst, then the queue 2e+04, full 2.5e+04"},
		"trtcm": {trtcm, "offered 9.766e+06, green 3.906e+06, yellow 3.906e+06, red 3.906e+06; CIR 8e+06, PIR 1.6e+07", "C 1.98e+04, P 990; CBS 2e+04, PBS 3e+04"},
		"srtcm": {srtcm, "offered 9.766e+06, green 3.906e+06, yellow 3.906e+06, red 3.906e+06; CIR 8e+06", "C 1.98e+04, E 990; CBS 2e+04, EBS 3e+04"},
	} {
		chart := NewChart(Limits{Rules: []policy.Rule{c.rule}})
		for i := range uint64(100) { // a packet in each millisecond; the widest bins, of 4.096 ms, have 4 or 5
			r := Result{Time: i * 1_000_000, Bytes: 1000, Level: i * 200 << model.UnitBits, Verdict: model.Pass}
			r.Colour, r.Second = policy.Colour(i%3), i*10<<model.UnitBits
			chart.Add(r)
		}
		says := func(p Panel) string {
			var layers, marks []string
			for _, l := range p.Layers {
				layers = append(layers, fmt.Sprintf("%s %.4g", l.Name, slices.Max(l.Y)))
			}
			for _, m := range p.Marks {
				marks = append(marks, fmt.Sprintf("%s %.4g", m.Name, m.Y))
			}
			return strings.TrimSpace(strings.Join(layers, ", ") + "; " + strings.Join(marks, ", "))
		}
		if got := says(chart.Levels()); got != c.levels {
			t.Errorf("%s: %s, want %s", name, got, c.levels)
		}
		rates := chart.Rates(25)
		if got := says(rates); got != c.rates {
			t.Errorf("%s: %s, want %s", name, got, c.rates)
		}
		if n := len(rates.X); n > 25 || n < 12 || rates.X[1]-rates.X[0] != 2*rates.X[0] {
			t.Errorf("%s: the intervals are around %v", name, rates.X)
		}
	}
	empty := NewChart(Limits{Rules: []policy.Rule{one}})
	if text, err := json.Marshal(empty.Rates(MostBins)); err != nil || strings.Contains(string(text), "null") {
		t.Errorf("without packets: %s, %v", text, err)
	}
}
