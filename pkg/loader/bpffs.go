package loader

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/step"
)

// DefaultBPFFS is where a bpffs is mounted on any system that mounts one.
const DefaultBPFFS = "/sys/fs/bpf"

const lockPatience = 10 * time.Second

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

// pinValue pins a new map whose one element has that value.
func pinValue(pin string, spec *ebpf.MapSpec, value any) error {
	spec.KeySize, spec.MaxEntries = 4, 1
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Put(uint32(0), value); err != nil {
		return err
	}
	return pinAt(m, pin)
}

// isBPFFS reports whether a bpffs is mounted on a path; a path that is not there has none.
func isBPFFS(path string) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for a bpffs on %s: %w", path, err)
	}
	return st.Type == unix.BPF_FS_MAGIC, nil
}

// lastingRoot is the file system as seen by a process that outlives this command: the first one
// or, where this one may not look at that, an ancestor. It is another inside `ip netns exec`, where
// mounts below /sys are gone with the command. It is "" where that process sees what this one does.
func lastingRoot() (root string, known bool) {
	self, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return "", false
	}
	try := func(pid int) {
		if ns, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err == nil {
			root, known = "", true
			if ns != self {
				root = fmt.Sprintf("/proc/%d/root", pid)
			}
		}
	}
	for pid := os.Getppid(); pid > 1; pid = parent(pid) {
		try(pid)
	}
	try(1)
	return root, known
}

// parent is the parent of a process; 0 if it can not be told.
func parent(pid int) int {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name, in parentheses, may hold anything.
	var state string
	var ppid int
	if _, err := fmt.Sscan(string(stat[bytes.LastIndexByte(stat, ')')+1:]), &state, &ppid); err != nil {
		return 0
	}
	return ppid
}

// mountBPFFS mounts a bpffs below a root, in the mount namespace that the root belongs to.
func mountBPFFS(root, path string) error {
	mount := func() error {
		if err := os.MkdirAll(path, 0o755); err != nil {
			return err
		}
		if in, err := os.ReadDir(path); err != nil || len(in) > 0 {
			return errors.Join(err, errors.New("there are other files in it, which a mount would hide"))
		}
		if err := step.Try("mount a bpffs"); err != nil {
			return err
		}
		return unix.Mount("bpf", path, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	}
	var err error
	if root == "" {
		err = mount()
	} else {
		err = inMountsOf(root, mount)
	}
	if err != nil {
		return fmt.Errorf("mount a bpffs on %s: %w", path, err)
	}
	return nil
}

// inMountsOf runs f on a thread in the mount namespace of the process that a root is of.
func inMountsOf(root string, f func() error) error {
	ns, err := os.Open(filepath.Join(filepath.Dir(root), "ns/mnt"))
	if err != nil {
		return err
	}
	defer ns.Close()
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}
		return f()
	})
}

// lockPin is a directory that only the owner of pins can open, so nobody else can keep changes out by a lock on it.
const lockPin = "lock"

// readersPatience is how long a command that changes rules waits for those that read shared pins.
const readersPatience = time.Second

// lock keeps commands apart until the process ends: those that change rules from all others. A member of the group of
// readers may lock the directory for good, so with shared pins no command waits for that for long. What a command reads
// then may be of several moments.
func (dir home) lock(exclusive bool, patience time.Duration) (unlock func(), err error) {
	shared := patience > 0 && isShared(string(dir))
	if !exclusive {
		unlock, err := lock(string(dir), false, patience)
		if shared && errors.Is(err, unix.EWOULDBLOCK) {
			return func() {}, nil
		}
		return unlock, err
	}
	if err := makeDir(dir.pin(lockPin)); err != nil {
		return nil, err
	}
	own, err := lock(dir.pin(lockPin), true, patience)
	if err != nil {
		return nil, err
	}
	if shared {
		patience = min(patience, readersPatience)
	}
	all, err := lock(string(dir), true, patience) // earlier builds lock only this one
	switch {
	case shared && errors.Is(err, unix.EWOULDBLOCK):
		return own, nil
	case err != nil:
		own()
		return nil, err
	}
	return func() { all(); own() }, nil
}

// lock keeps commands apart that change what another one reads or changes, until the process ends.
// The error wraps EWOULDBLOCK where others were too long at work, fs.ErrNotExist where the directory is gone.
func lock(dir string, exclusive bool, patience time.Duration) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err = unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w (another shapectl has been at work for %s)", dir, err, patience)
		}
	}
	locked, err1 := f.Stat()
	there, err2 := os.Stat(dir)
	if err := errors.Join(err1, err2); err != nil || !os.SameFile(locked, there) {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", dir, fs.ErrNotExist)
	}
	return func() { f.Close() }, nil
}

// readDir lists the pins in a directory; none where it is not there.
func readDir(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	return entries, nil
}

// makeDir makes a directory for pins, if it is not there.
func makeDir(path string) error {
	if err := step.Try("make a directory"); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	return nil
}

// unlink removes a pin or an empty directory, if it is there.
func unlink(path string) error {
	if err := step.Try("remove a pin"); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a pin: %w", err)
	}
	return nil
}

// renamePins renames a directory of pins.
func renamePins(from, to string) error {
	if err := step.Try("rename pins"); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// discard removes a directory of pins such that it is there whole or not at all.
func discard(dir string) error {
	trash := filepath.Join(filepath.Dir(dir), trashPrefix+filepath.Base(dir))
	if err := removeAll(trash); err != nil {
		return err
	}
	if err := renamePins(dir, trash); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	return removeAll(trash)
}

// removeAll removes a directory of pins. bpffs knows no recursion deeper than
// ours, and a pin that is gone already is as good as removed.
func removeAll(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.IsDir() {
			err = removeAll(path)
		} else {
			err = unlink(path)
		}
		if err != nil {
			return err
		}
	}
	return unlink(dir)
}
