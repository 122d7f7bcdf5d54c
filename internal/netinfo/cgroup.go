package netinfo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shapectl/shapectl/pkg/policy"
)

// Loopback is the index of the loopback device in every namespace.
const Loopback = 1

// cgroupBit is in the index of a cgroup, and in that of no network device. The rest is from the id of the cgroup, of which the kernel
// makes no second one before 2³¹ others.
const cgroupBit = 1 << 31

// IsCgroup reports whether an index is that of a cgroup.
func IsCgroup(index int) bool { return index&cgroupBit != 0 }

// IsCgroup reports whether the device is a cgroup.
func (d Device) IsCgroup() bool { return IsCgroup(d.Index) }

// CgroupIndex is the index of a cgroup with an id.
func CgroupIndex(id uint64) int { return cgroupBit | int(id%cgroupBit) }

// OpenCgroup opens the directory of a cgroup, and tells which device it is. The error wraps ErrNoDevice if there is none.
func OpenCgroup(name string) (*os.File, Device, error) {
	if err := policy.CheckCgroup(name); err != nil {
		return nil, Device{}, fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	path, err := findCgroup(name)
	if err != nil {
		return nil, Device{}, err
	}
	dir, err := os.OpenFile(path, unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNoDevice
	}
	if err != nil {
		return nil, Device{}, err
	}
	var st unix.Stat_t // the id is the number of the inode
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		dir.Close()
		return nil, Device{}, fmt.Errorf("look at %s: %w", path, err)
	}
	return dir, Device{Name: name, Index: CgroupIndex(st.Ino), Kind: "cgroup", Up: true, encap: "none"}, nil
}

func cgroupByName(name string) (Device, error) {
	dir, dev, err := OpenCgroup(name)
	if err == nil {
		dir.Close()
	}
	return dev, err
}

// Cgroups are those of these names that exist.
func Cgroups(names []string) (devices []Device) {
	for _, name := range names {
		if d, err := cgroupByName(name); err == nil {
			devices = append(devices, d)
		}
	}
	return devices
}

// cgroupMount is where all cgroups are mounted.
func cgroupMount() (string, error) {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 5 && strings.Contains(line, " - cgroup2 ") && f[3] == "/" {
			return f[4], nil
		}
	}
	return "", fmt.Errorf("%w: no cgroup2 file system is mounted here", ErrNoDevice)
}

// findCgroup is the directory of a cgroup.
func findCgroup(name string) (dir string, err error) {
	mount, err := cgroupMount()
	if err != nil {
		return "", err
	}
	kind, name, _ := strings.Cut(name, ":")
	switch kind {
	case "cgroup":
		return mount + name, nil
	case "unit":
		dir = findUnit(mount, name)
	default:
		dir = findContainer(mount, name)
	}
	if dir == "" {
		err = ErrNoDevice
	}
	return dir, err
}

// findUnit finds a unit of systemd, "" for none: it is in slices, in which only root makes cgroups.
func findUnit(dir, unit string) string {
	if st, err := os.Lstat(filepath.Join(dir, unit)); err == nil && st.IsDir() {
		return filepath.Join(dir, unit)
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() && strings.HasSuffix(e.Name(), ".slice") {
			if found := findUnit(filepath.Join(dir, e.Name()), unit); found != "" {
				return found
			}
		}
	}
	return ""
}

// containers has the ids of containers whose names were asked for. One that was made again has another id, and no cgroup of the old one.
var containers sync.Map

var containerID = regexp.MustCompile(`^[0-9a-f]{64}$`)

// findContainer finds a container by its name or id, "" for none.
func findContainer(mount, name string) string {
	if containerID.MatchString(name) {
		return findWithID(mount, name)
	}
	if id, known := containers.Load(name); known {
		if dir := findWithID(mount, id.(string)); dir != "" {
			return dir
		}
	}
	for id := range idsOf(name) {
		if dir := findWithID(mount, id); dir != "" { // a stopped container may have the same name
			containers.Store(name, id)
			return dir
		}
	}
	return ""
}

