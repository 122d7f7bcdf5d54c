package trace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"
)

const ethernetHeader = 14

// A capture reads packets of a pcap (draft-ietf-opsawg-pcap) or a pcapng (draft-ietf-opsawg-pcapng).
type capture struct {
	from    *bufio.Reader
	order   binary.ByteOrder
	devices []device // of a section of a pcapng; a pcap has one
	buffer  []byte
	count   uint64
	l2      uint8 // bytes of the link header of the last packet
}

// A device is where packets were captured. Times are in its units.
type device struct {
	link      uint16
	perSecond uint64
}

// A frame is what a capture has of a packet.
type frame struct {
	device
	units uint64 // of time
	wire  uint32 // bytes
	data  []byte
}

func openPcap(b *bufio.Reader) (*Reader, error) {
	c := &capture{from: b, order: binary.LittleEndian}
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
	c.devices = []device{{link: uint16(c.order.Uint32(head[20:])), perSecond: 1e6}}
	if c.order.Uint32(head) == 0xa1b23c4d {
		c.devices[0].perSecond = 1e9
	}
	return captured(c, c.record), nil
}

func openPcapng(b *bufio.Reader) (*Reader, error) {
	c := &capture{from: b}
	return captured(c, c.packetBlock), nil
}

func captured(c *capture, read func() (frame, error)) *Reader {
	r := &Reader{addressed: true, classed: true, l2Bytes: ethernetHeader}
	r.next = func(p *Packet) error {
		err := c.next(p, read)
		if c.count == 1 {
			r.l2Bytes = c.l2
		}
		return err
	}
	return r
}

// read returns the next n bytes, which are valid until the next call.
func (c *capture) read(n uint32) ([]byte, error) {
	if n > MaxBytes+1<<17 { // a packet, and room for the rest of its block
		return nil, fmt.Errorf("%d bytes; the maximum is %d", n, MaxBytes)
	}
	c.buffer = slices.Grow(c.buffer[:0], int(n))[:n]
	_, err := io.ReadFull(c.from, c.buffer)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return c.buffer, err
}

// record reads a packet of a pcap.
func (c *capture) record() (f frame, err error) {
	if _, err := c.from.Peek(1); err != nil {
		return f, err
	}
	head, err := c.read(16)
	if err != nil {
		return f, err
	}
	f = frame{device: c.devices[0], wire: c.order.Uint32(head[12:])}
	f.units = uint64(c.order.Uint32(head))*f.perSecond + uint64(c.order.Uint32(head[4:]))
	f.data, err = c.read(c.order.Uint32(head[8:]))
	return f, err
}

var (
	errShort  = errors.New("a block is too short")
	errNoTime = errors.New("it has no time between 1970 and 2262; convert the capture with 'editcap -F pcap'")
)

// packetBlock reads a packet of a pcapng, and the blocks before it.
func (c *capture) packetBlock() (f frame, err error) {
	for {
		kind, body, err := c.block()
		if err != nil {
			return f, err
		}
		switch kind {
		case 0x0a0d0d0a: // a section header
			if c.devices = nil; len(body) < 8 || c.order.Uint16(body[4:]) != 1 {
				return f, errors.New("its section is not of version 1")
			}
		case 1:
			if err := c.describe(body); err != nil {
				return f, err
			}
		case 2, 3: // an obsolete packet, or a simple one
			return f, errNoTime
		case 6: // an enhanced packet
			if len(body) < 20 || uint64(c.order.Uint32(body[12:])) > uint64(len(body)-20) {
				return f, errShort
			}
			id := c.order.Uint32(body)
			if uint64(id) >= uint64(len(c.devices)) {
				return f, fmt.Errorf("no block describes interface %d", id)
			}
			return frame{
				device: c.devices[id], units: uint64(c.order.Uint32(body[4:]))<<32 | uint64(c.order.Uint32(body[8:])),
				wire: c.order.Uint32(body[16:]), data: body[20 : 20+c.order.Uint32(body[12:])],
			}, nil
		}
	}
}

