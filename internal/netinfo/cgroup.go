package netinfo

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
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

// Cgroup is the device of a cgroup.
func Cgroup(name string, index int) Device {
	return Device{Name: name, Index: index, Kind: "cgroup", Up: true, encap: "none"}
}

// OpenCgroup opens the directory of a cgroup, and tells which device it is. The error wraps ErrNoDevice if there is none.
func OpenCgroup(name string) (*os.File, Device, error) {
	if err := policy.CheckCgroup(name); err != nil {
		return nil, Device{}, fmt.Errorf("%w: %w", ErrNoDevice, err)
	}
	found, err := findAsking(name)
	if err != nil {
		return nil, Device{}, err
	}
	return found.open(name)
}

// open is OpenCgroup for a name that was looked for.
func (f *findings) open(name string) (*os.File, Device, error) {
	if f.dirs[name] == "" {
		return nil, Device{}, ErrNoDevice
	}
	dir, err := os.OpenFile(f.dirs[name], unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNoDevice
	} else if errors.Is(err, unix.ENOTDIR) {
		err = fmt.Errorf("%w: %s is not a directory", ErrNoDevice, f.dirs[name])
	}
	if err != nil {
		return nil, Device{}, err
	}
	var st unix.Stat_t // the id is the number of the inode
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		dir.Close()
		return nil, Device{}, fmt.Errorf("look at %s: %w", f.dirs[name], err)
	}
	return dir, Cgroup(name, CgroupIndex(st.Ino)), nil
}

// devices are the cgroups that were found.
func (f *findings) devices() (devices []Device) {
	for _, name := range slices.Sorted(maps.Keys(f.dirs)) {
		if dir, d, err := f.open(name); err == nil {
			dir.Close()
			devices = append(devices, d)
		}
	}
	return devices
}

func cgroupByName(name string) (Device, error) {
	dir, dev, err := OpenCgroup(name)
	if err == nil {
		dir.Close()
	}
	return dev, err
}

// Cgroups are those of these names that exist.
func Cgroups(names []string) []Device {
	found, _ := findAsking(names...)
	return found.devices()
}

// RenewCgroups sets indexes of cgroups, by name, to those of now. It leaves those that are not found, without asking a runtime.
func RenewCgroups(indexes map[string]int) {
	found, _ := find(slices.Collect(maps.Keys(indexes)), nil)
	for _, d := range found.devices() {
		indexes[d.Name] = d.Index
	}
}

// CgroupDirs are the directories of those of these cgroups that exist, by name.
func CgroupDirs(names []string) map[string]string {
	found, _ := find(names, nil)
	return found.dirs
}

// CgroupsAbove are those of other cgroups that are above one, the nearest first.
func CgroupsAbove(name string, others []string) (above []string) {
	found, _ := find(append(slices.Clone(others), name), nil)
	for _, other := range others {
		if dir := found.dirs[other]; dir != "" && strings.HasPrefix(found.dirs[name], dir+"/") {
			above = append(above, other)
		}
	}
	slices.SortFunc(above, func(a, b string) int { return len(found.dirs[b]) - len(found.dirs[a]) })
	return above
}

// cgroupMount is where all cgroups are mounted.
func cgroupMount() (string, error) {
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 5 && strings.Contains(line, " - cgroup2 ") && f[3] == "/" {
			var st unix.Statfs_t
			dir := mountEscapes.Replace(f[4])
			if unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC { // not below another mount
				return dir, nil
			}
		}
	}
	return "", fmt.Errorf("%w: no cgroup2 file system is mounted here", ErrNoDevice)
}

var mountEscapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// findings are where the cgroups with some names are.
type findings struct {
	dirs    map[string]string // by name
	unknown []string          // IDs of containers that may have such a name
}

// lastDir has the directories of cgroups where they were last seen, by name.
var lastDir sync.Map

