package loader

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/netns"
	"github.com/shapectl/shapectl/internal/step"
)

// DefaultBPFFS is where a bpffs is mounted on any system that mounts one.
const DefaultBPFFS = "/sys/fs/bpf"

const lockPatience = 10 * time.Second

// A place is where pins of a network namespace are, or would be.
type place struct {
	bpffs  string
	cookie uint64 // of the namespace
}

// A home is the directory with all pins of a network namespace; "" if there is none.
type home string

func (dir home) pin(name string) string { return filepath.Join(string(dir), name) }

// locate tells where the state of the calling thread's namespace is, or would be.
func locate(o Options) (at place, err error) {
	at.bpffs = cmp.Or(o.BPFFS, DefaultBPFFS)
	at.cookie, err = netns.Cookie()
	return at, err
}

// top is the directory of all homes.
func (at place) top() string { return filepath.Join(at.bpffs, "shapectl") }

// home is that of the namespace.
func (at place) home() home { return home(filepath.Join(at.top(), strconv.FormatUint(at.cookie, 10))) }

// trustTop checks the directories on the path to the homes. The error wraps fs.ErrNotExist if one is missing.
func (at place) trustTop() error {
	if err := trustBase(at.bpffs); err != nil {
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

// ErrMounts means that the bpffs may be out of sight, as in 'ip netns exec'. One that is mounted here would end with the command.
var ErrMounts = errors.New("there is none in this mount namespace, which is not that of an ancestor of this process")

// mount mounts a bpffs where there is none.
func (at place) mount() error {
	if mounted, err := at.mounted(); err != nil || mounted {
		return err
	}
	err := os.MkdirAll(at.bpffs, 0o755)
	if err == nil {
		var in []os.DirEntry
		if in, err = os.ReadDir(at.bpffs); len(in) > 0 {
			err = errors.Join(err, errors.New("there are other files in it, which a mount would hide"))
		}
	}
	if err == nil {
		err = step.Try("mount a bpffs")
	}
	if err == nil {
		err = unix.Mount("bpf", at.bpffs, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	}
	if err != nil {
		return fmt.Errorf("mount a bpffs on %s: %w", at.bpffs, err)
	}
	return nil
}

// mounted reports whether a bpffs is mounted. The error wraps ErrMounts if it may be out of sight.
func (at place) mounted() (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(at.bpffs, &st)
	switch {
	case err == nil && st.Type == unix.BPF_FS_MAGIC:
		return true, nil
	case err == nil || errors.Is(err, fs.ErrNotExist):
		if err = nil; at.bpffs == DefaultBPFFS && hasOwnMounts() {
			err = ErrMounts
		}
	}
	if err != nil {
		err = fmt.Errorf("look for a bpffs on %s: %w", at.bpffs, err)
	}
	return false, err
}

// ErrUntrusted means that another user may have made a directory of pins, or could replace its contents.
var ErrUntrusted = errors.New("another user could replace what is pinned there")

// trustBase returns an error if pins in a bpffs would not be safe: whoever may rename
// directories there could replace them.
func trustBase(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if st.Mode&unix.S_ISVTX != 0 {
		st.Mode &^= 0o022 // others may add files, and can rename only their own
	}
	return trustOwner(path, st, "mount one that is yours")
}

// trustDir is trustBase for a directory below the bpffs, which may not be a symbolic link.
// Nobody else can replace a trusted directory.
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
		return fmt.Errorf("%q has mode %#o: %w; remove the write permission of group and others (chmod go-w), or name another bpffs in SHAPECTL_BPFFS",
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

// hasOwnMounts reports whether an ancestor of this process has other mounts, as far as this process may inspect them.
func hasOwnMounts() bool {
	own, err := os.Readlink("/proc/self/ns/mnt")
	for pid := os.Getppid(); err == nil && pid > 0; {
		if other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err == nil && other != own {
			return true
		}
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, parent, _ := strings.Cut(string(status), "\nPPid:")
		pid = 0
		fmt.Sscan(parent, &pid)
	}
	return false
}

// lockPin is a directory that commands lock before the home, so that those that read take turns with one that changes rules.
const lockPin = "lock"

// lock keeps a command that changes rules apart from all other commands, until the process ends.
func (dir home) lock(exclusive bool, patience time.Duration) (unlock func(), err error) {
	if exclusive {
		if err := makeDir(dir.pin(lockPin)); err != nil {
			return nil, err
		}
	}
	// A command that changes rules waits until those that read have ended. Others begin after it, or it might wait for good.
	turn, err := lock(dir.pin(lockPin), exclusive, patience)
	if err != nil && (exclusive || errors.Is(err, unix.EWOULDBLOCK)) {
		return nil, err
	}
	all, err := lock(string(dir), exclusive, patience)
	if err != nil || !exclusive {
		turn.Close()
	}
	if err != nil {
		return nil, err
	}
	return func() { all.Close(); turn.Close() }, nil
}

// lock locks a directory until it is closed, or the process ends. The error wraps EWOULDBLOCK if other commands held the lock
// for too long, and fs.ErrNotExist if the directory was removed.
func lock(dir string, exclusive bool, patience time.Duration) (*os.File, error) {
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
	return f, nil
}

// readDir lists the pins in a directory; none if it does not exist.
func readDir(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	return entries, nil
}

// makeDir makes a directory for pins, unless it exists.
func makeDir(path string) error {
	if err := step.Try("make a directory"); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	return nil
}

// unlink removes a pin or an empty directory, if it exists.
func unlink(path string) error {
	if err := step.Try("remove a pin"); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a pin: %w", err)
	}
	return nil
}

// renamePins renames a directory of pins, or a pin, which replaces the one that had the name.
func renamePins(from, to string) error {
	if err := step.Try("rename pins"); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// discard removes a directory of pins. A killed command leaves it whole, or renamed as trash.
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

// removeAll removes a directory of pins and all directories in it.
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
