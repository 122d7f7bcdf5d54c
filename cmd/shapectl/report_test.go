package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/measure"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// recorded is a history of two hours: a rule and a pool at their rate in the second one. It is still being recorded.
func recorded(t *testing.T, path string) (h *history.History, begin time.Time) {
	t.Helper()
	h, err := history.Open(path, history.Limits{Boot: "test"}, func(s string) { t.Error(s) })
	testenv.Must(t, err)
	t.Cleanup(func() { h.Close() })
	begin = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	rule := history.Sample{Series: history.Series{Key: history.Key{Device: "eth0", Direction: "egress", Network: "10.0.0.7/32"}, Name: "alice", Rate: 8e6, Capacity: 300000}}
	pool := history.Sample{Series: history.Series{Key: history.Key{Pool: "up"}, Rate: 80e6, Capacity: 3e6}}
	other := history.Sample{Series: history.Series{Key: history.Key{Device: "eth0", Direction: "egress", Network: "10.0.0.8/32"}, Name: "up", Rate: 8e6, Capacity: 300000}}
	up, down := rule, rule
	up.Direction, up.Name, down.Name, down.Network = "ingress", "bob", "bob", "10.0.0.9/32"
	for i := range 721 {
		at := time.Duration(i) * history.DefaultInterval
		if i > 360 {
			rule.Passed, rule.Dropped = rule.Passed+10e6, rule.Dropped+2e6
			pool.Passed += 10e6
		}
		h.Add(history.Reading{Time: begin.Add(at), Mono: uint64(at) + 1e9, Policy: "sha256:00", Samples: []history.Sample{pool, rule, other, up, down}})
	}
	return h, begin
}

// A report is read from the file while it is recorded, as text, JSON and a page.
func TestReport(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "history")
	h, begin := recorded(t, path)
	r := &rig{t, nil}
	command := func(more ...string) []string {
		return append([]string{"report", "--since", begin.Format(time.RFC3339), "--until", begin.Add(2 * time.Hour).Format(time.RFC3339), "--history", path}, more...)
	}
	text := r.ok(command("--rule", "eth0 egress 10.0.0.7")...)
	for _, want := range []string{"eth0 egress 10.0.0.7/32, alice", "8mbit, the rate", "3.60 GB (3600000000 bytes)", "17% of the offered bytes", "50% of the measured time; longest 1h0m0s",
		"100% of what was offered up to the committed rate of", "all 360 intervals", "passed 8.00mbit, offered 9.60mbit", "sha256:00"} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}
	var all report.Deliveries
	testenv.Must(t, json.Unmarshal([]byte(r.ok(command("-j", "--name", "alice")...)), &all))
	if len(all) != 1 || all[0].PassedBytes != 3600e6 || all[0].Delivered != 360 || len(all[0].Periods) != 24 || len(all[0].Intervals) != 0 || len(all[0].Gaps) != 0 {
		t.Errorf("JSON: %+v", all)
	}
	testenv.Must(t, json.Unmarshal([]byte(r.ok("report", "-j", "--name", "alice", "--history", path, "--since", begin.Add(time.Hour).Format(time.RFC3339), "--until", begin.Add(62*time.Minute).Format(time.RFC3339))), &all))
	if got := all[0].Intervals; len(got) != 12 || got[11].PassedBits != 8e6 || got[11].OfferedBits != 9.6e6 {
		t.Errorf("intervals: %+v", got)
	}
	page := filepath.Join(t.TempDir(), "page.html")
	if got := r.ok(command("--pool", "up", "--committed", "8mbit", "--html", page)...); !strings.Contains(got, page) {
		t.Error(got)
	}
	if b, err := os.ReadFile(page); err != nil || !strings.Contains(string(b), "8mbit, as given") {
		t.Errorf("%v: %s", err, b)
	}
	if got := r.ok(command("--name", "up", "--html", page)...); got != "wrote "+page+", with 1 rule and 1 pool\n" {
		t.Error(got)
	}
	testenv.Must(t, json.Unmarshal([]byte(r.ok(command("-j", "--name", "bob", "--committed", "1mbit")...)), &all))
	if len(all) != 2 || *all[0].CommittedBits != 1e6 || *all[1].CommittedBits != 1e6 || all[0].Direction == all[1].Direction {
		t.Errorf("JSON of both directions: %+v", all)
	}
	r.refused(exitInput, "one rule or pool, but 1 rule and 1 pool match: 'eth0 egress 10.0.0.8/32', pool \"up\"; choose one by --rule 'DEV DIRECTION NETWORK' or --pool", command("--name", "up", "--committed", "1mbit")...)
	r.refused(exitInput, "no readings of pool down", command("--pool", "down")...)
	r.refused(exitInput, "give one of", command("--pool", "up", "--name", "up")...)
	r.refused(exitInput, "does not have three words", command("--rule", "eth0 egress")...)
	r.refused(exitInput, "is not a time", "report", "--pool", "up", "--since", "yesterday")
	r.refused(exitInput, "is not before", "report", "--pool", "up", "--since", "1h", "--until", "2h")
	r.refused(exitInput, "it is not a history of shapectl", command("--pool", "up", "--history", page)...)
	r.refused(exitInput, "name the file that its serve records by --history", "-n", "1", "report", "--pool", "up")
	r.ok(append([]string{"-n", "1"}, command("--pool", "up")...)...)
	r.refused(exitInput, "no such file", command("--pool", "up", "--history", page+"-")...)

	// A server that records answers from that, and opens no file for a request.
	e := &env{history: h, contents: map[string][]byte{}}
	n := 0
	testenv.Must(t, e.queryHistory("/nonexistent", history.Query{From: begin, To: begin.Add(time.Hour), Match: func(*history.Series) bool { return true }},
		func(history.Interval) error { n++; return nil }))
	if n != 5*360 {
		t.Errorf("%d intervals", n)
	}
	e.history = nil
	if err := e.queryHistory(path, history.Query{}, nil); err == nil || !strings.Contains(err.Error(), "keeps no history") {
		t.Errorf("a request read a file: %v", err)
	}
}

