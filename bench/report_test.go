package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// result is a figure whose quartiles are a tenth away.
func result(suite, name, subject, unit string, median float64) Result {
	return Result{Suite: suite, Case: name, Subject: subject, Unit: unit, Median: median, Low: 0.9 * median, High: 1.1 * median, Rounds: 9}
}

var sample = []Result{
	result("setup", "time to load rules: 1 000", "shapectl gcra", unitSeconds, 0.02),
	result("setup", "time to load rules: 1 000", "nft", unitSeconds, 0.01),
	result("setup", "time to load rules: 100 000", "shapectl gcra", unitSeconds, 0.3),
	result("setup", "time to load rules: 100 000", "nft", unitSeconds, 4),
	{Suite: "setup", Case: "time to load rules: 1 000 000", Subject: "nft", Unit: unitSeconds, Note: "too long"},
	result("setup", "time to load rules: 1 000 000", "shapectl gcra", unitSeconds, 2.5),
	result("program", "packets: of one CPU", "shapectl gcra", unitNanoseconds, 100),
	result("program", "packets: of one CPU", "shapectl gcra", unitClock, 1.5),
	result("program", "packets: of one CPU", "trie", unitNanoseconds, 105),
	result("program", "packets: of two CPUs", "trie", unitNanoseconds, 60),
	result("program", "packets: of two CPUs", "shapectl gcra", unitNanoseconds, 62),
	result("program", "packets: of two CPUs", "shapectl leaky", unitNanoseconds, 59),
}

func TestTables(t *testing.T) {
	tables := tablesOf("setup", sample)
	if len(tables) != 1 {
		t.Fatalf("%d tables, want one", len(tables))
	}
	want := `| s | 1 000 | 100 000 | 1 000 000 |
|---|--:|--:|--:|
| shapectl gcra | 0.02 (0.018–0.022) | 0.3 (0.27–0.33) | 2.5 (2.25–2.75) |
| nft | 0.01 (0.009–0.011) | 4 (3.6–4.4) | - |

Rounds: 9.

- nft: no figure for 1 000 000: too long
`
	if got := tables[0].Markdown(); got != want {
		t.Errorf("one unit:\n%s\nwant:\n%s", got, want)
	}
	want = `|  |  | ns | x clock |
|---|---|--:|--:|
| of one CPU | shapectl gcra | 100 (90–110) | 1.5 (1.35–1.65) |
| of one CPU | trie | 105 (94.5–116) |  |
| of two CPUs | shapectl gcra | 62 (55.8–68.2) |  |
| of two CPUs | trie | 60 (54–66) |  |
| of two CPUs | shapectl leaky | 59 (53.1–64.9) |  |

Rounds: 9.

`
	if got := tablesOf("program", sample)[0].Markdown(); got != want {
		t.Errorf("two units:\n%s\nwant:\n%s", got, want)
	}
}

func TestWins(t *testing.T) {
	got := winTable(sample)
	_, rows, _ := strings.Cut(got, "|---|---|---|\n")
	want := `| packets, ns | trie | of two CPUs: ~60 against 62 (gcra) |
| time to load rules, s | nft | 1 000: 0.01 against 0.02 |

`
	if rows != want {
		t.Errorf("peers win:\n%s\nwant:\n%s", rows, want)
	}
	_, rows, _ = strings.Cut(winTable([]Result{
		result("queue", "flow: 1mbit", "shapectl gcra", unitGoodput, 99),
		result("queue", "flow: 1mbit", "CAKE", unitGoodput, 98),
		result("queue", "flow: 1mbit", "shapectl gcra", unitPing99, 60),
		result("queue", "flow: 1mbit", "CAKE", unitPing99, 21),
		result("queue", "gaps: 1", "shapectl gcra", unitGaps, 60),
		result("queue", "gaps: 1", "CAKE", unitGaps, 21),
	}), "|---|---|---|\n")
	if want = "| flow, ping p99, ms | CAKE | 1mbit: 21 against 60 |\n\n"; rows != want {
		t.Errorf("a peer wins in a unit that is not the first:\n%s\nwant:\n%s", rows, want)
	}
	if got := winTable(sample[2:4]); got != "In no case here.\n" {
		t.Errorf("no peer wins, but:\n%s", got)
	}
}

