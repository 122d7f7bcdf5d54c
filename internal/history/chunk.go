package history

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"
	"sort"
	"strings"
	"time"
)

// A chunk is readings one after another, without a gap in which nobody read.
type chunk struct {
	boot     string
	interval time.Duration
	times    []instant // of the readings; the first is also the last one of the chunk before it
	policies []string  // at each of them
	segments []*segment
	// bounded is whether it begins or ends a run of chunks. Only then all segments have a base.
	bounded bool

	open   map[Key]*segment // those that the last reading had
	before []Sample         // the last reading
	at     []*segment       // of each of its samples
}

// An instant is a time by two clocks, in ns.
type instant struct {
	wall int64
	mono uint64
}

// A segment is a series whose parameters did not change and whose counters did not begin anew.
type segment struct {
	Series
	first  int // index of the reading at which it begins
	base   Counters
	hasAll bool // base is known, and not only differences
	last   Counters
	n      int               // readings after the first
	deltas [columns][]uint64 // for each of these; nil if all are 0
	errors [columns]float64  // the largest relative ones, of deltas that were rounded
}

// add adds a reading.
func (c *chunk) add(r *Reading) {
	c.times = append(c.times, instant{r.Time.UnixNano(), r.Mono})
	c.policies = append(c.policies, r.Policy)
	index := len(c.times) - 1
	same := len(c.before) == len(r.Samples)
	for i := 0; same && i < len(r.Samples); i++ {
		same = r.Samples[i].Series == c.before[i].Series
	}
	if !same {
		c.at = c.at[:0]
		open := make(map[Key]*segment, len(r.Samples))
		for i := range r.Samples {
			s := &r.Samples[i]
			at := c.open[s.Key]
			if at != nil && at.Series != s.Series { // its parameters changed
				next := &segment{Series: s.Series, first: index - 1, base: at.last, last: at.last, hasAll: true}
				c.segments = append(c.segments, next)
				at = next
			}
			open[s.Key] = at
			c.at = append(c.at, at)
		}
		c.open = open
	}
	for i := range r.Samples {
		s := &r.Samples[i]
		at := c.at[i]
		if at == nil || !at.count(s.Counters, index) {
			at = &segment{Series: s.Series, first: index, base: s.Counters, last: s.Counters, hasAll: true}
			c.segments = append(c.segments, at)
			c.at[i], c.open[s.Key] = at, at
		}
	}
	c.before = r.Samples
}

// count adds the counters at a reading, unless they began anew.
func (s *segment) count(now Counters, index int) bool {
	d, ok := now.Since(s.last)
	if !ok || index != s.first+s.n+1 {
		return false
	}
	s.last = now
	s.n++
	for c, v := range d.columns() {
		if v == 0 && s.deltas[c] == nil {
			continue
		}
		if s.deltas[c] == nil {
			s.deltas[c] = make([]uint64, s.n-1, chunkReadings)
		}
		s.deltas[c] = append(s.deltas[c], v)
	}
	return true
}

// next is the chunk after this one. It begins with the last reading.
func (c *chunk) next() *chunk {
	n := &chunk{boot: c.boot, interval: c.interval}
	if len(c.times) > 0 {
		last := len(c.times) - 1
		n.add(&Reading{Time: time.Unix(0, c.times[last].wall), Mono: c.times[last].mono, Policy: c.policies[last], Samples: c.before})
	}
	return n
}

// segmentsOfBlock is how many segments are compressed together.
const segmentsOfBlock = 512

// An encoded chunk is a header, which says what else there is, and blocks: series in one, what they counted in another.
type encoded struct {
	header []byte
	names  [][]byte // of each block: the series
	values [][]byte
	length time.Duration
}

// length is the time from the first reading to the last.
func (c *chunk) length() time.Duration {
	return time.Duration(c.times[len(c.times)-1].mono - c.times[0].mono)
}

// hash names a list of series.
type hash [16]byte

func hashOf(b []byte) hash {
	sum := sha256.Sum256(b)
	return hash(sum[:16])
}

// encode encodes the chunk in at most budget bytes, if rounding can do that.
func (c *chunk) encode(budget int) encoded {
	slices.SortStableFunc(c.segments, func(a, b *segment) int {
		return cmp.Or(strings.Compare(a.Pool, b.Pool), strings.Compare(a.Device, b.Device), strings.Compare(a.Direction, b.Direction),
			strings.Compare(a.Network, b.Network), a.first-b.first)
	})
	e := encoded{length: c.length()}
	blocks := slices.Collect(slices.Chunk(c.segments, segmentsOfBlock))
	fixed := 0
	for _, segments := range blocks {
		e.names = append(e.names, compress(appendSeries(nil, len(segments), func(i int) *Series { return &segments[i].Series })))
		fixed += len(e.names[len(e.names)-1]) / 10 // they are shared by chunks with the same series
	}
	precision := c.precision(budget - fixed - 1000)
	h := []byte{byte(precision[0]), byte(precision[1]), 0}
	if c.bounded {
		h[2] = 1
	}
	h = appendHead(h, c)
	h = binary.AppendUvarint(h, uint64(len(c.times)))
	var before instant
	for _, t := range c.times {
		mono := int64(t.mono - before.mono)
		h = appendInt(h, mono)
		h = appendInt(h, t.wall-before.wall-mono)
		before = t
	}
	policy := ""
	for i, p := range c.policies {
		if p != policy {
			h = binary.AppendUvarint(h, uint64(i)+1)
			h = appendBytes(h, p)
			policy = p
		}
	}
	h = binary.AppendUvarint(h, 0)
	h = binary.AppendUvarint(h, uint64(len(blocks)))
	for i, segments := range blocks {
		name := hashOf(e.names[i])
		h = append(h, name[:]...)
		e.values = append(e.values, c.appendValues(segments, precision))
	}
	e.header = compress(h)
	return e
}

