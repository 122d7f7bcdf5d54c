package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
)

// A transcript is what a process that goes on has said so far.
type transcript struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *transcript) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *transcript) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// A process is a command that goes on.
type process struct {
	t        *testing.T
	cmd      *exec.Cmd
	manager  *net.UnixConn // what a service manager has of it
	out, err transcript
	heard    map[string]int
}

// pageless is the command line of a serve without a page.
func pageless(args ...string) []string {
	return append([]string{"serve", "--listen", "none", "--socket", "none"}, args...)
}

// launch starts a command that goes on, and does not wait for it.
func (r *rig) launch(args ...string) *process {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "watch") // a socket's path may not be as long as t.TempDir's are
	testenv.Must(r.t, err)
	socket := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	w := &process{t: r.t, heard: map[string]int{}, cmd: r.command(args...)}
	w.manager, err = net.ListenUnixgram(socket.Net, socket)
	testenv.Must(r.t, err)
	w.cmd.Env = append(w.cmd.Env, "NOTIFY_SOCKET="+socket.Name)
	w.cmd.Stdout, w.cmd.Stderr = &w.out, &w.err
	testenv.Must(r.t, w.cmd.Start())
	r.t.Cleanup(func() {
		w.cmd.Process.Kill()
		w.cmd.Wait()
		w.manager.Close()
		os.RemoveAll(dir)
	})
	return w
}

// watch starts a serve without a page, and waits until it has done what there was to do.
func (r *rig) watch(args ...string) *process {
	r.t.Helper()
	w := r.launch(pageless(args...)...)
	w.isTold("READY=1\n")
	return w
}

// isTold waits until the service manager is told something that begins so.
func (w *process) isTold(want string) {
	w.t.Helper()
	message := make([]byte, 1000)
	testenv.Must(w.t, w.manager.SetReadDeadline(time.Now().Add(testenv.Patience)))
	for {
		n, err := w.manager.Read(message)
		if err != nil {
			w.t.Fatalf("the service manager is not told %q: %v; %s%s", want, err, &w.out, &w.err)
		}
		if strings.HasPrefix(string(message[:n]), want) {
			return
		}
	}
}

// ends tells it to end, which it does well, and returns what it said but for what it watches.
func (w *process) ends(by os.Signal) result {
	w.t.Helper()
	testenv.Must(w.t, w.cmd.Process.Signal(by))
	w.isTold("STOPPING=1")
	if err := w.cmd.Wait(); err != nil {
		w.t.Errorf("told to end, it ends with %v: %s", err, &w.err)
	}
	return result{w.out.String(), withoutStart(w.err.String()), w.cmd.ProcessState.ExitCode()}
}

// withoutStart is what a serve without a page said but for what it watches.
func withoutStart(said string) string {
	return regexp.MustCompile(`(?m)^.*serve: watching for .*, of .*\n`).ReplaceAllString(said, "")
}

// says waits until it has said something, on either channel, once more than it was waited for before.
func (w *process) says(what string) {
	w.t.Helper()
	w.heard[what]++
	for deadline := time.Now().Add(testenv.Patience); strings.Count(w.out.String()+w.err.String(), what) < w.heard[what]; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("it does not say %q: %s%s", what, &w.out, &w.err)
		}
	}
}

// writeFile writes a file as one ought to that others read: whole.
func (r *rig) writeFile(path, text string) {
	r.t.Helper()
	testenv.Must(r.t, os.WriteFile(path+".part", []byte(text), 0o600))
	testenv.Must(r.t, os.Rename(path+".part", path))
}

// policy writes a policy file, and is its path.
func (r *rig) policy(text string) string {
	r.t.Helper()
	path := filepath.Join(r.t.TempDir(), "policy.yaml")
	r.writeFile(path, text)
	return path
}

