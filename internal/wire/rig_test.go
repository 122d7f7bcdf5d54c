//go:build guest

package wire

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/fq"
	"github.com/shapectl/shapectl/pkg/loader"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A rig is three network namespaces in a row, connected by veth pairs:
//
//	sender s0 -- in0 router out0 -- r0 receiver
//
// Egress limits are on out0, for forwarded traffic of the sender and local traffic of
// the router. Ingress limits are on in0. The receiver has all addresses of
// 198.51.100.0/24 and 2001:db8:2::/64. The sender has the upper half of 192.0.2.0/24,
// and the same of 2001:db8:1::/64.
type rig struct {
	t                        *testing.T
	sender, router, receiver *testenv.Netns
	options                  loader.Options
	longest                  time.Duration // for which a packet may be queued
}

const (
	toSender   = "in0"
	toReceiver = "out0"
)

// A family has the addresses of one address family.
type family struct {
	name                  string
	sender, router        netip.Prefix // of the first veth pair
	routerAgain, receiver netip.Prefix // of the second veth pair
	targets, everything   netip.Prefix
}

var v4 = &family{
	name:   "IPv4",
	sender: netip.MustParsePrefix("192.0.2.2/24"), router: netip.MustParsePrefix("192.0.2.1/24"),
	routerAgain: netip.MustParsePrefix("203.0.113.1/24"), receiver: netip.MustParsePrefix("203.0.113.2/24"),
	targets: netip.MustParsePrefix("198.51.100.0/24"), everything: netip.MustParsePrefix("0.0.0.0/0"),
}

var v6 = &family{
	name:   "IPv6",
	sender: netip.MustParsePrefix("2001:db8:1::2/64"), router: netip.MustParsePrefix("2001:db8:1::1/64"),
	routerAgain: netip.MustParsePrefix("2001:db8:3::1/64"), receiver: netip.MustParsePrefix("2001:db8:3::2/64"),
	targets: netip.MustParsePrefix("2001:db8:2::/64"), everything: netip.MustParsePrefix("::/0"),
}

// host returns the nth address of the targets.
func (f *family) host(n byte) netip.Addr {
	b := f.targets.Addr().AsSlice()
	b[len(b)-1] = n
	a, _ := netip.AddrFromSlice(b)
	return a
}

// source returns the nth address of the sender, from 128 on.
func (f *family) source(n byte) netip.Addr {
	b := f.sender.Addr().AsSlice()
	b[len(b)-1] = n
	a, _ := netip.AddrFromSlice(b)
	return a
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

var hardware = map[string]net.HardwareAddr{
	"s0": {2, 0, 0, 0, 0, 1}, "in0": {2, 0, 0, 0, 0, 2}, "out0": {2, 0, 0, 0, 0, 3}, "r0": {2, 0, 0, 0, 0, 4},
}

// newRig creates the namespaces and devices. out0 has the given number of transmit queues.
func newRig(t *testing.T, queues int) *rig {
	t.Helper()
	r := &rig{t: t, options: loader.Options{BPFFS: testenv.BPFFS(t)}}
	_, r.sender = testenv.NewNamedNetns(t)
	_, r.router = testenv.NewNamedNetns(t)
	_, r.receiver = testenv.NewNamedNetns(t)
	for _, n := range []*testenv.Netns{r.sender, r.router, r.receiver} {
		r.in(n, func() error {
			return errors.Join(sysctl("net/ipv6/conf/all/disable_ipv6", "0"), sysctl("net/ipv6/conf/default/disable_ipv6", "0"),
				// The kernel must not send packets by itself.
				sysctl("net/ipv6/conf/default/addr_gen_mode", "1"), sysctl("net/ipv6/conf/default/accept_ra", "0"),
				sysctl("net/ipv6/conf/default/accept_dad", "0"))
		})
	}
	r.in(r.router, func() error {
		return errors.Join(sysctl("net/ipv4/ip_forward", "1"), sysctl("net/ipv6/conf/all/forwarding", "1"),
			addPair("in0", "s0", r.sender, 1), addPair("out0", "r0", r.receiver, queues))
	})
	for _, n := range []*testenv.Netns{r.sender, r.router, r.receiver} {
		r.in(n, func() error { return setUp("lo", "s0", "in0", "out0", "r0") })
	}
	for _, f := range []*family{v4, v6} {
		r.in(r.sender, func() error {
			return errors.Join(sysctl("net/ipv6/ip_nonlocal_bind", "1"), addLocal(netip.PrefixFrom(f.source(128), f.source(128).BitLen()-7)),
				addAddress("s0", f.sender), addNeighbour("s0", f.router, "in0"),
				addRoute("s0", f.everything, f.router))
		})
		r.in(r.router, func() error {
			return errors.Join(addAddress("in0", f.router), addNeighbour("in0", f.sender, "s0"),
				addAddress("out0", f.routerAgain), addNeighbour("out0", f.receiver, "r0"),
				addRoute("out0", f.targets, f.receiver))
		})
		r.in(r.receiver, func() error {
			return errors.Join(addAddress("r0", f.receiver), addNeighbour("r0", f.routerAgain, "out0"),
				addRoute("r0", f.everything, f.routerAgain), addLocal(f.targets))
		})
	}
	return r
}

// in runs f in a namespace, and ends the test on an error.
func (r *rig) in(n *testenv.Netns, f func() error) {
	r.t.Helper()
	if err := n.Do(f); err != nil {
		r.t.Fatal(err)
	}
}

func sysctl(name, value string) error { return os.WriteFile("/proc/sys/"+name, []byte(value), 0) }

func addPair(name, peer string, there *testenv.Netns, queues int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.NumTxQueues, attrs.NumRxQueues = name, hardware[name], queues, queues
	return netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: attrs, PeerName: peer, PeerHardwareAddr: hardware[peer], PeerNamespace: netlink.NsFd(there.FD()),
	})
}

