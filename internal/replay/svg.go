package replay

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"image/color"
	"io"
	"strconv"
)

// writeSVG writes the drawing as an SVG of 10 by 6.5 inches. It names a kind of font, and contains none.
func (d *drawing) writeSVG(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%gin" height="%gin" viewBox="0 0 %g %[4]g" `+
		`role="img" aria-labelledby="title description" font-family="Helvetica, Arial, sans-serif" font-size="%[5]g" stroke-width="%[6]g">`+"\n",
		pageWidth/72, pageHeight/72, pageWidth, pageHeight, fontSize, lineWidth)
	fmt.Fprintf(&b, "<title id=\"title\">%s</title>\n<desc id=\"description\">%s</desc>\n", escape(d.title), escape(d.description))
	fmt.Fprintf(&b, "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n")
	writeLines(&b, d.grid)
	for _, a := range d.areas {
		var steps bytes.Buffer
		for i, y := range a.ys {
			fmt.Fprintf(&steps, "V%sH%s", number(y), number(a.xs[i+1]))
		}
		first, base := number(a.xs[0]), number(a.base)
		fmt.Fprintf(&b, "<path d=\"M%s %s%sV%sZ\" fill=\"%s\" fill-opacity=\"%.2f\"/>\n",
			first, base, steps.Bytes(), base, hex(a.fill), float64(a.fill.A)/0xff)
		fmt.Fprintf(&b, "<path d=\"M%s %s%s\" fill=\"none\" stroke=\"%s\"/>\n",
			first, number(a.ys[0]), steps.Bytes(), hex(a.stroke))
	}
	writeLines(&b, d.marks)
	for _, t := range d.texts {
		weight := ""
		if t.bold {
			weight = ` font-weight="bold"`
		}
		fmt.Fprintf(&b, "<text x=\"%s\" y=\"%s\" text-anchor=\"%s\"%s fill=\"%s\">%s</text>\n",
			number(t.x), number(t.y), t.anchor, weight, hex(ink), escape(t.text))
	}
	b.WriteString("</svg>\n")
	_, err := w.Write(b.Bytes())
	return err
}

func writeLines(b *bytes.Buffer, lines []line) {
	for _, l := range lines {
		dash := ""
		if l.dash > 0 {
			dash = fmt.Sprintf(` stroke-dasharray="%g %g"`, l.dash, dashGap)
		}
		fmt.Fprintf(b, "<path d=\"M%s %sL%s %s\" stroke=\"%s\"%s/>\n",
			number(l.x1), number(l.y1), number(l.x2), number(l.y2), hex(l.color), dash)
	}
}

// number is a length with hundredths of a point.
func number(f float64) string {
	return strconv.FormatFloat(float64(int64(f*100+0.5))/100, 'f', -1, 64)
}

func hex(c color.NRGBA) string { return fmt.Sprintf("#%02x%02x%02x", c.R, c.G, c.B) }

func escape(s string) string {
	var b bytes.Buffer
	xml.EscapeText(&b, []byte(s)) // a buffer does not fail
	return b.String()
}
