package history

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"
)

// A segment is a file of readings: a header, and a block for each reading with its length and a checksum. What a killed writer
// left of a block is not read.
//
// Each rule or pool has a slot in a table. A block says which slots became free, which have another series, and by how much
// the counters of each grew. These are in groups of slots, each compressed alone: who looks for few series decodes only
// their groups. The first block of a segment needs none before it.

const (
	format     = 3
	header     = "shapectl history %d %d %d\n" // the format, the time of the first reading and the usual interval in ns
	blockHead  = 4 + 4
	mostBytes  = 1 << 28 // of a block: a damaged length may be any
	groupSlots = 2048
	mostSlots  = 1 << 24
)

// Errors of files.
var (
	ErrFormat  = errors.New("another version of shapectl wrote it; move it away to begin a new one, and read it with that version")
	errDamaged = errors.New("it is damaged")
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	packer     = sync.OnceValue(func() *zstd.Encoder {
		e, _ := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
			zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true)) // fails for wrong options
		return e
	})
	unpacker = sync.OnceValue(func() *zstd.Decoder {
		d, _ := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxMemory(mostBytes))
		return d
	})
)

func sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

func newHeader(first time.Time, every time.Duration) []byte {
	return fmt.Appendf(nil, header, format, first.UnixNano(), every)
}

// readHeader is the inverse of newHeader.
func readHeader(from *bufio.Reader) (first time.Time, every time.Duration, err error) {
	line, _ := from.ReadSlice('\n')
	var number, wall int64
	n, _ := fmt.Sscanf(string(line), header, &number, &wall, &every)
	switch {
	case n > 0 && number != format:
		err = ErrFormat
	case n < strings.Count(header, "%"):
		err = errDamaged
	}
	return time.Unix(0, wall), every, err
}

// A block is a reading, as differences from the one before.
type block struct {
	Wall        int64
	Mono, Slept uint64
	Boot        string
	Freed, Set  []int32   // slots
	Series      []*Series // of Set
	Groups      [][]byte
}

// A table is what a block is relative to.
type table struct {
	series   []*Series  // of each slot; nil for a free one
	counters []Counters // of each slot
	coded    bytes.Buffer
}

// An encoder makes the blocks of a segment.
type encoder struct {
	table
	to    *gob.Encoder
	slots []int32 // of each sample of the last reading
}

// block is the block of the next reading.
func (e *encoder) block(r *Reading) []byte {
	b := block{Wall: r.Time.UnixNano(), Mono: r.Mono, Slept: r.Slept, Boot: r.boot}
	if !e.fits(r.Samples) {
		e.place(r.Samples, &b)
	}
	counters := make([]Counters, len(e.series))
	for i := range r.Samples {
		counters[e.slots[i]] = r.Samples[i].Counters
	}
	for at := 0; at < len(counters); at += groupSlots {
		end := min(at+groupSlots, len(counters))
		var group []byte
		if grew := appendGroup(nil, e.counters[at:end], counters[at:end]); len(grew) > 0 {
			group = packer().EncodeAll(grew, nil)
		}
		b.Groups = append(b.Groups, group)
	}
	e.counters = counters
	if e.to == nil {
		e.to = gob.NewEncoder(&e.coded)
	}
	e.to.Encode(&b) // to memory
	out := packer().EncodeAll(e.coded.Bytes(), make([]byte, blockHead))
	e.coded = bytes.Buffer{} // the first block is much larger than those after it
	binary.LittleEndian.PutUint32(out, uint32(len(out)-blockHead))
	binary.LittleEndian.PutUint32(out[4:], sum(out[blockHead:]))
	return out
}

// fits reports whether the samples are of the same series as those of the last reading.
func (e *encoder) fits(samples []Sample) bool {
	if len(samples) != len(e.slots) {
		return false
	}
	for i, slot := range e.slots {
		if was, now := e.series[slot], samples[i].Series; was != now && *was != *now {
			return false
		}
	}
	return true
}

// place finds a slot for each sample. Free ones stay free until the next segment.
func (e *encoder) place(samples []Sample, b *block) {
	at, there := make(map[Key]int32, len(samples)), make(map[Key]bool, len(samples))
	for _, s := range samples {
		there[s.Key] = true
	}
	for slot, s := range e.series {
		switch {
		case s == nil:
		case there[s.Key]:
			at[s.Key] = int32(slot)
		default:
			b.Freed = append(b.Freed, int32(slot))
			e.series[slot], e.counters[slot] = nil, Counters{}
		}
	}
	e.slots = e.slots[:0]
	for _, s := range samples {
		slot, known := at[s.Key]
		if !known {
			slot = int32(len(e.series))
			e.series, e.counters = append(e.series, nil), append(e.counters, Counters{})
		}
		if was := e.series[slot]; was == nil || *was != *s.Series {
			b.Set, b.Series = append(b.Set, slot), append(b.Series, s.Series)
			e.series[slot], e.counters[slot], at[s.Key] = s.Series, Counters{}, slot
		}
		e.slots = append(e.slots, slot)
	}
}

// columns are the counters. A group has how far each slot that grew is from the one before, with a bit for each counter that
// grew, and a 0. Then come the counters, one column after another. Those of a slot that was set begin at 0.
func (c *Counters) columns() [columns]*uint64 { return [...]*uint64{&c.Passed, &c.Dropped, &c.Refused} }

const columns = 3

