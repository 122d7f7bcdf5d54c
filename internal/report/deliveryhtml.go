package report

import (
	"cmp"
	"fmt"
	"html"
	"io"
	"math"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/plain"
)

// deliveryStyle is the style of the page. Colours are those of Okabe and Ito, which the colour-blind can tell apart.
const deliveryStyle = `:root{color-scheme:light dark;--ink:#222;--soft:#666;--paper:#fff;--line:#ddd;--passed:#0072b2;--offered:#d55e00;--limit:#333;--gap:#eee}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e6;--soft:#a0a0a0;--paper:#16181c;--line:#3a3d44;--passed:#56b4e9;--offered:#e69f00;--limit:#ddd;--gap:#2a2d33}}
@media print{:root{color-scheme:light;--ink:#000;--soft:#444;--paper:#fff;--line:#ccc;--passed:#0072b2;--offered:#d55e00;--limit:#000;--gap:#eee}section{break-inside:avoid}*{print-color-adjust:exact}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;max-width:60rem;padding:1rem}
h1{font-size:1.4rem;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}p{color:var(--soft);margin:.3rem 0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}th,td{text-align:left;vertical-align:top;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);overflow-wrap:anywhere}th{font-weight:600;white-space:nowrap;width:1%}
svg{width:100%;height:auto;display:block;margin:.5rem 0}svg text{fill:var(--soft);font:11px system-ui,sans-serif}
.grid{stroke:var(--line)}.gap{fill:var(--gap)}.offered{fill:var(--offered);opacity:.55}.passed{fill:var(--passed)}.limit{stroke:var(--limit);stroke-width:1.5;fill:none}.rate{stroke-width:1;opacity:.6}.change{stroke:var(--soft);fill:var(--soft)}
@media(max-width:40rem){section{overflow-x:auto}svg{min-width:36rem}svg text{font-size:15px}}`

// HTML writes the reports as one page that needs no other file. host is where the rules are.
func (all Deliveries) HTML(w io.Writer, host string) error {
	title := inHTML("Delivered rates of " + all.called() + " on " + host)
	var s strings.Builder
	s.WriteString("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n" +
		"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n" +
		"<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" + title + "</title>\n<style>" + deliveryStyle + "</style>\n</head>\n<body>\n<main>\n<h1>" + title + "</h1>\n")
	for _, d := range all {
		fmt.Fprintf(&s, "<section>\n<h2>%s</h2>\n", inHTML(d.title()))
		d.svg(&s)
		s.WriteString("<table>\n")
		d.rows(&s)
		s.WriteString("</table>\n</section>\n")
	}
	s.WriteString("<p>Offered is all traffic. The limits passed a part of it and dropped the rest. Passed packets may still be lost later. Committed is the rate that is checked. " +
		"A change came between two readings: the picture marks that time, and has no line of the rate in it. " +
		"The 95th percentile is the rate that 95 % of the averages do not exceed. Due is what had to pass: what was offered, or what the committed rate " +
		"allows less one burst, if that is less.</p>\n<p>Made by shapectl. Bytes are counted as on the wire. An interval delivered the committed rate if nothing was dropped in it, or if as much " +
		"passed as the committed rate allows, less one burst. If it did not, and the committed rate was not offered in it, before it and after it, it cannot be judged. For a pool within no other pool, only packets that the pool itself refused count as dropped. Rates and checks leave gaps out.</p>\n</main>\n</body>\n</html>\n")
	_, err := io.WriteString(w, s.String())
	return err
}

func (d *Delivery) rows(s *strings.Builder) {
	label, open := "", false
	for _, f := range d.facts(mostMissed) {
		switch {
		case f[0] == "" && open:
			fmt.Fprintf(s, "<br>%s", inHTML(f[1]))
			continue
		case open:
			s.WriteString("</td></tr>\n")
		}
		label, open = f[0], true
		fmt.Fprintf(s, "<tr><th scope=\"row\">%s</th><td>%s", inHTML(label), inHTML(f[1]))
	}
	if open {
		s.WriteString("</td></tr>\n")
	}
}

