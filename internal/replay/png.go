package replay

import (
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"math"

	"golang.org/x/image/font"
	"golang.org/x/image/font/inconsolata"
	"golang.org/x/image/math/fixed"
)

// pixels is how many pixels a point has: 144 dots per inch.
const pixels = 2

// writePNG writes the drawing as a PNG. All shapes are made of rectangles, and the font is a bitmap
// of its own: an outline font and its renderer would add half a megabyte to the program.
func (d *drawing) writePNG(w io.Writer) error {
	img := image.NewRGBA(image.Rect(0, 0, pageWidth*pixels, pageHeight*pixels))
	draw.Draw(img, img.Bounds(), image.White, image.Point{}, draw.Src)
	drawLines(img, d.grid)
	for _, a := range d.areas {
		before := a.ys[0]
		for i, y := range a.ys {
			fillRect(img, a.xs[i], y, a.xs[i+1], a.base, a.fill)
			drawLines(img, []line{{a.xs[i], before, a.xs[i], y, a.stroke, 0}, {a.xs[i], y, a.xs[i+1], y, a.stroke, 0}})
			before = y
		}
	}
	drawLines(img, d.marks)
	for _, t := range d.texts {
		face := inconsolata.Regular8x16
		if t.bold {
			face = inconsolata.Bold8x16
		}
		pen := font.Drawer{Dst: img, Src: image.NewUniform(ink), Face: face}
		pen.Dot = fixed.P(pixel(t.x), pixel(t.y))
		switch width := pen.MeasureString(t.text); t.anchor {
		case anchorMiddle:
			pen.Dot.X -= width / 2
		case anchorEnd:
			pen.Dot.X -= width
		}
		pen.DrawString(t.text)
	}
	return png.Encode(w, img)
}

func drawLines(img draw.Image, lines []line) {
	for _, l := range lines {
		length := math.Hypot(l.x2-l.x1, l.y2-l.y1)
		dash := l.dash
		if dash == 0 {
			dash = length
		}
		dx, dy := (l.x2-l.x1)/max(length, 1e-9), (l.y2-l.y1)/max(length, 1e-9)
		const half = lineWidth / 2
		for from := 0.0; from < length; from += dash + dashGap {
			to := min(from+dash, length)
			x1, y1, x2, y2 := l.x1+dx*from, l.y1+dy*from, l.x1+dx*to, l.y1+dy*to
			fillRect(img, min(x1, x2)-half, min(y1, y2)-half, max(x1, x2)+half, max(y1, y2)+half, l.color)
		}
	}
}

func fillRect(img draw.Image, x1, y1, x2, y2 float64, c color.NRGBA) {
	draw.Draw(img, image.Rect(pixel(x1), pixel(y1), pixel(x2), pixel(y2)), image.NewUniform(c), image.Point{}, draw.Over)
}

func pixel(points float64) int { return int(math.Round(points * pixels)) }