func TestGoals(t *testing.T) {
	line := func(results []Result, what string) string {
		for l := range strings.Lines(goalTable(results)) {
			if strings.HasPrefix(l, "| "+what+" |") {
				return l
			}
		}
		t.Fatalf("no target is called %q", what)
		return ""
	}
	million := func(s float64) []Result {
		return []Result{
			result("setup", "time to load rules: 1 000 000", "shapectl gcra", unitSeconds, 1),
			result("setup", "time to load rules: 1 000 000", "shapectl gcra, each host", unitSeconds, s),
		}
	}
	police := func(ours float64) []Result {
		return []Result{
			result("instructions", neverBite, "tc police", unitInstructions, 400),
			result("instructions", neverBite, "shapectl gcra, each all", unitInstructions, ours),
		}
	}
	cpus := func(leaky float64) []Result {
		return []Result{
			result("program", "packets of two CPUs: one bucket", "shapectl gcra", unitOneCPU, 1.8),
			result("program", "packets of two CPUs: one bucket", "shapectl leaky", unitOneCPU, leaky),
		}
	}
	delivered := func(peer float64) []Result {
		return []Result{
			result("accuracy", "error: 1 mbit", "shapectl gcra", unitMillionths, 1000),
			result("accuracy", "error: 1 mbit", "tc police", unitMillionths, peer),
			result("accuracy", "error: 20 mbit", "shapectl gcra", unitMillionths, 500),
			result("accuracy", "error: 20 mbit", "tc police", unitMillionths, 100_000),
		}
	}
	for _, c := range []struct {
		what    string
		results []Result
		ends    string
	}{
		{"a million rules loaded into the kernel", nil, "| not measured |  |\n"},
		{"a million rules loaded into the kernel", million(2)[:1], "| not measured |  |\n"},
		{"a million rules loaded into the kernel", million(2), "| at most 3 s | 2 | yes |\n"},
		{"a million rules loaded into the kernel", million(3.5), "| 3.5 | **no** |\n"},
		{"`each all` adds fewer instructions than `tc police`", police(300), "| 0.75 | yes |\n"},
		{"`each all` adds fewer instructions than `tc police`", police(500), "| 1.25 | **no** |\n"},
		{"one bucket, packets of two CPUs", cpus(1.6), "| at least 1.6 x one CPU | 1.6 | yes |\n"},
		{"one bucket, packets of two CPUs", cpus(1.4), "| 1.4 | **no** |\n"},
		{"error of the rate: every peer's by ours", delivered(20_000), "| 20 | yes |\n"},
		{"error of the rate: every peer's by ours", delivered(5_000), "| 5 | **no** |\n"},
	} {
		if got := line(c.results, c.what); !strings.HasSuffix(got, c.ends) {
			t.Errorf("%s, want it to end with %s", got, c.ends)
		}
	}
}

// Every target about the suites here names figures that they yield.
func TestGoalsNameFigures(t *testing.T) {
	for _, g := range goals {
		for _, f := range append(g.figures, g.explain...) {
			if _, known := units[f.unit]; !known {
				t.Errorf("%s: no unit is called %q", g.what, f.unit)
			}
		}
	}
}

