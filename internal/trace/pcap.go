package trace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

// Raw IP has other link types on BSD.
const (
	linkTypeRawBSD     layers.LinkType = 12
	linkTypeRawOpenBSD layers.LinkType = 14
)

const ethernetHeader = 14

// A capture reads packets of a capture file.
type capture struct {
	read func() ([]byte, gopacket.CaptureInfo, error)
	// of returns the link and the time of the last packet.
	of    func(gopacket.CaptureInfo) (layers.LinkType, time.Time, error)
	count uint64
	l2    uint8 // bytes of the link header of the last packet
}

func openPcap(b *bufio.Reader) (*Reader, error) {
	r, err := pcapgo.NewReader(b)
	if err != nil {
		return nil, unreadable("pcap", err)
	}
	r.SetSnaplen(MaxBytes) // the value in the file is often wrong
	link := r.LinkType()
	var long []byte
	return captured(&capture{
		read: func() ([]byte, gopacket.CaptureInfo, error) {
			data, ci, err := r.ZeroCopyReadPacketData()
			if err == nil || ci.CaptureLength <= ci.Length || ci.CaptureLength > MaxBytes {
				return data, ci, err
			}
			// pcapgo refuses a record that is longer than its packet. It has read only the
			// header, directly from b.
			long = slices.Grow(long[:0], ci.CaptureLength)[:ci.CaptureLength]
			_, err = io.ReadFull(b, long)
			return long, ci, err
		},
		of: func(ci gopacket.CaptureInfo) (layers.LinkType, time.Time, error) {
			return link, ci.Timestamp, nil
		},
	}), nil
}

func openPcapng(b *bufio.Reader) (*Reader, error) {
	r, err := pcapgo.NewNgReader(b, pcapgo.NgReaderOptions{WantMixedLinkType: true})
	if err != nil {
		return nil, unreadable("pcapng", err)
	}
	return captured(&capture{
		read: r.ZeroCopyReadPacketData,
		of: func(ci gopacket.CaptureInfo) (layers.LinkType, time.Time, error) {
			device, err := r.Interface(ci.InterfaceIndex)
			if err != nil {
				return 0, time.Time{}, err
			}
			at, err := exact(ci.Timestamp, device.TimestampResolution)
			return device.LinkType, at, err
		},
	}), nil
}

func unreadable(kind string, err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		err = errors.New("it ends within its header")
	}
	return fmt.Errorf("it begins like a %s, but cannot be read: %w", kind, err)
}

// exact corrects times in units of 2^-n s: pcapgo rounds the unit down to whole nanoseconds.
func exact(t time.Time, unit pcapgo.NgResolution) (time.Time, error) {
	n := unit.Exponent()
	switch {
	case unit.Binary() && n < 30:
		units := uint64(t.Nanosecond()) / (1e9 >> n)
		return time.Unix(t.Unix(), int64(units*1e9>>n)), nil
	case unit.Binary():
		return t, fmt.Errorf("its times are in units of 2^-%d s; the smallest supported unit is 2^-29", n)
	case n > 19:
		return t, fmt.Errorf("its times are in units of 10^-%d s; the smallest supported unit is 10^-19", n)
	}
	return t, nil
}

func captured(c *capture) *Reader {
	r := &Reader{addressed: true, classed: true, l2Bytes: ethernetHeader}
	r.next = func(p *Packet) error {
		err := c.next(p)
		if c.count == 1 {
			r.l2Bytes = c.l2
		}
		return err
	}
	return r
}

func (c *capture) next(p *Packet) error {
	data, ci, err := c.read()
	switch {
	case err == io.EOF && ci.CaptureLength == 0: // otherwise bytes of a packet are missing
		return io.EOF
	case err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF):
		return DamagedError{fmt.Errorf("the capture ends within packet %d", c.count+1)}
	case err != nil:
		return DamagedError{fmt.Errorf("packet %d cannot be read: %w", c.count+1, err)}
	}
	c.count++
	link, at, err := c.of(ci)
	if err != nil {
		return fmt.Errorf("packet %d: %w", c.count, err)
	}
	if seconds := at.Unix(); seconds < 0 || seconds >= math.MaxInt64/int64(time.Second) {
		return DamagedError{fmt.Errorf("packet %d has no time between 1970 and 2262", c.count)}
	}
	p.Time = uint64(at.UnixNano())
	length := max(ci.Length, ci.CaptureLength) // a packet has at least its captured bytes
	p.EtherType, p.Network, c.l2 = 0, nil, ethernetHeader
	switch link {
	case layers.LinkTypeEthernet:
		if len(data) >= ethernetHeader {
			p.EtherType, p.Network = binary.BigEndian.Uint16(data[12:]), data[ethernetHeader:]
		}
	case layers.LinkTypeRaw, linkTypeRawBSD, linkTypeRawOpenBSD:
		c.l2 = 0
		if len(data) > 0 {
			p.EtherType, p.Network = etherTypeIPv4, data
			if data[0]>>4 == 6 {
				p.EtherType = etherTypeIPv6
			}
		}
	case layers.LinkTypeIPv4:
		c.l2, p.EtherType, p.Network = 0, etherTypeIPv4, data
	case layers.LinkTypeIPv6:
		c.l2, p.EtherType, p.Network = 0, etherTypeIPv6, data
	case layers.LinkTypeNull, layers.LinkTypeLoop:
		c.l2 = 0
		var loop layers.Loopback
		if loop.DecodeFromBytes(data, gopacket.NilDecodeFeedback) == nil {
			p.Network = loop.Payload
			length -= len(loop.Contents)
			switch loop.Family {
			case layers.ProtocolFamilyIPv4:
				p.EtherType = etherTypeIPv4
			case layers.ProtocolFamilyIPv6BSD, layers.ProtocolFamilyIPv6FreeBSD, layers.ProtocolFamilyIPv6Darwin, layers.ProtocolFamilyIPv6Linux:
				p.EtherType = etherTypeIPv6
			}
		}
	case layers.LinkTypeLinuxSLL:
		var cooked layers.LinuxSLL
		if cooked.DecodeFromBytes(data, gopacket.NilDecodeFeedback) == nil {
			p.EtherType, p.Network = uint16(cooked.EthernetType), cooked.Payload
			length += c.cooked(len(cooked.Contents), layers.ARPHardwareType(cooked.AddrType))
		}
	case layers.LinkTypeLinuxSLL2:
		var cooked layers.LinuxSLL2
		if cooked.DecodeFromBytes(data, gopacket.NilDecodeFeedback) == nil {
			p.EtherType, p.Network = uint16(cooked.ProtocolType), cooked.Payload
			length += c.cooked(len(cooked.Contents), cooked.ARPHardwareType)
		}
	default:
		name := link.String()
		if name == "UnknownLinkType" {
			name = "see pcap-linktype(7)"
		}
		return fmt.Errorf("packet %d is of link type %d (%s), which is not supported; capture on Ethernet, raw IP, or the Linux device any", c.count, link, name)
	}
	if length < 0 || length > MaxBytes {
		return DamagedError{fmt.Errorf("packet %d claims to have %d bytes; the maximum is %d", c.count, length, MaxBytes)}
	}
	p.Bytes = uint64(length)
	p.Network = p.Network[:min(len(p.Network), MaxHeaders)]
	return nil
}

// cooked returns how much longer a frame was than its capture, in which a header of so
// many bytes replaces that of the link.
func (c *capture) cooked(header int, device layers.ARPHardwareType) int {
	if device != layers.ARPHardwareTypeEthernet && device != layers.ARPHardwareTypeLoopback {
		c.l2 = 0
	}
	return int(c.l2) - header
}
