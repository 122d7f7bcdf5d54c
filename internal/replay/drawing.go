package replay

import (
	"fmt"
	"image/color"
	"math"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A drawing is a chart as shapes. Lengths are in points, and y grows downwards.
// Shapes are drawn in the order of the fields.
type drawing struct {
	title, description string // for readers who do not see it
	grid               []line
	areas              []area
	marks              []line
	texts              []text
}

// A line is horizontal or vertical.
type line struct {
	x1, y1, x2, y2 float64
	color          color.NRGBA
	dash           float64 // length of its dashes; 0 for a solid line
}

// An area lies between steps and a base line. Step i begins at xs[i] and ends at xs[i+1].
type area struct {
	xs, ys       []float64 // one x more than ys
	base         float64
	stroke, fill color.NRGBA
}

type text struct {
	x, y float64 // of its baseline, at its anchor
	anchor
	bold bool
	text string
}

// An anchor is the point of a text that x is for, as SVG names it.
type anchor string

const (
	anchorStart  anchor = "start"
	anchorMiddle anchor = "middle"
	anchorEnd    anchor = "end"
)

const (
	pageWidth, pageHeight   = 720.0, 468.0
	marginLeft, marginRight = 58.0, 18.0
	titleColumns            = 105
	titleLine               = 15.0
	headHeight              = 22.0 // of a panel's name and legend
	tickHeight              = 18.0 // of the numbers below a panel
	nameWidth               = 110.0
	charWidth               = 5.5 // an estimate: only the viewer knows the font
	fontSize                = 10.0
	lineWidth               = 1.1
	shortDash, longDash     = 2.0, 6.0
	dashGap                 = 3.0
)

// Okabe and Ito chose these colours: the colour-blind can tell them apart.
var (
	ink       = color.NRGBA{R: 0x33, G: 0x33, B: 0x33, A: 0xff}
	gridColor = color.NRGBA{R: 0xe6, G: 0xe6, B: 0xe6, A: 0xff}
	gray      = color.NRGBA{R: 0x88, G: 0x88, B: 0x88, A: 0xff}
	blue      = color.NRGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}
	green     = color.NRGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}
	orange    = color.NRGBA{R: 0xe6, G: 0x9f, B: 0x00, A: 0xff}
	vermilion = color.NRGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}
)

// A scale is a unit of an axis.
type scale struct {
	name string
	size float64
}

// fit returns the largest scale that is not above the largest value.
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

// A panel is a chart of values over time.
type panel struct {
	name   string
	scales []scale
	areas  []series
	stack  []series // each stands on those before it; in front of the areas
	marks  []mark
}

// A series has a value for each bin.
type series struct {
	name   string
	values []float64
	color  color.NRGBA
}

// A mark is a horizontal dashed line.
type mark struct {
	name  string
	value float64
	dash  float64
}

// draw lays the chart out under a title.
func (c *Chart) draw(title string) *drawing {
	d := &drawing{title: title}
	y := 8.0
	for line := range strings.Lines(title) {
		folded := strings.TrimSpace(plain.Fold(strings.TrimSpace(line), titleColumns, "", ""))
		for part := range strings.SplitSeq(folded, "\n") {
			y += titleLine
			d.texts = append(d.texts, text{pageWidth / 2, y, anchorMiddle, true, part})
		}
	}
	span := float64(max(1, len(c.bins))) * float64(c.width)
	unit := fit(span, timeScales)
	d.description = fmt.Sprintf("Two charts over %.4g %s since the first packet.", span/unit.size, unit.name)
	height := (pageHeight - y - 30) / 2
	c.drawPanel(d, c.rates(), y+6, height)
	c.drawPanel(d, c.levels(), y+6+height, height)
	d.texts = append(d.texts, text{(marginLeft + pageWidth - marginRight) / 2, pageHeight - 8, anchorMiddle, false,
		"time since the first packet (" + unit.name + ")"})
	return d
}

