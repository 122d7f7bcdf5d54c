package main

import (
	"bufio"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
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

// A terminal is a pseudo terminal, and what was written to it.
type terminal struct {
	t             *testing.T
	master, slave *os.File

	mutex sync.Mutex
	raw   strings.Builder
	dumb  bool
}

func newTerminal(t *testing.T) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	testenv.Must(t, err)
	testenv.Must(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	testenv.Must(t, err)
	slave, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	testenv.Must(t, err)
	testenv.Must(t, unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: 120, Row: 24}))
	term := &terminal{t: t, master: master, slave: slave}
	t.Cleanup(func() { master.Close(); slave.Close() })
	go term.read()
	return term
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
	buffer := make([]byte, 1<<16)
	for {
		n, err := term.master.Read(buffer)
		if err != nil {
			return
		}
		term.mutex.Lock()
		term.raw.Write(buffer[:n])
		term.mutex.Unlock()
	}
}

// written is all that was written to the terminal.
func (term *terminal) written() string {
	term.mutex.Lock()
	defer term.mutex.Unlock()
	return term.raw.String()
}

func (term *terminal) shows(text string) {
	term.t.Helper()
	testenv.Eventually(term.t, text+" on the screen", func() bool { return strings.Contains(ansi.Strip(term.written()), text) })
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
		term.t.Errorf("top: %v:\n%q", err, term.written())
	}
	if after := term.modes(); after != before {
		term.t.Errorf("the terminal's modes were %+v and are %+v", before, after)
	}
	const alternate, cursor = "\x1b[?1049", "\x1b[?25"
	testenv.Eventually(term.t, "the usual screen and cursor", func() bool {
		raw := term.written()
		return raw[strings.LastIndex(raw, alternate)+len(alternate)] == 'l' && raw[strings.LastIndex(raw, cursor)+len(cursor)] == 'h'
	})
}

// newTopRig has a rule that is refused nothing, one that is used a little, and the one of mallory.
func newTopRig(r *rig) *rig {
	r.ok("set", "va", "egress", "10.0.0.7", "--rate", "10mbit", "--name", "alice")
	r.ok("set", "va", "egress", "10.0.0.8", "--rate", "100mbit", "--name", "bob")
	r.ok("set", "va", "egress", "10.0.0.9", "--rate", "1mbit", "--name", "mallory", "--capacity", "20kb")
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "1mbit", "--each", "host")
	return r
}

// It ends by a key or a signal, and the terminal is as before. What keys do and screens show is in internal/top.
func TestTopOnATerminal(t *testing.T) {
	r := newTopRig(newRig(t))
	for _, signal := range []syscall.Signal{0, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT} {
		term := newTerminal(t)
		before := term.modes()
		cmd := r.command("top", "--by", "tree")
		term.start(cmd)
		term.shows("alice")
		if signal == 0 {
			_, err := term.master.WriteString("q")
			testenv.Must(t, err)
		} else {
			testenv.Must(t, cmd.Process.Signal(signal))
		}
		term.isLeft(cmd, before)
	}
}

func TestTopWithoutATerminal(t *testing.T) {
	r := newTopRig(newRig(t))
	r.ok("set", "va", "egress", "10.0.1.0/24", "--rate", "8kbit", "--capacity", "100kb", "--each", "host") // keeps its level for a minute
	r.send("10.0.0.9", 100, 1400)
	r.send("10.0.1.5", 100, 500)
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
	for view, want := range map[string]string{"network": "mallory", "tree": "0 of 4; 4 idle", "name": "0 of 4; 4 idle", "name --sort name": "mallory"} {
		if got := r.ok(append([]string{"top", "--once", "--interval", "100ms", "--by"}, strings.Fields(view)...)...); !strings.Contains(got, want) {
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

// TestTopOfUnreadableRules sees that rules that cannot be read are an error, as with show, and not no rules.
func TestTopOfUnreadableRules(t *testing.T) {
	r := newRig(t)
	s := r.serve()
	r.ok("set", "va", "egress", "any", "--rate", "1mbit")
	s.ask(200, "top", "", `"of":2`)
	pins, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*", "g*", "rules"))
	testenv.Must(t, err)
	for _, path := range pins {
		testenv.Must(t, os.Remove(path))
	}
	time.Sleep(2 * usualInterval) // all share the reading of one
	for _, by := range []string{"network", "tree", "name"} {
		s.ask(500, "top", "by="+by, "deleted the pin")
	}
	s.ask(500, "show", "", "deleted the pin")
	r.refused(exitKernel, "deleted the pin", "show")
	r.refused(exitKernel, "deleted the pin", "top", "--once")
}

// A terminal that can show no screen gets none.
func TestTopOnADumbTerminal(t *testing.T) {
	r := newTopRig(newRig(t))
	term := newTerminal(t)
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
	if said, ok := s.Run("set", "--rate", "2mbit", "--kind", "pool", "--", "home"); !ok || !strings.HasPrefix(said, `pool "home" gets 2mbit`) {
		t.Errorf("a pool: %s", said)
	}
	r.ok("delete", "home")
	for says, line := range map[string]string{
		"set home: no pool has that name":                           "--kind pool -- home",
		"set alice: no rule or pool has that name":                  "-- alice",
		"no egress rule for 10.0.0.7/32 on va; nothing was changed": "--kind rule -- va egress 10.0.0.7/32",
	} {
		if said, ok := s.Run(append([]string{"set", "--rate", "1mbit"}, strings.Fields(line)...)...); ok || !strings.Contains(said, says) {
			t.Errorf("%s: %s", says, said)
		}
	}
}
