package netinfo

import (
	"maps"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Arrivals follows the devices of a network namespace: those that are created, moved into
// it or renamed, and whether any was deleted or moved away.
type Arrivals struct {
	feed
	names map[int]string // of all known devices, by index
	fresh map[int]Device // for the next Take
	gone  bool           // a device was deleted or moved away since the last Take
}

// NewArrivals returns Arrivals that start with the first Take.
func NewArrivals() *Arrivals {
	a := &Arrivals{feed: newFeed("devices", unix.RTNLGRP_LINK)}
	a.list, a.feed.handle = a.listDevices, a.handle
	a.isNews = func() bool { return len(a.fresh) > 0 || a.gone }
	return a
}

// Take returns the devices that are new or renamed since the last Take, sorted by index.
// The first Take, and one after lost messages, returns all devices. gone reports
// whether any device was deleted or moved away. Take must be called on a thread of the
// network namespace.
func (a *Arrivals) Take() (fresh []Device, gone bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.ready(); err != nil {
		return nil, false, err
	}
	for _, index := range slices.Sorted(maps.Keys(a.fresh)) {
		fresh = append(fresh, a.fresh[index])
	}
	clear(a.fresh)
	gone, a.gone = a.gone, false
	return fresh, gone, nil
}

// listDevices makes all existing devices new ones.
func (a *Arrivals) listDevices() error {
	devices, err := Devices()
	if err != nil {
		return err
	}
	a.names, a.fresh, a.gone = map[int]string{}, map[int]Device{}, true
	for _, d := range devices {
		a.names[d.Index], a.fresh[d.Index] = d.Name, d
	}
	return nil
}

// handle handles a message about a device.
func (a *Arrivals) handle(header *unix.NlMsghdr, data []byte) error {
	gone := header.Type == unix.RTM_DELLINK
	if !gone && header.Type != unix.RTM_NEWLINK {
		return nil
	}
	info := nl.DeserializeIfInfomsg(data)
	if info.Family == unix.AF_BRIDGE {
		return nil // a port was added or removed; the device itself is unchanged
	}
	if gone {
		delete(a.names, int(info.Index))
		delete(a.fresh, int(info.Index))
		a.gone = true
		return nil
	}
	l, err := netlink.LinkDeserialize(header, data)
	if err != nil {
		return err
	}
	if d := describe(l); a.names[d.Index] != d.Name {
		a.names[d.Index], a.fresh[d.Index] = d.Name, d
	}
	return nil
}
