package history

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	PeriodLength = 5 * time.Minute // of a Period
	mostMissed   = 100
	// leastMeasured is how much of a period must be measured for percentiles.
	leastMeasured = PeriodLength / 2
	// leastStep is by how much clocks part when one is set or the host sleeps.
	leastStep = time.Second
)

// An interval is the time between two readings, and what a subject counted in it.
type interval struct {
	Span                 // if the clock was set or the host slept, only the time after that
	length time.Duration // by the clock that nobody sets
	every  time.Duration // the usual length
	gap    string        // why it is longer than an interval; "" if it is none
	hole   string        // why the clock has more time than the interval; "" if it has not
	step   time.Duration // by how much the clock was set

	before, series  *Series // at the beginning and the end; nil for none
	anew            bool    // a counter began anew: something may be missing
	passed, dropped uint64  // bytes
	refused         uint64  // of the dropped ones: by the pool itself
	perhaps         uint64  // the dropped ones and those that may have been dropped
}

func (it *interval) offered() uint64 { return it.passed + it.dropped }

// between is the interval between two readings.
func between(a, b *Reading) interval {
	it := interval{Span: Span{a.Time, b.Time}, every: max(a.every, b.every)}
	if a.boot != b.boot {
		it.length, it.gap = it.End.Sub(it.Begin), restarted
		return it
	}
	it.length = time.Duration(b.Mono - a.Mono)
	asleep := time.Duration(b.Slept - a.Slept)
	step := it.End.Sub(it.Begin) - it.length - asleep
	switch {
	case step > leastStep:
		it.step, it.hole = step, clockSet
	case step < -leastStep:
		it.step = step
	}
	if asleep > leastStep {
		it.hole = slept
	}
	if it.step != 0 || it.hole != "" {
		it.Begin = it.End.Add(-it.length)
	}
	it.hole = cmp.Or(it.hole, a.damaged) // which counts if a is the first
	if it.length > longest(it.every) {
		it.gap = cmp.Or(b.damaged, noReading)
	}
	return it
}

// skipped is the reason of a gap with so many damaged bytes, or of files that have no reading left; "" for none.
func skipped(bytes int64, lost bool) string {
	if bytes == 0 && !lost {
		return ""
	}
	return fmt.Sprintf("damaged, %d bytes skipped", bytes)
}

// longest is how long an interval may be that is no gap.
func longest(every time.Duration) time.Duration { return every * 5 / 2 }

// delivering is a Delivery that is being made.
type delivering struct {
	Delivery
	given   uint64 // the rate to check, if it is not that of the series
	series  *Series
	every   time.Duration
	end     time.Time // of the last interval
	periods map[int64]*counted
	enough  bool // as much as was committed was offered in the interval before
	waiting *due // the interval before, which is missed if the next one has enough, too
}

type counted struct {
	length          time.Duration
	offered, passed uint64 // bytes
	rate, committed uint64
}

func newDelivering(q *Request, kind string) delivering {
	d := delivering{every: Interval, end: q.Since, periods: map[int64]*counted{}}
	d.Kind, d.Since, d.Until = kind, q.Since, q.Until
	d.Networks, d.Pools, d.Missed, d.Gaps, d.Changes = []string{}, []DeliveryPool{}, []Missed{}, []DeliveryGap{}, []DeliveryChange{}
	d.Periods = []Period{}
	if kind == KindPool {
		d.RefusedBytes = new(uint64)
	}
	return d
}

// gap notes that there is no data, or goes on with the gap before.
func (d *delivering) gap(s Span, why string) {
	d.settle(false)
	if n := len(d.Gaps); n > 0 && d.Gaps[n-1].Reason == why && d.Gaps[n-1].End.Equal(s.Begin) && d.Gaps[n-1].PassedBytes == nil {
		d.Gaps[n-1].End = s.End
		return
	}
	d.Gaps = append(d.Gaps, DeliveryGap{Span: s, Reason: why})
}

// until notes that there is no data from the last interval until a time.
func (d *delivering) until(at time.Time, why string) {
	if gap := at.Sub(d.end); gap > longest(d.every) || why != "" && gap > 0 {
		d.gap(Span{d.end, at}, cmp.Or(why, noData))
	}
}

