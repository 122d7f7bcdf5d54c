package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A Delivery is what a rule or a pool passed and dropped over time, beside what it was to pass.
type Delivery struct {
	Kind      string `json:"kind"`
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Name      string `json:"name"`
	Plan      string `json:"plan"`
	// Since and Until are the time of the report.
	Since time.Time `json:"since"`
	Until time.Time `json:"until"`
	// IntervalNS is the usual time between two readings of the counters.
	IntervalNS uint64 `json:"interval_ns"`
	// MeasuredNS is the time with such readings, without gaps.
	MeasuredNS uint64 `json:"measured_ns"`
	// RateBits and what follows are those at the end of the time.
	RateBits      *uint64 `json:"rate_bits_per_second"`
	CapacityBytes *uint64 `json:"capacity_bytes"`
	Each          string  `json:"each"`
	Within        string  `json:"within"`
	GuaranteeBits *uint64 `json:"guarantee_bits_per_second"`
	// PoolRateBits is the least rate of the pools above; null for unlimited.
	PoolRateBits *uint64 `json:"pool_rate_bits_per_second"`
	// Aware is whether packets come in with colours.
	Aware bool `json:"colour_aware"`
	// CommittedBits is the rate that the report checks; null if none is committed.
	CommittedBits *uint64 `json:"committed_bits_per_second"`
	// CommittedBy says what it is: guarantee, rate or given; "" if none is committed.
	CommittedBy  string `json:"committed_by"`
	OfferedBytes uint64 `json:"offered_bytes"`
	PassedBytes  uint64 `json:"passed_bytes"`
	DroppedBytes uint64 `json:"dropped_bytes"`
	// RefusedBytes are those that the pool refused itself; null for a rule.
	RefusedBytes *uint64 `json:"refused_bytes"`
	// ErrorBytes is by how much each sum may be wrong, as values were rounded to be kept.
	ErrorBytes uint64 `json:"error_bytes"`
	// Offered and Passed are their rates.
	Offered Rates `json:"offered"`
	Passed  Rates `json:"passed"`
	// FullNS is the time of the intervals in which bytes were dropped (of a pool: refused by it), or passed at the rate.
	FullNS uint64 `json:"full_ns"`
	// LongestFull is the longest time of such intervals one after another; null if there are none.
	LongestFull *Span `json:"longest_full"`
	// Checked is the number of intervals with traffic in which a rate was committed, without the undecided ones.
	Checked uint64 `json:"checked_intervals"`
	// Delivered is the number of those in which it was delivered.
	Delivered uint64 `json:"delivered_intervals"`
	// Unchecked is the number of intervals with traffic in which none was committed.
	Unchecked uint64 `json:"unchecked_intervals"`
	// Undecided is the number of intervals in which bytes were dropped and less passed than was committed, but in which nobody
	// knows whether as much was offered all the time.
	Undecided uint64 `json:"undecided_intervals"`
	// WithinBytes are the offered bytes of the checked intervals, of each at most what the committed rate allows in it.
	WithinBytes uint64 `json:"offered_within_committed_bytes"`
	// WithinPassedBytes are how many of those passed, at least: less what rounding may have added.
	WithinPassedBytes uint64 `json:"passed_within_committed_bytes"`
	// Policy is the hash of the rules that were in force at the end: the SHA-256 of what export prints.
	Policy string `json:"policy"`
	// Missed are the other ones, at most 100 of them, those with the least part of what was due first.
	Missed  []Missed         `json:"missed"`
	Gaps    []DeliveryGap    `json:"gaps"`
	Changes []DeliveryChange `json:"changes"`
	// Limits are the rates over time.
	Limits []DeliveryLimit `json:"limits"`
	// Periods are averages of five minutes.
	Periods []Period `json:"periods"`
	// Intervals are the averages of each interval, if the report is so short that a picture can show them; else there are none.
	Intervals []Period `json:"intervals"`
}

// Rates are those of a report, in bits per second; null where nothing was measured.
type Rates struct {
	// P95 is the 95th percentile of averages of five minutes.
	P95 *uint64 `json:"p95_5min_bits_per_second"`
	// P95Interval is the same of intervals.
	P95Interval *uint64 `json:"p95_interval_bits_per_second"`
	// Largest is the most in an interval.
	Largest *uint64 `json:"largest_bits_per_second"`
	// LargestAt is when that interval began.
	LargestAt *time.Time `json:"largest_at"`
}

