package report

import (
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/replay"
)

// deliveryNotes explain the words of the page.
var deliveryNotes = []string{
	"Offered is all traffic. The limits passed a part of it and dropped the rest. Passed packets may still be lost later. Committed is the rate that is checked. The 95th percentile is the rate that 95 % of the averages do not exceed. Due is what had to pass: what was offered, or what the committed rate allows less one burst, if that is less.",
	"Bytes are counted as on the wire. An interval delivered the committed rate if nothing was dropped in it, or if as much passed as the committed rate allows, less one burst. If it did not, and the committed rate was not offered in it, before it and after it, it cannot be judged. Of a pool, only packets count as dropped that it refused, or a pool above it. Rates and checks leave gaps out.",
}

// Page is what a page of the reports says and draws. host is where the rules are.
func (all Deliveries) Page(host string) (title string, text []string, charts []map[string]any) {
	title = plain.Line("Delivered rates of " + plain.List(all.names()) + " on " + host)
	if len(all) > 1 {
		text = []string{plain.Line(all.answer())}
	}
	for _, d := range all {
		facts := deliveryFacts(d)
		for i := range facts {
			facts[i][1] = plain.Line(facts[i][1])
		}
		charts = append(charts, map[string]any{"name": plain.Line(deliveryTitle(d)), "facts": facts, "panel": panelOf(d)})
	}
	return title, append(text, deliveryNotes...), charts
}

// panelOf is what was offered and passed over time, with the rates of the end. It has null where nothing was measured.
func panelOf(d *history.Delivery) map[string]any {
	var x []int64
	var offered, passed []*uint64
	add := func(at time.Time, o, p *uint64) {
		x, offered, passed = append(x, at.UnixMilli()), append(offered, o), append(passed, p)
	}
	for i := range d.Periods {
		p := &d.Periods[i]
		if i > 0 && d.Periods[i-1].End.Before(p.Begin) {
			add(d.Periods[i-1].End, nil, nil)
		}
		add(p.Begin.Add(p.End.Sub(p.Begin)/2), &p.OfferedBits, &p.PassedBits)
	}
	marks := []replay.Mark{}
	if d.CommittedBits != nil {
		marks = append(marks, replay.Mark{Name: "committed at the end", Color: "guarantee", Y: float64(*d.CommittedBits), Dash: []int{2, 3}})
	}
	if d.RateBits != nil {
		marks = append(marks, replay.Mark{Name: "rate at the end", Color: "ceiling", Y: float64(*d.RateBits), Dash: []int{6, 4}})
	}
	return map[string]any{
		"since": d.Since.UnixMilli(), "until": d.Until.UnixMilli(), "x": x, "marks": marks, "layers": []map[string]any{
			{"name": "offered", "color": "refused", "kind": "line", "y": offered}, {"name": "passed", "color": "passed", "kind": "area", "y": passed},
		},
	}
}
