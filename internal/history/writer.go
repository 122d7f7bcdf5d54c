package history

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Errors of directories.
var (
	ErrOther  = errors.New("it has other files; name a directory for the history alone")
	ErrLocked = errors.New("another process writes it")
)

const (
	segmentTime = time.Hour    // of the wall clock, from the first reading on
	coarse      = PeriodLength // between readings of old segments
)

// A History records readings into a directory. It may be used by several goroutines.
type History struct {
	mu      sync.Mutex
	files   Reader
	o       Options
	path    string   // "" for memory
	passing bool     // the path is removed in the end
	dir     *os.File // is locked
	notice  func(string)
	failing bool // the last write failed, which was said
	short   bool // less than a day is kept, which was said

	segments []segment // the oldest first
	file     *os.File  // the last of them; nil before a reading
	encoder  encoder   // of that
	begun    time.Time // the time of its first reading
}

// A segment is a file.
type segment struct {
	name   string
	size   int64
	coarse bool
}

// Open begins to record into a directory, or into memory if path is "". What is there stays. Notices say what an operator
// should know, such as that the disk is full. What cannot be opened is tried again with each reading.
func Open(path string, o Options, notice func(string)) *History {
	o.Bytes = cmp.Or(o.Bytes, DefaultBytes)
	if o.Boot == "" {
		b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // without it, counters tell whether they began anew
		o.Boot = strings.TrimSpace(string(b))
	}
	h := &History{o: o, path: path, notice: notice}
	h.tell("open", h.open())
	return h
}

func (h *History) name() string { return cmp.Or(h.path, "memory") }

// open opens and locks the directory that has the name now.
func (h *History) open() (err error) {
	h.close()
	h.segments, h.file, h.dir = nil, nil, nil
	if h.path == "" {
		h.dir, err = memory()
		if errors.Is(err, unix.EPERM) { // as in the unit
			h.path, err = os.MkdirTemp("/run/shapectl", "history-*")
			h.passing = true
		}
	}
	if h.path != "" {
		if err == nil {
			err = os.Mkdir(h.path, 0o750)
		}
		if err == nil || errors.Is(err, fs.ErrExist) {
			h.dir, err = os.OpenFile(h.path, unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		}
		if errors.Is(err, unix.ENOTDIR) {
			return errors.New("it is not a directory; move it away, or name another one")
		}
		if err == nil && unix.Flock(int(h.dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			err = ErrLocked
		}
	}
	if err != nil {
		return err
	}
	if h.files.root, err = os.OpenRoot(fmt.Sprintf("/proc/self/fd/%d", h.dir.Fd())); err != nil {
		return err
	}
	files, err := fs.ReadDir(h.files.root.FS(), ".")
	for _, f := range files {
		info, err := f.Info()
		switch {
		case err != nil:
			return err
		case f.Name() == unfinished:
			h.files.root.Remove(unfinished)
		case !f.Type().IsRegular() || !isSegment(f.Name()): // to open a FIFO would block
			return ErrOther
		default:
			_, every, err := h.files.header(f.Name())
			if errors.Is(err, ErrFormat) {
				return err
			}
			h.segments = append(h.segments, segment{f.Name(), info.Size(), every >= coarse})
		}
	}
	return err
}

// memory is a directory in memory that nobody else sees, and of which nothing is left.
func memory() (*os.File, error) {
	fd, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	if err := unix.FsconfigCreate(fd); err != nil {
		return nil, err
	}
	fd, err = unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, 0)
	return os.NewFile(uintptr(fd), ""), err
}

// Add adds a reading. They come about an Interval after one another. If one cannot be written, there is a gap.
func (h *History) Add(r Reading) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r.boot = h.o.Boot
	h.tell("write", h.write(&r))
}

// tell tells whether what was done worked, unless it was as before.
func (h *History) tell(did string, err error) {
	switch {
	case err != nil && !h.failing:
		h.notice(fmt.Sprintf("history: %s %s: %v; until that works there is a gap", did, h.name(), err))
	case err == nil && h.failing:
		h.notice(fmt.Sprintf("history: %s is written again", h.name()))
	}
	h.failing = err != nil
}

