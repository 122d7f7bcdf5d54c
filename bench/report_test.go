package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shapectl/shapectl/internal/testenv"
)

// result is a figure with quartiles at 90 % and 110 %.
func result(suite, name, subject, unit string, median float64) Result {
	return Result{Suite: suite, Case: name, Subject: subject, Unit: unit, Median: median, Low: 0.9 * median, High: 1.1 * median, Rounds: 9}
}

var sample = []Result{
	result("setup", "Time to load rules: 1 000", "shapectl gcra", unitSeconds, 0.02),
	result("setup", "Time to load rules: 1 000", "nft", unitSeconds, 0.01),
	result("setup", "Time to load rules: 100 000", "shapectl gcra", unitSeconds, 0.3),
	result("setup", "Time to load rules: 100 000", "nft", unitSeconds, 4),
	{Suite: "setup", Case: "Time to load rules: 1 000 000", Subject: "nft", Unit: unitSeconds, Note: "too long"},
	result("setup", "Time to load rules: 1 000 000", "shapectl gcra", unitSeconds, 2.5),
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

// The summary counts the cases in which a peer beats every mode, beyond the quartiles.
func TestLeadTable(t *testing.T) {
	_, got, _ := strings.Cut(leadTable(append([]Result{
		result("setup", "Time to load rules: 10", "shapectl leaky", unitSeconds, 0.005), // as fast as no peer
		result("setup", "Time to load rules: 10", "shapectl gcra", unitSeconds, 0.03),
		result("setup", "Time to load rules: 10", "nft", unitSeconds, 0.01),
		result("setup", "Kernel memory of rules: 10", "shapectl gcra", unitMiB, 4),
		result("setup", "Kernel memory of rules: 10", "nft", unitMiB, 1),
		result("setup", "Kernel memory of rules: 10", "HTB", unitMiB, 9),
		result("queue", "flow: 1mbit", "shapectl gcra", unitGoodput, 50),
		result("queue", "flow: 1mbit", "CAKE", unitGoodput, 98),
		result("hooks", "t: 1", "shapectl", unitSeconds, 1), // without a peer
	}, sample...)), "|---|---|---|\n")
	want := `| [Cost of the program](bench/program.md) | none |  |
| [Queueing instead of dropping](bench/queue.md) | CAKE 1 of 1 | flow: 1mbit, goodput, %: CAKE 98, ours 50 |
| [Loading and changing rules](bench/setup.md) | nft 2 of 4 | Kernel memory of rules: 10, MiB: nft 1, ours 4 |
`
	if got != want {
		t.Errorf("peers lead:\n%s\nwant:\n%s", got, want)
	}
}

func TestGoals(t *testing.T) {
	line := func(results []Result, what string) string {
		for l := range strings.Lines(goalTable(results, true)) {
			if strings.HasPrefix(l, "| "+what+" |") {
				return l
			}
		}
		t.Fatalf("no target is called %q", what)
		return ""
	}
	million := func(s float64) []Result {
		return []Result{
			result("setup", "Time to load rules: 1 000 000", "shapectl gcra", unitSeconds, 1),
			result("setup", "Time to load rules: 1 000 000", "shapectl gcra, each host", unitSeconds, s),
		}
	}
	police := func(ours float64) []Result {
		return []Result{
			result("instructions", allConform, "tc police", unitInstructions, 400),
			result("instructions", allConform, "shapectl gcra, each all", unitInstructions, ours),
		}
	}
	cpus := func(leaky float64) []Result {
		return []Result{
			result("program", "Throughput of two CPUs: one bucket", "shapectl gcra", unitOneCPU, 1.8),
			result("program", "Throughput of two CPUs: one bucket", "shapectl leaky", unitOneCPU, leaky),
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
		{"load a million rules into the kernel", nil, "| not measured |  |\n"},
		{"load a million rules into the kernel", million(2)[:1], "| not measured |  |\n"},
		{"load a million rules into the kernel", million(2), "| at most 3 s | 2 | yes |\n"},
		{"load a million rules into the kernel", million(3.5), "| 3.5 | **no** |\n"},
		{"`each all`, instructions relative to `tc police`", police(300), "| 0.75 | yes |\n"},
		{"`each all`, instructions relative to `tc police`", police(500), "| 1.25 | **no** |\n"},
		{"throughput of two CPUs with one bucket", cpus(1.6), "| at least 1.6 x one CPU | 1.6 | yes |\n"},
		{"throughput of two CPUs with one bucket", cpus(1.4), "| 1.4 | **no** |\n"},
		{"rate error of the best peer, relative to ours", delivered(20_000), "| 20 | yes |\n"},
		{"rate error of the best peer, relative to ours", delivered(5_000), "| 5 | **no** |\n"},
	} {
		if got := line(c.results, c.what); !strings.HasSuffix(got, c.ends) {
			t.Errorf("%s, want it to end with %s", got, c.ends)
		}
	}
}

// Each target and each chart of the summary names figures of the report in docs, and the pages there are those of
// this program.
func TestReportInDocs(t *testing.T) {
	const docs = "../docs"
	r, err := readReport(docs)
	testenv.Must(t, err)
	for _, g := range goals {
		if _, ok := g.value(r.Results); !ok {
			t.Errorf("the target %q names figures that do not exist", g.what)
		}
	}
	if n := len(slices.Concat(leads(r.Results)...)); n != len(allLeads) {
		t.Errorf("the summary has %d charts of %d", n, len(allLeads))
	}
	dir := t.TempDir()
	testenv.Must(t, r.write(dir))
	pages, err := filepath.Glob(filepath.Join(dir, "bench", "*.md"))
	testenv.Must(t, err)
	for _, path := range append(pages, filepath.Join(dir, summaryFile)) {
		name := strings.TrimPrefix(path, dir)
		want, err := os.ReadFile(path)
		testenv.Must(t, err)
		got, err := os.ReadFile(docs + name)
		testenv.Must(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("docs%s is out of date: run  make bench BENCH_FLAGS=-render", name)
		}
	}
}

// A report has a summary, an index and a page for each suite, with links and charts that exist.
func TestReportPages(t *testing.T) {
	dir := t.TempDir()
	r := report{
		Machine: machine{CPU: "a CPU", CPUs: 2, Kernel: "6.18"},
		Runs: map[string]measured{
			"setup":   {Date: "2026-01-02", Shapectl: "v1", Kernel: "6.19"},
			"program": {Date: "2026-01-03", Shapectl: "v1", Quick: true},
		},
		Results: append(slices.Clone(sample),
			result("setup", "Time to change one rule, a random one each time: 1 000", "shapectl gcra", unitMicroseconds, 2),
			result("program", "Live flows, in random order: 1", "shapectl gcra", unitNanoseconds, 80)),
	}
	testenv.Must(t, r.write(dir))
	again, err := readReport(dir)
	testenv.Must(t, err)
	var one, two bytes.Buffer
	testenv.Must(t, errors.Join(r.print(&one), again.print(&two)))
	if one.String() != two.String() {
		t.Error("the figures read back make another report")
	}
	for file, says := range map[string][]string{
		"benchmarks.md": {"a CPU, 2 CPUs,\nLinux 6.18", "of a quick run, and mean little", "0 of 38 targets are met.", "| nft 1 of 2 |", "(bench/setup.svg)"},
		"bench/README.md": {
			"| CPU | a CPU |", "| [Loading and changing rules](setup.md) | 2026-01-02 | v1, Linux 6.19 |", "2026-01-03, **a quick run", "| not measured |",
		},
		"bench/setup.md": {
			"# Loading and changing rules\n", "Measured 2026-01-02, shapectl v1, Linux 6.19.\n", "## Time to load rules",
		},
		"bench/program.md": {"Measured 2026-01-03, shapectl v1; **a quick run", "`BPF_PROG_TEST_RUN`"},
	} {
		data, err := os.ReadFile(filepath.Join(dir, file))
		testenv.Must(t, err)
		for _, want := range says {
			if !strings.Contains(string(data), want) {
				t.Errorf("%s does not say %q:\n%s", file, want, data)
			}
		}
		links := regexp.MustCompile(`\]\(([^)#]+)`).FindAllStringSubmatch(string(data), -1)
		if len(links) == 0 {
			t.Errorf("%s has no links", file)
		}
		for _, link := range links {
			target, err := os.ReadFile(filepath.Join(dir, filepath.Dir(file), link[1]))
			if err != nil {
				t.Errorf("a link in %s: %v", file, err)
			}
			if strings.HasSuffix(link[1], ".svg") && xml.Unmarshal(target, new(struct{})) != nil {
				t.Errorf("%s is not XML", link[1])
			}
		}
	}
}

// Noise can make a small difference negative, which a logarithmic axis does not show.
func TestChartsOfAnyFigures(t *testing.T) {
	low := result("setup", "t: 1", "a", unitSeconds, 0.001)
	low.Low = -1
	for _, results := range [][]Result{
		{low, result("setup", "t: 1 000", "a", unitSeconds, 100)},
		{result("setup", "t: 1", "a", unitSeconds, -1), result("setup", "t: 1 000", "a", unitSeconds, 0)},
		{{Suite: "setup", Case: "t: 1", Subject: "a", Unit: unitSeconds}, {Suite: "setup", Case: "t: 2", Subject: "a", Unit: unitSeconds}},
		{result("setup", "t", "a", unitSeconds, -1)},
		{{Suite: "setup", Case: "t", Subject: "a", Unit: unitSeconds}},
	} {
		chart := tablesOf("setup", results)[0].draw("a & b", unitSeconds)
		if err := xml.Unmarshal(chart, new(struct{})); err != nil || bytes.Contains(chart, []byte("NaN")) || bytes.Contains(chart, []byte("Inf")) {
			t.Errorf("%+v: %v\n%s", results, err, chart)
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
	now = report{Machine: machine{CPU: "a CPU", Kernel: "6.19"}}
	if err := now.keep(before, []string{"program"}); err != nil || now.Machine != before.Machine {
		t.Errorf("another kernel: machine %v, error %v", now.Machine, err)
	}
	if len(before.Runs) != 2 || len(before.Results) != len(sample) {
		t.Error("keep has modified the earlier report")
	}
	now = report{Machine: machine{CPU: "another CPU"}}
	if err := now.keep(before, []string{"program"}); err == nil {
		t.Error("figures of two machines were mixed")
	}
}

func TestTogether(t *testing.T) {
	const ms = time.Millisecond
	alone := []burst{{0, 10 * ms, 10 * ms}, {10 * ms, 20 * ms, 10 * ms}}
	rate, ok := together([][]burst{alone})
	if want := burstPackets / 0.01; !ok || rate != want {
		t.Errorf("one CPU alone: %v packets a second, want %v", rate, want)
	}
	// The first CPU's first burst, and the second one's last, ran alone.
	both := [][]burst{
		{{0, 10 * ms, 1 * ms}, {10 * ms, 20 * ms, 10 * ms}, {20 * ms, 30 * ms, 10 * ms}},
		{{10 * ms, 30 * ms, 20 * ms}, {30 * ms, 31 * ms, 1 * ms}},
	}
	rate, ok = together(both)
	if want := burstPackets/0.01 + burstPackets/0.02; !ok || rate != want {
		t.Errorf("two CPUs: %v packets a second, want %v", rate, want)
	}
	if _, ok := together([][]burst{{{0, 5 * ms, 5 * ms}}, {{6 * ms, 9 * ms, 3 * ms}}}); ok {
		t.Error("CPUs that never ran at the same time have a common rate")
	}
}
