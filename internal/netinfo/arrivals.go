package netinfo

import (
	"maps"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Arrivals follows the devices of a network namespace: those that are created, moved into
// it or renamed, and whether any was deleted or moved away.
type Arrivals struct {
	feed[netlink.LinkUpdate]
	names map[int]string // of all known devices, by index
	fresh map[int]Device // for the next Take
	gone  bool           // a device was deleted or moved away since the last Take
}

// NewArrivals returns Arrivals that start with the first Take.
func NewArrivals() *Arrivals {
	a := &Arrivals{}
	a.feed = feed[netlink.LinkUpdate]{
		what: "devices", list: a.listDevices, handle: a.hear, isNews: func() bool { return len(a.fresh) > 0 || a.gone },
		more: make(chan struct{}, 1), buffer: eventBytes,
		subscribe: func(messages chan<- netlink.LinkUpdate, done <-chan struct{}, buffer int, lost func(error)) error {
			return netlink.LinkSubscribeWithOptions(messages, done, netlink.LinkSubscribeOptions{
				ErrorCallback: lost, ReceiveBufferSize: buffer, ReceiveBufferForceSize: true})
		},
	}
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

// hear learns from a message.
func (a *Arrivals) hear(m netlink.LinkUpdate) {
	switch d := describe(m.Link); {
	case m.Family == unix.AF_BRIDGE: // a port was added or removed; the device itself is unchanged
	case m.Header.Type == unix.RTM_DELLINK:
		delete(a.names, d.Index)
		delete(a.fresh, d.Index)
		a.gone = true
	case a.names[d.Index] != d.Name:
		a.names[d.Index], a.fresh[d.Index] = d.Name, d
	}
}
