package top

import (
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
	Host       string
	Interval   time.Duration
	View, Sort string
	Colour     bool
	UTF8       bool
}

// A frameKind is what the table is of.
type frameKind int

const (
	allFrame     frameKind = iota
	poolFrame              // a pool, with what is within it
	nameFrame              // the rules with a name
	bucketsFrame           // the fullest buckets
	ruleFrame              // the hosts of a rule
	hostFrame              // the flows of a host
)

// A frame is one of the tables that were opened out of one another.
type frame struct {
	kind    frameKind
	name    string     // of the pool or the rules
	rule    *live.Item // of the hosts or flows
	host    string
	cursor  string // the id of the selected row in the table below; "" for the first one
	looker  Looker
	reading bool // looker reads now
	read    bool // it has read
	talkers []report.Talker
	note    string // about what looker sees
}

func (f *frame) title() string {
	switch f.kind {
	case poolFrame:
		return "pool " + plain.Line(f.name)
	case nameFrame:
		return "rules of " + plain.Line(f.name)
	case bucketsFrame:
		return "fullest buckets"
	case hostFrame:
		rule := report.NewRule(f.rule)
		return "flows of " + plain.Line(f.host) + ", " + rule.Where() + " " + rule.Network()
	case ruleFrame:
		return "hosts of " + labelOf(f.rule)
	}
	return ""
}

// A guarded looker is not closed while it reads, and reads nothing after that.
type guarded struct {
	Looker
	mutex  sync.Mutex
	closed bool
}

func (g *guarded) Read() (report.RuleTalkers, error) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.closed {
		return report.RuleTalkers{}, nil
	}
	return g.Looker.Read()
}

func (g *guarded) Close() error {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	return g.Looker.Close()
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
	target   Target
	rate     string
	what     string // would change
	question string // with the keys that answer it
	confirms bool   // it is about the change that is not confirmed
}

// confirmAfter is when a change of a rate reverts, if that is what the answer says.
const confirmAfter = time.Minute

// Model is the state of the screen. It implements tea.Model.
type Model struct {
	source Source
	host   string
	every  time.Duration
	look   look

	width, height int
	reading       *live.Reading // what is shown; nil before the first one
	summary       live.Summary  // of it
	failure       string        // of the last reading
	history       history
	paused        bool

	view, sort, filter string
	frames             []*frame // those that were opened, below the last one; never empty
	table              table    // of the last frame
	cursor             string   // the id of the selected row; "" for the first one
	at                 int      // where that row was
	offset             int      // the first row that is shown

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
	return &Model{
		source: source, host: o.Host, every: o.Interval, look: look{o.Colour, o.UTF8}, view: o.View, sort: o.Sort, width: 80, height: 24,
		frames: []*frame{{}},
	}
}

func (m *Model) frame() *frame { return m.frames[len(m.frames)-1] }

// Messages of commands that ended.
type (
	readingMsg struct {
		reading *live.Reading
		err     error
	}
	tickMsg    struct{}
	talkersMsg struct {
		of      *frame
		reading report.RuleTalkers
		err     error
	}
	lookMsg struct {
		of     *frame
		looker Looker
		err    error
	}
	doneMsg struct { // a command that the user asked for
		text string
		err  error
		long bool // the text is a page
	}
)

// Init implements tea.Model.
func (m *Model) Init() tea.Cmd { return m.read }

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
		return m, tea.Batch(m.tick(), m.watch())
	case lookMsg:
		if !slices.Contains(m.frames, msg.of) {
			if msg.looker != nil { // the frame was left meanwhile
				return m, func() tea.Msg { msg.looker.Close(); return nil }
			}
			return m, nil
		}
		if msg.looker != nil {
			msg.of.looker = &guarded{Looker: msg.looker}
		}
		if msg.err != nil {
			msg.of.note = oneLine(msg.err)
		}
		return m, nil // it has nothing to tell before the next tick
	case talkersMsg:
		msg.of.reading, msg.of.read = false, true
		if msg.err != nil {
			msg.reading.Note = oneLine(msg.err)
		}
		msg.of.talkers, msg.of.note = msg.reading.Talkers, msg.reading.Note
		m.rebuild()
	case doneMsg:
		m.done(msg)
		return m, nil
	case tea.PasteMsg:
		if m.mode == filterMode || m.mode == rateMode {
			m.write(msg.Content)
		}
	case tea.KeyPressMsg:
		return m, m.press(msg)
	}
	return m, nil
}

