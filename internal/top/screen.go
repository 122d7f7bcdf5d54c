package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
)

// Styles of parts of the screen.
var (
	bold     = ansi.NewStyle(ansi.AttrBold)
	faint    = ansi.NewStyle(ansi.AttrFaint)
	reverse  = ansi.NewStyle(ansi.AttrReverse)
	dropping = ansi.NewStyle().ForegroundColor(ansi.Red)
	near     = ansi.NewStyle().ForegroundColor(ansi.Yellow)
	waiting  = ansi.NewStyle(ansi.AttrBold).ForegroundColor(ansi.Yellow)
)

func styled(s ansi.Style, text string) string {
	if text == "" || s == nil {
		return text
	}
	return s.Styled(text)
}

// page is the lines of a text that is shown instead of a table; nil for a table.
func (m *Model) page() (lines []string) {
	f := m.frame()
	if f.seen != nil && f.seen.RTTs != nil {
		var text strings.Builder
		f.seen.RTTs.Text(&text, m.width)
		return strings.Split(strings.TrimRight(text.String(), "\n"), "\n")
	}
	for line := range strings.Lines(f.text) {
		line = plain.Line(strings.TrimRight(line, "\n"))
		indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
		folded := plain.Fold(strings.TrimLeft(line, " "), max(m.width, 20), indent, indent+"  ")
		lines = append(lines, strings.Split(strings.TrimRight(folded, "\n"), "\n")...)
	}
	return lines
}

// Screen is what the terminal shows: as many lines as it has, none wider than it is.
func (m *Model) Screen() string {
	lines, bottom := m.header(), m.bottom()
	body := max(m.height-len(lines)-len(bottom), 0)
	if page := m.page(); page != nil {
		page = page[min(m.offset, max(len(page)-body, 0)):]
		lines = append(lines, page[:min(body, len(page))]...)
	} else {
		lines = append(lines, m.body(body)...)
	}
	for len(lines) < m.height-len(bottom) {
		lines = append(lines, "")
	}
	lines = append(lines[:max(min(len(lines), m.height-len(bottom)), 0)], bottom...)
	for i := range lines {
		lines[i] = ansi.Truncate(lines[i], m.width, "…")
	}
	return strings.Join(lines[:min(len(lines), m.height)], "\n")
}

// header is the lines above the table.
func (m *Model) header() []string {
	parts := []string{styled(bold, "shapectl top"), plain.Line(m.host)}
	if m.reading != nil {
		parts = append(parts, m.reading.Time.Format(time.TimeOnly))
	}
	if m.every != time.Second {
		parts = append(parts, "every "+m.every.String())
	}
	order := m.sort + " first"
	if m.sort == "name" {
		order = "sorted by name"
	}
	parts = append(parts, "by "+m.view, order)
	if m.paused {
		parts = append(parts, styled(waiting, "PAUSED"))
	}
	all := m.summary
	says := plain.Count(all.Rules, "rule")
	if all.Pools > 0 {
		says += ", " + plain.Count(all.Pools, "pool")
	}
	if m.reading != nil && m.reading.Interval > 0 {
		says = "passed " + report.Bits(uint64(all.Passed)) + "  dropped " + report.Bits(uint64(all.Dropped)) + "  " + says
		if all.Dropping > 0 {
			says += styled(dropping, fmt.Sprintf("  %d dropping", all.Dropping))
		}
		if all.Near > 0 {
			says += styled(near, fmt.Sprintf("  %d near the rate", all.Near))
		}
	} else if m.reading != nil {
		says += "  measuring"
	}
	lines := []string{strings.Join(parts, "  "), says}
	if m.failure != "" {
		lines = append(lines, styled(dropping, m.failure))
	}
	if m.reading != nil && m.reading.RevertsInNS != nil {
		left := time.Duration(*m.reading.RevertsInNS)
		lines = append(lines, styled(waiting, fmt.Sprintf("a change is not confirmed: it reverts in %v; c confirms it, u undoes it", left.Round(time.Second))))
	}
	if f := m.frame(); f.title != "" {
		lines = append(lines, styled(bold, f.title))
	}
	return lines
}

// leastPlot is how many columns a plot has at least, and noPlot the width of a screen without one.
const (
	leastPlot = 12
	noPlot    = 60
)

