package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
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

// Units in which more is better, or 1 is the best, or that are for information. Else less is better.
var (
	higherIsBetter  = []string{"x one CPU", "goodput, %", "total, % of the rate"}
	nearOneIsBetter = []string{"gap p1", "gap p50", "gap p99"}
	notCompared     = []string{"cubic, %", "bbr, %", "udp, %"} // for information
)

// badness is lower for a better figure of the same unit.
func (r Result) badness() float64 {
	switch {
	case slices.Contains(higherIsBetter, r.Unit):
		return -r.Median
	case slices.Contains(nearOneIsBetter, r.Unit):
		return math.Abs(r.Median - 1)
	}
	return r.Median
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

var references = []string{emptyProgram, clockProgram, memoryFloor, sharedClock, noLimiter}

// isPeer reports whether a subject is neither shapectl nor a reference.
func isPeer(subject string) bool { return !ours(subject) && !slices.Contains(references, subject) }

// A table is the results of one suite with the same part of Case before the colon.
type table struct {
	Suite, Title string
	results      []Result
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
			tables = append(tables, table{Suite: suite, Title: title})
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
func (t table) units() []string    { return t.distinct(func(r Result) string { return r.Unit }) }

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

// Wins has a line for each suite with peers: in how many cases each of them beats every mode of shapectl.
func (r report) Wins() string {
	text := row("suite", "peers, and their cases") + rule(2, 0)
	for _, s := range suites {
		ahead, cases := map[string]int{}, map[string]int{}
		for _, t := range tablesOf(s.name, r.Results) {
			for _, r := range t.results {
				if best, ok := t.best(r); ok {
					cases[r.Subject]++
					if r.badness() < best.badness() && (r.Low > best.High || best.Low > r.High) {
						ahead[r.Subject]++
					}
				}
			}
		}
		var list []string
		for _, p := range slices.Sorted(maps.Keys(ahead)) {
			list = append(list, fmt.Sprintf("%s %d of %d", p, ahead[p], cases[p]))
		}
		if len(cases) > 0 {
			text += row(s.title, cmp.Or(strings.Join(list, "; "), "none"))
		}
	}
	return text
}

// best is the best of our figures in the case of a peer's; false if they do not compete. Ratios to the first unit of a
// table do not.
func (t table) best(theirs Result) (best Result, ok bool) {
	if !isPeer(theirs.Subject) || slices.Contains(notCompared, theirs.Unit) ||
		theirs.Unit != t.units()[0] && strings.HasPrefix(theirs.Unit, "x ") {
		return best, false
	}
	for _, r := range t.results {
		if r.Case == theirs.Case && r.Unit == theirs.Unit && ours(r.Subject) && (!ok || r.badness() < best.badness()) {
			best, ok = r, true
		}
	}
	return best, ok
}

// targets are those of the template "targets", which calls the methods.
type targets struct {
	medians map[string]float64
	text    string
	met     int
	count   int
	Missing []string // figures that were not measured
}

// F returns the medians of figures. The parts make the name "suite; case; subject; unit", where {a|b} stands for both. It
// returns nil unless all of them were measured.
func (t *targets) F(parts ...string) (values []float64) {
	for _, name := range expand(strings.Join(parts, "")) {
		v, ok := t.medians[name]
		if !ok {
			t.Missing = append(t.Missing, name)
			return nil
		}
		values = append(values, v)
	}
	return values
}

// expand returns the names for which a name with {a|b} stands.
func expand(name string) (names []string) {
	before, rest, found := strings.Cut(name, "{")
	if !found {
		return []string{name}
	}
	choices, after, _ := strings.Cut(rest, "}")
	for c := range strings.SplitSeq(choices, "|") {
		names = append(names, expand(before+c+after)...)
	}
	return names
}

func (*targets) Ratio(a, b []float64) []float64 {
	return pairs(a, b, func(a, b float64) float64 { return a / b })
}
func (*targets) Plus(a, b []float64) []float64 {
	return pairs(a, b, func(a, b float64) float64 { return a + b })
}
func (*targets) Minus(a, b []float64) []float64 {
	return pairs(a, b, func(a, b float64) float64 { return a - b })
}
func (*targets) List(all ...float64) []float64 { return all }

// pairs combines figures. If there are more of the first, each of the others stands for several of them.
func pairs(a, b []float64, of func(a, b float64) float64) (values []float64) {
	for i := range a {
		if len(b) > 0 {
			values = append(values, of(a[i], b[i*len(b)/len(a)]))
		}
	}
	return values
}

// Target adds a target, which the worst of all figures must meet. The bound is "at most" or "at least" this much.
func (t *targets) Target(what, side string, bound float64, unit string, values ...[]float64) string {
	all, figure, verdict := slices.Concat(values...), "not measured", ""
	if !slices.ContainsFunc(values, func(v []float64) bool { return v == nil }) {
		worst := slices.Max(all)
		met := worst <= bound
		if side == "at least" {
			worst = slices.Min(all)
			met = worst >= bound
		}
		figure, verdict = number(worst), "**no**"
		if met {
			verdict = "yes"
			t.met++
		}
	}
	t.count++
	t.text += row(what, side+" "+number(bound)+" "+unit, figure, verdict)
	return ""
}

// compare compares all targets with figures.
func compare(results []Result) *targets {
	t := &targets{medians: map[string]float64{}, text: row("target", "bound", "figure", "met") + "|---|--:|--:|---|\n"}
	for _, r := range results {
		t.medians[strings.Join([]string{r.Suite, r.Case, r.Subject, r.Unit}, "; ")] = r.Median
	}
	check(pages.ExecuteTemplate(io.Discard, "targets", t))
	return t
}

// Targets lists all of them, and says how many are met.
func (r report) Targets() string {
	t := compare(r.Results)
	return fmt.Sprintf("%d of %d targets are met.\n\n%s", t.met, t.count, t.text)
}