// setUp sets the devices up that exist.
func setUp(names ...string) error {
	for _, name := range names {
		l, err := netlink.LinkByName(name)
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) {
			continue
		}
		if err == nil {
			err = netlink.LinkSetUp(l)
		}
		if err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	return nil
}

func addAddress(device string, p netip.Prefix) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	network := ipNet(p)
	network.IP = p.Addr().AsSlice()
	return netlink.AddrAdd(l, &netlink.Addr{IPNet: network, Flags: unix.IFA_F_NODAD})
}

// addNeighbour adds a permanent neighbour entry, so that no solicitations are sent.
func addNeighbour(device string, p netip.Prefix, owner string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	err = netlink.NeighSet(&netlink.Neigh{
		LinkIndex: l.Attrs().Index, State: netlink.NUD_PERMANENT, IP: p.Addr().AsSlice(), HardwareAddr: hardware[owner],
	})
	if err != nil {
		return fmt.Errorf("add the neighbour %v to %s: %w", p.Addr(), device, err)
	}
	return nil
}

func addRoute(device string, to, via netip.Prefix) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(to), Gw: via.Addr().AsSlice(), Flags: int(netlink.FLAG_ONLINK)}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("add a route to %v by %s: %w", to, device, err)
	}
	return nil
}

// addLocal makes all addresses of a prefix local.
func addLocal(p netip.Prefix) error {
	l, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{
		LinkIndex: l.Attrs().Index, Dst: ipNet(p), Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST,
	})
}

// limited returns the device with the limits of a direction.
func (r *rig) limited(d policy.Direction) string {
	if d == policy.Ingress {
		return toSender
	}
	return toReceiver
}

// queue returns the device that queues packets of a direction: on ingress, the ifb device.
func (r *rig) queue(d policy.Direction) (name string) {
	r.t.Helper()
	if d == policy.Egress {
		return toReceiver
	}
	r.in(r.router, func() error {
		l, err := netlink.LinkByName(toSender)
		if err != nil {
			return err
		}
		ifb, err := fq.FindIfb(l.Attrs().Index)
		if err != nil || ifb == nil {
			return fmt.Errorf("no ifb device delays packets that enter %s: %v", toSender, err)
		}
		name = ifb.Name
		return nil
	})
	return name
}

