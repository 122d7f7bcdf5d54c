package metrics_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A source is readings that a test makes up.
type source struct {
	reading *live.Reading
	err     error
	told    []string
	rtts    func() observe.Sums
	most    int
}

func (s *source) exporter() *metrics.Exporter {
	return metrics.New(metrics.Options{
		Version: "v1.2.3", Layout: "00ff", OnError: func(err error) { s.told = append(s.told, err.Error()) }, Most: s.most,
		Read: func(context.Context) (*live.Reading, error) { return s.reading, s.err }, RTTs: s.rtts,
	})
}

// scrape is the text of an answer, without the metrics of the process.
func scrape(t testing.TB, e *metrics.Exporter) string {
	t.Helper()
	w := httptest.NewRecorder()
	e.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 || !strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") {
		t.Fatalf("status %d, %v", w.Code, w.Header())
	}
	return w.Body.String()
}

// series are the lines of the metrics of shapectl, without comments.
func series(text string) (lines []string) {
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "shapectl_") {
			lines = append(lines, strings.TrimSuffix(line, "\n"))
		}
	}
	return lines
}

// everything is a reading in which every metric has a value.
func everything() *live.Reading {
	host, queue := limit("2001:db8::/32", 10e6, "home"), limit("10.0.0.0/8", 10e6, "home")
	host.Each.Kind, host.Excess, host.Guarantee, host.Share.Kind = policy.EachHost, policy.ECN, 1e6, policy.ShareHost
	host.Label = policy.Label{Name: "alice", Plan: "gold"}
	queue.Excess, queue.Queue, queue.Label.Waits = policy.Delay, 375e3, 2e6
	peak, excess := limit("10.0.1.0/24", 10e6, ""), limit("10.0.2.0/24", 10e6, "")
	peak.Algorithm, peak.Colours = policy.TRTCM, policy.Colours{PIR: 20e6, PBS: 750e3, Yellow: policy.ActionECN}
	excess.Algorithm, excess.Colours = policy.RFC4115, policy.Colours{EIR: 5e6, Red: policy.ActionDrop}
	full, home, isp := pool("full", 50e6, "isp"), pool("home", 50e6, "isp"), pool("isp", 50e6, "")
	home.Share.Kind, home.Guarantee, full.Label.Waits = policy.ShareMember, 2e6, 2e6
	also := policy.Also{Packets: 100, Flows: 9, Quota: policy.Quota{Bytes: 70, Period: "month"}, Grace: 30, Then: 1e6}
	full.Also, queue.Also = also, also
	r := livetest.Scene(policy.Table{Rules: []policy.Rule{full, home, isp}},
		policy.Table{Device: "eth0", Direction: policy.Egress, Rules: []policy.Rule{queue, host, peak, excess}}).Read(1, func(l *live.Limit) live.Item { return live.Item{Limit: l} })
	it := func(n int) *live.Item { return &r.Items[n] }
	it(0).Lease = &maps.Lease{Safe: 33e5}
	it(1).Counts = live.Counts{GuaranteedBytes: 41, GuaranteedPackets: 42, Counters: maps.Counters{DroppedBytes: 19, DroppedPackets: 20, DelayedBytes: 21, DelayedPackets: 22, MarkedPackets: 23}}
	it(1).ActiveSharers, it(1).Lease, it(1).LostBytes, it(1).LostPackets = new(uint64(1)), &maps.Lease{Rate: 31e6, Safe: 32e5, Until: 2}, 9, 10
	it(0).Used, it(3).Used = maps.Quota{UsedBytes: 99, LeftBytes: 1}, maps.Quota{UsedBytes: 98, LeftBytes: 2}
	it(3).TooManyPackets, it(3).TooManyFlows, it(3).BeyondQuota = 43, 44, 45
	it(3).DelayedBytes, it(3).DelayedPackets = 17, 18
	it(4).Counts = live.Counts{GuaranteedBytes: 7, GuaranteedPackets: 8, Counters: maps.Counters{
		PassedBytes: 1, PassedPackets: 2, ExcessBytes: 3, ExcessPackets: 4, MarkedPackets: 5, ContendedPackets: 6, DroppedBytes: 9, DroppedPackets: 10, ExemptPackets: 11, SpilledPackets: 12,
	}}
	it(4).Level, it(4).ActiveBuckets, it(4).ActiveSharers = 13, new(uint64(7)), new(uint64(2))
	it(4).Shadow = &live.Shadow{Counters: maps.Counters{PassedBytes: 14, ExcessBytes: 15, ExcessPackets: 16}}
	it(5).Second, it(5).Counters = 34, maps.Counters{GreenPackets: 35, GreenBytes: 36, YellowPackets: 37, YellowBytes: 38, RedPackets: 39, RedBytes: 40}
	r.Time, r.RevertsInNS, r.Slots = time.Unix(1700000000, 0), new(uint64(60e9)), maps.Slots{All: 1 << 20, InUse: 7}
	r.Lacks = []inforce.Lack{{Device: "tap9", Direction: policy.Ingress, Missing: make([]netip.Prefix, 2), Of: 3}}
	r.AddFullest(it(4), live.Bucket{Name: "2001:db8::7", Bytes: 24}, 1)
	return r
}

