package report

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
)

// A Top is what rules and pools do now.
type Top struct {
	Time       string `json:"time"`        // RFC 3339
	IntervalNS uint64 `json:"interval_ns"` // over which use and drops were measured; 0 if they were not
	Of         int    `json:"of"`          // how many rows there would be without a search or a limit on rows
	// Summary is what all rules do together.
	Summary live.Summary `json:"summary"`
	// Rules are rules and pools, in the order that was asked for.
	Rules []TopRule `json:"rules"`
	// Names are names, in that order; null unless they were asked for. Rules are then those without a name. Of a tree, it is
	// the name that was asked for.
	Names []TopName `json:"names"`
	// The fullest buckets of hosts, subnets and flows, the fullest first.
	Fullest []FullBucket `json:"fullest_buckets"`
	// RevertsInNS is null unless a change is pending.
	RevertsInNS *uint64 `json:"reverts_in_ns"`
}

// A TopRule is a rule or pool that is a row of a Top.
type TopRule struct {
	Rule
	TopRow
}

// MarshalJSON has the keys of both.
func (r TopRule) MarshalJSON() ([]byte, error) {
	rule, err := r.Rule.MarshalJSON()
	return oneObject(rule, r.TopRow, err)
}

// A TopName is a name that is a row of a Top.
type TopName struct {
	Named
	TopRow
	Plan        string   `json:"plan"`                    // of its first rule
	DroppedBits uint64   `json:"dropped_bits_per_second"` // of all its rules
	UsePercent  *float64 `json:"use_percent"`             // of the direction that uses most of its rate; null where that is not known
}

// A TopRow is what a row of a Top is and does.
type TopRow struct {
	Row      int    `json:"row"`      // its place in the order, from 0; -1 for the name whose tree it is
	Depth    int    `json:"depth"`    // the number of pools above it in a tree
	Below    int    `json:"below"`    // how many rules and pools are directly within it
	Activity string `json:"activity"` // what it does now: out (not in force), dropping, near (its rate), busy or idle
	// FullPercent is the level of its bucket, or of its fullest one, in percent of what that and its queue can hold; null
	// without a limit.
	FullPercent *float64 `json:"full_percent"`
}

// A FullBucket is one of the fullest buckets of all rules.
type FullBucket struct {
	Device    string `json:"device"`
	Direction string `json:"direction"`
	CIDR      string `json:"cidr"`
	Name      string `json:"name"` // of the rule; "" for none
	live.Bucket
	FullPercent float64 `json:"full_percent"` // the level in percent of what the bucket and its queue can hold
}

// NewTop is the rows of a view.
func NewTop(r *live.Reading, v live.View) Top {
	rows, of := r.Rows(v)
	out := Top{
		Time: r.Time.Format(time.RFC3339Nano), IntervalNS: uint64(r.Interval), Of: of, Rules: []TopRule{}, Fullest: []FullBucket{}, RevertsInNS: r.RevertsInNS,
		Summary: r.Summary(v.Chosen),
	}
	if v.By == "name" {
		out.Names = []TopName{}
	}
	for i := range rows {
		switch row := newTopRow(&rows[i], i); {
		case rows[i].Name != nil:
			out.Names = append(out.Names, newTopName(&rows[i], row))
		case rows[i].Part == nil:
			out.Rules = append(out.Rules, TopRule{NewRule(rows[i].Item), row})
		}
	}
	if v.By == "tree" && v.Name != "" {
		names, _ := r.Rows(live.View{By: "name", Name: v.Name, Chosen: v.Chosen})
		for i := range names {
			out.Names = append(out.Names, newTopName(&names[i], newTopRow(&names[i], -1)))
		}
	}
	for _, b := range r.Fullest {
		if v.Chosen == nil || v.Chosen(b.Item) {
			out.Fullest = append(out.Fullest, FullBucket{b.Device, b.Direction, b.Network, b.Label.Name, b.Bucket, b.Percent})
		}
	}
	return out
}

func newTopRow(r *live.Row, at int) TopRow {
	row := TopRow{Row: at, Depth: r.Depth, Activity: r.Activity(), FullPercent: knownOrNull(r.Level)}
	if r.Item != nil {
		row.Below = r.Below()
	}
	return row
}

func newTopName(r *live.Row, row TopRow) TopName {
	return TopName{NewNamed(r), row, r.All()[0].Label.Plan, uint64(r.Dropped), knownOrNull(r.OfRate)}
}

// knownOrNull is a percentage of a row, which is negative where it is not known.
func knownOrNull(percent float64) *float64 {
	if percent < 0 {
		return nil
	}
	return &percent
}

// These are wide enough for figures that change, and for the names of rules on a narrow screen.
const (
	bitsWide  = 8
	leastRule = 14
	planWidth = 96 // of a table that has room for plans
)

