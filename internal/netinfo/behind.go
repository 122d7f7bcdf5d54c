package netinfo

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netmsg"
)

// Behind is what the kernel's configuration says of the hosts whose packets pass a device.
type Behind struct {
	// Hosts: packets of other hosts pass the device, and have their own addresses there.
	Hosts bool
	// NAT are private networks behind other devices. Their hosts most likely have the address of this host on the device.
	NAT []Inside
	// Line is the device by which packets leave for the Internet, if that is another one; else "".
	Line string
}

// An Inside is a network behind NAT, and the device that leads to it.
type Inside struct {
	Network netip.Prefix
	Device  string
}

// Hides returns the device that leads to a network whose hosts are behind NAT; "" if it is not known to be.
func (b Behind) Hides(p netip.Prefix) string {
	for _, in := range b.NAT {
		if in.Network.Bits() <= p.Bits() && in.Network.Contains(p.Addr()) {
			return in.Device
		}
	}
	return ""
}

// An inside is a network of a device.
type inside struct {
	device  Device
	network netip.Prefix // with the address of the device
}

// Behind finds out who is behind a device. Where nftables or iptables may change sources, it takes private networks for
// hidden ones, as their rules cannot be foreseen for all packets.
func (d Device) Behind() (Behind, error) {
	devices, err := Devices()
	if err != nil {
		return Behind{}, err
	}
	addresses, err := netmsg.List(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return Behind{}, fmt.Errorf("list the addresses: %w", err)
	}
	byIndex := map[int]Device{}
	for _, o := range devices {
		byIndex[o.Index] = o
	}
	var networks []inside
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && a.IPNet != nil {
			bits, _ := a.Mask.Size()
			networks = append(networks, inside{byIndex[a.LinkIndex], netip.PrefixFrom(ip.Unmap(), bits)})
		}
	}
	forwards4, forwards6 := d.Forwards()
	b := behind(d, byIndex[d.Master].Kind == "bridge", forwards4, forwards6, networks)
	if b.Line, err = d.otherLine(); err != nil {
		return b, err
	}
	if b.Line != "" {
		b.NAT = nil // the hosts of the line do not hide behind an inner device
	}
	b.NAT = slices.DeleteFunc(b.NAT, func(in Inside) bool {
		changes, failed := changesSources(in.Network.Addr().Is6())
		err = errors.Join(err, failed)
		return !changes
	})
	return b, err
}

// BehindLine is Behind for a device of the default route. Of another, which it finds out sooner, it only tells the Line.
func (d Device) BehindLine() (b Behind, err error) {
	const loopback = 1 // in each network namespace
	if all, err := (Device{Index: loopback}).otherLine(); err != nil || all == "" {
		return b, err
	}
	if b.Line, err = d.otherLine(); err != nil || b.Line != "" || d.IsCgroup() {
		return b, err
	}
	return d.Behind()
}

func behind(d Device, bridged, forwards4, forwards6 bool, networks []inside) (b Behind) {
	own := func(device Device) bool { return device.Index == d.Index || bridged && device.Index == d.Master }
	b.Hosts = bridged
	for _, n := range networks {
		addr := n.network.Addr()
		if own(n.device) || n.device.Loopback || !addr.IsGlobalUnicast() {
			continue
		}
		if addr.Is4() && !forwards4 || addr.Is6() && !forwards6 {
			continue
		}
		b.Hosts = true
		isOwn := false // a part of the network of the line itself, so its hosts have their own addresses there
		for _, o := range networks {
			isOwn = isOwn || own(o.device) && n.network.Contains(o.network.Addr())
		}
		if (addr.IsPrivate() || cgnat.Contains(addr)) && !isOwn {
			b.NAT = append(b.NAT, Inside{n.network.Masked(), n.device.Name})
		}
	}
	return b
}

var cgnat = netip.MustParsePrefix("100.64.0.0/10") // RFC 6598

// internet are addresses that only a default route leads to. No packet is sent to them.
var internet = []netip.Addr{netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("2606:4700:4700::1111")}

// otherLine returns the device by which packets leave for the Internet, if none leaves by d, the bridge that it is a port
// of, or a device on top of it.
func (d Device) otherLine() (other string, err error) {
	for _, to := range internet {
		if own, err := route(to, &netlink.RouteGetOptions{OifIndex: d.Index}); err == nil && own.Next != to {
			return "", nil // one of several lines
		}
		r, err := RouteTo(to)
		switch {
		case errors.Is(err, ErrNoRoute):
		case err != nil:
			return "", err
		case r.Device.Index == d.Index, r.Device.Index == d.Master, r.Device.Parent == d.Index:
			return "", nil
		case !r.Device.Loopback && other == "":
			other = r.Device.Name
		}
	}
	return other, nil
}
