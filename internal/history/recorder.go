package history

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

// A History records readings. It may be used by several goroutines.
type History struct {
	mu     sync.Mutex
	limits Limits
	store  store
	file   *os.File // holds the lock, or the memory
	notice func(string)

	chunk     *chunk
	resumed   []Sample  // see Resumed
	before    *Reading  // the last one
	firstRow  int       // index of rows[0]; 0 if the rows in the file are of another chunk
	rows      [][]byte  // that are not written
	full      []encoded // chunks that are not written
	kept      []kept    // chunks that are written, the oldest first
	failing   bool      // the last write failed, which was said
	shortened bool      // less than a day is kept, which was said
}

// A kept chunk is written.
type kept struct {
	number uint64
	length time.Duration
}

// mostUnwritten is how many full chunks wait to be written, while they cannot be: an hour of readings.
const mostUnwritten = 6

// Open begins to record into a file, or into memory if path is "". What the file has stays, and what a killed process had
// begun. Notices say what an operator should know, such as that the disk is full.
func Open(path string, limits Limits, notice func(string)) (*History, error) {
	limits = limits.withDefaults()
	h := &History{limits: limits, notice: notice, store: store{path: path}}
	if path == "" {
		fd, err := unix.MemfdCreate("shapectl-history", unix.MFD_CLOEXEC)
		if err != nil {
			return nil, fmt.Errorf("open a history in memory: %w", err)
		}
		h.file = os.NewFile(uintptr(fd), "")
		h.store.path, h.store.memory = fmt.Sprintf("/proc/self/fd/%d", fd), true
		h.limits.Bytes -= h.limits.Bytes / 9 // for the chunk that is not full
	} else {
		f, err := openFile(path)
		if err != nil {
			return nil, fmt.Errorf("history: %w", err)
		}
		h.file = f
	}
	err := h.begin()
	if errors.Is(err, errDamaged) {
		err = h.beginAnew(err)
	}
	if err != nil {
		if h.file != nil {
			h.file.Close()
		}
		return nil, fmt.Errorf("history: open %s: %w", cmp.Or(path, "memory"), err)
	}
	return h, nil
}

// beginAnew renames a damaged file, in place of one that was damaged before, and begins another.
func (h *History) beginAnew(damage error) error {
	if h.store.memory {
		return damage
	}
	aside := h.store.path + ".damaged"
	if err := os.Rename(h.store.path, aside); err != nil {
		return errors.Join(damage, err)
	}
	h.notice(fmt.Sprintf("history: %s: %v; it is kept as %s, and a new one begins", h.store.path, damage, aside))
	return h.reopen()
}

// reopen opens the file that has the name now, or makes one.
func (h *History) reopen() error {
	f, err := openFile(h.store.path)
	if err != nil {
		return err
	}
	h.file.Close()
	h.file, h.before, h.resumed, h.rows, h.firstRow = f, nil, nil, nil, 0
	return h.begin()
}

// find opens the file again if its name was removed, or is that of another file.
func (h *History) find() error {
	if h.store.memory {
		return nil
	}
	was, err := h.file.Stat()
	if err != nil {
		return err
	}
	if now, err := os.Lstat(h.store.path); err == nil && os.SameFile(was, now) {
		return nil
	}
	if err := h.reopen(); err != nil {
		return err
	}
	h.notice(fmt.Sprintf("history: %s was removed or replaced; recording goes on in the file that is there now", h.store.path))
	return nil
}

func (l Limits) withDefaults() Limits {
	l.Bytes, l.Keep, l.Interval = cmp.Or(l.Bytes, DefaultBytes), cmp.Or(l.Keep, DefaultKeep), cmp.Or(l.Interval, DefaultInterval)
	if l.Boot == "" {
		b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // without it, counters tell whether they began anew
		l.Boot = strings.TrimSpace(string(b))
	}
	return l
}

// begin reads what there is, and closes the chunk that was not full.
func (h *History) begin() error {
	h.kept, h.chunk = nil, &chunk{boot: h.limits.Boot, interval: h.limits.Interval, bounded: true}
	var unfinished *chunk
	err := h.store.with(true, func(db *bolt.DB) error {
		return db.Update(func(tx *bolt.Tx) error {
			empty, err := checkFormat(tx)
			if err != nil {
				return err
			}
			if empty {
				return create(tx)
			}
			c := tx.Bucket(chunkBucket).Cursor()
			for k, v := c.First(); k != nil; k, v = c.Next() {
				b, err := unsealed(v)
				if err != nil {
					return err
				}
				head, err := readHeader(b)
				if err != nil {
					return err
				}
				h.kept = append(h.kept, kept{binary.BigEndian.Uint64(k), head.length()})
			}
			unfinished = readRows(tx)
			return walk(tx.Bucket(valueBucket), tx.Bucket(nameBucket))
		})
	})
	if err != nil || unfinished == nil {
		return err
	}
	if unfinished.boot == h.limits.Boot {
		h.resumed = unfinished.before
	}
	h.full = append(h.full, unfinished.encode(h.limits.budget()))
	h.write()
	return nil
}

// Resumed is the last reading in the file, if the counters go on from it. It is kept until it was asked for.
func (h *History) Resumed() []Sample {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := h.resumed
	h.resumed = nil
	return last
}

