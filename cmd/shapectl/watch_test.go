package main

import (
	"encoding/json"
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

// What watched has for va.
func watchedVA() []string {
	return []string{"va egress 10.0.0.0/24 1000000", "va egress 10.0.0.9/32 0", "va ingress 10.0.0.0/24 3000000"}
}

// Devices get their rules: those that are there, that get a name of the policy, that are made, and made again.
func TestWatch(t *testing.T) {
	t.Parallel()
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			file := r.policy(watched)
			w := r.watch(file)
			r.has(watchedVA()...)

			testenv.Veth(t, "xa", "xb")
			rename(t, "xa", "tap0")
			w.says("tap0 egress")
			r.has(append(watchedVA(), "tap0 egress 10.0.0.0/24 2000000")...)

			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap0")))
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
			testenv.Veth(t, "tap1", "xb")
			testenv.Veth(t, "va", "vb")
			w.says("tap1 egress: 1 rule of " + file + "\nva egress: 2 rules of " + file + "\nva ingress: 1 rule")
			testenv.Veth(t, "tap0", "xc")
			w.says("tap0 egress")
			all := append(watchedVA(), "tap0 egress 10.0.0.0/24 2000000", "tap1 egress 10.0.0.0/24 2000000")
			r.has(all...)

			said := w.ends(syscall.SIGTERM)
			if want := "va egress: 2 rules of FILE\nva ingress: 1 rule of FILE\ntap0 egress: 1 rule of FILE\n" +
				"tap1 egress: 1 rule of FILE\nva egress: 2 rules of FILE\nva ingress: 1 rule of FILE\ntap0 egress: 1 rule of FILE\n"; said.err != "" ||
				strings.ReplaceAll(said.out, file, "FILE") != want {
				t.Errorf("it said\n%s%s and ought to have said\n%s", said.out, said.err, want)
			}
			r.has(all...)
			before := r.passed("va", "10.0.0.9/32")
			r.send("10.0.0.9", 3, 200)
			if now := r.passed("va", "10.0.0.9/32"); now != before+3 {
				t.Errorf("of 3 packets, %d are counted", now-before)
			}
			for _, name := range []string{"va", "tap0", "tap1"} {
				r.ok("flush", name)
			}
			r.nothingLeft()
		})
	}
}

// passed is a counter of a rule.
func (r *rig) passed(device, cidr string) uint64 {
	r.t.Helper()
	for _, rule := range r.show() {
		if rule.Device == device && rule.CIDR == cidr && rule.Direction == "egress" {
			return rule.PassedPackets
		}
	}
	r.t.Fatalf("%s egress %s is not there", device, cidr)
	return 0
}

// What somebody has set stays, and so does what somebody has flushed, however often other devices come. The other
// direction of such a device gets its rules.
func TestWatchLeavesRulesAlone(t *testing.T) {
	r := newRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "7mbit")
	r.ok("set", "vb", "ingress", "10.0.0.0/24", "--rate", "8mbit")
	w := r.watch(r.policy(watched))
	va := []string{"va egress 10.0.0.0/24 7000000", "va ingress 10.0.0.0/24 3000000"}
	r.has(append(va, "vb ingress 10.0.0.0/24 8000000")...)

	testenv.Veth(t, "tap0", "xb")
	w.says("tap0 egress")
	r.ok("flush", "tap0")
	rename(t, "vb", "tap1")
	testenv.Veth(t, "tap2", "xc")
	w.says("tap2 egress")
	r.has(append(va, "tap1 egress 10.0.0.0/24 2000000", "tap1 ingress 10.0.0.0/24 8000000", "tap2 egress 10.0.0.0/24 2000000")...)
	if said := w.ends(syscall.SIGINT); said.err != "" || strings.Count(said.out, "\n") != 4 {
		t.Errorf("it said %s%s", said.out, said.err)
	}
}

// So does what is in force on a device that has moved away, and whose name another one has now.
func TestWatchLeavesMovedRulesAlone(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = "tcx"
	r.ok("set", "va", "ingress", "10.0.0.0/24", "--rate", "7mbit")
	w := r.watch(r.policy("devices: {v?: {egress: {10.0.0.0/24: 1mbit}}}\n"))
	_, other := testenv.NewNamedNetns(t)
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "va"), other.FD()))
	testenv.Veth(t, "va", "xb")
	w.says("apply rules to va: va egress: its rules are in force on the device that had this name")
	r.has("va egress 10.0.0.0/24 1000000", "va ingress 10.0.0.0/24 7000000", "vb egress 10.0.0.0/24 1000000")
	if said := w.ends(syscall.SIGTERM); strings.Count(said.err, "\n") != 1 {
		t.Errorf("it said %s", said.err)
	}
}

