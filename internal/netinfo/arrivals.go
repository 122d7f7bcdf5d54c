package netinfo

import (
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// eventBytes is enough for the messages about a thousand devices.
const eventBytes = 4 << 20

// Arrivals follows the devices of a network namespace: those that are created, moved into
// it or renamed, and whether any was deleted or moved away.
type Arrivals struct {
	more   chan struct{}
	buffer int // receive buffer in bytes

	mu     sync.Mutex
	socket *nl.NetlinkSocket // nil before the first Take, or if messages were lost and all devices must be listed again
	names  map[int]string    // of all known devices, by index
	fresh  map[int]Device    // for the next Take
	gone   bool              // a device was deleted or moved away since the last Take
	broken string            // a panic, for the next Take
}

// NewArrivals returns Arrivals that start with the first Take.
func NewArrivals() *Arrivals {
	return &Arrivals{more: make(chan struct{}, 1), buffer: eventBytes}
}

// More returns a channel that receives a value when Take has something to return.
func (a *Arrivals) More() <-chan struct{} { return a.more }

// Take returns the devices that are new or renamed since the last Take, sorted by index.
// The first Take, and one after lost messages, returns all devices. gone reports
// whether any device was deleted or moved away. Take must be called on a thread of the
// network namespace.
func (a *Arrivals) Take() (fresh []Device, gone bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if p := a.broken; p != "" {
		a.broken = ""
		panic(p)
	}
	if a.socket == nil {
		if err := a.begin(); err != nil {
			return nil, false, err
		}
	}
	for _, index := range slices.Sorted(maps.Keys(a.fresh)) {
		fresh = append(fresh, a.fresh[index])
	}
	clear(a.fresh)
	gone, a.gone = a.gone, false
	return fresh, gone, nil
}

// Close stops following devices.
func (a *Arrivals) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.socket != nil {
		a.socket.Close()
		a.socket = nil
	}
}

// begin subscribes, and then lists all existing devices as new. Changes during the list
// also arrive as messages, in order.
func (a *Arrivals) begin() error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
	if err != nil {
		return fmt.Errorf("follow the devices: %w", err)
	}
	if err := socket.SetReceiveBufferSize(a.buffer, true); err != nil {
		socket.Close()
		return fmt.Errorf("follow the devices: %w", err)
	}
	devices, err := Devices()
	if err != nil {
		socket.Close()
		return err
	}
	a.socket, a.names, a.fresh, a.gone = socket, map[int]string{}, map[int]Device{}, true
	for _, d := range devices {
		a.names[d.Index], a.fresh[d.Index] = d.Name, d
	}
	go a.follow(socket)
	return nil
}

// follow reads messages until the socket is closed or messages were lost. Then the next Take
// begins again with a new socket: on the old one the kernel would drop messages until
// all are read.
func (a *Arrivals) follow(socket *nl.NetlinkSocket) {
	for {
		messages, from, err := socket.Receive()
		if err == nil && from.Pid != nl.PidKernel {
			continue
		}
		a.mu.Lock()
		if a.socket != socket { // closed
			a.mu.Unlock()
			return
		}
		for i := 0; i < len(messages) && err == nil; i++ {
			err = a.guarded(&messages[i])
		}
		if err != nil {
			socket.Close()
			a.socket = nil
		}
		if err != nil || len(a.fresh) > 0 || a.gone {
			select {
			case a.more <- struct{}{}:
			default:
			}
		}
		a.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// guarded handles a message. A panic is one of whoever calls Take next, who may recover from it.
func (a *Arrivals) guarded(m *syscall.NetlinkMessage) (err error) {
	defer func() {
		if p := recover(); p != nil {
			a.broken = fmt.Sprintf("follow the devices: %v\n%s", p, debug.Stack())
			err = errors.New(a.broken)
		}
	}()
	header := unix.NlMsghdr(m.Header)
	return a.handle(&header, m.Data)
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
