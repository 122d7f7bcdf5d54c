package netinfo

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/shapectl/shapectl/internal/netmsg"
)

// Behind is what the kernel's configuration says of the hosts whose packets pass a device.
type Behind struct {
	// Hosts: packets of other hosts pass the device, and have their own addresses there.
	Hosts bool
	// NAT is a private IPv4 network behind the device Via. Its hosts most likely have the address of this host on the
	// device. It is not valid if there is none.
	NAT netip.Prefix
	Via string
	// Line is the device by which packets leave for the Internet, if that is another one; else "".
	Line string
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
	hides := b.NAT.IsValid() && b.Line == "" // the hosts of the line do not hide behind an inner device
	if hides {
		hides, err = changesSources()
	}
	if !hides {
		b.NAT, b.Via = netip.Prefix{}, ""
	}
	return b, err
}

func behind(d Device, bridged, forwards4, forwards6 bool, networks []inside) (b Behind) {
	own := func(device Device) bool { return device.Index == d.Index || bridged && device.Index == d.Master }
	b.Hosts = bridged
	for _, n := range networks {
		addr := n.network.Addr()
		if own(n.device) || n.device.Loopback || !addr.IsGlobalUnicast() {
			continue
		}
		if addr.Is6() {
			b.Hosts = b.Hosts || forwards6
			continue
		}
		if !forwards4 {
			continue
		}
		b.Hosts = true
		isOwn := false // a part of the network of the line itself, so its hosts have their own addresses there
		for _, o := range networks {
			isOwn = isOwn || own(o.device) && n.network.Contains(o.network.Addr())
		}
		if addr.IsPrivate() && !isOwn && !b.NAT.IsValid() {
			b.NAT, b.Via = n.network.Masked(), n.device.Name
		}
	}
	return b
}

// internet are addresses that only a default route leads to. No packet is sent to them.
var internet = []netip.Addr{netip.MustParseAddr("1.1.1.1"), netip.MustParseAddr("2606:4700:4700::1111")}

// otherLine returns the device by which packets leave for the Internet, if none leaves by d, the bridge that it is a port
// of, or a device on top of it.
func (d Device) otherLine() (other string, err error) {
	for _, to := range internet {
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