// tick reads again at the next multiple of the interval, so that no time adds up.
func (m *Model) tick() tea.Cmd {
	return tea.Every(m.every, func(time.Time) tea.Msg { return tickMsg{} })
}

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

// watch has the looker of the frame read.
func (m *Model) watch() tea.Cmd {
	f := m.frame()
	if f.looker == nil || f.reading || m.paused {
		return nil
	}
	f.reading = true
	looker := f.looker
	return func() tea.Msg {
		reading, err := looker.Read()
		return talkersMsg{f, reading, err}
	}
}

// rebuild makes the table of the last frame anew.
func (m *Model) rebuild() {
	if m.reading == nil {
		return
	}
	f, v := m.frame(), live.View{By: m.view, Sort: m.sort, Search: m.filter, Chosen: m.source.Chosen}
	switch f.kind {
	case bucketsFrame:
		m.table = ofBuckets(m.reading, v)
	case ruleFrame, hostFrame:
		m.table = ofTalkers(f.talkers, m.sort, m.filter)
	default:
		if f.kind == poolFrame {
			v.By, v.Under = "tree", f.name
		} else if f.kind == nameFrame {
			v.By, v.Name = "network", f.name
		}
		m.table = ofView(m.reading, v)
	}
	if m.cursor != "" {
		m.at = min(m.at, max(len(m.table.rows)-1, 0)) // stays in place if the row is gone
		for i := range m.table.rows {
			if m.table.rows[i].id() == m.cursor {
				m.at = i
				return
			}
		}
		return
	}
	m.at = 0
}

// move selects another row.
func (m *Model) move(by int) {
	if len(m.table.rows) == 0 {
		return
	}
	m.at = min(max(m.at+by, 0), len(m.table.rows)-1)
	m.cursor = m.table.rows[m.at].id()
	if m.at == 0 {
		m.cursor = "" // whoever is the first one
	}
}

// open shows another table.
func (m *Model) open(f *frame) {
	f.cursor = m.cursor
	m.frames = append(m.frames, f)
	m.cursor, m.at, m.offset, m.filter = "", 0, 0, ""
	m.rebuild()
}

// back returns to the table below.
func (m *Model) back() tea.Cmd {
	if len(m.frames) == 1 {
		return nil
	}
	f := m.frame()
	m.frames = m.frames[:len(m.frames)-1]
	m.cursor, m.offset, m.filter = f.cursor, 0, ""
	m.rebuild()
	if f.looker == nil {
		return nil
	}
	return func() tea.Msg { f.looker.Close(); return nil }
}

// enter looks into the selected row.
func (m *Model) enter() tea.Cmd {
	if m.at >= len(m.table.rows) {
		return nil
	}
	r := &m.table.rows[m.at]
	f := &frame{kind: ruleFrame, rule: r.Item}
	switch here := m.frame(); {
	case r.Name != nil:
		m.open(&frame{kind: nameFrame, name: r.Name.Name})
		return nil
	case r.isPool() && here.kind == poolFrame && here.name == r.Key.Pool:
		return nil
	case r.isPool():
		m.open(&frame{kind: poolFrame, name: r.Key.Pool})
		return nil
	case r.talker != nil && here.kind == ruleFrame:
		f = &frame{kind: hostFrame, rule: here.rule, host: r.talker.Key}
	case f.rule == nil || r.talker != nil:
		return nil
	}
	m.open(f)
	return func() tea.Msg {
		looker, err := m.source.Look(f.rule, f.host)
		return lookMsg{f, looker, err}
	}
}

// target is what the selected row stands for.
func (m *Model) target() (Target, bool) {
	f := m.frame()
	if f.kind == ruleFrame || f.kind == hostFrame {
		t := Target{Rule: f.rule, Key: f.host}
		if m.at < len(m.table.rows) && f.kind == ruleFrame {
			t.Key = m.table.rows[m.at].talker.Key
		}
		return t, true
	}
	if m.at >= len(m.table.rows) {
		return Target{}, false
	}
	r := &m.table.rows[m.at]
	switch {
	case r.Name != nil:
		return Target{Name: r.Name.Name}, true
	case r.bucket != nil:
		return Target{Rule: r.Item, Key: r.bucket.Bucket.Name}, true
	}
	return Target{Rule: r.Item}, true
}

