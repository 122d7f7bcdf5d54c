package top

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/shapectl/shapectl/internal/live"
	"github.com/shapectl/shapectl/internal/live/livetest"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/pkg/policy"
)

var update = flag.Bool("update", false, "write the screens into testdata")

// golden compares a screen with a file in testdata.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (go test -update writes it anew); it is now:\n%s", path, got)
	}
}

// A made is a rule of a made-up reading.
type made struct {
	device, prefix, name, plan, within string
	ingress, pool                      bool
	rate, use, dropped                 uint64
	refused                            uint64 // of a pool: what it dropped itself
	each                               policy.Each
	level                              float64 // of the burst
	colours                            *policy.Colours
}

func (d made) rule() policy.Rule {
	r := policy.Rule{Rate: policy.Rate(d.rate), Each: d.each, Within: policy.Within(d.within), Pool: d.pool, Label: policy.Label{Name: d.name, Plan: d.plan}}
	if d.pool {
		r.Prefix = policy.PoolKey(d.name)
	} else {
		r.Prefix = netip.MustParsePrefix(d.prefix)
	}
	if d.rate == 0 {
		r.Rate = policy.Unlimited
	} else {
		r.Capacity = policy.DefaultCapacity(r.Rate)
	}
	if d.colours != nil {
		r.Algorithm, r.Colours = policy.TRTCM, *d.colours
	}
	return r
}

// counts are those after a second.
func (d made) counts() (c live.Counts) {
	dropped := d.dropped
	if d.pool {
		dropped = d.refused
	}
	c.PassedBytes, c.PassedPackets, c.DroppedBytes, c.DroppedPackets = d.use/8, d.use/8/1000, dropped/8, dropped/8/1000
	return c
}

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// readingOf is a made-up reading, so many seconds after noon. Pools come first, then a rule's device and direction together.
func readingOf(second int, all ...made) *live.Reading {
	var tables []policy.Table
	var order []made
	for _, d := range all {
		t := policy.Table{Device: d.device, Direction: policy.Egress, Match: policy.MatchDst}
		if d.ingress {
			t.Direction, t.Match = policy.Ingress, policy.MatchSrc
		}
		at := slices.IndexFunc(tables, func(o policy.Table) bool { return o.Device == t.Device && o.Direction == t.Direction })
		if at < 0 {
			at, tables = len(tables), append(tables, t)
		}
		tables[at].Rules = append(tables[at].Rules, d.rule())
	}
	for _, t := range tables { // the items of a scene are in this order
		for _, d := range all {
			if d.device == t.Device && d.ingress == (t.Direction == policy.Ingress) {
				order = append(order, d)
			}
		}
	}
	scene, n := livetest.Scene(tables...), 0
	before := scene.Read(1e9, func(l *live.Limit) live.Item { return live.Item{Limit: l} })
	r := scene.Read(2e9, func(l *live.Limit) live.Item {
		d := order[n]
		n++
		return live.Item{Limit: l, Counts: d.counts(), Level: uint64(d.level * float64(l.Capacity))}
	})
	r.Since(before)
	r.Time = noon.Add(time.Duration(second) * time.Second)
	return r
}

// provider are the rules and pools of a small provider, so many seconds after noon.
func provider(second int) []made {
	wave := uint64(second%10+1) * 1e6
	return []made{
		{pool: true, name: "uplink", rate: 1e9, use: 400e6 + wave},
		{pool: true, name: "ap-1", within: "uplink", rate: 50e6, use: 49.8e6, refused: 30e6, level: 0.97},
		{device: "eth0", prefix: "10.0.0.7/32", name: "alice", plan: "gold", within: "ap-1", rate: 50e6, use: 20e6 + wave/4, level: 0.02},
		{device: "eth0", prefix: "10.0.0.7/32", name: "alice", plan: "gold", ingress: true, rate: 10e6, use: wave},
		{device: "eth0", prefix: "10.0.0.8/32", name: "bob", plan: "silver", within: "ap-1", rate: 30e6, use: 29.9e6, dropped: 30e6, level: 0.99},
		{device: "eth0", prefix: "10.0.0.8/32", name: "bob", plan: "silver", ingress: true, rate: 3e6, use: 2.9e6, level: 0.4},
		{device: "eth0", prefix: "10.0.1.0/24", rate: 1e6, each: policy.Each{Kind: policy.EachHost}, use: 4e6, dropped: 12e3},
		{device: "eth0", prefix: "2001:db8:1234:5678::/64", name: "Lehmann, Lindenallee 41 / Router / Hinterhaus", rate: 100e6, use: wave / 2},
		{device: "wlan0", prefix: "0.0.0.0/0", rate: 0, use: 1234},
	}
}