// idsOf yields the ids of containers with a name. Podman's are read, as it does not run in the sandbox of the unit of 'serve'.
func idsOf(name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		files, _ := filepath.Glob("/var/lib/containers/storage/*-containers/containers.json")
		for _, file := range files {
			var all []struct {
				ID    string
				Names []string
			}
			text, _ := os.ReadFile(file)
			json.Unmarshal(text, &all)
			for _, c := range all {
				if slices.Contains(c.Names, name) && containerID.MatchString(c.ID) && !yield(c.ID) {
					return
				}
			}
		}
		for _, runtime := range []string{"podman", "docker", "nerdctl"} {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
			out, _ := exec.CommandContext(ctx, runtime, "container", "inspect", "--format", "{{.Id}}", "--", name).Output()
			cancel()
			if id := strings.TrimSpace(string(out)); containerID.MatchString(id) && !yield(id) {
				return
			}
		}
	}
}

// findWithID finds the cgroup that a runtime named after a container: the least deep one, as users may make others in their own.
func findWithID(mount, id string) string {
	for level := []string{mount}; len(level) > 0; {
		var next []string
		for _, dir := range level {
			entries, _ := os.ReadDir(dir)
			for _, e := range entries {
				path := filepath.Join(dir, e.Name())
				if e.IsDir() && strings.Contains(e.Name(), id) && !strings.Contains(e.Name(), "conmon") {
					return path
				}
				if e.IsDir() {
					next = append(next, path)
				}
			}
		}
		level = next
	}
	return ""
}

// CgroupArrivals follows cgroups as they are made and removed. The zero value watches nothing yet.
type CgroupArrivals struct {
	known map[string]int // indexes, by name
	watch *os.File       // inotify
	more  chan struct{}

	mu    sync.Mutex
	names []string
	found []Device // with these names
}

// Take returns those of the names, which are sorted, that are new since the last Take, and whether one is gone.
func (c *CgroupArrivals) Take(names []string) (fresh []Device, gone bool, err error) {
	if len(names) == 0 && c.watch == nil {
		return nil, false, nil
	}
	if c.watch == nil {
		if err := c.begin(); err != nil {
			return nil, false, err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Equal(names, c.names) {
		c.names, c.found = names, Cgroups(names)
	}
	now := map[string]int{}
	for _, d := range c.found {
		if now[d.Name] = d.Index; c.known[d.Name] != d.Index {
			fresh = append(fresh, d)
		}
	}
	for name, index := range c.known {
		gone = gone || now[name] != index
	}
	c.known = now
	return fresh, gone, nil
}

// More returns a channel that receives a value when any cgroup was made or removed.
func (c *CgroupArrivals) More() <-chan struct{} { return c.more }

// Close stops following.
func (c *CgroupArrivals) Close() {
	if c.watch != nil {
		c.watch.Close()
	}
}

// begin watches all directories of cgroups, also those that are made later.
func (c *CgroupArrivals) begin() error {
	mount, err := cgroupMount()
	if err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("follow the cgroups: %w", err)
	}
	c.watch, c.more = os.NewFile(uintptr(fd), "inotify"), make(chan struct{}, 1)
	look := func() {
		filepath.WalkDir(mount, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() { // before it is read, so that none in it is missed
				unix.InotifyAddWatch(fd, path, unix.IN_CREATE|unix.IN_DELETE|unix.IN_ONLYDIR)
			}
			return nil
		})
	}
	look()
	go func() { // here, because a runtime that is asked for a container may take a while
		for buffer := make([]byte, 1<<16); ; {
			if _, err := c.watch.Read(buffer); err != nil {
				return
			}
			look()
			c.mu.Lock()
			names := c.names
			c.mu.Unlock()
			found := Cgroups(names)
			c.mu.Lock()
			if slices.Equal(names, c.names) {
				c.found = found
			}
			c.mu.Unlock()
			select {
			case c.more <- struct{}{}:
			default:
			}
		}
	}()
	return nil
}
