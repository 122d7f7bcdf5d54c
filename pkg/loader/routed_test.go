package loader

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/maps"
	"github.com/shapectl/shapectl/pkg/policy"
)

// A routed is a router between a tenant, whose packets it limits as they enter, and a target:
//
//	tenant t0 -- in0 router out0 -- r0 target
type routed struct {
	t                      *testing.T
	tenant, router, target *testenv.Netns
	options                Options
	sender                 *testenv.Sender // out of t0
	rule                   policy.Rule
}

// Addresses of the two links.
const (
	linkHost, linkRouter      = "fe80::2", "fe80::1"
	tenantGlobal, tenantRoute = "2001:db8:1::2", "2001:db8:1::1"
	targetGlobal, targetRoute = "2001:db8:2::2", "2001:db8:2::1"
)

var tenantMAC, inMAC = net.HardwareAddr{2, 0, 0, 0, 1, 2}, net.HardwareAddr{2, 0, 0, 0, 1, 1}

func newRouted(t *testing.T, rule policy.Rule) *routed {
	t.Helper()
	r := &routed{t: t, options: Options{BPFFS: testenv.BPFFS(t)}, rule: rule}
	_, r.tenant = testenv.NewNamedNetns(t)
	_, r.router = testenv.NewNamedNetns(t)
	_, r.target = testenv.NewNamedNetns(t)
	for _, n := range []*testenv.Netns{r.tenant, r.router, r.target} {
		r.in(n, func() error {
			// The kernel must send only packets that the test causes.
			return sysctls("all/disable_ipv6=0", "default/disable_ipv6=0", "default/addr_gen_mode=1", "default/router_solicitations=0",
				"default/accept_ra=0", "default/mldv2_unsolicited_report_interval=100000", "default/accept_dad=1")
		})
	}
	r.in(r.router, func() error {
		return errors.Join(sysctls("all/forwarding=1", "default/accept_ra=2", "default/ndisc_notify=0"),
			pair("in0", inMAC, "t0", tenantMAC, r.tenant), pair("out0", nil, "r0", nil, r.target))
	})
	r.in(r.tenant, func() error {
		return errors.Join(up("t0", linkHost, tenantGlobal), route("t0", "2001:db8:2::/64", linkRouter))
	})
	r.in(r.router, func() error {
		return errors.Join(up("in0", linkRouter, tenantRoute), up("out0", linkRouter, targetRoute))
	})
	r.in(r.target, func() error {
		return errors.Join(up("r0", linkHost, targetGlobal), route("r0", "2001:db8:1::/64", targetRoute))
	})
	r.in(r.tenant, func() error {
		r.sender = testenv.NewSender(t, "t0")
		return nil
	})
	r.in(r.router, func() error { return limitOn(r.options, "in0", policy.Ingress, rule) })
	return r
}

// in runs f in a namespace, and ends the test if it fails.
func (r *routed) in(n *testenv.Netns, f func() error) {
	r.t.Helper()
	if err := n.Do(f); err != nil {
		r.t.Fatal(err)
	}
}

// poll is in for an f that lists something repeatedly. It ignores an error because the list
// changed while it was read.
func (r *routed) poll(n *testenv.Netns, f func() error) {
	r.t.Helper()
	r.in(n, func() error {
		if err := f(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
		return nil
	})
}

func sysctls(settings ...string) error {
	for _, s := range settings {
		name, value, _ := strings.Cut(s, "=")
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+name, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}

// pair creates two connected devices, the second in another namespace.
func pair(name string, mac net.HardwareAddr, peer string, peerMAC net.HardwareAddr, there *testenv.Netns) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = name, mac
	return netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: attrs, PeerName: peer, PeerHardwareAddr: peerMAC, PeerNamespace: netlink.NsFd(there.FD()),
	})
}

// up sets a device up with addresses, each in a /64 or a /24.
func up(device string, addresses ...string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return err
	}
	for _, a := range addresses {
		if err := assign(l, a, unix.IFA_F_NODAD); err != nil {
			return err
		}
	}
	return nil
}

func assign(l netlink.Link, address string, flags int) error {
	a := netip.MustParseAddr(address)
	mask := net.CIDRMask(a.BitLen()/2, a.BitLen())
	if a.Is4() {
		mask = net.CIDRMask(24, 32)
	}
	return netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: mask}, Flags: flags})
}

func route(device, to, via string) error {
	l, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(netip.MustParsePrefix(to)), Gw: netip.MustParseAddr(via).AsSlice()})
}

func (r *routed) counters() (c maps.Counters) {
	r.t.Helper()
	r.in(r.router, func() (err error) {
		c, err = countersOn(r.options, "in0", policy.Ingress, r.rule)
		return err
	})
	return c
}

// limitOn sets a rule on a device of the calling thread's namespace.
func limitOn(o Options, device string, d policy.Direction, rule policy.Rule) error {
	n, err := Write(o)
	if err != nil {
		return err
	}
	defer n.Close()
	_, err = put(n, device, d, d.FarSide(), rule)
	return err
}

func countersOn(o Options, device string, d policy.Direction, rule policy.Rule) (maps.Counters, error) {
	n, err := Read(o)
	if err != nil {
		return maps.Counters{}, err
	}
	defer n.Close()
	h, err := n.Find(device, d)
	if err != nil {
		return maps.Counters{}, err
	}
	defer h.Close()
	e, _ := h.Set.Find(rule.Prefix)
	return h.Set.Store.Counters(e.ID), nil
}

