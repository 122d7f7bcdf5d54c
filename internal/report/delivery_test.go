package report

import (
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/history"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func spanOf(begin, seconds int) history.Span {
	at := noon.Add(time.Duration(begin) * time.Second)
	return history.Span{Begin: at, End: at.Add(time.Duration(seconds) * time.Second)}
}

// hourOf is an hour of a rule with periods of five minutes, of which the first two were not measured.
func hourOf() *history.Delivery {
	d := &history.Delivery{
		Kind: history.KindRule, Device: "eth0", Direction: "egress", Networks: []string{"10.0.0.7/32"}, Rules: 1, Name: "alice", Each: "all",
		Since: noon, Until: noon.Add(time.Hour), IntervalNS: 10e9, MeasuredNS: 3000e9, RateBits: new(uint64(16e6)),
		CommittedBits: new(uint64(8e6)), CommittedBy: "guarantee", OfferedBytes: 6e9, PassedBytes: 5e9, DroppedBytes: 1e9,
		Checked: 300, Delivered: 300, WithinBytes: 100, WithinPassedBytes: 100, FullNS: 1500e9,
		Passed:  history.Rates{P95: new(uint64(8e6)), Largest: new(uint64(9e6)), LargestAt: &noon},
		Offered: history.Rates{P95: new(uint64(10e6)), Largest: new(uint64(11e6)), LargestAt: &noon},
		Pools:   []history.DeliveryPool{{Name: "home", RateBits: new(uint64(20e6)), GuaranteeBits: new(uint64(5e6))}, {Name: "isp"}},
		Gaps:    []history.DeliveryGap{{Span: spanOf(0, 600), Reason: "the host slept"}},
		Changes: []history.DeliveryChange{{Span: spanOf(1800, 10), What: "rate 8mbit -> 16mbit"}},
	}
	for i := 2; i < 12; i++ {
		p := history.Period{Span: spanOf(300*i, 300), MeasuredNS: 300e9, OfferedBits: 10e6, PassedBits: 8e6, CommittedBits: d.CommittedBits, RateBits: d.RateBits}
		if i < 6 {
			p.RateBits = new(uint64(8e6))
		}
		d.Periods = append(d.Periods, p)
	}
	return d
}