// TestReportJudges sees that an interval is missed only if as much as is committed was offered all the time: not where traffic
// begins, ends or is too little.
func TestReportJudges(t *testing.T) {
	h, err := history.Open("", history.Limits{Boot: "test"}, func(s string) { t.Error(s) })
	testenv.Must(t, err)
	defer h.Close()
	s := history.Sample{Series: history.Series{Key: history.Key{Device: "eth0", Direction: "egress", Network: "10.0.0.7/32"}, Rate: 8e6, Capacity: 300000}}
	begin := time.Now().Add(-time.Hour).Truncate(time.Second)
	const mb = 1_000_000
	for i, c := range [][2]uint64{ // what passes and is dropped; 10 MB are committed in 10 s
		{}, {}, {4 * mb, 9 * mb}, {10 * mb, 10 * mb}, {10 * mb, 10 * mb}, {3 * mb, 17 * mb}, {10 * mb, 10 * mb}, {6 * mb, 6 * mb}, {}, {7 * mb, 2 * mb}, {7 * mb, 2 * mb}, {7 * mb, 2 * mb}, {},
	} {
		s.Passed, s.Dropped = s.Passed+c[0], s.Dropped+c[1]
		at := time.Duration(i) * history.DefaultInterval
		h.Add(history.Reading{Time: begin.Add(at), Mono: uint64(at) + 1e9, Samples: []history.Sample{s}})
	}
	var out bytes.Buffer
	e := &env{out: &out, err: &out, getenv: os.Getenv, history: h}
	if code := e.run([]string{"report", "-j", "--rule", "eth0 egress 10.0.0.7"}); code != exitDone {
		t.Fatalf("exit %d: %s", code, &out)
	}
	var all report.Deliveries
	testenv.Must(t, json.Unmarshal(out.Bytes(), &all))
	if d := all[0]; d.Checked != 4 || d.Delivered != 3 || d.Undecided != 5 || len(d.Missed) != 1 || d.Missed[0].PassedBytes != 3*mb {
		t.Errorf("checked %d, delivered %d, undecided %d, missed %+v", d.Checked, d.Delivered, d.Undecided, d.Missed)
	}
}

