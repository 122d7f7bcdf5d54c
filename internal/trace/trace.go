// Package trace reads recorded traffic, a packet at a time and in constant
// memory: a CSV of times and sizes, a pcap or a pcapng, each of them compressed
// with gzip or not. Whatever the format and the link, a packet comes out alike.
// It knows nothing of rules; gopacket knows the formats.
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
)

const (
	// MaxBytes is the most that a packet can count.
	MaxBytes = 1<<24 - 1
	// MaxHeaders is how much of a packet is kept: headers that reach further are as if cut off there.
	MaxHeaders = 3 << 10
)

// A Packet is one of a trace.
type Packet struct {
	Time      uint64 // ns, since whenever the trace counts from
	Bytes     uint64 // at layer 2 on the wire, without FCS and preamble: up to MaxBytes
	EtherType uint16 // of what Network begins with; 0 where there is none
	Network   []byte // what follows the link header, as far as it was captured; good until the next packet
}

// A Reader reads one trace.
type Reader struct {
	next      func(*Packet) error
	addressed bool
	l2Bytes   uint8
	first     Packet
	state     error // of the first packet
	started   bool
}

// A DamagedError says that a trace can not be read to its end: the packets
// before that are good.
type DamagedError struct{ error }

func (e DamagedError) Unwrap() error { return e.error }

// Open finds out what a trace is, and reads as much of it as that takes. Errors
// do not name the trace.
func Open(from io.Reader) (*Reader, error) {
	r, err := open(bufio.NewReaderSize(from, 1<<16), true)
	if err != nil {
		return nil, err
	}
	// A link type that is not known shows with the first packet.
	if r.state = r.next(&r.first); r.state != nil && r.state != io.EOF {
		return nil, r.state
	}
	return r, nil
}

func open(b *bufio.Reader, unpack bool) (*Reader, error) {
	start, err := b.Peek(512)
	if err != nil && err != io.EOF {
		return nil, err
	}
	if len(start) == 0 {
		return nil, errors.New("there is nothing in it; a trace is a CSV of time_ns,bytes or a pcap")
	}
	magic := binary.BigEndian.Uint32(append(bytes.Clone(start), 0, 0, 0, 0))
	switch {
	case magic>>16 == 0x1f8b && unpack:
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fmt.Errorf("it begins like a gzip file, but %w", err)
		}
		return open(bufio.NewReaderSize(z, 1<<16), false)
	case magic == 0xa1b2c3d4 || magic == 0xd4c3b2a1 || magic == 0xa1b23c4d || magic == 0x4d3cb2a1:
		return openPcap(b)
	case magic == 0x0a0d0d0a:
		return openPcapng(b)
	case isText(start):
		return openCSV(b)
	}
	for prefix, what := range map[string]string{
		"\x28\xb5\x2f\xfd": "compressed by zstd; pipe it: zstd -dc TRACE | shapectl replay -",
		"\xfd7zXZ":         "compressed by xz; pipe it: xz -dc TRACE | shapectl replay -",
		"BZh":              "compressed by bzip2; pipe it: bzip2 -dc TRACE | shapectl replay -",
		"PK\x03\x04":       "a zip archive; pipe what is in it: unzip -p TRACE | shapectl replay -",
		"snoop\x00":        "a snoop capture; turn it into a pcap: editcap -F pcap TRACE TRACE.pcap",
	} {
		if bytes.HasPrefix(start, []byte(prefix)) {
			return nil, errors.New("it is " + what)
		}
	}
	return nil, fmt.Errorf("it begins with % x, which is no pcap, pcapng or CSV of time_ns,bytes; 'editcap -F pcap' turns other captures into a pcap", start[:min(4, len(start))])
}

const byteOrderMark = "\xef\xbb\xbf"

// isText looks at the first line: what is wrong with another is told with its number.
func isText(start []byte) bool {
	start, _, _ = bytes.Cut(start, []byte("\n"))
	return !strings.ContainsFunc(strings.TrimPrefix(string(start), byteOrderMark), func(r rune) bool {
		return r < ' ' && r != '\t' && r != '\r' && r != '\n' || r > '~'
	})
}

// Addressed reports whether packets have addresses; those of a CSV have none.
func (r *Reader) Addressed() bool { return r.addressed }

// L2Bytes is the length of a link header: 14, or 0 on a link without any. A
// pcapng may mix them; that of its first packet is taken.
func (r *Reader) L2Bytes() uint8 { return r.l2Bytes }

// Next reads the next packet. The error is io.EOF at the end, and a DamagedError where the trace ends too soon.
func (r *Reader) Next(p *Packet) error {
	if !r.started {
		r.started = true
		*p = r.first
		return r.state
	}
	return r.next(p)
}
