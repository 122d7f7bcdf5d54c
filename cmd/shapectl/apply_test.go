package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/report"
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
	until, _, err = n.PendingChange()
	testenv.Must(r.t, err)
	return until
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

// A change that is confirmed in time lasts, and can be taken back once.
func TestConfirmInTime(t *testing.T) {
	eachHook(t, func(t *testing.T, r *rig) {
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		if did := r.applied("apply", b, "--confirm", "1s"); did.RevertsInNS == nil || *did.RevertsInNS > 1e9 {
			t.Errorf("apply --confirm 1s: %+v", did)
		}
		until := r.pending()
		r.has(rulesB...)
		if out := r.ok("confirm"); out != "confirmed\n" {
			t.Errorf("confirm: %q", out)
		}
		r.refused(exitInput, "no such change", "confirm")
		sleepUntil(until)
		r.has(rulesB...)
		if out := r.ok("apply", b); out != "nothing to change\n" {
			t.Errorf("apply of what is in force: %q", out)
		}
		if out := r.ok("rollback"); !strings.Contains(out, "va egress: 1 added, 1 changed, 1 removed\nva ingress: 1 added\n") {
			t.Errorf("rollback: %q", out)
		}
		r.has(rulesA...)
		r.refused(exitInput, "no such change", "rollback")
		r.refused(exitInput, "no such change", "confirm")
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
			r.refused(exitInput, "no such change", "rollback")
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
			r := newRig(t)
			a, b := r.policy(policyA), r.policy(policyB)
			r.ok("apply", a)
			r.ok("apply", b, "--confirm", "1s")
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
	eachHook(t, func(t *testing.T, r *rig) {
		testenv.Veth(t, "vc", "vd")
		a, b := r.policy(policyA), r.policy(policyB)
		r.ok("apply", a)
		r.ok("apply", b, "--confirm", "1h")
		until := r.pending()
		for _, line := range []string{
			"apply " + a, "apply " + a + " --confirm 1m", "set va egress 10.0.0.0/24 --rate 1mbit", "delete va egress 10.0.0.0/24",
		} {
			r.refused(exitInput, "not confirmed yet; 'shapectl confirm' it or 'shapectl rollback' first", strings.Fields(line)...)
		}
		if did := r.applied("apply", b); len(did.Hooks) != 0 || did.RevertsInNS == nil {
			t.Errorf("apply of what is pending: %+v", did)
		}
		if r.pending() != until {
			t.Error("the deadline has moved")
		}
		r.has(rulesB...)
		if out := r.ok("diff", b); out != "" {
			t.Errorf("diff with what is pending: %q", out)
		}
		for _, line := range []string{"show", "doctor"} {
			if got := r.run(line); !strings.Contains(got.out, "shapectl confirm") {
				t.Errorf("%s does not tell of what is pending: %s%s", line, got.out, got.err)
			}
		}
		// Another device has nothing to do with it.
		r.ok("set", "vc", "egress", "10.0.0.0/24", "--rate", "5mbit")
		r.ok("flush", "vc")
		r.ok("rollback")
		if r.pending() != 0 {
			t.Error("pending after a rollback")
		}
		r.has(rulesA...)

		// What is flushed does not come back.
		r.ok("apply", b, "--confirm", "1s")
		until = r.pending()
		r.ok("flush", "va")
		r.has()
		sleepUntil(until)
		r.has()
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

// An operator reaches the rig's va from the other end of the cable: by UDP,
// with a request each millisecond, and over a TCP connection.
type operator struct {
	t       *testing.T
	tcp     net.Conn
	mutex   sync.Mutex
	asked   map[uint64]uint64 // requests: when each was sent, in ns of maps.Now
	replies map[uint64]uint64 // and when it was answered
}

// newOperator makes a rig whose vb is in a network namespace of its own, with an operator there.
func newOperator(t *testing.T) (*rig, *operator) {
	t.Helper()
	there := testenv.NewNetns(t)
	testenv.Veth(t, "vb", "va")
	here := testenv.NewNetns(t)
	r := &rig{t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(t)}}
	testenv.Must(t, there.Do(func() error {
		va, err := netlink.LinkByName("va")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetNsFd(va, here.FD()), address("vb", "192.0.2.2/24"))
	}))
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "va")))
	testenv.Must(t, address("va", "192.0.2.1/24"))
	testenv.WaitUp(t, "va")

	var running sync.WaitGroup
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{Port: 7})
	testenv.Must(t, err)
	tcp, err := net.Listen("tcp4", "192.0.2.1:7")
	testenv.Must(t, err)
	running.Go(func() { echo(udp) })
	running.Go(func() {
		if conn, err := tcp.Accept(); err == nil {
			defer conn.Close()
			io.Copy(conn, conn)
		}
	})
	o := &operator{t: t, asked: map[uint64]uint64{}, replies: map[uint64]uint64{}}
	var asking net.Conn
	testenv.Must(t, there.Do(func() (err error) {
		if asking, err = net.Dial("udp4", "192.0.2.1:7"); err != nil {
			return err
		}
		o.tcp, err = net.Dial("tcp4", "192.0.2.1:7")
		return err
	}))
	var stop atomic.Bool
	running.Go(func() { o.ask(asking, &stop) })
	running.Go(func() { o.hear(asking) })
	t.Cleanup(func() {
		stop.Store(true)
		for _, c := range []io.Closer{udp, tcp, asking, o.tcp} {
			c.Close()
		}
		running.Wait()
	})
	return r, o
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

