package main

import (
	"bytes"
	"encoding/xml"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

// result is a figure with quartiles at 90 % and 110 %.
func result(suite, name, subject, unit string, median float64) Result {
	return Result{Suite: suite, Case: name, Subject: subject, Unit: unit, Median: median, Low: 0.9 * median, High: 1.1 * median, Rounds: 9}
}

// Each target and each chart of the summary names figures of the report in docs, and the pages and charts there are
// those of this program.
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
	pages, err := filepath.Glob(filepath.Join(dir, "bench", "*"))
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
		Results: []Result{result("setup", "t", "a", unitSeconds, 1), result("program", "t", "a", unitSeconds, 1)},
	}
	now := report{Machine: machine{CPU: "a CPU"}}
	if err := now.keep(before, []string{"program"}); err != nil {
		t.Fatal(err)
	}
	if len(now.Runs) != 1 || len(now.Results) != 1 || now.Results[0].Suite != "setup" {
		t.Errorf("kept %v and %d results, want the one of setup", now.Runs, len(now.Results))
	}
	now = report{Machine: machine{CPU: "a CPU", Kernel: "6.19"}}
	if err := now.keep(before, []string{"program"}); err != nil || now.Machine != before.Machine {
		t.Errorf("another kernel: machine %v, error %v", now.Machine, err)
	}
	if len(before.Runs) != 2 || len(before.Results) != 2 {
		t.Error("keep has modified the earlier report")
	}
	now = report{Machine: machine{CPU: "another CPU"}}
	if err := now.keep(before, []string{"program"}); err == nil {
		t.Error("figures of two machines were mixed")
	}
}
