package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// A place is where pins of a network namespace are, or would be.
type place struct {
	root    string // of the file system with the bpffs: another process's view, or ""
	lasting bool   // whether root is known to be the right one
	path    string // of the bpffs below it
	cookie  uint64 // of the namespace
}

// A home is the directory with all that is pinned of a network namespace; "" where nothing ever was.
type home string

func (dir home) pin(name string) string { return filepath.Join(string(dir), name) }

// locate tells where the state of the calling thread's namespace is, or would be.
func locate(o Options) (at place, err error) {
	at = place{lasting: true, path: o.BPFFS}
	if o.BPFFS == "" {
		at.path = DefaultBPFFS
		at.root, at.lasting = lastingRoot()
	}
	at.cookie, err = netnsCookie()
	return at, err
}

func (at place) bpffs() string { return at.root + at.path }

// top is the directory of all homes.
func (at place) top() string { return filepath.Join(at.bpffs(), "shapectl") }

// home is that of the namespace.
func (at place) home() home { return home(filepath.Join(at.top(), strconv.FormatUint(at.cookie, 10))) }

// trustTop checks the directories on the way to the homes. The error wraps fs.ErrNotExist where one is not there yet.
func (at place) trustTop() error {
	if err := trustBase(at.bpffs()); err != nil {
		return err
	}
	return trustDir(at.top())
}

// trust is trustTop and the same for the home.
func (at place) trust() error {
	if err := at.trustTop(); err != nil {
		return err
	}
	return trustDir(string(at.home()))
}

// others are the homes of other namespaces.
func (at place) others() (homes []home) {
	if at.trustTop() != nil {
		return nil
	}
	entries, _ := readDir(at.top())
	for _, e := range entries {
		if cookie, err := strconv.ParseUint(e.Name(), 10, 64); err == nil && cookie != at.cookie {
			homes = append(homes, home(filepath.Join(at.top(), e.Name())))
		}
	}
	return homes
}

// mount mounts a bpffs where there is none.
func (at place) mount() error {
	mounted, err := isBPFFS(at.bpffs())
	if err != nil || mounted {
		return err
	}
	return mountBPFFS(at.root, at.path)
}

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
