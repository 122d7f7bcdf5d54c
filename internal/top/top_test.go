package top

import (
	"context"
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
		r.AddFullest(hosts, live.Bucket{Name: fmt.Sprintf("10.0.1.%d", i+1), Bytes: level}, float64(level)/150)
	}
	return r
}

// A fake is a Source of made-up readings.
type fake struct {
	t       *testing.T
	second  int
	asked   []string
	err     error
	failed  bool // what keys do
	reading func(second int) *live.Reading
	looks   []context.Context
}

func (f *fake) Chosen(*live.Item) bool { return true }

func (f *fake) Read() (*live.Reading, error) {
	f.second++
	return f.reading(f.second), f.err
}

// Look sees something once.
func (f *fake) Look(ctx context.Context, at Subject, see func(Seen)) error {
	f.looks = append(f.looks, ctx)
	known := func(n float64) live.Value { return live.Value{N: n, Known: true} }
	use := live.Use{Item: at.Rule}
	if at.Rule == nil {
		use.Item = reading(1).Find(live.Key{Device: "eth0", Direction: "egress", Network: "10.0.1.0/24"})
	}
	add := func(p live.Part) { use.Parts = append(use.Parts, use.Item.PartRow(p)) }
	switch {
	case at.By == "rtt":
		see(Seen{RTTs: &report.RTTs{Rules: []report.RTT{{Device: "eth0", Direction: "egress", CIDR: "10.0.1.0/24"}}}})
		return nil
	case at.Host != "":
		add(live.Part{Bucket: live.Bucket{Name: "tcp," + at.Host + ":443,192.0.2.1:5000"}, Offered: known(3e6), Passed: known(1e6)})
	default:
		add(live.Part{Bucket: live.Bucket{Name: "10.0.1.2"}, Offered: known(1e6), Passed: known(1e6)})
		add(live.Part{Bucket: live.Bucket{Name: "10.0.1.1", Bytes: 14000}, Offered: known(5e6), Passed: known(1e6), Full: known(93.3)})
	}
	see(Seen{Uses: []live.Use{use}})
	return nil
}

// open is how many looks were not ended.
func (f *fake) open() (n int) {
	for _, ctx := range f.looks {
		if ctx.Err() == nil {
			n++
		}
	}
	return n
}

func (f *fake) Run(args ...string) (string, bool) {
	what := strings.Join(args, " ")
	f.asked = append(f.asked, what)
	if f.failed {
		return "permission denied; run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN and a bpffs that you may write to", false
	}
	return "done: " + what, true
}

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
	if o.By == "" {
		o.By = "network"
	}
	if o.Sort == "" {
		o.Sort = "worst"
	}
	d := &driver{Model: New(f, o), t: t, f: f}
	d.send(tea.WindowSizeMsg{Width: width, Height: height})
	d.read(1)
	d.run(d.watch())
	return d
}

