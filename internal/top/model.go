package top

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/plain"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Options are how a screen begins.
type Options struct {
	Host     string
	Interval time.Duration
	By, Sort string // By is one of live.Views, or of a Subject
}

// A frame is one of the tables that were opened out of one another.
type frame struct {
	title  string
	by     string // what its rows are; "" for the view that keys choose
	pool   string // what the rows are within
	name   string // of the rules
	cursor string // the id of the selected row in the table below; "" for the first one
	filter string // of that table

	look  Subject // what it looks at, if by is of one
	close context.CancelFunc
	next  chan Seen
	seen  *Seen // the last; nil for none yet

	text string // a page instead of a table; "" for none
}

// A prompt is a line that keys write, and what it is for.
type prompt struct {
	says  string   // "" for none
	args  []string // of set, for a rate; nil for the filter
	input string
}

// confirmAfter is when a change of a rate reverts.
const confirmAfter = "1m"

// Model is the state of the screen. It implements tea.Model.
type Model struct {
	source Source
	host   string
	every  time.Duration

	width, height int
	reading       *live.Reading // what is shown; nil before the first one
	summary       live.Summary  // of it
	failure       string        // of the last reading
	history       history
	paused        bool

	view, sort, filter string
	frames             []*frame // those that were opened, below the last one; never empty
	looks              sync.WaitGroup
	rows               []live.Row // of the last frame
	of                 int        // how many there were before the filter
	cursor             string     // the id of the selected row; "" for the first one
	at                 int        // where that row was
	offset             int        // the first row or line that is shown

	prompt  prompt
	message string // until the next key
	busy    string // what is done now; "" for nothing
}

// New makes a screen of a source.
func New(source Source, o Options) *Model {
	m := &Model{
		source: source, host: o.Host, every: o.Interval, view: o.By, sort: o.Sort, width: 80, height: 24, frames: []*frame{{}},
	}
	if !slices.Contains(live.Views, o.By) {
		m.view = live.Views[0]
		title := map[string]string{"host": "hosts", "flow": "flows", "rtt": "round trips"}[o.By]
		m.frames = append(m.frames, &frame{title: title, by: o.By, look: Subject{By: o.By}})
	}
	return m
}

func (m *Model) frame() *frame { return m.frames[len(m.frames)-1] }

// by is what the rows are.
func (m *Model) by() string {
	if by := m.frame().by; by != "" {
		return by
	}
	return m.view
}

// Messages of commands that ended.
type (
	readingMsg struct {
		reading *live.Reading
		err     error
	}
	tickMsg struct{}
	seenMsg struct {
		of   *frame
		seen Seen
	}
	doneMsg struct { // a command that the user asked for
		text  string
		title string // of a page with the text
		long  bool   // it is a page
	}
)

// Init implements tea.Model.
func (m *Model) Init() tea.Cmd { return tea.Batch(m.read, m.watch()) }

func (m *Model) read() tea.Msg {
	r, err := m.source.Read()
	return readingMsg{r, err}
}

// View implements tea.Model.
func (m *Model) View() tea.View {
	v := tea.NewView(m.Screen())
	v.AltScreen = true
	return v
}

// Update implements tea.Model.
func (m *Model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tickMsg:
		return m, m.read
	case readingMsg:
		m.took(msg)
		return m, tea.Every(m.every, func(time.Time) tea.Msg { return tickMsg{} }) // at its next multiple, so that no time adds up
	case seenMsg:
		if !m.paused {
			msg.of.seen = &msg.seen
			m.rebuild()
		}
		return m, msg.of.wait
	case doneMsg:
		m.busy = ""
		if msg.text = strings.TrimRight(msg.text, "\n"); msg.long || strings.Count(msg.text, "\n") > mostSaid {
			m.open(&frame{title: msg.title, text: msg.text})
		} else {
			m.message = plain.Line(strings.ReplaceAll(msg.text, "\n", "; "))
		}
	case tea.PasteMsg:
		m.write(msg.Content)
	case tea.KeyPressMsg:
		return m, m.press(msg)
	}
	return m, nil
}

// mostSaid is how many lines of an answer are shown below the table, rather than on a page.
const mostSaid = 3

// took takes a reading in.
func (m *Model) took(msg readingMsg) {
	if m.paused {
		return
	}
	m.failure = ""
	if msg.err != nil {
		m.failure = oneLine(msg.err)
	}
	if msg.reading == nil || msg.err != nil && len(msg.reading.Items) == 0 && m.reading != nil {
		return // the last one is better than nothing
	}
	m.reading, m.summary = msg.reading, msg.reading.Summary(m.source.Chosen)
	m.history.add(m.reading)
	m.rebuild()
}

