package top

import (
	"cmp"
	"sort"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// Views are what rows are grouped by, Sorts the orders they can have.
var (
	Views = []string{"network", "tree", "name"}
	Sorts = []string{Worst, "use", "percent", "dropped", "level", "name"}
)

// Worst is the order of readings.
const Worst = report.Worst

// A row is a rule or pool, a name of rules, a bucket, or a host or flow.
type row struct {
	rule   *report.Rule
	named  *report.Named
	bucket *report.FullBucket
	talker *report.Talker
	depth  int
	keys   []report.Key // whose points its plot shows
	rank   int          // in the order of the reading, the worst first

	use, dropped, percent, level float64 // bit/s, bit/s, and in percent: -1 where there is none
	refused                      float64 // what it drops, or refuses if it is a pool, in bit/s
	lost                         float64 // dropped packets in percent of all; -1 where there were none
}

// id is what the row is about, in every reading.
func (r *row) id() string {
	switch {
	case r.named != nil:
		return "name\x00" + r.named.Name
	case r.bucket != nil:
		return strings.Join([]string{"bucket", r.bucket.Device, r.bucket.Direction, r.bucket.CIDR, r.bucket.Key}, "\x00")
	case r.talker != nil:
		return "talker\x00" + r.talker.Key
	}
	key := r.rule.Key()
	return strings.Join([]string{"rule", key.Device, key.Direction, key.Network, key.Pool}, "\x00")
}

// label is what people call the row.
func (r *row) label() string {
	switch {
	case r.named != nil:
		return plain.Line(r.named.Name)
	case r.bucket != nil:
		return r.bucket.Key
	case r.talker != nil:
		return plain.Line(r.talker.Key)
	case r.rule.IsPool():
		return plain.Line(r.rule.Name)
	case r.rule.Name == "":
		return r.rule.Where() + " " + r.rule.Network()
	}
	return plain.Line(r.rule.Name) + " " + r.rule.Direction + " " + r.rule.Network()
}

// short is the label within so many columns: of a rule with a name, that and the direction say most.
func (r *row) short(l look, width int) string {
	indent := strings.Repeat("  ", r.depth)
	width -= len(indent)
	label := r.label()
	if r.rule != nil && r.bucket == nil && r.named == nil && !r.rule.IsPool() && r.rule.Name != "" && ansi.StringWidth(label) > width {
		name, rest := plain.Line(r.rule.Name), " "+r.rule.Direction
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

func optional(p *float64) float64 {
	if p == nil {
		return -1
	}
	return *p
}

// figures fills in what is known of a rule. full is the level of its fullest bucket that is known.
func (r *row) figures(full float64) {
	rule := r.rule
	r.keys = []report.Key{rule.Key()}
	r.use, r.dropped, r.lost = value(rule.UseBits), value(rule.DroppedBits), optional(rule.DroppedPercent)
	r.refused = rule.Refusing()
	r.percent, r.level = optional(rule.UsePercent), -1
	if rule.RateBits != nil {
		r.level = max(rule.FullPercent(rule.LevelBytes), full)
	}
}

// A table is the rows of a view, in their order.
type table struct {
	rows []row
	of   int // how many there were before the filter
}

// rowsOf are the rules and pools of a reading with their figures, in the order of the reading: the worst first.
func rowsOf(t *report.Top) []row {
	full := map[report.Key]float64{}
	for i := range t.Fullest {
		b := &t.Fullest[i]
		key := b.RuleKey()
		full[key] = max(full[key], b.FullPercent)
	}
	rows := make([]row, len(t.Rules))
	for i := range t.Rules {
		rows[i].rule, rows[i].rank = &t.Rules[i], i
		rows[i].figures(full[t.Rules[i].Key()])
	}
	return rows
}

// compare compares rows by an order: figures from the largest on.
func compare(by string, a, b *row) int {
	switch by {
	case "use":
		return cmp.Compare(b.use, a.use)
	case "percent":
		return cmp.Compare(b.percent, a.percent)
	case "dropped":
		return cmp.Or(cmp.Compare(b.dropped, a.dropped), cmp.Compare(b.lost, a.lost))
	case "level":
		return cmp.Compare(b.level, a.level)
	case "name":
		return report.Natural(a.label(), b.label())
	}
	return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(b.dropped, a.dropped), cmp.Compare(b.level, a.level), cmp.Compare(b.use, a.use))
}

func (r *row) isPool() bool { return r.rule != nil && r.rule.IsPool() }

func sortRows(rows []row, by string) {
	sort.SliceStable(rows, func(i, j int) bool { return compare(by, &rows[i], &rows[j]) < 0 })
}

// matching are the rows that contain the filter.
func matching(rows []row, filter string) []row {
	if filter == "" {
		return rows
	}
	filter = strings.ToLower(filter)
	var found []row
	for i := range rows {
		r := &rows[i]
		if r.rule != nil && r.rule.Matches(filter) || strings.Contains(strings.ToLower(r.label()), filter) {
			found = append(found, *r)
		}
	}
	return found
}

// byNetwork are all rules and pools.
func byNetwork(t *report.Top, sort, filter string) table {
	rows := rowsOf(t)
	of := len(rows)
	rows = matching(rows, filter)
	if sort != Worst {
		sortRows(rows, sort)
	}
	return table{rows, of}
}

// byTree are pools with what is within them below, each level in the order; only those below root if that is not "". Rows
// that the filter leaves have those above them.
func byTree(t *report.Top, sort, filter, root string) table {
	rows := rowsOf(t)
	of := len(rows)
	within, pools := map[string][]*row{}, map[string]*row{}
	for i := range rows {
		if rows[i].rule.IsPool() {
			pools[rows[i].rule.Name] = &rows[i]
		}
	}
	for i := range rows { // a pool comes where the worst row within it does
		for above := pools[rows[i].rule.Within]; above != nil && above.rank > rows[i].rank; above = pools[above.rule.Within] {
			above.rank = rows[i].rank
		}
	}
	sortRows(rows, sort)
	for i := range rows {
		above := rows[i].rule.Within
		if pools[above] == nil {
			above = ""
		}
		within[above] = append(within[above], &rows[i])
	}
	var out []row
	var grow func(r *row, depth int, all bool)
	grow = func(r *row, depth int, all bool) {
		first := len(out)
		all = all || len(matching([]row{*r}, filter)) > 0
		r.depth = depth
		if out = append(out, *r); r.rule.IsPool() {
			for _, below := range within[r.rule.Name] {
				grow(below, depth+1, all)
			}
		}
		if !all && len(out) == first+1 {
			out = out[:first]
		}
	}
	if root != "" {
		for i := range rows {
			if rows[i].rule.IsPool() && rows[i].rule.Name == root {
				grow(&rows[i], 0, false)
			}
		}
		return table{out, max(len(out), 1)}
	}
	for _, r := range within[""] {
		grow(r, 0, false)
	}
	return table{out, of}
}

// byName are the names of rules, with the figures of both directions, and then the rules without one.
func byName(t *report.Top, sort, filter string) table {
	names, _ := report.Rules(t.Rules).ByName(t.Rules)
	all := rowsOf(t)
	index := make(map[string]int, len(names))
	rows := make([]row, len(names), len(names)+8)
	for i := range names {
		rows[i] = row{named: &names[i], rank: len(all), percent: -1, level: -1, lost: optional(names[i].DroppedPercent)}
		index[names[i].Name] = i
		for _, side := range []*report.NamedSide{names[i].Egress, names[i].Ingress} {
			_, percent := side.SideUse()
			rows[i].percent = max(rows[i].percent, percent)
		}
	}
	of := len(names)
	var left []row // what the filter leaves
	kept := map[int]bool{}
	for i := range all {
		r := &all[i]
		if r.rule.IsPool() {
			continue
		}
		if r.rule.Name == "" {
			of++
			if len(matching([]row{*r}, filter)) > 0 {
				left = append(left, *r)
			}
			continue
		}
		n := index[r.rule.Name]
		sum := &rows[n]
		sum.rank = min(sum.rank, r.rank) // the worst of its rules says where it comes
		sum.use, sum.dropped, sum.level = sum.use+r.use, sum.dropped+r.dropped, max(sum.level, r.level)
		sum.refused = sum.dropped
		sum.keys = append(sum.keys, r.keys...)
		kept[n] = kept[n] || filter == "" || r.rule.Matches(strings.ToLower(filter))
	}
	for i := range rows {
		if kept[i] {
			left = append(left, rows[i])
		}
	}
	sortRows(left, sort)
	return table{left, of}
}

// ofName are the rules with a name.
func ofName(t *report.Top, sort, filter, name string) table {
	var rows []row
	for _, r := range rowsOf(t) {
		if !r.rule.IsPool() && r.rule.Name == name {
			rows = append(rows, r)
		}
	}
	of := len(rows)
	rows = matching(rows, filter)
	sortRows(rows, sort)
	return table{rows, of}
}

// ofBuckets are the fullest buckets.
func ofBuckets(t *report.Top, sort, filter string) table {
	rules := map[report.Key]*report.Rule{}
	for i := range t.Rules {
		rules[t.Rules[i].Key()] = &t.Rules[i]
	}
	rows := make([]row, 0, len(t.Fullest))
	for i := range t.Fullest {
		b := &t.Fullest[i]
		rows = append(rows, row{bucket: b, rule: rules[b.RuleKey()], percent: -1, lost: -1, level: b.FullPercent})
	}
	of := len(rows)
	rows = matching(rows, filter)
	if sort == "name" {
		sortRows(rows, sort)
	}
	return table{rows, of}
}

// ofTalkers are hosts or flows.
func ofTalkers(talkers []report.Talker, sort, filter string) table {
	rows := make([]row, len(talkers))
	for i := range talkers {
		t := &talkers[i]
		use, dropped := value(t.OfferedBits), 0.0
		if t.PassedBits != nil {
			use, dropped = value(t.PassedBits), max(use-value(t.PassedBits), 0)
		}
		rows[i] = row{talker: t, use: use, dropped: dropped, refused: dropped, percent: -1, level: optional(t.FullPercent), lost: -1}
	}
	of := len(rows)
	rows = matching(rows, filter)
	sortRows(rows, sort)
	return table{rows, of}
}
