package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	smallPayload = 18 // bytes: makes the smallest Ethernet frame
	smallFrame   = 14 + 20 + 8 + smallPayload
	farPort      = 9 // discard
)

// A sender sends UDP packets as fast as possible, with one system call for each: if
// netfilter drops a packet of sendmmsg, the others are not sent.
type sender struct {
	fd      int
	payload []byte
	targets []unix.RawSockaddrInet4 // used in turn; empty if the socket is connected
	next    int
}

// newSender returns a sender in a namespace, with so many bytes of payload per packet.
func (a *arena) newSender(namespace netns.NsHandle, payload int, targets ...netip.Addr) (s *sender, err error) {
	family := unix.AF_INET
	if targets[0].Is6() {
		family = unix.AF_INET6
	}
	s = &sender{payload: make([]byte, payload)}
	if s.fd, err = a.socket(namespace, family, unix.SOCK_DGRAM, 0); err != nil {
		return nil, err
	}
	// Larger than any queue, so that a full queue drops packets and does not block the sender.
	if err := unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 256<<20); err != nil {
		return nil, fmt.Errorf("make a socket's buffer bigger: %w", err)
	}
	if len(targets) > 1 {
		port := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, farPort)) // network byte order
		for _, t := range targets {
			s.targets = append(s.targets, unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port, Addr: t.As4()})
		}
		return s, nil
	}
	var to unix.Sockaddr = &unix.SockaddrInet6{Port: farPort, Addr: targets[0].As16()}
	if targets[0].Is4() {
		to = &unix.SockaddrInet4{Port: farPort, Addr: targets[0].As4()}
	}
	if err := unix.Connect(s.fd, to); err != nil {
		return nil, fmt.Errorf("connect a socket to %v: %w", targets[0], err)
	}
	return s, nil
}

// send sends packets, and returns the mean time of one. A drop on the path is no error.
func (s *sender) send(packets int) (nanoseconds float64, err error) {
	start := time.Now()
	var to unsafe.Pointer
	var length uintptr
	for range packets {
		if s.targets != nil {
			to, length = unsafe.Pointer(&s.targets[s.next]), unix.SizeofSockaddrInet4
			if s.next++; s.next == len(s.targets) {
				s.next = 0
			}
		}
		// A raw call skips the scheduler of Go; the call does not block.
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd),
			uintptr(unsafe.Pointer(&s.payload[0])), uintptr(len(s.payload)), unix.MSG_DONTWAIT, uintptr(to), length)
		switch errno {
		case 0, unix.EPERM, unix.ENOBUFS: // EPERM and ENOBUFS report a drop
		default:
			return 0, fmt.Errorf("send a packet: %w", errno)
		}
	}
	return float64(time.Since(start)) / float64(packets), nil
}
