package top

import (
	"context"
	"errors"
	"fmt"
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
	Colour   bool
	UTF8     bool
}

// A frame is one of the tables that were opened out of one another.
type frame struct {
	title  string
	by     string // what its rows are; "" for the view that keys choose
	pool   string // what the rows are within
	name   string // of the rules
	cursor string // the id of the selected row in the table below; "" for the first one

	look  Subject // what it looks at, if by is of one
	close context.CancelFunc
	next  chan Seen
	seen  *Seen // the last; nil for none yet
}

// A mode is what keys are for.
type mode int

const (
	tableMode  mode = iota
	filterMode      // they write the filter
	rateMode        // a rate
	askMode         // they answer a question
	textMode        // they scroll a text
)

// A question is a change that is asked for.
type question struct {
	of             *live.Item // the rule or pool; nil for the rules with a name
	name           string
	args           []string // of set
	what, question string   // would change; with the keys that answer it
	confirms       bool     // it is about the change that is not confirmed
}

// confirmAfter is when a change of a rate reverts, if that is what the answer says.
const confirmAfter = time.Minute

// Model is the state of the screen. It implements tea.Model.
type Model struct {
	source Source
	host   string
	every  time.Duration
	look

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
	offset             int        // the first row that is shown

	mode    mode
	input   string
	ask     question
	text    []string
	whole   string // text before it was folded
	scroll  int
	message string // until the next key
	busy    string // what is done now; "" for nothing
}

// New makes a screen of a source.
func New(source Source, o Options) *Model {
	m := &Model{
		source: source, host: o.Host, every: o.Interval, look: look{o.Colour, o.UTF8}, view: o.By, sort: o.Sort, width: 80, height: 24,
		frames: []*frame{{}},
	}
	if !slices.Contains(live.Views, o.By) {
		m.view = live.Views[0]
		m.frames = append(m.frames, &frame{title: o.By + "s of all rules", by: o.By, look: Subject{By: o.By}})
		if o.By == "rtt" {
			m.frame().title = "round trips"
		}
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
		text string
		long bool // the text is a page
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
		m.fold()
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
			m.show(msg.text)
		} else {
			m.message = plain.Line(strings.ReplaceAll(msg.text, "\n", "; "))
		}
	case tea.PasteMsg:
		if m.mode == filterMode || m.mode == rateMode {
			m.write(msg.Content)
		}
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
	if m.at >= len(m.rows) {
		return nil
	}
	return &m.rows[m.at]
}

// move selects another row.
func (m *Model) move(by int) {
	m.at = max(min(m.at+by, len(m.rows)-1), 0)
	if m.cursor = ""; m.at > 0 { // else whoever is the first one
		m.cursor = m.rows[m.at].ID()
	}
}

// open shows another table.
func (m *Model) open(f *frame) tea.Cmd {
	f.cursor = m.cursor
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
	m.cursor, m.offset = f.cursor, 0
	m.rebuild()
	if f.close != nil {
		f.close()
	}
}

