package trace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

const ethernetHeader = 14

// A capture reads packets of a pcap (draft-ietf-opsawg-pcap).
type capture struct {
	from   *bufio.Reader
	order  binary.ByteOrder
	link   uint32
	unit   uint64 // ns of the fraction of a second
	buffer []byte
	count  uint64
}

// A frame is what a capture has of a packet.
type frame struct {
	time uint64 // ns since 1970
	wire uint32 // bytes
	data []byte
}

func openPcap(b *bufio.Reader) (*Reader, error) {
	c := &capture{from: b, order: binary.LittleEndian, unit: 1000}
	head, err := c.read(24)
	if err != nil {
		return nil, errors.New("it begins like a pcap, but cannot be read: it ends within its header")
	}
	if head[0] == 0xa1 {
		c.order = binary.BigEndian
	}
	if major, minor := c.order.Uint16(head[4:]), c.order.Uint16(head[6:]); major != 2 || minor != 4 {
		return nil, fmt.Errorf("it begins like a pcap, but cannot be read: it has version %d.%d", major, minor)
	}
	if c.order.Uint32(head) == 0xa1b23c4d {
		c.unit = 1
	}
	c.link = c.order.Uint32(head[20:]) & 0xffff
	r := &Reader{Addressed: true, HasDSCPs: true, L2Bytes: ethernetHeader}
	r.next = func(p *Packet) error {
		l2, err := c.next(p)
		if c.count == 1 {
			r.L2Bytes = l2
		}
		return err
	}
	return r, nil
}

// read returns the next n bytes, which are valid until the next call.
func (c *capture) read(n uint32) ([]byte, error) {
	if n > MaxBytes {
		return nil, fmt.Errorf("%d bytes; the maximum is %d", n, MaxBytes)
	}
	c.buffer = slices.Grow(c.buffer[:0], int(n))[:n]
	_, err := io.ReadFull(c.from, c.buffer)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return c.buffer, err
}

// record reads a packet. The error is io.EOF at the end.
func (c *capture) record() (f frame, err error) {
	if _, err := c.from.Peek(1); err != nil {
		return f, err
	}
	head, err := c.read(16)
	if err != nil {
		return f, err
	}
	f = frame{time: uint64(c.order.Uint32(head))*1e9 + uint64(c.order.Uint32(head[4:]))*c.unit, wire: c.order.Uint32(head[12:])}
	f.data, err = c.read(c.order.Uint32(head[8:]))
	return f, err
}

// network returns the length of the header in front of the network header, the protocol of that, and the length
// of the link header that the frame had.
func (c *capture) network(f frame) (header int, etherType uint16, l2 uint8, err error) {
	word := func(at int) uint16 {
		if len(f.data) < at+2 {
			return 0
		}
		return binary.BigEndian.Uint16(f.data[at:])
	}
	cooked := func(device uint16) uint8 {
		if device == 1 || device == 772 { // Ethernet or loopback
			return ethernetHeader
		}
		return 0
	}
	// See www.tcpdump.org/linktypes.html. Raw IP has other numbers on BSD.
	switch c.link {
	case 1: // Ethernet
		return ethernetHeader, word(12), ethernetHeader, nil
	case 228: // IPv4
		return 0, etherTypeIPv4, 0, nil
	case 229: // IPv6
		return 0, etherTypeIPv6, 0, nil
	case 12, 14, 101: // raw IP
		if word(0)>>12 == 6 {
			return 0, etherTypeIPv6, 0, nil
		}
		return 0, etherTypeIPv4, 0, nil
	case 0, 108: // loopback of BSD: an address family, in either byte order
		switch word(0)>>8 | word(2)&0xff {
		case 2:
			return 4, etherTypeIPv4, 0, nil
		case 10, 24, 28, 30: // of Linux, OpenBSD, FreeBSD and macOS
			return 4, etherTypeIPv6, 0, nil
		}
		return 4, 0, 0, nil
	case 113: // Linux cooked
		return 16, word(14), cooked(word(2)), nil
	case 276: // version 2 of it
		return 20, word(0), cooked(word(8)), nil
	}
	return 0, 0, 0, fmt.Errorf("is of link type %d (see pcap-linktype(7)), which is not supported; capture on Ethernet, raw IP, or the Linux device any", c.link)
}

// next reads a packet. l2 is the length of its link header in bytes.
func (c *capture) next(p *Packet) (l2 uint8, err error) {
	f, err := c.record()
	switch {
	case err == io.EOF:
		return 0, io.EOF
	case errors.Is(err, io.ErrUnexpectedEOF):
		return 0, DamagedError{fmt.Errorf("the capture ends within packet %d", c.count+1)}
	case err != nil:
		return 0, DamagedError{fmt.Errorf("packet %d cannot be read: %w", c.count+1, err)}
	}
	c.count++
	header, etherType, l2, err := c.network(f)
	if err != nil {
		return 0, fmt.Errorf("packet %d %w", c.count, err)
	}
	*p = Packet{Time: f.time}
	length := max(int(f.wire), len(f.data)) // a packet has at least its captured bytes
	if len(f.data) >= max(header, 1) {
		p.EtherType, p.Network = etherType, f.data[header:min(len(f.data), header+MaxHeaders)]
		length += int(l2) - header
	}
	if length < 0 || length > MaxBytes {
		return 0, DamagedError{fmt.Errorf("packet %d claims to have %d bytes; the maximum is %d", c.count, length, MaxBytes)}
	}
	p.Bytes = uint64(length)
	return l2, nil
}
