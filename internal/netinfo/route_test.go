package netinfo

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

func addAddress(t *testing.T, device, address string) {
	t.Helper()
	a, err := netlink.ParseAddr(address)
	testenv.Must(t, err)
	testenv.Must(t, netlink.AddrAdd(testenv.Link(t, device), a))
}

func addRoute(t *testing.T, r netlink.Route, dst string) {
	t.Helper()
	_, network, err := net.ParseCIDR(dst)
	testenv.Must(t, err)
	r.Dst = network
	testenv.Must(t, netlink.RouteAdd(&r))
}

// addKind creates a device of a kind.
func addKind(t *testing.T, name string, link func(netlink.LinkAttrs) netlink.Link) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	testenv.AddLink(t, link(attrs))
}

func TestRoute(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	testenv.Must(t, netlink.LinkSetUp(testenv.Link(t, "lo")))
	addAddress(t, "va", "10.0.0.1/24")
	addRoute(t, netlink.Route{Gw: net.IPv4(10, 0, 0, 254)}, "192.0.2.0/24")
	addRoute(t, netlink.Route{Type: unix.RTN_BLACKHOLE}, "198.51.100.0/24")
	addRoute(t, netlink.Route{Type: unix.RTN_PROHIBIT}, "203.0.113.0/24")
	for to, want := range map[string]struct {
		device, next string
		local        bool
	}{
		"10.0.0.7":  {"va", "10.0.0.7", false},
		"192.0.2.7": {"va", "10.0.0.254", false},
		"10.0.0.1":  {"lo", "10.0.0.1", true},
	} {
		r, err := RouteTo(netip.MustParseAddr(to))
		if err != nil || r.Device.Name != want.device || r.Next != netip.MustParseAddr(want.next) || r.Local != want.local {
			t.Errorf("the route to %s is %s to %v, local: %v, %v; want %+v", to, r.Device.Name, r.Next, r.Local, err, want)
		}
	}
	for _, to := range []string{"198.51.100.1", "203.0.113.1", "100.64.0.1", "2001:db8::1"} {
		if r, err := RouteTo(netip.MustParseAddr(to)); !errors.Is(err, ErrNoRoute) {
			t.Errorf("the route to %s is %+v, %v", to, r, err)
		}
	}

	// A remote packet that the kernel would not forward has no route.
	from, to := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("10.0.0.7")
	va, err := DeviceByName("va")
	testenv.Must(t, err)
	if r, err := Forward(from, to, va); !errors.Is(err, ErrNoRoute) {
		t.Errorf("without forwarding: %+v, %v", r, err)
	}
	testenv.Must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	if r, err := Forward(from, to, va); err != nil || r.Device.Name != "va" {
		t.Errorf("with forwarding: %+v, %v", r, err)
	}
	// A routing rule may select another table by the source.
	rule := netlink.NewRule()
	rule.Src, rule.Table = &net.IPNet{IP: from.AsSlice(), Mask: net.CIDRMask(32, 32)}, 77
	testenv.Must(t, netlink.RuleAdd(rule))
	addRoute(t, netlink.Route{LinkIndex: testenv.Link(t, "vb").Attrs().Index, Table: 77, Scope: unix.RT_SCOPE_LINK}, "10.0.0.0/24")
	if r, err := Forward(from, to, va); err != nil || r.Device.Name != "vb" {
		t.Errorf("by a rule for the source: %+v, %v", r, err)
	}
}

// hops formats the hops of a descent, with their tags.
func hops(w Descent) string {
	var s []string
	for _, h := range w.Hops {
		s = append(s, h.Name+" "+h.Direction.String()+strings.Repeat(" tagged", h.Tags))
	}
	return strings.Join(s, ", ")
}