func (o *operator) ask(conn net.Conn, stop *atomic.Bool) {
	for n := uint64(0); !stop.Load(); n++ {
		o.mutex.Lock()
		o.asked[n] = maps.Now()
		o.mutex.Unlock()
		conn.Write(binary.NativeEndian.AppendUint64(nil, n)) // a refusal is no answer
		time.Sleep(time.Millisecond)
	}
}

func (o *operator) hear(conn net.Conn) {
	b := make([]byte, 8)
	for {
		n, err := conn.Read(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if n == len(b) {
			o.mutex.Lock()
			o.replies[binary.NativeEndian.Uint64(b)] = maps.Now()
			o.mutex.Unlock()
		}
	}
}

// reaches waits until all requests that were sent between two moments are answered, and there are some.
func (o *operator) reaches(from, to uint64) {
	o.t.Helper()
	testenv.Eventually(o.t, "answers to all requests", func() bool {
		o.mutex.Lock()
		defer o.mutex.Unlock()
		asked, answered := 0, 0
		for request, sent := range o.asked {
			if sent < from || sent >= to {
				continue
			}
			asked++
			if _, ok := o.replies[request]; ok {
				answered++
			}
		}
		return asked > 0 && asked == answered && maps.Now() >= to
	})
}

// talks sends a line over the TCP connection and waits until it is back.
func (o *operator) talks() {
	o.t.Helper()
	line := []byte("still there?\n")
	testenv.Must(o.t, o.tcp.SetDeadline(time.Now().Add(30*time.Second)))
	_, err := o.tcp.Write(line)
	testenv.Must(o.t, err)
	_, err = io.ReadFull(o.tcp, make([]byte, len(line)))
	testenv.Must(o.t, err)
}

const (
	reachable = "devices: {va: {egress: {0.0.0.0/0: 1gbit}, ingress: {192.0.2.0/24: {rate: 1gbit, algorithm: leaky}}}}\n"
	cutOff    = `devices:
  va:
    defaults: {capacity: 1514}
    egress: {0.0.0.0/0: 8bit}
    ingress: {0.0.0.0/0: {rate: 8bit, algorithm: leaky}, 192.0.2.0/24: 8bit}
`
	cutOffHolds = 1514 / (14 + 20 + 8 + 8) // requests
)

// An operator who cuts himself off by a policy that nobody confirms is back
// when he said, though no process of shapectl is left.
func TestUnconfirmed(t *testing.T) {
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			r, o := newOperator(t)
			r.env["SHAPECTL_HOOK"] = hook
			r.ok("apply", r.policy(reachable))
			now := maps.Now()
			o.reaches(now, now+10e6)
			o.talks()

			cmd := r.command("apply", r.policy(cutOff), "--confirm", "2s")
			began := maps.Now()
			if got := r.result(cmd); got.code != exitDone {
				t.Fatalf("apply: %+v", got)
			}
			returned := maps.Now()
			until := r.pending()
			if until < began+2e9 || returned >= until {
				t.Errorf("the deadline is %d ns after apply began, and it took %d ns", until-began, returned-began)
			}
			cmd.Process.Kill()
			r.nobodyAtWork()
			sleepUntil(until)
			o.reaches(until, until+200e6)
			r.nobodyAtWork()
			o.talks() // on the same connection
			o.check(returned, until)

			r.refused(exitInput, "was not confirmed in time", "confirm")
			if out := r.ok("apply", r.policy(reachable)); out != "nothing to change\n" {
				t.Errorf("apply of what was before: %q", out)
			}
			r.ok("flush", "va")
			r.nothingLeft()
		})
	}
}

// check ends the test unless the operator was cut off between two moments, but
// for what the buckets held, and back at the second.
func (o *operator) check(from, until uint64) {
	o.t.Helper()
	o.mutex.Lock()
	defer o.mutex.Unlock()
	answered, back := 0, ^uint64(0)
	for request, heard := range o.replies {
		if heard >= until {
			back = min(back, heard)
		} else if o.asked[request] > from {
			answered++
		}
	}
	if answered > cutOffHolds+1 {
		o.t.Errorf("%d requests were answered while the operator was cut off", answered)
	}
	if back > until+100e6 {
		o.t.Errorf("he was back only %v after the deadline", time.Duration(back-until))
	}
	o.t.Logf("%d requests were answered in the %v before the deadline; he was back %v after it", answered, time.Duration(until-from), time.Duration(back-until))
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