// block reads a block of a pcapng.
func (c *capture) block() (kind uint32, body []byte, err error) {
	head, err := c.from.Peek(12) // the shortest block
	if err == io.EOF && len(head) > 0 {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return 0, nil, err
	}
	switch string(head[:4]) + string(head[8:]) { // a section header says the byte order
	case "\n\r\r\n\x1a\x2b\x3c\x4d":
		c.order = binary.BigEndian
	case "\n\r\r\n\x4d\x3c\x2b\x1a":
		c.order = binary.LittleEndian
	}
	if c.order == nil {
		return 0, nil, errors.New("its byte order is unknown")
	}
	kind, length := c.order.Uint32(head), c.order.Uint32(head[4:])
	if length < 12 {
		return 0, nil, errShort
	}
	if body, err = c.read(length); err != nil {
		return 0, nil, err
	}
	return kind, body[8 : length-4], nil // it ends with its length again
}

// describe takes a block that describes a device.
func (c *capture) describe(body []byte) error {
	if len(body) < 8 {
		return errShort
	}
	d := device{link: c.order.Uint16(body), perSecond: 1}
	base, exponent := uint64(10), byte(6)
	for options := body[8:]; len(options) >= 4; {
		code, n := c.order.Uint16(options), int(c.order.Uint16(options[2:]))
		value := options[4:]
		if code == 0 || n > len(value) {
			break
		}
		if code == 9 && n == 1 { // the unit: a negative power of 10 or, if the highest bit is set, of 2
			if exponent = value[0] & 0x7f; value[0] != exponent {
				base = 2
			}
		}
		options = value[min((n+3)&^3, len(value)):]
	}
	for range exponent {
		over, product := bits.Mul64(d.perSecond, base)
		if over != 0 {
			return fmt.Errorf("its times are in units of %d^-%d s, which are too small", base, exponent)
		}
		d.perSecond = product
	}
	c.devices = append(c.devices, d)
	return nil
}

// time returns ns since 1970.
func (f frame) time() (uint64, error) {
	seconds := f.units / f.perSecond
	if seconds >= math.MaxInt64/1_000_000_000 {
		return 0, errNoTime
	}
	over, product := bits.Mul64(f.units%f.perSecond, 1e9)
	ns, _ := bits.Div64(over, product, f.perSecond)
	return seconds*1e9 + ns, nil
}

// network returns the length of the header in front of the network header, the protocol of that, and the length
// of the link header that the frame had.
func (f frame) network() (header int, etherType uint16, l2 uint8, err error) {
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
	switch f.link {
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
	return 0, 0, 0, fmt.Errorf("is of link type %d (see pcap-linktype(7)), which is not supported; capture on Ethernet, raw IP, or the Linux device any", f.link)
}

func (c *capture) next(p *Packet, read func() (frame, error)) error {
	f, err := read()
	var at uint64
	if err == nil {
		at, err = f.time()
	}
	switch {
	case err == io.EOF:
		return io.EOF
	case errors.Is(err, io.ErrUnexpectedEOF):
		return DamagedError{fmt.Errorf("the capture ends within packet %d", c.count+1)}
	case err != nil:
		return DamagedError{fmt.Errorf("packet %d cannot be read: %w", c.count+1, err)}
	}
	c.count++
	header, etherType, l2, err := f.network()
	if err != nil {
		return fmt.Errorf("packet %d %w", c.count, err)
	}
	*p, c.l2 = Packet{Time: at}, l2
	length := max(int(f.wire), len(f.data)) // a packet has at least its captured bytes
	if len(f.data) >= max(header, 1) {
		p.EtherType, p.Network = etherType, f.data[header:min(len(f.data), header+MaxHeaders)]
		length += int(l2) - header
	}
	if length < 0 || length > MaxBytes {
		return DamagedError{fmt.Errorf("packet %d claims to have %d bytes; the maximum is %d", c.count, length, MaxBytes)}
	}
	p.Bytes = uint64(length)
	return nil
}