func TestDescend(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	testenv.Veth(t, "vc", "vd")
	addKind(t, "br", func(a netlink.LinkAttrs) netlink.Link { return &netlink.Bridge{LinkAttrs: a} })
	addKind(t, "mv", func(a netlink.LinkAttrs) netlink.Link {
		a.ParentIndex = testenv.Link(t, "vd").Attrs().Index
		return &netlink.Macvlan{LinkAttrs: a, Mode: netlink.MACVLAN_MODE_BRIDGE}
	})
	to := netip.MustParseAddr("10.0.0.7")
	descend := func(name string) Descent {
		t.Helper()
		d, err := DeviceByName(name)
		testenv.Must(t, err)
		w, err := Descend(d, to)
		testenv.Must(t, err)
		return w
	}
	expect := func(name, down, up string) {
		t.Helper()
		w := descend(name)
		if got := hops(w); got != down {
			t.Errorf("packets that leave by %s pass %s, want %s", name, got, down)
		}
		if got := hops(w.Reverse()); got != up {
			t.Errorf("packets that enter by %s pass %s, want %s", name, got, up)
		}
		if got := hops(w); got != down {
			t.Errorf("Reverse changed the descent from %s: %s", name, got)
		}
	}
	expect("va", "va egress, vb ingress", "vb egress, va ingress")
	expect("mv", "mv egress, vd egress, vc ingress", "vc egress, vd ingress, mv ingress")
	expect("br", "br egress", "br ingress")

	// The only port of a bridge, or the port where a neighbour was seen.
	br := testenv.Link(t, "br")
	testenv.Must(t, netlink.LinkSetMaster(testenv.Link(t, "va"), br))
	expect("br", "br egress, va egress, vb ingress", "vb egress, va ingress, br ingress")
	testenv.Must(t, netlink.LinkSetMaster(testenv.Link(t, "vc"), br))
	expect("br", "br egress", "br ingress")
	var ports []string
	for _, p := range descend("br").Ports {
		ports = append(ports, p.Name)
	}
	slices.Sort(ports)
	if !slices.Equal(ports, []string{"va", "vc"}) {
		t.Errorf("candidate ports: %v", ports)
	}
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 7}
	testenv.Must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: br.Attrs().Index, State: netlink.NUD_PERMANENT, IP: to.AsSlice(), HardwareAddr: mac,
	}))
	expect("br", "br egress", "br ingress")
	testenv.Must(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: testenv.Link(t, "vc").Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER,
		State: netlink.NUD_PERMANENT, HardwareAddr: mac,
	}))
	expect("br", "br egress, vc egress, vd ingress", "vd egress, vc ingress, br ingress")
	if w := descend("br"); w.Ports != nil {
		t.Errorf("candidate ports of a known port: %v", w.Ports)
	}
}

// Packets have a tag below a VLAN device, but not on the VLAN device.
func TestDescendTagged(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	va, err := DeviceByName("va")
	testenv.Must(t, err)
	w, err := Descend(Device{Name: "va.5", Index: 1000, Kind: "vlan", Parent: va.Index}, netip.MustParseAddr("10.0.0.7"))
	testenv.Must(t, err)
	if got, want := hops(w), "va.5 egress, va egress tagged, vb ingress tagged"; got != want {
		t.Errorf("the hops are %s, want %s", got, want)
	}
}

func TestDescendTunnel(t *testing.T) {
	testenv.NewNetns(t)
	testenv.Veth(t, "va", "vb")
	addAddress(t, "va", "192.0.2.1/24")
	addKind(t, "tun", func(a netlink.LinkAttrs) netlink.Link {
		return &netlink.Vxlan{LinkAttrs: a, VxlanId: 5, Group: net.IPv4(192, 0, 2, 9), Port: 4789}
	})
	d, err := DeviceByName("tun")
	testenv.Must(t, err)
	w, err := Descend(d, netip.MustParseAddr("10.0.0.7"))
	testenv.Must(t, err)
	if got := hops(w); got != "tun egress" {
		t.Errorf("the hops are %s", got)
	}
	va := testenv.Link(t, "va").Attrs().Index
	if w.Tunnel == nil || w.Tunnel.Underlay != va || w.Tunnel.Remote != netip.MustParseAddr("192.0.2.9") {
		t.Errorf("tunnel %+v, want 192.0.2.9 by device %d", w.Tunnel, va)
	}
}
