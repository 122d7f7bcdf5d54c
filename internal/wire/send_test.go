//go:build guest

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A stream sends UDP packets of one size to one address at an interval.
type stream struct {
	from  netip.Addr // the zero Addr for the default
	to    netip.AddrPort
	bytes int           // of a frame, without a tag
	every time.Duration // 0 for as fast as possible
	ect   bool
	count int           // packets to send; 0 for as long as others send
	after time.Duration // start, relative to the start of send

	fd      int
	frame   []byte // data for the kernel: payload, or a whole frame on packet sockets
	payload []byte
	control []byte // control message with the departure time, if not nil
	next    time.Duration
	number  uint64
}

// flood returns a stream of full frames at a multiple of a rate.
func flood(to netip.Addr, rate uint64, times float64) *stream {
	return &stream{to: netip.AddrPortFrom(to, sinkPort), bytes: frame, every: time.Duration(frame * 8e9 / (times * float64(rate)))}
}

const (
	tick = time.Millisecond // packets are sent this late, several per wake-up
	wave = 12               // packets at the start of a flood
)

// burst returns a stream of full frames without gaps.
func burst(to netip.Addr, count int) *stream {
	return &stream{to: netip.AddrPortFrom(to, sinkPort), bytes: frame, count: count}
}

// sinkPort is the discard port.
const sinkPort = 9

// sink discards UDP packets at the receiver, which would otherwise send ICMP errors.
func (r *rig) sink() {
	r.t.Helper()
	r.in(r.receiver, func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		r.t.Cleanup(func() { unix.Close(fd) })
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrInet6{Port: sinkPort})
	})
}

// send sends streams from a namespace for a time d, or until all streams with a count are
// finished. It waits until all packets have left.
func (r *rig) send(from *testenv.Netns, d time.Duration, streams ...*stream) {
	r.t.Helper()
	r.in(from, func() error {
		if err := lowerPriority(); err != nil {
			return err
		}
		for _, s := range streams {
			if s.payload == nil {
				if err := s.open(); err != nil {
					return fmt.Errorf("open a stream to %v: %w", s.to, err)
				}
			}
			defer unix.Close(s.fd)
		}
		runtime.GC() // now rather than during the measurement
		start := now()
		for i, s := range streams {
			s.number = 0
			s.next = start + s.after
			if s.every > 0 && s.control == nil {
				// A flood starts with a wave, so that its bucket is never empty. Streams have different phases.
				s.next -= s.every*time.Duration(i)/time.Duration(len(streams)) + s.every*wave
			}
		}
		for {
			var first *stream
			for _, s := range streams {
				if (s.count == 0 || s.number < uint64(s.count)) && (first == nil || s.next < first.next) {
					first = s
				}
			}
			if first == nil || d > 0 && first.next >= start+d {
				// Queued packets leave before the cleanup, which would keep the CPU busy.
				sleepUntil(now() + r.longest + 50*time.Millisecond)
				return nil
			}
			// A wake-up costs more than a send.
			if first.next > now() {
				sleepUntil(first.next + tick)
			}
			if err := first.sendOne(); err != nil {
				return fmt.Errorf("send to %v: %w", first.to, err)
			}
		}
	})
}

// lowerPriority gives the kernel's threads, which handle packets under load, priority over
// the calling thread. It also makes sleeps of the thread exact.
func lowerPriority() error {
	return errors.Join(unix.Setpriority(unix.PRIO_PROCESS, 0, 19), unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0))
}

func (s *stream) open() (err error) {
	if s.fd, err = udpSocket(s.from, s.to); err != nil {
		return err
	}
	headers := 14 + 20 + 8
	if s.to.Addr().Is6() {
		headers += 20
	}
	s.payload = make([]byte, s.bytes-headers)
	s.frame = s.payload
	if !s.ect {
		return nil
	}
	if s.to.Addr().Is6() {
		return unix.SetsockoptInt(s.fd, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, ect0)
	}
	return unix.SetsockoptInt(s.fd, unix.IPPROTO_IP, unix.IP_TOS, ect0)
}

// The ECN field (RFC 3168).
const (
	ect0 = 2
	ce   = 3
)

