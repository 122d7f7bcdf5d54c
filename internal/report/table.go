package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// screenWidth is how many columns text is folded to.
const screenWidth = 80

// A row is a rule or pool in a table, or a bucket of it, or its round-trip times; a name of rules; or a member of a cluster.
type row struct {
	*Rule
	depth  int // the number of pools above it, in a tree
	bucket *Bucket
	named  *Named
	rtt    *RTT
	now    *live.Row // of a view
	member *ClusterMember
}

func (rules Rules) rows() []row {
	rows := make([]row, len(rules))
	for i := range rules {
		rows[i].Rule = &rules[i]
	}
	return rows
}

// A column of a table is left out where all cells are empty or zero.
type column struct {
	head   string
	right  bool // numbers are aligned to the right
	wide   int  // at least so many columns, so that it does not move on a screen
	always bool // also where all cells are empty
	cell   func(*row) string
	cut    func(*row) bool // which cells may be cut to fit the width; nil for none
	inside bool            // cells are cut in their middle
	least  int             // columns that are left of a cell that is cut; 0 for leastCut
	drop   int             // where cutting is not enough, columns with the highest number are left out first; 0 for never
	short  *short          // what is shown where all do not fit; nil for the same
}

// A short is the cells of a column without what they have in common, and a line that says that; "" for none.
type short struct {
	head, common string
	cell         func(*row) string
}

const (
	gap      = "  "
	leastCut = 12
	ellipsis = "..."
)

