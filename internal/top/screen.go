package top

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// A look is how a terminal can show things.
type look struct {
	colour bool
	utf8   bool
}

// Styles of parts of the screen.
var (
	bold     = ansi.NewStyle(ansi.AttrBold)
	faint    = ansi.NewStyle(ansi.AttrFaint)
	reverse  = ansi.NewStyle(ansi.AttrReverse)
	dropping = ansi.NewStyle().ForegroundColor(ansi.Red)
	near     = ansi.NewStyle().ForegroundColor(ansi.Yellow)
	waiting  = ansi.NewStyle(ansi.AttrBold).ForegroundColor(ansi.Yellow)
)

func (l look) styled(s ansi.Style, text string) string {
	if !l.colour || text == "" {
		return text
	}
	return s.Styled(text)
}

func (l look) blocks() []rune {
	if l.utf8 {
		return []rune("▁▂▃▄▅▆▇█")
	}
	return []rune(".,:-=+*#")
}

func (l look) ellipsis() string {
	if l.utf8 {
		return "…"
	}
	return "..."
}

// fit makes a text exactly so wide. A text that is too long is cut in its middle: many differ only in their ends.
func (l look) fit(text string, width int, right bool) string {
	wide := ansi.StringWidth(text)
	if wide > width {
		dots := l.ellipsis()
		if width <= ansi.StringWidth(dots)+2 {
			text = ansi.Truncate(text, width, "")
		} else {
			end := (width - ansi.StringWidth(dots)) / 2
			tail := ansi.TruncateLeft(text, wide-end, "")
			text = ansi.Truncate(text, width-ansi.StringWidth(dots)-ansi.StringWidth(tail), "") + dots + tail
		}
		wide = ansi.StringWidth(text)
	}
	padding := strings.Repeat(" ", max(width-wide, 0))
	if right {
		return padding + text
	}
	return text + padding
}

// cut is a line that is at most so wide.
func (l look) cut(text string, width int) string {
	if ansi.StringWidth(text) <= width {
		return text
	}
	return ansi.Truncate(text, max(width, 0), l.ellipsis())
}

// A column of a table. Where not all have room, those with the highest drop are left out first.
type column struct {
	head  string
	width int
	left  bool // aligned to the left
	drop  int
	cell  func(*row) string
	plot  bool
	label bool // of the row, which knows how to be short
}

// text is the cell of a row.
func (c *column) text(l look, r *row, width int) string {
	if c.label {
		return r.short(l, width)
	}
	return c.cell(r)
}

const (
	whatLeast = 14
	plotLeast = 8
)

func percentCell(p float64) string {
	if p < 0 {
		return ""
	}
	return report.Percent(p)
}

func bitsCell(bits float64) string { return report.Bits(uint64(bits)) }