func reading(second int) *live.Reading {
	r := readingOf(second, provider(second)...)
	hosts := r.Find(live.Key{Device: "eth0", Direction: "egress", Network: "10.0.1.0/24"})
	for i, level := range []uint64{14000, 9000, 300} {
		r.Fullest = append(r.Fullest, live.FullBucket{Item: hosts, Bucket: live.Bucket{Name: fmt.Sprintf("10.0.1.%d", i+1), Bytes: level}, Percent: float64(level) / 150})
	}
	return r
}

// A fake is a Source of made-up readings.
type fake struct {
	t       *testing.T
	second  int
	asked   []string
	err     error
	reading func(second int) *live.Reading
	open    int // lookers
}

func (f *fake) Chosen(*live.Item) bool { return true }

func (f *fake) Read() (*live.Reading, error) {
	f.second++
	return f.reading(f.second), f.err
}

func (f *fake) Look(rule *live.Item, host string) (Looker, error) {
	f.asked = append(f.asked, "look "+rule.Network+" "+host)
	f.open++
	return &fakeLooker{f, host}, nil
}

func (f *fake) did(what string) (string, error) {
	f.asked = append(f.asked, what)
	return "done: " + what, f.err
}

func (f *fake) Explain(t Target) (string, error) {
	what := t.Name
	if t.Rule != nil {
		what = t.Rule.Label.Name + " " + t.Rule.Network
	}
	return f.did("explain " + strings.TrimSpace(what+" "+t.Key))
}

func (f *fake) SetRate(t Target, rate string, confirm time.Duration) (string, error) {
	what := t.Name
	if t.Rule != nil {
		what = t.Rule.Label.Name
	}
	return f.did(fmt.Sprintf("set %s %s %s %v", what, t.Direction, rate, confirm))
}

func (f *fake) Confirm() (string, error)  { return f.did("confirm") }
func (f *fake) Rollback() (string, error) { return f.did("rollback") }

type fakeLooker struct {
	f    *fake
	host string
}

func (l *fakeLooker) Read() (report.RuleTalkers, error) {
	bits := func(n uint64) *uint64 { return &n }
	if l.host != "" {
		return report.RuleTalkers{Talkers: []report.Talker{{Key: "tcp," + l.host + ":443,192.0.2.1:5000", OfferedBits: bits(3e6), PassedBits: bits(1e6)}}}, nil
	}
	full := 93.3
	return report.RuleTalkers{Talkers: []report.Talker{
		{Key: "10.0.1.2", OfferedBits: bits(1e6), PassedBits: bits(1e6)},
		{Key: "10.0.1.1", OfferedBits: bits(5e6), PassedBits: bits(1e6), LevelBytes: 14000, FullPercent: &full},
	}}, nil
}

func (l *fakeLooker) Close() error { l.f.open--; return nil }

// A driver presses keys, and runs the commands that the model returns but for its clock.
type driver struct {
	*Model
	t    *testing.T
	f    *fake
	quit bool
}

func drive(t *testing.T, width, height int, o Options) *driver {
	t.Helper()
	f := &fake{t: t, reading: reading}
	o.Interval, o.Host = time.Second, "router-7"
	if o.View == "" {
		o.View = "network"
	}
	if o.Sort == "" {
		o.Sort = "worst"
	}
	d := &driver{Model: New(f, o), t: t, f: f}
	d.send(tea.WindowSizeMsg{Width: width, Height: height})
	d.read(1)
	return d
}

// read takes some readings.
func (d *driver) read(n int) {
	d.t.Helper()
	for range n {
		d.took(d.Model.read().(readingMsg))
		d.run(d.watch())
	}
	d.check()
}

func (d *driver) send(msg tea.Msg) {
	_, cmd := d.Update(msg)
	d.run(cmd)
}

