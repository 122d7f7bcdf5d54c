package sandbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/internal/replay"
	"github.com/shapectl/shapectl/internal/trace"
	"github.com/shapectl/shapectl/pkg/policy"
)

const (
	// MaxPackets is the number of packets after which a load is cut.
	MaxPackets = 5_000
	// MaxSenders is the number of senders of a load.
	MaxSenders = 4

	maxTrace    = 256 << 10
	maxSender   = 32 // bytes of a name
	microsecond = 1_000
	second      = 1_000_000 * microsecond
	day         = 24 * 3600 * second
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

var kinds = []string{"burst", "steady", "on-off", "random", "tcp", "tcp-delay"}

// check returns an error that says what to write instead.
func (s *Sender) check() error {
	switch {
	case len(s.Name) > maxSender:
		return fmt.Errorf("the name is longer than %d bytes; shorten it", maxSender)
	case !slices.Contains(kinds, s.Kind):
		return fmt.Errorf("the kind %.40q is unknown; use %s", s.Kind, strings.Join(kinds, ", "))
	}
	number := func(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }
	for _, b := range []struct {
		key                string
		value, least, most float64
		needed             bool
	}{
		{"bytes", float64(s.Bytes), 1, trace.MaxBytes, true},
		{"start_ns", float64(s.StartNS), 0, day, true},
		{"packets", float64(s.Packets), 1, MaxPackets, s.Kind == "burst"},
		{"packets_per_second", s.PacketsPerSecond, 0.001, 1e9, s.Kind != "burst"},
		{"duration_ns", float64(s.DurationNS), 1, day, s.Kind != "burst"},
		{"on_ns", float64(s.OnNS), 1, day, s.Kind == "on-off"},
		{"off_ns", float64(s.OffNS), 0, day, s.Kind == "on-off"},
		{"rtt_ns", float64(s.RTTNS), microsecond, 10 * second, strings.HasPrefix(s.Kind, "tcp")},
	} {
		if b.needed && !(b.value >= b.least && b.value <= b.most) {
			return fmt.Errorf("%s of %s is out of range; use %s to %s", b.key, number(b.value), number(b.least), number(b.most))
		}
	}
	return nil
}

// check checks the load.
func (r *Request) check() error {
	r.direction = policy.Egress
	if r.Direction != "" {
		if err := r.direction.Set(r.Direction); err != nil {
			return err
		}
	}
	switch {
	case r.Unit != "" && r.Unit != "packet" && r.Unit != "request":
		return fmt.Errorf("the unit %.40q is unknown; use packet or request", r.Unit)
	case (r.Trace == "") == (len(r.Senders) == 0):
		return errors.New("the load is missing; give either senders or a trace")
	case len(r.Trace) > maxTrace:
		return fmt.Errorf("the trace has %d bytes, more than %d; replay it with 'shapectl replay'", len(r.Trace), maxTrace)
	case len(r.Senders) > MaxSenders:
		return fmt.Errorf("%d senders; at most %d can send", len(r.Senders), MaxSenders)
	}
	for i := range r.Senders {
		if err := r.Senders[i].check(); err != nil {
			return fmt.Errorf("sender %d: %w", i+1, err)
		}
	}
	return nil
}

// A source says when a sender sends. A packet is offered before the next one is asked for.
type source interface {
	// next returns the time of the next packet.
	next() (at uint64, ok bool)
	// told tells what happened to that packet.
	told(replay.Result)
}

// source returns a sender at its begin. It repeats itself exactly.
func (s *Sender) source(number int) source {
	clock := clock{start: s.StartNS, until: s.StartNS + s.DurationNS, perSecond: s.PacketsPerSecond, most: MaxPackets + 1}
	switch s.Kind {
	case "burst":
		clock.perSecond, clock.until, clock.most = math.Inf(1), math.MaxUint64, s.Packets
	case "on-off":
		return &onOff{clock, s.OnNS, s.OnNS + s.OffNS}
	case "random":
		return &random{clock, s.StartNS, rand.New(rand.NewPCG(1, uint64(number)))}
	case "tcp", "tcp-delay":
		return newTCP(clock, s.RTTNS, s.Kind == "tcp-delay")
	}
	return &clock
}

// A clock sends packets at equal intervals, each at its exact time, rounded down to 1 ns.
type clock struct {
	start, until uint64
	perSecond    float64
	sent, most   uint64
}

func (c *clock) next() (at uint64, ok bool) {
	at = c.start + uint64(float64(c.sent)*1e9/c.perSecond)
	return at, at < c.until && c.sent < c.most
}

func (c *clock) told(replay.Result) { c.sent++ }

// onOff begins anew in each period.
type onOff struct {
	clock
	on, period uint64
}

func (o *onOff) next() (at uint64, ok bool) {
	if at, _ := o.clock.next(); at-o.start >= o.on {
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

func (r *random) next() (at uint64, ok bool) { return r.at, r.at < r.until }
func (r *random) told(replay.Result)         { r.at += uint64(r.from.ExpFloat64() * 1e9 / r.perSecond) }

// A load is several senders as one sequence of packets, or a trace.
type load struct {
	trace   *trace.Reader // nil for senders
	senders []sender
}

type sender struct {
	source
	packet trace.Packet // the next one
	more   bool
}

// load returns the load at its begin.
func (r *Request) load() (*load, error) {
	l := new(load)
	for i := range r.Senders {
		s := sender{r.Senders[i].source(i), trace.Packet{Bytes: r.Senders[i].Bytes, EtherType: 0x0800, Network: r.header(i, r.Senders[i].ECN)}, false}
		s.packet.Time, s.more = s.next()
		l.senders = append(l.senders, s)
	}
	if r.Trace == "" {
		return l, nil
	}
	l.senders = []sender{{packet: trace.Packet{EtherType: 0x0800, Network: r.header(0, true)}}}
	var err error
	if l.trace, err = trace.Open(strings.NewReader(r.Trace)); err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	if l.trace.Addressed {
		return nil, errors.New("trace: it is a capture; write lines of time_ns,bytes, or replay it with 'shapectl replay'")
	}
	return l, nil
}

// next returns the next packet and its sender, the first one of several at the same time. The error is io.EOF after
// the last packet.
func (l *load) next(p *trace.Packet) (from int, err error) {
	if l.trace != nil {
		if err = l.trace.Next(p); err != nil && err != io.EOF {
			err = fmt.Errorf("trace: %w", err)
		}
		p.EtherType, p.Network = l.senders[0].packet.EtherType, l.senders[0].packet.Network
		return 0, err
	}
	from = -1
	for i := range l.senders {
		if s := &l.senders[i]; s.more && (from < 0 || s.packet.Time < l.senders[from].packet.Time) {
			from = i
		}
	}
	if from < 0 {
		return 0, io.EOF
	}
	*p = l.senders[from].packet
	return from, nil
}

// told tells a sender what happened to its packet.
func (l *load) told(from int, r replay.Result) {
	if s := &l.senders[from]; l.trace == nil {
		s.told(r)
		s.packet.Time, s.more = s.next()
	}
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