// columns are those of a kind of rows.
func (m *Model) columns(f *frame) []column {
	bits := func(head string, drop int, of func(*row) float64) column {
		return column{head: head, width: 8, drop: drop, cell: func(r *row) string { return bitsCell(of(r)) }}
	}
	percent := func(head string, drop int, of func(*row) float64) column {
		return column{head: head, width: max(5, len(head)), drop: drop, cell: func(r *row) string { return percentCell(of(r)) }}
	}
	use := bits("USE", 0, func(r *row) float64 { return r.Use })
	of := percent("OF", 0, func(r *row) float64 { return r.OfRate })
	drops := bits("DROPS", 0, func(r *row) float64 { return r.Dropped })
	dropped := percent("DROPPED", 3, func(r *row) float64 { return r.DroppedPercent })
	level := percent("LEVEL", 2, func(r *row) float64 { return r.Level })
	plot := column{head: "LAST MINUTE", width: plotLeast, left: true, drop: 4, plot: true}
	if span := m.every * samples; span != time.Minute {
		plot.head = "LAST " + strings.ToUpper(plainly(span.Round(time.Second)))
	}
	what := column{left: true, width: whatLeast, label: true}
	switch {
	case f.kind == bucketsFrame:
		what.head = "BUCKET"
		columns := []column{what,
			{head: "RULE", width: 16, left: true, cell: func(r *row) string {
				return cmp.Or(plain.Line(r.Label.Name), plain.Line(r.Device)+" "+r.Direction+" "+r.Network)
			}},
			{head: "LEVEL", width: 8, cell: func(r *row) string { return report.Bytes(r.bucket.Bytes) }},
			percent("FULL", 0, func(r *row) float64 { return r.Level }),
		}
		if slices.ContainsFunc(m.reading.Fullest, func(b live.FullBucket) bool { return b.Waits }) {
			columns = append(columns, column{head: "WAIT", width: 7, drop: 1, cell: func(r *row) string {
				if !r.bucket.Waits {
					return ""
				}
				return report.Wait(r.bucket.WaitNS)
			}})
		}
		return columns
	case f.kind == ruleFrame || f.kind == hostFrame:
		what.head = map[frameKind]string{ruleFrame: "HOST", hostFrame: "FLOW"}[f.kind]
		known := func(cell func(*report.Talker) *uint64) func(*row) string {
			return func(r *row) string {
				if n := cell(r.talker); n != nil {
					return report.Bits(*n)
				}
				return ""
			}
		}
		return []column{what,
			{head: "OFFERED", width: 8, drop: 3, cell: known(func(t *report.Talker) *uint64 { return t.OfferedBits })},
			{head: "PASSED", width: 8, cell: known(func(t *report.Talker) *uint64 { return t.PassedBits })},
			{head: "DROPPED", width: 8, cell: func(r *row) string {
				if r.talker.OfferedBits != nil && r.talker.PassedBits == nil {
					return ""
				}
				return bitsCell(r.Dropped)
			}},
			{head: "LEVEL", width: 8, drop: 2, cell: func(r *row) string {
				if r.Level < 0 && r.talker.LevelBytes == 0 {
					return ""
				}
				return report.Bytes(r.talker.LevelBytes)
			}},
			percent("FULL", 1, func(r *row) float64 { return r.Level }),
		}
	case f.kind == allFrame && m.view == "name":
		what.head = "NAME"
		columns := []column{what}
		for _, side := range live.SideColumns(len(m.table.rows), func(i int) *live.Row { return &m.table.rows[i].Row }) {
			figures := func(r *row) (use, percent live.Value) {
				switch {
				case r.Name == nil && r.Direction == side.Direction && (side.Device == "" || r.Device == side.Device):
					return r.UseBits(), r.UsePercent()
				case r.Name != nil && r.Side(side) != nil:
					done := r.Done(r.Side(side))
					return done.UseBits, done.OfRate
				}
				return use, percent
			}
			columns = append(columns,
				column{head: side.Head(), width: 8, cell: func(r *row) string {
					if use, _ := figures(r); use.Known {
						return bitsCell(use.N)
					}
					return ""
				}},
				percent("OF", 1, func(r *row) float64 {
					_, p := figures(r)
					return p.Or(-1)
				}))
		}
		return append(columns, drops, dropped, plot)
	}
	what.head = "POOL OR RULE"
	rate := column{head: "RATE", width: 10, drop: 5, cell: func(r *row) string { return r.rule().RateNowText() }}
	if m.width >= 100 {
		rate.width = 12
	}
	if slices.ContainsFunc(m.table.rows, func(r row) bool { return r.Item != nil && r.Algorithm.HasColours() }) {
		rate.width += 4 // for two rates
	}
	columns := []column{what, rate, use, of, drops, dropped, level, plot}
	if m.width >= 110 {
		plan := column{head: "PLAN", width: 10, left: true, drop: 6, cell: func(r *row) string { return plain.Line(r.Label.Plan) }}
		columns = slices.Insert(columns, 1, plan)
	}
	return columns
}