// has ends the test unless these rules, "DEVICE DIRECTION CIDR BITS", are those there are, and in force.
func (r *rig) has(want ...string) {
	r.t.Helper()
	have := []string{}
	for _, rule := range r.show() {
		have = append(have, fmt.Sprintf("%s %s %s %d", rule.Device, rule.Direction, rule.CIDR, rule.Rate))
		if !rule.Attached {
			r.t.Errorf("%s %s %s: %s", rule.Device, rule.Direction, rule.CIDR, rule.State)
		}
	}
	slices.Sort(have)
	slices.Sort(want)
	if !slices.Equal(have, want) {
		r.t.Fatalf("rules are\n%s\nand ought to be\n%s", strings.Join(have, "\n"), strings.Join(want, "\n"))
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	testenv.Must(t, netlink.LinkSetName(testenv.Link(t, from), to))
}

const (
	watchedTap = `
  tap*:
    egress:
      10.0.0.0/24: 2mbit
`
	watched = `devices:
  va:
    egress:
      10.0.0.0/24: 1mbit
      10.0.0.9: unlimited
    ingress:
      10.0.0.0/24: {rate: 3mbit, each: host, algorithm: leaky}
` + watchedTap
)

// Limits do not come back after somebody removed their file, whatever copy there is.
func TestRemovedPolicy(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	text := func(devices, rate string) string {
		return "devices: {" + devices + ": {egress: {10.0.0.0/24: " + rate + "}}}\n"
	}
	file, good := r.policy(text("tap*", "1mbit")), filepath.Join(t.TempDir(), "good.yaml")
	testenv.Veth(t, "tap0", "p0")
	r.ok("apply", file, "--last-good", good)
	w := r.watch(file, "--last-good", good)
	r.writeFile(file, text("tap*", "2mbit"))
	r.ok("apply", file, "--confirm", "1s")
	sleepUntil(r.pending()) // devices that appear would get the copy now

	testenv.Must(t, os.Remove(file))
	testenv.Veth(t, "tap1", "p1")
	w.says("there is no file " + file)
	// Not for tap1: what the kernel says of it next may come after the file.
	r.writeFile(file, text("tap2", "3mbit"))
	testenv.Veth(t, "tap2", "p2")
	w.says("tap2 egress")
	testenv.Must(t, os.Remove(file))
	testenv.Veth(t, "tap3", "p3")
	w.says("there is no file " + file)
	testenv.Veth(t, "tap4", "p4")
	time.Sleep(200 * time.Millisecond) // for serve to say it again; if it does later, nothing is tested
	r.has("tap0 egress 10.0.0.0/24 1000000", "tap2 egress 10.0.0.0/24 3000000")
	if said := w.ends(syscall.SIGTERM); strings.Count(said.err, "there is no file") != 2 {
		t.Errorf("it said %s", said.err)
	}

	r.ok("flush", "--all")
	r.refused(exitInput, "there is no file "+file+"; nothing was changed", "apply", file, "--last-good", good)
	r.watch(file, "--last-good", good).says("there is no file " + file)
	r.nothingLeft()
}

// A device that appears while a change is pending has the rules that are in force: those of the change, until it reverts.
func TestWatchWhileAChangeIsPending(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"expires", "rollback", "confirm"} {
		for _, another := range []bool{false, true} { // file is applied, and not the one that is watched
			t.Run(fmt.Sprint(end, another), func(t *testing.T) {
				r := newRig(t)
				policy := func(rate, more string) string {
					return "devices: {tap*: {egress: {pool: " + rate + ", 10.0.0.0/24: " + rate + more + "}}}\n"
				}
				file := r.policy(policy("1mbit", ", 10.0.1.0/24: 1mbit"))
				testenv.Veth(t, "tap0", "x0")
				r.ok("apply", file)
				w := r.watch(file)
				changed := file
				if another {
					changed = r.policy("")
				}
				r.writeFile(changed, policy("2mbit", ", 10.0.2.0/24: 2mbit"))
				confirm := "20s"
				if end == "expires" {
					confirm = "3s"
				}
				r.ok("apply", changed, "--confirm", confirm)
				until := r.pending()
				testenv.Veth(t, "tap1", "x1")
				w.says("tap1 egress")
				rules := func(mbit, other int, devices ...string) (all []string) {
					for _, dev := range devices {
						all = append(all, fmt.Sprintf("   %d000000", mbit)) // its pool
						for _, network := range []int{0, other} {
							all = append(all, fmt.Sprintf("%s egress 10.0.%d.0/24 %d000000", dev, network, mbit))
						}
					}
					return all
				}
				r.has(rules(2, 2, "tap0", "tap1")...)
				switch end {
				case "expires":
					sleepUntil(until)
				default:
					r.ok(end)
				}
				mbit := 1
				if end == "confirm" {
					mbit = 2
				}
				r.has(rules(mbit, mbit, "tap0", "tap1")...)
				r.ok("set", "tap0", "egress", "10.0.9.0/24", "--rate", "9mbit") // ends the change for good
				if mbit = 1; end == "confirm" && !another {
					mbit = 2
				}
				testenv.Veth(t, "tap2", "x2")
				w.says("tap2 egress")
				all := rules(mbit, mbit, "tap2")
				if end == "confirm" {
					mbit = 2
				}
				r.has(append(append(all, "tap0 egress 10.0.9.0/24 9000000"), rules(mbit, mbit, "tap0", "tap1")...)...)
				if said := w.ends(syscall.SIGTERM); strings.Contains(said.err, "cannot apply") {
					t.Errorf("it said %s", said.err)
				}
			})
		}
	}
}