func (c *Chart) rates() panel {
	rate := func(name string, of func(*bin) uint64, drawn color.NRGBA) series {
		var values []float64
		for i := range c.bins {
			values = append(values, float64(of(&c.bins[i]))*8e9/float64(c.width))
		}
		return series{name, values, drawn}
	}
	rule, one := c.limit()
	offered := rate("offered", func(b *bin) uint64 { return b.offered }, gray)
	if second, ok := rule.Second(); ok {
		p := panel{name: "rate", scales: rateScales, areas: []series{offered}}
		for i, drawn := range []color.NRGBA{green, orange, vermilion} {
			p.stack = append(p.stack, rate(policy.Colour(i).String(), func(b *bin) uint64 { return b.colours[i] }, drawn))
		}
		if one {
			p.marks = []mark{{"CIR", float64(rule.Rate), longDash}}
			if rule.Algorithm == policy.TRTCM {
				p.marks = append(p.marks, mark{"PIR", float64(second.Rate), shortDash})
			}
		}
		return p
	}
	name := "passed"
	if rule.Excess == policy.Delay {
		name = "passed, by departure time"
	}
	p := panel{name: "rate", scales: rateScales, areas: []series{offered, rate(name, func(b *bin) uint64 { return b.passed }, blue)}}
	if one {
		p.marks = []mark{{"the limit's rate", float64(rule.Rate), longDash}}
	}
	return p
}

func (c *Chart) levels() panel {
	rule, one := c.limit()
	leak := func(r policy.Rate) float64 { // bytes that leave a bucket during a bin
		if r == policy.Unlimited {
			return 0
		}
		return float64(r) / 8e9 * float64(c.width)
	}
	second, coloured := rule.Second()
	var levels, seconds []float64
	level, level2 := 0.0, 0.0
	for _, b := range c.bins {
		leak2 := leak(second.Rate)
		if rule.Algorithm == policy.SRTCM { // C comes first
			leak2 = max(leak2-level, 0)
		}
		level2 = max(float64(b.second)/(1<<model.UnitBits), level2-leak2, 0)
		level = max(float64(b.level)/(1<<model.UnitBits), level-leak(rule.Rate), 0)
		levels, seconds = append(levels, level), append(seconds, level2)
	}
	if coloured {
		name, highest := SecondBucket(rule.Algorithm), ""
		if !one {
			highest = "highest "
		}
		return panel{name: "level", scales: bytesScales,
			areas: []series{{highest + "level of C", levels, green}, {highest + "level of " + name, seconds, orange}},
			marks: []mark{{"CBS", float64(rule.Capacity), longDash}, {name + "BS", float64(rule.Colours.Burst()), shortDash}},
		}
	}
	name := "level of the bucket"
	if !one {
		name = "level of the fullest bucket"
	}
	p := panel{name: "level", scales: bytesScales, areas: []series{{name, levels, green}}}
	p.marks = []mark{{"capacity", float64(rule.Capacity), longDash}}
	if rule.Queue > 0 {
		p.marks = append(p.marks, mark{"capacity and queue", float64(rule.Capacity + rule.Queue), shortDash})
	}
	return p
}

