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

// A plane shows what a ping waits beside TCP, against what TCP has: to the left
// is what makes it wait the least, above what leaves TCP the most.

const planeHeight = 2.9 * vg.Inch

// isPlane reports whether a table has what a plane shows.
func (t table) isPlane() bool {
	_, _, goodput := t.bounds(unitGoodput)
	_, _, ping := t.bounds(unitPing50)
	return goodput && ping
}

// bounds are the least and the greatest figure of some units; false where there is none.
func (t table) bounds(units ...string) (least, most float64, ok bool) {
	least, most = math.Inf(1), math.Inf(-1)
	for _, r := range t.results {
		if slices.Contains(units, r.Unit) && r.Rounds > 0 {
			least, most, ok = min(least, r.Median), max(most, r.Median), true
		}
	}
	return least, most, ok
}

// planes are one for each column, on the same scales.
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
			line, err := plotter.NewLine(at)
			if err != nil {
				return nil, err
			}
			line.Color, line.Width = marks[i].Color, vg.Points(1.5)
			p.Add(line, &plotter.Scatter{XYs: at[:1], GlyphStyle: marks[i]})
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

// marks are what stands for each subject: a disc for us, and other shapes for others.
func (t table) marks() (marks []draw.GlyphStyle) {
	shapes := []draw.GlyphDrawer{draw.SquareGlyph{}, draw.TriangleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}, draw.CrossGlyph{}, draw.PlusGlyph{}}
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

// fewTicks are round numbers for an axis that has not many decades.
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
