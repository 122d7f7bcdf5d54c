package report

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
)

// NotZero is a figure that is null in JSON where it is 0.
func NotZero(v uint64) *uint64 { return history.NotZero(v) }

// Deliveries are what several rules and pools delivered.
type Deliveries []*history.Delivery

// Text writes the summary of each.
func (all Deliveries) Text(w io.Writer) error {
	var s strings.Builder
	for i, d := range all {
		if i > 0 {
			s.WriteByte('\n')
		}
		s.WriteString(plain.Fold(plain.Line(deliveryTitle(d)), screenWidth, "", "    "))
		for _, f := range deliveryFacts(d, fewest) {
			fact(&s, f[0], f[1])
		}
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// deliveryTitle names the rules or the pool.
func deliveryTitle(d *history.Delivery) string {
	text := strings.TrimSpace(d.Device + " " + d.Direction)
	if d.Kind == history.KindPool {
		text = fmt.Sprintf("pool %q", d.Name)
	} else {
		const few = 4
		if len(d.Networks) <= few {
			text += " " + plain.List(d.Networks)
		} else {
			text += ", " + plain.Count(d.Rules, KindRule) + " together"
		}
		if d.Name != "" {
			text += ", " + d.Name
		}
	}
	if d.Plan != "" {
		text += ", plan " + d.Plan
	}
	return text
}

func moment(t time.Time) string { return t.Local().Format(time.DateTime) }

// fewest is how many missed intervals are listed, and how many gaps and changes in the text.
const fewest = 10

// deliveryFacts are the lines of the summary: a label and a text each. They list at most so many gaps and changes.
func deliveryFacts(d *history.Delivery, most int) (facts [][2]string) {
	add := func(label, format string, args ...any) {
		facts = append(facts, [2]string{label, fmt.Sprintf(format, args...)})
	}
	length, every := d.Until.Sub(d.Since), time.Duration(d.IntervalNS)
	add("time", "%s to %s (%s), %v", moment(d.Since), moment(d.Until), d.Until.Local().Format("MST -0700"), length.Round(time.Second))
	// The first interval may begin before the report.
	add("measured", "%s of the time, every %v", percentText(min(100, 100*float64(d.MeasuredNS)/float64(max(length, 1)))), every)
	add("committed", "%s", committedText(d))
	for i, p := range d.Pools {
		text := fmt.Sprintf("%s, %s", p.Name, rateText(p.RateBits))
		if p.GuaranteeBits != nil {
			text += ", guarantee " + rateText(p.GuaranteeBits)
		}
		add([]string{"within", ""}[min(i, 1)], "%s", text)
	}
	sum := func(label string, bytes uint64, more string) {
		add(label, "%s (%d bytes)%s", bytesText(bytes), bytes, more)
	}
	sum("offered", d.OfferedBytes, "")
	sum("passed", d.PassedBytes, "")
	dropped := ""
	if d.OfferedBytes > 0 {
		dropped = ", " + percentText(percentOf(d.DroppedBytes, d.OfferedBytes)) + " of the offered bytes"
	}
	if d.RefusedBytes != nil && *d.RefusedBytes != d.DroppedBytes {
		dropped += "; the pool itself refused " + bytesText(*d.RefusedBytes)
	}
	sum("dropped", d.DroppedBytes, dropped)
	if p := d.Passed; p.P95 != nil {
		add("95th", "passed %s, offered %s (percentile of 5-minute averages)", bitsText(*p.P95), bitsText(*d.Offered.P95))
	}
	if p := d.Passed; p.Largest != nil {
		add("largest", "passed %s from %s, offered %s from %s (over %v)", bitsText(*p.Largest), moment(*p.LargestAt),
			bitsText(*d.Offered.Largest), moment(*d.Offered.LargestAt), every)
	}
	add("full", "%s of the measured time", percentText(100*float64(d.FullNS)/float64(max(d.MeasuredNS, 1))))
	list := func(label string, n int, item func(i int) string) {
		for i := range n {
			if i == most {
				add("", "and %d more; -j lists them", n-most)
				break
			}
			add(label, "%s", item(i))
			label = ""
		}
	}
	says := verdict(d)
	list("delivered", len(says), func(i int) string { return says[i] })
	missed := slices.Clone(d.Missed[:min(fewest, len(d.Missed))])
	slices.SortFunc(missed, func(a, b history.Missed) int { return a.Begin.Compare(b.Begin) })
	list("missed", len(missed), func(i int) string {
		m := missed[i]
		return fmt.Sprintf("%s: offered %s, passed %s, due %s", moment(m.Begin), bytesText(m.OfferedBytes), bytesText(m.PassedBytes), bytesText(m.DueBytes))
	})
	if all := d.Checked - d.Delivered; all > fewest {
		add("", "the %d worst of %d; -j lists up to 100", fewest, all)
	}
	list("gaps", len(d.Gaps), func(i int) string {
		g := d.Gaps[i]
		text := fmt.Sprintf("%s to %s (%v): %s", moment(g.Begin), moment(g.End), g.End.Sub(g.Begin).Round(time.Second), g.Reason)
		if g.PassedBytes != nil {
			text += fmt.Sprintf("; %s passed of %s offered", bytesText(*g.PassedBytes), bytesText(*g.OfferedBytes))
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
		rate := "the committed rate"
		if !slices.ContainsFunc(d.Periods, func(p history.Period) bool {
			return p.CommittedBits != nil && (d.CommittedBits == nil || *p.CommittedBits != *d.CommittedBits)
		}) {
			rate += " of " + rateText(d.CommittedBits)
		}
		lines = append(lines, fmt.Sprintf("%s of what was offered up to %s passed", wholePercent(d.WithinPassedBytes, d.WithinBytes), rate),
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