// body is the table.
func (m *Model) body(height int) []string {
	f := m.frame()
	if len(m.rows) == 0 {
		return []string{"", "  " + m.none()}
	}
	room := max(height-1, 1)
	m.offset = max(min(m.offset, m.at, len(m.rows)-room), m.at-room+1, 0)
	rows, width := m.rows[m.offset:min(m.offset+room, len(m.rows))], m.width
	plots := width >= noPlot && f.look.By == "" && m.by() != "bucket"
	if plots {
		width -= leastPlot + 2
	}
	lines, _ := report.Lines(rows, m.by(), width)
	wide := 0
	for _, line := range lines {
		wide = max(wide, ansi.StringWidth(line))
	}
	plots = plots && m.width-wide-2 >= leastPlot
	for i, line := range lines {
		if plots {
			line += strings.Repeat(" ", wide-ansi.StringWidth(line)+2)
		}
		if i == 0 {
			lines[0] = styled(bold, line+m.plotHead(plots))
			continue
		}
		r := &rows[i-1]
		style := map[string]ansi.Style{"out": dropping, "dropping": dropping, "near": near}[r.Activity()]
		selected := m.offset+i-1 == m.at
		if selected {
			style, line = reverse, ">"+line[1:]
		}
		if plots {
			line += m.plot(r, min(m.width-wide-2, samples), selected)
		}
		lines[i] = styled(style, line)
	}
	return lines
}

func (m *Model) plotHead(plots bool) string {
	if !plots {
		return ""
	}
	if span := m.every * samples; span != time.Minute {
		return "LAST " + strings.ToUpper(strings.Replace(span.Round(time.Second).String(), "m0s", "m", 1))
	}
	return "LAST MINUTE"
}

// plot is the use of a row lately; red where packets were dropped, unless the row is selected.
func (m *Model) plot(r *live.Row, width int, selected bool) string {
	full := float64(0)
	if r.Item != nil && r.Scope() == "" {
		rate, _, _ := r.InForce()
		full = float64(rate)
	}
	text, dropped := m.history.plot(r.All(), width, full)
	var b strings.Builder
	for i, cell := range text {
		if dropped[i] && !selected {
			b.WriteString(styled(dropping, string(cell)))
		} else {
			b.WriteRune(cell)
		}
	}
	return b.String()
}

// room is how many rows of the table, or lines of a page, have room.
func (m *Model) room() int { return max(m.height-len(m.header())-3, 1) }

// none says why there is no row.
func (m *Model) none() string {
	f := m.frame()
	switch {
	case m.reading == nil:
		return "reading"
	case m.filter != "" && m.of > 0:
		return fmt.Sprintf("none of %d contains %s", m.of, plain.Line(m.filter))
	case f.look.By != "" && f.seen == nil:
		return "measuring"
	case f.look.By != "":
		return cmp.Or(f.seen.says(), "no traffic now")
	case f.title != "":
		return "it was removed"
	case m.view != "bucket" && m.view != "node":
		return report.NoRows(m.view) + "; add one with 'shapectl set'"
	}
	return report.NoRows(m.view)
}

// bottom is the lines below the table.
func (m *Model) bottom() []string {
	facts := ""
	switch r, f := m.selected(), m.frame(); {
	case r == nil:
	case r.Name != nil:
		named := report.NewNamed(r)
		facts = named.Facts()
	case f.look.By != "":
		facts = f.seen.says()
	default:
		rule := report.NewRule(r.Item)
		facts = rule.Facts()
	}
	facts = styled(faint, ansi.Truncate(facts, m.width, "…"))
	switch p := m.prompt; {
	case p.says != "" && p.args == nil:
		return []string{facts, "filter: " + plain.Line(p.input) + "_   enter keeps it, esc clears it"}
	case p.says != "":
		return []string{styled(faint, "for example 20mbit; enter sets it for "+confirmAfter+", then c confirms it; esc cancels"), p.says + ": " + plain.Line(p.input) + "_"}
	case m.busy != "":
		return []string{facts, m.busy}
	case m.message != "":
		text := plain.Fold(m.message, max(m.width, 20), "", "  ")
		return append([]string{facts}, strings.Split(strings.TrimRight(text, "\n"), "\n")...)
	case m.page() != nil:
		return []string{"esc goes back, the arrows scroll"}
	}
	return []string{facts, m.keys()}
}

// keys names the keys, the most important ones first.
func (m *Model) keys() string {
	keys := []string{"q quit", "? help", "s sort", "v view", "/ filter", "enter open", "r rate", "e explain", "p pause"}
	if m.frame().title != "" {
		keys = []string{"esc back", "q quit", "? help", "s sort", "/ filter", "enter open", "e explain"}
	}
	if m.filter != "" {
		keys = slices.Insert(keys, 0, fmt.Sprintf("filter %s: %d of %d", plain.Line(m.filter), len(m.rows), m.of))
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
