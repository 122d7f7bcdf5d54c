// Package input reads whole files, up to a maximum size, and replaces them.
package input

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
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

// Trusted returns an error if root would do what another user wrote: if somebody else than root and the user who called sudo
// owns the open file, or others may write to it. Those who can write to a terminal are there.
func Trusted(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	owner := info.Sys().(*syscall.Stat_t).Uid
	switch {
	case os.Geteuid() != 0 || info.Mode()&os.ModeCharDevice != 0:
		return nil
	case owner != 0 && strconv.FormatUint(uint64(owner), 10) != os.Getenv("SUDO_UID"):
		return fmt.Errorf("it belongs to user %d, who could change it at any time; run 'chown root' on it", owner)
	case info.Mode().Perm()&0o022 != 0:
		return errors.New("other users can write to it; run 'chmod go-w' on it")
	}
	return nil
}

// File reads a regular file, and refuses others, which could block, and those that are not Trusted. The error names the file.
func File(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // O_NONBLOCK, because opening a FIFO waits for a writer
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file; name one that is")
	}
	if err == nil {
		err = Trusted(f)
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

// Update replaces a file atomically and durably by what next makes of that which File returns. It creates the directory if it is
// missing. One process at a time updates files of a directory.
func Update(path string, next func(have []byte, err error) []byte) error {
	parent := filepath.Dir(path)
	if err := os.Mkdir(parent, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	dir, err := os.Open(parent)
	if err != nil {
		return err
	}
	defer dir.Close()
	// All processes use the same temporary name, so that killed ones leave at most one file.
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", parent, err)
	}
	have, err := File(path)
	text := next(have, err)
	if err == nil && bytes.Equal(have, text) {
		return nil
	}
	aside := path + ".new"
	if err = write(aside, text); err == nil {
		err = os.Rename(aside, path)
	}
	if err != nil {
		os.Remove(aside) // if it exists
		return err
	}
	return dir.Sync()
}

// write writes a file and syncs it to disk.
func write(path string, text []byte) error {
	os.Remove(path) // of a killed process, or a symlink, which O_EXCL does not follow
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o640)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Chmod(0o640), f.Sync(), f.Close()) // Chmod, because of the umask
}
