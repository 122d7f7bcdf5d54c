package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	stdmaps "maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

// applied is what apply, confirm or rollback say in JSON; they must succeed.
func (r *rig) applied(args ...string) (a report.Applied) {
	r.t.Helper()
	out := r.ok(append([]string{"-j"}, args...)...)
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		r.t.Fatalf("%v: %v: %s", args, err, out)
	}
	return a
}

// pending is until when a change is in force that waits to be confirmed, in ns of maps.Now; 0 for none.
func (r *rig) pending() (until uint64) {
	r.t.Helper()
	n, err := loader.Read(loader.Options{BPFFS: r.bpffs()})
	testenv.Must(r.t, err)
	defer n.Close()
	if p := n.Pending(); p != nil {
		return p.Until
	}
	return 0
}

func sleepUntil(at uint64) {
	for now := maps.Now(); now < at; now = maps.Now() {
		time.Sleep(time.Duration(at - now))
	}
}

// Two policies that differ in all that they can, for both directions of va.
const (
	policyA = `devices:
  va:
    egress:
      10.0.0.0/24: {rate: 1mbit, capacity: 20kb}
      10.0.1.0/24: {rate: 2mbit, capacity: 20kb, algorithm: leaky, each: host}
    ingress:
      10.0.0.0/24: 3mbit
`
	policyB = `devices:
  va:
    egress:
      10.0.0.0/24: {rate: 4mbit, capacity: 20kb, algorithm: leaky}
      10.0.2.0/24: unlimited
`
)

var (
	rulesA = []string{"va egress 10.0.0.0/24 1000000", "va egress 10.0.1.0/24 2000000", "va ingress 10.0.0.0/24 3000000"}
	rulesB = []string{"va egress 10.0.0.0/24 4000000", "va egress 10.0.2.0/24 0"}
)

// eachHook runs a test for both hooks.
func eachHook(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			test(t, r)
		})
	}
}

// With --max-remove, a policy that lost its second half, or its rates, changes nothing.
func TestMaxRemove(t *testing.T) {
	r := newRig(t)
	const half = "devices: {va: {egress: {10.0.0.1: 1mbit, 10.0.0.2: 1mbit"
	r.ok("apply", r.policy(half+", 10.0.0.3: 1mbit, 10.0.0.4: 1mbit}}}\n"))
	before, torn, open := r.ok("export"), r.policy(half+"}}}\n"), r.policy(half+", 10.0.0.3: unlimited, 10.0.0.4: unlimited}}}\n")
	for _, most := range []string{"1", "49%"} {
		for _, file := range []string{torn, open} {
			r.refused(exitInput, "it would remove 2 of 4 rules and pools, or make them unlimited, more than --max-remove "+most, "apply", file, "--max-remove", most)
		}
	}
	if after := r.ok("export"); after != before {
		t.Errorf("it changed the rules to\n%s", after)
	}
	for _, wrong := range []string{"x", "-1", "101%", ""} {
		r.refused(exitInput, "max-remove", "apply", torn, "--max-remove", wrong)
	}
	r.ok("apply", torn, "--max-remove", "50%")
}

// A change that is confirmed in time lasts, and can be taken back once.
func TestConfirmInTime(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		t.Parallel()
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		if did := r.applied("apply", b, "--confirm", "5s"); did.RevertsInNS == nil || *did.RevertsInNS > 5e9 {
			t.Errorf("apply --confirm 5s: %+v", did)
		}
		until := r.pending()
		r.has(rulesB...)
		if out := r.ok("confirm"); !strings.HasPrefix(out, "confirmed the change of ") {
			t.Errorf("confirm: %q", out)
		}
		if out := r.ok("confirm"); out != "nothing to confirm: the last change is permanent already\n" {
			t.Errorf("confirm again: %q", out)
		}
		sleepUntil(until)
		r.has(rulesB...)
		if out := r.ok("apply", b); out != "nothing to change\n" {
			t.Errorf("apply of what is in force: %q", out)
		}
		if out := r.ok("rollback"); !strings.Contains(out, "2 rules added, 1 changed, 1 removed on 1 device\n") {
			t.Errorf("rollback: %q", out)
		}
		r.has(rulesA...)
		r.refused(exitInput, "no change can be confirmed or undone", "rollback")
		r.refused(exitInput, "no change can be confirmed or undone", "confirm")
		r.has(rulesA...)
		r.ok("flush", "va")
		r.nothingLeft()
	})
}

