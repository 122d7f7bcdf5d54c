package main

import (
	"bytes"
	"image/color"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

const chartPrefix = "bench-"

// chartFile is the name of a table's chart.
func chartFile(t table) string {
	words := strings.FieldsFunc(strings.ToLower(t.Suite+" "+t.Title), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
	return chartPrefix + strings.Join(words, "-") + ".svg"
}

// charts draws all tables, and takes away charts of tables that are no more.
func (r report) charts(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, chartPrefix+"*.svg"))
	if err != nil {
		return err
	}
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	for _, s := range r.Sections() {
		for _, t := range s.Tables {
			data, err := t.chart()
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(dir, chartFile(t)), data, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// colors are those of Okabe and Ito, which those who see fewer colours tell apart.
var colors = []color.Color{
	color.RGBA{0x00, 0x72, 0xb2, 0xff}, color.RGBA{0x56, 0xb4, 0xe9, 0xff}, color.RGBA{0xd5, 0x5e, 0x00, 0xff},
	color.RGBA{0xe6, 0x9f, 0x00, 0xff}, color.RGBA{0x00, 0x9e, 0x73, 0xff}, color.RGBA{0xcc, 0x79, 0xa7, 0xff},
	color.RGBA{0x50, 0x50, 0x50, 0xff}, color.RGBA{0xb0, 0xa0, 0x00, 0xff},
}

func colorOf(i int) color.Color { return colors[i%len(colors)] }

// chart draws the first unit of a table: lines where its columns are sizes, else bars.
func (t table) chart() ([]byte, error) {
	p := plot.New()
	p.Title.Text = t.Title
	p.BackgroundColor = color.White
	unit := t.units()[0]
	height := 3.4 * vg.Inch
	if sizes, ok := t.sizes(); ok {
		if err := t.lines(p, unit, sizes); err != nil {
			return nil, err
		}
	} else {
		height = t.bars(p, unit)
	}
	w, err := p.WriterTo(7.5*vg.Inch, height, "svg")
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if _, err := w.WriteTo(&b); err != nil {
		return nil, err
	}
	// Where a reader lacks the fonts that the library names, it shall take like ones.
	return bytes.ReplaceAll(b.Bytes(), []byte("font-family:Liberation Sans"),
		[]byte("font-family:Liberation Sans,Arial,Helvetica,sans-serif")), nil
}

// sizes are the columns as numbers; false where they are not.
func (t table) sizes() (sizes []float64, ok bool) {
	for _, column := range t.columns() {
		n, err := strconv.ParseFloat(strings.ReplaceAll(column, " ", ""), 64)
		if err != nil {
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

func (t table) lines(p *plot.Plot, unit string, sizes []float64) error {
	least, most := 0.0, 0.0
	for i, subject := range t.subjects() {
		var at points
		for j, column := range t.columns() {
			r, ok := t.find(column, subject, unit)
			if !ok || r.Rounds == 0 || r.Median <= 0 {
				continue
			}
			at.XYs = append(at.XYs, plotter.XY{X: sizes[j], Y: r.Median})
			at.YErrors = append(at.YErrors, struct{ Low, High float64 }{r.Median - r.Low, r.High - r.Median})
			if most = max(most, r.High); least == 0 || r.Low < least {
				least = r.Low
			}
		}
		if len(at.XYs) == 0 {
			continue
		}
		line, dots, err := plotter.NewLinePoints(at)
		if err != nil {
			return err
		}
		line.Color, line.Width = colorOf(i), vg.Points(1.5)
		dots.Color, dots.Shape, dots.Radius = colorOf(i), draw.CircleGlyph{}, vg.Points(2.5)
		if !ours(subject) {
			line.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
		}
		spread, err := plotter.NewYErrorBars(at)
		if err != nil {
			return err
		}
		spread.Color = colorOf(i)
		p.Add(line, dots, spread)
		p.Legend.Add(subject, line, dots)
	}
	p.Y.Label.Text = unit
	p.Y.Min = 0
	p.X.Scale = plot.LogScale{}
	var ticks plot.ConstantTicks
	for i, column := range t.columns() {
		ticks = append(ticks, plot.Tick{Value: sizes[i], Label: column})
	}
	p.X.Tick.Marker = ticks
	if least > 0 && most > 50*least {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.Y.Min, p.Y.Max = least/1.2, most*1.2
	} else {
		p.Y.Max = most * 1.1
	}
	p.Add(plotter.NewGrid())
	p.Legend.Top, p.Legend.Left = true, true
	return nil
}