// Lines are the heads and rows of a view, at most width columns wide where that can be; 0 is no limit. Before what is not in
// force stands X, and before what drops packets !. notes say what is not shown.
func Lines(rows []live.Row, by string, width int) (lines, notes []string) {
	width = max(width-2, 0)
	switch {
	case by == "name":
		columns := nameColumns(rows)
		columns[0].least = leastRule
		lines, notes = tableLines(rows, columns, width)
	case len(rows) > 0 && rows[0].Part != nil:
		several := slices.ContainsFunc(rows, func(r live.Row) bool { return r.Item.Key != rows[0].Item.Key })
		lines, notes = tableLines(rows, partColumns(rows, strings.ToUpper(by), by == "bucket" || several), width)
	default:
		rules := make(Rules, len(rows))
		for i := range rows {
			r := &rows[i]
			rules[i] = Rule{Item: r.Item, depth: r.Depth, now: r}
		}
		lines, notes = tableLines(rules, topColumns(rules, width), width)
	}
	for i := range lines {
		mark := "  "
		if i > 0 && rows[i-1].Activity() == "out" {
			mark = " X"
		} else if i > 0 && rows[i-1].Refusing > 0 {
			mark = " !"
		}
		lines[i] = mark + lines[i]
	}
	return lines, notes
}

// topColumns are those of a view. The figures of rules are those of show, and what they drop now and how full they are.
func topColumns(rules Rules, width int) []column[Rule] {
	devices, directions := map[string]bool{}, map[string]bool{}
	for _, r := range rules {
		if !r.IsPool() && r.Label.Name != "" {
			devices[r.Device], directions[r.Direction] = true, true
		}
	}
	full := width == 0 || width >= planWidth
	called := func(r *Rule) string {
		text := r.Called()
		if !full && !r.IsPool() && r.Label.Name != "" { // what tells rules with a name apart
			switch text = plain.Line(r.Label.Name) + " "; {
			case len(devices) < 2:
				text += r.Direction
			case len(directions) < 2:
				text += plain.Line(r.Device)
			default:
				text += r.Where()
			}
		}
		return strings.Repeat("  ", r.depth) + text
	}
	columns := []column[Rule]{{head: "POOL OR RULE", always: true, least: leastRule, cell: called}}
	if plan := figure("plan"); full {
		plan.drop = 6
		columns = append(columns, plan)
	}
	rate := cell("RATE", true, (*Rule).rateCell)
	drops := cell("DROPS", true, func(r *Rule) string { return Bits(uint64(r.now.Dropped)) })
	level := cell("LEVEL", true, func(r *Rule) string { return optional(knownOrNull(r.now.Level), percentText) })
	for i, c := range []column[Rule]{rate, figure("use_bits_per_second"), figure("use_percent"), drops, figure("dropped_percent"), level} {
		c.always, c.drop = true, []int{3, 0, 2, 0, 4, 5}[i]
		if c.drop == 0 {
			c.wide = bitsWide
		}
		columns = append(columns, c)
	}
	left := figure("quota_left_bytes")
	left.drop = 1
	return append(columns, left)
}

// Called is what people call the rule or pool: a pool by its name, a rule by its name, if any, and its place.
func (r *Rule) Called() string {
	if r.IsPool() {
		return plain.Line(r.Item.Key.Pool)
	}
	return strings.TrimLeft(plain.Line(r.Label.Name)+" "+r.Where()+" "+r.Network(), " ")
}

// writeRows writes the rows of a view as a table.
func writeRows(text *bufio.Writer, rows []live.Row, by string, width int) {
	if len(rows) == 0 {
		return
	}
	lines, notes := Lines(rows, by, width)
	for _, line := range append(lines, notes...) {
		fmt.Fprintln(text, line)
	}
}

// active are the rows of a tree that are not idle, and those above them.
func active(rows []live.Row) (some []live.Row) {
	above := 0 // such rows above the last one that was kept
	for i := range slices.Backward(rows) {
		if r := &rows[i]; r.Activity() != "idle" || r.Depth < above {
			some, above = append(some, *r), r.Depth
		}
	}
	slices.Reverse(some)
	return some
}

// NoRows says what a view without a row lacks.
func NoRows(by string) string {
	switch by {
	case "bucket":
		return "all buckets are empty"
	case "node":
		return "no pools that several names draw from"
	}
	return "no rules"
}

// TopText writes the rows of a view.
func TopText(w io.Writer, r *live.Reading, v live.View, width int) error {
	text := bufio.NewWriter(w)
	rows, of := r.Rows(v)
	if len(rows) == 0 {
		fmt.Fprintln(text, NoRows(v.By))
	}
	shown := rows
	if v.By == "tree" || v.By == "name" && v.Sort != "name" {
		shown = active(rows)
	}
	writeRows(text, shown, v.By, width)
	if idle := len(rows) - len(shown); idle > 0 {
		fmt.Fprintf(text, "%d of %d; %d idle ones are left out\n", len(shown), of, idle)
	} else if len(rows) < of {
		fmt.Fprintf(text, "%d of %d\n", len(rows), of)
	}
	if r.RevertsInNS != nil {
		fmt.Fprintf(text, "the last change is not confirmed: it %s\n", Reverts(*r.RevertsInNS))
	}
	return text.Flush()
}