// enter looks into the selected row.
func (m *Model) enter() tea.Cmd {
	r, here := m.selected(), m.frame()
	switch {
	case r == nil || here.by == "flow":
		return nil
	case r.Name != nil:
		return m.open(&frame{title: "rules of " + plain.Line(r.Name.Name), by: "network", name: r.Name.Name})
	case here.by == "host":
		return m.open(&frame{title: "flows of " + r.Part.Key + ", " + called(r.Item), by: "flow", look: Subject{"flow", r.Item, r.Part.Key}})
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
	if m.mode != rateMode {
		m.message = ""
	}
	switch m.mode {
	case filterMode, rateMode:
		return m.edit(name, key.Text)
	case askMode:
		return m.answer(name)
	}
	by, all := 0, len(m.rows)+len(m.text)
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
	if m.mode == textMode {
		m.scroll = max(min(m.scroll+by, len(m.text)-m.room()), 0)
		if slices.Contains([]string{"esc", "q", "enter", "left", "h", "backspace", "?"}, name) {
			m.mode = tableMode
		}
		return nil
	}
	if by != 0 {
		m.move(by)
		return nil
	}
	switch name {
	case "q":
		return tea.Quit
	case "s", "S":
		m.sort = next(orders, m.sort, name == "S")
		m.first()
	case "v", "V", "tab", "shift+tab":
		m.view = next(live.Views, m.view, name == "V" || name == "shift+tab")
		m.first()
	case "/":
		m.mode, m.input = filterMode, m.filter
	case "enter", "right", "l":
		return m.enter()
	case "esc", "left", "h", "backspace":
		if m.filter == "" {
			m.back()
		}
		m.filter = ""
		m.rebuild()
	case "p", "space":
		m.paused = !m.paused
	case "?", "f1":
		m.show(help)
	case "e":
		if r := m.selected(); r != nil && m.busy == "" {
			row := *r
			return m.do("counting packets for a second", true, func() (string, bool) { return m.source.Explain(&row) })
		}
	case "r":
		m.askRate()
	case "c":
		if m.reading == nil || m.reading.RevertsInNS == nil {
			m.message = "no change is pending"
			return nil
		}
		m.ask = question{confirms: true, what: "the last change is not confirmed", question: "y confirm it  u undo it now  n cancel"}
		m.mode = askMode
	}
	return nil
}

// first selects the first row of the table, which has another order now.
func (m *Model) first() {
	m.cursor, m.at, m.offset = "", 0, 0
	m.rebuild()
}

// orders are those that a key chooses.
var orders = []string{live.Worst, "use", "percent", "dropped", "level", "name"}

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
	if len(m.input)+len(text) <= mostInput {
		m.input += strings.Map(func(c rune) rune {
			if c < ' ' {
				return -1
			}
			return c
		}, text)
	}
	if m.mode == filterMode {
		m.filter = m.input
		m.first()
	}
}

// edit handles the keys that change the line that is written, or end it.
func (m *Model) edit(name, text string) tea.Cmd {
	filters := m.mode == filterMode
	switch {
	case name == "enter" && filters:
		m.mode = tableMode
	case name == "enter":
		if err := m.askWhether(); err != nil {
			m.message = oneLine(err)
		}
	case name == "esc":
		m.input, m.message = "", ""
		m.write("")
		m.mode = tableMode
	case name == "up" && filters:
		m.move(-1)
	case name == "down" && filters:
		m.move(1)
	case name == "backspace":
		runes := []rune(m.input)
		m.input = string(runes[:max(len(runes)-1, 0)])
		m.write("")
	case name == "ctrl+u":
		m.input = ""
		m.write("")
	case text != "":
		m.message = ""
		m.write(text)
	}
	return nil
}

// askRate begins to ask for another rate: of a rule without one, for that of its pool.
func (m *Model) askRate() {
	r := m.selected()
	if r == nil {
		return
	}
	m.ask = question{of: r.Item}
	if r.Name != nil {
		m.ask.name = r.Name.Name
	}
	for it := r.Item; it != nil && it.Limit.Rate == policy.Unlimited && it.Parent() != nil; {
		it = it.Parent()
		m.ask.of = it
	}
	m.mode, m.input, m.message = rateMode, "", ""
}

// called is what people call a rule or pool.
func called(it *live.Item) string {
	rule := report.NewRule(it)
	return rule.Called()
}

// called is what the question is about, and now its rate.
func (q *question) called() (called, now string) {
	switch {
	case q.of == nil:
		return plain.Line(q.name), "the rate"
	case q.of.IsPool():
		called = "pool "
	}
	rule := report.NewRule(q.of)
	return called + rule.Called(), rule.RateText()
}

// prompt asks for the rate.
func (q *question) prompt() string {
	called, now := q.called()
	if q.of == nil {
		return "[egress|ingress] rate of " + called
	}
	return fmt.Sprintf("rate of %s, now %s", called, now)
}

