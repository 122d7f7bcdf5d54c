// Package ping measures round trips to hosts by ICMP echo, from the network namespace of the thread that calls Send.
package ping

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

const (
	payload = 24 // bytes: with the headers, a packet is still small
	// kept is how many pings wait for an answer at most; older ones are forgotten.
	kept = 256
)

// A Pinger sends pings. It must be used by one goroutine.
type Pinger struct {
	clock   func() uint64
	id, seq uint16
	sockets map[bool]*icmp.PacketConn // by whether for IPv4
	waiting map[uint16]ping
	heard   chan message
}

type ping struct {
	to      netip.Addr
	sent    uint64
	payload [payload]byte
}

// A message is an ICMP message, and when it came.
type message struct {
	from    netip.Addr
	at      uint64
	v4, raw bool
	icmp    []byte
}

// An Answer is the answer to a ping. Times are those of the clock.
type Answer struct {
	From     netip.Addr
	Sent, At uint64
}

// New returns a Pinger that takes the time from a clock. It opens sockets when they are needed.
func New(clock func() uint64) *Pinger {
	var id [4]byte
	rand.Read(id[:]) // never fails
	return &Pinger{
		clock: clock, id: binary.NativeEndian.Uint16(id[:]), seq: binary.NativeEndian.Uint16(id[2:]),
		sockets: map[bool]*icmp.PacketConn{}, waiting: map[uint16]ping{}, heard: make(chan message, kept),
	}
}

// Close closes the sockets.
func (p *Pinger) Close() {
	for _, s := range p.sockets {
		s.Close()
	}
}

// socket opens the socket for a family: one for pings alone if the kernel permits that to this user, else a raw one.
func (p *Pinger) socket(v4 bool) (*icmp.PacketConn, error) {
	if s := p.sockets[v4]; s != nil {
		return s, nil
	}
	ping, raw, any := "udp6", "ip6:ipv6-icmp", "::"
	if v4 {
		ping, raw, any = "udp4", "ip4:icmp", "0.0.0.0"
	}
	s, err := icmp.ListenPacket(ping, any)
	if err != nil {
		if s, err = icmp.ListenPacket(raw, any); err != nil {
			return nil, fmt.Errorf("open a socket for pings: %w; give the process CAP_NET_RAW, or its group sysctl net.ipv4.ping_group_range", err)
		}
		if v4 {
			var only ipv4.ICMPFilter
			only.SetAll(true)
			only.Accept(ipv4.ICMPTypeEchoReply)
			err = s.IPv4PacketConn().SetICMPFilter(&only)
		} else {
			var only ipv6.ICMPFilter
			only.SetAll(true)
			only.Accept(ipv6.ICMPTypeEchoReply)
			err = s.IPv6PacketConn().SetICMPFilter(&only)
		}
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("open a socket for pings: filter answers: %w", err)
		}
	}
	p.sockets[v4] = s
	go p.listen(s, v4)
	return s, nil
}

// listen takes the time of answers as they come.
func (p *Pinger) listen(s *icmp.PacketConn, v4 bool) {
	buffer, raw := make([]byte, 1500), !isPing(s)
	for {
		n, from, err := s.ReadFrom(buffer)
		at := p.clock()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		select {
		case p.heard <- message{addrOf(from), at, v4, raw, bytes.Clone(buffer[:n])}:
		default: // a flood
		}
	}
}

// isPing reports whether the kernel chooses the identifier of a socket's pings, and lets no other answer through.
func isPing(s *icmp.PacketConn) bool {
	_, is := s.LocalAddr().(*net.UDPAddr)
	return is
}

func addrOf(a net.Addr) (addr netip.Addr) {
	switch a := a.(type) {
	case *net.UDPAddr:
		addr, _ = netip.AddrFromSlice(a.IP)
	case *net.IPAddr:
		addr, _ = netip.AddrFromSlice(a.IP)
	}
	return addr.Unmap()
}

// Send sends a ping to an address.
func (p *Pinger) Send(to netip.Addr) error {
	s, err := p.socket(to.Is4())
	if err != nil {
		return err
	}
	p.seq++
	its := ping{to: to}
	rand.Read(its.payload[:])
	m := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: int(p.id), Seq: int(p.seq), Data: its.payload[:]}}
	if !to.Is4() {
		m.Type = ipv6.ICMPTypeEchoRequest
	}
	packet, err := m.Marshal(nil)
	if err != nil {
		return fmt.Errorf("ping %v: %w", to, err)
	}
	var dst net.Addr = &net.IPAddr{IP: to.AsSlice()}
	if isPing(s) {
		dst = &net.UDPAddr{IP: to.AsSlice()}
	}
	its.sent = p.clock()
	if _, err := s.WriteTo(packet, dst); err != nil {
		return fmt.Errorf("ping %v: %w", to, err)
	}
	delete(p.waiting, p.seq-kept)
	p.waiting[p.seq] = its
	return nil
}

// Heard passes the answers on that have come since the last call. A ping is answered once, by the host that it was sent to,
// with its payload.
func (p *Pinger) Heard() (answers []Answer) {
	for {
		select {
		case m := <-p.heard:
			if a, ok := p.answer(m); ok {
				answers = append(answers, a)
			}
		default:
			return answers
		}
	}
}

func (p *Pinger) answer(m message) (a Answer, ok bool) {
	protocol, reply := 58, icmp.Type(ipv6.ICMPTypeEchoReply)
	if m.v4 {
		protocol, reply = 1, ipv4.ICMPTypeEchoReply
	}
	got, err := icmp.ParseMessage(protocol, m.icmp)
	if err != nil || got.Type != reply {
		return a, false
	}
	echo, isEcho := got.Body.(*icmp.Echo)
	if !isEcho || m.raw && echo.ID != int(p.id) {
		return a, false
	}
	sent, found := p.waiting[uint16(echo.Seq)]
	if !found || sent.to != m.from || !bytes.Equal(echo.Data, sent.payload[:]) {
		return a, false
	}
	delete(p.waiting, uint16(echo.Seq))
	return Answer{m.from, sent.sent, m.at}, true
}