// A Span is a part of the time.
type Span struct {
	Begin time.Time `json:"begin"`
	End   time.Time `json:"end"`
}

// A Missed interval is one in which a committed rate was not delivered.
type Missed struct {
	Span
	OfferedBytes uint64 `json:"offered_bytes"`
	PassedBytes  uint64 `json:"passed_bytes"`
	DueBytes     uint64 `json:"due_bytes"`
}

// A DeliveryGap is a time without readings, or without the rule.
type DeliveryGap struct {
	Span
	Reason string `json:"reason"`
	// OfferedBytes and PassedBytes are what was counted meanwhile; null if that is not known, also of the part of a longer gap.
	// The sums have them.
	OfferedBytes *uint64 `json:"offered_bytes"`
	PassedBytes  *uint64 `json:"passed_bytes"`
}

// A DeliveryChange is another policy, other parameters, or a step of the clock.
type DeliveryChange struct {
	// After is the last reading before the change; null if it was so at the first reading.
	After *time.Time `json:"after"`
	// Time is the first reading with it.
	Time time.Time `json:"time"`
	// What changed; "" if only other rules and pools did.
	What string `json:"what"`
	// Policy is the hash of all rules from then on; "" if it is the one before.
	Policy string `json:"policy"`
}

// A DeliveryLimit is the rates from a time on.
type DeliveryLimit struct {
	// After is the last reading with the rates before; null if there are none. From then until Time, nobody knows which applied.
	After         *time.Time `json:"after"`
	Time          time.Time  `json:"time"`
	RateBits      *uint64    `json:"rate_bits_per_second"`
	CommittedBits *uint64    `json:"committed_bits_per_second"`
}

// A Period is five minutes of a report, or an interval.
type Period struct {
	Span
	// MeasuredNS is the measured time in it.
	MeasuredNS  uint64 `json:"measured_ns"`
	OfferedBits uint64 `json:"offered_bits_per_second"`
	PassedBits  uint64 `json:"passed_bits_per_second"`
}

const (
	period     = 5 * time.Minute
	mostMissed = 100
	// mostIntervals is how many intervals are kept one by one: as many as a picture can show.
	mostIntervals = 450
	// leastMeasured is how much of a period must be measured for percentiles.
	leastMeasured = period / 2
)

// Deliveries are what several rules and pools delivered.
type Deliveries []*Delivery

// A Deliverer makes Deliveries of intervals.
type Deliverer struct {
	Since, Until time.Time
	Committed    policy.Rate // to check in place of that of the rule; 0 for that
	of           map[Key]*delivering
	order        []*delivering
}

// delivering is a Delivery that is being made.
type delivering struct {
	Delivery
	series          *history.Series
	end             time.Time // of the last interval
	limits          [2]uint64 // the last of Limits
	full            Span      // the intervals at the limit until now
	periods         map[int64]*counted
	offered, passed highest // rates of intervals
	interval        time.Duration
	short           bool // keep each interval
	enough          bool // as much as was committed was offered in the interval before
	waiting         *due // the interval before, which is missed if the next one has enough, too
}

type counted struct {
	length          time.Duration
	offered, passed float64 // bytes
}

// mostDeliveries is how many rules and pools one report can have.
const mostDeliveries = 100