// One that is not is over at its deadline, and what comes then works as ever.
func TestConfirmTooLate(t *testing.T) {
	for next, then := range map[string]func(r *rig, a, b string){
		"confirm":  func(r *rig, a, b string) { r.refused(exitInput, "was not confirmed in time", "confirm") },
		"rollback": func(r *rig, a, b string) { r.refused(exitInput, "was not confirmed in time", "rollback") },
		"apply the same": func(r *rig, a, b string) {
			if did := r.applied("apply", b); len(did.Hooks) != 2 || did.RevertsInNS != nil {
				r.t.Errorf("apply again: %+v", did)
			}
			r.has(rulesB...)
		},
		"apply what was before": func(r *rig, a, b string) {
			if out := r.ok("apply", a); out != "nothing to change\n" {
				r.t.Errorf("apply of what was before: %q", out)
			}
		},
		"set": func(r *rig, a, b string) {
			r.ok("set", "va", "egress", "10.0.5.0/24", "--rate", "5mbit")
			r.has(append(append([]string{}, rulesA...), "va egress 10.0.5.0/24 5000000")...)
			r.refused(exitInput, "no change can be confirmed or undone", "rollback")
			r.ok("delete", "va", "egress", "10.0.5.0/24")
		},
		"delete": func(r *rig, a, b string) {
			r.ok("delete", "va", "ingress", "10.0.0.0/24")
			r.has(rulesA[:2]...)
			r.ok("set", "va", "ingress", "10.0.0.0/24", "--rate", "3mbit")
		},
		"doctor": func(r *rig, a, b string) {
			if out := r.run("doctor").out; strings.Contains(out, "waits to be confirmed") {
				r.t.Errorf("doctor: %s", out)
			}
		},
		"flush": func(r *rig, a, b string) {
			r.ok("flush", "va")
			r.nothingLeft()
			r.ok("apply", a)
		},
	} {
		t.Run(next, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a, b := r.policy(policyA), r.policy(policyB)
			r.ok("apply", a)
			r.ok("apply", b, "--confirm", "3s")
			until := r.pending()
			r.has(rulesB...)
			sleepUntil(until)
			r.has(rulesA...)
			then(r, a, b)
			if next != "apply the same" {
				r.has(rulesA...)
			}
			r.ok("flush", "va")
			r.nothingLeft()
		})
	}
}

// What is pending is in nobody's way but of those who would change it.
func TestWhilePending(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		testenv.Veth(t, "vc", "vd")
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		r.ok("apply", b, "--confirm", "1h")
		until := r.pending()
		for _, line := range []string{
			"apply " + a, "apply " + a + " --confirm 1m", "set va egress 10.0.0.0/24 --rate 1mbit", "delete va egress 10.0.0.0/24",
		} {
			r.refused(exitInput, "'shapectl confirm' it or 'shapectl rollback' first", strings.Fields(line)...)
		}
		r.foretold(policyA, "not confirmed yet")
		if did := r.applied("apply", b); len(did.Hooks) != 0 || did.RevertsInNS == nil {
			t.Errorf("apply of what is pending: %+v", did)
		}
		if r.pending() != until {
			t.Error("the deadline has moved")
		}
		r.has(rulesB...)
		if out := r.ok("diff", b); out != "nothing to change\n" {
			t.Errorf("diff with what is pending: %q", out)
		}
		for _, line := range []string{"show", "doctor"} {
			if got := r.run(line); !strings.Contains(got.out, "shapectl confirm") {
				t.Errorf("%s does not tell of what is pending: %s%s", line, got.out, got.err)
			}
		}
		// Another device has nothing to do with it.
		if out := r.ok("set", "vc", "egress", "10.0.0.0/24", "--rate", "5mbit"); strings.Contains(out, "reverts") {
			t.Errorf("set of a rule that stays: %s", out)
		}
		r.ok("flush", "vc")
		r.ok("rollback")
		if r.pending() != 0 {
			t.Error("pending after a rollback")
		}
		r.has(rulesA...)

		// What is flushed would not come back at the deadline.
		r.ok("apply", b, "--confirm", "1s")
		until = r.pending()
		r.refused(exitInput, "not confirmed yet", "flush", "va")
		sleepUntil(until)
		r.has(rulesA...)
		r.ok("flush", "va")
		r.nothingLeft()
	})
}

func TestConfirmOutOfRange(t *testing.T) {
	r := newRig(t)
	a := r.policy(policyA)
	for _, confirm := range []string{"0", "0s", "500ms", "25h", "-1s", "soon", "60"} {
		r.refused(exitInput, "--confirm", "apply", a, "--confirm", confirm)
	}
	r.has()
	r.nothingLeft()
}

func address(device, cidr string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(cidr)
	if err != nil {
		return err
	}
	return netlink.AddrAdd(l, a)
}

// echo answers datagrams until the socket is closed.
func echo(conn *net.UDPConn) {
	b := make([]byte, 1500)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		conn.WriteToUDPAddrPort(b[:n], from)
	}
}

const (
	reachable = "devices: {va: {egress: {0.0.0.0/0: {rate: 1gbit, algorithm: leaky}}, ingress: {192.0.2.0/24: 1gbit}}}\n"
	cutOff    = `devices:
  va:
    defaults: {capacity: 1514}
    egress: {0.0.0.0/0: 8kbit}
    ingress: {0.0.0.0/0: 8kbit, 192.0.2.0/24: {rate: 8kbit, algorithm: leaky, penalty: 30s}}
`
)

