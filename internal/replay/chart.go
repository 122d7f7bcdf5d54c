package replay

import (
	"slices"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// MostBins is the number of intervals that a chart has at most. It has at least half as many, unless the
	// trace is shorter than firstWidth * MostBins.
	MostBins   = 400
	firstWidth = 1000 // ns
)

// A Chart has the offered and passed rates and the bucket level over time, in equal
// intervals. The length of a trace is known only at its end, so pairs of intervals are
// joined whenever there are too many.
type Chart struct {
	limits Limits
	bins   []bin
	width  uint64 // ns of a bin
	start  uint64 // ns: time of the first packet
	began  bool
}

type bin struct {
	offered, passed uint64    // bytes, by arrival time and by departure time
	level, second   uint64    // units: the highest level of any bucket, and of any second one
	colours         [3]uint64 // bytes of packets with colours, by arrival time
}

// NewChart returns a chart without packets.
func NewChart(l Limits) *Chart { return &Chart{limits: l, width: firstWidth} }

// Add counts a packet. Packets that match no rule are not in the chart. A packet from
// before the first one counts in the first interval.
func (c *Chart) Add(r Result) {
	if r.Rule == NoRule {
		return
	}
	if !c.began {
		c.began, c.start = true, r.Time
	}
	b := c.bin(r.Time)
	b.offered += r.Bytes
	b.level, b.second = max(b.level, r.Level), max(b.second, r.Second)
	if c.limits.Rules[r.Rule].Algorithm.HasColours() {
		b.colours[r.Colour] += r.Bytes
	}
	if r.Verdict != model.Drop {
		c.bin(r.Departure()).passed += r.Bytes
	}
}

// bin returns the interval that contains a time.
func (c *Chart) bin(at uint64) *bin {
	at -= min(at, c.start)
	for at/c.width >= MostBins {
		c.join()
	}
	for uint64(len(c.bins)) <= at/c.width {
		c.bins = append(c.bins, bin{})
	}
	return &c.bins[at/c.width]
}

func (c *Chart) join() {
	joined := c.bins[:0]
	for pair := range slices.Chunk(c.bins, 2) {
		b := pair[0]
		for _, other := range pair[1:] {
			b.offered, b.passed = b.offered+other.offered, b.passed+other.passed
			b.level, b.second = max(b.level, other.level), max(b.second, other.second)
			for i, bytes := range other.colours {
				b.colours[i] += bytes
			}
		}
		joined = append(joined, b)
	}
	c.bins, c.width = joined, 2*c.width
}

// A Panel is a plot of a chart, as plot.js of the web page draws it.
type Panel struct {
	StartNS uint64    `json:"start_ns"`
	X       []float64 `json:"x"`      // ns after the start: the middle of each interval
	Layers  []Layer   `json:"layers"` // later ones cover earlier ones
	Marks   []Mark    `json:"marks"`
}

// A Layer has a value for each interval.
type Layer struct {
	Name  string    `json:"name"`
	Color string    `json:"color"` // a variable of style.css
	Kind  string    `json:"kind"`  // area or line
	Y     []float64 `json:"y"`
}

// A Mark is a value of a limit.
type Mark struct {
	Name  string  `json:"name"`
	Color string  `json:"color"`
	Y     float64 `json:"y"`
	Dash  []int   `json:"dash"`
}

var longDash, shortDash = []int{6, 4}, []int{2, 3}

// panel is a panel without marks. values are, for each interval, those of the layers.
func (c *Chart) panel(layers []Layer, values func(bin) []float64) Panel {
	p := Panel{StartNS: c.start, X: []float64{}, Layers: layers, Marks: []Mark{}}
	for j := range layers {
		layers[j].Y = []float64{}
	}
	for i, b := range c.bins {
		p.X = append(p.X, (float64(i)+0.5)*float64(c.width))
		for j, v := range values(b) {
			layers[j].Y = append(layers[j].Y, v)
		}
	}
	return p
}