// askWhether asks whether to set the rate that was written.
func (m *Model) askWhether() error {
	q, words := &m.ask, strings.Fields(m.input)
	direction := ""
	if q.of == nil && len(words) == 2 {
		d, err := policy.ParseDirection(words[0])
		if err != nil {
			return err
		}
		direction, words = d.String(), words[1:]
	}
	rate, err := policy.ParseRate(strings.Join(words, " "))
	if err != nil {
		return err
	}
	q.args = []string{"set", "--rate", rate.String()}
	switch {
	case q.of == nil:
		q.args = append(q.args, "--", q.name)
	case q.of.IsPool():
		q.args = append(q.args, "--kind", "pool", "--", q.of.Key.Pool)
	default:
		q.args = append(q.args, "--kind", "rule", "--", q.of.Device, q.of.Direction, q.of.Network)
	}
	called, now := q.called()
	if direction != "" {
		called, q.args = called+" "+direction, append(q.args, direction)
	}
	q.what = fmt.Sprintf("%s: %s -> %s", called, now, rate)
	q.question = fmt.Sprintf("y set it  t set it, reverts in %s unless confirmed  n cancel", plainly(confirmAfter))
	m.mode, m.message = askMode, ""
	return nil
}

// plainly is a duration without parts that are zero.
func plainly(d time.Duration) string {
	text := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(text, zero) {
			text = text[:len(text)-2]
		}
	}
	return text
}

// do does something, and shows what it says.
func (m *Model) do(says string, long bool, f func() (string, bool)) tea.Cmd {
	m.busy = says
	return func() tea.Msg {
		text, ok := f()
		return doneMsg{text, long || !ok}
	}
}

// answer handles the answer to a question.
func (m *Model) answer(key string) tea.Cmd {
	q := m.ask
	m.mode = tableMode
	run := func(says string, args ...string) tea.Cmd {
		return m.do(says, false, func() (string, bool) { return m.source.Run(args...) })
	}
	switch {
	case q.confirms && key == "y":
		return run("confirming", "confirm")
	case q.confirms && key == "u":
		return run("undoing", "rollback")
	case !q.confirms && key == "y":
		return run("setting "+q.what, q.args...)
	case !q.confirms && key == "t":
		return run("setting "+q.what, slices.Insert(q.args, 1, "--confirm", confirmAfter.String())...)
	case key == "n" || key == "esc" || key == "q":
		m.message = "nothing was changed"
	default:
		m.mode = askMode
	}
	return nil
}

// show shows a page.
func (m *Model) show(text string) {
	m.mode, m.whole, m.scroll = textMode, text, 0
	m.fold()
}

// fold breaks the page into lines of the screen's width.
func (m *Model) fold() {
	m.text = nil
	for line := range strings.Lines(m.whole) {
		line = plain.Line(strings.TrimRight(line, "\n"))
		indent := line[:len(line)-len(strings.TrimLeft(line, " "))]
		folded := plain.Fold(strings.TrimLeft(line, " "), max(m.width, 20), indent, indent+"  ")
		m.text = append(m.text, strings.Split(strings.TrimRight(folded, "\n"), "\n")...)
	}
}

func oneLine(err error) string { return plain.Line(plain.OneLine(err)) }

// says is what a frame that looks at packets cannot see.
func (s *Seen) says() string {
	var errs []error
	for _, u := range s.Uses {
		if u.Note != "" {
			errs = append(errs, errors.New(u.Note))
		}
	}
	if err := errors.Join(append(errs, s.Err)...); err != nil {
		return oneLine(err)
	}
	return ""
}

const help = `Rows with ! drop packets now: rules, and pools that refuse packets themselves. The row that drops most comes first,
then the rows nearest to their rate. X marks rules that are not in force.

  USE       rate of packets that passed       OF RATE  that in percent of the rate
  DROPS     rate of packets that were dropped  DROPPED  share of packets that were dropped
  LEVEL     how full the bucket, or the fullest of many, is
  LAST MINUTE  use, where a full cell is the rate; without a shared rate, the highest use

Keys

  up, down, page up, page down, home, end   select a row (also k, j, g, G)
  enter      open the row: a pool's members, a name's rules, a rule's hosts, a host's flows
  esc        go back; also clears the filter
  s, S       the next or previous order: worst, use, percent, dropped, level, name
  v, V, tab  the next or previous view: by network, by tree of pools, by name,
             by the pools that several names draw from, the fullest buckets
  /          show only rows that contain a text: name, plan, note, pool, device, network
  r          change the rate; asks first, and keeps buckets
  c          confirm or undo a pending change
  e          explain what limits the row
  p, space   pause
  q, ctrl-c  quit; ctrl-z suspends`