// The whole answer for rules and pools that have everything.
func TestMetrics(t *testing.T) {
	s := source{reading: everything(), most: -1}
	side := observe.SumOfTimes{Samples: 25, All: 26 * time.Second, Median: 27 * time.Millisecond}
	part := observe.Sum{Receiver: side, Sender: side, Packets: 28, Again: 29}
	s.rtts = func() observe.Sums {
		return observe.Sums{Rules: map[live.Key][2]observe.Sum{s.reading.Items[4].Key: {part, part}}}
	}
	e, events := s.exporter(), metrics.NewEvents()
	events.WithLabelValues(report.Overflow).Add(30)
	e.Register(events)
	text := scrape(t, e)
	lines := slices.DeleteFunc(series(text), func(line string) bool {
		return strings.Contains(line, "_duration_") || strings.Contains(line, "goversion")
	})
	golden(t, "testdata/metrics.golden", strings.Join(lines, "\n")+"\n")
	if said := lint(t, text); said != nil {
		t.Errorf("promtool check metrics: %q", said)
	}
	for _, m := range metrics.All() {
		if !strings.Contains(text, "# TYPE "+m.Name+" "+m.Type+"\n") {
			t.Errorf("no value of %s, a %s", m.Name, m.Type)
		}
	}
}

// A reading that fails is told of once, and the answer has what could be read.
func TestReadingFails(t *testing.T) {
	s := source{reading: everything(), err: errors.New("device 7 is gone")}
	e := s.exporter()
	for range 2 {
		if text := scrape(t, e); !strings.Contains(text, "\nshapectl_up 0\n") || !strings.Contains(text, "\nshapectl_rules 4\n") {
			t.Errorf("a reading of four rules that failed in part: %s", text)
		}
	}
	s.reading = nil
	text := scrape(t, e)
	for _, want := range []string{"shapectl_up 0", "shapectl_rules 0", "shapectl_scrape_errors_total 3", "go_goroutines"} {
		if !strings.Contains(text, "\n"+want) {
			t.Errorf("without any reading there is no %s: %s", want, text)
		}
	}
	if s.reading, s.err = everything(), nil; !strings.Contains(scrape(t, e), "\nshapectl_up 1\n") {
		t.Error("shapectl_up stays 0")
	}
	if len(s.told) != 1 {
		t.Errorf("told of %q", s.told)
	}
}

