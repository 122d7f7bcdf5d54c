package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/pkg/policy"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// eightMbit passes 10 MB in 10 s, and has a burst of 300 kB.
var eightMbit = history.Series{Key: history.Key{Device: "eth0", Direction: "egress", Network: "10.0.0.7/32"}, Rate: 8e6, Capacity: 300000}

// interval is the i-th interval of ten seconds.
func interval(i int, s history.Series, passed, refused uint64) history.Interval {
	begin := noon.Add(time.Duration(i) * 10 * time.Second)
	return history.Interval{Begin: begin, End: begin.Add(10 * time.Second), Length: 10 * time.Second, Usual: 10 * time.Second,
		Series: &s, Counters: history.Counters{Passed: passed, Dropped: refused}, Known: true, Policy: "one"}
}

func deliver(t *testing.T, d Deliverer, intervals ...history.Interval) *Delivery {
	t.Helper()
	d.Since, d.Until = noon, intervals[len(intervals)-1].End
	for _, it := range intervals {
		if err := d.Add(it); err != nil {
			t.Fatal(err)
		}
	}
	all := d.Deliveries()
	if len(all) != 1 {
		t.Fatalf("%d deliveries", len(all))
	}
	return all[0]
}

// The committed rate is delivered if nothing was refused, or if as much passed as the rate allows, less one burst.
func TestDelivered(t *testing.T) {
	with := func(change func(*history.Series)) history.Series {
		s := eightMbit
		change(&s)
		return s
	}
	guaranteed := with(func(s *history.Series) { s.Within, s.Guarantee = "uplink", 4e6 }) // 5 MB in 10 s, burst 150 kB
	for _, test := range []struct {
		name             string
		series           history.Series
		given            policy.Rate
		passed, refused  uint64
		checked, deliver bool
		by               string
	}{
		{"idle", eightMbit, 0, 0, 0, false, false, "rate"},
		{"all passed", eightMbit, 0, 1000, 0, true, true, "rate"},
		{"rate less a burst", eightMbit, 0, 9700000, 1, true, true, "rate"},
		{"a byte less", eightMbit, 0, 9699999, 300001, true, false, "rate"},
		{"guarantee less its burst", guaranteed, 0, 4850000, 1, true, true, "guarantee"},
		{"a byte less than that", guaranteed, 0, 4849999, 150001, true, false, "guarantee"},
		{"shared", with(func(s *history.Series) { s.Within = "uplink" }), 0, 1, 1, false, false, ""},
		{"each", with(func(s *history.Series) { s.Each = "host" }), 0, 1, 1, false, false, ""},
		{"not in force", with(func(s *history.Series) { s.Detached = true }), 0, 1, 1, false, false, ""},
		{"unlimited", with(func(s *history.Series) { s.Rate = 0 }), 0, 1, 0, false, false, ""},
		{"given", with(func(s *history.Series) { s.Within = "uplink" }), 1e6, 950000, 1, true, true, "given"},
		{"a byte less than given", with(func(s *history.Series) { s.Within = "uplink" }), 1e6, 949999, 300001, true, false, "given"},
	} {
		busy := test.series // as much as is committed is offered before and after it
		d := deliver(t, Deliverer{Committed: test.given}, interval(0, busy, 10e6, 1), interval(1, test.series, test.passed, test.refused), interval(2, busy, 10e6, 1))
		if (d.Checked == 3) != test.checked || (d.Delivered == 3) != test.deliver || len(d.Missed) != int(d.Checked-d.Delivered) || d.CommittedBy != test.by {
			t.Errorf("%s: checked %d, delivered %d, missed %v, committed by %q", test.name, d.Checked, d.Delivered, d.Missed, d.CommittedBy)
		}
	}
	slow := eightMbit
	slow.Rate = 4e6
	changing := deliver(t, Deliverer{}, interval(0, slow, 1, 0), interval(1, eightMbit, 5e6, 1)) // the rate rose at some time in it
	larger := eightMbit
	larger.Capacity = 600000
	smaller := deliver(t, Deliverer{}, interval(0, larger, 10e6, 1), interval(1, eightMbit, 9400000, 1)) // the burst fell
	rounded := interval(1, eightMbit, 9700001, 300000)
	rounded.PassedError = 1e-3
	if d := deliver(t, Deliverer{}, interval(0, eightMbit, 10e6, 1), rounded, interval(2, eightMbit, 10e6, 1)); changing.Delivered != 2 || smaller.Delivered != 2 || d.Delivered != 2 || d.WithinPassedBytes != 29690300 {
		t.Errorf("changes: %d and %d delivered; rounding: %d", changing.Delivered, smaller.Delivered, d.Delivered)
	}
}

