package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"text/template"
)

// A report is all figures, and the machine that they were measured on.
type report struct {
	Machine machine
	Runs    map[string]measured // by suite
	Results []Result
}

// measured says when a suite was measured, and which shapectl.
type measured struct {
	Date     string
	Shapectl string
	Kernel   string `json:",omitempty"` // if it is not that of the machine
	Quick    bool   `json:",omitempty"` // the figures mean little
}

// The summary is in the folder of a report, and everything else in detailDir below it.
const (
	summaryFile = "benchmarks.md"
	detailDir   = "bench"
	indexFile   = "README.md"
	jsonFile    = "benchmarks.json"
)

// readReport reads the figures of an earlier run.
func readReport(dir string) (r report, err error) {
	path := filepath.Join(dir, detailDir, jsonFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return r, fmt.Errorf("read the figures of an earlier run: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("read %s: %w", path, err)
	}
	return r, nil
}

// keep adopts the figures of an earlier run, except for some suites. Figures of two machines do not mix. Another kernel is
// told with the suite.
func (r *report) keep(before report, except []string) error {
	same := before.Machine
	same.Kernel = r.Machine.Kernel
	if same != r.Machine {
		return fmt.Errorf("the figures of the other suites are of another machine (%s, Linux %s); run all suites",
			before.Machine.CPU, before.Machine.Kernel)
	}
	r.Machine = before.Machine
	r.Runs = maps.Clone(before.Runs)
	maps.DeleteFunc(r.Runs, func(suite string, _ measured) bool { return slices.Contains(except, suite) })
	r.Results = slices.DeleteFunc(slices.Clone(before.Results), func(f Result) bool {
		return slices.Contains(except, f.Suite)
	})
	return nil
}

// write writes figures, pages and charts into a folder, in place of those of an earlier run.
func (r report) write(dir string) error {
	detail := filepath.Join(dir, detailDir)
	if err := os.MkdirAll(detail, 0o755); err != nil {
		return err
	}
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(detail, jsonFile), append(data, '\n'), 0o644); err != nil {
		return err
	}
	if err := writePage(filepath.Join(dir, summaryFile), "summary", r); err != nil {
		return err
	}
	if err := writePage(filepath.Join(detail, indexFile), "index", r); err != nil {
		return err
	}
	for _, s := range r.Sections() {
		if err := writePage(filepath.Join(detail, s.Page), "suite", s); err != nil {
			return err
		}
		for _, l := range allLeads {
			i := slices.IndexFunc(s.Tables, func(t table) bool { return t.Suite == l.suite && t.Title == l.title })
			if i < 0 {
				continue
			}
			if err := os.WriteFile(filepath.Join(dir, l.Chart()), s.Tables[i].draw(l.Caption, l.unit), 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

func writePage(path, kind string, of any) error {
	var text bytes.Buffer
	if err := pages.ExecuteTemplate(&text, kind, of); err != nil {
		return err
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}

// Quick reports whether some figures are of a quick run.
func (r report) Quick() bool {
	for _, m := range r.Runs {
		if m.Quick {
			return true
		}
	}
	return false
}

// print writes the tables of all suites.
func (r report) print(w io.Writer) error {
	for _, s := range r.Sections() {
		if err := pages.ExecuteTemplate(w, "suite", s); err != nil {
			return err
		}
	}
	return nil
}

//go:embed report.md.tmpl
var pageTemplates string

var pages = template.Must(template.New("pages").Funcs(template.FuncMap{
	"goals":     goalTable,
	"leads":     leads,
	"leadTable": leadTable,
	"summary":   func() string { return summaryFile },
	"json":      func() string { return jsonFile },
}).Parse(pageTemplates))

// A section is the page of one suite.
type section struct {
	Title  string
	Page   string
	Method string // how it measures, where the tables do not say it
	measured
	Tables []table
}

// Sections are the suites that have figures, in their order.
func (r report) Sections() (sections []section) {
	for _, s := range suites {
		if run, ok := r.Runs[s.name]; ok {
			sections = append(sections, section{
				Title: s.title, Page: s.page(), Method: s.method, measured: run,
				Tables: tablesOf(s.name, r.Results),
			})
		}
	}
	return sections
}

// A lead is a chart in the summary.
type lead struct {
	suite, title, unit string // of its table
	Caption            string
}

func (l lead) Chart() string { return detailDir + "/" + l.suite + ".svg" }
func (l lead) Page() string  { return detailDir + "/" + suite{name: l.suite}.page() }

var allLeads = []lead{
	{"instructions", "Instructions added per packet", unitInstructions, "Instructions added per packet"},
	{"traffic", "Time added per packet", unitNanoseconds, "Time added per packet on a veth pair"},
	{"program", "Live flows, in random order", unitNanoseconds, "One bucket per flow: time per packet by number of flows"},
	{"accuracy", "Rate error", unitMillionths, "Error of the rate, UDP"},
	{"queue", fourFlows, unitPing99, "Four TCP flows: 99th percentile of a ping beside them"},
	{"setup", "Time to change one rule, a random one each time", unitMicroseconds, "Time to change one rule, by the number of rules"},
}

// leads are the charts in the summary that have figures, two in a row.
func leads(results []Result) (rows [][]lead) {
	there := slices.DeleteFunc(slices.Clone(allLeads), func(l lead) bool {
		return !slices.ContainsFunc(results, func(r Result) bool { return r.Suite == l.suite && r.table() == l.title })
	})
	return slices.Collect(slices.Chunk(there, 2))
}
