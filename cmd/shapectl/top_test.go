package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A terminal is a pseudo terminal, and what it shows. It is a vt100: others have more ways to say the same.
type terminal struct {
	t             *testing.T
	master, slave *os.File

	mutex sync.Mutex
	lines [][]string // of cells
	x, y  int
	// What scrolls is between these.
	top, bottom int
	inserts     bool // what is written moves the rest of the line
	raw         strings.Builder
	dumb        bool
}

func newTerminal(t *testing.T, width, height int) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	testenv.Must(t, err)
	testenv.Must(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	testenv.Must(t, err)
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	testenv.Must(t, err)
	term := &terminal{t: t, master: master, slave: slave}
	term.resize(width, height)
	t.Cleanup(func() { master.Close(); slave.Close() })
	go term.read()
	return term
}

func (term *terminal) resize(width, height int) {
	term.mutex.Lock()
	defer term.mutex.Unlock()
	term.lines, term.top, term.bottom = make([][]string, height), 0, height
	for i := range term.lines {
		term.lines[i] = blank(width)
	}
	testenv.Must(term.t, unix.IoctlSetWinsize(int(term.master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(width), Row: uint16(height)}))
}

// modes are those of the line discipline.
func (term *terminal) modes() unix.Termios {
	term.t.Helper()
	modes, err := unix.IoctlGetTermios(int(term.slave.Fd()), unix.TCGETS)
	testenv.Must(term.t, err)
	return *modes
}

// read takes in what is written to the terminal.
func (term *terminal) read() {
	var rest []byte
	buffer := make([]byte, 1<<16)
	for {
		n, err := term.master.Read(buffer)
		if err != nil {
			return
		}
		term.mutex.Lock()
		term.raw.Write(buffer[:n])
		rest = term.take(append(rest, buffer[:n]...))
		term.mutex.Unlock()
	}
}

// take shows a text, and returns the start of a sequence that is not complete.
func (term *terminal) take(text []byte) []byte {
	p := ansi.NewParser()
	var state byte
	for len(text) > 0 {
		sequence, width, n, next := ansi.DecodeSequence(text, state, p)
		if next != ansi.NormalState && n == len(text) {
			return append([]byte(nil), text...)
		}
		state, text = next, text[n:]
		if width > 0 {
			term.put(string(sequence), width)
			continue
		}
		switch string(sequence) {
		case "\r":
			term.x = 0
			continue
		case "\x1bM":
			if term.y == term.top {
				term.scroll(term.top, -1)
			} else {
				term.y--
			}
			continue
		case "\n", "\x1bD":
			if term.y == term.bottom-1 {
				term.scroll(term.top, 1)
			} else {
				term.y++
			}
			continue
		case "\b":
			term.x--
			continue
		case "\t":
			term.x = (term.x/8 + 1) * 8
			continue
		}
		if len(sequence) < 2 || sequence[1] != '[' {
			continue
		}
		command, count := p.Command(), 1
		if v, ok := p.Param(0, 1); ok {
			count = max(v, 1)
		}
		switch ansi.Cmd(command).Final() {
		case 'H', 'f':
			column, _ := p.Param(1, 1)
			term.y, term.x = count-1, max(column, 1)-1
		case 'A':
			term.y -= count
		case 'B':
			term.y += count
		case 'C':
			term.x += count
		case 'D':
			term.x -= count
		case 'K':
			from, to := term.x, 1<<16
			if kind, _ := p.Param(0, 0); kind == 1 {
				from, to = 0, term.x+1
			} else if kind == 2 {
				from = 0
			}
			term.clear(term.y, from, to)
		case 'J':
			kind, _ := p.Param(0, 0)
			for y := range term.lines {
				if kind == 2 || y > term.y {
					term.clear(y, 0, 1<<16)
				}
			}
			term.clear(term.y, term.x, 1<<16)
		case 'P':
			if line := term.line(); term.x < len(line) {
				copy(line[term.x:], append(slices.Clone(line[min(term.x+count, len(line)):]), blank(count)...))
			}
		case 'h', 'l':
			if count == 4 && !strings.Contains(string(sequence), "?") {
				term.inserts = ansi.Cmd(command).Final() == 'h'
			}
		case 'r':
			bottom, _ := p.Param(1, len(term.lines))
			term.top, term.bottom, term.x, term.y = count-1, bottom, 0, 0
		case 'L':
			term.scroll(term.y, -count)
		case 'M':
			term.scroll(term.y, count)
		case 'S':
			term.scroll(term.top, count)
		case 'T':
			term.scroll(term.top, -count)
		case 'X', 'b', '@':
			term.t.Errorf("the terminal of this test cannot do %q", sequence)
		}
	}
	return nil
}