// Intervals in which no rate was committed are not delivered ones.
func TestUncheckedDelivery(t *testing.T) {
	waiting := eightMbit
	waiting.Within = "uplink"
	guaranteed := waiting
	guaranteed.Guarantee = 4e6
	d := deliver(t, Deliverer{}, interval(0, guaranteed, 1, 0), interval(1, waiting, 1, 1), interval(2, waiting, 1, 1), interval(3, waiting, 0, 0), interval(4, guaranteed, 1, 1),
		interval(5, guaranteed, 1, 0))
	if want := "100% of what was offered up to the guarantee of 4mbit passed; the guarantee was delivered in all 2 intervals with traffic and a committed rate; " +
		"the rate above the guarantee is not checked; no rate was committed in 3 others with traffic"; d.verdict() != want {
		t.Errorf("%s; want %s", d.verdict(), want)
	}
	if d := deliver(t, Deliverer{}, interval(0, waiting, 1, 1), interval(1, guaranteed, 1, 1), interval(2, guaranteed, 0, 0)); !strings.HasPrefix(d.verdict(), "not checked: no rate was committed while") {
		t.Error(d.verdict())
	}
}

// Of many missed intervals the ten worst are listed, by time, and how much passed on the whole is said.
func TestMissed(t *testing.T) {
	all := []history.Interval{interval(0, eightMbit, 10e6, 1)}
	for i := range 30 {
		all = append(all, interval(i+1, eightMbit, 9e6+uint64(i%3)*1e5, 1e6)) // every third one is worst
	}
	d := deliver(t, Deliverer{}, append(all, interval(31, eightMbit, 10e6, 1))...)
	var text bytes.Buffer
	if err := (Deliveries{d}).Text(&text); err != nil {
		t.Fatal(err)
	}
	bare := strings.Join(strings.Fields(text.String()), " ")
	_, missed, _ := strings.Cut(bare, " missed ")
	var begins []string
	for _, line := range strings.Split(missed, " due 9.70 MB")[:strings.Count(missed, " due ")] {
		begins = append(begins, strings.Fields(line)[1])
	}
	if first := moment(noon.Add(10 * time.Second))[11:] + ":"; len(begins) != fewest || begins[0] != first || !slices.IsSorted(begins) || strings.Contains(missed, "9.10 MB") {
		t.Errorf("listed: %s", missed)
	}
	for _, want := range []string{" delivered 91.56% of what was offered up to the committed rate of 8mbit passed; the committed rate was delivered in 2 of 32 intervals", "the 10 worst of 30; -j lists up to 100"} {
		if !strings.Contains(bare, want) {
			t.Errorf("the report lacks %q:\n%s", want, text.String())
		}
	}
}

