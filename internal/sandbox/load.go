package sandbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/shapectl/shapectl/internal/model"
	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// MaxPackets is the number of packets after which a load is cut.
	MaxPackets = 6_000
	// MaxSenders is the number of senders of a load.
	MaxSenders = 4

	maxTime   = 24 * time.Hour
	maxRTT    = 10 * time.Second
	maxTrace  = 256 << 10
	maxSender = 32 // bytes of a name
)

// A Sender is a part of a load: a host with one flow. Times count from the begin of the load.
type Sender struct {
	Name  string `json:"name,omitempty"`
	Kind  string `json:"kind"`  // burst, steady, on-off, random, tcp or tcp-delay
	Bytes uint64 `json:"bytes"` // of each packet
	ECN   bool   `json:"ecn,omitempty"`

	StartNS    uint64 `json:"start_ns,omitempty"`
	DurationNS uint64 `json:"duration_ns,omitempty"` // not of a burst

	Packets          uint64  `json:"packets,omitempty"`            // of a burst
	PacketsPerSecond float64 `json:"packets_per_second,omitempty"` // not of a burst; TCP is never faster
	OnNS             uint64  `json:"on_ns,omitempty"`              // of on-off
	OffNS            uint64  `json:"off_ns,omitempty"`
	RTTNS            uint64  `json:"rtt_ns,omitempty"` // of TCP, without the queue
}

// check returns an error that says what to write instead.
func (s *Sender) check() error {
	between := func(what string, ns uint64, least, most time.Duration) error {
		if ns < uint64(least) || ns > uint64(most) {
			return fmt.Errorf("%s of %d ns is out of range; use %v to %v", what, ns, least, most)
		}
		return nil
	}
	switch {
	case len(s.Name) > maxSender:
		return fmt.Errorf("the name is longer than %d bytes; shorten it", maxSender)
	case s.Bytes == 0 || s.Bytes > trace.MaxBytes:
		return fmt.Errorf("a packet of %d bytes; one has 1 to %d", s.Bytes, trace.MaxBytes)
	}
	if err := between("start_ns", s.StartNS, 0, maxTime); err != nil {
		return err
	}
	if s.Kind == "burst" {
		if s.Packets == 0 || s.Packets > MaxPackets {
			return fmt.Errorf("a burst of %d packets; one has 1 to %d", s.Packets, MaxPackets)
		}
		return nil
	}
	if !(s.PacketsPerSecond >= 0.001 && s.PacketsPerSecond <= 1e9) {
		return fmt.Errorf("packets_per_second of %v is out of range; use 0.001 to 1e9", s.PacketsPerSecond)
	}
	err := between("duration_ns", s.DurationNS, 1, maxTime)
	switch s.Kind {
	case "steady", "random":
	case "on-off":
		err = errors.Join(err, between("on_ns", s.OnNS, 1, maxTime), between("off_ns", s.OffNS, 0, maxTime))
	case "tcp", "tcp-delay":
		err = errors.Join(err, between("rtt_ns", s.RTTNS, time.Microsecond, maxRTT))
	default:
		err = fmt.Errorf("the kind %.40q is unknown; use burst, steady, on-off, random, tcp or tcp-delay", s.Kind)
	}
	return err
}

// A source sends packets. A packet is offered before the next one is asked for.
type source interface {
	// next returns the time and size of the next packet.
	next() (at, bytes uint64, ok bool)
	// told tells what happened to that packet.
	told(replay.Result)
}

// source returns a sender at its begin. It repeats itself exactly.
func (s *Sender) source(number int) source {
	if s.Kind == "burst" {
		return &burst{s.StartNS, s.Bytes, s.Packets}
	}
	clock := clock{bytes: s.Bytes, start: s.StartNS, until: s.StartNS + s.DurationNS, perSecond: s.PacketsPerSecond}
	switch s.Kind {
	case "on-off":
		return &onOff{clock, s.OnNS, s.OnNS + s.OffNS}
	case "random":
		return &random{clock, s.StartNS, rand.New(rand.NewPCG(1, uint64(number)))}
	case "tcp", "tcp-delay":
		return newTCP(clock, s.RTTNS, s.Kind == "tcp-delay")
	}
	return &clock
}

type burst struct{ at, bytes, left uint64 }

func (b *burst) next() (at, bytes uint64, ok bool) { return b.at, b.bytes, b.left > 0 }
func (b *burst) told(replay.Result)                { b.left-- }

