package report

import (
	"fmt"
	"html"
	"io"
	"math"
	"slices"
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
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem}dt{font-weight:600}dd{grid-column:2;margin:0;overflow-wrap:anywhere}
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
		s.WriteString("<dl>\n")
		for _, f := range deliveryFacts(d) {
			if f[0] != "" {
				fmt.Fprintf(&s, "<dt>%s</dt>", f[0])
			}
			fmt.Fprintf(&s, "<dd>%s</dd>\n", inHTML(f[1]))
		}
		s.WriteString("</dl>\n</section>\n")
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

// deliveryPicture draws what was offered and passed over time, beside the committed rate and the rate.
func deliveryPicture(s *strings.Builder, d *history.Delivery) {
	const most = 450 // a picture of a long time joins periods
	joined := 1 + len(d.Periods)/most
	steps := slices.Collect(slices.Chunk(d.Periods, joined))
	average := func(step []history.Period, of func(*history.Period) uint64) float64 {
		bits, seconds := 0.0, 1e-9
		for i := range step {
			measured := float64(step[i].MeasuredNS) / 1e9
			bits, seconds = bits+float64(of(&step[i]))*measured, seconds+measured
		}
		return bits / seconds
	}
	offered := func(p *history.Period) uint64 { return p.OfferedBits }
	passed := func(p *history.Period) uint64 { return p.PassedBits }
	limits := [...]func(*history.Period) *uint64{func(p *history.Period) *uint64 { return p.RateBits }, func(p *history.Period) *uint64 { return p.CommittedBits }}
	length := d.Until.Sub(d.Since).Seconds()
	busiest := 1.0
	for _, step := range steps {
		busiest = max(busiest, average(step, offered))
	}
	top := busiest
	for i := range d.Periods {
		for _, limit := range limits {
			if bits := number(limit(&d.Periods[i]), 0); bits < 20*busiest { // a far limit would hide the traffic
				top = max(top, bits)
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
		inHTML(fmt.Sprintf("From %s to %s, %s were offered and %s passed.", moment(d.Since), moment(d.Until), Bytes(d.OfferedBytes), Bytes(d.PassedBytes))))
	layout := "2006-01-02 15:04"
	if length <= 36*3600 {
		layout = time.TimeOnly
	}
	for i := range svgTicks + 1 {
		part := float64(i) / svgTicks
		fmt.Fprintf(s, "<path class=\"grid\" d=\"M%g %.1fH%g\"/><text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
			svgLeft, y(top*part), svgWidth-svgRight, svgLeft-6, y(top*part)+4, Bits(uint64(top*part)))
		t := d.Since.Add(time.Duration(part * length * 1e9))
		fmt.Fprintf(s, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"%s\">%s</text>\n", x(t), svgHeight-8, []string{"start", "middle", "end"}[min(i, 1)+i/svgTicks], t.Local().Format(layout))
	}
	area := func(class string, bits func(*history.Period) uint64) {
		fmt.Fprintf(s, "<path class=\"%s\" d=\"", class)
		for _, step := range steps {
			fmt.Fprintf(s, "M%.1f %.1fV%.1fH%.1fV%.1fZ", x(step[0].Begin), y(0), y(average(step, bits)), x(step[len(step)-1].End), y(0))
		}
		s.WriteString("\"/>\n")
	}
	area("offered", offered)
	area("passed", passed)
	for i, class := range []string{"limit rate", "limit"} {
		fmt.Fprintf(s, "<path class=\"%s\" d=\"", class)
		for _, step := range steps {
			if bits := number(limits[i](&step[0]), math.Inf(1)); bits <= top {
				fmt.Fprintf(s, "M%.1f %.1fH%.1f", x(step[0].Begin), y(bits), x(step[len(step)-1].End))
			}
		}
		s.WriteString("\"/>\n")
	}
	for _, g := range d.Gaps { // over what is drawn: a step may reach into a gap
		fmt.Fprintf(s, "<rect class=\"gap\" x=\"%.1f\" y=\"%g\" width=\"%.1f\" height=\"%g\"/>\n", x(g.Begin), svgTop, x(g.End)-x(g.Begin), svgHeight-svgTop-svgBottom)
	}
	for _, c := range d.Changes {
		fmt.Fprintf(s, "<path class=\"change\" d=\"M%.1f %gV%gH%.1fV%gZ\"><title>%s</title></path>\n", x(c.Begin), svgTop, svgTop+8, x(c.End), svgTop, inHTML(changeText(c)))
	}
	for i, of := range [][2]string{{"passed", "passed"}, {"offered", "dropped"}, {"gap", "no data"}, {"limit rate", "rate"}, {"limit", "committed"}} {
		at := svgLeft + 120*float64(i)
		fmt.Fprintf(s, "<path class=\"%s\" d=\"M%g 5h20v6h-20z\"/><text x=\"%g\" y=\"14\">%s</text>\n", of[0], at, at+25, of[1])
	}
	fmt.Fprintf(s, "</svg>\n<p>Each step of the picture is an average over %v.</p>\n", time.Duration(joined)*history.PeriodLength)
}
