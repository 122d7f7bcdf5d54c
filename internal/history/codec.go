package history

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync"

	"github.com/klauspost/compress/huff0"
	"github.com/klauspost/compress/zstd"
)

// Values are stored as a number of bits each, and the bits after the first one. The numbers compress well, as values of
// one rule are of similar size; the bits do not. Where values take too much room, their last bits are rounded away.

// exact is the precision of values that are not rounded.
const exact = 63

// precisions are how many bits after the first one are kept, of passed and of other bytes, the best first. The last one is as
// bad as evidence may be: rather than round more, the history keeps less than a day.
var precisions = [][2]int{
	{exact, exact}, {14, 12}, {12, 10}, {10, 9}, {9, 8}, {8, 7}, {7, 7}, {7, 6}, {6, 6}, {6, 5}, {5, 5}, {5, 4}, {4, 4},
}

// relativeError is the largest error of a value that was rounded to this many bits after the first one.
func relativeError(precision int) float64 {
	if precision == exact {
		return 0
	}
	return math.Ldexp(1, -precision-1)
}

// rounded is the nearest value that has at most this many bits after the first one. It is 0 only for 0.
func rounded(v uint64, precision int) uint64 {
	cut := bits.Len64(v) - 1 - precision
	if cut <= 0 {
		return v
	}
	half := uint64(1) << (cut - 1)
	if v > math.MaxUint64-half {
		half = 0
	}
	return (v + half) >> cut << cut
}

// code numbers the values that rounded returns, without gaps and in their order.
func code(v uint64, precision int) uint64 {
	cut := bits.Len64(v) - 1 - precision
	if cut <= 0 {
		return v
	}
	return uint64(cut)<<precision + v>>cut
}

// decode is the inverse of code.
func decode(c uint64, precision int) uint64 {
	if precision == exact || c < 2<<precision {
		return c
	}
	cut := c>>precision - 1
	if cut > 63 {
		return math.MaxUint64 // of a damaged file
	}
	return (c&(1<<precision-1) + 1<<precision) << cut
}

func zigzag(v int64) uint64   { return uint64(v)<<1 ^ uint64(v>>63) }
func unzigzag(v uint64) int64 { return int64(v>>1) ^ -int64(v&1) }

// How a column of a segment is stored.
const (
	allZero     = 0
	plainly     = 1 // each value
	differences = 2 // from the value before it
)

// A column is a writer of values: their numbers of bits, and the other bits.
type column struct {
	sizes []byte
	rest  bitWriter
}

// add adds values, and returns how they are stored.
func (c *column) add(values []uint64, precision int) (mode byte) {
	mode = layout(values, precision)
	if mode == allZero {
		return mode
	}
	before := uint64(0)
	for _, v := range values {
		v = rounded(v, precision)
		if mode == plainly {
			size := bits.Len64(v)
			kept := max(0, min(precision, size-1))
			c.sizes = append(c.sizes, byte(size))
			c.rest.write(v>>max(0, size-1-kept), kept)
			continue
		}
		now := code(v, precision)
		z := zigzag(int64(now - before))
		size := bits.Len64(z)
		c.sizes = append(c.sizes, byte(size))
		c.rest.write(z, max(0, size-1))
		before = now
	}
	return mode
}

// layout is how values are stored in the least room. Numbers of bits of differences compress worse, by about a bit.
func layout(values []uint64, precision int) (mode byte) {
	plain, delta, before := 0, 0, uint64(0)
	any := uint64(0)
	for _, v := range values {
		any |= v
		now := code(rounded(v, precision), precision)
		plain += max(0, min(precision, bits.Len64(v)-1))
		delta += max(0, bits.Len64(zigzag(int64(now-before)))-1)
		before = now
	}
	switch {
	case any == 0:
		return allZero
	case plain <= delta+len(values):
		return plainly
	}
	return differences
}

// A columnReader reads what a column wrote.
type columnReader struct {
	sizes []byte
	rest  bitReader
}

func (c *columnReader) read(values []uint64, mode byte, precision int) error {
	if mode == allZero {
		clear(values)
		return nil
	}
	if len(values) > len(c.sizes) {
		return errDamaged
	}
	before := uint64(0)
	for i := range values {
		size := int(c.sizes[i])
		if size > 64 {
			return errDamaged
		}
		if mode == plainly {
			kept := max(0, min(precision, size-1))
			v := c.rest.read(kept)
			if size > 0 {
				v = (v | 1<<kept) << (size - 1 - kept)
			}
			values[i] = v
			continue
		}
		z := c.rest.read(max(0, size-1))
		if size > 0 {
			z |= 1 << (size - 1)
		}
		before += uint64(unzigzag(z))
		values[i] = decode(before, precision)
	}
	c.sizes = c.sizes[len(values):]
	if c.rest.short {
		return errDamaged
	}
	return nil
}

