package netinfo

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// ErrNoRoute means that the kernel has no route to an address.
var ErrNoRoute = errors.New("no route")

// A Route is the route of packets to an address.
type Route struct {
	Device Device
	Next   netip.Addr // the next hop on the device's link
	Local  bool       // the address belongs to the namespace, and Device is the loopback
}

// RouteTo queries the route to an address. The error wraps ErrNoRoute if there is none.
func RouteTo(to netip.Addr) (Route, error) { return route(to, nil) }

// Forward queries the route of a packet that enters by a device from a remote address. The
// error wraps ErrNoRoute if there is no route, or if the kernel would not forward the
// packet.
func Forward(from, to netip.Addr, in Device) (Route, error) {
	return route(to, &netlink.RouteGetOptions{IifIndex: in.Index, SrcAddr: from.AsSlice()})
}

func route(to netip.Addr, o *netlink.RouteGetOptions) (Route, error) {
	routes, err := netlink.RouteGetWithOptions(to.AsSlice(), o)
	for _, no := range []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EXDEV, unix.EAGAIN} {
		if errors.Is(err, no) { // depends on the type of the route or address
			return Route{}, fmt.Errorf("%w to %s: %w", ErrNoRoute, to, err)
		}
	}
	if err != nil {
		return Route{}, fmt.Errorf("query the route to %s: %w", to, err)
	}
	if len(routes) == 0 {
		return Route{}, fmt.Errorf("%w to %s", ErrNoRoute, to)
	}
	r := Route{Next: to, Local: routes[0].Type == unix.RTN_LOCAL}
	gateway := routes[0].Gw
	if via, ok := routes[0].Via.(*netlink.Via); ok {
		gateway = via.Addr // of the other family
	}
	if next, ok := netip.AddrFromSlice(gateway); ok {
		r.Next = next.Unmap()
	}
	d, here, err := DeviceByIndex(routes[0].LinkIndex)
	if err == nil && !here {
		err = fmt.Errorf("%w to %s: its device was just deleted", ErrNoRoute, to)
	}
	r.Device = d
	return r, err
}

// A Hop is a direction of a device that packets pass.
type Hop struct {
	Device
	Direction policy.Direction
	Tags      int // VLAN tags that were added since the first device
}

// A Descent has the hops that packets pass from a device down to the wire.
type Descent struct {
	Hops   []Hop
	Ports  []Device // candidates for the next hop, if it is not known
	Tunnel *Tunnel  // encapsulates the packets after the hops; nil for none
}

// Descend follows packets that leave by a device: to its parent, to the port where the next
// hop was seen, or to the peer of a pair.
func Descend(d Device, next netip.Addr) (Descent, error) {
	devices, err := Devices()
	if err != nil {
		return Descent{}, err
	}
	var w Descent
	tags := 0
	// Ends at a device that was visited, because of loops.
	for visited := map[int]bool{}; !visited[d.Index]; {
		visited[d.Index] = true
		w.Hops = append(w.Hops, Hop{Device: d, Direction: policy.Egress, Tags: tags})
		below, ports := d.Parent, d.ports(devices)
		if len(ports) > 0 {
			if below, err = d.portTo(next, ports); err != nil {
				return w, err
			}
		}
		if below == 0 {
			w.Ports, w.Tunnel = ports, d.Tunnel()
			break
		}
		if d.Kind == "vlan" {
			tags++
		}
		i := slices.IndexFunc(devices, func(o Device) bool { return o.Index == below })
		if i < 0 {
			return w, nil
		}
		d = devices[i]
	}
	i := slices.IndexFunc(devices, func(o Device) bool { return d.Peer == o.Index })
	if d.Peer != 0 && i >= 0 {
		w.Hops = append(w.Hops, Hop{Device: devices[i], Direction: policy.Ingress, Tags: tags})
	}
	return w, nil
}

// Reverse returns the hops of packets in the other direction.
func (w Descent) Reverse() Descent {
	w.Hops = slices.Clone(w.Hops)
	slices.Reverse(w.Hops)
	for i := range w.Hops {
		w.Hops[i].Direction = policy.Ingress + policy.Egress - w.Hops[i].Direction // the other one
	}
	return w
}

// ports returns the ports of a bridge, bond or team.
func (d Device) ports(devices []Device) []Device {
	if d.Kind != "bridge" && d.Kind != "bond" && d.Kind != "team" {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(devices), func(o Device) bool { return o.Master != d.Index })
}

// portTo returns the index of the port to a neighbour, or 0 if it is not known. It is the
// only port, or the port where a bridge has seen the neighbour.
func (d Device) portTo(next netip.Addr, ports []Device) (index int, err error) {
	if len(ports) == 1 {
		return ports[0].Index, nil
	}
	if d.Kind != "bridge" {
		return 0, nil
	}
	family := unix.AF_INET
	if next.Is6() {
		family = unix.AF_INET6
	}
	neighbours, err := netmsg.List(func() ([]netlink.Neigh, error) { return netlink.NeighList(d.Index, family) })
	if err != nil {
		return 0, fmt.Errorf("list the neighbours on %s: %w", d.Name, err)
	}
	i := slices.IndexFunc(neighbours, func(o netlink.Neigh) bool { return o.IP.Equal(net.IP(next.AsSlice())) })
	if i < 0 {
		return 0, nil
	}
	seen, err := netmsg.List(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return 0, fmt.Errorf("list the forwarding entries of bridges: %w", err)
	}
	for _, o := range seen {
		isPort := slices.ContainsFunc(ports, func(p Device) bool { return p.Index == o.LinkIndex })
		if isPort && slices.Equal(o.HardwareAddr, neighbours[i].HardwareAddr) {
			return o.LinkIndex, nil
		}
	}
	return 0, nil
}
