package main

import (
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shapectl/shapectl/internal/testenv"
)

// result is a figure with quartiles at 90 % and 110 %.
func result(suite, name, subject, unit string, median float64) Result {
	return Result{Suite: suite, Case: name, Subject: subject, Unit: unit, Median: median, Low: 0.9 * median, High: 1.1 * median, Rounds: 9}
}

// Each table of the page names figures of the report in docs, and the page there is that of this program.
func TestReportInDocs(t *testing.T) {
	const docs = "../docs"
	r, err := readReport(docs)
	testenv.Must(t, err)
	dir := t.TempDir()
	testenv.Must(t, try(func() { r.write(dir) }))
	for _, name := range []string{"benchmarks.md", "bench/benchmarks.json"} {
		want, err := os.ReadFile(filepath.Join(dir, name))
		testenv.Must(t, err)
		got, err := os.ReadFile(filepath.Join(docs, name))
		testenv.Must(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("docs/%s is out of date: run  make bench BENCH_FLAGS=-render", name)
		}
	}
	if page, err := os.ReadFile(filepath.Join(dir, "benchmarks.md")); err != nil || strings.Contains(string(page), "\n\n\n") {
		t.Errorf("a table of the page has no figures: %v", err)
	}
}

func TestKeep(t *testing.T) {
	before := report{
		Machine: machine{CPU: "a CPU"},
		Runs:    map[string]measured{"setup": {Date: "2026-01-02"}, "program": {Date: "2026-01-02"}},
		Results: []Result{result("setup", "t", "a", "s", 1), result("program", "t", "a", "s", 1)},
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

func TestSummarize(t *testing.T) {
	for _, c := range []struct {
		samples []float64
		want    string // median, quartiles and rounds
	}{
		{[]float64{7}, "7 7 7 1"},
		{[]float64{2, 1}, "1.5 1.25 1.75 2"},
		{[]float64{5, 1, 3, 2, 4}, "3 2 4 5"},
		{[]float64{4, 1, 3, 2}, "2.5 1.75 3.25 4"},
		{[]float64{1, 1, 1, 1, 1000}, "1 1 1 5"}, // one disturbed round has no effect
	} {
		var r report
		for _, s := range c.samples {
			r.record(Result{Case: "t: 1", Samples: []float64{s}})
		}
		r.summarize()
		if got := fmt.Sprint(r.Results[0].Median, r.Results[0].Low, r.Results[0].High, r.Results[0].Rounds); got != c.want {
			t.Errorf("%v: %s, want %s", c.samples, got, c.want)
		}
	}
}

func TestNumber(t *testing.T) {
	for f, want := range map[float64]string{
		0: "0", 1: "1", 0.25: "0.25", 12.345: "12.3", 999.4: "999", 1234.6: "1 235", 1048576: "1 048 576",
		0.00001234: "0.000012", 2.0004: "2", -3.21: "-3.21", -1234: "-1 234", 999.9: "1 000", 1e6: "1 000 000",
	} {
		if got := number(f); got != want {
			t.Errorf("%v reads %q, not %q", f, got, want)
		}
	}
}

func TestTreeForHTB(t *testing.T) {
	got := (&tree{rate: 9e6, members: []*tree{
		{rate: 5e6, guarantee: 4e6, members: []*tree{{rate: 2e6, guarantee: 1e6}}}, {rate: 3e6},
	}}).htb()
	for _, want := range []string{
		"class add dev near parent 1: classid 1:1000 htb rate 9000000bit ceil 9000000bit quantum 1514\n",
		"class add dev near parent 1:1000 classid 1:1001 htb rate 4000000bit ceil 5000000bit quantum 1514\n",
		"class add dev near parent 1:1001 classid 1:1 htb rate 1000000bit ceil 2000000bit quantum 1514\n",
		"class add dev near parent 1:1000 classid 1:2 htb rate 8bit ceil 3000000bit quantum 1514\n",
		"u32 ht 2:0: match ip dst 10.1.2.0 flowid 1:1\n",
		"u32 ht 2:1: match ip dst 10.1.2.1 flowid 1:2\n",
		"qdisc add dev near parent 1:2 pfifo limit 24\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in:\n%s", want, got)
		}
	}
}

// A walk gives each packet the next address, and a counter tells addresses apart.
func TestWalkAndCount(t *testing.T) {
	testenv.Root(t)
	var made owned
	defer made.Close()
	testenv.Must(t, try(func() {
		p, maps := made.reference("count_pass", 256, nil)
		walk := made.walk("walk_destination", []netip.Addr{addressOf(0), addressOf(1), addressOf(2), addressOf(3)}, p)
		_, _, err := walk[0].Benchmark(udp(), 8, func() {})
		check(err)
		for i := range uint32(5) {
			if got := (counter{maps["counts"]}).read(i); i < 4 && (got.Packets != 2 || got.Bytes != 2*64) || i == 4 && got.Packets != 0 {
				t.Errorf("address %d: %+v", i, got)
			}
		}
	}))
}
