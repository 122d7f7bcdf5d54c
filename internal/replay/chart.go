package replay

import (
	"bytes"
	"fmt"
	"image/color"
	"io"
	"math"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// mostBins is how many intervals a chart has at most, and at least half as many
	// unless the trace is shorter than firstWidth times that.
	mostBins   = 400
	firstWidth = 1000 // ns
)

// A Chart is what was offered, what departed, and the level over time, in equal intervals.
// How long a trace is shows at its end, so intervals are joined two by two
// whenever there are too many.
type Chart struct {
	limits Limits
	bins   []bin
	width  uint64 // ns of a bin
	start  uint64 // ns: of the first packet
	began  bool
}

type bin struct {
	offered, passed uint64 // bytes: when packets came, and when those that passed departed
	level           uint64 // units: the highest that any bucket had
}

// NewChart makes one of no packets.
func NewChart(l Limits) *Chart { return &Chart{limits: l, width: firstWidth} }

// Add counts a packet; what no rule decides over is not in the chart. One from
// before the first counts to the first interval.
func (c *Chart) Add(r Result) {
	if r.Rule == NoRule {
		return
	}
	if !c.began {
		c.began, c.start = true, r.Time
	}
	b := c.bin(r.Time)
	b.offered += r.Bytes
	b.level = max(b.level, r.Level)
	if r.Verdict != model.Drop {
		c.bin(r.Departure()).passed += r.Bytes
	}
}

// bin is the interval of a time.
func (c *Chart) bin(at uint64) *bin {
	at -= min(at, c.start)
	for at/c.width >= mostBins {
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
			b = bin{b.offered + other.offered, b.passed + other.passed, max(b.level, other.level)}
		}
		joined = append(joined, b)
	}
	c.bins, c.width = joined, 2*c.width
}

// Kinds of file that a chart can be.
const (
	SVG = ".svg"
	PNG = ".png"
)

const (
	chartWidth, chartHeight = 10 * vg.Inch, 6.5 * vg.Inch
	dotsPerInch             = 144
	titleColumns            = 105
	lineWidth               = 1.1
)

// Write draws the chart: rates above, levels below. The title may have lines.
func (c *Chart) Write(w io.Writer, kind, title string) error {
	rates, levels := c.rates(), c.levels()
	for line := range strings.Lines(title) {
		rates.Title.Text += plain.Fold(strings.TrimSuffix(line, "\n"), titleColumns, "", "")
	}
	rates.Title.Text = strings.TrimSuffix(rates.Title.Text, "\n")
	var canvas vg.CanvasWriterTo
	switch kind {
	case SVG:
		canvas = vgsvg.New(chartWidth, chartHeight)
	case PNG:
		canvas = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(chartWidth, chartHeight), vgimg.UseDPI(dotsPerInch))}
	default:
		return fmt.Errorf("a chart is %s or %s, not %q", SVG, PNG, kind)
	}
	page := draw.New(canvas)
	page.SetColor(color.White)
	page.Fill(page.Rectangle.Path())
	whole := draw.Crop(page, 12, -16, 10, -12)
	tiles := draw.Tiles{Rows: 2, Cols: 1, PadY: 14}
	areas := plot.Align([][]*plot.Plot{{rates}, {levels}}, tiles, whole)
	rates.Draw(areas[0][0])
	levels.Draw(areas[1][0])
	var file bytes.Buffer
	if _, err := canvas.WriteTo(&file); err != nil {
		return err
	}
	// Arial's letters are as wide, and more browsers have it.
	_, err := w.Write(bytes.ReplaceAll(file.Bytes(), []byte("font-family:Liberation Sans;"), []byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif;")))
	return err
}

var (
	ink   = color.Gray{Y: 0x33}
	grid  = color.Gray{Y: 0xe6}
	grey  = color.Gray{Y: 0x99}
	light = color.NRGBA{R: 0xdd, G: 0xdd, B: 0xe2, A: 0xff}
	blue  = color.NRGBA{R: 0x1f, G: 0x6f, B: 0xb4, A: 0xff}
	pale  = color.NRGBA{R: 0x1f, G: 0x6f, B: 0xb4, A: 0x50}
	green = color.NRGBA{R: 0x2a, G: 0x8c, B: 0x5a, A: 0xff}
	mint  = color.NRGBA{R: 0x2a, G: 0x8c, B: 0x5a, A: 0x40}
	red   = color.NRGBA{R: 0xc8, G: 0x32, B: 0x28, A: 0xff}
)

// A scale is a unit of which the largest value shown is a handful.
type scale struct {
	name string
	size float64
}

func fit(most float64, scales []scale) scale {
	best := scales[0]
	for _, s := range scales {
		if most >= s.size {
			best = s
		}
	}
	return best
}

var (
	timeScales  = []scale{{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}, {"h", 3600e9}}
	rateScales  = []scale{{"bit/s", 1}, {"kbit/s", 1e3}, {"Mbit/s", 1e6}, {"Gbit/s", 1e9}, {"Tbit/s", 1e12}}
	bytesScales = []scale{{"bytes", 1}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}}
)

// span is how long the chart is, in ns.
func (c *Chart) span() float64 { return float64(max(1, len(c.bins))) * float64(c.width) }