// scroll moves the lines between one and the lower margin up.
func (term *terminal) scroll(from, by int) {
	if from < 0 || from >= term.bottom {
		return
	}
	lines := slices.Clone(term.lines)
	for y := from; y < term.bottom; y++ {
		if term.lines[y] = blank(len(lines[y])); y+by >= from && y+by < term.bottom {
			term.lines[y] = lines[y+by]
		}
	}
}

func blank(width int) []string { return slices.Repeat([]string{" "}, width) }

// line is the one with the cursor.
func (term *terminal) line() []string {
	if term.y < 0 || term.y >= len(term.lines) {
		return nil
	}
	return term.lines[term.y]
}

func (term *terminal) put(cell string, width int) {
	if line := term.line(); term.x >= 0 && term.x < len(line) {
		if term.inserts {
			copy(line[min(term.x+width, len(line)):], slices.Clone(line[term.x:]))
		}
		line[term.x] = cell
	}
	term.x += width
}

func (term *terminal) clear(y, from, to int) {
	if y < 0 || y >= len(term.lines) {
		return
	}
	line := term.lines[y]
	for x := max(from, 0); x < min(to, len(line)); x++ {
		line[x] = " "
	}
}

// screen is what the terminal shows.
func (term *terminal) screen() []string {
	term.mutex.Lock()
	defer term.mutex.Unlock()
	var lines []string
	for _, line := range term.lines {
		lines = append(lines, strings.TrimRight(strings.Join(line, ""), " "))
	}
	return lines
}

func (term *terminal) press(keys string) {
	term.t.Helper()
	_, err := term.master.WriteString(keys)
	testenv.Must(term.t, err)
}

// screenPatience is how long a screen may take on a busy machine.
const screenPatience = 15 * time.Second

// until waits for a screen.
func (term *terminal) until(what string, is func(lines []string) bool) {
	term.t.Helper()
	for end := time.Now().Add(screenPatience); !is(term.screen()); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			term.t.Fatalf("there is no screen with %s; it is:\n%s", what, strings.Join(term.screen(), "\n"))
		}
	}
}

func (term *terminal) shows(text string) {
	term.t.Helper()
	term.until(text, func(lines []string) bool { return strings.Contains(strings.Join(lines, "\n"), text) })
}

// back presses escape, and waits for the table of all rules: escape and another key at once would be another one.
func (term *terminal) back() {
	term.t.Helper()
	term.press("\x1b")
	term.until("the keys", func(lines []string) bool { return strings.HasPrefix(lines[len(lines)-1], "q quit") })
}

// start runs a command on the terminal.
func (term *terminal) start(cmd *exec.Cmd) {
	term.t.Helper()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = term.slave, term.slave, term.slave
	if cmd.Env = append(cmd.Env, "LC_ALL=C.UTF-8"); !term.dumb {
		cmd.Env = append(cmd.Env, "TERM=vt100")
	}
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid, cmd.SysProcAttr.Setctty = true, true
	testenv.Must(term.t, cmd.Start())
	term.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
}

// isLeft ends the test unless the command ended well and left the terminal as it was.
func (term *terminal) isLeft(cmd *exec.Cmd, before unix.Termios) {
	term.t.Helper()
	if err := cmd.Wait(); err != nil {
		term.t.Errorf("top: %v:\n%s", err, strings.Join(term.screen(), "\n"))
	}
	if after := term.modes(); after != before {
		term.t.Errorf("the terminal's modes were %+v and are %+v", before, after)
	}
	const alternate, cursor = "\x1b[?1049", "\x1b[?25"
	term.until("", func([]string) bool {
		term.mutex.Lock()
		defer term.mutex.Unlock()
		raw := term.raw.String()
		return raw[strings.LastIndex(raw, alternate)+len(alternate)] == 'l' && raw[strings.LastIndex(raw, cursor)+len(cursor)] == 'h'
	})
}

// A flood is packets that are sent out of va while a test waits.
type flood struct {
	sender *testenv.Sender
	frames [][]byte
}

func (r *rig) flooding(frames ...[]byte) *flood { return &flood{testenv.NewSender(r.t, "va"), frames} }

func (f *flood) send() {
	for _, frame := range f.frames {
		f.sender.Send(frame)
	}
}

// newTopRig has a rule that is refused nothing, one that is used a little, and the one of mallory.
func newTopRig(r *rig) *rig {
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "10mbit", "--name", "alice")
	r.ok("set", "va", "egress", "10.0.0.8", "--rate", "100mbit", "--name", "bob")
	r.ok("set", "va", "egress", "10.0.0.9", "--rate", "1mbit", "--name", "mallory", "--capacity", "20kb")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "1mbit", "--each", "host")
	return r
}

