package netinfo

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// eventBytes is room for what the kernel tells of a thousand devices at once.
const eventBytes = 4 << 20

// Arrivals follows which devices come to be in a network namespace, or into it
// from another one, or get another name there; and that some are deleted, or leave it.
type Arrivals struct {
	more   chan struct{}
	buffer int // bytes of messages that wait to be read

	mu     sync.Mutex
	socket *nl.NetlinkSocket // nil where messages were lost, so that all devices have to be looked at again
	names  map[int]string    // of the devices that there are, by index, as far as is known
	fresh  map[int]Device    // those to be taken
	gone   bool              // whether one was deleted, or left, since the last Take
}

// NewArrivals follows nothing yet: the first Take begins.
func NewArrivals() *Arrivals {
	return &Arrivals{more: make(chan struct{}, 1), buffer: eventBytes}
}

// More receives when there is something to Take.
func (a *Arrivals) More() <-chan struct{} { return a.more }

// Take are the devices that are new, or have a new name, since the last Take,
// by index; the first time, and whenever the kernel had more to tell than was
// listened to, all devices. It reports whether any was deleted, or left, since.
// It must be called on a thread of the network namespace.
func (a *Arrivals) Take() (fresh []Device, gone bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
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

// Close ends it.
func (a *Arrivals) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.socket != nil {
		a.socket.Close()
		a.socket = nil
	}
}

// begin listens, and takes all devices that there are already for new. What
// happens while they are listed is told as well, and is told in order.
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

// follow reads what the kernel tells until the socket is closed, or messages
// were lost. Then it is left to Take to begin again: with a new socket, as the
// kernel goes on to lose messages until all of the old one's are read.
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
			header := unix.NlMsghdr(messages[i].Header)
			err = a.hear(&header, messages[i].Data)
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

// hear notes what a message says of a device.
func (a *Arrivals) hear(header *unix.NlMsghdr, data []byte) error {
	gone := header.Type == unix.RTM_DELLINK
	if !gone && header.Type != unix.RTM_NEWLINK {
		return nil
	}
	info := nl.DeserializeIfInfomsg(data)
	if info.Family == unix.AF_BRIDGE {
		return nil // a port came or went; the device is there as before
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
