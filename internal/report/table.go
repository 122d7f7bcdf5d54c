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
	cut    func(*T) bool // which cells may be cut to fit the width; nil for none
	inside bool          // cells are cut in their middle
	least  int           // columns that are left of a cell that is cut; 0 for leastCut
	drop   int           // where cutting is not enough, columns with the highest number are left out first; 0 for never
	short  *short[T]     // what is shown where all do not fit; nil for the same
}

// whole has all cells of a column cut.
func whole[T any](*T) bool { return true }

// A short is the cells of a column without what they have in common, and a line that says that; "" for none.
type short[T any] struct {
	head, common string
	cell         func(*T) string
}

const (
	gap      = "  "
	leastCut = 12
	ellipsis = "..."
)

// A measured column has its cells, and the width of the widest one, and of the widest one that cannot be cut.
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

// measure returns the columns that have any cells to show, and the width of all.
func measure[T any](rows []T, columns []column[T]) (shown []measured[T], total int) {
	total = -len(gap)
	for _, c := range columns {
		m, used := measured[T]{c, make([]string, len(rows)), max(textWidth(c.head), c.wide), cmp.Or(c.least, leastCut)}, c.always
		for i := range rows {
			cell := c.cell(&rows[i])
			width := textWidth(cell)
			used = used || cell != "" && cell != "0" && cell != "0%"
			m.cells[i], m.width = cell, max(m.width, width)
			if c.cut == nil || !c.cut(&rows[i]) {
				m.least = max(m.least, width)
			}
		}
		if m.least = min(m.least, m.width); c.cut == nil {
			m.least = m.width
		}
		if used {
			shown, total = append(shown, m), total+m.width+len(gap)
		}
	}
	return shown, total
}