func (p *Panel) mark(name string, y float64, dash []int) {
	p.Marks = append(p.Marks, Mark{name, "ceiling", y, dash})
}

// Rates are in bit/s, in at most so many intervals: what was offered, and what passed by the time of its departure; with
// colours, what had each colour when it arrived.
func (c *Chart) Rates(most int) Panel {
	for len(c.bins) > most {
		c.join()
	}
	rule, one := c.limit()
	bits := func(bytes uint64) float64 { return float64(bytes) * 8e9 / float64(c.width) }
	offered := Layer{Name: "offered", Color: "refused", Kind: "line"}
	if !rule.Algorithm.HasColours() {
		passes := Layer{Name: "passes", Color: "passed", Kind: "area"}
		if rule.Excess == policy.Delay {
			passes.Name = "leaves"
		}
		p := c.panel([]Layer{offered, passes}, func(b bin) []float64 { return []float64{bits(b.offered), bits(b.passed)} })
		if rule.Rate != policy.Unlimited && !rule.AnyRate() {
			p.mark(map[bool]string{false: "rate of each", true: "rate"}[one], float64(rule.Rate), longDash)
		}
		return p
	}
	offered.Color = "muted"
	p := c.panel([]Layer{offered, {Name: "green", Color: "guarantee", Kind: "line"}, {Name: "yellow", Color: "delayed", Kind: "line"}, {Name: "red", Color: "refused", Kind: "line"}},
		func(b bin) []float64 {
			return []float64{bits(b.offered), bits(b.colours[policy.Green]), bits(b.colours[policy.Yellow]), bits(b.colours[policy.Red])}
		})
	if second, _ := rule.Second(); one {
		p.mark("CIR", float64(rule.Rate), longDash)
		if rule.Algorithm == policy.TRTCM {
			p.mark("PIR", float64(second.Rate), shortDash)
		}
	}
	return p
}

// Levels are in bytes: the level of the bucket, or the highest of several, and with colours that of the second bucket.
func (c *Chart) Levels() Panel {
	rule, one := c.limit()
	leak := func(r policy.Rate) float64 { // bytes that leave a bucket during a bin
		if r == policy.Unlimited {
			return 0
		}
		return float64(r) / 8e9 * float64(c.width)
	}
	highest := map[bool]string{false: "highest "}[one]
	second, coloured := rule.Second()
	layers := []Layer{{Name: highest + "level", Color: "level", Kind: "area"}}
	if coloured {
		layers = []Layer{{Name: highest + "C", Color: "guarantee", Kind: "line"}, {Name: highest + SecondBucket(rule.Algorithm), Color: "delayed", Kind: "line"}}
	}
	level, level2 := 0.0, 0.0
	p := c.panel(layers, func(b bin) []float64 {
		leak2 := leak(second.Rate)
		if rule.Algorithm == policy.SRTCM { // C comes first
			leak2 = max(leak2-level, 0)
		}
		level2 = max(float64(b.second)/(1<<model.UnitBits), level2-leak2, 0)
		level = max(float64(b.level)/(1<<model.UnitBits), level-leak(rule.Rate), 0)
		return []float64{level, level2}[:len(layers)]
	})
	switch {
	case coloured:
		p.mark("CBS", float64(rule.Capacity), longDash)
		p.mark(SecondBucket(rule.Algorithm)+"BS", float64(rule.Colours.Burst()), shortDash)
	case rule.Rate == policy.Unlimited, rule.AnyRate():
	case rule.Queue > 0:
		p.mark("burst, then the queue", float64(rule.Capacity), shortDash)
		p.mark("full", float64(rule.Capacity+rule.Queue), longDash)
	default:
		p.mark("burst", float64(rule.Capacity), longDash)
	}
	return p
}

// limit returns the rule of the chart, and whether it has a single bucket. The rules of one
// chart differ only in their prefixes.
func (c *Chart) limit() (rule policy.Rule, one bool) {
	rule = c.limits.Rules[0]
	return rule, len(c.limits.Rules) == 1 && rule.Each.Kind == policy.EachAll
}
