package report

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
)

// Status is how good or bad a finding is.
type Status string

const (
	OK      Status = "ok"
	Note    Status = "note"    // worth knowing; limits are right
	Warning Status = "warning" // a limit may differ from its rule
	Failed  Status = "failed"  // something that rules need is missing, or rules are not in force
)

// A Finding is the result of a check.
type Finding struct {
	Status Status `json:"status"`
	Check  string `json:"check"`
	// Device is "" for the whole system, and Direction for both directions.
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Finding   string `json:"finding"`
	Advice    string `json:"advice"` // what to do; "" for nothing
	// A Finding of some rules begins with their number, and goes on with Of. Text adds up those of a device direction each.
	Rules int    `json:"-"`
	Of    string `json:"-"`
}

// OfRules makes a finding one of so many rules.
func (f *Finding) OfRules(n int, of string) {
	f.Finding, f.Rules, f.Of = plain.Count(n, "rule")+of, n, of
}

// Findings are the results of all checks.
type Findings []Finding

// Text writes all findings.
func (findings Findings) Text(w io.Writer) error {
	return findings.write(w, func(Finding) bool { return true })
}

// The checks whose notes are shown among problems.
const (
	Change = "change" // a change will revert unless it is confirmed
	State  = "state"  // as whether rules are in force is not known
)

// Problems writes warnings, failures, notes of a pending change and of the state of rules, and how many findings
// there are in all.
func (findings Findings) Problems(w io.Writer) error {
	return findings.write(w, func(f Finding) bool {
		return f.Status == Warning || f.Status == Failed || f.Status == Note && (f.Check == Change || f.Check == State)
	})
}

// write writes some findings, those that are the same for many devices once, and how many there are in all.
func (findings Findings) write(w io.Writer, shown func(Finding) bool) error {
	text := bufio.NewWriter(w)
	where, rules := map[Finding][]string{}, map[Finding]int{} // by what is found
	var order []Finding
	count, devices, hidden := map[Status]int{}, map[string]bool{}, false
	for _, f := range findings {
		count[f.Status]++
		if f.Device != "" {
			devices[f.Device] = true
		}
		if !shown(f) {
			hidden = hidden || f.Status == Note
			continue
		}
		at := strings.TrimSpace(plain.Line(f.Device) + " " + f.Direction)
		n := f.Rules
		if n > 0 {
			f.Finding = f.Of
		}
		f.Device, f.Direction, f.Rules = "", "", 0
		if where[f] == nil {
			order = append(order, f)
		}
		where[f] = append(where[f], at)
		rules[f] += n
	}
	const indent = "         "
	for _, f := range order {
		says := strings.TrimSpace(plain.List(where[f]) + " " + f.Check)
		first := fmt.Sprintf("%-7s  ", f.Status)
		if says += ": "; rules[f] > 0 {
			says += plain.Count(rules[f], "rule")
		}
		text.WriteString(plain.Fold(plain.Line(says+f.Finding), screenWidth, first, indent))
		if f.Advice != "" {
			text.WriteString(plain.Fold(plain.Line(f.Advice), screenWidth, indent+"-> ", indent+"   "))
		}
	}
	sum := fmt.Sprintf("%s on %s: %d failed, %s, %s", plain.Count(len(findings), "check"), plain.Count(len(devices), "device"),
		count[Failed], plain.Count(count[Warning], "warning"), plain.Count(count[Note], "note"))
	if hidden {
		sum += " (-v shows all)"
	}
	text.WriteString(plain.Fold(sum, screenWidth, "", "  "))
	return text.Flush()
}