// add adds an interval. Those of one subject come in the order of time. An interval counts where it ends, so that the sums of
// reports one after another add up.
func (d *delivering) add(it interval) {
	if !it.End.After(d.Since) {
		return
	}
	readings := it.Span
	if it.series == nil {
		it.gap = absent
	}
	part := it.gap != "" && it.Begin.Before(d.Since) // nobody knows how much of it came when
	if part {
		it.Begin = d.Since
	}
	d.until(it.Begin, it.hole)
	if d.series == nil && it.series != nil {
		d.series, d.end = cmp.Or(it.before, it.series), it.Begin
		if d.series.Detached && d.Kind != KindRules {
			d.Changes = append(d.Changes, DeliveryChange{Span{it.Begin, it.Begin}, "not in force"})
		}
	}
	before := d.series
	if it.series != nil {
		d.change(it, readings)
		d.series = it.series
	}
	d.end, d.every = it.End, it.every
	offered := it.offered()
	if !part {
		d.OfferedBytes, d.PassedBytes, d.DroppedBytes = d.OfferedBytes+offered, d.PassedBytes+it.passed, d.DroppedBytes+it.dropped
		if d.RefusedBytes != nil {
			*d.RefusedBytes += it.refused
		}
	}
	switch {
	case it.gap != "":
		if d.gap(it.Span, it.gap); !part && it.gap != absent {
			last := &d.Gaps[len(d.Gaps)-1]
			last.OfferedBytes, last.PassedBytes = &offered, &it.passed
		}
	case it.length > 0:
		d.measure(it)
		d.check(it, before)
	}
}

// change notes what changed in an interval. Its readings are the ones at its beginning and end.
func (d *delivering) change(it interval, readings Span) {
	if it.step != 0 {
		d.Changes = append(d.Changes, DeliveryChange{readings, fmt.Sprintf("the clock was set by %v", it.step.Round(time.Second))})
	}
	if d.Kind == KindRules {
		return
	}
	if d.end.Before(readings.Begin) { // there was a gap
		readings.Begin = d.end
	}
	what := changed(d.series, it.series)
	if it.anew && it.gap == "" {
		what = append(what, "set anew; what it had counted since the reading before is not known")
	}
	if len(what) > 0 {
		d.Changes = append(d.Changes, DeliveryChange{readings, strings.Join(what, ", ")})
	}
}

// measure adds an interval to the rates.
func (d *delivering) measure(it interval) {
	d.MeasuredNS += uint64(it.length)
	offered, passed := rate(it.offered(), it.length), rate(it.passed, it.length)
	if it.length > it.every/2 { // a burst in a shorter one is no average
		d.Offered.most(offered, it.Begin)
		d.Passed.most(passed, it.Begin)
	}
	at := it.End.Add(-1).Truncate(PeriodLength).Unix() // it counts where it ends
	c := d.periods[at]
	if c == nil {
		c = &counted{}
		d.periods[at] = c
	}
	c.length, c.offered, c.passed = c.length+it.length, c.offered+it.offered(), c.passed+it.passed
	if c.committed, _, _ = d.committed(it.series); d.Kind != KindRules {
		c.rate = it.series.Rate
	}
	if d.isFull(it) {
		d.FullNS += uint64(it.length)
	}
}

// rate is an average in bits per second.
func rate(bytes uint64, length time.Duration) uint64 {
	return uint64(math.Round(float64(bytes) * 8e9 / float64(length)))
}

func (r *Rates) most(bits uint64, at time.Time) {
	if r.Largest == nil || bits > *r.Largest {
		r.Largest, r.LargestAt = &bits, &at
	}
}

// isFull reports whether an interval was at the limit.
func (d *delivering) isFull(it interval) bool {
	s := it.series
	switch {
	case d.Kind == KindPool && it.refused > 0, d.Kind != KindPool && it.dropped > 0:
		return true
	case d.Kind == KindRules || s.Rate == 0 || s.Each != "" || s.Yellow != "" || s.Excess == policy.Pass.String():
		return false
	}
	return it.passed > 0 && it.passed >= dueBytes(s.Rate, s.Capacity, it.length)
}

// dueBytes is what a bucket of a rate passes at least in a time in which it is never empty: it may be full at the beginning, and
// not at the end.
func dueBytes(rate, capacity uint64, length time.Duration) uint64 {
	bytes := float64(rate) / 8 * length.Seconds()
	return uint64(max(0, bytes-float64(capacity)))
}

// committed is the rate that is committed to a series, its burst, and what it is.
func (d *delivering) committed(s *Series) (rate, burst uint64, by string) {
	guaranteed := func(rate uint64) uint64 {
		r, _ := policy.Rule{Guarantee: policy.Guarantee(rate)}.Guaranteed()
		return r.Capacity
	}
	switch {
	case d.given != 0:
		return d.given, max(guaranteed(d.given), s.Capacity), "given"
	case d.Kind == KindRules || s.Detached || s.Each != "" || s.Aware || s.Other != "": // only packets that come in green have the rate
	case s.Guarantee != 0:
		return s.Guarantee, guaranteed(s.Guarantee), "guarantee"
	case s.Within == "" && s.Rate != 0:
		return s.Rate, s.Capacity, "rate"
	}
	return 0, 0, ""
}