func (d *driver) run(cmd tea.Cmd) {
	if cmd == nil {
		return
	}
	switch msg := cmd().(type) {
	case nil:
	case tea.QuitMsg:
		d.quit = true
	default:
		d.send(msg)
	}
}

var keys = map[string]tea.KeyPressMsg{
	"enter": {Code: tea.KeyEnter}, "esc": {Code: tea.KeyEscape}, "up": {Code: tea.KeyUp}, "down": {Code: tea.KeyDown},
	"end": {Code: tea.KeyEnd}, "home": {Code: tea.KeyHome}, "backspace": {Code: tea.KeyBackspace}, "pgdown": {Code: tea.KeyPgDown},
	"tab": {Code: tea.KeyTab}, "ctrl+c": {Code: 'c', Mod: tea.ModCtrl}, "space": {Code: tea.KeySpace, Text: " "},
}

// press presses keys; what is no name of one is typed.
func (d *driver) press(names ...string) {
	d.t.Helper()
	for _, name := range names {
		if key, ok := keys[name]; ok {
			d.send(key)
		} else {
			for _, c := range name {
				d.send(tea.KeyPressMsg{Code: c, Text: string(c)})
			}
		}
		d.check()
	}
}

// check ends the test unless the screen fits the terminal.
func (d *driver) check() {
	d.t.Helper()
	lines := strings.Split(d.Screen(), "\n")
	if len(lines) > max(d.height, 1) {
		d.t.Fatalf("%d lines in %d:\n%s", len(lines), d.height, d.Screen())
	}
	for _, line := range lines {
		if ansi.StringWidth(line) > d.width {
			d.t.Fatalf("%d columns in %d: %q", ansi.StringWidth(line), d.width, line)
		}
	}
}

func (d *driver) shows(texts ...string) {
	d.t.Helper()
	bare := strings.Join(strings.Fields(d.Screen()), " ")
	for _, text := range texts {
		if !strings.Contains(d.Screen(), text) && !strings.Contains(bare, text) {
			d.t.Errorf("the screen has no %q:\n%s", text, d.Screen())
		}
	}
}

// trimmed is a screen as a file has it.
func trimmed(screen string) string {
	var s strings.Builder
	for line := range strings.Lines(screen + "\n") {
		s.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return s.String()
}

func TestScreens(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {120, 40}, {40, 10}} {
		for _, view := range live.Views {
			d := drive(t, size[0], size[1], Options{View: view, UTF8: true})
			d.read(69)
			golden(t, fmt.Sprintf("%s-%dx%d", view, size[0], size[1]), trimmed(d.Screen()))
		}
	}
	d := drive(t, 80, 24, Options{})
	d.read(20)
	golden(t, "ascii", trimmed(d.Screen()))
	if strings.ContainsFunc(d.Screen(), func(c rune) bool { return c > '~' || c == '\x1b' }) {
		t.Error("without UTF-8 and colour there are other characters")
	}
}

// The one who loses most is the first row, whoever it was a second before; the cursor follows what was selected.
func TestWorstFirst(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	if got := d.table.rows[0].label(); got != "bob egress 10.0.0.8" {
		t.Errorf("first is %s", got)
	}
	first := func() string { return strings.Split(d.Screen(), "\n")[3] }
	if !strings.HasPrefix(first(), ">!bob egress") {
		t.Errorf("the first line is %q", first())
	}
	d.press("down")
	selected := d.cursor
	d.f.reading = func(second int) *live.Reading {
		return readingOf(second, append(provider(second), made{device: "eth9", prefix: "10.9.0.0/16", rate: 1e6, use: 1e6, dropped: 900e6})...)
	}
	d.read(1)
	if !strings.HasPrefix(first(), " !eth9 egre") {
		t.Errorf("the first line is %q", first())
	}
	if d.cursor != selected || d.table.rows[d.at].id() != selected || d.at != 2 {
		t.Errorf("the cursor is at %d, %q, not at %q", d.at, d.cursor, selected)
	}
}