// inHTML is text as HTML shows it. Names come from anybody.
func inHTML(text string) string { return html.EscapeString(plain.Line(text)) }

const (
	svgWidth, svgHeight   = 900.0, 260.0
	svgLeft, svgRight     = 70.0, 10.0
	svgTop, svgBottom     = 24.0, 24.0
	mostColumns           = mostIntervals // of the picture: periods are joined until there are no more
	svgTicks              = 4
	legendStep, legendTop = 120.0, 14.0
)

// limitClasses are the classes of lines for the rate and the committed rate.
var limitClasses = [2]string{"limit rate", "limit"}

// A bar is an interval, or one or several periods of a picture.
type bar struct {
	begin, end      time.Time
	measured        float64 // seconds
	offered, passed float64 // bits
}

// bars are the intervals or periods as a picture can show them, and how long each is.
func (d *Delivery) bars() (bars []bar, width time.Duration) {
	for _, p := range d.Intervals {
		seconds := float64(p.MeasuredNS) / 1e9
		bars = append(bars, bar{p.Begin, p.End, seconds, float64(p.OfferedBits) * seconds, float64(p.PassedBits) * seconds})
	}
	if len(bars) > 0 {
		return bars, time.Duration(d.IntervalNS)
	}
	width = period
	for d.Until.Sub(d.Since)/width > mostColumns {
		width *= 2
	}
	for _, p := range d.Periods {
		begin := p.Begin.Truncate(width)
		if n := len(bars); n == 0 || !bars[n-1].begin.Equal(begin) {
			bars = append(bars, bar{begin: begin, end: begin.Add(width)})
		}
		b := &bars[len(bars)-1]
		seconds := float64(p.MeasuredNS) / 1e9
		b.measured += seconds
		b.offered, b.passed = b.offered+float64(p.OfferedBits)*seconds, b.passed+float64(p.PassedBits)*seconds
	}
	return bars, width
}