// appendHead writes what is known of a chunk when it begins.
func appendHead(b []byte, c *chunk) []byte {
	return binary.AppendUvarint(appendBytes(b, c.boot), uint64(c.interval))
}

// readHead is the inverse of appendHead.
func readHead(b []byte) (*chunk, error) {
	r := reader{b: b}
	c := &chunk{boot: r.string(), interval: time.Duration(r.uint())}
	return c, r.err
}

// precision is the best one that makes values take at most so many bytes, or the last one.
func (c *chunk) precision(budget int) [2]int {
	if c.estimate(precisions[0]) <= budget { // as usual
		return precisions[0]
	}
	best := 1 + sort.Search(len(precisions)-2, func(i int) bool { return c.estimate(precisions[i+1]) <= budget })
	return precisions[best]
}

// estimate is about how many bytes the values take.
func (c *chunk) estimate(precision [2]int) int {
	var all column
	overhead := 0
	for _, s := range c.segments {
		overhead += 3
		for i, values := range s.deltas {
			k := precision[min(i, 1)]
			if all.add(values, k) != allZero && k != exact {
				overhead += 4 // the rest of its sum
			}
		}
	}
	var counts [65]int
	for _, size := range all.sizes {
		counts[size]++
	}
	entropy := 0.0
	for _, n := range counts {
		if n > 0 {
			entropy -= float64(n) * math.Log2(float64(n)/float64(len(all.sizes)))
		}
	}
	return overhead + len(all.rest.finish()) + int(entropy*1.02)/8
}

// appendSeries writes n series, column by column.
func appendSeries(b []byte, n int, at func(int) *Series) []byte {
	b = binary.AppendUvarint(b, uint64(n))
	for _, text := range seriesTexts {
		for i := range n {
			b = appendBytes(b, *text(at(i)))
		}
	}
	for _, number := range seriesNumbers {
		for i := range n {
			b = binary.AppendUvarint(b, *number(at(i)))
		}
	}
	for i := range n {
		flags := byte(0)
		for bit, flag := range seriesFlags {
			if *flag(at(i)) {
				flags |= 1 << bit
			}
		}
		b = append(b, flags)
	}
	return b
}

var seriesTexts = []func(*Series) *string{
	func(s *Series) *string { return &s.Device }, func(s *Series) *string { return &s.Direction },
	func(s *Series) *string { return &s.Network }, func(s *Series) *string { return &s.Pool },
	func(s *Series) *string { return &s.Name }, func(s *Series) *string { return &s.Plan },
	func(s *Series) *string { return &s.Within }, func(s *Series) *string { return &s.Each },
	func(s *Series) *string { return &s.Excess },
}

var seriesNumbers = []func(*Series) *uint64{
	func(s *Series) *uint64 { return &s.Rate }, func(s *Series) *uint64 { return &s.Capacity }, func(s *Series) *uint64 { return &s.Guarantee },
	func(s *Series) *uint64 { return &s.PoolRate },
}

var seriesFlags = []func(*Series) *bool{
	func(s *Series) *bool { return &s.Detached }, func(s *Series) *bool { return &s.Coloured }, func(s *Series) *bool { return &s.Aware },
}

// series is the inverse of appendSeries. Equal texts of neighbours are one.
func (r *reader) series() []Series {
	series := make([]Series, r.count())
	for _, text := range seriesTexts {
		before := ""
		for i := range series {
			if b := r.bytes(); string(b) != before {
				before = string(b)
			}
			*text(&series[i]) = before
		}
	}
	for _, number := range seriesNumbers {
		for i := range series {
			*number(&series[i]) = r.uint()
		}
	}
	if len(r.b) < len(series) {
		r.err, r.b = errDamaged, nil
		return nil
	}
	for i := range series {
		for bit, flag := range seriesFlags {
			*flag(&series[i]) = r.b[i]>>bit&1 != 0
		}
	}
	r.b = r.b[len(series):]
	return series
}