// layout leaves out columns that have no room, and widens the first one and the plot to fill the rest.
func layout(columns []column, width int) []column {
	total := func() (sum int) {
		for _, c := range columns {
			sum += c.width + 1
		}
		return sum - 1
	}
	for total() > width {
		worst := -1
		for i, c := range columns {
			if c.drop > 0 && (worst < 0 || c.drop > columns[worst].drop) {
				worst = i
			}
		}
		if worst < 0 {
			columns[0].width = max(columns[0].width-(total()-width), 1)
			break
		}
		columns = slices.Delete(columns, worst, worst+1)
	}
	widen := func(i, to int) {
		if more := min(width-total(), to-columns[i].width); i >= 0 && more > 0 {
			columns[i].width += more
		}
	}
	plot := slices.IndexFunc(columns, func(c column) bool { return c.plot })
	widen(0, 24)
	if plot >= 0 {
		widen(plot, 12)
	}
	widen(0, 40)
	if len(columns) > 1 && columns[1].head == "RULE" {
		widen(1, 40)
	}
	if plot >= 0 {
		widen(plot, samples)
	}
	widen(0, 80)
	return columns
}

// marks are what stands before a row.
const marks = 2

// line is a row of the table.
func (m *Model) line(columns []column, r *row, selected bool) string {
	var b strings.Builder
	mark := []string{" ", " "}
	if selected {
		mark[0] = ">"
	}
	style := ansi.Style(nil)
	switch {
	case r.Refusing > 0:
		mark[1], style = "!", dropping
	case r.OfRate >= live.Near || r.Item != nil && r.bucket == nil && r.rule().Unusual() != "":
		style = near
	}
	if r.Item != nil && r.bucket == nil && !r.Place.InForce {
		mark[1], style = "X", dropping
	}
	if selected {
		style = reverse
	}
	b.WriteString(strings.Join(mark, ""))
	for i, c := range columns {
		if i > 0 {
			b.WriteString(" ")
		}
		if !c.plot {
			b.WriteString(m.look.fit(c.text(m.look, r, c.width), c.width, !c.left))
			continue
		}
		full := float64(0)
		if r.Item != nil && r.Scope() == "" {
			rate, _, _ := r.InForce()
			full = float64(rate)
		}
		text, dropped := m.history.plot(r.All(), c.width, full, m.look.blocks())
		for i, cell := range text {
			if dropped[i] && !selected {
				b.WriteString(m.look.styled(dropping, string(cell)))
			} else {
				b.WriteRune(cell)
			}
		}
	}
	if style == nil {
		return b.String()
	}
	return m.look.styled(style, b.String())
}

// Screen is what the terminal shows: as many lines as it has, none wider than it is.
func (m *Model) Screen() string {
	var lines []string
	add := func(line string) { lines = append(lines, m.look.cut(line, m.width)) }
	for _, line := range m.header() {
		add(line)
	}
	bottom := m.bottom()
	body := max(m.height-len(lines)-len(bottom), 0)
	switch {
	case m.mode == textMode:
		text := m.text[min(m.scroll, max(len(m.text)-body, 0)):]
		for _, line := range text[:min(body, len(text))] {
			add(line)
		}
	default:
		for _, line := range m.body(body) {
			add(line)
		}
	}
	for len(lines) < m.height-len(bottom) {
		lines = append(lines, "")
	}
	lines = lines[:max(min(len(lines), m.height-len(bottom)), 0)]
	for _, line := range bottom {
		add(line)
	}
	return strings.Join(lines[:min(len(lines), m.height)], "\n")
}

// header is the lines above the table.
func (m *Model) header() []string {
	parts := []string{m.look.styled(bold, "shapectl top"), plain.Line(m.host)}
	if m.reading != nil {
		parts = append(parts, m.reading.Time.Format(time.TimeOnly))
	}
	if m.every != time.Second {
		parts = append(parts, "every "+m.every.String())
	}
	parts = append(parts, "by "+m.view, m.sort+" first")
	if m.sort == "name" {
		parts[len(parts)-1] = "sorted by name"
	}
	if m.paused {
		parts = append(parts, m.look.styled(waiting, "PAUSED"))
	}
	lines := []string{strings.Join(parts, "  ")}
	all := m.summary
	says := plain.Count(all.Rules, "rule")
	if all.Pools > 0 {
		says += ", " + plain.Count(all.Pools, "pool")
	}
	if m.reading != nil && m.reading.Interval > 0 {
		says = "passed " + bitsCell(all.Passed) + "  dropped " + bitsCell(all.Dropped) + "  " + says
		if all.Dropping > 0 {
			says += m.look.styled(dropping, fmt.Sprintf("  %d dropping", all.Dropping))
		}
		if all.Near > 0 {
			says += m.look.styled(near, fmt.Sprintf("  %d near the rate", all.Near))
		}
	} else if m.reading != nil {
		says += "  measuring"
	}
	lines = append(lines, says)
	if m.failure != "" {
		lines = append(lines, m.look.styled(dropping, m.failure))
	}
	if m.reading != nil && m.reading.RevertsInNS != nil {
		left := time.Duration(*m.reading.RevertsInNS)
		says := fmt.Sprintf("a change is not confirmed: it reverts in %v; c confirms it", left.Round(time.Second))
		lines = append(lines, m.look.styled(waiting, says))
	}
	if f := m.frame(); f.kind != allFrame {
		lines = append(lines, m.look.styled(bold, f.title()))
	}
	return lines
}