func TestOrdersAndViews(t *testing.T) {
	d := drive(t, 100, 30, Options{})
	firsts := map[string]string{}
	for range orders {
		firsts[d.sort] = d.table.rows[0].label()
		d.press("s")
	}
	for sort, want := range map[string]string{
		"worst": "bob egress 10.0.0.8", "use": "uplink", "percent": "bob egress 10.0.0.8", "dropped": "bob egress 10.0.0.8",
		"level": "bob egress 10.0.0.8", "name": "Lehmann, Lindenallee 41 / Router / Hinterhaus egress 2001:db8:1234:5678::/64",
	} {
		if firsts[sort] != want {
			t.Errorf("by %s the first one is %s, not %s", sort, firsts[sort], want)
		}
	}
	d.press("S")
	d.shows("sorted by name")
	d.press("v")
	d.shows("by tree", "    bob egress")
	d.press("v")
	d.shows("by name", "EGRESS", "INGRESS")
	d.press("down", "down")
	d.shows("bob, eth0 egress 30mbit in 1 rule, eth0 ingress 3mbit in 1 rule, within ap-1")
	d.press("v")
	d.shows("by node", "ap-1")
	d.press("v")
	d.shows("by network")
}

func TestFilter(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.press("/", "silVER")
	d.shows("filter: silVER_")
	if len(d.table.rows) != 2 {
		t.Errorf("%d rows have that plan:\n%s", len(d.table.rows), d.Screen())
	}
	d.press("enter", "v", "v")
	d.shows("filter silVER: 1 of 5", "bob")
	d.press("v", "v", "v")
	d.shows("uplink", "ap-1", "bob egress") // with the pools above
	d.press("esc", "/", "nobody")
	d.shows("none of 9 contains nobody")
	d.press("backspace", "backspace", "backspace", "backspace", "backspace", "backspace")
	if len(d.table.rows) != 9 {
		t.Errorf("%d rows", len(d.table.rows))
	}
	d.press("x\x1b[31m", "esc")
	if d.filter != "" || d.mode != tableMode {
		t.Error("esc does not clear the filter")
	}
}

// A row opens: a pool's members, a name's rules, a rule's hosts, a host's flows.
func TestLookInto(t *testing.T) {
	d := drive(t, 80, 24, Options{View: "tree"})
	d.press("down", "enter")
	d.shows("pool ap-1", ">!ap-1", "bob egress", "alice egress")
	d.press("esc", "v", "enter")
	d.shows("rules of bob", "bob egress", "bob ingress")
	d.press("esc", "v", "v", "down", "down", "enter")
	d.shows("measuring")
	d.read(1)
	d.shows("hosts of eth0 egress 10.0.1.0/24", ">!10.0.1.1", "5.00mbit", "1.00mbit", "4.00mbit", "14.0 kB", "93%", "10.0.1.2")
	d.press("enter")
	d.read(1)
	d.shows("flows of 10.0.1.1", "tcp,10.0.1.1:443,192.0.2.1:5000")
	if d.f.open != 2 {
		t.Errorf("%d lookers are open", d.f.open)
	}
	d.press("e")
	d.shows("done: explain 10.0.1.0/24 10.0.1.1")
	d.press("esc", "esc", "esc")
	d.shows("by network")
	if d.f.open != 0 {
		t.Errorf("%d lookers are left", d.f.open)
	}
	d.press("b")
	d.shows("fullest buckets", "10.0.1.3")
	d.press("enter", "ctrl+c")
	if !d.quit || d.f.open != 0 {
		t.Errorf("quit: %v, with %d lookers left", d.quit, d.f.open)
	}
}

// Where it is not known what passed, it is not known either what was dropped.
func TestTalkersOfAQueue(t *testing.T) {
	bits := func(n uint64) *uint64 { return &n }
	rows := ofTalkers([]report.Talker{{Key: "10.0.1.2", OfferedBits: bits(1e6)}, {Key: "10.0.1.1", OfferedBits: bits(5e6)}}, live.Worst, "").rows
	if rows[0].talker.Key != "10.0.1.1" || rows[0].Dropped != 0 {
		t.Errorf("first is %s, which lost %v", rows[0].talker.Key, rows[0].Dropped)
	}
	m := drive(t, 80, 24, Options{}).Model
	for _, c := range m.columns(&frame{kind: ruleFrame}) {
		if text := c.text(look{}, &rows[0], c.width); c.head == "DROPPED" && text != "" {
			t.Errorf("DROPPED says %q", text)
		}
	}
}

