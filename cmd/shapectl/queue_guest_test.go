//go:build guest

package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// qdisc is what packets leave va by. A clsact qdisc stays with whoever first had a filter there.
func (r *rig) qdisc() string { return r.sh("tc -d qdisc show dev va | grep -v clsact || true") }

// says ends the test unless a command line has an exit code and says that, on stderr.
func (r *rig) says(code int, says string, args ...string) {
	r.t.Helper()
	got := r.run(args...)
	if got.code != code || !strings.Contains(got.err, says) || code == exitDone && strings.HasPrefix(got.err, "shapectl:") {
		r.t.Errorf("shapectl %s: exit %d, %s, want %d and %q", strings.Join(args, " "), got.code, got.err, code, says)
	}
}

// finds ends the test unless doctor has a finding of that status that says so.
func (r *rig) finds(status, check, says string) {
	r.t.Helper()
	all, _ := r.findings()
	for _, f := range all {
		is := strings.Join([]string{f.Device, f.Direction, f.Check}, " ")
		if string(f.Status) == status && is == check && strings.Contains(f.Finding+"; "+f.Advice, says) {
			return
		}
	}
	r.t.Errorf("doctor has no %s of %s that says %q: %+v", status, check, says, all)
}

const (
	delayed  = "set va egress 10.0.0.0/24 --rate 10mbit --algorithm leaky --excess delay"
	delayed2 = "set va egress 10.0.1.0/24 --rate 10mbit --excess delay --queue 60kb"
	entering = "set va ingress 10.0.0.0/24 --rate 10mbit --algorithm leaky --excess delay"
)

// What a person set up delays packets, and stays.
func TestDelayByHand(t *testing.T) {
	r := newRig(t)
	r.sh("tc qdisc replace dev va root fq limit 1048576 flow_limit 131072")
	by := r.qdisc()
	r.ok(fields(delayed)...)
	r.finds("ok", "va egress queue", "delays packets")
	r.ok(fields("flush va")...)
	if now := r.qdisc(); now != by {
		t.Errorf("what a person set up was %s, and is %s", by, now)
	}
}

func TestSetupFQ(t *testing.T) {
	r := newRig(t)
	before := r.qdisc()
	r.says(exitDone, "va: its qdisc is now fq instead of noqueue; 'shapectl flush va' brings the default back\n", fields(delayed+" --setup-fq")...)
	r.ok(fields(delayed2 + " --setup-fq")...)
	with := r.qdisc()
	r.finds("ok", "va egress queue", "delays packets")
	if s := r.explain("va", "egress", "10.0.0.7").Hooks[0]; s.HeldBack == nil || !*s.HeldBack {
		t.Errorf("nothing delays packets: %+v", s)
	}
	r.ok(fields("delete va egress 10.0.0.0/24")...)
	r.ok(fields("delete va egress 10.0.1.0/24")...)
	r.ok(fields("flush va ingress")...)
	if now := r.qdisc(); now != with {
		t.Errorf("only flush removes fq: was %s, is %s", with, now)
	}
	r.says(exitDone, "va: its qdisc is the default again: noqueue\n", fields("flush va egress")...)
	if after := r.qdisc(); after != before {
		t.Errorf("was %s, is %s", before, after)
	}
	if out := r.ok(fields("flush va")...); out != "no rules on va\n" || len(r.pins()) != 0 {
		t.Errorf("flushed again: %s, left: %v", out, r.pins())
	}
}

// A pattern removes the fqs of the devices that it matches.
func TestPatternsRemoveFQs(t *testing.T) {
	r := newRig(t)
	before := r.qdisc()
	r.says(exitDone, "is now fq", fields(delayed+" --setup-fq")...)
	with := r.qdisc()
	r.ok(fields("flush v* ingress")...)
	r.ok(fields("flush x*")...)
	if now := r.qdisc(); now != with {
		t.Errorf("was %s, is %s", with, now)
	}
	r.says(exitDone, "va: its qdisc is the default again: noqueue\n", fields("flush v*")...)
	if now := r.qdisc(); now != before {
		t.Errorf("was %s, is %s", before, now)
	}
}

