// Package input reads whole files, up to a maximum size.
package input

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
)

// MaxBytes is the largest file that is read: 128 MiB, twice the size of a policy with
// a million rules for IPv6 networks.
const MaxBytes = 128 << 20

// ErrTooLarge means that a file has more than MaxBytes.
var ErrTooLarge = fmt.Errorf("it has more than %d MiB, the maximum; split it up", MaxBytes>>20)

// All reads until EOF. The error is ErrTooLarge beyond MaxBytes.
func All(from io.Reader) ([]byte, error) { return all(from, MaxBytes) }

func all(from io.Reader, most int64) ([]byte, error) {
	var text bytes.Buffer
	if f, ok := from.(*os.File); ok {
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Size() <= most {
			text.Grow(int(info.Size()) + bytes.MinRead) // avoids copies while the buffer grows
		}
	}
	n, err := text.ReadFrom(io.LimitReader(from, most+1))
	if n > most {
		err = ErrTooLarge
	}
	return text.Bytes(), err
}

// File reads a regular file, and refuses others, which could block. The error names the file.
func File(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // O_NONBLOCK, because opening a FIFO waits for a writer
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	var text []byte
	if err == nil {
		text, err = All(f)
	}
	if path, ok := errors.AsType[*os.PathError](err); ok {
		err = path.Err
	}
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: name, Err: err}
	}
	return text, nil
}