// A change that lasts can be rolled back though devices have appeared since, on these, too.
func TestRollbackAfterDevicesAppeared(t *testing.T) {
	t.Parallel()
	for kind, rules := range map[string]string{"rules": "10.0.0.0/24: %[1]s", "pools": "pool: %[1]s, 10.0.0.0/24: %[1]s"} {
		for _, watched := range []bool{false, true} { // the file, and not the policy in force
			t.Run(fmt.Sprint(kind, watched), func(t *testing.T) {
				r := newRig(t)
				policy := func(rate string) string {
					return "devices: {'tap[0-4]': {egress: {" + fmt.Sprintf(rules, "1mbit") + "}}, 'tap[5-9]': {egress: {" + fmt.Sprintf(rules, rate) + "}}}\n"
				}
				file, of := r.policy(policy("50mbit")), []string{}
				if watched {
					of = []string{file}
				}
				addTap(t, "tap0")
				addTap(t, "tap5")
				r.ok("apply", file)
				w := r.watch(of...)
				r.writeFile(file, policy("100mbit"))
				r.ok("apply", file, "--confirm", "60s")
				r.ok("confirm")
				testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap5")))
				for _, name := range []string{"tap5", "tap1", "tap6"} {
					addTap(t, name)
					w.says(name + " egress")
				}
				has := func(mbit int) {
					t.Helper()
					var want []string
					for name, mbit := range map[string]int{"tap0": 1, "tap1": 1, "tap5": mbit, "tap6": mbit} {
						if want = append(want, fmt.Sprintf("%s egress 10.0.0.0/24 %d000000", name, mbit)); kind == "pools" {
							want = append(want, fmt.Sprintf("   %d000000", mbit))
						}
					}
					r.has(want...)
				}
				has(100)
				if got := r.run("rollback"); got.code != exitDone { // it may say that it removed rules of the first tap5
					t.Errorf("rollback: %+v", got)
				}
				has(50)
				w.ends(syscall.SIGTERM)
			})
		}
	}
}

// However many appear at once, and whatever becomes of the others.
func TestWatchManyAtOnce(t *testing.T) {
	r := newRig(t)
	w := r.watch(r.policy("devices:" + watchedTap))
	var want []string
	for i := range 50 { // pairs
		attrs := netlink.NewLinkAttrs()
		attrs.Name = fmt.Sprintf("tap%d", i)
		testenv.Must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: fmt.Sprintf("other%d", i)}))
		if i%10 == 0 {
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, attrs.Name)))
			continue
		}
		want = append(want, attrs.Name+" egress 10.0.0.0/24 2000000")
	}
	w.says("tap49 egress")
	r.has(want...)
	if said := w.ends(syscall.SIGTERM); said.err != "" || strings.Count(said.out, "\n") < len(want) {
		t.Errorf("it said %s%s", said.out, said.err)
	}
}

// A device that gets another name before its turn has come has that name's rules.
func TestWatchWaitsItsTurn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "7mbit")
	w := r.watch(r.policy("devices:" + watchedTap))
	n, err := loader.Write(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(t, err)
	testenv.Veth(t, "tap0", "xb")
	time.Sleep(100 * time.Millisecond) // for serve to wait; if it does not yet, nothing is tested
	rename(t, "tap0", "other")
	testenv.Veth(t, "tap0", "xc")
	n.Close()
	w.says("tap0 egress")
	r.has("va egress 10.0.0.0/24 7000000", "tap0 egress 10.0.0.0/24 2000000")
	if said := w.ends(syscall.SIGTERM); said.err != "" || strings.Count(said.out, "\n") != 1 {
		t.Errorf("it said %s%s", said.out, said.err)
	}
}
