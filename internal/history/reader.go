package history

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"
)

const (
	segmentName = "%08d" + segmentEnd
	segmentEnd  = ".readings"
	unfinished  = "unfinished" // a segment that is written anew
)

func isSegment(name string) bool {
	var n int
	_, err := fmt.Sscanf(name, segmentName, &n)
	return err == nil && name == fmt.Sprintf(segmentName, n)
}

// A Reader reads a history, also while a process records it.
type Reader struct {
	root    *os.Root
	damaged int64 // bytes that the last Query could not read after the last reading
}

// NewReader reads the history in a directory. A caller closes it.
func NewReader(path string) (*Reader, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	return &Reader{root: root}, nil
}

// Close ends reading.
func (r *Reader) Close() error { return r.root.Close() }

func (r *Reader) header(name string) (first time.Time, every time.Duration, err error) {
	f, err := r.root.Open(name)
	if err != nil {
		return first, 0, err
	}
	defer f.Close()
	return readHeader(bufio.NewReader(f))
}

// Query calls visit for all readings until a time, in the order in which they were recorded, from at least the last one before
// another time on. They have the samples whose series match. What is damaged is left out.
func (r *Reader) Query(from, until time.Time, match func(*Series) bool, visit func(*Reading)) error {
	files, err := fs.ReadDir(r.root.FS(), ".")
	if err != nil {
		return fmt.Errorf("history: %w", err)
	}
	var names []string // the last segment before the time, and those in it
	within, begun := false, map[int64]string{}
	for _, f := range files {
		name := f.Name()
		if !f.Type().IsRegular() || !isSegment(name) { // to open a FIFO would block
			continue
		}
		first, _, err := r.header(name)
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && first.After(until):
		case err != nil && !errors.Is(err, errDamaged):
			return fmt.Errorf("history: read %s: %w", r.root.Name(), err)
		case err != nil:
			names = append(names, name)
		case begun[first.UnixNano()] != "": // they would count twice
			return fmt.Errorf("history: %s has the same readings as %s; move one of them away", name, begun[first.UnixNano()])
		case !first.Add(segmentTime).Before(from):
			names, within = append(names, name), true
		case !within:
			names = []string{name}
		}
		if err == nil {
			begun[first.UnixNano()] = name
		}
	}
	r.damaged = 0
	lost := false // a file before has no reading
	for i, name := range names {
		f, err := r.root.Open(name)
		if errors.Is(err, fs.ErrNotExist) { // it was deleted meanwhile
			continue
		}
		if err != nil {
			return fmt.Errorf("history: %w", err)
		}
		d, _, bad := newDecoder(f, match)
		for bad == nil {
			reading := d.next()
			if reading == nil {
				break
			}
			reading.damaged = skipped(r.damaged, lost)
			if r.damaged, lost = 0, false; !reading.Time.After(until) {
				visit(reading)
			}
		}
		if info, err := f.Stat(); err == nil {
			r.damaged += d.damaged(info.Size(), i < len(names)-1)
			lost = lost || d.last == 0
		}
		f.Close()
	}
	return nil
}
