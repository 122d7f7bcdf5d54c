package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unicode"

	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/pkg/policy"
)

// screenWidth is how many columns text is folded to.
const screenWidth = 80

// A column of a table of rows of type R. It is left out where all cells are empty or zero.
type column[R any] struct {
	head   string
	right  bool // numbers are aligned to the right
	always bool // also where all cells are empty
	cell   func(*R) string
	cut    func(*R) bool // which cells may be cut to fit the width; nil for none
}

const (
	gap      = "  "
	leastCut = 12 // columns that are left of a cell that is cut
	ellipsis = "..."
)

// writeTable writes rows, at most width columns wide where cutting cells can achieve that;
// 0 is no limit.
func writeTable[R any](w io.Writer, rows []R, columns []column[R], width int) error {
	var shown []column[R]
	var widths, least []int
	total := -len(gap)
	for _, c := range columns {
		widest, uncut, used := displayWidth(c.head), leastCut, c.always
		for i := range rows {
			cell := c.cell(&rows[i])
			used = used || cell != "" && cell != "0" && cell != "0%"
			widest = max(widest, displayWidth(cell))
			if c.cut == nil || !c.cut(&rows[i]) {
				uncut = max(uncut, displayWidth(cell))
			}
		}
		if used {
			shown, widths, least = append(shown, c), append(widths, widest), append(least, uncut)
			total += widest + len(gap)
		}
	}
	for i, c := range shown {
		if c.cut != nil && width > 0 && total > width {
			narrower := max(widths[i]-(total-width), min(least[i], widths[i]))
			total -= widths[i] - narrower
			widths[i] = narrower
		}
	}
	line := func(cell func(column[R]) string) error {
		var b strings.Builder
		for i, c := range shown {
			text := cell(c)
			if displayWidth(text) > widths[i] {
				text = cutTo(text, widths[i])
			}
			padding := strings.Repeat(" ", widths[i]-displayWidth(text))
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
		_, err := io.WriteString(w, strings.TrimRight(b.String(), " ")+"\n")
		return err
	}
	if err := line(func(c column[R]) string { return c.head }); err != nil {
		return err
	}
	for i := range rows {
		if err := line(func(c column[R]) string { return c.cell(&rows[i]) }); err != nil {
			return err
		}
	}
	return nil
}

// displayWidth is how many columns a terminal needs for a text without control characters.
func displayWidth(s string) (n int) {
	for _, c := range s {
		n += runeWidth(c)
	}
	return n
}

func runeWidth(c rune) int {
	switch {
	case c < 0x300:
		return 1
	case unicode.In(c, unicode.Mn, unicode.Me):
		return 0
	case unicode.In(c, unicode.Han, unicode.Hiragana, unicode.Katakana, unicode.Hangul) || c >= 0x1f300 && c < 0x1fb00:
		return 2
	}
	return 1
}

// cutTo cuts a text to so many columns, and marks that.
func cutTo(s string, width int) string {
	left := width - len(ellipsis)
	for i, c := range s {
		if left -= runeWidth(c); left < 0 {
			return s[:i] + ellipsis
		}
	}
	return s
}

// A Table shows pools and rules in columns.
type Table struct {
	Pools, Rules Rules
	OfPools, Of  int // pools and rules that were found; some may have been left out since
	Wide         bool
	// Excess shows the share of excess and delayed packets. A wide table has their numbers.
	Excess bool
	Width  int // columns of the terminal; 0 for no limit
}

// manyRows is from how many rows on a table ends with their number: more than fit a screen.
const manyRows = 20

// Text writes the table, and below it what concerns all of it.
func (t Table) Text(w io.Writer) error {
	text := bufio.NewWriter(w)
	if len(t.Pools) > 0 {
		if err := t.part(text, t.Pools, t.OfPools, "pool"); err != nil {
			return err
		}
	}
	if len(t.Rules) > 0 && len(t.Pools) > 0 {
		text.WriteString("\n")
	}
	if len(t.Rules) > 0 || len(t.Pools) == 0 {
		if err := t.part(text, t.Rules, t.Of, "rule"); err != nil {
			return err
		}
	}
	if len(t.Rules) == 0 {
		t.Pools.pending(text)
	}
	t.Rules.pending(text)
	return text.Flush()
}

// part writes the table of the pools, or of the rules.
func (t Table) part(w io.Writer, rules Rules, of int, what string) error {
	if err := writeTable(w, rules, t.columns(rules), t.Width); err != nil {
		return err
	}
	switch {
	case len(rules) < of:
		fmt.Fprintf(w, "%d of %s\n", len(rules), plain.Count(of, what))
	case of >= manyRows:
		fmt.Fprintln(w, plain.Count(of, what))
	}
	return nil
}

// columns are those of a table of rules, or of pools.
func (t Table) columns(rules Rules) []column[Rule] {
	measured := slices.ContainsFunc(rules, func(r Rule) bool { return r.IntervalNS != nil })
	pools := slices.ContainsFunc(rules, func(r Rule) bool { return r.IsPool() })
	name := column[Rule]{head: "NAME", cell: func(r *Rule) string { return plain.Line(r.Name) }, cut: func(*Rule) bool { return true }}
	plan := column[Rule]{head: "PLAN", cell: func(r *Rule) string { return plain.Line(r.Plan) }, cut: func(*Rule) bool { return true }}
	figure := func(head string, shown bool, cell func(*Rule) string) column[Rule] {
		if !shown {
			cell = func(*Rule) string { return "" }
		}
		return column[Rule]{head: head, right: true, cell: cell}
	}
	text := func(head string, of func(*Rule) string) column[Rule] { return column[Rule]{head: head, cell: of} }
	rate := figure("RATE", true, (*Rule).rate)
	rate.always = true
	if pools {
		name.head = "POOL"
	}
	within := column[Rule]{head: "WITHIN", cell: func(r *Rule) string { return plain.Line(r.Within) }, cut: func(*Rule) bool { return true }}
	columns := []column[Rule]{text("DEVICE", (*Rule).where), text("NETWORK", (*Rule).network), name, plan, text("BY", (*Rule).matchedBy), within, rate,
		figure("GUARANTEE", true, func(r *Rule) string {
			return optional(r.GuaranteeBits, func(bits uint64) string { return policy.Rate(bits).String() })
		}),
	}
	if t.Wide {
		columns = append(columns, text("ALGORITHM", func(r *Rule) string { return r.Algorithm }),
			text("ON EXCESS", func(r *Rule) string { return r.Excess }),
			figure("BURST", true, func(r *Rule) string { return optional(r.CapacityBytes, bytesText) }),
			figure("QUEUE", true, func(r *Rule) string { return bytesText(r.QueueBytes) }),
			text("SHARE", (*Rule).sharedBy),
			figure("WEIGHT", true, (*Rule).weight))
	}
	use := figure("USE", measured, func(r *Rule) string { return optional(r.UseBits, bitsText) })
	use.always = measured
	columns = append(columns, use,
		figure("OF RATE", measured, func(r *Rule) string { return optional(r.UsePercent, percentText) }),
		figure("PASSED", t.Wide || !measured, func(r *Rule) string { return bytesText(r.PassedBytes) }),
		figure("BORROWED", pools || t.Wide, (*Rule).borrowed),
		figure("DROPPED", true, func(r *Rule) string { return optional(r.dropped(), percentText) }),
		figure("SHARERS", true, func(r *Rule) string { return optional(r.ActiveSharers, countText) }),
		figure("EXCESS", t.Excess && !t.Wide, func(r *Rule) string { return optional(r.excess(), percentText) }))
	if t.Wide {
		for _, c := range []struct {
			head string
			of   func(*Rule) uint64
		}{
			{"PACKETS", func(r *Rule) uint64 { return r.PassedPackets }}, {"EXCESS", func(r *Rule) uint64 { return r.ExcessPackets }},
			{"DROPS", func(r *Rule) uint64 { return r.DroppedPackets }}, {"DELAYED", func(r *Rule) uint64 { return r.DelayedPackets }},
			{"MARKED", func(r *Rule) uint64 { return r.MarkedPackets }}, {"CONTENDED", func(r *Rule) uint64 { return r.ContendedPackets }},
			{"SPILLED", func(r *Rule) uint64 { return r.SpilledPackets }}, {"EXEMPT", func(r *Rule) uint64 { return r.ExemptPackets }},
		} {
			columns = append(columns, figure(c.head, true, func(r *Rule) string { return countText(c.of(r)) }))
		}
		columns = append(columns, figure("LEVEL", true, func(r *Rule) string { return bytesText(r.LevelBytes) }),
			figure("BUCKETS", true, func(r *Rule) string { return optional(r.ActiveBuckets, countText) }),
			text("NOTE", func(r *Rule) string { return plain.Line(r.Note) }))
	}
	return append(columns, text("STATE", (*Rule).remarks))
}

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

// network is the prefix; of a single address without its length.
func (r *Rule) network() string {
	for _, length := range []string{"/32", "/128"} {
		if address, ok := strings.CutSuffix(r.CIDR, length); ok && strings.Contains(address, ":") == (length == "/128") {
			return address
		}
	}
	return r.CIDR
}

// calledBy is what people call the rule.
func (r *Rule) calledBy() string { return cmp.Or(plain.Line(r.Name), r.network()) }

// matchedBy is the side that prefixes are compared with where that is not the far side.
func (r *Rule) matchedBy() string {
	if r.IsPool() || r.Direction == policy.Egress.String() == (r.Match == policy.MatchDst.String()) {
		return ""
	}
	return r.Match
}

// rate is the rate, and who has it.
func (r *Rule) rate() string {
	switch text := rateText(r.RateBits); {
	case r.RateBits == nil && r.Within != "":
		return "as pool"
	case r.scope == "":
		return text
	case strings.HasPrefix(r.scope, "/"):
		return text + " per " + r.scope
	default:
		return text + "/" + r.scope
	}
}

// remarks say what is unusual about the rule: above all that it is not in force.
func (r *Rule) remarks() string {
	var says []string
	if text := state(*r); text != "" {
		says = append(says, text)
	}
	if r.Decides != nil && *r.Decides {
		says = append(says, "decides")
	} else if r.Decides != nil {
		says = append(says, "overridden")
	}
	return strings.Join(says, ", ")
}

// A bucketRow is a bucket and its rule.
type bucketRow struct {
	rule *Rule
	Bucket
}

// fullest are the buckets of all rules, the fullest first.
func (rules Rules) fullest() (rows []bucketRow) {
	for i := range rules {
		for _, b := range rules[i].Buckets {
			rows = append(rows, bucketRow{&rules[i], b})
		}
	}
	slices.SortStableFunc(rows, func(a, b bucketRow) int { return cmp.Compare(b.LevelBytes, a.LevelBytes) })
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
	for _, row := range rows[:min(n, of)] {
		row.rule.Buckets = append(row.rule.Buckets, row.Bucket)
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
	err := writeTable(text, rows, []column[bucketRow]{
		{head: "DEVICE", cell: func(b *bucketRow) string { return b.rule.where() }},
		{head: "RULE", cell: func(b *bucketRow) string { return b.rule.calledBy() }, cut: func(b *bucketRow) bool { return b.rule.Name != "" }},
		{head: "KEY", cell: func(b *bucketRow) string { return b.Key }},
		{head: "LEVEL", right: true, cell: func(b *bucketRow) string { return bytesText(b.LevelBytes) }},
		{head: "FULL", right: true, cell: func(b *bucketRow) string {
			return optional(b.rule.CapacityBytes, func(capacity uint64) string {
				return percentText(percentOf(b.LevelBytes, b.rule.holds(capacity)))
			})
		}},
		{head: "WAIT", right: true, cell: func(b *bucketRow) string {
			if b.WaitNS == nil && b.rule.delays() {
				return "dropped"
			}
			return optional(b.WaitNS, about)
		}},
	}, width)
	if err == nil && len(rows) < of {
		fmt.Fprintf(text, "%d of %s\n", len(rows), plain.Count(of, "bucket"))
	}
	rules.pending(text)
	return cmp.Or(err, text.Flush())
}

// Sorts are the names of the orders that Sort knows.
var Sorts = []string{"device", "network", "name", "plan", "rate", "use", "passed", "dropped", "excess"}

// Sort brings rules into one of the orders of Sorts: names and networks from the first on,
// figures from the largest on. It starts from pools by their names, and rules by devices, each egress first, and networks. With shadows,
// all of whose rules have one, the shares of packets are what those would have refused.
func (rules Rules) Sort(by string, shadows bool) {
	stable := func(compare func(a, b *Rule) int) {
		slices.SortStableFunc(rules, func(a, b Rule) int { return compare(&a, &b) })
	}
	figure := func(of func(*Rule) float64) {
		stable(func(a, b *Rule) int { return cmp.Compare(of(b), of(a)) })
	}
	stable(func(a, b *Rule) int {
		c := cmp.Or(Natural(a.Device, b.Device), cmp.Compare(a.Direction, b.Direction))
		if c == 0 && a.IsPool() && b.IsPool() {
			c = Natural(a.Name, b.Name)
		}
		return c
	})
	if shadows && slices.Contains([]string{"use", "dropped", "excess"}, by) {
		figure(func(r *Rule) float64 { return r.Shadow.refused() })
		return
	}
	switch by {
	case "network":
		stable(func(a, b *Rule) int { return policy.ComparePrefix(a.prefix, b.prefix) })
	case "name":
		stable(func(a, b *Rule) int { return cmp.Or(lastIfEmpty(a.Name, b.Name), Natural(a.Name, b.Name)) })
	case "plan":
		stable(func(a, b *Rule) int { return cmp.Or(lastIfEmpty(a.Plan, b.Plan), Natural(a.Plan, b.Plan)) })
	case "rate":
		figure(func(r *Rule) float64 { return number(r.RateBits, math.Inf(1)) })
	case "use":
		figure(func(r *Rule) float64 { return number(r.UseBits, -1) })
	case "passed":
		figure(func(r *Rule) float64 { return float64(r.PassedBytes) })
	case "dropped":
		figure(func(r *Rule) float64 { return number(r.dropped(), -1) })
	case "excess":
		figure(func(r *Rule) float64 { return number(r.excess(), -1) })
	}
}

func number[N uint64 | float64](v *N, none float64) float64 {
	if v == nil {
		return none
	}
	return float64(*v)
}

func lastIfEmpty(a, b string) int {
	switch {
	case a == "" && b != "":
		return 1
	case a != "" && b == "":
		return -1
	}
	return 0
}

// Natural compares names as people do: tap2 comes before tap10.
func Natural(a, b string) int {
	for a != "" && b != "" {
		da, db := digits(a), digits(b)
		if da > 0 && db > 0 {
			na, nb := strings.TrimLeft(a[:da], "0"), strings.TrimLeft(b[:db], "0")
			if c := cmp.Or(cmp.Compare(len(na), len(nb)), strings.Compare(na, nb)); c != 0 {
				return c
			}
			a, b = a[da:], b[db:]
			continue
		}
		if a[0] != b[0] {
			return cmp.Compare(a[0], b[0])
		}
		a, b = a[1:], b[1:]
	}
	return cmp.Compare(len(a), len(b))
}

// digits is how many digits a text begins with.
func digits(s string) (n int) {
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return n
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
	return math.Round(1e4*float64(part)/float64(max(whole, 1))) / 100
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
