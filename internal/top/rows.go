package top

import (
	"cmp"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// A row is a rule or pool, a name of rules, a bucket, or a host or flow.
type row struct {
	live.Row
	bucket *live.FullBucket
	talker *report.Talker
}

// rule is the rule or pool of a row; nil for a name, a host or a flow.
func (r *row) rule() *report.Rule {
	if r.Item == nil {
		return nil
	}
	rule := report.NewRule(r.Item)
	return &rule
}

// id is what the row is about, in every reading.
func (r *row) id() string {
	switch {
	case r.Name != nil:
		return "name\x00" + r.Name.Name
	case r.bucket != nil:
		return strings.Join([]string{"bucket", r.Device, r.Direction, r.Network, r.bucket.Bucket.Name}, "\x00")
	case r.talker != nil:
		return "talker\x00" + r.talker.Key
	}
	return strings.Join([]string{"rule", r.Device, r.Direction, r.Network, r.Key.Pool}, "\x00")
}

// label is what people call the row.
func (r *row) label() string {
	switch {
	case r.Name != nil:
		return plain.Line(r.Name.Name)
	case r.bucket != nil:
		return r.bucket.Bucket.Name
	case r.talker != nil:
		return plain.Line(r.talker.Key)
	}
	return labelOf(r.Item)
}

// labelOf is what people call a rule or pool.
func labelOf(it *live.Item) string {
	rule := report.NewRule(it)
	switch {
	case it.IsPool():
		return plain.Line(it.Key.Pool)
	case it.Label.Name == "":
		return rule.Where() + " " + rule.Network()
	}
	return plain.Line(it.Label.Name) + " " + it.Direction + " " + rule.Network()
}

// short is the label within so many columns: of a rule with a name, that and the direction say most.
func (r *row) short(l look, width int) string {
	indent := strings.Repeat("  ", r.Depth)
	width -= len(indent)
	label := r.label()
	if r.Item != nil && r.bucket == nil && !r.IsPool() && r.Label.Name != "" && ansi.StringWidth(label) > width {
		name, rest := plain.Line(r.Label.Name), " "+r.Direction
		if left := width - len(rest); left >= shortest {
			label = strings.TrimRight(l.fit(name, min(left, ansi.StringWidth(name)), false), " ") + rest
		} else {
			label = name
		}
	}
	return indent + label
}

// shortest is how many columns of a name are worth more than the direction.
const shortest = 8

func (r *row) isPool() bool { return r.Item != nil && r.bucket == nil && r.IsPool() }

// A table is the rows of a view, in their order.
type table struct {
	rows []row
	of   int // how many there were before the filter
}

// ofView are the rows of a view.
func ofView(r *live.Reading, v live.View) table {
	found, of := r.Rows(v)
	t := table{make([]row, len(found)), of}
	for i := range found {
		t.rows[i].Row = found[i]
	}
	return t
}

// matching leaves the rows whose label contains the filter.
func (t table) matching(filter string) table {
	t.rows = slices.DeleteFunc(t.rows, func(r row) bool { return !strings.Contains(strings.ToLower(r.label()), strings.ToLower(filter)) })
	return t
}

// ofBuckets are the fullest buckets.
func ofBuckets(r *live.Reading, v live.View) table {
	var t table
	for i := range r.Fullest {
		if b := &r.Fullest[i]; v.Chosen == nil || v.Chosen(b.Item) {
			t.rows = append(t.rows, row{bucket: b, Row: live.Row{Item: b.Item, OfRate: -1, DroppedPercent: -1, Level: b.Percent}})
		}
	}
	t.of = len(t.rows)
	if v.Sort == "name" {
		slices.SortStableFunc(t.rows, func(a, b row) int { return plain.Natural(a.label(), b.label()) })
	}
	return t.matching(v.Search)
}

// ofTalkers are hosts or flows.
func ofTalkers(talkers []report.Talker, sort, filter string) table {
	t := table{make([]row, len(talkers)), len(talkers)}
	for i := range talkers {
		of := &talkers[i]
		use, dropped, level := value(of.OfferedBits), 0.0, -1.0
		if of.PassedBits != nil {
			use, dropped = value(of.PassedBits), max(use-value(of.PassedBits), 0)
		}
		if of.FullPercent != nil {
			level = *of.FullPercent
		}
		t.rows[i] = row{talker: of, Row: live.Row{Use: use, Dropped: dropped, Refusing: dropped, OfRate: -1, DroppedPercent: -1, Level: level}}
	}
	slices.SortStableFunc(t.rows, func(a, b row) int {
		switch sort {
		case "use":
			return cmp.Compare(b.Use, a.Use)
		case "level":
			return cmp.Compare(b.Level, a.Level)
		case "name":
			return plain.Natural(a.label(), b.label())
		}
		return cmp.Or(cmp.Compare(b.Dropped, a.Dropped), cmp.Compare(b.Level, a.Level), cmp.Compare(b.Use, a.Use))
	})
	return t.matching(filter)
}

func value(n *uint64) float64 {
	if n == nil {
		return 0
	}
	return float64(*n)
}