// A rule that takes long to look into is looked into even if another table is opened meanwhile.
func TestLookIntoMeanwhile(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	_, slow := d.Update(keys["enter"])
	d.press("b")
	d.send(slow())
	d.press("esc")
	d.read(1)
	d.shows("hosts of bob", "10.0.1.2")
	_, slow = d.Update(keys["enter"])
	d.press("esc", "esc")
	d.send(slow())
	if d.f.open != 0 {
		t.Errorf("%d lookers are left", d.f.open)
	}
}

func TestSuspend(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.press("/")
	_, cmd := d.Update(tea.KeyPressMsg{Code: 'z', Mod: tea.ModCtrl})
	if cmd == nil || cmd() != tea.Suspend() {
		t.Error("ctrl-z does not suspend")
	}
}

func TestSetRate(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	asked := func(want ...string) {
		t.Helper()
		if got := strings.Join(d.f.asked, "; "); got != strings.Join(want, "; ") {
			t.Errorf("asked for %q, not %q", got, want)
		}
		d.f.asked = nil
	}
	d.press("r")
	d.shows("rate of bob egress 10.0.0.8, now 30mbit: _")
	d.press("10mbps", "enter")
	d.shows("did you mean 10mbit or 10MB/s?", "10mbps_")
	d.press("backspace", "backspace", "backspace", "bit", "enter")
	d.shows("bob egress 10.0.0.8: 30mbit -> 10mbit", "y set it", "1m unless confirmed")
	d.read(3) // the question stays about the same rule
	d.press("x", "n")
	d.shows("nothing was changed")
	asked()
	d.press("r", "10mbit", "enter", "y")
	asked("set bob  10mbit 0s")
	d.shows("done: set bob")
	d.press("r", "10mbit", "enter", "t")
	asked("set bob  10mbit 1m0s")

	d.press("v", "v", "r")
	d.shows("[egress|ingress] rate of bob: _")
	d.press("ingress 5mbit", "enter")
	d.shows("bob ingress: the rate -> 5mbit")
	d.press("y")
	asked("set bob ingress 5mbit 0s")
	d.press("r", "up 5mbit", "enter")
	d.shows("up 5mbit_")
	if d.mode != rateMode {
		t.Error("up is taken for a direction")
	}
	d.press("esc")

	d.f.err = fmt.Errorf("set bob: permission denied; run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN and a bpffs that you may write to")
	d.press("r", "egress 5mbit", "enter", "y")
	d.shows("permission denied; run as root")
	d.press("esc")
	asked("set bob egress 5mbit 0s")
}

// A rule without a rate of its own has that of its pool.
func TestSetRateOfPool(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.f.reading = func(second int) *live.Reading {
		return readingOf(second, made{pool: true, name: "home", rate: 50e6, use: 1e6},
			made{device: "eth0", prefix: "10.0.0.7/32", name: "alice", within: "home", use: 1e6, dropped: 1e6})
	}
	d.read(1)
	d.shows("as pool")
	d.press("r")
	d.shows("rate of pool home, now 50mbit")
	d.press("60mbit", "enter", "y")
	if got := strings.Join(d.f.asked, "; "); got != "set home  60mbit 0s" {
		t.Errorf("asked for %s", got)
	}
}

func TestPending(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.press("c")
	d.shows("no change is pending")
	d.f.reading = func(second int) *live.Reading {
		r := reading(second)
		r.RevertsInNS = new(uint64(42e9))
		return r
	}
	d.read(1)
	d.shows("reverts in 42s")
	d.press("c", "y", "c", "u", "c", "n")
	if got := strings.Join(d.f.asked, "; "); got != "confirm; rollback" {
		t.Errorf("asked for %s", got)
	}
}

func TestPause(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.press("p")
	d.read(5)
	d.shows("PAUSED", "12:00:01")
	d.press("space")
	d.read(1)
	d.shows("12:00:07")
}

// A reading that fails leaves the last one on the screen.
func TestFailure(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.f.err = fmt.Errorf("read: permission\x1b[31m denied")
	for _, failed := range []*live.Reading{nil, readingOf(2)} {
		d.f.reading = func(int) *live.Reading { return failed }
		d.read(1)
		d.shows(`permission\u001b[31m denied`, "bob egress")
	}
	d.f.err = nil
	d.read(1)
	d.shows("no rules; add one with 'shapectl set'")
}

