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
	y, height float64 // its middle, in rows
	color     color.Color
}

// barPlotter draws bars that lie.
type barPlotter []bar

const (
	rowInches  = 0.16 // what a bar takes
	headInches = 1.1  // what is above and below all bars
)

// bars draws each subject's figures below each other, a colour for each column, and returns how high that gets.
func (t table) bars(p *plot.Plot, unit string) vg.Length {
	var all barPlotter
	columns, subjects := t.columns(), t.subjects()
	groups, within := subjects, columns
	// As groups, what there is more of: fewer colours are easier to tell apart.
	bySubject := len(subjects) >= len(columns)
	if !bySubject {
		groups, within = columns, subjects
	}
	step := 1 / (float64(len(within)) + 0.5)
	var names []string
	for g, group := range groups {
		y := float64(len(groups) - 1 - g)
		names = append([]string{group}, names...)
		for w, one := range within {
			column, subject := one, group
			if !bySubject {
				column, subject = group, one
			}
			if r, ok := t.find(column, subject, unit); ok && r.Rounds > 0 {
				all = append(all, bar{r, y + step*(float64(len(within)-1)/2-float64(w)), step, colorOf(w)})
			}
		}
	}
	if len(within) > 1 {
		for w, one := range within {
			p.Legend.Add(one, swatch{colorOf(w)})
		}
		p.Legend.Top = true
		p.Legend.ThumbnailWidth = vg.Points(10)
	}
	p.Add(all)
	p.NominalY(names...)
	p.X.Label.Text = unit
	_, p.X.Max, p.Y.Min, p.Y.Max = all.DataRange()
	p.X.Max *= 1.1 // room for the numbers
	lines := float64(len(groups)) * (float64(len(within)) + 0.5)
	if len(within) > 1 {
		p.Y.Max += float64(len(within)) * step // room for the legend
		lines += float64(len(within))
	}
	return vg.Length(headInches+rowInches*lines) * vg.Inch
}

func (b barPlotter) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	text := p.X.Tick.Label
	text.XAlign, text.YAlign = draw.XLeft, draw.YCenter
	for _, one := range b {
		low, high := y(one.y-0.42*one.height), y(one.y+0.42*one.height)
		zero, end := x(0), x(one.Median)
		c.FillPolygon(one.color, []vg.Point{{X: zero, Y: low}, {X: end, Y: low}, {X: end, Y: high}, {X: zero, Y: high}})
		whisker := draw.LineStyle{Color: color.Black, Width: vg.Points(1)}
		c.StrokeLine2(whisker, x(one.Low), y(one.y), x(one.High), y(one.y))
		c.FillText(text, vg.Point{X: x(max(one.High, one.Median, 0)) + vg.Points(3), Y: y(one.y)}, number(one.Median))
	}
}

// DataRange tells the plot what there is to show.
func (b barPlotter) DataRange() (xmin, xmax, ymin, ymax float64) {
	ymin = -0.5
	for _, one := range b {
		xmin, xmax = min(xmin, one.Low), max(xmax, one.High)
		ymax = max(ymax, one.y+0.5)
	}
	return xmin, xmax, ymin, ymax
}

// A swatch is a colour in the legend.
type swatch struct{ color.Color }

func (s swatch) Thumbnail(c *draw.Canvas) {
	c.FillPolygon(s.Color, []vg.Point{c.Min, {X: c.Max.X, Y: c.Min.Y}, c.Max, {X: c.Min.X, Y: c.Max.Y}})
}
