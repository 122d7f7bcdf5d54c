package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// hooks are the directories of hooks in the bpffs, of all namespaces.
func (r *rig) hooks() []string {
	r.t.Helper()
	hooks, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*", "*gress-[0-9]*"))
	testenv.Must(r.t, err)
	return hooks
}

// homes are the directories of namespaces in the bpffs.
func (r *rig) homes() []string {
	r.t.Helper()
	homes, err := filepath.Glob(filepath.Join(r.bpffs(), "shapectl", "*"))
	testenv.Must(r.t, err)
	return homes
}

// commands runs command lines that must succeed, for where a test may not be ended.
func (r *rig) commands(lines ...string) error {
	for _, line := range lines {
		if got := r.run(strings.Fields(line)...); got.code != exitDone {
			return fmt.Errorf("%s: exit %d: %s", line, got.code, got.err)
		}
	}
	return nil
}

// doomed leaves rules of so many network namespaces that no longer exist.
func (r *rig) doomed(namespaces int) {
	r.t.Helper()
	testenv.DoomedNetns(r.t, slices.Repeat([]func() error{func() error {
		return errors.Join(addVeth("da", "db"), r.commands(
			"set da egress 10.0.0.0/24 --rate 1mbit --each host", "set da ingress 10.0.0.0/24 --rate 1mbit --algorithm leaky",
			"set db egress 10.0.0.0/24 --rate 1mbit"))
	}}, namespaces)...)
}

// stranded runs commands in a namespace with the devices da and db, which are here once it has ended.
func (r *rig) stranded(lines ...string) {
	r.t.Helper()
	r.env["SHAPECTL_HOOK"] = "tcx"
	here, err := os.Open("/proc/thread-self/ns/net")
	testenv.Must(r.t, err)
	defer here.Close()
	testenv.DoomedNetns(r.t, func() error {
		if err := errors.Join(addVeth("da", "db"), r.commands(lines...)); err != nil {
			return err
		}
		for _, name := range []string{"da", "db"} { // one would go with the other
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetNsFd(l, int(here.Fd())); err != nil {
				return err
			}
		}
		return nil
	})
}

// addVeth makes a pair of devices, for where a test may not be ended.
func addVeth(name, peer string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: peer})
}

// What network namespaces have left that no longer exist is named, and the next
// command removes it; namespaces that exist keep what they have.
func TestLeftoversOfNamespaces(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		alive, other := testenv.NewNamedNetns(t)
		testenv.Must(t, other.Do(func() error { return addVeth("oa", "ob") }))
		r.ok("-n", alive, "set", "oa", "egress", "10.0.0.0/24", "--rate", "1mbit")
		r.doomed(3)
		if n := len(r.homes()); n != 4 {
			t.Fatalf("%d namespaces have pins, and 4 ought to", n)
		}
		if text := bare(r.run("doctor", "-v").out); !strings.Contains(text, "pins of 3 network namespaces that no longer exist") {
			t.Errorf("doctor does not tell of them:\n%s", text)
		}
		if n := len(r.homes()); n != 4 {
			t.Errorf("doctor has changed something: %d namespaces have pins", n)
		}
		r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
		if hooks := r.hooks(); len(hooks) != 2 || len(r.homes()) != 2 {
			t.Errorf("hooks are %v in %v", hooks, r.homes())
		}
		if text := bare(r.run("doctor", "-v").out); strings.Contains(text, "no longer exist") {
			t.Errorf("doctor tells of what is not there:\n%s", text)
		}
		if rules := r.show("-n", alive); len(rules) != 1 || !rules[0].Attached {
			t.Errorf("rules of the namespace that exists: %+v", rules)
		}
		r.ok("-n", alive, "flush", "oa")
		r.ok("flush", "va")
		r.nothingLeft()
	})
}

// Whatever command is killed while it removes them, the next one goes on.
func TestLeftoversHalfRemoved(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for removed := 0; ; removed++ {
		testenv.DoomedNetns(t, func() error {
			return errors.Join(addVeth("da", "db"), r.commands("set da egress 10.0.0.0/24 --rate 1mbit"))
		})
		home := r.homes()[0]
		var pins []string
		for _, pin := range r.pins() {
			if base := filepath.Base(pin); pin != home && base != "alive" {
				pins = append(pins, pin)
			}
		}
		slices.Reverse(pins) // what is in a directory before it
		if removed > len(pins)+1 {
			break
		}
		for _, pin := range append(pins, filepath.Join(home, "alive"))[:removed] {
			testenv.Must(t, os.Remove(pin))
		}
		r.ok("flush", "va")
		if left := r.pins(); len(left) > 0 {
			t.Fatalf("after %d pins were removed, others are left: %v", removed, left)
		}
	}
}

// A command that another one keeps from removing them does not wait for it.
func TestLeftoversInUse(t *testing.T) {
	r := newRig(t)
	r.doomed(1)
	home, err := os.Open(r.homes()[0])
	testenv.Must(t, err)
	testenv.Must(t, unix.Flock(int(home.Fd()), unix.LOCK_EX))
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	if n := len(r.homes()); n != 2 {
		t.Errorf("%d namespaces have pins, where one is in use", n)
	}
	home.Close()
	r.ok("flush", "va")
	r.nothingLeft()
}

// Rules of a network namespace end with it, also on a device that left it in time.
func TestLeftoversInForce(t *testing.T) {
	r := newRig(t)
	r.stranded("set da egress 10.0.0.0/24 --rate 8kbit --capacity 2000", "set db egress 10.0.0.0/24 --rate 1mbit", "flush db")
	if text := bare(r.run("doctor", "-v").out); !strings.Contains(text, "pins of 1 network namespace that no longer exist") {
		t.Errorf("doctor does not tell of them:\n%s", text)
	}
	r.ok("set", "da", "egress", "10.0.0.0/24", "--rate", "1mbit")
	if hooks := r.hooks(); len(hooks) != 1 {
		t.Errorf("hooks are %v", hooks)
	}
	r.ok("flush", "--all")
	r.nothingLeft()
}

// Devices that come and go under a serve leave nothing behind, and so do
// network namespaces that end.
func TestWatchRemovesLeftovers(t *testing.T) {
	t.Parallel()
	eachHook(t, func(t *testing.T, r *rig) {
		w := r.watch(r.policy("devices: {tap*: {egress: {10.0.0.0/24: 1mbit}, ingress: {10.0.0.0/24: 1mbit}}}\n"))
		for round := range 2 {
			for i := range 4 {
				testenv.Must(t, addVeth(fmt.Sprintf("tap%d", i), fmt.Sprintf("p%d", i)))
			}
			w.says("tap3 ingress")
			r.doomed(1)
			for i := range 4 {
				testenv.Must(t, netlink.LinkDel(testenv.Link(t, fmt.Sprintf("tap%d", i))))
			}
			testenv.Eventually(t, fmt.Sprintf("nothing to be left in round %d", round), func() bool { return len(r.pins()) == 0 })
		}
		if said := w.ends(syscall.SIGTERM); said.err != "" {
			t.Errorf("it said %s", said.err)
		}
		r.nothingLeft()
	})
}