// An operator who cuts himself off by a policy that nobody confirms is back when it reverts, though no process of shapectl
// is left.
func TestUnconfirmed(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		there := testenv.NewNetns(t)
		testenv.Veth(t, "vb", "va")
		here := testenv.NewNetns(t)
		r.env["SHAPECTL_BPFFS"] = testenv.BPFFS(t)
		testenv.Must(t, there.Do(func() error {
			return errors.Join(netlink.LinkSetNsFd(testenv.Link(t, "va"), here.FD()), address("vb", "192.0.2.2/24"))
		}))
		testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "va")))
		testenv.Must(t, address("va", "192.0.2.1/24"))
		testenv.WaitUp(t, "va")
		udp, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 7})
		testenv.Must(t, err)
		defer udp.Close()
		go echo(udp)
		var asking net.Conn
		testenv.Must(t, there.Do(func() (err error) { asking, err = net.Dial("udp4", "192.0.2.1:7"); return err }))
		defer asking.Close()
		asked := uint64(0)
		answered := func() bool { // within a while
			asked++
			asking.Write(binary.NativeEndian.AppendUint64(nil, asked)) // a refusal is no answer
			testenv.Must(t, asking.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
			for b := make([]byte, 8); ; {
				if _, err := asking.Read(b); err != nil || binary.NativeEndian.Uint64(b) == asked {
					return err == nil
				}
			}
		}
		r.ok("apply", r.policy(reachable))
		testenv.Eventually(t, "an answer before", answered)

		if got := r.result(r.command("apply", r.policy(cutOff), "--confirm", "4s")); got.code != exitDone {
			t.Fatalf("apply: %+v", got)
		}
		until := r.pending()
		for range 200 { // the buckets are full then, and a penalty begins
			asking.Write(make([]byte, 8))
		}
		if answered() && maps.Now() < until {
			t.Error("the operator is not cut off")
		}
		sleepUntil(until)
		r.nobodyAtWork()
		testenv.Eventually(t, "an answer after", answered)
		r.refused(exitInput, "was not confirmed in time", "confirm")
		if out := r.ok("apply", r.policy(reachable)); out != "nothing to change\n" {
			t.Errorf("apply of what was before: %q", out)
		}
		r.ok("flush", "va")
		r.nothingLeft()
	})
}

// nobodyAtWork ends the test if there is a process of the rig's shapectl.
func (r *rig) nobodyAtWork() {
	r.t.Helper()
	environments, err := filepath.Glob("/proc/[0-9]*/environ")
	testenv.Must(r.t, err)
	for _, path := range environments {
		text, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(text), "SHAPECTL_BPFFS="+r.bpffs()) {
			r.t.Errorf("a process of shapectl is at work: %s", path)
		}
	}
}

// Policies for two devices, which have rules for some directions only.
var policiesOfTwo = []string{
	"devices: {}\n",
	`devices:
  va:
    egress: {10.0.0.0/24: 1mbit, 10.0.1.0/24: {rate: 2mbit, algorithm: leaky}}
    ingress: {10.0.0.0/24: 3mbit}
  vc:
    egress: {10.0.0.0/24: 4mbit, 10.0.0.9: unlimited}
`,
	`devices:
  va:
    egress: {10.0.0.0/24: {rate: 5mbit, algorithm: leaky}, 10.0.0.9: {rate: 6mbit, shadow: {rate: 1mbit}}}
  vc:
    egress: {10.0.0.0/16: 7mbit}
    ingress: {10.0.1.0/24: {rate: 8mbit, algorithm: leaky}}
`,
	`devices:
  va:
    egress: {10.0.0.0/16: {rate: 9mbit, capacity: 20kb}}
    ingress: {10.0.0.0/24: {rate: 3mbit, algorithm: leaky}, 10.0.0.9: 10mbit}
`,
	`devices:
  va:
    egress: {10.0.0.0/16: {rate: 9mbit, each: host}}
  vc:
    ingress: {10.0.0.0/16: {rate: 9mbit, each: flow, algorithm: leaky}}
`,
}

// Devices of a rig, each with its other end.
var vab, vcd = [2]string{"va", "vb"}, [2]string{"vc", "vd"}

// A killer kills commands at random moments, and looks at what they leave.
type killer struct {
	*rig
	random   *rand.Rand
	took     time.Duration // the longest that a command took that was not killed
	kills    int
	have     string // what is in force, as export writes it
	before   string // what was before the last change
	switched int    // how many killed commands had changed something
}