func TestQdiscReplacedSince(t *testing.T) {
	r := newRig(t)
	r.says(exitDone, "instead of noqueue", fields(delayed+" --setup-fq")...)
	r.sh("tc qdisc replace dev va root pfifo limit 7")
	theirs := r.qdisc()
	r.finds("failed", "va egress queue", "only the fq qdisc does that, and va has pfifo")
	r.ok(fields("flush va")...)
	if now := r.qdisc(); now != theirs || len(r.pins()) != 0 {
		t.Errorf("was %s, is %s, left: %v", theirs, now, r.pins())
	}
}

func TestLimitsOfFQ(t *testing.T) {
	r := newRig(t)
	r.sh("tc qdisc add dev va root fq limit 20 horizon 40ms")
	r.refused(exitInput, "the fq on va queues packets for at most 40ms, and the rules delay them for up to 50ms; shorten the queue", fields(delayed)...)
	if len(r.show()) != 0 {
		t.Error("a rule was set that was refused")
	}
	r.sh("tc qdisc change dev va root fq horizon 60ms")
	r.says(exitDegraded, "va: up to 977 packets may be queued, but its fq holds only 20, and 100 of one flow", fields(delayed)...)
	if rules := r.show(); len(rules) != 1 || !rules[0].Attached {
		t.Errorf("rules are %v", rules)
	}
	r.finds("warning", "va egress queue", "up to 977 packets may be queued, and the fq of va has room for 20")
	r.says(exitDegraded, "its fq holds only 20", "apply", r.policy("devices: {va: {egress: {10.0.0.0/24: {rate: 11mbit, algorithm: leaky, excess: delay}}}}"))
	r.sh("tc qdisc change dev va root fq horizon 5ms")
	r.finds("failed", "va egress queue", "the fq of va delays packets by 5ms at most, and rules by up to 50ms: packets with a longer delay are dropped")
	r.send("10.0.0.7", 60, 1500)
	r.finds("warning", "va egress queue", "packets by its own limits")
	r.refused(exitInput, "shorten the queue (--capacity or --queue); somebody has configured fq: shapectl replaces only", fields(delayed+" --setup-fq")...)
}

func TestConfiguredQdisc(t *testing.T) {
	for name, configure := range map[string]string{
		"htb":   "tc qdisc add dev va root handle 7: htb; tc class add dev va parent 7: classid 7:1 htb rate 1mbit",
		"pfifo": "tc qdisc add dev va root pfifo limit 77",
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.sh(configure)
			before := r.qdisc()
			for _, line := range []string{delayed, delayed + " --setup-fq", "line va --up 10mbit"} {
				r.refused(exitInput, "va cannot delay packets: its qdisc is "+name+", and only fq can", fields(line)...)
				r.refused(exitInput, "somebody has configured "+name+": shapectl replaces only qdiscs that the kernel makes by default; to have it replaced, delete it with 'tc qdisc del dev DEVICE root'", fields(line)...)
			}
			if now := r.qdisc(); now != before || len(r.pins()) != 0 {
				t.Errorf("was %s, is %s, left: %v", before, now, r.pins())
			}
		})
	}
}

// entered sends packets to va, and counts those that a socket there receives.
func (r *rig) entered(packets int) (received int) {
	r.t.Helper()
	sender := testenv.NewSender(r.t, "vb")
	frame := testenv.Frame(netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("10.0.0.1"), 1000)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	testenv.Must(r.t, err)
	defer unix.Close(fd)
	testenv.Must(r.t, unix.Bind(fd, &unix.SockaddrInet4{Port: 53}))
	testenv.Must(r.t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}))
	for range packets {
		testenv.Must(r.t, sender.Send(frame))
	}
	for received < packets {
		if _, _, err := unix.Recvfrom(fd, make([]byte, 2000), 0); err != nil {
			break
		}
		received++
	}
	return received
}