// A measured column has its cells, and the width of the widest one, and of the widest one that cannot be cut.
type measured struct {
	column
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
func measure(rows []row, columns []column) (shown []measured, total int) {
	total = -len(gap)
	for _, c := range columns {
		m, used := measured{c, make([]string, len(rows)), max(textWidth(c.head), c.wide), cmp.Or(c.least, leastCut)}, c.always
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
func fit(rows []row, columns []column, width int) (shown []measured, notes []string) {
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
func tableLines(rows []row, columns []column, width int) (lines, notes []string) {
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
			if wide > c.width {
				text = cut(text, c.width, c.inside)
				wide = textWidth(text)
			}
			padding := strings.Repeat(" ", max(c.width-wide, 0))
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
func writeTable(w io.Writer, rows []row, columns []column, width int) error {
	lines, notes := tableLines(rows, columns, width)
	for _, line := range append(lines, notes...) {
		if _, err := io.WriteString(w, line+"\n"); err != nil {
			return err
		}
	}
	return nil
}

// places is the column of the device and direction of rules. The short one leaves out what is the same for all.
func places(rows []row) column {
	const pool = "pool" // which has no device
	c := column{head: "DEVICE", cell: func(r *row) string { return cmp.Or(r.where(), pool) }}
	var first *Rule
	direction := "" // of all
	for _, r := range rows {
		switch {
		case r.IsPool():
		case first == nil:
			first, direction = r.Rule, r.Direction
		case r.Device != first.Device:
			return c
		case r.Direction != direction:
			direction = ""
		}
	}
	if first == nil {
		return c
	}
	rest := func(r *row) string {
		switch {
		case r.IsPool():
			return pool
		case direction == "":
			return r.Direction
		}
		return ""
	}
	c.short = &short{"DIR", "all rules: " + strings.TrimSpace(plain.Line(first.Device)+" "+direction), rest}
	return c
}

// cut cuts a text to so many columns, and marks that: at its end, or inside where texts may differ only in their ends.
func cut(text string, width int, inside bool) string {
	if inside {
		end := ansi.TruncateLeft(text, ansi.StringWidth(text)-(width-len(ellipsis))/2, "")
		return ansi.Truncate(text, width-ansi.StringWidth(end), ellipsis) + end
	}
	return ansi.Truncate(text, width, ellipsis)
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
		rows := part.rows()
		if err := writeTable(text, rows, t.columns(rows), t.Width); err != nil {
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

// columns are those of a table of rules, or of pools.
func (t Table) columns(rows []row) []column {
	measured := slices.ContainsFunc(rows, func(r row) bool { return r.IntervalNS != nil })
	pools := slices.ContainsFunc(rows, func(r row) bool { return r.IsPool() })
	always := func(*row) bool { return true }
	name := column{head: "NAME", cell: func(r *row) string { return plain.Line(r.Name) }, cut: always, least: leastName}
	plan := column{head: "PLAN", cell: func(r *row) string { return plain.Line(r.Plan) }, cut: always}
	place := places(rows)
	figure := func(head string, shown bool, cell func(*row) string) column {
		if !shown {
			cell = func(*row) string { return "" }
		}
		return column{head: head, right: true, cell: cell}
	}
	text := func(head string, of func(*row) string) column { return column{head: head, cell: of} }
	rate := figure("RATE", true, (*row).rateCell)
	rate.always = true
	if pools {
		name.head = "POOL"
		place.cell, place.short = func(*row) string { return "" }, nil
	}
	within := column{head: "WITHIN", cell: func(r *row) string { return plain.Line(r.Within) }, cut: always, least: leastPool}
	columns := []column{name, place, text("NETWORK", (*row).network), plan, text("BY", (*row).matchedBy), within, rate,
		figure("LEASE", true, (*row).leaseCell),
		figure("GUARANTEE", true, func(r *row) string {
			return optional(r.GuaranteeBits, func(bits uint64) string { return policy.Rate(bits).String() })
		}),
	}
	if t.Wide {
		columns = append(columns, text("ALGORITHM", func(r *row) string { return r.Algorithm }),
			text("ON EXCESS", (*row).OnExcess),
			figure("BURST", true, (*row).bursts),
			figure("QUEUE", true, func(r *row) string { return bytesText(r.QueueBytes) }),
			text("SHARE", (*row).sharedBy),
			figure("WEIGHT", true, (*row).weight))
	}
	use := figure("USE", measured, func(r *row) string { return optional(r.UseBits, bitsText) })
	use.always = measured
	columns = append(columns, use,
		figure("OF RATE", measured, func(r *row) string { return optional(r.UsePercent, percentText) }),
		figure("GREEN", !t.Wide, func(r *row) string { return optional(r.GreenBits, bitsText) }),
		figure("YELLOW", !t.Wide, func(r *row) string { return optional(r.YellowBits, bitsText) }),
		figure("RED", !t.Wide, func(r *row) string { return optional(r.RedBits, bitsText) }),
		figure("PASSED", t.Wide || !measured, func(r *row) string { return bytesText(r.PassedBytes) }),
		figure("BORROWED", pools || t.Wide, (*row).borrowed),
		figure("DROPPED", true, func(r *row) string { return percentOr(r.it.DroppedPercent()) }),
		figure("REFUSED", true, func(r *row) string { return percentOr(r.it.RefusedPercent()) }),
		figure("SHARERS", true, func(r *row) string { return optional(r.ActiveSharers, countText) }),
		figure("EXCESS", t.Excess && !t.Wide, func(r *row) string { return percentOr(r.it.ExcessPercent()) }))
	if t.Wide {
		for _, c := range []struct {
			head string
			of   func(*row) uint64
		}{
			{"PACKETS", func(r *row) uint64 { return r.PassedPackets }}, {"EXCESS", func(r *row) uint64 { return r.ExcessPackets }},
			{"GREEN", func(r *row) uint64 { return r.GreenPackets }}, {"YELLOW", func(r *row) uint64 { return r.YellowPackets }},
			{"RED", func(r *row) uint64 { return r.RedPackets }},
			{"DROPS", func(r *row) uint64 { return r.DroppedPackets }}, {"DELAYED", func(r *row) uint64 { return r.DelayedPackets }},
			{"MARKED", func(r *row) uint64 { return r.MarkedPackets }}, {"CONTENDED", func(r *row) uint64 { return r.ContendedPackets }},
			{"SPILLED", func(r *row) uint64 { return r.SpilledPackets }}, {"EXEMPT", func(r *row) uint64 { return r.ExemptPackets }},
		} {
			columns = append(columns, figure(c.head, true, func(r *row) string { return countText(c.of(r)) }))
		}
		columns = append(columns, figure("LEVEL", true, (*row).levels),
			figure("BUCKETS", true, func(r *row) string { return optional(r.ActiveBuckets, countText) }),
			text("NOTE", func(r *row) string { return plain.Line(r.Note) }))
	}
	if !t.Wide {
		for i, c := range columns {
			if c.head != place.head || t.Width > 0 && namesSayMore(rows) {
				columns[i].drop = slices.Index(dropped, c.head) + 1
			}
		}
	}
	return append(columns, text("STATE", (*row).remarks))
}

// dropped are the columns of a table that are left out where the screen is narrow, the last one first.
var dropped = []string{"DEVICE", "WITHIN", "REFUSED", "OF RATE", "GREEN", "YELLOW", "RED", "GUARANTEE", "BORROWED", "SHARERS", "PLAN"}

// namesSayMore reports whether rules can be told apart without their devices.
func namesSayMore(rows []row) bool {
	there := map[[2]string]bool{}
	for _, r := range rows {
		if r.Name != "" {
			there[[2]string{r.Name, r.CIDR}] = true
		}
	}
	return len(there) == len(rows)
}

// These are more than leastCut, so that names can be told apart.
const (
	leastName = 20
	leastPool = 15
)

// where is the device and the direction, as commands take them.
func (r *Rule) where() string { return strings.TrimSpace(plain.Line(r.Device) + " " + r.Direction) }

// sharedBy is who gets fair shares, if anybody does.
func (r *Rule) sharedBy() string {
	if r.Share == (policy.Share{}).String() {
		return ""
	}
	return r.Share
}

// weight is the weight if it is not the usual one.
func (r *Rule) weight() string {
	if r.Weight <= 1 {
		return ""
	}
	return fmt.Sprint(r.Weight)
}

// borrowed is what passed beyond a guarantee, or its rate over the interval.
func (r *Rule) borrowed() string {
	switch {
	case r.GuaranteeBits == nil:
		return ""
	case r.IntervalNS != nil:
		return optional(r.BorrowedBits, bitsText)
	}
	return bytesText(r.BorrowedBytes)
}

func (r *Rule) network() string { return addressOf(r.CIDR) }

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
func (r *Rule) calledBy() string { return cmp.Or(plain.Line(r.Name), r.network()) }

// called is the column of what people call rules and pools.
func called(rows []row) column {
	head := "RULE"
	if slices.ContainsFunc(rows, func(r row) bool { return r.IsPool() }) {
		head = "POOL OR RULE"
	}
	return column{head: head, cell: (*row).calledBy, cut: func(r *row) bool { return r.Name != "" }, least: leastName}
}

// matchedBy is the side that prefixes are compared with where that is not the far side.
func (r *Rule) matchedBy() string {
	if r.IsPool() || r.Direction == policy.Egress.String() == (r.Match == policy.MatchDst.String()) {
		return ""
	}
	return r.Match
}

// rate is the rate, and who has it.
func (r *Rule) rate() string {
	if r.RateBits == nil && r.Within != "" {
		return "as pool"
	}
	return rateFor(r.ColourOptions.rate(rateText(r.RateBits)), r.it.Scope())
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

// rateCell is rate in a table; of a rule that has only a pool the rate of that, unless a line of its own shows it.
func (r *row) rateCell() string {
	if r.depth == 0 && r.RateBits == nil {
		if pool := r.it.Parent(); pool != nil {
			return poolRate(pool) + "/pool"
		}
	}
	return r.rate()
}

// poolRate is rateNowText of a pool.
func poolRate(pool *live.Item) string {
	rate, _ := limit(pool.Rule)
	of := Rule{it: pool, RateBits: rate, ColourOptions: NewColourOptions(pool.Rule), Within: string(pool.Within)}
	if pool.Lease != nil {
		of.Leased = new(bool)
	}
	return of.rateNowText()
}

// remarks say what is unusual about the rule: above all that it is not in force.
func (r *Rule) remarks() string {
	var says []string
	if text := state(*r); text != "" {
		says = append(says, text)
	}
	if r.WaitingBits != nil {
		says = append(says, "guarantee waits")
	}
	if r.Decides != nil && *r.Decides {
		says = append(says, "decides")
	} else if r.Decides != nil {
		says = append(says, "overridden")
	}
	return strings.Join(says, ", ")
}

// fullest are the buckets of all rules, the fullest first.
func (rules Rules) fullest() (rows []row) {
	for i := range rules {
		for j := range rules[i].Buckets {
			rows = append(rows, row{Rule: &rules[i], bucket: &rules[i].Buckets[j]})
		}
	}
	sort.SliceStable(rows, func(i, j int) bool { return rows[i].bucket.LevelBytes > rows[j].bucket.LevelBytes })
	return rows
}

// KeepFullest leaves rules the n buckets with the highest levels of all, each rule's own
// with the fullest first; all for n = 0. It reports how many there were.
func (rules Rules) KeepFullest(n int) (of int) {
	rows := rules.fullest()
	if of = len(rows); n == 0 {
		n = of
	}
	for i := range rules {
		if rules[i].Buckets != nil {
			rules[i].Buckets = []Bucket{}
		}
	}
	for _, r := range rows[:min(n, of)] {
		r.Buckets = append(r.Buckets, *r.bucket)
	}
	return of
}

// BucketsText writes a line for each bucket, the fullest first. of is as KeepFullest reports it.
func (rules Rules) BucketsText(w io.Writer, of, width int) error {
	rows := rules.fullest()
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, "all buckets are empty")
		return err
	}
	text := bufio.NewWriter(w)
	err := writeTable(text, rows, append([]column{called(rows), places(rows)}, partColumns("KEY")...), width)
	if err == nil && len(rows) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rows), plain.Count(of, "bucket"))
	}
	rules.pending(text, lastReverts)
	return cmp.Or(err, text.Flush())
}

// partColumns are those of buckets, and of hosts and flows that send: who it is comes first.
func partColumns(head string) []column {
	bits := func(head string, of func(*live.Part) live.Value) column {
		return column{head: head, right: true, cell: func(r *row) string {
			if r.now == nil {
				return ""
			}
			return optional(bits(of(r.now.Part)), bitsText)
		}}
	}
	bucket := func(head string, drop int, cell func(*row) string) column {
		return column{head: head, right: true, drop: drop, cell: func(r *row) string {
			if r.now != nil && !r.now.Part.Full.Known {
				return ""
			}
			return cell(r)
		}}
	}
	level := bucket("LEVEL", 1, func(r *row) string { return bytesText(r.bucket.LevelBytes) })
	level.always = head == "KEY" // of buckets, whose second level may be all that they have
	return []column{
		{head: head, cut: func(*row) bool { return true }, inside: true, least: leastName, cell: func(r *row) string {
			if r.IsPool() {
				return ""
			}
			return plain.Line(r.bucket.Key)
		}},
		bits("OFFERED", func(p *live.Part) live.Value { return p.Offered }),
		bits("PASSED", func(p *live.Part) live.Value { return p.Passed }),
		bits("DROPS", func(p *live.Part) live.Value {
			return live.Value{N: max(p.Offered.N-p.Passed.N, 0), Known: p.Offered.Known && p.Passed.Known}
		}),
		level,
		bucket("FULL", 1, func(r *row) string {
			return optional(r.CapacityBytes, func(capacity uint64) string {
				return percentText(percentOf(r.bucket.LevelBytes, r.holds(capacity)))
			})
		}),
		bucket("E OR P", 0, func(r *row) string {
			return optional(r.bucket.SecondLevelBytes, func(level uint64) string {
				return bytesText(level) + " " + percentText(percentOf(level, *r.SecondBytes()))
			})
		}),
		bucket("WAIT", 0, func(r *row) string {
			if r.bucket.WaitNS == nil && r.delays() {
				return "dropped"
			}
			return optional(r.bucket.WaitNS, About)
		}),
	}
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
