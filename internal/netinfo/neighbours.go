package netinfo

import (
	"fmt"
	"maps"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netmsg"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Neighbours follows which addresses the neighbours with some MAC addresses have in a network namespace. An address that
// no longer answers stays until the kernel forgets it or another neighbour has it.
type Neighbours struct {
	feed[netlink.NeighUpdate]
	macs    map[policy.MAC]bool
	known   map[place]policy.MAC
	changed map[int]bool // devices for the next Take
	listed  bool         // all devices are, since the last Take
}

// A place is an address on the link of a device.
type place struct {
	device  int
	address netip.Addr
}

// A neighbour is an entry of the kernel's table.
type neighbour struct {
	place
	mac policy.MAC // zero for one that is not known
}

// NewNeighbours returns Neighbours that start with the first Take.
func NewNeighbours() *Neighbours {
	n := &Neighbours{}
	n.feed = feed[netlink.NeighUpdate]{
		what: "neighbours", list: n.listAll, handle: n.hear, isNews: func() bool { return len(n.changed) > 0 },
		more: make(chan struct{}, 1), buffer: eventBytes,
		subscribe: func(messages chan<- netlink.NeighUpdate, done <-chan struct{}, buffer int, lost func(error)) error {
			return netlink.NeighSubscribeWithOptions(messages, done, netlink.NeighSubscribeOptions{
				ErrorCallback: lost, ReceiveBufferSize: buffer, ReceiveBufferForceSize: true})
		},
	}
	return n
}

// Take reports on which devices neighbours with one of these MAC addresses have other addresses than at the last Take. all
// stands for all devices: at the first Take, with other MAC addresses, and after lost messages. Take must be called on a
// thread of the network namespace.
func (n *Neighbours) Take(macs map[policy.MAC]bool) (changed map[int]bool, all bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !maps.Equal(macs, n.macs) {
		n.macs = macs
		n.stop()
	}
	if err := n.ready(); err != nil {
		return nil, false, err
	}
	changed, n.changed = n.changed, map[int]bool{}
	all, n.listed = n.listed, false
	return changed, all, nil
}

// Of returns the addresses of the neighbours of each device, by its index, as of now.
func (n *Neighbours) Of() map[int]map[policy.MAC][]netip.Addr {
	n.mu.Lock()
	defer n.mu.Unlock()
	return byDevice(n.known)
}

func byDevice(known map[place]policy.MAC) map[int]map[policy.MAC][]netip.Addr {
	of := map[int]map[policy.MAC][]netip.Addr{}
	for at, mac := range known {
		if of[at.device] == nil {
			of[at.device] = map[policy.MAC][]netip.Addr{}
		}
		of[at.device][mac] = append(of[at.device][mac], at.address)
	}
	return of
}

// ListNeighbours returns the addresses of neighbours with these MAC addresses, by the index of their device.
func ListNeighbours(macs map[policy.MAC]bool) (map[int]map[policy.MAC][]netip.Addr, error) {
	known, err := neighbours(macs)
	return byDevice(known), err
}

func neighbours(macs map[policy.MAC]bool) (map[place]policy.MAC, error) {
	known := map[place]policy.MAC{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := netmsg.List(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, family) })
		if err != nil {
			return nil, fmt.Errorf("list the neighbours: %w", err)
		}
		for i := range all {
			if one, ok := toNeighbour(&all[i]); ok && macs[one.mac] {
				known[one.place] = one.mac
			}
		}
	}
	return known, nil
}

// resolved are the states of an entry whose MAC address is of a neighbour. That of NUD_NOARP is not: it is of a group or
// of the device itself.
const resolved = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT

// toNeighbour is false for entries that are no neighbours, or whose packets never pass the device to or from elsewhere.
func toNeighbour(entry *netlink.Neigh) (n neighbour, ok bool) {
	address, ok := netip.AddrFromSlice(entry.IP)
	address = address.Unmap()
	n.place = place{entry.LinkIndex, address}
	if entry.State&resolved != 0 && len(entry.HardwareAddr) == len(n.mac) {
		n.mac = policy.MAC(entry.HardwareAddr)
	}
	isProxy := entry.Flags&netlink.NTF_PROXY != 0
	return n, ok && !isProxy && entry.Family != unix.AF_BRIDGE && address.IsGlobalUnicast()
}

// listAll learns all neighbours.
func (n *Neighbours) listAll() (err error) {
	n.known, err = neighbours(n.macs)
	n.listed = true
	return err
}

// hear learns from a message about an entry of the table.
func (n *Neighbours) hear(m netlink.NeighUpdate) {
	gone := m.Type == unix.RTM_DELNEIGH
	one, ok := toNeighbour(&m.Neigh)
	if !ok || !gone && one.mac == (policy.MAC{}) {
		return
	}
	was, had := n.known[one.place]
	has := !gone && n.macs[one.mac]
	switch {
	case has && was == one.mac, !has && !had:
		return
	case has:
		n.known[one.place] = one.mac
	default:
		delete(n.known, one.place)
	}
	n.changed[one.device] = true
}