// A clock sends packets at equal intervals, each at its exact time, rounded down to 1 ns.
type clock struct {
	bytes, start, until uint64
	perSecond           float64
	sent                uint64
}

func (c *clock) next() (at, bytes uint64, ok bool) {
	at = c.start + uint64(float64(c.sent)*1e9/c.perSecond)
	return at, c.bytes, at < c.until
}

func (c *clock) told(replay.Result) { c.sent++ }

// onOff begins anew in each period.
type onOff struct {
	clock
	on, period uint64
}

func (o *onOff) next() (at, bytes uint64, ok bool) {
	if at, _, _ := o.clock.next(); at-o.start >= o.on {
		o.start, o.sent = o.start+(at-o.start-o.on)/o.period*o.period+o.period, 0
	}
	return o.clock.next()
}

// random sends each packet independently of the others (Poisson).
type random struct {
	clock
	at   uint64
	from *rand.Rand
}

func (r *random) next() (at, bytes uint64, ok bool) { return r.at, r.bytes, r.at < r.until }
func (r *random) told(replay.Result)                { r.at += uint64(r.from.ExpFloat64() * 1e9 / r.perSecond) }

// recorded sends the packets of a CSV.
type recorded struct {
	packets []trace.Packet
}

func (r *recorded) next() (at, bytes uint64, ok bool) {
	if len(r.packets) == 0 {
		return 0, 0, false
	}
	return r.packets[0].Time, r.packets[0].Bytes, true
}

func (r *recorded) told(replay.Result) { r.packets = r.packets[1:] }

// readTrace returns the packets of a CSV, up to one more than MaxPackets.
func readTrace(text string) (all []trace.Packet, err error) {
	if len(text) > maxTrace {
		return nil, fmt.Errorf("the trace has %d bytes, more than %d; replay it with 'shapectl replay'", len(text), maxTrace)
	}
	in, err := trace.Open(strings.NewReader(text))
	if err != nil {
		return nil, err
	}
	if in.Addressed() {
		return nil, errors.New("it is a capture; write lines of time_ns,bytes, or replay it with 'shapectl replay'")
	}
	for p := (trace.Packet{}); len(all) <= MaxPackets; {
		if err := in.Next(&p); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return all, nil
}

// A load is several sources as one sequence of packets.
type load struct {
	sources []source
	headers [][]byte
	// Of the next packet of each source.
	at, bytes []uint64
	more      []bool
}

func (r *Request) load() *load {
	l := new(load)
	if r.recorded != nil {
		l.add(&recorded{r.recorded}, r.header(0, true))
	}
	for i := range r.Senders {
		l.add(r.Senders[i].source(i), r.header(i, r.Senders[i].ECN))
	}
	return l
}

func (l *load) add(s source, header []byte) {
	at, bytes, ok := s.next()
	l.sources, l.headers = append(l.sources, s), append(l.headers, header)
	l.at, l.bytes, l.more = append(l.at, at), append(l.bytes, bytes), append(l.more, ok)
}

// next returns the sender of the next packet, the first one of several at the same time; -1 after the last packet.
func (l *load) next(p *trace.Packet) int {
	first := -1
	for i, more := range l.more {
		if more && (first < 0 || l.at[i] < l.at[first]) {
			first = i
		}
	}
	if first >= 0 {
		*p = trace.Packet{Time: l.at[first], Bytes: l.bytes[first], EtherType: 0x0800, Network: l.headers[first]}
	}
	return first
}

func (l *load) told(sender int, r replay.Result) {
	l.sources[sender].told(r)
	l.at[sender], l.bytes[sender], l.more[sender] = l.sources[sender].next()
}

// header is the IPv4 and UDP header of packets to or from a host, one for each sender.
func (r *Request) header(sender int, ect bool) []byte {
	h := make([]byte, 28)
	h[0], h[3], h[8], h[9] = 0x45, 28, 64, 17
	if ect {
		h[1] = 2
	}
	far, near := h[16:], h[12:]
	if r.direction == policy.Ingress {
		far, near = near, far
	}
	copy(near, []byte{192, 0, 2, 1})
	copy(far, []byte{10, 0, 0, byte(sender + 1)})
	binary.BigEndian.PutUint16(h[20:], 443)
	binary.BigEndian.PutUint16(h[22:], uint16(50000+sender))
	return h
}

// dropped reports whether a packet is lost to its sender.
func dropped(r replay.Result) bool { return r.Verdict == model.Drop }
