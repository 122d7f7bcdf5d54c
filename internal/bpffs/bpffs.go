// Package bpffs makes, replaces and removes pins in a bpffs, in directories that nobody else can replace.
package bpffs

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/internal/step"
)

// TrashPrefix begins the name of pins that are being removed. AsideSuffix ends the name of a pin that is being made in the place of
// another; a killed command leaves it.
const TrashPrefix, AsideSuffix = "trash-", "-new"

// Default is where a bpffs is mounted on any system that mounts one.
const Default = "/sys/fs/bpf"

// ErrMounts means that the bpffs may be out of sight, as in 'ip netns exec'. One that is mounted here would end with the command.
var ErrMounts = errors.New("there is none in this mount namespace, which is not that of an ancestor of this process")

// Mount mounts a bpffs where there is none.
func Mount(path string) error {
	if mounted, err := Mounted(path); err != nil || mounted {
		return err
	}
	err := os.MkdirAll(path, 0o755)
	if err == nil {
		var in []os.DirEntry
		if in, err = os.ReadDir(path); len(in) > 0 {
			err = errors.Join(err, errors.New("there are other files in it, which a mount would hide"))
		}
	}
	if err == nil {
		err = step.Try("mount a bpffs")
	}
	if err == nil {
		err = unix.Mount("bpf", path, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700")
	}
	if err != nil {
		return fmt.Errorf("mount a bpffs on %s: %w", path, err)
	}
	return nil
}

// Mounted reports whether a bpffs is mounted. The error wraps ErrMounts if it may be out of sight.
func Mounted(path string) (bool, error) {
	var st unix.Statfs_t
	err := unix.Statfs(path, &st)
	switch {
	case err == nil && st.Type == unix.BPF_FS_MAGIC:
		return true, nil
	case err == nil || errors.Is(err, fs.ErrNotExist):
		if err = nil; path == Default && outside() != 0 {
			err = ErrMounts
		}
	}
	if err != nil {
		err = fmt.Errorf("look for a bpffs on %s: %w", path, err)
	}
	return false, err
}

// outside is the nearest ancestor of this process with other mounts, as far as this process may inspect them; 0 for none.
func outside() int {
	own, err := os.Readlink("/proc/self/ns/mnt")
	for pid := os.Getppid(); err == nil && pid > 0; {
		if other, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err == nil && other != own {
			return pid
		}
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		_, parent, _ := strings.Cut(string(status), "\nPPid:")
		pid = 0
		fmt.Sscan(parent, &pid)
	}
	return 0
}

// Outside is Default, or if there is none and an ancestor of this process has other mounts, the one there.
func Outside() string {
	if _, err := Mounted(Default); errors.Is(err, ErrMounts) {
		return fmt.Sprintf("/proc/%d/root%s", outside(), Default)
	}
	return Default
}

// ErrUntrusted means that another user may have made a directory of pins, or could replace its contents.
var ErrUntrusted = errors.New("another user could replace what is pinned there")

// TrustBase returns an error if pins in a bpffs would not be safe: whoever may rename
// directories there could replace them.
func TrustBase(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("look at %s: %w", path, err)
	}
	if st.Mode&unix.S_ISVTX != 0 {
		st.Mode &^= 0o022 // others may add files, and can rename only their own
	}
	return trustOwner(path, st, "mount one that is yours")
}

// TrustDir is trustBase for a directory below the bpffs, which may not be a symbolic link.
// Nobody else can replace a trusted directory.
func TrustDir(path string) error {
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

// Exists reports whether there is a file. In doubt there is, as rules without pins are removed.
func Exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, os.ErrNotExist)
}

// Lock locks a directory until it is closed, or the process ends. The error wraps EWOULDBLOCK if other commands held the lock
// for too long, and fs.ErrNotExist if the directory was removed.
func Lock(dir string, exclusive bool, patience time.Duration) (*os.File, error) {
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
		if held := errors.Is(err, unix.EWOULDBLOCK); !held || time.Now().After(deadline) {
			f.Close()
			if err = fmt.Errorf("lock %s: %w", dir, err); held {
				err = fmt.Errorf("%w (another shapectl has been at work for %s)", err, patience)
			}
			return nil, err
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

// List lists the pins in a directory; none if it does not exist.
func List(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the pins: %w", err)
	}
	return entries, nil
}

// MakeDir makes a directory for pins, unless it exists.
func MakeDir(path string) error {
	if err := step.Try("make a directory"); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make a directory for pins: %w", err)
	}
	return nil
}

// Unlink removes a pin or an empty directory, if it exists.
func Unlink(path string) error {
	if err := step.Try("remove a pin"); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove a pin: %w", err)
	}
	return nil
}

// Rename renames a directory of pins, or a pin, which replaces the one that had the name.
func Rename(from, to string) error {
	if err := step.Try("rename pins"); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// Discard removes a directory of pins. A killed command leaves it whole, or renamed as trash.
func Discard(dir string) error {
	trash := filepath.Join(filepath.Dir(dir), TrashPrefix+filepath.Base(dir))
	if err := RemoveAll(trash); err != nil {
		return err
	}
	if err := Rename(dir, trash); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	return RemoveAll(trash)
}

// RemoveAll removes a directory of pins and all directories in it.
func RemoveAll(dir string) error {
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
			err = RemoveAll(path)
		} else {
			err = Unlink(path)
		}
		if err != nil {
			return err
		}
	}
	return Unlink(dir)
}

// Pin pins a program, link or map.
func Pin(object interface{ Pin(path string) error }, path string) error {
	if err := step.Try("pin"); err != nil {
		return err
	}
	return object.Pin(path)
}

// Value pins a new map whose one element has that value.
func Value(pin string, spec *ebpf.MapSpec, value any) error {
	spec.KeySize, spec.MaxEntries = 4, 1
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return err
	}
	defer m.Close()
	if err := m.Put(uint32(0), value); err != nil {
		return err
	}
	return Pin(m, pin)
}

// Record records a value in the place of the last one. A killed command leaves one of the two.
func Record(path string, value any) error {
	text, err := json.Marshal(value)
	aside := path + AsideSuffix
	if err == nil {
		err = Unlink(aside)
	}
	if err == nil {
		err = Value(aside, &ebpf.MapSpec{Name: "shapectl_" + filepath.Base(path), Type: ebpf.Array, ValueSize: uint32(len(text))}, text)
	}
	if err == nil {
		err = Rename(aside, path)
	}
	return err
}

// Recorded reads a record, if there is one.
func Recorded(path string, value any) error {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer m.Close()
	text, err := m.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	json.Unmarshal(text, value) // one that cannot be read is none: another build made it
	return nil
}