// Add adds an interval. Those of one key come in the order of time. An interval counts where it ends, so that the sums of
// reports one after another add up.
func (d *Deliverer) Add(it history.Interval) error {
	if it.Gap == history.NoGap && it.End.After(d.Until) {
		return nil
	}
	to := d.of[it.Series.Key]
	if to == nil {
		if len(d.order) == mostDeliveries {
			return fmt.Errorf("more than %d rules and pools match; name fewer", mostDeliveries)
		}
		to = &delivering{periods: map[int64]*counted{}, interval: it.Usual, end: d.Since}
		to.Since, to.Until, to.IntervalNS = d.Since, d.Until, uint64(it.Usual)
		to.offered.most = int(d.Until.Sub(d.Since)/it.Usual) * 5 / 4 // a restart begins a new interval
		to.passed.most = to.offered.most
		to.short = d.Until.Sub(d.Since) <= mostIntervals*it.Usual
		to.Missed, to.Gaps, to.Changes, to.Limits = []Missed{}, []DeliveryGap{}, []DeliveryChange{}, []DeliveryLimit{}
		to.Periods, to.Intervals = []Period{}, []Period{}
		if it.Series.Pool != "" {
			to.RefusedBytes = new(uint64)
		}
		if d.of == nil {
			d.of = map[Key]*delivering{}
		}
		d.of[it.Series.Key] = to
		d.order = append(d.order, to)
	}
	readings := Span{it.Begin, it.End}
	if it.Gap != history.NoGap && (it.Begin.Before(d.Since) || it.End.After(d.Until)) { // nobody knows how much of it came when
		it.Begin, it.End, it.Known = later(it.Begin, d.Since), earlier(it.End, d.Until), false
	}
	to.add(it, readings, d.Committed)
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// until notes that there is no data from the last interval until a time.
func (d *delivering) until(at time.Time) {
	if at.Sub(d.end) > history.Longest(d.interval) {
		d.gap(Span{d.end, at}, "no data", nil)
		d.interrupt()
	}
}

func (d *delivering) gap(s Span, reason string, c *history.Counters) {
	g := DeliveryGap{Span: s, Reason: reason}
	if c != nil {
		offered, passed := c.Offered(), c.Passed
		g.OfferedBytes, g.PassedBytes = &offered, &passed
	}
	d.Gaps = append(d.Gaps, g)
}

// limit notes the rates that are in force from a time on.
func (d *delivering) limit(after *time.Time, at time.Time, s *history.Series, given policy.Rate) {
	bits, _, _ := committed(s, given)
	if now := [2]uint64{s.Rate, bits}; len(d.Limits) == 0 || now != d.limits {
		d.Limits, d.limits = append(d.Limits, DeliveryLimit{after, at, NotZero(s.Rate), NotZero(bits)}), now
	}
}

// add adds an interval, which the report may have only a part of. Its readings are the ones at its beginning and end.
func (d *delivering) add(it history.Interval, readings Span, given policy.Rate) {
	d.until(it.Begin)
	before, after := d.series, readings.Begin
	if before == nil {
		before = it.Series
		d.limit(nil, it.Begin, before, given)
	} else {
		after = earlier(after, d.end) // there may be a hole between two intervals
	}
	change := func(what, policy string) {
		d.Changes = append(d.Changes, DeliveryChange{&after, readings.End, what, policy})
	}
	d.limit(&after, readings.End, it.Series, given)
	if it.ClockStep != 0 {
		d.endFull()
		change(fmt.Sprintf("the clock was set by %v, or the machine slept", it.ClockStep.Round(time.Second)), "")
	}
	policy := ""
	if d.series != nil && it.Policy != d.Policy {
		policy = cmp.Or(it.Policy, "unknown")
	}
	if what := changed(before, it.Series); what != "" || policy != "" {
		change(what, policy)
	}
	if d.series == nil && it.Series.Detached {
		d.Changes = append(d.Changes, DeliveryChange{nil, readings.End, "not in force", ""})
	}
	d.series, d.Policy, d.end = it.Series, it.Policy, it.End
	if it.Known {
		d.OfferedBytes, d.PassedBytes, d.DroppedBytes = d.OfferedBytes+it.Offered(), d.PassedBytes+it.Counters.Passed, d.DroppedBytes+it.Dropped
		if d.RefusedBytes != nil {
			*d.RefusedBytes += it.Refused
		}
		if it.Loose {
			d.ErrorBytes += uint64(math.Ceil(it.PassedError*float64(it.Counters.Passed) + it.DroppedError*float64(it.Dropped)))
		}
	}
	if it.Gap != history.NoGap {
		var counters *history.Counters
		if it.Known {
			counters = &it.Counters
		}
		d.gap(Span{it.Begin, it.End}, string(it.Gap), counters)
		d.interrupt()
		return
	}
	if it.Length <= 0 {
		return
	}
	d.measure(it, given)
	d.check(it, before, given)
}

// measure adds an interval to the rates.
func (d *delivering) measure(it history.Interval, given policy.Rate) {
	d.MeasuredNS += uint64(it.Length)
	perSecond := func(bytes uint64) uint64 { return uint64(math.Round(float64(bytes) * 8e9 / float64(it.Length))) }
	offered, passed := perSecond(it.Offered()), perSecond(it.Counters.Passed)
	if d.short {
		d.Intervals = append(d.Intervals, Period{Span{it.Begin, it.End}, uint64(it.Length), offered, passed})
	}
	if len(d.Intervals) > mostIntervals*5/4 { // restarts made too many short ones
		d.short, d.Intervals = false, []Period{}
	}
	if it.Length > it.Usual/2 { // a burst in a shorter one is no average
		d.Offered.most(offered, it.Begin)
		d.Passed.most(passed, it.Begin)
		d.offered.add(offered)
		d.passed.add(passed)
	}
	for at := it.Begin; ; {
		first := at.Truncate(period)
		end := first.Add(period)
		if end.After(it.End) {
			end = it.End
		}
		part := 1.0
		if all := it.End.Sub(it.Begin); all > 0 {
			part = float64(end.Sub(at)) / float64(all)
		}
		c := d.periods[first.Unix()]
		if c == nil {
			c = &counted{}
			d.periods[first.Unix()] = c
		}
		c.length += time.Duration(part * float64(it.Length))
		c.offered, c.passed = c.offered+part*float64(it.Offered()), c.passed+part*float64(it.Counters.Passed)
		if at = end; !at.Before(it.End) {
			break
		}
	}
	if d.isFull(it) {
		d.FullNS += uint64(it.Length)
		if d.full.Begin.IsZero() {
			d.full.Begin = it.Begin
		}
		d.full.End = it.End
	} else {
		d.endFull()
	}
}

func (r *Rates) most(bits uint64, at time.Time) {
	if r.Largest == nil || bits > *r.Largest {
		r.Largest, r.LargestAt = &bits, &at
	}
}

// isFull reports whether an interval was at the limit.
func (d *delivering) isFull(it history.Interval) bool {
	s, dropped := it.Series, it.Dropped
	if s.Pool != "" {
		dropped = it.Refused
	}
	if dropped > 0 {
		return true
	}
	return s.Rate != 0 && s.Each == "" && !s.Coloured && it.Counters.Passed > 0 && it.Counters.Passed >= dueBytes(s.Rate, s.Capacity, it.Length)
}

func (d *delivering) endFull() {
	if s := d.full; !s.Begin.IsZero() && (d.LongestFull == nil || s.End.Sub(s.Begin) > d.LongestFull.End.Sub(d.LongestFull.Begin)) {
		d.LongestFull = &s
	}
	d.full = Span{}
}

// interrupt ends what goes on from one interval to the next.
func (d *delivering) interrupt() {
	d.endFull()
	d.settle(false)
}

// dueBytes is what a bucket of a rate passes at least in a time in which it is never empty: it may be full at the beginning, and
// not at the end.
func dueBytes(rate, capacity uint64, length time.Duration) uint64 {
	bytes := float64(rate) / 8 * length.Seconds()
	return uint64(max(0, bytes-float64(capacity)))
}

// committed is the rate that is committed to a series, its burst, and what it is.
func committed(s *history.Series, given policy.Rate) (rate, burst uint64, by string) {
	guarantee, _ := policy.Rule{Guarantee: policy.Guarantee(s.Guarantee)}.Guaranteed()
	switch {
	case given != 0:
		guarantee, _ = policy.Rule{Guarantee: policy.Guarantee(given)}.Guaranteed()
		return uint64(given), max(guarantee.Capacity, s.Capacity), "given"
	case s.Detached || s.Each != "" || s.Aware: // only what comes in green has the rate
	case s.Guarantee != 0:
		return s.Guarantee, guarantee.Capacity, "guarantee"
	case s.Within == "" && s.Rate != 0:
		return s.Rate, s.Capacity, "rate"
	}
	return 0, 0, ""
}

// check checks whether the committed rate was delivered.
func (d *delivering) check(it history.Interval, before *history.Series, given policy.Rate) {
	rate, burst, _ := committed(it.Series, given)
	was, wasBurst, _ := committed(before, given) // they may have changed in the interval
	passed, dropped := it.Counters.Passed, it.Dropped
	if it.Series.Pool != "" && it.Series.Within == "" { // rules within it drop by their own rates, too
		dropped = it.Refused
	}
	offered := passed + dropped
	switch {
	case offered == 0:
		d.settle(false)
		return
	case rate == 0 || was == 0:
		d.settle(false)
		d.Unchecked++
		return
	}
	least := passed
	if dropped > 0 { // rounding does not make it delivered
		least -= uint64(math.Ceil(float64(passed) * it.PassedError))
	}
	all := dueBytes(min(rate, was), 0, it.Length)
	within := min(offered, all)
	want := min(dueBytes(rate, burst, it.Length), dueBytes(was, wasBurst, it.Length))
	now := &due{Missed{Span{it.Begin, it.End}, offered, passed, min(offered, want)}, within, min(least, within)}
	had := d.enough
	d.settle(offered >= all)
	switch {
	case dropped == 0 || least >= want:
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
		d.miss(d.waiting.Missed)
	case d.waiting != nil:
		d.Undecided++
	}
	d.waiting, d.enough = nil, enough
}

// miss keeps the worst intervals, the worst first.
func (d *delivering) miss(m Missed) {
	at := sort.Search(len(d.Missed), func(i int) bool { return d.Missed[i].part() > m.part() })
	d.Missed = slices.Insert(d.Missed, at, m)
	d.Missed = d.Missed[:min(mostMissed, len(d.Missed))]
}

// changed says in which parameters two series differ.
func changed(a, b *history.Series) string {
	var what []string
	differ := func(name, a, b string) {
		if a != b {
			what = append(what, name+" "+cmp.Or(a, "none")+" -> "+cmp.Or(b, "none"))
		}
	}
	rate := func(bits uint64, none string) string {
		if bits == 0 {
			return none
		}
		return policy.Rate(bits).String()
	}
	differ("rate", rate(a.Rate, "unlimited"), rate(b.Rate, "unlimited"))
	differ("guarantee", rate(a.Guarantee, ""), rate(b.Guarantee, ""))
	differ("capacity", bytesText(a.Capacity), bytesText(b.Capacity))
	differ("pool", a.Within, b.Within)
	differ("rate of its pools", rate(a.PoolRate, "unlimited"), rate(b.PoolRate, "unlimited"))
	differ("each", cmp.Or(a.Each, "all"), cmp.Or(b.Each, "all"))
	differ("excess", a.Excess, b.Excess)
	differ("name", a.Name, b.Name)
	differ("plan", a.Plan, b.Plan)
	switch {
	case b.Detached && !a.Detached:
		what = append(what, "not in force")
	case a.Detached && !b.Detached:
		what = append(what, "in force again")
	}
	return strings.Join(what, ", ")
}

// Deliveries are what was made of the intervals, in the order of the rules.
func (d *Deliverer) Deliveries() Deliveries {
	var all Deliveries
	for _, to := range d.order {
		to.until(d.Until)
		to.interrupt()
		s := to.series
		to.Kind, to.Device, to.Direction, to.CIDR, to.Name = KindRule, s.Device, s.Direction, s.Network, s.Name
		if s.Pool != "" {
			to.Kind, to.Name = KindPool, s.Pool
		}
		to.Plan, to.Each, to.Within = s.Plan, cmp.Or(s.Each, "all"), s.Within
		to.PoolRateBits, to.Aware = NotZero(s.PoolRate), s.Aware
		to.RateBits, to.CapacityBytes, to.GuaranteeBits = NotZero(s.Rate), NotZero(s.Capacity), NotZero(s.Guarantee)
		rate, _, by := committed(s, d.Committed)
		to.CommittedBits, to.CommittedBy = NotZero(rate), by
		to.Offered.P95Interval, to.Passed.P95Interval = to.offered.p95(), to.passed.p95()
		var offered, passed []uint64
		for begin, c := range to.periods {
			if c.length <= 0 {
				continue
			}
			bits := func(bytes float64) uint64 { return uint64(math.Round(bytes * 8 / c.length.Seconds())) }
			at := time.Unix(begin, 0).UTC()
			p := Period{Span{at, at.Add(period)}, uint64(c.length), bits(c.offered), bits(c.passed)}
			to.Periods = append(to.Periods, p)
			if c.length >= leastMeasured {
				offered, passed = append(offered, p.OfferedBits), append(passed, p.PassedBits)
			}
		}
		to.Offered.P95, to.Passed.P95 = p95(offered), p95(passed)
		slices.SortFunc(to.Periods, func(a, b Period) int { return a.Begin.Compare(b.Begin) })
		all = append(all, &to.Delivery)
	}
	slices.SortStableFunc(all, func(a, b *Delivery) int {
		return cmp.Or(strings.Compare(b.Kind, a.Kind), Natural(a.Device, b.Device), strings.Compare(a.Direction, b.Direction), Natural(a.CIDR, b.CIDR), Natural(a.Name, b.Name))
	})
	return all
}

func (m Missed) part() float64 { return float64(m.PassedBytes) / float64(max(m.DueBytes, 1)) }

// NotZero is a figure that is null in JSON where it is 0.
func NotZero(v uint64) *uint64 {
	if v == 0 {
		return nil
	}
	return &v
}

// p95 is the value above which 5 % of the others are at most: the nearest rank.
func p95(values []uint64) *uint64 {
	all := highest{most: len(values)}
	for _, v := range values {
		all.add(v)
	}
	return all.p95()
}

// highest keeps as many of the highest values as their 95th percentile takes.
type highest struct {
	most   int // values that are added; with more, p95 may be too high
	n      int
	values []uint64
}

func (h *highest) add(v uint64) {
	h.n++
	h.values = append(h.values, v)
	if keep := h.most/20 + 1; len(h.values) > 2*keep {
		h.sort()
		h.values = h.values[:keep]
	}
}

func (h *highest) sort() {
	slices.SortFunc(h.values, func(a, b uint64) int { return cmp.Compare(b, a) })
}

func (h *highest) p95() *uint64 {
	if h.n == 0 {
		return nil
	}
	h.sort()
	above := h.n - (h.n*95+99)/100
	return &h.values[min(above, len(h.values)-1)]
}

// called is what people call the rules and pools.
func (all Deliveries) called() string {
	var names []string
	for _, d := range all {
		name := cmp.Or(d.Name, d.title())
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return plain.List(names)
}

// Count says how many rules and pools there are.
func (all Deliveries) Count() string {
	var counts []string
	for _, kind := range []string{KindRule, KindPool} {
		n := 0
		for _, d := range all {
			if d.Kind == kind {
				n++
			}
		}
		if n > 0 {
			counts = append(counts, plain.Count(n, kind))
		}
	}
	return strings.Join(counts, " and ")
}

// BothDirections reports whether these are two rules with the same name, one for each direction.
func (all Deliveries) BothDirections() bool {
	return len(all) == 2 && all[0].Kind == KindRule && all[1].Kind == KindRule && all[0].Name == all[1].Name && all[0].Direction != all[1].Direction
}

// Names lists what --rule and --pool call the first few.
func (all Deliveries) Names() string {
	names := make([]string, len(all))
	for i, d := range all {
		names[i] = plain.Line("'" + d.Device + " " + d.Direction + " " + d.CIDR + "'")
		if d.Kind == KindPool {
			names[i] = plain.Line(d.title())
		}
	}
	return plain.List(names)
}

// Text writes the summary of each.
func (all Deliveries) Text(w io.Writer) error {
	var s strings.Builder
	for i, d := range all {
		if i > 0 {
			s.WriteByte('\n')
		}
		s.WriteString(plain.Fold(plain.Line(d.title()), screenWidth, "", "    "))
		for _, f := range d.facts(fewest) {
			fact(&s, f[0], f[1])
		}
	}
	_, err := io.WriteString(w, s.String())
	return err
}

// title names the rule or pool.
func (d *Delivery) title() string {
	text := d.Device + " " + d.Direction + " " + d.CIDR
	if d.Kind == KindPool {
		text = fmt.Sprintf("pool %q", d.Name)
	} else if d.Name != "" {
		text += ", " + d.Name
	}
	if d.Plan != "" {
		text += ", plan " + d.Plan
	}
	return text
}

const momentFormat = "2006-01-02 15:04:05"

func moment(t time.Time) string { return t.Local().Format(momentFormat) }

// fewest is how many missed intervals are listed, and how many gaps and changes in the text.
const fewest = 10

// facts are the lines of the summary: a label and a text each. They list at most so many gaps and changes.
func (d *Delivery) facts(most int) (facts [][2]string) {
	add := func(label, format string, args ...any) {
		facts = append(facts, [2]string{label, fmt.Sprintf(format, args...)})
	}
	length := d.Until.Sub(d.Since)
	add("time", "%s to %s (%s), %v", moment(d.Since), moment(d.Until), d.Until.Local().Format("MST -0700"), length.Round(time.Second))
	measured := time.Duration(d.MeasuredNS)
	// The first interval may begin before the report.
	add("measured", "%s of the time, every %v", percentText(min(100, 100*float64(measured)/float64(max(length, 1)))), time.Duration(d.IntervalNS))
	add("committed", "%s", d.committedText())
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
	if d.ErrorBytes > 0 {
		add("", "each is exact to %s, because the first and last ten minutes were rounded", bytesText(d.ErrorBytes))
	}
	label := "95th"
	if p := d.Passed; p.P95 != nil {
		add(label, "passed %s, offered %s (percentile of 5-minute averages)", bitsText(*p.P95), bitsText(*d.Offered.P95))
		label = ""
	}
	if p := d.Passed; p.P95Interval != nil {
		add(label, "passed %s, offered %s (percentile of %v averages)", bitsText(*p.P95Interval), bitsText(*d.Offered.P95Interval), time.Duration(d.IntervalNS))
		add("largest", "passed %s from %s, offered %s from %s (over %v)", bitsText(*p.Largest), moment(*p.LargestAt),
			bitsText(*d.Offered.Largest), moment(*d.Offered.LargestAt), time.Duration(d.IntervalNS))
	}
	if d.LongestFull == nil {
		add("full", "never")
	} else {
		add("full", "%s of the measured time; longest %v, from %s", percentText(100*float64(d.FullNS)/float64(max(d.MeasuredNS, 1))),
			d.LongestFull.length(), moment(d.LongestFull.Begin))
	}
	add("delivered", "%s", d.verdict())
	add("policy", "%s", cmp.Or(d.Policy, "unknown"))
	d.lists(most, add)
	return facts
}

func (s Span) length() time.Duration { return s.End.Sub(s.Begin).Round(time.Second) }

// lists adds what there may be many of, at most so many of each.
func (d *Delivery) lists(most int, add func(label, format string, args ...any)) {
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
	missed := slices.Clone(d.Missed[:min(fewest, len(d.Missed))])
	slices.SortFunc(missed, func(a, b Missed) int { return a.Begin.Compare(b.Begin) })
	list("missed", len(missed), func(i int) string {
		m := missed[i]
		return fmt.Sprintf("%s: offered %s, passed %s, due %s", moment(m.Begin), bytesText(m.OfferedBytes), bytesText(m.PassedBytes), bytesText(m.DueBytes))
	})
	if all := d.Checked - d.Delivered; all > fewest {
		add("", "the %d worst of %d; -j lists up to %d", fewest, all, mostMissed)
	}
	list("gaps", len(d.Gaps), func(i int) string {
		g := d.Gaps[i]
		text := fmt.Sprintf("%s to %s (%v): %s", moment(g.Begin), moment(g.End), g.length(), g.Reason)
		if g.PassedBytes != nil {
			text += fmt.Sprintf("; %s passed of %s offered", bytesText(*g.PassedBytes), bytesText(*g.OfferedBytes))
		}
		return text
	})
	changes := d.ownChanges()
	list("changes", len(changes), func(i int) string {
		c := changes[i]
		text := c.when() + ": " + c.What
		if c.Policy != "" {
			text += fmt.Sprintf("; policy %.12s", strings.TrimPrefix(c.Policy, "sha256:"))
		}
		return text
	})
}

// when says between which readings a change came.
func (c *DeliveryChange) when() string {
	if c.After == nil {
		return moment(c.Time)
	}
	layout := momentFormat
	if c.After.Local().Format(time.DateOnly) == c.Time.Local().Format(time.DateOnly) {
		layout = time.TimeOnly
	}
	return moment(*c.After) + " to " + c.Time.Local().Format(layout)
}

// ownChanges are those that are not of other rules alone.
func (d *Delivery) ownChanges() (own []DeliveryChange) {
	for _, c := range d.Changes {
		if c.What != "" {
			own = append(own, c)
		}
	}
	return own
}

// committedText says what is committed.
func (d *Delivery) committedText() string {
	text := "none"
	switch d.CommittedBy {
	case "guarantee":
		text = rateText(d.CommittedBits) + ", the guarantee"
	case "rate":
		return rateText(d.CommittedBits) + ", the rate"
	case "given":
		text = rateText(d.CommittedBits) + ", as given"
	default:
		switch {
		case d.Each != "all":
			text = "none for all together: each " + d.Each + " has the rate"
		case d.Aware:
			text = "none that can be checked: packets come in with colours"
		case d.Within != "":
			text = "none: within pool " + d.Within + " without a guarantee"
		}
	}
	if d.PoolRateBits != nil && (d.RateBits == nil || *d.RateBits > *d.PoolRateBits) {
		return text + "; the rate is " + rateText(d.PoolRateBits) + ", of its pools"
	}
	return text + "; the rate is " + rateText(d.RateBits)
}

// verdict says whether the committed rate was delivered.
func (d *Delivery) verdict() string {
	switch {
	case d.CommittedBits == nil && d.Checked == 0:
		return "not checked: no rate is committed"
	case d.Checked == 0 && d.Undecided > 0:
		return d.undecided()
	case d.Checked == 0 && d.Unchecked > 0:
		return "not checked: no rate was committed while there was traffic"
	case d.Checked == 0:
		return "nothing was offered"
	}
	what, of := d.checkedRate()
	text := fmt.Sprintf("%s of what was offered up to %s%s passed; %s was delivered in ", wholePercent(d.WithinPassedBytes, d.WithinBytes), what, of, what)
	traffic := "with traffic"
	if d.Unchecked > 0 {
		traffic += " and a committed rate"
	}
	if d.Checked == d.Delivered {
		text += fmt.Sprintf("all %d intervals %s", d.Checked, traffic)
	} else {
		text += fmt.Sprintf("%d of %d intervals %s (%s). In the rest, packets were dropped although less passed than %s: %s",
			d.Delivered, d.Checked, traffic, wholePercent(d.Delivered, d.Checked), what, d.reasons())
	}
	if what == theGuarantee {
		text += "; the rate above the guarantee is not checked"
	}
	if d.Undecided > 0 {
		text += "; " + d.undecided()
	}
	if d.Unchecked > 0 {
		text += fmt.Sprintf("; no rate was committed in %d others with traffic", d.Unchecked)
	}
	return text
}

// undecided says how many intervals are, and why.
func (d *Delivery) undecided() string {
	return plain.Count(d.Undecided, "interval") + " with traffic cannot be judged: packets were dropped and less passed than the committed rate allows, " +
		"but traffic began or ended, or less than that rate was offered"
}

// wholePercent is a part in percent, rounded down so that only all is 100%.
func wholePercent(part, whole uint64) string {
	if part >= whole {
		return "100%"
	}
	return fmt.Sprintf("%.2f%%", math.Floor(1e4*float64(part)/float64(whole))/100)
}

const theGuarantee = "the guarantee"

// checkedRate is what the checked rate is called, and how much it is, if that holds for the whole report.
func (d *Delivery) checkedRate() (what, of string) {
	what = "the committed rate"
	if d.CommittedBy == "guarantee" {
		what = theGuarantee
	}
	for _, l := range d.Limits {
		if l.CommittedBits == nil {
			continue
		}
		if amount := " of " + rateText(l.CommittedBits); of == "" {
			of = amount
		} else if of != amount {
			return "the committed rate", ""
		}
		if l.RateBits != nil && *l.RateBits <= *l.CommittedBits { // it may be the rate that was committed
			what = "the committed rate"
		}
	}
	return what, of
}

// reasons are why packets may be dropped although less passes than the committed rate.
func (d *Delivery) reasons() string {
	switch {
	case d.Kind == KindRule:
		return "they came in bursts, a penalty lasted, or a pool was full"
	case d.Within == "":
		return "they came in bursts"
	}
	return "they came in bursts, a pool above was full, or rules within this one dropped them by their own rates"
}

// Samples are rules and pools as a history keeps them.
func Samples(rules []*Rule) []history.Sample {
	samples := make([]history.Sample, len(rules))
	pools := map[string]*Rule{}
	for _, r := range rules {
		if r.Kind == KindPool {
			pools[r.Name] = r
		}
	}
	for i, r := range rules {
		s := &samples[i]
		if s.Key = r.Key(); s.Pool == "" {
			s.Name = r.Name
		}
		s.Plan, s.Within, s.Each, s.Excess = r.Plan, r.Within, r.scope, r.onExcess()
		s.Coloured, s.Aware = r.HasColours(), r.isAware()
		for pool := pools[r.Within]; pool != nil; pool = pools[pool.Within] {
			if rate := pool.RateBits; rate != nil && (s.PoolRate == 0 || *rate < s.PoolRate) {
				s.PoolRate = *rate
			}
		}
		if r.RateBits != nil {
			s.Rate, s.Capacity = *r.RateBits, r.holds(*r.CapacityBytes)
		}
		if r.GuaranteeBits != nil {
			s.Guarantee = *r.GuaranteeBits
		}
		s.Detached = NotInForce(r.Attached)
		s.Counters = history.Counters{Passed: r.PassedBytes, Dropped: r.DroppedBytes, Refused: r.RefusedBytes}
	}
	return samples
}