// read takes some readings.
func (d *driver) read(n int) {
	d.t.Helper()
	for range n {
		d.took(d.Model.read().(readingMsg))
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
	screen := ansi.Strip(d.Screen())
	bare := strings.Join(strings.Fields(screen), " ")
	for _, text := range texts {
		if !strings.Contains(screen, text) && !strings.Contains(bare, text) {
			d.t.Errorf("the screen has no %q:\n%s", text, screen)
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
			d := drive(t, size[0], size[1], Options{By: view})
			d.read(69)
			golden(t, fmt.Sprintf("%s-%dx%d", view, size[0], size[1]), trimmed(ansi.Strip(d.Screen())))
		}
	}
}

// The one who loses most is the first row, whoever it was a second before; the cursor follows what was selected.
func TestWorstFirst(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	if got := d.rows[0].Called(); got != "bob" {
		t.Errorf("first is %s", got)
	}
	first := func() string { return strings.Split(ansi.Strip(d.Screen()), "\n")[3] }
	if !strings.HasPrefix(first(), ">!bob egress") {
		t.Errorf("the first line is %q", first())
	}
	d.press("down")
	selected := d.cursor
	d.f.reading = func(second int) *live.Reading {
		return readingOf(second, append(provider(second), made{device: "eth9", prefix: "10.9.0.0/16", rate: 1e6, use: 1e6, dropped: 900e6})...)
	}
	d.read(1)
	if !strings.HasPrefix(first(), " !eth9 e") {
		t.Errorf("the first line is %q", first())
	}
	if d.cursor != selected || d.rows[d.at].ID() != selected || d.at != 2 {
		t.Errorf("the cursor is at %d, %q, not at %q", d.at, d.cursor, selected)
	}
}

func TestOrdersAndViews(t *testing.T) {
	d := drive(t, 100, 30, Options{})
	firsts := map[string]string{}
	for range live.Orders {
		firsts[d.sort] = d.rows[0].Called()
		d.press("s")
	}
	for sort, want := range map[string]string{
		"worst": "bob", "use": "uplink", "percent": "bob", "dropped": "bob", "level": "bob", "name": "Lehmann, Lindenallee 41 / Router / Hinterhaus",
	} {
		if firsts[sort] != want {
			t.Errorf("by %s the first one is %s, not %s", sort, firsts[sort], want)
		}
	}
	d.press("S", "S", "S", "S")
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
	d.shows("by bucket", "10.0.1.3", "BUCKET")
	d.press("v")
	d.shows("by network")
}

func TestFilter(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.press("/", "silVER")
	d.shows("filter: silVER_")
	if len(d.rows) != 2 {
		t.Errorf("%d rows have that plan:\n%s", len(d.rows), d.Screen())
	}
	d.press("enter", "e")
	d.shows("done: explain")
	d.press("esc", "v", "v") // the filter stays
	d.shows("filter silVER: 1 of 5", "bob")
	d.press("v", "v", "v", "v")
	d.shows("uplink", "ap-1", "bob egress") // with the pools above
	d.press("esc", "/", "nobody")
	d.shows("none of 9 contains nobody")
	d.press("backspace", "backspace", "backspace", "backspace", "backspace", "backspace")
	if len(d.rows) != 9 {
		t.Errorf("%d rows", len(d.rows))
	}
	d.press("x\x1b[31m", "esc")
	if d.filter != "" || d.prompt.says != "" {
		t.Error("esc does not clear the filter")
	}
}

// A row opens: a pool's members, a name's rules, a rule's hosts, a host's flows.
func TestLookInto(t *testing.T) {
	d := drive(t, 80, 24, Options{By: "tree"})
	d.press("down", "enter")
	d.shows("pool ap-1", ">!ap-1", "bob egress", "alice egress")
	d.press("esc", "v", "enter")
	d.shows("rules of bob", "bob egress", "bob ingress")
	d.press("esc", "v", "v", "v", "down", "down")
	_, slow := d.Update(keys["enter"])
	d.shows("measuring")
	d.run(slow)
	d.shows("hosts of eth0 egress 10.0.1.0/24", ">!10.0.1.1", "5.00mbit", "1.00mbit", "4.00mbit", "14.0 kB", "10.0.1.2")
	d.press("enter")
	d.shows("flows of 10.0.1.1", "tcp,10.0.1.1:443,192.0.2.1:5000")
	if d.f.open() != 2 {
		t.Errorf("%d looks go on", d.f.open())
	}
	d.press("esc", "e")
	d.shows("done: explain -- eth0 egress 10.0.1.1")
	d.press("esc", "esc")
	d.shows("by network")
	if d.f.open() != 0 {
		t.Errorf("%d looks are left", d.f.open())
	}
	d.press("enter", "ctrl+c")
	if d.Close(); !d.quit || d.f.open() != 0 {
		t.Errorf("quit: %v, with %d looks left", d.quit, d.f.open())
	}
}

// The screen may begin with who uses rules, or their round trips.
func TestBeginWithALook(t *testing.T) {
	for by, shows := range map[string]string{"host": "10.0.1.1", "rtt": "eth0 egress"} {
		d := drive(t, 80, 24, Options{By: by})
		d.shows(shows)
		d.press("esc")
		d.shows("by network", "bob")
	}
}

// Where it is not known what passed, it is not known either what was dropped.
func TestTalkersOfAQueue(t *testing.T) {
	it := &readingOf(1, made{device: "eth0", prefix: "10.0.1.0/24", rate: 1e6}).Items[0]
	rows := []live.Row{it.PartRow(live.Part{Bucket: live.Bucket{Name: "10.0.1.1"}, Offered: live.Value{N: 5e6, Known: true}})}
	if rows[0].Dropped != 0 || rows[0].Use != 5e6 {
		t.Errorf("it is %+v", rows[0])
	}
	if lines, _ := report.Lines(rows, "host", 80); strings.Join(strings.Fields(strings.Join(lines, " ")), " ") != "HOST OFFERED 10.0.1.1 5.00mbit" {
		t.Errorf("it shows %q", lines)
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

// A rate is set for a while, and only then confirmed.
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
	d.shows("rate of rule bob eth0 egress 10.0.0.8, now 30mbit: _")
	d.press("10mbt", "backspace", "it")
	d.f.reading = func(second int) *live.Reading { return readingOf(second, provider(second)[:3]...) }
	d.read(3) // the question stays about the same rule
	d.press("enter")
	asked("set --confirm 1m --rate 10mbit --kind rule -- eth0 egress 10.0.0.8/32")
	d.shows("done: set --confirm 1m")
	d.press("r", "10mbit", "esc", "r", "enter")
	asked()
	d.f.reading = reading
	d.read(1)
	d.press("v", "v", "r")
	d.shows("[egress|ingress] rate of bob: _")
	d.press("ingress 5mbit", "enter")
	asked("set --confirm 1m --rate 5mbit -- bob ingress")
	d.f.failed = true
	d.press("r", "egress 5mbit", "enter")
	d.shows("permission denied; run as root")
	d.press("esc")
	d.shows("by name")
}

// A rule without a rate of its own has that of its pool.
func TestSetRateOfPool(t *testing.T) {
	d := drive(t, 80, 24, Options{})
	d.f.reading = func(second int) *live.Reading {
		return readingOf(second, made{pool: true, name: "home", rate: 50e6, use: 1e6},
			made{device: "eth0", prefix: "10.0.0.7/32", name: "alice", within: "home", use: 1e6, dropped: 1e6})
	}
	d.read(1)
	d.shows("50mbit/pool")
	d.press("r")
	d.shows("rate of pool home, now 50mbit")
	d.press("60mbit", "enter")
	if got := strings.Join(d.f.asked, "; "); got != "set --confirm 1m --rate 60mbit --kind pool -- home" {
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
	d.press("c", "u")
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
			d := drive(t, size[0], size[1], Options{By: view})
			var rules []made
			for i, name := range names {
				rules = append(rules, made{pool: true, name: name, plan: name, rate: 1e9, use: 1e6},
					made{device: "eth0", prefix: fmt.Sprintf("10.0.0.%d/32", i), name: name, plan: name, within: name, rate: 1e6, use: 1e6})
			}
			d.f.reading = func(second int) *live.Reading {
				r := readingOf(second, rules...)
				r.AddFullest(&r.Items[1], live.Bucket{Name: "10.0.0.0"}, 50)
				return r
			}
			d.read(2)
			for range names {
				d.press("down", "enter", "r", "1mbit", "enter", "e", "esc", "esc", "esc", "c")
				if screen := ansi.Strip(d.Screen()); strings.ContainsFunc(screen, func(c rune) bool { return c < ' ' && c != '\n' || c == '\u202e' || c == '\u200b' }) {
					t.Fatalf("the screen has control characters: %q", screen)
				}
			}
			d.press("?", "pgdown", "end", "esc", "end", "home", "pgdown")
		}
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
	if len(h.of) != 1 {
		t.Errorf("%d series for one rule", len(h.of))
	}
}
