package trace

import (
	"bufio"
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
	from              *bufio.Reader
	line              int // the number of the last one
	time, bytes, dscp int // columns; without DSCPs the last is -1
	columns           int
	pending           []string // the first packet, unless there is a header
	header            []byte   // anonymous, with the DSCP of the last packet
}

func openCSV(b *bufio.Reader) (*Reader, error) {
	if start, _ := b.Peek(len(byteOrderMark)); string(start) == byteOrderMark {
		b.Discard(len(byteOrderMark))
	}
	t := &table{from: b, bytes: 1, dscp: -1, columns: 2, header: slices.Clone(anonymous)}
	first, err := t.read()
	if err != nil && err != io.EOF {
		return nil, err
	}
	if err == nil && strings.ContainsAny(first[0], "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") {
		t.time, t.bytes, t.columns = slices.Index(first, "time_ns"), slices.Index(first, "bytes"), len(first)
		t.dscp = slices.Index(first, "dscp")
		if t.time < 0 || t.bytes < 0 {
			return nil, fmt.Errorf("line %d: the columns are %.100q; two of them must be time_ns and bytes", t.line, strings.Join(first, ","))
		}
	} else {
		t.pending = first
	}
	return &Reader{next: t.next, L2Bytes: ethernetHeader, HasDSCPs: t.dscp >= 0}, nil
}

func (t *table) next(p *Packet) (err error) {
	row := t.pending
	if t.pending = nil; row == nil {
		if row, err = t.read(); err != nil {
			return err
		}
	}
	if len(row) != t.columns {
		return fmt.Errorf("line %d: %d columns instead of %d: time_ns,bytes", t.line, len(row), t.columns)
	}
	if p.Time, err = strconv.ParseUint(row[t.time], 10, 64); err != nil {
		return t.bad("time_ns", row[t.time], "0 to 18446744073709551615", err)
	}
	if p.Bytes, err = strconv.ParseUint(row[t.bytes], 10, 64); err != nil {
		return t.bad("bytes", row[t.bytes], fmt.Sprintf("1 to %d", MaxBytes), err)
	}
	if p.Bytes == 0 || p.Bytes > MaxBytes {
		return fmt.Errorf("line %d: a packet of %d bytes; one has 1 to %d", t.line, p.Bytes, MaxBytes)
	}
	if t.dscp >= 0 {
		dscp, err := policy.ParseDSCP(row[t.dscp])
		if err != nil {
			return fmt.Errorf("line %d: %w", t.line, err)
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
	return fmt.Errorf("line %d: %s %.40q %s; write %s", t.line, column, value, why, use)
}

// read returns the fields of the next line that is neither empty nor a comment. An error in the text differs from that
// of a stream that ends too early.
func (t *table) read() ([]string, error) {
	for {
		line, err := t.from.ReadSlice('\n')
		switch {
		case err == bufio.ErrBufferFull:
			return nil, fmt.Errorf("line %d is longer than %d bytes", t.line+1, len(line))
		case err == io.EOF && len(line) == 0:
			return nil, io.EOF
		case err != nil && err != io.EOF:
			return nil, DamagedError{fmt.Errorf("after line %d: %w", t.line, err)}
		}
		t.line++
		text := strings.TrimSpace(string(line))
		if text == "" || text[0] == '#' {
			continue
		}
		row := strings.Split(text, ",")
		for i := range row {
			row[i] = strings.TrimSpace(row[i])
		}
		return row, nil
	}
}