// walk reads all, to find damage before something depends on it.
func walk(buckets ...*bolt.Bucket) error {
	for _, b := range buckets {
		if err := each(b, func(_, _ []byte) error { return nil }); err != nil {
			return err
		}
	}
	return nil
}

// room is up to how many bytes a file may grow. Deleting what is oldest takes some pages, too.
func (l Limits) room() int64 { return l.Bytes - max(128<<10, l.Bytes/128) }

// budget is how many bytes a chunk may take, so that a day fits. One that was cut short may take as many.
func (l Limits) budget() int {
	const part = 0.925 // pages are not quite full, and there are rows
	return int(part * float64(l.room()-int64(allocStep)) / float64(fullDay) * float64(chunkReadings*l.Interval))
}

// Add adds a reading, unless it comes less than an interval after the one before it. What cannot be written is tried again
// with the next one.
func (h *History) Add(r Reading) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.chunk.times); n > 0 && r.Mono < h.chunk.times[n-1].mono+uint64(h.limits.Interval)*19/20 {
		return
	}
	h.find()             // before there is something to write; an error is one of write
	if h.before == nil { // the first reading
		h.firstRow, h.rows = 0, [][]byte{compress(appendHead(nil, h.chunk))}
	}
	h.rows = append(h.rows, compress(appendRow(nil, &r, h.before)))
	h.chunk.add(&r)
	h.before = &r
	if len(h.chunk.times) > chunkReadings {
		h.finish()
	}
	h.write()
}

// finish begins a new chunk.
func (h *History) finish() {
	// While chunks wait to be written, the one before this may be lost.
	h.chunk.bounded = h.chunk.bounded || h.failing
	h.full = append(h.full, h.chunk.encode(h.limits.budget()))
	if n := len(h.full) - mostUnwritten; n > 0 {
		h.full = h.full[n:]
	}
	h.chunk = h.chunk.next()
	h.firstRow, h.rows = 0, [][]byte{compress(appendHead(nil, h.chunk)), compress(appendRow(nil, h.before, nil))}
}

// write writes what is not written.
func (h *History) write() {
	err := h.tryWrite()
	if errors.Is(err, errDamaged) {
		err = h.beginAnew(err)
	}
	switch {
	case err != nil && !h.failing:
		h.notice(fmt.Sprintf("history: write %s: %v; up to an hour is kept in memory until that works", h.name(), err))
	case err == nil && h.failing:
		h.notice(fmt.Sprintf("history: %s is written again", h.name()))
	}
	h.failing = err != nil
}

func (h *History) name() string {
	if h.store.memory {
		return "memory"
	}
	return h.store.path
}

func (h *History) tryWrite() error {
	if err := h.find(); err != nil {
		return err
	}
	return h.store.with(true, func(db *bolt.DB) error {
		for {
			db.MaxSize = int(h.limits.room())
			err := h.update(db)
			db.MaxSize = int(h.limits.Bytes)
			if errors.Is(err, bolterrors.ErrMaxSizeReached) && len(h.kept) > 0 {
				if err = h.evict(db); err == nil {
					h.sayShort()
					continue
				}
			}
			for err == nil && h.outdated() {
				err = h.evict(db)
			}
			return err
		}
	})
}

// update writes full chunks and rows in one transaction.
func (h *History) update(db *bolt.DB) error {
	var numbers []uint64
	err := db.Update(func(tx *bolt.Tx) error {
		if empty, err := checkFormat(tx); empty || err != nil {
			return cmp.Or(err, errDamaged)
		}
		for _, e := range h.full {
			number, err := putChunk(tx, e)
			if err != nil {
				return err
			}
			numbers = append(numbers, number)
		}
		if len(h.rows) == 0 {
			return putRows(tx, 0, nil)
		}
		return putRows(tx, h.firstRow, h.rows)
	})
	if err != nil {
		return err
	}
	for i, number := range numbers {
		h.kept = append(h.kept, kept{number, h.full[i].length})
	}
	h.full, h.firstRow, h.rows = nil, h.firstRow+len(h.rows), nil
	return nil
}

// evict deletes the oldest chunk.
func (h *History) evict(db *bolt.DB) error {
	err := db.Update(func(tx *bolt.Tx) error { return deleteChunk(tx, h.kept[0].number) })
	if err == nil {
		h.kept = h.kept[1:]
	}
	return err
}

// length is how much recorded time is kept.
func (h *History) length() (sum time.Duration) {
	for _, k := range h.kept {
		sum += k.length
	}
	return sum
}

// outdated reports whether there is enough without the oldest chunk. Recorded time counts, as the wall clock may be set.
func (h *History) outdated() bool {
	return len(h.kept) > 0 && h.length()-h.kept[0].length >= h.limits.Keep
}

// sayShort says once that a day does not fit.
func (h *History) sayShort() {
	if length := h.length(); length < fullDay && length < h.limits.Keep && !h.shortened {
		h.shortened = true
		h.notice(fmt.Sprintf("history: %s is full with %v: a day of all rules and pools needs more than %d MB; the oldest goes first",
			h.name(), length.Round(time.Minute), h.limits.Bytes/1e6))
	}
}

// Close ends recording. What the last chunk has is in the file already.
func (h *History) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failing {
		h.write()
	}
	return h.file.Close()
}

// Query is that of a Reader on what is recorded.
func (h *History) Query(q Query, visit func(Interval)) error {
	return (&Reader{store: h.store}).Query(q, visit)
}