// A device that is made again has the rules of the policy, and no others come back.
func TestWatchDeviceMadeAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	testenv.Veth(t, "other", "xb")
	for _, line := range []string{
		"set other egress 10.0.0.0/24 --rate 7mbit", "set other ingress 10.0.0.0/24 --rate 9mbit",
		"set va egress 10.0.0.0/24 --rate 7mbit", "set va egress 10.0.7.0/24 --rate 7mbit --algorithm leaky",
		"set va ingress 10.0.0.0/24 --match dst --rate 7mbit",
		"set vb egress 10.0.0.0/24 --rate 7mbit", "set vb ingress 10.0.0.0/24 --rate 7mbit",
	} {
		r.ok(strings.Fields(line)...)
	}
	r.send("10.0.0.7", 3, 200)
	w := r.watch(r.policy(watched + "  vb: {egress: {10.0.0.0/24: 4mbit}}\n"))
	for _, name := range []string{"other", "va"} {
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, name)))
	}
	testenv.Veth(t, "other", "xb")
	testenv.Veth(t, "va", "vb")
	w.says("va ingress")
	testenv.Eventually(t, "nothing is left of the former devices", func() bool { return len(r.show()) == len(watchedVA())+1 })
	r.has(append(watchedVA(), "vb egress 10.0.0.0/24 4000000")...)
	if n := r.passed("va", "10.0.0.0/24"); n != 0 {
		t.Errorf("a new device has counted %d packets", n)
	}
	for _, rule := range r.show("va", "ingress") {
		if rule.Each != "host" || rule.Algorithm != "leaky" {
			t.Errorf("not as in the policy: %+v", rule)
		}
	}
	if said := w.ends(syscall.SIGTERM); said.err != "" {
		t.Errorf("it said %s", said.err)
	}
}

// What something else took off a direction is replaced by what the policy has there.
func TestWatchDetachedDirection(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = "clsact"
	for _, direction := range []string{"egress", "ingress"} {
		r.ok("set", "va", direction, "10.0.7.0/24", "--rate", "7mbit")
	}
	filters, err := netlink.FilterList(testenv.Link(t, "va"), netlink.HANDLE_MIN_EGRESS)
	testenv.Must(t, err)
	for _, f := range filters {
		testenv.Must(t, netlink.FilterDel(f))
	}
	w := r.watch(r.policy(watched))
	r.has("va egress 10.0.0.0/24 1000000", "va egress 10.0.0.9/32 0", "va ingress 10.0.7.0/24 7000000")
	if said := w.ends(syscall.SIGTERM); said.err != "" {
		t.Errorf("it said %s", said.err)
	}
}

// The policy counts as it is in the file, and in one that it includes, when a device appears, or as it last was good.
func TestWatchReadsThePolicyAgain(t *testing.T) {
	r := newRig(t)
	included := r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}}}\n")
	file := r.policy("include: [" + included + "]\ndevices: {}\n")
	w := r.watch(file)
	next := func(file, rate string) {
		t.Helper()
		r.writeFile(file, "devices: {tap*: {egress: {10.0.0.0/24: "+rate+"}}}\n")
	}
	appears := func(name string) {
		t.Helper()
		testenv.Veth(t, name, name+"p")
		w.says(name + " egress") // after its other end, which was made before
	}
	appears("tap0")
	next(included, "2mbit")
	appears("tap1")
	w.says("was read again")
	if n := strings.Count(w.err.String(), "was read again"); n != 1 {
		t.Errorf("it was read again %d times: %s", n, &w.err)
	}
	next(file, "fast")
	appears("tap2")
	w.says("shapectl: serve: " + file + `:1:40: "fast"`)
	w.says("shapectl: serve: still using the policy that was read before from " + file)
	if n := strings.Count(w.err.String(), "still using"); n != 1 {
		t.Errorf("one bad file is reported %d times: %s", n, &w.err)
	}
	next(file, "3mbit")
	testenv.Must(t, w.cmd.Process.Signal(syscall.SIGHUP))
	w.says("was read again")
	appears("tap3")
	var want []string
	for i, rate := range []int{1, 2, 2, 3} {
		for _, end := range []string{"", "p"} {
			want = append(want, fmt.Sprintf("tap%d%s egress 10.0.0.0/24 %d000000", i, end, rate))
		}
	}
	r.has(want...)
	w.ends(syscall.SIGTERM)
}