// kill runs a command and kills it; then what is in force must be one of these.
func (k *killer) kill(args []string, allowed ...string) {
	k.t.Helper()
	patience := time.Duration(k.random.Int64N(int64(k.took)))
	if k.random.IntN(4) == 0 {
		patience = time.Duration(k.random.Int64N(int64(5 * time.Millisecond)))
	}
	cmd := k.command(args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	testenv.Must(k.t, cmd.Start())
	timer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
	cmd.Wait() // killed, or done before
	timer.Stop()
	k.kills++
	// A rollback may find that there is nothing left to take back.
	none := args[0] == "rollback" && cmd.ProcessState.ExitCode() == exitInput
	if said := stderr.String(); said != "" && !none {
		k.t.Errorf("kill %d: %v: %s", k.kills, args, said)
	}
	now := k.settled()
	if !slices.Contains(allowed, now) {
		k.t.Errorf("kill %d, after %v: %v: in force is\n%s\nand ought to be one of\n%s", k.kills, patience, args, now, strings.Join(allowed, "\n"))
	}
	k.is(now)
}

// is remembers what is in force.
func (k *killer) is(now string) {
	if now != k.have {
		k.switched++
		k.before, k.have = k.have, now
	}
}

// killedConfirm is longer than the test.
const killedConfirm = time.Hour

// settled is what is in force, once changes have begun, or are taken back, that were about to.
func (k *killer) settled() string {
	k.t.Helper()
	for at := k.underWay(); at != 0; at = k.underWay() {
		sleepUntil(at)
	}
	return k.ok("export")
}

// underWay is when the rules in force are others by what a killed command has
// done, in ns of maps.Now; 0 if it has done no such thing.
func (k *killer) underWay() uint64 {
	k.t.Helper()
	n, err := loader.Read(loader.Options{BPFFS: k.bpffs()})
	testenv.Must(k.t, err)
	defer n.Close()
	hooks, err := n.Hooks()
	testenv.Must(k.t, err)
	defer func() {
		for _, h := range hooks {
			h.Close()
		}
	}()
	for _, h := range hooks {
		state, at := h.Set.Store.Change()
		// One that waits to be confirmed has far more time.
		if state == maps.Armed || state == maps.Pending && at < maps.Now()+uint64(killedConfirm/2) {
			return at
		}
	}
	return 0
}

// meters ends the test unless each packet through a pair of devices is metered
// once, by the rule in force for it.
func (r *rig) meters(pairs ...[2]string) {
	r.t.Helper()
	type count struct{ device, direction, cidr string }
	counted := func() map[count]uint64 {
		counts := map[count]uint64{}
		for _, rule := range r.show() {
			counts[count{rule.Device, rule.Direction, rule.CIDR}] = rule.PassedPackets + rule.DroppedPackets
			if !rule.Attached && slices.ContainsFunc(pairs, func(pair [2]string) bool { return pair[0] == rule.Device }) {
				r.t.Errorf("%s %s %s is not in force: %s", rule.Device, rule.Direction, rule.CIDR, rule.State)
			}
		}
		return counts
	}
	want := counted()
	near := netip.MustParseAddr("192.0.2.1")
	for _, pair := range pairs {
		device, out, in := pair[0], testenv.NewSender(r.t, pair[0]), testenv.NewSender(r.t, pair[1])
		for _, address := range []string{"10.0.0.7", "10.0.0.9", "10.0.1.7", "10.1.0.1"} {
			far := netip.MustParseAddr(address)
			testenv.Must(r.t, out.Send(testenv.Frame(near, far, 100)))
			testenv.Must(r.t, in.Send(testenv.Frame(far, near, 100)))
			for _, direction := range []string{"egress", "ingress"} {
				var decides count
				bits := -1
				for c := range want {
					p := netip.MustParsePrefix(c.cidr)
					if c.device == device && c.direction == direction && p.Contains(far) && p.Bits() > bits {
						decides, bits = c, p.Bits()
					}
				}
				if bits >= 0 {
					want[decides]++
				}
			}
		}
	}
	testenv.Eventually(r.t, fmt.Sprintf("counters %v", want), func() bool { return stdmaps.Equal(counted(), want) })
}

// Killed at a random moment, apply, confirm and rollback leave all devices with the
// policy that they had or the one that they were to have, in force; the next
// one works; and in the end nothing is left.
func TestKilledApply(t *testing.T) {
	for _, c := range []struct {
		hook  string
		kills int
	}{{"tcx", testenv.Rounds(t, 8)}, {"clsact", testenv.Rounds(t, 4)}} {
		t.Run(c.hook, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			testenv.Veth(t, "vc", "vd")
			r.env["SHAPECTL_HOOK"] = c.hook
			k := &killer{rig: r, random: rand.New(rand.NewPCG(testenv.Seed(t), 0))}
			var files, exports []string
			for _, text := range policiesOfTwo {
				file := r.policy(text)
				began := time.Now()
				got := r.result(r.command("apply", file))
				if got.code != exitDone {
					t.Fatalf("apply: %+v", got)
				}
				k.took = max(k.took, time.Since(began))
				files, exports = append(files, file), append(exports, r.ok("export"))
				k.is(r.ok("export"))
			}
			for k.kills < c.kills && !t.Failed() {
				n := k.random.IntN(len(files))
				args := []string{"apply", files[n]}
				if k.random.IntN(2) == 0 {
					args = append(args, "--confirm", killedConfirm.String())
				}
				k.kill(args, k.have, exports[n])
				for r.pending() != 0 && !t.Failed() {
					if k.random.IntN(2) == 0 {
						k.kill([]string{"confirm"}, k.have)
					} else {
						k.kill([]string{"rollback"}, k.have, k.before)
					}
				}
				if k.random.IntN(4) == 0 {
					k.kill([]string{"rollback"}, k.have, k.before)
				}
				k.meters(vab, vcd)
				if k.random.IntN(8) == 0 {
					r.ok("apply", files[n])
					k.is(r.ok("export"))
					if k.have != exports[n] {
						t.Errorf("apply that nobody killed: in force is\n%s\nand ought to be\n%s", k.have, exports[n])
					}
				}
			}
			t.Logf("%d kills, within %v of the beginning; %d found something changed", k.kills, k.took, k.switched)
			r.ok("apply", files[1])
			k.meters(vab, vcd)
			r.ok("flush", "va")
			r.ok("flush", "vc")
			r.nothingLeft()
		})
	}
}