func appendGroup(b []byte, before, now []Counters) []byte {
	var grew []Counters
	last := -1
	for i := range now {
		d := Counters{now[i].Passed - before[i].Passed, now[i].Dropped - before[i].Dropped, now[i].Refused - before[i].Refused}
		which := 0
		for bit, v := range d.columns() {
			if *v != 0 {
				which |= 1 << bit
			}
		}
		if which != 0 {
			b = binary.AppendUvarint(b, uint64((i-last)<<columns|which))
			grew, last = append(grew, d), i
		}
	}
	if len(grew) == 0 {
		return b
	}
	b = append(b, 0)
	for c := range columns {
		for i := range grew {
			if v := *grew[i].columns()[c]; v != 0 {
				b = binary.AppendUvarint(b, v)
			}
		}
	}
	return b
}

// readGroup is the inverse of appendGroup.
func readGroup(b []byte, counters []Counters) error {
	failed := false
	next := func() uint64 {
		v, n := binary.Uvarint(b)
		failed = failed || n <= 0
		b = b[max(n, 0):]
		return v
	}
	var grew [columns][]*uint64
	at := -1
	for head := next(); head != 0; head = next() {
		if at += int(head >> columns); at < 0 || at >= len(counters) {
			return errDamaged
		}
		for which := head & (1<<columns - 1); which != 0; which &= which - 1 {
			c := bits.TrailingZeros64(which)
			grew[c] = append(grew[c], counters[at].columns()[c])
		}
	}
	for _, column := range grew {
		for _, v := range column {
			*v += next()
		}
	}
	if failed {
		return errDamaged
	}
	return nil
}

// A decoder reads the blocks of a segment.
type decoder struct {
	table
	from  *bufio.Reader
	as    *gob.Decoder
	every time.Duration
	match func(*Series) bool

	good       int64 // bytes of the blocks that were read
	last, this int64 // bytes of the last of them, and of the one after it as it says

	slots  []int32 // whose series match
	groups []bool  // those that have some
}

func newDecoder(from io.Reader, match func(*Series) bool) (d *decoder, first time.Time, err error) {
	d = &decoder{from: bufio.NewReader(from), match: match}
	d.as = gob.NewDecoder(&d.coded)
	if first, d.every, err = readHeader(d.from); err == nil {
		d.good = int64(len(newHeader(first, d.every)))
	}
	return d, first, err
}

// damaged is how many bytes of a file of so many were not read because they are damaged. A block that its writer did not finish
// is not: it is shorter than it says, and the last one. If it is also the first one, no other file follows.
func (d *decoder) damaged(size int64, follows bool) int64 {
	rest := size - d.good
	if rest >= max(d.this, 1) || (d.last > 0 || follows) && rest > 2*d.last {
		return rest
	}
	return 0
}

// next is the next reading, with the samples that match. At the end of the segment, or where it is damaged, it is nil.
func (d *decoder) next() *Reading {
	var head [blockHead]byte
	if _, err := io.ReadFull(d.from, head[:]); err != nil {
		return nil
	}
	n := binary.LittleEndian.Uint32(head[:])
	d.this = blockHead + int64(n)
	packed, err := io.ReadAll(io.LimitReader(d.from, int64(min(n, mostBytes))))
	if err != nil || len(packed) != int(n) || sum(packed) != binary.LittleEndian.Uint32(head[4:]) {
		return nil
	}
	var b block
	coded, err := unpacker().DecodeAll(packed, nil)
	d.coded.Write(coded)
	if err != nil || d.as.Decode(&b) != nil || !d.place(&b) {
		return nil
	}
	for g, wanted := range d.groups {
		if !wanted || len(b.Groups[g]) == 0 {
			continue
		}
		grew, err := unpacker().DecodeAll(b.Groups[g], nil)
		if err != nil || readGroup(grew, d.counters[g*groupSlots:min((g+1)*groupSlots, len(d.counters))]) != nil {
			return nil
		}
	}
	d.last = d.this
	d.good += d.last
	r := &Reading{Time: time.Unix(0, b.Wall), Mono: b.Mono, Slept: b.Slept, boot: b.Boot, every: d.every, Samples: make([]Sample, len(d.slots))}
	for i, slot := range d.slots {
		r.Samples[i] = Sample{d.series[slot], d.counters[slot]}
	}
	return r
}

// place notes which series slots have now: those that do not match are as free.
func (d *decoder) place(b *block) (ok bool) {
	put := func(slot int32, s *Series) {
		for int(slot) >= len(d.series) && slot < mostSlots {
			d.series, d.counters = append(d.series, nil), append(d.counters, Counters{})
		}
		if ok = ok && slot >= 0 && slot < mostSlots; ok {
			d.series[slot], d.counters[slot] = s, Counters{}
		}
	}
	ok = len(b.Set) == len(b.Series)
	if len(b.Freed)+len(b.Set) == 0 {
		return ok && len(b.Groups) == len(d.groups)
	}
	for _, slot := range b.Freed {
		put(slot, nil)
	}
	for i := range min(len(b.Set), len(b.Series)) {
		s := b.Series[i]
		if !d.match(s) {
			s = nil
		}
		put(b.Set[i], s)
	}
	d.slots, d.groups = nil, make([]bool, (len(d.series)+groupSlots-1)/groupSlots)
	for slot, s := range d.series {
		if s != nil {
			d.slots, d.groups[slot/groupSlots] = append(d.slots, int32(slot)), true
		}
	}
	return ok && len(b.Groups) == len(d.groups)
}
