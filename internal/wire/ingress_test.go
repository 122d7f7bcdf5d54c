//go:build guest

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
	"github.com/shapectl/shapectl/pkg/policy"
)

// Packets are delayed on ingress as on egress, by their source address.
func TestIngress(t *testing.T) {
	const in = policy.Ingress
	flooded(t, time.Second, newLane(0, in, v4, policy.EachHost, mbit), newLane(1, in, v4, policy.EachAll, 5*mbit),
		newLane(0, in, v6, policy.EachHost, 5*mbit), newLane(1, in, v6, policy.EachAll, mbit))
}

// A reader is a UDP socket with receive timestamps.
type reader struct {
	t  *testing.T
	fd int
	at netip.Addr
}

const readPort = 7

// reader opens a socket in a namespace for packets to one of its addresses.
func (r *rig) reader(n *testenv.Netns, at netip.Addr) *reader {
	r.t.Helper()
	read := &reader{t: r.t, at: at}
	r.in(n, func() (err error) {
		if read.fd, err = unix.Socket(addressFamily(at), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		err = errors.Join(unix.SetsockoptInt(read.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 1<<20),
			unix.SetsockoptInt(read.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1))
		unspecified := netip.IPv4Unspecified()
		if at.Is6() {
			unspecified = netip.IPv6Unspecified()
			err = errors.Join(err, unix.SetsockoptInt(read.fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1))
		}
		return errors.Join(err, unix.Bind(read.fd, sockaddr(netip.AddrPortFrom(unspecified, readPort))))
	})
	r.t.Cleanup(func() { unix.Close(read.fd) })
	return read
}

// take returns the packets that have arrived since the last call.
func (read *reader) take() (packets []packet) {
	read.t.Helper()
	offset := clockOffset()
	buffer, control := make([]byte, frame), make([]byte, 128)
	for {
		n, controls, _, from, err := unix.Recvmsg(read.fd, buffer, control, 0)
		if errors.Is(err, unix.EAGAIN) {
			return packets
		}
		testenv.Must(read.t, err)
		p := packet{
			to: read.at, protocol: unix.IPPROTO_UDP,
			number: binary.BigEndian.Uint64(buffer), sent: time.Duration(binary.BigEndian.Uint64(buffer[8:])),
		}
		switch from := from.(type) {
		case *unix.SockaddrInet4:
			p.from, p.bytes = netip.AddrFrom4(from.Addr), 14+20+8+n
		case *unix.SockaddrInet6:
			p.from, p.bytes = netip.AddrFrom16(from.Addr), 14+40+8+n
		}
		messages, err := unix.ParseSocketControlMessage(control[:controls])
		testenv.Must(read.t, err)
		for _, m := range messages {
			if m.Header.Level == unix.SOL_SOCKET && m.Header.Type == unix.SCM_TIMESTAMPNS {
				p.at = time.Duration((*unix.Timespec)(unsafe.Pointer(&m.Data[0])).Nano()) - offset
			}
		}
		packets = append(packets, p)
	}
}

// A departure time does not reach the receiver: receive timestamps are arrival times, on
// the same machine and on another.
func TestTimestamps(t *testing.T) {
	for _, d := range []policy.Direction{policy.Egress, policy.Ingress} {
		t.Run(d.String(), func(t *testing.T) {
			r := newRig(t, 1)
			r.fq(toReceiver, fqPackets)
			for _, f := range []*family{v4, v6} {
				r.stamped(d, f)
			}
		})
	}
}

// stamped checks the receive timestamps of a delayed burst.
func (r *rig) stamped(d policy.Direction, f *family) {
	const accepted = 20
	n, at, far := r.receiver, f.host(1), f.host(1)
	if d == policy.Ingress {
		n, at, far = r.router, f.router.Addr(), f.sender.Addr()
	}
	rule := queued(f, 0, accepted)
	rule.Prefix = host(far)
	r.limit(r.limited(d), d, rule)
	w, read := r.watch(r.queue(d), 100), r.reader(n, at)
	s := burst(at, accepted+10)
	s.to = netip.AddrPortFrom(at, readPort)
	r.send(r.sender, 0, s)
	got := read.take()
	what := fmt.Sprintf("%v %s, by a socket's timestamps", d, f.name)
	w.into(got)
	inOrder(r.t, what, got, accepted)
	evenly(r.t, what, slow, got)
}