// A started command runs as a process.
type started struct {
	cmd      *exec.Cmd
	out, err strings.Builder
}

func (r *rig) start(args ...string) *started {
	r.t.Helper()
	s := &started{cmd: r.command(args...)}
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.err
	testenv.Must(r.t, s.cmd.Start())
	return s
}

// result waits until it has ended.
func (s *started) result() result {
	s.cmd.Wait() // how it ended says the code
	return result{s.out.String(), s.err.String(), s.cmd.ProcessState.ExitCode()}
}

// rulesOf are the rules of a device, "DIRECTION CIDR BITS".
func (r *rig) rulesOf(device string) (rules []string) {
	r.t.Helper()
	for _, rule := range r.show(device) {
		rules = append(rules, fmt.Sprintf("%s %s %d", rule.Direction, rule.CIDR, rule.Rate))
	}
	return rules
}

// A device that was made again gets the rules of the policy, and nothing is left of the old one.
func TestApplyToADeviceMadeAgain(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		a := r.policy(policyA)
		r.ok("apply", a)
		testenv.Must(t, netlink.LinkDel(testenv.Link(t, "va")))
		got := r.run("apply", a)
		if got.code != exitDegraded || !strings.Contains(got.err, "these devices do not exist: va") {
			t.Errorf("apply without the device: %+v", got)
		}
		testenv.Veth(t, "va", "vb")
		r.ok("apply", a)
		r.has(rulesA...)
		r.meters(vab)
		if out := r.ok("apply", a); out != "nothing to change\n" {
			t.Errorf("apply again: %q", out)
		}
		r.ok("flush", "va")
		r.has()
		r.nothingLeft()
	})
}

// A policy is refused as a whole where it can not be brought into force on all its devices.
func TestApplyIsRefusedAsAWhole(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		hook   string
		spoil  func(r *rig)
		policy string
		code   int
		says   string
		late   bool // known only once it is tried
	}{
		"link type": {"auto", func(r *rig) { unreadable(r.t, "tun0") },
			policyB + "  tun0: {egress: {10.0.0.0/24: 1mbit}}\n", exitInput, "tun0 egress: devices of this kind are not supported", false},
		"rules of another bpffs": {"auto", func(r *rig) {
			other := &rig{r.t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(r.t)}}
			other.ok("set", "vc", "ingress", "10.0.0.0/24", "--rate", "1mbit")
		}, policyB + "  vc: {egress: {10.0.0.0/24: 1mbit}, ingress: {10.0.0.0/24: 1mbit}}\n", exitKernel, "vc ingress: limits of shapectl are already on the device", false},
		"no egress side": {"clsact", func(r *rig) {
			testenv.Must(r.t, netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: testenv.Link(r.t, "vc").Attrs().Index, Parent: netlink.HANDLE_INGRESS,
			}}))
		}, policyB + "  vc: {egress: {10.0.0.0/24: {rate: 1mbit, each: host}}}\n", exitKernel, "tc qdisc del dev vc ingress", true},
		"the other address of packets": {"auto", func(*rig) {},
			strings.Replace(policyB, "egress:\n", "egress:\n      match: src\n", 1), exitInput, "va egress: other rules of this device and direction match the other address", false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = c.hook
			testenv.Veth(t, "vc", "vd")
			r.ok("apply", r.policy(policyA))
			c.spoil(r)
			pins, shown := r.pins(), r.ok("show", "-j")
			for _, confirm := range [][]string{nil, {"--confirm", "1h"}} {
				r.refused(c.code, c.says, append([]string{"apply", r.policy(c.policy)}, confirm...)...)
			}
			if !c.late {
				r.foretold(c.policy, c.says)
			}
			r.has(rulesA...)
			if now := r.pins(); !slices.Equal(now, pins) {
				t.Errorf("pins were %v, and are %v", pins, now)
			}
			if now := r.ok("show", "-j"); now != shown {
				t.Errorf("rules were %s, and are %s", shown, now)
			}
			r.meters(vab)
			r.ok("flush", "va")
			r.nothingLeft()
		})
	}
}

// foretold ends the test unless diff says with which words apply refuses a policy.
func (r *rig) foretold(policy, says string) {
	r.t.Helper()
	file := r.policy(policy)
	_, refusal, _ := strings.Cut(r.run("apply", file).err, "apply "+file+": ")
	got := r.run("diff", file)
	left := regexp.MustCompile(`reverts in \S+ at \S+`) // which is less by then
	refusal, got.err = left.ReplaceAllString(refusal, "reverts"), left.ReplaceAllString(got.err, "reverts")
	if !strings.Contains(refusal, says) || got.err != "shapectl: apply would refuse this: "+refusal && got.err != "shapectl: diff "+file+": "+refusal {
		r.t.Errorf("apply says %q, and diff %q", refusal, got.err)
	}
	if told := objects(r.t, r.run("diff", "-j", file).err); len(told) != 1 || !strings.Contains(fmt.Sprint(told[0]), says) {
		r.t.Errorf("diff -j says %v", told)
	}
}

