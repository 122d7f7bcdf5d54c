package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/history"
	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/internal/testenv/browser"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/policy"
)

// recorded is a history of two hours: a rule and a pool at their rate in the second one. It is still being recorded.
func recorded(t *testing.T, path string) (h *history.History, begin time.Time) {
	t.Helper()
	h = history.Open(path, history.Options{Boot: "test"}, func(s string) { t.Error(s) })
	t.Cleanup(func() { h.Close() })
	begin = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	of := func(device, direction, network, name string) history.Sample {
		return history.Sample{Series: &history.Series{Key: history.Key{Device: device, Direction: direction, Network: network}, Name: name, Rate: 8e6, Capacity: 300000}}
	}
	rule, other := of("eth0", "egress", "10.0.0.7/32", "alice"), of("eth0", "egress", "10.0.0.8/32", "up")
	down, up := of("eth0", "egress", "10.0.0.9/32", "bob"), of("eth0", "ingress", "10.0.0.7/32", "bob")
	pool := history.Sample{Series: &history.Series{Key: history.Key{Pool: "up"}, Rate: 80e6, Capacity: 3e6}}
	for i := range 721 {
		at := time.Duration(i) * history.Interval
		if i > 360 {
			rule.Passed, rule.Dropped = rule.Passed+10e6, rule.Dropped+2e6
			pool.Passed += 10e6
		}
		h.Add(history.Reading{Time: begin.Add(at), Mono: uint64(at) + 1e9, Samples: []history.Sample{pool, rule, other, up, down}})
	}
	return h, begin
}