// A rule with colours shows both rates, and its use in percent of what may pass.
func TestColours(t *testing.T) {
	colours := policy.Colours{PIR: 20e6, PBS: 750e3, Green: policy.ActionPass, Yellow: policy.ActionPass, Red: policy.ActionDrop}
	d := drive(t, 80, 24, Options{})
	d.f.reading = func(second int) *live.Reading {
		return readingOf(second, made{device: "eth0", prefix: "10.0.0.7/32", rate: 10e6, use: 15e6, colours: &colours})
	}
	d.read(1)
	d.shows("10mbit/20mbit", "75%")
}

// Whatever rules are called, the screen stays within its bounds and has no control characters.
func TestHostileNames(t *testing.T) {
	names := []string{
		"\x1b]0;pwned\a\x1b[2J", "a\nb\r\tc", "\u202egnp.exe", "東京ネットワーク株式会社の本社ビル十二階", "👩‍👩‍👧‍👦 family 🏳️‍🌈", "e\u0301\u0301\u0301", strings.Repeat("x", 200),
		"<img src=x onerror=alert(1)>", "\xff\xfe", "नमस्ते", "\u200b\u200d", "-rf", "%s%d",
	}
	for _, size := range [][2]int{{80, 24}, {40, 10}, {200, 60}, {25, 8}, {10, 3}, {3, 2}, {1, 1}} {
		for _, view := range live.Views {
			d := drive(t, size[0], size[1], Options{View: view, UTF8: true})
			var rules []made
			for i, name := range names {
				rules = append(rules, made{pool: true, name: name, plan: name, rate: 1e9, use: 1e6},
					made{device: "eth0", prefix: fmt.Sprintf("10.0.0.%d/32", i), name: name, plan: name, within: name, rate: 1e6, use: 1e6})
			}
			d.f.reading = func(second int) *live.Reading {
				r := readingOf(second, rules...)
				r.Fullest = []live.FullBucket{{Item: &r.Items[1], Bucket: live.Bucket{Name: "10.0.0.0"}, Percent: 50}}
				return r
			}
			d.read(2)
			for range names {
				d.press("down", "enter", "r", "1mbit", "enter", "n", "e", "esc", "esc", "c")
				if screen := d.Screen(); strings.ContainsFunc(screen, func(c rune) bool { return c < ' ' && c != '\n' || c == '\u202e' || c == '\u200b' }) {
					t.Fatalf("the screen has control characters: %q", screen)
				}
			}
			d.press("?", "pgdown", "end", "esc", "end", "home", "pgdown")
		}
	}
}

// Columns are where they belong whatever is in those before.
func TestWideCells(t *testing.T) {
	for _, text := range []string{"abc", "東京ネットワーク", "👍👍👍👍👍👍", "éééééééééééé", "abcdefghijklmnopq"} {
		for width := 1; width < 12; width++ {
			for _, l := range []look{{}, {utf8: true}} {
				if got := ansi.StringWidth(l.fit(text, width, true)); got != width {
					t.Errorf("%q has %d columns, not %d: %q", text, got, width, l.fit(text, width, true))
				}
			}
		}
	}
}

func TestColour(t *testing.T) {
	plain := drive(t, 80, 24, Options{UTF8: true})
	coloured := drive(t, 80, 24, Options{UTF8: true, Colour: true})
	if !strings.Contains(coloured.Screen(), "\x1b[") {
		t.Error("there is no colour")
	}
	if got := ansi.Strip(coloured.Screen()); got != plain.Screen() {
		t.Errorf("with colour it is\n%s\nand without\n%s", got, plain.Screen())
	}
}

func TestResize(t *testing.T) {
	d := drive(t, 120, 40, Options{})
	for width := 1; width < 130; width += 3 {
		for _, height := range []int{1, 2, 3, 5, 8, 13, 24, 50} {
			d.send(tea.WindowSizeMsg{Width: width, Height: height})
			d.press("end", "up", "?", "down", "esc", "home")
		}
	}
}

// Plots forget rules that are gone.
func TestHistory(t *testing.T) {
	var h history
	for i := range 100 {
		h.add(readingOf(i, made{device: "eth0", prefix: fmt.Sprintf("10.0.0.%d/32", i), rate: 1e6, use: 1e6}))
	}
	if len(h.of) > 2 {
		t.Errorf("%d series for one rule", len(h.of))
	}
}
