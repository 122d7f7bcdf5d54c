package main

import (
	"image/color"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// A bar is a median from zero on, with its quartiles and its number.
type bar struct {
	Result
	y     float64 // its middle; each bar is one high, with what is between bars
	color color.Color
}

// barPlotter draws bars that lie.
type barPlotter []bar

const (
	barHeight  = 0.17 * vg.Inch
	headHeight = 0.9 * vg.Inch // what is above and below all bars
)

// bars draws each subject's figures below each other, a colour for each column, and returns how high that gets.
func (t table) bars(p *plot.Plot, legend *plot.Legend, unit string) vg.Length {
	groups, within := t.subjects(), t.columns()
	// As groups, what there is more of: fewer colours are easier to tell apart.
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
	p.X.Max *= 1.1 // room for the numbers
	return headHeight + barHeight*vg.Length(-y)
}

func (b barPlotter) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	text := p.X.Tick.Label
	text.XAlign, text.YAlign = draw.XLeft, draw.YCenter
	for _, one := range b {
		low, high := y(one.y-0.42), y(one.y+0.42)
		zero, end := x(0), x(one.Median)
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
	c.FillPolygon(s.Color, []vg.Point{{X: c.Min.X, Y: low}, {X: c.Max.X, Y: low}, {X: c.Max.X, Y: high}, {X: c.Min.X, Y: high}})
}
