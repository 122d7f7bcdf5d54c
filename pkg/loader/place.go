package loader

import (
	"os"
	"path/filepath"
	"strconv"
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

func (at place) haste() haste { return haste(at.root + expedited) }

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
	entries, err := os.ReadDir(at.top())
	if err != nil {
		return nil
	}
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
