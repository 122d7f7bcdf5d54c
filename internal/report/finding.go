package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shapectl/shapectl/internal/plain"
)

// Status is how good or bad a finding is.
type Status string

const (
	OK      Status = "ok"
	Note    Status = "note"    // worth knowing; limits are right
	Warning Status = "warning" // a limit is not, or may not be, what its rule says
	Failed  Status = "failed"  // what rules need is missing, or rules are not in force
)

// A Finding is something that matters to limits.
type Finding struct {
	Status Status `json:"status"`
	Check  string `json:"check"`
	// Device is "" in what concerns the whole system, and Direction in what concerns both.
	Device    string `json:"device"`
	Direction string `json:"direction"`
	Finding   string `json:"finding"`
	Advice    string `json:"advice"` // "" where nothing is to be done
}

// Findings are all that was found.
type Findings []Finding

// Text writes a line for each.
func (findings Findings) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	for _, f := range findings {
		where := slices.DeleteFunc([]string{f.Device, f.Direction, f.Check}, func(s string) bool { return s == "" })
		line := fmt.Sprintf("%-7s  %s: %s", f.Status, strings.Join(where, " "), f.Finding)
		if f.Advice != "" {
			line += "; " + f.Advice
		}
		fmt.Fprintln(text, plain.Line(line))
	}
	return text.Flush()
}
