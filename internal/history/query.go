package history

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"
)

// A Reader reads a history, also while a process records it.
type Reader struct {
	store store
}

// NewReader reads the history in a file.
func NewReader(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	defer f.Close()
	if err := identify(f); err != nil {
		return nil, fmt.Errorf("history: %s: %w", path, err)
	}
	return &Reader{store: store{path: path}}, nil
}

// A Query is for some series over some time.
type Query struct {
	From, To time.Time
	Match    func(*Series) bool
}

// Query calls visit for each interval of series that match, in the order of time for each key. Intervals that overlap From
// or To only in part come whole.
func (r *Reader) Query(q Query, visit func(Interval)) error {
	err := r.store.with(false, func(db *bolt.DB) error {
		return db.View(func(tx *bolt.Tx) error {
			if empty, err := checkFormat(tx); empty || err != nil {
				return err
			}
			s := scan{Query: q, tx: tx, visit: visit, names: map[hash]*named{}, ends: map[Key]end{}}
			c := tx.Bucket(chunkBucket).Cursor()
			for k, v := c.First(); k != nil; k, v = c.Next() {
				if err := s.chunk(k, v); err != nil {
					return err
				}
			}
			if last := readRows(tx); last != nil {
				h := &header{chunk: *last}
				s.segments(h, last.segments)
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("history: read %s: %w", r.store.path, err)
	}
	return nil
}

// A scan goes through the chunks of a query.
type scan struct {
	Query
	tx    *bolt.Tx
	visit func(Interval)
	names map[hash]*named
	ends  map[Key]end
	last  instant // the last reading before the chunk; zero if there is none
	boot  string  // of that reading
}

// named is the series of a block.
type named struct {
	series []Series
	wanted []bool
	any    bool
}

// An end is the last reading of a series.
type end struct {
	at       instant
	boot     string
	counters Counters
	known    bool // counters are known
}

// chunk visits the intervals of a chunk.
func (s *scan) chunk(key, sealedHeader []byte) error {
	b, err := unsealed(sealedHeader)
	if err != nil {
		return err
	}
	h, err := readHeader(b)
	if err != nil {
		return err
	}
	if !s.overlaps(h) {
		s.last, s.boot = h.times[len(h.times)-1], h.boot
		return nil
	}
	var all []*segment
	for i, name := range h.blocks {
		n, err := s.named(name)
		if err != nil {
			return err
		}
		if !n.any {
			continue
		}
		b, err := get(s.tx.Bucket(valueBucket), valueKey(binary.BigEndian.Uint64(key), i))
		if err != nil {
			return err
		}
		found, err := h.readValues(b, n.series, func(i int) bool { return n.wanted[i] })
		if err != nil {
			return err
		}
		all = append(all, found...)
	}
	s.segments(h, all)
	return nil
}

// overlaps reports whether a chunk has readings in the time of the query.
func (s *scan) overlaps(h *header) bool {
	before, after := true, true
	for _, t := range h.times {
		at := time.Unix(0, t.wall)
		before, after = before && at.Before(s.From), after && at.After(s.To)
	}
	first, last := h.times[0].wall, h.times[len(h.times)-1].wall
	h.loose = time.Unix(0, first).Before(s.From) || time.Unix(0, last).After(s.To)
	return !before && !after
}

// named reads the series of a block, once.
func (s *scan) named(key hash) (*named, error) {
	if n := s.names[key]; n != nil {
		return n, nil
	}
	b, err := get(s.tx.Bucket(nameBucket), key[:])
	if err == nil {
		b, err = decompress(b)
	}
	if err != nil {
		return nil, err
	}
	r := reader{b: b}
	n := &named{series: r.series()}
	n.wanted = make([]bool, len(n.series))
	for i := range n.series {
		n.wanted[i] = s.Match(&n.series[i])
		n.any = n.any || n.wanted[i]
	}
	if r.err == nil && !n.any {
		n.series = nil // there may be many
	}
	s.names[key] = n
	return n, r.err
}

// emit visits an interval in the time of the query.
func (s *scan) emit(it Interval) {
	if it.End.After(s.From) && it.Begin.Before(s.To) {
		s.visit(it)
	}
}

// segments visits the intervals of segments of a chunk.
func (s *scan) segments(h *header, all []*segment) {
	for _, seg := range all {
		if s.Match(&seg.Series) {
			s.segment(h, seg)
		}
	}
	s.last, s.boot = h.times[len(h.times)-1], h.boot
}

func (s *scan) segment(h *header, seg *segment) {
	begin := h.times[seg.first]
	before, there := s.ends[seg.Key]
	now := end{at: begin, boot: h.boot, counters: seg.base, known: seg.hasAll}
	switch {
	case !there:
	case before.at == begin && before.boot == h.boot: // it goes on
		if !now.known {
			now.counters, now.known = before.counters, before.known
		}
	default:
		s.emit(s.gap(h, seg, before))
	}
	for i := range seg.n {
		to := seg.first + i + 1
		var v [columns]uint64
		for c, deltas := range seg.deltas {
			if deltas != nil {
				v[c] = deltas[i]
			}
		}
		it := between(h.times[to-1], h.times[to])
		it.Usual, it.Series, it.Counters, it.Policy = h.interval, &seg.Series, fromColumns(v), h.policies[to]
		it.PassedError, it.DroppedError = seg.errors[0], seg.errors[1]
		if it.Length > Longest(h.interval) {
			it.Gap = NoReading
		}
		it.Known, it.Loose = true, h.loose && it.PassedError+it.DroppedError > 0
		s.emit(it)
		now.counters.add(it.Counters)
		now.at = h.times[to]
	}
	s.ends[seg.Key] = now
}

// Longest is how long an interval may be that is no gap.
func Longest(interval time.Duration) time.Duration { return interval * 5 / 2 }

// gap is the interval from the end of a series to a segment that begins later.
func (s *scan) gap(h *header, seg *segment, before end) Interval {
	begin := h.times[seg.first]
	it := between(before.at, begin)
	it.Usual, it.Series, it.Policy = h.interval, &seg.Series, h.policies[seg.first]
	reading := s.last // the one before the segment begins
	if seg.first > 0 {
		reading = h.times[seg.first-1]
	}
	if before.boot != h.boot { // the clocks have nothing to do with each other
		it.Begin, it.ClockStep = time.Unix(0, before.at.wall), 0
		it.Length = it.End.Sub(it.Begin)
	}
	switch {
	case reading != before.at:
		it.Gap = Absent
	case before.boot == h.boot && seg.first == 0 && before.known && seg.hasAll:
		if d, ok := seg.base.Since(before.counters); ok {
			it.Gap, it.Counters, it.Known = NoReading, d, true
			if it.Length <= Longest(h.interval) {
				it.Gap = NoGap
			}
			return it
		}
		fallthrough
	default:
		it.Gap = Restarted
	}
	return it
}

// between is the interval between two readings. If the wall clock was set meanwhile, it begins by the new time.
func between(a, b instant) Interval {
	it := Interval{Begin: time.Unix(0, a.wall), End: time.Unix(0, b.wall), Length: time.Duration(b.mono - a.mono)}
	if step := it.End.Sub(it.Begin) - it.Length; step > time.Second || step < -time.Second {
		it.Begin, it.ClockStep = it.End.Add(-it.Length), step
	}
	return it
}

func (c *Counters) add(d Counters) {
	c.Passed, c.Dropped, c.Refused = c.Passed+d.Passed, c.Dropped+d.Dropped, c.Refused+d.Refused
}
