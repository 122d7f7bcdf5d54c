package loader

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/bpffs"
	"github.com/shapectl/shapectl/internal/netinfo"
)

// BPFFS is the file system that holds the pins.
type BPFFS struct {
	Path              string
	Mounted, Writable bool
	// Untrusted is why pins there are not used: the error wraps bpffs.ErrUntrusted.
	Untrusted error
}

// FindBPFFS is where pins are kept, or would be. It mounts nothing.
func FindBPFFS(o Options) (BPFFS, error) {
	at, err := locate(o)
	if err != nil {
		return BPFFS{}, err
	}
	path := at.bpffs
	fs := BPFFS{Path: path}
	if fs.Mounted, err = bpffs.Mounted(at.bpffs); err != nil || !fs.Mounted {
		return fs, err
	}
	if err := at.trust(); errors.Is(err, bpffs.ErrUntrusted) {
		fs.Untrusted = err
	}
	// Once shapectl's directory exists, only that needs to be writable.
	if bpffs.Exists(at.top()) {
		path = at.top()
	}
	fs.Writable = unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK|unix.X_OK, unix.AT_EACCESS) == nil
	return fs, nil
}

// HookMode is how a new hook would be attached.
func HookMode(o Options) (Mode, error) {
	switch {
	case o.Mode == Clsact:
		return Clsact, nil
	case netinfo.HasTCX():
		return TCX, nil
	case o.Mode == TCX:
		return TCX, ErrNoTCX
	}
	return Clsact, nil
}
