package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// A report is all figures of a run, and what they were taken on.
type report struct {
	Date    string
	Quick   bool `json:",omitempty"` // figures that mean little
	Machine machine
	Results []Result
}

const jsonFile = "benchmarks.json"

// readReport reads the figures of an earlier run.
func readReport(dir string) (r report, err error) {
	data, err := os.ReadFile(filepath.Join(dir, jsonFile))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("read %s: %w", filepath.Join(dir, jsonFile), err)
	}
	return r, nil
}

// keep takes over an earlier run's figures of all suites but those named. Only one machine's go together.
func (r *report) keep(dir string, but []string) error {
	before, err := readReport(dir)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if before.Machine != r.Machine || before.Quick != r.Quick {
		return fmt.Errorf("the other suites' figures in %s are of another machine or kind of run: run all suites", dir)
	}
	r.Results = slices.DeleteFunc(before.Results, func(f Result) bool { return slices.Contains(but, f.Suite) })
	return nil
}

// write writes the report into a folder: figures, tables and charts.
func (r report) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, jsonFile), append(data, '\n'), 0o644); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, "benchmarks.md"))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := r.markdown(f); err != nil {
		return err
	}
	return f.Close()
}

// markdown writes the report for people.
func (r report) markdown(w io.Writer) error {
	for _, f := range r.Results {
		if _, err := fmt.Fprintf(w, "%s | %s | %s | %.3g (%.3g-%.3g) %s\n", f.Suite, f.Case, f.Subject, f.Median, f.Low, f.High, f.Unit); err != nil {
			return err
		}
	}
	return nil
}
