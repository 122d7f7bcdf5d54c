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

// A capture is what arrives at a device of a namespace, with the times that
// the kernel gives it. It goes into memory that is shared with the kernel, so
// nobody has to wake up for it while time is measured.
type capture struct {
	t    *testing.T
	fd   int
	ring []byte
	next int // frame of the ring
}

// A packet is one that arrived, or several that were merged.
type packet struct {
	at       time.Duration // CLOCK_MONOTONIC
	bytes    int           // as a frame, with its tag
	tagged   bool
	vlan     uint16
	from, to netip.Addr
	protocol byte
	tos      byte
	broken   bool // the checksum of the IPv4 header is wrong
	toPort   uint16
	number   uint64        // of our UDP packets
	sent     time.Duration // when they were given to the kernel
	due      time.Duration // when fq was told to let them out
}

const (
	ringFrame = 256 // bytes: what is kept of a packet, with the kernel's header
	ringBlock = 1 << 20
)

// capture begins to capture at a device; there is room for so many packets.
func (r *rig) capture(n *testenv.Netns, device string, packets int) *capture {
	r.t.Helper()
	c := &capture{t: r.t}
	r.in(n, func() (err error) {
		// Without a protocol nothing comes before all is set.
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
			return fmt.Errorf("make a ring: %w", err)
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

// take are the packets that have arrived since it was last asked, of UDP and TCP.
func (c *capture) take() (packets []packet) {
	c.t.Helper()
	stats, err := unix.GetsockoptTpacketStats(c.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	testenv.Must(c.t, err)
	if stats.Drops > 0 {
		c.t.Fatalf("the capture has missed %d packets: its ring is too small", stats.Drops)
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

// read finds out what a frame is, and whether it is of UDP or TCP.
func (p *packet) read(b []byte) bool {
	kind, b := binary.BigEndian.Uint16(b[12:]), b[14:]
	if kind == unix.ETH_P_8021Q && len(b) >= 4 { // where it is not beside the packet
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

// checksum is that of RFC 1071, 0 over a header that has the right one.
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

// now is the kernel's CLOCK_MONOTONIC, by which departure times are.
func now() time.Duration { return clock(unix.CLOCK_MONOTONIC) }

func clock(id int32) time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(id, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// clockOffset is what CLOCK_REALTIME, of which captures are, has more than
// CLOCK_MONOTONIC. Nothing in a guest sets or slews its clock.
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

// where are those packets of which it is true.
func where(packets []packet, is func(p packet) bool) (found []packet) {
	for _, p := range packets {
		if is(p) {
			found = append(found, p)
		}
	}
	return found
}

// to are the packets to the addresses in a prefix.
func to(packets []packet, prefix netip.Prefix) []packet {
	return where(packets, func(p packet) bool { return prefix.Contains(p.to) })
}