// On a terminal: the offender comes first, keys work, and the terminal is as before in the end.
func TestTopOnATerminal(t *testing.T) {
	t.Parallel()
	r := newTopRig(newRig(t))
	term := newTerminal(t, 80, 24)
	before := term.modes()
	cmd := r.command("top")
	term.start(cmd)
	term.shows("alice egress")
	tcx := !testenv.OlderThan(t, 6, 6)
	flood := r.flooding(frameTo("10.0.0.8", 200))
	for range 9 { // three times as much as the others
		flood.frames = append(flood.frames, frameTo("10.0.0.9", 1400))
	}
	flood.frames = append(flood.frames, frameTo("10.0.1.5", 1400), frameTo("10.0.1.5", 1400), frameTo("10.0.1.5", 1400))
	began := time.Now()
	term.until("mallory first", func(lines []string) bool {
		flood.send()
		return strings.HasPrefix(lines[3], ">!mallory egress")
	})
	t.Logf("the offender was first after %v", time.Since(began))
	term.press("V") // the last view
	term.until("the fullest bucket", func(lines []string) bool {
		flood.send()
		return strings.HasPrefix(lines[3], "> 10.0.1.5 ")
	})
	term.press("v")

	term.resize(120, 40)
	term.until("40 lines", func(lines []string) bool {
		flood.send()
		return strings.Contains(lines[2], " LEVEL ") && strings.HasPrefix(lines[39], "q quit")
	})
	term.resize(40, 10)
	term.until("10 lines", func(lines []string) bool { return strings.HasPrefix(lines[9], "q quit") })
	term.resize(80, 24)
	term.until("24 lines", func(lines []string) bool { return strings.HasPrefix(lines[23], "q quit") })

	term.press("/10.0.1.0\r\r") // enter keeps the filter, and enter again looks into the rule
	term.until("its hosts", func(lines []string) bool {
		flood.send()
		return strings.HasPrefix(lines[2], "hosts of va egress 10.0.1.0/24") && strings.Contains(lines[4], "10.0.1.5") && (!tcx || strings.HasPrefix(lines[4], ">!10.0.1.5 ") && strings.Contains(lines[4], "bit"))
	})
	if tcx { // which shows the packets, too
		term.press("\r")
		term.until("its flows", func(lines []string) bool {
			flood.send()
			return strings.HasPrefix(lines[2], "flows of 10.0.1.5") && strings.HasPrefix(lines[4], ">!udp,192.0.2.1:") && strings.Contains(lines[4], "bit")
		})
		term.press("\x1b")
		term.shows("hosts of va")
	}
	term.press("\x1b")
	term.shows("filter 10.0.1.0: 1 of 4")
	term.back()

	counted := r.show("va", "egress", "10.0.0.9")[0]
	term.press("/mallory\rr2mbit\r")
	term.until("the new rate", func(lines []string) bool {
		flood.send()
		return strings.Contains(strings.Join(lines, "\n"), "u undoes it") && strings.Contains(lines[4], " 2mbit ")
	})
	term.press("c")
	term.until("no pending change", func(lines []string) bool { return strings.Contains(lines[3], " 2mbit ") })
	now := r.show("va", "egress", "10.0.0.9")[0]
	if now.Rate != 2e6 || now.Name != "mallory" || now.PassedPackets < counted.PassedPackets || now.DroppedPackets < counted.DroppedPackets {
		t.Errorf("the rule was %+v and is %+v", counted, now)
	}
	term.press("r3mbit\r")
	term.shows("u undoes it")
	term.press("u")
	term.until("no change", func(lines []string) bool { return !strings.Contains(strings.Join(lines, "\n"), "u undoes it") })
	if now := r.show("va", "egress", "10.0.0.9")[0]; now.Rate != 2e6 {
		t.Errorf("undone, the rate is %d", now.Rate)
	}
	term.back() // without the filter
	term.press("e")
	term.shows("decides")
	term.shows("esc goes back")
	term.back()
	term.press("q")
	term.isLeft(cmd, before)
}

// A signal ends it as a key does.
func TestTopAndSignals(t *testing.T) {
	r := newTopRig(newRig(t))
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT} {
		term := newTerminal(t, 80, 24)
		before := term.modes()
		cmd := r.command("top", "--by", "tree")
		term.start(cmd)
		term.shows("alice egress")
		testenv.Must(t, cmd.Process.Signal(signal))
		term.isLeft(cmd, before)
	}
}

