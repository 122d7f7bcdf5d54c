// Package trace reads recorded traffic, one packet at a time and in constant
// memory: a CSV of times, sizes and perhaps DSCPs, or a pcap, each of them perhaps
// compressed with gzip. All formats and link types yield the same Packet.
package trace

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

const (
	// MaxBytes is the maximum length of a packet.
	MaxBytes = 1<<24 - 1
	// maxSpan is how far apart packets may be: the data path can tell apart the ages of buckets for a multiple of that.
	maxSpan = 18 * 365 * 24 * time.Hour
	// maxBack is how far the clock may step back: packets of several CPUs are out of order by less. Figures of a trace with larger
	// steps would mean nothing.
	maxBack = time.Second
	// MaxHeaders is the maximum number of bytes that are kept of a packet. Longer headers are cut off.
	MaxHeaders = 3 << 10
)

// A Packet is one of a trace.
type Packet struct {
	Time      uint64 // ns, since the epoch of the trace
	Bytes     uint64 // at layer 2 on the wire, without FCS and preamble: 1 to MaxBytes
	EtherType uint16 // the protocol of Network; 0 if unknown
	Network   []byte // the captured bytes after the link header; valid until the next packet
}

// A Reader reads one trace.
type Reader struct {
	// Addressed is true if packets have addresses. Those of a CSV have none.
	Addressed bool
	// HasDSCPs is true if packets have DSCPs. Those of a CSV have them in the column dscp, if there is one.
	HasDSCPs bool
	// L2Bytes is the length of a link header in bytes: 14, or 0 on a link without one. It is that of the first packet,
	// because the Linux device any mixes links.
	L2Bytes uint8

	next    func(*Packet) error
	first   Packet
	state   error // from reading the first packet
	started bool

	earliest, latest uint64 // ns
}

// A DamagedError says that a trace cannot be read to its end. The packets before are
// valid.
type DamagedError struct{ error }

func (e DamagedError) Unwrap() error { return e.error }

// Open detects the format of a trace and reads its first packet. Errors do not name
// the trace.
func Open(from io.Reader) (*Reader, error) {
	r, err := open(bufio.NewReaderSize(from, 1<<16), true)
	if err != nil {
		return nil, err
	}
	// The first packet shows whether the link type is supported.
	if r.state = r.next(&r.first); r.state != nil && r.state != io.EOF {
		return nil, r.state
	}
	return r, nil
}

// open opens a trace, which may be packed.
func open(b *bufio.Reader, mayBePacked bool) (*Reader, error) {
	start, err := b.Peek(512)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if len(start) == 0 {
		return nil, errors.New("it is empty; a trace is a CSV of time_ns,bytes or a pcap")
	}
	magic := binary.BigEndian.Uint32(append(bytes.Clone(start), 0, 0, 0, 0))
	switch {
	case magic>>16 == 0x1f8b && mayBePacked:
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("it begins like a gzip file, but %w", err)
		}
		return open(bufio.NewReaderSize(z, 1<<16), false)
	case magic == 0xa1b2c3d4 || magic == 0xd4c3b2a1 || magic == 0xa1b23c4d || magic == 0x4d3cb2a1:
		return openPcap(b)
	case magic == 0x0a0d0d0a:
		return nil, errors.New("it is a pcapng; convert it: editcap -F pcap TRACE TRACE.pcap, or tcpdump -r TRACE -w - | shapectl replay -")
	case isText(start):
		return openCSV(b)
	}
	return nil, fmt.Errorf("it begins with % x, which is no pcap or CSV of time_ns,bytes; unpack it, for example with zstd -dc TRACE | shapectl replay -, or convert it with 'editcap -F pcap'",
		start[:min(4, len(start))])
}

const byteOrderMark = "\xef\xbb\xbf"

// isText checks the first line only. Errors in later lines are reported with their number.
func isText(start []byte) bool {
	start, _, _ = bytes.Cut(start, []byte("\n"))
	return !strings.ContainsFunc(strings.TrimPrefix(string(start), byteOrderMark), func(r rune) bool {
		return r < ' ' && r != '\t' && r != '\r' && r != '\n' || r > '~'
	})
}

// Next reads the next packet. The error is io.EOF at the end, and a DamagedError if the trace ends too early or its times
// are too far apart.
func (r *Reader) Next(p *Packet) error {
	if !r.started {
		r.started = true
		*p = r.first
		r.earliest, r.latest = p.Time, p.Time
		return r.state
	}
	if err := r.next(p); err != nil {
		return err
	}
	if r.latest > p.Time && r.latest-p.Time > uint64(maxBack) {
		return DamagedError{fmt.Errorf("the clock steps back by %v; sort the packets by time, for example with reordercap", time.Duration(r.latest-p.Time).Round(time.Second))}
	}
	if r.earliest, r.latest = min(r.earliest, p.Time), max(r.latest, p.Time); r.latest-r.earliest > uint64(maxSpan) {
		return DamagedError{errors.New("the packets are more than 18 years apart; cut the trace into parts")}
	}
	return nil
}