// svg draws what was offered and passed over time, beside the committed rate and the rate.
func (d *Delivery) svg(s *strings.Builder) {
	bars, width := d.bars()
	length := d.Until.Sub(d.Since).Seconds()
	if length <= 0 {
		return
	}
	top := 1.0
	for _, b := range bars {
		top = max(top, b.offered/max(b.measured, 1))
	}
	busiest := top
	for _, l := range d.Limits {
		for _, bits := range l.both() {
			if bits != nil && float64(*bits) < 20*busiest { // a far limit would hide the traffic
				top = max(top, float64(*bits))
			}
		}
	}
	top = niceAbove(top * 1.05)
	x := func(t time.Time) float64 {
		part := t.Sub(d.Since).Seconds() / length
		return svgLeft + max(0, min(1, part))*(svgWidth-svgLeft-svgRight)
	}
	y := func(bits float64) float64 {
		return svgHeight - svgBottom - min(1, bits/top)*(svgHeight-svgTop-svgBottom)
	}
	description := fmt.Sprintf("From %s to %s, %s were offered and %s passed.", moment(d.Since), moment(d.Until), bytesText(d.OfferedBytes), bytesText(d.PassedBytes))
	fmt.Fprintf(s, "<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\">\n", svgWidth, svgHeight, inHTML(description))
	for i := range svgTicks + 1 {
		bits := top * float64(i) / svgTicks
		fmt.Fprintf(s, "<path class=\"grid\" d=\"M%g %.1fH%g\"/><text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
			svgLeft, y(bits), svgWidth-svgRight, svgLeft-6, y(bits)+4, bitsText(uint64(bits)))
	}
	area := func(class string, bits func(bar) float64) {
		fmt.Fprintf(s, "<path class=\"%s\" d=\"", class)
		for _, b := range bars {
			if v := bits(b) / max(b.measured, 1e-9); v > 0 {
				fmt.Fprintf(s, "M%.1f %.1fV%.1fH%.1fV%.1fZ", x(b.begin), y(0), y(v), x(b.end), y(0))
			}
		}
		s.WriteString("\"/>\n")
	}
	area("offered", func(b bar) float64 { return b.offered })
	area("passed", func(b bar) float64 { return b.passed })
	drawn := d.limitLines(s, x, y, top)
	for _, g := range d.Gaps { // over what is drawn: a bar may reach into a gap
		if left, right := x(g.Begin), x(g.End); right > left {
			fmt.Fprintf(s, "<rect class=\"gap\" x=\"%.1f\" y=\"%g\" width=\"%.1f\" height=\"%g\"/>\n", left, svgTop, right-left, svgHeight-svgTop-svgBottom)
		}
	}
	for _, c := range d.ownChanges() {
		left, right := x(*cmp.Or(c.After, &c.Time)), x(c.Time)
		fmt.Fprintf(s, "<path class=\"change\" d=\"M%.1f %gV%gH%.1fV%gZ\"><title>%s</title></path>\n", left, svgTop, svgTop+8, right, svgTop, inHTML(c.when()+": "+c.What))
	}
	for i := range svgTicks + 1 {
		t := d.Since.Add(time.Duration(float64(i) / svgTicks * length * 1e9))
		layout := "2006-01-02 15:04"
		switch {
		case length <= 3600:
			layout = time.TimeOnly
		case length <= 36*3600:
			layout = "15:04"
		}
		anchor := []string{"start", "middle", "end"}[min(i, 1)+i/svgTicks]
		fmt.Fprintf(s, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"%s\">%s</text>\n", x(t), svgHeight-8, anchor, t.Local().Format(layout))
	}
	at := svgLeft
	legend := func(class, text string) {
		fmt.Fprintf(s, "<rect class=\"%s\" x=\"%g\" y=\"%g\" width=\"12\" height=\"10\"/><text x=\"%g\" y=\"%g\">%s</text>\n", class, at, legendTop-9, at+17, legendTop, text)
		at += legendStep
	}
	legend("passed", "passed")
	legend("offered", "dropped")
	legend("gap", "no data")
	for i, text := range []string{"rate", "committed"} {
		if drawn[i] {
			fmt.Fprintf(s, "<path class=\"%s\" d=\"M%g %gh20\"/><text x=\"%g\" y=\"%g\">%s</text>\n", limitClasses[i], at, legendTop-4, at+25, legendTop, text)
			at += legendStep
		}
	}
	fmt.Fprintf(s, "</svg>\n<p>Each step of the picture is an average over %v.</p>\n", width)
}

func (l *DeliveryLimit) both() [2]*uint64 { return [2]*uint64{l.RateBits, l.CommittedBits} }

// limitLines draws the rate and the committed rate up to top, and returns which of them it drew.
func (d *Delivery) limitLines(s *strings.Builder, x func(time.Time) float64, y func(float64) float64, top float64) (drawn [2]bool) {
	for i, class := range limitClasses {
		fmt.Fprintf(s, "<path class=\"%s\" d=\"", class)
		for j, l := range d.Limits {
			end := d.Until
			if j+1 < len(d.Limits) {
				end = *cmp.Or(d.Limits[j+1].After, &d.Limits[j+1].Time)
			}
			bits := l.both()[i]
			if bits != nil && float64(*bits) <= top && (i > 0 || l.CommittedBits == nil || *bits != *l.CommittedBits) {
				fmt.Fprintf(s, "M%.1f %.1fH%.1f", x(l.Time), y(float64(*bits)), x(end))
				drawn[i] = true
			}
		}
		s.WriteString("\"/>\n")
	}
	return drawn
}

// niceAbove is a round number that is not less.
func niceAbove(v float64) float64 {
	unit := math.Pow(10, math.Floor(math.Log10(v)))
	for _, n := range []float64{1, 2, 4, 5, 8, 10} {
		if n*unit >= v {
			return n * unit
		}
	}
	return v
}
