package trace

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/shapectl/shapectl/pkg/policy"
)

// anonymous is the network header of packets without addresses: IPv4 without addresses,
// and ECN-capable, so that --excess ecn has an effect.
var anonymous = []byte{0x45, 2, 0, 20, 0, 0, 0, 0, 64, 253, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

const etherTypeIPv4, etherTypeIPv6 = 0x0800, 0x86dd

type table struct {
	*csv.Reader
	time, bytes, dscp int // columns; without DSCPs the last is -1
	fields            int
	pending           []string // the first record, unless it is a header
	header            []byte   // anonymous, with the DSCP of the last packet
}

func openCSV(b *bufio.Reader) (*Reader, error) {
	if start, _ := b.Peek(len(byteOrderMark)); string(start) == byteOrderMark {
		b.Discard(len(byteOrderMark))
	}
	t := &table{Reader: csv.NewReader(&lines{from: b}), bytes: 1, dscp: -1, fields: 2, header: slices.Clone(anonymous)}
	t.Comment, t.ReuseRecord, t.TrimLeadingSpace, t.FieldsPerRecord = '#', true, true, -1
	first, err := t.read()
	if err != nil && err != io.EOF {
		return nil, err
	}
	if err == nil && strings.ContainsAny(first[0], "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		t.time, t.bytes, t.fields = slices.Index(first, "time_ns"), slices.Index(first, "bytes"), len(first)
		t.dscp = slices.Index(first, "dscp")
		if t.time < 0 || t.bytes < 0 {
			return nil, fmt.Errorf("%s: the columns are %.100q; two of them must be time_ns and bytes", t.line(), strings.Join(first, ","))
		}
	} else {
		t.pending = slices.Clone(first)
	}
	return &Reader{next: t.next, l2Bytes: 14, classed: t.dscp >= 0}, nil
}

// maxLine is more bytes than any line of a trace has.
const maxLine = 1 << 16

// lines reads a text and fails at a long line, because package csv would keep all of it in memory.
type lines struct {
	from    io.Reader
	without int // bytes since the last end of a line
}

func (l *lines) Read(p []byte) (n int, err error) {
	n, err = l.from.Read(p)
	if last := bytes.LastIndexByte(p[:n], '\n'); last >= 0 {
		l.without = n - last - 1
	} else {
		l.without += n
	}
	if l.without > maxLine {
		return n, fmt.Errorf("a line is longer than %d bytes", maxLine)
	}
	return n, err
}

func (t *table) next(p *Packet) error {
	record := t.pending
	t.pending = nil
	if record == nil {
		var err error
		if record, err = t.read(); err != nil {
			return err
		}
	}
	if len(record) != t.fields {
		return fmt.Errorf("%s: %d columns instead of %d: time_ns,bytes", t.line(), len(record), t.fields)
	}
	var err error
	if p.Time, err = strconv.ParseUint(record[t.time], 10, 64); err != nil {
		return t.bad("time_ns", record[t.time], "0 to 18446744073709551615", err)
	}
	if p.Bytes, err = strconv.ParseUint(record[t.bytes], 10, 64); err != nil {
		return t.bad("bytes", record[t.bytes], fmt.Sprintf("1 to %d", MaxBytes), err)
	}
	if p.Bytes == 0 || p.Bytes > MaxBytes {
		return fmt.Errorf("%s: a packet of %d bytes; one has 1 to %d", t.line(), p.Bytes, MaxBytes)
	}
	if t.dscp >= 0 {
		dscp, err := policy.ParseDSCP(record[t.dscp])
		if err != nil {
			return fmt.Errorf("%s: %w", t.line(), err)
		}
		t.header[1] = dscp<<2 | anonymous[1]
	}
	p.EtherType, p.Network = etherTypeIPv4, t.header
	return nil
}

func (t *table) bad(column, value, use string, err error) error {
	why := "is not a whole number"
	if errors.Is(err, strconv.ErrRange) {
		why = "is out of range"
	}
	return fmt.Errorf("%s: %s %.40q %s; write %s", t.line(), column, value, why, use)
}

func (t *table) line() string {
	line, _ := t.FieldPos(0)
	return fmt.Sprintf("line %d", line)
}

// read returns the next record. An error in the text differs from that of a stream that ends too early.
func (t *table) read() ([]string, error) {
	record, err := t.Read()
	var bad *csv.ParseError
	switch {
	case errors.As(err, &bad):
		return nil, fmt.Errorf("line %d: %w", bad.Line, bad.Err)
	case err != nil && err != io.EOF:
		return nil, DamagedError{fmt.Errorf("after line %d: %w", t.lines(), err)}
	}
	return record, err
}

func (t *table) lines() int {
	if t.InputOffset() == 0 {
		return 0
	}
	line, _ := t.FieldPos(0)
	return line
}