// fq sets the root qdisc of a device of the router to fq, with a limit of packets per
// flow. A device with several queues gets mq, and an fq per queue.
func (r *rig) fq(device string, flowLimit uint32) {
	r.t.Helper()
	r.in(r.router, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		parents := []uint32{netlink.HANDLE_ROOT}
		if queues := l.Attrs().NumTxQueues; queues > 1 {
			mq := netlink.MakeHandle(1, 0)
			err := netlink.QdiscReplace(&netlink.GenericQdisc{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_ROOT, Handle: mq}, QdiscType: "mq",
			})
			if err != nil {
				return fmt.Errorf("set mq: %w", err)
			}
			parents = nil
			for i := range queues {
				parents = append(parents, mq+uint32(i)+1)
			}
		}
		for _, parent := range parents {
			q := netlink.NewFq(netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Parent: parent})
			q.PacketLimit, q.FlowPacketLimit = fqPackets, flowLimit
			if err := netlink.QdiscReplace(q); err != nil {
				return fmt.Errorf("set fq: %w", err)
			}
		}
		return nil
	})
}

// fqPackets exceeds any queue of the tests.
const fqPackets = 131072

// fqStatistics returns the packets that each fq of a device of the router has sent, and the packets that all have dropped.
func (r *rig) fqStatistics(device string) (sent []uint32, dropped uint32) {
	r.t.Helper()
	r.in(r.router, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		qdiscs, err := netlink.QdiscList(l)
		if err != nil {
			return err
		}
		for _, q := range qdiscs {
			if s := q.Attrs().Statistics; q.Type() == "fq" {
				sent, dropped = append(sent, s.Basic.Packets), dropped+s.Queue.Drops
			}
		}
		return nil
	})
	if sent == nil {
		r.t.Fatalf("%s has no fq", device)
	}
	return sent, dropped
}

// offload turns segmentation offload and GRO on or off on all devices.
func (r *rig) offload(on bool) {
	r.t.Helper()
	features := map[string]bool{
		"tx-tcp-segmentation": on, "tx-tcp6-segmentation": on, "tx-tcp-ecn-segmentation": on, "tx-generic-segmentation": on,
		"rx-gro": on,
	}
	for n, devices := range map[*testenv.Netns][]string{
		r.sender: {"s0"}, r.router: {"in0", "out0"}, r.receiver: {"r0"},
	} {
		r.in(n, func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			for _, device := range devices {
				if err := e.Change(device, features); err != nil {
					return fmt.Errorf("change features of %s: %w", device, err)
				}
				for name, is := range must(e.Features(device)) {
					if want, ok := features[name]; ok && is != want {
						return fmt.Errorf("%s: %s is %v", device, name, is)
					}
				}
			}
			return nil
		})
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// limit sets rules on a direction of a device of the router.
func (r *rig) limit(device string, d policy.Direction, rules ...policy.Rule) {
	r.t.Helper()
	r.in(r.router, func() error {
		n, err := loader.Write(r.options)
		if err != nil {
			return err
		}
		defer n.Close()
		for _, rule := range rules {
			if rule.Excess == policy.Delay {
				wait := float64(rule.Capacity+rule.Queue) * 8e9 / float64(rule.Rate)
				r.longest = max(r.longest, time.Duration(wait))
			}
			if err := rule.Validate(); err != nil {
				return err
			}
			if _, err := n.Put(loader.ApplyOptions{}, policy.Table{Device: device, Direction: d, Match: d.FarSide(), Rules: []policy.Rule{rule}}); err != nil {
				return fmt.Errorf("set a rule for %v: %w", rule.Prefix, err)
			}
		}
		return nil
	})
}

// counters returns the counters of the rule for a prefix.
func (r *rig) counters(device string, d policy.Direction, p netip.Prefix) (c maps.Counters) {
	r.t.Helper()
	r.in(r.router, func() error {
		n, err := loader.Read(r.options)
		if err != nil {
			return err
		}
		defer n.Close()
		h, err := n.Find(device, d)
		if err != nil {
			return err
		}
		defer h.Close()
		rules := h.Set.Rules()
		i := slices.IndexFunc(rules, func(e maps.Entry) bool { return e.Prefix == p })
		if i < 0 {
			return fmt.Errorf("no rule for %v", p)
		}
		c = h.Set.Store.Counters(rules[i].ID)
		return nil
	})
	return c
}