func TestReportWritesWhatItReads(t *testing.T) {
	dir := t.TempDir()
	stale := filepath.Join(dir, chartPrefix+"of-a-table-that-is-gone.svg")
	if err := os.WriteFile(stale, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	r := report{
		Machine: machine{CPU: "a CPU", CPUs: 2, Kernel: "6.18"},
		Runs: map[string]measured{
			"setup":   {Date: "2026-01-02", Shapectl: "v1"},
			"program": {Date: "2026-01-03", Shapectl: "v1", Quick: true},
		},
		Results: sample,
	}
	if err := r.write(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(stale); !os.IsNotExist(err) {
		t.Errorf("a chart without a table is still there: %v", err)
	}
	again, err := readReport(dir)
	if err != nil {
		t.Fatal(err)
	}
	var one, two bytes.Buffer
	if err := errors.Join(r.markdown(&one), again.markdown(&two)); err != nil {
		t.Fatal(err)
	}
	if one.String() != two.String() {
		t.Error("the figures read back make another report")
	}
	text := one.String()
	for _, want := range []string{
		"| CPU | a CPU |", "Measured 2026-01-02, shapectl v1.\n", "Measured 2026-01-03, shapectl v1; **a quick run",
		"## Setting up and changing rules", "### time to load rules", "| nft | 1 000: 0.01 against 0.02 |",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report does not say %q", want)
		}
	}
	// Each chart that the text shows is there, and is XML.
	var charts int
	for line := range strings.Lines(text) {
		if _, rest, ok := strings.Cut(line, "]("+chartPrefix); ok {
			charts++
			f, err := os.Open(filepath.Join(dir, chartPrefix+strings.TrimSuffix(strings.TrimSpace(rest), ")")))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for d := xml.NewDecoder(f); err == nil; _, err = d.Token() {
			}
			if !errors.Is(err, io.EOF) {
				t.Errorf("%s: %v", f.Name(), err)
			}
		}
	}
	if charts != 2 {
		t.Errorf("the report shows %d charts, want one for each of two tables", charts)
	}
}

// What noise makes of a small difference can be below zero, which a logarithmic axis does not show.
func TestChartsOfAnyFigures(t *testing.T) {
	low := result("setup", "t: 1", "a", unitSeconds, 0.001)
	low.Low = -1
	for _, results := range [][]Result{
		{low, result("setup", "t: 1 000", "a", unitSeconds, 100)},
		{result("setup", "t: 1", "a", unitSeconds, -1), result("setup", "t: 1 000", "a", unitSeconds, 0)},
		{{Suite: "setup", Case: "t: 1", Subject: "a", Unit: unitSeconds}, {Suite: "setup", Case: "t: 2", Subject: "a", Unit: unitSeconds}},
		{result("setup", "t", "a", unitSeconds, -1)},
		{{Suite: "setup", Case: "t", Subject: "a", Unit: unitSeconds}},
		{result("queue", "t: 1mbit", "a", unitGoodput, 90), result("queue", "t: 1mbit", "a", unitPing50, 0), result("queue", "t: 1mbit", "a", unitPing99, 0)},
		{result("queue", "t: 1mbit", "a", unitGoodput, 90), result("queue", "t: 1mbit", "b", unitPing50, 1), {Suite: "queue", Case: "t: 2mbit", Subject: "a", Unit: unitPing99}},
		{result("queue", "gaps: 0.9", "a", unitGaps, 1), result("queue", "gaps: 1.1", "a", unitGaps, 99)},
	} {
		if data, err := tablesOf(results[0].Suite, results)[0].chart(); err != nil || len(data) == 0 {
			t.Errorf("%+v: %d bytes, %v", results, len(data), err)
		}
	}
}

// Each rate has a picture of its own in a chart of the suite queue.
func TestPictureForEachRate(t *testing.T) {
	var results []Result
	for _, rate := range []string{"1mbit", "10mbit"} {
		for unit, median := range map[string]float64{
			"flow: " + unitGoodput: 99, "flow: " + unitPing50: 21, "flow: " + unitPing99: 69, "gaps: " + unitGap1: 0.5, "gaps: " + unitGap50: 1, "gaps: " + unitGap99: 3,
		} {
			table, unit, _ := strings.Cut(unit, ": ")
			results = append(results, result("queue", table+": "+rate, "TBF", unit, median))
		}
	}
	for _, table := range tablesOf("queue", results) {
		data, err := table.chart()
		if err != nil {
			t.Fatal(err)
		}
		says := []string{">" + table.Title + ": 1mbit<", ">" + table.Title + ": 10mbit<", ">TBF<"}
		if table.Title == "flow" {
			says = append(says, ">30<", ">50<") // numbers on an axis without a power of ten
		}
		for _, want := range says {
			if !strings.Contains(string(data), want) {
				t.Errorf("the chart of %q does not say %q", table.Title, want)
			}
		}
	}
}

func TestKeep(t *testing.T) {
	before := report{
		Machine: machine{CPU: "a CPU"},
		Runs:    map[string]measured{"setup": {Date: "2026-01-02"}, "program": {Date: "2026-01-02"}},
		Results: sample,
	}
	now := report{Machine: machine{CPU: "a CPU"}}
	if err := now.keep(before, []string{"program"}); err != nil {
		t.Fatal(err)
	}
	if len(now.Runs) != 1 || len(now.Results) != 6 || now.Results[0].Suite != "setup" {
		t.Errorf("kept %v and %d results, want the 6 of setup", now.Runs, len(now.Results))
	}
	if len(before.Runs) != 2 || len(before.Results) != len(sample) {
		t.Error("keeping has changed what was kept")
	}
	now = report{Machine: machine{CPU: "another CPU"}}
	if err := now.keep(before, []string{"program"}); err == nil {
		t.Error("figures of two machines go together")
	}
}

func TestTogether(t *testing.T) {
	const ms = time.Millisecond
	alone := []burst{{0, 10 * ms, 10 * ms}, {10 * ms, 20 * ms, 10 * ms}}
	rate, ok := together([][]burst{alone})
	if want := burstPackets / 0.01; !ok || rate != want {
		t.Errorf("one CPU alone: %v packets a second, want %v", rate, want)
	}
	// The first CPU's first burst, and the second one's last, had no company.
	both := [][]burst{
		{{0, 10 * ms, 1 * ms}, {10 * ms, 20 * ms, 10 * ms}, {20 * ms, 30 * ms, 10 * ms}},
		{{10 * ms, 30 * ms, 20 * ms}, {30 * ms, 31 * ms, 1 * ms}},
	}
	rate, ok = together(both)
	if want := burstPackets/0.01 + burstPackets/0.02; !ok || rate != want {
		t.Errorf("two CPUs: %v packets a second, want %v", rate, want)
	}
	if _, ok := together([][]burst{{{0, 5 * ms, 5 * ms}}, {{6 * ms, 9 * ms, 3 * ms}}}); ok {
		t.Error("CPUs that were never at work together have a rate together")
	}
}
