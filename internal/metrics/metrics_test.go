package metrics_test

import (
	"compress/gzip"
	"errors"
	"io"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/inforce"
	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/observe"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A source is readings that a test makes up.
type source struct {
	reading *measure.Reading
	err     error
	told    []string
	rtts    func() observe.Sums
}

func (s *source) exporter() *metrics.Exporter {
	return metrics.New(metrics.Options{
		Version: "v1.2.3", Layout: "00ff", OnError: func(err error) { s.told = append(s.told, err.Error()) },
		Read: func() (*measure.Reading, error) { return s.reading, s.err }, RTTs: s.rtts,
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

func number(n uint64) *uint64 { return &n }

func isTrue(is bool) *bool { return &is }

func aRule(device, network string) report.Rule {
	return report.Rule{
		Kind: report.KindRule, Device: device, Direction: "egress", CIDR: network, Algorithm: "gcra", Each: "all", Excess: "drop",
		RateBits: number(10e6), CapacityBytes: number(375e3), Attached: isTrue(true),
	}
}

func aPool(name, within string) report.Rule {
	return report.Rule{
		Kind: report.KindPool, Name: name, Within: within, Algorithm: "gcra", Each: "all", Excess: "drop", RateBits: number(50e6),
		CapacityBytes: number(1e6), Share: "member",
	}
}

// everything is a reading in which every metric has a value.
func everything() *measure.Reading {
	host := aRule("eth0", "2001:db8::/32")
	host.Each, host.Excess, host.Name, host.Plan, host.Within = "host", "ecn", "alice", "gold", "home"
	host.GuaranteeBits, host.ActiveBuckets, host.ActiveSharers = number(1e6), number(7), number(2)
	host.PassedBytes, host.PassedPackets, host.ExcessBytes, host.ExcessPackets = 1, 2, 3, 4
	host.MarkedPackets, host.ContendedPackets, host.GuaranteedBytes, host.GuaranteedPackets = 5, 6, 7, 8
	host.DroppedBytes, host.DroppedPackets, host.ExemptPackets, host.SpilledPackets, host.LevelBytes = 9, 10, 11, 12, 13
	host.Shadow = &report.Shadow{SeenBytes: 14, RefusedBytes: 15, RefusedPackets: 16}
	queue := aRule("eth0", "10.0.0.0/8")
	queue.Excess, queue.QueueBytes, queue.DelayedBytes, queue.DelayedPackets = "delay", 375e3, 17, 18
	home, isp, full := aPool("home", "isp"), aPool("isp", ""), aPool("full", "isp")
	queue.Within, queue.WaitingBits, full.WaitingBits = "home", number(2e6), number(2e6)
	home.GuaranteeBits, home.ActiveSharers, home.RefusedBytes, home.RefusedPackets = number(2e6), number(1), 19, 20
	home.DelayedBytes, home.DelayedPackets, home.MarkedPackets = 21, 22, 23
	home.Leased, home.LeaseBits, home.SafeBits = isTrue(true), number(31e6), number(32e5)
	full.Leased, full.SafeBits = isTrue(false), number(33e5)
	peak, excess := aRule("eth0", "10.0.1.0/24"), aRule("eth0", "10.0.2.0/24")
	peak.Algorithm, peak.ColourOptions = "trtcm", report.NewColourOptions(policy.Rule{Algorithm: policy.TRTCM, Colours: policy.Colours{
		PIR: 20e6, PBS: 750e3, Yellow: policy.ActionECN,
	}})
	excess.Algorithm, excess.ColourOptions = "rfc4115", report.NewColourOptions(policy.Rule{Algorithm: policy.RFC4115, Colours: policy.Colours{
		EIR: 5e6, EBS: 0, Red: policy.ActionDrop,
	}})
	peak.Excess, peak.SecondLevelBytes, excess.Excess, excess.SecondLevelBytes = "", number(34), "", number(0)
	peak.ColourCounters = report.ColourCounters{GreenPackets: 35, GreenBytes: 36, YellowPackets: 37, YellowBytes: 38, RedPackets: 39, RedBytes: 40}
	return &measure.Reading{
		Time: time.Unix(1700000000, 0), Rules: report.Rules{full, home, isp, queue, host, peak, excess}, RevertsInNS: number(60e9), Slots: maps.Slots{All: 1 << 20, InUse: 7},
		Lacks:   []inforce.Lack{{Device: "tap9", Direction: policy.Ingress, Missing: make([]netip.Prefix, 2), Of: 3}},
		Fullest: []report.FullBucket{report.NewFullBucket(&host, report.Bucket{Key: "2001:db8::7", LevelBytes: 24}, 1)},
	}
}

// The whole answer for rules and pools that have everything.
func TestMetrics(t *testing.T) {
	s := source{reading: everything()}
	side := observe.SumOfTimes{Samples: 25, All: 26 * time.Second, Median: 27 * time.Millisecond}
	part := observe.Sum{Receiver: side, Sender: side, Packets: 28, Again: 29}
	s.rtts = func() observe.Sums {
		return observe.Sums{Rules: map[report.Key][2]observe.Sum{s.reading.Rules[4].Key(): {part, part}}}
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
	hostile := aRule("e\xff\"\\\n", "10.0.0.0/8")
	hostile.Name = "\u202e<img onerror=1>\x1b[2J"
	old, other := aRule("eth0", "10.0.0.0/8"), aRule("eth0", "10.0.0.0/8")
	old.Attached, old.PassedBytes, other.PassedBytes = isTrue(false), 1, 2
	alike := aRule("e\\xff\"\\\\n", "10.0.0.0/8") // as the hostile one is written
	s := source{reading: &measure.Reading{Rules: report.Rules{hostile, alike, old, other}}}
	text := scrape(t, s.exporter())
	if said := lint(t, text); said != nil {
		t.Errorf("promtool check metrics: %q", said)
	}
	for _, want := range []string{
		`shapectl_rule_passed_bytes_total{device="e\\xff\"\\\\\\n",direction="egress",network="10.0.0.0/8"} 0`,
		`shapectl_rule_passed_bytes_total{device="eth0",direction="egress",network="10.0.0.0/8"} 2`,
		`shapectl_attached{device="eth0",direction="egress"} 1`, `name="\\u202e<img onerror=1>\\u001b[2J"`,
	} {
		if strings.Count(text, want) != 1 {
			t.Errorf("there is no %s", want)
		}
	}
	if strings.Count(text, "\nshapectl_rule_passed_bytes_total{") != 3 {
		t.Error("a rule is there twice")
	}
}

// Prometheus asks for other formats and compression; all say the same.
func TestFormats(t *testing.T) {
	s := source{reading: everything()}
	e := s.exporter()
	for accept, says := range map[string]string{"application/openmetrics-text;version=1.0.0": "# EOF\n", "text/plain;version=0.0.4": "go_goroutines"} {
		for _, encoding := range []string{"", "gzip", "br;q=1.0, gzip;q=0.8", "gzip;q=0"} {
			w, r := httptest.NewRecorder(), httptest.NewRequest("GET", "/metrics", nil)
			r.Header.Set("Accept", accept)
			r.Header.Set("Accept-Encoding", encoding)
			e.ServeHTTP(w, r)
			var body io.Reader = w.Body
			if w.Header().Get("Content-Encoding") == "gzip" {
				var err error
				body, err = gzip.NewReader(body)
				testenv.Must(t, err)
			}
			if wanted := strings.Contains(encoding, "gzip") && encoding != "gzip;q=0"; wanted != (body != w.Body) {
				t.Errorf("Accept-Encoding %q is answered by %q", encoding, w.Header().Get("Content-Encoding"))
			}
			text, err := io.ReadAll(body)
			testenv.Must(t, err)
			if !strings.Contains(string(text), says) || !strings.Contains(string(text), `shapectl_rule_level_bytes{device="eth0"`) {
				t.Errorf("%s, %q: %s", accept, encoding, text)
			}
		}
	}
}
