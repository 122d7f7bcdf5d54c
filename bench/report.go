package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/template"

	"golang.org/x/sys/unix"
)

// A report is all figures, and the machine that they were measured on.
type report struct {
	Machine machine
	Runs    map[string]measured // by suite
	Results []Result

	shown []Result // those of the tables that were asked for
}

// measured says when a suite was measured, and which shapectl.
type measured struct {
	Date     string
	Shapectl string
	Kernel   string `json:",omitempty"` // if it is not that of the machine
	Quick    bool   `json:",omitempty"` // the figures mean little
}

// The page is in the folder of a report, and all figures in detailDir below it.
const detailDir, jsonFile = "bench", "benchmarks.json"

// readReport reads the figures of an earlier run.
func readReport(dir string) (r report, err error) {
	data, err := os.ReadFile(filepath.Join(dir, detailDir, jsonFile))
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	return r, err
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
	r.Machine, r.Runs = before.Machine, maps.Clone(before.Runs)
	maps.DeleteFunc(r.Runs, func(suite string, _ measured) bool { return slices.Contains(except, suite) })
	r.Results = slices.DeleteFunc(slices.Clone(before.Results), func(f Result) bool { return slices.Contains(except, f.Suite) })
	return nil
}

// write writes figures and the page into a folder, in place of those of an earlier run.
func (r report) write(dir string) {
	detail := filepath.Join(dir, detailDir)
	check(os.MkdirAll(detail, 0o755))
	check(os.WriteFile(filepath.Join(detail, jsonFile), append(must(json.MarshalIndent(r, "", " ")), '\n'), 0o644))
	var page bytes.Buffer
	check(pages.ExecuteTemplate(&page, "page", &r))
	check(os.WriteFile(filepath.Join(dir, "benchmarks.md"), page.Bytes(), 0o644))
}

//go:embed report.md.tmpl
var pageTemplates string

var pages = template.Must(template.New("pages").Parse(pageTemplates))

// A suiteRun is when a suite was measured.
type suiteRun struct {
	Title string
	measured
}

// Suites are those that have figures, in their order.
func (r report) Suites() (runs []suiteRun) {
	for _, s := range suites {
		if m, ok := r.Runs[s.name]; ok {
			runs = append(runs, suiteRun{s.title, m})
		}
	}
	return runs
}

// Table is the medians of a table in one unit, under its title; empty if it has no figures.
func (r *report) Table(suiteName, title, unit string) (text string) {
	for _, t := range tablesOf(suiteName, r.Results) {
		if t.Title == title {
			text = fmt.Sprintf("### %s\n\n%s", title, t.inUnit(unit))
			r.shown = append(r.shown, t.results...)
		}
	}
	return text
}

// Notes say what a fair comparison must consider: each with the subjects of the tables above that it is about.
func (r *report) Notes() (text string) {
	subjects, notes := map[string][]string{}, []string{}
	for _, f := range r.shown {
		if f.Note != "" && !slices.Contains(notes, f.Note) {
			notes = append(notes, f.Note)
		}
		if !slices.Contains(subjects[f.Note], f.Subject) {
			subjects[f.Note] = append(subjects[f.Note], f.Subject)
		}
	}
	for _, note := range notes {
		text += "- " + strings.Join(subjects[note], "; ") + ": " + note + "\n"
	}
	return text
}

// machine describes where figures were measured.
type machine struct {
	CPU         string
	CPUs        int
	Caches      string
	Memory      string
	Kernel      string
	ClockSource string
	Peers       string // versions of their tools
}