// Without a file, what was applied last counts.
func TestServeFollowsThePolicyInForce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	policy := func(rate string) string {
		return r.policy("devices: {tap*: {egress: {10.0.0.0/24: " + rate + "}}}\n")
	}
	s := r.serve()
	s.says("no policy is in force; until one is applied, devices that appear get no rules")
	appears := func(name string) {
		t.Helper()
		testenv.Veth(t, name, "peer"+name)
		s.says(name + " egress")
	}
	first := policy("1mbit")
	testenv.Veth(t, "tap0", "peertap0") // no policy is in force on no device
	r.ok("apply", first)
	testenv.Must(t, os.Remove(first))
	appears("tap1")
	r.ok("apply", policy("2mbit"), "--confirm", "60s")
	appears("tap2")
	r.has("tap0 egress 10.0.0.0/24 2000000", "tap1 egress 10.0.0.0/24 2000000", "tap2 egress 10.0.0.0/24 2000000")
	r.ok("rollback")
	appears("tap3")
	r.has("tap0 egress 10.0.0.0/24 1000000", "tap1 egress 10.0.0.0/24 1000000", "tap2 egress 10.0.0.0/24 1000000", "tap3 egress 10.0.0.0/24 1000000")
	s.ends(syscall.SIGTERM)

	testenv.Veth(t, "tap4", "peertap4")
	s = r.serve()
	s.says("watching for tap*, of the policy in force")
	s.says("tap4 egress")
	r.ok("apply", policy("2mbit"), "--confirm", "60s")
	appears("tap5")
	for i := range 6 {
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, fmt.Sprintf("tap%d", i))))
	}
	testenv.Eventually(t, "nothing to be left", func() bool { return len(testenv.Pins(t, r.bpffs())) == 0 })
	appears("tap6") // what was not confirmed is forgotten
	r.has("tap6 egress 10.0.0.0/24 1000000")
	s.ends(syscall.SIGTERM)
}

// Without a good file, the last good one is used.
func TestWatchLastGood(t *testing.T) {
	r := newRig(t)
	file, good := r.policy("devices: {va: {egress: {10.0.0.0/24: fast}}}\n"), r.policy(watched)
	w := r.watch(file, "--last-good", good)
	r.has(watchedVA()...)
	said := w.ends(syscall.SIGTERM)
	if lines := strings.Split(said.err, "\n"); len(lines) != 3 || !strings.Contains(lines[0], file) ||
		lines[1] != "shapectl: serve: using the last good policy, "+good {
		t.Errorf("it said %s", said.err)
	}
	r.refused(exitInput, "there is no last good policy in "+good+"-not", "serve", file, "--last-good", good+"-not")
	r.refused(exitInput, file, "serve", file)
	r.refused(exitInput, "leave it out", "serve", file, "--last-good", "")
	r.ok("flush", "va")
	r.nothingLeft()
}

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

