// Package netinfo queries the network namespace of the calling thread: devices and their
// features, routes, and the programs and filters on a device. It changes nothing, and
// does not know shapectl's pins.
package netinfo

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoDevice means that the namespace has no device with that name.
var ErrNoDevice = errors.New("no such device")

// ErrUnsupportedDevice means that a device has a link header that the program cannot parse.
var ErrUnsupportedDevice = errors.New("devices of this kind are not supported")

// A Device is a network device of a namespace.
type Device struct {
	Name  string
	Index int
	// L2Bytes is the length of the link header that programs see: 14, or 0 for none.
	L2Bytes uint8
	// Kind is the kernel's name for the driver of a virtual device ("veth", "bridge"),
	// or "device".
	Kind string
	// MTU and GSOMax limit a packet that programs see, in bytes. GROMax limits a packet
	// that was merged on ingress.
	MTU, GSOMax, GROMax int
	// Master is the index of the device that this one is a port of, 0 for none.
	Master int
	// Parent is the index of the device that this one is stacked on, 0 for none.
	Parent int
	// Peer is the index of the other end of a pair, 0 if that is in another namespace.
	Peer int
	// XDP is the mode of the device's XDP program ("native"), "" for none.
	XDP        string
	XDPProgram uint32
	Up         bool
	// Loopback: packets that are sent are received on the same device.
	Loopback bool

	encap string
}

// EthernetBytes is the length of an Ethernet header without VLAN tags.
const EthernetBytes = 14

// linkHeaders has the lengths of the link headers that the program can parse, by netlink's
// name for the link type (ARPHRD_*).
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
		Up:       a.RawFlags&unix.IFF_UP != 0,
		Loopback: a.RawFlags&unix.IFF_LOOPBACK != 0, encap: a.EncapType,
	}
	switch {
	case a.NetNsID >= 0: // the other device is in another namespace
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

// stacked has the kinds of device whose packets also pass their parent.
var stacked = map[string]bool{"vlan": true, "macvlan": true, "macvtap": true, "ipvlan": true, "ipvtap": true, "macsec": true}

// paired has the kinds of device that come in connected pairs.
var paired = map[string]bool{"veth": true, "netkit": true}

var xdpModes = map[uint32]string{
	nl.XDP_ATTACHED_DRV: "native", nl.XDP_ATTACHED_SKB: "generic", nl.XDP_ATTACHED_HW: "offloaded",
	xdpAttachedMulti: "native and offloaded",
}

const xdpAttachedMulti = 4 // XDP_ATTACHED_MULTI of linux/if_link.h

// CheckReadable returns an error that wraps ErrUnsupportedDevice if the program cannot parse the device's packets.
func (d Device) CheckReadable() error {
	if _, ok := linkHeaders[d.encap]; !ok {
		return fmt.Errorf("%w: its link type is %s, but only Ethernet and devices without a link header are supported",
			ErrUnsupportedDevice, d.encap)
	}
	return nil
}

// FullFrame returns the length in bytes at layer 2 of the longest packet of the device,
// without VLAN tags. For the zero Device it is that of an Ethernet frame.
func (d Device) FullFrame() uint64 {
	if d.MTU == 0 {
		return policy.MinCapacity
	}
	return uint64(d.MTU) + uint64(d.L2Bytes)
}

// DeviceByName finds a device by its name or alternative name, or a cgroup. The error wraps ErrNoDevice if there is none.
func DeviceByName(name string) (Device, error) {
	if policy.IsCgroup(name) {
		return cgroupByName(name)
	}
	l, err := netlink.LinkByName(name)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) || errors.Is(err, unix.ERANGE) || errors.Is(err, unix.EINVAL) {
		return Device{}, ErrNoDevice // or the name is invalid
	}
	if err != nil {
		return Device{}, fmt.Errorf("look up device %s: %w", name, err)
	}
	return describe(l), nil
}

// KnownDevice is DeviceByName, without containers that only a runtime knows: that may take seconds to answer.
func KnownDevice(name string) (Device, error) {
	if !policy.IsCgroup(name) {
		return DeviceByName(name)
	}
	found, err := find([]string{name}, nil)
	if err != nil {
		return Device{}, err
	}
	dir, d, err := found.open(name)
	dir.Close() // nil too
	return d, err
}

// DeviceAt finds a device by its index, or by its name if it is a cgroup, and reports whether it exists.
func DeviceAt(name string, index int) (Device, bool, error) {
	if !IsCgroup(index) {
		return DeviceByIndex(index)
	}
	if d, err := KnownDevice(name); err == nil && d.Index == index {
		return d, true, nil
	}
	return Device{}, false, nil
}

// DeviceByIndex finds a device by its index, and reports whether it exists.
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

// linkOf is a device for requests, which only need its index.
func linkOf(index int) netlink.Link {
	return &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

// Devices returns all devices of the namespace.
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

// Addresses reports whether a device has global unicast addresses. One that is gone has none.
func (d Device) Addresses() (ipv4, ipv6 bool, err error) {
	addresses, err := netmsg.List(func() ([]netlink.Addr, error) { return netlink.AddrList(linkOf(d.Index), netlink.FAMILY_ALL) })
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

// Forwards reports whether the kernel may route packets that enter the device to another one.
func (d Device) Forwards() (ipv4, ipv6 bool) {
	// For IPv6, conf/DEV/forwarding only tells whether the device is a router's: ip6_forward reads these.
	ipv6 = isSet("ipv6", "all", "forwarding") || isSet("ipv6", d.Name, "force_forwarding")
	return isSet("ipv4", d.Name, "forwarding"), ipv6 && !isSet("ipv6", d.Name, "disable_ipv6")
}

// isSet reports whether a sysctl of a device is not 0; false if there is none.
func isSet(family, device, name string) bool {
	value, err := os.ReadFile(filepath.Join("/proc/sys/net", family, "conf", device, name))
	return err == nil && string(value) != "0\n"
}
