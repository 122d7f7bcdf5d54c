package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// A chart is the figures of a table in one unit, as SVG: lines if the columns are sizes, and bars if not. A figure is the
// median, with a thin line from quartile to quartile.
type chart struct {
	bytes.Buffer
	table
	unit    string
	x, y    scale
	subject []string // with figures
}

const (
	chartWidth  = 660 // pixels
	legendWidth = 190
	linesHeight = 280
	barHeight   = 13
)

// A scale maps figures to pixels.
type scale struct {
	least, most, from, to float64
	log                   bool
}

func (s scale) at(v float64) float64 {
	least, most := s.least, s.most
	if s.log {
		v, least, most = math.Log(max(v, least)), math.Log(least), math.Log(most)
	}
	return s.from + (v-least)/(most-least)*(s.to-s.from)
}

// newScale has zero, or is logarithmic if the figures differ by more than a factor.
func newScale(least, most, factor, from, to float64) scale {
	switch {
	case least > 0 && most > factor*least:
		return scale{math.Pow(10, math.Floor(math.Log10(least))), most, from, to, true}
	case !(most > min(0, least)): // no figures, or all are zero
		return scale{0, 1, from, to, false}
	}
	return scale{min(0, least), most, from, to, false}
}

// ticks are round figures.
func (s scale) ticks() (list []float64) {
	step := math.Pow(10, math.Floor(math.Log10(s.most-s.least)))
	if (s.most-s.least)/step < 3 {
		step /= 2
	}
	for v := math.Ceil(s.least/step) * step; !s.log && v <= s.most; v += step {
		list = append(list, v)
	}
	for v := s.least; s.log && v <= s.most; v *= 10 {
		list = append(list, v)
	}
	return list
}

// draw returns the chart of a table.
func (t table) draw(title, unit string) []byte {
	c := chart{table: t, unit: unit}
	sizes, isSizes := t.sizes()
	least, most := math.Inf(1), math.Inf(-1)
	for _, r := range t.results {
		if r.Unit == unit && r.Rounds > 0 {
			least, most = min(least, r.Low, r.Median), max(most, r.High, r.Median)
		}
	}
	for _, s := range t.subjects() {
		for _, column := range t.columns() {
			if r, ok := t.find(column, s, unit); ok && r.Rounds > 0 {
				c.subject = append(c.subject, s)
				break
			}
		}
	}
	height := linesHeight
	if !isSizes {
		height = 60 + barHeight*len(c.subject)*(len(t.columns())+1)
	}
	fmt.Fprintf(&c, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">`+"\n", chartWidth, height)
	c.box(0, 0, chartWidth, float64(height), "#fff")
	c.text(chartWidth/2, 16, "middle", title+" ("+unit+")")
	if isSizes {
		c.lines(sizes, least, most)
	} else {
		c.bars(least, most, float64(height))
	}
	c.WriteString("</svg>\n")
	return c.Bytes()
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

func (c *chart) lines(sizes []float64, least, most float64) {
	c.x = scale{sizes[0], sizes[len(sizes)-1], 60, chartWidth - legendWidth - 20, true}
	c.y = newScale(least, most, 50, linesHeight-30, 40)
	for _, v := range c.y.ticks() {
		c.line(c.x.from, c.y.at(v), c.x.to, c.y.at(v), "#ddd", "")
		c.text(c.x.from-5, c.y.at(v)+4, "end", number(v))
	}
	for i, size := range sizes {
		if i+1 == len(sizes) || sizes[i+1] >= 8*size { // else the next one's label needs the room
			c.text(c.x.at(size), linesHeight-14, "middle", c.columns()[i])
		}
	}
	for i, subject := range c.subject {
		color, dashes := colorOf(c.subject, i), ""
		if !ours(subject) {
			dashes = "5 3"
		}
		var before []float64
		for j, column := range c.columns() {
			r, ok := c.find(column, subject, c.unit)
			if !ok || r.Rounds == 0 {
				continue
			}
			x, y := c.x.at(sizes[j]), c.y.at(r.Median)
			if before != nil {
				c.line(before[0], before[1], x, y, color, dashes)
			}
			before = []float64{x, y}
			c.line(x, c.y.at(r.Low), x, c.y.at(r.High), color, "")
			fmt.Fprintf(c, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x, y, color)
		}
		c.legend(i, color, subject)
	}
}

// bars are those of each subject below each other, with a colour for each column.
func (c *chart) bars(least, most, height float64) {
	columns := c.columns()
	right := float64(chartWidth - 60)
	if len(columns) > 1 {
		right -= legendWidth
	}
	c.x = newScale(least, most, 1000, 200, right)
	labelled := 0.0
	for _, v := range c.x.ticks() {
		c.line(c.x.at(v), 30, c.x.at(v), height-20, "#ddd", "")
		if c.x.at(v) > labelled+45 {
			labelled = c.x.at(v)
			c.text(labelled, height-6, "middle", number(v))
		}
	}
	y := 36.0
	for n, subject := range c.subject {
		c.text(c.x.from-8, y+float64(barHeight*len(columns))/2+4, "end", subject)
		for i, column := range columns {
			color := colors[i%len(colors)]
			if len(columns) == 1 {
				color = colorOf(c.subject, n)
			}
			if r, ok := c.find(column, subject, c.unit); ok && r.Rounds > 0 {
				zero, end := c.x.at(max(0, c.x.least)), c.x.at(r.Median)
				c.box(min(zero, end), y+1, math.Abs(end-zero), barHeight-2, color)
				c.line(c.x.at(r.Low), y+barHeight/2, c.x.at(r.High), y+barHeight/2, "#000", "")
				c.text(c.x.at(max(r.High, r.Median, 0))+4, y+barHeight-3, "start", number(r.Median))
			}
			y += barHeight
		}
		y += barHeight
	}
	for i, column := range columns {
		if len(columns) > 1 {
			c.legend(i, colors[i%len(colors)], column)
		}
	}
}

func (c *chart) legend(i int, color, text string) {
	y := float64(40 + 16*i)
	c.box(chartWidth-legendWidth, y, 12, 10, color)
	c.text(chartWidth-legendWidth+17, y+9, "start", text)
}

func (c *chart) box(x, y, width, height float64, color string) {
	fmt.Fprintf(c, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x, y, width, height, color)
}

func (c *chart) line(x1, y1, x2, y2 float64, color, dashes string) {
	fmt.Fprintf(c, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-dasharray="%s"/>`+"\n", x1, y1, x2, y2, color, dashes)
}

func (c *chart) text(x, y float64, anchor, text string) {
	fmt.Fprintf(c, `<text x="%.1f" y="%.1f" text-anchor="%s">`, x, y, anchor)
	xml.EscapeText(c, []byte(text))
	c.WriteString("</text>\n")
}

// Okabe and Ito chose most of these colours: the colour-blind can tell them apart. Blue is for shapectl.
var (
	blues  = []string{"#0072b2", "#56b4e9", "#00304d", "#8c9fe0", "#5b2fd6"}
	others = []string{"#d55e00", "#e69f00", "#009e73", "#cc79a7", "#888", "#7a4a2b", "#333"}
	colors = append(blues[:1:1], others...)
)

// colorOf is the colour of a subject.
func colorOf(subjects []string, i int) string {
	same := 0
	for _, s := range subjects[:i] {
		if ours(s) == ours(subjects[i]) {
			same++
		}
	}
	if ours(subjects[i]) {
		return blues[same%len(blues)]
	}
	return others[same%len(others)]
}