type bitWriter struct {
	bytes []byte
	acc   uint64
	n     int // bits in acc
}

func (w *bitWriter) write(v uint64, n int) {
	if n > 32 {
		w.write(v&(1<<32-1), 32)
		v, n = v>>32, n-32
	}
	w.acc |= v & (1<<n - 1) << w.n
	for w.n += n; w.n >= 8; w.n -= 8 {
		w.bytes = append(w.bytes, byte(w.acc))
		w.acc >>= 8
	}
}

// finish returns all that was written.
func (w *bitWriter) finish() []byte {
	if w.n > 0 {
		w.bytes = append(w.bytes, byte(w.acc))
	}
	w.acc, w.n = 0, 0
	return w.bytes
}

type bitReader struct {
	bytes []byte
	acc   uint64
	n     int
	short bool // there were not enough bits
}

func (r *bitReader) read(n int) uint64 {
	if n > 32 {
		low := r.read(32)
		return low | r.read(n-32)<<32
	}
	for r.n < n {
		if len(r.bytes) == 0 {
			r.short = true
			return 0
		}
		r.acc |= uint64(r.bytes[0]) << r.n
		r.bytes, r.n = r.bytes[1:], r.n+8
	}
	v := r.acc & (1<<n - 1)
	r.acc >>= n
	r.n -= n
	return v
}

var errDamaged = errors.New("the history is damaged")

// A reader reads what the append functions of encoding/binary wrote. The first error stays.
type reader struct {
	b   []byte
	err error
}

func (r *reader) uint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.err, r.b = errDamaged, nil
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) int() int64 { return unzigzag(r.uint()) }

// count is a number of things that take at least one byte each.
func (r *reader) count() int {
	v := r.uint()
	if v > uint64(len(r.b)) {
		r.err, r.b = errDamaged, nil
		return 0
	}
	return int(v)
}

func (r *reader) bytes() []byte {
	n := r.count()
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

func (r *reader) string() string { return string(r.bytes()) }

func appendInt(b []byte, v int64) []byte { return binary.AppendUvarint(b, zigzag(v)) }

func appendBytes[T string | []byte](b []byte, s T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// largestBlock is more than any block has once it is decompressed.
const largestBlock = 256 << 20

var (
	encoder = sync.OnceValue(func() *zstd.Encoder {
		// A block is at most some 100 kB long. The checksum is how damage is found.
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(true), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithWindowSize(1<<20))
		if err != nil {
			panic(err) // only for wrong options
		}
		return e
	})
	decoder = sync.OnceValue(func() *zstd.Decoder {
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(largestBlock))
		if err != nil {
			panic(err)
		}
		return d
	})
)

// appendSizes appends numbers of bits. A Huffman code suits those of busy rules, whose similar values zstd takes for repeated
// ones; zstd those of idle rules.
func appendSizes(b, sizes []byte) []byte {
	best := compress(sizes)
	var s huff0.Scratch
	if h, _, err := huff0.Compress4X(sizes, &s); err == nil && len(h) < len(best) {
		b = append(b, huffman)
		b = binary.AppendUvarint(b, uint64(len(sizes)))
		return appendBytes(b, h)
	}
	return appendBytes(append(b, 0), best)
}

// huffman says that a Huffman code follows, and not zstd.
const huffman = 1

// sizes reads at most so many numbers of bits.
func (r *reader) sizes(most int) ([]byte, error) {
	if len(r.b) == 0 {
		return nil, errDamaged
	}
	how := r.b[0]
	r.b = r.b[1:]
	if how != huffman {
		b := r.bytes()
		if r.err != nil {
			return nil, r.err
		}
		return decompress(b)
	}
	n := r.uint()
	b := r.bytes()
	if r.err != nil || n > uint64(most) {
		return nil, errDamaged
	}
	s, b, err := huff0.ReadTable(b, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	sizes, err := s.Decoder().Decompress4X(make([]byte, 0, n), b)
	if err != nil || uint64(len(sizes)) != n {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return sizes, nil
}

func compress(b []byte) []byte { return encoder().EncodeAll(b, nil) }

func decompress(b []byte) ([]byte, error) {
	plain, err := decoder().DecodeAll(b, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return plain, nil
}