// A change of other rules is only in the JSON; one of this rule has the beginning of the hash.
func TestDeliveryChanges(t *testing.T) {
	other, own := interval(1, eightMbit, 1, 0), interval(2, eightMbit, 1, 0)
	other.Policy, own.Policy = "sha256:1111111111111111", "sha256:2222222222222222"
	own.Series.Rate = 9e6
	d := deliver(t, Deliverer{}, interval(0, eightMbit, 1, 0), other, own)
	var text, page bytes.Buffer
	if err := errors.Join((Deliveries{d}).Text(&text), (Deliveries{d}).HTML(&page, "gw")); err != nil {
		t.Fatal(err)
	}
	when := moment(own.Begin) + " to " + own.End.Local().Format(time.TimeOnly)
	for _, got := range []string{strings.Join(strings.Fields(text.String()), " ") + "<", strings.ReplaceAll(page.String(), "-&gt;", "->")} {
		if !strings.Contains(got, when+": rate 8mbit -> 9mbit; policy 222222222222<") || strings.Contains(got, "1111") {
			t.Errorf("changes in %s", got)
		}
	}
	if c := d.Changes; len(c) == 2 && (!c[1].After.Equal(own.Begin) || !c[1].Time.Equal(own.End)) {
		t.Errorf("a change from %v to %v", c[1].After, c[1].Time)
	}
	if len(d.Changes) != 2 || d.Changes[0].What != "" || d.Changes[0].Policy != other.Policy || strings.Count(page.String(), `class="change"`) != 1 {
		t.Errorf("changes: %+v", d.Changes)
	}
}

// A change came between the last reading that is known without it and the first with it, also if one is not in the report. What
// the first reading found has no beginning.
func TestTimesOfDeliveryChange(t *testing.T) {
	faster, off := eightMbit, eightMbit
	faster.Rate, off.Detached = 9e6, true
	hole := interval(5, faster, 1, 0)
	beyond := interval(6, off, 1, 0)
	beyond.End, beyond.Gap = noon.Add(time.Hour), history.NoReading
	d := Deliverer{Since: noon, Until: noon.Add(2 * time.Minute)}
	for _, it := range []history.Interval{interval(0, eightMbit, 1, 0), hole, beyond} {
		if err := d.Add(it); err != nil {
			t.Fatal(err)
		}
	}
	c := d.Deliveries()[0].Changes
	if len(c) != 2 || !c[0].After.Equal(noon.Add(10*time.Second)) || !c[0].Time.Equal(hole.End) || !c[1].After.Equal(beyond.Begin) || !c[1].Time.Equal(beyond.End) {
		t.Errorf("changes: %+v", c)
	}
	first := deliver(t, Deliverer{}, interval(0, off, 1, 0)).Changes
	if len(first) != 1 || first[0].After != nil || first[0].when() != moment(first[0].Time) || !first[0].Time.Equal(noon.Add(10*time.Second)) {
		t.Errorf("changes: %+v", first)
	}
}

// The summary calls a guarantee one only if nothing else was checked, and names an amount only if no other one was. Only all is 100%.
func TestVerdict(t *testing.T) {
	guaranteed := eightMbit
	guaranteed.Within, guaranteed.Guarantee = "uplink", 4e6
	more, all, alone := guaranteed, guaranteed, eightMbit
	more.Guarantee, all.Guarantee, alone.Rate = 5e6, 8e6, 4e6
	for _, test := range []struct {
		want   string
		series []history.Series
	}{
		{"100% of what was offered up to the guarantee of 4mbit passed; the guarantee was", []history.Series{guaranteed, guaranteed}},
		{"100% of what was offered up to the committed rate passed; the committed rate was", []history.Series{guaranteed, more}},
		{"100% of what was offered up to the committed rate of 4mbit passed; the committed rate was", []history.Series{alone, guaranteed}},
		{"100% of what was offered up to the committed rate of 8mbit passed; the committed rate was", []history.Series{all}},
	} {
		var intervals []history.Interval
		for i, s := range test.series {
			intervals = append(intervals, interval(i, s, 1000, 0))
		}
		if d := deliver(t, Deliverer{}, intervals...); !strings.HasPrefix(d.verdict(), test.want) {
			t.Errorf("%s; want %s", d.verdict(), test.want)
		}
	}
	if d := deliver(t, Deliverer{}, interval(0, eightMbit, 10e6-1, 1e6)); !strings.HasPrefix(d.verdict(), "99.99% of what") {
		t.Error(d.verdict())
	}
}