// unreadable makes a device of a link type that nothing here can read.
func unreadable(t *testing.T, name string) {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	testenv.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	request, err := unix.NewIfreq(name)
	testenv.Must(t, err)
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	testenv.Must(t, unix.IoctlIfreq(fd, unix.TUNSETIFF, request))
	testenv.Must(t, unix.IoctlSetInt(fd, unix.TUNSETLINK, unix.ARPHRD_IEEE80211))
}

// Without rules, nothing keeps a direction from matching the other address of packets.
func TestMatchAfterNoRules(t *testing.T) {
	r := newRig(t)
	r.ok("apply", r.policy(policyA))
	r.ok("apply", r.policy("devices: {}\n"))
	r.has()
	r.ok("apply", r.policy(strings.Replace(policyB, "egress:\n", "egress:\n      match: src\n", 1)))
	r.has(rulesB...)
	r.ok("flush", "va")
	r.nothingLeft()
}

// A rule that is set keeps the address that its direction matches, unless --match says otherwise.
func TestSetKeepsMatch(t *testing.T) {
	r := newRig(t)
	policy := r.policy("devices: {va: {ingress: {match: dst, any: 1mbit}}}\n")
	r.ok("apply", policy)
	for _, network := range []string{"any", "10.0.0.0/24"} {
		r.ok("set", "va", "ingress", network, "--rate", "2mbit")
		for _, rule := range r.show("va") {
			if rule.Match != "dst" {
				t.Errorf("after set of %s: %+v", network, rule)
			}
		}
	}
	r.ok("apply", policy)
	r.ok("flush", "va")
	r.ok("set", "va", "ingress", "any", "--rate", "1mbit")
	r.ok("set", "va", "ingress", "any", "--rate", "1mbit", "--match", "dst")
	if rules := r.show("va"); len(rules) != 2 || rules[0].Match != "dst" {
		t.Errorf("with --match: %+v", rules)
	}
}

// A device that is deleted while a policy is applied is not there, or not matched by a pattern.
func TestApplyDeviceDeletedMeanwhile(t *testing.T) {
	r := newRig(t)
	defer func() { step.Hook = nil }()
	for name, says := range map[string]string{"xa": "these devices do not exist: xa;", "tap*": "no device matches tap*"} {
		testenv.Veth(t, "xa", "xb")
		testenv.Veth(t, "tap0", "tap0p")
		step.Hook = func(string, bool) error { // ahead of the first step
			step.Hook = nil
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "tap0")))
			return netlink.LinkDel(testenv.Link(t, "xa"))
		}
		got := r.run("apply", r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}, '"+name+"': {egress: {10.0.0.0/24: 2mbit}}}\n"))
		if got.code != exitDegraded || !strings.Contains(got.err, says) {
			t.Errorf("%s: exit %d: %s", name, got.code, got.err)
		}
		r.has("va egress 10.0.0.0/24 1000000")
		r.ok("flush", "va")
		r.nothingLeft()
	}
}

// Programs that somebody has taken off a device come back with the policy that is in force.
func TestApplyAttachesAgain(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = "clsact"
	a := r.policy(policyA)
	r.ok("apply", a)
	va := testenv.Link(t, "va")
	testenv.Must(t, netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: va.Attrs().Index, Parent: netlink.HANDLE_CLSACT, Handle: netlink.MakeHandle(0xffff, 0),
	}}))
	if rules := r.show(); rules[0].Attached {
		t.Errorf("without the qdisc: %+v", rules[0])
	}
	if got := r.run("diff", a); got.code != exitDiffers || strings.Contains(got.out, "  - ") || !strings.HasPrefix(got.out, "3 rules to add on 1 device\nva egress\n  + ") {
		t.Errorf("diff without the qdisc: %+v", got)
	}
	if out := r.ok("apply", a); out != "no rule changed on 1 device\nva egress: attached again (was: detached)\nva ingress: attached again (was: detached)\n" {
		t.Errorf("apply: %q", out)
	}
	r.has(rulesA...)
	r.meters(vab)
	r.ok("flush", "va")
	r.nothingLeft()
}

// policyOfAll has all that a rule can be, on a device with a link header and one without.
const policyOfAll = `# what customers have
defaults: {capacity: 50kb}
plans:
  gold: {rate: 100mbit, capacity: 100ms}
devices:
  va:
    egress:
      0.0.0.0/0: {rate: 1gbit, each: flow, excess: ecn}  # all others
      10.0.0.0/24: {plan: gold, each: host, shadow: {rate: 50mbit, each: host}}
      10.0.0.9: unlimited
      10.0.1.0/24: {rate: 10mbit, algorithm: leaky, penalty: 30s, overhead: 24, mpu: 84}
      10.0.2.0/24: {rate: 1.5mbit, excess: pass, fail: closed}
      2001:db8::/32: {plan: gold, each: /64}
    ingress:
      match: dst
      10.0.0.0/24: {rate: 8kbit, algorithm: leaky, penalty: fill}
  tun0:
    egress: {10.0.0.0/8: gold, "::/0": 400gbit}
`