func (c *Chart) rates() *plot.Plot {
	perSecond := func(bytes uint64) float64 { return float64(bytes) * 8e9 / float64(c.width) }
	most := 0.0
	for _, b := range c.bins {
		most = max(most, perSecond(b.offered), perSecond(b.passed))
	}
	rule, one := c.limit()
	if one {
		most = max(most, float64(rule.Rate))
	}
	passed := "passed"
	if rule.Excess == policy.Delay {
		passed = "passed, as it leaves"
	}
	unit := fit(most, rateScales)
	p := c.axes("rate ("+unit.name+")", most/unit.size)
	c.area(p, "offered", grey, light, func(i int) float64 { return perSecond(c.bins[i].offered) / unit.size })
	c.area(p, passed, blue, pale, func(i int) float64 { return perSecond(c.bins[i].passed) / unit.size })
	if one {
		across(p, "the limit's rate", float64(rule.Rate)/unit.size)
	}
	return p
}

func (c *Chart) levels() *plot.Plot {
	rule, one := c.limit()
	leak := 0.0 // bytes in the time of a bin, from any bucket of the chart
	if rule.Rate != policy.Unlimited {
		leak = float64(rule.Rate) / 8e9 * float64(c.width)
	}
	most, before := 0.0, 0.0
	levels := make([]float64, len(c.bins))
	for i, b := range c.bins {
		before = max(float64(b.level)/(1<<model.UnitBits), before-leak, 0)
		levels[i] = before
		most = max(most, before)
	}
	most = max(most, float64(rule.Capacity+rule.Queue))
	unit := fit(most, bytesScales)
	height := most
	if rule.Queue > 0 {
		height *= 1.1 // room for one more in the legend
	}
	p := c.axes("level ("+unit.name+")", height/unit.size)
	p.X.Label.Text = "time since the first packet (" + fit(c.span(), timeScales).name + ")"
	name := "level of the bucket"
	if !one {
		name = "level of the fullest bucket"
	}
	c.area(p, name, green, mint, func(i int) float64 { return levels[i] / unit.size })
	across(p, "capacity", float64(rule.Capacity)/unit.size)
	if rule.Queue > 0 {
		across(p, "capacity and queue", float64(rule.Capacity+rule.Queue)/unit.size)
	}
	return p
}

// limit is the rule of the chart, and whether it has but one bucket. Rules of
// one chart differ in their prefixes only.
func (c *Chart) limit() (rule policy.Rule, one bool) {
	rule = c.limits.Rules[0]
	return rule, len(c.limits.Rules) == 1 && rule.Each.Kind == policy.EachAll
}

// axes is an empty plot over the time of the chart, up to a value.
func (c *Chart) axes(label string, most float64) *plot.Plot {
	p := plot.New()
	for style, size := range map[*text.Style]font.Length{
		&p.Title.TextStyle: 11, &p.X.Label.TextStyle: 10, &p.Y.Label.TextStyle: 10,
		&p.X.Tick.Label: 9, &p.Y.Tick.Label: 9, &p.Legend.TextStyle: 9,
	} {
		style.Font.Variant, style.Font.Size, style.Color = "Sans", size, ink
	}
	p.Title.Padding = 10
	p.X.Min, p.X.Max = 0, c.span()/fit(c.span(), timeScales).size
	p.Y.Min, p.Y.Max = 0, most*1.25 // room for the legend
	if most == 0 {
		p.Y.Max = 1
	}
	p.Y.Label.Text = label
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Padding = 0
		axis.LineStyle.Color, axis.Tick.LineStyle.Color = ink, ink
		axis.Tick.Marker = ticks{}
	}
	lines := plotter.NewGrid()
	lines.Vertical.Color, lines.Horizontal.Color = grid, grid
	p.Add(lines)
	p.Legend.Top, p.Legend.Left = true, false
	p.Legend.Padding = 3
	p.Legend.YOffs = -3
	p.Legend.XOffs = -4
	return p
}

// area adds steps with something below them, one for each bin.
func (c *Chart) area(p *plot.Plot, name string, line, fill color.Color, value func(bin int) float64) {
	if len(c.bins) == 0 {
		return
	}
	unit := fit(c.span(), timeScales).size
	var points plotter.XYs
	for i := range c.bins {
		points = append(points, plotter.XY{X: float64(i) * float64(c.width) / unit, Y: value(i)})
	}
	points = append(points, plotter.XY{X: c.span() / unit, Y: points[len(points)-1].Y})
	style := draw.LineStyle{Color: line, Width: lineWidth}
	add(p, name, &plotter.Line{XYs: points, StepStyle: plotter.PostStep, LineStyle: style, FillColor: fill})
}

// across adds a dashed line at a height.
func across(p *plot.Plot, name string, y float64) {
	style := draw.LineStyle{Color: red, Width: lineWidth, Dashes: []vg.Length{5, 3}}
	add(p, name, &plotter.Line{XYs: plotter.XYs{{X: p.X.Min, Y: y}, {X: p.X.Max, Y: y}}, LineStyle: style})
}

func add(p *plot.Plot, name string, line *plotter.Line) {
	p.Add(line)
	p.Legend.Add(name, line)
}

// ticks are at round numbers: 1, 2 or 5 times a power of ten, each of them labelled.
type ticks struct{}

func (ticks) Ticks(least, most float64) (all []plot.Tick) {
	const about = 6
	step := math.Pow(10, math.Floor(math.Log10((most-least)/about)))
	for _, more := range []float64{2, 2.5, 2} {
		if (most-least)/step > about {
			step *= more
		}
	}
	for i := math.Ceil(least / step); i*step <= most*(1+1e-9); i++ {
		all = append(all, plot.Tick{Value: i * step, Label: strings.TrimSuffix(fmt.Sprintf("%.6g", i*step), ".0")})
	}
	return all
}