func TestTopWithoutATerminal(t *testing.T) {
	r := newTopRig(newRig(t))
	r.refused(exitInput, "the screen needs a terminal for input and output; use --once", "top")
	r.refused(exitInput, "--sort \"size\" is unknown", "top", "--once", "--sort", "size")
	r.refused(exitInput, "--by \"device\" is unknown", "top", "--once", "--by", "device")
	r.refused(exitInput, "out of range", "top", "--once", "--interval", "1ms")
	r.refused(exitInput, "there is no device carol, and no rule", "top", "--once", "carol")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "8kbit", "--capacity", "100kb", "--each", "host") // keeps its level for a minute
	for by, says := range map[string]string{"node": "no pools that several names draw from\n", "bucket": "all buckets are empty\n"} {
		if got := r.ok("top", "--once", "--by", by); !strings.HasPrefix(got, says) {
			t.Errorf("--by %s of a rule without traffic: %s", by, got)
		}
	}
	flood := r.flooding(frameTo("10.0.0.9", 1400), frameTo("10.0.1.5", 500))
	for range 100 {
		flood.send()
	}
	var top struct {
		Rules   []shownRule `json:"rules"`
		Fullest []struct {
			Key string `json:"key"`
		} `json:"fullest_buckets"`
	}
	testenv.Must(t, json.Unmarshal([]byte(r.ok("top", "--once", "-j", "--interval", "100ms")), &top))
	if len(top.Rules) != 4 || len(top.Fullest) != 1 || top.Fullest[0].Key != "10.0.1.5" {
		t.Errorf("top: %+v", top)
	}
	testenv.Must(t, json.Unmarshal([]byte(r.ok("top", "--once", "-j", "--interval", "100ms", "alice")), &top))
	if len(top.Rules) != 1 || top.Rules[0].Name != "alice" || len(top.Fullest) != 0 {
		t.Errorf("of alice: %+v", top)
	}
	for view, want := range map[string]string{"network": "mallory", "tree": "0 of 4; 4 idle", "name": "mallory"} {
		if got := r.ok("top", "--once", "--interval", "100ms", "--by", view); !strings.Contains(got, want) {
			t.Errorf("by %s:\n%s", view, got)
		}
	}

	streams := [][]string{{"top", "-j", "--interval", "100ms"}}
	if !testenv.OlderThan(t, 6, 6) {
		streams = append(streams, []string{"top", "-j", "--interval", "100ms", "--by", "host"}, []string{"top", "-j", "--interval", "100ms", "--rtt"})
	}
	for _, line := range streams {
		cmd := r.command(line...)
		out, err := cmd.StdoutPipe()
		testenv.Must(t, err)
		testenv.Must(t, cmd.Start())
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for range 3 {
			if !lines.Scan() || !json.Valid(lines.Bytes()) {
				t.Fatalf("a line of %s is %q, %v", line, lines.Text(), lines.Err())
			}
		}
		testenv.Must(t, cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}

// A terminal that can show no screen gets none.
func TestTopOnADumbTerminal(t *testing.T) {
	r := newTopRig(newRig(t))
	term := newTerminal(t, 120, 24)
	cmd := r.command("top")
	cmd.Env = append(cmd.Env, "TERM=dumb")
	term.dumb = true
	term.start(cmd)
	term.shows("this terminal (TERM=dumb) cannot show a screen; use --once")
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != exitInput {
		t.Errorf("it ends with %v", err)
	}
}

// What is gone is not set again: neither by the arguments of the screen.
func TestTopSetsWhatIsThere(t *testing.T) {
	r := newRig(t)
	s := &topSource{e: &env{getenv: func(name string) string { return r.env[name] }}}
	r.ok("set", "home", "--new", "--rate", "1mbit")
	if said, ok := s.Run("set", "--rate", "2mbit", "--kind", "pool", "--", "home"); !ok || !strings.HasPrefix(said, `pool "home" now gets 2mbit`) {
		t.Errorf("a pool: %s", said)
	}
	r.ok("delete", "home")
	for says, line := range map[string]string{
		"set home: no pool has that name":                            "--kind pool -- home",
		"set alice: no rule or pool has that name":                   "-- alice",
		"va egress has no rule for 10.0.0.7/32; nothing was changed": "--kind rule -- va egress 10.0.0.7/32",
	} {
		if said, ok := s.Run(append([]string{"set", "--rate", "1mbit"}, strings.Fields(line)...)...); ok || !strings.Contains(said, says) {
			t.Errorf("%s: %s", says, said)
		}
	}
}
