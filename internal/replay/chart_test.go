package replay

import (
	"bytes"
	"encoding/xml"
	"image/png"
	"io"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

// However long a trace is, a chart has some hundred intervals that hold all of it.
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
			if len(c.bins) > mostBins {
				t.Fatalf("gap %d: %d bins", gap, len(c.bins))
			}
		}
		c.Add(Result{Time: start - 1, Bytes: 7})           // before the first
		c.Add(Result{Time: start, Bytes: 9, Rule: NoRule}) // nobody's
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
		if gap >= 1000 && len(c.bins) < mostBins/2 {
			t.Errorf("gap %d: only %d bins", gap, len(c.bins))
		}
		if c.bins[0].offered < 107 {
			t.Errorf("gap %d: the first bin has %+v", gap, c.bins[0])
		}
	}
}

// What is held back is in the chart when it leaves, also behind the last packet.
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

// A chart is what its name says, and whoever reads it knows what is what.
func TestChartFiles(t *testing.T) {
	one, each := everything(8_000_000, 20000), everything(8_000_000, 20000)
	each.Each.Kind = policy.EachHost
	queue := one
	queue.Excess, queue.Queue, queue.ECNAbove = policy.Delay, 5000, policy.Never
	for _, c := range []struct {
		rule  policy.Rule
		says  []string
		empty bool
	}{
		{one, []string{"a title", "rate (Mbit/s)", "level (kB)", "offered", "passed", "the limit&#39;s rate", "level of the bucket", "capacity", "time since the first packet (ms)"}, false},
		{each, []string{"level of the fullest bucket"}, false},
		{queue, []string{"passed, as it leaves", "capacity", "capacity and queue"}, false},
		{one, []string{"rate (Mbit/s)"}, true},
	} {
		l := Limits{Rules: []policy.Rule{c.rule}}
		chart := NewChart(l)
		for i := range uint64(100) {
			if !c.empty {
				chart.Add(Result{Time: i * 1_000_000, Bytes: 1000, Level: i << 27})
			}
		}
		var svg, picture bytes.Buffer
		if err := chart.Write(&svg, SVG, "a title\nof two lines"); err != nil {
			t.Fatal(err)
		}
		for _, s := range c.says {
			if !strings.Contains(svg.String(), ">"+s+"<") {
				t.Errorf("%q is not in the chart", s)
			}
		}
		for d := xml.NewDecoder(&svg); ; {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if c.rule != one { // one is enough, as it takes long
			continue
		}
		if err := chart.Write(&picture, PNG, "a title"); err != nil {
			t.Fatal(err)
		}
		if i, err := png.Decode(&picture); err != nil || i.Bounds().Dx() != 1440 {
			t.Errorf("picture %v, %v", i, err)
		}
	}
	if err := NewChart(Limits{Rules: []policy.Rule{one}}).Write(io.Discard, ".gif", ""); err == nil {
		t.Error("a .gif was drawn")
	}
}