// udpSocket returns a connected socket in the calling thread's namespace, with a send buffer larger than any queue.
func udpSocket(from netip.Addr, to netip.AddrPort) (int, error) {
	fd, err := unix.Socket(addressFamily(to.Addr()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 1<<30)
	if from.IsValid() {
		err = errors.Join(err, unix.Bind(fd, sockaddr(netip.AddrPortFrom(from, 0))))
	}
	err = errors.Join(err, unix.Connect(fd, sockaddr(to)))
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func addressFamily(a netip.Addr) int {
	if a.Is6() {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

func sockaddr(to netip.AddrPort) unix.Sockaddr {
	if to.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
}

// sendOne sends the next packet. A drop is not an error.
func (s *stream) sendOne() error {
	s.next += s.every
	sent := now()
	if s.control != nil {
		sent += probeWait
		binary.NativeEndian.PutUint64(s.control[unix.CmsgLen(0):], uint64(sent))
	}
	binary.BigEndian.PutUint64(s.payload, s.number)
	binary.BigEndian.PutUint64(s.payload[8:], uint64(sent))
	s.number++
	part := unix.Iovec{Base: &s.frame[0]}
	part.SetLen(len(s.frame))
	message := unix.Msghdr{Iov: &part, Iovlen: 1}
	if s.control != nil {
		message.Control = &s.control[0]
		message.SetControllen(len(s.control))
	}
	// RawSyscall avoids Go's scheduler, because the call does not block.
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&message)), unix.MSG_DONTWAIT)
	if errno != 0 && errno != unix.ENOBUFS { // a drop of a local packet
		return errno
	}
	return nil
}

// sleepUntil sleeps until now returns t.
func sleepUntil(t time.Duration) {
	ts := unix.NsecToTimespec(int64(t))
	for unix.ClockNanosleep(unix.CLOCK_MONOTONIC, unix.TIMER_ABSTIME, &ts, nil) == unix.EINTR {
	}
}

// From asm-generic/socket.h, for most architectures.
const soTxtime = 61

// tagged returns a stream on a device of the router with a VLAN tag in each frame.
func (r *rig) tagged(device string, to netip.Addr, vlan uint16) *stream {
	r.t.Helper()
	s := &stream{to: netip.AddrPortFrom(to, sinkPort)}
	r.in(r.router, func() (err error) {
		if s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		index, err := deviceIndex(device)
		if err != nil {
			return err
		}
		return unix.Bind(s.fd, &unix.SockaddrLinklayer{Ifindex: index})
	})
	plain := testenv.Frame(v4.routerAgain.Addr(), to, frame)
	s.frame = binary.BigEndian.AppendUint16(slices.Clone(plain[:12]), unix.ETH_P_8021Q)
	s.frame = append(binary.BigEndian.AppendUint16(s.frame, vlan), plain[12:]...)
	s.payload = s.frame[14+4+20+8:]
	return s
}

// probe returns a stream from the router whose sender sets departure times, as the program
// does for other packets. So the probes measure the lateness that the qdisc, the timers
// and the capture cause.
func (r *rig) probe() *stream {
	r.t.Helper()
	s := &stream{to: netip.AddrPortFrom(probeTo, sinkPort), bytes: 96, every: 5 * time.Millisecond}
	r.in(r.router, func() error {
		if err := s.open(); err != nil {
			return err
		}
		txtime := [8]byte{} // struct sock_txtime
		binary.NativeEndian.PutUint32(txtime[:], unix.CLOCK_MONOTONIC)
		return unix.SetsockoptString(s.fd, unix.SOL_SOCKET, soTxtime, string(txtime[:]))
	})
	s.control = make([]byte, unix.CmsgSpace(8))
	header := (*unix.Cmsghdr)(unsafe.Pointer(&s.control[0]))
	header.Level, header.Type = unix.SOL_SOCKET, soTxtime
	header.SetLen(unix.CmsgLen(8))
	return s
}

// probeTo is not limited.
var probeTo = v4.host(250)

// probeWait is the delay of a probe: longer than the CPU is ever busy.
const probeWait = 3 * time.Millisecond

// deviceIndex returns the index of a device in the calling thread's namespace.
func deviceIndex(name string) (int, error) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return 0, err
	}
	return i.Index, nil
}
