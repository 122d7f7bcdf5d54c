package main

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/policyfile"
	"github.com/shapectl/shapectl/internal/report"
	"github.com/shapectl/shapectl/internal/testenv"
)

// tabletMAC is that of the tablet.
const tabletMAC = "3c:22:fb:12:34:56"

// A home is a rig whose device va is a router's, with a tablet behind it in another network namespace.
type home struct {
	*rig
	tablet *testenv.Netns
}

func newHome(r *rig) *home {
	t := r.t
	_, other := testenv.NewNamedNetns(t)
	h := &home{r, other}
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "vb"), other.FD()))
	h.enable("va")
	for _, a := range []string{"192.168.1.1/24", "2001:db8::1/64"} {
		testenv.Must(t, address("va", a))
	}
	testenv.Must(t, other.Do(func() error {
		mac, err := net.ParseMAC(tabletMAC)
		if err != nil {
			return err
		}
		vb, err := netlink.LinkByName("vb")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetHardwareAddr(vb, mac); err != nil {
			return err
		}
		h.enable("vb")
		return netlink.LinkSetUp(vb)
	}))
	testenv.WaitUp(t, "va")
	return h
}

// enable lets a device have IPv6 addresses.
func (h *home) enable(device string) {
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+device+"/disable_ipv6", []byte("0"), 0); err != nil {
		h.t.Error(err)
	}
}

// gets gives the tablet an address, and lets the router talk to it.
func (h *home) gets(cidr string) {
	h.t.Helper()
	testenv.Must(h.t, h.tablet.Do(func() error { return address("vb", cidr) }))
	ip, _, _ := strings.Cut(cidr, "/")
	h.talk(ip, 1)
	index := testenv.Link(h.t, "va").Attrs().Index
	testenv.Eventually(h.t, "the router to know "+ip, func() bool {
		all, err := netlink.NeighList(index, netlink.FAMILY_ALL)
		return err == nil && slices.ContainsFunc(all, func(n netlink.Neigh) bool { return n.IP.Equal(net.ParseIP(ip)) && n.HardwareAddr != nil })
	})
}

// loses removes an address from the tablet, and from the router's table.
func (h *home) loses(cidr string) {
	h.t.Helper()
	address, err := netlink.ParseAddr(cidr)
	testenv.Must(h.t, err)
	testenv.Must(h.t, h.tablet.Do(func() error {
		vb, err := netlink.LinkByName("vb")
		if err != nil {
			return err
		}
		return netlink.AddrDel(vb, address)
	}))
	h.forgets("va", address.IP.String())
}

// forgets removes an address from the router's table.
func (h *home) forgets(device, address string) {
	h.t.Helper()
	testenv.Must(h.t, netlink.NeighDel(&netlink.Neigh{LinkIndex: testenv.Link(h.t, device).Attrs().Index, IP: net.ParseIP(address)}))
}

// talk sends packets from the router to an address of the tablet.
func (h *home) talk(to string, packets int) {
	h.t.Helper()
	c, err := net.Dial("udp", net.JoinHostPort(to, "9"))
	testenv.Must(h.t, err)
	defer c.Close()
	for range packets {
		c.Write(make([]byte, 1200)) // refused, as nobody listens, or dropped
	}
}

// rules are the rules of hosts, and pools.
func (h *home) rules() string {
	h.t.Helper()
	var all []string
	for _, row := range h.show() {
		says := names([]shownRule{row})
		if row.Kind != report.KindPool {
			says += fmt.Sprintf(" of %s in %s", row.Name, cmp.Or(row.Within, "none"))
		}
		all = append(all, says)
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

// A host that makes up addresses has a bounded number of rules, and those that it has stay. One line says how many came.
func TestWatchHostWithManyAddresses(t *testing.T) {
	t.Parallel()
	h := newHome(newRig(t))
	h.gets("192.168.1.7/24")
	file := h.policy("devices: {va: {egress: {3c:22:fb:12:34:56: {rate: 1mbit, name: tablet}}}}\n")
	h.ok("apply", file)
	w := h.watch(file)
	mac, err := net.ParseMAC(tabletMAC)
	testenv.Must(t, err)
	const made = policyfile.MaxAddresses + 10
	index := testenv.Link(t, "va").Attrs().Index
	for i := range made {
		testenv.Must(t, netlink.NeighSet(&netlink.Neigh{
			LinkIndex: index, State: netlink.NUD_PERMANENT, IP: net.IPv4(10, 0, byte(i>>8), byte(i)), HardwareAddr: mac,
		}))
	}
	w.says("va egress: tablet (3c:22:fb:12:34:56) has ")
	testenv.Eventually(t, "as many rules as there may be", func() bool { return len(h.show()) == policyfile.MaxAddresses+1 })
	if len(h.show("va", "egress", "192.168.1.7")) == 0 {
		t.Error("the address that had a rule has none")
	}
	h.forgets("va", "192.168.1.7")
	w.says("va: removed 192.168.1.7 of tablet")
	got := w.ends(syscall.SIGTERM)
	if lines := strings.Count(got.err, "\n"); lines > 100 || strings.Count(got.err, fmt.Sprintf("and only %d ", policyfile.MaxAddresses)) != 1 {
		t.Errorf("%d lines: %s", lines, got.err)
	}
	t.Logf("serve used %v", w.cmd.ProcessState.UserTime()+w.cmd.ProcessState.SystemTime())
}