// export and diff are the inverse of apply: what is exported changes nothing, and
// diff says of any policy what it would change, and of the one in force nothing.
func TestExportAndDiff(t *testing.T) {
	r := newRig(t)
	testenv.AddLink(t, &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN, Queues: 1, Flags: netlink.TUNTAP_DEFAULTS})
	all, b := r.policy(policyOfAll), r.policy(policyB)
	empty := r.ok("export")
	if got := r.run("diff", all); got.code != exitDiffers || !strings.HasPrefix(got.out, "9 rules to add on 2 devices\n") || strings.Count(got.out, "\n  + ") != 9 {
		t.Errorf("diff with nothing in force: %+v", got)
	}
	r.has()
	r.ok("apply", all)
	exported := r.ok("export")
	for name, file := range map[string]string{"the policy": all, "its export": r.policy(exported)} {
		if out := r.ok("diff", file); out != "nothing to change\n" {
			t.Errorf("diff with %s: %s", name, out)
		}
		if out := r.ok("diff", "-j", file); out != "[]\n" {
			t.Errorf("diff -j with %s: %s", name, out)
		}
		if out := r.ok("apply", file); out != "nothing to change\n" {
			t.Errorf("apply of %s: %s", name, out)
		}
	}
	stdin := r.command("apply", "-")
	stdin.Stdin = strings.NewReader(exported)
	if got := r.result(stdin); got.code != exitDone || got.out != "nothing to change\n" {
		t.Errorf("apply -: %+v", got)
	}

	shown := r.ok("show", "-j")
	got := r.run("diff", b)
	if got.code != exitDiffers || got.err != "" || strings.Count(got.out, "\n  - ") != 7 ||
		!strings.HasPrefix(got.out, "2 rules to change, 7 to remove on 2 devices\n") || !strings.Contains(got.out, "\n  ~ 10.0.2.0/24    rate 1.5mbit -> unlimited, fail closed -> open\n") {
		t.Errorf("diff: %+v", got)
	}
	var differences []report.Difference
	if got := r.run("diff", b, "-j"); got.code != exitDiffers || json.Unmarshal([]byte(got.out), &differences) != nil || len(differences) != 9 {
		t.Errorf("diff -j: %+v", got)
	}
	if now := r.ok("show", "-j"); now != shown {
		t.Errorf("diff changed something: rules were %s, and are %s", shown, now)
	}
	r.refused(exitInput, "diff: there is no file", "diff", b+".no")
	r.refused(exitInput, "nothing was changed", "diff", r.policy("devices: {va: {egress: {10.0.0.0/24: fast}}}\n"))
	r.refused(exitInput, "nothing was changed", "apply", r.policy("devices: {va: {egress: {10.0.0.0/24: fast}}}\n"))

	r.ok("apply", b)
	r.ok("apply", r.policy(empty))
	if out := r.ok("export"); out != empty {
		t.Errorf("export of nothing: %s", out)
	}
	r.ok("apply", r.policy(exported))
	if now := r.ok("export"); now != exported {
		t.Errorf("exported was\n%s, and after a way round it is\n%s", exported, now)
	}
	r.ok("flush", "va")
	r.ok("flush", "tun0")
	r.nothingLeft()
}

// From outside of its network namespace, everything works as it does inside.
func TestApplyFromOutside(t *testing.T) {
	r := newRig(t)
	name, ns := testenv.NewNamedNetns(t)
	testenv.Must(t, ns.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "va"}, PeerName: "vb"})
	}))
	b := r.policy(policyB)
	r.ok("-n", name, "apply", b, "--confirm", "1h")
	r.ok("-n", name, "confirm")
	r.ok("-n", name, "diff", b)
	r.has()
	r.refused(exitInput, "no change can be confirmed or undone", "rollback")
	r.ok("-n", name, "rollback")
	if got := r.run("-n", name, "diff", b); got.code != exitDiffers {
		t.Errorf("diff after a rollback: %+v", got)
	}
	r.nothingLeft()
}

// What another command changed since can not be taken back in part.
func TestRollbackAfterAnotherCommand(t *testing.T) {
	t.Parallel()
	for _, line := range []string{
		"set va egress 10.7.0.0/16 --rate 7mbit", "delete va egress 10.0.0.9", "flush va", "flush vc ingress", "apply FIRST",
	} {
		t.Run(line, func(t *testing.T) {
			r := newRig(t)
			testenv.Veth(t, "vc", "vd")
			first := r.policy(policiesOfTwo[3])
			r.ok("apply", r.policy(policiesOfTwo[1]))
			r.ok("apply", first)
			r.ok("apply", r.policy(policiesOfTwo[2]))
			r.ok(strings.Fields(strings.Replace(line, "FIRST", first, 1))...)
			now := r.ok("export")
			got := r.run("rollback")
			if line == "apply FIRST" { // which can be
				if got.code != exitDone {
					t.Errorf("rollback: %+v", got)
				}
				return
			}
			if then := r.ok("export"); got.code != exitInput || then != now {
				t.Errorf("rollback: %+v; in force was\n%s\nand is\n%s", got, now, then)
			}
		})
	}
}

