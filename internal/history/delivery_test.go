package history

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// eightMbit passes 10 MB in 10 s, and has a burst of 300 kB.
var eightMbit = Series{Key: Key{Device: "eth0", Direction: "egress", Network: "10.0.0.7/32"}, Rate: 8e6, Capacity: 300000, Excess: "drop"}

// ofInterval is the i-th interval of ten seconds.
func ofInterval(i int, s Series, passed, dropped uint64) interval {
	begin := noon.Add(time.Duration(i) * tick)
	return interval{Span: Span{begin, begin.Add(tick)}, length: tick, every: tick, series: &s, passed: passed, dropped: dropped, perhaps: dropped}
}

func deliver(given uint64, intervals ...interval) *Delivery {
	q := &Request{Since: noon, Until: intervals[len(intervals)-1].End}
	kind := KindRule
	if intervals[0].series.Pool != "" {
		kind = KindPool
	}
	d := newDelivering(q, kind)
	d.given = given
	for _, it := range intervals {
		d.add(it)
	}
	d.finish(q, 0)
	return &d.Delivery
}

// TestDelivered sees that the committed rate is delivered if nothing was dropped, or if as much passed as it allows, less one
// burst.
func TestDelivered(t *testing.T) {
	with := func(change func(*Series)) Series {
		s := eightMbit
		change(&s)
		return s
	}
	guaranteed := with(func(s *Series) { s.Within, s.Guarantee = "uplink", 4e6 }) // 5 MB in 10 s, burst 150 kB
	for _, test := range []struct {
		name             string
		series           Series
		given            uint64
		passed, dropped  uint64
		checked, deliver bool
		by               string
	}{
		{"idle", eightMbit, 0, 0, 0, false, false, "rate"},
		{"all passed", eightMbit, 0, 1000, 0, true, true, "rate"},
		{"rate less a burst", eightMbit, 0, 9700000, 1, true, true, "rate"},
		{"a byte less", eightMbit, 0, 9699999, 300001, true, false, "rate"},
		{"guarantee less its burst", guaranteed, 0, 4850000, 1, true, true, "guarantee"},
		{"a byte less than that", guaranteed, 0, 4849999, 150001, true, false, "guarantee"},
		{"with colours", with(func(s *Series) { s.Yellow = "pass" }), 0, 9699999, 300001, true, false, "rate"},
		{"packets with colours", with(func(s *Series) { s.Yellow, s.Aware = "pass", true }), 0, 1, 1, false, false, ""},
		{"shared", with(func(s *Series) { s.Within = "uplink" }), 0, 1, 1, false, false, ""},
		{"each", with(func(s *Series) { s.Each = "host" }), 0, 1, 1, false, false, ""},
		{"not in force", with(func(s *Series) { s.Detached = true }), 0, 1, 1, false, false, ""},
		{"unlimited", with(func(s *Series) { s.Rate = 0 }), 0, 1, 0, false, false, ""},
		{"given", with(func(s *Series) { s.Within = "uplink" }), 1e6, 950000, 1, true, true, "given"},
		{"a byte less than given", with(func(s *Series) { s.Within = "uplink" }), 1e6, 949999, 300001, true, false, "given"},
	} {
		busy := test.series // as much as is committed is offered before and after it
		d := deliver(test.given, ofInterval(0, busy, 10e6, 1), ofInterval(1, test.series, test.passed, test.dropped), ofInterval(2, busy, 10e6, 1))
		if (d.Checked == 3) != test.checked || (d.Delivered == 3) != test.deliver || len(d.Missed) != int(d.Checked-d.Delivered) || d.CommittedBy != test.by {
			t.Errorf("%s: checked %d, delivered %d, missed %v, committed by %q", test.name, d.Checked, d.Delivered, d.Missed, d.CommittedBy)
		}
	}
	slow, larger := eightMbit, eightMbit
	slow.Rate, larger.Capacity = 4e6, 600000
	changing := deliver(0, ofInterval(0, slow, 1, 0), ofInterval(1, eightMbit, 5e6, 1))         // the rate rose at some time in it
	smaller := deliver(0, ofInterval(0, larger, 10e6, 1), ofInterval(1, eightMbit, 9400000, 1)) // the burst fell
	lowered := guaranteed
	lowered.Guarantee = 2e6 // by the plan: what was committed counts until then
	night := deliver(0, ofInterval(0, guaranteed, 5e6, 1), ofInterval(1, lowered, 2.5e6, 1), ofInterval(2, lowered, 2.5e6, 1))
	if night.Delivered != 3 || *night.CommittedBits != 2e6 || night.WithinBytes != 5e6+2.5e6+2.5e6 {
		t.Errorf("a guarantee that was lowered: %d delivered, %d within", night.Delivered, night.WithinBytes)
	}
	if changing.Delivered != 2 || changing.WithinBytes != 5e6+1 || smaller.Delivered != 2 {
		t.Errorf("changes: %d and %d delivered", changing.Delivered, smaller.Delivered)
	}
}