func TestParseMoment(t *testing.T) {
	now := time.Date(2026, 3, 2, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]string{
		"24h": "2026-03-01 12:00:00", "7d": "2026-02-23 12:00:00", "0.5d": "2026-03-02 00:00:00", "90m": "2026-03-02 10:30:00", "11:59": "2026-03-02 11:59:00",
		"12:01": "2026-03-01 12:01:00", "2026-01-31": "2026-01-31 00:00:00", "2026-01-31 14:00": "2026-01-31 14:00:00", "2026-01-31T14:00:01Z": "2026-01-31 14:00:01",
	} {
		if got, err := parseMoment(text, now); err != nil || got.Format(time.DateTime) != want {
			t.Errorf("%s is %v, %v; want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "yesterday", "-1h", "-1d", "1e300d", "NaNd", "24"} {
		if got, err := parseMoment(text, now); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}

// What serve records is what the counters say, with the hash of what export prints.
func TestRecorder(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "10mbit", "--name", "net")
	r.ok("set", "up", "--new", "--rate", "20mbit")
	var said []string
	h, err := history.Open("", history.Limits{Interval: 1}, func(s string) { said = append(said, s) })
	testenv.Must(t, err)
	defer h.Close()
	e := &env{getenv: func(name string) string { return r.env[name] }, history: h}
	c := &recorder{env: e, reader: &measure.Reader{Options: loader.Options{BPFFS: r.bpffs()}}, say: func(s string) { said = append(said, s) }}
	defer c.reader.Close()
	c.record()
	first := c.policy
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit", "--name", "net")
	c.record()
	c.record()
	if first == c.policy || c.policy != fmt.Sprintf("sha256:%s", sha256Of(r.ok("export"))) {
		t.Errorf("hashes %s and %s", first, c.policy)
	}
	var found []string
	testenv.Must(t, h.Query(history.Query{From: time.Now().Add(-time.Hour), To: time.Now().Add(time.Hour), Match: func(*history.Series) bool { return true }}, func(it history.Interval) {
		found = append(found, fmt.Sprintf("%v %q %v", it.Series.Key, it.Series.Name, policy.Rate(it.Series.Rate)))
	}))
	want := []string{`va egress 10.0.0.0/24 "net" 20mbit`, `va egress 10.0.0.0/24 "net" 20mbit`, `pool up "" 20mbit`, `pool up "" 20mbit`}
	for _, w := range want {
		if !strings.Contains(strings.Join(found, "\n"), w) || len(found) != len(want) {
			t.Errorf("recorded %q", found)
		}
	}
	if len(said) > 0 {
		t.Error(said)
	}
}

// TestReportOfColoursAndPools sees that a report knows what colours and pools commit, by what serve records.
func TestReportOfColoursAndPools(t *testing.T) {
	r := newRig(t)
	r.ok("set", "isp", "--new", "--rate", "20mbit")
	r.ok("set", "home", "--new", "--rate", "50mbit", "--within", "isp")
	r.ok("set", "va", "egress", "10.0.0.1", "--rate", "unlimited", "--within", "home", "--name", "alice")
	r.ok("set", "va", "egress", "10.0.0.2", "--rate", "1mbit", "--algorithm", "srtcm", "--colour-aware", "--name", "bob")
	h, err := history.Open("", history.Limits{Interval: 1}, func(s string) { t.Error(s) })
	testenv.Must(t, err)
	defer h.Close()
	var out bytes.Buffer
	e := &env{out: &out, err: &out, getenv: func(name string) string { return r.env[name] }, history: h}
	c := &recorder{env: e, reader: &measure.Reader{Options: loader.Options{BPFFS: r.bpffs()}}, say: func(s string) { t.Error(s) }}
	defer c.reader.Close()
	c.record()
	c.record()
	for name, want := range map[string]string{
		"alice": "none: within pool home without a guarantee; the rate is 20mbit, of its pools",
		"bob":   "none that can be checked: packets come in with colours; the rate is 1mbit",
	} {
		out.Reset()
		if code := e.run([]string{"report", "--name", name}); code != exitDone || !strings.Contains(bare(out.String()), want) {
			t.Errorf("exit %d, not %q: %s", code, want, &out)
		}
	}
}

// What a pool drops goes on when rules join and leave it, and when serve is started again. A rule has one series, also if
// a deleted device with the same name left another one.
func TestRecordedDropsOfPool(t *testing.T) {
	all := func(within string, dropped ...uint64) report.Rules {
		rules := report.Rules{{Kind: report.KindPool, Name: "up"}}
		for i, bytes := range dropped {
			rules = append(rules, report.Rule{Kind: report.KindRule, Device: "va", Direction: "egress", CIDR: fmt.Sprintf("10.0.0.%d/32", i), DroppedBytes: bytes, DroppedPackets: bytes / 1000})
		}
		rules[1].Within, rules[len(rules)-1].Within = "up", within
		return rules
	}
	c := &recorder{}
	dropped := uint64(0)
	expect := func(rules report.Rules, grown uint64) []history.Sample {
		t.Helper()
		rules[0].DroppedBytes = 1e12 // the sum of the rules that are within it now
		samples := c.samples(rules)
		if samples[0].Pool != "up" || samples[0].Dropped != dropped+grown {
			t.Errorf("%d bytes dropped; want %d more than %d", samples[0].Dropped, grown, dropped)
		}
		dropped = samples[0].Dropped
		return samples
	}
	expect(all("", 50_000, 7_000_000), 0)
	expect(all("up", 60_000, 8_000_000), 10_000) // the other one joins
	last := expect(all("up", 60_000, 8_005_000), 5000)
	c = &recorder{}
	c.lost.Resume(last)
	expect(all("up", 60_000, 8_006_000), 1000)
	expect(all("", 61_000, 9_000_000), 1000) // it leaves
	twice := all("", 62_000, 9_000_000)
	deleted, no := twice[1], false
	deleted.Attached, deleted.DroppedBytes = &no, 1
	if samples := expect(append(report.Rules{twice[0], deleted}, twice[1:]...), 1000); len(samples) != 3 {
		t.Errorf("%d series", len(samples))
	}
}

func sha256Of(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }
