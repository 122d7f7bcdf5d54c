// Package lastgood stores the text of the policy that was applied last, as a fallback.
package lastgood

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/shapectl/shapectl/internal/input"
	"github.com/shapectl/shapectl/internal/policyfile"
)

// A Policy is a valid policy and its source.
type Policy struct {
	*policyfile.File
	Path    string // of the file that was used
	Text    []byte // of that file, with those that it includes
	Problem error  // of the requested file; nil if that was used
}

// Load reads and validates the policy in file. If that fails, it loads the policy in
// kept, unless kept is "", and sets Problem to the error. If both fail, the error
// contains both. If there is no file, somebody removed it to end its limits: the error
// is fs.ErrNotExist, whatever is in kept.
func Load(file, kept string) (Policy, error) {
	p, err := load(file)
	if err == nil || kept == "" || errors.Is(err, fs.ErrNotExist) {
		return p, err
	}
	last, errKept := load(kept)
	if errors.Is(errKept, fs.ErrNotExist) {
		return p, fmt.Errorf("%w; there is no last good policy in %s; nothing was changed", err, kept)
	}
	if errKept != nil {
		return p, fmt.Errorf("%w; the last good policy cannot be used either: %w; nothing was changed", err, errKept)
	}
	last.Problem = err
	return last, nil
}

func load(path string) (Policy, error) {
	text, err := input.File(path)
	if err != nil {
		return Policy{}, fmt.Errorf("read the policy: %w", err)
	}
	if text, err = policyfile.Include(path, text, input.File); err != nil {
		return Policy{}, err
	}
	f, err := policyfile.Parse(path, text)
	if err != nil {
		return Policy{}, err
	}
	return Policy{File: f, Path: path, Text: text}, nil
}

// Check returns an error if path exists and is not a regular file.
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

// Keep replaces the last good policy atomically and durably. It creates the directory
// if it is missing.
func Keep(path string, text []byte) error {
	if err := input.Update(path, func([]byte, error) []byte { return text }); err != nil {
		return fmt.Errorf("save the last good policy: %w", err)
	}
	return nil
}