// press handles a key.
func (m *Model) press(key tea.KeyPressMsg) tea.Cmd {
	name := key.String()
	switch name {
	case "ctrl+c":
		return m.quit()
	case "ctrl+z":
		return tea.Suspend
	}
	if m.mode != rateMode {
		m.message = ""
	}
	switch m.mode {
	case filterMode:
		return m.pressFilter(name, key.Text)
	case rateMode:
		return m.pressRate(name, key.Text)
	case askMode:
		return m.answer(name)
	case textMode:
		m.pressText(name)
		return nil
	}
	switch name {
	case "q":
		return m.quit()
	case "up", "k":
		m.move(-1)
	case "down", "j":
		m.move(1)
	case "pgup":
		m.move(-m.room())
	case "pgdown":
		m.move(m.room())
	case "home", "g":
		m.move(-len(m.table.rows))
	case "end", "G":
		m.move(len(m.table.rows))
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
		if m.filter != "" {
			m.filter = ""
			m.rebuild()
			return nil
		}
		return m.back()
	case "b":
		if m.frame().kind != bucketsFrame {
			m.open(&frame{kind: bucketsFrame})
		}
	case "p", "space":
		m.paused = !m.paused
	case "?", "f1":
		m.show(help)
	case "e":
		return m.explain()
	case "r":
		m.askRate()
	case "c":
		m.askConfirm()
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
	return names[(slices.Index(names, now)+step)%len(names)]
}

// quit ends the program, and what looks into rules before.
func (m *Model) quit() tea.Cmd {
	m.Close()
	return tea.Quit
}

// Close ends what looks into rules.
func (m *Model) Close() {
	for _, f := range m.frames {
		if f.looker != nil {
			f.looker.Close()
			f.looker = nil
		}
	}
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

// edit handles the keys that change the line that is written.
func (m *Model) edit(name, text string) {
	switch {
	case name == "backspace":
		runes := []rune(m.input)
		m.input = string(runes[:max(len(runes)-1, 0)])
		m.write("")
	case name == "ctrl+u":
		m.input = ""
		m.write("")
	case text != "":
		m.write(text)
	}
}

func (m *Model) pressFilter(name, text string) tea.Cmd {
	switch name {
	case "enter":
		m.mode = tableMode
	case "esc":
		m.mode, m.filter = tableMode, ""
		m.first()
	case "up":
		m.move(-1)
	case "down":
		m.move(1)
	default:
		m.edit(name, text)
	}
	return nil
}

// askRate begins to ask for another rate.
func (m *Model) askRate() {
	target, ok := m.target()
	if !ok {
		return
	}
	target.Key = "" // all keys have the rate of the rule
	for it := target.Rule; it != nil && it.Limit.Rate == policy.Unlimited && it.Parent() != nil; {
		it = it.Parent() // whose rate it has
		target.Rule = it
	}
	m.ask = question{target: target}
	m.mode, m.input, m.message = rateMode, "", ""
}

// called is what the question is about.
func (q *question) called() string {
	switch {
	case q.target.Rule == nil:
		return plain.Line(q.target.Name)
	case q.target.Rule.IsPool():
		return "pool " + labelOf(q.target.Rule)
	}
	return labelOf(q.target.Rule)
}

func rateOf(it *live.Item) string {
	rule := report.NewRule(it)
	return rule.RateText()
}

// prompt asks for the rate.
func (q *question) prompt() string {
	if q.target.Rule == nil {
		return "[egress|ingress] rate of " + q.called()
	}
	return fmt.Sprintf("rate of %s, now %s", q.called(), rateOf(q.target.Rule))
}

func (m *Model) pressRate(name, text string) tea.Cmd {
	switch name {
	case "enter":
		m.checkRate()
	case "esc":
		m.mode, m.message = tableMode, ""
	default:
		m.message = ""
		m.edit(name, text)
	}
	return nil
}

// checkRate asks whether to set the rate that was written.
func (m *Model) checkRate() {
	q := &m.ask
	words := strings.Fields(m.input)
	if q.target.Direction = ""; q.target.Rule == nil && len(words) == 2 {
		d, err := policy.ParseDirection(words[0])
		if err != nil {
			m.message = oneLine(err)
			return
		}
		q.target.Direction, words = d.String(), words[1:]
	}
	rate, err := policy.ParseRate(strings.Join(words, " "))
	if err != nil {
		m.message = oneLine(err)
		return
	}
	q.rate = rate.String()
	before := "the rate"
	if q.target.Rule != nil {
		before = rateOf(q.target.Rule)
	}
	q.what = fmt.Sprintf("%s: %s -> %s", strings.TrimSpace(q.called()+" "+q.target.Direction), before, q.rate)
	q.question = fmt.Sprintf("y set it  t set it, reverts in %s unless confirmed  n cancel", plainly(confirmAfter))
	m.mode, m.message = askMode, ""
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

// askConfirm asks what to do about the change that is not confirmed.
func (m *Model) askConfirm() {
	if m.reading == nil || m.reading.RevertsInNS == nil {
		m.message = "no change is pending"
		return
	}
	m.ask = question{confirms: true, what: "the last change is not confirmed", question: "y confirm it  u undo it now  n cancel"}
	m.mode = askMode
}

// answer handles the answer to a question.
func (m *Model) answer(key string) tea.Cmd {
	q := m.ask
	m.mode = tableMode
	do := func(says string, f func() (string, error)) tea.Cmd {
		m.busy = says
		return func() tea.Msg {
			text, err := f()
			return doneMsg{text: text, err: err}
		}
	}
	set := func(confirm time.Duration) tea.Cmd {
		return do("setting "+q.what, func() (string, error) { return m.source.SetRate(q.target, q.rate, confirm) })
	}
	switch {
	case q.confirms && key == "y":
		return do("confirming", m.source.Confirm)
	case q.confirms && key == "u":
		return do("undoing", m.source.Rollback)
	case !q.confirms && key == "y":
		return set(0)
	case !q.confirms && key == "t":
		return set(confirmAfter)
	case key == "n" || key == "esc" || key == "q":
		m.message = "nothing was changed"
	default:
		m.mode = askMode
	}
	return nil
}

// explain explains the selected row.
func (m *Model) explain() tea.Cmd {
	target, ok := m.target()
	if !ok || m.busy != "" {
		return nil
	}
	m.busy = "counting packets for a second"
	return func() tea.Msg {
		text, err := m.source.Explain(target)
		return doneMsg{text, err, true}
	}
}

// mostSaid is how many lines of an answer are shown below the table, rather than on a page.
const mostSaid = 3

// done shows what a command said.
func (m *Model) done(msg doneMsg) {
	m.busy = ""
	text := strings.TrimRight(msg.text, "\n")
	if msg.err != nil {
		text = strings.TrimSpace(text + "\n" + msg.err.Error())
	}
	if msg.long || msg.err != nil || strings.Count(text, "\n") > mostSaid {
		m.show(text)
		return
	}
	m.message = plain.Line(strings.Join(strings.Split(text, "\n"), "; "))
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

func (m *Model) pressText(name string) {
	page := max(m.height-4, 1)
	switch name {
	case "up", "k":
		m.scroll--
	case "down", "j":
		m.scroll++
	case "pgup":
		m.scroll -= page
	case "pgdown", "space":
		m.scroll += page
	case "home", "g":
		m.scroll = 0
	case "end", "G":
		m.scroll = len(m.text)
	case "esc", "q", "enter", "left", "h", "backspace", "?":
		m.mode = tableMode
	}
	m.scroll = max(min(m.scroll, len(m.text)-page), 0)
}

func oneLine(err error) string { return plain.Line(plain.OneLine(err)) }

const help = `Rows with ! drop packets now: rules, and pools that refuse packets themselves. The row that drops most comes first,
then the rows nearest to their rate. X marks rules that are not in force.

  USE       rate of packets that passed       OF     that in percent of the rate
  DROPS     rate of packets that were dropped  DROPPED  share of packets that were dropped
  LEVEL     how full the bucket, or the fullest of many, is
  LAST MINUTE  use, where a full cell is the rate; without a shared rate, the highest use

Keys

  up, down, page up, page down, home, end   select a row (also k, j, g, G)
  enter      open the row: a pool's members, a name's rules, a rule's hosts, a host's flows
  esc        go back; also clears the filter
  s, S       the next or previous order: worst, use, percent, dropped, level, name
  v, V, tab  the next or previous view: by network, by tree of pools, by name,
             by the pools that several names draw from
  /          show only rows that contain a text: name, plan, note, pool, device, network
  b          the fullest buckets
  r          change the rate; asks first, and keeps buckets
  c          confirm or undo a pending change
  e          explain what limits the row
  p, space   pause
  q, ctrl-c  quit; ctrl-z suspends`