// A change that expired is not tried on devices that appear, until the file is edited.
func TestWatchExpiredChange(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	policy := func(rate string) string { return "devices: {va*: {egress: {10.0.0.0/24: " + rate + "}}}\n" }
	file := r.policy(policy("1mbit"))
	good := filepath.Join(t.TempDir(), "good.yaml")
	r.ok("apply", file, "--last-good", good)
	start := func() *process { return r.watch(file, "--last-good", good) }
	w := start()
	appears := func(name, from string) {
		t.Helper()
		testenv.Veth(t, name, "peer"+name)
		w.says(name + " egress: 1 rule of " + from)
	}
	r.writeFile(file, policy("2mbit"))
	r.ok("apply", file, "--confirm", "1s")
	sleepUntil(r.pending())
	appears("va0", file)
	w.ends(syscall.SIGTERM)
	w = start()
	appears("va1", file)
	r.writeFile(file, policy("3mbit"))
	appears("va2", file)
	w.ends(syscall.SIGTERM)
	w = start()
	appears("va3", file)

	// A device appears while a change is pending, and another one after it reverted, but the file was edited meanwhile.
	r.writeFile(file, policy("4mbit"))
	r.ok("apply", file, "--confirm", "3s")
	until := r.pending()
	appears("va4", file)
	r.writeFile(file, policy("5mbit"))
	appears("va5", file)
	sleepUntil(until)
	appears("va6", file)
	var want []string
	for device, mbit := range map[string]int{"va": 1, "va0": 1, "va1": 1, "va2": 3, "va3": 3, "va4": 3, "va5": 5, "va6": 5} {
		want = append(want, fmt.Sprintf("%s egress 10.0.0.0/24 %d000000", device, mbit))
	}
	r.has(want...)
	w.ends(syscall.SIGTERM)
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

// Only a device that cannot have the rules of both sides of a change waits for its end, and for no rollback.
func TestWatchWhileAChangeOfMatchIsPending(t *testing.T) {
	r := newRig(t)
	policy := func(match, rate string) string {
		return "devices: {tap*: {ingress: {" + match + "10.0.0.0/24: " + rate + "}}, vn*: {egress: {10.0.0.0/24: " + rate + "}}}\n"
	}
	file := r.policy(policy("match: dst, ", "1mbit"))
	testenv.Veth(t, "vn1", "x1")
	w := r.watch(file)
	r.writeFile(file, policy("", "2mbit"))
	r.run("apply", file, "--confirm", "60s") // says that there is no tap*
	testenv.Veth(t, "tap2", "x2")
	w.says("cannot apply rules to")
	testenv.Veth(t, "vn3", "x3")
	w.says("vn3 egress")
	r.has("vn1 egress 10.0.0.0/24 2000000", "vn3 egress 10.0.0.0/24 2000000")
	r.ok("rollback")
	w.says("tap2 ingress")
	r.has("vn1 egress 10.0.0.0/24 1000000", "vn3 egress 10.0.0.0/24 1000000", "tap2 ingress 10.0.0.0/24 1000000")

	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap2")))
	r.run("apply", file)
	testenv.Veth(t, "tap4", "x4")
	w.says("tap4 ingress")
	r.has("vn1 egress 10.0.0.0/24 2000000", "vn3 egress 10.0.0.0/24 2000000", "tap4 ingress 10.0.0.0/24 2000000")
	if said := w.ends(syscall.SIGTERM); strings.Count(said.err, "cannot apply") != 1 {
		t.Errorf("it said %s", said.err)
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

func TestWatchNamedNamespace(t *testing.T) {
	r := newRig(t)
	name, other := testenv.NewNamedNetns(t)
	w := r.watch("-j", "-n", name, r.policy(watched))
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "va"), other.FD()))
	w.says("va ingress")
	if rules := r.show(); len(rules) > 0 {
		t.Errorf("here are rules: %+v", rules)
	}
	if rules := r.show("-n", name); len(rules) != 3 {
		t.Errorf("rules are %+v", rules)
	}
	decode := json.NewDecoder(strings.NewReader(w.ends(syscall.SIGTERM).out))
	for _, want := range []string{"va egress 2", "va ingress 1"} {
		var line struct {
			Device, Direction, Policy, Sentence string
			Rules                               int
		}
		err := decode.Decode(&line)
		if have := fmt.Sprintf("%s %s %d", line.Device, line.Direction, line.Rules); err != nil || have != want ||
			!strings.HasSuffix(line.Sentence, line.Policy) || line.Policy == "" {
			t.Errorf("%+v, %v, where it ought to be %s", line, err, want)
		}
	}
	r.refused(exitInput, "no such network namespace", "serve", "-n", "nosuch", r.policy(watched))
}

// One device that can not be given rules keeps no other one from them.
func TestWatchGoesOn(t *testing.T) {
	r := newRig(t)
	w := r.watch(r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}}, '*0': {egress: {10.0.0.0/24: 2mbit}}}\n"))
	testenv.Veth(t, "tap0", "x0")
	w.says("shapectl: serve: apply rules to tap0: ")
	w.says("x0 egress")
	r.has("x0 egress 10.0.0.0/24 2000000")
	if said := w.ends(syscall.SIGTERM); strings.Count(said.err, "\n") != 1 || !strings.Contains(said.err, "tap*") {
		t.Errorf("it said %s", said.err)
	}
}