// addressed gives va the addresses of the frames that tests send.
func (r *rig) addressed() {
	r.t.Helper()
	mac := []byte{0x02, 0, 0, 0, 0, 2}
	testenv.Must(r.t, netlink.LinkSetHardwareAddr(testenv.Link(r.t, "va"), mac))
	r.address("10.0.0.1/24")
}

// ifbs are the ifb devices that shapectl has made.
func (r *rig) ifbs() (names []string) {
	r.t.Helper()
	links, err := netlink.LinkList()
	testenv.Must(r.t, err)
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "shapectl") {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

func TestIngressThroughIfb(t *testing.T) {
	for _, hook := range []string{"tcx", "clsact"} {
		t.Run(hook, func(t *testing.T) {
			r := newRig(t)
			r.env["SHAPECTL_HOOK"] = hook
			r.addressed()
			r.ok(fields(entering)...)
			name := fmt.Sprintf("shapectl%d", testenv.Link(t, "va").Attrs().Index)
			if ifbs := r.ifbs(); !slices.Equal(ifbs, []string{name}) {
				t.Fatalf("there are %v", ifbs)
			}
			if n := r.entered(20); n != 20 {
				t.Errorf("%d of 20 packets came through", n)
			}
			if sent := testenv.Link(t, name).Attrs().Statistics.TxPackets; sent != 20 {
				t.Errorf("%d of 20 packets through the ifb", sent)
			}
			var rules []struct {
				Delayed uint64 `json:"delayed_packets"`
			}
			testenv.Must(t, json.Unmarshal([]byte(r.ok("show", "-j")), &rules))
			if len(rules) != 1 || rules[0].Delayed < 10 {
				t.Errorf("counted: %v", rules)
			}
			r.finds("ok", "va ingress queue", "the fq of "+name+" delays packets")
			s := r.explain("va", "ingress", "10.0.0.9").Hooks[0]
			var way []string
			for _, a := range s.Chain {
				way = append(way, a.At+" "+a.Name)
			}
			if want := []string{hook + " shapectl", "ifb " + name, "qdisc fq"}; !slices.Equal(way, want) || !*s.HeldBack || s.Verdict == "lost" {
				t.Errorf("explained as %q, %+v; want %q", way, s, want)
			}

			r.sh("ip link set " + name + " down")
			r.finds("failed", "va ingress queue", name+", the ifb device for delayed packets, is down: those that conform are lost: 10.0.0.0/24")
			r.sh("ip link del " + name)
			r.finds("failed", "va ingress queue", "the ifb device for delayed packets is gone: those that conform are lost: 10.0.0.0/24")
			if s := r.explain("va", "ingress", "10.0.0.9").Hooks[0]; s.Verdict != "lost" || *s.HeldBack {
				t.Errorf("without the ifb it is explained as %+v", s)
			}
			if n := r.entered(2); n != 0 {
				t.Errorf("%d packets came through without the ifb", n)
			}
			r.ok(fields("set va egress 10.9.0.0/24 --rate 1mbit")...) // any command
			if n := r.entered(2); n != 2 {
				t.Errorf("%d of 2 packets came through the ifb that was made again", n)
			}

			r.ok(fields("set va ingress 10.0.0.0/25 --rate 10mbit")...)
			r.ok(fields("delete va ingress 10.0.0.0/24")...)
			if ifbs := r.ifbs(); ifbs != nil {
				t.Errorf("left behind: %v", ifbs)
			}
			if n := r.entered(2); n != 2 {
				t.Errorf("%d of 2 packets came in", n)
			}
			r.ok(fields(entering)...)
			r.ok(fields("flush va ingress")...)
			r.ok(fields("flush va")...)
			if ifbs, pins := r.ifbs(), r.pins(); ifbs != nil || len(pins) > 0 {
				t.Errorf("left behind: %v, %v", ifbs, pins)
			}
		})
	}
}

// With a device goes its ifb; made again, it has one of its own.
func TestIfbGoesWithItsDevice(t *testing.T) {
	r := newRig(t)
	r.ok(fields(entering)...)
	first := r.ifbs()
	r.sh("ip link del va")
	if got := r.run(fields("set lo egress 10.9.0.0/24 --rate 1mbit")...); got.code != exitDone || got.err != "shapectl: removed the rules of deleted devices: va\n" { // any command
		t.Fatalf("%+v", got)
	}
	if ifbs := r.ifbs(); ifbs != nil {
		t.Errorf("left behind: %v", ifbs)
	}
	testenv.Veth(t, "va", "vb")
	r.addressed()
	r.ok(fields(entering)...)
	if ifbs := r.ifbs(); len(ifbs) != 1 || slices.Equal(ifbs, first) {
		t.Errorf("there are %v, and were %v", ifbs, first)
	}
	if n := r.entered(5); n != 5 {
		t.Errorf("%d of 5 packets came through", n)
	}
}

const (
	policyHolds = "devices: {va: {ingress: {10.0.0.0/24: {rate: 10mbit, excess: delay}}, egress: {10.0.0.0/24: {rate: 10mbit, excess: delay}}}}"
	policyDrops = "devices: {va: {ingress: {10.0.0.0/24: 10mbit}, egress: {10.0.0.0/24: 10mbit}}}"
)

// While a change can be taken back, what either side of it needs is there.
func TestApplyHoldsBack(t *testing.T) {
	r := newRig(t)
	r.addressed()
	holds, drops := r.policy(policyHolds), r.policy(policyDrops)
	through := func(why string, ifbs int) {
		t.Helper()
		if n := r.entered(5); n != 5 {
			t.Errorf("%s: %d of 5 packets came through", why, n)
		}
		if there := r.ifbs(); len(there) != ifbs {
			t.Errorf("%s: there are %v", why, there)
		}
	}
	r.refused(exitInput, "va egress: va cannot delay packets", "apply", holds)
	through("refused", 0)
	if len(r.pins()) != 0 {
		t.Errorf("refused, and left behind: %v", r.pins())
	}
	r.says(exitDone, "va: its qdisc is now fq instead of noqueue; 'shapectl flush va' brings the default back\n", "apply", "--setup-fq", holds)
	through("applied", 1)
	if out := r.ok("apply", "--setup-fq", holds); out != "nothing to change\n" {
		t.Errorf("applied again: %s", out)
	}
	r.ok("apply", drops)
	through("the rollback may need it", 1)
	r.ok("rollback")
	through("rolled back", 1)
	r.ok("apply", drops)
	r.ok(fields("set va ingress 10.9.0.0/24 --rate 1mbit")...)
	through("nothing needs it", 0)
	r.ok("apply", drops)
	r.ok("apply", holds, "--confirm", "3s")
	through("not confirmed yet", 1)
	testenv.Eventually(t, "the change to be over", func() bool { return strings.Contains(r.ok("show", "--sentences"), "excess is dropped") })
	through("not confirmed", 1)
	r.ok(fields("set va ingress 10.9.0.0/24 --rate 1mbit")...)
	through("over for good", 0)
	r.sh("tc qdisc del dev va root")
	r.refused(exitInput, "its qdisc is noqueue", "apply", holds)
	r.says(exitDone, "va: its qdisc is now fq", "apply", "--setup-fq", holds)
	r.sh("tc qdisc del dev va root")
	r.says(exitDone, "va: its qdisc is now fq", "apply", "--setup-fq", holds) // though all rules are as they are to be
	r.finds("ok", "va egress queue", "delays packets")
}

func TestWatchSetsUpFQ(t *testing.T) {
	r := newRig(t)
	file := r.policy("devices: {'tap*': {egress: {10.0.0.0/24: {rate: 10mbit, excess: delay}}}}")
	w := r.watch(file)
	testenv.Veth(t, "tap0", "xa")
	// noqueue, or noop where the device is not up yet.
	w.says("apply rules to tap0: tap0 egress: tap0 cannot delay packets: its qdisc is no")
	w.ends(unix.SIGTERM)
	w = r.watch("--setup-fq", file)
	w.says("tap0: its qdisc is now fq instead of noqueue; 'shapectl flush tap0' brings the default back\n")
	testenv.Veth(t, "tap1", "xb")
	w.says("tap1: its qdisc is now fq")
	r.sh("ip link del tap1")
	testenv.Veth(t, "tap1", "xb")
	w.says("tap1: its qdisc is now fq")
	w.ends(unix.SIGTERM)
	r.has("tap0 egress 10.0.0.0/24 10000000", "tap1 egress 10.0.0.0/24 10000000")
}

// Where something took the programs off, all rules are attached again: what any of them needs has to be there.
func TestAttachedAgainWithoutFQ(t *testing.T) {
	r := newRig(t)
	r.env["SHAPECTL_HOOK"] = "clsact"
	r.says(exitDone, "its qdisc is now fq", fields(delayed+" --setup-fq")...)
	r.sh("tc qdisc del dev va clsact && tc qdisc del dev va root")
	other := fields("set va egress 10.9.0.0/24 --rate 1mbit")
	r.refused(exitInput, "va cannot delay packets: its qdisc is noqueue", other...)
	r.says(exitDone, "its qdisc is now fq", append(other, "--setup-fq")...)
	r.has("va egress 10.0.0.0/24 10000000", "va egress 10.9.0.0/24 1000000")
}

// The next setup completes one that was killed half way.
func TestKilledHalfWay(t *testing.T) {
	r := newRig(t)
	r.sh("ip link add q0 numtxqueues 3 type ifb && ip link set q0 up")
	show := func() string { return r.sh("tc -d qdisc show dev q0 | grep -v clsact || true") }
	set := fields(strings.Replace(delayed, "va", "q0", 1) + " --setup-fq")
	before := show()
	r.says(exitDone, "q0: its qdisc is now fq", set...)
	with := show()
	r.sh("tc qdisc del dev q0 root && tc qdisc add dev q0 root handle 5ac0: mq && " +
		"tc qdisc add dev q0 parent 5ac0:1 handle 5ac1: fq limit 1048576 flow_limit 131072 orphan_mask 262143 horizon 10s")
	r.finds("failed", "q0 egress queue", "and q0 has mq")
	r.ok(set...)
	if now := show(); now != with {
		t.Errorf("set up again it is %s, and was %s", now, with)
	}
	r.says(exitDone, "q0: its qdisc is the default again", fields("flush q0")...)
	if now := show(); now != before {
		t.Errorf("was %s, is %s", before, now)
	}
}

// What would be lost is not begun.
func TestIngressOnOldKernel(t *testing.T) {
	r := newRig(t)
	r.refused(exitMissing, "this kernel drops packets that a program redirects to an ifb device", fields(entering)...)
	r.refused(exitMissing, "va ingress: this kernel drops packets", "apply", "--setup-fq", r.policy(policyHolds))
	if ifbs, pins := r.ifbs(), r.pins(); ifbs != nil || len(pins) > 0 {
		t.Errorf("left behind: %v, %v", ifbs, pins)
	}
}

func TestNoHeaderNoIfb(t *testing.T) {
	r := newRig(t)
	testenv.AddLink(t, &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "t0"}, Mode: netlink.TUNTAP_MODE_TUN, Queues: 1, Flags: netlink.TUNTAP_DEFAULTS})
	r.refused(exitInput, "without an Ethernet header, arriving packets cannot be delayed", fields(strings.Replace(entering, "va", "t0", 1))...)
	r.says(exitDone, "its qdisc is now fq", fields(strings.Replace(delayed, "va", "t0", 1)+" --setup-fq")...)
	if ifbs := r.ifbs(); ifbs != nil {
		t.Errorf("there are %v", ifbs)
	}
}
