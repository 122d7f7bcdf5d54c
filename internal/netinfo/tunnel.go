package netinfo

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// A Tunnel is the destination of the packets that a device encapsulates.
type Tunnel struct {
	Remote   netip.Addr // the zero Addr if there is none, or several
	Underlay int        // index of the device by which they leave; 0 if not known
}

// tunnels has the kinds of device that encapsulate packets.
var tunnels = map[string]bool{
	"ipip": true, "sit": true, "gre": true, "gretap": true, "ip6tnl": true, "ip6gre": true, "ip6gretap": true,
	"vti": true, "vti6": true, "vxlan": true, "geneve": true, "wireguard": true,
}

// Tunnel returns nil for a device that is not a tunnel.
func (d Device) Tunnel() *Tunnel {
	if !tunnels[d.Kind] {
		return nil
	}
	t := new(Tunnel)
	l, err := netlink.LinkByIndex(d.Index)
	if err != nil {
		return t
	}
	remote := remoteOf(l)
	if addr, ok := netip.AddrFromSlice(remote); ok && !addr.IsUnspecified() && !addr.IsMulticast() {
		t.Remote = addr.Unmap()
	}
	if v, ok := l.(*netlink.Vxlan); ok && v.VtepDevIndex != 0 {
		t.Underlay = v.VtepDevIndex
	} else if t.Remote.IsValid() {
		if routes, err := netlink.RouteGet(remote); err == nil && len(routes) > 0 {
			t.Underlay = routes[0].LinkIndex
		}
	}
	return t
}

func remoteOf(l netlink.Link) net.IP {
	switch l := l.(type) {
	case *netlink.Iptun:
		return l.Remote
	case *netlink.Sittun:
		return l.Remote
	case *netlink.Gretun:
		return l.Remote
	case *netlink.Gretap:
		return l.Remote
	case *netlink.Ip6tnl:
		return l.Remote
	case *netlink.Vti:
		return l.Remote
	case *netlink.Vxlan:
		return l.Group
	case *netlink.Geneve:
		return l.Remote
	}
	return nil
}
