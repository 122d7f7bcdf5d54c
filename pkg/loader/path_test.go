package loader

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netinfo"
	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// path lists what packets pass on a device, with "*" before our programs.
func (r *rig) path(device string, d policy.Direction) (names []string) {
	r.t.Helper()
	n, err := Read(r.options)
	testenv.Must(r.t, err)
	defer n.Close()
	dev, err := netinfo.DeviceByName(device)
	testenv.Must(r.t, err)
	ours, err := n.Programs(dev.Index, d)
	testenv.Must(r.t, err)
	path, err := netinfo.Path(dev, d, ours)
	testenv.Must(r.t, err)
	for _, e := range path {
		name := e.At + " " + e.Name
		if e.Ours {
			name = "*" + name
		}
		names = append(names, name)
		if program := e.At != "netfilter" && e.At != "qdisc"; program != (e.ID != 0) {
			r.t.Errorf("%s has the program %d", name, e.ID)
		}
	}
	return names
}

// The order is the kernel's, in both directions and with both kinds of hook.
func TestPathIsInOrder(t *testing.T) {
	xdp := func(t *testing.T) {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: "early", Type: ebpf.XDP, License: "MIT", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2 /* XDP_PASS */), asm.Return()},
		})
		testenv.Must(t, err)
		t.Cleanup(func() { p.Close() })
		l, err := link.AttachXDP(link.XDPOptions{Program: p, Interface: testenv.Link(t, "va").Attrs().Index, Flags: link.XDPGenericMode})
		testenv.Must(t, err)
		t.Cleanup(func() { l.Close() })
	}
	chains := []nftChain{
		{unix.NFPROTO_NETDEV, "late", unix.NF_NETDEV_EGRESS, 10, []string{"va"}},
		{unix.NFPROTO_NETDEV, "out", unix.NF_NETDEV_EGRESS, -10, []string{"va", "vb"}},
		{unix.NFPROTO_NETDEV, "in", unix.NF_NETDEV_INGRESS, 0, []string{"va"}},
		{unix.NFPROTO_INET, "first", inetIngress, -5, []string{"va"}},
		{unix.NFPROTO_INET, "other", inetIngress, -5, []string{"vb"}},
	}
	for _, test := range []struct {
		mode Mode
		d    policy.Direction
		want []string
	}{
		{TCX, policy.Egress, []string{
			"netfilter chain netdev t out (priority -10)", "netfilter chain netdev t late (priority 10)",
			"tcx foreign", "*tcx shapectl", "clsact foreign", "qdisc htb",
		}},
		{Clsact, policy.Egress, []string{
			"netfilter chain netdev t out (priority -10)", "netfilter chain netdev t late (priority 10)",
			"tcx foreign", "*clsact shapectl", "clsact foreign", "qdisc htb",
		}},
		{TCX, policy.Ingress, []string{
			"xdp early, generic", "tcx foreign", "*tcx shapectl", "clsact foreign",
			"netfilter chain inet t first (priority -5)", "netfilter chain netdev t in (priority 0)",
		}},
		{Clsact, policy.Ingress, []string{
			"xdp early, generic", "tcx foreign", "*clsact shapectl", "clsact foreign",
			"netfilter chain inet t first (priority -5)", "netfilter chain netdev t in (priority 0)",
		}},
	} {
		t.Run(string(test.mode)+" "+test.d.String(), func(t *testing.T) {
			r := newRig(t, test.mode, test.d)
			r.put(rule("10.0.0.0/24"), rule("10.0.1.0/24", leaky))
			attachForeign(t, "va", test.d, link.Head())
			xdp(t)
			index := testenv.Link(t, "va").Attrs().Index
			testenv.Must(t, netlink.QdiscAdd(netlink.NewHtb(netlink.QdiscAttrs{
				LinkIndex: index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0),
			})))
			addChains(t, chains)
			got := r.path("va", test.d)
			if !slices.Equal(got, test.want) {
				t.Errorf("it is\n%q, want\n%q", got, test.want)
			}
		})
	}
}

// An nftChain is a chain in the table t.
type nftChain struct {
	family   uint8
	name     string
	hook     uint32
	priority int32
	devices  []string
}

const nftTable = "t"

// From linux/netfilter.h and nf_tables.h.
const (
	inetIngress = 5 // NF_INET_INGRESS
	hookDevices = 4 // NFTA_HOOK_DEVS
)

// addChains makes chains, with their tables, in one transaction.
func addChains(t *testing.T, chains []nftChain) {
	t.Helper()
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	testenv.Must(t, err)
	defer socket.Close()
	var batch []byte
	add := func(kind int, flags int, family uint8, resource uint16, attributes ...*nl.RtAttr) {
		r := nl.NewNetlinkRequest(kind, flags)
		r.AddData(&nl.Nfgenmsg{NfgenFamily: family, ResId: resource})
		for _, a := range attributes {
			r.AddData(a)
		}
		batch = append(batch, r.Serialize()...)
	}
	name := func(kind int, s string) *nl.RtAttr { return nl.NewRtAttr(kind, nl.ZeroTerminated(s)) }
	number := func(kind int, n uint32) *nl.RtAttr {
		return nl.NewRtAttr(kind, binary.BigEndian.AppendUint32(nil, n))
	}
	const nft = unix.NFNL_SUBSYS_NFTABLES << 8
	subsystem := binary.NativeEndian.Uint16([]byte{0, unix.NFNL_SUBSYS_NFTABLES})
	add(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, subsystem)
	for _, family := range []uint8{unix.NFPROTO_INET, unix.NFPROTO_NETDEV} {
		add(nft|unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, family, 0, name(unix.NFTA_TABLE_NAME, nftTable))
	}
	for _, c := range chains {
		hook := nl.NewRtAttr(unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, nil)
		hook.AddChild(number(unix.NFTA_HOOK_HOOKNUM, c.hook))
		hook.AddChild(number(unix.NFTA_HOOK_PRIORITY, uint32(c.priority)))
		devices := hook.AddRtAttr(hookDevices|unix.NLA_F_NESTED, nil)
		for _, d := range c.devices {
			const deviceName = 1 // NFTA_DEVICE_NAME
			devices.AddChild(name(deviceName, d))
		}
		add(nft|unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE|unix.NLM_F_ACK, c.family, 0,
			name(unix.NFTA_CHAIN_TABLE, nftTable), name(unix.NFTA_CHAIN_NAME, c.name), hook, name(unix.NFTA_CHAIN_TYPE, "filter"))
	}
	add(unix.NFNL_MSG_BATCH_END, 0, 0, subsystem)
	testenv.Must(t, unix.Sendto(socket.GetFd(), batch, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	for range chains {
		messages, _, err := socket.Receive()
		testenv.Must(t, err)
		for _, m := range messages {
			errno := unix.Errno(-int32(binary.NativeEndian.Uint32(m.Data)))
			if errors.Is(errno, unix.EINVAL) || errors.Is(errno, unix.EOPNOTSUPP) {
				testenv.Skip(t, "the kernel has no nftables, or no such hooks")
			}
			if m.Header.Type != unix.NLMSG_ERROR || errno != 0 {
				t.Fatalf("make chains: message %d, %v", m.Header.Type, errno)
			}
		}
	}
}
