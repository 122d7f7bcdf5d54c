package main

import (
	"bytes"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// chartFile is the name of a table's chart.
func chartFile(t table) string {
	words := strings.FieldsFunc(strings.ToLower(t.Suite+" "+t.Title), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	return strings.Join(words, "-") + ".svg"
}

// writeCharts writes the charts of all tables of a suite into a folder.
func (s section) writeCharts(dir string) error {
	for _, t := range s.Tables {
		data, err := t.chart()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, chartFile(t)), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// Okabe and Ito chose most of these colours: the colour-blind can tell them apart.
var (
	blue      = []color.Color{rgb(0x0072b2), rgb(0x56b4e9), rgb(0x00304d), rgb(0x8c9fe0), rgb(0x5b2fd6)}
	gray      = []color.Color{rgb(0x888888), rgb(0x333333), rgb(0xbbbbbb)}
	bright    = []color.Color{rgb(0xd55e00), rgb(0xe69f00), rgb(0x009e73), rgb(0xcc79a7), rgb(0xf0e442), rgb(0x7a4a2b)}
	allColors = slices.Concat(blue[:1], bright, blue[1:], gray)
)

func rgb(c uint32) color.Color { return color.RGBA{byte(c >> 16), byte(c >> 8), byte(c), 0xff} }

// colorsOf returns blues for shapectl, bright colours for peers, and grays for references that limit
// nothing. Things other than subjects get one colour each.
func colorsOf(things []string, areSubjects bool) (list []color.Color) {
	used := map[string]int{}
	for _, thing := range things {
		kind, from := "other", allColors
		switch {
		case areSubjects && ours(thing):
			kind, from = "ours", blue
		case areSubjects && peer(thing):
			kind, from = "peer", bright
		case areSubjects:
			kind, from = "reference", gray
		}
		list = append(list, from[used[kind]%len(from)])
		used[kind]++
	}
	return list
}

const (
	chartWidth  = 7 * vg.Inch
	lineHeight  = 3.2 * vg.Inch // of a chart with lines
	chartMargin = 8             // points
)

// chart draws a table: latency against goodput, or gaps, if it has them. Otherwise it draws the first
// unit, as lines if the columns are sizes, and as bars if not.
func (t table) chart() ([]byte, error) {
	plot.DefaultFont.Variant = "Sans"
	legend := plot.NewLegend()
	legend.Top, legend.Left = true, true
	legend.Padding = vg.Points(2)
	legend.ThumbnailWidth = vg.Points(16)
	plots, height, err := t.plots(&legend)
	if err != nil {
		return nil, err
	}
	svg := vgsvg.New(chartWidth, height*vg.Length(len(plots)))
	all := draw.New(svg)
	all.FillPolygon(color.White, []vg.Point{{}, {X: all.Max.X}, {X: all.Max.X, Y: all.Max.Y}, {Y: all.Max.Y}})
	for i, p := range plots {
		below, above := height*vg.Length(len(plots)-1-i), height*vg.Length(i)
		one := draw.Crop(all, chartMargin, -chartMargin, below+chartMargin, -above-chartMargin)
		box := legend.Rectangle(one) // beside the plot, where it hides nothing
		width := box.Max.X - box.Min.X
		if width > 0 {
			width = 1.1*width + 3*chartMargin // other fonts are wider
		}
		if i == 0 {
			beside := one.Max.X - one.Min.X - width + 2*chartMargin
			legend.Draw(draw.Crop(one, beside, 0, 0, -vg.Points(20)))
		}
		p.BackgroundColor = nil
		p.Draw(draw.Crop(one, 0, -width, 0, 0))
	}
	var b bytes.Buffer
	if _, err := svg.WriteTo(&b); err != nil {
		return nil, err
	}
	// Few readers have the font that the library names; these are as wide.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif")), nil
}

// plots are the parts of a chart from top to bottom, and the height of each.
func (t table) plots(legend *plot.Legend) (plots []*plot.Plot, height vg.Length, err error) {
	if t.isPlane() {
		plots, err := t.planes(legend)
		return plots, planeHeight, err
	}
	if t.isSpacing() {
		plots, err := t.ranges()
		return plots, headHeight + 0.2*vg.Inch*vg.Length(len(t.subjects())+1), err
	}
	p, unit := plot.New(), t.units()[0]
	p.Title.Text, p.Title.Padding = t.Title, vg.Points(6)
	if sizes, ok := t.sizes(); ok {
		return []*plot.Plot{p}, lineHeight, t.lines(p, legend, unit, sizes)
	}
	return []*plot.Plot{p}, t.bars(p, legend, unit), nil
}

// sizes are the columns as numbers; false if some are not.
func (t table) sizes() (sizes []float64, ok bool) {
	for _, column := range t.columns() {
		n, err := strconv.ParseFloat(strings.ReplaceAll(column, " ", ""), 64)
		if err != nil || n <= 0 {
			return nil, false
		}
		sizes = append(sizes, n)
	}
	return sizes, len(sizes) > 1
}

// points are medians, with quartiles as their errors.
type points struct {
	plotter.XYs
	plotter.YErrors
}

func (t table) lines(p *plot.Plot, legend *plot.Legend, unit string, sizes []float64) error {
	p.Add(plotter.NewGrid())
	least, most := math.Inf(1), 0.0
	colors := colorsOf(t.subjects(), true)
	for i, subject := range t.subjects() {
		var at points
		for j, column := range t.columns() {
			r, ok := t.find(column, subject, unit)
			if !ok || r.Rounds == 0 {
				continue
			}
			at.XYs = append(at.XYs, plotter.XY{X: sizes[j], Y: r.Median})
			at.YErrors = append(at.YErrors, struct{ Low, High float64 }{r.Median - r.Low, r.High - r.Median})
			least, most = min(least, r.Low), max(most, r.High)
		}
		if len(at.XYs) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(at)
		if err != nil {
			return err
		}
		line.Color, line.Width = colors[i], vg.Points(1.5)
		dots.Color, dots.Shape, dots.Radius = colors[i], draw.CircleGlyph{}, vg.Points(2.5)
		if !ours(subject) {
			line.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
		}
		spread, err := plotter.NewYErrorBars(at)
		if err != nil {
			return err
		}
		spread.Color = colors[i]
		p.Add(line, dots, spread)
		legend.Add(subject, line, dots)
	}
	p.Y.Label.Text = unit
	p.X.Min, p.X.Max = slices.Min(sizes), slices.Max(sizes)
	if p.X.Max > 8*p.X.Min {
		p.X.Scale = plot.LogScale{}
		var ticks plot.ConstantTicks
		for i, column := range t.columns() {
			if i+1 < len(sizes) && sizes[i+1] < 8*sizes[i] {
				column = "" // the next one's label needs the room
			}
			ticks = append(ticks, plot.Tick{Value: sizes[i], Label: column})
		}
		p.X.Tick.Marker = ticks
	}
	if least > 0 && most > 50*least {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.Y.Min, p.Y.Max = least/1.2, most*1.2
	} else {
		p.Y.Min, p.Y.Max = min(0, least), most*1.1
	}
	return nil
}

// A bar is a median, with its quartiles and its number. It begins at zero, or at the axis of a logarithmic scale.
type bar struct {
	Result
	y     float64 // its middle; each bar is one high, with what is between bars
	color color.Color
}

// barPlotter draws horizontal bars.
type barPlotter []bar

const (
	barHeight  = 0.15 * vg.Inch
	headHeight = 0.9 * vg.Inch // above and below all bars
)

// bars draws the figures of each subject below each other, with one colour per column, and returns their height.
func (t table) bars(p *plot.Plot, legend *plot.Legend, unit string) vg.Length {
	groups, within := t.subjects(), t.columns()
	// Fewer colours are easier to tell apart, so the longer list becomes the groups.
	bySubject := len(groups) >= len(within)
	if !bySubject {
		groups, within = within, groups
	}
	colors := colorsOf(within, !bySubject)
	const gap = 0.6
	var all barPlotter
	var names plot.ConstantTicks
	y := 0.0
	for _, group := range groups {
		first := y
		for i, one := range within {
			column, subject := one, group
			if !bySubject {
				column, subject = group, one
			}
			if r, ok := t.find(column, subject, unit); ok && r.Rounds > 0 {
				all = append(all, bar{r, y, colors[i]})
				y--
			}
		}
		if y == first {
			continue // nothing was measured
		}
		names = append(names, plot.Tick{Value: (first + y + 1) / 2, Label: group})
		y -= gap
	}
	if len(within) > 1 {
		for i, one := range within {
			legend.Add(one, swatch{colors[i]})
		}
	}
	p.Add(all)
	p.Y.Tick.Marker, p.Y.Tick.Width, p.Y.Width = names, 0, 0
	p.X.Label.Text = unit
	if least, most := all.bounds(); least > 0 && most > 1000*least {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.X.Min = math.Pow(10, math.Floor(math.Log10(least)))
		p.X.Max *= 4
	} else {
		p.X.Max *= 1.1 // room for the numbers
	}
	return headHeight + barHeight*vg.Length(-y)
}

// bounds are the least and the greatest figure.
func (b barPlotter) bounds() (least, most float64) {
	least = math.Inf(1)
	for _, one := range b {
		least, most = min(least, one.Low, one.Median), max(most, one.High)
	}
	return least, most
}

func (b barPlotter) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	text := p.X.Tick.Label
	text.XAlign, text.YAlign = draw.XLeft, draw.YCenter
	for _, one := range b {
		low, high := y(one.y-0.42), y(one.y+0.42)
		zero, end := x(max(0, p.X.Min)), x(one.Median)
		c.FillPolygon(one.color, []vg.Point{{X: zero, Y: low}, {X: end, Y: low}, {X: end, Y: high}, {X: zero, Y: high}})
		whisker := draw.LineStyle{Color: color.Black, Width: vg.Points(1)}
		c.StrokeLine2(whisker, x(one.Low), y(one.y), x(one.High), y(one.y))
		c.FillText(text, vg.Point{X: x(max(one.High, one.Median, 0)) + vg.Points(3), Y: y(one.y)}, number(one.Median))
	}
}

// DataRange tells the plot what there is to show.
func (b barPlotter) DataRange() (xmin, xmax, ymin, ymax float64) {
	ymax = 0.6
	for _, one := range b {
		xmin, xmax, ymin = min(xmin, one.Low), max(xmax, one.High), min(ymin, one.y-0.6)
	}
	return xmin, xmax, ymin, ymax
}

// A swatch is a colour in the legend.
type swatch struct{ color.Color }

func (s swatch) Thumbnail(c *draw.Canvas) {
	low, high := c.Min.Y+vg.Points(2), c.Max.Y-vg.Points(2)
	left, right := c.Min.X, c.Max.X
	c.FillPolygon(s.Color, []vg.Point{{X: left, Y: low}, {X: right, Y: low}, {X: right, Y: high}, {X: left, Y: high}})
}
