package netinfo

import (
	"fmt"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// eventBytes is enough for the messages about a thousand devices.
const eventBytes = 4 << 20

// A feed keeps what it knows of something in a network namespace up to date by messages of the kernel.
type feed struct {
	what   string                                         // it is about, for errors
	group  uint                                           // of the messages
	list   func() error                                   // learns all there is
	handle func(header *unix.NlMsghdr, data []byte) error // learns from a message
	isNews func() bool                                    // whether the owner wants to hear of what was learned
	more   chan struct{}
	buffer int // receive buffer in bytes

	mu     sync.Mutex
	socket *nl.NetlinkSocket // nil before it begins, or if messages were lost and all must be listed again
}

func newFeed(what string, group uint) feed {
	return feed{what: what, group: group, more: make(chan struct{}, 1), buffer: eventBytes}
}

// More returns a channel that receives a value when there is something to take.
func (f *feed) More() <-chan struct{} { return f.more }

// ready begins, if it has not begun yet or messages were lost. It must be called with the lock, on a thread of the network
// namespace.
func (f *feed) ready() error {
	if f.socket == nil {
		return f.begin()
	}
	return nil
}

// Close stops following.
func (f *feed) Close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stop()
}

func (f *feed) stop() {
	if f.socket != nil {
		f.socket.Close()
		f.socket = nil
	}
}

// begin subscribes, and then lists all there is. Changes during the list also arrive as messages, in order.
func (f *feed) begin() error {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE, f.group)
	if err != nil {
		return fmt.Errorf("follow the %s: %w", f.what, err)
	}
	if err := socket.SetReceiveBufferSize(f.buffer, true); err != nil {
		socket.Close()
		return fmt.Errorf("follow the %s: %w", f.what, err)
	}
	if err := f.list(); err != nil {
		socket.Close()
		return err
	}
	f.socket = socket
	go f.follow(socket)
	return nil
}

// follow reads messages until the socket is closed or messages were lost. Then the next ready
// begins again with a new socket: on the old one the kernel would drop messages until
// all are read.
func (f *feed) follow(socket *nl.NetlinkSocket) {
	for {
		messages, from, err := socket.Receive()
		if err == nil && from.Pid != nl.PidKernel {
			continue
		}
		f.mu.Lock()
		if f.socket != socket { // closed
			f.mu.Unlock()
			return
		}
		for i := 0; i < len(messages) && err == nil; i++ {
			header := unix.NlMsghdr(messages[i].Header)
			err = f.handle(&header, messages[i].Data)
		}
		if err != nil {
			f.stop()
		}
		if err != nil || f.isNews() {
			select {
			case f.more <- struct{}{}:
			default:
			}
		}
		f.mu.Unlock()
		if err != nil {
			return
		}
	}
}