// find finds the directories of cgroups, in one walk. It passes each directory to watch in which one with such a name may be made,
// before it reads it. Only root makes cgroups there.
func find(names []string, watch func(dir string)) (f findings, err error) {
	f.dirs = map[string]string{}
	if len(names) == 0 {
		return f, nil
	}
	mount, err := cgroupMount()
	if err != nil {
		return f, err
	}
	if watch == nil {
		watch = func(string) {}
		names = slices.DeleteFunc(slices.Clone(names), func(name string) bool {
			dir, _ := lastDir.Load(name)
			path, known := dir.(string)
			if _, err := os.Lstat(path); known && err == nil && strings.HasPrefix(path, mount+"/") {
				f.dirs[name] = path
			}
			return f.dirs[name] != ""
		})
	}
	units, ofContainers, containers := map[string]string{}, []string{}, map[string]string{} // the last are directories, by ID
	for _, name := range names {
		switch kind, of, _ := strings.Cut(name, ":"); kind {
		case "cgroup":
			for i := range of {
				if of[i] == '/' {
					watch(mount + of[:i])
				}
			}
			f.dirs[name] = mount + of
		case "unit":
			units[of], units["_"+of] = name, name // systemd escapes the names of files of the kernel, such as cpu.
		default:
			ofContainers = append(ofContainers, name)
		}
	}
	type place struct {
		dir     string
		inSlice bool
	}
	var todo []place
	if len(units)+len(ofContainers) > 0 {
		todo = []place{{mount, true}}
	}
	for ; len(todo) > 0; todo = todo[1:] {
		at := todo[0]
		watch(at.dir)
		entries, _ := os.ReadDir(at.dir)
		for _, e := range entries {
			if !e.IsDir() {
				continue
			}
			name, path := e.Name(), filepath.Join(at.dir, e.Name())
			if unit := units[name]; unit != "" && at.inSlice && f.dirs[unit] == "" {
				f.dirs[unit] = path
			}
			id, inSlice := containerID.FindString(name), at.inSlice && strings.HasSuffix(name, ".slice")
			var st unix.Stat_t
			if id != "" && !strings.Contains(name, "conmon") && containers[id] == "" {
				containers[id] = path
			}
			if (inSlice || id == "" && ofContainers != nil) && unix.Lstat(path, &st) == nil && st.Uid == 0 {
				todo = append(todo, place{path, inSlice})
			}
		}
	}
	if len(ofContainers) > 0 {
		f.unknown = nameContainers(ofContainers, containers, f.dirs)
	}
	for name, dir := range f.dirs {
		lastDir.Store(name, dir)
	}
	return f, nil
}

// findAsking is find, and asks the runtimes if it must.
func findAsking(names ...string) (findings, error) {
	f, err := find(names, nil)
	if len(f.unknown) > 0 {
		var asked sync.WaitGroup
		for _, r := range runtimes {
			asked.Go(func() { r.ask(f.unknown, false) })
		}
		asked.Wait()
		f, err = find(names, nil)
	}
	return f, err
}

// CgroupArrivals follows cgroups as they are made and removed. The zero value watches nothing yet.
type CgroupArrivals struct {
	known map[string]int // indexes, by name
	watch *os.File       // inotify, with a deadline for the next look
	more  chan struct{}

	mu    sync.Mutex
	names []string
	found []Device // with these names
	err   error
}

const (
	// lookPause bounds what it costs when many cgroups are made. A look may take a third of the time.
	lookPause = 50 * time.Millisecond
	// lookAgain is the interval of looks at directories that cannot be watched.
	lookAgain = 2 * time.Second
)

// Take returns those of the names, which are sorted, that are new since the last Take, and whether one is gone. With an error, it
// learns of them later.
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
	others := !slices.Equal(names, c.names)
	c.names = names
	c.mu.Unlock()
	if others {
		c.look()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
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
	return fresh, gone, c.err
}

// More returns a channel that receives a value when there may be another cgroup, or one less.
func (c *CgroupArrivals) More() <-chan struct{} { return c.more }

// Close stops following.
func (c *CgroupArrivals) Close() {
	if c.watch != nil {
		c.watch.Close()
	}
}

// look finds the cgroups. In the meantime, others may ask the runtimes for unknown containers.
func (c *CgroupArrivals) look() {
	c.mu.Lock()
	names := c.names
	c.mu.Unlock()
	inotify, err := c.watch.SyscallConn()
	if err != nil {
		return // it was closed
	}
	c.watch.SetReadDeadline(time.Time{})
	var unwatched error
	f, err := find(names, func(dir string) {
		inotify.Control(func(fd uintptr) {
			_, err := unix.InotifyAddWatch(int(fd), dir, unix.IN_CREATE|unix.IN_DELETE|unix.IN_ONLYDIR)
			if err != nil && !errors.Is(err, unix.ENOENT) {
				unwatched = fmt.Errorf("watch the cgroups in %s: %w; until fs.inotify.max_user_watches is raised, new ones may get their rules %v later", dir, err, lookAgain)
			}
		})
	})
	err = cmp.Or(err, unwatched)
	found := f.devices()
	c.mu.Lock()
	if err != nil {
		c.watch.SetReadDeadline(time.Now().Add(lookAgain))
	}
	if slices.Equal(names, c.names) {
		c.found, c.err = found, err
	}
	c.mu.Unlock()
	for _, r := range runtimes {
		if len(f.unknown) > 0 {
			go func() {
				if r.ask(f.unknown, true) {
					c.watch.SetReadDeadline(time.Now())
				}
			}()
		}
	}
}

// begin watches for cgroups.
func (c *CgroupArrivals) begin() error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return fmt.Errorf("follow the cgroups: %w", err)
	}
	c.watch, c.more = os.NewFile(uintptr(fd), "inotify"), make(chan struct{}, 1)
	go func() {
		for buffer := make([]byte, 1<<16); ; {
			if _, err := c.watch.Read(buffer); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			began := time.Now()
			c.look()
			select {
			case c.more <- struct{}{}:
			default:
			}
			time.Sleep(max(lookPause, 2*time.Since(began)))
		}
	}()
	return nil
}
