package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	stdmaps "maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/step"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
)

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

// address gives a device an address that can be used at once.
func address(device, cidr string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(cidr)
	if err != nil {
		return err
	}
	a.Flags = unix.IFA_F_NODAD
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

// A device of a rig, with its other end.
var vab = [2]string{"va", "vb"}

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
			r.has("va egress 10.0.0.0/24 1000000", "va egress 10.0.1.0/24 2000000", "va ingress 10.0.0.0/24 3000000")
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