func (h *History) write(r *Reading) error {
	if h.dir == nil || h.path != "" && !h.isThere() {
		if h.file != nil {
			h.notice(fmt.Sprintf("history: %s was removed or replaced; recording goes on in what is there now", h.path))
		}
		if err := h.open(); err != nil {
			return err
		}
	}
	var header []byte
	last := len(h.segments) - 1
	if h.file == nil || r.Time.Before(h.begun) || r.Time.Sub(h.begun) >= segmentTime || h.segments[last].size > h.o.Bytes/8 {
		number := 0
		if last >= 0 {
			fmt.Sscanf(h.segments[last].name, segmentName, &number)
		}
		name := fmt.Sprintf(segmentName, number+1)
		file, err := h.files.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		h.file.Close()
		h.segments, h.file, h.encoder, h.begun = append(h.segments, segment{name: name}), file, encoder{}, r.Time
		header, last = newHeader(r.Time, Interval), last+1
	}
	n, err := h.file.Write(append(header, h.encoder.block(r)...))
	h.segments[last].size += int64(n)
	if err == nil {
		err = unix.Fdatasync(int(h.file.Fd()))
	}
	if err == nil && header != nil && h.path != "" {
		err = h.dir.Sync()
	}
	if err != nil { // a reader ends at what was written of the block, so what comes next is in another segment
		h.file.Close()
		if h.file = nil; header != nil {
			h.files.root.Remove(h.segments[last].name)
			h.segments = h.segments[:last]
		}
		return err
	}
	return h.shrink()
}

// isThere reports whether the last segment is still where it was opened.
func (h *History) isThere() bool {
	if h.file == nil {
		return false
	}
	was, err := h.file.Stat()
	now, failed := os.Lstat(filepath.Join(h.path, h.segments[len(h.segments)-1].name))
	return err == nil && failed == nil && os.SameFile(was, now)
}

// shrink makes room: of the oldest segments it keeps a reading each five minutes. When these fill half of the room, the oldest
// go.
func (h *History) shrink() error {
	for {
		all, old, fine := int64(0), int64(0), -1
		for i, s := range h.segments {
			all += s.size
			if s.coarse {
				old += s.size
			} else if fine < 0 {
				fine = i
			}
		}
		sealed := len(h.segments) - 1
		if all <= h.o.Bytes || sealed == 0 {
			return nil
		}
		if fine < sealed && old <= h.o.Bytes/2 && h.coarsen(&h.segments[fine]) == nil {
			continue
		}
		if err := h.files.root.Remove(h.segments[0].name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		h.segments = h.segments[1:]
		if first, _, err := h.files.header(h.segments[0].name); err == nil && h.begun.Sub(first) < 24*time.Hour && !h.short {
			h.short = true
			h.notice(fmt.Sprintf("history: %s is full with less than a day: give it more than %d MB; the oldest goes first", h.name(), h.o.Bytes/1e6))
		}
	}
}

// coarsen keeps the first reading of a segment, and one each five minutes.
func (h *History) coarsen(s *segment) error {
	s.coarse = true // also if it is damaged
	from, err := h.files.root.Open(s.name)
	if err != nil {
		return nil
	}
	defer from.Close()
	d, begun, err := newDecoder(from, func(*Series) bool { return true })
	if err != nil {
		return nil
	}
	out, err := h.files.root.OpenFile(unfinished, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	to, e := bufio.NewWriter(out), encoder{}
	to.Write(newHeader(begun, coarse)) // Flush returns its error
	kept := time.Time{}
	for r := d.next(); r != nil; r = d.next() {
		if since := r.Time.Sub(kept); since >= coarse || since < 0 {
			to.Write(e.block(r))
			kept = r.Time
		}
	}
	if err := cmp.Or(to.Flush(), out.Sync()); err != nil {
		return err
	}
	if s.size, err = out.Seek(0, io.SeekCurrent); err != nil {
		return err
	}
	return h.files.root.Rename(unfinished, s.name)
}

// Reader reads what is recorded. A caller closes it.
func (h *History) Reader() (*Reader, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dir == nil {
		return NewReader(h.path) // which says why it cannot be opened
	}
	return NewReader(fmt.Sprintf("/proc/self/fd/%d", h.dir.Fd()))
}

// Close ends recording. All readings are written already.
func (h *History) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.passing {
		defer os.RemoveAll(h.path)
	}
	return h.close()
}

func (h *History) close() error {
	h.file.Close() // what it had is written
	if h.files.root != nil {
		h.files.root.Close()
	}
	return h.dir.Close()
}
