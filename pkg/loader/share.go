package loader

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultGroup is the group whose members may read pins, if there is a group of that name.
const DefaultGroup = "shapectl"

// ErrNoGroup means that Options.Group names no group.
var ErrNoGroup = errors.New("no such group")

// ErrMayNotRead means that this user may not read the pins. It comes with an error that wraps fs.ErrPermission.
var ErrMayNotRead = errors.New("this user may not read the rules")

// An access is who may read pins besides their owner.
type access struct {
	gid     uint32
	granted bool // otherwise only the owner, whose group it is, may read
}

// readAccess is the access of the group of readers, or of nobody if the default group does not exist.
func readAccess(o Options) (access, error) {
	group, err := user.LookupGroup(cmp.Or(o.Group, DefaultGroup))
	switch {
	case err == nil:
		gid, err := strconv.ParseUint(group.Gid, 10, 32)
		return access{uint32(gid), true}, err
	case o.Group == "":
		return access{gid: uint32(os.Getegid())}, nil
	case errors.As(err, new(user.UnknownGroupError)):
		return access{}, fmt.Errorf("%w: %s", ErrNoGroup, o.Group)
	}
	return access{}, fmt.Errorf("look up the group %s: %w", o.Group, err)
}

// ReadersGroup is the number of the group whose members may read pins; negative if there is none.
func ReadersGroup(o Options) (gid int, err error) {
	to, err := readAccess(o)
	if err != nil || !to.granted {
		return -1, err
	}
	return int(to.gid), nil
}

// share makes all pins of the namespace readable for whoever has access, and for nobody else. If that fails,
// for example because the caller may not change the group of files, the next command tries again.
func (at place) share(to access) {
	dir := at.home()
	var st unix.Stat_t
	if err := unix.Lstat(string(dir), &st); err != nil || !to.granted && st.Mode&0o070 == 0 {
		return // there are no pins, or they are not shared
	}
	if at.openBPFFS(to, st.Gid) == nil && to.directory(at.top()) == nil && to.contents(dir) == nil {
		to.directory(string(dir)) // last, because this marks pins as shared
	}
}

// openBPFFS lets the group enter the bpffs, which systemd mounts for root alone. A bpffs that all
// may enter, or that another group may, stays as it is. was is the group that could read pins.
func (at place) openBPFFS(to access, was uint32) error {
	var st unix.Stat_t
	if err := unix.Stat(at.bpffs, &st); err != nil {
		return err
	}
	switch {
	case to.granted && st.Mode&0o001 == 0 && (st.Mode&0o070 == 0 || st.Gid == to.gid):
		return to.set(at.bpffs, st, st.Mode|0o010)
	case !to.granted && st.Mode&0o077 == 0o010 && st.Gid == was:
		return to.set(at.bpffs, st, st.Mode&^0o010)
	}
	return nil
}

// contents shares what is pinned in a home. Directories below it are complete when they get their
// name, so one with the right access needs no look inside.
func (to access) contents(dir home) error {
	entries, err := readDir(string(dir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := dir.pin(e.Name())
		if slices.Contains(closedPins, e.Name()) {
			continue
		}
		if !e.IsDir() {
			err = to.pin(path)
		} else if !to.isSet(path) {
			err = to.tree(path)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// tree shares a directory after all that is in it.
func (to access) tree(dir string) error {
	entries, err := readDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.IsDir() {
			err = to.tree(path)
		} else {
			err = to.pin(path)
		}
		if err != nil {
			return err
		}
	}
	return to.directory(dir)
}

// isShared reports whether members of a group may open a directory.
func isShared(dir string) bool {
	var st unix.Stat_t
	return unix.Lstat(dir, &st) == nil && st.Mode&0o040 != 0
}

func (to access) isSet(dir string) bool {
	var st unix.Stat_t
	return unix.Lstat(dir, &st) == nil && st.Gid == to.gid && st.Mode == to.mode(st, 0o050)
}

// mode is that of a file whose readers need such permissions of their group.
func (to access) mode(st unix.Stat_t, group uint32) uint32 {
	if to.granted {
		return st.Mode | group
	}
	return st.Mode &^ 0o070
}

func (to access) directory(path string) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	return to.set(path, st, to.mode(st, 0o050))
}

// pin shares a map. Links and programs can only be opened for reading and writing, so they stay the owner's.
func (to access) pin(path string) error {
	name := filepath.Base(path)
	if strings.HasPrefix(name, linkPin) || strings.HasPrefix(name, programPin) || name == kindsPin {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return err
	}
	return to.set(path, st, to.mode(st, 0o040))
}

// set changes the group before the mode, so that no other group gets this access.
func (to access) set(path string, st unix.Stat_t, mode uint32) error {
	if st.Gid != to.gid {
		if err := unix.Lchown(path, -1, int(to.gid)); err != nil {
			return err
		}
	}
	if mode == st.Mode {
		return nil
	}
	return unix.Chmod(path, mode&0o7777)
}