// icmp6 is a frame from the tenant to the router with an ICMPv6 message, whose checksum it sets.
func icmp6(src, dst string, message []byte) []byte {
	b := make([]byte, 14+40+len(message))
	copy(b, inMAC)
	to := netip.MustParseAddr(dst)
	if to.IsMulticast() {
		copy(b, []byte{0x33, 0x33})
		copy(b[2:], to.AsSlice()[12:])
	}
	copy(b[6:], tenantMAC)
	binary.BigEndian.PutUint16(b[12:], unix.ETH_P_IPV6)
	ip := b[14:]
	ip[0], ip[6], ip[7] = 0x60, unix.IPPROTO_ICMPV6, 255
	binary.BigEndian.PutUint16(ip[4:], uint16(len(message)))
	copy(ip[8:], netip.MustParseAddr(src).AsSlice())
	copy(ip[24:], to.AsSlice())
	copy(ip[40:], message)
	binary.BigEndian.PutUint16(ip[42:], onesComplement(unix.IPPROTO_ICMPV6+uint32(len(message)), ip[8:]))
	return b
}

func (r *routed) send(frame []byte) {
	r.t.Helper()
	if err := r.sender.Send(frame); err != nil {
		r.t.Fatal(err)
	}
}

// Neighbours find and probe each other, detect duplicate addresses and learn of routers, while a full limit
// drops everything else.
func TestDiscoveryUnderFullLimit(t *testing.T) {
	full := rule("::/0", leaky)
	full.Rate, full.Capacity, full.Penalty = 8000, 200, policy.Penalty{Kind: policy.PenaltyHold, Duration: time.Hour}
	r := newRouted(t, full)
	echo := icmp6(tenantGlobal, targetGlobal, []byte{128, 0, 0, 0, 0, 1, 0, 1})
	for range 10 {
		r.send(echo)
	}
	closed := func() (passed uint64) {
		c := r.counters()
		if c.DroppedPackets == 0 {
			t.Fatalf("the limit is not full: %+v", c)
		}
		return c.PassedPackets
	}
	testenv.Eventually(t, "the limit to be full", func() bool { return r.counters().DroppedPackets > 0 })
	before := closed()
	neighbour := func() (state int) {
		r.poll(r.router, func() error {
			l, err := netlink.LinkByName("in0")
			if err != nil {
				return err
			}
			neighbours, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_V6)
			for _, n := range neighbours {
				if n.IP.Equal(net.ParseIP(tenantGlobal)) {
					state = n.State
				}
			}
			return err
		})
		return state
	}
	exempt := uint64(0)
	more := func(what string) {
		t.Helper()
		c := r.counters()
		if c.ExemptPackets <= exempt {
			t.Errorf("%s: %d packets were exempt, and %d before", what, c.ExemptPackets, exempt)
		}
		exempt = c.ExemptPackets
	}

	// The router must find the tenant, to forward a packet from the target.
	r.in(r.target, func() error {
		c, err := net.Dial("udp6", net.JoinHostPort(tenantGlobal, "9"))
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte{0})
		return err
	})
	testenv.Eventually(t, "the tenant's address to be resolved", func() bool { return neighbour() == netlink.NUD_REACHABLE })
	more("resolution")

	// The router probes the tenant, as it does after a while without packets from it.
	r.in(r.router, func() error {
		l, err := netlink.LinkByName("in0")
		if err != nil {
			return err
		}
		return netlink.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, State: netlink.NUD_PROBE, IP: net.ParseIP(tenantGlobal), HardwareAddr: tenantMAC,
		})
	})
	testenv.Eventually(t, "the tenant to answer a probe", func() bool { return neighbour() == netlink.NUD_REACHABLE })
	more("probe")

	// The tenant adds an address that the router has.
	r.in(r.tenant, func() error {
		l, err := netlink.LinkByName("t0")
		if err != nil {
			return err
		}
		return assign(l, tenantRoute, 0)
	})
	testenv.Eventually(t, "the duplicate address to be detected", func() (failed bool) {
		r.poll(r.tenant, func() error {
			l, err := netlink.LinkByName("t0")
			if err != nil {
				return err
			}
			addresses, err := netlink.AddrList(l, netlink.FAMILY_V6)
			for _, a := range addresses {
				failed = failed || a.IP.Equal(net.ParseIP(tenantRoute)) && a.Flags&unix.IFA_F_DADFAILED != 0
			}
			return err
		})
		return failed
	})
	more("duplicate address detection")

	// The tenant advertises itself as a router.
	advertisement := make([]byte, 16)
	advertisement[0], advertisement[4] = 134, 64
	binary.BigEndian.PutUint16(advertisement[6:], 1800)
	r.send(icmp6(linkHost, "ff02::1", advertisement))
	testenv.Eventually(t, "the router's default route by the tenant", func() (there bool) {
		r.poll(r.router, func() error {
			routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{Protocol: unix.RTPROT_RA}, netlink.RT_FILTER_PROTOCOL)
			for _, route := range routes {
				there = there || route.Gw.Equal(net.ParseIP(linkHost))
			}
			return err
		})
		return there
	})
	more("router advertisement")
	if after := closed(); after != before {
		t.Errorf("%d other packets passed", after-before)
	}
}