// Percentiles and the largest rates are without gaps, sums are with what is known of them.
func TestRatesOfDelivery(t *testing.T) {
	var all []history.Interval
	for i := range 600 { // 20 periods of 30 intervals; the last has ten times the traffic
		passed := uint64(1e6)
		if i >= 570 {
			passed *= 10
		}
		all = append(all, interval(i, eightMbit, passed, 0))
	}
	gap := interval(600, eightMbit, 7e9, 1)
	gap.End, gap.Length, gap.Gap = gap.End.Add(time.Hour), time.Hour+10*time.Second, history.NoReading
	unknown := interval(0, eightMbit, 0, 0)
	unknown.Begin, unknown.End, unknown.Length, unknown.Gap, unknown.Known = gap.End, gap.End.Add(time.Hour), time.Hour, history.Restarted, false
	d := deliver(t, Deliverer{}, append(all, gap, unknown)...)
	if *d.Passed.P95 != 8e5 || *d.Passed.P95Interval != 8e5 || *d.Passed.Largest != 8e6 || !d.Passed.LargestAt.Equal(noon.Add(95*time.Minute)) {
		t.Errorf("rates: %d, %d, %d at %v", *d.Passed.P95, *d.Passed.P95Interval, *d.Passed.Largest, d.Passed.LargestAt)
	}
	if d.PassedBytes != 570e6+300e6+7e9 || d.DroppedBytes != 1 || d.MeasuredNS != 6000e9 || len(d.Gaps) != 2 || *d.Gaps[0].PassedBytes != 7e9 || d.Gaps[1].PassedBytes != nil {
		t.Errorf("passed %d, measured %d, gaps %v", d.PassedBytes, d.MeasuredNS, d.Gaps)
	}
	if d.FullNS != 300e9 || d.LongestFull.length() != 5*time.Minute || d.Checked != 600 || len(d.Periods) != 20 {
		t.Errorf("full %d, longest %v, checked %d, %d periods", d.FullNS, d.LongestFull, d.Checked, len(d.Periods))
	}
}

// What a pool delivers does not depend on packets that rules within it drop by their own rates. Within another pool, nobody
// knows which of them dropped a packet.
func TestDeliveryOfPool(t *testing.T) {
	pool := history.Series{Key: history.Key{Pool: "home"}, Rate: 8e6, Capacity: 300000}
	own := interval(0, pool, 1e6, 5e6)
	own.Refused = 0
	full := interval(2, pool, 9.5e6, 5e6)
	full.Refused = 1e6
	d := deliver(t, Deliverer{}, own, interval(1, pool, 10e6, 0), full, interval(3, pool, 10e6, 0))
	if d.Checked != 4 || d.Delivered != 3 || len(d.Missed) != 1 || d.Missed[0].OfferedBytes != 10.5e6 || d.WithinBytes != 31e6 || d.WithinPassedBytes != 30.5e6 {
		t.Errorf("checked %d, delivered %d, missed %+v, %d of %d passed", d.Checked, d.Delivered, d.Missed, d.WithinPassedBytes, d.WithinBytes)
	}
	if d.OfferedBytes != 40.5e6 || d.DroppedBytes != 10e6 || *d.RefusedBytes != 1e6 || d.FullNS != 30e9 {
		t.Errorf("offered %d, dropped %d, refused %d, full for %d ns", d.OfferedBytes, d.DroppedBytes, *d.RefusedBytes, d.FullNS)
	}
	pool.Within, pool.Guarantee = "isp", 4e6
	if d := deliver(t, Deliverer{}, interval(0, pool, 10e6, 0), interval(1, pool, 1e6, 5e6), interval(2, pool, 10e6, 0)); d.Checked != 3 || d.Delivered != 2 {
		t.Errorf("checked %d, delivered %d", d.Checked, d.Delivered)
	}
}