// fit makes a table at most width columns wide, if that can be: it shortens columns, leaves some out, and then cuts
// cells, the last columns first. It returns lines that say what is not shown.
func fit[T any](rows []T, columns []column[T], width int) (shown []measured[T], notes []string) {
	shown, total := measure(rows, columns)
	if width == 0 || total <= width {
		return shown, nil
	}
	columns = slices.Clone(columns)
	for i, c := range columns {
		if c.short != nil {
			columns[i].head, columns[i].cell = c.short.head, c.short.cell
			if c.short.common != "" {
				notes = append(notes, c.short.common)
			}
		}
	}
	shown, total = measure(rows, columns)
	least := total
	for _, c := range shown {
		least -= c.width - c.least
	}
	var out []string
	for least > width {
		first := 0
		for i, c := range shown {
			if c.drop > shown[first].drop {
				first = i
			}
		}
		if shown[first].drop == 0 {
			break
		}
		out = append(out, shown[first].head)
		least, total = least-shown[first].least-len(gap), total-shown[first].width-len(gap)
		shown = slices.Delete(shown, first, first+1)
	}
	for i := len(shown) - 1; i >= 0 && total > width; i-- {
		narrower := max(shown[i].width-(total-width), shown[i].least)
		total -= shown[i].width - narrower
		shown[i].width = narrower
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
			wide := textWidth(text)
			if wide > c.width && c.inside {
				text = cutInside(text, c.width)
			} else if wide > c.width {
				text = ansi.Truncate(text, c.width, ellipsis)
			}
			padding := strings.Repeat(" ", max(c.width-textWidth(text), 0))
			if i > 0 {
				b.WriteString(gap)
			}
			if c.right {
				b.WriteString(padding)
			}
			b.WriteString(text)
			if !c.right {
				b.WriteString(padding)
			}
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

// places is the column of the device and direction of rules. The short one leaves out what is the same for all.
func places(rules Rules) column[Rule] {
	const pool = "pool" // which has no device
	c := column[Rule]{head: "DEVICE", cell: func(r *Rule) string { return cmp.Or(r.Where(), pool) }}
	var first *Rule
	direction := "" // of all
	for i := range rules {
		switch r := &rules[i]; {
		case r.IsPool():
		case first == nil:
			first, direction = r, r.Direction
		case r.Device != first.Device:
			return c
		case r.Direction != direction:
			direction = ""
		}
	}
	if first == nil {
		return c
	}
	rest := func(r *Rule) string {
		switch {
		case r.IsPool():
			return pool
		case direction == "":
			return r.Direction
		}
		return ""
	}
	c.short = &short[Rule]{"DIR", "all rules: " + strings.TrimSpace(plain.Line(first.Device)+" "+direction), rest}
	return c
}

// cutInside cuts a text to so many columns in its middle, for texts that may differ only in their ends.
func cutInside(s string, width int) string {
	end := (width - len(ellipsis)) / 2
	return ansi.Truncate(s, width-end, ellipsis) + ansi.TruncateLeft(s, ansi.StringWidth(s)-end, "")
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
	switch key {
	case "plan":
		c.cut = whole[Rule]
	case "within":
		c.cut, c.least = whole[Rule], leastPool
	}
	return c
}

func cell(head string, right bool, of func(*Rule) string) column[Rule] {
	return column[Rule]{head: head, right: right, cell: of}
}

// figureText writes a figure, in the unit that its key has.
func figureText(f *live.Figure, it *live.Item) string {
	switch v := f.Of(it).(type) {
	case string:
		if v != (policy.Share{}).String() { // that nobody has a share goes without saying
			return plain.Line(v)
		}
	case uint64:
		switch {
		case strings.HasSuffix(f.Key, "_bits_per_second"): // as it was set
			return policy.Rate(v).String()
		case strings.HasSuffix(f.Key, "_bytes"):
			return bytesText(v)
		}
		return countText(v)
	case float64:
		if strings.HasSuffix(f.Key, "_percent") {
			return percentText(v)
		}
		return bitsText(uint64(v))
	}
	return ""
}

// columns are those of a table of rules, or of pools.
func (t Table) columns(rules Rules) []column[Rule] {
	pools := slices.ContainsFunc(rules, func(r Rule) bool { return r.IsPool() })
	name := column[Rule]{head: "NAME", cell: func(r *Rule) string { return plain.Line(r.Label.Name) }, cut: whole[Rule], least: leastName}
	place, rate := places(rules), cell("RATE", true, (*Rule).rateCell)
	if rate.always = true; pools {
		name.head = "POOL"
		place.cell, place.short = func(*Rule) string { return "" }, nil
	}
	columns := []column[Rule]{name, place, cell("NETWORK", false, (*Rule).Network), figure("plan"), cell("BY", false, (*Rule).matchedBy), figure("within"), rate,
		cell("LEASE", true, (*Rule).leaseCell), figure("guarantee_bits_per_second")}
	if t.Wide {
		columns = append(columns, figure("algorithm"), cell("ON EXCESS", false, (*Rule).OnExcess), figure("capacity_bytes"), figure("pbs_bytes"), figure("ebs_bytes"), figure("queue_bytes"),
			figure("share"), cell("WEIGHT", true, (*Rule).weight))
	}
	columns = append(columns, t.counted(rules)...)
	if !t.Wide {
		for i, c := range columns {
			if c.head != place.head || t.Width > 0 && namesSayMore(rules) {
				columns[i].drop = slices.Index(dropped, c.head) + 1
			}
		}
	}
	return append(columns, cell("STATE", false, (*Rule).remarks))
}

// counted are the columns of what was counted.
func (t Table) counted(rules Rules) []column[Rule] {
	measured := slices.ContainsFunc(rules, func(r Rule) bool { return r.Interval > 0 })
	use := figure("use_bits_per_second")
	use.always = measured
	columns := []column[Rule]{use, figure("use_percent")}
	if !t.Wide {
		columns = append(columns, figure("green_bits_per_second"), figure("yellow_bits_per_second"), figure("red_bits_per_second"))
	}
	if t.Wide || !measured {
		columns = append(columns, figure("passed_bytes"))
	}
	if t.Wide || slices.ContainsFunc(rules, func(r Rule) bool { return r.IsPool() }) {
		columns = append(columns, cell("BORROWED", true, (*Rule).borrowed))
	}
	columns = append(columns, figure("dropped_percent"), figure("refused_percent"), figure("active_sharers"))
	switch {
	case t.Wide:
		for _, key := range []string{"passed_packets", "excess_packets", "green_packets", "yellow_packets", "red_packets", "dropped_packets", "delayed_packets", "marked_packets",
			"contended_packets", "spilled_packets", "exempt_packets"} {
			columns = append(columns, figure(key))
		}
		columns = append(columns, figure("level_bytes"), cell("FULL", true, func(r *Rule) string { return percentOr(r.FullPercent(r.Level)) }), figure("second_level_bytes"), figure("active_buckets"), figure("note"))
	case t.Excess:
		columns = append(columns, figure("excess_percent"))
	}
	return columns
}

// dropped are the columns of a table that are left out where the screen is narrow, the last one first.
var dropped = []string{"DEVICE", "WITHIN", "REFUSED", "OF RATE", "GREEN", "YELLOW", "RED", "GUARANTEE", "BORROWED", "SHARERS", "PLAN"}

// namesSayMore reports whether rules can be told apart without their devices.
func namesSayMore(rules Rules) bool {
	there := map[[2]string]bool{}
	for _, r := range rules {
		if r.Label.Name != "" {
			there[[2]string{r.Label.Name, r.Item.Network}] = true
		}
	}
	return len(there) == len(rules)
}

// These are more than leastCut, so that names can be told apart.
const (
	leastName = 20
	leastPool = 15
)

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

// called is the column of what people call rules and pools.
func called(rules Rules) column[Rule] {
	head := "RULE"
	if slices.ContainsFunc(rules, func(r Rule) bool { return r.IsPool() }) {
		head = "POOL OR RULE"
	}
	return column[Rule]{head: head, cell: (*Rule).calledBy, cut: func(r *Rule) bool { return r.Label.Name != "" }, least: leastName}
}

// matchedBy is the side that prefixes are compared with where that is not the far side.
func (r *Rule) matchedBy() string {
	if r.IsPool() || r.Place.Match == r.Place.Direction.FarSide() {
		return ""
	}
	return r.Place.Match.String()
}

// RateText is the rate, and who has it.
func (r *Rule) RateText() string {
	if r.Rate == policy.Unlimited && r.Within != "" {
		return "as pool"
	}
	return rateFor(ratesOf(&r.Item.Rule), r.Scope())
}

// RateNowText is RateText, but of a pool with leases what packets meet: the lease or the safe share.
func (r *Rule) RateNowText() string {
	if r.Lease != nil {
		return bitsText(*r.rateNow())
	}
	return r.RateText()
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
		return (&Rule{Item: pool}).RateNowText() + "/pool"
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

// fullest are the rules of all buckets, with one bucket each, the fullest first.
func (rules Rules) fullest() (rows Rules) {
	for _, r := range rules {
		for i := range r.Buckets {
			one := r
			one.Buckets = r.Buckets[i : i+1]
			rows = append(rows, one)
		}
	}
	slices.SortStableFunc(rows, func(a, b Rule) int { return cmp.Compare(b.Buckets[0].LevelBytes, a.Buckets[0].LevelBytes) })
	return rows
}

// KeepFullest leaves rules the n buckets with the highest levels of all, each rule's own
// with the fullest first; all for n = 0. It reports how many there were.
func (rules Rules) KeepFullest(n int) (of int) {
	rows := rules.fullest()
	if of = len(rows); n == 0 {
		n = of
	}
	kept := map[*live.Item][]Bucket{}
	for _, r := range rows[:min(n, of)] {
		kept[r.Item] = append(kept[r.Item], r.Buckets[0])
	}
	for i := range rules {
		if r := &rules[i]; r.Buckets != nil {
			r.Buckets = append([]Bucket{}, kept[r.Item]...)
		}
	}
	return of
}

// partColumns are those of rules with one bucket each, or with a host or flow that sends: who it is comes first.
func partColumns(head string) []column[Rule] {
	sends := func(head string, of func(*live.Part) live.Value) column[Rule] {
		return cell(head, true, func(r *Rule) string {
			if r.now == nil {
				return ""
			}
			return optional(bits(of(r.now.Part)), bitsText)
		})
	}
	bucket := func(head string, drop int, of func(*Rule) string) column[Rule] {
		c := cell(head, true, func(r *Rule) string {
			if r.now != nil && !r.now.Part.Full.Known {
				return ""
			}
			return of(r)
		})
		c.drop = drop
		return c
	}
	level := bucket("LEVEL", 1, func(r *Rule) string { return bytesText(r.Buckets[0].LevelBytes) })
	level.always = head == "KEY" // of buckets, whose second level may be all that they have
	return []column[Rule]{
		{head: head, cut: whole[Rule], inside: true, least: leastName, cell: func(r *Rule) string {
			if r.IsPool() {
				return ""
			}
			return plain.Line(r.Buckets[0].Key)
		}},
		sends("OFFERED", func(p *live.Part) live.Value { return p.Offered }),
		sends("PASSED", func(p *live.Part) live.Value { return p.Passed }),
		sends("DROPS", func(p *live.Part) live.Value {
			return live.Value{N: max(p.Offered.N-p.Passed.N, 0), Known: p.Offered.Known && p.Passed.Known}
		}),
		level,
		bucket("FULL", 1, func(r *Rule) string { return percentOr(r.FullPercent(r.Buckets[0].LevelBytes)) }),
		bucket("LEVEL 2", 0, func(r *Rule) string {
			return optional(r.Buckets[0].SecondLevelBytes, func(level uint64) string {
				return bytesText(level) + " " + percentText(percentOf(level, r.Colours.Burst()))
			})
		}),
		bucket("WAIT", 0, func(r *Rule) string {
			if r.Buckets[0].WaitNS == nil && r.Excess == policy.Delay {
				return "dropped"
			}
			return optional(r.Buckets[0].WaitNS, About)
		}),
	}
}

// BucketsText writes a line for each bucket, the fullest first. of is as KeepFullest reports it.
func (rules Rules) BucketsText(w io.Writer, of, width int) error {
	rows := rules.fullest()
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, "all buckets are empty")
		return err
	}
	text := bufio.NewWriter(w)
	err := writeTable(text, rows, append([]column[Rule]{called(rows), places(rows)}, partColumns("KEY")...), width)
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

func bytesText(n uint64) string {
	if n == 0 {
		return "0"
	}
	return si(float64(n), byteNames)
}

func bitsText(n uint64) string {
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
