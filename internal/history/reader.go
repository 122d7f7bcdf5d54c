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
	root *os.Root
}

// NewReader reads the history in a directory. A caller closes it.
func NewReader(path string) (*Reader, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("history: %w", err)
	}
	return &Reader{root}, nil
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
	before := ""
	for _, f := range files {
		name := f.Name()
		if !f.Type().IsRegular() { // to open a FIFO would block
			continue
		}
		first, _, err := r.header(name)
		switch {
		case name == unfinished || errors.Is(err, errDamaged) || errors.Is(err, fs.ErrNotExist) || first.After(until):
		case err != nil:
			return fmt.Errorf("history: read %s: %w", r.root.Name(), err)
		case first.Add(segmentTime).Before(from):
			before = name
		default:
			if len(names) == 0 && before != "" {
				names = append(names, before)
			}
			names = append(names, name)
		}
	}
	for _, name := range names {
		f, err := r.root.Open(name)
		if errors.Is(err, fs.ErrNotExist) { // it was deleted meanwhile
			continue
		}
		if err != nil {
			return fmt.Errorf("history: %w", err)
		}
		d, _, err := newDecoder(f, match)
		for reading := d.next(); err == nil && reading != nil; reading = d.next() {
			if !reading.Time.After(until) {
				visit(reading)
			}
		}
		f.Close()
	}
	return nil
}