// body is the table.
func (m *Model) body(height int) []string {
	f := m.frame()
	t := m.table
	if height < 2 {
		return nil
	}
	columns := layout(m.columns(f), m.width-marks)
	if len(t.rows) == 0 {
		return []string{"", "  " + m.none(f)}
	}
	lines := []string{m.look.styled(bold, m.head(columns))}
	var buckets []string
	if f.kind == allFrame {
		buckets = m.preview(height)
	}
	room := m.room()
	at := m.at
	m.offset = max(min(m.offset, at, len(t.rows)-room), at-room+1, 0)
	for i := m.offset; i < min(m.offset+room, len(t.rows)); i++ {
		lines = append(lines, m.line(columns, &t.rows[i], i == at))
	}
	if buckets != nil {
		for len(lines) < height-len(buckets) {
			lines = append(lines, "")
		}
		lines = append(lines, buckets...)
	}
	return lines
}

// head is the line above the table.
func (m *Model) head(columns []column) string {
	head := strings.Repeat(" ", marks)
	for i, c := range columns {
		if i > 0 {
			head += " "
		}
		title := c.head
		if c.plot && c.width < len(title) {
			title = strings.Replace(title, "LAST MINUTE", "LAST MIN", 1)
		}
		head += m.look.fit(title, c.width, !c.left)
	}
	return head
}

// Below the table are the fullest buckets, where there is room.
const (
	previewFrom = 16 // lines of the table
	previewMost = 5
)

// preview is the fullest buckets, with a line above.
func (m *Model) preview(height int) []string {
	if height < previewFrom || m.reading == nil {
		return nil
	}
	t := ofBuckets(m.reading, live.View{Chosen: m.source.Chosen})
	n := min(len(t.rows), previewMost)
	if n == 0 {
		return nil
	}
	columns := layout(m.columns(&frame{kind: bucketsFrame}), m.width-marks)
	lines := []string{m.look.styled(bold, m.head(columns))}
	for i := range t.rows[:n] {
		lines = append(lines, m.line(columns, &t.rows[i], false))
	}
	return lines
}

// room is how many rows of the table have room.
func (m *Model) room() int {
	height := m.height - len(m.header()) - len(m.bottom())
	room := height - 1
	if m.frame().kind == allFrame {
		room -= len(m.preview(height))
	}
	return max(room, 1)
}

// none says why there is no row.
func (m *Model) none(f *frame) string {
	switch {
	case m.reading == nil:
		return "reading"
	case m.filter != "" && m.table.of > 0:
		return "none of " + fmt.Sprint(m.table.of) + " contains " + plain.Line(m.filter)
	case f.kind == bucketsFrame:
		return "all buckets are empty"
	case f.kind == ruleFrame || f.kind == hostFrame:
		if f.note != "" {
			return f.note
		}
		if !f.read {
			return "measuring"
		}
		return "no traffic now"
	case f.kind == allFrame:
		return "no rules; add one with 'shapectl set'"
	}
	return "it was removed"
}

