// Package lastgood keeps the text of the policy that was applied last, and falls
// back to it.
package lastgood

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/policyfile"
)

// A Policy is one that validated.
type Policy struct {
	*policyfile.File
	Path    string // where it is from
	Text    []byte // as it is there
	Problem error  // of the file that was asked for; nil where it is from that one
}

// Load reads and validates a policy. Where that fails, it is the one in kept, if
// that is not "" and validates; Problem then says why. The error is that of both.
func Load(file, kept string) (Policy, error) {
	p, err := load(file)
	if err == nil || kept == "" {
		return p, err
	}
	last, errKept := load(kept)
	if errors.Is(errKept, fs.ErrNotExist) {
		return p, fmt.Errorf("%w\nand no policy is kept in %s to fall back to", err, kept)
	}
	if errKept != nil {
		return p, fmt.Errorf("%w\nand the policy that is kept to fall back to is no better: %w", err, errKept)
	}
	last.Problem = err
	return last, nil
}

func load(path string) (Policy, error) {
	text, err := input.File(path)
	if err != nil {
		return Policy{}, fmt.Errorf("read the policy: %w", err)
	}
	f, err := policyfile.Parse(path, text)
	if err != nil {
		return Policy{}, err
	}
	return Policy{File: f, Path: path, Text: text}, nil
}

// Check reports why no policy can be kept in a file: it is there, and is none.
func Check(path string) error {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is not a regular file; name another", path)
	}
	return nil
}

// Keep keeps the text of a policy that is in force: whole, or, if it is
// interrupted, what was kept before. The directory is made if it is not there.
func Keep(path string, text []byte) error {
	if err := keep(path, text); err != nil {
		return fmt.Errorf("keep the policy: %w", err)
	}
	return nil
}

func keep(path string, text []byte) error {
	if have, err := input.File(path); err == nil && bytes.Equal(have, text) {
		return nil
	}
	parent := filepath.Dir(path)
	if err := os.Mkdir(parent, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	dir, err := os.Open(parent)
	if err != nil {
		return err
	}
	defer dir.Close()
	// One at a time: the new text has but one name, so that none is left over from those that were killed.
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", parent, err)
	}
	next := path + ".new"
	if err = write(next, text); err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		os.Remove(next) // as far as it is there
		return err
	}
	return dir.Sync()
}

// write writes a file such that it is on the disk.
func write(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	// Whatever the umask is, and whatever mode a file had that was left over.
	return errors.Join(err, f.Chmod(0o640), f.Sync(), f.Close())
}