// drawPanel adds a panel to a drawing, from top down, and a sentence to its description.
func (c *Chart) drawPanel(d *drawing, p panel, top, height float64) {
	most := 0.0
	for _, s := range p.areas {
		most = max(most, highest(s.values))
	}
	sums := sumsOf(p.stack)
	for _, s := range sums {
		most = max(most, highest(s))
	}
	for _, m := range p.marks {
		most = max(most, m.value)
	}
	unit := fit(most, p.scales)
	high := most * 1.04
	if most == 0 {
		high = 1
	}
	span := float64(max(1, len(c.bins))) * float64(c.width)
	timeSize := fit(span, timeScales).size
	left, right, base := marginLeft, pageWidth-marginRight, top+height-tickHeight
	x := func(ns float64) float64 { return left + (right-left)*ns/span }
	y := func(v float64) float64 { return base - (base-top-headHeight)*v/high }

	for _, v := range ticks(high / unit.size) {
		at := y(v * unit.size)
		d.grid = append(d.grid, line{left, at, right, at, gridColor, 0})
		d.texts = append(d.texts, text{left - 5, at + 3.5, anchorEnd, false, fmt.Sprintf("%.6g", v)})
	}
	for _, v := range ticks(span / timeSize) {
		at := x(v * timeSize)
		d.grid = append(d.grid, line{at, top + headHeight, at, base, gridColor, 0})
		d.texts = append(d.texts, text{at, base + 13, anchorMiddle, false, fmt.Sprintf("%.6g", v)})
	}
	d.grid = append(d.grid, line{left, base, right, base, ink, 0}, line{left, top + headHeight, left, base, ink, 0})

	name := p.name + " (" + unit.name + ")"
	head := top + headHeight - 8
	d.texts = append(d.texts, text{8, head, anchorStart, true, name})
	says := name + ":"
	legend := marginLeft + nameWidth
	entry := func(name string, value float64, what string) float64 {
		at := legend
		d.texts = append(d.texts, text{at + 24, head, anchorStart, false, name})
		says += fmt.Sprintf(" %s, %s%.4g;", name, what, value/unit.size)
		legend += 24 + charWidth*float64(len(name)) + 20
		return at
	}
	fill := func(values []float64, stroke, fill color.NRGBA) {
		a := area{ys: make([]float64, len(values)), base: base, stroke: stroke, fill: fill}
		for i, v := range values {
			a.xs, a.ys[i] = append(a.xs, x(float64(i)*float64(c.width))), y(v)
		}
		if len(values) > 0 {
			a.xs = append(a.xs, right)
			d.areas = append(d.areas, a)
		}
	}
	for _, s := range p.areas {
		fill(s.values, s.color, faint(s.color))
	}
	for i, s := range slices.Backward(p.stack) {
		fill(sums[i], s.color, tint(s.color))
	}
	for _, s := range slices.Concat(p.areas, p.stack) {
		at := entry(s.name, highest(s.values), "at most ")
		d.areas = append(d.areas, area{[]float64{at, at + 18}, []float64{head - 7}, head + 1, s.color, faint(s.color)})
	}
	for _, m := range p.marks {
		d.marks = append(d.marks, line{left, y(m.value), right, y(m.value), vermilion, m.dash})
		at := entry(m.name, m.value, "")
		d.marks = append(d.marks, line{at, head - 3, at + 18, head - 3, vermilion, m.dash})
	}
	d.description += " " + strings.ToUpper(says[:1]) + strings.TrimSuffix(says[1:], ";") + "."
}

// highest is the largest of values that are not negative; 0 if there are none.
func highest(values []float64) (most float64) {
	for _, v := range values {
		most = max(most, v)
	}
	return most
}

// sumsOf returns for each series the sums of its values and those of the series before it.
func sumsOf(stack []series) [][]float64 {
	var sums [][]float64
	for i, s := range stack {
		sums = append(sums, slices.Clone(s.values))
		if i > 0 {
			for bin, below := range sums[i-1] {
				sums[i][bin] += below
			}
		}
	}
	return sums
}

const faintness = 0x48 // of 255

// faint lets what is behind an area show through.
func faint(c color.NRGBA) color.NRGBA {
	c.A = faintness
	return c
}

// tint looks like faint on white, but hides what is behind.
func tint(c color.NRGBA) color.NRGBA {
	mix := func(part uint8) uint8 { return 255 - uint8((255-int(part))*faintness/255) }
	return color.NRGBA{R: mix(c.R), G: mix(c.G), B: mix(c.B), A: c.A}
}

// ticks returns at most nine round numbers from 0 to a value: multiples of 1, 2 or 5 times a power of ten.
func ticks(to float64) (all []float64) {
	const steps = 8
	step := math.Pow(10, math.Floor(math.Log10(to/steps)))
	for _, factor := range []float64{2, 2.5, 2} {
		if to/step > steps {
			step *= factor
		}
	}
	for i := 0.0; i*step <= to*(1+1e-9); i++ {
		all = append(all, i*step)
	}
	return all
}
