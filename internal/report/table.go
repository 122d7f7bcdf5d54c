package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// screenWidth is how many columns text is folded to.
const screenWidth = 80

// A column of a table is left out where all cells are empty or zero.
type column[T any] struct {
	head   string
	key    string // of its figure; "" for none
	right  bool   // numbers are aligned to the right
	wide   int    // at least so many columns, so that it does not move on a screen
	always bool   // also where all cells are empty
	cell   func(*T) string
	// Where not all fit: a line below says what all cells of a common column are, the columns with the highest drop are left out
	// first, and cells are cut in their middle to no less than least columns. 0 is for never.
	common      bool
	drop, least int
}

const (
	gap      = "  "
	ellipsis = "..."
)

// Of names more is left, so that they can be told apart.
const (
	leastCut  = 12
	leastPool = 15
	leastName = 20
)

// A measured column has its cells, and how wide it is and has to be.
type measured[T any] struct {
	column[T]
	cells        []string
	width, least int
}

// textWidth is how many columns a terminal needs for a text. Most are ASCII.
func textWidth(s string) int {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return ansi.StringWidth(s)
		}
	}
	return len(s)
}

// measure returns the columns that have any cells to show.
func measure[T any](rows []T, columns []column[T]) (shown []measured[T]) {
	for _, c := range columns {
		m, used := measured[T]{column: c, cells: make([]string, len(rows)), width: max(textWidth(c.head), c.wide)}, c.always
		for i := range rows {
			m.cells[i] = c.cell(&rows[i])
			used = used || m.cells[i] != "" && m.cells[i] != "0" && m.cells[i] != "0%"
			m.width = max(m.width, textWidth(m.cells[i]))
		}
		if m.least = m.width; c.least > 0 {
			m.least = min(c.least, m.width)
		}
		if used {
			shown = append(shown, m)
		}
	}
	return shown
}

// fit makes a table at most width columns wide, if that can be. It returns lines that say what is not shown.
func fit[T any](rows []T, columns []column[T], width int) (shown []measured[T], notes []string) {
	shown = measure(rows, columns)
	over := func(least bool) (sum int) {
		for _, m := range shown {
			if sum += len(gap); least {
				sum += m.least
			} else {
				sum += m.width
			}
		}
		return sum - len(gap) - width
	}
	if width == 0 || over(false) <= 0 {
		return shown, nil
	}
	shown = slices.DeleteFunc(shown, func(m measured[T]) bool {
		values := slices.Compact(slices.DeleteFunc(slices.Clone(m.cells), func(cell string) bool { return cell == "" }))
		if !m.common || len(values) > 1 {
			return false
		}
		notes = append(notes, "all rules: "+values[0])
		return true
	})
	var out []string
	for over(true) > 0 {
		first := 0
		for i, m := range shown {
			if m.drop > shown[first].drop {
				first = i
			}
		}
		if shown[first].drop == 0 {
			break
		}
		out = append(out, shown[first].head)
		shown = slices.Delete(shown, first, first+1)
	}
	for i := len(shown) - 1; i >= 0; i-- {
		shown[i].width = max(shown[i].width-max(over(false), 0), shown[i].least)
	}
	if out != nil {
		notes = append(notes, fmt.Sprintf("not shown in %d columns: %s", width, strings.Join(out, ", ")))
	}
	return shown, notes
}

// tableLines are the heads and rows of a table, at most width columns wide where that can be, 0 is no limit; and lines that say
// what is not shown.
func tableLines[T any](rows []T, columns []column[T], width int) (lines, notes []string) {
	shown, notes := fit(rows, columns, width)
	lines = make([]string, len(rows)+1)
	for n := range lines {
		var b strings.Builder
		for i, c := range shown {
			text := c.head
			if n > 0 {
				text = c.cells[n-1]
			}
			if wide := textWidth(text); wide > c.width {
				end := (c.width - len(ellipsis)) / 2 // texts may differ only in their ends
				text = ansi.Truncate(text, c.width-end, ellipsis) + ansi.TruncateLeft(text, wide-end, "")
			}
			padding := strings.Repeat(" ", max(c.width-textWidth(text), 0))
			if i > 0 {
				b.WriteString(gap)
			}
			if c.right {
				text, padding = padding, text
			}
			b.WriteString(text + padding)
		}
		lines[n] = strings.TrimRight(b.String(), " ")
	}
	return lines, notes
}

