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

// A report is all figures, and what they were taken on.
type report struct {
	Machine machine
	Runs    map[string]measured // by suite
	Results []Result
}

// measured says when and of what a suite took its figures.
type measured struct {
	Date     string
	Shapectl string
	Quick    bool `json:",omitempty"` // figures that mean little
}

const (
	jsonFile     = "benchmarks.json"
	markdownFile = "benchmarks.md"
)

// readReport reads the figures of an earlier run.
func readReport(dir string) (r report, err error) {
	data, err := os.ReadFile(filepath.Join(dir, jsonFile))
	if err != nil {
		return r, fmt.Errorf("read the figures of an earlier run: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("read %s: %w", filepath.Join(dir, jsonFile), err)
	}
	return r, nil
}

// keep takes an earlier run's figures over, but for the suites named. Only one machine's go together.
func (r *report) keep(before report, but []string) error {
	if before.Machine != r.Machine {
		return fmt.Errorf("the figures of the other suites are of another machine (%s, Linux %s): run all suites",
			before.Machine.CPU, before.Machine.Kernel)
	}
	r.Runs = maps.Clone(before.Runs)
	maps.DeleteFunc(r.Runs, func(suite string, _ measured) bool { return slices.Contains(but, suite) })
	r.Results = slices.DeleteFunc(slices.Clone(before.Results), func(f Result) bool {
		return slices.Contains(but, f.Suite)
	})
	return nil
}

// write writes figures, tables and charts into a folder.
func (r report) write(dir string) error {
	data, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, jsonFile), append(data, '\n'), 0o644); err != nil {
		return err
	}
	if err := r.charts(dir); err != nil {
		return err
	}
	var text bytes.Buffer
	if err := r.markdown(&text); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, markdownFile), text.Bytes(), 0o644)
}

//go:embed report.md.tmpl
var reportTemplate string

// markdown writes the report for people.
func (r report) markdown(w io.Writer) error {
	t, err := template.New(markdownFile).Funcs(template.FuncMap{
		"goals": func() string { return goalTable(r.Results) },
		"wins":  func() string { return winTable(r.Results) },
		"chart": chartFile,
	}).Parse(reportTemplate)
	if err != nil {
		return err
	}
	return t.Execute(w, r)
}

// A section is one suite in the report.
type section struct {
	Title string
	measured
	Tables []table
}

// Sections are the suites that have figures, in their order.
func (r report) Sections() (sections []section) {
	for _, s := range suites {
		if run, ok := r.Runs[s.name]; ok {
			sections = append(sections, section{s.title, run, tablesOf(s.name, r.Results)})
		}
	}
	return sections
}