// bottom is the lines below the table.
func (m *Model) bottom() []string {
	facts := ""
	if at := m.at; m.mode != textMode && at < len(m.table.rows) {
		r := &m.table.rows[at]
		switch {
		case r.Name != nil:
			named := report.NewNamed(&r.Row)
			facts = named.Facts()
		case r.bucket != nil:
			facts = r.label() + ": " + r.rule().Facts()
		case r.talker != nil:
			facts = m.frame().note
		default:
			facts = r.rule().Facts()
		}
	}
	facts = m.look.styled(faint, m.look.cut(facts, m.width))
	switch {
	case m.mode == filterMode:
		return []string{facts, "filter: " + plain.Line(m.input) + "_   enter keeps it, esc clears it"}
	case m.mode == rateMode:
		prompt := m.ask.prompt() + ": " + plain.Line(m.input) + "_"
		if m.message != "" {
			return append(m.folded(dropping, m.message), prompt)
		}
		return []string{m.look.styled(faint, "for example 20mbit; enter continues, esc cancels"), prompt}
	case m.mode == askMode:
		return append(m.folded(waiting, m.ask.what), m.look.styled(waiting, m.ask.question))
	case m.busy != "":
		return []string{facts, m.busy}
	case m.message != "":
		return append([]string{facts}, m.folded(nil, m.message)...)
	case m.mode == textMode && len(m.text) > m.height:
		return []string{"esc goes back, the arrows scroll"}
	case m.mode == textMode:
		return []string{"esc goes back"}
	}
	return []string{facts, m.keys()}
}

// folded breaks a text into lines.
func (m *Model) folded(s ansi.Style, text string) (lines []string) {
	for line := range strings.Lines(plain.Fold(text, max(m.width, 20), "", "  ")) {
		lines = append(lines, m.look.styled(s, strings.TrimSuffix(line, "\n")))
	}
	return lines
}

// keys names the keys, the most important ones first.
func (m *Model) keys() string {
	keys := []string{"q quit", "? help", "s sort", "v view", "/ filter", "enter open", "r rate", "e explain", "p pause", "b buckets"}
	if m.frame().kind != allFrame {
		keys = []string{"esc back", "q quit", "? help", "s sort", "/ filter", "enter open", "e explain"}
	}
	if m.filter != "" {
		keys = slices.Insert(keys, 0, fmt.Sprintf("filter %s: %d of %d", plain.Line(m.filter), len(m.table.rows), m.table.of))
	}
	text := keys[0]
	for _, key := range keys[1:] {
		if len(text)+2+len(key) > m.width {
			break
		}
		text += "  " + key
	}
	return text
}

// Text writes a table of a reading without a screen, at most width columns wide; 0 is no limit.
func Text(w io.Writer, r *live.Reading, v live.View, width int) error {
	m := &Model{width: width, look: look{utf8: true}, reading: r, view: v.By, frames: []*frame{{}}}
	m.table = ofView(r, v)
	var text strings.Builder
	if len(m.table.rows) == 0 {
		text.WriteString("no rules\n")
	}
	m.writeRows(&text, m.columns(m.frame()), m.table.rows)
	if n := len(m.table.rows); n < m.table.of {
		fmt.Fprintf(&text, "%d of %d\n", n, m.table.of)
	}
	if buckets := ofBuckets(r, live.View{Chosen: v.Chosen}).rows; len(buckets) > 0 {
		text.WriteString("\n")
		m.writeRows(&text, m.columns(&frame{kind: bucketsFrame}), buckets)
	}
	if r.RevertsInNS != nil {
		fmt.Fprintf(&text, "the last change is not confirmed: it reverts in %v\n", time.Duration(*r.RevertsInNS).Round(time.Second))
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// writeRows writes all rows, without a plot, which would have one point.
func (m *Model) writeRows(text *strings.Builder, columns []column, rows []row) {
	if len(rows) == 0 {
		return
	}
	columns = slices.DeleteFunc(columns, func(c column) bool { return c.plot })
	if m.width > 0 {
		columns = layout(columns, m.width-marks)
	} else {
		for i := range columns {
			for j := range rows {
				columns[i].width = max(columns[i].width, ansi.StringWidth(columns[i].text(m.look, &rows[j], 1<<16)))
			}
		}
	}
	fmt.Fprintln(text, strings.TrimRight(m.head(columns), " "))
	for i := range rows {
		fmt.Fprintln(text, strings.TrimRight(m.line(columns, &rows[i], false), " "))
	}
}