// check checks whether the committed rate was delivered.
func (d *delivering) check(it interval, before *Series) {
	rate, burst, _ := d.committed(it.series)
	was, wasBurst, _ := d.committed(before) // they may have changed in the interval
	offered := it.offered()
	switch {
	case offered == 0 && it.perhaps == 0:
		d.settle(false)
		return
	case rate == 0 || was == 0:
		d.settle(false)
		d.Unchecked++
		return
	}
	all := dueBytes(min(rate, was), 0, it.length)
	within := min(offered, all)
	want := min(dueBytes(rate, burst, it.length), dueBytes(was, wasBurst, it.length))
	now := &due{Missed{it.Span, offered, it.passed, min(offered, want)}, within, min(it.passed, within)}
	had := d.enough
	d.settle(offered >= all && !it.anew)
	switch {
	case it.perhaps == 0 && !it.anew || it.passed >= want:
		d.Delivered++
		d.count(now)
	case had && d.enough:
		d.waiting = now
	default:
		d.Undecided++
	}
}

// A due is an interval in which a rate was committed, and what was offered and passed up to that rate.
type due struct {
	Missed
	within, passed uint64
}

func (d *delivering) count(of *due) {
	d.Checked++
	d.WithinBytes, d.WithinPassedBytes = d.WithinBytes+of.within, d.WithinPassedBytes+of.passed
}

// settle decides about the interval before: traffic did not begin or end in it if as much as was committed was offered before
// and after it, too.
func (d *delivering) settle(enough bool) {
	switch {
	case d.waiting != nil && enough:
		d.count(d.waiting)
		at := sort.Search(len(d.Missed), func(i int) bool { return d.Missed[i].part() > d.waiting.part() })
		d.Missed = slices.Insert(d.Missed, at, d.waiting.Missed)
		d.Missed = d.Missed[:min(mostMissed, len(d.Missed))]
	case d.waiting != nil:
		d.Undecided++
	}
	d.waiting, d.enough = nil, enough
}

func (m *Missed) part() float64 { return float64(m.PassedBytes) / float64(max(m.DueBytes, 1)) }

// parameters are those whose changes a report lists.
var parameters = []struct {
	name string
	of   func(*Series) string
}{
	{"rate", func(s *Series) string { return cmp.Or(rateText(s.Rate), "unlimited") }},
	{"guarantee", func(s *Series) string { return rateText(s.Guarantee) }},
	{"capacity", func(s *Series) string { return fmt.Sprint(s.Capacity, " bytes") }},
	{"pool", func(s *Series) string { return s.Within }},
	{"each", func(s *Series) string { return cmp.Or(s.Each, "all") }},
	{"excess", func(s *Series) string { return s.Excess }},
	{"yellow", func(s *Series) string { return s.Yellow }},
	{"other limit", func(s *Series) string { return s.Other }},
	{"name", func(s *Series) string { return s.Name }},
	{"plan", func(s *Series) string { return s.Plan }},
	{"in force", func(s *Series) string { return map[bool]string{true: "no", false: "yes"}[s.Detached] }},
}

func rateText(bits uint64) string {
	if bits == 0 {
		return ""
	}
	return policy.Rate(bits).String()
}

// changed says in which parameters two series differ.
func changed(a, b *Series) (what []string) {
	for _, p := range parameters {
		if a, b := p.of(a), p.of(b); a != b {
			what = append(what, p.name+" "+cmp.Or(a, "none")+" -> "+cmp.Or(b, "none"))
		}
	}
	return what
}

// finish adds what is known at the end.
func (d *delivering) finish(q *Request, damaged int64) {
	d.until(q.Until, skipped(damaged, false))
	d.settle(false)
	s := d.series
	d.IntervalNS, d.Each = uint64(d.every), "all"
	if d.Kind != KindRules {
		d.Plan, d.Each, d.Aware = s.Plan, cmp.Or(s.Each, "all"), s.Aware
		d.Quota, d.Other = s.Quota, s.Other
		d.RateBits, d.CapacityBytes, d.GuaranteeBits = NotZero(s.Rate), NotZero(s.Capacity), NotZero(s.Guarantee)
	}
	bits, _, by := d.committed(s)
	d.CommittedBits, d.CommittedBy = NotZero(bits), by
	var offered, passed []uint64
	for begin, c := range d.periods {
		at := time.Unix(begin, 0).UTC()
		p := Period{Span{at, at.Add(PeriodLength)}, uint64(c.length), rate(c.offered, c.length), rate(c.passed, c.length), NotZero(c.rate), NotZero(c.committed)}
		d.Periods = append(d.Periods, p)
		if c.length >= leastMeasured {
			offered, passed = append(offered, p.OfferedBits), append(passed, p.PassedBits)
		}
	}
	d.Offered.P95, d.Passed.P95 = p95(offered), p95(passed)
	slices.SortFunc(d.Periods, func(a, b Period) int { return a.Begin.Compare(b.Begin) })
}

// p95 is the value above which at most 5 % of the others are: the nearest rank.
func p95(values []uint64) *uint64 {
	if len(values) == 0 {
		return nil
	}
	slices.Sort(values)
	return &values[(len(values)*95+99)/100-1]
}

// NotZero is a figure that is null in JSON where it is 0.
func NotZero(v uint64) *uint64 {
	if v == 0 {
		return nil
	}
	return &v
}