// writeTable writes rows, at most width columns wide where that can be; 0 is no limit.
func writeTable[T any](w io.Writer, rows []T, columns []column[T], width int) error {
	lines, notes := tableLines(rows, columns, width)
	for _, line := range append(lines, notes...) {
		if _, err := io.WriteString(w, line+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// places is the column of the device and direction of rules.
func places() column[Rule] {
	return column[Rule]{head: "DEVICE", common: true, cell: (*Rule).Where}
}

// A Table shows pools, and then rules, in columns.
type Table struct {
	Rules Rules
	Of    int // how many were found; some may have been left out since
	Wide  bool
	// Excess shows the share of excess and delayed packets. A wide table has their numbers.
	Excess bool
	Width  int // columns of the terminal; 0 for no limit
}

// manyRows is from how many rows on a table ends with their number: more than fit a screen.
const manyRows = 20

// Text writes the table, and below it what concerns all of it.
func (t Table) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	pools, rules := t.Rules.Split()
	what := "rule"
	for i, part := range []Rules{pools, rules} {
		if len(part) == 0 && (i == 0 || len(pools) > 0) {
			continue
		}
		if i > 0 && len(pools) > 0 {
			text.WriteString("\n")
		}
		if err := writeTable(text, part, t.columns(part), t.Width); err != nil {
			return err
		}
	}
	switch {
	case len(pools) > 0 && len(rules) > 0:
		what = "limit"
	case len(pools) > 0:
		what = "pool"
	}
	if n := len(t.Rules); n < t.Of {
		fmt.Fprintf(text, "%d of %s\n", n, plain.Count(t.Of, what))
	} else if n >= manyRows {
		fmt.Fprintln(text, plain.Count(n, what))
	}
	t.Rules.pending(text, lastReverts)
	return text.Flush()
}

// figure is the column of a live.Figure.
func figure(key string) column[Rule] {
	f := live.Figured(key)
	c := column[Rule]{head: f.Head, key: key, right: strings.HasPrefix(f.Type, "number"), cell: func(r *Rule) string { return figureText(f, r.Item) }}
	c.least = map[string]int{"plan": leastCut, "within": leastPool}[key]
	return c
}

func cell(head string, right bool, of func(*Rule) string) column[Rule] {
	return column[Rule]{head: head, right: right, cell: of}
}

// figureText writes a figure, in the unit that its key has.
func figureText(f *live.Figure, it *live.Item) string {
	if f.Key == "dropped_packets" && !it.SameBegin() {
		return ""
	}
	switch v := f.Of(it).(type) {
	case string:
		if v != (policy.Share{}).String() { // that nobody has a share goes without saying
			return plain.Line(v)
		}
	case uint64:
		switch {
		case f.Key == "quota_left_bytes":
			return leftText(v, it.Used, it.Also.Then)
		case strings.HasSuffix(f.Key, "_bits_per_second"): // as it was set
			return policy.Rate(v).String()
		case strings.HasSuffix(f.Key, "_bytes"):
			return Bytes(v)
		}
		return countText(v)
	case float64:
		if strings.HasSuffix(f.Key, "_percent") {
			return percentText(v)
		}
		return Bits(uint64(v))
	}
	return ""
}

// columns are those of a table of rules, or of pools.
func (t Table) columns(rules Rules) []column[Rule] {
	pools := rules.havePools()
	measured := slices.ContainsFunc(rules, func(r Rule) bool { return r.Interval > 0 })
	name := column[Rule]{head: "NAME", cell: func(r *Rule) string { return plain.Line(r.Label.Name) }, least: leastName}
	rate, borrowed := cell("RATE", true, (*Rule).rateCell), cell("BORROWED", true, (*Rule).borrowed)
	if rate.always = true; pools {
		name.head = "POOL"
	}
	columns := []column[Rule]{name, places(), cell("NETWORK", false, (*Rule).Network), cell("BY", false, (*Rule).matchedBy)}
	state := cell("STATE", false, (*Rule).remarks)
	if t.Wide {
		columns = append(columns, rate, cell("ON EXCESS", false, (*Rule).OnExcess), cell("WEIGHT", true, (*Rule).weight))
		return append(figures(columns), full, borrowed, state)
	}
	add := func(drop int, c column[Rule]) {
		c.drop = drop
		columns = append(columns, c)
	}
	add(10, figure("plan"))
	add(1, figure("within"))
	add(0, rate)
	add(7, figure("guarantee_bits_per_second"))
	use := figure("use_bits_per_second")
	use.always = measured
	add(0, use)
	add(3, figure("use_percent"))
	add(4, figure("green_bits_per_second"))
	add(5, figure("yellow_bits_per_second"))
	add(6, figure("red_bits_per_second"))
	if !measured {
		add(0, figure("passed_bytes"))
	}
	if pools {
		add(8, borrowed)
	}
	add(0, figure("dropped_percent"))
	add(2, figure("refused_percent"))
	add(1, figure("quota_left_bytes"))
	add(9, figure("active_sharers"))
	if t.Excess {
		add(0, figure("excess_percent"))
	}
	add(0, state)
	return columns
}

// figures adds the columns of all figures that have a head, each head once.
func figures(columns []column[Rule]) []column[Rule] {
	for _, f := range live.Figures {
		if f.Head != "" && !slices.ContainsFunc(columns, func(c column[Rule]) bool { return c.head == f.Head }) {
			columns = append(columns, figure(f.Key))
		}
	}
	return columns
}

// full is how full the shared bucket is.
var full = cell("FULL", true, func(r *Rule) string { return percentOr(r.FullPercent(r.Level)) })

// Where is the device and the direction, as commands take them.
func (r *Rule) Where() string { return strings.TrimSpace(plain.Line(r.Device) + " " + r.Direction) }

// weight is the weight if it is not the usual one.
func (r *Rule) weight() string {
	if r.Weight <= 1 {
		return ""
	}
	return r.Weight.String()
}

// borrowed is what passed beyond a guarantee, or its rate over the interval.
func (r *Rule) borrowed() string {
	switch {
	case r.Guarantee == 0:
		return ""
	case r.Interval > 0:
		return r.figure("borrowed_bits_per_second")
	}
	return r.figure("borrowed_bytes")
}

// Network is the prefix; of a single address without its length.
func (r *Rule) Network() string { return addressOf(r.Item.Network) }

// addressOf is a network; of a single address without its length.
func addressOf(network string) string {
	for _, length := range []string{"/32", "/128"} {
		if address, ok := strings.CutSuffix(network, length); ok && strings.Contains(address, ":") == (length == "/128") {
			return address
		}
	}
	return network
}

// calledBy is what people call the rule.
func (r *Rule) calledBy() string { return cmp.Or(plain.Line(r.Label.Name), r.Network()) }

// called is the column of what people call rules, and pools if there are some.
func called(pools bool) column[Rule] {
	return column[Rule]{head: map[bool]string{false: "RULE", true: "POOL OR RULE"}[pools], cell: (*Rule).calledBy, least: leastName}
}

func (rules Rules) havePools() bool {
	return slices.ContainsFunc(rules, func(r Rule) bool { return r.IsPool() })
}

// matchedBy is the side that prefixes are compared with where that is not the far side.
func (r *Rule) matchedBy() string {
	if r.IsPool() || r.Place.Match == r.Place.Direction.FarSide() {
		return ""
	}
	return r.Place.Match.String()
}

// RateText is the rate, and who has it; of a pool with a lease or a safe share, that comes first.
func (r *Rule) RateText() string {
	switch {
	case r.isLeased():
		return Bits(*r.rateNow()) + map[bool]string{true: " leased", false: " safe"}[r.Leased()] + " of " + r.Rate.String()
	case r.Rate == policy.Unlimited && r.Within != "":
		return "as pool"
	}
	return rateFor(ratesOf(&r.Item.Rule), r.Scope())
}

// rateFor is a rate, and who has it; "" for all together.
func rateFor(rate, scope string) string {
	switch {
	case scope == "":
		return rate
	case strings.HasPrefix(scope, "/"), strings.ContainsAny(rate, "/+"):
		return rate + " per " + scope
	default:
		return rate + "/" + scope
	}
}

// rateCell is RateText in a table; of a rule that has only a pool the rate of that, unless a line of its own shows it.
func (r *Rule) rateCell() string {
	if pool := r.Parent(); r.depth == 0 && r.Rate == policy.Unlimited && pool != nil {
		return (&Rule{Item: pool}).RateText() + "/pool"
	}
	return r.RateText()
}

// remarks say what is unusual about the rule: above all that it is not in force.
func (r *Rule) remarks() string {
	var says []string
	if text := r.Unusual(); text != "" {
		says = append(says, text)
	}
	if r.Label.Waits != 0 {
		says = append(says, "guarantee waits")
	}
	if r.Decides != nil && *r.Decides {
		says = append(says, "decides")
	} else if r.Decides != nil {
		says = append(says, "overridden")
	}
	return strings.Join(says, ", ")
}

// bucketRows are the rows of all buckets: the fullest first, or by order "quota" those with the least left.
func (rules Rules) bucketRows(order string) (rows []live.Row) {
	for _, r := range rules {
		for _, b := range r.Buckets {
			rows = append(rows, r.PartRow(live.Part{Bucket: b, Full: r.FullestPercent(b)}))
		}
	}
	slices.SortStableFunc(rows, func(a, b live.Row) int {
		quota := cmp.Compare(b.QuotaPercent(), a.QuotaPercent())
		if order == "quota" && quota != 0 {
			return quota
		}
		return cmp.Or(cmp.Compare(b.Level, a.Level), cmp.Compare(b.Part.Bytes, a.Part.Bytes), quota, plain.Natural(a.Part.Name, b.Part.Name))
	})
	return rows
}

// KeepFullest leaves rules the first n buckets of all, as bucketRows has them; all for n = 0. It reports how many there were.
func (rules Rules) KeepFullest(n int, order string) (of int) {
	rows := rules.bucketRows(order)
	if of = len(rows); n == 0 {
		n = of
	}
	kept := map[*live.Item][]live.Bucket{}
	for _, r := range rows[:min(n, of)] {
		kept[r.Item] = append(kept[r.Item], r.Part.Bucket)
	}
	for i := range rules {
		if r := &rules[i]; r.Buckets != nil {
			r.Buckets = append([]live.Bucket{}, kept[r.Item]...)
		}
	}
	return of
}

// partColumns are those of parts of rules: who it is, then the rule if that may not be the same for all, then what it sends and
// its bucket.
func partColumns(rows []live.Row, head string, withRule bool) []column[live.Row] {
	columns := []column[live.Row]{{head: head, least: leastName, cell: func(r *live.Row) string {
		if r.IsPool() {
			return ""
		}
		return plain.Line(r.Part.Name)
	}}}
	if withRule {
		pools := slices.ContainsFunc(rows, func(r live.Row) bool { return r.IsPool() })
		for _, c := range []column[Rule]{called(pools), places()} {
			columns = append(columns, column[live.Row]{head: c.head, least: c.least, common: c.common, cell: func(r *live.Row) string { return c.cell(&Rule{Item: r.Item}) }})
		}
	}
	add := func(head string, drop int, of func(r *live.Row) string) {
		columns = append(columns, column[live.Row]{head: head, right: true, drop: drop, cell: of})
	}
	add("OFFERED", 0, func(r *live.Row) string { return optional(bits(r.Part.Offered), Bits) })
	add("PASSED", 0, func(r *live.Row) string { return optional(bits(r.Part.Passed), Bits) })
	add("DROPS", 0, func(r *live.Row) string {
		if !r.Part.Offered.Known || !r.Part.Passed.Known {
			return ""
		}
		return Bits(uint64(r.Dropped))
	})
	add("LEVEL", 1, func(r *live.Row) string {
		if !r.Part.Full.Known {
			return ""
		}
		return Bytes(r.Part.Bytes)
	})
	columns[len(columns)-1].always = withRule // a second level may be all that a bucket has
	add("PACKETS", 1, func(r *live.Row) string { return optional(r.Part.Packets, countText) })
	add("FLOWS", 1, func(r *live.Row) string { return optional(r.Part.Flows, countText) })
	add("FULL", 1, func(r *live.Row) string { return percentOr(r.Part.Full) })
	add("LEVEL 2", 0, func(r *live.Row) string {
		return optional(r.Part.SecondBytes, func(level uint64) string {
			return Bytes(level) + " " + percentText(percentOf(level, r.Colours.Burst()))
		})
	})
	add("USED", 0, func(r *live.Row) string { return optional(r.Part.UsedBytes, Bytes) })
	add("LEFT", 0, func(r *live.Row) string {
		return optional(r.Part.LeftBytes, func(left uint64) string {
			return leftText(left, maps.Quota{UsedBytes: *r.Part.UsedBytes, LeftBytes: left}, r.Also.Then)
		})
	})
	add("WAIT", 0, func(r *live.Row) string {
		if r.Part.WaitNS == nil && r.Part.Full.Known && r.Excess == policy.Delay {
			return "dropped"
		}
		return optional(r.Part.WaitNS, About)
	})
	return columns
}

// BucketsText writes a line for each bucket, the fullest first. of is as KeepFullest reports it.
func (rules Rules) BucketsText(w io.Writer, order string, of, width int) error {
	rows := rules.bucketRows(order)
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, NoRows("bucket"))
		return err
	}
	text := bufio.NewWriter(w)
	err := writeTable(text, rows, partColumns(rows, "KEY", true), width)
	if err == nil && len(rows) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rows), plain.Count(of, "bucket"))
	}
	rules.pending(text, lastReverts)
	return cmp.Or(err, text.Flush())
}