func thisMachine() machine {
	var name unix.Utsname
	var info unix.Sysinfo_t
	unix.Uname(&name) // neither can fail
	unix.Sysinfo(&info)
	m := machine{
		CPU:         cmp.Or(readField("/proc/cpuinfo", "model name"), runtime.GOARCH),
		CPUs:        runtime.NumCPU(),
		Memory:      fmt.Sprintf("%.0f GiB", float64(info.Totalram)*float64(info.Unit)/(1<<30)),
		Kernel:      string(bytes.TrimRight(name.Release[:], "\x00")),
		ClockSource: readLine("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
	}
	if strings.Contains(" "+readField("/proc/cpuinfo", "flags")+" ", " hypervisor ") {
		m.CPU += ", in a virtual machine"
	}
	var caches, peers []string
	dirs, _ := filepath.Glob("/sys/devices/system/cpu/cpu0/cache/index[0-9]")
	for _, dir := range dirs {
		if readLine(dir+"/type") != "Instruction" {
			caches = append(caches, "L"+readLine(dir+"/level")+" "+readLine(dir+"/size"))
		}
	}
	for _, c := range [][]string{{"tc", "-V"}, {"nft", "--version"}, {"iptables", "-V"}, {"iperf3", "--version"}} {
		if version, _, _ := strings.Cut(firstLine(c...), " ("); version != "" { // it is installed
			peers = append(peers, strings.TrimPrefix(strings.TrimSpace(version), "tc utility, "))
		}
	}
	m.Caches, m.Peers = strings.Join(caches, ", "), strings.Join(peers, ", ")
	return m
}

// firstLine returns the first line that a command prints, or "".
func firstLine(command ...string) string {
	output, _ := exec.Command(command[0], command[1:]...).Output()
	line, _, _ := strings.Cut(string(output), "\n")
	return line
}

// readLine returns the text of a file of one line, or "" if it cannot be read.
func readLine(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

// readField returns the first value of a name in a file of names and values, or "".
func readField(path, name string) string {
	for line := range strings.Lines(readLine(path)) {
		if found, value, _ := strings.Cut(line, ":"); strings.TrimSpace(found) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// readMiB returns a value that such a file has in kB, or 0.
func readMiB(path, name string) float64 {
	kib, _ := strconv.ParseFloat(strings.TrimSuffix(readField(path, name), " kB"), 64)
	return kib / 1024
}

// A Result is one figure: that of one subject in one case, over all rounds.
type Result struct {
	Suite   string
	Case    string // "table: column"
	Subject string // a row
	Unit    string
	Median  float64
	Low     float64 // lower quartile
	High    float64 // upper quartile
	Rounds  int
	Note    string    `json:",omitempty"` // what a fair comparison must consider
	Samples []float64 `json:",omitempty"` // while a suite runs
}

// record adds samples to a figure.
func (r *report) record(of Result) {
	i := slices.IndexFunc(r.Results, func(old Result) bool {
		return old.Suite == of.Suite && old.Case == of.Case && old.Subject == of.Subject && old.Unit == of.Unit
	})
	if i < 0 {
		i = len(r.Results)
		r.Results = append(r.Results, of)
		r.Results[i].Samples = nil
	}
	r.Results[i].Samples = append(r.Results[i].Samples, of.Samples...)
}

// summarize computes the figures of samples.
func (r *report) summarize() {
	for i, f := range r.Results {
		if f.Samples != nil {
			sorted := slices.Sorted(slices.Values(f.Samples))
			f.Rounds, f.Samples = len(sorted), nil
			f.Median, f.Low, f.High = quantile(sorted, 0.5), quantile(sorted, 0.25), quantile(sorted, 0.75)
			r.Results[i] = f
		}
	}
}

// quantile returns a quantile of sorted samples, interpolated between neighbours.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i+1 == len(sorted) {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}

// ours reports whether a subject is a mode of shapectl.
func ours(subject string) bool { return strings.HasPrefix(subject, "shapectl") }

// References: subjects that limit nothing.
const (
	emptyProgram = "empty program"
	clockProgram = "clock program"
	memoryFloor  = "clock and one cache line"
	noLimiter    = "no limiter"
)

// A table is the results of one suite with the same part of Case before the colon.
type table struct {
	Title   string
	results []Result
}

func (r Result) column() string {
	_, column, _ := strings.Cut(r.Case, ": ")
	return column
}

// tablesOf returns the tables of a suite, in the order of its results.
func tablesOf(suite string, results []Result) (tables []table) {
	for _, r := range results {
		if r.Suite != suite {
			continue
		}
		title, _, _ := strings.Cut(r.Case, ": ")
		i := slices.IndexFunc(tables, func(t table) bool { return t.Title == title })
		if i < 0 {
			i = len(tables)
			tables = append(tables, table{Title: title})
		}
		tables[i].results = append(tables[i].results, r)
	}
	return tables
}

// distinct returns the different values of a part of the results, in their order.
func (t table) distinct(part func(Result) string) (values []string) {
	for _, r := range t.results {
		if v := part(r); !slices.Contains(values, v) {
			values = append(values, v)
		}
	}
	return values
}

func (t table) columns() []string  { return t.distinct(Result.column) }
func (t table) subjects() []string { return t.distinct(func(r Result) string { return r.Subject }) }

func (t table) find(column, subject, unit string) Result {
	for _, r := range t.results {
		if r.column() == column && r.Subject == subject && r.Unit == unit {
			return r
		}
	}
	return Result{}
}

// inUnit returns the medians in a unit, with a column for each case, of those who have one.
func (t table) inUnit(unit string) string {
	text := row(append([]string{unit}, t.columns()...)...) + rule(1, len(t.columns()))
	for _, subject := range t.subjects() {
		cells := []string{subject}
		for _, column := range t.columns() {
			cells = append(cells, t.find(column, subject, unit).cell())
		}
		if strings.Join(cells[1:], "") != "" {
			text += row(cells...)
		}
	}
	return text
}

func row(cells ...string) string { return "| " + strings.Join(cells, " | ") + " |\n" }

// rule returns the line below the head of a table: columns of text, then of numbers.
func rule(text, numbers int) string {
	return "|" + strings.Repeat("---|", text) + strings.Repeat("--:|", numbers) + "\n"
}

// cell is the median of a figure; "" if it does not exist.
func (r Result) cell() string {
	if r.Rounds == 0 {
		return ""
	}
	return number(r.Median)
}

// number formats a figure with three digits, or all digits before the point.
func number(f float64) string {
	if math.Abs(f) >= 999.5 {
		return count(int(math.Round(f)))
	}
	s := strconv.FormatFloat(f, 'g', 3, 64)
	if strings.Contains(s, "e") {
		s = strconv.FormatFloat(f, 'f', 6, 64)
	}
	return s
}

// count formats a number with spaces between its thousands.
func count(n int) string {
	if n < 0 {
		return "-" + count(-n)
	}
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
