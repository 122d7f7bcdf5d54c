package replay

import (
	"bytes"
	"encoding/xml"
	"io"
	"math"
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
			if len(c.bins) > mostBins {
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
		if gap >= 1000 && len(c.bins) < mostBins/2 {
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

// Colours stand on one another, so the top one is at what was offered.
func TestChartOfColours(t *testing.T) {
	rule := everything(8_000_000, 20000)
	colour(&rule, policy.TRTCM, 16_000_000, 30000)
	c := NewChart(Limits{Rules: []policy.Rule{rule}})
	for i, of := range []policy.Colour{policy.Green, policy.Yellow, policy.Yellow, policy.Red, policy.Red, policy.Red} {
		r := Result{Time: uint64(i), Bytes: 1000}
		r.Colour = of
		c.Add(r)
	}
	rates := c.rates()
	sums := sumsOf(rates.stack)
	offered := rates.areas[0].values[0]
	for i, want := range []float64{offered / 6, offered / 2, offered} {
		if got := sums[i][0]; math.Abs(got-want) > offered/1e9 {
			t.Errorf("the top of %s is at %v of %v, want %v", rates.stack[i].name, got, offered, want)
		}
	}
}

// A chart has the format of its name, and labels for everything in it.
func TestChartFiles(t *testing.T) {
	one, each := everything(8_000_000, 20000), everything(8_000_000, 20000)
	each.Each.Kind = policy.EachHost
	trtcm, srtcm := one, each
	colour(&trtcm, policy.TRTCM, 16_000_000, 30000)
	colour(&srtcm, policy.SRTCM, 0, 30000)
	queue := one
	queue.Excess, queue.Queue, queue.ECNAbove = policy.Delay, 5000, policy.Never
	for _, c := range []struct {
		rule  policy.Rule
		says  []string
		empty bool
	}{
		{one, []string{"a title", "rate (Mbit/s)", "level (kB)", "offered", "passed", "the limit&#39;s rate", "level of the bucket", "capacity", "time since the first packet (ms)"}, false},
		{each, []string{"level of the fullest bucket"}, false},
		{queue, []string{"passed, by departure time", "capacity", "capacity and queue"}, false},
		{trtcm, []string{"offered", "green", "yellow", "red", "CIR", "PIR", "level of C", "level of P", "CBS", "PBS"}, false},
		{srtcm, []string{"green", "highest level of C", "highest level of E", "CBS", "EBS"}, false},
		{one, []string{"rate (Mbit/s)"}, true},
	} {
		l := Limits{Rules: []policy.Rule{c.rule}}
		chart := NewChart(l)
		for i := range uint64(100) {
			if !c.empty {
				chart.Add(Result{Time: i * 1_000_000, Bytes: 1000, Level: i << 27})
			}
		}
		var svg bytes.Buffer
		if err := chart.WriteSVG(&svg, "a title\nof two lines"); err != nil {
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
	}
}

// A screen reader finds the title and the figures of a chart, and nothing in them is taken for markup.
func TestChartForScreenReaders(t *testing.T) {
	r := everything(8_000_000, 20000)
	chart := NewChart(Limits{Rules: []policy.Rule{r}})
	for i := range uint64(400) { // one packet in each interval of 1 us
		chart.Add(Result{Time: i * 1000, Bytes: 250 + 250*(i%2), Verdict: []model.Verdict{model.Pass, model.Drop}[i%2], Level: i << 20})
	}
	var b bytes.Buffer
	if err := chart.WriteSVG(&b, "5 < 6 & \"more\""); err != nil {
		t.Fatal(err)
	}
	var svg struct {
		Role     string `xml:"role,attr"`
		Labels   string `xml:"aria-labelledby,attr"`
		Children []struct {
			XMLName xml.Name
			ID      string `xml:"id,attr"`
			Text    string `xml:",chardata"`
		} `xml:",any"`
	}
	if err := xml.Unmarshal(b.Bytes(), &svg); err != nil {
		t.Fatal(err)
	}
	title, desc := svg.Children[0], svg.Children[1]
	if svg.Role != "img" || svg.Labels != title.ID+" "+desc.ID {
		t.Errorf("role %q, labelled by %q", svg.Role, svg.Labels)
	}
	if title.XMLName.Local != "title" || title.Text != "5 < 6 & \"more\"" {
		t.Errorf("title: %+v", title)
	}
	want := "Two charts over 400 us since the first packet. Rate (Gbit/s): offered, at most 4; passed, at most 2; the limit's rate, 0.008. " +
		"Level (kB): level of the bucket, at most 0.399; capacity, 20."
	if desc.XMLName.Local != "desc" || desc.Text != want {
		t.Errorf("description: %q, want %q", desc.Text, want)
	}
}

func TestDrawing(t *testing.T) {
	d := &drawing{
		areas: []area{{xs: []float64{100, 200, 300}, ys: []float64{50, 80}, base: 100, stroke: blue, fill: green}},
		marks: []line{{400, 20, 500, 20, vermilion, longDash}, {400, 40, 500, 40, vermilion, 0}},
		texts: []text{{600, 300, anchorEnd, true, "end"}},
	}
	var svg bytes.Buffer
	if err := d.writeSVG(&svg); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`<path d="M100 100V50H200V80H300V100Z" fill="#009e73" fill-opacity="1.00"/>`,
		`<path d="M100 50V50H200V80H300" fill="none" stroke="#0072b2"/>`,
		`<path d="M400 20L500 20" stroke="#d55e00" stroke-dasharray="6 3"/>`,
		`<path d="M400 40L500 40" stroke="#d55e00"/>`,
		`<text x="600" y="300" text-anchor="end" font-weight="bold" fill="#333333">end</text>`,
	} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("the SVG lacks %s:\n%s", want, svg.String())
		}
	}
}

func TestTicks(t *testing.T) {
	for to, want := range map[float64][]float64{
		1: {0, 0.2, 0.4, 0.6, 0.8, 1}, 12.1: {0, 2, 4, 6, 8, 10, 12}, 26: {0, 5, 10, 15, 20, 25}, 390: {0, 50, 100, 150, 200, 250, 300, 350},
		999: {0, 200, 400, 600, 800}, 0.07: {0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07},
	} {
		got := ticks(to)
		if !slices.EqualFunc(got, want, func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }) {
			t.Errorf("up to %v: %v, want %v", to, got, want)
		}
	}
}