func textOf(t *testing.T, all ...*history.Delivery) string {
	t.Helper()
	var text bytes.Buffer
	if err := Deliveries(all).Text(&text, true, 80); err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// TestDeliveryText sees that the text says what was delivered, on a screen of 80 columns.
func TestDeliveryText(t *testing.T) {
	text := textOf(t, hourOf(), hostile())
	for line := range strings.Lines(text) {
		if len([]rune(line)) > screenWidth+1 || strings.ContainsAny(line, "\x1b\u202e") {
			t.Errorf("line %q", line)
		}
	}
	bare := strings.Join(strings.Fields(text), " ")
	for _, want := range []string{
		"eth0 egress 10.0.0.7, alice delivered 100% of what was offered", "committed 8mbit, the guarantee; the rate is 16mbit within home, 20mbit, guarantee 5mbit isp, unlimited time ",
		"1h0m0s; 83% of it measured, every 10s offered",
		"dropped 1.00 GB (1000000000 bytes), 17% of the offered bytes 95th passed 8.00mbit, offered 10.0mbit", "full 50% of the measured time",
		"(10m0s): the host slept changes ", ": rate 8mbit -> 16mbit",
	} {
		if !strings.Contains(bare, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}
}

// TestDeliveryAnswer sees that the report of several parts begins with the answer, and has a line for each of them.
func TestDeliveryAnswer(t *testing.T) {
	down, up, pool := hourOf(), hourOf(), hourOf()
	up.Direction, up.CommittedBits, up.Checked, up.Delivered = "ingress", nil, 0, 0
	pool.Kind, pool.Name, pool.WithinBytes, pool.WithinPassedBytes = history.KindPool, "alice", 1000, 991
	all := Deliveries{down, up, pool}
	got := text(t, func(w io.Writer) error { return all.Text(w, false, 80) })
	head, rest, _ := strings.Cut(got, "PART")
	if !strings.HasPrefix(head, "alice: 17% of all that was offered was dropped; 99.18% of what was offered up to\n    the committed rates passed\n") {
		t.Errorf("it begins with\n%s", head)
	}
	same(t, "the parts", "PART"+rest, `
PART                   COMMITTED  OFFERED   PASSED  DROPPED      95TH  DELIVERED
eth0 egress 10.0.0.7       8mbit  6.00 GB  5.00 GB      17%  8.00mbit       100%
eth0 ingress 10.0.0.7       none  6.00 GB  5.00 GB      17%  8.00mbit
pool "alice"               8mbit  6.00 GB  5.00 GB      17%  8.00mbit     99.10%
0 missed intervals, 1 gap, 3 changes; -v shows all of each part
`)
	for _, test := range []struct {
		want   string
		change func(d *history.Delivery)
	}{
		{"alice: 17% of all that was offered was dropped; 100% of what was offered up to\n    the committed rates passed\n", func(d *history.Delivery) { d.WithinPassedBytes = d.WithinBytes }},
		{"alice: 17% of all that was offered was dropped; no rate was committed\n", func(d *history.Delivery) { d.Checked, d.Delivered = 0, 0 }},
		{"alice: nothing was offered\n", func(d *history.Delivery) { d.OfferedBytes = 0 }},
	} {
		for _, d := range all {
			test.change(d)
		}
		if got := text(t, func(w io.Writer) error { return all.Text(w, false, 80) }); !strings.HasPrefix(got, test.want) {
			t.Errorf("it is %s, want %s", got, test.want)
		}
	}
}

// TestVerdict sees what is said of checked intervals: an amount only if no other one was checked, and only all is 100%.
func TestVerdict(t *testing.T) {
	for _, test := range []struct {
		change func(d *history.Delivery)
		want   string
	}{
		{func(*history.Delivery) {}, "100% of what was offered up to the committed rate passed; it was delivered in 300 of 300 intervals with traffic (100%)"},
		{func(d *history.Delivery) { d.WithinBytes, d.WithinPassedBytes, d.Delivered = 1e9, 1e9-1, 299 }, "99.99% of what was offered up to the committed rate passed; it was delivered in 299 of 300 intervals with traffic (99.66%); it was missed in 1 interval: packets were"},
		{func(d *history.Delivery) { d.Checked, d.Delivered, d.Undecided, d.Unchecked = 0, 0, 1, 3 }, "1 interval cannot be judged: packets were dropped and less passed, but traffic began or ended, or less was offered; 3 intervals with traffic had no committed rate"},
		{func(d *history.Delivery) { d.Checked = 0 }, "nothing was offered"},
	} {
		d := hourOf()
		test.change(d)
		if says := strings.Join(verdict(d), "; "); !strings.Contains(says, test.want) {
			t.Errorf("%s\nlacks %s", says, test.want)
		}
	}
}

// TestMissed sees that of many missed intervals the ten worst are listed, by time.
func TestMissed(t *testing.T) {
	d := hourOf()
	d.Delivered -= 30
	for i := range 30 { // the worst first, the latest first
		d.Missed = append(d.Missed, history.Missed{Span: spanOf(300-10*i, 10), OfferedBytes: 10e6, PassedBytes: uint64(i) * 1e5, DueBytes: 9.7e6})
	}
	bare := strings.Join(strings.Fields(textOf(t, d)), " ")
	first := "missed " + moment(noon.Add(210*time.Second)) + ": offered 10.0 MB, passed 900 kB, due 9.70 MB"
	if !strings.Contains(bare, first) || !strings.Contains(bare, "the 10 worst of 30; -j lists up to 100") || strings.Count(bare, " due ") != 10 {
		t.Errorf("%q is not first in %s", first, bare)
	}
}

// hostile is a report whose names come from somebody who means ill.
func hostile() *history.Delivery {
	d := hourOf()
	d.Name, d.Plan, d.Pools[0].Name = "<img src=x onerror=alert(1)>\x1b[2J\u202e", `"'&amp;</svg><script>`, "</table>"
	d.Changes[0].What = "name --><b> -> </title><script>"
	return d
}

// TestDeliveryPage sees that the page has each period at its place by the clock, and nothing over what was not measured.
func TestDeliveryPage(t *testing.T) {
	all := Deliveries{hostile(), hourOf()}
	all[1].Periods = slices.Delete(all[1].Periods, 3, 4)
	title, text, charts := all.Page("gw")
	b, err := json.Marshal(charts)
	if err != nil || strings.ContainsAny(title+strings.Join(text, "")+string(b), "\x1b\u202e") || strings.ContainsAny(string(b), "<>") {
		t.Errorf("%v: the page has %s, %q and %s", err, title, text, b)
	}
	var got []struct {
		Name  string
		Facts [][2]string
		Panel struct {
			Since, Until int64
			X            []int64
			Layers       []struct{ Y []*float64 }
			Marks        []struct{ Y float64 }
		}
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	p := got[1].Panel
	if len(got[1].Facts) == 0 || p.Since != noon.UnixMilli() || len(p.X) != 10 || p.X[0] != noon.UnixMilli()+750_000 || p.Marks[0].Y != 8e6 || p.Marks[1].Y != 16e6 {
		t.Errorf("it has %+v", got[1])
	}
	if y := p.Layers[1].Y; *y[0] != 8e6 || y[3] != nil || p.X[3] != noon.UnixMilli()+1_500_000 {
		t.Errorf("passed: %v at %v", y, p.X)
	}
}
