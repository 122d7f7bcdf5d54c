package main

import (
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

const tabletMAC = "3c:22:fb:12:34:56"

// A home is a rig whose device va is a router's, with a tablet behind it in another network namespace.
type home struct {
	*rig
	tablet *testenv.Netns
}

func newHome(t *testing.T) *home {
	t.Parallel()
	r := newRig(t)
	_, other := testenv.NewNamedNetns(t)
	h := &home{r, other}
	testenv.Must(t, netlink.LinkSetNsFd(testenv.Link(t, "vb"), other.FD()))
	h.enable("va")
	for _, a := range []string{"192.168.1.1/24", "2001:db8::1/64"} {
		h.address("va", a)
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

func (h *home) address(device, cidr string) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		h.t.Error(err)
		return
	}
	address, err := netlink.ParseAddr(cidr)
	if err != nil {
		h.t.Error(err)
		return
	}
	address.Flags = 0x2 // IFA_F_NODAD, so that it can be used at once
	if err := netlink.AddrAdd(link, address); err != nil {
		h.t.Error(err)
	}
}

// gets gives the tablet an address, and lets the router talk to it.
func (h *home) gets(cidr string) {
	h.t.Helper()
	testenv.Must(h.t, h.tablet.Do(func() error {
		h.address("vb", cidr)
		return nil
	}))
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

// has ends the test unless these are the rules and pools there are.
func (h *home) has(want ...string) {
	h.t.Helper()
	var all []string
	for _, row := range h.rows("show") {
		says := names([]shownRule{row})
		if row.Kind != report.KindPool {
			says += fmt.Sprintf(" of %s in %s", row.Name, row.Within)
		}
		all = append(all, says)
	}
	slices.Sort(all)
	slices.Sort(want)
	if !slices.Equal(all, want) {
		h.t.Fatalf("there are\n%s\nand ought to be\n%s", strings.Join(all, "\n"), strings.Join(want, "\n"))
	}
}

func (h *home) dropped(pool string) (packets uint64) {
	h.t.Helper()
	for _, row := range h.rows("show") {
		if row.Kind == report.KindPool && row.Name == pool {
			return row.DroppedPackets
		}
	}
	h.t.Fatalf("there is no pool %s", pool)
	return 0
}

const tabletLimit = `devices:
  v*:
    egress: {3C-22-FB-12-34-56: {rate: 100kbit, name: tablet, overhead: 4}}
    ingress: {3C-22-FB-12-34-56: {rate: 50kbit, name: tablet}}
`

// serve follows the addresses of a host, which stays limited as it changes them.
func TestWatchFollowsHost(t *testing.T) {
	h := newHome(t)
	file := h.policy(tabletLimit)
	h.unseen(file)
	h.has("pool va egress tablet", "pool va ingress tablet")
	w := h.watch(file)
	h.gets("192.168.1.7/24")
	w.says("va: added 192.168.1.7 of tablet (3c:22:fb:12:34:56), egress and ingress")
	h.gets("2001:db8::7/64")
	w.says("va: added 2001:db8::7 of tablet (3c:22:fb:12:34:56), egress and ingress")
	h.has("pool va egress tablet", "pool va ingress tablet",
		"va egress 192.168.1.7/32 of tablet in va egress tablet", "va egress 2001:db8::7/128 of tablet in va egress tablet",
		"va ingress 192.168.1.7/32 of tablet in va ingress tablet", "va ingress 2001:db8::7/128 of tablet in va ingress tablet")
	h.talk("192.168.1.7", 200)
	before := h.dropped("va egress tablet")
	if before == 0 {
		t.Error("the host is not limited")
	}

	h.gets("2001:db8::8/64") // as with privacy addresses
	w.says("va: added 2001:db8::8 of tablet")
	h.loses("2001:db8::7/64")
	w.says("va: removed 2001:db8::7 of tablet (3c:22:fb:12:34:56), egress and ingress")
	h.has("pool va egress tablet", "pool va ingress tablet",
		"va egress 192.168.1.7/32 of tablet in va egress tablet", "va egress 2001:db8::8/128 of tablet in va egress tablet",
		"va ingress 192.168.1.7/32 of tablet in va ingress tablet", "va ingress 2001:db8::8/128 of tablet in va ingress tablet")
	h.talk("2001:db8::8", 200)
	if after := h.dropped("va egress tablet"); after < before+100 {
		t.Errorf("with its new address, the pool dropped %d more of 200 packets", after-before)
	}
	if got := h.run("diff", file); got.code != exitDone {
		t.Errorf("diff: %+v", got)
	}
	w.ends(syscall.SIGTERM)
}

// A host stays one, whatever note a person gives it: its rule goes with its address.
func TestNoteOfHost(t *testing.T) {
	h := newHome(t)
	h.gets("192.168.1.7/24")
	file := h.policy(tabletLimit)
	h.ok("apply", file)
	h.ok("set", "tablet", "--note", "of Ann")
	for _, r := range h.rows("show", "va", "egress") {
		if r.Host != tabletMAC || r.Note != "of Ann" {
			t.Errorf("the note is %q", r.Note)
		}
	}
	w := h.watch(file)
	h.loses("192.168.1.7/24")
	w.says("va: removed 192.168.1.7 of tablet")
	w.ends(syscall.SIGTERM)
}

// unseen applies a policy, which tells once that hosts are not limited.
func (h *home) unseen(file string, flags ...string) string {
	h.t.Helper()
	got := h.run(append([]string{"apply", file}, flags...)...)
	if got.code != exitDone || !strings.HasPrefix(got.err, "no address is known of ") || !strings.Contains(got.err, " on va: not limited until ") || strings.Count(got.err, "\n") != 1 {
		h.t.Errorf("apply: %+v", got)
	}
	return got.out
}

// doctor tells of a host without a known address, and does not advise to delete its pool.
func TestDoctorOfUnknownHost(t *testing.T) {
	h := newHome(t)
	h.unseen(h.policy(tabletLimit))
	got := h.run("doctor")
	if !strings.Contains(bare(got.out), "no address of tablet (3c:22:fb:12:34:56) has a rule, so it is not limited") || strings.Contains(got.out, "pool delete") {
		t.Errorf("%+v", got)
	}
}

// doctor tells of addresses of a host that have no rules, as no serve follows it.
func TestDoctorOfHost(t *testing.T) {
	h := newHome(t)
	file := h.policy(tabletLimit)
	h.unseen(file)
	lacks := func(address string) {
		t.Helper()
		const text = "tablet (3c:22:fb:12:34:56) has no rule for its address "
		if got := h.warnings("hosts"); !slices.Equal(got, []string{"va ingress " + text + address, "va egress " + text + address}) {
			t.Errorf("doctor says %q", got)
		}
	}
	h.gets("192.168.1.7/24")
	lacks("192.168.1.7")
	h.ok("apply", file)
	if got := h.warnings("hosts"); len(got) != 0 {
		t.Errorf("with rules of the address: %q", got)
	}
	h.gets("2001:db8::7/64")
	lacks("2001:db8::7")
	w := h.watch(file)
	testenv.Eventually(t, "rules of the address", func() bool { return len(h.warnings("hosts")) == 0 })
	w.ends(syscall.SIGTERM)
}

// A device that appears has the pools of hosts, and those above, before these have addresses, and the rules as it appears.
func TestWatchHostsOfNewDevice(t *testing.T) {
	h := newHome(t)
	h.gets("192.168.1.7/24")
	w := h.watch(h.policy("pools: {kids: 1mbit}\n" + strings.Replace(tabletLimit, "overhead: 4", "within: kids", 1)))
	h.has("pool kids", "pool va egress tablet", "pool va ingress tablet",
		"va egress 192.168.1.7/32 of tablet in va egress tablet", "va ingress 192.168.1.7/32 of tablet in va ingress tablet")
	rename(t, "va", "other")
	h.ok("flush", "--all")
	h.forgets("other", "192.168.1.7")
	rename(t, "other", "va")
	testenv.Eventually(t, "the pools", func() bool { return len(h.rows("show")) == 3 })
	h.has("pool kids", "pool va egress tablet", "pool va ingress tablet")
	h.remove("va")
	testenv.Eventually(t, "the pools to go with the device", func() bool { return len(h.rows("show")) == 1 })
	w.ends(syscall.SIGTERM)
}

// Where another command deletes the rules of a direction, serve adds none for its hosts.
func TestFlushedHost(t *testing.T) {
	h := newHome(t)
	h.gets("192.168.1.7/24")
	file := h.policy(tabletLimit)
	w := h.watch(file)
	if got := h.run("flush", "va", "egress"); got.code != exitDone || got.err != "" {
		t.Errorf("flush: %+v", got)
	}
	h.gets("192.168.1.8/24")
	w.says("va: added 192.168.1.8 of tablet (3c:22:fb:12:34:56), ingress")
	h.ok("set", "va", "ingress", "192.168.1.8", "--rate", "1mbit", "--within", "none") // that is a person's now
	h.loses("192.168.1.8/24")
	h.gets("192.168.1.10/24")
	w.says("va: added 192.168.1.10 of tablet")
	h.has("pool va ingress tablet", "va ingress 192.168.1.7/32 of tablet in va ingress tablet", "va ingress 192.168.1.8/32 of tablet in ", "va ingress 192.168.1.10/32 of tablet in va ingress tablet")
	h.ok("apply", file)
	h.gets("192.168.1.9/24")
	w.says("va: added 192.168.1.9 of tablet (3c:22:fb:12:34:56), egress and ingress")
	if got := w.ends(syscall.SIGTERM); strings.Contains(got.err, "apply rules") {
		t.Error(got.err)
	}
}

// In a direction that has rules already, serve makes no pool of a host, and so none of its rules.
func TestWatchLeavesDirectionOfHost(t *testing.T) {
	h := newHome(t)
	h.ok("set", "va", "egress", "10.0.0.0/24", "--rate", "1mbit")
	w := h.watch(h.policy(tabletLimit))
	h.gets("192.168.1.7/24")
	w.says("va: added 192.168.1.7 of tablet (3c:22:fb:12:34:56), ingress")
	h.has("pool va ingress tablet", "va egress 10.0.0.0/24 of  in ", "va ingress 192.168.1.7/32 of tablet in va ingress tablet")
	w.ends(syscall.SIGTERM)
}

// The pools of a host go with its rules, so that nothing of it is left to export or to serve. The device's own pools go with it.
func TestDeleteHost(t *testing.T) {
	h := newHome(t)
	h.gets("192.168.1.7/24")
	file := h.policy(strings.Replace(tabletLimit, "    egress:", "    pool: 1mbit\n    egress:", 1) + "pools: {up: 1mbit}\n")
	h.ok("apply", file)
	before := h.ok("export")
	h.ok("delete", "tablet", "ingress")
	h.has("pool up", "pool va", "pool va egress tablet", "va egress 192.168.1.7/32 of tablet in va egress tablet")
	h.ok("delete", "tablet", "--confirm", "1h")
	h.has("pool up")
	h.ok("rollback")
	h.ok("delete", "va", "egress", "192.168.1.7")
	h.has("pool up", "pool va", "pool va egress tablet")
	h.ok("delete", "tablet") // which has no rule
	h.has("pool up")
	if after := h.ok("export"); strings.Contains(after, "tablet") {
		t.Errorf("deleted from\n%s\nthere is\n%s", before, after)
	}
}

// A host that makes up addresses has a bounded number of rules, and those that it has stay. One line says how many came.
func TestWatchHostWithManyAddresses(t *testing.T) {
	h := newHome(t)
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
	testenv.Eventually(t, "as many rules as there may be", func() bool { return len(h.rows("show")) == policyfile.MaxAddresses+1 })
	if len(h.rows("show", "va", "egress", "192.168.1.7")) == 0 {
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

// Two hosts within one pool have no pool of their own. Their rules are added while there is the pool, also after all
// addresses have gone, but not where another command deleted the rules of the direction.
func TestWatchHostsWithinPool(t *testing.T) {
	h := newHome(t)
	file := h.policy(`pools: {kids: 100kbit}
devices:
  va:
    egress: {3c:22:fb:12:34:56: {within: kids}}
    ingress: {3c:22:fb:12:34:56: unlimited}
`)
	h.unseen(file)
	w := h.watch(file)
	h.gets("192.168.1.7/24")
	w.says("va: added 192.168.1.7 of 3c:22:fb:12:34:56, egress and ingress")
	h.has("pool kids", "va egress 192.168.1.7/32 of 3c:22:fb:12:34:56 in kids", "va ingress 192.168.1.7/32 of 3c:22:fb:12:34:56 in ")
	h.loses("192.168.1.7/24")
	w.says("va: removed 192.168.1.7 of 3c:22:fb:12:34:56, egress and ingress")
	h.gets("192.168.1.8/24")
	w.says("va: added 192.168.1.8 of 3c:22:fb:12:34:56, egress and ingress")
	h.run("flush", "va", "egress")
	h.gets("192.168.1.9/24")
	w.says("va: added 192.168.1.9 of 3c:22:fb:12:34:56, ingress")
	w.ends(syscall.SIGTERM)
}

// While a change is pending, the rules of hosts stay as they are.
func TestWatchHostsWhilePending(t *testing.T) {
	h := newHome(t)
	file := h.policy(tabletLimit)
	h.unseen(file)
	w := h.watch(file)
	h.ok("set", "other", "--new", "--rate", "1mbit", "--confirm", "1h")
	h.gets("192.168.1.7/24")
	w.says("serve: cannot follow the addresses of hosts yet: the last change is not confirmed yet")
	h.ok("confirm")
	w.says("va: added 192.168.1.7 of tablet (3c:22:fb:12:34:56), egress and ingress")
	w.ends(syscall.SIGTERM)
}

// Rules that a person has set stay, and the policy is as it was after export and apply.
func TestExportHosts(t *testing.T) {
	h := newHome(t)
	h.gets("192.168.1.7/24")
	h.gets("2001:db8::7/64")
	h.unseen(h.policy(`pools: {up: 1mbit}
devices:
  va:
    egress:
      192.168.1.0/24: 1mbit
      3c:22:fb:12:34:56: {rate: 100kbit, name: tablet, overhead: 4, share: flow, within: up, note: "Anna's"}
      3c:22:fb:00:00:01: {rate: 200kbit, note: not here}
    ingress: {3c:22:fb:12:34:56: unlimited}
`))
	exported := h.ok("export")
	want := `pools:
  up: 1mbit
devices:
  va:
    egress:
      192.168.1.0/24: 1mbit
      3c:22:fb:00:00:01: {rate: 200kbit, note: not here}
      3c:22:fb:12:34:56: {rate: 100kbit, overhead: 4, within: up, share: flow, name: tablet, note: "Anna's"}
    ingress:
      3c:22:fb:12:34:56: unlimited
`
	if exported != want {
		t.Errorf("exported\n%s\nand ought to be\n%s", exported, want)
	}
	if got := h.unseen(h.policy(exported)); got != "nothing to change\n" {
		t.Error(got)
	}
}

// A MAC address is no network in a command line.
func TestSetMAC(t *testing.T) {
	r := newRig(t)
	r.refused(exitInput, "is a MAC address; a policy can limit a host by it", "set", "va", "egress", tabletMAC, "--rate", "1mbit")
}
