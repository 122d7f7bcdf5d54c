package main

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A tcpRig has addresses on both ends of a pair of devices: va, and vb in a namespace of its own.
type tcpRig struct {
	*rig
	here, there *testenv.Netns
	thereName   string
}

func newTCPRig(t *testing.T) *tcpRig {
	t.Helper()
	if testenv.OlderThan(t, 6, 6) {
		t.Skip("this kernel has no tcx")
	}
	here := testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	name, there := testenv.NewNamedNetns(t)
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "vb"), there.FD()))
	up := func(device, cidr string) error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(l), address(device, cidr))
	}
	testenv.Must(t, up("va", "10.0.0.1/24"))
	testenv.Must(t, there.Do(func() error { return up("vb", "10.0.0.2/24") }))
	testenv.WaitUp(t, "va")
	return &tcpRig{&rig{t, map[string]string{"SHAPECTL_BPFFS": testenv.BPFFS(t)}}, here, there, name}
}

// upload sends 33 Mbit/s by TCP from va to vb until the test ends, or what the limit lets through.
func (r *tcpRig) upload() {
	r.t.Helper()
	var l net.Listener
	testenv.Must(r.t, r.there.Do(func() (err error) {
		l, err = net.Listen("tcp4", "10.0.0.2:5001")
		return err
	}))
	go func() {
		if c, err := l.Accept(); err == nil {
			io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	c, err := net.DialTCP("tcp4", nil, net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.2:5001")))
	testenv.Must(r.t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(4 * time.Millisecond)
		defer tick.Stop()
		for data := make([]byte, 16<<10); ; <-tick.C {
			if _, err := c.Write(data); err != nil {
				return
			}
		}
	}()
	r.t.Cleanup(func() {
		c.SetLinger(0)
		c.Close()
		l.Close()
		<-done
	})
}

func (r *tcpRig) rtt(args ...string) (out report.RTTs) {
	r.t.Helper()
	testenv.Must(r.t, json.Unmarshal([]byte(r.ok(append([]string{"top", "--rtt", "--once", "-j"}, args...)...)), &out))
	return out
}

// programs are those on va.
func (r *tcpRig) programs() (all []ebpf.ProgramID) {
	r.t.Helper()
	va, err := netinfo.DeviceByName("va")
	testenv.Must(r.t, err)
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		ids, err := netinfo.TCXPrograms(va.Index, d)
		testenv.Must(r.t, err)
		all = append(all, ids...)
	}
	return all
}

// Real traffic under a limit has round trips and retransmissions, and nothing is left on the device.
func TestRTT(t *testing.T) {
	r := newTCPRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit", "--capacity", "100kb")
	r.ok("set", "va", "egress", "10.9.0.0/24", "--rate", "20mbit")
	r.upload()
	var got report.RTTs
	testenv.Eventually(t, "round trips while limited", func() bool {
		got = r.rtt("--interval", "1s")
		return len(got.Rules) == 1 && got.Rules[0].Limited.Receiver.Samples > 0
	})
	rule := got.Rules[0]
	if rule.CIDR != "10.0.0.0/24" || rule.Limited.RetransmittedPackets == 0 || *rule.Limited.Receiver.MinNS == 0 {
		t.Errorf("measured %+v", rule)
	}
	if len(rule.Hosts) != 1 || rule.Hosts[0].Host != "10.0.0.2" || rule.Hosts[0].Limited.Receiver.Samples == 0 {
		t.Errorf("the hosts are %+v", rule.Hosts)
	}
	if left := r.programs(); len(left) != 1 {
		t.Errorf("programs %v are on the device, want only that of shapectl", left)
	}
	testenv.Eventually(t, "a line for the rule and one for its host", func() bool {
		lines := strings.Split(r.ok("top", "10.0.0.2", "--rtt", "--once", "--interval", "500ms"), "\n")
		return len(lines) == 4 && strings.HasPrefix(lines[2], "va egress  10.0.0.0/24  10.0.0.2")
	})
}

// Hosts and flows are measured by what they send, and nothing is left on the device.
func TestTalkers(t *testing.T) {
	t.Parallel()
	r := newTCPRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--name", "alice", "--rate", "20mbit", "--capacity", "100kb")
	r.ok("set", "va", "egress", "10.0.0.0/16", "--rate", "1gbit")
	r.upload()
	talkers := func(args ...string) (out report.Talkers) {
		testenv.Must(t, json.Unmarshal([]byte(r.ok(append([]string{"top", "--once", "-j", "--interval", "500ms"}, args...)...)), &out))
		return out
	}
	testenv.Eventually(t, "the host that sends", func() bool {
		got := talkers("alice", "--by", "host").Rules
		return len(got) == 1 && got[0].Name == "alice" && len(got[0].Talkers) == 1 && got[0].Talkers[0].Key == "10.0.0.2" &&
			*got[0].Talkers[0].PassedBits > 0 && *got[0].Talkers[0].OfferedBits >= *got[0].Talkers[0].PassedBits
	})
	testenv.Eventually(t, "its flow, in the rule that decides", func() bool {
		got := talkers("10.0.0.2", "egress", "--by", "flow").Rules
		return len(got) == 1 && got[0].CIDR == "10.0.0.0/24" && got[0].Host == "10.0.0.2" && len(got[0].Talkers) == 1 && strings.HasSuffix(got[0].Talkers[0].Key, ",10.0.0.2:5001")
	})
	for _, one := range talkers("va", "--by", "host").Rules {
		if one.CIDR == "10.0.0.0/16" && len(one.Talkers) > 0 {
			t.Errorf("packets count for the rule around theirs: %+v", one)
		}
	}
	if got := talkers("alice", "--by", "flow").Rules; len(got) != 1 || len(got[0].Talkers) != 1 || !strings.HasSuffix(got[0].Talkers[0].Key, ",10.0.0.2:5001") {
		t.Errorf("the flows of all hosts are %+v", got)
	}
	if got := r.ok("top", "alice", "--by", "host", "--once"); !strings.HasPrefix(got, "alice (va egress 10.0.0.0/24): ") || !strings.Contains(got, "10.0.0.2 ") {
		t.Errorf("prints %q", got)
	}
	if left := r.programs(); len(left) != 1 {
		t.Errorf("programs %v are on the device, want only that of shapectl", left)
	}
	r.refused(exitInput, "--top 0 shows nothing", "top", "--once", "alice", "--by", "host", "--top", "0")
	r.refused(exitInput, "top: ", "top", "--once", "nobody", "--by", "host")
	r.ok("set", "town", "--new", "--rate", "1gbit")
	r.refused(exitInput, "town is a pool", "top", "--once", "town", "--by", "host")
	for i := range mostCounted {
		r.ok("set", "va", "egress", "10.1."+strconv.Itoa(i)+".0/24", "--rate", "1mbit")
	}
	r.refused(exitInput, "12 rules match; name at most 10", "top", "--once", "va", "--by", "host")
}

// The kernel detaches what a killed process has left.
func TestRTTKilled(t *testing.T) {
	r := newTCPRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit")
	cmd := r.command("top", "--rtt", "--once", "--interval", "1h")
	testenv.Must(t, cmd.Start())
	testenv.Eventually(t, "programs before and behind", func() bool { return len(r.programs()) == 5 })
	found, _ := r.findings()
	for _, f := range found {
		if f.Check == "chain" && f.Status != report.OK {
			t.Errorf("doctor says of programs that only look: %+v", f)
		}
	}
	testenv.Must(t, cmd.Process.Kill())
	cmd.Wait()
	testenv.Eventually(t, "their end", func() bool { return len(r.programs()) == 1 })
}

func TestRTTWithoutTraffic(t *testing.T) {
	r := newTCPRig(t)
	r.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "20mbit")
	if out := r.ok("top", "--rtt", "--once", "--interval", "20ms"); out != "no TCP packets with payload\n" {
		t.Errorf("prints %q", out)
	}
	r.refused(exitInput, "use a power of two", "top", "--once", "--rtt", "--one-in", "3")
	r.refused(exitInput, "--one-in needs --rtt", "top", "--once", "--one-in", "2")
	r.refused(exitInput, "leave --by", "top", "--once", "--rtt", "--by", "host")
	r.refused(exitInput, "top: ", "top", "--once", "--rtt", "nowhere")
	r.refused(exitInput, "out of range", "top", "--once", "--rtt", "--interval", "1us")
	if out := r.ok("top", "--rtt", "--once", "-j", "--interval", "20ms", "va", "ingress"); !strings.Contains(out, `"rules": []`) {
		t.Errorf("without a rule: %s", out)
	}
}