// watch begins to look, if the frame needs that.
func (m *Model) watch() tea.Cmd {
	f := m.frame()
	if f.look.By == "" {
		return nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	f.close, f.next = cancel, make(chan Seen)
	m.looks.Go(func() {
		defer close(f.next)
		see := func(s Seen) {
			select {
			case f.next <- s:
			case <-ctx.Done():
			}
		}
		if err := m.source.Look(ctx, f.look, see); err != nil {
			see(Seen{Err: err})
		}
	})
	return f.wait
}

// wait waits for what the frame sees next.
func (f *frame) wait() tea.Msg {
	if seen, more := <-f.next; more {
		return seenMsg{f, seen}
	}
	return nil
}

// rebuild makes the table of the last frame anew.
func (m *Model) rebuild() {
	if m.reading == nil {
		return
	}
	f := m.frame()
	v := live.View{By: m.by(), Sort: m.sort, Search: m.filter, Under: f.pool, Name: f.name, Chosen: m.source.Chosen}
	if f.look.By == "" {
		m.rows, m.of = m.reading.Rows(v)
	} else {
		var all []live.Row
		for i := 0; f.seen != nil && i < len(f.seen.Uses); i++ {
			all = append(all, f.seen.Uses[i].Parts...)
		}
		m.rows, m.of = v.Arrange(all)
	}
	if m.cursor == "" {
		m.at = 0
		return
	}
	m.at = min(m.at, max(len(m.rows)-1, 0)) // stays in place if the row is gone
	if at := slices.IndexFunc(m.rows, func(r live.Row) bool { return r.ID() == m.cursor }); at >= 0 {
		m.at = at
	}
}

// selected is the selected row; nil for none.
func (m *Model) selected() *live.Row {
	if m.at >= len(m.rows) || len(m.page()) > 0 {
		return nil
	}
	return &m.rows[m.at]
}

// move selects another row, or scrolls.
func (m *Model) move(by int) {
	if len(m.page()) > 0 {
		m.offset = max(min(m.offset+by, len(m.page())-m.room()), 0)
		return
	}
	m.at = max(min(m.at+by, len(m.rows)-1), 0)
	if m.cursor = ""; m.at > 0 { // else whoever is the first one
		m.cursor = m.rows[m.at].ID()
	}
}

// open shows another table.
func (m *Model) open(f *frame) tea.Cmd {
	f.cursor, f.filter = m.cursor, m.filter
	m.frames = append(m.frames, f)
	m.filter = ""
	m.first()
	return m.watch()
}

// back returns to the table below.
func (m *Model) back() {
	if len(m.frames) == 1 {
		return
	}
	f := m.frame()
	m.frames = m.frames[:len(m.frames)-1]
	m.cursor, m.filter, m.offset = f.cursor, f.filter, 0
	m.rebuild()
	if f.close != nil {
		f.close()
	}
}

// enter looks into a row.
func (m *Model) enter(r *live.Row) tea.Cmd {
	here := m.frame()
	switch {
	case here.by == "flow":
		return nil
	case r.Name != nil:
		return m.open(&frame{title: "rules of " + plain.Line(r.Name.Name), by: "network", name: r.Name.Name})
	case here.by == "host":
		return m.open(&frame{title: "flows of " + r.Part.Name + ", " + called(r.Item), by: "flow", look: Subject{"flow", r.Item, r.Part.Name}})
	case !r.IsPool():
		return m.open(&frame{title: "hosts of " + called(r.Item), by: "host", look: Subject{By: "host", Rule: r.Item}})
	case here.pool != r.Key.Pool:
		return m.open(&frame{title: "pool " + plain.Line(r.Key.Pool), by: "tree", pool: r.Key.Pool})
	}
	return nil
}

// press handles a key.
func (m *Model) press(key tea.KeyPressMsg) tea.Cmd {
	name := key.String()
	switch name {
	case "ctrl+c":
		return tea.Quit
	case "ctrl+z":
		return tea.Suspend
	}
	m.message = ""
	if m.prompt.says != "" {
		return m.edit(name, key.Text)
	}
	by, all := 0, 1<<30
	switch name {
	case "up", "k":
		by = -1
	case "down", "j":
		by = 1
	case "pgup":
		by = -m.room()
	case "pgdown":
		by = m.room()
	case "home", "g":
		by = -all
	case "end", "G":
		by = all
	}
	if by != 0 {
		m.move(by)
		return nil
	}
	r, pending := m.selected(), m.reading != nil && m.reading.RevertsInNS != nil
	switch {
	case name == "q":
		return tea.Quit
	case name == "s", name == "S":
		m.sort = next(live.Orders, m.sort, name == "S")
		m.first()
	case name == "v", name == "V":
		m.view = next(live.Views, m.view, name == "V")
		m.first()
	case name == "/":
		m.prompt = prompt{says: "filter", input: m.filter}
	case name == "enter" && r != nil:
		return m.enter(r)
	case m.filter == "" && (name == "esc" || name == "backspace"):
		m.back()
	case name == "esc", name == "backspace":
		m.filter = ""
		m.first()
	case name == "p", name == "space":
		m.paused = !m.paused
	case name == "?":
		return m.do("", "help", "top", "--help")
	case m.busy != "": // one after the other
	case name == "e" && r != nil:
		return m.do("counting packets for a second", "explain", explainArgs(r)...)
	case name == "r" && r != nil:
		m.prompt = askRate(r)
	case name == "c" && pending:
		return m.do("confirming", "", "confirm")
	case name == "u" && pending:
		return m.do("undoing", "", "rollback")
	case name == "c", name == "u":
		m.message = "no change is pending"
	}
	return nil
}

// first selects the first row of the table, which has another order now.
func (m *Model) first() {
	m.cursor, m.at, m.offset = "", 0, 0
	m.rebuild()
}

func next(names []string, now string, back bool) string {
	step := 1
	if back {
		step = len(names) - 1
	}
	return names[(max(slices.Index(names, now), 0)+step)%len(names)]
}

// Close ends what looks at packets.
func (m *Model) Close() {
	for _, f := range m.frames {
		if f.close != nil {
			f.close()
		}
	}
	m.looks.Wait()
}

// mostInput is how much of a filter or rate one can write.
const mostInput = 100

// write adds to the line that is written.
func (m *Model) write(text string) {
	p := &m.prompt
	if p.says != "" && len(p.input)+len(text) <= mostInput {
		p.input += strings.Map(func(c rune) rune {
			if c < ' ' {
				return -1
			}
			return c
		}, text)
	}
	if p.says != "" && p.args == nil {
		m.filter = p.input
		m.first()
	}
}

// edit handles the keys that change the line that is written, or end it.
func (m *Model) edit(name, text string) tea.Cmd {
	p := m.prompt
	switch words := strings.Fields(p.input); {
	case name == "enter" && len(words) > 0 && p.args != nil: // a rate, after a direction where that may be
		m.prompt = prompt{}
		args := slices.Concat([]string{"set", "--confirm", confirmAfter, "--rate", words[len(words)-1]}, p.args, words[:len(words)-1])
		return m.do("setting the "+p.says, "", args...)
	case name == "enter":
		m.prompt = prompt{}
	case name == "esc":
		m.prompt.input = ""
		m.write("")
		m.prompt = prompt{}
	case name == "backspace":
		runes := []rune(p.input)
		m.prompt.input = string(runes[:max(len(runes)-1, 0)])
		m.write("")
	default:
		m.write(text)
	}
	return nil
}

// called is what people call a rule or pool.
func called(it *live.Item) string {
	rule := report.NewRule(it)
	return rule.Called()
}

// askRate asks for another rate: of a rule without one, for that of its pool.
func askRate(r *live.Row) prompt {
	if r.Name != nil {
		return prompt{says: "[egress|ingress] rate of " + plain.Line(r.Name.Name), args: []string{"--", r.Name.Name}}
	}
	it := r.Item
	for it.Limit.Rate == policy.Unlimited && it.Parent() != nil {
		it = it.Parent()
	}
	rule, kind, args := report.NewRule(it), "rule", []string{it.Device, it.Direction, it.Network}
	if it.IsPool() {
		kind, args = "pool", []string{it.Key.Pool}
	}
	return prompt{says: "rate of " + kind + " " + rule.Called() + ", now " + rule.RateText(), args: append([]string{"--kind", kind, "--"}, args...)}
}

// explainArgs are a command line that explains what limits a row.
func explainArgs(r *live.Row) []string {
	switch {
	case r.Name != nil:
		return []string{"explain", "--", r.Name.Name}
	case r.IsPool():
		return []string{"explain", "--", r.Item.Key.Pool}
	}
	if policy.IsMark(r.Prefix) {
		return []string{"explain", "--", r.Device, r.Direction, policy.CIDR(r.Prefix)}
	}
	address := r.Prefix.Addr()
	if !r.Prefix.IsSingleIP() {
		address = address.Next()
	}
	where := []string{"explain", "--", r.Device, r.Direction}
	if r.Part == nil {
		return append(where, address.String())
	}
	if subnet, err := netip.ParsePrefix(r.Part.Name); err == nil {
		return append(where, subnet.Addr().String())
	}
	if _, err := netip.ParseAddr(r.Part.Name); err == nil {
		return append(where, r.Part.Name)
	}
	return slices.Insert(where, 1, "--flow", r.Part.Name)
}

// do runs a command line, and shows what it says: on a page if that has a title, fails or is long.
func (m *Model) do(busy, title string, args ...string) tea.Cmd {
	m.busy = busy
	return func() tea.Msg {
		text, ok := m.source.Run(args...)
		return doneMsg{text, cmp.Or(title, args[0]), title != "" || !ok}
	}
}

func oneLine(err error) string { return plain.Line(plain.OneLine(err)) }

// says is what was not seen.
func (s *Seen) says() string {
	if s.Err != nil {
		return oneLine(s.Err)
	}
	for _, u := range s.Uses {
		if u.Note != "" {
			return plain.Line(u.Note)
		}
	}
	return ""
}