func number[N uint64 | float64](v *N, none float64) float64 {
	if v == nil {
		return none
	}
	return float64(*v)
}

// optional is the text of a value; empty where it is not known or has no meaning.
func optional[V any](v *V, text func(V) string) string {
	if v == nil {
		return ""
	}
	return text(*v)
}

// si writes a number with three digits, in thousands of a unit.
func si(v float64, names []string) string {
	unit := 0
	for v >= 999.5 && unit < len(names)-1 {
		v, unit = v/1000, unit+1
	}
	decimals := 2
	switch {
	case v >= 99.95 || unit == 0:
		decimals = 0
	case v >= 9.995:
		decimals = 1
	}
	return fmt.Sprintf("%.*f%s", decimals, v, names[unit])
}

var (
	byteNames  = []string{" B", " kB", " MB", " GB", " TB", " PB", " EB"}
	bitNames   = []string{"bit", "kbit", "mbit", "gbit", "tbit"}
	countNames = []string{"", "k", "M", "G", "T", "P", "E"}
)

// Bytes writes a number of bytes as all tables have it.
func Bytes(n uint64) string {
	if n == 0 {
		return "0"
	}
	return si(float64(n), byteNames)
}

// Bits is Bytes for bit/s.
func Bits(n uint64) string {
	if n == 0 {
		return "0"
	}
	return si(float64(n), bitNames)
}

func countText(n uint64) string { return si(float64(n), countNames) }

// percentOf is part of a whole in percent, to a hundredth.
func percentOf(part, whole uint64) float64 {
	return live.Percent(part, max(whole, 1)).N
}

func percentText(p float64) string {
	switch {
	case p == 0:
		return "0%"
	case p < 0.1:
		return "<0.1%"
	case p < 9.95:
		return fmt.Sprintf("%.1f%%", p)
	}
	return fmt.Sprintf("%.0f%%", p)
}
