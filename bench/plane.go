package main

import (
	"math"
	"slices"
	"strconv"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// A plane shows the round trip of pings beside TCP against the goodput of TCP: left is a
// short one, and above is a high goodput. Ranges show gaps.

const planeHeight = 2.9 * vg.Inch

// isPlane reports whether a table has the figures of a plane.
func (t table) isPlane() bool {
	_, _, goodput := t.bounds(unitGoodput)
	_, _, ping := t.bounds(unitPing50)
	return goodput && ping
}

// isSpacing reports whether a table has quantiles of gaps.
func (t table) isSpacing() bool {
	_, _, ok := t.bounds(unitGap99)
	return ok
}

// ranges returns a plot for each column, with the range of most gaps: a line for each subject, with a mark at the median.
func (t table) ranges() (ranges []*plot.Plot, err error) {
	marks := t.marks()
	least, most, _ := t.bounds(unitGap1, unitGap50, unitGap99)
	for _, column := range t.columns() {
		p := plot.New()
		p.Title.Text, p.Title.Padding = t.Title+": "+column, vg.Points(6)
		p.X.Label.Text = "gaps from p1 to p99, relative to the ideal"
		p.Add(plotter.NewGrid())
		var names plot.ConstantTicks
		for i, subject := range t.subjects() {
			names = append(names, plot.Tick{Value: -float64(i), Label: subject})
			var at plotter.XYs
			for _, unit := range []string{unitGap1, unitGap50, unitGap99} {
				if r, ok := t.find(column, subject, unit); ok && r.Rounds > 0 {
					at = append(at, plotter.XY{X: r.Median, Y: -float64(i)})
				}
			}
			if len(at) != 3 {
				continue
			}
			if err := stretch(p, at, at[1], marks[i]); err != nil {
				return nil, err
			}
		}
		p.Y.Tick.Marker, p.Y.Tick.Width, p.Y.Width = names, 0, 0
		p.Y.Min, p.Y.Max = 0.5-float64(len(names)), 0.5
		p.X.Min, p.X.Max = min(0, least), max(2, most)
		ranges = append(ranges, p)
	}
	return ranges, nil
}

// stretch draws a line with a mark on it.
func stretch(p *plot.Plot, along plotter.XYs, at plotter.XY, mark draw.GlyphStyle) error {
	line, err := plotter.NewLine(along)
	if err != nil {
		return err
	}
	line.Color, line.Width = mark.Color, vg.Points(1.5)
	p.Add(line, &plotter.Scatter{XYs: plotter.XYs{at}, GlyphStyle: mark})
	return nil
}

// bounds returns the least and the greatest figure of some units, or false without figures.
func (t table) bounds(units ...string) (least, most float64, ok bool) {
	least, most = math.Inf(1), math.Inf(-1)
	for _, r := range t.results {
		if slices.Contains(units, r.Unit) && r.Rounds > 0 {
			least, most, ok = min(least, r.Median), max(most, r.Median), true
		}
	}
	return least, most, ok
}

// planes returns a plot for each column, all with the same scales.
func (t table) planes(legend *plot.Legend) (planes []*plot.Plot, err error) {
	soonest, latest, _ := t.bounds(unitPing50, unitPing99)
	worst, best, _ := t.bounds(unitGoodput)
	marks := t.marks()
	for i, subject := range t.subjects() {
		legend.Add(subject, &plotter.Scatter{GlyphStyle: marks[i]})
	}
	for _, column := range t.columns() {
		p := plot.New()
		p.Title.Text, p.Title.Padding = t.Title+": "+column, vg.Points(6)
		p.X.Label.Text, p.Y.Label.Text = "ms from p50 to p99 of pings", unitGoodput
		p.Add(plotter.NewGrid())
		for i, subject := range t.subjects() {
			goodput, ok1 := t.find(column, subject, unitGoodput)
			p50, ok2 := t.find(column, subject, unitPing50)
			p99, ok3 := t.find(column, subject, unitPing99)
			if !ok1 || !ok2 || !ok3 || min(goodput.Rounds, p50.Rounds, p99.Rounds) == 0 {
				continue
			}
			at := plotter.XYs{{X: p50.Median, Y: goodput.Median}, {X: p99.Median, Y: goodput.Median}}
			if err := stretch(p, at, at[0], marks[i]); err != nil {
				return nil, err
			}
		}
		p.X.Tick.Marker = plot.TickerFunc(fewTicks)
		p.X.Min, p.X.Max = soonest/1.1, latest*1.1
		if soonest > 0 {
			p.X.Scale = plot.LogScale{}
		}
		p.Y.Min, p.Y.Max = math.Floor(worst-1), math.Ceil(max(best, 100)+1)
		planes = append(planes, p)
	}
	return planes, nil
}

// marks returns a symbol for each subject: a disc for modes of shapectl, and other shapes for peers.
func (t table) marks() (marks []draw.GlyphStyle) {
	shapes := []draw.GlyphDrawer{
		draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}, draw.CrossGlyph{}, draw.PlusGlyph{},
	}
	colors := colorsOf(t.subjects(), true)
	for i, subject := range t.subjects() {
		mark := draw.GlyphStyle{Color: colors[i], Radius: vg.Points(3.5), Shape: draw.CircleGlyph{}}
		if !ours(subject) {
			mark.Shape = shapes[i%len(shapes)]
		}
		marks = append(marks, mark)
	}
	return marks
}

// fewTicks returns round numbers for a logarithmic axis with few decades.
func fewTicks(least, most float64) (ticks []plot.Tick) {
	for ten := math.Pow(10, math.Floor(math.Log10(max(least, 1e-3)))); ten <= most; ten *= 10 {
		for _, digit := range []float64{1, 1.5, 2, 3, 4, 5, 7} {
			if at := digit * ten; at >= least && at <= most {
				ticks = append(ticks, plot.Tick{Value: at, Label: strconv.FormatFloat(at, 'g', 3, 64)})
			}
		}
	}
	return ticks
}