// A rollback of a change to deleted devices alone does nothing, and says so.
func TestRollbackAfterItsDeviceWasDeleted(t *testing.T) {
	r := newRig(t)
	policy := func(rate string) string {
		return r.policy("devices: {va: {egress: {10.0.0.0/24: 1mbit}}, vc: {egress: {10.0.0.0/24: " + rate + "}}}\n")
	}
	testenv.Veth(t, "vc", "vd")
	r.ok("apply", policy("2mbit"))
	r.ok("apply", policy("3mbit"))
	testenv.Must(t, netlink.LinkDel(testenv.Link(t, "vc")))
	testenv.Veth(t, "vc", "vd")
	if got := r.run("rollback"); got.code != exitDegraded || !strings.Contains(got.err, "no rule was changed: the devices that it concerned were deleted") || got.out != "" {
		t.Errorf("rollback: %+v", got)
	}
	r.has("va egress 10.0.0.0/24 1000000")
}

// Devices that go while a change waits to be confirmed are in nobody's way.
func TestDeviceGoesWhilePending(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(r *rig, until uint64){
		"confirm":  func(r *rig, _ uint64) { r.removes("vc", "confirm") },
		"rollback": func(r *rig, _ uint64) { r.removes("vc", "rollback") },
		"expiry":   func(r *rig, until uint64) { sleepUntil(until); r.removes("vc", "flush", "vc") },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			testenv.Veth(t, "vc", "vd")
			a, b := r.policy(policiesOfTwo[1]), r.policy(policiesOfTwo[2])
			want := map[string][]string{
				"confirm":  {"egress 10.0.0.0/24 5000000", "egress 10.0.0.9/32 6000000"},
				"rollback": {"egress 10.0.0.0/24 1000000", "egress 10.0.1.0/24 2000000", "ingress 10.0.0.0/24 3000000"},
			}
			want["expiry"] = want["rollback"]
			r.ok("apply", a)
			r.ok("apply", b, "--confirm", "1s")
			testenv.Must(t, netlink.LinkDel(testenv.Link(t, "vc")))
			until := r.pending()
			then(r, until)
			if r.pending() != 0 {
				t.Error("it is pending still")
			}
			if now := r.rulesOf("va"); !slices.Equal(now, want[name]) {
				t.Errorf("rules of va are %v, and ought to be %v", now, want[name])
			}
			r.meters(vab)
			testenv.Veth(t, "vc", "vd")
			for _, file := range []string{b, a} {
				r.ok("apply", file)
				if out := r.ok("apply", file); out != "nothing to change\n" {
					t.Errorf("apply again: %q", out)
				}
				r.meters(vab, vcd)
			}
			r.ok("flush", "va")
			r.ok("flush", "vc")
			r.has()
			r.nothingLeft()
		})
	}
}

// removes ends the test unless a command line succeeds, and says that a device is gone and its rules with it.
func (r *rig) removes(device string, args ...string) {
	r.t.Helper()
	if got := r.run(args...); got.code != exitDone || got.err != "shapectl: removed the rules of deleted devices: "+device+"\n" {
		r.t.Fatalf("shapectl %s: %+v", strings.Join(args, " "), got)
	}
}

// A policy includes another one. What is recorded is both, and diff counts by kind.
func TestInclude(t *testing.T) {
	r := newRig(t)
	imported := r.policy("devices: {va: {egress: {10.0.0.1: 1mbit, 10.0.0.2: 1mbit}}}\n")
	own := r.policy("include: [" + imported + "]\ndevices: {va: {egress: {10.0.0.2: {rate: 2mbit, name: mine}, 10.0.0.3: 3mbit}}}\n")
	r.ok("apply", own)
	if got := r.ok("export"); !strings.Contains(got, "10.0.0.1: 1mbit") || !strings.Contains(got, "10.0.0.2: {rate: 2mbit, name: mine}") || !strings.Contains(got, "10.0.0.3: 3mbit") {
		t.Errorf("in force is\n%s", got)
	}
	if got := r.run("diff", own, "--summary"); got.code != exitDone || got.out != "nothing to change\n" {
		t.Errorf("diff: %+v", got)
	}
	r.ok("delete", "va", "egress", "10.0.0.1")
	if got := r.run("diff", own, "--summary"); got.code != exitDiffers || got.out != "1 rule to add on 1 device\n  add                      1  10.0.0.1\n" {
		t.Errorf("diff: %+v", got)
	}
	if got := r.run("doctor", "va"); !strings.Contains(got.out, "10.0.0.1") {
		t.Errorf("doctor does not miss the rule of the included file: %s", got.out)
	}
}