// appendValues encodes what segments counted.
func (c *chunk) appendValues(segments []*segment, precision [2]int) []byte {
	var all column
	var b []byte
	for _, s := range segments {
		b = binary.AppendUvarint(b, uint64(s.first))
		b = binary.AppendUvarint(b, uint64(s.n))
		var modes byte
		rests := make([]int64, 0, columns)
		for i, values := range s.deltas {
			k := precision[min(i, 1)]
			mode := all.add(values, k)
			modes |= mode << (2 * i)
			if mode != allZero && k != exact {
				rest := int64(0)
				for _, v := range values {
					rest += int64(v - rounded(v, k))
				}
				rests = append(rests, rest)
			}
		}
		if c.bounded || s.first > 0 {
			modes |= hasBase
		}
		b = append(b, modes)
		for _, rest := range rests {
			b = appendInt(b, rest)
		}
		if modes&hasBase != 0 {
			for _, v := range s.base.columns() {
				b = binary.AppendUvarint(b, v)
			}
		}
	}
	b = appendBytes(nil, compress(b))
	b = appendSizes(b, all.sizes)
	return append(b, all.rest.finish()...)
}

// hasBase is set with the modes of a segment that has a base.
const hasBase = 1 << (2 * columns)

// A header is what the header of a chunk says.
type header struct {
	chunk
	precision [2]int
	blocks    []hash // of the names
	loose     bool   // only a part of it is in the time of a query
}

func readHeader(b []byte) (*header, error) {
	b, err := decompress(b)
	if err != nil {
		return nil, err
	}
	if len(b) < 3 || b[0] > exact || b[1] > exact {
		return nil, errDamaged
	}
	h := &header{precision: [2]int{int(b[0]), int(b[1])}}
	h.bounded = b[2] != 0
	r := reader{b: b[3:]}
	h.boot, h.interval = r.string(), time.Duration(r.uint())
	h.times, h.policies = make([]instant, r.count()), nil
	var before instant
	for i := range h.times {
		mono := r.int()
		before.mono += uint64(mono)
		before.wall += mono + r.int()
		h.times[i] = before
	}
	h.policies = make([]string, len(h.times))
	for r.err == nil {
		i := r.uint()
		if i == 0 {
			break
		}
		policy := r.string()
		for ; i <= uint64(len(h.policies)); i++ {
			h.policies[i-1] = policy
		}
	}
	for range r.count() {
		if len(r.b) < len(hash{}) {
			return nil, errDamaged
		}
		h.blocks = append(h.blocks, hash(r.b[:len(hash{})]))
		r.b = r.b[len(hash{}):]
	}
	if r.err != nil || len(h.times) == 0 {
		return nil, errDamaged
	}
	return h, nil
}

// readValues reads the segments of a block whose series are wanted.
func (h *header) readValues(b []byte, series []Series, want func(i int) bool) (segments []*segment, err error) {
	r := reader{b: b}
	frame, err := decompress(r.bytes())
	if err != nil {
		return nil, err
	}
	if r.err != nil {
		return nil, r.err
	}
	sizes, err := r.sizes(len(series) * len(h.times) * columns)
	if err != nil {
		return nil, err
	}
	all := columnReader{sizes: sizes, rest: bitReader{bytes: r.b}}
	r = reader{b: frame}
	modes, rests := make([]byte, len(series)), make([][columns]int64, len(series))
	segments = make([]*segment, len(series))
	for i := range series {
		s := &segment{Series: series[i], first: int(r.uint()), n: int(r.uint())}
		if s.first < 0 || s.n < 0 || s.first+s.n >= len(h.times) || len(r.b) == 0 {
			return nil, errDamaged
		}
		segments[i], modes[i] = s, r.b[0]
		r.b = r.b[1:]
		for c := range columns {
			if mode := modes[i] >> (2 * c) & 3; mode != allZero && h.precision[min(c, 1)] != exact {
				rests[i][c] = r.int()
			}
		}
		if s.hasAll = modes[i]&hasBase != 0; s.hasAll {
			s.base = Counters{r.uint(), r.uint(), r.uint()}
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	found := segments[:0]
	var unused []uint64
	for i, s := range segments {
		wanted := want(i)
		for c := range columns {
			mode, k := modes[i]>>(2*c)&3, h.precision[min(c, 1)]
			if mode == allZero {
				continue
			}
			values := unused[:0]
			if wanted {
				values = nil
			}
			values = slices.Grow(values, s.n)[:s.n]
			if err := all.read(values, mode, k); err != nil {
				return nil, err
			}
			if wanted {
				s.deltas[c], s.errors[c] = values, relativeError(k)+spread(values, rests[i][c])
			} else {
				unused = values
			}
		}
		if wanted {
			found = append(found, s)
		}
	}
	return found, nil
}

// spread adds what was rounded away of a sum to the values, in proportion. So the sum is exact. It returns by which part
// that changes a value at most.
func spread(values []uint64, rest int64) float64 {
	sum := uint64(0)
	for _, v := range values {
		sum += v
	}
	if rest == 0 || sum == 0 || sum+uint64(rest) == 0 {
		return 0
	}
	until, spent := uint64(0), int64(0)
	for i, v := range values {
		until += v
		now := int64(float64(rest) * (float64(until) / float64(sum)))
		values[i] += uint64(now - spent)
		spent = now
	}
	return math.Abs(float64(rest) / float64(sum))
}
