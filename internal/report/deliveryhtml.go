package report

import (
	"fmt"
	"html"
	"io"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/history"
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

// deliveryNotes explain the words of the page.
const deliveryNotes = `<p>Offered is all traffic. The limits passed a part of it and dropped the rest. Passed packets may still be lost later. Committed is the rate that is checked. The 95th percentile is the rate that 95 % of the averages do not exceed. Due is what had to pass: what was offered, or what the committed rate allows less one burst, if that is less.</p>
<p>Made by shapectl. Bytes are counted as on the wire. An interval delivered the committed rate if nothing was dropped in it, or if as much passed as the committed rate allows, less one burst. If it did not, and the committed rate was not offered in it, before it and after it, it cannot be judged. Of a pool, only packets count as dropped that it refused, or a pool above it. Rates and checks leave gaps out.</p>
`

// HTML writes the reports as one page that needs no other file. host is where the rules are.
func (all Deliveries) HTML(w io.Writer, host string) error {
	title := inHTML("Delivered rates of " + plain.List(all.names()) + " on " + host)
	var s strings.Builder
	fmt.Fprintf(&s, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"+
		"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"+
		"<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>%s</title>\n<style>%s</style>\n</head>\n<body>\n<main>\n<h1>%s</h1>\n", title, deliveryStyle, title)
	if len(all) > 1 {
		fmt.Fprintf(&s, "<p>%s</p>\n", inHTML(all.answer()))
	}
	for _, d := range all {
		fmt.Fprintf(&s, "<section>\n<h2>%s</h2>\n", inHTML(deliveryTitle(d)))
		deliveryPicture(&s, d)
		s.WriteString("<table>")
		const mostListed = 100
		for i, f := range deliveryFacts(d, mostListed) {
			switch {
			case f[0] == "":
				s.WriteString("<br>")
			case i > 0:
				s.WriteString("</td></tr>\n")
				fallthrough
			default:
				fmt.Fprintf(&s, "<tr><th scope=\"row\">%s</th><td>", f[0])
			}
			s.WriteString(inHTML(f[1]))
		}
		s.WriteString("</td></tr>\n</table>\n</section>\n")
	}
	s.WriteString(deliveryNotes + "</main>\n</body>\n</html>\n")
	_, err := io.WriteString(w, s.String())
	return err
}

// inHTML is text as HTML shows it. Names come from anybody.
func inHTML(text string) string { return html.EscapeString(plain.Line(text)) }

const (
	svgWidth, svgHeight = 900.0, 260.0
	svgLeft, svgRight   = 70.0, 10.0
	svgTop, svgBottom   = 24.0, 24.0
	svgTicks            = 4
)

// A bar is one or several periods of a picture.
type bar struct {
	history.Span
	seconds         float64 // measured
	offered, passed float64 // bits
	limits          [2]*uint64
}

// deliveryBars joins periods until a picture can show them, and tells how long each bar is.
func deliveryBars(d *history.Delivery) (bars []bar, width time.Duration) {
	const most = 450
	for width = history.PeriodLength; d.Until.Sub(d.Since)/width > most; {
		width *= 2
	}
	for _, p := range d.Periods {
		begin := p.Begin.Truncate(width)
		if n := len(bars); n == 0 || !bars[n-1].Begin.Equal(begin) {
			bars = append(bars, bar{Span: history.Span{Begin: begin, End: begin.Add(width)}})
		}
		b, seconds := &bars[len(bars)-1], float64(p.MeasuredNS)/1e9
		b.seconds, b.limits = b.seconds+seconds, [...]*uint64{p.RateBits, p.CommittedBits}
		b.offered, b.passed = b.offered+float64(p.OfferedBits)*seconds, b.passed+float64(p.PassedBits)*seconds
	}
	return bars, width
}

// deliveryPicture draws what was offered and passed over time, beside the committed rate and the rate.
func deliveryPicture(s *strings.Builder, d *history.Delivery) {
	bars, width := deliveryBars(d)
	length := d.Until.Sub(d.Since).Seconds()
	busiest := 1.0
	for _, b := range bars {
		busiest = max(busiest, b.offered/max(b.seconds, 1))
	}
	top := busiest
	for _, b := range bars {
		for _, bits := range b.limits {
			if bits != nil && float64(*bits) < 20*busiest { // a far limit would hide the traffic
				top = max(top, float64(*bits))
			}
		}
	}
	top *= 1.05
	x := func(t time.Time) float64 {
		return svgLeft + max(0, min(1, t.Sub(d.Since).Seconds()/length))*(svgWidth-svgLeft-svgRight)
	}
	y := func(bits float64) float64 {
		return svgHeight - svgBottom - min(1, bits/top)*(svgHeight-svgTop-svgBottom)
	}
	fmt.Fprintf(s, "<svg viewBox=\"0 0 %g %g\" role=\"img\" aria-label=\"%s\">\n", svgWidth, svgHeight,
		inHTML(fmt.Sprintf("From %s to %s, %s were offered and %s passed.", moment(d.Since), moment(d.Until), bytesText(d.OfferedBytes), bytesText(d.PassedBytes))))
	layout := "2006-01-02 15:04"
	if length <= 36*3600 {
		layout = time.TimeOnly
	}
	for i := range svgTicks + 1 {
		part := float64(i) / svgTicks
		fmt.Fprintf(s, "<path class=\"grid\" d=\"M%g %.1fH%g\"/><text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
			svgLeft, y(top*part), svgWidth-svgRight, svgLeft-6, y(top*part)+4, bitsText(uint64(top*part)))
		t := d.Since.Add(time.Duration(part * length * 1e9))
		fmt.Fprintf(s, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"%s\">%s</text>\n", x(t), svgHeight-8, []string{"start", "middle", "end"}[min(i, 1)+i/svgTicks], t.Local().Format(layout))
	}
	area := func(class string, bits func(bar) float64) {
		fmt.Fprintf(s, "<path class=\"%s\" d=\"", class)
		for _, b := range bars {
			if v := bits(b) / max(b.seconds, 1e-9); v > 0 {
				fmt.Fprintf(s, "M%.1f %.1fV%.1fH%.1fV%.1fZ", x(b.Begin), y(0), y(v), x(b.End), y(0))
			}
		}
		s.WriteString("\"/>\n")
	}
	area("offered", func(b bar) float64 { return b.offered })
	area("passed", func(b bar) float64 { return b.passed })
	for i, class := range []string{"limit rate", "limit"} {
		fmt.Fprintf(s, "<path class=\"%s\" d=\"", class)
		for _, b := range bars {
			if bits := b.limits[i]; bits != nil && float64(*bits) <= top {
				fmt.Fprintf(s, "M%.1f %.1fH%.1f", x(b.Begin), y(float64(*bits)), x(b.End))
			}
		}
		s.WriteString("\"/>\n")
	}
	for _, g := range d.Gaps { // over what is drawn: a bar may reach into a gap
		fmt.Fprintf(s, "<rect class=\"gap\" x=\"%.1f\" y=\"%g\" width=\"%.1f\" height=\"%g\"/>\n", x(g.Begin), svgTop, x(g.End)-x(g.Begin), svgHeight-svgTop-svgBottom)
	}
	for _, c := range d.Changes {
		fmt.Fprintf(s, "<path class=\"change\" d=\"M%.1f %gV%gH%.1fV%gZ\"><title>%s</title></path>\n", x(c.Begin), svgTop, svgTop+8, x(c.End), svgTop, inHTML(changeText(c)))
	}
	for i, of := range [][2]string{{"passed", "passed"}, {"offered", "dropped"}, {"gap", "no data"}, {"limit rate", "rate"}, {"limit", "committed"}} {
		at := svgLeft + 120*float64(i)
		fmt.Fprintf(s, "<path class=\"%s\" d=\"M%g 5h20v6h-20z\"/><text x=\"%g\" y=\"14\">%s</text>\n", of[0], at, at+25, of[1])
	}
	fmt.Fprintf(s, "</svg>\n<p>Each step of the picture is an average over %v.</p>\n", width)
}
