package netinfo

import (
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A chain may match all devices with a common prefix of their names.
func TestChainOn(t *testing.T) {
	for _, test := range []struct {
		chain netfilterChain
		d     policy.Direction
		want  bool
	}{
		{netfilterChain{family: unix.NFPROTO_NETDEV, hook: unix.NF_NETDEV_INGRESS, devices: []string{"vb", "va"}}, policy.Ingress, true},
		{netfilterChain{family: unix.NFPROTO_NETDEV, hook: unix.NF_NETDEV_INGRESS, devices: []string{"va"}}, policy.Egress, false},
		{netfilterChain{family: unix.NFPROTO_NETDEV, hook: unix.NF_NETDEV_EGRESS, devices: []string{"va"}}, policy.Ingress, false},
		{netfilterChain{family: unix.NFPROTO_NETDEV, hook: unix.NF_NETDEV_EGRESS, devices: []string{"va0"}}, policy.Egress, false},
		{netfilterChain{family: unix.NFPROTO_NETDEV, hook: unix.NF_NETDEV_EGRESS, devices: []string{"v*"}}, policy.Egress, true},
		{netfilterChain{family: unix.NFPROTO_NETDEV, hook: unix.NF_NETDEV_EGRESS, devices: []string{"w*"}}, policy.Egress, false},
		{netfilterChain{family: unix.NFPROTO_INET, hook: inetIngress, devices: []string{"va"}}, policy.Ingress, true},
		{netfilterChain{family: unix.NFPROTO_INET, hook: inetIngress, devices: []string{"va"}}, policy.Egress, false},
		{netfilterChain{family: unix.NFPROTO_INET, hook: unix.NF_INET_FORWARD, devices: []string{"va"}}, policy.Ingress, false},
		{netfilterChain{family: unix.NFPROTO_IPV4, hook: unix.NF_NETDEV_INGRESS, devices: []string{"va"}}, policy.Ingress, false},
	} {
		if got := test.chain.on("va", test.d); got != test.want {
			t.Errorf("%+v on va %s: %v", test.chain, test.d, got)
		}
	}
}

// A filter that polices is a limiter, however it is told to.
func TestPolices(t *testing.T) {
	police := []netlink.Action{&netlink.GenericAction{}, netlink.NewPoliceAction()}
	for _, f := range []netlink.Filter{
		&netlink.U32{Police: netlink.NewPoliceAction()}, &netlink.U32{Actions: police}, &netlink.FwFilter{Police: netlink.NewPoliceAction()},
		&netlink.FwFilter{Actions: police}, &netlink.Flower{Actions: police}, &netlink.MatchAll{Actions: police},
	} {
		if !polices(f) {
			t.Errorf("%+v is no limiter", f)
		}
	}
	for _, f := range []netlink.Filter{&netlink.U32{Actions: police[:1]}, &netlink.Flower{}, &netlink.BpfFilter{}} {
		if polices(f) {
			t.Errorf("%+v is a limiter", f)
		}
	}
}

// The name of a multiqueue qdisc includes the qdiscs of its queues.
func TestRootQdisc(t *testing.T) {
	testenv.NewNetns(t)
	addKind(t, "va", func(a netlink.LinkAttrs) netlink.Link {
		a.NumTxQueues = 2
		return &netlink.Veth{LinkAttrs: a, PeerName: "vb"}
	})
	qdisc := func() string {
		t.Helper()
		dev, err := DeviceByName("va")
		testenv.Must(t, err)
		path, err := Path(dev, policy.Egress, nil)
		testenv.Must(t, err)
		last := path[len(path)-1]
		return last.At + " " + last.Name
	}
	if got := qdisc(); got != "qdisc noqueue" {
		t.Errorf("new veth: %s", got)
	}
	at := netlink.QdiscAttrs{LinkIndex: testenv.Link(t, "va").Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)}
	testenv.Must(t, netlink.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: at, QdiscType: "mq"}))
	at.Handle = 0
	for _, kinds := range [][2]string{{"pfifo", "pfifo"}, {"pfifo", "bfifo"}} {
		for i, kind := range kinds {
			at.Parent = netlink.MakeHandle(1, uint16(i+1))
			testenv.Must(t, netlink.QdiscReplace(&netlink.GenericQdisc{QdiscAttrs: at, QdiscType: kind}))
		}
		want := "qdisc mq of " + strings.Join(slices.Compact(kinds[:]), " and ")
		if got := qdisc(); got != want {
			t.Errorf("device with two queues: %s, want %s", got, want)
		}
	}
	at.Parent, at.Handle = netlink.HANDLE_ROOT, netlink.MakeHandle(2, 0)
	testenv.Must(t, netlink.QdiscReplace(netlink.NewHtb(at)))
	testenv.Must(t, netlink.ClassAdd(netlink.NewHtbClass(
		netlink.ClassAttrs{LinkIndex: at.LinkIndex, Parent: at.Handle, Handle: netlink.MakeHandle(2, 1)}, netlink.HtbClassAttrs{Rate: 1e9, Buffer: 1 << 20})))
	at.Parent, at.Handle = netlink.MakeHandle(2, 1), netlink.MakeHandle(3, 0)
	testenv.Must(t, netlink.QdiscAdd(&netlink.Tbf{QdiscAttrs: at, Rate: 125_000_000, Limit: 1 << 20, Buffer: 1 << 20}))
	if got := qdisc(); got != "qdisc htb with tbf" {
		t.Errorf("device with a limiter below another: %s", got)
	}
}
