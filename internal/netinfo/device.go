// Package netinfo tells what there is in the network namespace of the calling
// thread: devices and their features, routes, and what packets meet on a device.
// It changes nothing, and knows nothing of what shapectl pinned.
package netinfo

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoDevice means that the namespace has no device of that name.
var ErrNoDevice = errors.New("no such device")

// ErrUnsupportedDevice means that packets of a device have a link header that the programs do not read.
var ErrUnsupportedDevice = errors.New("packets of this kind of device can not be read")

// A Device is a network device of a namespace.
type Device struct {
	Name  string
	Index int
	// L2Bytes is the length of the link header that programs see: 14, or 0 for a
	// device without one.
	L2Bytes uint8
	// Kind is what the kernel calls the driver of a virtual device ("veth",
	// "bridge"), or "device".
	Kind string
	// MTU and GSOMax bound one packet as programs see it, in bytes; GROMax one
	// that was merged from several on its way in.
	MTU, GSOMax, GROMax int
	// Master is the index of the device that this one is a port of, 0 for none.
	Master int
	// Parent is the index of the device that this one is stacked on, 0 for none.
	Parent int
	// Peer is the index of the other end of a pair, 0 if that is in another namespace.
	Peer int
	// XDP is the mode of the device's XDP program ("native"), "" where it has none.
	XDP        string
	XDPProgram uint32
	// Loopback: what is sent is received again on the same device.
	Loopback bool

	encap string
}

// EthernetBytes is the length of an Ethernet header without VLAN tags.
const EthernetBytes = 14

// linkHeaders are the lengths of link headers by what netlink calls the kind
// of link (ARPHRD_*), as far as the programs can read them.
var linkHeaders = map[string]uint8{
	"ether": EthernetBytes, "loopback": EthernetBytes,
	"none": 0, "ppp": 0, "ipip": 0, "tunnel6": 0, "sit": 0, "gre": 0,
	fmt.Sprintf("unknown%d", unix.ARPHRD_NONE):   0,
	fmt.Sprintf("unknown%d", unix.ARPHRD_IP6GRE): 0,
	fmt.Sprintf("unknown%d", unix.ARPHRD_RAWIP):  0,
}

func describe(l netlink.Link) Device {
	a := l.Attrs()
	d := Device{
		Name: a.Name, Index: a.Index, Kind: l.Type(), MTU: a.MTU,
		GSOMax: int(max(a.GSOMaxSize, a.GSOIPv4MaxSize)), GROMax: int(max(a.GROMaxSize, a.GROIPv4MaxSize)),
		Master:   a.MasterIndex,
		Loopback: a.RawFlags&unix.IFF_LOOPBACK != 0, encap: a.EncapType,
	}
	switch {
	case a.NetNsID >= 0: // whatever it names is in another namespace
	case stacked[d.Kind]:
		d.Parent = a.ParentIndex
	case paired[d.Kind]:
		d.Peer = a.ParentIndex
	}
	if a.Xdp != nil && a.Xdp.Attached {
		d.XDP, d.XDPProgram = xdpModes[a.Xdp.AttachMode], a.Xdp.ProgId
	}
	d.L2Bytes = linkHeaders[a.EncapType]
	return d
}

// stacked are the kinds of device whose packets pass their parent, too.
var stacked = map[string]bool{"vlan": true, "macvlan": true, "macvtap": true, "ipvlan": true, "ipvtap": true, "macsec": true}

// paired are the kinds of device of which two are the ends of one cable.
var paired = map[string]bool{"veth": true, "netkit": true}

var xdpModes = map[uint32]string{
	nl.XDP_ATTACHED_DRV: "native", nl.XDP_ATTACHED_SKB: "generic", nl.XDP_ATTACHED_HW: "offloaded",
	xdpAttachedMulti: "native and offloaded",
}

const xdpAttachedMulti = 4 // XDP_ATTACHED_MULTI of linux/if_link.h

// CheckReadable reports as an error why the programs can not read the device's packets.
func (d Device) CheckReadable() error {
	if _, ok := linkHeaders[d.encap]; !ok {
		return fmt.Errorf("%w: its link type is %s, and only Ethernet and devices without a link header are known",
			ErrUnsupportedDevice, d.encap)
	}
	return nil
}

// FullFrame is the length in bytes at layer 2 of the longest packet of the device, without
// VLAN tags; of the zero Device that of an Ethernet frame.
func (d Device) FullFrame() uint64 {
	if d.MTU == 0 {
		return policy.MinCapacity
	}
	return uint64(d.MTU) + uint64(d.L2Bytes)
}

// DeviceByName finds a device by its name or an alternative one. The error wraps ErrNoDevice where there is none.
func DeviceByName(name string) (Device, error) {
	l, err := netlink.LinkByName(name)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) || errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EINVAL) {
		return Device{}, ErrNoDevice // or no name that a device could have
	}
	if err != nil {
		return Device{}, fmt.Errorf("look up device %s: %w", name, err)
	}
	return describe(l), nil
}

// DeviceByIndex finds a device by its index, and reports whether there is one.
func DeviceByIndex(index int) (Device, bool, error) {
	l, err := netlink.LinkByIndex(index)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return Device{}, false, nil
	}
	if err != nil {
		return Device{}, false, fmt.Errorf("look up device %d: %w", index, err)
	}
	return describe(l), true, nil
}

// Devices are all devices of the namespace.
func Devices() ([]Device, error) {
	links, err := netmsg.List(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list the devices: %w", err)
	}
	devices := make([]Device, len(links))
	for i, l := range links {
		devices[i] = describe(l)
	}
	return devices, nil
}

// Addresses reports whether a device has addresses that are valid beyond its link.
func (d Device) Addresses() (ipv4, ipv6 bool, err error) {
	l, err := netlink.LinkByIndex(d.Index)
	if err != nil {
		return false, false, fmt.Errorf("look up device %s: %w", d.Name, err)
	}
	addresses, err := netmsg.List(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return false, false, fmt.Errorf("list the addresses of %s: %w", d.Name, err)
	}
	for _, a := range addresses {
		if a.IP.IsGlobalUnicast() {
			ipv4 = ipv4 || a.IP.To4() != nil
			ipv6 = ipv6 || a.IP.To4() == nil
		}
	}
	return ipv4, ipv6, nil
}
