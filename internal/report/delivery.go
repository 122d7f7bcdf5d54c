package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// Deliveries are what several rules and pools delivered.
type Deliveries []*history.Delivery

// Text writes whether the committed rate was delivered, and then why: the facts of one part, or a line for each of several.
// Verbose has the facts of these, too. Tables are at most width columns wide; 0 is no limit.
func (all Deliveries) Text(w io.Writer, verbose bool, width int) error {
	var s strings.Builder
	line := func(text string) { s.WriteString(plain.Fold(plain.Line(text), screenWidth, "", "    ")) }
	if len(all) > 1 {
		line(plain.List(all.names()) + ": " + all.answer())
		line(timeOf(all[0]))
		if err := writeTable(&s, all, deliveryColumns, width); err != nil {
			return err
		}
		missed, gaps, changes := uint64(0), 0, 0
		for _, d := range all {
			missed, gaps, changes = missed+d.Checked-d.Delivered, max(gaps, len(d.Gaps)), changes+len(d.Changes)
		}
		if !verbose {
			fmt.Fprintf(&s, "%s, %s, %s; -v shows all of each part\n", plain.Count(missed, "missed interval"), plain.Count(gaps, "gap"), plain.Count(changes, "change"))
		}
	}
	for i := 0; i < len(all) && (len(all) == 1 || verbose); i++ {
		if len(all) > 1 {
			s.WriteByte('\n')
		}
		line(deliveryTitle(all[i]))
		for _, f := range deliveryFacts(all[i]) {
			fact(&s, f[0], f[1])
		}
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// deliveryColumns are those of several parts.
var deliveryColumns = []column[*history.Delivery]{
	{head: "PART", cell: func(d **history.Delivery) string { return partOf(*d) }, least: leastName},
	ofDelivery("COMMITTED", func(d *history.Delivery) string {
		return cmp.Or(optional(d.CommittedBits, func(bits uint64) string { return rateText(&bits) }), "none")
	}),
	ofDelivery("OFFERED", func(d *history.Delivery) string { return Bytes(d.OfferedBytes) }),
	ofDelivery("PASSED", func(d *history.Delivery) string { return Bytes(d.PassedBytes) }),
	ofDelivery("DROPPED", func(d *history.Delivery) string { return percentOr(live.Percent(d.DroppedBytes, d.OfferedBytes)) }),
	ofDelivery("95TH", func(d *history.Delivery) string { return optional(d.Passed.P95, Bits) }),
	ofDelivery("DELIVERED", func(d *history.Delivery) string {
		if d.Checked == 0 {
			return ""
		}
		return wholePercent(d.WithinPassedBytes, d.WithinBytes)
	}),
}

func ofDelivery(head string, of func(*history.Delivery) string) column[*history.Delivery] {
	return column[*history.Delivery]{head: head, right: true, always: true, cell: func(d **history.Delivery) string { return of(*d) }}
}

// answer says whether several parts delivered what was committed.
func (all Deliveries) answer() string {
	var within, passed, offered, dropped, checked uint64
	onlyPools := all.onlyPools()
	for _, d := range all {
		if checked += d.Checked; d.Checked > 0 {
			within, passed = within+d.WithinBytes, passed+d.WithinPassedBytes
		}
		if onlyPools || d.Kind != history.KindPool { // whose packets are those of rules
			offered, dropped = offered+d.OfferedBytes, dropped+d.DroppedBytes
		}
	}
	lost := percentText(percentOf(dropped, offered)) + " of all that was offered was dropped"
	switch {
	case offered == 0:
		return "nothing was offered"
	case checked == 0:
		return lost + "; no rate was committed"
	}
	return lost + "; " + wholePercent(passed, within) + " of what was offered up to the committed rates passed"
}

func (all Deliveries) onlyPools() bool {
	return !slices.ContainsFunc(all, func(d *history.Delivery) bool { return d.Kind != history.KindPool })
}

// names are those of all rules, or else of their devices. Pools have theirs only without rules.
func (all Deliveries) names() (names []string) {
	onlyPools := all.onlyPools()
	for _, d := range all {
		if name := cmp.Or(d.Name, d.Device); (onlyPools || d.Kind != history.KindPool) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// partOf names the rules or the pool.
func partOf(d *history.Delivery) string {
	const few = 4
	switch {
	case d.Kind == history.KindPool:
		return fmt.Sprintf("pool %q", d.Name)
	case len(d.Networks) <= few:
		networks := slices.Clone(d.Networks)
		for i, n := range networks {
			networks[i] = addressOf(n)
		}
		return strings.TrimSpace(d.Device+" "+d.Direction) + " " + plain.List(networks)
	}
	return strings.TrimSpace(d.Device+" "+d.Direction) + ", " + plain.Count(d.Rules, KindRule) + " together"
}

// deliveryTitle is that with the name and plan.
func deliveryTitle(d *history.Delivery) string {
	text := partOf(d)
	if d.Name != "" && d.Kind != history.KindPool {
		text += ", " + d.Name
	}
	if d.Plan != "" {
		text += ", plan " + d.Plan
	}
	return text
}

func moment(t time.Time) string { return t.Local().Format(time.DateTime) }

// timeOf is the time of a report, and how much of it was measured. The first interval may begin before it.
func timeOf(d *history.Delivery) string {
	length := d.Until.Sub(d.Since)
	return fmt.Sprintf("%s to %s (%s), %v; %s of it measured, every %v", moment(d.Since), moment(d.Until), d.Until.Local().Format("MST -0700"), length.Round(time.Second),
		percentText(min(100, 100*float64(d.MeasuredNS)/float64(max(length, 1)))), time.Duration(d.IntervalNS))
}

// fewest is how many missed intervals, gaps and changes are listed.
const fewest = 10

// deliveryFacts are the lines of the summary: a label and a text each.
func deliveryFacts(d *history.Delivery) (facts [][2]string) {
	add := func(label, format string, args ...any) {
		facts = append(facts, [2]string{label, fmt.Sprintf(format, args...)})
	}
	list := func(label string, n int, item func(i int) string) {
		for i := range n {
			if i == fewest {
				add("", "and %d more; -j lists them", n-fewest)
				break
			}
			add(label, "%s", item(i))
			label = ""
		}
	}
	says := verdict(d)
	list("delivered", len(says), func(i int) string { return says[i] })
	add("committed", "%s", committedText(d))
	if d.Quota != "" {
		add("quota", "%s", d.Quota)
	}
	for i, p := range d.Pools {
		text := fmt.Sprintf("%s, %s", p.Name, rateText(p.RateBits))
		if p.GuaranteeBits != nil {
			text += ", guarantee " + rateText(p.GuaranteeBits)
		}
		add([]string{"within", ""}[min(i, 1)], "%s", text)
	}
	add("time", "%s", timeOf(d))
	sum := func(label string, bytes uint64, more string) {
		add(label, "%s (%d bytes)%s", Bytes(bytes), bytes, more)
	}
	sum("offered", d.OfferedBytes, "")
	sum("passed", d.PassedBytes, "")
	dropped := ""
	if d.OfferedBytes > 0 {
		dropped = ", " + percentText(percentOf(d.DroppedBytes, d.OfferedBytes)) + " of the offered bytes"
	}
	if d.RefusedBytes != nil && *d.RefusedBytes != d.DroppedBytes {
		dropped += "; the pool itself refused " + Bytes(*d.RefusedBytes)
	}
	sum("dropped", d.DroppedBytes, dropped)
	if p := d.Passed; p.P95 != nil {
		add("95th", "passed %s, offered %s (percentile of 5-minute averages)", Bits(*p.P95), Bits(*d.Offered.P95))
	}
	if p := d.Passed; p.Largest != nil {
		add("largest", "passed %s from %s, offered %s from %s (over %v)", Bits(*p.Largest), moment(*p.LargestAt),
			Bits(*d.Offered.Largest), moment(*d.Offered.LargestAt), time.Duration(d.IntervalNS))
	}
	add("full", "%s of the measured time", percentText(100*float64(d.FullNS)/float64(max(d.MeasuredNS, 1))))
	missed := slices.Clone(d.Missed[:min(fewest, len(d.Missed))])
	slices.SortFunc(missed, func(a, b history.Missed) int { return a.Begin.Compare(b.Begin) })
	list("missed", len(missed), func(i int) string {
		m := missed[i]
		return fmt.Sprintf("%s: offered %s, passed %s, due %s", moment(m.Begin), Bytes(m.OfferedBytes), Bytes(m.PassedBytes), Bytes(m.DueBytes))
	})
	if all := d.Checked - d.Delivered; all > fewest {
		add("", "the %d worst of %d; -j lists up to 100", fewest, all)
	}
	list("gaps", len(d.Gaps), func(i int) string {
		g := d.Gaps[i]
		text := fmt.Sprintf("%s to %s (%v): %s", moment(g.Begin), moment(g.End), g.End.Sub(g.Begin).Round(time.Second), g.Reason)
		if g.PassedBytes != nil {
			text += fmt.Sprintf("; %s passed of %s offered", Bytes(*g.PassedBytes), Bytes(*g.OfferedBytes))
		}
		return text
	})
	list("changes", len(d.Changes), func(i int) string { return changeText(d.Changes[i]) })
	return facts
}

// changeText says what changed, and between which readings.
func changeText(c history.DeliveryChange) string {
	return moment(c.Begin) + " to " + c.End.Local().Format(time.TimeOnly) + ": " + c.What
}

// committedText says what is committed.
func committedText(d *history.Delivery) string {
	rate := "; the rate is " + rateText(d.RateBits)
	switch {
	case d.CommittedBy == "rate":
		return rateText(d.CommittedBits) + ", the rate"
	case d.CommittedBy == "guarantee":
		return rateText(d.CommittedBits) + ", the guarantee" + rate
	case d.CommittedBy == "given":
		return rateText(d.CommittedBits) + ", as given"
	case d.Kind == history.KindRules:
		return "none for these rules together"
	case d.Each != "all":
		return "none for all together: each " + d.Each + " has the rate" + rate
	case d.Aware:
		return "none that can be checked: packets come in with colours" + rate
	case d.Other != "":
		return "none: the limit is also " + d.Other + rate
	case len(d.Pools) > 0:
		return "none: within pool " + d.Pools[0].Name + " without a guarantee" + rate
	}
	return "none" + rate
}

// verdict says whether the committed rate was delivered, and in how many intervals.
func verdict(d *history.Delivery) (lines []string) {
	count := func(n uint64, format string) {
		if n > 0 {
			lines = append(lines, fmt.Sprintf(format, plain.Count(n, "interval")))
		}
	}
	if d.Checked > 0 {
		lines = append(lines, wholePercent(d.WithinPassedBytes, d.WithinBytes)+" of what was offered up to the committed rate passed",
			fmt.Sprintf("it was delivered in %d of %s with traffic (%s)", d.Delivered, plain.Count(d.Checked, "interval"), wholePercent(d.Delivered, d.Checked)))
		count(d.Checked-d.Delivered, "it was missed in %s: packets were dropped although less passed. They came in bursts, a penalty lasted, or a pool was full")
	}
	count(d.Undecided, "%s cannot be judged: packets were dropped and less passed, but traffic began or ended, or less was offered")
	count(d.Unchecked, "%s with traffic had no committed rate")
	if len(lines) == 0 {
		return []string{"nothing was offered"}
	}
	return lines
}

// wholePercent is a part in percent, rounded down so that only all is 100%.
func wholePercent(part, whole uint64) string {
	if part >= whole {
		return "100%"
	}
	return fmt.Sprintf("%.2f%%", math.Floor(1e4*float64(part)/float64(whole))/100)
}