// Names may hold anything, and a deleted device may have left rules under a name that another has now.
func TestNames(t *testing.T) {
	one := func(device string, inForce bool) (live.Place, []maps.Entry) {
		at := livetest.Place(policy.Table{Device: device, Direction: policy.Egress})
		if !inForce {
			at.InForce, at.Status = false, "detached"
		}
		return at, []maps.Entry{{Rule: limit("10.0.0.0/8", 10e6, "")}}
	}
	var places [5]live.Place
	var rules [5][]maps.Entry
	places[0], rules[0] = one("e\xff\"\\\n", true)
	places[1], rules[1] = one(`"e\xff\"\\\n"`, true) // as the hostile one is written
	places[2], rules[2] = one("eth0", false)
	places[3], rules[3] = one("eth0", true)
	places[4], rules[4] = one(`unit:foo@a\x2db.service`, true)
	rules[0][0].Label.Name = "\u202e<img onerror=1>\x1b[2J"
	s := source{most: -1, reading: live.NewScene(places[:], rules[:]).Read(1, func(l *live.Limit) live.Item {
		it := live.Item{Limit: l}
		if l.Place.InForce && l.Device == "eth0" {
			it.PassedBytes = 2
		}
		return it
	})}
	text := scrape(t, s.exporter())
	if said := lint(t, text); said != nil {
		t.Errorf("promtool check metrics: %q", said)
	}
	for _, want := range []string{
		`shapectl_rule_passed_bytes_total{device="\"e\\xff\\\"\\\\\\n\"",direction="egress",network="10.0.0.0/8"} 0`,
		`shapectl_rule_passed_bytes_total{device="eth0",direction="egress",network="10.0.0.0/8"} 2`,
		`shapectl_attached{device="eth0",direction="egress"} 1`, `name="\"\\u202e<img onerror=1>\\x1b[2J\""`,
		`shapectl_attached{device="unit:foo@a\\x2db.service",direction="egress"} 1`,
	} {
		if strings.Count(text, want) != 1 {
			t.Errorf("there is no %s", want)
		}
	}
	if strings.Count(text, "\nshapectl_rule_passed_bytes_total{") != 4 {
		t.Error("a rule is there twice")
	}
}

// Of an ISP with ten thousand pools, metrics are for the pools that several names draw from and a bounded number of others.
func TestMost(t *testing.T) {
	pools, rules := []policy.Rule{pool("isp", 1e9, "")}, []policy.Rule{limit("192.0.2.0/25", 1e6, ""), limit("192.0.2.128/25", 1e6, "")}
	for i := range 10_000 {
		own, r := pool(fmt.Sprint("own ", i), 1e6, "isp"), limit(fmt.Sprintf("10.0.%d.%d/32", i/256, i%256), policy.Unlimited, fmt.Sprint("own ", i))
		r.Label.Name = fmt.Sprint("home ", i)
		pools, rules = append(pools, own), append(rules, r)
	}
	scene := livetest.Scene(policy.Table{Rules: pools}, policy.Table{Device: "eth0", Direction: policy.Egress, Rules: rules})
	second := func(n uint64) *live.Reading {
		drops := live.Counts{Counters: maps.Counters{DroppedBytes: n, DroppedPackets: n}}
		return scene.Read(n*1e9, livetest.Counted(map[string]live.Counts{"own 77": drops, "home 77": drops}))
	}
	for most, want := range map[int]string{
		0:  "isp",
		1:  "isp, home 77", // not all rules in no pool
		2:  "isp, 192.0.2.0/25, 192.0.2.128/25",
		3:  "isp, 192.0.2.0/25, 192.0.2.128/25, home 77",
		99: "isp, own 77, 192.0.2.0/25, 192.0.2.128/25, home 77",
	} {
		s := source{reading: second(2), most: most}
		s.reading.Since(second(1))
		text := scrape(t, s.exporter())
		for _, part := range strings.Split(want, ", ") {
			if !strings.Contains(text, `"`+part+`"`) {
				t.Errorf("most %d: there is no %s", most, part)
			}
		}
		if infos := strings.Count(text, "\nshapectl_rule_info{") + strings.Count(text, "\nshapectl_pool_info{"); infos != strings.Count(want, ",")+1 {
			t.Errorf("most %d: %d rules and pools have metrics, want %s", most, infos, want)
		}
		if !strings.Contains(text, "\nshapectl_rules 10002\n") || !strings.Contains(text, "\nshapectl_pools 10001\n") {
			t.Errorf("most %d: not all are counted", most)
		}
	}
	if n := len(second(2).Exported(20_003)); n != 20_003 {
		t.Errorf("of 20003 rules and pools %d have metrics, and all may", n)
	}
}

// Prometheus asks for other formats; all say the same.
func TestFormats(t *testing.T) {
	s := source{reading: everything(), most: -1}
	e := s.exporter()
	for accept, says := range map[string]string{"application/openmetrics-text;version=1.0.0": "# EOF\n", "text/plain;version=0.0.4": "go_goroutines"} {
		w, r := httptest.NewRecorder(), httptest.NewRequest("GET", "/metrics", nil)
		r.Header.Set("Accept", accept)
		e.ServeHTTP(w, r)
		if text := w.Body.String(); !strings.Contains(text, says) || !strings.Contains(text, `shapectl_rule_level_bytes{device="eth0"`) {
			t.Errorf("%s: %s", accept, text)
		}
	}
}