// TestReport sees that a report is read from the files while they are recorded, as text, JSON and a page.
func TestReport(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "history")
	h, begin := recorded(t, path)
	r := &rig{t, nil}
	command := func(more ...string) []string {
		return append([]string{"report", "--since", begin.Format(time.RFC3339), "--until", begin.Add(2 * time.Hour).Format(time.RFC3339), "--history", path}, more...)
	}
	of := func(more ...string) (all report.Deliveries) {
		t.Helper()
		testenv.Must(t, json.Unmarshal([]byte(r.ok(command(append(more, "-j")...)...)), &all))
		return all
	}
	text := r.ok(command("eth0", "egress", "10.0.0.7")...)
	for _, want := range []string{"eth0 egress 10.0.0.7, alice", "8mbit, the rate", "3.60 GB (3600000000 bytes)", "17% of the offered bytes", "50% of the measured time",
		"100% of what was offered up to the committed rate passed", "delivered in 360 of 360 intervals", "passed 8.00mbit, offered 9.60mbit"} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}
	if all := of("alice"); len(all) != 1 || all[0].PassedBytes != 3600e6 || all[0].Delivered != 360 || len(all[0].Periods) != 24 || len(all[0].Gaps) != 0 {
		t.Errorf("JSON: %+v", all)
	}
	if all := of("bob", "--committed", "1mbit"); len(all) != 2 || *all[0].CommittedBits != 1e6 || *all[1].CommittedBits != 1e6 || all[0].Direction == all[1].Direction {
		t.Errorf("JSON of both directions: %+v", all)
	}
	if all := of("10.0.0.7"); len(all) != 2 || all[0].Name != "alice" || all[1].Name != "bob" {
		t.Errorf("JSON of an address: %+v", all)
	}
	if all := of("eth0"); len(all) != 2 || all[0].Rules != 3 || all[1].Rules != 1 || all[0].PassedBytes != 3600e6 {
		t.Errorf("JSON of a device: %+v", all)
	}
	page := filepath.Join(t.TempDir(), "page.html")
	if got := r.ok(command("up", "--html", page)...); got != "wrote "+page+"\n" {
		t.Error(got)
	}
	tab := browser.New(t)
	tab.Open("file://" + page)
	tab.Until("two plots", `document.querySelectorAll("canvas").length === 2 && document.querySelectorAll("dt").length > 10`)
	if text := tab.Text("main"); !strings.Contains(text, "Delivered rates of") || !strings.Contains(text, `pool "up"`) {
		t.Errorf("the page says %s", text)
	}
	tab.Harmless("file://" + page)
	fifo, to := page+".fifo", page+".link"
	testenv.Must(t, errors.Join(unix.Mkfifo(fifo, 0o600), os.Symlink(page, to)))
	for _, path := range []string{fifo, to, "-"} {
		r.refused(exitInput, "is not a regular file", command("up", "--html", path)...)
	}
	r.refused(exitInput, `no readings of "down" from`, command("down")...)
	r.refused(exitInput, "is not a time", "report", "up", "--since", "yesterday")
	r.refused(exitInput, "is not before", "report", "up", "--since", "1h", "--until", "2h")
	r.refused(exitInput, "name the directory that its serve records by --history", "-n", "1", "report", "up")
	r.ok(append([]string{"-n", "1"}, command("up")...)...)
	r.refused(exitInput, "not a directory", command("up", "--history", page)...)
	r.refused(exitInput, "no such file", command("up", "--history", page+"-")...)

	// A server that records answers from that, and opens no file for a request.
	e := &env{history: h, contents: map[string][]byte{}}
	q := history.Request{Since: begin, Until: begin.Add(time.Hour), Name: "alice"}
	if all, err := e.deliveries("/nonexistent", q); err != nil || len(all) != 1 {
		t.Error(all, err)
	}
	e.history = nil
	if _, err := e.deliveries(path, q); err == nil || !strings.Contains(err.Error(), "keeps no history") {
		t.Errorf("a request read a file: %v", err)
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

// TestRecorder sees that what serve records is what the kernel counts, and that a report knows what colours and pools commit.
func TestRecorder(t *testing.T) {
	r := newRig(t)
	r.ok("set", "isp", "--new", "--rate", "20mbit")
	r.ok("set", "home", "--new", "--rate", "50mbit", "--within", "isp", "--guarantee", "5mbit")
	r.ok("set", "va", "egress", "10.0.0.1", "--rate", "unlimited", "--within", "home", "--name", "alice")
	r.ok("set", "va", "egress", "10.0.0.2", "--rate", "1mbit", "--algorithm", "srtcm", "--colour-aware", "--name", "bob")
	r.ok("set", "va", "egress", "10.0.0.3", "--rate", "2mbit", "--within", "home", "--name", "carol")
	r.ok("set", "va", "egress", "10.0.0.4", "--rate", "1gbit", "--quota", "10kb/month", "--then", "8kbit", "--name", "dave")
	h := history.Open("", history.Options{}, func(s string) { t.Error(s) })
	defer h.Close()
	var out bytes.Buffer
	e := &env{out: &out, err: &out, getenv: func(name string) string { return r.env[name] }, history: h}
	c := &recorder{env: e, shared: live.NewShared(&live.Reader{Options: loader.Options{BPFFS: r.bpffs()}}, 1), say: func(s string) { t.Error(s) }}
	c.record(t.Context())
	c.record(t.Context())
	r.ok("set", "carol", "--rate", "3mbit")
	r.send("10.0.0.4", 20, 1000)
	c.record(t.Context())
	for name, wants := range map[string][]string{
		"alice": {"none: within pool home without a guarantee; the rate is unlimited within home, 50mbit, guarantee 5mbit isp, 20mbit"},
		"bob":   {"none that can be checked: packets come in with colours; the rate is 1mbit"},
		"carol": {"none: within pool home without a guarantee; the rate is 3mbit", "rate 2mbit -> 3mbit"},
		"dave":  {"none: the limit is also what follows the quota: 8kbit", "quota 10kb/month, 90% used", "other limit none -> what follows"},
		"home":  {`pool "home"`, "5mbit, the guarantee; the rate is 50mbit within isp, 20mbit"},
	} {
		out.Reset()
		code := e.run([]string{"report", name})
		for _, want := range wants {
			if code != exitDone || !strings.Contains(bare(out.String()), want) {
				t.Errorf("exit %d, not %q: %s", code, want, &out)
			}
		}
	}
	var found []string
	reader, err := h.Reader()
	testenv.Must(t, err)
	defer reader.Close()
	testenv.Must(t, reader.Query(time.Now().Add(-time.Hour), time.Now().Add(time.Hour), func(*history.Series) bool { return true }, func(reading *history.Reading) {
		found = nil
		for _, s := range reading.Samples {
			found = append(found, fmt.Sprintf("%s%s %v %s %s", s.Pool, s.Name, policy.Rate(s.Rate), s.Within, s.Yellow))
		}
	}))
	if slices.Sort(found); !slices.Equal(found, []string{"alice 0 home ", "bob 1mbit  pass", "carol 3mbit home ", "dave 1gbit  ", "home 50mbit isp ", "isp 20mbit  "}) {
		t.Errorf("recorded %q", found)
	}
}