// TestFull sees that a rule is full if it drops, or passes as much as it has; with colours, more than the CIR may pass.
func TestFull(t *testing.T) {
	coloured, passes, each := eightMbit, eightMbit, eightMbit
	coloured.Yellow, passes.Excess, each.Each = "pass", "pass", "host"
	for _, test := range []struct {
		series          Series
		passed, dropped uint64
		full            bool
	}{
		{eightMbit, 9700000, 0, true}, {eightMbit, 9699999, 0, false}, {eightMbit, 1, 1, true},
		{coloured, 20e6, 0, false}, {coloured, 1, 1, true}, {passes, 20e6, 0, false}, {each, 20e6, 0, false},
	} {
		if d := deliver(0, ofInterval(0, test.series, test.passed, test.dropped)); (d.FullNS == uint64(tick)) != test.full {
			t.Errorf("%+v: full for %d ns", test, d.FullNS)
		}
	}
}

// TestUndecided sees that an interval is missed only if as much as is committed was offered all the time: not where traffic
// begins, ends or is too little, and not around a gap or where a rule was set anew.
func TestUndecided(t *testing.T) {
	const mb = 1_000_000
	judge := func(change func(i int, it *interval), traffic ...[2]uint64) *Delivery {
		var all []interval
		for i, c := range traffic {
			it := ofInterval(i, eightMbit, c[0]*mb, c[1]*mb)
			if change(i, &it); it.series != nil {
				all = append(all, it)
			}
		}
		return deliver(0, all...)
	}
	nothing := func(int, *interval) {}
	d := judge(nothing, [2]uint64{}, [2]uint64{4, 9}, [2]uint64{10, 10}, [2]uint64{10, 10}, [2]uint64{3, 17}, [2]uint64{10, 10}, [2]uint64{6, 6}, [2]uint64{}, [2]uint64{7, 2}, [2]uint64{7, 2}, [2]uint64{7, 2}, [2]uint64{})
	if d.Checked != 4 || d.Delivered != 3 || d.Undecided != 5 || len(d.Missed) != 1 || d.Missed[0].PassedBytes != 3*mb {
		t.Errorf("checked %d, delivered %d, undecided %d, missed %+v", d.Checked, d.Delivered, d.Undecided, d.Missed)
	}
	busy := [][2]uint64{{10, 10}, {10, 10}, {3, 17}, {10, 10}, {10, 10}}
	for what, change := range map[string]func(i int, it *interval){
		"no reading before":  func(i int, it *interval) { it.series = map[bool]*Series{false: it.series}[i < 2] },
		"no reading after":   func(i int, it *interval) { it.series = map[bool]*Series{false: it.series}[i >= 3] },
		"a gap before":       func(i int, it *interval) { it.gap = map[bool]string{true: noReading}[i == 1] },
		"set anew before it": func(i int, it *interval) { it.anew = i == 1 },
		"set anew after it":  func(i int, it *interval) { it.anew = i == 3 },
		"perhaps dropped":    func(i int, it *interval) { it.dropped = map[bool]uint64{false: it.dropped}[i == 2] },
	} {
		if d := judge(change, busy...); len(d.Missed) != 0 || d.Undecided != 1 {
			t.Errorf("%s: missed %d, undecided %d", what, len(d.Missed), d.Undecided)
		}
	}
	if d := judge(nothing, busy...); len(d.Missed) != 1 {
		t.Error("what is missed is not")
	}
}

// TestDeliveredSums sees that percentiles and the largest rates are without gaps, and sums with what is known of them.
func TestDeliveredSums(t *testing.T) {
	var all []interval
	for i := range 600 { // 20 periods of 30 intervals; the last has ten times the traffic
		passed := uint64(1e6)
		if i >= 570 {
			passed *= 10
		}
		all = append(all, ofInterval(i, eightMbit, passed, 0))
	}
	gap := ofInterval(600, eightMbit, 7e9, 1)
	gap.End, gap.length, gap.gap = gap.End.Add(time.Hour), time.Hour+tick, noReading
	short := ofInterval(0, eightMbit, 300000, 0) // serve was started again: a burst of a second is no average
	short.Span, short.length = Span{gap.End, gap.End.Add(time.Second)}, time.Second
	d := deliver(0, append(all, gap, short)...)
	if *d.Passed.P95 != 8e5 || *d.Passed.Largest != 8e6 || !d.Passed.LargestAt.Equal(noon.Add(95*time.Minute)) {
		t.Errorf("rates: %d, %d at %v", *d.Passed.P95, *d.Passed.Largest, d.Passed.LargestAt)
	}
	if d.PassedBytes != 570e6+300e6+7e9+300000 || d.DroppedBytes != 1 || d.MeasuredNS != 6001e9 || len(d.Gaps) != 1 || *d.Gaps[0].PassedBytes != 7e9 {
		t.Errorf("passed %d, measured %d, gaps %v", d.PassedBytes, d.MeasuredNS, d.Gaps)
	}
	if d.FullNS != 300e9 || d.Checked != 601 || len(d.Periods) != 21 || *d.Periods[0].CommittedBits != 8e6 {
		t.Errorf("full %d, checked %d, %d periods", d.FullNS, d.Checked, len(d.Periods))
	}
}

// A timeline is a history that has a reading each ten seconds, and what becomes of its clocks.
type timeline struct {
	*recording
	rules map[string]*Sample
}

// step adds a reading after what is counted.
func (l *timeline) step(names ...string) {
	l.now.Time, l.now.Mono, l.now.Samples = l.now.Time.Add(tick), l.now.Mono+uint64(tick), nil
	for _, name := range names {
		l.now.Samples = append(l.now.Samples, *l.rules[name])
	}
	l.Add(l.now)
}

func (l *timeline) deliveries(q Request) []*Delivery {
	l.t.Helper()
	if q.Until.IsZero() {
		q.Since, q.Until = noon, l.now.Time
	}
	all, err := reader(l.t, l.History).Deliveries(q)
	testenv.Must(l.t, err)
	return all
}

func gapsOf(d *Delivery) (gaps []string) {
	for _, g := range d.Gaps {
		text := fmt.Sprintf("%s+%v %s", g.Begin.UTC().Format(time.TimeOnly), g.End.Sub(g.Begin), g.Reason)
		if g.PassedBytes != nil {
			text += fmt.Sprint(" ", *g.PassedBytes)
		}
		gaps = append(gaps, text)
	}
	return gaps
}

// TestInterruptions sees what a report says of rules that are set anew, go and come, and of hosts that sleep, restart, have no
// reader, and whose clock is set.
func TestInterruptions(t *testing.T) {
	l := timeline{record(t, Options{}), map[string]*Sample{}}
	a, other := rule("a", 100, 0), rule("b", 0, 0)
	l.rules["a"], l.rules["b"] = &a, &other
	off := *a.Series
	off.Detached = true
	counted := func(bytes uint64) { a.Passed += bytes }
	on := a.Series
	a.Series = &off
	l.step("a") // 12:00:10
	a.Series = on
	counted(10)
	l.step("a", "b")
	a.Counters = Counters{Passed: 3} // set anew
	l.step("a", "b")                 // 12:00:30
	l.step("b")
	l.step("b")
	a.Counters = Counters{Passed: 4} // and again
	l.step("a", "b")                 // 12:01:00
	l.now.Time, l.now.Mono = l.now.Time.Add(time.Minute), l.now.Mono+uint64(time.Minute)
	counted(70)
	l.step("a", "b") // 12:02:10: nobody read for a minute
	l.now.Time, l.now.Slept = l.now.Time.Add(time.Hour), l.now.Slept+uint64(time.Hour)
	counted(1)
	l.step("a", "b") // 13:02:20: the host slept
	l.now.Time = l.now.Time.Add(2 * time.Hour)
	l.step("a", "b") // 15:02:30: the clock was set
	l.Close()
	l.o.Boot, l.now.Mono, l.now.Slept, a.Counters = "boot-2", 5e9, 0, Counters{Passed: 900}
	l.open()
	l.now.Time = l.now.Time.Add(time.Minute)
	l.step("a", "b") // 15:03:40
	faster := *a.Series
	faster.Rate = 16e6
	a.Series = &faster
	counted(5)
	l.step("a", "b")
	renamed := faster
	renamed.Name = "c"
	a.Series = &renamed
	counted(6)
	l.step("a", "b")
	d := l.deliveries(Request{Name: "a"})[0]
	want := []string{"12:00:30+20s no such rule", "12:01:00+1m10s no readings 70", "12:02:10+1h0m0s the host slept",
		"13:02:20+2h0m0s the clock was set forward", "15:02:30+1m10s the host was restarted 900", "15:03:50+10s no such rule"}
	if gaps := gapsOf(d); !slices.Equal(gaps, want) {
		t.Errorf("gaps %q, want %q", gaps, want)
	}
	var changes []string
	for _, c := range d.Changes {
		changes = append(changes, fmt.Sprintf("%s %.17s", c.End.UTC().Format(time.TimeOnly), c.What))
	}
	want = []string{"12:00:10 not in force", "12:00:20 in force no -> ye", "12:00:30 set anew; what it", "12:01:00 set anew; what it", "15:02:30 the clock was set", "15:03:50 rate 8mbit -> 16m"}
	if !slices.Equal(changes, want) || d.PassedBytes != 10+3+4+70+1+900+5 || *d.RateBits != 16e6 {
		t.Errorf("changes %q, want %q; passed %d", changes, want, d.PassedBytes)
	}
	if c := l.deliveries(Request{Name: "c"})[0]; c.PassedBytes != 6 {
		t.Errorf("what was renamed passed %d", c.PassedBytes)
	}
	part := l.deliveries(Request{Name: "a", Since: noon.Add(100 * time.Second), Until: noon.Add(4 * time.Minute)})[0]
	if gaps := gapsOf(part); part.PassedBytes != 0 || len(gaps) != 2 || gaps[0] != "12:01:40+30s no readings" || gaps[1] != "12:02:10+1m50s no data" {
		t.Errorf("%d passed; gaps %q", part.PassedBytes, gaps)
	}
}

// TestBusyHost sees that a reading that comes late is no clock that was set.
func TestBusyHost(t *testing.T) {
	l := timeline{record(t, Options{}), map[string]*Sample{}}
	a := rule("a", 1, 0)
	l.rules["a"] = &a
	for range 5 {
		l.step("a")
		l.now.Time, l.now.Mono = l.now.Time.Add(9*time.Second), l.now.Mono+uint64(9*time.Second)
	}
	if d := l.deliveries(Request{Name: "a"})[0]; len(d.Changes) != 0 || d.MeasuredNS != 4*19e9 {
		t.Errorf("changes %+v, measured %d", d.Changes, d.MeasuredNS)
	}
}

// TestWhoIsMeant sees which rules and pools are in a report of a subscriber, a pool, a device and an address: both directions
// and families, summed up where they share a pool.
func TestWhoIsMeant(t *testing.T) {
	l := timeline{record(t, Options{}), map[string]*Sample{}}
	add := func(key Key, name, within string, rate, guarantee uint64) string {
		at := key.Pool + key.Direction + key.Network
		l.rules[at] = &Sample{Series: &Series{Key: key, Name: name, Within: within, Rate: rate, Guarantee: guarantee, Capacity: 1000}}
		return at
	}
	names := []string{
		add(Key{Pool: "isp"}, "", "", 100e6, 0), add(Key{Pool: "ap"}, "", "isp", 50e6, 20e6), add(Key{Pool: "home"}, "", "ap", 20e6, 8e6),
		add(Key{"eth0", "egress", "10.0.0.1/32", ""}, "alice", "home", 0, 0), add(Key{"eth0", "egress", "2001:db8::1/128", ""}, "alice", "home", 0, 0),
		add(Key{"eth0", "ingress", "10.0.0.1/32", ""}, "alice", "home", 0, 0), add(Key{"eth0", "egress", "10.0.0.2/32", ""}, "bob", "ap", 8e6, 2e6),
		add(Key{"eth1", "egress", "10.0.0.3/32", ""}, "carol (7)", "", 8e6, 0),
	}
	for range 3 {
		l.step(names...)
		for i, name := range names[3:] {
			l.rules[name].Passed += uint64(i + 1)
		}
	}
	for _, test := range []struct {
		q    Request
		want string
	}{
		{Request{Name: "alice"}, `rules eth0 egress [10.0.0.1/32 2001:db8::1/128] alice  6 in home ap isp; rule eth0 ingress [10.0.0.1/32] alice  6 in home ap isp; pool   [] home guarantee 0 in ap isp`},
		{Request{Name: "alice", Direction: "ingress"}, `rule eth0 ingress [10.0.0.1/32] alice  6 in home ap isp`},
		{Request{Name: "bob"}, `rule eth0 egress [10.0.0.2/32] bob guarantee 8 in ap isp`},
		{Request{Name: "home"}, `pool   [] home guarantee 0 in ap isp`},
		{Request{Name: "eth0"}, `rules eth0 egress [10.0.0.1/32 10.0.0.2/32 2001:db8::1/128]   14 in; rule eth0 ingress [10.0.0.1/32] alice  6 in home ap isp; pool   [] isp rate 0 in`},
		{Request{Name: "10.0.0.1", Networks: []string{"10.0.0.1/32"}}, `rule eth0 egress [10.0.0.1/32] alice  2 in home ap isp; rule eth0 ingress [10.0.0.1/32] alice  6 in home ap isp`},
		{Request{Device: "eth1", Direction: "egress", Networks: []string{"10.0.0.3/32"}}, `rule eth1 egress [10.0.0.3/32] carol (7) rate 10 in`},
		{Request{Name: "7"}, `rule eth1 egress [10.0.0.3/32] carol (7) rate 10 in`},
		{Request{Name: "dave"}, ``},
	} {
		var got []string
		for _, d := range l.deliveries(test.q) {
			text := fmt.Sprintf("%s %s %s %v %s %s %d in", d.Kind, d.Device, d.Direction, d.Networks, d.Name, d.CommittedBy, d.PassedBytes)
			for _, p := range d.Pools {
				text += " " + p.Name
			}
			got = append(got, text)
		}
		if text := strings.Join(got, "; "); text != test.want {
			t.Errorf("%+v is\n%s\nwant\n%s", test.q, text, test.want)
		}
	}
	given := Request{Since: noon, Until: l.now.Time, Committed: 1e6}
	for name, fails := range map[string]bool{"alice": false, "home": false, "10.0.0.1": false, "eth0": false, "eth1": false, "both": true} {
		if given.Name, given.Networks = name, nil; name == "both" {
			given.Name, given.Networks = "none", []string{"10.0.0.2/32", "10.0.0.3/32"}
		}
		if _, err := reader(l.t, l.History).Deliveries(given); (err != nil) != fails {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestDroppedByPools sees what is known of the packets that a pool or those above it refused, whatever rules and pools within it
// did to others.
func TestDroppedByPools(t *testing.T) {
	l := timeline{record(t, Options{}), map[string]*Sample{}}
	series := func(name, within string, rate uint64, pool bool) {
		s := &Series{Key: Key{"eth0", "egress", name, ""}, Within: within, Rate: rate, Guarantee: map[bool]uint64{true: 4e6}[name == "home"], Capacity: 1000}
		if pool {
			s.Key = Key{Pool: name}
		}
		l.rules[name] = &Sample{Series: s}
	}
	series("isp", "", 100e6, true)
	series("home", "isp", 20e6, true)
	series("kids", "home", 5e6, true)
	series("phone", "kids", 0, false)
	series("tv", "home", 8e6, false) // it may drop packets by its own rate
	series("bob", "isp", 0, false)
	names := []string{"isp", "home", "kids", "phone", "tv", "bob"}
	count := func(name string, passed, dropped, refused uint64) {
		c := &l.rules[name].Counters
		*c = c.plus(Counters{passed, dropped, refused})
	}
	l.step(names...)
	for _, test := range []struct {
		count      func()
		home, kids uint64 // dropped
		judged     string // intervals of home so far: missed, checked, undecided
	}{
		{func() { count("phone", 0, 6e6, 0); count("kids", 5e6, 0, 6e6) }, 0, 6e6, "0 0 0"},                             // only kids refused
		{func() { count("tv", 0, 9e6, 0); count("isp", 0, 0, 2e6); count("bob", 0, 2e6, 0) }, 0, 0, "0 0 1"},            // tv or isp
		{func() { count("phone", 0, 6e6, 0); count("home", 5e6, 0, 6e6) }, 6e6, 6e6, "0 1 1"},                           // home
		{func() { count("phone", 0, 7e6, 0); count("home", 1e6, 0, 0); count("isp", 0, 0, 7e6) }, 7e6, 7e6, "0 1 2"},    // isp, above home
		{func() { count("phone", 0, 9e6, 0); count("home", 5e6, 0, 3e6); count("kids", 0, 0, 6e6) }, 3e6, 9e6, "1 3 1"}, // some of each
	} {
		test.count()
		before := l.now.Time
		l.step(names...)
		for name, want := range map[string]uint64{"home": test.home, "kids": test.kids} {
			if d := l.deliveries(Request{Name: name, Since: before, Until: l.now.Time})[0]; d.DroppedBytes != want {
				t.Errorf("%s dropped %d, want %d", name, d.DroppedBytes, want)
			}
		}
		d := l.deliveries(Request{Name: "home"})[0]
		if judged := fmt.Sprint(len(d.Missed), d.Checked, d.Undecided); judged != test.judged {
			t.Errorf("missed, checked and undecided are %s, want %s", judged, test.judged)
		}
	}
}

// TestHours sees reports over several hours of which some have no readings, or had a wrong clock.
func TestHours(t *testing.T) {
	l := timeline{record(t, Options{}), map[string]*Sample{}}
	a := rule("a", 0, 0)
	l.rules["a"] = &a
	steps := func(n int) {
		for range n {
			a.Passed += 10
			l.step("a")
		}
	}
	steps(30)
	begin := l.now.Time
	l.now.Time, l.now.Mono = begin.Add(3*time.Hour), l.now.Mono+uint64(3*time.Hour)
	steps(60)
	d := l.deliveries(Request{Name: "a", Since: begin.Add(2 * time.Hour), Until: l.now.Time})[0]
	if gaps := gapsOf(d); len(gaps) != 1 || gaps[0] != "14:05:00+1h0m10s no readings" || d.PassedBytes != 590 {
		t.Errorf("gaps %q, %d passed", gaps, d.PassedBytes)
	}
	for _, years := range []int{50, -50} { // the clock is wrong for ten minutes
		since := l.now.Time
		l.now.Time = l.now.Time.AddDate(years, 0, 0)
		steps(60)
		l.now.Time = l.now.Time.AddDate(-years, 0, 0)
		steps(60)
		d := l.deliveries(Request{Name: "a", Since: since, Until: l.now.Time})[0]
		if gaps := gapsOf(d); len(gaps) != 1 || !strings.HasSuffix(gaps[0], "+10m10s no readings 610") || d.PassedBytes != 1200 || len(d.Changes) != 0 {
			t.Errorf("gaps %q, %d passed, changes %+v", gaps, d.PassedBytes, d.Changes)
		}
	}
}