// An interval counts in the report in which it ends, so that the sums of two months are those of both together. What passed
// in a gap that reaches beyond the report is not known to have passed in it.
func TestEdgesOfDelivery(t *testing.T) {
	gap := func(from, until int) history.Interval {
		it := interval(from, eightMbit, 7, 0)
		it.End, it.Length = interval(until, eightMbit, 0, 0).Begin, time.Duration(until-from)*10*time.Second
		it.Gap = history.NoReading
		return it
	}
	all := []history.Interval{gap(-20, 10), interval(10, eightMbit, 1, 0), interval(11, eightMbit, 1, 0), gap(12, 20), interval(20, eightMbit, 1, 0), gap(21, 80)}
	at := func(ticks float64) time.Time { return noon.Add(time.Duration(ticks * float64(10*time.Second))) }
	sums := []uint64{}
	for _, part := range [][2]float64{{0, 11.5}, {11.5, 40}, {0, 40}} {
		d := Deliverer{Since: at(part[0]), Until: at(part[1])}
		for _, it := range all {
			if it.End.After(d.Since) && it.Begin.Before(d.Until) { // as a query of the history
				if err := d.Add(it); err != nil {
					t.Fatal(err)
				}
			}
		}
		got := d.Deliveries()[0]
		sums = append(sums, got.PassedBytes)
		for _, g := range got.Gaps {
			if g.Begin.Before(d.Since) || g.End.After(d.Until) || (g.PassedBytes == nil) != (g.Begin.Equal(d.Since) || g.End.Equal(d.Until)) {
				t.Errorf("%v: gap %+v", part, g)
			}
		}
	}
	if want := []uint64{1, 9, 10}; !slices.Equal(sums, want) {
		t.Errorf("sums %d, want %d", sums, want)
	}
}

// An interval that a restart of serve cut short may have passed a burst at the speed of the device: that is no average of ten
// seconds. Without five minutes of data, the line of the percentile still has its name.
func TestShortIntervalOfDelivery(t *testing.T) {
	short := interval(1, eightMbit, 300000, 0)
	short.Begin, short.Length = short.End.Add(-time.Second), time.Second
	d := deliver(t, Deliverer{}, interval(0, eightMbit, 1e6, 0), short)
	if *d.Passed.Largest != 8e5 || *d.Passed.P95Interval != 8e5 || d.PassedBytes != 1300000 || d.MeasuredNS != 11e9 {
		t.Errorf("largest %d, percentile %d, %d passed", *d.Passed.Largest, *d.Passed.P95Interval, d.PassedBytes)
	}
	var text bytes.Buffer
	if err := (Deliveries{d}).Text(&text); err != nil || !strings.Contains(text.String(), "  95th       passed 800kbit, offered 800kbit (percentile of 10s averages)\n") {
		t.Errorf("%v:\n%s", err, text.String())
	}
}

// Time that the readings do not have is a gap: the host slept, or its clock was set. It ends a full time.
func TestDeliveryWithoutTime(t *testing.T) {
	var all []history.Interval
	for i := range 20 {
		it := interval(i, eightMbit, 10e6, 1)
		if i >= 10 {
			it.Begin, it.End = it.Begin.Add(time.Hour), it.End.Add(time.Hour)
		}
		if i == 10 {
			it.ClockStep = time.Hour
		}
		all = append(all, it)
	}
	back := interval(21, eightMbit, 10e6, 1)
	back.ClockStep = -time.Hour
	of := Deliverer{Since: noon, Until: all[len(all)-1].End}
	for _, it := range append(all, back) {
		if err := of.Add(it); err != nil {
			t.Fatal(err)
		}
	}
	d := of.Deliveries()[0]
	if len(d.Gaps) != 2 || d.Gaps[0].Reason != "no data" || d.Gaps[0].length() != time.Hour || !d.Gaps[1].End.Equal(of.Until) || len(d.Changes) != 2 {
		t.Errorf("gaps %+v, changes %+v", d.Gaps, d.Changes)
	}
	if d.LongestFull.length() != 100*time.Second || d.FullNS != 210e9 {
		t.Errorf("full for %d ns, at most %v", d.FullNS, d.LongestFull.length())
	}
}

