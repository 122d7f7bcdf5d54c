package metrics_test

import (
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/metrics"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/maps"
)

// A source is readings that a test makes up.
type source struct {
	reading *measure.Reading
	err     error
	told    []string
}

func (s *source) exporter() *metrics.Exporter {
	return metrics.New(metrics.Options{
		Version: "v1.2.3", Layout: "00ff", OnError: func(err error) { s.told = append(s.told, err.Error()) },
		Read: func() (*measure.Reading, error) { return s.reading, s.err },
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
	home, isp := aPool("home", "isp"), aPool("isp", "")
	home.GuaranteeBits, home.ActiveSharers, home.RefusedBytes, home.RefusedPackets = number(2e6), number(1), 19, 20
	home.DelayedBytes, home.DelayedPackets, home.MarkedPackets = 21, 22, 23
	return &measure.Reading{
		Time: time.Unix(1700000000, 0), Rules: report.Rules{home, isp, queue, host}, RevertsInNS: number(60e9), Slots: maps.Slots{All: 1 << 20, InUse: 7},
		Fullest: []report.FullBucket{report.NewFullBucket(&host, report.Bucket{Key: "2001:db8::7", LevelBytes: 24}, 1)},
	}
}

// The whole answer for rules and pools that have everything.
func TestMetrics(t *testing.T) {
	s := source{reading: everything()}
	text := scrape(t, s.exporter())
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
