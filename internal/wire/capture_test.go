//go:build guest

package wire

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/testenv"
)

// A capture records packets that arrive at a device, with the kernel's timestamps. It uses
// a ring in shared memory, so no process wakes up during the measurement.
type capture struct {
	t    *testing.T
	fd   int
	ring []byte
	next int // frame of the ring
}

// A packet is a captured packet, which GRO may have merged from several.
type packet struct {
	at       time.Duration // CLOCK_MONOTONIC
	bytes    int           // of the frame, including its tag
	tagged   bool
	vlan     uint16
	from, to netip.Addr
	protocol byte
	tos      byte
	broken   bool // the checksum of the IPv4 header is wrong
	toPort   uint16
	number   uint64        // of our UDP packets
	sent     time.Duration // when it was sent
	due      time.Duration // its departure time
	delayed  bool          // it has one; else due is when the watch saw it
}

const (
	ringFrame = 256 // bytes kept of a packet, including the kernel's header
	ringBlock = 1 << 20
)

// capture starts a capture of up to the given number of packets at a device.
func (r *rig) capture(n *testenv.Netns, device string, packets int) *capture {
	r.t.Helper()
	c := &capture{t: r.t}
	r.in(n, func() (err error) {
		// Without a protocol the socket receives nothing until Bind.
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err := unix.SetsockoptInt(c.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
			return err
		}
		blocks := (packets*ringFrame + ringBlock - 1) / ringBlock
		err = unix.SetsockoptTpacketReq(c.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
			Block_size: ringBlock, Block_nr: uint32(blocks), Frame_size: ringFrame, Frame_nr: uint32(blocks * (ringBlock / ringFrame)),
		})
		if err != nil {
			return fmt.Errorf("create the ring: %w", err)
		}
		c.ring, err = unix.Mmap(c.fd, 0, blocks*ringBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("map the ring: %w", err)
		}
		index, err := deviceIndex(device)
		if err != nil {
			return err
		}
		return unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: networkOrder(unix.ETH_P_ALL), Ifindex: index})
	})
	r.t.Cleanup(c.close)
	return c
}

func (c *capture) close() {
	if c.ring == nil {
		return
	}
	unix.Munmap(c.ring)
	unix.Close(c.fd)
	c.ring = nil
}

// take returns the UDP and TCP packets that have arrived since the last call.
func (c *capture) take() (packets []packet) {
	c.t.Helper()
	stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	testenv.Must(c.t, err)
	if stats.Drops > 0 {
		c.t.Fatalf("the capture missed %d packets: its ring is too small", stats.Drops)
	}
	offset := clockOffset()
	for {
		frame := c.ring[c.next*ringFrame:][:ringFrame]
		header := (*unix.Tpacket2Hdr)(unsafe.Pointer(&frame[0]))
		if header.Status&unix.TP_STATUS_USER == 0 {
			return packets
		}
		address := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&frame[unsafe.Sizeof(*header)]))
		if address.Pkttype != unix.PACKET_OUTGOING {
			p := packet{
				at:    time.Duration(header.Sec)*time.Second + time.Duration(header.Nsec) - offset,
				bytes: int(header.Len),
			}
			if header.Status&unix.TP_STATUS_VLAN_VALID != 0 {
				p.tagged, p.vlan = true, header.Vlan_tci
				p.bytes += 4
			}
			if p.read(frame[header.Mac:][:header.Snaplen]) {
				packets = append(packets, p)
			}
		}
		header.Status = 0
		c.next = (c.next + 1) % (len(c.ring) / ringFrame)
	}
}

// read parses a frame, and reports whether it is UDP or TCP.
func (p *packet) read(b []byte) bool {
	kind, b := binary.BigEndian.Uint16(b[12:]), b[14:]
	if kind == unix.ETH_P_8021Q && len(b) >= 4 { // if it is not in the metadata
		kind, b = binary.BigEndian.Uint16(b[2:]), b[4:]
	}
	switch {
	case kind == unix.ETH_P_IP && len(b) >= 20:
		p.from, p.to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		p.tos, p.protocol, p.broken = b[1], b[9], checksum(b[:20]) != 0
		b = b[20:]
	case kind == unix.ETH_P_IPV6 && len(b) >= 40:
		p.from, p.to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		p.tos, p.protocol = b[0]<<4|b[1]>>4, b[6]
		b = b[40:]
	default:
		return false
	}
	if len(b) < 8 || p.protocol != unix.IPPROTO_UDP && p.protocol != unix.IPPROTO_TCP {
		return false
	}
	p.toPort = binary.BigEndian.Uint16(b[2:])
	if p.protocol == unix.IPPROTO_UDP && len(b) >= 24 {
		p.number, p.sent = binary.BigEndian.Uint64(b[8:]), time.Duration(binary.BigEndian.Uint64(b[16:]))
	}
	return true
}

// checksum computes the checksum of RFC 1071: 0 over a header with a correct checksum.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

func networkOrder(n uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], n)
	return binary.NativeEndian.Uint16(b[:])
}

// now returns CLOCK_MONOTONIC, the clock of departure times.
func now() time.Duration { return clock(unix.CLOCK_MONOTONIC) }

func clock(id int32) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// clockOffset returns CLOCK_REALTIME, the clock of captures, less CLOCK_MONOTONIC. It is
// constant, because nothing in a guest sets the clock.
func clockOffset() time.Duration {
	var offsets []time.Duration
	for range 9 {
		before := now()
		real := clock(unix.CLOCK_REALTIME)
		offsets = append(offsets, real-before-(now()-before)/2)
	}
	slices.Sort(offsets)
	return offsets[len(offsets)/2]
}

// where returns the packets for which is returns true.
func where(packets []packet, is func(p packet) bool) (found []packet) {
	for _, p := range packets {
		if is(p) {
			found = append(found, p)
		}
	}
	return found
}

// to returns the packets to the addresses in a prefix.
func to(packets []packet, prefix netip.Prefix) []packet {
	return where(packets, func(p packet) bool { return prefix.Contains(p.to) })
}