// hostile is a report whose names come from somebody who means ill.
func hostile(t *testing.T) Deliveries {
	s := eightMbit
	s.Name, s.Plan, s.Within = "<img src=x onerror=alert(1)>\x1b[2J\u202e", `"'&amp;</svg><script>`, "</table>"
	other := s
	other.Rate, other.Guarantee, other.Name = 16e6, 2e6, "--><b>"
	d := Deliverer{Since: noon.Add(-time.Hour), Until: noon.Add(time.Hour)}
	for i := range 100 {
		it := interval(i, s, uint64(i)*1e5, uint64(i%7)*1e5)
		if i >= 50 {
			it.Series, it.Policy = &other, "</title><script>"
		}
		if err := d.Add(it); err != nil {
			t.Fatal(err)
		}
	}
	return d.Deliveries()
}

// The page is well-formed, has no element or attribute of somebody else's making, and shows what it got.
func TestDeliveryHTML(t *testing.T) {
	var page bytes.Buffer
	if err := hostile(t).HTML(&page, "<gw>"); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	_, body, _ := strings.Cut(text, "</style>\n</head>\n")
	body = strings.ReplaceAll(strings.TrimSuffix(body, "</html>\n"), "<br>", "<br/>")
	known := " body main h1 h2 section svg rect path text title table tr th td br p "
	decoder := xml.NewDecoder(strings.NewReader(body))
	for {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if e, ok := token.(xml.StartElement); ok {
			if !strings.Contains(known, " "+e.Name.Local+" ") {
				t.Errorf("element %s", e.Name.Local)
			}
			for _, a := range e.Attr {
				if strings.HasPrefix(a.Name.Local, "on") || a.Name.Local == "href" || a.Name.Local == "src" {
					t.Errorf("attribute %s", a.Name.Local)
				}
			}
		}
	}
	for _, want := range []string{"<h1>Delivered rates of --&gt;&lt;b&gt; on &lt;gw&gt;</h1>", "The 95th percentile is", "16mbit", "no data", "2mbit, the guarantee", `class="offered"`} {
		if !strings.Contains(text, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.ContainsAny(text, "\x1b\u202e") {
		t.Error("the page has hidden characters")
	}
}

// The picture has each interval of a short report and each period of a long one at its place by the clock, grey over what was
// not measured, and the rates where they are known.
func TestDeliveryPicture(t *testing.T) {
	faster := eightMbit
	faster.Rate = 16e6
	for _, test := range []struct {
		length    time.Duration // of the report, and of the part in which nothing was measured
		unknown   time.Duration
		n         int
		step      string
		first     float64 // left and width of bars
		width     float64
		line, gap string
	}{
		// Each second, and then each ten seconds, has one of the 820 columns.
		{820 * time.Second, 200 * time.Second, 62, "10s", 270, 10, "M270.0 151.2H470.0M480.0 66.4H890.0", "200.0"},
		{8200 * time.Second, 2000 * time.Second, 620, "5m0s", 250, 30, "M270.0 151.2H470.0M471.0 66.4H890.0", "200.0"},
	} {
		d := Deliverer{Since: noon, Until: noon.Add(test.length)}
		begin := int(test.unknown / (10 * time.Second))
		for i := begin; i < begin+test.n; i++ {
			it := interval(i, eightMbit, 10e6, 0)
			if i >= int(test.length/(10*time.Second))*40/82 {
				it.Series = &faster
			}
			if err := d.Add(it); err != nil {
				t.Fatal(err)
			}
		}
		all := d.Deliveries()
		var page bytes.Buffer
		if err := all.HTML(&page, "gw"); err != nil {
			t.Fatal(err)
		}
		part := func(begin string) string {
			_, rest, _ := strings.Cut(page.String(), begin)
			text, _, _ := strings.Cut(rest, "\"")
			return text
		}
		at := test.first
		for _, bar := range strings.Split(strings.TrimSuffix(part(`<path class="passed" d="`), "Z"), "Z") {
			var left, bottom, top, right float64
			fmt.Sscanf(bar, "M%f %fV%fH%f", &left, &bottom, &top, &right)
			if left != at || right != min(890, at+test.width) {
				t.Errorf("%v: a bar from %v to %v, want it at %v", test.length, left, right, at)
			}
			at = right
		}
		if at != 890 {
			t.Errorf("%v: the bars end at %v", test.length, at)
		}
		if got := part(`<rect class="gap" x="70.0" y="24" width="`); got != test.gap || strings.Index(page.String(), `class="gap"`) < strings.Index(page.String(), `class="passed"`) {
			t.Errorf("%v: the grey part is %s wide, or below the bars", test.length, got)
		}
		if want := "<p>Each step of the picture is an average over " + test.step + ".</p>"; !strings.Contains(page.String(), want) {
			t.Errorf("the page lacks %q", want)
		}
		if line := part(`<path class="limit" d="`); line != test.line {
			t.Errorf("%v: line of the committed rate: %s", test.length, line)
		}
	}
}

// Intervals are kept one by one if a picture can show them, and never too many.
func TestIntervalsOfDelivery(t *testing.T) {
	for _, test := range []struct{ length, every, want int }{
		{mostIntervals, 1, mostIntervals}, {mostIntervals + 1, 1, 0}, {mostIntervals, 2, 0}, // restarts cut each into two
	} {
		d := Deliverer{Since: noon, Until: noon.Add(time.Duration(test.length) * 10 * time.Second)}
		for i := range test.length * test.every {
			it := interval(0, eightMbit, 1e6, 1e6)
			it.Length /= time.Duration(test.every)
			it.Begin = noon.Add(time.Duration(i) * it.Length)
			it.End = it.Begin.Add(it.Length)
			if err := d.Add(it); err != nil {
				t.Fatal(err)
			}
		}
		got := d.Deliveries()[0].Intervals
		if len(got) != test.want {
			t.Errorf("%d intervals, want %d", len(got), test.want)
		}
		if last := (Period{Span{d.Until.Add(-10 * time.Second), d.Until}, 10e9, 1.6e6, 8e5}); test.want > 0 && got[mostIntervals-1] != last {
			t.Errorf("the last one is %+v, want %+v", got[mostIntervals-1], last)
		}
	}
}

// The text is one for a terminal, and JSON comes back as it was.
func TestDeliveryText(t *testing.T) {
	all := hostile(t)
	var text bytes.Buffer
	if err := all.Text(&text); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text.String()) {
		if len([]rune(line)) > screenWidth+1 || strings.ContainsAny(line, "\x1b\u202e") {
			t.Errorf("line %q", line)
		}
	}
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	var again Deliveries
	if err := json.Unmarshal(b, &again); err != nil {
		t.Fatal(err)
	}
	var one, two bytes.Buffer
	if err := errors.Join(all.HTML(&one, "gw"), again.HTML(&two, "gw")); err != nil || one.String() != two.String() {
		t.Errorf("JSON lost something: %v", err)
	}
}

// More rules than one report can have are refused.
func TestTooManyDeliveries(t *testing.T) {
	d := Deliverer{Since: noon, Until: noon.Add(time.Hour)}
	var err error
	for i := range mostDeliveries + 1 {
		s := eightMbit
		s.Network = fmt.Sprint(i)
		err = d.Add(interval(0, s, 1, 1))
		if (err != nil) != (i == mostDeliveries) {
			t.Fatal(i, err)
		}
	}
}

func TestHighest(t *testing.T) {
	for n := range 500 {
		all, few := make([]uint64, n), highest{most: n}
		for i := range all {
			all[i] = rand.Uint64N(uint64(n))
			few.add(all[i])
		}
		if n == 0 {
			if few.p95() != nil {
				t.Error("there is a percentile of nothing")
			}
			continue
		}
		slices.Sort(all)
		if got, want := *few.p95(), all[(n*95+99)/100-1]; got != want {
			t.Fatalf("of %d values it is %d, want %d", n, got, want)
		}
		if len(few.values) > 2*(n/20+1) {
			t.Fatalf("it keeps %d of %d values", len(few.values), n)
		}
	}
}
