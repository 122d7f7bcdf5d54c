package loader

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrUntrusted means that another user may have made a directory of pins, or could replace what is in it.
var ErrUntrusted = errors.New("another user could replace what is pinned there")

// trustBase reports as an error why pins in a bpffs would not be safe: whoever may rename
// directories there could put others in their place.
func trustBase(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if st.Mode&unix.S_ISVTX != 0 {
		st.Mode &^= 0o022 // others may add to it, and rename only what is theirs
	}
	return trustOwner(path, st, "mount one that is yours")
}

// trustDir is trustBase for a directory below the bpffs, which may not be a symbolic link.
// Once it is trusted, nobody else can put another one in its place.
func trustDir(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("%q is not a directory: %w; remove it, or name another bpffs in SHAPECTL_BPFFS", path, ErrUntrusted)
	}
	return trustOwner(path, st, "remove it")
}

func trustOwner(path string, st unix.Stat_t, remedy string) error {
	if st.Uid != 0 && int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("%q belongs to user %d: %w; %s, or name another bpffs in SHAPECTL_BPFFS", path, st.Uid, ErrUntrusted, remedy)
	}
	if st.Mode&0o022 != 0 {
		return fmt.Errorf("%q has mode %#o: %w; take the write permission from group and others (chmod go-w), or name another bpffs in SHAPECTL_BPFFS",
			path, st.Mode&0o7777, ErrUntrusted)
	}
	return nil
}
